"""Parquet files that are damaged, hostile or of another layout.

They give the same records, or one line that names the file.
"""

import json
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.packed_files import IMAGE, image, make_row, write_parquet
from tests.rejections import rejects
from vit_jax.data.decoding.images import UnreadableImage
from vit_jax.data.kinds import parquet, parquet_layout
from vit_jax.data.kinds.listing import warn_once
from vit_jax.data.kinds.parquet_layout import LayoutError, measure_pages, read_layout

NAMES = ("cat", "dog", "emu")
IMAGES = pa.array([make_row(image(level), f"{level}.png") for level in range(4)], IMAGE)
ALTERNATING = [0, 1] * 2


def forget_groups():
    """Remove all row groups from memory."""
    parquet._GROUPS = parquet._Groups(parquet.CACHE_BYTES)


@pytest.fixture(autouse=True)
def groups(monkeypatch):
    """No row group is in memory, and no warning was given before."""
    monkeypatch.setattr(parquet, "_GROUPS", None)
    forget_groups()
    warn_once.cache_clear()


def to_array(values):
    if isinstance(values, pa.Array):
        return values
    return pa.array(values)


def add_hugging_face_metadata(table, features):
    description = json.dumps({"info": {"features": features}})
    return table.replace_schema_metadata({"huggingface": description})


@pytest.fixture
def open_columns(tmp_path, open_data):
    """Return a function that writes columns, as lists or arrays, and opens them."""

    def write_and_open(column="", metadata=None, names=None, **columns):
        path = tmp_path / "a.parquet"
        arrays = [to_array(values) for values in columns.values()]
        table = pa.Table.from_arrays(arrays, names=names or list(columns))
        if metadata is not None:
            table = add_hugging_face_metadata(table, metadata)

        pq.write_table(table, path)
        return open_data(f"parquet:{path}{column}")

    return write_and_open


# Labels.


def make_dictionary(indices, values):
    """Return labels that are stored as indices of values."""
    return pa.DictionaryArray.from_arrays(
        pa.array(indices),
        pa.array(values),
    )


def replace_third(label):
    """Return four labels, of which the third is this one."""
    return [0, 1, label, 0]


WITHOUT_SECOND = ["a", None, "b", "a"]


@pytest.mark.parametrize(
    ("labels", "rule"),
    [
        (
            pa.array(replace_third(2**64 - 1), pa.uint64()),
            "row 2 has the label 18446744073709551615 in column 'label'",
        ),
        (replace_third(2**32 + 1), "row 2 has the label 4294967297"),
        (replace_third(-(2**32)), "row 2 has the label -4294967296"),
        (replace_third(2**20), "row 2 has the label 1048576.*0 to 1,048,575"),
        (
            pa.array(replace_third(-1), pa.int8()),
            "row 2 has the label -1",
        ),
        (["a", "b", "", "a"], "row 2 has a label of 0 bytes"),
        (
            ["a", "b", "a", "x" * 5000],
            "row 3 has a label of 5,000 bytes in column 'label'.*#COLUMN",
        ),
        (WITHOUT_SECOND, "row 1 has no label in column 'label'"),
        (
            pa.array(WITHOUT_SECOND).dictionary_encode(),
            "row 1 has no label",
        ),
        (
            make_dictionary(ALTERNATING, [7, -3]),
            "row 1 has the label -3",
        ),
    ],
)
def test_labels_that_are_no_classes(open_columns, tmp_path, labels, rule):
    with rejects(f"{tmp_path}/a.parquet", rule):
        open_columns(image=IMAGES, label=labels)


@pytest.mark.parametrize(
    ("labels", "kind"),
    [
        ([0.0, 1.0, 1.5, 0.0], "double"),
        ([[0], [1], [0, 1], []], "list"),
        ([{"id": 0}] * 4, "struct"),
        ([True, False] * 2, "bool"),
        ([b"a", b"b"] * 2, "binary"),
    ],
)
def test_types_that_are_no_labels(open_columns, tmp_path, labels, kind):
    with rejects(f"{tmp_path}/a.parquet", rf"no column of labels.*'label' \({kind}"):
        open_columns(image=IMAGES, label=labels)


