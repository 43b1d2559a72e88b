"""The model of a command line: options of all verbs that use one, and its loading."""

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vit_jax.cli.verb import ALLOW_CODE
from vit_jax.cli.words import UsageError, fraction, value_range, whole
from vit_jax.files import expanded, printable
from vit_jax.weights import OPTIONS

if TYPE_CHECKING:
    import jax

    from vit_jax.api import Model
    from vit_jax.weights import Weights

CHECKPOINT = {"CHECKPOINT": "weights: a workdir, .npz, .safetensors, a folder with weights, or hf://owner/name"}
NAMES = {"[--class_names=FILE]": "names of the classes, one a line, where the weights do not state them"}
_SIZE = OPTIONS["image_size"]
_SIZES = {f"[--image_size={_SIZE[0]}]": f"{_SIZE[1]}; learned positions are resized as in the library of the weights"}
_FACTS = {
    f"[--{name}={form}]": f"{what}, where the file does not state it"
    for name, (form, what) in OPTIONS.items()
    if name != "image_size"
}
OF_WEIGHTS = {"[--raw]": "use a workdir's parameters, not their Polyak average"} | ALLOW_CODE | _SIZES | _FACTS
READING = OF_WEIGHTS | {
    "[--resize=direct|short_side]": "how images are prepared, where the weights do not state it",
    "[--crop_fraction=X]": "the part of both sides that is kept, after --resize=short_side",
    "[--interpolation=bilinear|bicubic]": "antialiased filter, where the weights do not state one",
    "[--exif_orientation=applied|ignored]": "turn photographs upright, or not; else as in training, if that is known",
    "[--value_range=LOW,HIGH]": "values of files of more than 8 bits that become 0 and 255; else as in training",
    "[--compute_dtype=float32]": "or bfloat16",
}
_LIMITS = {"global_batch": "128", "max_unreadable": "100"}  # as in training
OF_LIMITS = {
    f"[--global_batch={_LIMITS['global_batch']}]": "images at a time on all devices",
    f"[--max_unreadable={_LIMITS['max_unreadable']}]": "how many images may be unreadable, as in training",
}


def limits(options: Mapping[str, str]) -> dict[str, int]:
    """Return the numbers of `OF_LIMITS`, by name."""
    return {name: whole(_LIMITS | dict(options), name) for name in _LIMITS}


def load_placed_model(
    options: Mapping[str, str], *, needs_classes: bool = True, needs_transform: bool = True, uses_head: bool = True
) -> "tuple[Model, Weights]":
    """Load the model of the options, complete on every device of all processes; arguments as `open_model`."""
    import jax

    from vit_jax.sharding import build_mesh, replicated

    sharding = replicated(build_mesh(jax.devices()))
    return open_model(
        options, sharding, needs_classes=needs_classes, needs_transform=needs_transform, uses_head=uses_head
    )


def open_model(
    options: Mapping[str, str],
    sharding: "jax.sharding.Sharding | None" = None,
    *,
    needs_classes: bool = True,
    needs_transform: bool = True,
    uses_head: bool = True,
) -> "tuple[Model, Weights]":
    """Load the model of the options and print notes about its weights.

    Args:
      options: the command line.
      sharding: of the parameters; None: on one device.
      needs_classes: reject weights without a classifier.
      needs_transform: reject weights that do not state how images are prepared.
      uses_head: print warnings about the head.
    """
    from vit_jax import hosts
    from vit_jax.api import from_weights
    from vit_jax.weights import load_weights

    weights = load_weights(options["CHECKPOINT"], polyak="raw" not in options, **weight_options(options))
    notes = [*weights.notes, *(weights.warnings() if uses_head else [])]
    for note in notes if hosts.is_first() else ():
        print(f"note: {printable(note)}", file=sys.stderr)
    model = from_weights(
        weights,
        compute_dtype=options.get("compute_dtype", "float32"),
        resize=options.get("resize"),
        crop_fraction=fraction(options, "crop_fraction") if "crop_fraction" in options else None,
        interpolation=options.get("interpolation"),
        exif_orientation=options["exif_orientation"] == "applied" if "exif_orientation" in options else None,
        value_range=value_range(options),
        sharding=sharding,
    )
    if needs_classes:
        model.require_classes()
    if needs_transform:
        model.require_transform()
    return model, weights


def weight_options(options: Mapping[str, str]) -> dict[str, Any]:
    """Return the options about incomplete weight files, in the types that `load_weights` takes."""
    values: dict[str, Any] = {name: options[name] for name in (*OPTIONS, "allow_code") if name in options}
    kinds = {"num_heads": int} | {name: float for name in OPTIONS if name.endswith("epsilon")}
    try:
        values |= {name: kind(values[name]) for name, kind in kinds.items() if name in values}
        if "image_size" in values:
            parts = [int(part) for part in values["image_size"].split(",")]
            values["image_size"] = tuple(parts * 2 if len(parts) == 1 else parts)
    except ValueError as error:
        raise UsageError(f"An option is not a number: {error}. image_size is SIDE or HEIGHT,WIDTH.") from None
    if "class_names" in options:
        from vit_jax.weights.load import read_class_names

        path = expanded(options["class_names"])
        if not path.exists():
            raise UsageError(f"--class_names={options['class_names']}: there is no such file; one name a line.")
        try:
            values["class_names"] = read_class_names(path)
        except (OSError, ValueError) as error:
            raise UsageError(f"--class_names={options['class_names']} is not readable UTF-8 text: {error}.") from None
    return values
