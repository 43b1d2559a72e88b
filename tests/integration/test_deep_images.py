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


def test_a_folder_of_12_bit_tiffs(data_dir, tmp_path, caplog):
    rng = np.random.default_rng(0)
    for label, low in (("dark", 0), ("light", 2000)):
        (tmp_path / "images" / label).mkdir(parents=True)
        for number in range(20):
            values = rng.integers(low, low + 2000, (8, 8), np.uint16)
            (tmp_path / "images" / label / f"{number:02}.tif").write_bytes(tiff(values))

    data = f"data=folder:{tmp_path}/images"
    words = pretraining(data_dir, tmp_path / "run", *SHORT, data, "evaluation.global_batch=8")
    succeed([*words, "--config.input.value_range=0,4095"])
    weights = load_weights(tmp_path / "run")

    assert weights.preprocessing["value_range"] == [0.0, 4095.0]

    (tmp_path / "deep.tif").write_bytes(tiff(values))
    mapped = np.rint(values * (255 / 4095)).astype(np.uint8)
    (tmp_path / "mapped.png").write_bytes(to_png(np.stack([mapped] * 3, axis=-1)))
    files = [str(tmp_path / name) for name in ("deep.tif", "mapped.png")]
    succeed(["convert", str(tmp_path / "run"), str(tmp_path / "weights")])

    for source in ("run", "weights"):
        deep, of_8_bits = json.loads(succeed(["predict", str(tmp_path / source), *files, "--json"]))
        assert deep["predictions"] == of_8_bits["predictions"]

    succeed(["evaluate", str(tmp_path / "run"), f"--{data}"])

    assert not [line for line in caplog.messages if "16 bits" in line]

    words[words.index(f"--workdir={tmp_path / 'run'}")] = f"--workdir={tmp_path / 'without'}"
    succeed(words)
    (line,) = [line for line in caplog.messages if "16 bits" in line]

    assert "40 of 40 checked files" in line
    assert "input.value_range=0,4095" in line
