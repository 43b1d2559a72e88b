"""The life of a TPU pod, played by a stand-in for gcloud: its calls, and the messages for the user."""

import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
from typing import NamedTuple

import pytest

from tests.launch.conftest import LAUNCH, STAND_INS

PLACE = ["--zone=us-west4-a", "--quiet"]
SSH = ["--ssh-flag=-oServerAliveInterval=30", "--ssh-flag=-oServerAliveCountMax=4"]
NAME = ["--name=pod", "--zone=us-west4-a"]
RUN = [
    "run",
    *NAME,
    "--type=v5litepod-16",
    "--workdir=gs://bucket/run",
    "--poll_seconds=0",
]
WORDS = [
    "--",
    "pretrain",
    "--config=configs/x.py:ViT-H/14",
    "--config.note=it's",
]

DESCRIBE = [
    "compute",
    "tpus",
    "queued-resources",
    "describe",
    "pod",
    "--format=value(state.state)",
    *PLACE,
]
CREATE = [
    "compute",
    "tpus",
    "queued-resources",
    "create",
    "pod",
    "--accelerator-type=v5litepod-16",
    "--runtime-version=v2-alpha-tpuv5-lite",
    "--node-id=pod",
    "--async",
    *PLACE,
]
DELETE = [
    "compute",
    "tpus",
    "queued-resources",
    "delete",
    "pod",
    "--force",
    *PLACE,
]
SUMMARY = ["storage", "cat", "gs://bucket/run/summary.json"]
FETCH = [
    "storage",
    "rsync",
    "--recursive",
    "--exclude=(^|/)checkpoints/",
    "gs://bucket/run",
    "runs/pod",
]
UNPACK = "rm -rf vit_jax.new && mkdir vit_jax.new && tar -xzf vit_jax.tar.gz -C vit_jax.new"
INSTALL = f"{UNPACK} && bash vit_jax.new/launch/tpu_worker.sh install gs://bucket"
START = (
    "bash vit_jax/launch/tpu_worker.sh start gs://bucket/run pretrain --config=configs/x.py:ViT-H/14 "
    "'--config.note=it'\\''s'"
)

CHECKED = [
    *WORDS[1:],
    "--workdir=/mnt/vit_jax/bucket/run",
    "--check",
    "--devices=16",
    "--slices=1",
    "--remote=/",
]

PLANNED = [
    "plan",
    "--topology=1*v5litepod-16",
    "--arithmetic",
    "--json",
    *WORDS[2:],
]
NOT_THERE = "echo 'NOT_FOUND: no such resource' >&2; exit 1"
ENDED_WELL = "echo t1v-n-1-w-0 exit 0 100; echo t1v-n-1-w-1 exit 0 101"
BOTH_RUN = "echo t1v-n-1-w-0 running; echo t1v-n-1-w-1 running"
SAVED = "echo t1v-n-1-w-0 exit 75 100; echo t1v-n-1-w-1 exit 0 101"
KILLED = (
    "echo t1v-n-1-w-0 exit 76 99.5; echo t1v-n-1-w-1 exit 137 100.5; echo t1v-n-1-w-2 exit 1 100.7"
)


@pytest.fixture
def stage(stage):
    """A stage with a stand-in for vit-jax here, which checks the recipe before a machine is asked
    for.
    """
    stage.install(STAND_INS / "vit-jax")
    return stage


def build_ssh(command, worker="all", node="pod"):
    return [
        "compute",
        "tpus",
        "tpu-vm",
        "ssh",
        node,
        f"--worker={worker}",
        *SSH,
        f"--command={command}",
        *PLACE,
    ]


def build_step(words, **options):
    return build_ssh(f"bash vit_jax/launch/tpu_worker.sh {words}", **options)


def build_scp(archive):
    flags = [flag.replace("--ssh-flag", "--scp-flag") for flag in SSH]
    return [
        "compute",
        "tpus",
        "tpu-vm",
        "scp",
        archive,
        "pod:vit_jax.tar.gz",
        "--worker=all",
        *flags,
        *PLACE,
    ]


NEW = [
    NOT_THERE,
    NOT_THERE,
    "echo ACTIVE",
]  # what describe says of a machine that is created at once
UNDISTURBED = {
    "describe": NEW,
    "summary": ["exit 1", "true"],
    "log": ["echo step 1"],
    "status": [ENDED_WELL],
}


def run(stage, *options, words=WORDS, **answers):
    """Run the command with these answers of gcloud instead of those of an undisturbed life."""
    for kind, scripts in (UNDISTURBED | answers).items():
        stage.answers(kind, *scripts)
    return stage.run("tpu_pod.sh", *RUN, *options, *words)


def name_call(call):
    """Return a call of gcloud as one word."""
    for word in call:
        if word.startswith("--command=") and "tpu_worker.sh" in word:
            return word.partition("tpu_worker.sh ")[2].split()[0]
    return call[1] if call[0] == "storage" else call[3]


def list_kinds(stage):
    """Return the calls of gcloud, one word each."""
    return [name_call(call) for call in stage.calls("gcloud")]


CHANGES = ("create", "install", "start", "stop", "rsync", "delete")


