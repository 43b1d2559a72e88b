"""Training images that are near-duplicates of test images, also mirrored.

Pairs with nearly equal perceptual hashes are duplicates. With weights, so are pairs with less equal
hashes, or with any hashes, whose frozen features have a large cosine: features see through crops,
which change a hash.
"""

import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from vit_jax import hosts
from vit_jax.config.schema import InputConfig
from vit_jax.data.decoding.images import decode
from vit_jax.data.exclusion import write_exclusion
from vit_jax.data.pipeline import open_batches
from vit_jax.data.records import Record, Source
from vit_jax.data.stream import EvaluationStream
from vit_jax.data.subset import SubsetSource
from vit_jax.data.transforms import EvaluationTransform
from vit_jax.data.unreadable import UnreadableLog
from vit_jax.data.workers import choose_parallelism, count_cores
from vit_jax.evals.features import Extractor
from vit_jax.evals.neighbours import nearest
from vit_jax.storage.files import write_atomically
from vit_jax.text.tables import columns, to_csv
from vit_jax.tools.prepare.perceptual import Reduction, hashes, near

NEIGHBOURS = 20  # of each test image whose cosine is compared with the threshold
MOST_PAIRS = 10**7  # in memory
_BATCH = 1024
_BITS = 64


class Duplicate(NamedTuple):
    """A training image and a test image that show the same.

    Attributes:
      record: number of the image in its source.
      test: number of the test source.
      test_record: number of the test image in it.
      distance: different bits of 64; None if only features were compared.
      cosine: of the features; None if only hashes were compared.
      is_mirrored: the image is like the mirror image of the test image.
    """

    record: int
    test: int
    test_record: int
    distance: int | None
    cosine: float | None
    is_mirrored: bool


class MirroredSource(SubsetSource):
    """Records of another source, each as a transform decodes it, mirrored."""

    def __init__(self, source: Source, transform: EvaluationTransform) -> None:
        super().__init__(source, np.arange(len(source)))
        self._decoding = (
            transform.max_image_megapixels,
            transform.exif_orientation,
            transform.value_range,
        )

    def __getitem__(self, index: int) -> Record:
        record = super().__getitem__(index)
        return record._replace(
            image=np.ascontiguousarray(decode(record.image, *self._decoding)[:, ::-1])
        )

    @property
    def origin(self) -> str | None:
        inner = super().origin
        return inner and f"{inner} mirrored"


