"""Rented machines are deleted or named at every exit: hours and price before, a limit, each step failing in turn."""

import itertools
import os
import signal

import pytest

from tests.launch.conftest import STAND_INS, finish

RUN = ["run", "--name=pod", "--zone=us-west4-a", "--type=v5litepod-16", "--workdir=gs://bucket/run"]
QUIET = ["--poll_seconds=0", "--max_failures=0"]
WORDS = ["--", "pretrain", "--config=configs/x.py"]
JOB = ["--name=vit", "--image=registry.example/vit:1", "--workdir=gs://bucket/run"]
TPU = [*JOB, "--accelerator=tpu-v5-lite-podslice", "--topology=4x4"]
PLAN = """echo '{
  "fits": false,
  "totals": {
    "days": 0.5,
    "chip_hours": 192.0,
    "core_days": 8.0
  }
}'"""

# A cloud with one machine, which exists as long as the file does.
MACHINE = {
    "describe": 'if [[ -e "$PLAY/machine" ]]; then echo ACTIVE; else echo NOT_FOUND >&2; exit 1; fi',
    "create": 'touch "$PLAY/machine"',
    "delete": 'rm -f "$PLAY/machine"',
    "status": "echo pod-w-0 exit 0 100",
    "summary": '[[ -e "$PLAY/finished" ]]',
    "log": 'touch "$PLAY/finished"',
}
STEPS = 13  # calls of gcloud of a run that is never disturbed
TROUBLES = {
    "fails": ("exit 1", "true"),
    "fails after its effect": ("trap 'exit 1' EXIT", "true"),
    "no network until the terminal is closed": (*["exit 1"] * 30, "kill -HUP 0; exit 1"),
    "Ctrl-C": ("kill -INT 0; exit 1", "true"),
    "the script alone gets SIGTERM": ("kill -TERM $(ps -o pgid= -p $$)", "true"),
}


@pytest.fixture
def stage(stage):
    """A stage with a stand-in for vit-jax here."""
    stage.install(STAND_INS / "vit-jax")
    return stage


@pytest.mark.parametrize(
    ("words", "chips"),
    [(["tpu_pod.sh", *RUN, "--poll_seconds=0"], 16), (["gke.sh", "submit", *TPU], 16)],
)
def test_hours_and_price_are_printed_before_anything_is_rented(stage, words, chips):
    """None of these commands gets so far: the first call of gcloud or kubectl fails."""
    stage.answers("plan", PLAN)
    for kind in ("summary", "describe", "apply"):
        stage.answers(kind, "echo down >&2; exit 1")

    said = stage.run(*words, "--price=2", "--max_hours=10", *WORDS).stderr.splitlines()
    plan = "vit-jax: plan, by arithmetic: 12.0 hours on 16 chips, 192 chip-hours, 384.00 at 2 a chip-hour; "
    plan += "evaluation, checkpoints, input and interruptions are not included"

    assert plan in said
    assert said.index(plan) < said.index("down")
    assert (
        "vit-jax: --max_hours=10 is less: the run is stopped before its end, and the same command goes on"
        in said
    )
    assert "vit-jax: by this plan the run does not fit into the memory of the chips" in said

    limit = "vit-jax: --max_hours=10: at most 160.0 chip-hours, 320.00 at 2 a chip-hour, then the run is saved and "
    assert f"{limit}stopped" in said[: said.index("down")]


def test_a_plan_that_fails_stops_no_run(stage):
    stage.answers(
        "plan", "echo 'vit-jax: How many images folder:x has is not known here' >&2; exit 2"
    )
    result = stage.run("gke.sh", "submit", *TPU, *WORDS)

    assert result.returncode == 0, result.stderr
    assert "hours and price are not known: vit-jax: How many images folder:x has" in result.stderr

    result = stage.run("tpu_pod.sh", *RUN[:3], "--type=v2-8", RUN[-1], "--dry-run", *WORDS)
    assert "plan does not know v2-8" in result.stderr


@pytest.mark.parametrize("hours", ["0", "0.0001", "many", "-1", "1e3", ""])
def test_hours_that_limit_nothing_are_refused(stage, hours):
    words = [] if not hours else [f"--max_hours={hours}"]
    result = stage.run(
        "tpu_pod.sh",
        *(["delete", *RUN[1:3], "--max_hours=1"] if not hours else [*RUN, *words]),
        *WORDS,
    )

    assert result.returncode == 2
    assert (f"--max_hours={hours}: must be" if hours else "--max_hours is of run") in result.stderr
    assert stage.calls() == []


def test_the_workers_get_what_is_left_of_the_hours(stage):
    for kind, script in MACHINE.items():
        stage.answers(kind, script)

    result = stage.run("tpu_pod.sh", *RUN, *QUIET, "--max_hours=1", *WORDS)

    assert result.returncode == 0, result.stderr

    (start,) = (
        word for call in stage.calls("gcloud") for word in call if "tpu_worker.sh start" in word
    )
    assert 3000 < int(start.partition("--seconds=")[2].split()[0]) <= 3600


def play(stage, trouble, number):
    """Run with a trouble at this call of gcloud; return the process and its errors."""
    for path in sorted((stage.folder / "play").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (stage.folder / "calls").unlink(missing_ok=True)
    for kind, script in MACHINE.items():
        stage.answers(kind, script)
    stage.answers("any", *["true"] * number, *TROUBLES[trouble])
    with stage.start(
        "tpu_pod.sh", *RUN, *QUIET, "--repository=https://example.org/v.git", *WORDS
    ) as process:
        _, stderr = finish(process, timeout=60)
    return process, stderr


@pytest.mark.parametrize("trouble", TROUBLES)
def test_a_machine_is_deleted_or_named_whatever_step_fails(stage, trouble):
    machine = stage.folder / "play/machine"
    rented = stage.checkout / "runs/pod/rented.txt"
    ends = set()
    for number in itertools.count():
        process, stderr = play(stage, trouble, number)
        step = f"{trouble} at call {number}:\n{stderr}"
        if len(stage.calls("gcloud")) <= number:
            assert number >= STEPS, step
            break

        command = "./launch/tpu_pod.sh delete --name=pod --zone=us-west4-a"
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


@pytest.mark.parametrize("command", ["run", "submit", "log"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, None])
def test_nodes_of_a_cluster_are_named(stage, command, number):
    """At a signal, and where kubectl fails."""
    # bash alone: one that waits for a program ignores an interrupt that comes as the program ends
    wait = ': >"$PLAY/here"; exec sleep 600' if number else "exit 1"
    stage.answers("apply", wait if command == "submit" else "true")
    stage.answers("logs", wait)
    stage.answers("get", "exit 1")
    words = ["--name=vit"] if command == "log" else [*TPU, *WORDS]
    with stage.start("gke.sh", command, "--poll_seconds=0", *words) as process:
        while number and not (stage.folder / "play/here").exists():
            assert process.poll() is None
        if number:
            os.killpg(process.pid, number)
        _, stderr = finish(process, timeout=60)

    assert process.returncode != 0
    assert "the nodes of vit cost money until" in stderr
    assert "./launch/gke.sh delete --name=vit" in stderr


def test_a_jobset_at_its_time_limit(stage):
    stage.answers("get", "echo Failed/0", "echo DeadlineExceeded")
    result = stage.run("gke.sh", "run", *TPU, "--max_hours=10", *WORDS)

    assert result.returncode == 75
    assert "vit was stopped after --max_hours" in result.stderr
    assert "activeDeadlineSeconds: 36000" in (stage.folder / "applied").read_text()
