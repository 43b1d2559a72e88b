"""Datasets of the Hugging Face Hub: configurations, splits, commits and downloads."""

import importlib
import json
import logging
import pathlib

import pytest

from tests.data.packed_files import image, write_parquet
from tests.hub import TOKEN, forget_library
from tests.hub import hub as hub  # a fixture
from tests.rejections import rejects
from vit_jax.data.kinds import hub_parquet
from vit_jax.data.kinds.hub_parquet import Address, parse_address, read_licence
from vit_jax.data.sources import find_listing, normalize_data, open_source, pin_data
from vit_jax.storage.files import cache_folder

NAMES = ("cat", "dog")
DATA = "hf://datasets/owner/pets"
CLASSES = {"class_label": {"names": {"0": "cat", "1": "dog"}}}
FEATURES = [
    {"name": "img", "dtype": "image"},
    {"name": "kind", "dtype": CLASSES},
]


def describe_files(name, *splits):
    """Return a configuration of a card, whose splits have files in a folder of its name."""
    files = [{"split": split, "path": f"{name}/{split}-*"} for split in splits]
    return {"config_name": name, "data_files": files}


CARD = {
    "license": "cc-by-4.0",
    "configs": [describe_files("data", "train", "test")],
    "dataset_info": {"features": FEATURES, "splits": [{"name": "train"}]},
}


@pytest.fixture(autouse=True)
def unknown_datasets():
    """No dataset was opened before."""
    hub_parquet.open_dataset.cache_clear()
    yield
    hub_parquet.open_dataset.cache_clear()


@pytest.fixture
def make_parquet(tmp_path):
    """Return a function from labels to a file as bytes, whose first image has this level."""

    def make(labels, first=0, **options):
        path = write_parquet(
            tmp_path / "made.parquet",
            labels,
            first,
            **options,
        )
        return path.read_bytes()

    return make


@pytest.fixture
def unnamed(make_parquet):
    """Files without metadata of Hugging Face, with the columns `img` and `kind`."""

    def make(labels, first=0):
        return make_parquet(
            labels,
            first,
            image_column="img",
            label="kind",
        )

    return {
        "README.md": b"---",
        "data/train-00000-of-00002.parquet": make([0, 1, 0]),
        "data/train-00001-of-00002.parquet": make([1, 1], 3),
        "data/test-00000-of-00001.parquet": make([1], 5),
    }


@pytest.fixture
def pets(hub, unnamed):
    """The commit of a dataset with a card, on the Hub."""
    return hub.push("owner/pets", unnamed, CARD)


def test_splits_columns_and_classes_are_those_of_the_card(
    hub,
    pets,
    make_config,
):
    source = open_source(DATA, "train", make_config(), 0)

    assert source.class_names == NAMES
    assert source.labels.tolist() == [0, 1, 0, 1, 1]
    images = [source.image_of(index) for index in range(5)]
    assert images == list(map(image, range(5)))
    assert source.key_of(3) == b"data/train-00001-of-00002.parquet:0"
    assert read_licence(DATA) == "cc-by-4.0"


def test_only_the_files_of_a_split_are_downloaded(hub, pets, make_config):
    """And those of the classes, of the smallest file."""
    open_source(DATA, "test", make_config(), 0)

    assert hub.list_downloads() == ["data/test-00000-of-00001.parquet"]


def test_metadata_in_the_files_need_no_card(hub, make_parquet, make_config):
    named = {
        "train.parquet": make_parquet([0, 1, 0], names=NAMES),
        "validation.parquet": make_parquet([1, 0], 3, names=NAMES),
    }
    hub.push("owner/pets", named)

    source = open_source(DATA, "test", make_config(), 0)

    assert source.class_names == NAMES
    assert source.labels.tolist() == [1, 0]
    assert read_licence(DATA) == ""


def test_files_without_splits_are_held_out(hub, make_parquet, make_config):
    hub.push("owner/pets", {"all.parquet": make_parquet([0, 1] * 10, names=NAMES)})

    train = open_source(
        DATA,
        "train",
        make_config(holdout_fraction=0.2),
        0,
    )
    test = open_source(
        DATA,
        "test",
        make_config(holdout_fraction=0.2),
        0,
    )

    assert (len(train), len(test)) == (16, 4)


