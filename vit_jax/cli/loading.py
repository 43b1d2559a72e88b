"""The model of a command line: options of all verbs that use one, and its loading."""

import dataclasses
import math
from typing import TYPE_CHECKING, Annotated, Any, Literal

from vit_jax.cli.options import (
    AllowCode,
    Options,
    PositiveShare,
    UsageError,
    argument,
    option,
    switch,
)
from vit_jax.cli.outputs import note
from vit_jax.config.network_options import AddedTo, Gelu, Rope
from vit_jax.config.rules import Count, Number, Positive
from vit_jax.config.schema import Interpolation
from vit_jax.storage.files import expanded
from vit_jax.weights import OPTIONS

if TYPE_CHECKING:
    from vit_jax.api import Model
    from vit_jax.weights import Weights


def _read_size(text: str) -> tuple[int, int]:
    sides = [int(side) if side.isdecimal() else 0 for side in text.split(",")]
    height, width = sides * 2 if len(sides) == 1 else sides if len(sides) == 2 else (0, 0)
    if not height or not width:
        raise ValueError("must be SIDE or HEIGHT,WIDTH in pixels. Use 224, or 224,160")
    return height, width


def _read_range(text: str) -> tuple[float, float]:
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        low = high = math.nan
    if not -math.inf < low < high < math.inf:
        raise ValueError("must be LOW,HIGH, two finite numbers, LOW < HIGH")
    return low, high


_OF_FILE = {  # form and meaning of facts about weights
    name: ("" if "|" in form else form, f"{meaning}; default: of the file")
    for name, (form, meaning) in OPTIONS.items()
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits(Options):
    """The batch, and the number of images that may be unreadable, as in training."""

    global_batch: Count = option("N", "images at a time on all devices", 128)
    max_unreadable: Number | None = option(
        "N", "largest number of unreadable images; default: 100, at most a tenth"
    )

    @property
    def limits(self) -> dict[str, Any]:
        """Both by name."""
        return {"global_batch": self.global_batch, "max_unreadable": self.max_unreadable}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Names(Options):
    """Names of the classes."""

    class_names: str | None = option(
        "FILE", "names of the classes, one a line; default: of the weights"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfWeights(AllowCode):
    """Facts about weights whose file does not state everything."""

    raw: bool = switch("use a workdir's parameters, not their Polyak average")
    image_size: Annotated[tuple[int, int] | None, _read_size] = option(
        "H,W",
        "pixels, or one number for both; learned positions are resized as in the library of the weights",
    )
    architecture: str | None = option(*_OF_FILE["architecture"])
    num_heads: Count | None = option(*_OF_FILE["num_heads"])
    gelu: Gelu | None = option(*_OF_FILE["gelu"])
    layer_norm_epsilon: Positive | None = option(*_OF_FILE["layer_norm_epsilon"])
    group_norm_epsilon: Positive | None = option(*_OF_FILE["group_norm_epsilon"])
    standardization_epsilon: Positive | None = option(*_OF_FILE["standardization_epsilon"])
    standardization_epsilon_added_to: AddedTo | None = option(
        *_OF_FILE["standardization_epsilon_added_to"]
    )
    rope: Rope | None = option(*_OF_FILE["rope"])
    position_embedding: Literal["learned_1d", "learned_2d", "sincos2d", "none"] | None = option(
        *_OF_FILE["position_embedding"]
    )

    def facts(self) -> dict[str, Any]:
        """Return the options as `load_weights` takes them."""
        facts = self.chosen(*OPTIONS, "allow_code")
        if (file := getattr(self, "class_names", None)) is None:
            return facts

        from vit_jax.weights.load import read_class_names

        try:
            return facts | {"class_names": read_class_names(expanded(file))}
        except (OSError, ValueError) as error:
            raise UsageError(
                f"--class_names={file}: must be readable UTF-8 text, one name a line. {error}."
            ) from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading(OfWeights):
    """Facts about weights and the preparation of their images."""

    resize: Literal["direct", "short_side"] | None = option(
        "", "resize of images; default: of the weights"
    )
    crop_fraction: PositiveShare | None = option(
        "X", "fraction of both sides that a central crop keeps"
    )
    interpolation: Interpolation | None = option("", "antialiased filter; default: of the weights")
    exif_orientation: Literal["applied", "ignored"] | None = option(
        "", "turn photographs upright; default: as trained"
    )
    value_range: Annotated[tuple[float, float] | None, _read_range] = option(
        "LOW,HIGH",
        "values of files of more than 8 bits that become 0 and 255; default: as in training",
    )
    compute_dtype: Literal["float32", "bfloat16"] = option("", "of activations", "float32")

    def load(
        self,
        checkpoint: str,
        *,
        is_placed: bool = False,
        needs_classes: bool = True,
        needs_transform: bool = True,
        uses_head: bool = True,
    ) -> "tuple[Model, Weights]":
        """Load a model and print notes about its weights.

        Args:
          checkpoint: path or address of the weights.
          is_placed: put the parameters on every device of all processes, not on one device.
          needs_classes: reject weights without a classifier.
          needs_transform: reject weights that do not state how images are prepared.
          uses_head: print warnings about the head.
        """
        import jax

        from vit_jax import hosts
        from vit_jax.api import from_weights
        from vit_jax.sharding import build_mesh, replicated
        from vit_jax.weights import load_weights

        sharding = replicated(build_mesh(jax.devices())) if is_placed else None
        weights = load_weights(checkpoint, polyak=not self.raw, **self.facts())
        if hosts.is_first():
            note(*weights.notes, *(weights.warnings() if uses_head else []))
        model = from_weights(
            weights,
            compute_dtype=self.compute_dtype,
            resize=self.resize,
            crop_fraction=self.crop_fraction,
            interpolation=self.interpolation,
            exif_orientation=None
            if self.exif_orientation is None
            else self.exif_orientation == "applied",
            value_range=self.value_range,
            sharding=sharding,
        )
        if needs_classes:
            model.require_classes()
        if needs_transform:
            model.require_transform()
        return model, weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint(Options):
    """The weights."""

    checkpoint: str = argument(
        "CHECKPOINT",
        "weights: a workdir, .npz, .safetensors, a folder with weights, or hf://owner/name",
    )
