"""Frozen features: one vector for each image, from any layer, computed on all devices.

A cache keeps them on disk. They depend on the parameters, the network, the layer, the preparation
of images, and the records. They are computed again if one of these changes.

Legend: B global batch, N images, D size of a feature, S tokens, P tokens before those of patches.
"""

import dataclasses
import hashlib
import json
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Generic

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import hosts
from vit_jax.arrays import Batch, ModelOutput, normalise
from vit_jax.config import Architecture
from vit_jax.data.records import Source, few
from vit_jax.data.transforms import EvaluationTransform
from vit_jax.data.unreadable import count_allowed
from vit_jax.evals.feature_cache import Cache, Entry, write_rows
from vit_jax.evals.runner import Module, Runner, require_finite
from vit_jax.evals.step_results import Evaluated, OpenBatches, Results, Rows, iterate_rows
from vit_jax.pytree import parameters_sha256
from vit_jax.storage.files import open_atomically
from vit_jax.text.progress_bar import ProgressBar, open_progress

LAYERS = {
    "pre_logits": "the input of the last linear layer, after the head's hidden layer if there is "
    "one",
    "pooled": "the image's representation before the head",
    "token": "the class token after the last norm; of several all, side by side",
    "mean": "the mean of the patch tokens after the last norm, or of a ResNet's last map",
    "token_mean": "the class token and the mean of the patch tokens, side by side, after the "
    "last norm",
    "block:N": "the class token after block N, or the mean of the tokens where there is none",
    "stage:N": "the mean of the map after stage N of a ResNet or of a hybrid's",
}
FORM = 2  # form of the files in the cache; files of another form are never read
_FEATURE = "feature.npy"
_IS_READ = "is_read.npy"
_HASH = "hash.npy"
_FILES = (_FEATURE, _IS_READ, _HASH)
_HASH_KEYS = (0x9E3779B9, 0x85EBCA6B)
_INTERMEDIATES = {
    "block": {"intermediates": ("blocks",)},
    "stage": {"intermediates": ("stages",)},
}
"""Arguments of a network that make it return the intermediates of a kind of layer."""


@dataclasses.dataclass(frozen=True)
class Features:
    """The features of a split in the order of its records.

    Attributes:
      feature_ND: float32, in memory or mapped from a file; zeros for unreadable images.
      label_N: int32; (N, K), 0 or 1, for images that may have several labels.
      is_read_N: bool; False for unreadable images.
      hash_N: uint64 of the prepared pixels: equal images have equal hashes.
    """

    feature_ND: np.ndarray
    label_N: np.ndarray
    is_read_N: np.ndarray
    hash_N: np.ndarray

    def __len__(self) -> int:
        return len(self.label_N)

    def take(self, indices: np.ndarray) -> "Features":
        """Return some of the images, in memory."""
        return Features(
            feature_ND=np.asarray(self.feature_ND[indices]),
            label_N=np.asarray(self.label_N[indices]),
            is_read_N=np.asarray(self.is_read_N[indices]),
            hash_N=np.asarray(self.hash_N[indices]),
        )

    def readable(self) -> "Features":
        """Return the readable images; the same object if all are."""
        if self.is_read_N.all():
            return self
        return self.take(np.flatnonzero(self.is_read_N))


MeasureFeatures = Callable[[Features, Features], Iterator[tuple[str, float]]]
"""Yields names and values of metrics, from the features of the training and the test images."""


@dataclasses.dataclass(frozen=True)
class FrozenEvaluator(Generic[Evaluated]):
    """Measures frozen features of a training state.

    Attributes:
      extract: returns the features of the training and the test images for a state.
      measure: yields the metrics of these features.
    """

    extract: Callable[[Evaluated], tuple[Features, Features]]
    measure: MeasureFeatures

    def run(self, state: Evaluated) -> Iterator[tuple[str, float]]:
        """Yield names and values of the metrics."""
        return self.measure(*self.extract(state))


def select_readable(train: Features, test: Features) -> tuple[Features, Features]:
    """Return the readable images of both sides.

    Raises:
      ValueError: a side has none.
    """
    train = train.readable()
    test = test.readable()
    if not len(train) or not len(test):
        raise ValueError(
            "Classifiers of features need readable training and test images; one side has none."
        )
    return train, test


