"""The commands of docs/deployment.md, on a tiny run; OpenVINO where it is installed."""

import importlib.util
import pathlib
import re

import numpy as np
import pytest

from docs import deployment
from tests.integration.commands import succeed
from vit_jax.api import load_model

PAGE = (pathlib.Path(__file__).parents[2] / "docs/deployment.md").read_text()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("tiny"),
    # The telemetry of OpenVINO forks a process.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),
]


def list_blocks(language):
    """Return the blocks of the page in a language, in their order."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def programs(tiny_run, tmp_path, monkeypatch):
    """Run the commands of the page in an empty folder, with the tiny run as runs/mine."""
    pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    pathlib.Path("runs").mkdir()
    pathlib.Path("runs/mine").symlink_to(tiny_run.workdir)
    (commands,) = list_blocks("sh")
    for line in commands.splitlines():
        words = line.partition("#")[0].split()
        assert words[0] == "vit-jax"
        succeed(words[1:])
    return load_model(str(tiny_run.workdir))


def test_the_blocks_of_the_page(programs):
    images = np.zeros((4, *programs.architecture.image_size, 3), np.uint8)
    expected = programs.predict(images)
    tolerances = iter([1e-5, 0.2, 1e-5, 1e-5])
    names = {}
    skipped = []
    for block in list_blocks("python"):
        tolerance = next(tolerances)
        if "import openvino" in block and importlib.util.find_spec("openvino") is None:
            skipped.append("openvino is not installed")
            continue
        exec(block, names)
        assert names.pop("probabilities") == pytest.approx(expected, abs=tolerance)

    assert list(tolerances) == []
    if skipped:
        pytest.skip(skipped[0])


def test_the_comparison(programs, monkeypatch):
    monkeypatch.setattr(deployment, "NUM_ROUNDS", 1)

    text = deployment.compare("runs/mine", None)

    names = re.findall(r"^\| (\w[^|]*) \|", text, re.MULTILINE)
    rows = dict(re.findall(r"^\| (\w[^|]*) \|.* \| ([\d.e+-]+) \|$", text, re.MULTILINE))

    assert names[0] == "runtime"
    assert {"StableHLO", "ONNX Runtime, float32", "ONNX Runtime, int8"} <= rows.keys()
    assert float(rows["ONNX Runtime, float32"]) < 1e-4
    assert float(rows["JAX, this package"]) == 0
