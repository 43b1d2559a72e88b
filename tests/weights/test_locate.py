"""Folders and repositories whose weights are pickled only: the error has the command, with their paths."""

import sys
import types

import pytest

from tests.evals.samples import NAMES, sample_weights
from tests.hub import hub as hub  # a fixture
from tests.rejections import rejects
from vit_jax.weights import load_weights
from vit_jax.weights.saving import save_weights


def fill(folder, *names):
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"")

    return folder


@pytest.mark.parametrize(
    ("names", "inputs"),
    [
        (["config.json", "pytorch_model.bin", "training_args.bin"], ["pytorch_model.bin"]),
        (["checkpoint.pth"], ["checkpoint.pth"]),
        (["epoch=9.ckpt", "last.ckpt"], ["epoch=9.ckpt"]),
        (
            [
                "pytorch_model.bin.index.json",
                "pytorch_model-00001-of-00002.bin",
                "pytorch_model-00002-of-00002.bin",
            ],
            ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"],
        ),
    ],
)
def test_a_folder_of_pickles(tmp_path, names, inputs):
    fill(tmp_path, *names)
    message = f"^{tmp_path}: holds {inputs[0]}, a PyTorch file, which runs code"
    paths = [str(tmp_path / name) for name in ("model.safetensors", *inputs)]

    with pytest.raises(ValueError, match=message) as caught:
        load_weights(tmp_path)

    assert str(caught.value).replace("'", "").endswith(" ".join(paths))


def test_a_folder_without_weights(tmp_path):
    fill(tmp_path, "config.json", "training_args.bin", "optimizer.pt")
    message = r"no model\.safetensors \(\.safetensors in it: none\): give a file"

    with pytest.raises(ValueError, match=message):
        load_weights(tmp_path)


def test_weights_of_a_stand_in_of_the_hub(hub, tmp_path):
    """The library itself asks it; a second call downloads nothing."""
    save_weights(sample_weights(), tmp_path / "vit", "timm")
    files = {path.name: path.read_bytes() for path in (tmp_path / "vit").iterdir()}
    commit = hub.push("owner/vit", files, kind="models")

    weights = load_weights("hf://owner/vit")
    num_requests = len(hub.list_downloads())
    load_weights(f"hf://owner/vit@{commit}")

    assert weights.class_names == NAMES
    assert len(hub.list_downloads()) == num_requests >= 2
    with rejects("hf://owner/bit cannot be fetched", "HF_TOKEN") as raised:
        load_weights("hf://owner/bit")
    assert "\n" not in str(raised.value)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Replace huggingface_hub, and return the names of a repository's files."""
    names = []
    api = types.SimpleNamespace(list_repo_files=lambda name, *, revision: names)
    library = types.SimpleNamespace(
        snapshot_download=lambda *_, **__: str(tmp_path),
        HfApi=lambda: api,
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", library)
    return names


def test_a_repository_of_pickles(repository):
    repository.extend(["README.md", "pytorch_model.bin", "onnx/model.bin"])
    message = (
        r"hf://owner/vit@v1 has no \.safetensors but pytorch_model\.bin, "
        r".* owner/vit --revision=v1 --local-dir=vit,"
    )

    with pytest.raises(ValueError, match=message) as caught:
        load_weights("hf://owner/vit@v1")

    assert str(caught.value).endswith(" vit/model.safetensors vit/pytorch_model.bin")


def test_a_repository_without_weights(repository):
    repository.append("README.md")

    with pytest.raises(ValueError, match=r"no model\.safetensors"):
        load_weights("hf://owner/vit@v1")
