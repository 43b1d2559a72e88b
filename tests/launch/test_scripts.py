"""The launch scripts, with stand-ins for Python, pip and nvidia-smi that record their calls."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

BASH = shutil.which("bash") or pytest.skip("no bash here", allow_module_level=True)

# Knows the few ways in which environment.sh calls Python. An environment that it makes contains a
# copy of it.
FAKE_PYTHON = """#!/bin/bash
case "$1 ${2:-}" in
  "-c "*)
    echo "${FAKE_VERSION:-3.11.7}" ;;
  "-m venv")
    echo venv >>"$CALLS"
    directory="${@: -1}"
    mkdir -p "$directory/bin"
    touch "$directory/pyvenv.cfg"
    cp "$0" "$directory/bin/python" ;;
  "-m pip")
    [[ "$3" == --version ]] && exit 0
    echo "pip ${@: -1}" >>"$CALLS"
    echo "what pip says"
    sleep "${FAKE_PIP_SECONDS:-0}"
    [[ -z "${FAKE_PIP_FAILS:-}" ]] || exit 1
    for tool in vit-jax ruff mypy; do
      cp "$FAKE_TOOL" "$(dirname "$0")/$tool"
    done ;;
  "-m pytest")
    exec "$FAKE_TOOL" "$@" ;;
