"""The verb vtab: for real on three made-up tasks, and with runs that only pretend, for the order of
runs.
"""

import csv
import json
import pathlib
import re
import shutil

import pytest

from tests.columns import list_column
from tests.integration import commands
from tests.integration.commands import rejected, run, succeed
from tests.tools.sweeps import small_suite
from tests.tools.sweeps.small_suite import build_words, read_begun
from vit_jax.tools.sweeps import vtab as sweep
from vit_jax.train.lifecycle import workdir
from vit_jax.train.lifecycle.interruption import Interrupted
from vit_jax.train.run_files import write_summary

pytestmark = pytest.mark.usefixtures("compiled_once")


def read_times(folder):
    return {path: path.stat().st_mtime_ns for path in folder.glob(f"{REAL}/**/*.json*")}


@pytest.fixture(scope="module")
def weights(tiny_run):
    return tiny_run.workdir


def read_results(folder):
    return json.loads((folder / "results.json").read_text())


REAL = "bright"  # the task whose runs really train


@pytest.fixture(scope="module")
def swept(weights, tmp_path_factory):
    """A finished sweep and what it printed."""
    folder = tmp_path_factory.mktemp("sweep") / "vtab"
    return folder, succeed(build_words(weights, folder, tasks=REAL))


@pytest.mark.slow
def test_trials_come_first_and_then_the_final_run_on_their_splits(swept):
    folder, out = swept
    (task,) = read_results(folder)["tasks"]

    assert read_begun(out) == [
        ("bright", "trial", "0.0001", "12"),
        ("bright", "trial", "0.2", "12"),
        ("bright", "final run", f"{task['learning_rate']:g}", "12"),
    ]
    assert out.endswith((folder / "results.md").read_text())
    assert task["test_accuracy"] == 1

    (final,) = folder.glob("bright/final/*")
    assert commands.summary(final)["test_images"] == small_suite.SIZES["test"]
    assert commands.checkpoint_steps(final) == [12]

    trials = list(folder.glob("bright/trials/*"))
    assert len(trials) == 2
    for trial in trials:
        assert commands.summary(trial)["test_images"] == small_suite.SIZES["val200"]
        assert not commands.checkpoints(trial)


@pytest.mark.slow
def test_the_same_command_again_repeats_nothing(swept, weights):
    folder, out = swept
    before = read_times(folder)
    table = succeed(build_words(weights, folder, tasks=REAL))

    assert out.endswith(table)
    assert read_begun(table) == []
    assert read_times(folder) == before


def read_hashes(folder):
    summaries = sorted(folder.glob("*/*/*/summary.json"))
    return [json.loads(path.read_text())["parameters_sha256"] for path in summaries]


@pytest.mark.slow
def test_killed_in_its_second_trial_it_comes_to_the_same_parameters(
    swept,
    weights,
    tmp_path,
):
    """A kill leaves no summary of the run in progress, nothing of later runs, and no results."""
    complete, _ = swept
    folder = tmp_path / "vtab"
    shutil.copytree(complete, folder)
    shutil.rmtree(folder / REAL / "final")
    (unfinished,) = folder.glob(f"{REAL}/trials/*0.2*")
    (unfinished / "summary.json").unlink()
    for file in folder.glob("results.*"):
        file.unlink()

    out = succeed(build_words(weights, folder, tasks=REAL))

    assert [run[1:3] for run in read_begun(out)] == [("trial", "0.2"), ("final run", "0.2")]
    assert read_hashes(folder) == read_hashes(complete)
    assert (folder / "results.md").read_text() == (complete / "results.md").read_text()


@pytest.mark.slow
def test_a_run_of_another_config_is_not_taken_for_this_one(swept, weights):
    folder, _ = swept
    err = rejected(build_words(weights, folder, "--config.seed=1", tasks=REAL))

    assert re.search(r"belongs to a run with another config:\n  seed: there 0, given 1", err)


