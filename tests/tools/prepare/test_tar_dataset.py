"""Datasets made of tar archives, from the archive to the records that training reads."""

import collections
import contextlib
import csv
import fcntl
import gzip
import hashlib
import io
import itertools
import json
import shutil
import tarfile
import types

import numpy as np
import pyarrow.parquet as pq
import pytest
from array_record.python import array_record_module

from tests.columns import list_column
from tests.data.packed_files import by_class, packed, picture, special
from tests.integration.commands import run
from tests.rejections import rejects
from vit_jax.config.schema import InputConfig
from vit_jax.data.decoding import images
from vit_jax.data.sources import open_source
from vit_jax.tools.prepare import scatter, tar_dataset, tar_reading, tar_writing
from vit_jax.tools.prepare.tar_dataset import Options

SIZES = {"n02": 7, "n01": 4, "n10": 9}  # not in the order of their names
NUMBERS = itertools.count()


def compute_sha(image):
    return hashlib.sha256(image).hexdigest()


def draw_class(name, size):
    files = {}
    for k in range(size):
        files[f"{name}_{k}.JPEG"] = picture(next(NUMBERS))
    return files


def list_files(classes):
    """Return (class, file name, image) of all images."""
    rows = []
    for name, files in classes.items():
        for file, image in files.items():
            rows.append((name, file, image))
    return rows


def pack_folders(files):
    members = []
    for name, file, image in files:
        members.append((f"./{name}/{file}", image))
    return packed(*members)


CLASSES = {name: draw_class(name, size) for name, size in SIZES.items()}
FILES = list_files(CLASSES)
IMAGES = {(name, compute_sha(image)) for name, _, image in FILES}
WHOLE = by_class(CLASSES)
FOLDERS = pack_folders(FILES)


def pack_shards(suffix, label):
    """Return WebDataset samples with classes mixed.

    `label` returns the content of a label's file.
    """
    rng = np.random.default_rng(0)
    members = []
    for k in rng.permutation(len(FILES)).tolist():
        name, _, image = FILES[k]
        members.append((f"{k:04}.jpg", image))
        members.append((f"{k:04}.{suffix}", label(name)))
    return packed(*members)


def write_json_label(name):
    label = {"class_id": name, "label": 3}
    return json.dumps(label).encode()


def write_number_label(name):
    return b"%d\n" % int(name[1:])


OF_NAMES = pack_shards("cls", str.encode)
OF_JSON = pack_shards("json", write_json_label)
OF_NUMBERS = pack_shards("cls", write_number_label)


@pytest.fixture
def prepare(tmp_path):
    """Return a function from an archive, or several by name, to the folder and the counts."""

    def make(archive, data="data", **options):
        files = archive
        if isinstance(archive, bytes):
            files = {"whole.tar": archive}

        paths = []
        for name, content in files.items():
            path = tmp_path / name
            paths.append(str(path))
            if not path.exists() or path.read_bytes() != content:
                path.write_bytes(content)

        return tar_dataset.prepare_tars(
            tar_dataset.list_archives(paths),
            "mine",
            data_dir=str(tmp_path / data),
            options=Options(**options),
        )

    make.root = tmp_path
    return make


def get_unfinished(prepare, data="data"):
    """Return the folder of an unfinished dataset."""
    return prepare.root / data / "mine" / tar_dataset.UNFINISHED


def open_split(folder, split="train"):
    return open_source("tfds:mine", split, make_config(folder), 0)


def read_records(folder, split="train"):
    """Return (class, SHA-256) of the records in the order in which training reads them."""
    source = open_split(folder, split)
    found = []
    for index in range(len(source)):
        record = source[index]
        found.append((source.class_names[record.label], compute_sha(record.image)))
    return found


def check_dataset(folder):
    return tar_dataset.check("mine", str(folder.parents[1]))


def make_config(folder):
    return InputConfig(
        data_dir=str(folder.parents[1]),
        train_split="train",
        test_split="validation",
        image_size=(8, 8),
    )


