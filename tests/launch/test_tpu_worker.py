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
    """Poll until the condition is true; the time limit is for hangs."""
    deadline = time.monotonic() + 300
    while not (found := condition()):
        assert time.monotonic() < deadline, "hangs"
        time.sleep(0.02)
    return found


def read_exit(stage):
    return stage.run("tpu_worker.sh", "status").stdout.partition(" exit ")[2]


def wait_for_exit(stage) -> str:
    """Wait for the end of the run and return its exit code."""
    return wait_for(lambda: read_exit(stage)).split()[0]


WAIT = "until [[ -e $HOME/go ]]; do sleep 0.02; done"


def test_start_returns_at_once_and_the_end_is_recorded(worker):
    play(worker, f"echo step 1; {WAIT}; echo step 2; exit 75")
    command = ["start", "gs://bucket/a run", "pretrain", "--config.note=it's"]
    workdir = f"{worker.folder}/buckets/bucket/a run"
    words = f"vit-jax pretrain --config.note=it's --workdir={workdir}\n"

    assert worker.run("tpu_worker.sh", "status").stdout == "t1v-n-1-w-0 none\n"
    assert worker.run("tpu_worker.sh", *command).returncode == 0
    assert worker.run("tpu_worker.sh", "status").stdout == "t1v-n-1-w-0 running\n"

    # The log is followed to the end of the run.
    with worker.start("tpu_worker.sh", "log") as process:
        (worker.folder / "go").touch()
        log, _ = process.communicate(timeout=300)
    assert log == f"\nvit-jax-log 0\n{words}step 1\nstep 2\n"
    assert wait_for_exit(worker) == "75"

    later = worker.run("tpu_worker.sh", "log", str(len(words))).stdout
    assert later == f"\nvit-jax-log {len(words)}\nstep 1\nstep 2\n"
    assert worker.run("tpu_worker.sh", "tail").stdout == f"{words}step 1\nstep 2\n"


def test_run_survives_the_session_that_started_it_and_is_not_started_twice(worker):
    """Everything in the session that ssh makes gets SIGHUP when the connection drops."""
    play(worker, f"{WAIT}; echo survived")
    with worker.start("tpu_worker.sh", "start", "gs://bucket/run", "pretrain") as process:
        process.communicate(timeout=300)

    # Nothing of the run has stayed in the session.
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, signal.SIGHUP)

    again = worker.run("tpu_worker.sh", "start", "gs://bucket/run", "pretrain")
    assert again.returncode == 0
    assert "t1v-n-1-w-0 is already running the command" in again.stderr

    other = worker.run(
        "tpu_worker.sh",
        "start",
        "gs://bucket/other",
        "pretrain",
    )
    assert other.returncode == 1
    assert "runs another command" in other.stderr

    (worker.folder / "go").touch()
    assert worker.run("tpu_worker.sh", "log").stdout.endswith("survived\n")
    assert (worker.folder / "starts").read_text() == "x\n"


def run_until_sigterm(worker, trap):
    """Play a run that handles SIGTERM by this command."""
    play(worker, f"trap '{trap}' TERM; echo ready; while :; do sleep 0.02; done")


def start_and_wait(worker):
    worker.run("tpu_worker.sh", "start", "gs://bucket/run", "pretrain")
    log = worker.folder / "vit_jax_run/log"
    wait_for(lambda: "ready" in log.read_text())


def test_the_exit_code_stays_at_a_preemption(worker):
    """The shell around vit-jax gets SIGTERM as well."""
    run_until_sigterm(worker, "sleep 0.2; exit 75")
    start_and_wait(worker)
    os.killpg(int((worker.folder / "vit_jax_run/pid").read_text()), signal.SIGTERM)

    assert wait_for_exit(worker) == "75"


