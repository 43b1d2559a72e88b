"""Options of verbs that load weights: the weights, names of classes, and limits of reading."""

import dataclasses
from typing import TYPE_CHECKING, Any

from vit_jax.cli.groups import ImageFields, WeightFields, load_model
from vit_jax.cli.options import Options, UsageError, argument, group, option
from vit_jax.config.rules import Count, Number
from vit_jax.storage.files import expand_path

if TYPE_CHECKING:
    from vit_jax.api import Model
    from vit_jax.weights import Weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint(Options):
    """The weights."""

    checkpoint: str = argument(
        "CHECKPOINT",
        "weights: a workdir, .npz, .safetensors, a folder with weights, or hf://owner/name",
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
