"""Parquet files that are damaged, hostile or of another layout.

They give the same records, or one line that names the file.
"""

import json
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.packed_files import IMAGE, image, write_parquet
from tests.rejections import rejects
from vit_jax.data.decoding.images import UnreadableImage
from vit_jax.data.kinds import parquet, parquet_layout
from vit_jax.data.kinds.listing import warn_once
from vit_jax.data.kinds.parquet_layout import LayoutError, measure_pages, read_layout
from vit_jax.data.sources import open_source

NAMES = ("cat", "dog", "emu")
IMAGES = pa.array([{"bytes": image(number), "path": f"{number}.png"} for number in range(4)], IMAGE)


@pytest.fixture(autouse=True)
def groups(monkeypatch):
    """No row group is in memory, and no warning was given before."""
    monkeypatch.setattr(
        parquet,
        "_GROUPS",
        parquet._Groups(parquet.CACHE_BYTES),
    )
    warn_once.cache_clear()


def to_array(values):
    return values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values)


def add_hugging_face_metadata(table, features):
    description = json.dumps({"info": {"features": features}})
    return table.replace_schema_metadata({"huggingface": description})


@pytest.fixture
def open_columns(tmp_path, make_config):
    """Return a function that writes columns, as lists or arrays, and opens them."""

    def write_and_open(column="", metadata=None, names=None, **columns):
        arrays = [to_array(values) for values in columns.values()]
        table = pa.Table.from_arrays(arrays, names=names or list(columns))
        if metadata is not None:
            table = add_hugging_face_metadata(table, metadata)

        pq.write_table(table, tmp_path / "a.parquet")
        return open_source(
            f"parquet:{tmp_path}/a.parquet{column}",
            "all",
            make_config(),
            0,
        )

    return write_and_open


# Labels.


@pytest.mark.parametrize(
    ("labels", "rule"),
    [
        (
            pa.array([0, 1, 2**64 - 1, 0], pa.uint64()),
            "row 2 has the label 18446744073709551615 in column 'label'",
        ),
        (pa.array([0, 1, 2**32 + 1, 0]), "row 2 has the label 4294967297"),
        (pa.array([0, 1, -(2**32), 0]), "row 2 has the label -4294967296"),
        (pa.array([0, 1, 2**20, 0]), "row 2 has the label 1048576.*0 to 1,048,575"),
        (pa.array([0, 1, -1, 0], pa.int8()), "row 2 has the label -1"),
        (pa.array(["a", "b", "", "a"]), "row 2 has a label of 0 bytes"),
        (
            pa.array(["a", "b", "a", "x" * 5000]),
            "row 3 has a label of 5,000 bytes in column 'label'.*#COLUMN",
        ),
        (pa.array(["a", None, "b", "a"]), "row 1 has no label in column 'label'"),
        (pa.array(["a", None, "b", "a"]).dictionary_encode(), "row 1 has no label"),
        (pa.array([0.0, 1.0, 1.5, 0.0]), r"no column of labels.*'label' \(double\)"),
        (pa.array([[0], [1], [0, 1], []]), r"no column of labels.*'label' \(list"),
        (pa.array([{"id": 0}] * 4), r"no column of labels.*'label' \(struct"),
        (pa.array([True, False] * 2), r"no column of labels.*'label' \(bool"),
        (pa.array([b"a", b"b"] * 2), r"no column of labels.*'label' \(binary"),
        (
            pa.DictionaryArray.from_arrays(pa.array([0, 1, 1, 0]), pa.array([7, -3])),
            "row 1 has the label -3",
        ),
    ],
)
def test_labels_that_are_no_classes(open_columns, tmp_path, labels, rule):
    with rejects(f"{tmp_path}/a.parquet", rule):
        open_columns(image=IMAGES, label=labels)


@pytest.mark.parametrize(
    ("labels", "names"),
    [
        (pa.array(["b", "a", "c", "a"]), ("a", "b", "c")),
        (pa.array(["b", "a", "c", "a"], pa.large_string()), ("a", "b", "c")),
        (pa.array(["b", "a", "c", "a"]).dictionary_encode(), ("a", "b", "c")),
        (
            pa.DictionaryArray.from_arrays(
                pa.array([1, 0, 2, 0]),
                pa.array(["a", "b", "c", "x" * 9999]),
            ),
            ("a", "b", "c"),
        ),
        (pa.array([1, 0, 2, 0], pa.uint64()), ("0", "1", "2")),
        (pa.array([1, 0, 2, 0], pa.int8()).dictionary_encode(), ("0", "1", "2")),
    ],
)
def test_kinds_of_labels(open_columns, labels, names):
    source = open_columns(image=IMAGES, label=labels)

    assert source.labels.tolist() == [1, 0, 2, 0]
    assert source.class_names == names


