"""The SLURM script, with stand-ins for srun, which runs its tasks here, and for scontrol, which records its calls."""

import os
import shlex
import time

import pytest

from tests.launch.conftest import STAND_INS
from tests.launch.test_scripts import FAKE_PYTHON, write_program

WORDS = ["pretrain", "--config=configs/x.py:ViT-B/16", "--workdir=/shared/a run"]
REQUEUE = ["requeue", "7"]

FAKE_RUN = f"""#!/bin/bash
[[ "$1" != status && " $* " != *" --check "* ]] || exec "{STAND_INS}/vit-jax" "$@"
"""
FAKE_RUN += """
echo "vit-jax $*" >>"$LINES"
code=$SLURM_PROCID_CODES
set -- $code
shift "$SLURM_PROCID"
sleep "${SECONDS_BEFORE:-0}"
[[ "$1" != 137 ]] || kill -9 $$
exit "$1"
"""


@pytest.fixture
def job(stage):
    """A job of two tasks; the test gives the code that each ends with."""
    tool = write_program(stage.folder / "tool", FAKE_RUN)
    stage.install(tool)
    stage.variables |= {
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "2",
        "SLURM_SUBMIT_DIR": str(stage.checkout),
        "LINES": str(stage.folder / "lines"),
    }
    return stage


def submit(job, codes="0 0", **variables):
    return job.run("slurm.sbatch", *WORDS, SLURM_PROCID_CODES=codes, **variables)


def test_every_task_runs_the_command_and_the_job_ends(job):
    result = submit(job, SLURM_CPUS_PER_TASK="12")
    assert result.returncode == 0, result.stderr

    task = f"{job.checkout}/launch/slurm_task.sh"
    ends = f"{job.checkout}/runs/slurm/7/end"
    vit_jax = f"{job.checkout}/.venv/bin/vit-jax"
    flags = ["--kill-on-bad-exit=1", "--label", "--cpus-per-task=12"]

    assert job.calls() == [
        ["vit-jax", *WORDS, "--check", "--devices=2"],
        ["srun", *flags, task, ends, vit_jax, *WORDS],
    ]

    line = "vit-jax pretrain --config=configs/x.py:ViT-B/16 --workdir=/shared/a run\n"
    assert (job.folder / "lines").read_text() == line * 2
    assert not (job.checkout / "runs/slurm/7").exists()


def test_dry_run_prints_exactly_what_the_job_executes(job):
    result = job.run(
        "slurm.sbatch", "--dry-run", *WORDS, NCCL_SOCKET_IFNAME="ib0", NCCL_DEBUG="INFO"
    )

    assert job.calls() == []
    assert (
        "export NCCL_DEBUG=INFO NCCL_SOCKET_IFNAME=ib0 NCCL_IGNORE_CPU_AFFINITY=1" in result.stdout
    )

    submit(job, "75 75")
    lines = [
        shlex.split(line)
        for line in result.stdout.splitlines()
        if not line.startswith(("#", "export"))
    ]

    assert lines[0][:3] == ["env", "JAX_PLATFORMS=cpu", f"{job.checkout}/.venv/bin/vit-jax"]
    assert [["vit-jax", *lines[0][3:]], *lines[1:]] == job.calls()


GPUS = {"VIT_JAX_ACCELERATOR": "cuda", "SLURM_JOB_NUM_NODES": "4", "SLURM_GPUS_ON_NODE": "8"}


