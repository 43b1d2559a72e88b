"""A TPU worker's script, executed: alone, and by tpu_pod.sh on four workers of which one is killed."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.launch.conftest import STAND_INS
from tests.launch.test_scripts import FAKE_PYTHON, write_program

# Takes the place of vit-jax: does what the n-th line of $SCRIPT says when it is started for the
# n-th time.
FAKE_RUN = """#!/bin/bash
echo x >>"$HOME/starts"
script="$(sed -n "$(wc -l <"$HOME/starts")p" "$SCRIPT")"
workdir="${@: -1}"
workdir="${workdir#--workdir=}"
await() { # until these workers have ended in the same attempt
  for number in "$@"; do
    other="$HOMES/pod-w-$number"
    until [[ -f "$other/vit_jax_run/exit" && "$(cat "$other/starts")" == "$(cat "$HOME/starts")" ]]; do
      sleep 0.02
    done
  done
}
echo "vit-jax $*"
eval "$script"
"""


@pytest.fixture
def worker(stage):
    """The stage with an installed worker: its home is the stage's folder."""
    bin = stage.folder / "vit_jax_venv/bin"
    bin.mkdir(parents=True)
    write_program(bin / "vit-jax", FAKE_RUN)
    stage.variables["SCRIPT"] = str(stage.folder / "script")
    return stage


def play(stage, *lines: str) -> None:
    (stage.folder / "script").write_text("\n".join(lines) + "\n")


def wait_for(condition):
    """Polls until the condition is true; the time limit is for hangs."""
    deadline = time.monotonic() + 300
    while not (found := condition()):
        assert time.monotonic() < deadline, "hangs"
        time.sleep(0.02)
    return found


def exit_code(stage) -> str:
    """Of the run, once it has ended."""
    return wait_for(
        lambda: stage.run("tpu_worker.sh", "status").stdout.partition(" exit ")[2]
    ).split()[0]


def test_start_returns_at_once_and_the_end_is_recorded(worker):
    play(worker, "echo step 1; until [[ -e $HOME/go ]]; do sleep 0.02; done; echo step 2; exit 75")

    assert worker.run("tpu_worker.sh", "status").stdout == "t1v-n-1-w-0 none\n"
    assert (
        worker.run(
            "tpu_worker.sh", "start", "gs://bucket/a run", "pretrain", "--config.note=it's"
        ).returncode
        == 0
    )
    assert worker.run("tpu_worker.sh", "status").stdout == "t1v-n-1-w-0 running\n"

    with worker.start("tpu_worker.sh", "log") as process:
        (worker.folder / "go").touch()
        log, _ = process.communicate(timeout=300)  # to the end of the run

    words = f"vit-jax pretrain --config.note=it's --workdir={worker.folder}/buckets/bucket/a run\n"

    assert log == "\nvit-jax-log 0\n" + words + "step 1\nstep 2\n"
    assert exit_code(worker) == "75"

    later = worker.run("tpu_worker.sh", "log", str(len(words))).stdout
    assert later == f"\nvit-jax-log {len(words)}\nstep 1\nstep 2\n"
    assert worker.run("tpu_worker.sh", "tail").stdout == words + "step 1\nstep 2\n"


def test_run_survives_the_session_that_started_it_and_is_not_started_twice(worker):
    """Everything in the session that ssh makes gets SIGHUP when the connection drops."""
    play(worker, "until [[ -e $HOME/go ]]; do sleep 0.02; done; echo survived")
    with worker.start("tpu_worker.sh", "start", "gs://bucket/run", "pretrain") as process:
        process.communicate(timeout=300)

    with pytest.raises(ProcessLookupError):  # nothing of the run has stayed in it
        os.killpg(process.pid, signal.SIGHUP)

    again = worker.run("tpu_worker.sh", "start", "gs://bucket/run", "pretrain")
    assert again.returncode == 0
    assert "t1v-n-1-w-0 is already running the command" in again.stderr

    other = worker.run("tpu_worker.sh", "start", "gs://bucket/other", "pretrain")
    assert other.returncode == 1
    assert "runs another command" in other.stderr

    (worker.folder / "go").touch()
    assert worker.run("tpu_worker.sh", "log").stdout.endswith("survived\n")
    assert (worker.folder / "starts").read_text() == "x\n"


@pytest.mark.parametrize(
    ("trap", "code"), [("sleep 0.2; exit 75", "75"), ("", "137")], ids=["sigterm", "stop"]
)
def test_the_exit_code_stays_whatever_ends_the_run(worker, trap, code):
    """At a preemption the shell around vit-jax gets SIGTERM as well; `stop` kills what does not end by itself."""
    play(worker, f"trap '{trap}' TERM; echo ready; while :; do sleep 0.02; done")
    worker.run("tpu_worker.sh", "start", "gs://bucket/run", "pretrain")
    wait_for(lambda: "ready" in (worker.folder / "vit_jax_run/log").read_text())
    if trap:
        os.killpg(int((worker.folder / "vit_jax_run/pid").read_text()), signal.SIGTERM)
    else:
        assert worker.run("tpu_worker.sh", "stop", "0").returncode == 0

    assert exit_code(worker) == code


