"""A network ready to use: called on prepared images, or run over any number of them on all local devices."""

import dataclasses
import functools
import pathlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax import pytree
from vit_jax.api.images import Images, undescribed
from vit_jax.arrays import ModelOutput, normalise
from vit_jax.config import Architecture
from vit_jax.data.images import UnreadableImage
from vit_jax.data.pipeline import open_batches
from vit_jax.data.placement import prefetch
from vit_jax.data.stream import EvaluationStream
from vit_jax.data.transforms import EvaluationTransform
from vit_jax.data.unreadable import reason_of
from vit_jax.data.workers import Parallelism, available_cores
from vit_jax.sharding import batch_sharding, build_mesh, replicated
from vit_jax.weights.description import TrainingData, describe_preparation
from vit_jax.weights.folding import OURS, Normalisation
from vit_jax.weights.load import Weights
from vit_jax.weights.report import Report
from vit_jax.weights.saving import save

BATCH_SIZE = 64
Padded = tuple[np.ndarray, list[UnreadableImage | None]]
"""A batch of images, and for each of its images before the padding the error that was met."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Model:
    """A network ready to use.

    Attributes:
      module: the Flax module, a plain pytree that `jax.jit`, `jax.grad` and optax take. Put a trained one back with
        `dataclasses.replace(model, module=...)`, and write it with `save`.
      architecture: every number of the network, and the dtype it computes in.
      class_names: in the order of the logits; "0", "1", … where the weights do not name them.
      transform: from a stored image to the network's pixels; None where the weights do not state how.
      source: where the parameters come from.
      notes: what was assumed, changed or is odd about them.
      training: the data of the run that made them; None where that is not known.
      is_multilabel: trained on images that may have several labels: the probability of each class is its own.
      normalisation: of the pixels of the library that the weights come from, which is folded into them.
      licence: of the weights, as the Hub names it; "" where it is not known.
    """

    module: nnx.Module
    architecture: Architecture
    class_names: tuple[str, ...]
    transform: EvaluationTransform | None
    source: str
    notes: tuple[str, ...] = ()
    training: TrainingData | None = None
    is_multilabel: bool = False
    normalisation: Normalisation = OURS
    licence: str = ""

    def __repr__(self) -> str:
        a = self.architecture
        return f"Model({a.name}, {a.image_size[0]}x{a.image_size[1]} pixels, {a.num_classes} classes, {self.source})"

    def save(self, destination: str | pathlib.Path, *, to: str | None = None, overwrite: bool = False) -> Report:
        """Writes the parameters with classes and preparation of images, as `load_model`, verbs and others read them.

        Args:
          destination: a folder, for a checkpoint of ours; a .npz in the released format of the family.
          to: another format, of those that `vit-jax convert` writes: "timm", "huggingface", ...
          overwrite: replace what is there.

        Returns:
          What was written, array by array, and notes.

        Raises:
          ValueError: the destination exists or does not match the format, or the format cannot hold the network.
        """
        weights = Weights(
            architecture=self.architecture,
            parameters={name: np.asarray(leaf) for name, leaf in pytree.named_leaves(self.module).items()},
            class_names=None if self.class_names == numbers_of(len(self.class_names)) else self.class_names,
            preprocessing=None if self.transform is None else describe_preparation(self.transform, self.normalisation),
            source=self.source,
            training=self.training and dataclasses.replace(self.training, is_multilabel=self.is_multilabel),
            licence=self.licence,
        )
        return save(weights, str(destination), to=to, overwrite=overwrite)

    def __call__(self, images_BHWC: Any, *, taps: str | Collection[str] = ()) -> ModelOutput:
        """Runs the network on images that are prepared, on one device; also under `jax.jit`.

        Args:
          images_BHWC: (B, H, W, 3) of the architecture's size, RGB; uint8, 0 to 255, or floating point in [-1, 1].
          taps: inner results to return: "blocks" and "attention" of a transformer, "stages" of a ResNet.

        Returns:
          Logits, features, tokens and taps as `ModelOutput` has them; logits_BK is None of a network without classes.

        Raises:
          ValueError: another shape, dtype or range (the range of what is being traced is not known), or a tap that the
            network does not have.
        """
        taps = (taps,) if isinstance(taps, str) else tuple(taps)
        return _forward(self.module, self._validated(images_BHWC), self.architecture.compute_dtype, taps)

    def preprocess(self, images: Any) -> np.ndarray:
        """Prepares images as those that the network was trained on: decodes, resizes and crops.

        Args:
          images: a path, an encoded file as bytes, or pixels as uint8 (H, W), (H, W, 1 or 3) of any size or as an image
            of Pillow; or a list of these; or an array (B, H, W, 3).

        Returns:
          uint8 (B, height, width, 3), RGB.

        Raises:
          ValueError: an image cannot be read, or the weights do not state how images are prepared.
        """
        source = Images(images)
        return _stacked(_rows(self._read(source, min(BATCH_SIZE, len(source)))), source)

    def predict(self, images: Any, *, batch_size: int = BATCH_SIZE) -> np.ndarray:
        """Class probabilities (N, K), float32; arguments and errors as for `stream`.

        They are the softmax of the logits; of a network for several labels the sigmoid of each.
        """
        source = Images(images)
        return _stacked(self.stream(source, batch_size=batch_size), source)

    def features(self, images: Any, *, batch_size: int = BATCH_SIZE) -> np.ndarray:
        """What the last layer is linear in, (N, D), float32; arguments and errors as for `stream`."""
        source = Images(images)
        return _stacked(self.stream(source, "features_BD", batch_size=batch_size), source)

    def stream(
        self, images: Any, field: str = "probabilities", *, batch_size: int = BATCH_SIZE
    ) -> Iterator[np.ndarray | UnreadableImage]:
        """Runs the network over any number of images on all devices of this process, each image once.

        Args:
          images: an array (N, H, W, 3) of prepared images, as for a call. Anything else is prepared as by `preprocess`,
            by threads that read ahead.
          field: "probabilities", or a field of `ModelOutput` whose first dimension is the batch.
          batch_size: images at a time over all devices, rounded up to a multiple of them; the last batch is padded.

        Yields:
          For each image in its order the row of the result, in float32; for one that cannot be read, why.

        Raises:
          ValueError: as a call and `preprocess`, or a field that the network does not return.
        """
        if field in ("probabilities", "logits_BK"):
            self.require_classes()
        mesh, module = self._on_local_devices

        def run(batch: Any) -> tuple[jax.Array, list[UnreadableImage | None]]:
            image_BHWC = jax.device_put(batch[0], batch_sharding(mesh))
            dtype = self.architecture.compute_dtype
            return _field(module, image_BHWC, dtype, field, self.is_multilabel), batch[1]

        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: give at least 1.")
        source = images if isinstance(images, Images) else Images(images)
        size = -(-min(batch_size, len(source)) // mesh.size) * mesh.size
        batches: Any = self._read(source, size) if source.batch is None else self._cut(source.batch, size)
        yield from _rows(prefetch(batches, run))

    def require_classes(self) -> None:
        """Raises ValueError for a network that ends in its features."""
        if self.architecture.num_classes == 0:
            raise ValueError(f"{self.source} has no classes, only features: its head was left out. Fine-tune it first.")

    def require_transform(self) -> EvaluationTransform:
        """The transform; ValueError where the weights do not state one."""
        if self.transform is None:
            raise undescribed(self.source)
        return self.transform

    @functools.cached_property
    def _on_local_devices(self) -> tuple[jax.sharding.Mesh, nnx.Module]:
        mesh = build_mesh(jax.local_devices())
        return mesh, jax.device_put(self.module, replicated(mesh))

    def _cut(self, images_NHWC: Any, size: int) -> Iterator[Padded]:
        """Batches of prepared images."""
        images_NHWC = self._validated(images_NHWC)
        for first in range(0, len(images_NHWC), size):
            part = np.asarray(images_NHWC[first : first + size])
            yield np.pad(part, ((0, size - len(part)), (0, 0), (0, 0), (0, 0))), [None] * len(part)

    def _read(self, source: Images, size: int) -> Iterator[Padded]:
        """Batches of images that are prepared here, by threads that read ahead."""
        threads = Parallelism(num_workers=0, num_threads=available_cores())
        transform = self.require_transform()
        stream = EvaluationStream(source, transform, size, np.arange(size))
        decoding = transform.max_image_megapixels, transform.value_range
        with open_batches(stream, threads) as batches:
            for batch in batches:
                rows = zip(batch.record_index.tolist(), batch.mask, strict=True)
                reasons = (None if ok else reason_of(source, i, *decoding) for i, ok in rows if i >= 0)
                yield batch.image, [None if reason is None else UnreadableImage(reason) for reason in reasons]

    def _validated(self, images_BHWC: Any) -> Any:
        images = images_BHWC if isinstance(images_BHWC, jax.Array) else np.asarray(images_BHWC)
        height, width = self.architecture.image_size
        is_float = jnp.issubdtype(images.dtype, jnp.floating)
        if images.ndim != 4 or images.shape[1:] != (height, width, 3) or not (is_float or images.dtype == np.uint8):
            raise ValueError(
                f"Images are {images.dtype} {images.shape}; give (B, {height}, {width}, 3) in uint8, 0 to 255, or in "
                "floating point in [-1, 1]. preprocess() makes this of files and of images of any size."
            )
        if is_float and images.size and not isinstance(images, jax.core.Tracer):
            low, high = float(images.min()), float(images.max())
            if not -1 <= low <= high <= 1:
                raise ValueError(f"Images in floating point reach from {low:g} to {high:g}; give [-1, 1], or uint8.")
        return images


@functools.partial(jax.jit, static_argnames=("dtype", "taps"))
def _forward(module: Any, images_BHWC: jax.Array, dtype: str, taps: tuple[str, ...] = ()) -> ModelOutput:
    scaled = normalise(images_BHWC, dtype) if images_BHWC.dtype == jnp.uint8 else images_BHWC.astype(dtype)
    return module(scaled, taps=taps) if taps else module(scaled)


def numbers_of(num_classes: int) -> tuple[str, ...]:
    """What stands for the names of classes where these are not known."""
    return tuple(map(str, range(num_classes)))


def to_probabilities(logits_BK: jax.Array, is_multilabel: bool) -> jax.Array:
    """Of the classes: they exclude each other, or each is a question of its own."""
    return jax.nn.sigmoid(logits_BK) if is_multilabel else jax.nn.softmax(logits_BK)


@functools.partial(jax.jit, static_argnames=("dtype", "field", "is_multilabel"))
def _field(module: Any, images_BHWC: jax.Array, dtype: str, field: str, is_multilabel: bool) -> jax.Array:
    output = _forward(module, images_BHWC, dtype)
    found = getattr(output, "logits_BK" if field == "probabilities" else field, None)
    if found is None:
        raise ValueError(f"This network does not return {field}: choose a field of ModelOutput that it sets.")
    return to_probabilities(found, is_multilabel) if field == "probabilities" else found.astype(jnp.float32)


def _rows(batches: Iterable[tuple[Any, list[UnreadableImage | None]]]) -> Iterator[np.ndarray | UnreadableImage]:
    for result, errors in batches:
        for row, error in zip(jax.device_get(result), errors, strict=False):  # rows of padding come last
            yield row if error is None else error


def _stacked(rows: Iterable[np.ndarray | UnreadableImage], source: Images) -> np.ndarray:
    found = []
    for number, row in enumerate(rows):
        if isinstance(row, UnreadableImage):
            raise UnreadableImage(f"{source.name_of(number)}: {row}. Use stream() to continue after such images.")
        found.append(row)
    return np.stack(found)
