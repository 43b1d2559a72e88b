"""The tiers: what a limit on CPU time rejects, and that every feature has a fast test."""

import os
import subprocess
import sys
from pathlib import Path

from tests.tiers import is_fast

SAMPLE = """
import subprocess, sys, time, pytest
BUSY = "import time\\nend = time.process_time() + 0.3\\nwhile time.process_time() < end: pass"

@pytest.fixture(scope="session")
def shared(): exec(BUSY)

@pytest.fixture
def costly(): exec(BUSY)

def test_shared(shared): pass
def test_idle(): time.sleep(0.3)
def test_fixture(costly): pass
def test_call(): exec(BUSY)
def test_process(): subprocess.run([sys.executable, "-c", BUSY])
@pytest.mark.slow
def test_marked(): exec(BUSY)
"""


def run_sample(folder, *words):
    (folder / "test_sample.py").write_text(SAMPLE)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.tiers",
        "-p",
        "no:cacheprovider",
        "--strict-markers",
    ]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
    command += ["-c", "/dev/null", f"--rootdir={folder}", *words, str(folder)]

    return subprocess.run(command, capture_output=True, text=True, env=environment).stdout


def test_a_limit_on_cpu_time(tmp_path):
    out = run_sample(tmp_path, "--cpu-limit=0.25", "-rA")
    results = dict(
        line.split()[1::-1] for line in out.splitlines() if line.startswith(("PASSED", "FAILED"))
    )
    failed = {
        name.rpartition("::test_")[2] for name, result in results.items() if result == "FAILED"
    }

    assert len(results) == 6
    assert failed == {"fixture", "call", "process"}
    assert (
        "CPU seconds: without a marker a test uses at most 0.25. Use fewer, or mark the test with"
        in out
    )


def test_the_fast_tier_has_the_tests_without_a_marker(tmp_path):
    assert "5/6 tests collected (1 deselected)" in run_sample(tmp_path, "--fast", "--collect-only")


FEATURES = (  # files with at least one fast test
    "train/test_early_stopping.py",  # training runs, interrupted and resumed
    "train/test_start.py",  # fine-tuning
    *(f"models/test_{family}.py" for family in ("vit", "resnet", "blocks", "attention")),
    *(f"{part}.py" for part in ("evals/test_evaluate", "tools/figures/test_report_folder")),
    *(f"{part}.py" for part in ("tools/export/test_programs", "api/test_predictions")),
    *(f"weights/test_{step}.py" for step in ("saving", "convert", "fit")),  # each with all formats
    *(f"cli/test_{family}_verbs.py" for family in ("training", "weight", "frozen")),
    *("cli/test_inspect_verb.py", "cli/test_plan_verb.py"),
    *(f"launch/test_{script}.py" for script in ("scripts", "slurm", "gke", "tpu_pod")),
)


def test_every_feature_has_a_fast_test(request):
    """Only files that are collected count."""
    files = [Path(__file__).parent / name for name in FEATURES]

    assert all(file.is_file() for file in files)

    collected = {item.path for item in request.session.items}
    fast = {item.path for item in request.session.items if is_fast(item)}

    assert [file for file in files if file in collected - fast] == []
