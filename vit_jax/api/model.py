"""A network ready to use.

It is called on prepared images, or run over any number of them on all local devices.
"""

import dataclasses
import functools
import math
import os
import pathlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import ArrayLike

from vit_jax import pytree
from vit_jax.arrays import ModelOutput, accept_earlier_name, normalise
from vit_jax.config import Architecture
from vit_jax.config.network_options import Views
from vit_jax.data.decoding.images import UnreadableImage
from vit_jax.data.kinds.image_files import read_file
from vit_jax.data.pipeline import open_batches
from vit_jax.data.placement import prefetch
from vit_jax.data.records import Source
from vit_jax.data.stream import EvaluationStream
from vit_jax.data.transforms import EvaluationTransform
from vit_jax.data.unreadable import find_reason
from vit_jax.data.workers import Parallelism, count_cores
from vit_jax.models.views import ViewAverage
from vit_jax.sharding import batch_sharding, build_mesh, replicate
from vit_jax.weights.folding import OURS, Normalisation

if TYPE_CHECKING:
    from vit_jax.data.subset import TrainingData
    from vit_jax.weights import Weights
    from vit_jax.weights.load_report import Report

BATCH_SIZE = 64


class PillowImage(Protocol):
    """The part of an image of Pillow that is read; Pillow need not be installed."""

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Pixels, as NumPy takes them."""


OneImage: TypeAlias = "str | os.PathLike[str] | bytes | np.ndarray | jax.Array | PillowImage"
"""An image: path, encoded file or pixels."""
ManyImages: TypeAlias = "OneImage | Iterable[OneImage]"
"""An image, several ones, or an array of images."""
Padded = tuple[np.ndarray, list[UnreadableImage | None]]
"""A batch of images, and the error of each image before the padding."""


class Images(Source):
    """Images as records without labels: paths, encoded files or pixels.

    Attributes:
      batch: the array (B, H, W, C), if the images are one.
    """

    class_names = ()

    def __init__(self, images: ManyImages) -> None:
        """Take one image, an array of images, or an iterable of images."""
        self.batch: Any = None
        self._images: Any = [images]
        if hasattr(images, "ndim"):
            if images.ndim == 4:
                self.batch = images
                self._images = images
        elif isinstance(images, Iterable) and not isinstance(images, (str, bytes, os.PathLike)):
            self._images = list(images)
        if not len(self._images):
            raise ValueError("The list of images is empty; give at least one.")
        self.labels = np.zeros(len(self._images), np.int32)

    def image_of(self, index: int) -> bytes | np.ndarray:
        """Return an encoded image, or pixels."""
        image = self._images[index]
        if isinstance(image, (str, os.PathLike)):
            return read_file(os.path.expanduser(os.fspath(image)))
        if isinstance(image, bytes):
            return image
        return np.asarray(image)

    def name_of(self, index: int) -> str:
        """Return the path of an image, or its number."""
        image = self._images[index]
        if isinstance(image, (str, os.PathLike)):
            return os.fspath(image)
        return f"image {index}"


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Model:
    """A network ready to use.

    Attributes:
      module: the Flax module, a plain pytree that `jax.jit`, `jax.grad` and optax take. Put a
        trained one back with `dataclasses.replace(model, module=...)`, and write it with `save`.
      architecture: every number of the network, and the dtype it computes in.
      class_names: in the order of the logits; "0", "1", … if the weights do not name them.
      transform: from a stored image to the network's pixels; None if the weights do not describe
        it.
      source: origin of the parameters.
      notes: remarks on the weights.
      training: the data of the run that made them; None if unknown.
      is_multilabel: images may have several labels: sigmoid instead of softmax.
      normalisation: normalisation of pixels in the library of the weights, folded into them.
      licence: licence of the weights in the words of the Hub; "" if unknown.
      views: views of an image over which outputs are averaged, see `average_views`; None: the image
        alone.
      finetuning_rule: rule of the recipe finetune for the family of the weights; "": for any.
    """

    module: nnx.Module
    architecture: Architecture
    class_names: tuple[str, ...]
    transform: EvaluationTransform | None
    source: str
    notes: tuple[str, ...] = ()
    training: "TrainingData | None" = None
    is_multilabel: bool = False
    normalisation: Normalisation = OURS
    licence: str = ""
    views: Views | None = None
    finetuning_rule: str = ""

    def __repr__(self) -> str:
        a = self.architecture
        height, width = a.image_size
        millions = self.num_parameters / 1e6
        return (
            f"Model({a.name}, {millions:.3g} million parameters, {height}x{width} pixels, "
            f"{a.num_classes} classes, {self.source})"
        )

    @property
    def num_parameters(self) -> int:
        """Number of parameters, with those of the head."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.module))

    def average_views(self, views: Views) -> "Model":
        """Return the model whose logits and features are means over views of each image.

        Args:
          views: "flip", the image and its mirror image; "flips", both also upside down; "rotations",
            both at four angles, for square images. Time grows with the 2, 4 or 8 views.

        Raises:
          ValueError: other views, or rotations where images are not square.
        """
        allowed = get_args(Views)
        if views not in allowed:
            raise ValueError(f"views={views!r}: must be one of {', '.join(allowed)}.")
        height, width = self.architecture.image_size
        if views == "rotations" and height != width:
            raise ValueError(
                f"views={views}: images of {self.source} must be square, and have {height}x{width} "
                "pixels. Use flips."
            )
        return dataclasses.replace(self, views=views)

    @property
    def averaging_module(self) -> nnx.Module:
        """The module, averaged over the views if there are any."""
        if self.views is None:
            return self.module
        return ViewAverage(self.module, self.views)

    def save(
        self,
        destination: str | pathlib.Path,
        *,
        to: str | None = None,
        overwrite: bool = False,
    ) -> "Report":
        """Write the parameters with classes and preparation of images.

        `load_model`, the verbs and other libraries read them.

        Args:
          destination: a folder, for a checkpoint of vit_jax; a .npz in the released format of the
            family.
          to: another format, of those that `vit-jax convert` writes: "timm", "huggingface", ...
          overwrite: replace existing files.

        Returns:
          A report of the written arrays, and notes.

        Raises:
          ValueError: the destination exists or does not match the format, or the format cannot hold
            the network.
        """
        from vit_jax.weights.saving import save

        return save(
            self._to_weights(),
            str(destination),
            to=to,
            overwrite=overwrite,
        )

    def _to_weights(self) -> "Weights":
        """Return the parameters with all metadata of a file of weights."""
        from vit_jax.weights import Weights
        from vit_jax.weights.description import describe_preparation

        parameters = {}
        for name, leaf in pytree.name_leaves(self.module).items():
            parameters[name] = np.asarray(leaf)

        preprocessing = None
        if self.transform is not None:
            preprocessing = describe_preparation(self.transform, self.normalisation)

        training = self.training
        if training is not None:
            training = dataclasses.replace(training, is_multilabel=self.is_multilabel)

        class_names = None
        if self.class_names != number_classes(len(self.class_names)):
            class_names = self.class_names

        return Weights(
            architecture=self.architecture,
            parameters=parameters,
            class_names=class_names,
            preprocessing=preprocessing,
            source=self.source,
            training=training,
            licence=self.licence,
            finetuning_rule=self.finetuning_rule,
            has_several_labels=self.is_multilabel,
        )

    @accept_earlier_name
    def __call__(
        self,
        images_BHWC: ArrayLike,
        *,
        intermediates: str | Collection[str] = (),
    ) -> ModelOutput:
        """Run the network on prepared images, on one device; also under `jax.jit`.

        Args:
          images_BHWC: (B, H, W, 3) of the architecture's size, RGB; uint8, 0 to 255, or floating
            point in [-1, 1]; of bands (B, H, W, C), normalised as `preprocess` returns them.
          intermediates: names of activations to return: "blocks" and "attention" of a transformer,
            "stages" of a ResNet.

        Returns:
          Logits, features, tokens and intermediates, see `ModelOutput`; logits_BK is None without
          classes.

        Raises:
          ValueError: another shape, dtype or range (ranges are not checked while tracing), or an
            intermediate that the network does not have.
        """
        if isinstance(intermediates, str):
            intermediates = (intermediates,)
        return _forward(
            self.averaging_module,
            self._require_prepared(images_BHWC),
            self.architecture.compute_dtype,
            tuple(intermediates),
        )

    def preprocess(self, images: ManyImages) -> np.ndarray:
        """Decode, resize and crop images as in training.

        Args:
          images: a path, an encoded file as bytes, pixels as uint8 (H, W) or (H, W, 1 or 3) of any
            size, or an image of Pillow; or a list of these; or an array (B, H, W, 3). Where the
            weights take bands, pixels are any numbers (H, W, bands).

        Returns:
          uint8 (B, height, width, 3), RGB; or normalised bands, float32 (B, height, width, C).

        Raises:
          ValueError: an image is unreadable, or the weights do not describe the preparation of
            images.
        """
        source = Images(images)
        batches = self._read_batches(source, min(BATCH_SIZE, len(source)))
        return _stack(_iterate_rows(batches), source)

    def predict(self, images: ManyImages, *, batch_size: int = BATCH_SIZE) -> np.ndarray:
        """Return class probabilities (N, K), float32; arguments and errors as for `stream`.

        They are the softmax of the logits, or the sigmoid if images may have several labels.
        """
        source = Images(images)
        return _stack(self.stream(source, batch_size=batch_size), source)

    def features(self, images: ManyImages, *, batch_size: int = BATCH_SIZE) -> np.ndarray:
        """Return the input of the last linear layer, (N, D), float32.

        Arguments and errors are as for `stream`.
        """
        source = Images(images)
        rows = self.stream(source, "features_BD", batch_size=batch_size)
        return _stack(rows, source)

    def stream(
        self,
        images: "ManyImages | Source",
        field: str = "probabilities",
        *,
        batch_size: int = BATCH_SIZE,
    ) -> Iterator[np.ndarray | UnreadableImage]:
        """Run the network over any number of images on all devices of this process.

        Each image is used once.

        Args:
          images: an array (N, H, W, 3) of prepared images, as for a call; other images are prepared
            as by `preprocess`, by threads that read ahead.
          field: "probabilities", or a field of `ModelOutput` whose first dimension is the batch.
          batch_size: images at a time over all devices, rounded up to a multiple of them; the last
            batch is padded.

        Yields:
          The row of the result of each image in its order, in float32; the error of an unreadable
          image.

        Raises:
          ValueError: the errors of a call and of `preprocess`, or a field that the network does not
            return.
        """
        if field in ("probabilities", "logits_BK"):
            self.require_classes()
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: give at least 1.")

        mesh, module = self._on_local_devices

        def run(batch: Padded) -> tuple[jax.Array, list[UnreadableImage | None]]:
            images_BHWC, errors = batch
            image_BHWC = jax.device_put(images_BHWC, batch_sharding(mesh))
            result = _compute_field(
                module,
                image_BHWC,
                self.architecture.compute_dtype,
                field,
                self.is_multilabel,
            )
            return result, errors

        source = images if isinstance(images, Source) else Images(images)
        num_images = min(batch_size, len(source))
        images_per_device = math.ceil(num_images / mesh.size)
        batches = self._make_batches(source, images_per_device * mesh.size)
        yield from _iterate_rows(prefetch(batches, run))

    def require_classes(self) -> None:
        """Raise ValueError for a network without classes."""
        if self.architecture.num_classes == 0:
            raise ValueError(
                f"{self.source} has no classes, only features: its head was removed. "
                "Fine-tune it first."
            )

    def require_transform(self) -> EvaluationTransform:
        """Return the transform; raise ValueError if the weights do not describe one."""
        if self.transform is None:
            raise make_preparation_error(self.source)
        return self.transform

    @functools.cached_property
    def _on_local_devices(self) -> tuple[jax.sharding.Mesh, nnx.Module]:
        """The mesh of the devices of this process, and the module on all of them."""
        mesh = build_mesh(jax.local_devices())
        return mesh, jax.device_put(self.averaging_module, replicate(mesh))

    def _make_batches(self, source: Source, size: int) -> Iterator[Padded]:
        """Return batches of images; those of an array are prepared already."""
        if isinstance(source, Images) and source.batch is not None:
            return self._split_batches(source.batch, size)
        return self._read_batches(source, size)

    def _split_batches(self, images_NHWC: ArrayLike, size: int) -> Iterator[Padded]:
        """Yield batches of prepared images."""
        images_NHWC = self._require_prepared(images_NHWC)
        for first in range(0, len(images_NHWC), size):
            image_BHWC = np.asarray(images_NHWC[first : first + size])
            num_images = len(image_BHWC)
            padding = ((0, size - num_images), (0, 0), (0, 0), (0, 0))
            yield np.pad(image_BHWC, padding), [None] * num_images

    def _read_batches(self, source: Source, size: int) -> Iterator[Padded]:
        """Yield batches of images that threads prepare ahead."""
        threads = Parallelism(num_workers=0, num_threads=count_cores())
        transform = self.require_transform()
        stream = EvaluationStream(source, transform, size, np.arange(size))

        def find_error(index: int, is_read: bool) -> UnreadableImage | None:
            if is_read:
                return None
            megapixels = transform.max_image_megapixels
            values = transform.value_range
            reason = find_reason(source, index, megapixels, values, transform.bands)
            if reason is None:
                return None
            return UnreadableImage(reason)

        with open_batches(stream, threads) as batches:
            for batch in batches:
                errors = []
                for index, is_read in zip(batch.record_index.tolist(), batch.mask, strict=True):
                    if index >= 0:  # not padding
                        errors.append(find_error(index, is_read))
                yield batch.image, errors

    def _require_prepared(self, images_BHWC: ArrayLike) -> jax.Array | np.ndarray:
        """Return images as an array; ValueError for another shape, dtype or range."""
        images = images_BHWC
        if not isinstance(images, jax.Array):
            images = np.asarray(images)

        height, width = self.architecture.image_size
        channels = self.architecture.channels
        bands = None if self.transform is None else self.transform.bands
        has_shape = images.ndim == 4 and images.shape[1:] == (height, width, channels)
        is_float = jnp.issubdtype(images.dtype, jnp.floating)
        has_dtype = is_float or images.dtype == np.uint8
        numbers = "uint8, 0 to 255, or in floating point in [-1, 1]"
        if bands is not None and not bands.scales_8_bits:
            has_dtype = is_float
            numbers = "floating point, normalised by channel"
        if not (has_shape and has_dtype):
            raise ValueError(
                f"Images are {images.dtype} {images.shape}; give (B, {height}, {width}, "
                f"{channels}) in {numbers}. preprocess() makes this of files and of images of any "
                "size."
            )
        is_known = not isinstance(images, jax.core.Tracer)
        if is_known and is_float and bands is None and images.size:
            _require_range(images)
        return images


