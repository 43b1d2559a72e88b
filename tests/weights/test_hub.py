import sys
import types

import pytest

from tests.weights.small_networks import SQUARE, arrays_of
from vit_jax.weights import load_weights
from vit_jax.weights.formats import write_safetensors


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Stands in for huggingface_hub; the list of calls."""
    calls = []

    def snapshot_download(name, *, revision, allow_patterns):
        calls.append((name, revision, allow_patterns))
        if name == "nobody/nothing":
            raise OSError("404")
        write_safetensors(tmp_path / "model.safetensors", arrays_of(SQUARE, "timm"), {})
        return str(tmp_path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))
    return calls


def test_weights_of_a_repository(library):
    weights = load_weights("hf://owner/a-name_1.0", num_heads=2)
    assert weights.architecture.width == SQUARE.width
    load_weights("hf://owner/name@refs/pr/1", num_heads=2)
    assert [call[:2] for call in library] == [("owner/a-name_1.0", None), ("owner/name", "refs/pr/1")]
    assert library[0][2] == ["*.safetensors", "config.json", "preprocessor_config.json"]


@pytest.mark.parametrize("address", ["hf://name", "hf://a/b/c", "hf://", "hf://a/b@", "hf://a/b c"])
def test_malformed_addresses(address, library):
    with pytest.raises(ValueError, match="not an address of the form hf://owner/name"):
        load_weights(address)
    assert library == []


def test_what_cannot_be_fetched_is_one_error(library, monkeypatch):
    with pytest.raises(ValueError, match="hf://nobody/nothing cannot be fetched: 404"):
        load_weights("hf://nobody/nothing")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"needs huggingface_hub: pip install 'vit_jax\[hub\]'"):
        load_weights("hf://owner/name")
