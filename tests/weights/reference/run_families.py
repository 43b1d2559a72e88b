"""Records what timm and transformers compute with small networks of current families.

Needs torch, timm, transformers and safetensors, and nothing of vit_jax:

python tests/weights/reference/run_families.py tests/golden/families.json [CASE ...]

With cases, such as timm/mae, it replaces these and keeps the others.
"""

import inspect
import json
import pathlib
import re
import sys
import tempfile
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
import transformers
from families import full_names, pixels, values
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from torchvision_stand_in import install_stand_in

install_stand_in()

import timm  # noqa: E402
from timm.models._hub import save_config_for_hf  # noqa: E402

SIZES = {"embed_dim": 32, "depth": 2, "num_heads": 2}
REFERENCE = {"ref_feat_shape": (3, 3)}
TIMM = {  # case: name of the model
    "mae": "vit_base_patch16_224.mae",
    "registers_map": "test_vit3",
    "ijepa": "vit_huge_patch14_gap_224.in1k_ijepa",
    "dinov2": "vit_small_patch14_dinov2",
    "dinov2_reg": "vit_small_patch14_reg4_dinov2",
    "dinov2_giant": "vit_giant_patch14_dinov2",
    "tipsv2": "vit_base_patch14_reg1_tipsv2",
    "tipsv2_giant": "vit_giant_patch14_reg1_tipsv2",
    "deit_distilled": "deit_small_distilled_patch16_224",
    "deit3": "deit3_small_patch16_224",
    "siglip": "vit_base_patch32_siglip_256",
    "clip": "vit_base_patch32_clip_quickgelu_224",
    "dinov3": "vit_small_patch16_dinov3",
    "dinov3_plus": "vit_small_plus_patch16_dinov3",
    "eupe": "vit_small_patch16_dinov3_qkvb",
    "eva01": "eva_giant_patch14_224",
    "eva02_small": "eva02_small_patch14_224",
    "eva02_base": "eva02_base_patch14_224",
    "eva02_clip": "eva02_base_patch16_clip_224",
    "pe_core": "vit_pe_core_base_patch16_224",
    "pe_lang": "vit_pe_lang_large_patch14_448",
    "pe_spatial": "vit_pe_spatial_base_patch16_512",
    "aimv2": "aimv2_large_patch14_224",
    "radio": "vit_base_patch16_radio_v3",
    "radio_v4": "vit_so400m_patch16_radio_v4",
    "intern300m": "vit_intern300m_patch14_448",
}
THREE_CLASSES = {"num_classes": 3}
TIMM_ARGUMENTS = {  # of the cases that have any
    "registers_map": THREE_CLASSES,
    "deit_distilled": THREE_CLASSES,
    "deit3": THREE_CLASSES,
    "clip": {"num_classes": 7},
    "eva01": THREE_CLASSES,
    "eva02_small": THREE_CLASSES,
    "eva02_base": THREE_CLASSES,
    "eva02_clip": THREE_CLASSES,
    # timm scales the places of patches to its reference grid: the grid of this image is as in the
    # original code.
    "pe_core": {
        "num_classes": 5,
        "attn_pool_num_heads": 4,
        **REFERENCE,
    },
    "pe_lang": REFERENCE,
    "pe_spatial": REFERENCE,
}


def find_image_size(name: str) -> int:
    """Return the image size of a model: three patches, or two of 32 pixels."""
    match = re.search(r"patch(\d+)", name)
    patch_size = int(match[1]) if match else 16
    if patch_size == 32:
        return 64
    return 3 * patch_size


def describe_timm(case: str) -> tuple[str, int, dict[str, Any]]:
    """Return the name of timm's model, its image size and other arguments."""
    name = TIMM[case]
    return name, find_image_size(name), TIMM_ARGUMENTS.get(case, {})


