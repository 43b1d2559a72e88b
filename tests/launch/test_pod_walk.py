"""docs/pod.md from its first command to its last: processes of this machine take the place of the pod's hosts.

Every command is that of the page, with fields that make the run small, and paths of this machine
behind them. gcloud is a stand-in: a bucket is a folder, a worker a home folder in which
tpu_worker.sh and vit-jax run as they would there.
"""

import io
import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tarfile

import cv2
import numpy as np
import pytest

from tests.launch.conftest import LAUNCH
from tests.launch.test_cost_guard import MACHINE
from tests.launch.test_scripts import FAKE_PYTHON, write_program
from tests.tiny import NETWORK, flags

ROOT = LAUNCH.parent
SMALL = flags(
    *(
        *NETWORK,
        "global_batch=256",
        "total=6 steps",
        "schedule.warmup=2 steps",
        "input.image_size=32",
    ),
    *(
        "checkpoint.every=3 steps",
        "evaluation.global_batch=256",
        "logging.every=2 steps",
        "logging.tensorboard=False",
    ),
    *("logging.compilation_cache=False", "input.num_workers=0"),
)
# vit-jax of the checkout that it runs in: here, and on a worker as one of two processes of a run.
TOOL = """#!/bin/bash
set -euo pipefail
export PYTHONPATH="{checkout}" JAX_PLATFORMS=cpu
if [[ -n "${{HOST:-}}" ]]; then
  export PYTHONPATH="$HOME/vit_jax"
  if [[ "$1" == pretrain ]]; then
    export VIT_JAX_COORDINATOR=127.0.0.1:{port} VIT_JAX_NUM_PROCESSES=2 VIT_JAX_PROCESS_ID="${{HOST##*-w-}}"
  fi
  set -- "${{@//\\/mnt\\/vit_jax_data/${{VIT_JAX_MOUNTS}}_data}}" # where this test mounts
fi
exec {python} -P -m vit_jax "$@"
"""
COPY = r"""
where() {
  case "$1" in
    gs://images*) echo "${VIT_JAX_MOUNTS}_data/${1#gs://}" ;;
    gs://*) echo "$VIT_JAX_MOUNTS/${1#gs://}" ;;
    *) echo "$1" ;;
  esac
}
read -r -a parts <<<"$words"
mkdir -p "$(where "${parts[-1]}")"
cp -r "$(where "${parts[-2]}")/." "$(where "${parts[-1]}")"
"""
LOOK = 'folder="${VIT_JAX_MOUNTS}_data/${words##* gs://}"; [[ -e "${folder% }" ]]'


@pytest.fixture
def stage(stage):
    """A stage with the complete package in its checkout, two workers, and a cloud with one machine and two buckets."""
    for name in ("vit_jax", "configs"):
        shutil.copytree(
            ROOT / name, stage.checkout / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    subprocess.run(["git", "-C", stage.checkout, "add", "--all"], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tool = TOOL.format(checkout=stage.checkout, port=port, python=shlex.quote(sys.executable))
    stage.install(write_program(stage.folder / "tool", tool))
    (stage.folder / "bin").mkdir()
    write_program(stage.folder / "bin/python3", FAKE_PYTHON)
    for kind, script in (MACHINE | {"fetch": COPY, "ls": LOOK}).items():
        if kind not in ("status", "summary", "log"):  # these are the workers' own
            stage.answers(kind, script)
    stage.variables |= {
        "PATH": f"{stage.folder}/bin:{stage.checkout}/.venv/bin:{stage.variables['PATH']}",
        "WORKERS": "2",
        "FAKE_TOOL": str(stage.folder / "tool"),
    }
    return stage


def photos(folder, tar):
    """Write twelve images of two classes as a folder of folders, and the same as a tar of tars."""
    rng = np.random.default_rng(0)
    with tarfile.open(tar, "w") as outer:
        for name in ("n01440764", "n01443537"):
            (folder / name).mkdir(parents=True)
            for number in range(24):
                encoded = cv2.imencode(".jpg", rng.integers(0, 256, (40, 48, 3), np.uint8))[
                    1
                ].tobytes()
                (folder / name / f"{name}_{number}.JPEG").write_bytes(encoded)
            inner = io.BytesIO()
            with tarfile.open(fileobj=inner, mode="w") as archive:
                archive.add(folder / name, arcname=".")
            member = tarfile.TarInfo(f"{name}.tar")
            member.size = len(inner.getvalue())
            outer.addfile(member, io.BytesIO(inner.getvalue()))


def commands():
    """The commands of the page that are for the reader's computer, in order."""
    text = (ROOT / "docs/pod.md").read_text().replace("\\\n", " ")
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    return [shlex.split(line) for line in lines if line.startswith(("vit-jax ", "./launch/"))]


def made_small(words):
    """The same command for this machine: small fields behind its own, other buckets, plans without a compiler."""
    words = [
        word.replace("gs://BUCKET", "gs://images").replace("/BUCKET/", "/images/") for word in words
    ]
    words = [word.replace("--workdir=gs://images", "--workdir=gs://bucket") for word in words]
    verb = words[words.index("--") + 1] if "--" in words else words[1]
    if verb in ("pretrain", "plan", "doctor"):
        words += SMALL
    if words[1] == "plan":
        words.append("--arithmetic")
    if words[1] == "run":
        words[2:2] = ["--poll_seconds=1", "--keep"]  # for the status and the deletion that follow
    return words


def test_every_command_of_the_page(stage):
    (stage.checkout / "archives").mkdir()
    photos(stage.checkout / "my-images", stage.checkout / "archives/ILSVRC2012_img_train.tar")
    said = []
    for words in map(made_small, commands()):
        words[0] = "vit-jax" if words[0] == "vit-jax" else str(stage.checkout / words[0])
        result = subprocess.run(
            words,
            cwd=stage.checkout,
            env=stage.variables,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        # The speed of this machine decides
        may_be_slow = words[1] == "doctor" and result.returncode == 1

        assert result.returncode == 0 or may_be_slow, (
            f"{shlex.join(words)}\n{result.stdout}\n{result.stderr}"
        )

        said.append(f"$ {shlex.join(words)}\n{result.stdout}{result.stderr}")

    text = "\n".join(said)

    assert "vit-jax: plan, by arithmetic: " in text
    assert "2 x cpu in 2 process(es)" in (stage.checkout / "runs/vit-l/log.txt").read_text()
    assert json.loads((stage.checkout / "runs/vit-l/summary.json").read_text())["steps"] == 6
    assert len(re.findall(r"runs/vit-l +\| ended +\| +6 \|", text)) == 2, (
        "by tpu_pod.sh status and vit-jax status"
    )
    assert (stage.checkout / "curves.png").stat().st_size > 1000
    assert not (stage.folder / "play/machine").exists(), "the machine is deleted"
    assert not (stage.checkout / "runs/vit-l/rented.txt").exists()
