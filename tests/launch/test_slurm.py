"""The SLURM script, with stand-ins for srun, which runs its tasks here, and for scontrol, which
records its calls.
"""

import os
import shlex
import time

import pytest

from tests.launch.conftest import STAND_INS
from tests.launch.test_scripts import FAKE_PYTHON, write_program

WORDS = ["pretrain", "--config=configs/x.py:ViT-B/16", "--workdir=/shared/a run"]
REQUEUE = ["requeue", "7"]

FAKE_RUN = f"""#!/bin/bash
[[ "$1" != status && "$1" != plan && " $* " != *" --check "* ]] || exec "{STAND_INS}/vit-jax" "$@"
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


def read_commands(text):
    """Return the words of each printed command."""
    commands = []
    for line in text.splitlines():
        if not line.startswith(("#", "export")):
            commands.append(shlex.split(line))
    return commands


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
    return job.run(
        "slurm.sbatch",
        *WORDS,
        SLURM_PROCID_CODES=codes,
        **variables,
    )


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
    variables = {"NCCL_SOCKET_IFNAME": "ib0", "NCCL_DEBUG": "INFO"}
    exported = "export NCCL_DEBUG=INFO NCCL_SOCKET_IFNAME=ib0 NCCL_IGNORE_CPU_AFFINITY=1"
    result = job.run("slurm.sbatch", "--dry-run", *WORDS, **variables)

    assert job.calls() == []
    assert exported in result.stdout

    submit(job, "75 75")
    check, *commands = read_commands(result.stdout)
    assert check[:3] == ["env", "JAX_PLATFORMS=cpu", f"{job.checkout}/.venv/bin/vit-jax"]
    assert [["vit-jax", *check[3:]], *commands] == job.calls()


def install_cuda(job):
    """Record that the environment was installed for GPUs."""
    stamp = job.checkout / ".venv/vit-jax-installed"
    stamp.write_text(stamp.read_text().replace("cpu", "cuda", 1))


GPUS = {
    "VIT_JAX_ACCELERATOR": "cuda",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_GPUS_ON_NODE": "8",
}

CONTAINER = {"VIT_JAX_IMAGE": "vit.sif", "VIT_JAX_BIND": "/shared"}


@pytest.mark.parametrize(
    ("variables", "words", "checked"),
    [
        (GPUS, WORDS, [*WORDS, "--check", "--devices=32", "--slices=4"]),
        (GPUS | {"SLURM_GPUS_ON_NODE": ""}, WORDS, [*WORDS, "--check"]),
        (GPUS | {"SLURM_RESTART_COUNT": "1"}, WORDS, None),
        (GPUS, ["study", "pooling", *WORDS[1:]], None),
        (GPUS | CONTAINER, WORDS, None),
    ],
    ids=["GPUs", "unknown", "queued again", "study", "container"],
)
def test_a_job_is_checked_once_for_its_gpus(job, variables, words, checked):
    job.answers("check", "echo platforms=$JAX_PLATFORMS")
    job.answers("srun", "exit 0")
    install_cuda(job)

    result = job.run("slurm.sbatch", *words, **variables)

    assert result.returncode == 0, result.stderr
    assert job.calls("vit-jax") == ([checked] if checked else [])
    assert ("platforms=cpu" in result.stdout) == bool(checked)
    assert len(job.calls("srun")) == 1


PRICED = GPUS | {"VIT_JAX_GPU": "NVIDIA H100 80GB HBM3", "VIT_JAX_PRICE": "2"}
PLAN_OF_GPUS = """cat <<END
{
    "days": 0.5,
    "chip_hours": 384.0
}
END
"""


@pytest.mark.parametrize(
    ("left", "hours"),
    [
        ("10:00:00", "10.0"),
        ("30:00", "0.5"),
        ("UNLIMITED", None),
        ("1-06:00:00", None),  # more than the plan
    ],
)
def test_a_job_prints_gpu_hours_and_price(job, left, hours):
    job.answers("plan", PLAN_OF_GPUS)
    job.answers("srun", "exit 0")
    install_cuda(job)
    (job.folder / "bin").mkdir()
    write_program(job.folder / "bin/squeue", f"#!/bin/sh\necho {left}\n")
    path = f"{job.folder}/bin:{job.variables['PATH']}"
    result = job.run("slurm.sbatch", *WORDS, **PRICED, PATH=path)

    assert result.returncode == 0, result.stderr
    planned = ["plan", "--topology=4*NVIDIA H100 80GB HBM3:8", "--arithmetic", "--json", WORDS[1]]
    assert job.calls("vit-jax")[1] == planned
    assert "12.0 hours on 32 GPUs, 384 GPU-hours, 768.00 at 2 a GPU-hour" in result.stderr
    if hours is None:
        assert "the time limit" not in result.stderr
    else:
        assert f"the time limit of {hours} hours is less" in result.stderr


def test_the_check_on_a_login_node_prints_gpu_hours(job):
    job.answers("plan", PLAN_OF_GPUS)
    words = ["--check", *WORDS, "--devices=32", "--slices=4"]
    result = job.run("slurm.sbatch", *words, VIT_JAX_GPU="h100")

    assert "--topology=4*h100:8" in job.calls("vit-jax")[1]
    assert "384 GPU-hours" in result.stderr


@pytest.mark.parametrize(
    ("devices", "topology"),
    [
        (32, "4*h100:8"),
        (20, "4*h100:5"),
        (8, "1*h100:8"),
    ],
)
def test_without_a_number_of_nodes_the_plan_has_nodes_of_eight_gpus(
    job,
    devices,
    topology,
):
    job.answers("plan", PLAN_OF_GPUS)
    result = job.run("slurm.sbatch", "--check", *WORDS, f"--devices={devices}", VIT_JAX_GPU="h100")

    assert f"--topology={topology}" in job.calls("vit-jax")[1]
    assert ("--slices=N" in result.stderr) == (devices > 8)


def test_a_price_that_is_no_number(job):
    result = job.run("slurm.sbatch", "--check", *WORDS, VIT_JAX_GPU="h100", VIT_JAX_PRICE="two")

    assert result.returncode == 2
    assert "VIT_JAX_PRICE=two: must be the price" in result.stderr


LOGIN_NODE = {"SLURM_JOB_ID": "", "VIT_JAX_ACCELERATOR": ""}


@pytest.mark.parametrize(
    ("answer", "code", "starts"),
    [
        ("exit 2", 2, 0),
        ("exit 137", 0, 1),
    ],
)
def test_a_job_that_cannot_start_ends_and_is_not_queued_again(
    job,
    answer,
    code,
    starts,
):
    job.answers("check", answer)

    assert submit(job).returncode == code
    assert len(job.calls("srun")) == starts
    assert job.calls("scontrol") == []


def test_a_run_is_checked_on_a_login_node(job):
    job.answers("check", "echo platforms=$JAX_PLATFORMS", "exit 2")
    install_cuda(job)

    result = job.run(
        "slurm.sbatch",
        "--check",
        *WORDS,
        "--devices=32",
        **LOGIN_NODE,
    )

    assert result.returncode == 0, result.stderr
    assert result.stdout == "platforms=cpu\n"
    assert job.calls() == [["vit-jax", *WORDS, "--devices=32", "--check"]]
    assert job.run("slurm.sbatch", "--check", *WORDS, **LOGIN_NODE).returncode == 2


@pytest.mark.parametrize(
    ("words", "variables"),
    [
        (["study", "pooling"], {}),
        (WORDS, {"VIT_JAX_IMAGE": "vit.sif"}),
        ([], {}),
    ],
    ids=["study", "container", "nothing"],
)
def test_what_cannot_be_checked_on_a_login_node(job, words, variables):
    install_cuda(job)
    result = job.run(
        "slurm.sbatch",
        "--check",
        *words,
        **LOGIN_NODE,
        **variables,
    )

    assert result.returncode == 2
    assert "must be pretrain or finetune, without VIT_JAX_IMAGE" in result.stderr
    assert job.calls() == []


def test_status_on_a_login_node(job):
    job.answers("check", "echo platforms=$JAX_PLATFORMS; echo a table")
    (job.folder / "bin").mkdir()
    (job.folder / "bin/squeue").symlink_to("/bin/echo")
    login = {
        "SLURM_JOB_ID": "",
        "SLURM_JOB_NAME": "",
        "PATH": f"{job.folder}/bin:{job.variables['PATH']}",
    }

    result = job.run(
        "slurm.sbatch",
        "--status",
        "runs",
        "--follow=60",
        **login,
    )

    assert result.returncode == 0, result.stderr
    assert result.stdout == "--name=vit-jax\nplatforms=cpu\na table\n"
    assert job.calls() == [["vit-jax", "status", "runs", "--follow=60"]]
    assert "Give the workdirs" in job.run("slurm.sbatch", "--status", **login).stderr


ARRAY = {
    "SLURM_ARRAY_TASK_ID": "6",
    "SLURM_ARRAY_TASK_MIN": "5",
    "SLURM_ARRAY_TASK_MAX": "7",
    "SLURM_ARRAY_TASK_COUNT": "3",
}

STUDY = ["study", "pooling", *WORDS[1:]]

SWEEP = ["sweep", "--grid", "seed=0,1", *WORDS[1:]]


@pytest.mark.parametrize(
    ("words", "share"),
    [
        (STUDY, ["--index=1", "--count=3"]),
        (SWEEP, ["--index=1", "--count=3"]),
        # An array of a single run is a chain.
        (WORDS, []),
    ],
    ids=["study", "sweep", "run"],
)
def test_jobs_of_an_array_share_the_runs_of_a_study(job, words, share):
    result = job.run("slurm.sbatch", *words, SLURM_PROCID_CODES="0 0", **ARRAY)
    expected = [*words, *share]

    assert result.returncode == 0
    assert job.calls()[-1][-len(expected) :] == expected


def test_an_array_with_gaps_is_rejected(job):
    with_gaps = ARRAY | {"SLURM_ARRAY_TASK_MAX": "9"}  # --array=5-9:2
    result = job.run("slurm.sbatch", *STUDY, **with_gaps)

    assert result.returncode == 2
    assert "must have no gaps" in result.stderr


def test_installed_beforehand_on_a_login_node(stage):
    """A login node has neither GPUs nor a job; the job then needs no internet."""
    write_program(stage.folder / "python3", FAKE_PYTHON)
    tool = write_program(stage.folder / "tool", "#!/bin/bash\n")
    calls = stage.folder / "calls"
    path = {
        "PATH": f"{stage.folder}:{stage.variables['PATH']}",
        "FAKE_TOOL": str(tool),
        "PYTHON": "python3",
    }
    job = {
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "1",
        "VIT_JAX_ACCELERATOR": "cuda",
        "FAKE_PIP_FAILS": "1",
    }

    result = stage.run("slurm.sbatch", "--install", **path)
    assert result.returncode == 0, result.stderr
    assert "jobs that are submitted from here find it" in result.stderr
    assert calls.read_text() == "venv\npip .[cuda]\n"

    assert stage.run("slurm.sbatch", *WORDS, **path, **job).returncode == 0
    assert calls.read_text().count("pip") == 1

    (stage.checkout / ".venv/vit-jax-installed").unlink()
    result = stage.run("slurm.sbatch", *WORDS, **path, **job)
    assert result.returncode == 1
    assert "install on a login node first: bash launch/slurm.sbatch --install" in result.stderr


SRUN = ["srun", "--kill-on-bad-exit=1", "--label"]


def read_srun(job, image):
    """Return the command of srun for a container of this image."""
    place = {"VIT_JAX_IMAGE": image, "VIT_JAX_BIND": "/shared,/data"}
    result = job.run("slurm.sbatch", "--dry-run", *WORDS, **place)
    line = next(line for line in result.stdout.splitlines() if line.startswith("srun"))
    return shlex.split(line)


def test_containers_of_apptainer(job):
    checkout = str(job.checkout)

    assert read_srun(job, "/images/vit.sif") == [
        *SRUN,
        f"{checkout}/launch/slurm_task.sh",
        f"{checkout}/runs/slurm/7/end",
        "apptainer",
        "exec",
        "--nv",
        f"--bind={checkout},/shared,/data",
        f"--pwd={checkout}",
        "/images/vit.sif",
        "vit-jax",
        *WORDS,
    ]


def test_containers_of_pyxis(job):
    checkout = str(job.checkout)
    mounts = f"{checkout}:{checkout},/shared:/shared,/data:/data"

    assert read_srun(job, "registry.example/vit:1") == [
        *SRUN,
        "--container-image=registry.example/vit:1",
        f"--container-mounts={mounts}",
        f"--container-workdir={checkout}",
        f"{checkout}/launch/slurm_task.sh",
        f"{checkout}/runs/slurm/7/end",
        "vit-jax",
        *WORDS,
    ]


def submit_to(job, workdir):
    place = {"VIT_JAX_IMAGE": "vit.sif", "VIT_JAX_BIND": "/shared,/data/"}
    return job.run(
        "slurm.sbatch",
        "--dry-run",
        *WORDS,
        f"--workdir={workdir}",
        **place,
    )


@pytest.mark.parametrize(
    "failure",
    [
        {"FAKE_PIP_FAILS": "1"},
        {"VIT_JAX_ACCELERATOR": "gpu"},
    ],
)
def test_an_installation_that_failed_is_not_reported_as_done(stage, failure):
    write_program(stage.folder / "python3", FAKE_PYTHON)
    path = {"PATH": f"{stage.folder}:{stage.variables['PATH']}", "PYTHON": "python3"}
    result = stage.run("slurm.sbatch", "--install", **path, **failure)

    assert result.returncode == 1
    assert "find it" not in result.stderr


@pytest.mark.parametrize("workdir", ["/scratch/run", "/shared-not/run"])
def test_a_workdir_that_would_be_lost_with_the_container_is_rejected(job, workdir):
    result = submit_to(job, workdir)

    assert result.returncode == 2
    assert "add it or one above to VIT_JAX_BIND" in result.stderr


@pytest.mark.parametrize("workdir", ["/shared/run", "/data/a", "{checkout}/runs/a"])
def test_a_workdir_that_the_container_sees(job, workdir):
    assert submit_to(job, workdir.format(checkout=job.checkout)).returncode == 0


def test_preempted_job_is_queued_again_and_not_counted(job):
    disabled = "echo 'Requested operation is presently disabled' >&2; exit 1"
    job.answers("scontrol", "true", "true", disabled)

    results = [submit(job, codes, VIT_JAX_MAX_FAILURES="0") for codes in ("75 75", "0 75", "75 0")]

    for result in results:
        assert result.returncode == 75
        assert "saved: queued again to resume" in result.stderr
        assert "dead worker" not in result.stderr
    assert job.calls("scontrol") == [REQUEUE] * 3
    assert "SLURM has queued it again itself, or cannot" in results[2].stderr


def test_the_first_to_fail_is_named(job):
    """A task that only lost a process (76) is not to blame, whenever it ended."""
    ends = job.checkout / "runs/slurm/7"
    ends.mkdir(parents=True)
    now = int(time.time())
    for task, code in enumerate((76, 134, 1)):
        (job.folder / f"end.{task}").write_text(f"{code} node{task} {now + task}.5\n")
    job.answers("srun", f'cp "{job.folder}"/end.* "{ends}"; exit 134')

    assert "task 1 on node1 ended with exit code 134" in submit(job).stderr


def test_a_dead_worker_is_named_and_the_job_queued_again(job):
    job.answers("srun", ":")
    result = submit(job, "0 137")

    assert result.returncode == 75
    assert job.calls("scontrol") == [REQUEUE]
    assert "a dead worker: task 1 on node1 ended with exit code 137" in result.stderr
    assert "1 of at most 3 times" in result.stderr


def test_a_mistake_of_the_user_is_not_repeated(job):
    job.answers("srun", ":")
    result = submit(job, "2 2")

    assert result.returncode == 2
    assert job.calls("scontrol") == []
    assert "Starting again would not help" in result.stderr


def test_a_job_of_which_nothing_was_started_is_queued_again(job):
    job.answers("srun", "exit 9")
    result = submit(job)

    assert result.returncode == 75
    assert job.calls("scontrol") == [REQUEUE]
    assert "task none on an unknown node ended with exit code 9" in result.stderr


def test_failures_come_to_an_end(job):
    assert submit(job, "0 137", VIT_JAX_MAX_FAILURES="1").returncode == 75
    assert submit(job, "0 137", VIT_JAX_MAX_FAILURES="1").returncode == 1


SAVING = """#!/bin/bash
trap 'exit 75' TERM
echo ready
while :; do sleep 0.05; done
"""


def test_sigterm_to_all_processes_leaves_their_codes(job):
    """--signal and preemption reach the shell of a task as well as vit-jax."""
    write_program(job.folder / "tool", SAVING)
    end = job.folder / "end"
    words = ["slurm_task.sh", str(end), str(job.folder / "tool")]
    with job.start(*words, SLURM_PROCID="0", SLURMD_NODENAME="node0") as process:
        assert process.stdout.readline() == "ready\n"
        os.killpg(process.pid, 15)
        process.communicate(timeout=300)

    assert process.returncode == 0, "srun sees no failure"
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
def test_mistakes_are_rejected(job, variables, message):
    result = submit(job, **variables)

    assert result.returncode == 2
    assert message in result.stderr
    assert job.calls() == []


def test_options_of_sbatch_are_before_the_first_command(job):
    """sbatch reads no #SBATCH line after it."""
    lines = (job.checkout / "launch/slurm.sbatch").read_text().splitlines()
    is_command = [bool(line) and not line.startswith("#") for line in lines]
    first_command = is_command.index(True)
    before = [line for line in lines[:first_command] if line.startswith("#SBATCH")]
    after = [line for line in lines[first_command:] if line.startswith("#SBATCH")]
    options = {line.split()[1] for line in before}

    assert {"--requeue", "--open-mode=append", "--signal=TERM@300"} <= options
    assert after == []
