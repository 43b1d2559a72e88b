"""Datasets made of tar archives, from the archive to the records that training reads."""

import collections
import csv
import fcntl
import gzip
import hashlib
import io
import itertools
import json
import shutil
import tarfile

import numpy as np
import pyarrow.parquet as pq
import pytest
from array_record.python import array_record_module

from tests.data.packed_files import by_class, packed, picture, special
from tests.integration.commands import run
from tests.rejections import rejects
from vit_jax.data.decoding import images
from vit_jax.data.sources import open_source
from vit_jax.tools.prepare import scatter, tar_dataset, tar_reading, tar_writing
from vit_jax.tools.prepare.tar_dataset import Options

SIZES = {"n02": 7, "n01": 4, "n10": 9}  # not in the order of their names
NUMBERS = itertools.count()
CLASSES = {
    name: {f"{name}_{k}.JPEG": picture(next(NUMBERS)) for k in range(size)}
    for name, size in SIZES.items()
}
IMAGES = {
    (name, hashlib.sha256(image).hexdigest())
    for name, files in CLASSES.items()
    for image in files.values()
}
WHOLE = by_class(CLASSES)
FOLDERS = packed(
    *(
        (f"./{name}/{file}", image)
        for name, files in CLASSES.items()
        for file, image in files.items()
    )
)


def shards(suffix, label):
    """WebDataset samples, classes mixed."""
    pairs = [(name, image) for name, files in CLASSES.items() for image in files.values()]
    order = np.random.default_rng(0).permutation(len(pairs)).tolist()
    parts = (
        [(f"{k:04}.jpg", pairs[k][1]), (f"{k:04}.{suffix}", label(pairs[k][0]))] for k in order
    )
    return packed(*itertools.chain(*parts))


OF_NAMES = shards("cls", str.encode)
OF_JSON = shards("json", lambda name: json.dumps({"class_id": name, "label": 3}).encode())
OF_NUMBERS = shards("cls", lambda name: b"%d\n" % int(name[1:]))


@pytest.fixture
def prepare(tmp_path):
    """Returns a function from an archive, or several by name, to the folder and the counts."""

    def make(archive, data="data", **options):
        files = archive if isinstance(archive, dict) else {"whole.tar": archive}
        paths = [tmp_path / name for name in files]
        for path, content in zip(paths, files.values(), strict=True):
            if not path.exists() or path.read_bytes() != content:
                path.write_bytes(content)
        found = tar_dataset.list_archives(list(map(str, paths)))
        return tar_dataset.prepare_tars(
            found, "mine", data_dir=str(tmp_path / data), options=Options(**options)
        )

    make.root = tmp_path
    return make


def unfinished(prepare, data="data"):
    """The folder of an unfinished dataset."""
    return prepare.root / data / "mine" / tar_dataset.UNFINISHED


def records(folder, split="train"):
    """(class, SHA-256) of the records, in their order, as training reads them."""
    config = tar_dataset_config(folder)
    source = open_source("tfds:mine", split, config, 0)
    return [
        (source.class_names[record.label], sha(record.image))
        for record in map(source.__getitem__, range(len(source)))
    ]


def tar_dataset_config(folder):
    from vit_jax.config.schema import InputConfig

    return InputConfig(
        data_dir=str(folder.parents[1]),
        train_split="train",
        test_split="validation",
        image_size=(8, 8),
    )


def sha(image):
    return hashlib.sha256(image).hexdigest()


def manifest(folder):
    return pq.read_table(folder / "manifest").to_pylist()


def listed(folder):
    """Kinds and names of the listed files."""
    with open(folder / "listed.csv", newline="") as file:
        return [(row["kind"], row["source"]) for row in csv.DictReader(file)]