TEXTS = ["b", "a", "c", "a"]
NUMBERS = [1, 0, 2, 0]
KINDS_OF_LABELS = {
    "texts": pa.array(TEXTS),
    "large texts": pa.array(TEXTS, pa.large_string()),
    "texts in a dictionary": pa.array(TEXTS).dictionary_encode(),
    "texts of a larger dictionary": make_dictionary(NUMBERS, ["a", "b", "c", "x" * 9999]),
    "numbers": pa.array(NUMBERS, pa.uint64()),
    "numbers in a dictionary": pa.array(NUMBERS, pa.int8()).dictionary_encode(),
}


@pytest.mark.parametrize("kind", KINDS_OF_LABELS)
def test_kinds_of_labels(open_columns, kind):
    source = open_columns(image=IMAGES, label=KINDS_OF_LABELS[kind])

    names = ("a", "b", "c")
    if kind.startswith("numbers"):
        names = ("0", "1", "2")

    assert source.labels.tolist() == NUMBERS
    assert source.class_names == names


def test_a_long_label_of_all_rows_is_not_read_to_its_end(
    open_columns,
    tmp_path,
    monkeypatch,
):
    monkeypatch.setattr(parquet, "_LABELS_AT_ONCE", 10)
    rows = [make_row(image(0))] * 300
    images = pa.array(rows, IMAGE)
    labels = ["x" * 10**5] * 300

    with rejects(f"{tmp_path}/a.parquet", "row 0 has a label of 100,000 bytes"):
        open_columns(image=images, label=labels)


@pytest.mark.parametrize(
    ("names", "rule"),
    [
        (["cat", "dog", "cat"], "empty or repeated: 'cat'"),
        (["cat", "", "emu"], "empty or repeated: ''"),
        (["cat", 1, "emu"], "no list of texts"),
        ("cat", "no list of texts"),
    ],
)
def test_names_of_classes_in_the_metadata(
    open_columns,
    tmp_path,
    names,
    rule,
):
    with rejects(f"{tmp_path}/a.parquet", rule):
        open_columns(
            image=IMAGES,
            label=[0, 1, 2, 0],
            metadata={"label": {"_type": "ClassLabel", "names": names}},
        )


# Columns.


def test_different_long_labels_are_not_read_to_their_end(
    open_columns,
    tmp_path,
    monkeypatch,
):
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
        (["picture", "photo", "label"], r"no column of images.*'picture' \(struct"),
    ],
)
def test_names_of_columns(open_columns, tmp_path, names, rule):
    values = {
        "image": IMAGES,
        "picture": IMAGES,
        "photo": IMAGES,
        "image.bytes": [b""] * 4,
        "label": ALTERNATING,
    }
    columns = {}
    for number, name in enumerate(names):
        columns[f"{number}"] = values[name]

    with rejects(f"{tmp_path}/a.parquet", rule):
        open_columns(names=names, **columns)


def test_the_only_column_of_images_may_have_another_name(open_columns):
    source = open_columns(
        picture=IMAGES,
        other=[0, 1, 0, 1],
        label=[0, 1, 0, 1],
    )

    assert source.image_of(3) == image(3)


def test_other_columns_may_have_one_name(open_columns):
    source = open_columns(
        names=["image", "label", "note", "note"],
        first=IMAGES,
        second=ALTERNATING,
        third=["x"] * 4,
        fourth=["y"] * 4,
    )

    assert len(source) == 4


