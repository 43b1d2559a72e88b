"""Pickled weights are not opened: their error has a command that converts them, also entries in entries."""

import argparse
import pickle
import shlex
import sys
import types

import numpy as np
import pytest

from tests.weights.formats.samples import build_archive, read_all
from vit_jax.weights.formats.pickled import choose_pickles, write_command


def build_libraries(contents, allowed, saved):
    """Return stand-ins for torch and safetensors.torch, which note allowed classes and saved arrays."""

    def load(file, device, *, weights_only):
        assert weights_only
        assert device == "cpu"
        return contents[file]

    def save_file(arrays, path):
        saved[path] = {name: tensor.values for name, tensor in arrays.items()}

    torch = types.SimpleNamespace(
        load=load,
        is_tensor=lambda value: isinstance(value, Tensor),
        serialization=types.SimpleNamespace(add_safe_globals=allowed.extend),
    )
    return torch, types.SimpleNamespace(save_file=save_file)


ARCHIVE = [("archive/data.pkl", pickle.dumps({})), ("archive/data/0", b"")]


class Tensor:
    """An array with the methods of a tensor that the command uses."""

    def __init__(self, *values):
        self.values = values

    def contiguous(self):
        return self

    def clone(self):
        return self


@pytest.fixture
def run(monkeypatch):
    """A function that runs the program of a command, and returns the saved arrays by file."""

    def run(command, contents):
        saved = {}
        allowed = []
        torch, torch_files = build_libraries(contents, allowed, saved)
        monkeypatch.setitem(sys.modules, "torch", torch)
        monkeypatch.setitem(
            sys.modules,
            "safetensors",
            types.SimpleNamespace(torch=torch_files),
        )
        monkeypatch.setitem(sys.modules, "safetensors.torch", torch_files)
        python, option, program, *arguments = shlex.split(command)
        assert [python, option] == ["python", "-c"]

        monkeypatch.setattr(sys, "argv", ["-c", *arguments])
        exec(program, {})

        assert allowed == [argparse.Namespace]
        return saved

    return run


def test_the_command_joins_files_and_names_of_entries_and_omits_the_optimiser(run):
    contents = {
        "a 1.bin": {
            "state_dict": {"module.head.weight": Tensor(1), "n": 3},
            "optimizer": {"state": {0: Tensor(2)}},
        },
        "b.bin": {
            "teacher": {"backbone.norm.bias": Tensor(3)},
            "epoch": 4,
            "args": argparse.Namespace(lr=1),
        },
    }

    saved = run(write_command("out dir/model.safetensors", list(contents)), contents)

    assert saved == {
        "out dir/model.safetensors": {
            "state_dict.module.head.weight": (1,),
            "teacher.backbone.norm.bias": (3,),
        },
    }


@pytest.mark.parametrize(
    "content",
    [build_archive(ARCHIVE), pickle.dumps({"x": np.zeros(1)})],
    ids=["zip", "pickle"],
)
@pytest.mark.parametrize("name", ["checkpoint.pth", "it's.bin", "w.safetensors"])
def test_the_error_of_a_pickle_ends_in_the_command(
    content,
    name,
    tmp_path,
    run,
):
    path = tmp_path / name
    path.write_bytes(content)

    with pytest.raises(ValueError, match="which runs code when it is opened") as caught:
        read_all(path)
    message = str(caught.value)
    command = message[message.index('python -c "') :]
    saved = run(command, {str(path): {"x": Tensor(5)}})
    ((output, arrays),) = saved.items()

    assert "\n" not in message
    assert arrays == {"x": (5,)}
    assert output.endswith(".safetensors")
    assert output != str(path)


SHARDS = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["config.json", "training_args.bin", "optimizer.pt"], []),
        (["last.ckpt", "pytorch_model.bin"], ["pytorch_model.bin"]),
        (SHARDS[::-1], SHARDS),
        (["checkpoint0040.pth", "checkpoint.pth", "log.txt"], ["checkpoint.pth"]),
    ],
)
def test_files_to_convert_together(names, chosen):
    assert choose_pickles(names) == chosen