@pytest.mark.slow
def test_other_weights_are_rejected(swept, weights, tmp_path):
    folder, _ = swept
    other = shutil.copytree(weights, tmp_path / "other")
    identity = folder / "weights.json"
    content = identity.read_text()

    # A plan does not compare weights.
    assert run(build_words(other, folder, "--dry-run")).code == 0

    identity.write_text(content.replace('256": "', '256": "0'))
    outcome = run(build_words(other, folder))
    identity.write_text(content)

    assert outcome.code == 2
    assert "holds a sweep of other weights" in outcome.err


@pytest.fixture
def pretended(monkeypatch):
    """Runs end at once, with their learning rate as accuracy, or 1 minus the rate in the dull task.

    Returns the names of the runs so far, and errors to raise once, by name.
    """
    ran = []
    special = {}

    def tune(config, folder):
        rate = config.schedule.learning_rate
        part = pathlib.Path(folder).parent
        name = f"{part.parent.name} {part.name} {rate:g}"
        accuracy = 1 - rate if "dull" in name else rate
        summary = {
            "test_accuracy": accuracy,
            "test_loss": 1.0,
            "test_images": 24,
        }

        with workdir.claim(folder, config) as claimed:
            if error := special.pop(name, None):
                raise error
            write_summary(claimed.folder, summary)
        ran.append(name)

    monkeypatch.setattr(sweep, "tune", tune)
    return ran, special


SETTINGS = ["--learning_rates=0.1,0.3", "--lengths=12:2"]
TRIALS = {
    "bright": ["bright trials 0.1", "bright trials 0.3"],
    "shade": ["shade trials 0.1", "shade trials 0.3"],
    "dull": ["dull trials 0.1", "dull trials 0.3"],
}

ALL_TRIALS = [*TRIALS["bright"], *TRIALS["shade"], *TRIALS["dull"]]


def make_divergence():
    return FloatingPointError("Step 3: the loss is nan")


def test_an_interrupted_sweep_goes_on(pretended, weights, tmp_path):
    """The final runs have the setting with the best mean over tasks: 0.3, 0.3, 0.7 against 0.1,
    0.1, 0.9.
    """
    ran, special = pretended
    special["shade trials 0.1"] = Interrupted("stopped after step 3")
    words = build_words(weights, tmp_path, settings=SETTINGS)

    outcome = run(words)
    assert outcome.code == 75
    assert outcome.err == "vit-jax: stopped after step 3\n"
    assert ran == TRIALS["bright"]

    succeed(words)
    assert ran == [*ALL_TRIALS, "bright final 0.3", "shade final 0.3", "dull final 0.3"]


def read_rows(table):
    """Return the cells of each line of a table by its first cell."""
    rows = {}
    for line in table.splitlines():
        if cells := [cell.strip() for cell in line.split("|")[1:-1]]:
            rows[cells[0]] = cells
    return rows


EXPECTED_ROWS = {
    "bright": [
        "bright",
        "light",
        "30.00",
        # The interval of 7 of 24 images, the whole number next to 30 %.
        "14.91 to 49.17",
        "24",
        "0.3",
        "12",
        "90.0",
        "80.0",
        "70.0",
    ],
    "**light**": [
        "**light**",
        "",
        "**30.00**",
        "",
        "2 of 2 tasks",
        "",
        "",
        "80.00",
        "70.00",
        "60.00",
    ],
    "**all tasks**": [
        "**all tasks**",
        "",
        "**43.33**",
        "",
        "3 of 3 tasks",
        "",
        "",
        "70.00",
        "60.00",
        "51.00",
    ],
    # Means over the validation images: (0.1 + 0.1 + 0.9) / 3 and (0.3 + 0.3 + 0.7) / 3.
    "0.1": ["0.1", "12", "3", "36.67"],
    "0.3": ["0.3", "12", "3", "43.33 (chosen)"],
}


def test_the_table_shows_tasks_means_and_the_paper(
    pretended,
    weights,
    tmp_path,
):
    table = succeed(build_words(weights, tmp_path, settings=SETTINGS))
    rows = read_rows(table)

    assert rows["task"][:7] == [
        "task",
        "group",
        "top-1 %",
        "95 %",
        "test images",
        "learning rate",
        "steps",
    ]
    for name, expected in EXPECTED_ROWS.items():
        assert rows[name] == expected
    assert rows["dull"][1:3] == ["nothing", "70.00"]