PE_NAMES = {  # names of timm → the authors'; the names of the pooling come first
    r"^attn_pool\.latent": "attn_pool.probe",
    r"^attn_pool\.kv\.": "attn_pool.attn.in_proj_",
    r"^attn_pool\.proj": "attn_pool.attn.out_proj",
    r"^attn_pool\.norm": "attn_pool.layernorm",
    "patch_embed.proj": "conv1",
    "cls_token": "class_embedding",
    "pos_embed": "positional_embedding",
    "norm_pre": "ln_pre",
    r"^norm\.": "ln_post.",
    r"^blocks\.": "transformer.resblocks.",
    r"\.norm(\d)": r".ln_\1",
    r"\.gamma_(\d)": r".ls_\1.gamma",
    r"attn\.qkv\.": "attn.in_proj_",
    r"(?<!attn_pool\.)attn\.proj": "attn.out_proj",
    "fc1": "c_fc",
    "fc2": "c_proj",
    r"head\.weight": "proj",
}
# Case: name of timm's model, image size, other arguments, names of timm → the authors', ignored
# arrays
ORIGINAL = {
    "clip": (
        "vit_base_patch32_clip_quickgelu_224",
        64,
        {"num_classes": 7},
        PE_NAMES | {"^": "visual."},
        {
            "positional_embedding": [5, 8],
            "text_projection": [8, 7],
            "logit_scale": [],
            "ln_final.weight": [8],
        },
    ),
    "pe_core": (
        *describe_timm("pe_core"),
        PE_NAMES | {"^": "visual."},
        {"logit_scale": []},
    ),
    "pe_lang": (
        *describe_timm("pe_lang"),
        PE_NAMES,
        {},
    ),
    "aimv2": (
        "aimv2_large_patch14_224",
        42,
        {},
        {
            r"patch_embed\.": "preprocessor.patchifier.",
            "pos_embed": "preprocessor.pos_embed",
            r"^blocks\.": "trunk.blocks.",
            r"^norm\.": "trunk.post_trunk_norm.",
            r"\.norm(\d)": r".norm_\1",
            "fc1_x": "fc3",
            "fc1_g": "fc1",
        },
        {},
    ),
    "dinov3_plus": (
        "vit_small_plus_patch16_dinov3_qkvb",
        48,
        {},
        {
            r"gamma_(\d)": r"ls\1.gamma",
            "reg_token": "storage_tokens",
            "q_bias": "qkv.bias",
            "fc1_g": "w1",
            "fc1_x": "w2",
        }
        | {"fc2": "w3"},
        {"mask_token": [1, 32], "rope_embed.periods": [4], "blocks.{n}.attn.qkv.bias_mask": [96]},
    ),
}
NORM = {"scale": [32], "bias": [32]}
HEADS = {"kernel": [32, 2, 16], "bias": [2, 16]}
ATTENTION = {
    "query": HEADS,
    "key": HEADS,
    "value": HEADS,
    "out": {"kernel": [2, 16, 32], "bias": [32]},
}
HIDDEN = {
    "Dense_0": {"kernel": [32, 128], "bias": [128]},
    "Dense_1": {"kernel": [128, 32], "bias": [32]},
}
ENCODER = {
    "LayerNorm_0": NORM,
    "MultiHeadDotProductAttention_0": ATTENTION,
    "LayerNorm_1": NORM,
    "MlpBlock_0": HIDDEN,
}
POOLING = {
    "probe": [1, 1, 32],
    "MultiHeadDotProductAttention_0": ATTENTION,
    "LayerNorm_0": NORM,
    "MlpBlock_0": HIDDEN,
}
BIG_VISION = {  # SigLIP's file, of images of 64 pixels
    "img": {
        "embedding": {"kernel": [32, 32, 3, 32], "bias": [32]},
        "pos_embedding": [1, 4, 32],
        "Transformer": {"encoderblock_{n}": ENCODER, "encoder_norm": NORM},
        "MAPHead_0": POOLING,
    },
    "txt": {"head": {"kernel": [8, 32], "bias": [32]}},
    "t": [1],
    "b": [1],
}
HF_SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 48,
    "patch_size": 16,
}
MLP = {"intermediate_size": 64}
TEXT = {
    **MLP,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 50,
}
TOWERS = {
    "vision_config": {**HF_SIZES, **MLP},
    "text_config": TEXT,
}
TIPS = {"vision_config": HF_SIZES, "text_config": TEXT}
DECODER = {
    "mask_ratio": 0.0,
    "decoder_hidden_size": 16,
    "decoder_num_hidden_layers": 1,
    "decoder_num_attention_heads": 2,
    "decoder_intermediate_size": 32,
}
GATED = {"use_gated_mlp": True, "hidden_act": "silu"}
REGISTERS = {"num_register_tokens": 4}
HUGGINGFACE = {  # case: class, configuration, its arguments
    "mae": (
        "ViTMAEForPreTraining",
        "ViTMAEConfig",
        MLP | DECODER,
    ),
    "ijepa": (
        "IJepaForImageClassification",
        "IJepaConfig",
        {**MLP, "num_labels": 3},
    ),
    "deit": (
        "DeiTForImageClassification",
        "DeiTConfig",
        {**MLP, "num_labels": 3},
    ),
    "deit_distilled": (
        "DeiTForImageClassificationWithTeacher",
        "DeiTConfig",
        {**MLP, "num_labels": 3},
    ),
    "deit_pooler": (
        "DeiTModel",
        "DeiTConfig",
        MLP,
    ),
    "dinov2": (
        "Dinov2ForImageClassification",
        "Dinov2Config",
        {"num_labels": 3},
    ),
    "dinov2_reg": (
        "Dinov2WithRegistersModel",
        "Dinov2WithRegistersConfig",
        {},
    ),
    "dinov2_giant": (
        "Dinov2Model",
        "Dinov2Config",
        {"use_swiglu_ffn": True},
    ),
    "dinov3": (
        "DINOv3ViTModel",
        "DINOv3ViTConfig",
        MLP | REGISTERS,
    ),
    "dinov3_plus": (
        "DINOv3ViTModel",
        "DINOv3ViTConfig",
        MLP | REGISTERS | GATED,
    ),
    "siglip": (
        "SiglipVisionModel",
        "SiglipVisionConfig",
        MLP,
    ),
    "siglip_both": (
        "SiglipModel",
        "SiglipConfig",
        TOWERS,
    ),
    "clip": (
        "CLIPVisionModelWithProjection",
        "CLIPVisionConfig",
        {**MLP, "projection_dim": 7},
    ),
    "tipsv2_both": (
        "Tipsv2Model",
        "Tipsv2Config",
        TIPS,
    ),
    "tipsv2_giant_both": (
        "Tipsv2Model",
        "Tipsv2Config",
        {
            **TIPS,
            "vision_config": HF_SIZES | {"use_swiglu_ffn": True},
        },
    ),
    "clip_both": (
        "CLIPModel",
        "CLIPConfig",
        {**TOWERS, "projection_dim": 7},
    ),
    "aimv2": (
        "Aimv2VisionModel",
        "Aimv2VisionConfig",
        {**MLP, "use_head": False},
    ),
    "radio": (
        "RadioModel",
        "RadioConfig",
        {"max_img_size": 128, "num_registers": 3, "summary_idxs": [2, 0]},
    ),
}