def content(folder):
    """All files but those that name the archive or have its order."""
    files = (
        path
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("prepared.json", "listed.csv")
    )
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize(
    "archive", [WHOLE, gzip.compress(WHOLE), FOLDERS, OF_NAMES, OF_JSON], ids=range(5)
)
def test_every_image_is_read_with_its_class(prepare, archive):
    """From a tar for each class, compressed too, a folder for each class, and WebDataset samples."""
    folder, counts = prepare(archive, shards=3)
    found = records(folder)

    assert set(found) == IMAGES
    assert len(found) == counts["train"] == len(IMAGES)

    rows = manifest(folder)
    assert [(row["class"], row["sha256"]) for row in rows] == found
    assert [row["id"] for row in rows] == [f"train:{k}" for k in range(len(rows))]
    assert [row["label"] for row in rows] == [sorted(SIZES).index(row["class"]) for row in rows]
    assert listed(folder) == []
    assert tar_dataset.check("mine", str(folder.parents[1])) == []
    assert not list(folder.parent.glob(".*"))


def test_the_order_depends_on_seed_and_names_alone(prepare, tmp_path, monkeypatch):
    """Not on the order in the archive, its name, compression, or the number of threads; classes are mixed."""
    expected = content(prepare(WHOLE, shards=4)[0])
    backwards = by_class(
        {name: dict(reversed(CLASSES[name].items())) for name in reversed(CLASSES)}
    )

    assert (
        content(prepare({"other.tar.gz": gzip.compress(backwards)}, "backwards", shards=4)[0])
        == expected
    )

    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(WHOLE))))
    archives = tar_dataset.list_archives(["-"])
    folder, _ = tar_dataset.prepare_tars(
        archives, "mine", data_dir=str(tmp_path / "input"), options=Options(shards=4)
    )

    assert content(folder) == expected

    for shard in folder.glob("*.array_record*"):
        reader = array_record_module.ArrayRecordReader(str(shard))
        for record in reader.read(
            list(range(reader.num_records()))
        ):  # protobuf's order is by chance otherwise
            assert record.index(b"file_name") < record.index(b"image") < record.index(b"label")
        reader.close()

    order = [name for name, _ in records(folder)]

    assert len(list(itertools.groupby(order))) > len(SIZES)
    assert records(prepare(WHOLE, "seed", shards=4, seed=1)[0]) != records(folder)


def test_parts_of_a_split(prepare):
    folder, _ = prepare(WHOLE)

    assert records(folder, "train[:5]") + records(folder, "train[5:]") == records(folder)
    assert set(records(folder, "train[:50%]")) | set(records(folder, "train[50%:]")) == IMAGES


def test_several_archives_may_have_members_of_one_name(prepare):
    half = {name: dict(itertools.islice(files.items(), 2)) for name, files in CLASSES.items()}
    other = {name: {file: picture(next(NUMBERS)) for file in files} for name, files in half.items()}
    folder, counts = prepare({"a.tar": by_class(half), "b.tar": by_class(other)})

    assert counts["train"] == 12
    assert {row["source"].partition("/")[0] for row in manifest(folder)} == {"a.tar", "b.tar"}


PNG_BOMB = bytearray(picture(0, ".png"))
PNG_BOMB[16:24] = (60_000).to_bytes(4, "big") * 2