def list_changes(stage):
    """Return the calls that change something."""
    return [kind for kind in list_kinds(stage) if kind in CHANGES]


def list_log_calls(stage):
    calls = stage.calls("gcloud")
    return [call for call in calls if any("tpu_worker.sh log" in word for word in call)]


def list_whole_life(archive, waiting):
    """Return every call of a run that is never disturbed."""
    return [
        SUMMARY,
        DESCRIBE,
        DESCRIBE,
        CREATE,
        *[DESCRIBE] * waiting,
        build_scp(archive),
        build_ssh(INSTALL),
        build_ssh(START),
        build_step("log 0", worker=0),
        DESCRIBE,
        build_step("status"),
        SUMMARY,
        FETCH,
        DELETE,
    ]


def test_one_command_is_the_whole_life(stage):
    waiting = ["echo WAITING_FOR_RESOURCES", "echo PROVISIONING"]
    result = run(
        stage,
        describe=[NOT_THERE, NOT_THERE, *waiting, "echo ACTIVE"],
        log=["echo step 1; echo step 2"],
    )

    assert result.returncode == 0, result.stderr
    assert result.stdout == "step 1\nstep 2\n"
    assert (stage.checkout / "runs/pod/log.txt").read_text() == "step 1\nstep 2\n"
    assert not list(stage.folder.glob("tmp*"))

    calls = stage.calls("gcloud")
    archive = next(call[4] for call in calls if "scp" in call)
    assert calls == list_whole_life(archive, waiting=3)
    assert stage.calls()[:2] == [["vit-jax", *CHECKED], ["vit-jax", *PLANNED]]

    said = [line.removeprefix("vit-jax: ") for line in result.stderr.splitlines()]
    assert "pod is deleted" in said
    assert said[:5] == [
        "plan has no time for this run",
        "pod is NOT_FOUND",
        "requesting 1 x v5litepod-16 in us-west4-a (--on-demand)",
        "pod is WAITING_FOR_RESOURCES",
        "pod is PROVISIONING",
    ]


def test_dry_run_prints_exactly_what_a_run_executes(stage):
    result = stage.run("tpu_pod.sh", *RUN, "--dry-run", *WORDS)

    assert result.returncode == 0, result.stderr
    assert stage.calls() == []
    assert not (stage.checkout / "runs").exists()

    lines = result.stdout.splitlines()
    (pack,) = (shlex.split(line) for line in lines if line.startswith("git"))
    commands = [shlex.split(line)[1:] for line in lines if not line.startswith("git")]
    assert pack[3:6] == ["ls-files", "-z", "--cached"]
    assert commands == [CHECKED, PLANNED, *list_whole_life("checkout.tar.gz", waiting=1)]


@pytest.fixture
def untracked(stage):
    """A stage with two files that git does not track, one of them ignored.

    Returns the names of tracked files.
    """
    (stage.checkout / ".gitignore").write_text("/runs/\n.venv*\n")
    (stage.checkout / "runs").mkdir()
    (stage.checkout / "runs/weights").write_text("large")
    (stage.checkout / "my recipe.py").write_text("mine")
    (stage.checkout / "pyproject.toml").unlink()
    stage.answers("scp", f'cp "$archive" "{stage.folder}/shipped.tar.gz"')

    scripts = {f"launch/{path.name}" for path in (stage.checkout / "launch").iterdir()}
    return stage, {"setup.py"} | scripts


@pytest.mark.parametrize(
    ("uploads", "uploaded"),
    [
        ((), set()),
        (("--upload=runs", "--upload=my recipe.py"), {"runs/weights", "my recipe.py"}),
    ],
)
def test_what_is_shipped_is_what_git_tracks_and_what_is_named(
    untracked,
    uploads,
    uploaded,
):
    stage, tracked = untracked
    result = stage.run("tpu_pod.sh", "install", *NAME, *uploads)

    assert result.returncode == 0, result.stderr

    archive = stage.folder / "shipped.tar.gz"
    listing = subprocess.check_output(["tar", "-tzf", archive], text=True).splitlines()
    assert set(listing) == tracked | uploaded
    assert f"{len(listing)} files, 0.0 MB compressed, are copied to every worker" in result.stderr
    assert "without 2 file(s) that git does not track" in result.stderr

    dry_run = stage.run("tpu_pod.sh", "install", *NAME, *uploads, "--dry-run")
    line = dry_run.stdout.splitlines()[0]
    assert ("ls-files -z --others -- runs 'my recipe.py')" in line) == bool(uploads)


def test_a_recipe_is_read_before_a_machine_is_asked_for(stage):
    stage.answers("check", "echo 'config.optimzer: there is no such field' >&2; exit 2")
    result = run(stage, words=["--", "pretrain", "--config=configs/x.py"])

    assert result.returncode == 2
    assert "there is no such field" in result.stderr
    assert stage.calls("gcloud") == []


def test_a_recipe_must_be_known_to_git_or_uploaded(stage):
    words = ["--", "pretrain", "--config=mine.py:ViT-L/16"]
    (stage.checkout / "mine.py").write_text("")
    stage.answers("check", "true")
    result = run(stage, words=words)

    assert result.returncode == 2
    assert "mine.py is not known to git and would not be on the workers" in result.stderr
    assert stage.calls("gcloud") == []
    assert run(stage, "--upload=mine.py", words=words).returncode == 0