STORED = r"input_conditioner\.|summary_idxs$"  # arrays whose values mean something


def fill(model: torch.nn.Module) -> None:
    """Set the parameters to the values of their names, but for arrays whose values mean something."""
    state = model.state_dict()
    for name, array in model.state_dict().items():
        if array.is_floating_point() and not re.search(STORED, name):
            state[name] = torch.from_numpy(values(name, tuple(array.shape)))
    model.load_state_dict(state)


def read_short_names(file: pathlib.Path) -> dict[str, list[int]]:
    """Return name and shape of every array, the blocks of one tower written once."""
    with safe_open(file, "np") as arrays:
        shapes = {name: list(arrays.get_slice(name).get_shape()) for name in arrays.keys()}  # noqa: SIM118 - no mapping

    networks = r"(?:vision_(?:model|encoder)|radio_model\.model|vit|deit|dinov2|ijepa)\."
    blocks = rf"^((?:{networks})?(?:blocks|encoder\.layers?|layer))\.(\d+)\."
    short = {}
    for name, shape in shapes.items():
        block = re.match(blocks, name)
        if block is None or block[2] == "0":
            short[re.sub(blocks, r"\1.{n}.", name)] = shape
    return short


def run_timm(model: torch.nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    outputs = {}
    # The features of a distilled network are the mean of two tokens.
    if not hasattr(model, "head_dist"):
        outputs["features"] = model.forward_head(
            model.forward_features(x),
            pre_logits=True,
        )
    if model.num_classes:
        outputs["logits"] = model(x)
    return outputs


def run_two_towers(
    model: torch.nn.Module,
    case: str,
    x: torch.Tensor,
    options: dict[str, bool],
) -> dict[str, torch.Tensor]:
    output = model.get_image_features(x, **options)
    output = getattr(output, "pooler_output", output)
    return {"logits" if case.startswith("clip") else "features": output}


def run_mae(
    model: torch.nn.Module,
    x: torch.Tensor,
    options: dict[str, bool],
) -> dict[str, torch.Tensor]:
    """Return the class token of an encoder that moves no patch."""
    height, width = x.shape[2:]
    num_patches = -(-height // 16) * -(-width // 16)
    order = torch.arange(float(num_patches))[None].repeat(len(x), 1)
    return {"features": model.vit(x, noise=order, **options).last_hidden_state[:, 0]}


def run_transformers(
    model: torch.nn.Module,
    case: str,
    x: torch.Tensor,
    options: dict[str, bool],
) -> dict[str, torch.Tensor]:
    output = model(x, **options)
    if case == "aimv2":
        output["pooler_output"] = output.last_hidden_state.mean(1)

    names = {
        "logits": "logits",
        "image_embeds": "logits",
        # Behind a layer with tanh.
        "pooler_output": "hidden" if case.endswith("_pooler") else "features",
        "summary": "features",
    }
    return {ours: output[theirs] for theirs, ours in names.items() if theirs in output}


def round_number(number: float) -> float:
    return float(f"{number:.7g}")


def run(
    model: torch.nn.Module,
    case: str,
    size: tuple[int, ...],
    mean: list[float],
    std: list[float],
) -> dict[str, list]:
    """Return the outputs for the images of a size, which is height and width or a side."""
    images = ((pixels(*size) - mean) / std).astype(np.float32)
    x = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()
    arguments = inspect.signature(getattr(model, "vit", model).forward).parameters
    has_table = "interpolate_pos_encoding" in arguments or case.endswith("_both")
    options = {}
    if len(size) == 2 and has_table:
        options["interpolate_pos_encoding"] = True

    with torch.inference_mode():
        if hasattr(model, "forward_head"):
            outputs = run_timm(model, x)
        elif case.endswith("_both"):
            outputs = run_two_towers(model, case, x, options)
        elif case == "mae":
            outputs = run_mae(model, x, options)
        else:
            outputs = run_transformers(model, case, x, options)

    rounded = {}
    for name, array in outputs.items():
        rounded[name] = [[round_number(number) for number in row] for row in array.tolist()]
    return rounded


def record_timm(case: str, folder: pathlib.Path) -> tuple[dict, dict]:
    """Return the record of a case of timm, and its record at another image size."""
    _, size, _ = describe_timm(case)
    model, arguments = build_timm(case)
    save_config_for_hf(model, folder / "config.json", model_args=arguments)
    timm.models.save_for_hf(
        model,
        folder,
        model_args=arguments,
        safe_serialization=True,
    )
    config = json.loads((folder / "config.json").read_text())
    mean = config["pretrained_cfg"]["mean"]
    std = config["pretrained_cfg"]["std"]

    output = run(model, case, (size,), mean, std)
    shapes = read_short_names(folder / "model.safetensors")
    record_of_case = {
        "config": config,
        "size": size,
        "shapes": shapes,
        **output,
    }

    # The original code counts patches; timm does so at its reference grid.
    if "ref_feat_shape" in arguments:
        model.rope.ref_feat_shape = [4, 2]
    other_size = (96, 32) if size == 64 else (size // 3 * 4, size // 3 * 2)
    model.set_input_size(other_size)
    return record_of_case, {"size": other_size, **run(model, case, other_size, mean, std)}


def record_original(case: str, folder: pathlib.Path) -> dict:
    """Return the record of a file of the authors, which timm converts."""
    model_name, size, arguments, names, others = ORIGINAL[case]
    arguments = {
        **SIZES,
        "img_size": size,
        **arguments,
    }
    model = timm.create_model(model_name, **arguments).eval()
    shapes = set_original_state(model, names, others)
    save_config_for_hf(model, folder / "config.json", model_args=arguments)
    config = json.loads((folder / "config.json").read_text())
    pretrained = config["pretrained_cfg"]

    output = run(
        model,
        case,
        (size,),
        pretrained["mean"],
        pretrained["std"],
    )
    return {
        "config": config,
        "size": size,
        "shapes": shapes,
        **output,
    }


def record_big_vision(folder: pathlib.Path) -> dict:
    """Return the record of a file of SigLIP, which timm converts."""
    model = timm.create_model("vit_base_patch32_siglip_256", img_size=64, **SIZES).eval()
    shapes = flatten(BIG_VISION, "params")
    full_shapes = full_names(shapes, depth=2)
    arrays = {}
    for name, shape in full_shapes.items():
        arrays[name] = values(name, shape)

    np.savez(folder / "siglip.npz", **arrays)
    model.load_pretrained(str(folder / "siglip.npz"))

    output = run(model, "siglip", (64,), [0.5] * 3, [0.5] * 3)
    return {
        "size": 64,
        "shapes": shapes,
        **output,
    }


def record_huggingface(case: str, folder: pathlib.Path) -> tuple[dict, dict | None]:
    """Return the record of a case of transformers, and its record at another image size.

    C-RADIO normalises pixels itself; AIMv2's class takes images of one size.
    """
    model, stored = build_huggingface(case, folder)
    config = json.loads((folder / "config.json").read_text())
    shapes = read_short_names(folder / "model.safetensors")
    mean = [0.0] * 3 if case == "radio" else [0.5] * 3
    std = [1.0] * 3 if case == "radio" else [0.5] * 3

    output = run(model, case, (48,), mean, std)
    record_of_case = {
        "config": config,
        "size": 48,
        "shapes": shapes,
        **stored,
        **output,
    }
    if case == "aimv2":
        return record_of_case, None
    return record_of_case, {"size": (64, 32), **run(model, case, (64, 32), mean, std)}


def list_cases() -> list[str]:
    return [
        *(f"timm/{case}" for case in TIMM),
        *(f"original/{case}" for case in ORIGINAL),
        "big_vision/siglip",
        *(f"huggingface/{case}" for case in HUGGINGFACE),
    ]


def record(path: pathlib.Path, chosen: Collection[str]) -> None:
    """Record all cases, or replace the chosen ones in the file."""
    known = json.loads(path.read_text()) if chosen else {}
    cases = known.get("cases", {})
    resized = known.get("resized", {})

    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for full_name in list_cases():
            if chosen and full_name not in chosen:
                continue

            library, case = full_name.split("/")
            at_other_size = None
            if library == "timm":
                cases[full_name], at_other_size = record_timm(case, folder)
            elif library == "original":
                cases[full_name] = record_original(case, folder)
            elif library == "big_vision":
                cases[full_name] = record_big_vision(folder)
            else:
                cases[full_name], at_other_size = record_huggingface(case, folder)
            if at_other_size is not None:
                resized[full_name] = at_other_size

    versions = {library.__name__: library.__version__ for library in (timm, transformers, torch)}
    content = {
        "versions": versions,
        "cases": cases,
        "resized": resized,
    }
    path.write_text(json.dumps(content, separators=(",", ":")) + "\n")


def build_timm(case: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return a network of timm, and the arguments that it was built with."""
    model_name, size, arguments = describe_timm(case)
    arguments = {
        **SIZES,
        "img_size": size,
        **arguments,
    }
    model = timm.create_model(model_name, **arguments).eval()
    fill(model)

    return model, arguments


def build_huggingface(case: str, folder: pathlib.Path) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return a network of transformers, written to the folder, and the arrays that keep their values."""
    class_name, config_name, arguments = HUGGINGFACE[case]
    sizes = {} if case.endswith("_both") else HF_SIZES
    config = getattr(transformers, config_name)(**sizes, **arguments)
    model = getattr(transformers, class_name)(config).eval()
    fill(model)
    model.save_pretrained(folder)

    return model, set_file_values(model, folder / "model.safetensors")


def find_original_shape(name: str, shape: list[int]) -> list[int]:
    """Return the shape of an array in a file of the authors, by its name there."""
    short = name.removeprefix("visual.")
    if short == "class_embedding":
        return shape[2:]
    if short == "positional_embedding":
        return shape[1:]
    if short == "proj":
        return shape[::-1]
    if name.endswith("qkv.bias"):
        return [3 * shape[0]]
    return shape


def set_original_state(
    model: torch.nn.Module,
    names: dict[str, str],
    others: dict[str, list[int]],
) -> dict[str, list[int]]:
    """Give a model of timm the values of a file of the authors; return the file's shapes.

    The file is converted by timm.
    """
    shapes = {}
    for name, array in model.state_dict().items():
        shape = list(array.shape)
        if name.startswith("attn_pool.q."):
            continue
        if name.startswith("attn_pool.kv."):
            shape = [shape[0] * 3 // 2, *shape[1:]]

        for pattern, other in names.items():
            name = re.sub(pattern, other, name)
        if name.endswith(("v_bias", "head.bias")) or "s.1." in name:
            continue
        shapes[name.replace("s.0.", "s.{n}.")] = find_original_shape(name, shape)

    shapes |= others
    state = {}
    for name, shape in full_names(shapes, depth=2).items():
        state[name] = torch.from_numpy(values(name, shape))
    convert = sys.modules[type(model).__module__].checkpoint_filter_fn
    model.load_state_dict(convert(state, model))
    return shapes


def flatten(tree: dict[str, Any] | list[int], name: str) -> dict[str, list[int]]:
    """Return the shapes of a tree by path."""
    if isinstance(tree, list):
        return {name: tree}

    shapes = {}
    for part, inner in tree.items():
        shapes |= flatten(inner, f"{name}/{part}")
    return shapes


def set_file_values(model: torch.nn.Module, file: pathlib.Path) -> dict[str, Any]:
    """Give a model of transformers the values of the names in its file.

    Its names in memory are newer. Return the arrays that keep their values.
    """
    arrays = load_file(file)
    stored = {}
    for name, array in arrays.items():
        if re.search(STORED, name):
            stored[name] = array.tolist()
        else:
            arrays[name] = values(name, array.shape)

    save_file(arrays, file, metadata={"format": "pt"})
    reloaded = type(model).from_pretrained(file.parent)
    model.load_state_dict(reloaded.state_dict())
    return {"stored": stored} if stored else {}


if __name__ == "__main__":
    record(pathlib.Path(sys.argv[1]), sys.argv[2:])