def test_files_of_different_datasets_are_rejected(
    hub,
    make_parquet,
    make_config,
):
    files = {
        "train-0.parquet": make_parquet([0, 1], names=NAMES),
        "train-1.parquet": make_parquet([0, 1], names=("ant", "bee")),
        "test.parquet": make_parquet([0, 1], names=NAMES),
    }
    hub.push("owner/pets", files)

    with rejects("train-1.parquet", "differ in their names of classes"):
        open_source(DATA, "train", make_config(), 0)


# Revisions.


def test_a_revision_becomes_a_commit(hub, pets, unnamed):
    tagged = hub.push(
        "owner/pets",
        unnamed | {"new": b""},
        CARD,
        revision="v2/b",
    )

    assert pin_data(DATA) == f"{DATA}@{pets}"
    assert pin_data(f"{DATA}/data/test#kind") == f"{DATA}@{pets}/data/test#kind"
    assert pin_data(f"{DATA}@v2%2Fb") == f"{DATA}@{tagged}"
    assert normalize_data(f"{DATA}/") == f"{DATA}@{pets}"
    assert pin_data("folder:x") == "folder:x"


def test_the_commit_of_an_earlier_run_is_used_again(hub, pets, unnamed):
    pinned = pin_data(DATA)
    newer = hub.push("owner/pets", unnamed | {"new": b""}, CARD)
    hub_parquet.open_dataset.cache_clear()

    assert pin_data(DATA, pinned) == pinned
    assert pin_data(DATA, f"hf://datasets/owner/others@{pets}") == f"{DATA}@{newer}"
    assert pin_data(f"{DATA}@main", pinned) == f"{DATA}@{newer}"
    assert pin_data(pinned) == pinned


def test_a_pinned_address_is_compared_without_the_hub(hub):
    pinned = f"{DATA}@{'a' * 40}/data"

    assert normalize_data(pinned) == pinned
    assert find_listing(pinned) is not None
    assert hub.requests == []


def test_a_commit_is_asked_for_once(hub, pets, make_config):
    open_source(DATA, "train", make_config(), 0)
    hub_parquet.open_dataset.cache_clear()
    hub.requests.clear()

    open_source(f"{DATA}@{pets}", "train", make_config(), 0)

    assert hub.requests == []


# Downloads.


def test_a_download_that_is_cut_off_is_resumed(
    hub,
    pets,
    make_config,
    monkeypatch,
):
    constants = importlib.import_module("huggingface_hub.constants")
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 500)
    hub.cuts.append(1100)

    open_source(DATA, "test", make_config(), 0)

    parts = [request for request in hub.requests if request.startswith("GET /datasets")]
    assert len(parts) == 2
    assert parts[1].endswith("bytes=1000-")


def test_a_damaged_download_is_removed(hub, pets, unnamed, make_config):
    file = "data/test-00000-of-00001.parquet"
    damaged = bytearray(unnamed[file])
    damaged[100] ^= 1
    hub.damage("owner/pets", pets, file, bytes(damaged))

    with rejects(f"{DATA}@{pets}", "test-00000-of-00001.parquet has SHA-256 .*the Hub states"):
        open_source(DATA, "test", make_config(), 0)

    hub.damage("owner/pets", pets, file, unnamed[file])
    assert len(open_source(DATA, "test", make_config(), 0)) == 1


def test_a_file_that_changed_in_the_cache_is_downloaded_again(
    hub,
    pets,
    make_config,
):
    source = open_source(DATA, "test", make_config(), 0)
    (file,) = source.files
    content = pathlib.Path(file).resolve()
    content.write_bytes(content.read_bytes()[:-1])

    with rejects("test-00000-of-00001.parquet", "bytes, and the Hub states"):
        open_source(DATA, "test", make_config(), 0)

    assert len(open_source(DATA, "test", make_config(), 0)) == 1


def test_digests_are_computed_once(hub, pets, make_config, monkeypatch):
    open_source(DATA, "test", make_config(), 0)
    monkeypatch.setattr("vit_jax.storage.hub_files._compute_sha256", None)

    assert len(open_source(DATA, "test", make_config(), 0)) == 1


