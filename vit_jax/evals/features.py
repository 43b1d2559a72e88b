"""Frozen features of a split: one vector for each image, from any layer of the network.

Legend: B global batch, N images, D numbers of a feature, S tokens.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.arrays import Batch, ModelOutput, normalise
from vit_jax.config import Architecture
from vit_jax.data.records import few
from vit_jax.evals.sums import OpenBatches, Results, results_of

LAYERS = {
    "pre_logits": "the input of the last linear layer, after the head's hidden layer if there is one",
    "pooled": "the image's representation before the head",
    "token": "the class token after the last norm; of several all, side by side",
    "mean": "the mean of the patch tokens after the last norm, or of a ResNet's last map",
    "token_mean": "the class token and the mean of the patch tokens, side by side, after the last norm",
    "block:N": "the class token after block N, or the mean of the tokens where there is none",
    "stage:N": "the mean of the map after stage N of a ResNet or of a hybrid's",
}
_HASH_KEYS = (0x9E3779B9, 0x85EBCA6B)


@dataclasses.dataclass(frozen=True)
class Features:
    """The features of a split in the order of its records.

    Attributes:
      feature_ND: float32, in memory or mapped from a file; zeros where an image could not be read.
      label_N: int32.
      is_read_N: bool, whether the image could be read.
      hash_N: uint64 of the prepared pixels: equal images have equal hashes.
    """

    feature_ND: np.ndarray
    label_N: np.ndarray
    is_read_N: np.ndarray
    hash_N: np.ndarray

    def __len__(self) -> int:
        return len(self.label_N)

    def take(self, indices: np.ndarray) -> "Features":
        """Some of the images, in memory."""
        return Features(*(np.asarray(getattr(self, field.name)[indices]) for field in dataclasses.fields(self)))

    def readable(self) -> "Features":
        """Without the images that could not be read; the same object where all could."""
        return self if self.is_read_N.all() else self.take(np.flatnonzero(self.is_read_N))


def make_feature_step(layer: str, a: Architecture) -> Callable[[Any, Batch], Results]:
    """Returns (module, batch) -> "feature_BD" in float32, "hash_B2" in uint32, "mask_B" of the batch.

    Args:
      layer: one of `LAYERS`, with a number in the place of N.
      a: of the network.

    Raises:
      ValueError: no such layer, or this network does not have it.
    """
    kind, number = _parse(layer)
    _validate(layer, kind, number, a)
    taps = {"block": ("blocks",), "stage": ("stages",)}.get(kind, ())
    has_token = a.has_transformer and a.num_class_tokens > 0

    def feature(output: ModelOutput, kind: str = kind) -> jax.Array:
        if kind == "token_mean":
            return jnp.concatenate([feature(output, part).astype(jnp.float32) for part in ("token", "mean")], axis=-1)
        if kind == "pre_logits":
            return output.features_BD
        if kind == "token":
            return output.prefix_BPD[:, : a.num_class_tokens].reshape(len(output.prefix_BPD), -1)
        if kind == "pooled" or (kind == "mean" and not a.has_transformer):
            return output.pooled_BD
        if kind == "mean":
            return output.tokens_BND.astype(jnp.float32).mean(axis=1)
        if kind == "stage":
            return output.stages_BHWC[number - 1].astype(jnp.float32).mean(axis=(1, 2))
        block_BSD = output.blocks_LBSD[number - 1].astype(jnp.float32)
        return (
            block_BSD[:, 0] if has_token else block_BSD[:, a.prefix_length if a.has_transformer else 0 :].mean(axis=1)
        )

    def step(module: Any, batch: Batch) -> Results:
        image_BHWC = normalise(batch.image_BHWC, a.compute_dtype)
        output = module(image_BHWC, taps=taps) if taps else module(image_BHWC)
        found = feature(output)
        if found is None:
            raise ValueError(f"This network does not return what layer={layer!r} is made of.")
        return {
            "feature_BD": found.astype(jnp.float32) * batch.mask_B[:, None],
            "hash_B2": _pixel_hashes(batch.image_BHWC),
            "mask_B": batch.mask_B,
        }

    return step


def feature_rows(
    open_batches: OpenBatches, step: Callable[[Any, Batch], Results], evaluated: Any, num_images: int
) -> Iterator[tuple[slice, dict[str, np.ndarray]]]:
    """The images of one batch after another: which of the split's, and what the step gave for them without padding.

    Raises:
      ValueError: features that are not finite.
      RuntimeError: batches of fewer images than the split has.
    """
    first = 0
    for results in results_of(open_batches, step, evaluated):
        last = min(first + len(results["mask_B"]), num_images)
        rows = {name: value[: last - first] for name, value in results.items()}
        if bad := int((~np.isfinite(rows["feature_BD"]).all(axis=1)).sum()):
            raise ValueError(
                f"The features of {bad} of the images {first} to {last - 1} are not finite (NaN or infinite): the "
                "parameters are damaged, or too large for the dtype. Try --compute_dtype=float32, or other weights."
            )
        yield slice(first, last), rows
        first = last
    if first < num_images:
        raise RuntimeError(f"The batches of a split held {first:,} of its {num_images:,} images.")


def collect(
    open_batches: OpenBatches, step: Callable[[Any, Batch], Results], evaluated: Any, label_N: np.ndarray
) -> Features:
    """The features of a split, in memory; arguments and errors as for `feature_rows`."""
    rows = [part for _, part in feature_rows(open_batches, step, evaluated, len(label_N))]
    joined = {name: np.concatenate([part[name] for part in rows]) for name in rows[0]}
    return Features(joined["feature_BD"], label_N, joined["mask_B"] > 0, hashes(joined["hash_B2"]))


def parts_of(feature_ND: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Features in memory, so many examples at a time."""
    return (np.asarray(feature_ND[first : first + size]) for first in range(0, len(feature_ND), size))


