"""The fast tier: every test without one of the markers below, which say why a test is not in it.

`--fast` selects the tier, `--newest` the tier and the tests marked `newest`, without the files of
`ONCE` and with two cases of each test of `SAMPLED`. `--cpu-limit=SECONDS` fails a test without a
marker that uses more CPU time: CPU time, not wall time, because other programs on the machine change
it less. Unmarked tests use about an eighth of the limit of `launch/test.sh` or less (cold cache, one
process per file).
"""

import os
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

MARKERS = {
    "slow": "compiles large or many programs",
    "newest": "as slow, and a newer JAX can change it: CI runs it with the newest Python too",
    "processes": "starts processes of a run",
    "launch": "runs shell scripts, some in pseudo-terminals",
    "tools": "runs libtpu, XLA for GPUs, mkdocs, pip or a linter",
}

ONCE = (
    "cli/test_upright_files.py",
    "data/decoding",
    "data/kinds/test_vtab_tasks.py",
    "data/test_image_matrix.py",
    "docs/test_intervals.py",
    "docs/test_language.py",
    "docs/test_lengths.py",
    "docs/test_tables.py",
    "integration/test_bands.py",
    "launch",
    "models/test_parameter_counts.py",
    "test_architecture.py",
    "test_readability.py",
    "tools/figures",
    "tools/plan/test_calibration.py",
    "tools/plan/test_estimate.py",
    "tools/plan/test_preflight.py",
    "tools/plan/test_search.py",
    "tools/prepare/test_imagenet_sets.py",
    "tools/sweeps",
    "train/test_chosen_metrics.py",
    "train/test_early_stopping.py",
)
"""Files and folders that `--newest` skips.

Their subjects are texts, scripts, stored tables, arithmetic, figures and the pixels of files, which
neither another Python nor another JAX changes. The programs of some run with the newest JAX in
other files:

* `integration/test_bands.py`: verbs on images of other channels: the programs of RGB images, in
  `api`, `cli`, `evals` and `tools/export`.
* `tools/prepare/test_imagenet_sets.py`: lists of classes: predictions, in `evals`.
* `train/test_chosen_metrics.py`, `train/test_early_stopping.py`: decisions on metrics: the tiny run,
  and resumed runs in `train/test_last_blocks.py` and `train/test_masked_patch.py`.
"""

SAMPLED = (
    "api",
    "cli",
    "config",
    "data",
    "docs",
    "hosts",
    "imports",
    "integration",
    "storage",
    "test_recipe_behaviour.py",
    "test_recipes.py",
    "text",
    "tools",
    "train/test_layout.py",
    "train/test_run_files.py",
    "weights",
)
"""Files and folders of which `--newest` runs the first and the last unmarked case of each test.

The cases of one test take the same way through Python and JAX, which two of them show. They differ
in words, values and fields of a config (`api`, `cli`, `config`, `train`, recipes), in variables and
paths of machines (`hosts`, `imports`, `storage`, `text`), in wrong or unusual files and records
(`data`), in chips and prices (`tools`), and in the names and shapes of networks (`weights`). All cases
run where these differ in the arithmetic of a program: in `evals`, `kernels`, `models`, `objectives`,
`optim`, `sharding` and most of `train`. So do the cases that are marked `newest`, and all tests of
the files of checkpoints.
"""


def is_below(path, names):
    """Return whether a path is one of these files, or in one of these folders, of `tests`."""
    places = {TESTS / name for name in names}
    return not places.isdisjoint([path, *path.parents])


def is_fast(item):
    return not any(item.get_closest_marker(name) for name in MARKERS)


def cpu_seconds():
    """Return the CPU time of this process and of the processes that it started and waited for."""
    return sum(os.times()[:4])


def pytest_addoption(parser):
    group = parser.getgroup("tiers")
    group.addoption(
        "--fast",
        action="store_true",
        help="select the tests without a marker of a slower tier",
    )
    group.addoption(
        "--newest",
        action="store_true",
        help="select these and the tests marked `newest`, without files of texts and scripts",
    )
    group.addoption(
        "--cpu-limit",
        type=float,
        metavar="SECONDS",
        help="fail unmarked tests that use more CPU time",
    )


def pytest_configure(config):
    for name, reason in MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {reason}; not in the fast tier")
    if limit := config.getoption("--cpu-limit"):
        config.pluginmanager.register(Limit(limit))


def pytest_ignore_collect(collection_path, config):
    """Ignore the files of `ONCE` where the others run again."""
    is_once = is_below(collection_path, ONCE)
    return True if is_once and config.getoption("--newest") else None


def find_ends(items):
    """Return the set of the first and the last case of each test."""
    first = {}
    last = {}
    for item in items:
        name = item.nodeid.partition("[")[0]
        first.setdefault(name, item)
        last[name] = item
    return {*first.values(), *last.values()}


def select_newest(items):
    """Return the tests that the newest Python repeats."""
    fast = [item for item in items if is_fast(item)]
    ends = find_ends(fast)

    selected = []
    for item in items:
        is_marked = item.get_closest_marker("newest") is not None
        is_repeated = item in ends or (is_fast(item) and not is_below(item.path, SAMPLED))
        if is_marked or is_repeated:
            selected.append(item)
    return selected


@pytest.hookimpl(trylast=True)  # after markers are added
def pytest_collection_modifyitems(config, items):
    if config.getoption("--newest"):
        selected = select_newest(items)
    elif config.getoption("--fast"):
        selected = [item for item in items if is_fast(item)]
    else:
        return

    kept = set(selected)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = selected


class Limit:
    """Measures the setup and the call of each test.

    Session-scoped fixtures count for no test: any may be the first.
    """

    def __init__(self, seconds):
        self.seconds = seconds
        self.start = self.shared = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self):
        self.start = cpu_seconds()
        self.shared = 0.0

        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        before = cpu_seconds()
        try:
            return (yield)
        finally:
            if fixturedef.scope == "session":
                self.shared += cpu_seconds() - before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        used = cpu_seconds() - self.start - self.shared

        if call.when == "call" and report.passed and is_fast(item) and used > self.seconds:
            report.outcome = "failed"
            choices = ", ".join(f"{name} ({reason})" for name, reason in MARKERS.items())
            report.longrepr = (
                f"{item.nodeid}: {used:.1f} CPU seconds: without a marker a test uses at most {self.seconds:g}. "
                f"Use fewer, or mark the test with pytest.mark and one of: {choices}."
            )

        return report