def read_manifest(folder):
    return pq.read_table(folder / "manifest").to_pylist()


def read_listed(folder):
    """Return kinds and names of the listed files."""
    listed = []
    with open(folder / "listed.csv", newline="") as file:
        for row in csv.DictReader(file):
            listed.append((row["kind"], row["source"]))
    return listed


def read_content(folder):
    """Return all files except those that name the archive or have its order."""
    files = {}
    for path in folder.rglob("*"):
        if path.is_file():
            files[str(path.relative_to(folder))] = path.read_bytes()
    del files["prepared.json"], files["listed.csv"]
    return files


def replace_stdin(monkeypatch, archive):
    buffer = io.BufferedReader(io.BytesIO(archive))
    file = io.TextIOWrapper(buffer)
    monkeypatch.setattr("sys.stdin", file)


@pytest.mark.parametrize(
    "archive",
    [
        WHOLE,
        gzip.compress(WHOLE),
        FOLDERS,
        OF_NAMES,
        OF_JSON,
    ],
    ids=[
        "tar of tars",
        "compressed",
        "folders",
        "WebDataset names",
        "WebDataset JSON",
    ],
)
def test_every_image_is_read_with_its_class(prepare, archive):
    folder, counts = prepare(archive, shards=3)
    found = read_records(folder)
    rows = read_manifest(folder)
    class_names = sorted(SIZES)

    assert set(found) == IMAGES
    assert len(found) == len(IMAGES)
    assert counts["train"] == len(IMAGES)
    assert len(rows) == len(IMAGES)
    for k, row in enumerate(rows):
        assert row["id"] == f"train:{k}"
        assert (row["class"], row["sha256"]) == found[k]
        assert row["class"] == class_names[row["label"]]
    assert read_listed(folder) == []
    assert check_dataset(folder) == []
    assert not list(folder.parent.glob(".*"))


def test_the_order_depends_on_seed_and_names_alone(
    prepare,
    tmp_path,
    monkeypatch,
):
    """It does not depend on the order in the archive, its name, compression, or the number of
    threads.
    """
    folder, _ = prepare(WHOLE, shards=4)
    expected = read_content(folder)
    reversed_classes = {}
    for name in reversed(CLASSES):
        files = CLASSES[name].items()
        reversed_classes[name] = dict(reversed(files))
    content = gzip.compress(by_class(reversed_classes))

    backwards, _ = prepare(
        {"other.tar.gz": content},
        "backwards",
        shards=4,
    )
    assert read_content(backwards) == expected

    replace_stdin(monkeypatch, WHOLE)
    from_input, _ = tar_dataset.prepare_tars(
        tar_dataset.list_archives(["-"]),
        "mine",
        data_dir=str(tmp_path / "input"),
        options=Options(shards=4),
    )

    assert read_content(from_input) == expected


def test_classes_are_mixed_by_the_seed(prepare):
    folder, _ = prepare(WHOLE, shards=4)
    other_folder, _ = prepare(WHOLE, "seed", shards=4, seed=1)

    found = read_records(folder)
    names = list_column(found, 0)
    runs = list(itertools.groupby(names))

    assert len(runs) > len(SIZES)
    assert read_records(other_folder) != found


def test_fields_of_a_record_are_in_alphabetical_order(prepare):
    """Their order in protobuf would be by chance."""
    folder, _ = prepare(WHOLE, shards=4)

    for shard in folder.glob("*.array_record*"):
        reader = array_record_module.ArrayRecordReader(str(shard))
        numbers = list(range(reader.num_records()))
        for record in reader.read(numbers):
            name = record.index(b"file_name")
            image = record.index(b"image")
            label = record.index(b"label")
            assert name < image < label
        reader.close()


