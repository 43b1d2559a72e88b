"""Rented machines are deleted or named at every exit: hours and price before, a limit, each step
failing in turn.
"""

import itertools
import os
import re
import shutil
import signal
import time

import pytest

from tests.launch.conftest import STAND_INS, finish

RUN = [
    "run",
    "--name=pod",
    "--zone=us-west4-a",
    "--type=v5litepod-16",
    "--workdir=gs://bucket/run",
]
QUIET = ["--poll_seconds=0", "--max_failures=0"]
WORDS = ["--", "pretrain", "--config=configs/x.py"]
JOB = ["--name=vit", "--image=registry.example/vit:1", "--workdir=gs://bucket/run"]
TPU = [*JOB, "--accelerator=tpu-v5-lite-podslice", "--topology=4x4"]
LAUNCHERS = {
    "tpu_pod.sh": ["tpu_pod.sh", *RUN, "--poll_seconds=0"],
    "gke.sh": ["gke.sh", "submit", *TPU],
}
PLAN = """echo '{
  "fits": false,
  "totals": {
    "days": 0.5,
    "chip_hours": 192.0,
    "core_days": 8.0
  }
}'"""

# A cloud with one machine, which exists as long as the file does.
DESCRIBE = 'if [[ -e "$PLAY/machine" ]]; then echo ACTIVE; else echo NOT_FOUND >&2; exit 1; fi'
MACHINE = {
    "describe": DESCRIBE,
    "create": 'touch "$PLAY/machine"',
    "delete": 'rm -f "$PLAY/machine"',
    "status": "echo pod-w-0 exit 0 100",
    "summary": '[[ -e "$PLAY/finished" ]]',
    "log": 'touch "$PLAY/finished"',
}
STEPS = 13  # number of calls of gcloud of an undisturbed run
TROUBLES = {
    "fails": ["exit 1", "true"],
    "fails after its effect": ["trap 'exit 1' EXIT", "true"],
    "no network until the terminal is closed": [*["exit 1"] * 30, "kill -HUP 0; exit 1"],
    "Ctrl-C": ["kill -INT 0; exit 1", "true"],
    "the script alone gets SIGTERM": ["kill -TERM $(ps -o pgid= -p $$)", "true"],
}


@pytest.fixture
def stage(stage):
    """A stage with a stand-in for vit-jax here."""
    stage.install(STAND_INS / "vit-jax")
    return stage


@pytest.mark.parametrize("words", LAUNCHERS.values(), ids=LAUNCHERS)
def test_hours_and_price_are_printed_before_anything_is_rented(stage, words):
    """The first call of gcloud or kubectl fails, so none of these commands gets so far."""
    stage.answers("plan", PLAN)
    for kind in ("summary", "describe", "apply"):
        stage.answers(kind, "echo down >&2; exit 1")

    result = stage.run(*words, "--price=2", "--max_hours=10", *WORDS)

    said = result.stderr.splitlines()
    before = said[: said.index("down")]
    assert (
        "vit-jax: plan, by arithmetic: 12.0 hours on 16 chips, 192 chip-hours, 384.00 at 2 a "
        "chip-hour; evaluation, checkpoints, input and interruptions are not included"
    ) in before
    assert (
        "vit-jax: --max_hours=10: at most 160.0 chip-hours, 320.00 at 2 a chip-hour, then the run "
        "is saved and stopped"
    ) in before
    assert (
        "vit-jax: --max_hours=10 is less: the run is stopped before its end, and the same command "
        "goes on"
    ) in said
    assert "vit-jax: by this plan the run does not fit into the memory of the chips" in said


@pytest.mark.parametrize(
    ("days", "options", "line"),
    [
        ("0.5", [], "--max_hours=24.0 is the default, twice the plan; --max_hours=none sets no"),
        ("0.01", [], "--max_hours=2.0 is the default"),
        ("0.5", ["--max_hours=3"], "--max_hours=3: at most 48.0 chip-hours"),
    ],
)
@pytest.mark.parametrize("words", LAUNCHERS.values(), ids=LAUNCHERS)
def test_the_default_limit_is_twice_the_plan(
    stage,
    words,
    days,
    options,
    line,
):
    stage.answers("plan", PLAN.replace("0.5", days))
    stage.answers("summary", "echo down >&2; exit 1")
    stage.answers("describe", "echo down >&2; exit 1")
    result = stage.run(*words, *options, *WORDS)

    assert line in result.stderr
    assert ("is the default" in result.stderr) == (not options)
    if words[0] == "gke.sh":
        hours = float(re.findall(r"--max_hours=([\d.]+)", line)[0])
        applied = (stage.folder / "applied").read_text()
        assert f"activeDeadlineSeconds: {3600 * hours:.0f}" in applied


@pytest.mark.parametrize("words", LAUNCHERS.values(), ids=LAUNCHERS)
def test_a_run_without_a_limit(stage, words):
    stage.answers("plan", PLAN)
    stage.answers("summary", "echo down >&2; exit 1")
    stage.answers("describe", "echo down >&2; exit 1")
    result = stage.run(*words, "--max_hours=none", *WORDS)

    assert "12.0 hours on 16 chips" in result.stderr
    assert "--max_hours=" not in result.stderr
    if words[0] == "gke.sh":
        assert "activeDeadlineSeconds" not in (stage.folder / "applied").read_text()