def make_feature_step(layer: str, a: Architecture) -> Callable[[Module, Batch], Results]:
    """Return (module, batch) -> "feature_BD" in float32, "hash_B2" in uint32, "mask_B".

    Raises:
      ValueError: a layer that is not one of `LAYERS`, or that this network does not have.
    """
    kind, number = _parse_layer(layer, a)
    options = _INTERMEDIATES.get(kind, {})

    def step(module: Module, batch: Batch) -> Results:
        image_BHWC = normalise(batch.image_BHWC, a.compute_dtype)
        output = module(image_BHWC, **options)
        feature_BD = _select_feature(output, kind, number, a)
        if feature_BD is None:
            raise ValueError(f"layer={layer!r}: this network does not return it.")

        feature_BD = feature_BD.astype(jnp.float32)
        return {
            "feature_BD": feature_BD * batch.mask_B[:, None],
            "hash_B2": _compute_pixel_hashes(batch.image_BHWC),
            "mask_B": batch.mask_B,
        }

    return step


def _select_feature(
    output: ModelOutput,
    kind: str,
    number: int,
    a: Architecture,
) -> jax.Array | None:
    """Return the feature of a layer, (B, D); None if the network does not return it.

    `kind` and `number` are parts of the name of the layer, such as "block" and 3.
    """
    if kind == "pre_logits":
        feature_BD = output.features_BD
    elif kind == "token":
        feature_BD = _select_tokens(output, a)
    elif kind == "pooled" or (kind == "mean" and not a.has_transformer):
        feature_BD = output.pooled_BD
    elif kind == "mean":
        feature_BD = _average_patches(output)
    elif kind == "token_mean":
        token_BD = _select_tokens(output, a).astype(jnp.float32)
        mean_BD = _average_patches(output)
        feature_BD = jnp.concatenate([token_BD, mean_BD], axis=-1)
    elif kind == "stage":
        map_BHWC = output.stages_BHWC[number - 1].astype(jnp.float32)
        feature_BD = map_BHWC.mean(axis=(1, 2))
    else:
        block_BSD = output.blocks_LBSD[number - 1].astype(jnp.float32)
        feature_BD = _select_block(block_BSD, a)
    return feature_BD


def _select_tokens(output: ModelOutput, a: Architecture) -> jax.Array:
    """Return the class tokens after the last norm, side by side, (B, D)."""
    token_BPD = output.prefix_BPD[:, : a.num_class_tokens]
    return token_BPD.reshape(len(token_BPD), -1)


def _average_patches(output: ModelOutput) -> jax.Array:
    """Return the mean of the patch tokens after the last norm, (B, D) float32."""
    token_BND = output.tokens_BND.astype(jnp.float32)
    return token_BND.mean(axis=1)


def _select_block(block_BSD: jax.Array, a: Architecture) -> jax.Array:
    """Return the class token after a block, or the mean of the patch tokens without one."""
    if a.num_class_tokens:
        return block_BSD[:, 0]
    return block_BSD[:, a.prefix_length :].mean(axis=1)


def collect(
    open_batches: OpenBatches,
    step: Callable[[Evaluated, Batch], Results],
    evaluated: Evaluated,
    label_N: np.ndarray,
) -> Features:
    """Return the features of a split with these labels, in memory.

    Other arguments and errors are as for `iterate_rows`.

    Raises:
      ValueError: features that are not finite.
    """
    feature_batches = []
    mask_batches = []
    hash_batches = []
    for rows in iterate_rows(open_batches, step, evaluated, len(label_N)):
        _require_finite_features(rows)
        feature_batches.append(rows["feature_BD"])
        mask_batches.append(rows["mask_B"])
        hash_batches.append(rows["hash_B2"])

    return Features(
        feature_ND=np.concatenate(feature_batches),
        label_N=label_N,
        is_read_N=np.concatenate(mask_batches) > 0,
        hash_N=join_hash_words(np.concatenate(hash_batches)),
    )


def _require_finite_features(rows: Rows) -> None:
    """Raise ValueError if features are not finite."""

    def name_image(row: int) -> str:
        return f"image {rows['record_B'][row]}"

    require_finite(rows["feature_BD"], "features", name_image)