def test_parts_of_a_split(prepare):
    folder, _ = prepare(WHOLE)

    every = read_records(folder)
    first_five = read_records(folder, "train[:5]")
    others = read_records(folder, "train[5:]")
    first_half = read_records(folder, "train[:50%]")
    second_half = read_records(folder, "train[50%:]")

    assert first_five + others == every
    assert {*first_half, *second_half} == IMAGES


def test_several_archives_may_have_members_of_one_name(prepare):
    first = {}
    second = {}
    for name, files in CLASSES.items():
        first[name] = dict(itertools.islice(files.items(), 2))
        second[name] = draw_class(name, 2)
        assert first[name].keys() == second[name].keys()

    folder, counts = prepare(
        {
            "a.tar": by_class(first),
            "b.tar": by_class(second),
        }
    )

    archives = set()
    for row in read_manifest(folder):
        archives.add(row["source"].partition("/")[0])

    assert counts["train"] == 12
    assert archives == {"a.tar", "b.tar"}


def pack_odd_files(tmp_path, good):
    """Return a tar with the good images of class a, and files of every kind that is listed."""
    a = packed(
        *good.items(),
        ("png.JPEG", picture(1, ".png")),
        ("tiny.JPEG", picture(2, size=(31, 99))),
        ("cut.JPEG", picture(3)[:-200]),
        ("rubbish.JPEG", b"rubbish"),
        ("empty.JPEG", b""),
        ("bomb.png", bytes(PNG_BOMB)),
        ("x.txt", b""),
        ("../../../escaped.JPEG", picture(4)),
        (str(tmp_path / "absolute.JPEG"), picture(5)),
        special("link.JPEG", tarfile.SYMTYPE, "/etc/passwd"),
    )
    b = packed(
        ("0.JPEG", picture(6)),
        ("0.JPEG", picture(7)),
        ("1.JPEG", picture(8)),
    )
    c = packed(*good.items())[:2000]
    return packed(
        ("a.tar", a),
        ("b.tar", b),
        ("c.tar", c),
        ("d.jpg", picture(9)),
        special("device", tarfile.BLKTYPE),
        ("e.jpg", picture(10)),
        ("e.cls", b"two\nlines"),
        ("f.jpg", picture(11)),
        ("f.json", b'{"class": "\\ud800"}'),
    )


PNG_BOMB = bytearray(picture(0, ".png"))
PNG_BOMB[16:24] = 2 * (60_000).to_bytes(4, "big")


def draw_numbered(count):
    return {f"{k}.JPEG": picture(k) for k in range(count)}


def test_files_that_are_excluded_or_odd_are_listed(prepare, tmp_path):
    good = draw_numbered(4)
    expected = [
        ("mislabelled", "a.tar/png.JPEG"),
        ("tiny", "a.tar/tiny.JPEG"),
        ("unreadable", "a.tar/cut.JPEG"),
        ("unreadable", "a.tar/rubbish.JPEG"),
        ("unreadable", "a.tar/empty.JPEG"),
        ("unreadable", "a.tar/bomb.png"),
        ("other", "a.tar/x.txt"),
        ("unsafe", "a.tar/../../../escaped.JPEG"),
        ("unsafe", f"a.tar/{tmp_path}/absolute.JPEG"),
        ("unsafe", "a.tar/link.JPEG"),
        ("duplicate", "b.tar/0.JPEG"),
        ("damaged archive", "c.tar"),
        ("no class", "d.jpg"),
        ("no class", "e.jpg"),
        ("no class", "f.jpg"),
        ("unsafe", "device"),
    ]

    folder, counts = prepare(pack_odd_files(tmp_path, good))

    listed = read_listed(folder)
    kinds = collections.Counter(list_column(listed, 0))

    assert set(listed) == set(expected)
    for kind, count in kinds.items():
        assert counts[kind] == count

    images_a = (*good.values(), picture(1, ".png"))
    images_b = (picture(6), picture(8))
    kept = {
        *(("a", compute_sha(image)) for image in images_a),
        *(("b", compute_sha(image)) for image in images_b),
    }

    assert set(read_records(folder)) == kept