def test_a_private_dataset_needs_a_token(
    hub,
    unnamed,
    make_config,
    monkeypatch,
):
    hub.push("owner/pets", unnamed, CARD, private=True)
    with rejects(f"{DATA} cannot be fetched", "HF_TOKEN"):
        open_source(DATA, "test", make_config(), 0)

    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert len(open_source(DATA, "test", make_config(), 0)) == 1


@pytest.fixture
def offline(hub, monkeypatch):
    """Return a function after which the Hub is not asked."""

    def disconnect():
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        forget_library(monkeypatch)
        hub_parquet.open_dataset.cache_clear()

    return disconnect


def test_cached_data_are_used_offline(
    hub,
    pets,
    make_config,
    offline,
    caplog,
):
    open_source(DATA, "test", make_config(), 0)
    offline()

    with caplog.at_level(logging.WARNING):
        source = open_source(DATA, "test", make_config(), 0)

    assert len(source) == 1
    assert f"The cached commit {pets} is used" in caplog.text
    with rejects(f"{DATA}@{pets} cannot be fetched", "cannot be reached.*HF_HUB_OFFLINE"):
        open_source(DATA, "train", make_config(), 0)


def test_unknown_data_offline_are_one_error(pets, make_config, offline):
    offline()

    with rejects(f"{DATA} cannot be fetched", "not in the cache.*HF_ENDPOINT.*HF_HUB_OFFLINE"):
        open_source(DATA, "test", make_config(), 0)


def test_a_file_outside_of_the_repository_is_ignored(
    hub,
    make_parquet,
    make_config,
):
    files = {
        "test.parquet": make_parquet([0, 1]),
        "../../test.parquet": b"",
        "/test.parquet": b"",
    }
    hub.push("owner/pets", files)
    open_source(
        DATA,
        "test",
        make_config(train_split="val"),
        0,
        is_classified=False,
    )

    (index,) = cache_folder("hub").glob("owner--pets/main.json")
    assert list(json.loads(index.read_text())["files"]) == ["test.parquet"]


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        ("hf://datasets/owner/cats", "HF_TOKEN"),
        (f"{DATA}@v9", "Give a branch, a tag or a commit"),
    ],
)
def test_data_that_the_hub_does_not_have(pets, make_config, data, rule):
    with rejects(f"{data} cannot be fetched", rule):
        open_source(data, "test", make_config(), 0)


# Configurations.


SEVERAL = {
    "configs": [
        describe_files("small", "train", "test"),
        describe_files("large", "train", "extra"),
    ],
    "dataset_info": [
        {"config_name": "small", "features": FEATURES},
        {"config_name": "large", "features": FEATURES[:1]},
    ],
}


@pytest.fixture
def several(hub, unnamed):
    """Return a function that pushes a card for files of two configurations."""
    train = unnamed["data/train-00000-of-00002.parquet"]
    test = unnamed["data/test-00000-of-00001.parquet"]
    files = {
        "small/train-0.parquet": train,
        "small/test-0.parquet": test,
        "large/train-0.parquet": train,
        "large/extra-0.parquet": test,
        "notes/train.txt": b"",
    }

    def push(card, revision="main"):
        return hub.push("owner/pets", files, card, revision=revision)

    return push


def list_files(data):
    """Return the chosen files with their splits."""
    listing = find_listing(data)
    splits = listing._find_splits(())
    names = [pathlib.Path(file).relative_to(listing.root).as_posix() for file in listing.files]
    return dict(zip(names, splits, strict=True))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/small", {"small/test-0.parquet": "test", "small/train-0.parquet": "train"}),
        ("/large", {"large/extra-0.parquet": "extra", "large/train-0.parquet": "train"}),
        ("/large/extra", {"large/extra-0.parquet": "extra"}),
        ("/small/train-*", {"small/train-0.parquet": "train"}),
        (
            "/**/train-?.parquet",
            {"large/train-0.parquet": "train", "small/train-0.parquet": "train"},
        ),
    ],
)
def test_a_path_names_a_configuration_a_split_or_files(
    several,
    path,
    expected,
):
    several(SEVERAL if "*" not in path else {})

    assert list_files(f"{DATA}{path}") == expected


def test_classes_are_those_of_the_configuration(several, make_config):
    several(SEVERAL)

    small = open_source(f"{DATA}/small#kind", "train", make_config(), 0)
    config = make_config(test_split="extra")
    large = open_source(f"{DATA}/large#kind", "train", config, 0)

    assert small.class_names == NAMES
    assert large.class_names == ("0", "1")