def test_files_that_are_left_out_or_odd_are_listed(prepare, tmp_path):
    """Nothing is written by the name of a member."""
    good = {f"{k}.JPEG": picture(k) for k in range(4)}
    odd = {
        "png.JPEG": picture(1, ".png"),
        "tiny.JPEG": picture(2, size=(31, 99)),
        "cut.JPEG": picture(3)[:-200],
        "rubbish.JPEG": b"rubbish",
        "empty.JPEG": b"",
        "bomb.png": bytes(PNG_BOMB),
        "x.txt": b"",
        "../../../escaped.JPEG": picture(4),
        str(tmp_path / "absolute.JPEG"): picture(5),
    }
    twice = packed(("0.JPEG", picture(6)), ("0.JPEG", picture(7)), ("1.JPEG", picture(8)))
    archive = packed(
        (
            "a.tar",
            packed(
                *good.items(), *odd.items(), special("link.JPEG", tarfile.SYMTYPE, "/etc/passwd")
            ),
        ),
        ("b.tar", twice),
        ("c.tar", packed(*good.items())[:2000]),
        ("d.jpg", picture(9)),
        special("device", tarfile.BLKTYPE),
        *(("e.jpg", picture(10)), ("e.cls", b"two\nlines")),
        *(("f.jpg", picture(11)), ("f.json", b'{"class": "\\ud800"}')),
    )
    before = set(tmp_path.parent.rglob("*"))
    folder, counts = prepare(archive)

    assert set(listed(folder)) == {
        ("mislabelled", "a.tar/png.JPEG"),
        ("tiny", "a.tar/tiny.JPEG"),
        *(
            ("unreadable", f"a.tar/{name}")
            for name in ("cut.JPEG", "rubbish.JPEG", "empty.JPEG", "bomb.png")
        ),
        ("other", "a.tar/x.txt"),
        ("unsafe", "a.tar/../../../escaped.JPEG"),
        ("unsafe", f"a.tar/{tmp_path}/absolute.JPEG"),
        ("unsafe", "a.tar/link.JPEG"),
        ("duplicate", "b.tar/0.JPEG"),
        ("damaged archive", "c.tar"),
        *(("no class", f"{name}.jpg") for name in "def"),
        ("unsafe", "device"),
    }

    kinds = collections.Counter(kind for kind, _ in listed(folder))
    assert {kind: counts[kind] for kind in kinds} == kinds

    expected = {*((good | {"png.JPEG": odd["png.JPEG"]}).values())}
    assert {image for name, image in records(folder) if name == "a"} == set(map(sha, expected))
    assert {image for name, image in records(folder) if name == "b"} == {
        sha(picture(6)),
        sha(picture(8)),
    }

    new = set(tmp_path.parent.rglob("*")) - before
    assert {path for path in new if (tmp_path / "data") not in (path, *path.parents)} == {
        tmp_path / "whole.tar"
    }