@pytest.mark.parametrize(
    ("type", "slices", "devices"),
    [
        ("v2-8", 1, 8),
        ("v3-32", 1, 32),
        ("v4-32", 1, 16),
        ("v5p-32", 2, 32),
        ("v5litepod-16", 2, 32),
        ("v6e-8", 1, 8),
        ("tpu7x-8", 2, 16),
    ],
)
def test_the_recipe_is_checked_for_the_devices_that_jax_will_count(
    stage,
    type,
    slices,
    devices,
):
    machine = [f"--type={type}", f"--slices={slices}", "--workdir=gs://bucket/run"]
    result = stage.run(
        "tpu_pod.sh",
        "run",
        *NAME,
        *machine,
        "--dry-run",
        *WORDS,
    )
    line = next(line for line in result.stdout.splitlines() if "--check" in line)

    assert shlex.split(line)[-3:] == [f"--devices={devices}", f"--slices={slices}", "--remote=/"]


UNSEEN = """\
echo 'checked: a recipe'
echo 'not visible from here: /mnt/vit_jax_data/images/tfds/cifar10'
echo 'not visible from here: /mnt/vit_jax/bucket/my runs/a'
"""

WRITTEN = ["--config.data=tfds:mine", "--config.input.data_dir=.", "--config.input.test_split=val"]
DATA_WORDS = [
    "--config.data=tfds:mine",
    "--config.input.data_dir=/mnt/vit_jax_data/images/tfds",
    "--config.input.test_split=val",
]
WRITE = f"printf '%s\\n' {' '.join(WRITTEN)}"
MANIFEST = ["storage", "cat", "gs://images/tfds/vit_jax_data.txt"]
LOOKS = [
    ["storage", "ls", "gs://images/tfds/cifar10"],
    ["storage", "ls", "gs://bucket/my runs/a"],
]


def test_data_are_looked_for_in_the_buckets_before_a_machine_is_asked_for(stage):
    """The bucket of the workdir counts too.

    The folder of the dataset has the name that vit-jax uses.
    """
    stage.answers("check", UNSEEN)
    result = run(stage, "--data_bucket=gs://images")

    assert result.returncode == 0, result.stderr
    assert stage.calls("gcloud")[:4] == [MANIFEST, *LOOKS, SUMMARY]
    assert result.stdout == "step 1\n"
    assert "checked: a recipe" in result.stderr


def test_data_that_are_missing_in_a_bucket_are_rejected(stage):
    stage.answers("check", UNSEEN)
    stage.answers(
        "ls",
        "true",
        "echo 'One or more URLs matched no objects.' >&2; exit 1",
    )
    result = run(stage, "--data_bucket=gs://images")

    assert result.returncode == 2
    assert "matched no objects" in result.stderr
    assert "gcloud storage rsync --recursive FOLDER 'gs://bucket/my runs/a'" in result.stderr
    assert stage.calls("gcloud") == [MANIFEST, *LOOKS]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/mnt/vit_jax_data/photos/tfds", "--data_bucket=gs://BUCKET"),
        (
            "/mnt/vit_jax/images/run",
            "/mnt/vit_jax/images/run: the machines of the run do not",
        ),
        ("/home/user/tensorflow_datasets/cifar10", "below /mnt/vit_jax_data/BUCKET"),
    ],
)
def test_paths_that_the_workers_do_not_have_are_rejected(
    stage,
    path,
    message,
):
    stage.answers("check", f"echo 'not visible from here: {path}'")
    result = run(stage, "--data_bucket=gs://images")

    assert result.returncode == 2
    assert message in result.stderr
    assert stage.calls("gcloud") == [MANIFEST]


def test_weights_must_be_known_to_git_or_uploaded(stage):
    (stage.checkout / "weights.npz").write_text("")
    stage.answers("check", "echo 'looked for here: weights.npz'")
    result = run(stage, "--data_bucket=gs://images")

    assert result.returncode == 2
    assert "weights.npz is not known to git and would not be on the workers" in result.stderr
    assert stage.calls("gcloud") == [MANIFEST]
    assert run(stage, "--upload=weights.npz").returncode == 0


def run_with_data(stage, option, path):
    words = [*WORDS, f"--config.data=folder:{path}", "--config.init_from=/elsewhere"]
    return run(stage, option, "--data_bucket=gs://images", words=words)


UNCHECKED = ["--dry-run", "--no_check", "--repository=https://example.org/v.git"]


@pytest.mark.parametrize("option", UNCHECKED)
def test_without_a_check_the_data_that_arguments_name_are_looked_for(stage, option):
    result = run_with_data(stage, option, "/mnt/vit_jax_data/images/photos")
    calls = stage.calls("gcloud")
    if option == "--dry-run":
        lines = result.stdout.splitlines()
        calls = [shlex.split(line)[1:] for line in lines if line.startswith("gcloud")]

    assert result.returncode == 0, result.stderr
    assert calls[:3] == [MANIFEST, ["storage", "ls", "gs://images/photos"], SUMMARY]
    assert not stage.calls("vit-jax")


