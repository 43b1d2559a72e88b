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
    """Run the program of a command with stand-ins for torch and safetensors.torch; return the saved names by file."""

    def run(command, contents):
        saved = {}
        allowed = []
        torch = types.SimpleNamespace(
            load=lambda file, device, *, weights_only: (
                contents[file] if weights_only and device == "cpu" else None
            ),
            is_tensor=lambda value: isinstance(value, Tensor),
            serialization=types.SimpleNamespace(add_safe_globals=allowed.extend),
        )
        torch_files = types.SimpleNamespace(
            save_file=lambda arrays, path: saved.update({path: arrays})
        )
        monkeypatch.setitem(sys.modules, "torch", torch)
        monkeypatch.setitem(sys.modules, "safetensors", types.SimpleNamespace(torch=torch_files))
        monkeypatch.setitem(sys.modules, "safetensors.torch", torch_files)
        words = shlex.split(command)

        assert words[:2] == ["python", "-c"]

        monkeypatch.setattr(sys, "argv", words[2:])
        monkeypatch.setattr(sys, "argv", ["-c", *words[3:]])
        exec(words[2], {})

        assert allowed == [argparse.Namespace]

        return {
            path: {name: tensor.values for name, tensor in arrays.items()}
            for path, arrays in saved.items()
        }

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
    expected = {"state_dict.module.head.weight": (1,), "teacher.backbone.norm.bias": (3,)}

    assert saved == {"out dir/model.safetensors": expected}


@pytest.mark.parametrize(
    "content",
    [build_archive(ARCHIVE), pickle.dumps({"x": np.zeros(1)})],
    ids=["zip", "pickle"],
)
@pytest.mark.parametrize("name", ["checkpoint.pth", "it's.bin", "w.safetensors"])
def test_the_error_of_a_pickle_ends_in_the_command(content, name, tmp_path, run):
    path = tmp_path / name
    path.write_bytes(content)

    with pytest.raises(ValueError, match="which runs code when it is opened") as caught:
        read_all(path)

    text = str(caught.value)
    assert "\n" not in text

    saved = run(text[text.index('python -c "') :], {str(path): {"x": Tensor(5)}})
    ((output, arrays),) = saved.items()

    assert arrays == {"x": (5,)}
    assert output.endswith(".safetensors")
    assert output != str(path)


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["config.json", "training_args.bin", "optimizer.pt"], []),
        (["last.ckpt", "pytorch_model.bin"], ["pytorch_model.bin"]),
        (["pytorch_model-00002-of-00002.bin", "pytorch_model-00001-of-00002.bin"], None),
        (["checkpoint0040.pth", "checkpoint.pth", "log.txt"], ["checkpoint.pth"]),
    ],
)
def test_files_to_convert_together(names, chosen):
    assert choose_pickles(names) == (sorted(names) if chosen is None else chosen)