@pytest.mark.parametrize(
    ("archive", "rule"),
    [
        (WHOLE[: len(WHOLE) // 2], "ends at byte"),
        (gzip.compress(WHOLE)[:-100], "cannot be read after byte"),
        (WHOLE[:-10240], "ends at byte"),
        (b"rubbish" * 99, "is no tar archive"),
        (by_class({"n01": CLASSES["n01"]}), "1 classes"),
        (packed(("a.jpg", picture(0))), "0 classes"),
        (
            packed(("train/a/0.jpg", picture(0)), ("val/a/0.jpg", picture(1))),
            "as if they were splits",
        ),
        (
            packed(("0.jpg", picture(0)), ("0.cls", b"a"), ("1.jpg", picture(1)), ("1.cls", b"1")),
            "names or numbers",
        ),
        (
            packed(*((f"{n}.jpg", picture(n)) for n in range(3)), ("0.cls", b"a")),
            "image and label of '0' are apart",
        ),
    ],
)
def test_archives_that_are_rejected(prepare, tmp_path, archive, rule):
    with rejects("", rule):
        prepare(archive)

    assert [path.name for path in (tmp_path / "data/mine").iterdir()] == [".unfinished"]
    with rejects("mine", "unfinished"):
        open_source("tfds:mine", "train", tar_dataset_config(tmp_path / "data/mine/1.0.0"), 0)

    with rejects("mine", "unfinished"):
        tar_dataset.check("mine", str(tmp_path / "data"))


ORDER = ("n30", "n10", "n20", "n02", "n01")


def numbering(folder):
    source = open_source("tfds:mine", "train", tar_dataset_config(folder), 0)
    return source.class_names, {source.class_names[label] for label in source.labels.tolist()}


def test_numbers_of_the_classes(prepare):
    """Classes have the numbers of a list, with gaps for missing ones, of files, or of the sorted names."""
    assert numbering(prepare(WHOLE)[0]) == (("n01", "n02", "n10"), set(SIZES))
    assert numbering(prepare(WHOLE, "a", classes=ORDER)[0]) == (ORDER, set(SIZES))
    assert numbering(prepare(OF_NUMBERS, "b")[0]) == (tuple(map(str, range(11))), {"1", "2", "10"})

    names = tuple(f"class {k}" for k in range(11))
    assert numbering(prepare(OF_NUMBERS, "c", classes=names)[0]) == (
        names,
        {"class 1", "class 2", "class 10"},
    )
    assert set(records(prepare(OF_JSON, "d", classes=ORDER)[0])) == IMAGES

    of_numbers = tuple(f"n{k:02}" for k in range(11))
    for name, classes, expected in (("e", ORDER, ORDER), ("f", (), ("n01", "n02", "n10"))):
        folder, _ = prepare(OF_NUMBERS, name, classes=classes, number_names=of_numbers)
        assert set(records(folder)) == IMAGES
        assert numbering(folder)[0] == expected


@pytest.mark.parametrize("archive", [WHOLE, OF_NAMES, OF_NUMBERS])
def test_classes_that_the_list_does_not_have(prepare, archive):
    classes = ("n01", "n02", "x")  # neither "n10" nor number 10
    with rejects("class", "--other_classes=skip"):
        prepare(archive, classes=classes)

    folder, counts = prepare(archive, "other", classes=classes, skips_others=True)
    expected = SIZES["n01"] + SIZES["n02"]

    assert (len(records(folder)), counts["classes"]) == (expected, 3)
    assert counts["no class"] == (1 if archive is WHOLE else SIZES["n10"])


def test_small_classes_and_hold_out(prepare):
    """Hold out the same number of each class, at most half; the places depend on the seed alone."""
    folder, counts = prepare(WHOLE, shards=3, min_class_images=5, holdout_per_class=4)

    assert counts == {"train": 9, "validation": 7, "classes": 2, "small class": 1}
    assert listed(folder) == [("small class", "n01")]

    train = records(folder)
    validation = records(folder, "validation")

    assert collections.Counter(name for name, _ in validation) == {"n02": 3, "n10": 4}
    assert {*train, *validation} == {pair for pair in IMAGES if pair[0] != "n01"}

    rows = {row["id"]: (row["class"], row["sha256"]) for row in manifest(folder)}
    for split, found in (("train", train), ("validation", validation)):
        assert [rows[f"{split}:{k}"] for k in range(len(found))] == found
    assert tar_dataset.check("mine", str(folder.parents[1])) == []
    assert records(prepare(WHOLE, "again", holdout_per_class=4)[0], "validation") != validation
    assert numbering(folder)[0] == ("n02", "n10")


def test_smaller_images(prepare):
    folder, _ = prepare(
        by_class({name: {"0.png": picture(0, ".png", (70, 90))} for name in "ab"}), short_side=35
    )
    source = open_source("tfds:mine", "train", tar_dataset_config(folder), 0)

    assert images.decode(source[0].image).shape == (35, 45, 3)
    assert tar_dataset.check("mine", str(folder.parents[1])) == []


class Kill(BaseException):
    """The end of the process, which nothing handles."""


@pytest.mark.parametrize(
    ("archive", "rest"), [(WHOLE, 13), (gzip.compress(WHOLE), 13), (OF_NAMES, 12)]
)
def test_an_interrupted_command_goes_on(prepare, archive, rest, monkeypatch):
    """Killed at several records and files, the bytes are those of one that was not, and little is done twice."""
    expected = content(prepare(archive, "whole", shards=3)[0])
    monkeypatch.setattr(tar_reading, "_COMMIT_BYTES", 1)
    added = []
    for place, name, after in (
        (scatter.Scatter, "add", 8),  # after the first of three classes
        (scatter.Scatter, "add", 3),
        (scatter.Scatter, "commit", 1),
        *((tar_writing, "_write_bucket", 1),) * 2,
        (tar_writing.tfds.folder_dataset, "write_metadata", 0),
        (tar_dataset.os, "sync", 0),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, killing(getattr(place, name), after))
            with pytest.raises(Kill):
                prepare(archive, shards=3)
        if not added:
            with monkeypatch.context() as patch:
                patch.setattr(
                    scatter.Scatter,
                    "add",
                    lambda *words, do=scatter.Scatter.add: added.append(do(*words)),
                )
                shutil.copytree(unfinished(prepare), unfinished(prepare, "copy"))
                prepare(archive, "copy", shards=3)
            assert len(added) == rest

    folder, _ = prepare(archive, shards=3)

    assert content(folder) == expected
    assert listed(folder) == []


def test_one_image_of_a_sample_is_stored(prepare, monkeypatch):
    """The others are listed, each once, also after an interruption."""
    members = []
    for number in range(12):
        mask = (f"{number:02}.seg.png", picture(100 + number, ".png"))
        members += [
            mask,
            (f"{number:02}.cls", b"ab"[number % 2 :][:1]),
            (f"{number:02}.jpg", picture(number)),
        ]

    archive = packed(*members)
    folder, counts = prepare(archive, "whole", shards=1)

    assert {image for _, image in records(folder)} == {sha(picture(number)) for number in range(12)}

    skipped = [("other", f"{number:02}.seg.png") for number in range(12)]
    assert (listed(folder), counts["other"]) == (skipped, 12)

    monkeypatch.setattr(tar_reading, "_COMMIT_BYTES", 1)
    with monkeypatch.context() as patch:
        patch.setattr(scatter.Scatter, "add", killing(scatter.Scatter.add, 5))
        with pytest.raises(Kill):
            prepare(archive, shards=1)

    again, _ = prepare(archive, shards=1)

    assert content(again) == content(folder)
    assert listed(again) == skipped


def test_the_standard_input_begins_again(tmp_path, monkeypatch):
    def make(data):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(WHOLE))))
        return tar_dataset.prepare_tars(
            ["-"], "mine", data_dir=str(tmp_path / data), options=Options(shards=3)
        )

    expected = content(make("whole")[0])
    monkeypatch.setattr(tar_reading, "_COMMIT_BYTES", 1)
    for place, name, after in ((scatter.Scatter, "add", 8), (tar_writing, "_write_bucket", 1)):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, killing(getattr(place, name), after))
            with pytest.raises(Kill):
                make("data")

    monkeypatch.setattr(tar_reading, "read_images", killing(None, 0))  # all was read

    assert content(make("data")[0]) == expected


