"""slurm.sbatch on a real SLURM of two nodes, started for these tests.

The names of its nodes do not resolve.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.integration import commands
from tests.launch.conftest import make_stage
from tests.launch.test_scripts import write_program
from tests.launch.test_slurm import install_cuda
from tests.tiny import NETWORK, ROOT, flags

SCRIPT = Path(__file__).with_name("slurm_cluster.sh")
MISSING = subprocess.run([SCRIPT, "check"], capture_output=True, text=True).stderr.strip()
pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(bool(MISSING), reason=f"no real SLURM: {MISSING}"),
]

OPTIONS = (
    "total=30 steps",
    "checkpoint.every=10 steps",
    "evaluation.every=15 steps",
    "logging.every=5 steps",
)
VIT_JAX = f"""#!/bin/bash
# vit-jax of these tests; a job that is queued again is not held.
if ((${{SLURM_RESTART_COUNT:-0}} > 0)); then unset HELD_FOLDER; fi
export XLA_FLAGS="--xla_force_host_platform_device_count=1" PYTHONPATH="{commands.HELD}:{ROOT}"
exec "{sys.executable}" -m vit_jax "$@"
"""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def drop_settings(variables):
    """Return the variables without those of another SLURM and of the environment that runs the
    tests.
    """
    prefixes = ("SLURM", "VIT_JAX_")
    return {name: value for name, value in variables.items() if not name.startswith(prefixes)}


@pytest.fixture(scope="module")
def cluster():
    """Start the cluster; return the variable with which the programs of SLURM find it."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # its sockets need a short path
    try:
        subprocess.run([SCRIPT, "start", folder], check=True)
        yield {"SLURM_CONF": str(folder / "slurm.conf")}
    finally:
        subprocess.run([SCRIPT, "stop", folder], check=True)
        shutil.rmtree(folder)


class Jobs:
    """Jobs of a checkout on the cluster."""

    def __init__(self, stage, cluster):
        self.stage = stage
        self.folder = stage.folder
        self.submitted = []
        self.variables = drop_settings(os.environ) | cluster | {"VIT_JAX_ACCELERATOR": "cpu"}

    def tool(self, text):
        self.stage.install(write_program(self.folder / "vit-jax", text))

    def call(self, *words, check=True, **variables):
        result = subprocess.run(
            words,
            cwd=self.stage.checkout,
            env=self.variables | variables,
            capture_output=True,
            text=True,
            timeout=commands.HANG_SECONDS,
        )
        assert not check or result.returncode == 0, result.stderr
        return result

    def submit(self, *words, options=("--nodes=2",), **variables):
        """Submit a job with these words of vit-jax; return its number."""
        log = f"--output={self.folder}/%j.log"
        result = self.call(
            "sbatch", "--parsable", log, *options, "launch/slurm.sbatch", *words, **variables
        )
        self.submitted.append(result.stdout.strip())
        return self.submitted[-1]

    def show(self, job, field):
        shown = self.call("scontrol", "show", "job", job, "--oneliner").stdout
        return [part.partition("=")[2] for part in shown.split() if part.startswith(f"{field}=")]

    def log(self, job):
        file = self.folder / f"{job}.log"
        return file.read_text() if file.exists() else ""

    def wait(self, condition, job):
        """Wait until the condition holds."""
        deadline = time.monotonic() + commands.HANG_SECONDS
        while not condition():
            assert time.monotonic() < deadline, self.log(job)
            time.sleep(0.1)

    def end(self, job):
        """Wait for the end of a job, or of all jobs of an array.

        Return its states and exit code.
        """
        self.wait(lambda: all(state in ENDED for state in self.show(job, "JobState")), job)
        return self.show(job, "JobState"), self.show(job, "ExitCode")[0]


def build_training(data_dir, workdir):
    return [str(word) for word in commands.pretraining(data_dir, workdir, *OPTIONS)]