def _require_range(images: jax.Array | np.ndarray) -> None:
    """Raise ValueError for images in floating point beyond [-1, 1]."""
    low = float(images.min())
    high = float(images.max())
    if not -1 <= low <= high <= 1:
        raise ValueError(
            f"Images in floating point reach from {low:g} to {high:g}; give [-1, 1], or uint8."
        )


@functools.partial(jax.jit, static_argnames=("dtype", "intermediates"))
def _forward(
    module: Callable[..., ModelOutput],
    images_BHWC: jax.Array,
    dtype: str,
    intermediates: tuple[str, ...] = (),
) -> ModelOutput:
    """Return the output for prepared images. A custom network need not know intermediates."""
    if images_BHWC.dtype == jnp.uint8:
        scaled = normalise(images_BHWC, dtype)
    else:
        scaled = images_BHWC.astype(dtype)

    if not intermediates:
        return module(scaled)
    return module(scaled, intermediates=intermediates)


def number_classes(num_classes: int) -> tuple[str, ...]:
    """Return the names of unnamed classes, which are their numbers."""
    return tuple(map(str, range(num_classes)))


def to_probabilities(logits_BK: jax.Array, is_multilabel: bool) -> jax.Array:
    """Return the softmax of the logits, or the sigmoid if images may have several labels."""
    if is_multilabel:
        return jax.nn.sigmoid(logits_BK)
    return jax.nn.softmax(logits_BK)


