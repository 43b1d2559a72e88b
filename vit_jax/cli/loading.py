"""Options of verbs that load weights: the weights, names of classes, and limits of reading."""

import dataclasses
import itertools
from typing import TYPE_CHECKING, Any

from vit_jax.cli.groups import ImageFields, WeightFields, load_model
from vit_jax.cli.options import Options, UsageError, argument, group, option
from vit_jax.config.data_kinds import find_kind, infer_data
from vit_jax.config.network_options import Views
from vit_jax.config.rules import Count, Number
from vit_jax.storage.files import expand_path

if TYPE_CHECKING:
    from vit_jax.api import Model
    from vit_jax.weights import Weights

_MOST_SEEN = 10_000  # files of a folder among which an image is looked for
_WEIGHT_SUFFIXES = (".npz", ".safetensors", ".safetensors.index.json", ".bin", ".pt", ".pth")


def read_data(text: str) -> str:
    """Return data with its kind: "folder:photos" for a folder photos; names of datasets stay."""
    data = infer_data(text)
    if data == text:
        return text

    from vit_jax.evals.splits import RELEASED

    is_name = text in (*RELEASED, "released", "all")
    return text if is_name else data


def read_datasets(text: str) -> str:
    """Return data of "DATA,…", each with its kind."""
    return ",".join(map(read_data, text.split(",")))


def require_weights_first(verb: str, checkpoint: str, data: str) -> None:
    """Raise UsageError if the word for weights names data, or the word for data weights."""
    is_data = _names_data(checkpoint)
    if is_data and _names_weights(data):
        raise UsageError(
            f"{checkpoint} {data}: the weights must be first, then the data. "
            f"Use vit-jax {verb} {_remove_folder_kind(data)} {_remove_folder_kind(checkpoint)}."
        )
    if is_data:
        raise UsageError(
            f"{checkpoint}: must be weights, and is data. Give the weights, then the data."
        )
    if _names_weights(data):
        raise UsageError(f"DATA={data}: must be data, and is weights. Give images, or KIND:PATH.")


def _names_data(word: str) -> bool:
    """Return True for data with a kind, tables, tars, and folders with images but no weights."""
    data = infer_data(word)
    kind = find_kind(data)
    if kind is None:
        return False
    if data == word or kind.prefix != "folder":
        return True
    return not _names_weights(word) and _holds_images(word)


def _holds_images(folder: str) -> bool:
    """Return True for a folder with images among its first files, at any depth."""
    from vit_jax.data.kinds.image_files import is_image

    files = itertools.islice(expand_path(folder).rglob("*"), _MOST_SEEN)
    return any(is_image(file.name) for file in files)


def _names_weights(word: str) -> bool:
    """Return True for files and folders of weights, by the names of files, and for the Hub."""
    kind = find_kind(word)
    if kind is not None and kind.prefix != "folder":  # npz:FILE is data
        return False
    path = expand_path(_remove_folder_kind(word))
    if word.startswith("hf://") and not word.startswith("hf://datasets/"):
        return True
    if not path.is_dir():
        return word.endswith(_WEIGHT_SUFFIXES)
    if (path / "checkpoints").is_dir():
        return True
    names = [file.name for file in path.iterdir()]
    return "config.json" in names or any(name.endswith(_WEIGHT_SUFFIXES) for name in names)


def _remove_folder_kind(word: str) -> str:
    """Return the path of "folder:PATH"; other words unchanged."""
    return word.removeprefix("folder:")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint(Options):
    """The weights."""

    checkpoint: str = argument(
        "CHECKPOINT",
        "a workdir, .npz, .safetensors, folder of weights or hf://owner/name",
        reads_bucket=True,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits(Options):
    """The batch, and the number of images that may be unreadable, as in training."""

    global_batch: Count = option("N", "number of images in a batch, on all devices", 128)
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
        "FILE", "file of class names, one a line; default: as in the weights"
    )

    def read_class_names(self) -> list[str] | None:
        """Return the names in the file, None without one."""
        if self.class_names is None:
            return None

        from vit_jax.weights.load import read_class_names

        try:
            return read_class_names(expand_path(self.class_names))
        except (OSError, ValueError) as error:
            raise UsageError(
                f"--class_names={self.class_names}: must be readable UTF-8 text, one name a line. "
                f"{error}."
            ) from None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading(Options):
    """Facts about weights and the preparation of their images."""

    weights: WeightFields = group(WeightFields)
    images: ImageFields = group(ImageFields)

    def load(self, checkpoint: str, **needs: Any) -> "tuple[Model, Weights]":
        """Load a model as `load_model` does."""
        return load_model(checkpoint, self.weights, self.images, **needs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Averaging(Options):
    """Views of an image over which logits are averaged."""

    views: Views | None = option("", "average logits over the 2, 4 or 8 views of an image")

    def average(self, model: "Model") -> "Model":
        """Return the model, averaged over the views if they are requested."""
        if self.views is None:
            return model
        try:
            return model.average_views(self.views)
        except ValueError as error:
            raise UsageError(f"--{error}") from None