class Extractor:
    """Computes features of a network, or reads them from the cache."""

    def __init__(
        self,
        *,
        module: Module,
        architecture: Architecture,
        transform: EvaluationTransform,
        layer: str,
        global_batch: int,
        max_unreadable: int | None,
        cache: Cache | None,
    ):
        """Compile nothing yet. `layer` is one of `LAYERS`; other arguments are as for `Runner`."""
        self.transform = transform
        self._architecture = architecture
        self._layer = layer
        self._cache = cache
        self._runner = Runner(
            module,
            transform,
            global_batch=global_batch,
            max_unreadable=max_unreadable,
        )
        step = make_feature_step(layer, architecture)
        self._step = self._runner.jit(step)
        self._parameters_sha256 = ""
        if cache is not None:
            self._parameters_sha256 = parameters_sha256(module)

    def extract(self, source: Source) -> Features:
        """Return the features of every image of a source, in every process.

        Raises:
          ValueError: more images than `max_unreadable` are unreadable, features are not finite, or
            the cache cannot be written.
        """
        about = self._describe(source)
        if self._cache is None or about is None:
            return self._extract_uncached(source)

        digest = hashlib.sha256(about.encode()).hexdigest()
        entry = Entry(
            folder=self._cache.folder / digest[:32],
            about=about,
            files=_FILES,
            num_rows=len(source),
            cache=self._cache,
        )
        arrays = self._find(entry)
        if not all(hosts.gather(arrays is not None)):  # computing takes all processes
            with entry.new_folder() as unfinished:
                self._compute(source, entry, unfinished)
                arrays = entry.read(unfinished)  # another process may publish them

        assert arrays is not None
        return _build_features(arrays, source)

    def _extract_uncached(self, source: Source) -> Features:
        with tempfile.TemporaryDirectory(prefix="vit_jax_features_") as scratch:
            folder = pathlib.Path(scratch)
            entry = Entry(
                folder=folder,
                about="null",
                files=_FILES,
                num_rows=len(source),
            )
            self._compute(source, entry, folder)
            return _build_features(entry.read(folder), source)

    def _find(self, entry: Entry) -> dict[str, np.ndarray] | None:
        """Return cached arrays; None if there are none, or more unreadable images than allowed.

        Arrays may be kept under a higher limit. The images are then read again, to name them.
        """
        arrays = entry.find()
        if arrays is None:
            return None

        most = count_allowed(entry.num_rows, self._runner.max_unreadable)
        num_unreadable = (~arrays[_IS_READ]).sum()
        if num_unreadable > most:
            return None
        return arrays

    def _compute(
        self,
        source: Source,
        entry: Entry,
        folder: pathlib.Path,
    ) -> None:
        """Write the array files and their record into a folder."""
        num_images = len(source)
        is_read_N = np.zeros(num_images, bool)
        hash_N = np.zeros(num_images, np.uint64)
        progress = _open_progress(num_images)

        def yield_features() -> Iterator[np.ndarray]:
            for rows in self._runner.compute_rows(
                source,
                self._step,
                shortens_batch=True,
            ):
                _require_finite_features(rows)
                record_B = rows["record_B"]
                yield rows["feature_BD"]
                is_read_N[record_B] = rows["mask_B"] > 0
                hash_N[record_B] = join_hash_words(rows["hash_B2"])
                progress.update(len(record_B))

        with progress:
            feature_record = write_rows(
                folder / _FEATURE,
                yield_features(),
                num_images,
            )
        arrays = {
            _FEATURE: feature_record,
            _IS_READ: write_rows(folder / _IS_READ, [is_read_N], num_images),
            _HASH: write_rows(folder / _HASH, [hash_N], num_images),
        }
        entry.write_record(folder, arrays)

    def _describe(self, source: Source) -> str | None:
        """Return all facts that determine the features, as JSON; None if they are unknown.

        Also return None without a cache.
        """
        a = self._architecture
        origin = source.origin
        if self._cache is None or origin is None or not a.is_standard:
            return None  # the code of a custom source or block may change
        about = {
            "form": FORM,
            "parameters_sha256": self._parameters_sha256,
            "architecture": dataclasses.asdict(a),
            "layer": self._layer,
            "transform": dataclasses.asdict(self.transform),
            "origin": origin,
            "records": source.records_sha256,
            "platform": jax.default_backend(),
        }
        return json.dumps(about, sort_keys=True)


def _open_progress(num_images: int) -> ProgressBar:
    """Announce the images in the first process, and return their progress, shown there."""
    is_first = hosts.is_first()
    if is_first:
        print(f"computing features of {num_images:,} images", file=sys.stderr, flush=True)
    return open_progress("features", num_images, is_shown=is_first)


def _build_features(arrays: Mapping[str, np.ndarray], source: Source) -> Features:
    return Features(
        feature_ND=arrays[_FEATURE],
        label_N=np.asarray(source.labels, np.int32),
        is_read_N=np.asarray(arrays[_IS_READ]),
        hash_N=np.asarray(arrays[_HASH]),
    )


def write_features(
    path: pathlib.Path,
    features: Features,
    source: Source,
) -> dict[str, str]:
    """Write, in the first process, the features of the readable images; return a summary by name.

    The file holds "features" (N, D) float32, "labels" int32 (N,), or (N, K) if images may have
    several, "names" (N,) of the records, "class_names".
    """
    kept = np.flatnonzero(features.is_read_N)
    if hosts.is_first():
        names = [source.name_of(index) for index in kept.tolist()]
        arrays = {
            "features": features.feature_ND[kept],
            "labels": features.label_N[kept],
            "names": np.array(names),
            "class_names": np.array(source.class_names),
        }
        with open_atomically(path) as file:
            np.savez(file, allow_pickle=True, **arrays)

    width = features.feature_ND.shape[1]
    num_unreadable = len(features) - len(kept)
    return {
        "features": f"{len(kept):,} x {width:,} float32",
        "left out": f"{num_unreadable:,} unreadable",
        "file": str(path),
    }


