"""Groups of options: `--weights.FIELD` describes weights, `--images.FIELD` prepares their images.

A field is declared here once; a verb states which groups it takes. `load_model` gives both to the
model.
"""

import dataclasses
import math
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from vit_jax.cli.options import Group, PositiveShare, option, switch
from vit_jax.cli.outputs import note
from vit_jax.config.network_options import AddedTo, Gelu, Rope
from vit_jax.config.rules import Count, Positive
from vit_jax.config.schema import Interpolation
from vit_jax.weights import OPTIONS

if TYPE_CHECKING:
    from vit_jax.api import Model
    from vit_jax.weights import Weights


def _read_size(text: str) -> tuple[int, int]:
    """Return height and width of "HEIGHT,WIDTH", or of one number for both."""
    height, comma, width = text.partition(",")
    return _read_side(height), _read_side(width if comma else height)


def _read_side(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise ValueError("must be SIDE or HEIGHT,WIDTH in pixels. Use 224, or 224,160")
    return int(text)


def _read_range(text: str) -> tuple[float, float]:
    """Return LOW and HIGH of "LOW,HIGH"."""
    problem = "must be LOW,HIGH, two finite numbers, LOW < HIGH"
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        raise ValueError(problem) from None
    if not -math.inf < low < high < math.inf:
        raise ValueError(problem)
    return low, high


def _describe_facts() -> dict[str, tuple[str, str]]:
    """Return form and meaning of each fact in `weights.OPTIONS`; of a choice the type has the form."""
    facts = {}
    for name, (form, meaning) in OPTIONS.items():
        if "|" in form:
            form = ""
        facts[name] = (form, f"{meaning}; default: as in the file")
    return facts


_FACTS = _describe_facts()


@dataclasses.dataclass(frozen=True, kw_only=True)
class AllowedCode(Group):
    """Packages whose code the weights may run."""

    PREFIX: ClassVar[str] = "weights"

    allow_code: str | None = option(
        "PACKAGE,…", "packages whose code the weights may run; default: none"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightFields(AllowedCode):
    """Facts that the file of the weights does not state."""

    raw: bool = switch("use a workdir's parameters, not their Polyak average")
    image_size: Annotated[tuple[int, int] | None, _read_size] = option(
        "H,W",
        "image size in pixels, or one number for both sides; learned positions are resized as in "
        "the library of the weights",
    )
    architecture: str | None = option(*_FACTS["architecture"])
    num_heads: Count | None = option(*_FACTS["num_heads"])
    gelu: Gelu | None = option(*_FACTS["gelu"])
    layer_norm_epsilon: Positive | None = option(*_FACTS["layer_norm_epsilon"])
    group_norm_epsilon: Positive | None = option(*_FACTS["group_norm_epsilon"])
    standardization_epsilon: Positive | None = option(*_FACTS["standardization_epsilon"])
    standardization_epsilon_added_to: AddedTo | None = option(
        *_FACTS["standardization_epsilon_added_to"]
    )
    rope: Rope | None = option(*_FACTS["rope"])
    position_embedding: Literal["learned_1d", "learned_2d", "sincos2d", "none"] | None = option(
        *_FACTS["position_embedding"]
    )
    compute_dtype: Literal["float32", "bfloat16"] = option("", "dtype of activations", "float32")

    def collect_facts(self) -> dict[str, Any]:
        """Return the options as `load_weights` takes them."""
        return self.collect_values(*OPTIONS, "allow_code")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageFields(Group):
    """Preparation of images, by default as the weights state it."""

    PREFIX: ClassVar[str] = "images"

    resize: Literal["direct", "short_side"] | None = option(
        "", "method that resizes images; default: as in the weights"
    )
    crop_fraction: PositiveShare | None = option(
        "X", "fraction of both sides that a central crop keeps"
    )
    interpolation: Interpolation | None = option(
        "", "antialiased filter; default: as in the weights"
    )
    exif_orientation: Literal["applied", "ignored"] | None = option(
        "", "turn photographs upright; default: as in training, and applied to other files"
    )
    value_range: Annotated[tuple[float, float] | None, _read_range] = option(
        "LOW,HIGH",
        "values of files of more than 8 bits that become 0 and 255; default: as in training",
    )

    def collect_options(self) -> dict[str, Any]:
        """Return the options as `from_weights` takes them."""
        is_oriented = None
        if self.exif_orientation is not None:
            is_oriented = self.exif_orientation == "applied"
        return {
            "resize": self.resize,
            "crop_fraction": self.crop_fraction,
            "interpolation": self.interpolation,
            "exif_orientation": is_oriented,
            "value_range": self.value_range,
        }


GROUPS = (WeightFields, ImageFields)


def load_model(
    checkpoint: str,
    weight_fields: WeightFields,
    image_fields: ImageFields,
    *,
    data: str = "",
    class_names: list[str] | None = None,
    is_placed: bool = False,
    needs_classes: bool = True,
    needs_transform: bool = True,
    uses_head: bool = True,
) -> "tuple[Model, Weights]":
    """Load a model and print notes about its weights.

    Args:
      checkpoint: path or address of the weights.
      weight_fields: facts about the weights.
      image_fields: preparation of images.
      data: datasets of the images; "": image files.
      class_names: names of the classes; default: of the weights.
      is_placed: put the parameters on every device of all processes, not on one device.
      needs_classes: reject weights without a classifier.
      needs_transform: reject weights that do not state how images are prepared.
      uses_head: print warnings about the head.
    """
    import jax

    from vit_jax import hosts
    from vit_jax.api import from_weights
    from vit_jax.sharding import build_mesh, replicate
    from vit_jax.weights import load_weights

    facts = weight_fields.collect_facts()
    if class_names is not None:
        facts["class_names"] = class_names
    weights = load_weights(checkpoint, polyak=not weight_fields.raw, **facts)
    if hosts.is_first():
        note(*weights.notes)
        if uses_head:
            note(*weights.warnings())

    sharding = None
    if is_placed:
        sharding = replicate(build_mesh(jax.devices()))
    model = from_weights(
        weights,
        compute_dtype=weight_fields.compute_dtype,
        sharding=sharding,
        data=data,
        **image_fields.collect_options(),
    )
    if hosts.is_first():
        printed = {*weights.notes, *weights.warnings()}
        note(*(text for text in model.notes if text not in printed))
    if needs_classes:
        model.require_classes()
    if needs_transform:
        model.require_transform()
    return model, weights
