"""Data in a bucket give the records that the same files give on this machine."""

import pickle
from pathlib import Path

import numpy as np
import pytest

from tests import gcs
from tests.data.packed_files import image, samples, write_parquet, write_shard
from vit_jax.data.kinds import shard_index
from vit_jax.data.sources import located, open_source
from vit_jax.storage import files, gcs_client

TWENTY = [number % 2 for number in range(20)]
ROOT = f"gs://{gcs.BUCKET}"


@pytest.fixture(autouse=True)
def cache(cloud, monkeypatch, tmp_path):
    """The user's cache folder, which no test shares."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files.mirror.cache_clear()
    yield tmp_path / "cache"

    assert not cloud.forgive()


@pytest.fixture(scope="module")
def local(tmp_path_factory, cloud):
    """Folders of one dataset in every form, which are in the bucket too."""
    folder = tmp_path_factory.mktemp("local")
    for number in range(20):
        path = folder / "folder" / ("cat", "dog")[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image(number))

    rows = [f"{kind}/{n}.png,{kind}" for n in range(20) for kind in [("cat", "dog")[n % 2]]]
    (folder / "folder" / "list.csv").write_text("\n".join(["image,label", *rows]) + "\n")

    for number, name in enumerate(("train-0000", "train-0001")):
        write_shard(folder / "wds" / f"{name}.tar", samples(TWENTY[:10], 10 * number))
        write_parquet(
            folder / "parquet" / f"{name}-of-0002.parquet",
            TWENTY[:10],
            10 * number,
            names=["cat", "dog"],
        )

    (folder / "wds" / "classes.txt").write_text("cat\ndog\n")
    gcs.upload(folder, f"{ROOT}/data")

    return folder


@pytest.mark.parametrize(
    ("data", "split"),
    [
        ("folder:{}/folder", "train"),
        ("csv:{}/folder/list.csv", "test"),
        ("wds:{}/wds", "train"),
        ("wds:{}/wds/train-{{0000..0001}}.tar", "train[:90%]"),
        ("parquet:{}/parquet", "train"),
        ("parquet:{}/parquet/*.parquet", "train"),
    ],
)
def test_the_records_are_those_of_the_files(data, split, local, make_config):
    config = (
        make_config(train_split="train[:90%]", test_split="train[90%:]")
        if "[" in split
        else make_config()
    )
    if "wds" in data or "parquet" in data:
        config = make_config(train_split=split, test_split="train[90%:]")

    ours = open_source(data.format(f"{ROOT}/data"), split, config, 0)
    theirs = open_source(data.format(local), split, config, 0)

    assert len(ours) == len(theirs)
    assert ours.class_names == theirs.class_names
    assert ours.labels.tolist() == theirs.labels.tolist()

    ours = pickle.loads(pickle.dumps(ours))  # as in a worker

    expected = [theirs[index].image for index in range(len(theirs))]
    assert [ours[index].image for index in range(len(ours))] == expected
    assert ours.records_sha256 == theirs.records_sha256
    assert located(data.format(f"{ROOT}/data")) == data.format(f"{ROOT}/data")


@pytest.fixture(scope="module")
def tfds_folder(cloud, data_dir):
    gcs.upload(Path(data_dir), f"{ROOT}/tfds")
    return f"{ROOT}/tfds"


@pytest.mark.parametrize("split", ["train", "train[10%:20%]", "test"])
def test_the_records_of_tfds_are_those_of_the_files(
    split, tfds_folder, data_dir, make_config, cloud
):
    ours, theirs = (
        open_source("tfds:vit_jax_digits", split, make_config(data_dir=folder), 0)
        for folder in (tfds_folder, data_dir)
    )

    assert len(ours) == len(theirs)
    assert ours.class_names == theirs.class_names
    np.testing.assert_array_equal(ours.labels, theirs.labels)

    ours = pickle.loads(pickle.dumps(ours))
    before = len(cloud.requests)

    for index in (0, 7, len(ours) - 1):
        assert ours[index] == theirs[index]

    assert len(cloud.requests) - before == 3, "one request for each record"


def test_what_is_not_there(cloud, tfds_folder, make_config):
    with pytest.raises(
        ValueError,
        match="gs://bucket/nothing: cannot be read: there is no object below",
    ):
        open_source(f"folder:{ROOT}/nothing", "train", make_config(), 0)

    with pytest.raises(
        ValueError,
        match="gs://bucket/tfds/cifar10: cannot be read: there is no object below",
    ):
        open_source("tfds:cifar10", "train", make_config(data_dir=tfds_folder), 0)

    with pytest.raises(ValueError, match="has no effect on digits"):
        open_source("digits", "train", make_config(data_dir=tfds_folder), 0)

    cloud.inject("GET ", 403)
    with pytest.raises(
        ValueError,
        match=r"gs://bucket/other: cannot be read: access is denied \(403\).*objectUser",
    ):
        open_source(f"wds:{ROOT}/other", "train", make_config(), 0)


def test_a_bucket_that_does_not_answer_ends_the_run_and_counts_for_no_damaged_image(
    local, make_config, cloud, monkeypatch
):
    source = open_source(f"folder:{ROOT}/data/folder", "train", make_config(), 0)
    monkeypatch.setattr(gcs_client, "RETRY_SECONDS", 1e-6)  # below any pause, which is random
    cloud.inject("GET ", 503)

    with pytest.raises(gcs_client.NoAnswer):
        source[0]


def test_the_index_of_a_shard_is_kept_on_this_machine(local, make_config, cache, monkeypatch):
    """It is of a generation: a mirror that is made again has files with other times."""
    config = make_config(train_split="train", test_split="train[90%:]")
    open_source(f"wds:{ROOT}/data/wds", "train", config, 0)

    assert (
        cache / "vit_jax" / "gs" / gcs.BUCKET / "data" / "wds" / "train-0000.tar.index"
    ).is_file()

    (cache / "vit_jax" / "gs" / gcs.BUCKET / "data" / "wds" / "train-0000.tar").unlink()
    shard_index._find_valid.cache_clear()
    files.mirror.cache_clear()
    monkeypatch.delattr(shard_index, "read_index")

    assert len(open_source(f"wds:{ROOT}/data/wds", "train", config, 0)) == 20
