"""Weights in a bucket are those of the same files on this machine."""

import pytest

from tests import gcs
from tests.weights.formats.test_sharded import split
from tests.weights.reference import networks
from tests.weights.small_networks import (
    SQUARE,
    VIT,
    arrays_of,
    assert_same,
    weights_of,
)
from vit_jax.weights import load_weights
from vit_jax.weights.formats import write_npz
from vit_jax.weights.locate import find_class_names_file
from vit_jax.weights.saving import OWN, save_weights

ROOT = f"gs://{gcs.BUCKET}"


@pytest.fixture(scope="module")
def weights_folder(cloud, tmp_path_factory):
    """A released file with class names, folders as Hugging Face has them, and a workdir, uploaded."""
    folder = tmp_path_factory.mktemp("weights")
    names = [f"class {number}" for number in range(SQUARE.num_classes)]
    write_npz(folder / "one.npz", arrays_of(SQUARE, "released"), {})
    find_class_names_file(folder / "one.npz").write_text("\n".join(names) + "\n")

    save_weights(weights_of(VIT), folder / "hf", "huggingface")
    save_weights(weights_of(VIT), folder / "run", OWN)

    save_weights(weights_of(VIT), folder / "shards", "huggingface")
    (folder / "shards/model.safetensors").unlink()
    split(folder / "shards", arrays_of(VIT, "huggingface"), 2)

    (folder / "pickled").mkdir()
    (folder / "pickled/pytorch_model.bin").write_bytes(b"PK")
    gcs.upload(folder, ROOT)
    return folder


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.mark.parametrize(
    "name",
    [
        "one.npz",
        "hf",
        "hf/model.safetensors",
        "shards",
        "shards/model.safetensors.index.json",
    ],
)
def test_files_are_downloaded_once(cloud, weights_folder, name):
    here = load_weights(weights_folder / name)

    there = load_weights(f"{ROOT}/{name}")
    num_requests = len(cloud.requests)
    load_weights(f"{ROOT}/{name}")
    later_requests = cloud.requests[num_requests:]

    assert there.architecture == here.architecture
    assert there.class_names == here.class_names
    assert there.preprocessing == here.preprocessing
    assert_same(there.parameters, here.parameters)
    assert there.source.startswith(f"{ROOT}/{name} (")
    assert not [request for request in later_requests if "alt=media" in request]


def test_checkpoints_are_read_where_they_are(weights_folder, tmp_path):
    """Orbax marks a complete checkpoint in a bucket, which cannot rename, by an object."""
    for item in ("0", "0/model", "0/metadata"):
        folder = gcs.buckets.BucketPath(f"{ROOT}/run/checkpoints/{item}")
        (folder / "commit_success.txt").write_bytes(b"")

    weights = load_weights(f"{ROOT}/run")

    assert_same(weights.parameters, networks.parameters(VIT))
    assert weights.source.startswith(f"{ROOT}/run (vit_jax")
    assert not list(tmp_path.rglob("*"))


def test_copies_of_files_that_the_bucket_has_no_more_are_not_read(weights_folder, tmp_path):
    load_weights(f"{ROOT}/shards")
    (index,) = tmp_path.rglob("*.index.json")
    index.with_name("model.safetensors").write_bytes(b"of an earlier upload")

    assert_same(
        load_weights(f"{ROOT}/shards").parameters,
        networks.parameters(VIT),
    )


def test_pickles_are_named(weights_folder):
    with pytest.raises(
        ValueError, match=r"no \.safetensors but pytorch_model\.bin\. Copy it here.*python -c"
    ):
        load_weights(f"{ROOT}/pickled")


def test_what_is_not_there(weights_folder):
    with pytest.raises(
        ValueError,
        match=r"gs://bucket/none\.npz: cannot be read: there is no such object or bucket",
    ):
        load_weights(f"{ROOT}/none.npz")

    with pytest.raises(
        ValueError, match=r"gs://bucket: must have vit_jax checkpoints or a \.safetensors"
    ):
        load_weights(ROOT)