@pytest.mark.parametrize("option", UNCHECKED)
def test_without_a_check_data_of_another_bucket_are_rejected(stage, option):
    path = "/mnt/vit_jax_data/others/photos"
    result = run_with_data(stage, option, path)

    assert result.returncode == 2
    assert f"{path}: the machines of the run do not have this path" in result.stderr


class Life(NamedTuple):
    """A run that something happens to.

    It has the changes of the run, texts that the user is told, the exit code, options, and the
    answers of gcloud.
    """

    changes: str
    said: list[str]
    code: int
    options: tuple[str, ...]
    answers: dict[str, list[str]]


def test_a_recipe_is_found_among_the_files_of_a_large_checkout(stage):
    (stage.checkout / "a.py").write_text("")
    for number in range(300):
        (stage.checkout / f"module_{number}.py").write_text("")

    subprocess.run(["git", "-C", stage.checkout, "add", "--all"], check=True)
    result = stage.run(
        "tpu_pod.sh",
        *RUN,
        "--dry-run",
        "--",
        "pretrain",
        "--config=a.py",
    )

    assert result.returncode == 0, result.stderr


def make_life(changes, *said, code=0, options=(), **answers):
    scripts = {}
    for kind, answer in answers.items():
        scripts[kind] = [answer] if isinstance(answer, str) else answer
    return Life(changes, list(said), code, options, scripts)


ONE_LIFE = "create install start rsync delete"
TWO_LIVES = f"create install start delete {ONE_LIFE}"
NO_QUOTA = "ERROR: (gcloud) RESOURCE_EXHAUSTED: Quota limit TPUV5sLitepodPerProjectPerZone exceeded"
UNANSWERED = {"log": ["exit 255", "true"], "endpoints": "echo '10.0.0.1;10.0.0.2'"}
UNANSWERED["status"] = [*["exit 255"] * 7, ENDED_WELL]


def refuse(reason):
    return f"echo '{reason}' >&2; exit 1"


LIVES = {
    "a preemption makes a new machine that goes on": make_life(
        TWO_LIVES,
        "pod was preempted (SUSPENDED). A new one is requested; the run resumes",
        options=("--spot", "--max_failures=0"),
        describe=[*NEW, "echo SUSPENDED", "echo SUSPENDED", NOT_THERE, "echo ACTIVE"],
        log=["echo step 1; exit 255", "echo step 1; echo step 2"],
    ),
    "a run that has saved is started again and not counted": make_life(
        "create install start install start install start rsync delete",
        "has saved; it is started again",
        options=("--max_failures=0",),
        status=[SAVED, SAVED, ENDED_WELL],
    ),
    "no quota": make_life(
        "create",
        *(
            NO_QUOTA,
            "no quota or no capacity for 1 x v5litepod-16 in us-west4-a",
            "--retry_seconds=600",
        ),
        code=3,
        create=refuse(NO_QUOTA),
        describe=NOT_THERE,
    ),
    "another refusal than of capacity is final": make_life(
        "create create create",
        *("requesting again in 0 s", "PERMISSION_DENIED", "Nothing of it costs money"),
        code=1,
        options=("--retry_seconds=0",),
        create=[
            refuse(text)
            for text in ("There is no more capacity", "exceeded the quota", "PERMISSION_DENIED")
        ],
        describe=NOT_THERE,
    ),
    "a request that fails later for want of quota is deleted, since it stays in the queue for good": make_life(
        "create delete",
        "message: Quota exceeded",
        code=3,
        describe=[*NEW[:2], "echo FAILED", "echo FAILED"],
        reason="echo 'message: Quota exceeded'",
    ),
    "a worker out of reach is named and the machine replaced": make_life(
        TWO_LIVES,
        "a dead worker: worker 1 of pod cannot be reached by ssh",
        describe=[*NEW[:2], *["echo ACTIVE"] * 6, NOT_THERE, "echo ACTIVE"],
        true=["true", "exit 255"],
        **UNANSWERED | {"status": [*["exit 255"] * 5, ENDED_WELL]},
    ),
    "workers that each can be reached are not given up": make_life(
        ONE_LIFE,
        "finished",
        **UNANSWERED,
    ),
    "a laptop off line gives nothing up": make_life(
        ONE_LIFE,
        "finished",
        describe=[*NEW, *[refuse("no network")] * 7, "echo ACTIVE"],
        **UNANSWERED,
    ),
    "a dead worker is named, and the run starts again a few times on the same machine": make_life(
        "create install start stop install start stop install start delete",
        "a dead worker: t1v-n-1-w-1 (worker 1 of pod) was killed (exit code 137",
        "the last words of worker 1",
        "starting again from the last checkpoint, 1 of at most 2 times",
        "failed 3 times; --max_failures=2 allows no more.",
        code=1,
        options=("--max_failures=2",),
        status=KILLED,
        tail="echo the last words of worker 1",
    ),
    "a mistake of the user is not repeated": make_life(
        "create install start delete",
        "there is no such field",
        code=2,
        status="echo t1v-n-1-w-0 exit 2 100; echo t1v-n-1-w-1 exit 2 100",
        tail="echo config.optimzer: there is no such field",
    ),
    "the end of --max_hours ends the run, which has saved": make_life(
        "create install start rsync delete",
        "stopped after --max_hours. The same command resumes from the last checkpoint in gs://bucket/run",
        code=75,
        options=("--max_hours=10",),
        status="echo t1v-n-1-w-0 exit 124 100; echo t1v-n-1-w-1 exit 75 101",
    ),
    "after --max_hours nothing is started again": make_life(
        "create install start rsync delete",
        "stopped after --max_hours",
        code=75,
        options=("--max_hours=0.0003",),
        log="sleep 1.1",
        status=KILLED,
        tail="echo the last words of worker 1",
    ),
    # The workers still tell how an earlier attempt ended; taken for this one's end, it would be
    # tried for ever.
    "a failed installation is a failure whatever an earlier attempt left": make_life(
        "create install stop install delete",
        "no space left",
        code=1,
        options=("--max_failures=1",),
        install=refuse("no space left"),
        status=SAVED,
    ),
    "the machine is kept, and what it costs is said": make_life(
        "create install start rsync",
        *(
            "costs money until it is deleted",
            "tpu_pod.sh delete --name=pod --zone=us-west4-a",
            "(256 chips)",
        ),
        options=("--type=v4-512", "--keep"),
    ),
    "all workers are waited for, and no summary is a failure": make_life(
        "create install start delete",
        "gs://bucket/run/summary.json is not there",
        code=1,
        options=("--max_failures=0",),
        status=["echo t1v-n-1-w-0 exit 0 100; echo t1v-n-1-w-1 running", ENDED_WELL],
        summary="exit 1",
    ),
    "a finished run creates nothing": make_life("rsync", "Nothing is created", summary="true"),
    # The same command again after Ctrl-C: nothing is created or installed under the run.
    "a run that goes on is taken up": make_life(
        "start rsync delete",
        "finished",
        describe="echo ACTIVE",
        status=[BOTH_RUN, ENDED_WELL],
    ),
    "another run on the machine is left alone": make_life(
        "start",
        "pod runs another command",
        code=1,
        describe="echo ACTIVE",
        status=BOTH_RUN,
        start=refuse("runs another command"),
    ),
    "one slice that fails to start is seen": make_life(
        "create install install start start delete",
        "(worker 0 of pod-0) never started",
        code=1,
        options=("--slices=2", "--max_failures=0"),
        start='[[ "$node" == pod-1 ]]',
        status='echo "$node-w-0 none"',
    ),
    "Google Cloud out of reach is not waited for for ever": make_life(
        "",
        "has not responded ten times",
        code=1,
        describe=refuse("could not resolve host"),
    ),
}


