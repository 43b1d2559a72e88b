"""The frozen features of a split: computed on all devices, streamed into a file, and kept for the next time.

They depend on the parameters, the network, the layer, the preparation of images, and the records: where one of these is
another, they are computed again.
"""

import dataclasses
import hashlib
import json
import pathlib
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from vit_jax import hosts
from vit_jax.api import Model
from vit_jax.data.placement import local_rows, open_placed
from vit_jax.data.records import Source
from vit_jax.data.stream import EvaluationStream
from vit_jax.data.transforms import EvaluationTransform
from vit_jax.data.unreadable import UnreadableLog
from vit_jax.evals.features import Features, feature_rows, hashes, make_feature_step
from vit_jax.files import open_atomically
from vit_jax.models.activations import placed_by
from vit_jax.sharding import Placement, batch_sharding, build_mesh, replicated
from vit_jax.train.overview import parameters_sha256
from vit_jax.transfer.cache import Entry, write_rows

FORM = 2  # of the files below; another number never reads them
_FILES = _FEATURE, _IS_READ, _HASH = "feature.npy", "is_read.npy", "hash.npy"


@dataclasses.dataclass(kw_only=True)
class Extractor:
    """Computes features of a model, or finds those of an earlier time.

    Attributes:
      model: its parameters lie complete on every device of all processes.
      layer: one of `evals.features.LAYERS`.
      transform: of the images.
      global_batch: images at a time on all devices; rounded up to a multiple of them.
      max_unreadable: images of a split that may be left out, over all processes.
      cache: where features are kept; None keeps none.
    """

    model: Model
    layer: str
    transform: EvaluationTransform
    global_batch: int
    max_unreadable: int
    cache: pathlib.Path | None

    def __post_init__(self) -> None:
        self._mesh = build_mesh(jax.devices())
        step = placed_by(Placement(self._mesh))(make_feature_step(self.layer, self.model.architecture))
        self._step = jax.jit(step, out_shardings=replicated(self._mesh))
        self._parameters_sha256 = "" if self.cache is None else parameters_sha256(self.model.module)

    def extract(self, source: Source) -> Features:
        """Return the features of every image of a source, in every process.

        Raises:
          ValueError: more images than `max_unreadable` cannot be read, features are not finite, or the cache cannot be
            written.
        """
        about = self._about(source)
        if self.cache is None or about is None:
            with tempfile.TemporaryDirectory(prefix="vit_jax_features_") as scratch:
                entry = Entry(folder=pathlib.Path(scratch), about="null", files=_FILES, num_rows=len(source))
                self._compute(source, entry, entry.folder)
                return _features(entry.read(entry.folder), source)
        folder = self.cache / hashlib.sha256(about.encode()).hexdigest()[:32]
        entry = Entry(folder=folder, about=about, files=_FILES, num_rows=len(source))
        arrays = entry.find()
        if arrays is not None and (~arrays[_IS_READ]).sum() > self.max_unreadable:
            arrays = None  # kept under a higher limit: read those images again, to name them
        if "no" in hosts.gather("no" if arrays is None else "yes"):  # computing takes all processes
            with entry.new_folder() as unfinished:
                self._compute(source, entry, unfinished)
                arrays = entry.read(unfinished)  # whichever process publishes
        assert arrays is not None
        return _features(arrays, source)

    def _compute(self, source: Source, entry: Entry, folder: pathlib.Path) -> None:
        """Write the array files and their record into a folder."""
        sharding = batch_sharding(self._mesh)
        batch = -(-min(self.global_batch, len(source)) // self._mesh.size) * self._mesh.size
        stream = EvaluationStream(source, self.transform, batch, local_rows(sharding, batch))
        decoding = self.transform.max_image_megapixels, self.transform.value_range
        log = UnreadableLog(source, len(source), *decoding)  # counted at the end, by all
        is_read_N, hash_N = np.zeros(len(source), bool), np.zeros(len(source), np.uint64)
        if hosts.is_first():
            print(f"computing features of {len(source):,} images", file=sys.stderr, flush=True)
        progress = tqdm(total=len(source), unit=" images", desc="features", disable=None if hosts.is_first() else True)

        def feature_parts() -> Iterator[np.ndarray]:
            rows = feature_rows(lambda: open_placed(stream, sharding, log), self._step, self.model.module, len(source))
            for part, values in rows:
                is_read_N[part], hash_N[part] = values["mask_B"] > 0, hashes(values["hash_B2"])
                yield values["feature_BD"]
                progress.update(part.stop - part.start)

        with progress:
            arrays = {_FEATURE: write_rows(folder / _FEATURE, feature_parts(), len(source))}
        log.require_few(int((~is_read_N).sum()), self.max_unreadable)
        for file, array_N in ((_IS_READ, is_read_N), (_HASH, hash_N)):
            arrays[file] = write_rows(folder / file, [array_N], len(source))
        entry.write_record(folder, arrays)

    def _about(self, source: Source) -> str | None:
        """Everything that the features depend on, as JSON; None where that cannot be told, or nothing is kept."""
        a, origin = self.model.architecture, source.origin
        if self.cache is None or origin is None or not a.is_standard:
            return None  # a source or a block of the user's own: its code may do something else tomorrow
        about = {
            "form": FORM,
            "parameters_sha256": self._parameters_sha256,
            "architecture": dataclasses.asdict(a),
            "layer": self.layer,
            "transform": dataclasses.asdict(self.transform),
            "origin": origin,
            "records": source.records_sha256,
            "platform": jax.default_backend(),
        }
        return json.dumps(about, sort_keys=True)


def write_features(path: pathlib.Path, features: Features, source: Source) -> dict[str, Any]:
    """Writes, in the first process, the features of the readable images; returns what was written, in words.

    The file holds "features" (N, D) float32, "labels" int32 (N,), or (N, K) where an image may have several, "names"
    (N,) of the records, "class_names".
    """
    kept = np.flatnonzero(features.is_read_N)
    if hosts.is_first():
        arrays: dict[str, Any] = {
            "features": features.feature_ND[kept],
            "labels": features.label_N[kept],
            "names": np.array([source.name_of(index) for index in kept.tolist()]),
            "class_names": np.array(source.class_names),
        }
        with open_atomically(path) as file:
            np.savez(file, **arrays)
    shape = f"{len(kept):,} x {features.feature_ND.shape[1]:,} float32"
    return {"features": shape, "left out": f"{len(features) - len(kept):,} unreadable", "file": str(path)}


def _features(arrays: Mapping[str, np.ndarray], source: Source) -> Features:
    label_N = np.asarray(source.labels, np.int32)
    return Features(arrays[_FEATURE], label_N, np.asarray(arrays[_IS_READ]), np.asarray(arrays[_HASH]))