# Ends a command as timeout does, but not before it is ready.
FAKE_TIMEOUT = """#!/bin/bash
echo "$@" >"$HOME/timeout-arguments"
while [[ "$1" == --* ]]; do shift; done
"${@:2}" &
until grep -q ready "$HOME/vit_jax_run/log"; do sleep 0.02; done
sleep "$1"
kill -TERM "$!"
wait "$!"
"""


@pytest.mark.parametrize(("end", "code"), [("exit 75", "124"), ("exit 0", "0"), ("exit 76", "76")])
def test_a_time_limit_is_kept_by_the_worker_alone(worker, end, code):
    """Its exit code says that the run has saved and that the limit is why."""
    (worker.folder / "bin").mkdir()
    write_program(worker.folder / "bin/timeout", FAKE_TIMEOUT)
    path = f"{worker.folder}/bin:{worker.variables['PATH']}"
    play(worker, f"trap '{end}' TERM; echo ready; while :; do sleep 0.02; done")
    words = ["--seconds=1", "gs://bucket/run", "pretrain", "--config=x"]

    assert worker.run("tpu_worker.sh", "start", *words, PATH=path).returncode == 0
    assert exit_code(worker) == code

    *flags, seconds, _, verb, _, _ = (worker.folder / "timeout-arguments").read_text().split()
    assert (seconds, verb) == ("1", "pretrain")
    assert (
        subprocess.run(["timeout", *flags, "0.1", "sleep", "600"]).returncode
        == 128 + signal.SIGTERM
    )

    play(worker, "", f"{end.replace('76', '75')}")
    assert worker.run("tpu_worker.sh", "start", "--seconds=600", *words[1:]).returncode == 0
    assert exit_code(worker) == end.replace("76", "75").removeprefix("exit "), (
        "before the limit it is a preemption"
    )


def test_progress_is_of_the_run_that_was_started(worker):
    assert "no run was started here" in worker.run("tpu_worker.sh", "progress").stderr

    play(worker, "exit 0", "")
    worker.run("tpu_worker.sh", "start", "gs://bucket/a run", "pretrain")
    exit_code(worker)
    result = worker.run("tpu_worker.sh", "progress")

    assert result.stdout == f"vit-jax status {worker.folder}/buckets/bucket/a run\n"


def test_mount_remembers_nothing_of_what_is_there(worker):
    """A process must see at once what another has written: the workdir is checked to be shared in this way."""
    install = worker.run("tpu_worker.sh", "--dry-run", "install", "gs://bucket").stdout
    other = worker.run(
        "tpu_worker.sh", "--dry-run", "install", "--cache=/mnt/ssd", "--data=gs://images"
    ).stdout

    assert " --cache-dir=/mnt/ssd/images " in other

    start = worker.run("tpu_worker.sh", "--dry-run", "start", "gs://bucket/run", "pretrain").stdout
    assert "gcsfuse --implicit-dirs --metadata-cache-ttl-secs=0" in install
    assert "vit_jax_venv/bin/vit-jax pretrain --workdir=" in start
    assert worker.calls() == []  # a dry run executes nothing

    write_program(worker.folder / "vit_jax_venv/bin/python", FAKE_PYTHON)
    for _ in range(2):
        worker.run(
            "tpu_worker.sh", "install", "gs://bucket", "--data=gs://images", FAKE_TOOL="/bin/true"
        )

    flags = [
        "--implicit-dirs",
        "--metadata-cache-ttl-secs=0",
        "--metadata-cache-negative-ttl-secs=0",
    ]
    workdir, data = worker.calls("gcsfuse")

    assert workdir == [
        *flags,
        "--rename-dir-limit=200000",
        "bucket",
        f"{worker.folder}/buckets/bucket",
    ]
    # Data are remembered, and their files kept on the disk, of which some stays free.
    assert data[:3] == ["--implicit-dirs", "-o", "ro"]
    assert "--metadata-cache-ttl-secs=-1" in data
    assert f"--cache-dir={worker.folder}/vit_jax_cache/images" in data
    assert "--file-cache-cache-file-for-range-read" in data

    (size,) = (
        int(flag.partition("=")[2]) for flag in data if flag.startswith("--file-cache-max-size-mb=")
    )
    assert 0 < size < shutil.disk_usage(worker.folder).total / 2**20 / 2
    assert data[-2:] == ["images", f"{worker.folder}/buckets_data/images"]