@pytest.mark.parametrize("name", LIVES)
def test_events_of_a_run(stage, name):
    life = LIVES[name]
    result = run(stage, *life.options, **life.answers)

    assert result.returncode == life.code, result.stderr
    assert list_changes(stage) == life.changes.split()
    for text in life.said:
        assert text in result.stderr
    if life.code == 0 and "status" not in life.answers:
        assert "dead worker" not in result.stderr

    create = ["queued-resources", "create"]
    for call in stage.calls("gcloud"):
        if call[2:4] == create:
            check_creation(stage, call, life.options)

    if life.answers.get("status") == [KILLED]:
        log = stage.checkout / "runs/pod/worker-1-of-pod.txt"
        assert log.read_text() == "the last words of worker 1\n"
        assert build_step("tail", worker=1) in stage.calls("gcloud")


def check_creation(stage, call, options):
    """All requests of a run are equal."""
    first = next(call for call in stage.calls("gcloud") if "create" in call)
    assert call == first
    assert ("--spot" in call) == ("--spot" in options)


def test_a_checkout_that_git_does_not_know_is_rejected_before_a_machine_is_asked_for(stage):
    message = "is not a git checkout, so its files are not known: give --repository=URL"
    shutil.rmtree(stage.checkout / ".git")
    result = run(stage)

    assert result.returncode == 2
    assert message in result.stderr
    assert stage.calls("gcloud") == []


def test_log_that_gcloud_repeats_is_kept_once(stage):
    """gcloud runs a command again, with the same words, when its connection drops.

    A cut line comes as a whole.
    """
    repeats = [
        r"step 1\n\nstép 2\nst",
        r"st",
        r"step 1\n",
        r"step 1\n\nstép 2\nstep 3\ncut",
    ]
    first = "; ".join(rf"printf '\nvit-jax-log 0\n{text}'" for text in repeats)
    rest = [
        r"printf '\nvit-jax-log 23\ncut line\n'",
        r"printf '\nvit-jax-log 32\n\nstep 4\nno end'",
    ]
    complete_lines = len("step 1..stép 2.step 3.".encode())
    with_cut_line = complete_lines + len("cut line.")

    result = run(
        stage,
        log=[f"{first}; exit 255", *rest],
        status=[BOTH_RUN, BOTH_RUN, ENDED_WELL],
    )

    assert result.returncode == 0, result.stderr
    assert result.stdout == "step 1\n\nstép 2\nst\nstep 3\ncut\ncut line\n\nstep 4\nno end\n"
    assert (stage.checkout / "runs/pod/log.txt").read_text() == result.stdout
    assert list_log_calls(stage) == [
        build_step("log 0", worker=0),
        build_step(f"log {complete_lines}", worker=0),
        build_step(f"log {with_cut_line}", worker=0),
    ]
    assert list_kinds(stage).count("start") == 1
    assert result.stderr.count("was lost and the run continues: following again") == 2


