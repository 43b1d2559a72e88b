"""The verbs inspect and inspect data: pictures of a model, and of the images that a run trains on."""

import dataclasses
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vit_jax.cli.loading import CHECKPOINT, READING, open_model
from vit_jax.cli.outputs import output_folder
from vit_jax.cli.verb import RECIPE, verb
from vit_jax.cli.words import Given, UsageError, whole
from vit_jax.files import printable
from vit_jax.nearest import did_you_mean

if TYPE_CHECKING:
    from vit_jax.api import Model
    from vit_jax.figures.network import Picture

_OF_IMAGES = ("split", "data_dir", "num_images", "shown")
_NUMBERS = {"num_images": "128", "shown": "8"}


@verb(
    CHECKPOINT
    | {
        "[WHAT]": "all by default, or with commas between them: filters, positions, distance, rollout, heads, gradcam, "
        "similar, pca, reconstructions",
        "--output=FOLDER": "for each picture a .png, and its numbers as .npz",
        "[--images=FILES]": "what it looks at: a folder, an image, a pattern, or data as in a recipe",
        "[--split=NAME]": "of data; test by default",
        "[--data_dir=FOLDER]": "of TFDS",
        "[--num_images=128]": "at most so many, evenly spread",
        "[--shown=8]": "how many of them a sheet has",
        "[--heads=LAYER:HEAD,…]": "whose attention is drawn, both from 1; by default up to 8 of the last layer",
    }
    | READING,
    "ViT-L_32.npz filters,positions --output=pictures",
    "runs/digits --images=digits --output=pictures",
)
def inspect(given: Given) -> None:
    """Draw pictures of a network: its filters and positions, what it looks at, what it finds similar."""
    options = given.options
    numbers, heads = {name: whole(_NUMBERS | options, name) for name in _NUMBERS}, _heads(options)

    from vit_jax.drawing import require_drawing
    from vit_jax.figures.network import KINDS, chosen_heads
    from vit_jax.figures.view import View, read_view

    names = _names(options.get("WHAT", "all"), list(KINDS))
    with_images = {name for name in names if KINDS[name].needs_images}
    _require_sense(options, names, needs_images=bool(with_images))
    output = output_folder(options["output"])
    require_drawing()
    model, _ = open_model(options, needs_classes=False, needs_transform="images" in options, uses_head=False)
    drawn = _available(model, names, options)
    if "heads" in drawn:
        chosen_heads(model, heads)
    view, images = View(), options.get("images")
    if images is not None and with_images & {*drawn}:
        split, data_dir = options.get("split"), options.get("data_dir")
        view = read_view(model, images, split=split, data_dir=data_dir, num_images=numbers["num_images"])
        drawn = _with_enough_images(drawn, len(view.names), options)
    view = dataclasses.replace(view, shown=numbers["shown"], heads=heads)
    for note in view.notes:
        print(f"note: {printable(note)}", file=sys.stderr)
    _write(output, ((name, KINDS[name].draw(model, view)) for name in drawn))


@verb(
    RECIPE
    | {
        "--output=FOLDER": "for train.png and test.png, and their numbers as .npz",
        "[--shown=32]": "how many images a sheet has",
    },
    "--config=pretrain_own:ViT-Ti/16 --config.data=folder:my-images --output=pictures",
    "--config=digits --config.input.cutmix_alpha=1.0 --shown=64 --output=pictures",
)
def inspect_data(given: Given) -> None:
    """Draw the images and labels that a recipe trains and evaluates on, as the network receives them."""
    options, overrides, _ = given
    shown, output = whole({"shown": "32"} | options, "shown"), output_folder(options["output"])

    from vit_jax.config import load_recipe, validate
    from vit_jax.drawing import require_drawing

    require_drawing()
    config = load_recipe(options["config"], overrides)
    validate(config)

    from vit_jax.figures.data_sheet import draw_data

    _write(output, draw_data(config, shown).items())


def _write(folder: Path, pictures: Iterable[tuple[str, "Picture"]]) -> None:
    """Write each picture, by name, when it is drawn; print its files."""
    from vit_jax.files import make_folder, write_atomically

    with make_folder(folder):
        for name, picture in pictures:
            for path, content in picture.files(folder / name).items():
                write_atomically(path, content)
                print(printable(str(path)), flush=True)


def _names(text: str, known: Sequence[str]) -> list[str]:
    """The pictures of "all", or of names with commas between them."""
    if text == "all":
        return list(known)
    names = list(dict.fromkeys(filter(None, text.split(","))))
    for name in names or [text]:
        if name not in known:
            hint = did_you_mean(name, known)
            raise UsageError(f"There is no picture {name!r}.{hint} Pictures: {', '.join(known)}, or all.")
    return names


def _heads(options: Mapping[str, str]) -> tuple[tuple[int, int], ...]:
    texts = options["heads"].split(",") if "heads" in options else []
    if not all(re.fullmatch(r"[1-9]\d{0,3}:[1-9]\d{0,3}", text) for text in texts):
        raise UsageError(f"--heads={options['heads']}: must be LAYER:HEAD,... such as 1:1,12:3; both count from 1.")
    pairs = [text.split(":") for text in texts]
    return tuple((int(layer), int(head)) for layer, head in pairs)


def _require_sense(options: Mapping[str, str], names: Sequence[str], *, needs_images: bool) -> None:
    """Every option has an effect on these pictures, and those asked for by name have what they need."""
    has_images, of_names = "images" in options, f"on {', '.join(names)}"
    idle = {f"--{name}": "without --images=" for name in _OF_IMAGES if name in options and not has_images}
    if has_images and not needs_images:
        idle["--images"] = of_names
    if "heads" in options and "heads" not in names:
        idle["--heads"] = of_names
    for name, where in idle.items():
        raise UsageError(f"{name}: without effect {where}; leave it out.")
    if needs_images and not has_images and options.get("WHAT", "all") != "all":
        raise UsageError(f"{options['WHAT']}: give images, --images=FOLDER or data as in a recipe.")


def _with_enough_images(names: Sequence[str], num_images: int, options: Mapping[str, str]) -> list[str]:
    """Return the pictures for which there are enough images; print a note on each other of "all"."""
    from vit_jax.figures.network import KINDS

    missing = {name: KINDS[name].least_images for name in names if num_images < KINDS[name].least_images}
    for name, least in missing.items():
        reason = f"it needs at least {least} images, and --images={options['images']} has {num_images}"
        if options.get("WHAT", "all") != "all":
            raise ValueError(f"{name}: {reason}.")
        print(f"note: {name} is left out: {printable(reason)}.", file=sys.stderr)
    return [name for name in names if name not in missing]


def _available(model: "Model", names: Sequence[str], options: Mapping[str, str]) -> list[str]:
    """Those of the pictures that can be drawn; a note on each other of "all", an error for one asked for by name."""
    from vit_jax.figures.network import KINDS, available

    reasons = available(model)
    if options.get("WHAT", "all") != "all":
        others = ", ".join(name for name, reason in reasons.items() if not reason)
        for name in names:
            if reasons[name]:
                raise ValueError(f"{name}: {reasons[name]}. Of this network there are {others or 'no pictures'}.")
        return list(names)
    if "images" not in options:
        missing = {name: "it needs --images=" for name, kind in KINDS.items() if kind.needs_images}
        reasons = {name: reason or missing.get(name) for name, reason in reasons.items()}
    for name, reason in reasons.items():
        if reason:
            print(f"note: {name} is left out: {printable(reason)}.", file=sys.stderr)
    return [name for name in names if not reasons[name]]