@pytest.mark.parametrize(
    ("variables", "words", "checked"),
    [
        (GPUS, WORDS, [*WORDS, "--check", "--devices=32", "--slices=4"]),
        ({**GPUS, "SLURM_GPUS_ON_NODE": ""}, WORDS, [*WORDS, "--check"]),
        ({**GPUS, "SLURM_RESTART_COUNT": "1"}, WORDS, None),
        (GPUS, ["study", "pooling", *WORDS[1:]], None),
        ({**GPUS, "VIT_JAX_IMAGE": "vit.sif", "VIT_JAX_BIND": "/shared"}, WORDS, None),
    ],
    ids=["GPUs", "unknown", "queued again", "study", "container"],
)
def test_a_job_is_checked_once_for_its_gpus(job, variables, words, checked):
    job.answers("check", "echo platforms=$JAX_PLATFORMS")
    job.answers("srun", "exit 0")
    stamp = job.checkout / ".venv/vit-jax-installed"
    stamp.write_text(stamp.read_text().replace("cpu", "cuda", 1))
    result = job.run("slurm.sbatch", *words, **variables)

    assert result.returncode == 0, result.stderr
    assert job.calls("vit-jax") == ([checked] if checked else [])
    assert ("platforms=cpu" in result.stdout) == bool(checked)
    assert len(job.calls("srun")) == 1


@pytest.mark.parametrize(("answer", "code", "starts"), [("exit 2", 2, 0), ("exit 137", 0, 1)])
def test_a_job_that_cannot_start_ends_and_is_not_queued_again(job, answer, code, starts):
    job.answers("check", answer)

    assert submit(job).returncode == code
    assert len(job.calls("srun")) == starts
    assert job.calls("scontrol") == []


def test_a_run_is_checked_on_a_login_node(job):
    stamp = job.checkout / ".venv/vit-jax-installed"
    stamp.write_text(stamp.read_text().replace("cpu", "cuda", 1))
    job.answers("check", "echo platforms=$JAX_PLATFORMS", "exit 2")
    login = {"SLURM_JOB_ID": "", "VIT_JAX_ACCELERATOR": ""}
    result = job.run("slurm.sbatch", "--check", *WORDS, "--devices=32", **login)

    assert (result.returncode, result.stdout) == (0, "platforms=cpu\n"), result.stderr
    assert job.calls() == [["vit-jax", *WORDS, "--devices=32", "--check"]]
    assert job.run("slurm.sbatch", "--check", *WORDS, **login).returncode == 2

    for words, variables in (
        (["study", "pooling"], {}),
        (WORDS, {"VIT_JAX_IMAGE": "vit.sif"}),
        ([], {}),
    ):
        result = job.run("slurm.sbatch", "--check", *words, **login, **variables)
        assert result.returncode == 2
        assert "must be pretrain or finetune, without VIT_JAX_IMAGE" in result.stderr
    assert len(job.calls()) == 2


def test_status_on_a_login_node(job):
    job.answers("check", "echo platforms=$JAX_PLATFORMS; echo a table")
    login = {
        "SLURM_JOB_ID": "",
        "SLURM_JOB_NAME": "",
        "PATH": f"{job.folder}/bin:{job.variables['PATH']}",
    }
    (job.folder / "bin").mkdir()
    (job.folder / "bin/squeue").symlink_to("/bin/echo")
    result = job.run("slurm.sbatch", "--status", "runs", "--follow=60", **login)

    assert (result.returncode, result.stdout) == (0, "--name=vit-jax\nplatforms=cpu\na table\n"), (
        result.stderr
    )
    assert job.calls() == [["vit-jax", "status", "runs", "--follow=60"]]
    assert "Give the workdirs" in job.run("slurm.sbatch", "--status", **login).stderr


def test_jobs_of_an_array_share_the_runs_of_a_study(job):
    array = {"SLURM_ARRAY_TASK_ID": "6", "SLURM_ARRAY_TASK_MIN": "5", "SLURM_ARRAY_TASK_MAX": "7"}
    array["SLURM_ARRAY_TASK_COUNT"] = "3"
    study = ["study", "pooling", *WORDS[1:]]
    share_1 = ["--index=1", "--count=3"]
    sweep = ["sweep", "--grid", "seed=0,1", *WORDS[1:]]

    for words, share in (
        (study, share_1),
        (sweep, share_1),
        (WORDS, []),
    ):  # of a run alone an array is a chain
        assert job.run("slurm.sbatch", *words, SLURM_PROCID_CODES="0 0", **array).returncode == 0
        assert job.calls()[-1][-len(words) - len(share) :] == [*words, *share]

    with_gaps = array | {"SLURM_ARRAY_TASK_MAX": "9"}  # --array=5-9:2
    result = job.run("slurm.sbatch", *study, **with_gaps)

    assert result.returncode == 2
    assert "must have no gaps" in result.stderr


