"""`convert`: the format that a destination means, rejections, and a report of every parameter."""

import dataclasses

import pytest

from tests.columns import list_column
from tests.weights.reference import networks
from tests.weights.small_networks import (
    OURS,
    RESNET,
    SQUARE,
    TRAINING,
    VIT,
    arrays_of,
    assert_same,
    weights_of,
)
from vit_jax.checkpoint.reader import has_checkpoints
from vit_jax.weights import load_weights
from vit_jax.weights.formats import write_npz
from vit_jax.weights.load_report import ArrayStatus, list_arrays
from vit_jax.weights.saving import OWN, convert, save_weights


@pytest.fixture
def source(tmp_path):
    """A released file of a ViT."""
    path = tmp_path / "source.npz"
    write_npz(path, arrays_of(SQUARE, "released"), {})

    return str(path)


@pytest.mark.parametrize(
    ("a", "destination", "to", "expected"),
    [
        (VIT, "out.npz", None, "released"),
        (RESNET, "out.npz", None, "bit"),
        (VIT, "out", None, OWN),
        (VIT, "deep/er/out", OWN, OWN),
        (VIT, "out.safetensors", "timm", "timm"),
        (VIT, "out.safetensors", "huggingface", "huggingface"),
        (VIT, "out.v1/", "timm", "timm"),
    ],
)
def test_the_destination_decides(a, destination, to, expected, tmp_path):
    save_weights(
        weights_of(a, training=TRAINING),
        tmp_path / "source",
        OWN,
    )
    written = tmp_path / destination

    report = convert(
        str(tmp_path / "source"),
        f"{tmp_path}/{destination}",
        to=to,
    )
    read = load_weights(written)

    assert report.destination == f"{written} ({expected})"
    assert read.architecture == a
    assert read.training == TRAINING
    assert_same(read.parameters, networks.parameters(a))
    if expected == OWN:
        assert has_checkpoints(written)
    elif not written.is_file():
        assert (written / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("destination", "to", "words"),
    [
        (
            "out.safetensors",
            None,
            "does not determine the format. Give --to=timm or --to=huggingface",
        ),
        ("out.npz", "torch", "to='torch': must be one of released, bit, timm, huggingface"),
        ("out.npz", "vit_jax", "our own checkpoints are folders"),
        ("out", "released", "the format released is a file. Give one that ends in .npz"),
        ("out.npz", "timm", "a file of the format timm must end in .safetensors"),
        ("out.safetensors", "bit", "a file of the format bit must end in .npz"),
        ("new/out.npz", "bit", "bit cannot hold"),
        ("hf://owner/name", None, "name: must be a path on this machine. Give a local path"),
        ("gs://bucket/out.npz", None, "out.npz: must be a path on this machine"),
    ],
)
def test_destinations_that_make_no_sense(
    destination,
    to,
    words,
    source,
    tmp_path,
):
    if "://" not in destination:
        destination = str(tmp_path / destination)

    with pytest.raises(ValueError, match=words):
        convert(source, destination, to=to)

    files = []
    for path in tmp_path.rglob("*"):
        if path.is_file():
            files.append(path.name)

    assert files == ["source.npz"]


@pytest.mark.parametrize("taken", ["out.npz", "out.npz.classes.txt"])
def test_a_file_is_not_overwritten_without_the_option(
    source,
    taken,
    tmp_path,
):
    destination = tmp_path / "out.npz"
    (tmp_path / taken).write_text("precious")
    message = f"{taken} exists: choose another destination, or give --overwrite"

    with pytest.raises(ValueError, match=message):
        convert(source, str(destination))
    assert (tmp_path / taken).read_text() == "precious"

    convert(source, str(destination), overwrite=True)
    assert load_weights(destination).architecture == SQUARE


def test_a_file_is_converted_onto_itself(source):
    convert(source, source, overwrite=True)

    assert_same(
        load_weights(source).parameters,
        networks.parameters(SQUARE),
    )