def test_slices_are_one_request_and_every_node_is_started(stage):
    options = ("--type=v6e-64", "--slices=2", "--reserved", "--create_flag=--network=mine")
    result = run(stage, *options, status=['echo "$node-host exit 0 100"'])

    assert result.returncode == 0, result.stderr
    assert "(128 chips)" in result.stderr

    calls = stage.calls("gcloud")
    assert calls[3] == [
        *CREATE[:5],
        "--accelerator-type=v6e-64",
        "--runtime-version=v2-alpha-tpuv6e",
        "--node-count=2",
        "--node-prefix=pod",
        "--reserved",
        "--network=mine",
        "--async",
        *PLACE,
    ]
    for node in ("pod-0", "pod-1"):
        assert build_ssh(START, node=node) in calls
        assert build_ssh(INSTALL, node=node) in calls
    assert [call[4] for call in list_log_calls(stage)] == ["pod-0"]


def test_repository_is_cloned_on_the_workers(stage):
    repository = "https://example.org/v.git"
    options = [f"--repository={repository}", "--ref=v1.0", "--data_bucket=gs://images"]
    clone = f"git clone --quiet {repository} vit_jax.new"
    checkout = "git -C vit_jax.new checkout --quiet v1.0"
    install = "bash vit_jax.new/launch/tpu_worker.sh install --data=gs://images"

    assert stage.run("tpu_pod.sh", "install", *NAME, *options).returncode == 0
    assert stage.calls("gcloud") == [
        build_ssh(f"rm -rf vit_jax.new && {clone} && {checkout} && {install}")
    ]


def test_steps_alone(stage):
    stage.answers("describe", "echo ACTIVE")
    stage.answers("status", BOTH_RUN)

    assert stage.run("tpu_pod.sh", "create", *NAME, "--type=v5litepod-16").returncode == 0
    assert stage.run("tpu_pod.sh", "wait", *NAME).returncode == 0

    status = stage.run("tpu_pod.sh", "status", *NAME)
    assert status.returncode == 0
    assert status.stdout == "pod t1v-n-1-w-0 running\npod t1v-n-1-w-1 running\n"

    assert stage.run("tpu_pod.sh", "fetch", *NAME, "--workdir=gs://bucket/run").returncode == 0
    assert stage.run("tpu_pod.sh", "delete", *NAME).returncode == 0
    assert stage.calls("gcloud") == [
        CREATE,
        DESCRIBE,
        DESCRIBE,
        build_step("status"),
        build_step("progress", worker=0),
        FETCH,
        DELETE,
    ]


def test_steps_that_fail(stage):
    stage.answers("fetch", "exit 1")
    assert stage.run("tpu_pod.sh", "fetch", *NAME, "--workdir=gs://bucket/run").returncode == 1

    stage.answers("describe", "echo FAILED")
    stage.answers("reason", "echo 'message: no such type here'")
    result = stage.run("tpu_pod.sh", "wait", *NAME)
    assert result.returncode == 1
    assert "no such type here" in result.stderr


def test_help(stage):
    assert stage.run("tpu_pod.sh", "run", "--help").stdout == stage.run("tpu_pod.sh").stdout


def test_data_are_prepared_and_copied(stage):
    words = ["tar:a.tar", "--name=mine", "--data_dir=tfds"]
    command = ["tpu_pod.sh", "data", "--data_bucket=gs://images", "--", *words]
    copy = ["storage", "rsync", "--recursive", "tfds", "gs://images/tfds"]
    stage.answers("check", "mkdir tfds", "exit 1")

    result = stage.run(*command)

    assert result.returncode == 0, result.stderr
    assert stage.calls() == [["vit-jax", "prepare", *words], ["gcloud", *copy]]
    assert "A run with --data_bucket=gs://images trains on it" in result.stderr

    assert stage.run(*command).returncode == 1
    assert len(stage.calls("gcloud")) == 1, "nothing is copied before all is prepared"


def test_four_values_are_enough(stage):
    """The recipe gives the name, the bucket the workdir and what `data` wrote about it."""
    for kind, scripts in UNDISTURBED.items():
        stage.answers(kind, *scripts)
    stage.answers("manifest", WRITE)
    four = ["--zone=us-west4-a", "--type=v5litepod-16", "--data_bucket=gs://images"]

    result = stage.run("tpu_pod.sh", "run", *four, "--poll_seconds=0", *WORDS[:3])

    assert result.returncode == 0, result.stderr
    assert "--name=x-vit-h-14\n" in result.stderr
    assert "--workdir=gs://images/runs/x-vit-h-14\n" in result.stderr
    assert MANIFEST in stage.calls("gcloud")
    (check, *_) = [call for call in stage.calls("vit-jax") if "--check" in call]
    assert set(DATA_WORDS) <= set(check)
    (start,) = [call for call in stage.calls("gcloud") if is_start(call)]
    assert "start gs://images/runs/x-vit-h-14 pretrain" in "".join(start)
    assert "--config.data=tfds:mine" in "".join(start)