def test_a_plan_that_fails_stops_no_run(stage):
    reason = "vit-jax: How many images folder:x has"
    stage.answers("plan", f"echo '{reason} is not known here' >&2; exit 2")

    result = stage.run("gke.sh", "submit", *TPU, *WORDS)

    assert result.returncode == 0, result.stderr
    assert f"hours and price are not known: {reason}" in result.stderr


def test_a_machine_that_plan_does_not_know_stops_no_run(stage):
    words = [
        "run",
        "--name=pod",
        "--zone=us-west4-a",
        "--type=v2-8",
        "--workdir=gs://bucket/run",
    ]
    result = stage.run("tpu_pod.sh", *words, "--dry-run", *WORDS)

    assert "plan does not know v2-8" in result.stderr


@pytest.mark.parametrize("hours", ["0", "0.0001", "many", "-1", "1e3"])
def test_hours_that_limit_nothing_are_rejected(stage, hours):
    result = stage.run("tpu_pod.sh", *RUN, f"--max_hours={hours}", *WORDS)

    assert result.returncode == 2
    assert f"--max_hours={hours}: must be" in result.stderr
    assert stage.calls() == []


def test_hours_of_another_command_are_rejected(stage):
    words = ["delete", "--name=pod", "--zone=us-west4-a", "--max_hours=1"]
    result = stage.run("tpu_pod.sh", *words, *WORDS)

    assert result.returncode == 2
    assert "--max_hours is of run" in result.stderr
    assert stage.calls() == []


def test_the_workers_get_what_is_left_of_the_hours(stage):
    for kind, script in MACHINE.items():
        stage.answers(kind, script)

    result = stage.run("tpu_pod.sh", *RUN, *QUIET, "--max_hours=1", *WORDS)

    assert result.returncode == 0, result.stderr

    words = itertools.chain(*stage.calls("gcloud"))
    (start,) = (word for word in words if "tpu_worker.sh start" in word)
    seconds = int(start.partition("--seconds=")[2].split()[0])
    assert 3000 < seconds <= 3600


def clear(stage):
    """Remove the scripts, the machine and the calls of an earlier run."""
    shutil.rmtree(stage.folder / "play")
    (stage.folder / "play").mkdir()
    (stage.folder / "calls").unlink(missing_ok=True)


def play(stage, trouble, number):
    """Run with a trouble at this call of gcloud; return the process and its errors."""
    clear(stage)
    for kind, script in MACHINE.items():
        stage.answers(kind, script)
    stage.answers("any", *["true"] * number, *TROUBLES[trouble])

    repository = "--repository=https://example.org/v.git"
    with stage.start(
        "tpu_pod.sh",
        *RUN,
        *QUIET,
        repository,
        *WORDS,
    ) as process:
        _, stderr = finish(process, timeout=300)
    return process, stderr


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_machine_is_deleted_or_named_whatever_step_fails(stage, trouble):
    machine = stage.folder / "play/machine"
    rented = stage.checkout / "runs/pod/rented.txt"
    command = "./launch/tpu_pod.sh delete --name=pod --zone=us-west4-a"
    ends = set()

    for number in itertools.count():
        process, stderr = play(stage, trouble, number)
        step = f"{trouble} at call {number}:\n{stderr}"
        if len(stage.calls("gcloud")) <= number:
            assert number >= STEPS, step
            break

        if machine.exists():
            assert process.returncode != 0, step
            assert "costs money until it is deleted" in stderr, step
            assert command in stderr, step
            assert command in rented.read_text(), step
        elif process.returncode == 0:
            assert "pod is deleted" in stderr or "Nothing is created" in stderr, step
            assert not rented.exists(), step
        ends.add(machine.exists())

    assert False in ends, "some end with no machine left"


def check_nodes_are_named(process, stderr):
    assert process.returncode != 0
    assert "the nodes of vit cost money until" in stderr
    assert "./launch/gke.sh delete --name=vit" in stderr


COMMANDS = {
    "run": ["run", "--poll_seconds=0", *TPU, *WORDS],
    "submit": ["submit", "--poll_seconds=0", *TPU, *WORDS],
    "log": ["log", "--poll_seconds=0", "--name=vit"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_nodes_of_a_cluster_are_named_at_a_signal(stage, command, number):
    # bash alone: one that waits for a program ignores an interrupt that comes as the program ends
    wait = ': >"$PLAY/here"; exec sleep 600'
    here = stage.folder / "play/here"
    stage.answers("apply", wait if command == "submit" else "true")
    stage.answers("logs", wait)
    stage.answers("get", "exit 1")

    with stage.start("gke.sh", *COMMANDS[command]) as process:
        while not here.exists():
            assert process.poll() is None
            time.sleep(0.01)
        os.killpg(process.pid, number)
        _, stderr = finish(process, timeout=300)

    check_nodes_are_named(process, stderr)


@pytest.mark.parametrize("command", COMMANDS)
def test_nodes_of_a_cluster_are_named_where_kubectl_fails(stage, command):
    stage.answers("apply", "exit 1" if command == "submit" else "true")
    stage.answers("logs", "exit 1")
    stage.answers("get", "exit 1")

    with stage.start("gke.sh", *COMMANDS[command]) as process:
        _, stderr = finish(process, timeout=300)

    check_nodes_are_named(process, stderr)


def test_a_jobset_at_its_time_limit(stage):
    stage.answers("get", "echo Failed/0", "echo DeadlineExceeded")
    result = stage.run("gke.sh", "run", *TPU, "--max_hours=10", *WORDS)

    assert result.returncode == 75
    assert "vit was stopped after --max_hours" in result.stderr
    assert "activeDeadlineSeconds: 36000" in (stage.folder / "applied").read_text()
