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
TIMM = {  # case: name of the model, image size, other arguments
    "mae": ("vit_base_patch16_224.mae", 48, {}),
    "registers_map": ("test_vit3", 48, {"num_classes": 3}),
    "ijepa": ("vit_huge_patch14_gap_224.in1k_ijepa", 42, {}),
    "dinov2": ("vit_small_patch14_dinov2", 42, {}),
    "dinov2_reg": ("vit_small_patch14_reg4_dinov2", 42, {}),
    "dinov2_giant": ("vit_giant_patch14_dinov2", 42, {}),
    "tipsv2": ("vit_base_patch14_reg1_tipsv2", 42, {}),
    "tipsv2_giant": ("vit_giant_patch14_reg1_tipsv2", 42, {}),
    "deit_distilled": ("deit_small_distilled_patch16_224", 48, {"num_classes": 3}),
    "deit3": ("deit3_small_patch16_224", 48, {"num_classes": 3}),
    "siglip": ("vit_base_patch32_siglip_256", 64, {}),
    "clip": ("vit_base_patch32_clip_quickgelu_224", 64, {"num_classes": 7}),
    "dinov3": ("vit_small_patch16_dinov3", 48, {}),
    "dinov3_plus": ("vit_small_plus_patch16_dinov3", 48, {}),
    "eupe": ("vit_small_patch16_dinov3_qkvb", 48, {}),
    "eva01": ("eva_giant_patch14_224", 42, {"num_classes": 3}),
    "eva02_small": ("eva02_small_patch14_224", 42, {"num_classes": 3}),
    "eva02_base": ("eva02_base_patch14_224", 42, {"num_classes": 3}),
    "eva02_clip": ("eva02_base_patch16_clip_224", 48, {"num_classes": 3}),
    # timm scales the places of patches to its reference grid: the grid of this image is as in the
    # original code.
    "pe_core": (
        "vit_pe_core_base_patch16_224",
        48,
        {"num_classes": 5, "attn_pool_num_heads": 4, **REFERENCE},
    ),
    "pe_lang": ("vit_pe_lang_large_patch14_448", 42, REFERENCE),
    "pe_spatial": ("vit_pe_spatial_base_patch16_512", 48, REFERENCE),
    "aimv2": ("aimv2_large_patch14_224", 42, {}),
    "radio": ("vit_base_patch16_radio_v3", 48, {}),
    "radio_v4": ("vit_so400m_patch16_radio_v4", 48, {}),
    "intern300m": ("vit_intern300m_patch14_448", 42, {}),
}
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
    "pe_core": (*TIMM["pe_core"], PE_NAMES | {"^": "visual."}, {"logit_scale": []}),
    "pe_lang": (*TIMM["pe_lang"], PE_NAMES, {}),
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
TOWERS = {"vision_config": {**HF_SIZES, **MLP}, "text_config": TEXT}
TIPS = {"vision_config": HF_SIZES, "text_config": TEXT}
DECODER = {"mask_ratio": 0.0, "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1}
DECODER |= {"decoder_num_attention_heads": 2, "decoder_intermediate_size": 32}
GATED = {"use_gated_mlp": True, "hidden_act": "silu"}
REGISTERS = {"num_register_tokens": 4}
HUGGINGFACE = {  # case: class, configuration, its arguments
    "mae": ("ViTMAEForPreTraining", "ViTMAEConfig", MLP | DECODER),
    "ijepa": ("IJepaForImageClassification", "IJepaConfig", {**MLP, "num_labels": 3}),
    "deit": ("DeiTForImageClassification", "DeiTConfig", {**MLP, "num_labels": 3}),
    "deit_distilled": (
        "DeiTForImageClassificationWithTeacher",
        "DeiTConfig",
        {**MLP, "num_labels": 3},
    ),
    "deit_pooler": ("DeiTModel", "DeiTConfig", MLP),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Config", {"num_labels": 3}),
    "dinov2_reg": ("Dinov2WithRegistersModel", "Dinov2WithRegistersConfig", {}),
    "dinov2_giant": ("Dinov2Model", "Dinov2Config", {"use_swiglu_ffn": True}),
    "dinov3": ("DINOv3ViTModel", "DINOv3ViTConfig", MLP | REGISTERS),
    "dinov3_plus": ("DINOv3ViTModel", "DINOv3ViTConfig", MLP | REGISTERS | GATED),
    "siglip": ("SiglipVisionModel", "SiglipVisionConfig", MLP),
    "siglip_both": ("SiglipModel", "SiglipConfig", TOWERS),
    "clip": ("CLIPVisionModelWithProjection", "CLIPVisionConfig", {**MLP, "projection_dim": 7}),
    "tipsv2_both": ("Tipsv2Model", "Tipsv2Config", TIPS),
    "tipsv2_giant_both": (
        "Tipsv2Model",
        "Tipsv2Config",
        {**TIPS, "vision_config": HF_SIZES | {"use_swiglu_ffn": True}},
    ),
    "clip_both": ("CLIPModel", "CLIPConfig", {**TOWERS, "projection_dim": 7}),
    "aimv2": ("Aimv2VisionModel", "Aimv2VisionConfig", {**MLP, "use_head": False}),
    "radio": (
        "RadioModel",
        "RadioConfig",
        {"max_img_size": 128, "num_registers": 3, "summary_idxs": [2, 0]},
    ),
}


STORED = r"input_conditioner\.|summary_idxs$"  # arrays whose values mean something


def fill(model: torch.nn.Module) -> None:
    state = {name: array for name, array in model.state_dict().items() if array.is_floating_point()}
    arrays = {
        name: torch.from_numpy(values(name, tuple(array.shape)))
        for name, array in state.items()
        if not re.search(STORED, name)
    }
    model.load_state_dict(model.state_dict() | arrays)


def short_names(file: pathlib.Path) -> dict[str, list[int]]:
    """Name and shape of every array, the blocks of one tower written once."""
    with safe_open(file, "np") as arrays:
        shapes = {name: list(arrays.get_slice(name).get_shape()) for name in arrays.keys()}  # noqa: SIM118 - no mapping

    networks = r"(?:vision_(?:model|encoder)|radio_model\.model|vit|deit|dinov2|ijepa)\."
    blocks = rf"^((?:{networks})?(?:blocks|encoder\.layers?|layer))\.(\d+)\."
    blocks_of = {name: re.match(blocks, name) for name in shapes}

    return {
        re.sub(blocks, r"\1.{n}.", name): shapes[name]
        for name, block in blocks_of.items()
        if block is None or block[2] == "0"
    }


def run(
    model: torch.nn.Module, case: str, size: tuple[int, ...], mean: list[float], std: list[float]
) -> dict[str, list]:
    images = ((pixels(*size) - mean) / std).astype(np.float32)
    has_table = (
        "interpolate_pos_encoding"
        in inspect.signature(getattr(model, "vit", model).forward).parameters
    )
    is_resized = (
        {"interpolate_pos_encoding": True}
        if len(size) == 2 and (has_table or case.endswith("_both"))
        else {}
    )
    x = torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()

    with torch.inference_mode():
        if hasattr(model, "forward_head"):
            features = model.forward_head(model.forward_features(x), pre_logits=True)
            # The mean of two tokens
            outputs = {} if hasattr(model, "head_dist") else {"features": features}
            outputs |= {"logits": model(x)} if model.num_classes else {}
        elif case.endswith("_both"):
            output = model.get_image_features(x, **is_resized)
            output = getattr(output, "pooler_output", output)
            outputs = {"logits" if case.startswith("clip") else "features": output}
        elif case == "mae":
            order = torch.arange(float(images[0, ::16, ::16, 0].size))[None].repeat(
                len(x),
                1,
            )  # no patch moves
            outputs = {"features": model.vit(x, noise=order, **is_resized).last_hidden_state[:, 0]}
        else:
            output = model(x, **is_resized)
            # Behind a layer with tanh
            pooled = "hidden" if case.endswith("_pooler") else "features"
            names = {
                "logits": "logits",
                "image_embeds": "logits",
                "pooler_output": pooled,
                "summary": "features",
            }

            if case == "aimv2":
                output["pooler_output"] = output.last_hidden_state.mean(1)

            outputs = {ours: output[theirs] for theirs, ours in names.items() if theirs in output}

    rows = {name: array.tolist() for name, array in outputs.items()}
    return {
        name: [[float(f"{number:.7g}") for number in row] for row in array]
        for name, array in rows.items()
    }


def record(path: pathlib.Path, chosen: Collection[str]) -> None:
    known = json.loads(path.read_text()) if chosen else {}
    cases = known.get("cases", {})
    resized = known.get("resized", {})

    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for case, (_, size, _) in TIMM.items():
            if chosen and f"timm/{case}" not in chosen:
                continue

            model, arguments = build_timm(case)
            save_config_for_hf(model, folder / "config.json", model_args=arguments)
            timm.models.save_for_hf(model, folder, model_args=arguments, safe_serialization=True)
            config = json.loads((folder / "config.json").read_text())
            pretrained = config["pretrained_cfg"]
            normalisation = pretrained["mean"], pretrained["std"]
            output = run(model, case, (size,), *normalisation)
            shapes = short_names(folder / "model.safetensors")
            cases[f"timm/{case}"] = {"config": config, "size": size, "shapes": shapes, **output}

            if (
                "ref_feat_shape" in arguments
            ):  # the original code counts patches; timm does so at its reference grid
                model.rope.ref_feat_shape = [4, 2]

            new = (size // 3 * 4, size // 3 * 2) if size != 64 else (96, 32)
            model.set_input_size(new)
            resized[f"timm/{case}"] = {"size": new, **run(model, case, new, *normalisation)}

        for case, (model_name, size, arguments, names, others) in ORIGINAL.items():
            if chosen and f"original/{case}" not in chosen:
                continue

            arguments = {**SIZES, "img_size": size, **arguments}
            model = timm.create_model(model_name, **arguments).eval()
            shapes = original_state(model, names, others)
            save_config_for_hf(model, folder / "config.json", model_args=arguments)
            config = json.loads((folder / "config.json").read_text())
            output = run(
                model,
                case,
                (size,),
                config["pretrained_cfg"]["mean"],
                config["pretrained_cfg"]["std"],
            )
            cases[f"original/{case}"] = {"config": config, "size": size, "shapes": shapes, **output}

        if not chosen or "big_vision/siglip" in chosen:
            model = timm.create_model("vit_base_patch32_siglip_256", img_size=64, **SIZES).eval()
            shapes = flat(BIG_VISION, "params")
            arrays = {
                name: values(name, shape) for name, shape in full_names(shapes, depth=2).items()
            }
            np.savez(folder / "siglip.npz", **arrays)
            model.load_pretrained(str(folder / "siglip.npz"))
            output = run(model, "siglip", (64,), [0.5] * 3, [0.5] * 3)
            cases["big_vision/siglip"] = {"size": 64, "shapes": shapes, **output}

        for case in HUGGINGFACE:
            if chosen and f"huggingface/{case}" not in chosen:
                continue

            model, stored = build_huggingface(case, folder)
            config = json.loads((folder / "config.json").read_text())
            shapes = short_names(folder / "model.safetensors")
            # C-RADIO normalises pixels itself; AIMv2's class takes images of one size.
            normalisation = ([0.0] * 3, [1.0] * 3) if case == "radio" else ([0.5] * 3, [0.5] * 3)
            output = run(model, case, (48,), *normalisation)
            cases[f"huggingface/{case}"] = {
                "config": config,
                "size": 48,
                "shapes": shapes,
                **stored,
                **output,
            }

            if case != "aimv2":
                resized[f"huggingface/{case}"] = {
                    "size": (64, 32),
                    **run(model, case, (64, 32), *normalisation),
                }

    versions = {library.__name__: library.__version__ for library in (timm, transformers, torch)}
    path.write_text(
        json.dumps(
            {"versions": versions, "cases": cases, "resized": resized},
            separators=(",", ":"),
        )
        + "\n"
    )


def build_timm(case: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return a network of timm, and the arguments that it was built with."""
    model_name, size, arguments = TIMM[case]
    arguments = {**SIZES, "img_size": size, **arguments}
    model = timm.create_model(model_name, **arguments).eval()
    fill(model)

    return model, arguments


def build_huggingface(case: str, folder: pathlib.Path) -> tuple[torch.nn.Module, dict[str, Any]]:
    """Return a network of transformers, written to the folder, and the arrays that keep their values."""
    class_name, config_name, arguments = HUGGINGFACE[case]
    sizes = {} if case.endswith("_both") else HF_SIZES
    model = getattr(transformers, class_name)(
        getattr(transformers, config_name)(**sizes, **arguments)
    ).eval()
    fill(model)
    model.save_pretrained(folder)

    return model, file_values(model, folder / "model.safetensors")


def original_state(
    model: torch.nn.Module, names: dict[str, str], others: dict[str, list[int]]
) -> dict[str, list[int]]:
    """Give a model of timm the values of a file of the authors, by timm's own conversion; return the file's shapes."""
    shapes = {}
    for name, array in model.state_dict().items():
        shape = list(array.shape)
        if name.startswith("attn_pool.q."):
            continue

        if name.startswith("attn_pool.kv."):
            shape = [shape[0] * 3 // 2, *shape[1:]]

        for pattern, other in names.items():
            name = re.sub(pattern, other, name)

        short = name.removeprefix("visual.")
        if short in ("class_embedding", "positional_embedding", "proj"):
            shape = {"class": shape[2:], "posit": shape[1:], "proj": shape[::-1]}[short[:5]]

        if name.endswith("qkv.bias"):
            shape = [3 * shape[0]]

        if not name.endswith("v_bias") and not name.endswith("head.bias"):
            shapes[name] = shape

    shapes = {
        name.replace("s.0.", "s.{n}."): shape
        for name, shape in shapes.items()
        if "s.1." not in name
    } | others
    state = {
        name: torch.from_numpy(values(name, shape))
        for name, shape in full_names(shapes, depth=2).items()
    }
    convert = sys.modules[type(model).__module__].checkpoint_filter_fn
    model.load_state_dict(convert(state, model))

    return shapes


def flat(tree: dict[str, Any] | list[int], name: str) -> dict[str, list[int]]:
    if isinstance(tree, list):
        return {name: tree}

    return {
        key: shape
        for part, inner in tree.items()
        for key, shape in flat(inner, f"{name}/{part}").items()
    }


def file_values(model: torch.nn.Module, file: pathlib.Path) -> dict[str, Any]:
    """Give a model of transformers, whose names in memory are newer, the values that the names in its file have.

    Return the arrays that keep their values.
    """
    arrays = load_file(file)
    stored = {name: array.tolist() for name, array in arrays.items() if re.search(STORED, name)}
    arrays |= {
        name: values(name, array.shape) for name, array in arrays.items() if name not in stored
    }
    save_file(arrays, file, metadata={"format": "pt"})
    again = type(model).from_pretrained(file.parent)
    model.load_state_dict(again.state_dict())

    return {"stored": stored} if stored else {}


if __name__ == "__main__":
    record(pathlib.Path(sys.argv[1]), sys.argv[2:])
