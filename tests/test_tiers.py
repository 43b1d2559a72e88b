"""The tiers: what a limit on CPU time rejects, and that every feature has a fast test."""

import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from tests import tiers
from tests.tiers import ONCE, is_fast

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
    results = re.findall(
        r"^(PASSED|FAILED) .*::test_(\w+)",
        out,
        re.MULTILINE,
    )
    failed = {name for result, name in results if result == "FAILED"}

    assert len(set(results)) == 6
    assert failed == {"fixture", "call", "process"}
    assert (
        "CPU seconds: without a marker a test uses at most 0.25. Use fewer, or mark the test with"
        in out
    )


def test_the_fast_tier_has_the_tests_without_a_marker(tmp_path):
    assert "5/6 tests collected (1 deselected)" in run_sample(tmp_path, "--fast", "--collect-only")


@pytest.mark.parametrize("name", ONCE)
def test_files_that_run_once_exist_and_none_is_marked_newest(name):
    path = Path(__file__).parent / name
    files = path.rglob("*.py") if path.is_dir() else [path]

    assert path.exists()
    for file in files:
        assert "pytest.mark.newest" not in file.read_text()


def test_the_newest_python_skips_files_that_run_once():
    path = Path(__file__).parent / "launch"
    newest = types.SimpleNamespace(getoption=lambda name: name == "--newest")
    all_tests = types.SimpleNamespace(getoption=lambda name: False)

    assert tiers.pytest_ignore_collect(path, newest) is True
    assert tiers.pytest_ignore_collect(path.with_name("models"), newest) is None
    assert tiers.pytest_ignore_collect(path, all_tests) is None


class Item:
    """A stand-in for a collected case of the test `test_values` of a file below `tests`."""

    def __init__(self, file, case, *markers):
        self.path = Path(__file__).parent / file
        self.nodeid = f"tests/{file}::test_values[{case}]"
        self.get_closest_marker = lambda name: name if name in markers else None


def test_the_newest_python_runs_two_cases_of_sampled_tests():
    sampled = [
        Item("weights/test_x.py", "slow", "slow"),
        Item("weights/test_x.py", "first"),
        Item("weights/test_x.py", "second"),
        Item("weights/test_x.py", "newest", "newest"),
        Item("weights/test_x.py", "third"),
    ]
    complete = [Item("models/test_x.py", case) for case in "abc"]
    alone = [Item("weights/test_y.py", "alone")]

    selected = tiers.select_newest([*sampled, *complete, *alone])

    expected = [sampled[1], sampled[3], sampled[4], *complete, *alone]
    assert selected == expected


@pytest.mark.parametrize("name", tiers.SAMPLED)
def test_files_that_are_sampled_exist_and_run(name):
    path = Path(__file__).parent / name

    assert path.exists()
    assert not tiers.is_below(path, ONCE)


FEATURES = (  # files with at least one fast test
    "train/test_early_stopping.py",  # training runs, interrupted and resumed
    "train/test_start.py",  # fine-tuning
    "models/test_vit.py",
    "models/test_resnet.py",
    "models/test_blocks.py",
    "models/test_attention.py",
    "evals/test_evaluate.py",
    "tools/figures/test_report_folder.py",
    "tools/export/test_programs.py",
    "api/test_predictions.py",
    "weights/test_saving.py",  # with all formats, as the next two
    "weights/test_convert.py",
    "weights/test_fit.py",
    "cli/test_training_verbs.py",
    "cli/test_weight_verbs.py",
    "cli/test_frozen_verbs.py",
    "cli/test_inspect_verb.py",
    "cli/test_plan_verb.py",
    "launch/test_scripts.py",
    "launch/test_slurm.py",
    "launch/test_gke.py",
    "launch/test_tpu_pod.py",
)


def test_every_feature_has_a_fast_test(request):
    """Only files that are collected count."""
    collected = set()
    fast = set()
    for item in request.session.items:
        collected.add(item.path)
        if is_fast(item):
            fast.add(item.path)

    for name in FEATURES:
        file = Path(__file__).parent / name
        assert file.is_file(), name
        assert file not in collected - fast, name
