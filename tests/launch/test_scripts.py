"""The launch scripts, run beside stand-ins for Python, pip and nvidia-smi that write down how they are called."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "launch"
BASH = shutil.which("bash") or pytest.skip("no bash here", allow_module_level=True)

# Answers the few ways in which environment.sh calls a Python. An environment made by it holds a copy of it.
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
# Shows who was called, where, and every argument between brackets.
FAKE_TOOL = """#!/bin/bash
printf '%s in %s:' "$(basename "$0")" "$PWD"
printf ' [%s]' "$@"
echo
"""
MISSING = "#!/bin/bash\nexit 127\n"


@dataclass
class Sandbox:
    """A checkout with the launch scripts, a PATH of stand-ins, and another directory to call from."""

    checkout: Path
    elsewhere: Path
    stand_ins: Path
    calls_file: Path
    variables: dict[str, str]

    def start(self, script: str, *arguments: str, cwd: Path | None = None, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self.checkout / "launch" / script, *arguments],
            cwd=cwd or self.elsewhere,
            env=self.variables | variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, script: str, *arguments: str, **options) -> subprocess.CompletedProcess[str]:
        with self.start(script, *arguments, **options) as process:
            stdout, stderr = process.communicate(timeout=30)
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []


def write_program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def sandbox(tmp_path) -> Sandbox:
    checkout, elsewhere, stand_ins = (tmp_path / name for name in ("a checkout", "elsewhere", "bin"))
    shutil.copytree(LAUNCH, checkout / "launch")
    for name in ("setup.py", "pyproject.toml"):
        (checkout / name).write_text(f"# {name}\n")
    elsewhere.mkdir()
    stand_ins.mkdir()
    write_program(stand_ins / "python3", FAKE_PYTHON)
    for name in ("python3.13", "python3.12", "python3.11", "nvidia-smi"):
        write_program(stand_ins / name, MISSING)
    variables = {
        "PATH": f"{stand_ins}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "CALLS": str(tmp_path / "calls"),
        "FAKE_TOOL": str(write_program(tmp_path / "tool", FAKE_TOOL)),
        "VIT_JAX_ACCELERATOR": "cpu",
    }
    return Sandbox(checkout, elsewhere, stand_ins, tmp_path / "calls", variables)


def test_first_run_installs_and_second_does_not(sandbox):
    first = sandbox.run("local.sh", "pretrain")
    assert first.returncode == 0, first.stderr
    assert first.stdout == f"vit-jax in {sandbox.elsewhere}: [pretrain]\n"  # nothing of pip on the way
    assert sandbox.calls() == ["venv", "pip .[cpu]"]
    second = sandbox.run("local.sh", "pretrain", cwd=sandbox.checkout)
    assert (second.stdout, second.stderr) == (f"vit-jax in {sandbox.checkout}: [pretrain]\n", "")
    assert len(sandbox.calls()) == 2


def test_arguments_pass_untouched(sandbox):
    arguments = ("pretrain", "--workdir=my runs/x", "", 'it\'s "quoted"', "$HOME `ls` * \\", "line\nbreak", "--", "-e")
    result = sandbox.run("local.sh", *arguments)
    assert result.stdout.partition(": ")[2] == " ".join(f"[{argument}]" for argument in arguments) + "\n"


def test_without_a_verb_it_helps(sandbox):
    assert sandbox.run("local.sh").stdout.endswith(": [--help]\n")


def test_a_link_to_the_script_finds_the_checkout(sandbox):
    link = sandbox.elsewhere / "vit"
    link.symlink_to(sandbox.checkout / "launch/local.sh")
    subprocess.run([link, "doctor"], env=sandbox.variables, check=True, capture_output=True)
    assert (sandbox.checkout / ".venv/vit-jax-installed").exists()


@pytest.mark.parametrize("name", ["setup.py", "pyproject.toml"])
def test_changed_requirements_install_again(sandbox, name):
    sandbox.run("local.sh", "doctor")
    (sandbox.checkout / name).write_text("changed")
    sandbox.run("local.sh", "doctor")
    assert sandbox.calls() == ["venv", "pip .[cpu]", "pip .[cpu]"]


def test_moved_checkout_installs_again(sandbox):
    sandbox.run("local.sh", "doctor")
    sandbox.checkout = sandbox.checkout.rename(sandbox.checkout.with_name("moved"))
    assert sandbox.run("local.sh", "doctor").returncode == 0
    assert sandbox.calls() == ["venv", "pip .[cpu]", "pip .[cpu]"]


def test_failed_installation_is_shown_and_repeated(sandbox):
    failed = sandbox.run("local.sh", "doctor", FAKE_PIP_FAILS="1")
    assert failed.returncode == 1
    assert failed.stdout == ""
    assert "what pip says" in failed.stderr
    assert f"{sandbox.checkout}/.venv/install.log" in failed.stderr
    assert sandbox.run("local.sh", "doctor").returncode == 0
    assert sandbox.calls() == ["venv", "pip .[cpu]", "pip .[cpu]"]


def test_interrupted_reinstallation_is_repeated(sandbox):
    """Also where an earlier installation was complete: its stamp must not vouch for the one that was cut off."""
    sandbox.run("local.sh", "doctor")
    sandbox.run("test.sh", "-q", FAKE_PIP_FAILS="1")
    sandbox.run("local.sh", "doctor")
    assert sandbox.calls() == ["venv", "pip .[cpu]", "pip .[cpu,test]", "pip .[cpu]"]


def test_half_made_environment_is_made_again(sandbox):
    (sandbox.checkout / ".venv/bin").mkdir(parents=True)
    (sandbox.checkout / ".venv/pyvenv.cfg").touch()
    assert sandbox.run("local.sh", "doctor").returncode == 0
    assert sandbox.calls() == ["venv", "pip .[cpu]"]


def test_a_directory_that_is_no_environment_is_left_alone(sandbox):
    (sandbox.elsewhere / "letters").touch()
    result = sandbox.run("local.sh", "doctor", VIT_JAX_VENV=str(sandbox.elsewhere))
    assert result.returncode == 1
    assert "is not a virtual environment" in result.stderr
    assert (sandbox.elsewhere / "letters").exists()
    assert sandbox.calls() == []


@pytest.mark.skipif(not shutil.which("flock"), reason="without flock there is no lock")
def test_two_first_runs_install_once(sandbox):
    processes = [sandbox.start("local.sh", "doctor", FAKE_PIP_SECONDS="0.3") for _ in range(2)]
    for process in processes:
        assert process.communicate(timeout=30)[0].endswith(": [doctor]\n")
    assert sandbox.calls() == ["venv", "pip .[cpu]"]


@pytest.mark.parametrize(
    ("nvidia_smi", "extra"),
    [
        ("echo 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)'", "cuda"),
        ("echo 'No devices were found'", "cpu"),
        ("echo 'NVIDIA-SMI has failed because it could not talk to the driver.'; exit 9", "cpu"),
    ],
    ids=["card", "no card", "no driver"],
)
def test_nvidia_is_detected(sandbox, tmp_path, nvidia_smi, extra):
    write_program(sandbox.stand_ins / "nvidia-smi", f"#!/bin/bash\n{nvidia_smi}\n")
    assert detect(sandbox, tmp_path) == extra


@pytest.mark.parametrize(
    ("files", "extra"),
    [
        ({"dev/accel0": ""}, "tpu"),
        ({"dev/accel/accel0": ""}, "cpu"),  # what Linux calls the accelerator of a laptop
        ({"dev/vfio/vfio": ""}, "cpu"),  # any machine with the module loaded
        ({"sys/bus/pci/drivers/vfio-pci/0000:00:05.0/vendor": "0x1ae0\n"}, "tpu"),
        ({"sys/bus/pci/drivers/vfio-pci/0000:00:05.0/vendor": "0x10de\n"}, "cpu"),  # passed on to a guest
        ({"sys/bus/pci/drivers/gvnic/0000:00:04.0/vendor": "0x1ae0\n"}, "cpu"),  # the network card of a Google VM
    ],
)
def test_tpu_is_detected(sandbox, tmp_path, files, extra):
    for name, text in files.items():
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    assert detect(sandbox, tmp_path) == extra


def detect(sandbox: Sandbox, tmp_path: Path) -> str:
    script = f'set -euo pipefail; source "{sandbox.checkout}/launch/environment.sh"; accelerator "{tmp_path}/root"'
    variables = {name: value for name, value in sandbox.variables.items() if name != "VIT_JAX_ACCELERATOR"}
    return subprocess.check_output([BASH, "-c", script], env=variables, text=True).strip()


def test_accelerator_chosen_by_name(sandbox):
    assert sandbox.run("local.sh", "doctor", VIT_JAX_ACCELERATOR="tpu").returncode == 0
    assert sandbox.calls() == ["venv", "pip .[tpu]"]
    unknown = sandbox.run("local.sh", "doctor", VIT_JAX_ACCELERATOR="gpu")
    assert unknown.returncode == 1
    assert "none of cpu, cuda, tpu" in unknown.stderr


def test_old_python_is_refused(sandbox):
    result = sandbox.run("local.sh", "doctor", FAKE_VERSION="3.10.13")
    assert result.returncode == 1
    assert "Python 3.11 or newer is needed; python3 is 3.10.13" in result.stderr
    assert not (sandbox.checkout / ".venv").exists()


def test_no_python_is_said(sandbox):
    write_program(sandbox.stand_ins / "python3", MISSING)
    assert "python3 is not found" in sandbox.run("local.sh", "doctor").stderr


def test_newer_python_is_found_beside_an_old_python3(sandbox):
    write_program(sandbox.stand_ins / "python3", "#!/bin/bash\necho 3.9.2\n")
    write_program(sandbox.stand_ins / "python3.12", FAKE_PYTHON)
    result = sandbox.run("local.sh", "doctor", FAKE_VERSION="3.12.1")
    assert result.returncode == 0, result.stderr
    assert "with Python 3.12.1" in result.stderr


def test_chosen_python_is_never_ignored(sandbox):
    chosen = str(write_program(sandbox.stand_ins / "chosen", FAKE_PYTHON))
    assert sandbox.run("local.sh", "doctor", PYTHON=chosen).returncode == 0
    assert sandbox.run("local.sh", "doctor", PYTHON=chosen).returncode == 0
    other = str(write_program(sandbox.stand_ins / "other", "#!/bin/bash\necho 3.13.0\n"))
    refused = sandbox.run("local.sh", "doctor", PYTHON=other)
    assert refused.returncode == 1
    assert "was made with Python 3.11.7" in refused.stderr
    old = str(write_program(sandbox.stand_ins / "old", "#!/bin/bash\necho 3.9.2\n"))
    refused = sandbox.run("local.sh", "doctor", PYTHON=old, VIT_JAX_VENV="fresh")
    assert f"PYTHON={old} is 3.9.2; 3.11 or newer is needed." in refused.stderr


def test_another_environment_is_relative_to_the_caller(sandbox):
    assert sandbox.run("local.sh", "doctor", VIT_JAX_VENV="mine").returncode == 0
    assert (sandbox.elsewhere / "mine/vit-jax-installed").exists()


def test_test_script_checks_everything_in_the_root(sandbox):
    result = sandbox.run("test.sh")
    assert [line.partition(" in ")[0] for line in result.stdout.splitlines()] == ["ruff", "ruff", "mypy", "tool"]
    assert result.stdout.splitlines()[-1] == f"tool in {sandbox.checkout}: [-m] [pytest] [-n] [auto] [--maxprocesses=4]"
    assert sandbox.calls() == ["venv", "pip .[cpu,test]"]


def test_test_script_passes_arguments_to_pytest_alone(sandbox):
    result = sandbox.run("test.sh", "tests/models", "-k", "a or b")
    assert (
        result.stdout
        == f"tool in {sandbox.checkout}: [-m] [pytest] [-n] [auto] [--maxprocesses=4] [tests/models] [-k] [a or b]\n"
    )


def test_scripts_share_an_environment(sandbox):
    for script in ("local.sh", "test.sh", "local.sh", "test.sh"):
        sandbox.run(script, "x")
    assert sandbox.calls() == ["venv", "pip .[cpu]", "pip .[cpu,test]"]


GPUS = "echo 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-a)'; echo 'GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-b)'"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({}, "vit-jax: 2 GPU(s), all of them used by one process: 2 x NVIDIA H100 80GB HBM3\n"),
        ({"CUDA_VISIBLE_DEVICES": "1"}, "vit-jax: CUDA_VISIBLE_DEVICES=1 chooses among 2 GPU(s): 2 x NVIDIA H100"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "vit-jax: CUDA_VISIBLE_DEVICES= chooses among 2 GPU(s)"),
        ({"JAX_CUDA_VISIBLE_DEVICES": "0"}, "vit-jax: JAX_CUDA_VISIBLE_DEVICES=0 chooses among 2 GPU(s)"),
        ({"JAX_PLATFORMS": "cpu"}, "vit-jax: JAX_PLATFORMS=cpu chooses what JAX uses\n"),
    ],
)
def test_gpus_are_named_and_what_hides_some(sandbox, variables, message):
    write_program(sandbox.stand_ins / "nvidia-smi", f"#!/bin/bash\n{GPUS}\n")
    result = sandbox.run("local.sh", "pretrain", VIT_JAX_ACCELERATOR="cuda", **variables)
    assert message in result.stderr
    assert result.stdout.endswith(": [pretrain]\n")


def test_every_gpu_is_left_to_the_run(sandbox):
    """The script sets nothing that would narrow what the process sees, or change how JAX takes memory."""
    write_program(sandbox.stand_ins / "nvidia-smi", f"#!/bin/bash\n{GPUS}\n")
    show = write_program(sandbox.elsewhere / "show", "#!/bin/bash\nenv\n")
    before = set(sandbox.variables) | {"VIT_JAX_ACCELERATOR", "PWD", "OLDPWD", "SHLVL", "_"}
    result = sandbox.run("local.sh", "pretrain", VIT_JAX_ACCELERATOR="cuda", FAKE_TOOL=str(show))
    assert {line.partition("=")[0] for line in result.stdout.splitlines()} <= before


@pytest.mark.parametrize(("chosen", "seen"), [({}, "cpu"), ({"JAX_PLATFORMS": "tpu"}, "tpu")])
def test_without_an_accelerator_none_is_looked_for_unless_asked(sandbox, chosen, seen):
    show = write_program(sandbox.elsewhere / "show", "#!/bin/bash\nenv\n")
    result = sandbox.run("local.sh", "pretrain", FAKE_TOOL=str(show), **chosen)
    assert f"JAX_PLATFORMS={seen}" in result.stdout.splitlines()


def test_dry_run_of_a_first_run_executes_nothing(sandbox):
    result = sandbox.run("local.sh", "--dry-run", "pretrain", "--workdir=my runs")
    assert result.returncode == 0, result.stderr
    venv = f"{sandbox.checkout}/.venv"
    pip = "-m pip install --disable-pip-version-check --no-input -e"
    assert result.stdout.splitlines() == [
        f"python3 -m venv --clear -- '{venv}'",
        f"'{venv}/bin/python' {pip} '{sandbox.checkout}[cpu]'",
        f"'{venv}/bin/vit-jax' pretrain '--workdir=my runs'",
    ]
    assert sandbox.calls() == []
    assert not (sandbox.checkout / ".venv").exists()


def test_dry_run_of_a_later_run_shows_the_run_alone(sandbox):
    sandbox.run("local.sh", "pretrain")
    result = sandbox.run("local.sh", "--dry-run", "pretrain")
    assert result.stdout == f"'{sandbox.checkout}/.venv/bin/vit-jax' pretrain\n"