def test_an_empty_folder_is_used_and_a_full_one_is_not(source, tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()

    convert(source, str(folder))
    with pytest.raises(ValueError, match="exists"):
        convert(source, str(folder))


@pytest.mark.parametrize("destination", [".", "..", "./"])
def test_into_the_current_folder(destination, source, tmp_path, monkeypatch):
    inside = tmp_path / "empty/deeper"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    folder = inside.parent if destination == ".." else inside
    expected = dataclasses.replace(
        SQUARE,
        num_classes=0,
        gelu="exact",
    )

    convert(
        source,
        destination,
        overwrite=True,
        without_head=True,
        gelu="exact",
    )
    names = set(list_column(folder.iterdir(), "name"))

    assert load_weights(destination).architecture == expected
    assert names - {"deeper"} == {"README.md", "checkpoints"}


@pytest.fixture
def report(source, tmp_path):
    """The report of a conversion to timm."""
    destination = str(tmp_path / "out.safetensors")
    return convert(
        source,
        destination,
        to="timm",
        class_names=["a", "b", "c"],
    )


def test_the_report_names_every_array_on_both_sides(report):
    read = set(list_column(report.read, "name"))
    written = set(list_column(report.written, "name"))

    assert read == set(arrays_of(SQUARE, "released"))
    assert written == set(arrays_of(SQUARE, "timm"))


def test_a_notebook_shows_a_line_for_each_status(report):
    assert repr(report) == report.text(is_complete=False)
    assert len(repr(report).splitlines()) < 20


def test_the_complete_report_has_a_line_for_each_array_and_notes(report):
    lines = report.text(is_complete=True).splitlines()
    (qkv,) = [line for line in lines if " blocks.1.attn.qkv.weight " in line]
    (network,) = [line for line in lines if line.startswith("ViT-custom/4: ")]

    assert qkv.split() == [
        "blocks.1.attn.qkv.weight",
        "encoder/blocks/1/attention/{query,key,value}/kernel",
        "48x16",
        "float32",
        "joined,",
        "transposed,",
        "unstacked",
    ]
    assert "3 classes" in network
    assert "gelu tanh" in network
    assert "- A square grid of 3x3 patches is assumed, of 12x12 images." in lines[-3:]
    assert any("readers of timm files compute with exact" in line for line in lines)


def sum_counts(lines):
    return sum(int(line.split()[0]) for line in lines if line.startswith("  "))


def test_the_short_report_counts_arrays_and_keeps_the_notes(report, tmp_path):
    complete = report.text(is_complete=True).splitlines()
    lines = report.text(is_complete=False).splitlines()
    middle = lines.index(f"Written to {tmp_path}/out.safetensors (timm):")

    assert len(lines) < 20
    assert sum_counts(lines[:middle]) == len(arrays_of(SQUARE, "released"))
    assert sum_counts(lines[middle:]) == len(arrays_of(SQUARE, "timm"))
    assert lines[-3:] == complete[-3:], "notes stay"


def test_the_table_has_a_line_for_each_array_and_joins_names_that_differ_in_one_place():
    layers = tuple(f"b/{layer}/x" for layer in range(12))
    statuses = [
        ArrayStatus(
            "a.weight",
            ("a/query/x", "a/key/x"),
            (2, 3),
            "float32",
            "joined",
        ),
        ArrayStatus("b", layers, (12, 1), "float32", "stacked"),
        ArrayStatus("opt/x", (), (), "float32", "ignored"),
    ]

    assert list_arrays(statuses).splitlines() == [
        "  array     our parameter    shape   dtype    status",
        "  a.weight  a/{query,key}/x  2x3     float32  joined",
        "  b         b/{0..11}/x      12x1    float32  stacked",
        "  opt/x     -                scalar  float32  ignored",
    ]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("every", "learned_1d, position_layers every"),
        ("axial_relative", "relative, block axial"),
    ],
)
def test_the_summary_states_unusual_positions_and_blocks(
    name,
    words,
    tmp_path,
):
    save_weights(weights_of(OURS[name]), tmp_path / "source", OWN)

    report = convert(str(tmp_path / "source"), str(tmp_path / "out"))

    assert words in report.network