@pytest.fixture(scope="module")
def preempted(cluster, data_dir, tmp_path_factory):
    """A run that was preempted and is queued again, which SLURM starts after two minutes.

    Returns its jobs, its number and its workdir.
    """
    jobs = Jobs(make_stage(tmp_path_factory.mktemp("preempted")), cluster)
    jobs.tool(VIT_JAX)
    workdir = jobs.folder / "run"
    release = jobs.folder / "release"
    held = {
        "HELD_FOLDER": str(workdir),
        "HELD_BEFORE": "",
        "HELD_RELEASE": str(release),
    }
    job = jobs.submit(*build_training(data_dir, workdir), **held)
    jobs.wait(lambda: commands.checkpoint_steps(workdir), job)

    options = ["--partition=high", "--nodes=2", "--output=/dev/null"]
    urgent = jobs.call("sbatch", "--parsable", *options, "--wrap=true")
    jobs.wait(lambda: jobs.log(job).count("SIGTERM caught") == 2, job)
    release.touch()
    states, _ = jobs.end(urgent.stdout.strip())
    assert states == ["COMPLETED"]
    return jobs, job, workdir


@pytest.fixture
def jobs(stage, cluster, preempted):
    made = Jobs(stage, cluster)
    yield made
    if made.submitted:
        made.call("scancel", *made.submitted, check=False)


def test_an_array_shares_the_runs_of_a_study(jobs):
    jobs.tool(VIT_JAX)
    folder = jobs.folder / "study"
    short = flags(
        *NETWORK,
        "total=4 steps",
        "schedule.warmup=1 steps",
        "global_batch=16",
        "logging.tensorboard=False",
    )
    words = [
        "study",
        "pooling",
        "--config=digits_studies:ViT-16",
        f"--workdir={folder}",
        "--learning_rates=0.01",
    ]

    job = jobs.submit(*words, *short, options=("--nodes=1", "--array=0-1"))

    assert jobs.end(job) == (["COMPLETED", "COMPLETED"], "0:0")

    rows = json.loads((folder / "study.json").read_text())["rows"]
    assert sorted(row["folders"][0] for row in rows) == [
        "runs/pool=gap,learning_rate=0.01",
        "runs/pool=token,learning_rate=0.01",
    ]


FAKE = """#!/bin/bash
# In the place of vit-jax: "codes A,B" ends each task with its code, "wait" saves at SIGTERM.
echo "start $SLURM_PROCID"
case "$1" in
  codes)
    IFS=, read -r -a codes <<<"$2"
    code="${codes[$SLURM_PROCID]}"
    if [[ "$code" == killed ]]; then kill -9 $$; fi
    exit "$code" ;;
  wait)
    trap 'echo saved; exit 75' TERM
    while :; do sleep 0.1; done ;;
esac
"""


@pytest.fixture
def fake(jobs):
    """Jobs with a program in the place of vit-jax: SLURM and the script are the subject."""
    jobs.tool(FAKE)
    return jobs


CHECKED = f"""#!/bin/bash
# vit-jax that checks and plans a run, and trains nothing.
if [[ "$1" == pretrain && " $* " != *" --check "* ]]; then exit 0; fi
PYTHONPATH="{ROOT}" JAX_PLATFORMS=cpu exec "{sys.executable}" -m vit_jax "$@"
"""


def test_a_job_prints_gpu_hours_and_price_of_its_nodes(jobs):
    """SLURM tells the job its nodes, GPUs and time limit."""
    jobs.tool(CHECKED)
    install_cuda(jobs.stage)
    words = ["pretrain", "--config=digits", f"--workdir={jobs.folder}/run"]
    machine = {
        "VIT_JAX_ACCELERATOR": "cuda",
        "VIT_JAX_GPU": "h100",
        "VIT_JAX_PRICE": "2",
    }
    options = ("--nodes=2", "--gpus-per-node=2", "--time=1")

    job = jobs.submit(
        *words,
        "--config.total=9000000 steps",
        options=options,
        **machine,
    )

    assert jobs.end(job) == (["COMPLETED"], "0:0"), jobs.log(job)
    log = jobs.log(job)
    assert "on 4 devices (2 replica x 2 data x 1 model)" in log
    (hours, gpu_hours, price) = re.findall(
        r"arithmetic: ([\d.]+) hours on 4 GPUs, (\d+) GPU-hours, ([\d.]+) at 2 a GPU-hour", log
    )[0]
    assert int(gpu_hours) == pytest.approx(4 * float(hours), abs=0.7)
    assert float(price) == pytest.approx(2 * int(gpu_hours), abs=1)
    assert "the time limit of 0.0 hours is less" in log


