"""Training images that are near-duplicates of test images, also mirrored.

Pairs with nearly equal perceptual hashes are duplicates. With weights, pairs whose frozen features
have a large cosine are duplicates too; their hashes may be less equal, or arbitrary. Features are
nearly equal after a crop, which changes a hash.
"""

import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax import hosts
from vit_jax.config.schema import InputConfig
from vit_jax.data.decoding.bands import BandChoice
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
from vit_jax.evals.neighbours import find_nearest
from vit_jax.storage.files import write_atomically
from vit_jax.text.progress_bar import open_progress
from vit_jax.text.tables import columns, to_csv
from vit_jax.tools.prepare.perceptual import Reduction, compute_hashes, find_near

NEIGHBOURS = 20  # training images whose cosine with a test image is compared with the threshold
MOST_PAIRS = 10**7  # pairs in memory
_BATCH = 1024
_BITS = 64  # bits of a hash


class Duplicate(NamedTuple):
    """A training image and a test image with the same content.

    Attributes:
      record: number of the image in its source.
      test: number of the test source.
      test_record: number of the test image in the test source.
      distance: different bits of 64; None if only features were compared.
      cosine: cosine of the features; None if only hashes were compared.
      is_mirrored: True if the image resembles the mirror image of the test image.
    """

    record: int
    test: int
    test_record: int
    distance: int | None
    cosine: float | None
    is_mirrored: bool


class MirroredSource(SubsetSource):
    """The mirror images of another source, decoded as a transform decodes images."""

    def __init__(
        self,
        source: Source,
        transform: EvaluationTransform,
    ) -> None:
        super().__init__(source, np.arange(len(source)))
        self._bands = transform.bands
        self._decoding = (
            transform.max_image_megapixels,
            transform.exif_orientation,
            transform.value_range,
            transform.bands,
        )

    def __getitem__(self, index: int) -> Record:
        record = super().__getitem__(index)
        image_HWC = decode(record.image, *self._decoding)
        if self._bands is not None:
            image_HWC = self._bands.place(image_HWC)
        return record._replace(image=np.ascontiguousarray(image_HWC[:, ::-1]))

    @property
    def origin(self) -> str | None:
        origin = super().origin
        if not origin:
            return origin
        return f"{origin} mirrored"


