"""Compares adapters of PEFT that are read here with peft's `merge_and_unload`.

The first command needs torch, transformers and peft; the second one vit_jax:

python tests/weights/reference/run_adapters.py write FOLDER
python -m tests.weights.reference.run_adapters compare FOLDER
"""

import pathlib
import sys

import numpy as np

TOLERANCE = 1e-6  # of logits, relative to the largest: float32 in another order
LABELS = {
    0: "cat",
    1: "dog",
    2: "red",
}
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
NEW_HEAD = {"target_modules": "all-linear", "modules_to_save": ["classifier"]}
CASES = {  # name → base, number of classes, options of LoraConfig
    "attention": ("vit", 3, {"target_modules": ["q_proj", "v_proj"]}),
    "stabilised": ("vit", 3, {**NEW_HEAD, "use_rslora": True}),
    "patterns": (
        "vit",
        3,
        {
            "target_modules": "all-linear",
            "rank_pattern": {"vit.layers.0.attention.q_proj": 6, "fc1": 2},
            "alpha_pattern": {"vit.layers.0.attention.q_proj": 5, "fc1": 7},
        },
    ),
    "convolution": ("vit", 3, {"target_modules": ["projection"]}),
    "new_head": ("vit_bare", 5, NEW_HEAD),
    "dinov2_new_head": ("dinov2_bare", 7, NEW_HEAD),
}


def write(folder: pathlib.Path) -> None:
    """Write bases, adapters, images and the logits of peft."""
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import (
        AutoModelForImageClassification,
        Dinov2Config,
        Dinov2Model,
        ViTConfig,
        ViTForImageClassification,
        ViTModel,
    )

    torch.manual_seed(0)
    vit = {**SIZES, "intermediate_size": 128}
    bases = {
        "vit": ViTForImageClassification(ViTConfig(**vit, id2label=LABELS)),
        "vit_bare": ViTModel(ViTConfig(**vit)),
        "dinov2_bare": Dinov2Model(Dinov2Config(**SIZES, mlp_ratio=2)),
    }

    for name, model in bases.items():
        for parameter in model.parameters():
            parameter.data += 0.05 * torch.randn_like(parameter)
        model.save_pretrained(folder / name)

    images = 2 * torch.rand(4, 3, 32, 32) - 1
    np.save(folder / "images.npy", images.numpy())

    for name, (base, classes, options) in CASES.items():
        network = AutoModelForImageClassification.from_pretrained(folder / base, num_labels=classes)
        adapter = get_peft_model(
            network,
            LoraConfig(
                r=4,
                lora_alpha=8,
                **options,
            ),
        )

        for parameter in adapter.parameters():
            if parameter.requires_grad:
                parameter.data += 0.05 * torch.randn_like(parameter)

        adapter.save_pretrained(folder / name)

        fresh = AutoModelForImageClassification.from_pretrained(folder / base, num_labels=classes)
        merged = PeftModel.from_pretrained(fresh, folder / name).merge_and_unload().eval()

        with torch.no_grad():
            np.save(folder / f"{name}.npy", merged(images).logits.numpy())


def compare(folder: pathlib.Path) -> None:
    """Print the distance of logits for each case; end with an error if one is above the tolerance."""
    import jax

    from vit_jax import pytree
    from vit_jax.models import build_model
    from vit_jax.weights import load_weights

    images = np.load(folder / "images.npy").transpose(0, 2, 3, 1)
    distances = {}

    for name in CASES:
        weights = load_weights(folder / name)
        abstract = jax.eval_shape(lambda a=weights.architecture: build_model(a, jax.random.key(0)))
        model = pytree.from_named_leaves(abstract, dict(weights.parameters))
        logits = jax.jit(lambda model, images: model(images))(model, images).logits_BK
        expected = np.load(folder / f"{name}.npy")
        distances[name] = float(np.abs(logits - expected).max() / np.abs(expected).max())
        print(f"{name:16} {distances[name]:.1e}")

    if max(distances.values()) > TOLERANCE:
        sys.exit("the logits differ")


if __name__ == "__main__":
    mode, path = sys.argv[1:]
    pathlib.Path(path).mkdir(parents=True, exist_ok=True)
    {"write": write, "compare": compare}[mode](pathlib.Path(path))