def killing(function, after):
    """A function that ends the process when it is called once more."""
    calls = itertools.count()

    def call(*words, **options):
        if next(calls) >= after:
            raise Kill
        return function(*words, **options)

    return call


def test_an_archive_or_an_option_that_changed(prepare):
    folder, counts = prepare(WHOLE)
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}

    assert prepare(WHOLE) == (folder, counts)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == times
    for archive, options in ((WHOLE, {"seed": 1}), (FOLDERS, {})):
        with rejects(str(folder), "exists"):
            prepare(archive, **options)


def test_an_unfinished_dataset_of_other_options(prepare, monkeypatch):
    monkeypatch.setattr(tar_reading, "_COMMIT_BYTES", 1)
    monkeypatch.setattr(tar_writing, "_write_bucket", killing(None, 0))

    with pytest.raises(Kill):
        prepare(WHOLE)

    with rejects(str(unfinished(prepare)), "other archives or options"):
        prepare(WHOLE, min_side=1)

    with open(unfinished(prepare) / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with rejects(str(unfinished(prepare)), "another process"):
            prepare(WHOLE)

    bucket = unfinished(prepare) / "bucket-00000"
    stored = bytearray(bucket.read_bytes())
    stored[-9] ^= 1
    bucket.write_bytes(stored)
    monkeypatch.undo()

    with rejects(str(unfinished(prepare)), "damaged"):
        prepare(WHOLE)


def test_a_bucket_that_a_loss_of_power_cut(prepare, monkeypatch):
    monkeypatch.setattr(tar_reading, "_COMMIT_BYTES", 1)
    with monkeypatch.context() as patch:
        patch.setattr(scatter.Scatter, "add", killing(scatter.Scatter.add, 8))
        with pytest.raises(Kill):
            prepare(WHOLE)

    (unfinished(prepare) / "bucket-00000").write_bytes(b"")

    with rejects("bucket-00000", "has 0 bytes instead of"):
        prepare(WHOLE)


def test_a_disk_that_is_too_small(prepare, monkeypatch):
    """It must hold the images once, and one bucket; what is there already counts."""
    usage = collections.namedtuple("usage", "free")
    monkeypatch.setattr(tar_dataset.shutil, "disk_usage", lambda _: usage(len(WHOLE)))

    with rejects(str(unfinished(prepare)), r"GB free, and .* GB are needed"):
        prepare(WHOLE, shards=2)

    monkeypatch.setattr(tar_dataset.shutil, "disk_usage", lambda _: usage(2 * len(WHOLE)))
    assert prepare(WHOLE, shards=2)


def test_a_disk_that_fills_up_while_shards_are_written(prepare, monkeypatch):
    """ArrayRecord raises RuntimeError; it becomes an error of files, and the same command goes on."""
    make = array_record_module.ArrayRecordWriter

    class Full:
        def __init__(self, path, options):
            self.writer = make(path, options)
            self.write = self.writer.write

        def close(self):
            self.writer.close()
            raise RuntimeError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(array_record_module, "ArrayRecordWriter", Full)
        with pytest.raises(OSError, match=r"cannot be written .No space left on device"):
            prepare(WHOLE)

    folder, _ = prepare(WHOLE)

    assert not tar_dataset.check("mine", str(folder.parents[1]))


def test_memory_is_bounded(prepare, monkeypatch):
    """One image is checked at a time where the limit is below the size of two."""
    at_once = []
    most = []

    def check(found, options, do=tar_reading._check):
        at_once.append(found)
        most.append(len(at_once))
        checked = do(found, options)
        at_once.remove(found)
        return checked

    monkeypatch.setattr(tar_reading, "available_cores", lambda: 4)
    monkeypatch.setattr(tar_reading, "_check", check)
    monkeypatch.setattr(tar_reading, "_MEMORY_BYTES", 20_000)
    prepare(WHOLE)

    assert max(most) == 1

    monkeypatch.setattr(tar_reading, "MAX_MEMBER_BYTES", 100)
    with rejects("0 classes"):
        prepare(WHOLE, "other")


def flip(path, place):
    stored = bytearray(path.read_bytes())
    stored[place] ^= 1
    path.write_bytes(stored)


def test_a_check_finds_what_changed(prepare):
    folder, _ = prepare(WHOLE, shards=2, holdout_per_class=1)
    shard = folder / "mine-train.array_record-00001-of-00002"
    whole = {path: path.read_bytes() for path in (shard, *folder.rglob("manifest/*"))}
    rows = {row["id"]: row for row in manifest(folder)}

    def problems():
        found = tar_dataset.check("mine", str(folder.parents[1]))
        for path, stored in whole.items():
            path.write_bytes(stored)
        return found

    flip(shard, whole[shard].index(b"JFIF") + 400)
    (problem,) = problems()
    name = problem.split()[1]

    assert name in rows
    assert str(shard) in problem

    shard.write_bytes(whole[shard][:-70_000])
    assert problems()

    shard.unlink()
    assert problems()

    shutil.copy(folder / "mine-train.array_record-00000-of-00002", shard)
    assert len(problems()) > 1

    (folder / "manifest/00001-of-00002.parquet").unlink()
    assert problems()
    assert problems() == []


def test_the_verb(tmp_path):
    (tmp_path / "whole.tar").write_bytes(WHOLE)
    (tmp_path / "classes.txt").write_text("\n".join(ORDER))
    words = [
        "prepare",
        f"tar:{tmp_path}/*.tar",
        "--name=mine",
        f"--data_dir={tmp_path}/data",
        "--holdout_per_class=1",
    ]
    outcome = run([*words, f"--classes={tmp_path}/classes.txt"])

    assert (outcome.code, outcome.out) == (
        0,
        f"{tmp_path}/data/mine/1.0.0: 17 train, 3 validation, 5 classes\n",
    )

    check = ["prepare", "mine", f"--data_dir={tmp_path}/data", "--check"]
    assert run(check).code == 0

    shard = tmp_path / "data/mine/1.0.0/mine-train.array_record-00000-of-00001"
    flip(shard, shard.read_bytes().index(b"JFIF") + 400)

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
    outcome = run(["prepare", *words, *([] if "folder:b" in words else [f"--data_dir={tmp_path}"])])

    assert (outcome.code, rule in outcome.err) == (2, True), outcome.err
    assert not list(tmp_path.iterdir())
