"""The 1,797 handwritten digits of scikit-learn, as a small TFDS dataset without a download.

Grey 8 x 8 images; the stored values 0 to 16 are scaled to 0 to 255.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import tensorflow_datasets as tfds

TEST_EVERY = 5


class VitJaxDigits(tfds.core.GeneratorBasedBuilder, skip_registration=True):  # type: ignore[call-arg]  # an argument of TFDS
    """Digits 0 to 9: 1,437 to train on, 360 to test."""

    name = "vit_jax_digits"
    VERSION = tfds.core.Version("1.0.0")

    def _info(self) -> Any:
        features = tfds.features.FeaturesDict(
            {
                "image": tfds.features.Image(shape=(8, 8, 1), encoding_format="png"),
                "label": tfds.features.ClassLabel(names=list(map(str, range(10)))),
            },
        )
        return tfds.core.DatasetInfo(
            builder=self,
            features=features,
            homepage="https://scikit-learn.org",
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
        from sklearn.datasets import load_digits

        digits = load_digits()
        train, test = (
            self._generate_examples(digits, indices) for indices in split_indices(digits.target)
        )
        return {"train": train, "test": test}

    def _generate_examples(
        self,
        digits: Any,
        indices: np.ndarray,
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        for index in indices:
            pixels = np.round(digits.images[index] * (255 / 16)).astype(np.uint8)
            # Encoded here: TFDS would encode an array with TensorFlow.
            encoded = cv2.imencode(".png", pixels)[1].tobytes()
            yield int(index), {"image": encoded, "label": int(digits.target[index])}


def split_indices(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Train and test indices: by class and a hash of the index, every fifth is for testing.

    The hash puts every writer, whose digits are neighbours in the file, on both sides; it never
    changes.
    """

    def rank(index: int) -> tuple[int, bytes]:
        return int(labels[index]), hashlib.sha256(b"digits/%d" % index).digest()

    order = np.array(sorted(range(len(labels)), key=rank))
    testing = np.arange(len(order)) % TEST_EVERY == 0
    return np.sort(order[~testing]), np.sort(order[testing])


def prepare(data_dir: str | None = None) -> Path:
    """Write the dataset unless it exists, and return its folder; `data_dir` as for `TfdsSource`.

    Several processes may do so at once.

    Raises:
      ValueError: the folder cannot be written.
    """
    builder = VitJaxDigits(data_dir=data_dir, file_format="array_record")
    path = Path(builder.data_dir)
    if not _is_prepared(path):
        try:
            builder.download_and_prepare()
        except Exception as error:
            # TFDS writes beside the folder and then renames; the second process cannot, and need
            # not.
            if _is_prepared(path):
                return path
            if not isinstance(error, OSError) or error.filename is None:
                raise
            fix = "Set --config.input.data_dir=FOLDER, or --data_dir=FOLDER of verbs without a recipe."
            raise ValueError(
                f"input.data_dir: {path} cannot be written ({error.strerror or error}). {fix}",
            ) from error
    return path


def _is_prepared(path: Path) -> bool:
    return (path / "dataset_info.json").exists()
