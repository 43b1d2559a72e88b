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
import subprocess
import sys
import tarfile

import cv2
import numpy as np
import pytest

from tests.integration.commands import environment_of
from tests.integration.launchers import reserve_port
from tests.launch.conftest import LAUNCH
from tests.launch.test_cost_guard import MACHINE
from tests.launch.test_scripts import FAKE_PYTHON, write_program
from tests.tiny import NETWORK, flags

ROOT = LAUNCH.parent
SMALL = flags(
    *NETWORK,
    "global_batch=256",
    "total=6 steps",
    "schedule.warmup=2 steps",
    "input.image_size=32",
    "checkpoint.every=3 steps",
    "evaluation.global_batch=256",
    "logging.every=2 steps",
    "logging.tensorboard=False",
    "logging.compilation_cache=False",
    "input.num_workers=0",
)


# vit-jax of the checkout that it runs in: here, and on a worker as one of two processes of a run.
TOOL = """#!/bin/bash
set -euo pipefail
export PYTHONPATH="{checkout}" JAX_PLATFORMS=cpu XLA_FLAGS="{xla_flags}"
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
    """A stage with the complete package in its checkout, two workers, and a cloud with one machine
    and two buckets.
    """
    without_caches = shutil.ignore_patterns("__pycache__")
    for name in ("vit_jax", "configs"):
        shutil.copytree(ROOT / name, stage.checkout / name, ignore=without_caches)
    subprocess.run(["git", "-C", stage.checkout, "add", "--all"], check=True)

    python = shlex.quote(sys.executable)
    tool = TOOL.format(
        checkout=stage.checkout,
        port=reserve_port(),
        python=python,
        xla_flags=environment_of(devices=1)["XLA_FLAGS"],  # without optimisation, as in tests
    )
    stage.install(write_program(stage.folder / "tool", tool))
    (stage.folder / "bin").mkdir()
    write_program(stage.folder / "bin/python3", FAKE_PYTHON)

    # The workers answer to status, summary and log themselves.
    for kind in ("describe", "create", "delete"):
        stage.answers(kind, MACHINE[kind])
    stage.answers("fetch", COPY)
    stage.answers("ls", LOOK)
    stage.variables |= {
        "PATH": f"{stage.folder}/bin:{stage.checkout}/.venv/bin:{stage.variables['PATH']}",
        "WORKERS": "2",
        "FAKE_TOOL": str(stage.folder / "tool"),
    }
    return stage


def add_member(archive, name, content):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def write_photos(folder, tar):
    """Write 48 images of two classes as a folder of folders, and the same as a tar of tars."""
    rng = np.random.default_rng(0)
    with tarfile.open(tar, "w") as outer:
        for name in ("n01440764", "n01443537"):
            (folder / name).mkdir(parents=True)
            for number in range(24):
                pixels = rng.integers(0, 256, (40, 48, 3), np.uint8)
                cv2.imwrite(str(folder / name / f"{name}_{number}.JPEG"), pixels)

            inner = io.BytesIO()
            with tarfile.open(fileobj=inner, mode="w") as archive:
                archive.add(folder / name, arcname=".")
            add_member(outer, f"{name}.tar", inner.getvalue())


def read_commands():
    """Return the commands of the page that are for the reader's computer, in order."""
    text = (ROOT / "docs/pod.md").read_text().replace("\\\n", " ")
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).splitlines()
    return [shlex.split(line) for line in lines if line.startswith(("vit-jax ", "./launch/"))]


def make_small(words):
    """Return the same command for this machine: small fields, other buckets, plans without a
    compiler.
    """
    small = []
    for word in words:
        small.append(word.replace("gs://BUCKET", "gs://images").replace("/BUCKET/", "/images/"))

    verb = small[small.index("--") + 1] if "--" in small else small[1]
    if verb in ("pretrain", "plan", "doctor"):
        small += SMALL
    if small[1] == "plan":
        small.append("--arithmetic")
    if small[1] == "run":
        # The status and the deletion follow.
        workdir = "--workdir=gs://bucket/runs/pretrain-imagenet1k-vit-l-16"
        small[2:2] = ["--poll_seconds=1", "--keep", workdir]
    return small


def execute(stage, words):
    """Run a command of the page; return it with its output."""
    program, *rest = words
    if program != "vit-jax":
        program = str(stage.checkout / program)
    result = subprocess.run(
        [program, *rest],
        cwd=stage.checkout,
        env=stage.variables,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )

    text = f"$ {shlex.join(words)}\n{result.stdout}\n{result.stderr}"
    # The speed of this machine decides what doctor says.
    may_fail = words[1] == "doctor" and result.returncode == 1
    assert result.returncode == 0 or may_fail, text
    return text


def test_every_command_of_the_page(stage):
    run_folder = stage.checkout / "runs/pretrain-imagenet1k-vit-l-16"
    (stage.checkout / "archives").mkdir()
    archive = stage.checkout / "archives/ILSVRC2012_img_train.tar"
    write_photos(stage.checkout / "my-images", archive)

    outputs = [execute(stage, make_small(words)) for words in read_commands()]

    text = "\n".join(outputs)
    states = re.findall(r"runs/pretrain-imagenet1k-vit-l-16 +\| ended +\| +6 \|", text)
    assert "vit-jax: plan, by arithmetic: " in text
    assert len(states) == 2, "by tpu_pod.sh status and vit-jax status"

    assert "2 x cpu in 2 process(es)" in (run_folder / "log.txt").read_text()
    assert json.loads((run_folder / "summary.json").read_text())["steps"] == 6
    assert (stage.checkout / "curves.png").stat().st_size > 1000
    assert not (stage.folder / "play/machine").exists(), "the machine is deleted"
    assert not (run_folder / "rented.txt").exists()