def test_stop_kills_a_run_that_does_not_end_by_itself(worker):
    run_until_sigterm(worker, "")
    start_and_wait(worker)

    assert worker.run("tpu_worker.sh", "stop", "0").returncode == 0
    assert wait_for_exit(worker) == "137"


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


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("exit 75", "124"),
        ("exit 0", "0"),
        ("exit 76", "76"),
    ],
)
def test_a_time_limit_is_kept_by_the_worker_alone(worker, end, code):
    """Its exit code says that the run has saved, and that the limit is the reason."""
    (worker.folder / "bin").mkdir()
    write_program(worker.folder / "bin/timeout", FAKE_TIMEOUT)
    path = f"{worker.folder}/bin:{worker.variables['PATH']}"
    run_until_sigterm(worker, end)
    words = ["--seconds=1", "gs://bucket/run", "pretrain", "--config=x"]

    assert worker.run("tpu_worker.sh", "start", *words, PATH=path).returncode == 0
    assert wait_for_exit(worker) == code

    arguments = (worker.folder / "timeout-arguments").read_text().split()
    *flags, seconds, _, verb, _, _ = arguments
    ended = subprocess.run(["timeout", *flags, "0.1", "sleep", "600"])
    assert seconds == "1"
    assert verb == "pretrain"
    assert ended.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("code", ["75", "0"])
def test_an_end_before_the_time_limit_is_a_preemption(worker, code):
    play(worker, f"exit {code}")
    words = [
        "start",
        "--seconds=600",
        "gs://bucket/run",
        "pretrain",
        "--config=x",
    ]

    assert worker.run("tpu_worker.sh", *words).returncode == 0
    assert wait_for_exit(worker) == code


def test_progress_is_of_the_run_that_was_started(worker):
    assert "no run was started here" in worker.run("tpu_worker.sh", "progress").stderr

    play(worker, "exit 0", "")
    worker.run("tpu_worker.sh", "start", "gs://bucket/a run", "pretrain")
    wait_for_exit(worker)
    result = worker.run("tpu_worker.sh", "progress")

    assert result.stdout == f"vit-jax status {worker.folder}/buckets/bucket/a run\n"


def test_dry_runs_of_a_worker_execute_nothing(worker):
    def print_commands(*words):
        return worker.run("tpu_worker.sh", "--dry-run", *words).stdout

    install = print_commands("install", "gs://bucket")
    with_cache = print_commands("install", "--cache=/mnt/ssd", "--data=gs://images")
    start = print_commands("start", "gs://bucket/run", "pretrain")

    assert "gcsfuse --implicit-dirs --metadata-cache-ttl-secs=0" in install
    assert " --cache-dir=/mnt/ssd/images " in with_cache
    assert "vit_jax_venv/bin/vit-jax pretrain --workdir=" in start
    assert worker.calls() == []


def test_mount_remembers_nothing_of_what_is_there(worker):
    """A process must see at once what another has written: the workdir is checked to be shared in
    this way.
    """
    write_program(worker.folder / "vit_jax_venv/bin/python", FAKE_PYTHON)
    words = ["install", "gs://bucket", "--data=gs://images"]
    worker.run("tpu_worker.sh", *words, FAKE_TOOL="/bin/true")
    worker.run("tpu_worker.sh", *words, FAKE_TOOL="/bin/true")

    workdir, data = worker.calls("gcsfuse")

    assert workdir == [
        "--implicit-dirs",
        "--metadata-cache-ttl-secs=0",
        "--metadata-cache-negative-ttl-secs=0",
        "--rename-dir-limit=200000",
        "bucket",
        f"{worker.folder}/buckets/bucket",
    ]
    # Data are remembered, and their files kept on the disk, of which some stays free.
    assert data[:3] == ["--implicit-dirs", "-o", "ro"]
    assert "--metadata-cache-ttl-secs=-1" in data
    assert f"--cache-dir={worker.folder}/vit_jax_cache/images" in data
    assert "--file-cache-cache-file-for-range-read" in data
    assert data[-2:] == ["images", f"{worker.folder}/buckets_data/images"]

    (size_flag,) = (flag for flag in data if flag.startswith("--file-cache-max-size-mb="))
    disk_mib = shutil.disk_usage(worker.folder).total / 2**20
    assert 0 < int(size_flag.partition("=")[2]) < disk_mib / 2


@pytest.fixture
def programs(worker):
    """The folder of the stand-ins except gcsfuse, for tests of its installation."""
    write_program(worker.folder / "vit_jax_venv/bin/python", FAKE_PYTHON)
    bin = worker.folder / "bin"
    bin.mkdir()
    for path in STAND_INS.iterdir():
        if path.name != "gcsfuse":
            (bin / path.name).symlink_to(path)
    worker.variables |= {"FAKE_TOOL": "/bin/true", "PATH": f"{bin}:{os.environ['PATH']}"}
    return bin