@functools.partial(jax.jit, static_argnames=("dtype", "field", "is_multilabel"))
def _compute_field(
    module: Callable[..., ModelOutput],
    images_BHWC: jax.Array,
    dtype: str,
    field: str,
    is_multilabel: bool,
) -> jax.Array:
    """Return a field of the output in float32, or the probabilities."""
    output = _forward(module, images_BHWC, dtype)
    is_probability = field == "probabilities"
    name = "logits_BK" if is_probability else field
    value = getattr(output, name, None)
    if value is None:
        raise ValueError(
            f"This network does not return {field}: choose a field of ModelOutput that it sets."
        )
    if is_probability:
        return to_probabilities(value, is_multilabel)
    return value.astype(jnp.float32)


def _iterate_rows(
    batches: Iterable[tuple[Any, list[UnreadableImage | None]]],
) -> Iterator[np.ndarray | UnreadableImage]:
    """Yield the result of each image, or its error.

    Rows of padding come last in a batch, without an error.
    """
    for result, errors in batches:
        result = jax.device_get(result)
        for row, error in zip(result, errors, strict=False):
            if error is None:
                yield row
            else:
                yield error


def _stack(rows: Iterable[np.ndarray | UnreadableImage], source: Images) -> np.ndarray:
    """Return the results of all images; raise the first error."""
    stacked = []
    for number, row in enumerate(rows):
        if isinstance(row, UnreadableImage):
            raise UnreadableImage(
                f"{source.name_of(number)}: {row}. Use stream() to continue after such images."
            )
        stacked.append(row)
    return np.stack(stacked)


def make_preparation_error(source: str) -> ValueError:
    """Return the error for weights that do not describe the preparation of images."""
    return ValueError(
        f"{source} does not state how images are prepared: add --images.resize=direct (both sides "
        'to the network\'s size; in Python resize="direct") or --images.resize=short_side '
        "--images.crop_fraction=0.875 (the middle of the image)."
    )
