"""`convert`: which format a destination means, what is in the way, and a report of every parameter."""

import dataclasses

import pytest

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
    save_weights(weights_of(a, training=TRAINING), tmp_path / "source", OWN)
    report = convert(str(tmp_path / "source"), f"{tmp_path}/{destination}", to=to)

    assert report.destination == f"{tmp_path / destination} ({expected})"

    read = load_weights(tmp_path / destination)
    assert (read.architecture, read.training) == (a, TRAINING)
    assert_same(read.parameters, networks.parameters(a))

    if expected == OWN:
        assert has_checkpoints(tmp_path / destination)
    elif not (tmp_path / destination).is_file():
        assert (tmp_path / destination / "model.safetensors").is_file()


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
def test_destinations_that_make_no_sense(destination, to, words, source, tmp_path):
    with pytest.raises(ValueError, match=words):
        convert(source, destination if "://" in destination else str(tmp_path / destination), to=to)

    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["source.npz"]


@pytest.mark.parametrize("taken", ["out.npz", "out.npz.classes.txt"])
def test_what_exists_is_not_written_over_unless_asked(source, taken, tmp_path):
    destination = tmp_path / "out.npz"
    (tmp_path / taken).write_text("precious")

    with pytest.raises(
        ValueError, match=f"{taken} exists: choose another destination, or give --overwrite"
    ):
        convert(source, str(destination))

    assert (tmp_path / taken).read_text() == "precious"

    convert(source, str(destination), overwrite=True)
    assert load_weights(destination).architecture == SQUARE

    convert(source, source, overwrite=True)  # onto itself
    assert_same(load_weights(source).parameters, networks.parameters(SQUARE))

    (tmp_path / "empty").mkdir()
    convert(source, str(tmp_path / "empty"))

    with pytest.raises(ValueError, match="exists"):
        convert(source, str(tmp_path / "empty"))


@pytest.mark.parametrize("destination", [".", "..", "./"])
def test_into_the_folder_one_is_in(destination, source, tmp_path, monkeypatch):
    inside = tmp_path / "empty/deeper"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    convert(source, destination, overwrite=True, without_head=True, gelu="exact")
    folder = inside if destination != ".." else inside.parent
    expected = dataclasses.replace(SQUARE, num_classes=0, gelu="exact")

    assert load_weights(destination).architecture == expected
    assert {path.name for path in folder.iterdir()} - {"deeper"} == {"README.md", "checkpoints"}


def test_the_report_names_or_counts_every_array_on_both_sides(source, tmp_path):
    report = convert(
        source,
        str(tmp_path / "out.safetensors"),
        to="timm",
        class_names=["a", "b", "c"],
    )
    expected = set(arrays_of(SQUARE, "released"))

    assert {status.name for status in report.read} == expected
    assert {status.name for status in report.written} == set(arrays_of(SQUARE, "timm"))

    lines = report.text(is_complete=True).splitlines()
    (qkv,) = [line.split() for line in lines if " blocks.1.attn.qkv.weight " in line]
    ours = "encoder/blocks/1/attention/{query,key,value}/kernel"

    assert qkv == [
        "blocks.1.attn.qkv.weight",
        ours,
        "48x16",
        "float32",
        "joined,",
        "transposed,",
        "unstacked",
    ]
    assert any(
        line.startswith("ViT-custom/4: ") and "3 classes" in line and "gelu tanh" in line
        for line in lines
    )
    assert "- A square grid of 3x3 patches is assumed, of 12x12 images." in lines[-3:]
    assert any("readers of timm files compute with exact" in line for line in lines)

    short = report.text(is_complete=False).splitlines()  # numbers of arrays
    assert len(short) < 20

    second = short.index(f"Written to {tmp_path}/out.safetensors (timm):")
    for section, format_name in ((short[:second], "released"), (short[second:], "timm")):
        counts = [int(line.split()[0]) for line in section if line.startswith("  ")]
        assert sum(counts) == len(arrays_of(SQUARE, format_name))

    assert short[-3:] == lines[-3:], "notes stay"


def test_the_table_has_a_line_for_each_array_and_joins_names_that_differ_in_one_place():
    statuses = [
        ArrayStatus("a.weight", ("a/query/x", "a/key/x"), (2, 3), "float32", "joined"),
        ArrayStatus(
            "b",
            tuple(f"b/{layer}/x" for layer in range(12)),
            (12, 1),
            "float32",
            "stacked",
        ),
        ArrayStatus("opt/x", (), (), "float32", "ignored"),
    ]
    expected = [
        "  array     our parameter    shape   dtype    status",
        "  a.weight  a/{query,key}/x  2x3     float32  joined",
        "  b         b/{0..11}/x      12x1    float32  stacked",
        "  opt/x     -                scalar  float32  ignored",
    ]

    assert list_arrays(statuses).splitlines() == expected


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("every", "learned_1d, position_layers every"),
        ("axial_relative", "relative, block axial"),
    ],
)
def test_the_summary_states_unusual_positions_and_blocks(name, words, tmp_path):
    save_weights(weights_of(OURS[name]), tmp_path / "source", OWN)
    assert words in convert(str(tmp_path / "source"), str(tmp_path / "out")).network
