"""The verb sweep: two settings that really train, and runs that only pretend, for tables, shares and early stopping."""

import json
import re
import shlex
import shutil
import statistics

import pytest

from tests.integration import commands
from tests.integration.commands import rejected, run, succeed
from tests.tiny import LENGTH, RECIPE, RUN, flags
from vit_jax.config import load_recipe
from vit_jax.train.lifecycle.interruption import Interrupted

pytestmark = [pytest.mark.usefixtures("compiled_once"), pytest.mark.xdist_group("tiny")]

RATE = "schedule.learning_rate"


def words_of(folder, *more, recipe=RECIPE):
    return ["sweep", f"--config={recipe}", f"--workdir={folder}", *flags(*RUN, *LENGTH), *more]


def results(folder):
    return json.loads((folder / "sweep.json").read_text())


def begun(out):
    return re.findall(r"^run (\d of \d.*): (.*)$", out, re.MULTILINE)


# Runs that really train, with the program of the tiny run.

CUSTOM = "--config.evaluation.evaluators.c.kind=math:hypot"  # it states no directions
HALVING = ["--grid", "input.train_examples=200,1200", "--stop_after=0.5", "--metric=test_loss"]
NAMES = [f"input.train_examples={number}" for number in (200, 1200)]


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A finished sweep of which one run was stopped: its folder, what it printed, the run that ended, the other."""
    folder = tmp_path_factory.mktemp("sweep") / "examples"
    out = succeed(words_of(folder, *HALVING))
    return folder, out, *sorted(NAMES, key=lambda name: loss_at_half(folder / "runs" / name))


def loss_at_half(folder):
    return next(
        line["test_loss"]
        for line in commands.metrics(folder)
        if line["step"] == 3 and "test_loss" in line
    )


@pytest.mark.slow
def test_the_better_setting_ends_as_a_run_that_was_never_paused(swept, tmp_path):
    folder, out, kept, dropped = swept
    begin = [("1 of 2, to 50%", NAMES[0]), ("2 of 2, to 50%", NAMES[1]), ("1 of 1", kept)]

    assert begun(out) == begin

    stopped = folder / "runs" / dropped
    assert commands.checkpoint_steps(stopped)[-1] == 3

    number = dropped.partition("=")[2]
    loss = loss_at_half(stopped)

    assert re.search(rf"^\| {number} .* 0 of 1, stopped at {loss:.3g} \|$", out, re.MULTILINE)

    (command,) = re.findall(r"^    (vit-jax pretrain .*)$", out, re.MULTILINE)
    _, *words = shlex.split(command)
    succeed([*words[:-1], f"--workdir={tmp_path}"])

    assert commands.summary(tmp_path)["parameters_sha256"] == hash_of(folder, kept)
    assert commands.curve(tmp_path) == commands.curve(folder / "runs" / kept)


def hash_of(folder, name):
    return commands.summary(folder / "runs" / name)["parameters_sha256"]


@pytest.mark.slow
def test_the_same_command_again_trains_nothing(swept):
    folder, out, *_ = swept
    before = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/*.json*")}
    again = succeed(words_of(folder, *HALVING))

    assert out.endswith(again)
    assert {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/*.json*")} == before


@pytest.mark.slow
def test_killed_after_the_pause_it_comes_to_the_same_results(swept, tmp_path):
    """A kill before the record of the pause leaves a checkpoint of that step, and nothing of the other run."""
    folder = tmp_path / "examples"
    (kept, dropped) = swept[2:]
    shutil.copytree(swept[0], folder)
    for name in ("sweep.json", "sweep.md", f"runs/{dropped}/pause.json"):
        (folder / name).unlink()

    shutil.rmtree(folder / "runs" / kept)
    out = succeed(words_of(folder, *HALVING))

    assert begun(out) == begun(swept[1])
    assert "continuing from this workdir's checkpoint of step 3" in out
    assert hash_of(folder, kept) == hash_of(swept[0], kept)
    assert commands.checkpoint_steps(folder / "runs" / dropped)[-1] == 3


# Runs that pretend.

GRID = ["--grid", f"{RATE}=0.1,0.2,0.3", "--grid", "seed=0,1,2"]


def names(*rates, seeds=range(3)):
    return [f"{RATE}={rate},seed={seed}" for rate in rates for seed in seeds]


def test_the_table_has_means_deviations_and_the_best_setting_as_a_command(pretended, tmp_path):
    out = succeed(words_of(tmp_path, *GRID, "--config.model.pool=token"))
    assert [name for name, _ in pretended[0]] == names(0.1, 0.2, 0.3)

    deviation = statistics.stdev([0.5, 0.51, 0.52])
    assert re.findall(
        r"^\| (0.\d) +\| +([\d.]+%) \| +([\d.]+%) .* (\d of \d) \|$", out, re.MULTILINE
    ) == [
        (f"{rate}", f"{0.51 + rate:.2%}", f"{deviation:.2%}", "3 of 3") for rate in (0.1, 0.2, 0.3)
    ]
    assert f"Best: {RATE}=0.3, test_accuracy 81.00%" in out

    (command,) = re.findall(r"^    vit-jax pretrain (.*)$", out, re.MULTILINE)
    recipe, *overrides, folder = shlex.split(command)
    config = load_recipe(recipe.removeprefix("--config="), overrides)
    recipes_seed = load_recipe(str(RECIPE)).seed

    assert (config.schedule.learning_rate, config.seed, config.model.pool) == (
        0.3,
        recipes_seed,
        "token",
    )
    assert folder == f"--workdir={tmp_path / 'best'}"

    content = results(tmp_path)
    assert out.endswith((tmp_path / "sweep.md").read_text())
    assert content["best"] == content["rows"][2]
    assert [row["test_accuracy_deviation"] for row in content["rows"]] == pytest.approx(
        [deviation] * 3
    )
    assert content["command"] == f"vit-jax pretrain {command}"


def test_another_metric_a_tie_and_a_run_that_diverged(pretended, tmp_path):
    """The loss is lowest at 0.3, whose run diverged once; without a seed the first of equal settings is named."""
    pretended[1][names(0.3)[1]] = FloatingPointError("Step 3: the loss is nan")
    words = words_of(tmp_path / "a", *GRID, "--metric=test_loss")
    out = succeed(words)

    assert f"Best: {RATE}=0.2, test_loss 0.29 (lower is better)" in out
    assert "3 of 3, 1 diverged" in out
    assert len(pretended[0]) == 8
    assert out.endswith(succeed(words))
    assert len(pretended[0]) == 8
    assert "Best: model.pool=token," in succeed(
        words_of(tmp_path / "b", "--grid=model.pool=token,gap")
    )


def test_machines_share_the_runs_and_an_interrupted_sweep_goes_on(pretended, tmp_path):
    ran, special = pretended
    first, second = (
        words_of(tmp_path, *GRID, f"--index={index}", "--count=2") for index in range(2)
    )
    special[names(0.2)[1]] = Interrupted("stopped after step 3")
    outcome = run(first)

    assert (outcome.code, outcome.err) == (75, "vit-jax: stopped after step 3\n")

    out = succeed(second)
    assert f"Best so far: {RATE}=0.3" not in out  # one of its seeds is missing
    assert f"Not ended: {', '.join([names(0.2)[1], names(0.3)[0], names(0.3)[2]])}." in out
    assert f"Best: {RATE}=0.3" in succeed(first)
    assert sorted(name for name, _ in ran) == names(0.1, 0.2, 0.3)


def test_a_recipe_for_fine_tuning_is_fine_tuned(pretended, tmp_path):
    words = ["sweep", "--config=finetune:any,own", f"--workdir={tmp_path}", *GRID]
    fields = flags("init_from=w.npz", "data=digits", "search.learning_rates=()")
    out = succeed([*words, *fields])

    assert len(pretended[0]) == 9
    assert "    vit-jax finetune --config=finetune:any,own --config.init_from=w.npz" in out


def test_only_the_best_settings_go_on(pretended, tmp_path):
    ran, _ = pretended
    words = words_of(tmp_path, *GRID, "--stop_after=0.25")
    out = succeed(words)

    assert ran == [
        *((name, 0.25) for name in names(0.1, 0.2, 0.3)),
        *((name, None) for name in names(0.2, 0.3)),
    ]

    value = 0.2 * statistics.mean(
        [0.6, 0.61, 0.62]
    )  # of step 20, the last evaluation up to a quarter
    assert f"0 of 3, stopped at {value:.2%}" in out
    assert f"Best: {RATE}=0.3" in out
    assert results(tmp_path)["rows"][0]["stopped_at"] == pytest.approx(value)

    ran.clear()
    assert out.endswith(succeed(words))
    assert ran == []

    succeed([*words, "--keep=1"])  # what has ended stays
    succeed([*words[:-1], "--stop_after=0.1"])

    assert ran == []

    succeed([*words[:-1], "--stop_after=0.5"])  # the stopped ones are compared again, later
    assert ran == [(name, 0.5) for name in names(0.1)]

    succeed(words[:-1])
    assert ran[3:] == [(name, None) for name in names(0.1)]
    assert "stopped" not in (tmp_path / "sweep.md").read_text()


def test_settings_that_diverge_are_stopped_first_and_a_loss_is_better_when_lower(
    pretended, tmp_path
):
    ran, special = pretended
    special[names(0.3)[1]] = FloatingPointError("Step 3: the loss is nan")
    out = succeed(words_of(tmp_path, *GRID, "--stop_after=0.5", "--keep=2"))

    assert [name for name, fraction in ran if fraction is None] == names(0.1, 0.2)
    assert "1 of 3, 1 diverged, stopped at" in out


def test_machines_wait_for_each_other_where_settings_are_compared(pretended, tmp_path):
    ran, _ = pretended
    words = [
        words_of(tmp_path, *GRID, "--stop_after=0.5", f"--index={index}", "--count=2")
        for index in range(2)
    ]
    outcome = run(words[0])

    assert outcome.code == 75
    assert re.search(r"trained to 50%.* missing in .*seed=1.*The same command goes on", outcome.err)
    assert len(ran) == 5

    succeed(words[1])
    assert f"Best: {RATE}=0.3" in succeed(words[0])
    assert sorted(name for name, fraction in ran if fraction is None) == names(0.2, 0.3)


def test_a_dry_run_lists_the_runs_and_their_states(pretended, tmp_path):
    _, special = pretended
    words = words_of(
        tmp_path,
        "--grid",
        f"{RATE}=0.1,0.2",
        "--grid=seed=0,1",
        "--stop_after=0.5",
        "--index=0",
        "--count=2",
    )
    special[names(0.2)[0]] = Interrupted("stopped after step 3")
    run(words)
    states = re.findall(r"\| (yes|no) +\| (\w+) +\|", succeed([*words, "--dry-run"]))

    assert states == [("yes", "paused"), ("no", "new"), ("yes", "interrupted"), ("no", "new")]

    succeed(words[:-2])
    plan = succeed([*words, "--dry-run"])

    assert re.findall(r"\| (yes|no) +\| (\w+) +\|", plan) == [
        (share, state) for state in ("stopped", "ended") for share in ("yes", "no")
    ]
    assert "Left: 0 of 4 runs, 0 exaFLOPs." in plan


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["--grid=model.pool=gap,mean"], "pool=mean: config.model.pool='mean'"),
        (["--grid=seed=0,-1"], "seed=-1: config.seed=-1"),
        (["--grid=optimizer.beta3=1,2"], "beta3=1: There is no field"),
        (["--grid=objective.kind=classification", "--grid"], "--grid needs a value"),
        ([], "Missing: --grid"),
        (
            [*GRID, "--metric=test_acuracy"],
            r"will have no test_acuracy \(--metric=\); it will have test_accuracy",
        ),
        (
            [*GRID, CUSTOM, "--metric=c_brier_score"],
            "metric=c_brier_score: .*config.checkpoint.best_mode=max or min",
        ),
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
def test_mistakes_are_found_before_the_first_run(pretended, tmp_path, words, rule):
    err = rejected(words_of(tmp_path / "s", *words))

    assert re.search(rule, err), err
    assert not list(tmp_path.iterdir())


def test_a_search_in_each_run_cannot_be_stopped(pretended, tmp_path):
    words = [
        "sweep",
        "--config=finetune:any,own",
        f"--workdir={tmp_path}",
        "--grid=total=8 steps,9 steps",
    ]
    fields = flags("init_from=w.npz", "data=digits", "search.learning_rates=0.1,0.2")

    assert "compares runs with one learning rate" in rejected([*words, "--stop_after=0.5", *fields])