def test_installed_beforehand_on_a_login_node(stage):
    """Which has neither GPUs nor a job; the job then needs no internet."""
    write_program(stage.folder / "python3", FAKE_PYTHON)
    tool = write_program(stage.folder / "tool", "#!/bin/bash\n")
    path = {
        "PATH": f"{stage.folder}:{stage.variables['PATH']}",
        "FAKE_TOOL": str(tool),
        "PYTHON": "python3",
    }
    result = stage.run("slurm.sbatch", "--install", **path)

    assert result.returncode == 0, result.stderr
    assert "jobs that are submitted from here find it" in result.stderr

    made = (stage.folder / "calls").read_text()
    assert made == "venv\npip .[cuda]\n"

    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "1",
        "VIT_JAX_ACCELERATOR": "cuda",
        "FAKE_PIP_FAILS": "1",
    }
    assert stage.run("slurm.sbatch", *WORDS, **path, **job).returncode == 0
    assert "pip" not in (stage.folder / "calls").read_text().removeprefix(made)

    (stage.checkout / ".venv/vit-jax-installed").unlink()
    result = stage.run("slurm.sbatch", *WORDS, **path, **job)

    assert result.returncode == 1
    assert "install on a login node first: bash launch/slurm.sbatch --install" in result.stderr


@pytest.mark.parametrize("failure", [{"FAKE_PIP_FAILS": "1"}, {"VIT_JAX_ACCELERATOR": "gpu"}])
def test_an_installation_that_failed_is_not_reported_as_done(stage, failure):
    write_program(stage.folder / "python3", FAKE_PYTHON)
    path = {"PATH": f"{stage.folder}:{stage.variables['PATH']}", "PYTHON": "python3"}
    result = stage.run("slurm.sbatch", "--install", **path, **failure)

    assert result.returncode == 1
    assert "find it" not in result.stderr


def test_containers(job):
    def call(image):
        result = job.run(
            "slurm.sbatch", "--dry-run", *WORDS, VIT_JAX_IMAGE=image, VIT_JAX_BIND="/shared,/data"
        )
        return shlex.split(
            next(line for line in result.stdout.splitlines() if line.startswith("srun"))
        )

    place = str(job.checkout)
    task = [f"{job.checkout}/launch/slurm_task.sh", f"{job.checkout}/runs/slurm/7/end"]
    flags = ["srun", "--kill-on-bad-exit=1", "--label"]
    bind = f"--bind={place},/shared,/data"
    apptainer = ["apptainer", "exec", "--nv", bind, f"--pwd={place}", "/images/vit.sif", "vit-jax"]

    assert call("/images/vit.sif") == [*flags, *task, *apptainer, *WORDS]

    mounts = f"--container-mounts={place}:{place},/shared:/shared,/data:/data"
    pyxis = ["--container-image=registry.example/vit:1", mounts, f"--container-workdir={place}"]

    assert call("registry.example/vit:1") == [*flags, *pyxis, *task, "vit-jax", *WORDS]


def test_a_workdir_that_would_be_lost_with_the_container_is_refused(job):
    def submit_to(workdir):
        place = {"VIT_JAX_IMAGE": "vit.sif", "VIT_JAX_BIND": "/shared,/data/"}
        return job.run("slurm.sbatch", "--dry-run", *WORDS, f"--workdir={workdir}", **place)

    assert submit_to("/scratch/run").returncode == 2
    assert "add it or one above to VIT_JAX_BIND" in submit_to("/scratch/run").stderr
    assert "add it" in submit_to("/shared-not/run").stderr
    assert [
        submit_to(seen).returncode for seen in ("/shared/run", "/data/a", f"{job.checkout}/runs/a")
    ] == [0, 0, 0]