def test_nothing_is_written_by_the_name_of_a_member(prepare, tmp_path):
    good = draw_numbered(4)
    before = set(tmp_path.parent.rglob("*"))

    prepare(pack_odd_files(tmp_path, good))

    data = tmp_path / "data"
    after = set(tmp_path.parent.rglob("*"))
    elsewhere = set()
    for path in after - before:
        if not path.is_relative_to(data):
            elsewhere.add(path)

    assert elsewhere == {tmp_path / "whole.tar"}


TWO_SPLITS = packed(
    ("train/a/0.jpg", picture(0)),
    ("val/a/0.jpg", picture(1)),
)

NAME_AND_NUMBER = packed(
    ("0.jpg", picture(0)),
    ("0.cls", b"a"),
    ("1.jpg", picture(1)),
    ("1.cls", b"1"),
)

LATE_LABEL = packed(
    ("0.jpg", picture(0)),
    ("1.jpg", picture(1)),
    ("2.jpg", picture(2)),
    ("0.cls", b"a"),
)


@pytest.mark.parametrize(
    ("archive", "rule"),
    [
        (WHOLE[: len(WHOLE) // 2], "ends at byte"),
        (gzip.compress(WHOLE)[:-100], "cannot be read after byte"),
        (WHOLE[:-10240], "ends at byte"),
        (b"rubbish" * 99, "is no tar archive"),
        (by_class({"n01": CLASSES["n01"]}), "1 classes"),
        (packed(("a.jpg", picture(0))), "0 classes"),
        (TWO_SPLITS, "as if they were splits"),
        (NAME_AND_NUMBER, "names or numbers"),
        (LATE_LABEL, "image and label of '0' are apart"),
    ],
    ids=[
        "half",
        "compressed half",
        "no end",
        "no tar",
        "one class",
        "no class",
        "two splits",
        "name and number",
        "late label",
    ],
)
def test_archives_that_are_rejected(prepare, tmp_path, archive, rule):
    with rejects("", rule):
        prepare(archive)

    folder = tmp_path / "data/mine/1.0.0"
    assert list_column(folder.parent.iterdir(), "name") == [".unfinished"]

    with rejects("mine", "unfinished"):
        open_split(folder)

    with rejects("mine", "unfinished"):
        check_dataset(folder)


def read_class_names(folder):
    return open_split(folder).class_names


def read_used_names(folder):
    names = list_column(read_records(folder), 0)
    return set(names)


NUMBER_NAMES = tuple(f"class {k}" for k in range(11))
DIGITS = tuple(str(k) for k in range(11))
ORDER = ("n30", "n10", "n20", "n02", "n01")


@pytest.mark.parametrize(
    ("archive", "classes", "class_names", "used_names"),
    [
        (WHOLE, (), ("n01", "n02", "n10"), set(SIZES)),
        (WHOLE, ORDER, ORDER, set(SIZES)),
        (OF_NUMBERS, (), DIGITS, {"1", "2", "10"}),
        (
            OF_NUMBERS,
            NUMBER_NAMES,
            NUMBER_NAMES,
            {"class 1", "class 2", "class 10"},
        ),
    ],
    ids=[
        "sorted names",
        "names of a list",
        "numbers of files",
        "numbers and a list",
    ],
)
def test_numbers_of_the_classes(
    prepare,
    archive,
    classes,
    class_names,
    used_names,
):
    """Classes have the numbers of a list, with gaps for missing ones, of files, or of the sorted
    names.
    """
    folder, _ = prepare(archive, classes=classes)

    assert read_class_names(folder) == class_names
    assert read_used_names(folder) == used_names


def test_classes_of_json_labels_have_the_numbers_of_a_list(prepare):
    folder, _ = prepare(OF_JSON, classes=ORDER)

    assert set(read_records(folder)) == IMAGES


@pytest.mark.parametrize(
    ("classes", "expected"),
    [
        (ORDER, ORDER),
        ((), ("n01", "n02", "n10")),
    ],
)
def test_numbers_of_files_may_have_names(prepare, classes, expected):
    number_names = tuple(f"n{k:02}" for k in range(11))
    folder, _ = prepare(
        OF_NUMBERS,
        classes=classes,
        number_names=number_names,
    )

    assert set(read_records(folder)) == IMAGES
    assert read_class_names(folder) == expected


@pytest.mark.parametrize(
    ("archive", "num_without_class"),
    [
        (WHOLE, 1),  # the archive of the class is one file
        (OF_NAMES, SIZES["n10"]),
        (OF_NUMBERS, SIZES["n10"]),
    ],
    ids=["tar of tars", "names", "numbers"],
)
def test_classes_that_the_list_does_not_have(
    prepare,
    archive,
    num_without_class,
):
    classes = ("n01", "n02", "x")  # neither "n10" nor number 10
    with rejects("class", "--other_classes=skip"):
        prepare(archive, classes=classes)

    folder, counts = prepare(
        archive,
        "other",
        classes=classes,
        skips_others=True,
    )

    assert len(read_records(folder)) == SIZES["n01"] + SIZES["n02"]
    assert counts["classes"] == 3
    assert counts["no class"] == num_without_class


def test_small_classes_and_hold_out(prepare):
    """Hold out the same number of each class, at most half; the places depend on the seed alone."""
    folder, counts = prepare(
        WHOLE,
        shards=3,
        min_class_images=5,
        holdout_per_class=4,
    )
    train = read_records(folder)
    validation = read_records(folder, "validation")
    held_out = collections.Counter(list_column(validation, 0))
    large_classes = {pair for pair in IMAGES if pair[0] != "n01"}

    assert counts == {
        "train": 9,
        "validation": 7,
        "classes": 2,
        "small class": 1,
    }
    assert read_listed(folder) == [("small class", "n01")]
    assert held_out == {"n02": 3, "n10": 4}
    assert {*train, *validation} == large_classes
    assert read_class_names(folder) == ("n02", "n10")
    assert check_dataset(folder) == []

    again, _ = prepare(WHOLE, "again", holdout_per_class=4)
    assert read_records(again, "validation") != validation


def test_the_manifest_has_the_records_of_all_splits(prepare):
    folder, _ = prepare(
        WHOLE,
        shards=3,
        min_class_images=5,
        holdout_per_class=4,
    )
    rows = {}
    for row in read_manifest(folder):
        rows[row["id"]] = (row["class"], row["sha256"])

    for split in ("train", "validation"):
        for k, record in enumerate(read_records(folder, split)):
            assert rows[f"{split}:{k}"] == record


def test_smaller_images(prepare):
    files = {"0.png": picture(0, ".png", (70, 90))}
    archive = by_class({"a": files, "b": files})

    folder, _ = prepare(archive, short_side=35)
    stored = open_split(folder)[0].image

    assert images.decode(stored).shape == (35, 45, 3)
    assert check_dataset(folder) == []


class Kill(BaseException):
    """The end of the process, which nothing handles."""


@pytest.mark.parametrize(
    ("archive", "rest"),
    [
        (WHOLE, 13),
        (gzip.compress(WHOLE), 13),
        (OF_NAMES, 12),
    ],
    ids=["tar of tars", "compressed", "WebDataset"],
)
def test_an_interrupted_command_goes_on(prepare, archive, rest, monkeypatch):
    """After kills at several records and files, the bytes are the same, and little is done twice."""
    whole, _ = prepare(archive, "whole", shards=3)
    expected = read_content(whole)
    monkeypatch.setattr(tar_reading, "_COMMIT_BYTES", 1)

    # After the first of three classes.
    with expect_kill(monkeypatch, scatter.Scatter, "add", 8):
        prepare(archive, shards=3)
    assert count_rest(prepare, archive, monkeypatch) == rest

    for owner, name, after in (
        (scatter.Scatter, "add", 3),
        (scatter.Scatter, "commit", 1),
        (tar_writing, "_write_bucket", 1),
        (tar_writing, "_write_bucket", 1),
        (tar_writing.tfds.folder_dataset, "write_metadata", 0),
        (tar_dataset.os, "sync", 0),
    ):
        with expect_kill(monkeypatch, owner, name, after):
            prepare(archive, shards=3)

    folder, _ = prepare(archive, shards=3)
    assert read_content(folder) == expected
    assert read_listed(folder) == []


def pack_samples_with_masks(count):
    members = []
    for number in range(count):
        key = f"{number:02}"
        mask = picture(100 + number, ".png")
        name = b"b" if number % 2 else b"a"
        members.append((f"{key}.seg.png", mask))
        members.append((f"{key}.cls", name))
        members.append((f"{key}.jpg", picture(number)))
    return packed(*members)


def test_one_image_of_a_sample_is_stored(prepare, monkeypatch):
    """The others are listed, each once, also after an interruption."""
    archive = pack_samples_with_masks(12)
    stored = set()
    skipped = []
    for number in range(12):
        stored.add(compute_sha(picture(number)))
        skipped.append(("other", f"{number:02}.seg.png"))

    folder, counts = prepare(archive, "whole", shards=1)
    found = list_column(read_records(folder), 1)

    assert set(found) == stored
    assert read_listed(folder) == skipped
    assert counts["other"] == 12

    monkeypatch.setattr(tar_reading, "_COMMIT_BYTES", 1)
    with expect_kill(monkeypatch, scatter.Scatter, "add", 5):
        prepare(archive, shards=1)
    again, _ = prepare(archive, shards=1)

    assert read_content(again) == read_content(folder)
    assert read_listed(again) == skipped


def test_the_standard_input_begins_again(tmp_path, monkeypatch):
    def prepare_stdin(data):
        replace_stdin(monkeypatch, WHOLE)
        folder, _ = tar_dataset.prepare_tars(
            ["-"],
            "mine",
            data_dir=str(tmp_path / data),
            options=Options(shards=3),
        )
        return folder

    expected = read_content(prepare_stdin("whole"))
    monkeypatch.setattr(tar_reading, "_COMMIT_BYTES", 1)
    with expect_kill(monkeypatch, scatter.Scatter, "add", 8):
        prepare_stdin("data")
    with expect_kill(monkeypatch, tar_writing, "_write_bucket", 1):
        prepare_stdin("data")

    # Everything was read, so nothing is read again.
    monkeypatch.setattr(tar_reading, "read_images", make_killing(None, 0))
    assert read_content(prepare_stdin("data")) == expected


def read_times(folder):
    times = {}
    for path in folder.rglob("*"):
        times[path] = path.stat().st_mtime_ns
    return times


def make_killing(function, after):
    """Return a function that ends the process at its call number `after` + 1."""
    calls = itertools.count()

    def call(*words, **options):
        if next(calls) >= after:
            raise Kill
        return function(*words, **options)

    return call


@contextlib.contextmanager
def expect_kill(monkeypatch, owner, name, after):
    """Expect that the process is killed at the call number `after` + 1 of a function."""
    function = getattr(owner, name)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, make_killing(function, after))
        with pytest.raises(Kill):
            yield


def count_rest(prepare, archive, monkeypatch):
    """Finish a copy of the unfinished dataset; return the number of images that it adds."""
    added = []
    add = scatter.Scatter.add

    def count_and_add(*words):
        added.append(words)
        add(*words)

    shutil.copytree(
        get_unfinished(prepare),
        get_unfinished(prepare, "copy"),
    )
    with monkeypatch.context() as patch:
        patch.setattr(scatter.Scatter, "add", count_and_add)
        prepare(archive, "copy", shards=3)
    return len(added)


def test_an_archive_or_an_option_that_changed(prepare):
    folder, counts = prepare(WHOLE)
    times = read_times(folder)

    assert prepare(WHOLE) == (folder, counts)
    assert read_times(folder) == times

    with rejects(str(folder), "exists"):
        prepare(WHOLE, seed=1)

    with rejects(str(folder), "exists"):
        prepare(FOLDERS)


def test_an_unfinished_dataset_of_other_options(prepare, monkeypatch):
    monkeypatch.setattr(tar_reading, "_COMMIT_BYTES", 1)
    with expect_kill(monkeypatch, tar_writing, "_write_bucket", 0):
        prepare(WHOLE)

    unfinished = get_unfinished(prepare)
    with rejects(str(unfinished), "other archives or options"):
        prepare(WHOLE, min_side=1)

    with open(unfinished / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with rejects(str(unfinished), "another process"):
            prepare(WHOLE)

    flip(unfinished / "bucket-00000", -9)
    with rejects(str(unfinished), "damaged"):
        prepare(WHOLE)


def test_a_bucket_that_a_loss_of_power_cut(prepare, monkeypatch):
    monkeypatch.setattr(tar_reading, "_COMMIT_BYTES", 1)
    with expect_kill(monkeypatch, scatter.Scatter, "add", 8):
        prepare(WHOLE)
    bucket = get_unfinished(prepare) / "bucket-00000"
    bucket.write_bytes(b"")

    with rejects("bucket-00000", "has 0 bytes instead of"):
        prepare(WHOLE)


def set_free_bytes(monkeypatch, num_bytes):
    usage = types.SimpleNamespace(free=num_bytes)
    monkeypatch.setattr(tar_dataset.shutil, "disk_usage", lambda _: usage)


def test_a_disk_that_is_too_small(prepare, monkeypatch):
    """It must hold the images once, and one bucket; bytes that are already there count."""
    unfinished = get_unfinished(prepare)

    set_free_bytes(monkeypatch, len(WHOLE))
    with rejects(str(unfinished), r"GB free, and .* GB are needed"):
        prepare(WHOLE, shards=2)

    set_free_bytes(monkeypatch, 2 * len(WHOLE))
    assert prepare(WHOLE, shards=2)


class FullDiskWriter:
    """A writer of ArrayRecord whose disk is full at the end."""

    make = array_record_module.ArrayRecordWriter

    def __init__(self, path, options):
        self.writer = FullDiskWriter.make(path, options)
        self.write = self.writer.write

    def close(self):
        self.writer.close()
        raise RuntimeError("No space left on device")


def test_a_disk_that_fills_up_while_shards_are_written(prepare, monkeypatch):
    """ArrayRecord raises RuntimeError.

    It becomes an error of files, and the same command goes on.
    """
    with monkeypatch.context() as patch:
        patch.setattr(array_record_module, "ArrayRecordWriter", FullDiskWriter)

        message = r"cannot be written .No space left on device"
        with pytest.raises(OSError, match=message):
            prepare(WHOLE)

    folder, _ = prepare(WHOLE)
    assert not check_dataset(folder)


def test_memory_is_bounded(prepare, monkeypatch):
    """One image is checked at a time where the limit is below the size of two."""
    check = tar_reading._check
    in_progress = []
    numbers = []

    def count_and_check(found, options):
        in_progress.append(found)
        numbers.append(len(in_progress))
        checked = check(found, options)
        in_progress.remove(found)
        return checked

    monkeypatch.setattr(tar_reading, "count_cores", lambda: 4)
    monkeypatch.setattr(tar_reading, "_check", count_and_check)
    monkeypatch.setattr(tar_reading, "_MEMORY_BYTES", 20_000)
    prepare(WHOLE)

    assert max(numbers) == 1

    monkeypatch.setattr(tar_reading, "MAX_MEMBER_BYTES", 100)
    with rejects("0 classes"):
        prepare(WHOLE, "other")


def flip(path, place):
    """Change one bit of a file."""
    stored = bytearray(path.read_bytes())
    stored[place] ^= 1
    path.write_bytes(stored)


def flip_in_first_image(path):
    flip(path, path.read_bytes().index(b"JFIF") + 400)


def test_a_check_finds_what_changed(prepare):
    folder, _ = prepare(WHOLE, shards=2, holdout_per_class=1)
    shard = folder / "mine-train.array_record-00001-of-00002"
    other_shard = folder / "mine-train.array_record-00000-of-00002"
    part = folder / "manifest/00001-of-00002.parquet"
    whole = {shard: shard.read_bytes()}
    for path in folder.glob("manifest/*"):
        whole[path] = path.read_bytes()
    ids = list_column(read_manifest(folder), "id")

    def find_and_repair():
        problems = check_dataset(folder)
        for path, stored in whole.items():
            path.write_bytes(stored)
        return problems

    flip_in_first_image(shard)
    (problem,) = find_and_repair()
    assert problem.split()[1] in ids
    assert str(shard) in problem

    shard.write_bytes(whole[shard][:-70_000])
    assert find_and_repair()

    shard.unlink()
    assert find_and_repair()

    shutil.copy(other_shard, shard)
    assert len(find_and_repair()) > 1

    part.unlink()
    assert find_and_repair()

    assert find_and_repair() == []


def test_the_verb(tmp_path):
    (tmp_path / "whole.tar").write_bytes(WHOLE)
    (tmp_path / "classes.txt").write_text("\n".join(ORDER))
    folder = tmp_path / "data/mine/1.0.0"

    outcome = run(
        [
            "prepare",
            f"tar:{tmp_path}/*.tar",
            "--name=mine",
            f"--data_dir={tmp_path}/data",
            "--holdout_per_class=1",
            f"--classes={tmp_path}/classes.txt",
        ]
    )

    assert outcome.code == 0
    assert outcome.out == f"{folder}: 17 train, 3 validation, 5 classes\n"
    assert (tmp_path / "data/vit_jax_data.txt").read_text().splitlines() == [
        "--config.data=tfds:mine",
        "--config.input.data_dir=.",
        "--config.input.test_split=validation",
    ]

    check = ["prepare", "mine", f"--data_dir={tmp_path}/data", "--check"]
    assert run(check).code == 0

    flip_in_first_image(folder / "mine-train.array_record-00000-of-00001")
    assert run(check).code == 1


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["tar:a.tar"], "--name"),
        (["tar:a.tar", "folder:b"], "one dataset"),
        (["cifar10", "cifar100"], "one dataset"),
        ([__file__, "--name=x"], f"tar:{__file__}"),
        (["tar:a.tar", "--name=x", "--output=y"], "--output"),
        (["cifar10", "--holdout_per_class=1"], "--holdout_per_class"),
        (["tar:missing.tar", "--name=x"], "missing.tar"),
        (["tar:/dev/zero", "--name=x"], "regular file"),
        (["tar:/dev", "--name=x"], "is a folder. Give its files, tar:'/dev/*.tar'"),
        (["tar:-", f"tar:{__file__}", "--name=x"], "alone"),
        ([f"tar:{__file__}", f"tar:{__file__}", "--name=x"], "different names"),
        ([f"tar:{__file__}", "--name=X"], "--name=X"),
        ([f"tar:{__file__}", "--name=cifar10"], "--name=cifar10"),
        ([f"tar:{__file__}", "--name=x", "--quality=50"], "--short_side"),
        ([f"tar:{__file__}", "--name=x", "--other_classes=skip"], "--classes"),
        ([f"tar:{__file__}", "--name=x", "--classes=/dev/null"], "--classes=/dev/null"),
        (["missing", "--check"], "has no prepared.json"),
    ],
)
def test_words_that_are_rejected(tmp_path, words, rule):
    words = ["prepare", *words]
    if "folder:b" not in words:
        words.append(f"--data_dir={tmp_path}")

    outcome = run(words)

    assert outcome.code == 2, outcome.err
    assert rule in outcome.err
    assert not list(tmp_path.iterdir())