def is_start(call):
    return any("tpu_worker.sh start" in word for word in call)


@pytest.mark.parametrize("field", ["data=tfds:other", "input.data_dir=/mnt/vit_jax_data/images/x"])
def test_data_of_the_command_come_before_those_of_the_bucket(stage, field):
    stage.answers("manifest", WRITE)

    run(stage, "--data_bucket=gs://images", words=[*WORDS, f"--config.{field}"])

    assert "tfds:mine" not in str(stage.calls())


def test_other_words_in_the_bucket_are_rejected(stage):
    stage.answers("manifest", "echo '--config.data=x:$(id)'")

    result = run(stage, "--data_bucket=gs://images")

    assert result.returncode == 2
    assert "is not a word that vit-jax prepare writes" in result.stderr


@pytest.mark.parametrize(
    ("words", "tool"),
    [
        (("tpu_pod.sh", "status", *NAME), "gcloud"),
        (("gke.sh", "log", "--name=a"), "kubectl"),
    ],
)
def test_a_missing_tool_is_named(stage, words, tool):
    programs = stage.folder / "bin"
    programs.mkdir()
    for program in ("bash", "readlink", "dirname", "git"):
        (programs / program).symlink_to(shutil.which(program))

    result = stage.run(*words, PATH=str(programs))

    assert result.returncode == 2
    assert result.stderr == f"vit-jax: {tool} is not installed here, or not on the PATH.\n"


NO_CREDENTIALS = "echo 'credentials not found' >&2; exit 1"


@pytest.mark.parametrize(
    ("state", "workers", "code"),
    [
        ("echo ACTIVE", ENDED_WELL, 0),
        ("echo ACTIVE", SAVED, 75),
        ("echo ACTIVE", KILLED, 1),
        ("echo ACTIVE", "echo t1v-n-1-w-0 running; echo t1v-n-1-w-1 none", 1),
        ("echo ACTIVE", "exit 255", 1),
        ("echo PROVISIONING", "exit 99", 3),
        (NOT_THERE, "exit 99", 3),
        # This answer says nothing about the machine.
        (NO_CREDENTIALS, "exit 99", 1),
    ],
)
def test_status_has_exit_codes(stage, state, workers, code):
    stage.answers("describe", state)
    stage.answers("status", workers)

    assert stage.run("tpu_pod.sh", "status", *NAME).returncode == code


@pytest.mark.parametrize(
    ("type", "rule"),
    [
        ("v5litepod-17", "Use v5litepod-16 or v5litepod-32."),
        ("v5litepod-512", "Use v5litepod-256."),
        ("v4-33", "Use v4-32 or v4-64."),
        ("v5p-20000", "Use v5p-12288."),
    ],
)
def test_impossible_slices_are_rejected_in_dry_runs(stage, type, rule):
    result = stage.run("tpu_pod.sh", "create", *NAME, f"--type={type}", "--dry-run")

    assert result.returncode == 2
    assert f"--type={type}: there is no slice of this size. {rule}" in result.stderr


def test_the_usual_name_of_a_v5e_slice(stage):
    result = stage.run("tpu_pod.sh", "create", *NAME, "--type=v5e-16", "--dry-run")

    assert "--accelerator-type=v5litepod-16" in result.stdout


@pytest.mark.parametrize(
    ("type", "version"),
    [
        ("v2-8", "tpu-ubuntu2204-base"),
        ("v3-32", "tpu-ubuntu2204-base"),
        ("v4-512", "tpu-ubuntu2204-base"),
        ("v5litepod-16", "v2-alpha-tpuv5-lite"),
        ("v5p-1024", "v2-alpha-tpuv5"),
        ("v6e-64", "v2-alpha-tpuv6e"),
        ("tpu7x-128", "v2-alpha-tpu7-ubuntu2404"),
    ],
)
def test_types(stage, type, version):
    result = stage.run(
        "tpu_pod.sh",
        "create",
        *NAME,
        f"--type={type}",
        "--dry-run",
    )
    assert f"--accelerator-type={type} --runtime-version={version} " in result.stdout


def test_chips_with_two_cores(stage):
    assert "(64 chips)" in run(stage, "--type=tpu7x-128").stderr


@pytest.mark.parametrize("document", ["launch/README.md", "docs/pod.md"])
def test_commands_of_the_documents_can_be_looked_at_as_they_stand(stage, document):
    """Names of the user are words in capitals; without --dry-run these are refused."""
    text = (LAUNCH.parent / document).read_text().replace("\\\n", " ")
    lines = re.findall(r"^\./launch/((?:tpu_pod|gke)\.sh run .*)$", text, re.MULTILINE)
    assert lines

    for line in lines:
        script, *words = shlex.split(line)
        stop = words.index("--")
        result = stage.run(script, *words[:stop], "--dry-run", *words[stop:])
        assert result.returncode == 0, result.stderr

        refused = stage.run(script, *words)
        assert refused.returncode == 2
        assert "in the place of BUCKET" in refused.stderr
    assert stage.calls() == []


