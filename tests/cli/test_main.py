"""How the command ends when nobody waits for it any more: interrupted, or with its output closed."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from vit_jax import cli

ROOT = pathlib.Path(__file__).parents[2]


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    def interrupted(words):
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.VERBS, "predict", interrupted)
    monkeypatch.setattr(os, "_exit", sys.exit)  # pytest stays
    with pytest.raises(SystemExit) as exit_:
        cli.main(["predict", "w.npz", "a.png"])
    assert exit_.value.code == 128 + signal.SIGINT == 130
    assert capsys.readouterr().err == "vit-jax: stopped\n"


@pytest.mark.parametrize("words", ["show --config=configs/digits.py", "--help"])
def test_an_output_that_nobody_reads(words):
    """As `| head -1` leaves it."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "vit_jax", *words.split()]
    result = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    os.close(write_end)
    assert (result.returncode, result.stderr) == (128 + signal.SIGPIPE, "")