def iterate_chunks(feature_ND: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Yield features in memory, `size` examples at a time; views of an array in memory."""
    for first in range(0, len(feature_ND), size):
        yield np.asarray(feature_ND[first : first + size])


def join_hash_words(hash_B2: np.ndarray) -> np.ndarray:
    """Join two words of 32 bits to one word of 64 bits, (B,)."""
    wide = hash_B2.astype(np.uint64)
    return (wide[:, 0] << np.uint64(32)) | wide[:, 1]


def list_notes(
    name: str,
    class_names: Sequence[str],
    train: Features,
    test: Features,
) -> list[str]:
    """Return remarks on the data `name`: unreadable and common images, missing classes."""
    notes = []
    for side, images in (("training", train), ("test", test)):
        missing = int((~images.is_read_N).sum())
        if missing:
            notes.append(f"{name}: {missing:,} {side} image(s) cannot be read and are skipped.")

    same = count_common_images(train, test)
    if same:
        notes.append(
            f"{name}: {same:,} of {len(test):,} test images are among the training images too."
        )

    label_N = train.label_N[train.is_read_N]
    num_images_K = count_by_class(label_N, len(class_names))
    missing_classes = np.flatnonzero(num_images_K == 0)
    absent = [class_names[k] for k in missing_classes.tolist()]
    if absent:
        notes.append(
            f"{name}: no training image of {few(absent)}; their test images count as wrong."
        )
    return notes


def count_by_class(labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Return the number of images of each class.

    Labels are (N,), or 0 and 1 for each class, (N, K).
    """
    if labels.ndim == 2:
        return np.asarray(labels.sum(axis=0))
    return np.bincount(labels, minlength=num_classes)


def count_common_images(train: Features, test: Features) -> int:
    """Return the number of readable test images with the pixels of a readable training image."""
    train_hashes = train.hash_N[train.is_read_N]
    test_hashes = test.hash_N[test.is_read_N]
    is_in_both = np.isin(test_hashes, np.unique(train_hashes))
    return int(is_in_both.sum())


def _compute_pixel_hashes(image_BHWC: jax.Array) -> jax.Array:
    """Return two sums, modulo 2**32, of pixels times odd numbers, (B, 2) uint32.

    The odd numbers depend on the position of the pixel. Of normalised bands the bits count.
    """
    pixels_BP = image_BHWC.reshape(len(image_BHWC), -1)
    if pixels_BP.dtype == jnp.float32:
        pixels_BP = jax.lax.bitcast_convert_type(pixels_BP, jnp.uint32)
    pixels_BP = pixels_BP.astype(jnp.uint32)
    position_P = jax.lax.iota(jnp.uint32, pixels_BP.shape[1])
    one = np.uint32(1)

    def compute_word(key: int) -> jax.Array:
        mixed_P = (position_P + one) * np.uint32(key)
        mixed_P = mixed_P ^ (mixed_P >> np.uint32(15))
        mixed_P = mixed_P * np.uint32(0xC2B2AE35)
        products_BP = (pixels_BP + one) * (mixed_P | one)
        return jnp.sum(products_BP, axis=1, dtype=jnp.uint32)

    words = [compute_word(key) for key in _HASH_KEYS]
    return jnp.stack(words, axis=1)


def _parse_layer(layer: str, a: Architecture) -> tuple[str, int]:
    """Return the kind of a layer and its number, 0 without one.

    Raises:
      ValueError: the network does not have the layer.
    """
    has_token = a.has_transformer and a.num_class_tokens and a.network is None
    counts = {}
    if a.has_transformer:
        counts["block"] = a.depth
    if a.has_resnet:
        counts["stage"] = len(a.units)

    names = ["pre_logits", "pooled", "mean"]
    if has_token:
        names = ["pre_logits", "pooled", "token", "mean", "token_mean"]
    if layer in names:
        return layer, 0

    kind, _, number = layer.partition(":")
    if number.isdecimal() and 1 <= int(number) <= counts.get(kind, 0):
        return kind, int(number)

    for numbered, count in counts.items():
        if count:
            names.append(f"{numbered}:1 to {numbered}:{count}")
    raise ValueError(f"layer={layer!r}: must be one of {', '.join(names)} for {a.name}.")