@pytest.mark.parametrize(
    ("image", "kind", "rule"),
    [
        ("0.png", None, r"no column of images.*'image' \(string\)"),
        ({"path": "0.png"}, None, r"no column of images.*'image' \(struct<path: string>\)"),
        ({"bytes": "0"}, None, r"no column of images.*'image' \(struct<bytes: string>\)"),
        (make_row(None, "0.png"), IMAGE, r"'image\.bytes' holds no bytes in all 4 rows"),
        (None, IMAGE, r"'image\.bytes' holds no bytes in all 4 rows.*csv:FILE"),
        (None, pa.binary(), "'image' holds no bytes in all 4 rows"),
        ([make_row(b"0", "")], pa.list_(IMAGE), r"no column of images.*'image' \(list"),
    ],
)
def test_columns_without_images(open_columns, tmp_path, image, kind, rule):
    images = pa.array([image] * 4, kind)

    with rejects(f"{tmp_path}/a.parquet", rule):
        open_columns(image=images, label=ALTERNATING)


def test_some_rows_without_bytes(open_columns, tmp_path, caplog):
    rows = [
        make_row(image(0)),
        make_row(None, "x.png"),
        None,
        make_row(image(1), ""),
    ]
    images = pa.array(rows, IMAGE)

    source = open_columns(image=images, label=ALTERNATING)

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
    megabyte = bytes(10**6)
    rows = [make_row(megabyte)] * 8
    images = pa.array(rows, IMAGE)
    source = open_columns(image=images, label=[0, 1] * 4)

    for row in range(8):
        assert source[row].image == megabyte
    assert parquet._GROUPS._bytes == 8 * 10**6

    forget_groups()
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
    images = [bytes([number]) * 3000 for number in range(100)]
    table = pa.table(
        {
            "image": images,
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
        for place in range(3):
            column = expected.column(place)
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
    return write_parquet(tmp_path / "a.parquet", ALTERNATING)


def read_chunk(path, column):
    """Return the description of a column in the first row group of a file."""
    layout = read_layout(str(path))
    return layout.groups[0].chunks[column]


def test_a_page_header_that_states_gigabytes(four_rows, tmp_path, open_data):
    """The footer states little; the library would allocate the stated size."""
    source = open_data(f"parquet:{four_rows}")
    chunk = read_chunk(four_rows, "image.bytes")
    content = four_rows.read_bytes()
    before = content[: chunk.first_page]
    pages = content[chunk.first_page :]
    header = parquet_layout._Reader(pages).read_struct()

    stated_size = encode_size(header[2])
    huge_size = encode_size(2**31 - 1)
    num_added = len(huge_size) - len(stated_size)
    changed = pages.replace(stated_size, huge_size, 1)
    bomb = tmp_path / "bomb"
    bomb.write_bytes(before + changed)
    longer = chunk._replace(compressed=chunk.compressed + num_added)

    with pytest.raises(LayoutError, match="its pages hold more than 1,024 MiB"):
        measure_pages(
            str(bomb),
            longer,
            parquet.MAX_GROUP_BYTES,
        )
    assert source[0].image == image(0)


def encode_size(size):
    """Return a field of 32 bits of a page header, of variable length."""
    number = 2 * size
    content = [0x15]
    while number >= 0x80:
        content.append(number & 0x7F | 0x80)
        number >>= 7
    content.append(number)
    return bytes(content)


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


def test_a_cut_file_is_not_said_to_have_damaged_metadata(tmp_path, open_data):
    path = write_parquet(
        tmp_path / "a.parquet",
        ALTERNATING,
        names=["cat", "dog"],
    )
    whole = path.read_bytes()
    sizes = [0, 3, 11, len(whole) // 2, len(whole) - 1]

    for size in sizes:
        path.write_bytes(whole[:size])

        with rejects(str(path), "no complete parquet file .*cut off") as caught:
            open_data(f"parquet:{path}")

        assert "metadata" not in str(caught.value)


def damage_page_header(path, column):
    """Overwrite the first page header of a column."""
    place = read_chunk(path, column).first_page
    content = bytearray(path.read_bytes())
    content[place : place + 8] = b"\xff" * 8
    path.write_bytes(content)


def test_a_damaged_page_header_of_labels_names_file_and_column(four_rows, open_data):
    damage_page_header(four_rows, "label")

    with rejects(str(four_rows), "column 'label' cannot be read .*header"):
        open_data(f"parquet:{four_rows}")


def test_a_damaged_page_header_of_images_names_file_and_column(four_rows, open_data):
    """No row group is in memory when the image is read."""
    source = open_data(f"parquet:{four_rows}")
    damage_page_header(four_rows, "image.bytes")
    forget_groups()

    rule = r"'image\.bytes' of .*a\.parquet cannot be read .*header"
    with pytest.raises(UnreadableImage, match=rule):
        source[0]


def read_or_fail(path, open_data):
    """Return names, labels and images, or None and the message of an error."""
    try:
        return read_source(path, open_data), ""
    except ValueError as error:
        return None, str(error)


@pytest.mark.parametrize(
    ("has_names", "options"),
    [
        (True, {"write_page_checksum": True}),
        (False, {"write_page_checksum": True}),
        (True, {}),
        (False, {"use_dictionary": False, "compression": "none"}),
    ],
    ids=["checksums", "texts", "plain", "uncompressed"],
)
def test_damaged_files(tmp_path, open_data, has_names, options):
    """Damaged files give the same labels, or one line.

    If pages have checksums, changed images are unreadable, too. 4,800 such files were tried; here
    are 60.
    """
    labels = [number % 3 for number in range(20)]
    path = tmp_path / "a.parquet"
    if has_names:
        write_parquet(path, labels, names=NAMES)
    else:
        texts = [NAMES[label] for label in labels]
        write_parquet(path, texts)
    table = pq.read_table(path)
    pq.write_table(table, path, row_group_size=7, **options)
    whole = path.read_bytes()
    names, labels, images = read_source(path, open_data)

    for seed in range(15):
        damaged = damage(whole, random.Random(seed))
        path.write_bytes(damaged)

        found, problem = read_or_fail(path, open_data)

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


def read_source(path, open_data):
    """Return class names, labels and images; None for an unreadable image."""
    forget_groups()
    source = open_data(f"parquet:{path}")

    images = []
    for index in range(len(source)):
        try:
            images.append(source[index].image)
        except UnreadableImage:
            images.append(None)
    return source.class_names, source.labels.tolist(), images


KINDS_OF_DAMAGE = (
    "bit",
    "bytes",
    "cut",
    "twice",
    "insert",
    "footer",
    "footer",
    "zero",
)


def damage(whole, random):
    """Return the content of a file after one random damage."""
    kind = random.choice(KINDS_OF_DAMAGE)
    place = random.randrange(len(whole))
    content = bytearray(whole)

    if kind == "footer":
        footer_bytes = int.from_bytes(whole[-8:-4], "little")
        distance = random.randrange(footer_bytes + 8)
        content[-1 - distance] ^= 1 << random.randrange(8)
    elif kind == "bit":
        content[place] ^= 1 << random.randrange(8)
    elif kind == "bytes":
        content[place : place + 8] = random.randbytes(8)
    elif kind == "cut":
        del content[place:]
    elif kind == "twice":
        before = content[max(0, place - 50) : place]
        content[place:place] = before
    elif kind == "insert":
        content[place:place] = b"\n"
    else:
        content[place : place + 16] = bytes(16)

    return bytes(content)


def test_copies_of_class_names_that_differ(tmp_path, open_data):
    """A footer has no checksum, but pyarrow stores the metadata twice."""
    path = write_parquet(
        tmp_path / "a.parquet",
        ALTERNATING,
        names=["cat", "dog"],
    )
    content = path.read_bytes()
    changed = content.replace(b'"dog"', b'"dig"')
    path.write_bytes(changed)

    assert content.count(b'"dog"') == 1
    with rejects(str(path), "schema cannot be read .the two copies"):
        open_data(f"parquet:{path}")


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
