"""The verb sweep: two settings that really train, and runs that only pretend, for tables, shares
and early stopping.
"""

import json
import re
import shlex
import shutil
import statistics

import pytest

from tests.columns import list_column
from tests.integration import commands
from tests.integration.commands import rejected, run, succeed
from tests.tiny import LENGTH, RECIPE, RUN, flags
from vit_jax.config import load_recipe
from vit_jax.train.lifecycle.interruption import Interrupted

pytestmark = [
    pytest.mark.usefixtures("compiled_once"),
    pytest.mark.xdist_group("tiny"),
]

RATE = "schedule.learning_rate"


def build_words(folder, *more):
    return [
        "sweep",
        f"--config={RECIPE}",
        f"--workdir={folder}",
        *flags(*RUN, *LENGTH),
        *more,
    ]


def build_share(number, count=2):
    return [f"--index={number}", f"--count={count}"]


def read_times(folder):
    times = {}
    for path in folder.glob("runs/*/*.json*"):
        times[path] = path.stat().st_mtime_ns
    return times


def read_results(folder):
    return json.loads((folder / "sweep.json").read_text())


def read_begun(out):
    return re.findall(r"^run (\d of \d.*): (.*)$", out, re.MULTILINE)


CUSTOM = "--config.evaluation.evaluators.c.kind=math:hypot"  # it states no directions
HALVING = [
    "--grid",
    "input.train_examples=200,1200",
    "--stop_after=0.5",
    "--metric=test_loss",
]
NAMES = [f"input.train_examples={number}" for number in (200, 1200)]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A finished sweep of which one run was stopped.

    Returns its folder, its output, the run that ended and the run that was stopped.
    """
    folder = tmp_path_factory.mktemp("sweep") / "examples"
    out = succeed(build_words(folder, *HALVING))
    kept, dropped = sorted(
        NAMES,
        key=lambda name: read_loss_at_half(folder / "runs" / name),
    )
    return folder, out, kept, dropped


def read_loss_at_half(folder):
    for line in commands.metrics(folder):
        if line["step"] == 3 and "test_loss" in line:
            return line["test_loss"]
    raise AssertionError(f"{folder} has no evaluation of step 3")


@pytest.mark.slow
def test_the_better_setting_ends_as_a_run_that_was_never_paused(swept, tmp_path):
    folder, out, kept, dropped = swept
    stopped = folder / "runs" / dropped
    number = dropped.partition("=")[2]
    row = rf"^\| {number} .* 0 of 1, stopped at {read_loss_at_half(stopped):.3g} \|$"

    assert read_begun(out) == [
        ("1 of 2, to 50%", NAMES[0]),
        ("2 of 2, to 50%", NAMES[1]),
        ("1 of 1", kept),
    ]
    assert commands.checkpoint_steps(stopped)[-1] == 3
    assert re.search(row, out, re.MULTILINE)

    (command,) = re.findall(r"^    (vit-jax pretrain .*)$", out, re.MULTILINE)
    _, *words, _ = shlex.split(command)
    succeed([*words, f"--workdir={tmp_path}"])

    assert commands.summary(tmp_path)["parameters_sha256"] == read_hash(folder, kept)
    assert commands.curve(tmp_path) == commands.curve(folder / "runs" / kept)


def read_hash(folder, name):
    return commands.summary(folder / "runs" / name)["parameters_sha256"]


@pytest.mark.slow
def test_the_same_command_again_trains_nothing(swept):
    folder, out, *_ = swept
    before = read_times(folder)
    again = succeed(build_words(folder, *HALVING))

    assert out.endswith(again)
    assert read_times(folder) == before


@pytest.mark.slow
def test_killed_after_the_pause_it_comes_to_the_same_results(swept, tmp_path):
    """A kill before the record of the pause leaves a checkpoint of that step, and nothing of the
    other run.
    """
    complete, complete_out, kept, dropped = swept
    folder = tmp_path / "examples"
    shutil.copytree(complete, folder)
    shutil.rmtree(folder / "runs" / kept)
    (folder / "sweep.json").unlink()
    (folder / "sweep.md").unlink()
    (folder / "runs" / dropped / "pause.json").unlink()

    out = succeed(build_words(folder, *HALVING))

    assert read_begun(out) == read_begun(complete_out)
    assert "continuing from this workdir's checkpoint of step 3" in out
    assert read_hash(folder, kept) == read_hash(complete, kept)
    assert commands.checkpoint_steps(folder / "runs" / dropped)[-1] == 3


GRID = ["--grid", f"{RATE}=0.1,0.2,0.3", "--grid", "seed=0,1,2"]


def list_names(*rates):
    return [f"{RATE}={rate},seed={seed}" for rate in rates for seed in range(3)]


DEVIATION = statistics.stdev([0.5, 0.51, 0.52])


def test_the_table_has_means_deviations_and_the_best_setting(pretended, tmp_path):
    ran, _ = pretended
    out = succeed(build_words(tmp_path, *GRID))
    content = read_results(tmp_path)
    deviations = list_column(content["rows"], "test_accuracy_deviation")
    row = r"^\| (0.\d) +\| +([\d.]+%) \| +([\d.]+%) .* (\d of \d) \|$"

    assert list_column(ran, 0) == list_names(0.1, 0.2, 0.3)
    assert re.findall(row, out, re.MULTILINE) == [
        ("0.1", "61.00%", f"{DEVIATION:.2%}", "3 of 3"),
        ("0.2", "71.00%", f"{DEVIATION:.2%}", "3 of 3"),
        ("0.3", "81.00%", f"{DEVIATION:.2%}", "3 of 3"),
    ]
    assert f"Best: {RATE}=0.3, test_accuracy 81.00% ± {DEVIATION:.2%} (higher" in out
    assert out.endswith((tmp_path / "sweep.md").read_text())
    assert content["best"] == content["rows"][2]
    assert deviations == pytest.approx([DEVIATION] * 3)


def test_the_best_setting_is_a_command(pretended, tmp_path):
    out = succeed(build_words(tmp_path, *GRID, "--config.model.pool=token"))

    (command,) = re.findall(r"^    (vit-jax pretrain .*)$", out, re.MULTILINE)
    _, _, recipe, *overrides, folder = shlex.split(command)
    config = load_recipe(recipe.removeprefix("--config="), overrides)

    assert config.schedule.learning_rate == 0.3
    assert config.seed == load_recipe(str(RECIPE)).seed
    assert config.model.pool == "token"
    assert folder == f"--workdir={tmp_path / 'best'}"
    assert read_results(tmp_path)["command"] == command


def test_another_metric_and_a_run_that_diverged(pretended, tmp_path):
    """The loss is lowest at 0.3, whose run diverged once."""
    ran, special = pretended
    special[list_names(0.3)[1]] = FloatingPointError("Step 3: the loss is nan")
    words = build_words(tmp_path, *GRID, "--metric=test_loss")

    out = succeed(words)

    assert f"Best: {RATE}=0.2, test_loss 0.29 (lower is better)" in out
    assert "3 of 3, 1 diverged" in out
    assert len(ran) == 8
    assert out.endswith(succeed(words))
    assert len(ran) == 8


def test_the_first_of_equal_settings_is_the_best(pretended, tmp_path):
    out = succeed(build_words(tmp_path, "--grid=model.pool=token,gap"))
    assert "Best: model.pool=token," in out


def test_machines_share_the_runs_and_an_interrupted_sweep_goes_on(pretended, tmp_path):
    ran, special = pretended
    first = build_words(tmp_path, *GRID, *build_share(0))
    second = build_words(tmp_path, *GRID, *build_share(1))
    _, interrupted, _ = list_names(0.2)
    earlier, _, later = list_names(0.3)
    missing = f"{interrupted}, {earlier}, {later}"
    special[interrupted] = Interrupted("stopped after step 3")

    outcome = run(first)
    assert outcome.code == 75
    assert outcome.err == "vit-jax: stopped after step 3\n"

    out = succeed(second)
    assert f"Best so far: {RATE}=0.3" not in out, "one of its seeds is missing"
    assert f"Not ended: {missing}." in out

    assert f"Best: {RATE}=0.3" in succeed(first)
    assert sorted(list_column(ran, 0)) == list_names(0.1, 0.2, 0.3)


def test_a_recipe_for_fine_tuning_is_fine_tuned(pretended, tmp_path):
    ran, _ = pretended
    fields = flags("init_from=w.npz", "data=digits", "search.learning_rates=()")
    words = [
        "sweep",
        "--config=finetune:any,own",
        f"--workdir={tmp_path}",
        *GRID,
        *fields,
    ]

    out = succeed(words)

    assert len(ran) == 9
    assert "    vit-jax finetune --config=finetune:any,own --config.init_from=w.npz" in out


def test_only_the_best_settings_go_on(pretended, tmp_path):
    ran, _ = pretended
    paused = [(name, 0.25) for name in list_names(0.1, 0.2, 0.3)]
    completed = [(name, None) for name in list_names(0.2, 0.3)]
    # Step 20 has the last evaluation up to a quarter.
    stopped_at = 0.2 * statistics.mean([0.6, 0.61, 0.62])
    words = build_words(tmp_path, *GRID, "--stop_after=0.25")

    out = succeed(words)

    assert ran == paused + completed
    assert f"0 of 3, stopped at {stopped_at:.2%}" in out
    assert f"Best: {RATE}=0.3" in out
    row, *_ = read_results(tmp_path)["rows"]
    assert row["stopped_at"] == pytest.approx(stopped_at)

    ran.clear()
    assert out.endswith(succeed(words))
    assert ran == []


def test_a_sweep_goes_on_with_other_options(pretended, tmp_path):
    ran, _ = pretended
    words = build_words(tmp_path, *GRID)
    succeed([*words, "--stop_after=0.25"])
    ran.clear()

    # Runs that have ended stay.
    succeed([*words, "--stop_after=0.25", "--keep=1"])
    succeed([*words, "--stop_after=0.1"])
    assert ran == []

    # Stopped settings are compared again, later.
    succeed([*words, "--stop_after=0.5"])
    assert ran == [(name, 0.5) for name in list_names(0.1)]

    ran.clear()
    succeed(words)
    assert ran == [(name, None) for name in list_names(0.1)]
    assert "stopped" not in (tmp_path / "sweep.md").read_text()


def test_settings_that_diverge_are_stopped_first_and_a_loss_is_better_when_lower(
    pretended,
    tmp_path,
):
    ran, special = pretended
    special[list_names(0.3)[1]] = FloatingPointError("Step 3: the loss is nan")
    out = succeed(build_words(tmp_path, *GRID, "--stop_after=0.5", "--keep=2"))

    assert [name for name, fraction in ran if fraction is None] == list_names(0.1, 0.2)
    assert "1 of 3, 1 diverged, stopped at" in out


def test_machines_wait_for_each_other_where_settings_are_compared(pretended, tmp_path):
    ran, _ = pretended
    first = build_words(tmp_path, *GRID, "--stop_after=0.5", *build_share(0))
    second = build_words(tmp_path, *GRID, "--stop_after=0.5", *build_share(1))
    message = r"trained to 50%.* missing in .*seed=1.*The same command goes on"

    outcome = run(first)
    assert outcome.code == 75
    assert re.search(message, outcome.err)
    assert len(ran) == 5

    succeed(second)
    assert f"Best: {RATE}=0.3" in succeed(first)
    assert sorted(name for name, fraction in ran if fraction is None) == list_names(0.2, 0.3)


def list_states(words):
    """Return, for each run of a dry run, whether this machine runs it, and its state."""
    return re.findall(
        r"\| (yes|no) +\| (\w+) +\|",
        succeed([*words, "--dry-run"]),
    )


def test_a_dry_run_lists_the_runs_and_their_states(pretended, tmp_path):
    _, special = pretended
    grid = ["--grid", f"{RATE}=0.1,0.2", "--grid=seed=0,1", "--stop_after=0.5"]
    complete = build_words(tmp_path, *grid)
    shared = [*complete, *build_share(0)]
    special[list_names(0.2)[0]] = Interrupted("stopped after step 3")

    run(shared)
    assert list_states(shared) == [
        ("yes", "paused"),
        ("no", "new"),
        ("yes", "interrupted"),
        ("no", "new"),
    ]

    succeed(complete)
    assert list_states(shared) == [
        ("yes", "stopped"),
        ("no", "stopped"),
        ("yes", "ended"),
        ("no", "ended"),
    ]
    assert "Left: 0 of 4 runs, 0 exaFLOPs." in succeed([*shared, "--dry-run"])


NO_METRIC = r"will have no test_acuracy \(--metric=\); it will have test_accuracy"

NO_DIRECTION = "metric=c_brier_score: .*config.checkpoint.best_mode=max or min"


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["--grid=model.pool=gap,mean"], "pool=mean: config.model.pool='mean'"),
        (["--grid=seed=0,-1"], "seed=-1: config.seed=-1"),
        (["--grid=optimizer.beta3=1,2"], "beta3=1: There is no field"),
        (["--grid=objective.kind=classification", "--grid"], "--grid needs a value"),
        ([], "Missing: --grid"),
        ([*GRID, "--metric=test_acuracy"], NO_METRIC),
        ([*GRID, CUSTOM, "--metric=c_brier_score"], NO_DIRECTION),
        ([*GRID, CUSTOM, "--stop_after=0.5", "--metric=c_ece"], "metric=c_ece: .*higher or lower"),
        ([*GRID, "--metric=steps"], "metric=steps: .*higher or lower"),
        ([*GRID, "--keep=1"], "--keep=1: has no effect without --stop_after"),
        ([*GRID, "--seed=1"], "--seed=1: has no effect without --random"),
        ([*GRID, "--num_classes=1"], "--num_classes=1: has no effect without --dry_run"),
        ([*GRID, "--stop_after=1"], "--stop_after=1: .*\\(0, 0.99\\]"),
        ([*GRID, "--stop_after=0.5", "--keep=3"], "--keep=3: must be below 3"),
        ([*GRID, "--index=2", "--count=2"], "--index=2: must lie in \\[0, 2\\)"),
    ],
)
def test_mistakes_are_found_before_the_first_run(
    pretended,
    tmp_path,
    words,
    rule,
):
    err = rejected(build_words(tmp_path / "s", *words))

    assert re.search(rule, err), err
    assert not list(tmp_path.iterdir())


def test_a_search_in_each_run_cannot_be_stopped(pretended, tmp_path):
    fields = flags("init_from=w.npz", "data=digits", "search.learning_rates=0.1,0.2")
    words = [
        "sweep",
        "--config=finetune:any,own",
        f"--workdir={tmp_path}",
        "--grid=total=8 steps,9 steps",
        "--stop_after=0.5",
        *fields,
    ]

    assert "compares runs with one learning rate" in rejected(words)