esac
"""
# Prints its name, the folder, and every argument in brackets.
FAKE_TOOL = """#!/bin/bash
printf '%s in %s:' "$(basename "$0")" "$PWD"
printf ' [%s]' "$@"
echo
"""
MISSING = "#!/bin/bash\nexit 127\n"


def read_calls(sandbox):
    """Return the environments that were made and the packages that were installed, in order."""
    calls = sandbox.folder / "calls"
    return calls.read_text().splitlines() if calls.exists() else []


PACKAGES = "pip .[cpu,figures,hub,onnx]"

TEST_PACKAGES = "pip .[cpu,test,figures,hub,onnx]"


def write_program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def sandbox(stage):
    """A stage with programs of its own on the PATH, and a working folder that is not the checkout."""
    stage.programs = stage.folder / "bin"
    stage.elsewhere = stage.folder / "elsewhere"
    stage.programs.mkdir()
    stage.elsewhere.mkdir()
    write_program(stage.programs / "python3", FAKE_PYTHON)
    for name in ("python3.13", "python3.12", "python3.11", "nvidia-smi"):
        write_program(stage.programs / name, MISSING)
    stage.cwd = stage.elsewhere
    stage.variables |= {
        "PATH": f"{stage.programs}:{os.environ['PATH']}",
        "FAKE_TOOL": str(write_program(stage.folder / "tool", FAKE_TOOL)),
        "VIT_JAX_ACCELERATOR": "cpu",
    }
    del stage.variables["VIT_JAX_MOUNTS"]
    return stage


def test_first_run_installs_and_second_does_not(sandbox):
    first = sandbox.run("local.sh", "pretrain")

    # pip prints nothing.
    assert first.returncode == 0, first.stderr
    assert first.stdout == f"vit-jax in {sandbox.elsewhere}: [pretrain]\n"
    assert read_calls(sandbox) == ["venv", PACKAGES]

    second = sandbox.run("local.sh", "pretrain", cwd=sandbox.checkout)
    assert second.stdout == f"vit-jax in {sandbox.checkout}: [pretrain]\n"
    assert second.stderr == ""

    link = sandbox.elsewhere / "vit"
    link.symlink_to(sandbox.checkout / "launch/local.sh")
    subprocess.run(
        [link, "doctor"],
        env=sandbox.variables,
        check=True,
        capture_output=True,
    )
    assert len(read_calls(sandbox)) == 2


def test_arguments_pass_untouched(sandbox):
    arguments = (
        "pretrain",
        "--workdir=my runs/x",
        "",
        'it\'s "quoted"',
        "$HOME `ls` * \\",
        "line\nbreak",
        "--",
        "-e",
    )
    expected = " ".join(f"[{argument}]" for argument in arguments)

    result = sandbox.run("local.sh", *arguments)

    assert result.stdout.partition(": ")[2] == f"{expected}\n"


def test_changed_requirements_and_a_moved_checkout_install_again(sandbox):
    sandbox.run("local.sh", "doctor")
    for name in ("setup.py", "pyproject.toml"):
        (sandbox.checkout / name).write_text("changed")
        sandbox.run("local.sh", "doctor")
    sandbox.checkout = sandbox.checkout.rename(sandbox.checkout.with_name("moved"))

    assert sandbox.run("local.sh", "doctor").returncode == 0
    assert read_calls(sandbox) == ["venv", PACKAGES, PACKAGES, PACKAGES, PACKAGES]


def test_failed_installation_is_shown_and_repeated(sandbox):
    """So it is in a half-made environment, and after a complete installation, whose stamp must not
    stay valid.
    """
    venv = sandbox.checkout / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "pyvenv.cfg").touch()
    failed = sandbox.run("local.sh", "doctor", FAKE_PIP_FAILS="1")

    assert failed.returncode == 1
    assert failed.stdout == ""
    assert "what pip says" in failed.stderr
    assert f"{venv}/install.log" in failed.stderr
    assert sandbox.run("local.sh", "doctor").returncode == 0

    # The scripts share an environment.
    sandbox.run("test.sh", "-q", FAKE_PIP_FAILS="1")
    for script in ("local.sh", "test.sh", "local.sh", "test.sh"):
        sandbox.run(script, "x")
    assert read_calls(sandbox) == [
        "venv",
        PACKAGES,
        PACKAGES,
        TEST_PACKAGES,
        PACKAGES,
        TEST_PACKAGES,
    ]


VFIO = "sys/bus/pci/drivers/vfio-pci/0000:00:05.0/vendor"

NO_DRIVER = "NVIDIA-SMI has failed because it could not talk to the driver."
NETWORK_CARD = "sys/bus/pci/drivers/gvnic/0000:00:04.0/vendor"


def test_a_directory_that_is_no_environment_is_left_alone(sandbox):
    (sandbox.elsewhere / "letters").touch()
    result = sandbox.run("local.sh", "doctor", VIT_JAX_VENV=str(sandbox.elsewhere))

    assert result.returncode == 1
    assert "is not a virtual environment" in result.stderr
    assert (sandbox.elsewhere / "letters").exists()
    assert read_calls(sandbox) == []


@pytest.mark.skipif(not shutil.which("flock"), reason="without flock there is no lock")
def test_two_first_runs_install_once(sandbox):
    processes = [sandbox.start("local.sh", "doctor", FAKE_PIP_SECONDS="0.3") for _ in range(2)]

    for process in processes:
        assert process.communicate(timeout=300)[0].endswith(": [doctor]\n")
    assert read_calls(sandbox) == ["venv", PACKAGES]


@pytest.mark.parametrize(
    ("nvidia_smi", "file", "text", "extra"),
    [
        ("echo 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)'", "", "", "cuda"),
        ("echo 'No devices were found'", "", "", "cpu"),
        (f"echo '{NO_DRIVER}'; exit 9", "", "", "cpu"),
        ("exit 127", "dev/accel0", "", "tpu"),
        # Linux gives this name to the accelerator of a laptop.
        ("exit 127", "dev/accel/accel0", "", "cpu"),
        # Any machine with the module loaded has this file.
        ("exit 127", "dev/vfio/vfio", "", "cpu"),
        ("exit 127", VFIO, "0x1ae0\n", "tpu"),
        # This GPU is passed on to a guest.
        ("exit 127", VFIO, "0x10de\n", "cpu"),
        # The network card of a Google VM.
        ("exit 127", NETWORK_CARD, "0x1ae0\n", "cpu"),
    ],
    ids=[
        "GPU",
        "no GPU",
        "no driver",
        "TPU",
        "laptop",
        "vfio",
        "TPU by vfio",
        "GPU of a guest",
        "Google VM",
    ],
)
def test_accelerators_are_detected(sandbox, nvidia_smi, file, text, extra):
    write_program(sandbox.programs / "nvidia-smi", f"#!/bin/bash\n{nvidia_smi}\n")
    path = sandbox.folder / "root" / (file or "nothing")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    script = 'set -euo pipefail; source "$1/launch/environment.sh"; accelerator "$2/root"'
    words = [BASH, "-c", script, "bash", sandbox.checkout, sandbox.folder]
    variables = dict(sandbox.variables)
    del variables["VIT_JAX_ACCELERATOR"]

    assert subprocess.check_output(words, env=variables, text=True).strip() == extra


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 3.10.13", "is needed; python3 is 3.10.13"),
        ("exit 127", "python3 is not found"),
    ],
)
def test_old_python_is_rejected_unless_there_is_a_newer_one(
    sandbox,
    script,
    message,
):
    write_program(sandbox.programs / "python3", f"#!/bin/bash\n{script}\n")
    result = sandbox.run("local.sh", "doctor")

    assert result.returncode == 1
    assert message in result.stderr
    assert not (sandbox.checkout / ".venv").exists()

    write_program(sandbox.programs / "python3.12", FAKE_PYTHON)
    result = sandbox.run("local.sh", "doctor", FAKE_VERSION="3.12.1")
    assert "with Python 3.12.1" in result.stderr


def test_chosen_python_is_never_ignored(sandbox):
    chosen = str(write_program(sandbox.programs / "chosen", FAKE_PYTHON))

    assert sandbox.run("local.sh", "doctor", PYTHON=chosen).returncode == 0
    assert sandbox.run("local.sh", "doctor", PYTHON=chosen).returncode == 0

    other = str(write_program(sandbox.programs / "other", "#!/bin/bash\necho 3.13.0\n"))
    refused = sandbox.run("local.sh", "doctor", PYTHON=other)

    assert refused.returncode == 1
    assert "was made with Python 3.11.7" in refused.stderr

    old = str(write_program(sandbox.programs / "old", "#!/bin/bash\necho 3.9.2\n"))
    refused = sandbox.run(
        "local.sh",
        "doctor",
        PYTHON=old,
        VIT_JAX_VENV="fresh",
    )

    assert f"PYTHON={old} is 3.9.2; 3.11 or newer is needed." in refused.stderr


@pytest.mark.parametrize(
    ("words", "variables", "checks", "added"),
    [
        ((), {}, ["ruff", "ruff", "mypy"], " [--fast]"),
        (("--all",), {"CI": ""}, ["ruff", "ruff", "mypy"], ""),
        (("--all", "-x"), {"CI": "true"}, ["ruff", "ruff", "mypy"], " [--cpu-limit=15] [-x]"),
        (("tests/models", "-k", "a or b"), {}, [], " [tests/models] [-k] [a or b]"),
    ],
    ids=["default", "all", "CI", "arguments"],
)
def test_test_script(sandbox, words, variables, checks, added):
    """It checks style, types and the fast tests.

    With --all it runs all tests, and with arguments pytest alone.
    """
    pytest_words = "[-m] [pytest] [-n] [auto] [--maxprocesses=4] [--dist=loadgroup]"
    *checked, last = sandbox.run("test.sh", *words, **variables).stdout.splitlines()

    assert [line.partition(" in ")[0] for line in checked] == checks
    assert last == f"tool in {sandbox.checkout}: {pytest_words}{added}"
    assert read_calls(sandbox) == ["venv", "pip .[cpu,test]"]


def test_test_script_keeps_bytecode(sandbox):
    """A container may forbid bytecode; the processes of the tests share it."""
    write_program(sandbox.folder / "tool", "#!/bin/bash\necho ${PYTHONDONTWRITEBYTECODE-kept}\n")
    result = sandbox.run("test.sh", "-q", PYTHONDONTWRITEBYTECODE="1")

    assert result.stdout == "kept\n"


TWO_GPUS = "2 GPU(s): 2 x NVIDIA H100"

PRINT_GPUS = """#!/bin/bash
echo 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-a)'
echo 'GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-b)'
"""

ALL_GPUS = "vit-jax: 2 GPU(s), all of them used by one process: 2 x NVIDIA H100 80GB HBM3\n"


@pytest.mark.parametrize(
    ("accelerator", "variables", "message"),
    [
        ("cuda", {}, ALL_GPUS),
        (
            "cuda",
            {"CUDA_VISIBLE_DEVICES": "1"},
            f"CUDA_VISIBLE_DEVICES=1 chooses among {TWO_GPUS}",
        ),
        (
            "cuda",
            {"CUDA_VISIBLE_DEVICES": ""},
            "vit-jax: CUDA_VISIBLE_DEVICES= chooses among 2 GPU(s)",
        ),
        (
            "cuda",
            {"JAX_CUDA_VISIBLE_DEVICES": "0"},
            "vit-jax: JAX_CUDA_VISIBLE_DEVICES=0 chooses among 2 GPU(s)",
        ),
        ("cuda", {"JAX_PLATFORMS": "cpu"}, "vit-jax: JAX_PLATFORMS=cpu chooses what JAX uses\n"),
        ("cpu", {"JAX_PLATFORMS": "tpu"}, ""),
        ("cpu", {}, ""),
        ("tpu", {}, ""),
    ],
)
def test_accelerators_are_named_and_the_environment_is_left_alone(
    sandbox,
    accelerator,
    variables,
    message,
):
    """Nothing limits the GPUs or changes how JAX uses memory.

    Without an accelerator none is looked for by default.
    """
    write_program(sandbox.programs / "nvidia-smi", PRINT_GPUS)
    show = write_program(sandbox.elsewhere / "show", "#!/bin/bash\nenv\n")
    before = {
        *sandbox.variables,
        "VIT_JAX_ACCELERATOR",
        "PWD",
        "OLDPWD",
        "SHLVL",
        "_",
    }
    expected = dict(variables)
    if accelerator == "cpu":
        expected.setdefault("JAX_PLATFORMS", "cpu")

    changed = {"VIT_JAX_ACCELERATOR": accelerator, "FAKE_TOOL": str(show)}
    result = sandbox.run("local.sh", "x", **changed, **variables)

    added = [line for line in result.stdout.splitlines() if line.partition("=")[0] not in before]
    assert message in result.stderr
    assert set(added) == {f"{name}={value}" for name, value in expected.items()}
    assert read_calls(sandbox) == ["venv", f"pip .[{accelerator},figures,hub,onnx]"]


def test_an_unknown_accelerator_is_rejected(sandbox):
    unknown = sandbox.run("local.sh", "doctor", VIT_JAX_ACCELERATOR="gpu")

    assert unknown.returncode == 1
    assert "none of cpu, cuda, tpu" in unknown.stderr


def test_dry_run_of_a_first_run_executes_nothing(sandbox):
    result = sandbox.run(
        "local.sh",
        "--dry-run",
        "pretrain",
        "--workdir=my runs",
    )
    assert result.returncode == 0, result.stderr

    venv = f"{sandbox.checkout}/.venv"
    pip = "-m pip install --disable-pip-version-check --no-input -e"

    assert result.stdout.splitlines() == [
        f"python3 -m venv --clear -- '{venv}'",
        f"'{venv}/bin/python' {pip} '{sandbox.checkout}[cpu,figures,hub,onnx]'",
        f"'{venv}/bin/vit-jax' pretrain '--workdir=my runs'",
    ]
    assert read_calls(sandbox) == []
    assert not (sandbox.checkout / ".venv").exists()

    sandbox.run("local.sh", VIT_JAX_VENV="mine")  # relative to the caller
    later = sandbox.run("local.sh", "--dry-run", VIT_JAX_VENV="mine")

    assert later.stdout == f"{sandbox.elsewhere}/mine/bin/vit-jax --help\n"