def hash_all(
    source: Source,
    max_unreadable: int | None,
    bands: BandChoice | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the hashes of all images, or of their bands, and of their mirror images.

    Returns:
      hashes, uint64 (N, 2), and True for readable images, bool (N,).

    Raises:
      ValueError: more than `max_unreadable` images cannot be read.
    """
    transform = Reduction(InputConfig.max_image_megapixels, bands)
    stream = EvaluationStream(source, transform, _BATCH, np.arange(_BATCH))
    log = UnreadableLog(source, max_unreadable, option="--max_unreadable")
    hash_N2 = np.zeros((len(source), 2), np.uint64)
    is_read_N = np.zeros(len(source), bool)
    progress = open_progress("hashes", len(source), is_shown=hosts.is_first())
    batch_bytes = _BATCH * math.prod(transform.image_shape)
    parallelism = choose_parallelism(batch_bytes=batch_bytes)
    with progress, open_batches(stream, parallelism) as batches:
        for batch in log.watch(batches):
            is_readable_B = batch.mask > 0
            records = batch.record_index[is_readable_B]
            images = batch.image[is_readable_B]
            hash_N2[records] = compute_hashes(images)
            is_read_N[records] = True
            is_image_B = batch.record_index >= 0
            progress.update(int(is_image_B.sum()))
    return hash_N2, is_read_N


def find_by_hashes(
    source: Source,
    tests: Sequence[Source],
    distance: int,
    max_unreadable: int | None,
    bands: BandChoice | None = None,
) -> list[Duplicate]:
    """Return all pairs whose hashes differ in at most `distance` bits.

    Args:
      source: training images.
      tests: sources of test images.
      distance: see above.
      max_unreadable: number of images that may be unreadable.
      bands: bands that are compared; None: RGB.

    Raises:
      ValueError: too many pairs; as `hash_all`.
    """
    hash_N2, is_read_N = hash_all(source, max_unreadable, bands)
    records = np.flatnonzero(is_read_N)
    hash_N = hash_N2[records, 0]
    num_threads = count_cores()
    pairs = list[Duplicate]()
    for test, test_source in enumerate(tests):
        query_Q2, is_read_Q = hash_all(test_source, max_unreadable, bands)
        test_records = np.flatnonzero(is_read_Q)
        for is_mirrored in (False, True):
            query_Q = query_Q2[test_records, int(is_mirrored)]
            for index, query, bits in find_near(hash_N, query_Q, distance, num_threads):
                pair = Duplicate(
                    record=int(records[index]),
                    test=test,
                    test_record=int(test_records[query]),
                    distance=bits,
                    cosine=None,
                    is_mirrored=is_mirrored,
                )
                pairs.append(pair)
                if len(pairs) > MOST_PAIRS:
                    raise ValueError(
                        f"More than {MOST_PAIRS:,} pairs differ in at most {distance} bits. "
                        "Lower --candidates= or --distance=."
                    )
    return merge_pairs(pairs)


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
    records = [pair.record for pair in pairs]
    features = _extract_unit_features(source, records, extractor)
    confirmed = list[Duplicate]()
    for test, is_mirrored, test_source in _list_views(tests, extractor):
        group = []
        test_records = []
        for pair in pairs:
            if pair.test == test and pair.is_mirrored == is_mirrored:
                group.append(pair)
                test_records.append(pair.test_record)

        test_features = _extract_unit_features(test_source, test_records, extractor)
        for pair in group:
            feature = features[pair.record]
            test_feature = test_features[pair.test_record]
            pair_cosine = float(feature @ test_feature)
            is_near = (pair.distance or 0) <= distance
            if is_near or pair_cosine >= cosine:
                confirmed.append(pair._replace(cosine=pair_cosine))
    return merge_pairs(confirmed)


def find_by_features(
    source: Source,
    tests: Sequence[Source],
    extractor: Extractor,
    cosine: float,
) -> list[Duplicate]:
    """Return pairs of test images and their `NEIGHBOURS` nearest images with at least this cosine."""
    feature_ND = extractor.extract(source).feature_ND
    num_neighbours = min(NEIGHBOURS, len(source))
    pairs = list[Duplicate]()
    for test, is_mirrored, test_source in _list_views(tests, extractor):
        first = 0
        query_QD = extractor.extract(test_source).feature_ND
        for cosine_Ck, index_Ck in find_nearest(feature_ND, query_QD, num_neighbours):
            for row, column in np.argwhere(cosine_Ck >= cosine).tolist():
                pair = Duplicate(
                    record=int(index_Ck[row, column]),
                    test=test,
                    test_record=first + row,
                    distance=None,
                    cosine=float(cosine_Ck[row, column]),
                    is_mirrored=is_mirrored,
                )
                pairs.append(pair)
            first += len(cosine_Ck)
    return merge_pairs(pairs)


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
    rows = _list_rows(pairs, source, tests)
    duplicates = sorted({pair.record for pair in pairs})
    if "output" in files:
        write_atomically(files["output"], to_csv([HEAD, *rows]))
    if "write" in files:
        write_exclusion(files["write"], split, source, duplicates)

    result: dict[str, object] = {
        "images": len(source),
        "duplicates": len(duplicates),
        "pairs": len(pairs),
    }
    for test, (name, test_source) in enumerate(tests.items()):
        copied = {pair.test_record for pair in pairs if pair.test == test}
        share = f"{len(copied):,} of {len(test_source):,}"
        result[f"{name}: copied test images"] = share
    if as_json:
        result["found"] = [dict(zip(HEAD, row, strict=True)) for row in rows]
        return json.dumps(result, indent=2)

    result |= files
    lines = [(name, str(value)) for name, value in result.items()]
    return columns(lines, "<<", gap=" ", least=(40,))


def _list_rows(
    pairs: Sequence[Duplicate],
    source: Source,
    tests: Mapping[str, Source],
) -> list[tuple[object, ...]]:
    """Return the values of `HEAD` for each pair."""
    named_tests = list(tests.items())
    rows = list[tuple[object, ...]]()
    for pair in pairs:
        name, test_source = named_tests[pair.test]
        record_key = source.key_of(pair.record)
        test_key = test_source.key_of(pair.test_record)
        cosine = pair.cosine
        if cosine is not None:
            cosine = round(cosine, 4)
        row = (
            os.fsdecode(record_key),
            name,
            os.fsdecode(test_key),
            pair.distance,
            cosine,
            pair.is_mirrored,
        )
        rows.append(row)
    return rows


def _list_views(
    tests: Sequence[Source],
    extractor: Extractor,
) -> Iterator[tuple[int, bool, Source]]:
    """Yield each test source, unchanged and mirrored: its number, whether it is mirrored, source."""
    for test, source in enumerate(tests):
        yield test, False, source
        yield test, True, MirroredSource(source, extractor.transform)


def _extract_unit_features(
    source: Source,
    records: Sequence[int],
    extractor: Extractor,
) -> dict[int, np.ndarray]:
    """Return the features of some records, of length 1; zeros for unreadable images."""
    unique = sorted(set(records))
    if not unique:
        return {}
    subset = SubsetSource(source, unique)
    feature_ND = extractor.extract(subset).feature_ND
    length_N1 = np.linalg.norm(feature_ND, axis=1, keepdims=True)
    unit_ND = feature_ND / np.maximum(length_N1, 1e-12)
    return dict(zip(unique, unit_ND, strict=True))


def merge_pairs(pairs: Sequence[Duplicate]) -> list[Duplicate]:
    """Return one of several entries of a pair, by the least distance, then the largest cosine."""
    best = dict[tuple[int, int, int], Duplicate]()
    for pair in sorted(pairs, key=_rank):
        images = (pair.record, pair.test, pair.test_record)
        best.setdefault(images, pair)
    return [best[images] for images in sorted(best)]


def _rank(pair: Duplicate) -> tuple[int, float]:
    distance = _BITS if pair.distance is None else pair.distance
    return distance, -(pair.cosine or 0)
