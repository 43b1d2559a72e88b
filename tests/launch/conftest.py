"""Stand-ins for gcloud, kubectl, srun and others on the PATH: they record calls and run scripts of
the test.
"""

import os
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

STAND_INS = Path(__file__).parent / "stand_ins"
LAUNCH = Path(__file__).parents[2] / "launch"
# This command undoes the effect of nohup and of background jobs of a shell: a script cannot trap a
# signal that its parent ignores.
LISTENING = ("/usr/bin/env", "--default-signal=HUP,INT,TERM")


def pytest_collection_modifyitems(items):
    """Mark the tests that run scripts as `launch`, except dry runs, which keep one fast test of
    each script.
    """
    folder = Path(__file__).parent
    for item in items:
        is_here = folder in item.path.parents
        is_dry_run = "dry_run" in item.name
        if is_here and "stage" in item.fixturenames and not is_dry_run:
            item.add_marker("launch")


def finish(process: subprocess.Popen[str], timeout: int) -> tuple[str, str]:
    """Wait for a script of `Stage.start` and return its output.

    At the time limit kill it and raise.
    """
    try:
        return process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise


@dataclass
class Stage:
    """A checkout with the launch scripts, and the machines that they seem to command."""

    folder: Path
    checkout: Path
    variables: dict[str, str]
    cwd: Path | None = None  # the folder of the scripts; by default the checkout

    def answers(self, kind: str, *scripts: str) -> None:
        """Let the n-th call of this kind run the n-th script, and later calls the last."""
        folder = self.folder / "play" / kind
        folder.mkdir(parents=True, exist_ok=True)
        for number, script in enumerate(scripts):
            (folder / str(number)).write_text(script + "\n")

    def start(
        self,
        *words: str,
        cwd: Path | None = None,
        stdin: int = subprocess.DEVNULL,
        **variables: str,
    ) -> subprocess.Popen[str]:
        """Start a script of launch/ in a new session, by default in the checkout."""
        script, *rest = words
        return subprocess.Popen(
            [*LISTENING, self.checkout / "launch" / script, *rest],
            cwd=cwd or self.cwd or self.checkout,
            env=self.variables | variables,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def install(self, tool: Path) -> None:
        """Make an environment of the checkout in which `tool` takes the place of vit-jax."""
        bin = self.checkout / ".venv/bin"
        bin.mkdir(parents=True)
        (bin / "vit-jax").symlink_to(tool)
        (bin / "python").symlink_to("/bin/true")
        fingerprint = f"{self.checkout}\n\n# setup.py\n# pyproject.toml\n"
        (self.checkout / ".venv/vit-jax-installed").write_text(f"cpu\n{fingerprint}")
        self.variables["VIT_JAX_ACCELERATOR"] = "cpu"

    def run(
        self,
        *words: str,
        **options,
    ) -> subprocess.CompletedProcess[str]:
        with self.start(*words, **options) as process:
            stdout, stderr = finish(process, timeout=300)
        return subprocess.CompletedProcess(
            process.args,
            process.returncode,
            stdout,
            stderr,
        )

    def calls(self, program: str | None = None) -> list[list[str]]:
        """Return calls of the stand-ins in order; calls of one program are without its name."""
        file = self.folder / "calls"
        if not file.exists():
            return []

        records = file.read_text().split("\x1e")[:-1]
        calls = [record.split("\x1f")[:-1] for record in records]
        if program is None:
            return calls
        return [call[1:] for call in calls if call[0] == program]


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return make_stage(tmp_path)


def make_stage(tmp_path: Path) -> Stage:
    """Return a stage whose files are in this empty folder."""
    checkout = tmp_path / "a checkout"
    shutil.copytree(LAUNCH, checkout / "launch")
    for name in ("setup.py", "pyproject.toml"):
        (checkout / name).write_text(f"# {name}\n")
    subprocess.run(["git", "init", "--quiet", checkout], check=True)
    subprocess.run(["git", "-C", checkout, "add", "--all"], check=True)

    for name in ("play", "homes", "buckets"):
        (tmp_path / name).mkdir()
    variables = {
        "PATH": f"{STAND_INS}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "CALLS": str(tmp_path / "calls"),
        "PLAY": str(tmp_path / "play"),
        "HOMES": str(tmp_path / "homes"),
        "APPLIED": str(tmp_path / "applied"),
        "VIT_JAX_MOUNTS": str(tmp_path / "buckets"),
    }
    return Stage(tmp_path, checkout, variables)