def test_a_killed_task_is_queued_again_up_to_the_limit(fake):
    job = fake.submit("codes", "0,killed", VIT_JAX_MAX_FAILURES="1")
    fake.wait(lambda: fake.show(job, "Restarts") == ["1"], job)

    assert "a dead worker: task 1 on n2 ended with exit code 137" in fake.log(job)

    job = fake.submit("codes", "0,killed", VIT_JAX_MAX_FAILURES="0")
    assert fake.end(job) == (["FAILED"], "1:0")
    assert "failed more than VIT_JAX_MAX_FAILURES=0 times" in fake.log(job)


def test_a_mistake_is_not_queued_again(fake):
    job = fake.submit("codes", "2,2")

    assert fake.end(job) == (["FAILED"], "2:0")
    assert fake.show(job, "Restarts") == ["0"]
    assert "Starting again would not help" in fake.log(job)


def test_the_time_limit_saves_and_queues_again(fake):
    """SLURM looks at limits, which are minutes, twice a minute, and sends the signal 30 to 60 s
    after the start, when the tasks are ready.
    """
    job = fake.submit("wait", options=("--nodes=2", "--time=2", "--signal=TERM@60"))
    fake.wait(lambda: fake.show(job, "Restarts") == ["1"], job)

    assert fake.log(job).count("saved\n") == 2
    assert "near the time limit, and saved: queued again to resume" in fake.log(job)


def test_a_cancelled_job_saves_and_is_not_queued_again(fake):
    job = fake.submit("wait")
    fake.wait(lambda: fake.log(job).count("start") == 2, job)

    fake.call("scancel", job)

    states, _ = fake.end(job)
    assert states == ["CANCELLED"]
    fake.wait(lambda: fake.log(job).count("saved\n") == 2, job)


def test_installing_on_a_login_node_while_a_job_runs_changes_nothing_under_it(fake):
    job = fake.submit("wait")
    fake.wait(lambda: fake.log(job).count("start") == 2, job)
    program = fake.stage.checkout / ".venv/bin/vit-jax"
    before = program.stat()
    result = fake.call("bash", "launch/slurm.sbatch", "--install")

    assert "jobs that are submitted from here find it" in result.stderr
    assert program.stat() == before
    assert fake.show(job, "JobState") == ["RUNNING"]


def test_two_nodes_train_to_the_end_and_the_preempted_run_resumes_with_equal_bytes(
    jobs,
    preempted,
    data_dir,
):
    """This test is the last, when two minutes have passed."""
    jobs.tool(VIT_JAX)
    workdir = jobs.folder / "run"
    job = jobs.submit(*build_training(data_dir, workdir))

    assert jobs.end(job) == (["COMPLETED"], "0:0"), jobs.log(job)
    assert not (jobs.stage.checkout / f"runs/slurm/{job}").exists()

    preempted_jobs, preempted_job, preempted_workdir = preempted
    end = jobs.end(preempted_job)
    log = preempted_jobs.log(preempted_job)
    assert end == (["COMPLETED"], "0:0"), log
    assert jobs.show(preempted_job, "Restarts") == ["1"]

    (step,) = re.findall(r"continuing from this workdir's checkpoint of step (\d+)", log)
    assert f"stopped after step {step} of 30, which is saved" in log

    resumed = commands.summary(preempted_workdir)
    expected = commands.summary(workdir)
    assert resumed["parameters_sha256"] == expected["parameters_sha256"]
    assert resumed["test_loss"] == expected["test_loss"]
    assert commands.curve(preempted_workdir) == commands.curve(workdir)