def test_a_long_label_of_all_rows_is_not_read_to_its_end(open_columns, tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "_LABELS_AT_ONCE", 10)
    images = pa.array([{"bytes": image(0), "path": None}] * 300, IMAGE)

    with rejects(f"{tmp_path}/a.parquet", "row 0 has a label of 100,000 bytes"):
        open_columns(image=images, label=["x" * 10**5] * 300)


@pytest.mark.parametrize(
    ("names", "rule"),
    [
        (["cat", "dog", "cat"], "empty or repeated: 'cat'"),
        (["cat", "", "emu"], "empty or repeated: ''"),
        (["cat", 1, "emu"], "no list of texts"),
        ("cat", "no list of texts"),
    ],
)
def test_names_of_classes_in_the_metadata(open_columns, tmp_path, names, rule):
    with rejects(f"{tmp_path}/a.parquet", rule):
        open_columns(
            image=IMAGES,
            label=[0, 1, 2, 0],
            metadata={"label": {"_type": "ClassLabel", "names": names}},
        )


# Columns.


def test_different_long_labels_are_not_read_to_their_end(open_columns, tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "MAX_LABEL_BYTES", 10**6)
    labels = [str(number) * 500_000 for number in range(4)]

    with rejects(
        f"{tmp_path}/a.parquet",
        "column 'label' cannot be read .its pages hold more than 1 MiB",
    ):
        open_columns(image=IMAGES, label=labels)


@pytest.mark.parametrize(
    ("names", "rule"),
    [
        (["image", "label", "label"], "2 columns have the name 'label'"),
        (["image", "image", "label"], "2 columns have the name 'image'"),
        (["image", "label", "image.bytes"], "several columns have the path 'image.bytes'"),
        (["picture", "label", "other"], r"no column of images.*'picture' \(struct"),
    ],
)
def test_names_of_columns(open_columns, tmp_path, names, rule):
    values = {
        "image": IMAGES,
        "picture": IMAGES,
        "image.bytes": [b""] * 4,
        "label": [0, 1, 0, 1],
        "other": [0, 1, 0, 1],
    }
    columns = {f"{number}": values[name] for number, name in enumerate(names)}

    with rejects(f"{tmp_path}/a.parquet", rule):
        open_columns(names=names, **columns)


def test_other_columns_may_have_one_name(open_columns):
    source = open_columns(
        names=["image", "label", "note", "note"],
        first=IMAGES,
        second=[0, 1] * 2,
        third=["x"] * 4,
        fourth=["y"] * 4,
    )

    assert len(source) == 4


@pytest.mark.parametrize(
    ("images", "rule"),
    [
        (["0.png"] * 4, r"no column of images.*'image' \(string\)"),
        ([{"path": "0.png"}] * 4, r"no column of images.*'image' \(struct<path: string>\)"),
        ([{"bytes": "0"}] * 4, r"no column of images.*'image' \(struct<bytes: string>\)"),
        (
            pa.array([{"bytes": None, "path": "0.png"}] * 4, IMAGE),
            r"'image\.bytes' holds no bytes in all 4 rows",
        ),
        (pa.array([None] * 4, IMAGE), r"'image\.bytes' holds no bytes in all 4 rows.*csv:FILE"),
        (pa.array([None] * 4, pa.binary()), "'image' holds no bytes in all 4 rows"),
        (
            pa.array([[{"bytes": b"0", "path": ""}]] * 4, pa.list_(IMAGE)),
            r"no column of images.*'image' \(list",
        ),
    ],
)
def test_columns_without_images(open_columns, tmp_path, images, rule):
    with rejects(f"{tmp_path}/a.parquet", rule):
        open_columns(image=images, label=[0, 1] * 2)


def test_some_rows_without_bytes(open_columns, tmp_path, caplog):
    rows = [
        {"bytes": image(0), "path": None},
        {"bytes": None, "path": "x.png"},
        None,
        {"bytes": image(1), "path": ""},
    ]

    source = open_columns(image=pa.array(rows, IMAGE), label=[0, 1] * 2)

    (line,) = caplog.messages
    assert f"{tmp_path}/a.parquet: column 'image.bytes' holds no bytes in 2 of 4 rows" in line
    assert source[0].image == image(0)
    assert source[3].image == image(1)
    for row in (1, 2):
        rule = rf"Row {row} of column 'image\.bytes' of .*a\.parquet holds no bytes"
        with pytest.raises(UnreadableImage, match=rule):
            source[row]


# Sizes.


