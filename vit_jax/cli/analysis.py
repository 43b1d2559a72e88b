"""The verbs inspect and inspect data: pictures of a model, and of the images that a run trains on."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from vit_jax.cli.loading import Checkpoint, Reading
from vit_jax.cli.options import REQUIRED, Recipe, UsageError, argument, option, verb
from vit_jax.cli.outputs import note, output_folder
from vit_jax.config.rules import Count, When
from vit_jax.text.nearest import require_known
from vit_jax.text.printable import printable

if TYPE_CHECKING:
    from vit_jax.tools.figures.network import Figure

Heads = tuple[tuple[int, int], ...]  # layer and head, both from 1


def _read_heads(text: str) -> Heads:
    if not re.fullmatch(r"[1-9]\d{0,3}:[1-9]\d{0,3}(,[1-9]\d{0,3}:[1-9]\d{0,3})*", text):
        raise ValueError("must be LAYER:HEAD,... such as 1:1,12:3; both count from 1")
    pairs = [pair.split(":") for pair in text.split(",")]
    return tuple((int(layer), int(head)) for layer, head in pairs)


@verb(
    "ViT-L_32.npz filters,positions --output=pictures",
    "runs/digits --images=digits --output=pictures",
)
class Inspect(Reading, Checkpoint):
    """Draw pictures of a network: filters, positions, attention, similar images, and more."""

    what: str = argument(
        "WHAT",
        "some, with commas between them: filters, positions, distance, rollout, heads, gradcam, similar, pca, "
        "reconstructions",
        "all",
    )
    output: str = option("FOLDER", "for each picture a .png, and its numbers as .npz", REQUIRED)
    images: str | None = option(
        "FILES", "input images: a folder, an image, a pattern, or data as in a recipe"
    )
    split: Annotated[str | None, When("images")] = option("NAME", "of data; default: test")
    data_dir: Annotated[str | None, When("images")] = option("FOLDER", "of TFDS")
    num_images: Annotated[Count | None, When("images")] = option(
        "N", "images at most, evenly spread; default: 128"
    )
    shown: Annotated[Count | None, When("images")] = option("N", "images in a sheet; default: 8")
    heads: Annotated[Heads, _read_heads] = option(
        "LAYER:HEAD,…", "from 1; default: up to 8 of the last layer", ()
    )

    def run(self) -> None:
        from vit_jax.tools.figures.drawing import require_drawing
        from vit_jax.tools.figures.network import KINDS, available, chosen_heads
        from vit_jax.tools.figures.view import View, read_view

        names = _names(self.what, list(KINDS))
        with_images = {name for name in names if KINDS[name].needs_images}
        if not with_images:
            self.reject_ineffective(["images"], f"on {', '.join(names)}")
        if "heads" not in names:
            self.reject_ineffective(["heads"], f"on {', '.join(names)}")
        if with_images and self.images is None and self.what != "all":
            raise UsageError(
                f"WHAT={self.what}: must have images. Add --images=FOLDER, or data as in a recipe."
            )
        output = output_folder(self.output)
        require_drawing()
        model, _ = self.load(
            self.checkpoint,
            needs_classes=False,
            needs_transform=self.images is not None,
            uses_head=False,
        )
        drawn = self._possible(names, available(model))
        if "heads" in drawn:
            chosen_heads(model, self.heads)
        view = View()
        if self.images is None:
            drawn = self._possible(drawn, dict.fromkeys(with_images, "it needs --images="))
        elif with_images & {*drawn}:
            view = read_view(
                model,
                self.images,
                split=self.split,
                data_dir=self.data_dir,
                num_images=self.num_images or 128,
            )
            has = f"images, and --images={self.images} has {len(view.names)}"
            least = {
                name: kind.least_images
                for name, kind in KINDS.items()
                if len(view.names) < kind.least_images
            }
            drawn = self._possible(
                drawn, {name: f"it needs at least {number} {has}" for name, number in least.items()}
            )
        view = dataclasses.replace(view, shown=self.shown or 8, heads=self.heads)
        note(*view.notes)
        _write(output, ((name, KINDS[name].draw(model, view)) for name in drawn))

    def _possible(self, names: Sequence[str], reasons: Mapping[str, str | None]) -> list[str]:
        """Return the pictures without a reason against them; note each other of "all", reject one that was named."""
        for name in names:
            if (reason := reasons.get(name)) and self.what != "all":
                others = ", ".join(name for name, reason in reasons.items() if not reason)
                raise ValueError(f"{name}: {reason}.{others and f' Use {others}.'}")
            if reason:
                note(f"{name} is skipped: {reason}.")
        return [name for name in names if not reasons.get(name)]


@verb(
    "--config=pretrain_own:ViT-Ti/16 --config.data=folder:my-images --output=pictures",
    "--config=digits --config.input.cutmix_alpha=1.0 --shown=64 --output=pictures",
)
class InspectData(Recipe):
    """Draw the images and labels that a recipe trains and evaluates on, as the network receives them."""

    output: str = option(
        "FOLDER", "for train.png and test.png, and their numbers as .npz", REQUIRED
    )
    shown: Count = option("N", "images in a sheet", 32)

    def run(self) -> None:
        from vit_jax.config import validate
        from vit_jax.tools.figures.drawing import require_drawing

        output = output_folder(self.output)
        require_drawing()
        config = self.load()
        validate(config)

        from vit_jax.tools.figures.data_sheet import draw_data

        _write(output, draw_data(config, self.shown).items())


def _write(folder: Path, pictures: Iterable[tuple[str, "Figure"]]) -> None:
    """Write each picture, by name, when it is drawn; print its files."""
    from vit_jax.storage.files import make_folder, write_atomically

    with make_folder(folder):
        for name, picture in pictures:
            for path, content in picture.files(folder / name).items():
                write_atomically(path, content)
                print(printable(str(path)), flush=True)


def _names(text: str, known: Sequence[str]) -> list[str]:
    """Return the pictures of "all", or of names with commas between them."""
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        require_known("WHAT", name, ("all", *known) if text == name else known)
    return list(known) if text == "all" else names
