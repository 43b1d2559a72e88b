"""The verbs inspect and inspect data: figures of a model, and of the images of a run."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from vit_jax.cli.groups import StartedRecipe
from vit_jax.cli.loading import Checkpoint, Reading
from vit_jax.cli.options import REQUIRED, UsageError, argument, format_command, option
from vit_jax.cli.outputs import note, resolve_output_folder
from vit_jax.cli.verbs import verb
from vit_jax.config.data_kinds import find_kind
from vit_jax.config.rules import Count, When
from vit_jax.text.nearest import require_known
from vit_jax.text.printable import printable

if TYPE_CHECKING:
    from vit_jax.api import Model
    from vit_jax.tools.figures.network import Figure
    from vit_jax.tools.figures.view import View

Heads = tuple[tuple[int, int], ...]  # layer and head, both from 1
_HEAD = re.compile(r"(?P<layer>[1-9]\d{0,3}):(?P<head>[1-9]\d{0,3})")
_NUM_IMAGES = 128
_NUM_SHOWN = 8


def _read_heads(text: str) -> Heads:
    """Return the pairs of "LAYER:HEAD,..."."""
    heads = []
    for pair in text.split(","):
        match = _HEAD.fullmatch(pair)
        if match is None:
            raise ValueError("must be LAYER:HEAD,... such as 1:1,12:3; both count from 1")
        heads.append((int(match["layer"]), int(match["head"])))
    return tuple(heads)


@verb(
    "ViT-L_32.npz filters,positions --output=figures",
    "runs/digits --images=digits --output=figures",
)
class Inspect(Reading, Checkpoint):
    """Draw figures of a network: filters, positions, attention, similar images, and more."""

    what: str = argument(
        "WHAT",
        "figures, with commas between them: filters, positions, distance, rollout, heads, "
        "gradcam, similar, pca, reconstructions",
        "all",
    )

    output: str = option(
        "FOLDER", "folder of the figures: for each a .png, and its numbers as .npz", REQUIRED
    )

    files: str | None = option(
        "FILES",
        "input images: a folder, an image, a pattern, or data as in a recipe",
        flag="images",
    )
    split: Annotated[str | None, When("files")] = option("NAME", "split of the data; default: test")
    data_dir: Annotated[str | None, When("files")] = option(
        "FOLDER", "folder of TFDS datasets", reads_bucket=True
    )
    num_images: Annotated[Count | None, When("files")] = option(
        "N", "largest number of images, evenly spread; default: 128"
    )

    shown: Annotated[Count | None, When("files")] = option(
        "N", "number of images in a sheet; default: 8"
    )
    heads: Annotated[Heads, _read_heads] = option(
        "LAYER:HEAD,…",
        "layers and heads, counted from 1; default: up to 8 heads of the last layer",
        (),
    )

    def suggest_next(self) -> str:
        """Return predictions by the weights."""
        return f"{format_command('predict', self.checkpoint)} IMAGE"

    def run(self) -> None:
        from vit_jax.tools.figures.drawing import require_drawing
        from vit_jax.tools.figures.network import KINDS, explain_missing, select_heads

        names = _list_names(self.what, list(KINDS))
        self._require_effective(names)
        output = resolve_output_folder(self.output)
        require_drawing()

        model, _ = self.load(
            self.checkpoint,
            data=self._name_dataset(),
            needs_classes=False,
            needs_transform=self.files is not None,
            uses_head=False,
        )
        reasons = explain_missing(model)
        drawn = self._select(names, reasons)
        if "heads" in drawn:
            select_heads(model, self.heads)
        drawn, view = self._read_view(model, drawn)
        note(*view.notes)

        for name in drawn:
            _write(output, name, KINDS[name].draw(model, view))

    def _name_dataset(self) -> str:
        """Return the data of --images=; "" for image files."""
        if self.files is None or find_kind(self.files) is None:
            return ""
        return self.files

    def _require_effective(self, names: Sequence[str]) -> None:
        """Raise UsageError for options without effect on these figures, and for missing images."""
        shown_names = ", ".join(names)
        if "heads" not in names:
            self.reject_ineffective(["heads"], f"on {shown_names}")
        if not _select_with_images(names):
            self.reject_ineffective(["files"], f"on {shown_names}")
        elif self.files is None and self.what != "all":
            raise UsageError(
                f"WHAT={self.what}: must have images. Add --images=FOLDER, or data as in a recipe."
            )

    def _read_view(self, model: "Model", names: Sequence[str]) -> "tuple[list[str], View]":
        """Read the images, if a figure needs them.

        Returns:
          the figures that can be drawn, and their input.
        """
        from vit_jax.tools.figures.network import KINDS
        from vit_jax.tools.figures.view import View, read_view

        view = View()
        reasons = dict[str, str]()
        with_images = _select_with_images(names)
        if self.files is None:
            reasons = dict.fromkeys(with_images, "it needs --images=")
        elif with_images:
            view = read_view(
                model,
                self.files,
                split=self.split,
                data_dir=self.data_dir,
                num_images=self.num_images or _NUM_IMAGES,
            )
            for name, kind in KINDS.items():
                if len(view.names) < kind.least_images:
                    reasons[name] = (
                        f"it needs at least {kind.least_images} images, "
                        f"and --images={self.files} has {len(view.names)}"
                    )

        view = dataclasses.replace(
            view,
            shown=self.shown or _NUM_SHOWN,
            heads=self.heads,
        )
        return self._select(names, reasons), view

    def _select(self, names: Sequence[str], reasons: Mapping[str, str | None]) -> list[str]:
        """Return the figures without a reason against them; note the others.

        Raises:
          ValueError: the command names a figure with a reason against it.
        """
        selected = []
        for name in names:
            reason = reasons.get(name)
            if not reason:
                selected.append(name)
            elif self.what == "all":
                note(f"{name} is skipped: {reason}.")
            else:
                hint = _suggest_others(reasons)
                raise ValueError(f"{name}: {reason}.{hint}")
        return selected


def _suggest_others(reasons: Mapping[str, str | None]) -> str:
    """Return " Use A, B." with the figures without a reason against them; "" without any."""
    others = [name for name, reason in reasons.items() if not reason]
    if not others:
        return ""
    return f" Use {', '.join(others)}."


def _select_with_images(names: Sequence[str]) -> list[str]:
    """Return the figures that need images."""
    from vit_jax.tools.figures.network import KINDS

    return [name for name in names if KINDS[name].needs_images]


@verb(
    "--config=pretrain_own:ViT-Ti/16 --config.data=folder:my-images --output=figures",
    "--config=digits --config.input.cutmix_alpha=1.0 --shown=64 --output=figures",
)
class InspectData(StartedRecipe):
    """Draw images and labels of a recipe's training and evaluation, as the network receives them."""

    output: str = option(
        "FOLDER", "folder of train.png and test.png, and their numbers as .npz", REQUIRED
    )

    shown: Count = option("N", "number of images in a sheet", 32)

    def suggest_next(self) -> str:
        """Return the run of the recipe."""
        return self.suggest_run()

    def run(self) -> None:
        from vit_jax.config import validate
        from vit_jax.tools.figures.drawing import require_drawing

        output = resolve_output_folder(self.output)
        require_drawing()
        config = self.load()
        validate(config)

        from vit_jax.tools.figures.data_sheet import draw_data

        figures = draw_data(config, self.shown)
        for name, figure in figures.items():
            _write(output, name, figure)


def _write(folder: Path, name: str, figure: "Figure") -> None:
    """Write a figure and its numbers; print their files."""
    from vit_jax.storage.files import make_folder, write_atomically

    files = figure.files(folder / name)
    with make_folder(folder):
        for path, content in files.items():
            write_atomically(path, content)
            print(printable(str(path)), flush=True)


def _list_names(text: str, known: Sequence[str]) -> list[str]:
    """Return the figures of "all", or of names with commas between them."""
    if text == "all":
        return list(known)
    names = list(dict.fromkeys(text.split(",")))
    choices = known if "," in text else ("all", *known)
    for name in names:
        require_known("WHAT", name, choices)
    return names