@pytest.mark.parametrize(
    ("answer", "is_deleted"),
    [
        (None, False),
        ("y\n", True),
        ("\n", False),
    ],
    ids=["no terminal", "yes", "no"],
)
def test_ctrl_c_says_what_still_costs_money_and_asks_on_a_terminal(
    stage,
    answer,
    is_deleted,
):
    stage.answers("describe", "echo ACTIVE")
    stage.answers("status", BOTH_RUN)
    stage.answers("summary", "exit 1")
    stage.answers("log", "echo step 1; sleep 600")
    terminal, ours = pty.openpty()
    stdin = subprocess.DEVNULL if answer is None else ours

    with stage.start("tpu_pod.sh", *RUN, *WORDS, stdin=stdin) as process:
        assert process.stdout.readline() == "step 1\n"
        os.write(terminal, (answer or "").encode())
        os.killpg(process.pid, signal.SIGINT)
        _, stderr = process.communicate(timeout=300)
    os.close(terminal)
    os.close(ours)

    assert process.returncode == 130
    assert "continues; the same command again follows it" in stderr
    assert "./launch/tpu_pod.sh delete --name=pod --zone=us-west4-a" in stderr
    assert ("delete" in list_kinds(stage)) == is_deleted


def test_price_is_an_argument(stage):
    """A run costs whole seconds, at least one, at 1 a second and chip."""
    result = run(stage, "--type=v5p-1024", "--price=3600", log=["sleep 1.1"])
    line = next(line for line in result.stderr.splitlines() if "chip-hours" in line)
    cost = float(line.split()[5])

    assert "--runtime-version=v2-alpha-tpuv5" in stage.calls("gcloud")[3]
    assert "(512 chips)" in line
    assert cost >= 512
    assert cost % 512 == 0


BAD_FOLDERS = ("../other", "runs/..", "runs/./x", "runs//x", "$(id)", "`id`", "a b", "x;y")


@pytest.mark.parametrize("folder", BAD_FOLDERS)
def test_folders_that_are_rejected(stage, folder):
    words = ["run", *NAME, "--type=v4-8", f"--workdir=gs://bucket/{folder}"]
    result = stage.run("tpu_pod.sh", *words)

    assert result.returncode == 2
    assert f"gs://bucket/{folder}: parts of the" in result.stderr
    assert stage.calls() == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [*RUN, "--", "pretrainn", "--config=x"],
            "'pretrainn' follows --: this script runs pretrain or finetune",
        ),
        (["run"], "--name=: must be"),
        (["run", "--name=Pod"], "--name=Pod: must be at most 48 lower-case"),
        (["run", "--name=pod", "--zone=here"], "--zone=here: must be a zone"),
        (["run", *NAME, "--type=v5litepod"], "--type=v5litepod: must be"),
        (["run", *NAME, "--type=v99-8"], "--type=v99-8: must be"),
        (
            ["run", *NAME, "--type=v4-8", "--workdir=runs/x"],
            "--workdir=runs/x: must be gs://BUCKET/FOLDER",
        ),
        ([*RUN], "Give the command to run after --"),
        ([*RUN, "--", "pretrain", "--workdir=x"], "--workdir=x follows --"),
        ([*RUN, "--spot", "--reserved", *WORDS], "exclude each other"),
        ([*RUN, "--slices=0", *WORDS], "--slices=0: must be 1 or more"),
        ([*RUN, "--max_failures=many", *WORDS], "--max_failures=many: must be a whole number"),
        ([*RUN, "--price=cheap", *WORDS], "--price=cheap: must be the price"),
        ([*RUN, "--ref=v1", *WORDS], "--ref=v1 is of a --repository"),
        ([*RUN, "--data_bucket=images", *WORDS], "--data_bucket=images: must be gs://BUCKET"),
        ([*RUN, "--upload=../weights", *WORDS], "--upload=../weights: must be a file or folder in"),
        ([*RUN, "--upload=x", "--repository=y", *WORDS], "--upload is of this checkout"),
        (
            [*RUN, "--", "pretrain", "--config=/home/me/x.py"],
            "--config=/home/me/x.py: must be a path from",
        ),
        (["status", *NAME, "--no_check"], "--no_check is of run"),
        ([*RUN, "--learning_rate=1", *WORDS], "'--learning_rate=1' is not an option of tpu_pod.sh"),
        (["delete", *NAME, *WORDS], "'delete' takes no command"),
        (["destroy"], "There is no command 'destroy'"),
        (
            ["data", "--", "imagenet2012", "--data_dir=tfds"],
            "data copies to one --data_bucket=gs://BUCKET",
        ),
        (["data", "--data_bucket=gs://images", "--", "imagenet2012"], "with --data_dir=FOLDER"),
        (
            [*RUN, "--cache_dir=/mnt/ssd", *WORDS],
            "--cache_dir is of run and install with a --data_bucket",
        ),
        (
            [*RUN, "--data_bucket=gs://images", "--cache_dir=ssd", *WORDS],
            "--cache_dir=ssd: must be an absolute path",
        ),
    ],
)
def test_mistakes_are_rejected_before_anything_is_asked_for(
    stage,
    words,
    message,
):
    result = stage.run("tpu_pod.sh", *words)

    assert result.returncode == 2
    assert message in result.stderr
    assert stage.calls() == []