def test_several_configurations_are_named(several):
    several(SEVERAL)

    with rejects(DATA, "has several configurations.*/small or /large"):
        list_files(DATA)


@pytest.mark.parametrize(
    "change",
    [
        {"default": True},
        {"config_name": "default"},
    ],
)
def test_the_default_configuration(several, change):
    configs = [SEVERAL["configs"][0], SEVERAL["configs"][1] | change]
    several({"configs": configs})

    assert list(list_files(DATA)) == ["large/extra-0.parquet", "large/train-0.parquet"]


def test_the_copy_of_the_hub_has_a_folder_for_each_configuration(several):
    several(None, revision="refs/convert/parquet")

    assert list(list_files(f"{DATA}@~parquet/small")) == [
        "small/test-0.parquet",
        "small/train-0.parquet",
    ]
    assert list(list_files(f"{DATA}@~parquet/small/test-0.parquet")) == ["small/test-0.parquet"]
    with rejects(f"{DATA}@~parquet", "has several configurations"):
        list_files(f"{DATA}@~parquet")


def test_a_path_without_files_is_an_error_with_the_paths(several):
    several(SEVERAL)

    with rejects(f"{DATA}/smal", "has no Parquet files in 'smal'. Did you mean 'small'.*large"):
        list_files(f"{DATA}/smal")


def test_a_repository_without_parquet_files(hub):
    commit = hub.push("owner/pets", {"a.jpg": b"", "b.csv": b""})

    with rejects(DATA, rf"no .parquet files, but a.jpg, b.csv.*{DATA}@~parquet"):
        list_files(DATA)
    assert commit


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ("a.parquet", {"a.parquet": ""}),
        (["a.parquet", "b*"], {"a.parquet": "", "b.parquet": ""}),
        ([{"split": "s", "path": ["b.parquet"]}], {"b.parquet": "s"}),
        ([{"split": "s", "path": "c"}], {"c/d.parquet": "s"}),
        ([{"split": "s"}, 5], {}),
    ],
)
def test_forms_of_files_in_a_card(files, expected):
    names = ["a.parquet", "b.parquet", "c/d.parquet"]
    card = {"configs": {"config_name": "x", "data_files": files}}

    assert hub_parquet.list_configurations(card, names).get("x", {}) == expected


@pytest.mark.parametrize(
    "card",
    [
        {"configs": 3},
        {"configs": ["x"]},
        {"dataset_info": "x"},
    ],
)
def test_cards_of_other_forms_are_ignored(card):
    assert hub_parquet.list_configurations(card, ["a.parquet"]) == {}
    assert hub_parquet.read_features(card, None) == {}


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a", "b"], ["a", "b"]),
        ({1: "b", 0: "a"}, ["a", "b"]),
        ({"0": "a", "2": "c"}, None),
    ],
)
def test_names_of_classes_in_a_card(names, expected):
    dtype = {"class_label": {"names": names}}
    card = {"dataset_info": {"features": [{"name": "label", "dtype": dtype}]}}

    found = hub_parquet.read_features(card, None)

    assert found == {"label": {"_type": "ClassLabel", "names": expected}}


# Addresses.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (DATA, Address("owner/pets", None, "")),
        (f"{DATA}/", Address("owner/pets", None, "")),
        (f"{DATA}@v1.0/small/train", Address("owner/pets", "v1.0", "small/train")),
        (f"{DATA}@~parquet", Address("owner/pets", "refs/convert/parquet", "")),
        (f"{DATA}@refs/pr/3/a", Address("owner/pets", "refs/pr/3", "a")),
        (f"{DATA}@a%2Fb", Address("owner/pets", "a/b", "")),
    ],
)
def test_parts_of_an_address(text, expected):
    assert parse_address(text) == expected


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("hf://owner/pets", f"Did you mean '{DATA}'"),
        ("hf://datasets/pets", "must have the form hf://datasets/OWNER/NAME"),
        (f"{DATA} b", "must have the form"),
        (f"{DATA}@", "must have the form"),
    ],
)
def test_malformed_addresses(text, rule, make_config):
    with rejects(text, rule):
        open_source(text, "test", make_config(), 0)