def test_packages_are_tried_again_while_another_program_installs(worker):
    """A new machine installs updates by itself, and holds a lock meanwhile."""
    write_program(worker.folder / "vit_jax_venv/bin/python", FAKE_PYTHON)
    bin = worker.folder / "bin"
    bin.mkdir()
    for path in STAND_INS.iterdir():
        (bin / path.name).symlink_to(path)

    (bin / "gcsfuse").unlink()
    for name in ("sleep", "apt-cache"):
        write_program(bin / name, "#!/bin/bash\n")

    locked = "echo 'E: Could not get lock /var/lib/apt/lists/lock' >&2; exit 100"
    worker.answers(
        "apt-get", locked, locked, "true", locked, f"ln -s {STAND_INS}/gcsfuse {bin}", locked
    )
    environment = {"FAKE_TOOL": "/bin/true", "PATH": f"{bin}:{os.environ['PATH']}"}
    result = worker.run("tpu_worker.sh", "install", "gs://bucket", **environment)

    assert result.returncode == 0, result.stderr

    calls = [call for call in worker.calls("sudo") if call[0] == "apt-get"]
    assert [call[-1] for call in calls] == ["update"] * 3 + ["gcsfuse"] * 2
    assert all("DPkg::Lock::Timeout=600" in call for call in calls)

    (bin / "gcsfuse").unlink()
    result = worker.run("tpu_worker.sh", "install", "gs://other", **environment)

    assert result.returncode == 1
    assert "apt-get update has failed 20 times" in result.stderr


def test_a_downloaded_package_lies_where_only_the_user_may_write(worker):
    """Root installs it. A name in a shared folder could be taken by another user before."""
    write_program(worker.folder / "vit_jax_venv/bin/python", FAKE_PYTHON)
    bin = worker.folder / "bin"
    seen = worker.folder / "seen"
    bin.mkdir()
    for path in STAND_INS.iterdir():
        (bin / path.name).symlink_to(path)

    (bin / "gcsfuse").unlink()
    write_program(bin / "apt-cache", "#!/bin/bash\nexit 1\n")
    output = 'while [[ "$1" != --output ]]; do shift; done; echo package >"$2"'
    write_program(
        bin / "curl", f'#!/bin/bash\n{output}\nstat --format=\'%a\' -- "$(dirname "$2")" >{seen}\n'
    )
    worker.answers("apt-get", "true", f"ln -s {STAND_INS}/gcsfuse {bin}")
    environment = {"FAKE_TOOL": "/bin/true", "PATH": f"{bin}:{os.environ['PATH']}"}
    result = worker.run("tpu_worker.sh", "install", "gs://bucket", **environment)

    assert result.returncode == 0, result.stderr

    (package,) = (call[-1] for call in worker.calls("sudo") if call[-1].endswith(".deb"))
    assert Path(package).parent == worker.folder / "vit_jax_downloads"
    assert seen.read_text() == "700\n"
    assert not Path(package).exists()


def test_four_workers_of_which_one_is_killed(stage):
    """Only the machines are stand-ins: shipped, installed, started, one lost, started again."""
    tool = write_program(stage.folder / "tool", FAKE_RUN)
    stage.install(Path("/bin/true"))  # the look at the recipe
    python = write_program(stage.folder / "bin-python3", FAKE_PYTHON)
    (stage.folder / "bin").mkdir()
    (stage.folder / "bin/python3").symlink_to(python)
    last = 'if [[ "$HOST" == *-w-0 ]]; then await 1 2 3; fi'
    play(
        stage,
        'if [[ "$HOST" == *-w-2 ]]; then kill -9 $$; fi; await 2; echo "a process was lost"; exit 1',
        f'{last}; echo finished; mkdir -p "$workdir"; echo "{{}}" >"$workdir/summary.json"',
    )
    stage.answers(
        "describe", "echo NOT_FOUND >&2; exit 1", "echo NOT_FOUND >&2; exit 1", "echo ACTIVE"
    )
    words = [
        "--name=pod",
        "--zone=us-west4-a",
        "--type=v5litepod-16",
        "--workdir=gs://bucket/run",
        "--poll_seconds=0",
    ]
    result = stage.run(
        *["tpu_pod.sh", "run", *words, "--", "pretrain", "--config=configs/digits.py"],
        PATH=f"{stage.folder}/bin:{stage.variables['PATH']}",
        WORKERS="4",
        SCRIPT=str(stage.folder / "script"),
        FAKE_TOOL=str(tool),
    )

    assert result.returncode == 0, result.stderr
    assert "a dead worker: pod-w-2 (worker 2 of pod) was killed (exit code 137" in result.stderr
    assert [(stage.folder / f"homes/pod-w-{number}/starts").read_text() for number in range(4)] == [
        "x\n" * 2
    ] * 4

    log = (stage.checkout / "runs/pod/log.txt").read_text()
    assert [line for line in log.splitlines() if not line.startswith("vit-jax")] == [
        "a process was lost",
        "finished",
    ]
    assert Path(stage.folder / "buckets/bucket/run/summary.json").exists()
