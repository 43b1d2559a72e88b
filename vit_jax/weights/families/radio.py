"""C-RADIO: features of several teachers, in a class token for each."""

import dataclasses
import re
from collections.abc import Mapping, Sequence

import numpy as np

from vit_jax.config.architecture import Architecture
from vit_jax.weights.family import Family, RejectedArrays, Release, read_models
from vit_jax.weights.folding import Normalisation, parse_normalisation
from vit_jax.weights.formats import ArrayFile, StoredArray
from vit_jax.weights.library_models import (
    SQUARE,
    WHOLE_BIAS,
    WITHOUT_CLASSES,
    TransformersModel,
    hold_any,
)
from vit_jax.weights.names import timm
from vit_jax.weights.names.entry import Entry, Rule, replace_shape
from vit_jax.weights.names.facts import Facts, read_shape
from vit_jax.weights.names.original_names import OriginalNames
from vit_jax.weights.packing import Packing, Parameters, Shapes, Unpacked
from vit_jax.weights.position_resize import crop_square

_MODELS = """
768/12/12
  vit_base_patch16_radio_v3
1024/24/16
  vit_large_patch16_radio_v3
1152/27/16
  vit_so400m_patch16_radio_v4
1280/32/16
  vit_huge_patch16_radio_v3 vit_huge_patch16_radio_v4
1536/40/24
  vit_giant_patch16_radio_v3
"""

_ORIGINAL = OriginalNames(
    "patch_generator.embedder.weight",
    {
        r"^patch_generator\.embedder\.": "patch_embed.proj.",
        r"^patch_generator\.pos_embed$": "pos_embed",
        r"^patch_generator\.cls_token\.token$": "cls_token",
        r"\.grandma$": ".gamma",
        r"\.layer_scale(\d)\.lambda1$": r".ls\1.gamma",
    },
    prefixes=("radio_model.model.",),
    ignored=r"patch_generator\.video_embedder\.",
)
_CHOICE = "radio_model.summary_idxs"  # numbers of class tokens
_NORMALISATION = (
    "radio_model.input_conditioner.norm_mean",
    "radio_model.input_conditioner.norm_std",
)


class RadioTokens(Packing):
    """All prefix tokens in one array, positions of a large square, and the normalisation of pixels.

    The output of the network is a choice of its prefix tokens, which become our class tokens; the
    others are registers. Prefix tokens have no positions, so their order changes nothing.
    """

    note = (
        "Positions are resized to the longer side (bilinear) and cropped, as transformers and "
        "C-RADIOv4 do (align_corners=False). C-RADIOv3 B and H were trained with "
        "align_corners=True: take timm's files of these."
    )
    fits_any_grid = True
    pads_class_position = False

    def matches(self, shapes: Shapes, arrays: Mapping[str, StoredArray]) -> bool:
        """Return True for a file with a linear patch embedding."""
        return len(shapes.get("patch_embed.proj.weight", ())) == 2

    def complete_facts(
        self,
        facts: Facts,
        shapes: Shapes,
        arrays: Mapping[str, StoredArray],
    ) -> Facts:
        """Return the facts with as many class tokens as the file chooses.

        It is one if the file states no choice.
        """
        num_tokens, _ = read_shape(shapes, "cls_token", 2)
        num_chosen = 1
        if _CHOICE in arrays and len(arrays[_CHOICE].shape) == 1:
            num_chosen = arrays[_CHOICE].shape[0]
        if not 0 < num_chosen <= num_tokens:
            raise ValueError(f"it chooses {num_chosen} of {num_tokens} prefix tokens: {_CHOICE}")

        modern_options = dict(facts.modern_options)
        modern_options["class_tokens"] = num_chosen
        modern_options["registers"] = num_tokens - num_chosen
        absent = frozenset(["register_tokens"])
        return dataclasses.replace(facts, modern_options=modern_options, absent=absent)

    def split_shapes(self, shapes: Shapes) -> dict[str, tuple[int, ...]]:
        """Return the shapes without registers, which are in the array of the class token."""
        parts = dict(shapes)
        parts.pop("register_tokens", None)
        return parts

    def adapt_entries(self, entries: Sequence[Entry], a: Architecture) -> list[Entry]:
        """Return the arrays with all prefix tokens in the array of the class token."""
        return replace_shape(entries, "class_token", (1, a.prefix_length, a.width))

    def unpack(self, parts: Parameters, file: ArrayFile, a: Architecture) -> Unpacked:
        """Return our tokens and positions, and the normalisation that the file has, if any.

        Raises:
          ValueError: the chosen numbers repeat a token, or are no tokens.
        """
        chosen = np.zeros(1, np.int64)
        if _CHOICE in file.arrays:
            chosen = file.read(_CHOICE)
        tokens = _split_tokens(parts["class_token"], chosen)
        table_SD = parts["positions/table"][0]
        positions_1SD = crop_square(table_SD, a.grid)[None]
        parameters = {**parts, **tokens, "positions/table": positions_1SD}
        if not file.arrays.keys() >= set(_NORMALISATION):
            return Unpacked(parameters)

        mean, std = [file.read(name).ravel().tolist() for name in _NORMALISATION]
        return Unpacked(parameters, parse_normalisation(mean, std))

    def pack(self, parameters: Parameters) -> dict[str, np.ndarray]:
        """Return the parameters with all prefix tokens in the array of the class token."""
        packed = dict(parameters)
        tokens = [packed.pop("class_token")]
        if "register_tokens" in packed:
            tokens.append(packed.pop("register_tokens"))
        packed["class_token"] = np.concatenate(tokens, axis=1)
        return packed


