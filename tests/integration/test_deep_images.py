"""Training on a folder of 12-bit TIFFs, and prediction with its weights."""

import json

import numpy as np
import pytest

from tests.data.deep_files import tiff
from tests.evals.samples import to_png
from tests.integration.commands import pretraining, succeed
from vit_jax.weights import load_weights

SHORT = (
    "total=2 steps",
    "schedule.warmup=1 steps",
    "checkpoint.every=2 steps",
    "evaluation.every=2 steps",
)
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compiled_once")]


WITH_RANGE = "--config.input.value_range=0,4095"


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder of forty TIFFs of 12 bits in two classes."""
    folder = tmp_path_factory.mktemp("deep") / "images"
    rng = np.random.default_rng(0)
    for label, low in (("dark", 0), ("light", 2000)):
        (folder / label).mkdir(parents=True)
        for number in range(20):
            values = rng.integers(low, low + 2000, (8, 8), np.uint16)
            (folder / label / f"{number:02}.tif").write_bytes(tiff(values))
    return folder


@pytest.fixture(scope="module")
def make_words(data_dir, images):
    """Return a function from a workdir to the words of a run."""

    def make(workdir):
        data = f"data=folder:{images}"
        return pretraining(
            data_dir,
            workdir,
            *SHORT,
            data,
            "evaluation.global_batch=8",
        )

    return make


@pytest.fixture(scope="module")
def workdir(make_words, tmp_path_factory):
    """A run with the range of values."""
    folder = tmp_path_factory.mktemp("run") / "run"
    succeed([*make_words(folder), WITH_RANGE])
    return folder


def test_the_range_of_a_run_is_stored(workdir):
    assert load_weights(workdir).preprocessing["value_range"] == [0.0, 4095.0]


def test_predictions_have_the_range_of_the_run(workdir, images, tmp_path):
    """A deep file and the same values in 8 bits have equal predictions, also converted."""
    values = np.random.default_rng(1).integers(2000, 4000, (8, 8), np.uint16)
    mapped = np.rint(values * (255 / 4095)).astype(np.uint8)
    (tmp_path / "deep.tif").write_bytes(tiff(values))
    (tmp_path / "mapped.png").write_bytes(to_png(np.stack([mapped] * 3, axis=-1)))
    succeed(["convert", str(workdir), str(tmp_path / "weights")])

    for weights in (workdir, tmp_path / "weights"):
        out = succeed(
            [
                "predict",
                str(weights),
                str(tmp_path / "deep.tif"),
                str(tmp_path / "mapped.png"),
                "--json",
            ]
        )
        of_deep, of_mapped = json.loads(out)
        assert of_deep["predictions"] == of_mapped["predictions"]


def test_evaluation_with_the_range_of_the_run_warns_of_nothing(
    workdir,
    images,
    caplog,
):
    succeed(["evaluate", str(workdir), f"--data=folder:{images}"])

    assert not [line for line in caplog.messages if "16 bits" in line]


def test_a_run_without_a_range_warns(make_words, tmp_path, caplog):
    succeed(make_words(tmp_path / "without"))

    (line,) = (line for line in caplog.messages if "16 bits" in line)
    assert "40 of 40 checked files" in line
    assert "input.value_range=0,4095" in line


def test_a_run_with_a_range_does_not_warn(make_words, tmp_path, caplog):
    succeed([*make_words(tmp_path / "with"), WITH_RANGE])

    assert not [line for line in caplog.messages if "16 bits" in line]