def test_an_image_that_rows_repeat_is_not_read_many_times(open_columns, monkeypatch):
    """The file holds the image once: 8 rows of 300 MB are a footer that states 300 MB."""
    images = pa.array([{"bytes": bytes(10**6), "path": None}] * 8, IMAGE)
    source = open_columns(image=images, label=[0, 1] * 4)

    assert sum(len(source[row].image) for row in range(8)) == 8 * 10**6
    assert parquet._GROUPS._bytes == 8 * 10**6

    monkeypatch.setattr(
        parquet,
        "_GROUPS",
        parquet._Groups(parquet.CACHE_BYTES),
    )
    monkeypatch.setattr(parquet, "MAX_GROUP_BYTES", 2**21)
    rule = r"Row group 0 of column 'image\.bytes' of .*a\.parquet.*more than"
    with pytest.raises(UnreadableImage, match=rule):
        source[0]

    assert parquet._GROUPS._bytes == 0


@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
@pytest.mark.parametrize("pages", ["1.0", "2.0"])
def test_the_layout_is_that_of_the_library(tmp_path, compression, pages):
    """Sizes and missing values of each chunk, and the measured size of its pages."""
    path = tmp_path / "a.parquet"
    table = pa.table(
        {
            "image": [bytes([number]) * 3000 for number in range(100)],
            "text": pa.array(["a", None] * 50),
            "more": pa.array([[1, 2]] * 100),
        }
    )
    pq.write_table(
        table,
        path,
        row_group_size=40,
        compression=compression,
        data_page_version=pages,
        data_page_size=5000,
        write_batch_size=3,
    )

    layout = read_layout(str(path))

    metadata = pq.read_metadata(path)
    assert len(layout.groups) == metadata.num_row_groups == 3
    for number, group in enumerate(layout.groups):
        expected = metadata.row_group(number)
        assert group.num_rows == expected.num_rows
        for column in map(expected.column, range(3)):
            chunk = group.chunks[column.path_in_schema]
            check_chunk(path, chunk, column)


def check_chunk(path, chunk, column):
    """Compare a chunk with the library's metadata of its column."""
    assert chunk.uncompressed == column.total_uncompressed_size
    assert chunk.compressed == column.total_compressed_size
    assert chunk.num_missing == column.statistics.null_count

    size = measure_pages(str(path), chunk, 2**30)
    assert size == column.total_uncompressed_size
    with pytest.raises(LayoutError, match="pages hold more than"):
        measure_pages(str(path), chunk, size - 1)


@pytest.fixture
def four_rows(tmp_path):
    """The path of a file with four images of two classes."""
    return write_parquet(tmp_path / "a.parquet", [0, 1, 0, 1])


def test_a_page_header_that_states_gigabytes(four_rows, tmp_path, make_config):
    """The footer states little; the library would allocate the stated size."""
    source = open_source(f"parquet:{four_rows}", "all", make_config(), 0)
    chunk = read_layout(str(four_rows)).groups[0].chunks["image.bytes"]
    content = bytearray(four_rows.read_bytes())
    header = parquet_layout._Reader(bytes(content[chunk.first_page :])).read_struct()

    stated_size = bytes([0x15, *encode_varint(2 * header[2])])
    huge_size = bytes([0x15, *encode_varint(2 * (2**31 - 1))])
    place = content.index(stated_size, chunk.first_page)
    content[place : place + len(stated_size)] = huge_size
    (tmp_path / "bomb").write_bytes(content)
    longer = chunk._replace(compressed=chunk.compressed + len(huge_size) - len(stated_size))

    with pytest.raises(LayoutError, match="its pages hold more than 1,024 MiB"):
        measure_pages(
            str(tmp_path / "bomb"),
            longer,
            parquet.MAX_GROUP_BYTES,
        )
    assert source[0].image == image(0)


def encode_varint(number):
    """Yield the bytes of a number of variable length."""
    while number >= 0x80:
        yield number & 0x7F | 0x80
        number >>= 7
    yield number


@pytest.mark.parametrize(
    "content",
    [
        b"\x4c",
        b"\x1c" * 50,
        b"\x19\xfc\xff\xff\xff\x0f",
        b"\x16" + b"\xff" * 12,
        b"\x1b\x00\x00",
    ],
)
def test_damaged_structs(content):
    with pytest.raises(LayoutError):
        parquet_layout._Reader(content).read_struct()


# Damages.


def test_a_cut_file_is_not_said_to_have_damaged_metadata(tmp_path, make_config):
    path = write_parquet(
        tmp_path / "a.parquet",
        [0, 1, 0, 1],
        names=["cat", "dog"],
    )
    whole = path.read_bytes()

    for size in (0, 3, 11, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])

        with rejects(str(path), "no complete parquet file .*cut off") as caught:
            open_source(f"parquet:{path}", "all", make_config(), 0)

        assert "metadata" not in str(caught.value)


def damage_page_header(path, column):
    """Overwrite the first page header of a column."""
    place = read_layout(str(path)).groups[0].chunks[column].first_page
    content = path.read_bytes()
    path.write_bytes(content[:place] + b"\xff" * 8 + content[place + 8 :])