def _split_tokens(tokens_1PD: np.ndarray, chosen: np.ndarray) -> dict[str, np.ndarray]:
    """Return our class tokens and registers.

    Args:
      tokens_1PD: all prefix tokens.
      chosen: their numbers that are class tokens.
    """
    numbers = chosen.tolist()
    all_numbers = range(tokens_1PD.shape[1])
    others = [number for number in all_numbers if number not in numbers]
    if sorted(numbers + others) != list(all_numbers):
        raise ValueError(
            f"{_CHOICE}={numbers}: must be different numbers below {len(all_numbers)}. "
            "Correct the file."
        )
    return {"class_token": tokens_1PD[:, chosen], "register_tokens": tokens_1PD[:, others]}


# timm's names → C-RADIO's, below the prefix.
_RENAMES = {
    r"^patch_embed\.proj": "patch_generator.embedder",
    "^pos_embed$": "patch_generator.pos_embed",
    "^cls_token$": "patch_generator.cls_token.token",
    r"\.ls(\d)\.gamma$": r".layer_scale\1.lambda1",
}


def _rename(name: str) -> str:
    """Return C-RADIO's name for timm's."""
    for pattern, replacement in _RENAMES.items():
        name = re.sub(pattern, replacement, name)
    return f"radio_model.model.{name}"


class RadioModel(TransformersModel):
    """The class of transformers, with the names of the authors' code."""

    def make_rules(self, a: Architecture) -> list[Rule]:
        """Return the names of the parameters of a network."""
        style = timm.Style(embeds_linearly=True)
        rules = []
        for rule in timm.make_vit_rules(style):
            name = _rename(str(rule.name))
            rules.append(rule._replace(name=name))
        return rules

    def make_arrays(self, a: Architecture, normalisation: Normalisation) -> dict[str, np.ndarray]:
        """Return the choice of class tokens, and the normalisation."""
        arrays: dict[str, np.ndarray] = {_CHOICE: np.arange(a.num_class_tokens)}
        for name, values in zip(_NORMALISATION, normalisation, strict=True):
            arrays[name] = np.array(values, np.float32).reshape(3, 1, 1)
        return arrays


def _state_arguments(a: Architecture, pixels: Normalisation) -> dict[str, object]:
    return {
        "num_cls_tokens": a.num_class_tokens,
        "num_registers": a.registers,
        "summary_idxs": list(range(a.num_class_tokens)),
        "max_img_size": a.image_size[0],
        "mlp_ratio": a.mlp_dim / a.width,
        "qkv_bias": a.qkv_bias == "all",
        "norm_mean": list(pixels.mean),
        "norm_std": list(pixels.std),
    }


_TOKENS = RadioTokens()
_MODEL = RadioModel(
    name="RadioModel",
    model_type="radio",
    held={
        **WITHOUT_CLASSES,
        **SQUARE,
        **WHOLE_BIAS,
        **hold_any("class_tokens", "registers", "layer_scale"),
        "pool": ("token",),
        "position_tokens": ("patches",),
        "final_norm": ("none",),
    },
    packing=_TOKENS,
    has_patch_bias=False,
    arguments=_state_arguments,
    normalises_pixels=False,
)

FAMILY = Family(
    releases=(
        Release(
            name="C-RADIO",
            addresses=(
                "hf://timm/vit_{base,large,huge,giant}_patch16_radio_v3.c_radio",
                "hf://nvidia/C-RADIOv4-H",
            ),
            pattern=r"_radio_v\d|nvidia/C-RADIO|^radio$",
            use="dense tasks, features of several teachers",
            licence="nvidia-open-model-license",
            pixels="512 bicubic; mean and deviation are in the file",
        ),
    ),
    models=read_models(_MODELS),
    registry_rows={
        "C-RADIO": r"vit_\w+_radio",
    },
    model_types={"radio": {}},
    rejected_arrays=(
        RejectedArrays(
            r"embeddings\.cls_register_token:",
            "C-RADIO in transformers' names of memory",
            "all prefix tokens in one array",
            "save it by save_pretrained, which writes C-RADIO's own names",
        ),
    ),
    original=_ORIGINAL,
    packings=(_TOKENS,),
    transformers_models=(_MODEL,),
)