def test_packages_are_tried_again_while_another_program_installs(worker, programs):
    """A new machine installs updates by itself, and holds a lock meanwhile."""
    locked = "echo 'E: Could not get lock /var/lib/apt/lists/lock' >&2; exit 100"
    install = f"ln -s {STAND_INS}/gcsfuse {programs}"
    for name in ("sleep", "apt-cache"):
        (programs / name).unlink(missing_ok=True)
        write_program(programs / name, "#!/bin/bash\n")
    worker.answers("apt-get", locked, locked, "true", locked, install, locked)

    result = worker.run("tpu_worker.sh", "install", "gs://bucket")

    assert result.returncode == 0, result.stderr
    calls = [call for call in worker.calls("sudo") if call[0] == "apt-get"]
    assert [call[-1] for call in calls] == ["update", "update", "update", "gcsfuse", "gcsfuse"]
    for call in calls:
        assert "DPkg::Lock::Timeout=600" in call

    (programs / "gcsfuse").unlink()
    result = worker.run("tpu_worker.sh", "install", "gs://other")
    assert result.returncode == 1
    assert "apt-get update has failed 20 times" in result.stderr


def test_a_downloaded_package_lies_where_only_the_user_may_write(worker, programs):
    """Root installs it. A name in a shared folder could be taken by another user before."""
    seen = worker.folder / "seen"
    output = 'while [[ "$1" != --output ]]; do shift; done; echo package >"$2"'
    mode = f'stat --format=\'%a\' -- "$(dirname "$2")" >{seen}'
    for name, text in (("apt-cache", "exit 1"), ("curl", f"{output}\n{mode}")):
        (programs / name).unlink(missing_ok=True)
        write_program(programs / name, f"#!/bin/bash\n{text}\n")
    worker.answers("apt-get", "true", f"ln -s {STAND_INS}/gcsfuse {programs}")

    result = worker.run("tpu_worker.sh", "install", "gs://bucket")

    assert result.returncode == 0, result.stderr
    (package,) = (call[-1] for call in worker.calls("sudo") if call[-1].endswith(".deb"))
    assert Path(package).parent == worker.folder / "vit_jax_downloads"
    assert seen.read_text() == "700\n"
    assert not Path(package).exists()


FIRST_ATTEMPT = """\
if [[ "$HOST" == *-w-2 ]]; then kill -9 $$; fi; await 2; echo "a process was lost"; exit 1"""

SECOND_ATTEMPT = """\
if [[ "$HOST" == *-w-0 ]]; then await 1 2 3; fi; echo finished; mkdir -p "$workdir"; \
echo "{}" >"$workdir/summary.json\""""


def test_four_workers_of_which_one_is_killed(stage):
    """Only the machines are stand-ins: the run is shipped, installed and started, loses a worker,
    and starts again.
    """
    tool = write_program(stage.folder / "tool", FAKE_RUN)
    stage.install(Path("/bin/true"))  # this checks the recipe
    (stage.folder / "bin").mkdir()
    write_program(stage.folder / "bin/python3", FAKE_PYTHON)
    play(stage, FIRST_ATTEMPT, SECOND_ATTEMPT)
    not_found = "echo NOT_FOUND >&2; exit 1"
    stage.answers("describe", not_found, not_found, "echo ACTIVE")

    result = stage.run(
        "tpu_pod.sh",
        "run",
        "--name=pod",
        "--zone=us-west4-a",
        "--type=v5litepod-16",
        "--workdir=gs://bucket/run",
        "--poll_seconds=0",
        "--",
        "pretrain",
        "--config=configs/digits.py",
        PATH=f"{stage.folder}/bin:{stage.variables['PATH']}",
        WORKERS="4",
        SCRIPT=str(stage.folder / "script"),
        FAKE_TOOL=str(tool),
    )

    assert result.returncode == 0, result.stderr
    assert "a dead worker: pod-w-2 (worker 2 of pod) was killed (exit code 137" in result.stderr
    for number in range(4):
        assert (stage.folder / f"homes/pod-w-{number}/starts").read_text() == "x\nx\n"

    lines = (stage.checkout / "runs/pod/log.txt").read_text().splitlines()
    said = [line for line in lines if not line.startswith("vit-jax")]
    assert said == ["a process was lost", "finished"]
    assert Path(stage.folder / "buckets/bucket/run/summary.json").exists()