def test_results_as_json_and_csv(pretended, weights, tmp_path):
    succeed(build_words(weights, tmp_path, settings=SETTINGS))
    content = read_results(tmp_path)
    validation_accuracies = list_column(content["trials"], "validation_accuracy")

    assert list_column(content["means"], "name") == [
        "light",
        "nothing",
        "all tasks",
    ]
    assert content["means"][-1]["accuracy"] == pytest.approx(1.3 / 3)
    assert validation_accuracies == pytest.approx([0.1, 0.3, 0.1, 0.3, 0.9, 0.7])

    with open(tmp_path / "results.csv") as file:
        bright, shade, dull = csv.DictReader(file)
    assert (bright["task"], bright["test_accuracy"]) == ("bright", "0.3")
    assert (shade["task"], shade["test_accuracy"]) == ("shade", "0.3")
    assert (dull["task"], dull["test_accuracy"]) == ("dull", "0.7")
    assert shade["paper_percent: ViT-L/16, JFT-300M"] == "60.0"


def test_each_task_may_have_its_own_setting(pretended, weights, tmp_path):
    ran, _ = pretended
    succeed(build_words(weights, tmp_path, "--sweep=per_task", settings=SETTINGS))

    assert ran == [
        *TRIALS["bright"],
        "bright final 0.3",
        *TRIALS["shade"],
        "shade final 0.3",
        *TRIALS["dull"],
        "dull final 0.1",
    ]
    assert read_results(tmp_path)["sweep"] == "per_task"
    assert "mean validation" not in (tmp_path / "results.md").read_text()


def test_a_single_setting_needs_no_trials(pretended, weights, tmp_path):
    ran, _ = pretended
    settings = ["--learning_rates=0.3", "--lengths=12:2"]
    succeed(build_words(weights, tmp_path, settings=settings, tasks="light"))

    assert ran == ["bright final 0.3", "shade final 0.3"]
    assert read_results(tmp_path)["tasks"][0]["validation_accuracy"] is None


def test_machines_share_the_tasks_and_wait_for_each_others_trials(
    pretended,
    weights,
    tmp_path,
):
    ran, _ = pretended
    first = build_words(
        weights,
        tmp_path,
        "--index=0",
        "--count=2",
        settings=SETTINGS,
    )
    second = build_words(
        weights,
        tmp_path,
        "--index=1",
        "--count=2",
        settings=SETTINGS,
    )
    message = r"trials of shade are missing in .*The same command goes on"

    outcome = run(first)
    assert outcome.code == 75
    assert re.search(message, outcome.err)
    assert ran == [*TRIALS["bright"], *TRIALS["dull"]]
    assert not (tmp_path / "results.md").exists()

    # The second machine has all trials, and does its final run.
    ran.clear()
    out = succeed(second)
    assert ran == [*TRIALS["shade"], "shade final 0.3"]
    assert "1 of 3 tasks" in out
    assert "Without a result: bright, dull." in out

    ran.clear()
    plan = succeed([*first, "--dry-run"])

    assert re.search(r"^\| shade .* no +\| +2 of 2 \| done", plan, re.MULTILINE)
    assert "Left for this machine: at most 24 steps of 16 images, 384 images of 4x4 pixels." in plan
    assert ran == []

    assert "3 of 3 tasks" in succeed(first)
    assert ran == ["bright final 0.3", "dull final 0.3"]


def test_machines_need_not_wait_where_each_task_has_its_own_setting(
    pretended,
    weights,
    tmp_path,
):
    ran, _ = pretended
    options = ["--sweep=per_task", "--index=1", "--count=3"]
    succeed(build_words(weights, tmp_path, *options, settings=SETTINGS))

    assert ran == [*TRIALS["shade"], "shade final 0.3"]


