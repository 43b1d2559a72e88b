"""The verb inspect: pictures of a model."""

import dataclasses
import difflib
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vit_jax.cli.verb import verb
from vit_jax.cli.weights import CHECKPOINT, READING, open_model
from vit_jax.cli.words import Given, UsageError, whole
from vit_jax.files import printable

if TYPE_CHECKING:
    from vit_jax.api import Model

_OF_IMAGES = ("split", "data_dir", "num_images", "shown")


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
        "[--heads=LAYER:HEAD,…]": "whose attention is drawn, both from 1; all heads of the last layer by default",
    }
    | READING,
    "ViT-L_32.npz filters,positions --output=pictures",
    "runs/digits --images=digits --output=pictures",
)
def inspect(given: Given) -> None:
    """Draw pictures of a network: its filters and positions, what it looks at, what it finds similar."""
    options = given.options
    if idle := [f"--{name}" for name in _OF_IMAGES if name in options and "images" not in options]:
        raise UsageError(f"{', '.join(idle)}: without effect without --images=; leave it out.")
    numbers = {name: whole(options, name) for name in ("num_images", "shown") if name in options}
    heads = _heads(options)

    from vit_jax.analysis.images import View, read_view
    from vit_jax.analysis.pictures import KINDS, chosen_heads
    from vit_jax.drawing import require_drawing
    from vit_jax.files import make_folder, write_atomically

    names = _names(options.get("WHAT", "all"), list(KINDS))
    with_images = [name for name in names if KINDS[name].needs_images]
    if "heads" in options and "heads" not in names:
        raise UsageError(f"--heads={options['heads']}: without effect on {', '.join(names)}; leave it out.")
    if "images" in options and not with_images:
        raise UsageError(f"--images={options['images']}: {', '.join(names)} need none; leave it out.")
    if with_images and "images" not in options and "WHAT" in options and options["WHAT"] != "all":
        raise UsageError(f"{', '.join(with_images)}: give images, --images=FOLDER or data as in a recipe.")
    require_drawing()
    model, _ = open_model(options, needs_classes=False, needs_transform="images" in options)
    drawn = _available(model, names, options)
    if "heads" in drawn:
        chosen_heads(model.architecture, heads)
    view, shown = View(), {name: numbers.pop(name) for name in ("shown",) if name in numbers}
    if set(drawn) & set(with_images):
        chosen = {name: options[name] for name in ("split", "data_dir") if name in options}
        view = read_view(model, options["images"], **chosen, **numbers)
    view = dataclasses.replace(view, heads=heads, **shown)
    for note in view.notes:
        print(f"note: {printable(note)}", file=sys.stderr)
    folder = pathlib.Path(options["output"]).expanduser()
    with make_folder(folder):
        for name in drawn:
            for path, content in KINDS[name].draw(model, view).files(folder / name).items():
                write_atomically(path, content)
                print(printable(str(path)), flush=True)


def _names(text: str, known: Sequence[str]) -> list[str]:
    """The pictures of "all", or of names with commas between them."""
    if text == "all":
        return list(known)
    names = list(dict.fromkeys(filter(None, text.split(","))))
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"There is no picture {name!r}.{hint} Pictures: {', '.join(known)}, or all.")
    return names


def _heads(options: Mapping[str, str]) -> tuple[tuple[int, int], ...]:
    texts = options["heads"].split(",") if "heads" in options else []
    if not all(re.fullmatch(r"[1-9]\d{0,3}:[1-9]\d{0,3}", text) for text in texts):
        raise UsageError(f"--heads={options['heads']}: must be LAYER:HEAD,... such as 1:1,12:3; both count from 1.")
    pairs = [text.split(":") for text in texts]
    return tuple((int(layer), int(head)) for layer, head in pairs)


def _available(model: "Model", names: Sequence[str], options: Mapping[str, str]) -> list[str]:
    """Those of the pictures that can be drawn; a note for the others of "all", an error for those asked for by name."""
    from vit_jax.analysis.pictures import KINDS, available

    reasons = available(model)
    if "images" not in options:
        reasons |= {
            name: "it needs --images=" for name, kind in KINDS.items() if kind.needs_images and not reasons[name]
        }
    missing = [f"{name} is left out: {reasons[name]}" for name in names if reasons[name]]
    drawn = [name for name in names if not reasons[name]]
    if missing and options.get("WHAT", "all") != "all":
        others = ", ".join(name for name, reason in reasons.items() if not reason)
        raise ValueError(
            f"{missing[0].replace(' is left out', '')}. This network has {others or 'none of the pictures'}."
        )
    for note in missing:
        print(f"note: {printable(note)}.", file=sys.stderr)
    return drawn