def hash_all(source: Source, max_unreadable: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes of all images and of their mirror images, uint64 (N, 2), and which could be read, bool (N,).

    Raises:
      ValueError: more than `max_unreadable` images cannot be read.
    """
    transform = Reduction(InputConfig.max_image_megapixels)
    stream = EvaluationStream(source, transform, _BATCH, np.arange(_BATCH))
    log = UnreadableLog(source, max_unreadable, option="--max_unreadable")
    hash_N2 = np.zeros((len(source), 2), np.uint64)
    is_read_N = np.zeros(len(source), bool)
    progress = tqdm(
        total=len(source), unit=" images", desc="hashes", disable=None if hosts.is_first() else True
    )
    parallelism = choose_parallelism(batch_bytes=_BATCH * 32 * 32 * 3)
    with progress, open_batches(stream, parallelism) as batches:
        for batch in log.watch(batches):
            rows = batch.record_index[batch.mask > 0]
            hash_N2[rows] = hashes(batch.image[batch.mask > 0])
            is_read_N[rows] = True
            progress.update(int((batch.record_index >= 0).sum()))
    return hash_N2, is_read_N


def find_by_hashes(
    source: Source, tests: Sequence[Source], distance: int, max_unreadable: int | None
) -> list[Duplicate]:
    """Return all pairs whose hashes differ in at most `distance` bits; raises as `hash_all`."""
    hash_N2, is_read_N = hash_all(source, max_unreadable)
    readable = np.flatnonzero(is_read_N)
    pairs = list[Duplicate]()
    for test, opened in enumerate(tests):
        query_Q2, is_read_Q = hash_all(opened, max_unreadable)
        queries = np.flatnonzero(is_read_Q)
        for is_mirrored in (False, True):
            close = near(
                hash_N2[readable, 0],
                query_Q2[queries, int(is_mirrored)],
                distance,
                count_cores(),
            )
            for index, query, bits in close:
                pairs.append(
                    Duplicate(
                        int(readable[index]), test, int(queries[query]), bits, None, is_mirrored
                    )
                )
                if len(pairs) > MOST_PAIRS:
                    raise ValueError(
                        f"More than {MOST_PAIRS:,} pairs differ in at most {distance} bits. Lower --candidates= or "
                        "--distance=."
                    )
    return merged(pairs)


def confirm(
    pairs: Sequence[Duplicate],
    source: Source,
    tests: Sequence[Source],
    extractor: Extractor,
    distance: int,
    cosine: float,
) -> list[Duplicate]:
    """Return the pairs of at most this distance or at least this cosine, with their cosines.

    Only images of pairs are read.
    """
    confirmed = list[Duplicate]()
    units = _unit_features(source, [one.record for one in pairs], extractor)
    for (test, is_mirrored), opened in _sides(tests, extractor):
        group = [one for one in pairs if (one.test, one.is_mirrored) == (test, is_mirrored)]
        units_of_test = _unit_features(opened, [one.test_record for one in group], extractor)
        known = (
            one._replace(cosine=float(units[one.record] @ units_of_test[one.test_record]))
            for one in group
        )
        confirmed += [
            one for one in known if (one.distance or 0) <= distance or (one.cosine or 0) >= cosine
        ]
    return merged(confirmed)


def find_by_features(
    source: Source, tests: Sequence[Source], extractor: Extractor, cosine: float
) -> list[Duplicate]:
    """Return the pairs of a test image and one of its `NEIGHBOURS` nearest images with at least this cosine."""
    feature_ND = extractor.extract(source).feature_ND
    pairs = list[Duplicate]()
    for (test, is_mirrored), opened in _sides(tests, extractor):
        first = 0
        query_QD = extractor.extract(opened).feature_ND
        for cosine_Ck, index_Ck in nearest(feature_ND, query_QD, min(NEIGHBOURS, len(source))):
            for row, column in np.argwhere(cosine_Ck >= cosine).tolist():
                pair = int(index_Ck[row, column]), test, first + row
                pairs.append(Duplicate(*pair, None, float(cosine_Ck[row, column]), is_mirrored))
            first += len(cosine_Ck)
    return merged(pairs)


HEAD = ("id", "test_set", "test_id", "distance", "cosine", "is_mirrored")


def report(
    pairs: Sequence[Duplicate],
    source: Source,
    tests: Mapping[str, Source],
    split: str,
    files: Mapping[str, pathlib.Path],
    as_json: bool,
) -> str:
    """Return a summary as text, or as JSON with the pairs.

    `files` may have paths to write: "output" for the pairs, "write" for the ids of images in
    `split` of the source.
    """
    opened = list(tests.items())
    rows = [
        (
            os.fsdecode(source.key_of(one.record)),
            opened[one.test][0],
            os.fsdecode(opened[one.test][1].key_of(one.test_record)),
            one.distance,
            None if one.cosine is None else round(one.cosine, 4),
            one.is_mirrored,
        )
        for one in pairs
    ]
    images = sorted({one.record for one in pairs})
    if "output" in files:
        write_atomically(files["output"], to_csv([HEAD, *rows]))
    if "write" in files:
        write_exclusion(files["write"], split, source, images)
    result: dict[str, object] = {
        "images": len(source),
        "duplicates": len(images),
        "pairs": len(pairs),
    }
    for test, (name, of_test) in enumerate(opened):
        copied = {one.test_record for one in pairs if one.test == test}
        result[f"{name}: copied test images"] = f"{len(copied):,} of {len(of_test):,}"
    if as_json:
        return json.dumps(
            result | {"found": [dict(zip(HEAD, row, strict=True)) for row in rows]}, indent=2
        )
    lines = [(name, str(value)) for name, value in [*result.items(), *files.items()]]
    return columns(lines, "<<", gap=" ", least=(40,))


def _sides(
    tests: Sequence[Source], extractor: Extractor
) -> Iterator[tuple[tuple[int, bool], Source]]:
    """Yield each test source, by its number and whether it is mirrored, as it is and mirrored."""
    for test, source in enumerate(tests):
        yield (test, False), source
        yield (test, True), MirroredSource(source, extractor.transform)


def _unit_features(
    source: Source, indices: Sequence[int], extractor: Extractor
) -> dict[int, np.ndarray]:
    """Return the features of some records, of length 1; zeros of an image that could not be read."""
    chosen = sorted({*indices})
    if not chosen:
        return {}
    feature_ND = extractor.extract(SubsetSource(source, chosen)).feature_ND
    length_N1 = np.linalg.norm(feature_ND, axis=1, keepdims=True)
    return dict(zip(chosen, feature_ND / np.maximum(length_N1, 1e-12), strict=True))


def merged(pairs: Sequence[Duplicate]) -> list[Duplicate]:
    """Return one of several entries of a pair: the one with the least distance, else with the greatest cosine."""
    best = dict[tuple[int, int, int], Duplicate]()
    for one in sorted(
        pairs, key=lambda one: (_BITS if one.distance is None else one.distance, -(one.cosine or 0))
    ):
        best.setdefault(one[:3], one)
    return [best[pair] for pair in sorted(best)]
