"""Data in a bucket give the records that the same files give on this machine."""

import pickle
from pathlib import Path

import pytest
from numpy.testing import assert_array_equal

from tests import gcs
from tests.data.packed_files import image, samples, write_parquet, write_shard
from vit_jax.data.kinds import shard_index
from vit_jax.data.sources import normalize_data, open_source
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
    write_image_folder(folder / "folder")
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


def write_image_folder(folder):
    """Write twenty images of two classes in turn, and a table of them."""
    lines = ["image,label"]
    for number in range(20):
        kind = ("cat", "dog")[number % 2]
        path = folder / kind / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image(number))
        lines.append(f"{kind}/{number}.png,{kind}")
    (folder / "list.csv").write_text("\n".join(lines) + "\n")


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
    """Records are compared after pickling, as a worker receives the source."""
    fields = {}
    if "wds" in data or "parquet" in data:
        fields = {"train_split": split, "test_split": "train[90%:]"}
    config = make_config(**fields)
    in_bucket = data.format(f"{ROOT}/data")

    found = pickle.loads(pickle.dumps(open_source(in_bucket, split, config, 0)))

    expected = open_source(
        data.format(local),
        split,
        config,
        0,
    )
    assert len(found) == len(expected)
    assert found.class_names == expected.class_names
    assert found.labels.tolist() == expected.labels.tolist()
    assert found.records_sha256 == expected.records_sha256
    for index in range(len(expected)):
        assert found[index].image == expected[index].image
    assert normalize_data(in_bucket) == in_bucket


@pytest.fixture(scope="module")
def tfds_folder(cloud, data_dir):
    gcs.upload(Path(data_dir), f"{ROOT}/tfds")
    return f"{ROOT}/tfds"


@pytest.mark.parametrize("split", ["train", "train[10%:20%]", "test"])
def test_the_records_of_tfds_are_those_of_the_files(
    split,
    tfds_folder,
    data_dir,
    open_data,
    cloud,
):
    """Records are read with one request each."""
    found = open_data("tfds:vit_jax_digits", split, data_dir=tfds_folder)
    expected = open_data("tfds:vit_jax_digits", split, data_dir=data_dir)

    assert len(found) == len(expected)
    assert found.class_names == expected.class_names
    assert_array_equal(found.labels, expected.labels)

    received = pickle.loads(pickle.dumps(found))
    num_requests = len(cloud.requests)
    for index in (0, 7, len(expected) - 1):
        assert received[index] == expected[index]

    assert len(cloud.requests) - num_requests == 3


def test_folders_that_are_empty(tfds_folder, open_data):
    rule = "gs://bucket/nothing: cannot be read: there is no object below"
    with pytest.raises(ValueError, match=rule):
        open_data(f"folder:{ROOT}/nothing", "train")

    rule = "gs://bucket/tfds/cifar10: cannot be read: there is no object below"
    with pytest.raises(ValueError, match=rule):
        open_data("tfds:cifar10", "train", data_dir=tfds_folder)


def test_digits_are_not_read_from_a_bucket(tfds_folder, open_data):
    with pytest.raises(ValueError, match="has no effect on digits"):
        open_data("digits", "train", data_dir=tfds_folder)


def test_a_folder_without_access(cloud, open_data):
    cloud.inject("GET ", 403)

    rule = r"gs://bucket/other: cannot be read: access is denied \(403\).*objectUser"
    with pytest.raises(ValueError, match=rule):
        open_data(f"wds:{ROOT}/other", "train")


@pytest.mark.usefixtures("local")
def test_a_bucket_that_does_not_answer_ends_the_run_and_counts_for_no_damaged_image(
    open_data,
    cloud,
    monkeypatch,
):
    """There are more refusals than attempts in this time, whose pauses are random."""
    source = open_data(f"folder:{ROOT}/data/folder", "train")
    monkeypatch.setattr(gcs_client, "RETRY_SECONDS", 0.5)
    cloud.inject("GET ", 503, times=1000)

    with pytest.raises(gcs_client.NoAnswer):
        source[0]

    cloud.forgive()


@pytest.mark.usefixtures("local")
def test_the_index_of_a_shard_is_kept_on_this_machine(
    make_config,
    cache,
    monkeypatch,
):
    """It is of a generation: a mirror that is made again has files with other times."""
    config = make_config(train_split="train", test_split="train[90%:]")
    mirror = cache / "vit_jax" / "gs" / gcs.BUCKET / "data" / "wds"
    open_source(f"wds:{ROOT}/data/wds", "train", config, 0)

    assert (mirror / "train-0000.tar.index").is_file()

    (mirror / "train-0000.tar").unlink()
    shard_index._find_cached_index.cache_clear()
    files.mirror.cache_clear()
    monkeypatch.delattr(shard_index, "read_index")
    source = open_source(
        f"wds:{ROOT}/data/wds",
        "train",
        config,
        0,
    )

    assert len(source) == 20