def test_what_diverges_is_named_and_not_tried_again(
    pretended,
    weights,
    tmp_path,
):
    ran, special = pretended
    special["bright trials 0.3"] = make_divergence()
    special["shade final 0.1"] = FloatingPointError("Step 9: the loss is nan")
    words = build_words(weights, tmp_path, settings=SETTINGS)

    out = succeed(words)

    assert "bright, trial: learning rate 0.3, 12 steps: Step 3: the loss is nan" in out
    assert "Without a result: shade." in out
    # 0.1, 0.1 and 0.9 against 0, 0.3 and 0.7.
    assert [name for name in ran if "final" in name] == ["bright final 0.1", "dull final 0.1"]

    ran.clear()
    assert "2 of 3 tasks" in succeed(words)
    assert ran == []


def test_where_all_trials_diverge(pretended, weights, tmp_path):
    _, special = pretended
    for name in ALL_TRIALS:
        special[name] = make_divergence()

    err = rejected(build_words(weights, tmp_path, settings=SETTINGS))

    assert "No trial's loss stayed finite: try lower learning rates" in err


def test_where_all_trials_of_a_task_diverge_the_others_go_on(
    pretended,
    weights,
    tmp_path,
):
    ran, special = pretended
    for name in TRIALS["shade"]:
        special[name] = make_divergence()

    out = succeed(
        build_words(
            weights,
            tmp_path,
            "--sweep=per_task",
            settings=SETTINGS,
        )
    )

    assert ran[-4:] == ["shade final 0.1", *TRIALS["dull"], "dull final 0.1"]
    assert "3 of 3 tasks" in out


def test_missing_data(pretended, weights, tmp_path):
    ran, _ = pretended
    message = r"Data of 1 of 4 tasks cannot be opened:\n  absent: .*make images"
    outcome = run(
        build_words(
            weights,
            tmp_path,
            suite="WITH_ABSENT",
            settings=SETTINGS,
        )
    )

    assert outcome.code == 2
    assert re.search(message, outcome.err)
    assert "--available the other tasks are run" in outcome.err
    assert ran == []


def test_tasks_whose_data_is_available(pretended, weights, tmp_path):
    words = build_words(
        weights,
        tmp_path,
        "--available",
        suite="WITH_ABSENT",
        settings=SETTINGS,
    )
    outcome = run(words)

    assert outcome.code == 0
    assert "note: absent is skipped. There are no such images; run: make images." in outcome.err
    assert "3 of 4 tasks" in outcome.out
    assert "Without a result: absent." in outcome.out


def test_no_task_has_available_data(pretended, weights, tmp_path):
    words = build_words(
        weights,
        tmp_path,
        "--available",
        suite="WITH_ABSENT",
        tasks="absent",
    )
    outcome = run(words)

    assert outcome.code == 2
    assert "available the other" not in outcome.err


def test_all_of_vtab_says_what_to_prepare(weights, tmp_path):
    folders = [f"--workdir={tmp_path}", f"--data_dir={tmp_path}"]
    err = rejected(["vtab", str(weights), "--tasks=all", *folders])

    assert "Data of 19 of 19 tasks cannot be opened" in err
    assert err.count("vit-jax prepare ") == 19


def test_without_published_results_there_are_no_columns_for_them(
    pretended,
    weights,
    tmp_path,
):
    out = succeed(
        build_words(
            weights,
            tmp_path,
            suite="UNPUBLISHED",
            settings=SETTINGS,
        )
    )

    assert "ViT-L/16" not in out
    assert read_results(tmp_path)["means"][0]["published"] == []


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("--learning_rates=0.1,0.1", "--learning_rates=0.1,0.1: a value occurs twice"),
        ("--lengths=500", "--lengths=500: "),
        ("--lengths=500:x", "--lengths=500:x: "),
        ("--lengths=500:500", "--lengths=500:500: "),
        ("--lengths=500:100,500:50", "--lengths=500,500: a value occurs twice"),
        ("--config.total=5 steps", "Use --lengths="),
        ("--config.data=digits", "Use --tasks= and --suite="),
        ("--config=digits", "--config=digits: must be a recipe for fine-tuning"),
        # Found once the weights are read.
        ("--config.model.name=ViT-B/16", "config.model.name='ViT-B/16'"),
    ],
)
def test_mistakes(weights, tmp_path, more, message):
    err = rejected(build_words(weights, tmp_path, more))

    assert message in err
    assert not list(tmp_path.iterdir())