def test_preempted_job_is_queued_again_and_not_counted(job):
    job.answers(
        "scontrol", "true", "true", "echo 'Requested operation is presently disabled' >&2; exit 1"
    )
    results = [submit(job, codes, VIT_JAX_MAX_FAILURES="0") for codes in ("75 75", "0 75", "75 0")]

    assert [result.returncode for result in results] == [75, 75, 75]
    assert job.calls("scontrol") == [REQUEUE] * 3
    assert all("saved: queued again to resume" in result.stderr for result in results)
    assert not any("dead worker" in result.stderr for result in results)
    assert "SLURM has queued it again itself, or cannot" in results[2].stderr


def test_the_first_to_fail_is_named(job):
    """Who only lost a process (76) is not to blame, whenever it ended."""
    ends = job.checkout / "runs/slurm/7"
    ends.mkdir(parents=True)
    now = int(time.time())
    for task, code in enumerate((76, 134, 1)):
        (job.folder / f"end.{task}").write_text(f"{code} node{task} {now + task}.5\n")

    job.answers("srun", f'cp "{job.folder}"/end.* "{ends}"; exit 134')

    assert "task 1 on node1 ended with exit code 134" in submit(job).stderr


@pytest.mark.parametrize(
    ("codes", "srun", "code", "requeued", "said"),
    [
        (
            "0 137",
            ":",
            75,
            True,
            ["a dead worker: task 1 on node1 ended with exit code 137", "1 of at most 3 times"],
        ),
        ("2 2", ":", 2, False, ["Starting again would not help"]),  # a mistake of the user
        (
            "0 0",
            "exit 9",
            75,
            True,
            ["task none on an unknown node ended with exit code 9"],
        ),  # nothing was started
    ],
)
def test_failures_are_named_and_mistakes_not_repeated(job, codes, srun, code, requeued, said):
    job.answers("srun", srun)
    result = submit(job, codes)

    assert result.returncode == code
    assert job.calls("scontrol") == [REQUEUE] * requeued
    assert not [text for text in said if text not in result.stderr]


def test_failures_come_to_an_end(job):
    assert [submit(job, "0 137", VIT_JAX_MAX_FAILURES="1").returncode for _ in range(2)] == [75, 1]


def test_sigterm_to_all_processes_leaves_their_codes(job):
    """--signal and preemption reach the shell of a task as well as vit-jax."""
    write_program(
        job.folder / "tool",
        "#!/bin/bash\ntrap 'exit 75' TERM\necho ready\nwhile :; do sleep 0.05; done\n",
    )
    task = [f"{job.folder}/end", str(job.folder / "tool")]
    with job.start("slurm_task.sh", *task, SLURM_PROCID="0", SLURMD_NODENAME="node0") as process:
        assert process.stdout.readline() == "ready\n"
        os.killpg(process.pid, 15)
        process.communicate(timeout=300)

    assert process.returncode == 0  # not a failure in srun's eyes
    assert (job.folder / "end.0").read_text().startswith("75 node0 ")


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"VIT_JAX_ACCELERATOR": ""}, "ask for them (sbatch --gpus-per-node=N)"),
        ({"SLURM_JOB_ID": ""}, "sbatch --nodes=N --gpus-per-node=M"),
        ({"SLURM_SUBMIT_DIR": "/"}, "submit from its root"),
        ({"VIT_JAX_MAX_FAILURES": "many"}, "VIT_JAX_MAX_FAILURES=many: must be a whole number"),
    ],
)
def test_mistakes_are_refused(job, variables, message):
    result = submit(job, **variables)

    assert result.returncode == 2
    assert message in result.stderr
    assert job.calls() == []


def test_options_of_sbatch_are_before_the_first_command(job):
    """sbatch reads no #SBATCH line after it."""
    lines = (job.checkout / "launch/slurm.sbatch").read_text().splitlines()
    first_command = next(
        number for number, line in enumerate(lines) if line and not line.startswith("#")
    )
    options = [line.split()[1] for line in lines[:first_command] if line.startswith("#SBATCH")]

    assert {"--requeue", "--open-mode=append", "--signal=TERM@300"} <= set(options)
    assert not [line for line in lines[first_command:] if line.startswith("#SBATCH")]