def test_a_damaged_page_header_of_labels_names_file_and_column(four_rows, make_config):
    damage_page_header(four_rows, "label")

    with rejects(str(four_rows), "column 'label' cannot be read .*header"):
        open_source(f"parquet:{four_rows}", "all", make_config(), 0)


DAMAGED_FILES = {
    "checksums": ("numbers", {"write_page_checksum": True}),
    "texts": ("texts", {"write_page_checksum": True}),
    "plain": ("numbers", {}),
    "uncompressed": ("texts", {"use_dictionary": False, "compression": "none"}),
}


def test_a_damaged_page_header_of_images_names_file_and_column(four_rows, make_config):
    """No row group is in memory when the image is read."""
    source = open_source(f"parquet:{four_rows}", "all", make_config(), 0)
    damage_page_header(four_rows, "image.bytes")
    parquet._GROUPS = parquet._Groups(parquet.CACHE_BYTES)

    rule = r"'image\.bytes' of .*a\.parquet cannot be read .*header"
    with pytest.raises(UnreadableImage, match=rule):
        source[0]


def read_or_fail(path, make_config):
    """Return names, labels and images, or None and the message of an error."""
    try:
        return read_source(path, make_config), ""
    except ValueError as error:
        return None, str(error)


@pytest.mark.parametrize("name", DAMAGED_FILES)
def test_damaged_files(tmp_path, make_config, name):
    """Damaged files give the same labels, or one line.

    If pages have checksums, changed images are unreadable, too. 4,800 such files were tried; here
    are 60.
    """
    kind, options = DAMAGED_FILES[name]
    labels = [number % 3 for number in range(20)]
    path = tmp_path / "a.parquet"
    if kind == "numbers":
        write_parquet(path, labels, names=NAMES)
    else:
        write_parquet(path, [NAMES[label] for label in labels])
    pq.write_table(pq.read_table(path), path, row_group_size=7, **options)
    whole = path.read_bytes()
    names, labels, images = read_source(path, make_config)

    for seed in range(15):
        path.write_bytes(damage(whole, random.Random(seed)))

        found, problem = read_or_fail(path, make_config)

        if found is None:
            assert str(path) in problem, seed
            assert len(problem.splitlines()) == 1, seed
            continue
        found_names, found_labels, found_images = found
        assert found_names == names, seed
        assert found_labels == labels, seed
        if "write_page_checksum" in options:
            for one, other in zip(found_images, images, strict=True):
                assert one == other or not one, seed


def read_source(path, make_config):
    """Return class names, labels and images; None for an unreadable image."""
    parquet._GROUPS = parquet._Groups(parquet.CACHE_BYTES)
    source = open_source(f"parquet:{path}", "all", make_config(), 0)

    images = []
    for index in range(len(source)):
        try:
            images.append(source[index].image)
        except UnreadableImage:
            images.append(None)
    return source.class_names, source.labels.tolist(), images


def damage(whole, random):
    """Return the content of a file after one random damage."""
    kind = random.choice(["bit", "bytes", "cut", "twice", "insert", "footer", "footer", "zero"])
    place = random.randrange(len(whole))
    content = bytearray(whole)

    if kind == "footer":
        footer_bytes = int.from_bytes(whole[-8:-4], "little")
        content[-1 - random.randrange(footer_bytes + 8)] ^= 1 << random.randrange(8)
    elif kind == "bit":
        content[place] ^= 1 << random.randrange(8)
    elif kind == "bytes":
        content[place : place + 8] = random.randbytes(8)
    elif kind == "cut":
        del content[place:]
    elif kind == "twice":
        content[place:place] = content[max(0, place - 50) : place]
    elif kind == "insert":
        content[place:place] = b"\n"
    else:
        content[place : place + 16] = bytes(16)

    return bytes(content)


def test_copies_of_class_names_that_differ(tmp_path, make_config):
    """A footer has no checksum, but pyarrow stores the metadata twice."""
    path = write_parquet(
        tmp_path / "a.parquet",
        [0, 1, 0, 1],
        names=["cat", "dog"],
    )
    content = path.read_bytes()

    assert content.count(b'"dog"') == 1

    path.write_bytes(content.replace(b'"dog"', b'"dig"'))
    with rejects(str(path), "schema cannot be read .the two copies"):
        open_source(f"parquet:{path}", "all", make_config(), 0)


def test_labels_are_counted(four_rows, tmp_path):
    labels = np.zeros(3, np.int32)

    with pytest.raises(ValueError, match="3 labels are of 4 rows"):
        parquet.ParquetSource(
            [str(four_rows)],
            "image.bytes",
            ("a", "b"),
            labels,
            str(tmp_path),
        )