def hashes(hash_B2: np.ndarray) -> np.ndarray:
    """Two words of 32 bits as one of 64, (B,)."""
    wide = hash_B2.astype(np.uint64)
    return (wide[:, 0] << np.uint64(32)) | wide[:, 1]


def notes_on(name: str, class_names: Sequence[str], support: Features, test: Features) -> list[str]:
    """What readers of a result should know about the data `name` that it was learnt from and tested on."""
    notes = []
    for side, found in (("training", support), ("test", test)):
        if missing := int((~found.is_read_N).sum()):
            notes.append(f"{name}: {missing:,} {side} image(s) cannot be read and are left out.")
    if same := num_in_both(support, test):
        notes.append(f"{name}: {same:,} of {len(test):,} test images are among the training images too.")
    sizes = np.bincount(support.label_N[support.is_read_N], minlength=len(class_names))
    if absent := [class_names[k] for k in np.flatnonzero(sizes == 0).tolist()]:
        notes.append(f"{name}: no training image of {few(absent)}; their test images count as wrong.")
    return notes


def num_in_both(support: Features, test: Features) -> int:
    """How many readable images of `test` have the pixels of a readable image of `support`."""
    known = np.unique(support.hash_N[support.is_read_N])
    return int(np.isin(test.hash_N[test.is_read_N], known).sum())


def _pixel_hashes(image_BHWC: jax.Array) -> jax.Array:
    """(B, 2) uint32: two sums, modulo 2**32, of the pixels times odd numbers that depend on their place."""
    pixels_BP = image_BHWC.reshape(len(image_BHWC), -1).astype(jnp.uint32)
    place_P = jax.lax.iota(jnp.uint32, pixels_BP.shape[1])

    def word(key: int) -> jax.Array:
        mixed = (place_P + np.uint32(1)) * np.uint32(key)
        mixed = (mixed ^ (mixed >> np.uint32(15))) * np.uint32(0xC2B2AE35)
        return jnp.sum((pixels_BP + np.uint32(1)) * (mixed | np.uint32(1)), axis=1, dtype=jnp.uint32)

    return jnp.stack([word(key) for key in _HASH_KEYS], axis=1)


def _parse(layer: str) -> tuple[str, int]:
    match = re.fullmatch(r"(pre_logits|pooled|token|mean|token_mean)|(block|stage):([1-9][0-9]{0,3})", layer)
    if match is None:
        raise ValueError(f"layer={layer!r}: choose one of {', '.join(LAYERS)}, where N counts from 1.")
    return match[1] or match[2], int(match[3] or 0)


def _validate(layer: str, kind: str, number: int, a: Architecture) -> None:
    limits = {"block": a.depth if a.has_transformer else 0, "stage": len(a.units) if a.has_resnet else 0}
    if kind in limits and number > limits[kind]:
        raise ValueError(f"layer={layer!r}: {a.name} has {limits[kind]} {kind}s.")
    if kind in ("token", "token_mean") and not (a.has_transformer and a.num_class_tokens and a.network is None):
        raise ValueError(f"layer={layer!r}: {a.name} has no class token; choose pooled or mean.")
