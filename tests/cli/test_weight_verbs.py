"""The verbs that use weights, from the words of the command to what they print, write and end with."""

import csv
import dataclasses
import errno
import io
import json
import os
import pathlib
import sys

import numpy as np
import pytest

from tests.data.deep_files import png, tiff
from tests.evals.samples import (
    DIRECT,
    NAMES,
    SEVEN,
    logits_of,
    sample_pixels,
    sample_weights,
    softmax,
    write_classes,
    write_pngs,
)
from tests.integration.commands import run as run_words
from tests.weights.small_networks import RESNET, SQUARE, TRAINING, arrays_of, assert_same
from vit_jax import cli, pytree
from vit_jax.api import from_weights
from vit_jax.checkpoint.store import CheckpointStore
from vit_jax.storage.files import WriteError
from vit_jax.weights import load_weights
from vit_jax.weights.formats import write_npz
from vit_jax.weights.saving import OWN, describe_weights, save_weights


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder in which the commands run."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def weights(here):
    """Weights in `w.npz`."""
    weights = sample_weights()
    save_weights(weights, here / "w.npz", "released")
    return weights


def run(*words):
    return run_words(words)


def fails(*words):
    """Runs a command that must fail as a user's mistake; returns its message."""
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    message = err.splitlines()[-1]  # after notes about the weights
    assert message.startswith("vit-jax: ")
    return message


def probabilities(record, names=NAMES):
    """Of the classes in their order."""
    by_name = {one["class"]: one["probability"] for one in record["predictions"]}
    return [by_name[name] for name in names]


def contents(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("predict", "CHECKPOINT, IMAGE…"),
        ("predict w.npz a.png --class_names=a.txt", "--class_names=a.txt"),
        ("predict w.npz a.png --class_names=a.png", "--class_names=a.png"),
        ("predict w.npz a.png --weights.num_heads=two", "--weights.num_heads=two: must be int"),
        ("predict w.npz a.png --weights.image_size=9", "must divide the image height of 9"),
        ("predict w.npz a.png --weights.raw", "w.npz has no Polyak average"),
        ("predict w.npz a.png --weights.raw", "omit --weights.raw."),
        ("predict w.npz a.png --raw", "omit --raw."),
        ("predict w.npz a.png --image-size=9", "must divide the image height of 9"),
        ("predict w.npz a.png --weights.compute_dtype=int8", "--weights.compute_dtype=int8: "),
        ("convert w.npz o.npz --compute_dtype=bfloat16", "--compute_dtype=bfloat16: has no effect"),
        ("evaluate nowhere --data=digits", "nowhere: "),
        ("export w.npz --to=npz", "w.npz exists: "),
        ("export w.npz --to=stablehlo --output=a.png", "a.png exists"),
        ("export w.npz --to=npz --output=out", "--output=out: "),
        ("export w.npz --to=npz --output=o.npz --names=timm", "--names=timm: "),
        ("export w.npz --to=npz --output=o.npz --images.resize=direct", "--images.resize=direct: "),
        ("export w.npz --to=npz --output=o.npz --resize=direct", "--resize=direct: "),
    ],
)
def test_wrong_words(weights, here, words, message):
    write_pngs(here, sample_pixels(1))
    (here / "000.png").rename(here / "a.png")
    before = contents(here)

    assert message in fails(*words.split(" "))
    assert contents(here) == before, "a mistake writes nothing"


# Predict.


def test_predict_names_on_standard_input(weights, here, monkeypatch):
    write_pngs(here, sample_pixels(3))
    odd = (here / "001.png").rename(here / os.fsdecode(b"caf\xe9 1.png"))
    lines = b"000.png\n\n" + os.fsencode(odd.name) + b"\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))
    code, out, _ = run("predict", "w.npz", "002.png", "-", "000.png", "--json")

    assert (code, [one["image"] for one in json.loads(out)]) == (
        0,
        ["002.png", "000.png", odd.name],
    )


def test_predict_reads_nothing_without_end(weights, here):
    """A pipe, a device and a file of 60 GB are images that cannot be read; the others are answered."""
    write_pngs(here, sample_pixels(1))
    os.mkfifo(here / "pipe.png")
    (here / "large.png").touch()
    os.truncate(here / "large.png", 60 * 10**9)
    code, out, _ = run("predict", "w.npz", "pipe.png", "/dev/zero", "large.png", "000.png")
    reasons = [line.partition("cannot be read: ")[2] for line in out.splitlines()]
    expected = ["The file is not read: it is not a regular file"] * 2

    assert (code, reasons[:2]) == (1, expected)
    assert reasons[2:] == ["The file is not read: it is larger than 1,073,741,824 bytes", ""]


def test_predict_a_table_of_three_classes_unless_told(weights, here):
    write_pngs(here, sample_pixels(2))
    row = softmax(logits_of(from_weights(weights).module, sample_pixels(2)))[1]
    order = np.argsort(-row)
    for top in (3, 1):
        code, out, _ = run(
            "predict", "w.npz", "000.png", "001.png", *([] if top == 3 else [f"--top={top}"])
        )
        line = "   ".join(f"{NAMES[k]} {row[k]:.1%}" for k in order[:top])
        assert (code, out.splitlines()[1]) == (0, f"001.png   {line}")


def test_predict_does_the_rest_when_some_cannot_be_read(weights, here):
    write_pngs(here / "photos", sample_pixels(3))
    (here / "photos/001.png").write_bytes(b"")
    code, out, err = run("predict", "w.npz", "photos", "--json", "--csv=table.csv")

    assert code == 1

    records = json.loads(out)
    assert records[1] == {"image": "photos/001.png", "error": "The file is empty"}
    assert ["predictions" in record for record in records] == [True, False, True]
    assert err == "vit-jax: 1 of 3 images cannot be read: photos/001.png\n"

    header, first, second, _ = csv.reader((here / "table.csv").read_text().splitlines())
    assert header == [
        "image",
        "error",
        *(f"{word}_{n}" for n in (1, 2, 3) for word in ("class", "probability")),
    ]

    expected = [
        cell
        for one in records[0]["predictions"]
        for cell in (one["class"], f"{one['probability']:.6f}")
    ]
    assert first == ["photos/000.png", "", *expected]
    assert second == ["photos/001.png", "The file is empty", *[""] * 6]
    assert run("predict", "w.npz", "photos", "--csv=-")[1] == (here / "table.csv").read_text()


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_predict_names_that_the_terminal_cannot_show(here, monkeypatch, encoding):
    """In the file's name or the class's, in bytes that are no text or in a script that the terminal lacks."""
    names = (os.fsdecode(b"caf\xe9"), "café", *NAMES[2:])
    save_weights(sample_weights(class_names=names), here / "w", OWN)
    pathlib.Path(write_pngs(here, sample_pixels(1))[0]).rename(here / os.fsdecode(b"\xe9.png"))
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, encoding, errors="strict"))
    cli.main(["predict", "w", ".", "--top=7"])
    text = output.getvalue()

    assert text.startswith((rb"\udce9.png   ", rb"./\udce9.png   "))
    assert rb"caf\udce9 " in text
    assert "café ".encode(encoding, "backslashreplace") in text

    cli.main(["predict", "w", ".", "--json", "--top=7"])
    records = json.loads(output.getvalue()[len(text) :])

    assert {one["class"] for one in records[0]["predictions"]} == set(names)


def test_names_from_files_have_no_power_over_the_terminal(here):
    """A class or a file may be called what sets the title of a window, clears the screen or forges a line."""
    hostile = "\x1b]0;owned\x07"
    folder = here / "im\x1b[2Jages"
    save_weights(sample_weights(class_names=(hostile, *NAMES[1:])), here / "w", OWN)
    folder.mkdir()
    write_pngs(folder, sample_pixels(1))
    (folder / "b\nvit-jax: all is well.png").write_bytes(b"")
    for name in (hostile, "cat\x1b[2J"):
        (folder / "classes" / name).mkdir(parents=True)
        (folder / "classes" / name / "a.png").write_bytes(b"")

    said = [
        run("predict", "w", folder.name, "--top=7"),
        run("predict", "nowhere\x1b[2J", folder.name),
    ]
    said.append(run("evaluate", "w", f"--data=folder:{folder.name}/classes", "--split=all"))
    text = "".join(out + err for _, out, err in said)

    assert "\x1b" not in text
    assert "\nvit-jax: all is well" not in text
    for shown in (
        r"\x1b]0;owned\x07 ",
        r"b\nvit-jax: all is well.png",
        r"nowhere\x1b[2J",
        r"know: cat\x1b[2J",
    ):
        assert shown in text

    records = json.loads(run("predict", "w", folder.name, "--top=7", "--json")[1])
    assert hostile in {one["class"] for one in records[0]["predictions"]}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_table_on_a_terminal_has_no_power_over_it(here, monkeypatch):
    """Control characters are escaped on a terminal; a pipe gets the names as they are."""
    save_weights(sample_weights(class_names=("c\x1b[2J", *NAMES[1:])), here / "w", OWN)
    pathlib.Path(write_pngs(here, sample_pixels(1))[0]).rename(here / "a\x1b]0;owned\x07\r.png")
    words = ["predict", "w", *map(str, pathlib.Path().glob("a*")), "--csv=-", "--top=7"]
    piped = run(*words)[1]

    assert '"a\x1b]0;owned\x07\r.png",' in piped

    monkeypatch.setattr(sys, "stdout", Terminal())
    cli.main(words)
    shown = sys.stdout.getvalue()

    assert not {"\x1b", "\x07", "\r"} & {*shown}
    assert r"a\x1b]0;owned\x07\r.png" in shown
    assert r"c\x1b[2J" in shown
    assert len(shown.splitlines()) == 2


def test_cells_that_a_spreadsheet_would_execute(here):
    """Names of classes and files get a quote in front; probabilities stay numbers."""
    save_weights(sample_weights(class_names=("=1+2", "-3", *NAMES[2:])), here / "w", OWN)
    pathlib.Path(write_pngs(here, sample_pixels(1))[0]).rename(here / "@SUM(A1).png")

    assert run("predict", "w", "@SUM(A1).png", "--csv=t.csv", "--top=7")[0] == 0

    (row,) = [*csv.reader((here / "t.csv").read_text().splitlines())][1:]
    assert row[0] == "'@SUM(A1).png"
    assert {"'=1+2", "-3", *NAMES[2:]} == {*row[2::2]}
    assert sum(map(float, row[3::2])) == pytest.approx(1, abs=1e-5)


def test_a_foreign_file_asks_how_images_are_prepared(here):
    write_npz(here / "foreign.npz", arrays_of(SQUARE, "released"), {})
    (here / "names.txt").write_text("ant\nbee\ncat\n")
    write_pngs(here, sample_pixels(2, (12, 12)))
    message = fails("predict", "foreign.npz", "000.png", "--weights.num_heads=2")

    assert "does not state how images are prepared: add --images.resize=direct" in message

    words = (
        "predict",
        "foreign.npz",
        "000.png",
        "--weights.num_heads=2",
        "--json",
        "--top=9",
        "--class_names=names.txt",
    )
    code, out, err = run(*words, "--images.resize=direct")

    assert code == 0
    assert "note: A square grid of 3x3 patches is assumed, of 12x12 images." in err

    model = from_weights(load_weights("foreign.npz", num_heads=2), resize="direct").module
    expected = softmax(logits_of(model, sample_pixels(2, (12, 12))))[0]

    assert probabilities(json.loads(out)[0], NAMES[:3]) == pytest.approx(expected, abs=1e-6)
    assert run(*words, "--images.resize=short_side", "--images.crop_fraction=0.5")[1] != out

    words = ("export", "foreign.npz", "--to=stablehlo", "--weights.num_heads=2", "--output=p")
    assert "add --images.resize=direct" in fails(*words)

    for orientation in ("applied", "ignored"):
        preparation = {
            "resize": "short_side",
            "crop_fraction": 0.875,
            "exif_orientation": orientation,
        }
        preparation |= {"interpolation": "bicubic"} if orientation == "applied" else {}
        given = (f"--{name}={value}" for name, value in preparation.items())

        assert run(*words, *given, "--overwrite")[0] == 0

        written = json.loads((here / "p.json").read_text())["preprocessing"]
        assert preparation.items() <= written.items()
        assert ("bicubic with antialiasing" in written["filter"]) == (
            "interpolation" in preparation
        )
        assert ("covers the input's size / crop_fraction, rounded down" in written["meaning"]) == (
            "interpolation" in preparation
        )


def test_values_of_more_than_8_bits(here):
    """The range of training is that of predict, unless another is given; without either a note counts the files."""
    values = sample_pixels(1)[0].astype(np.uint16) * 16 + 3  # of 12 bits
    (here / "deep.tif").write_bytes(tiff(values))
    (here / "stated.png").write_bytes(png(values, 12))
    (here / "float.tif").write_bytes(tiff(values.astype(np.float32), pages=2))
    files = ("deep.tif", "stated.png", "float.tif")
    save_weights(sample_weights(), here / "w.npz", "released")
    save_weights(
        sample_weights(preprocessing=DIRECT | {"value_range": [0.0, 4095.0]}),
        here / "deep.npz",
        "released",
    )
    pixels = np.rint(values * (255 / 4095)).astype(np.uint8)
    expected = pytest.approx(
        softmax(logits_of(from_weights(sample_weights()).module, [pixels]))[0], abs=1e-6
    )
    for weights, option in (("deep.npz", []), ("w.npz", ["--images.value_range=0,4095"])):
        code, out, err = run("predict", weights, *files, "--json", "--top=9", *option)
        assert (code, err) == (
            0,
            "note: 1 of 3 checked files have several pages: page 1 of 2 is used.\n",
        )
        assert all(probabilities(record, NAMES) == expected for record in json.loads(out))

    code, out, err = run("predict", "w.npz", *files, "--json", "--top=9")
    dark, stated, unread = json.loads(out)

    assert code == 1
    assert probabilities(stated, NAMES) == expected != probabilities(dark, NAMES)
    assert "--images.value_range=0,1" in unread["error"]
    assert "note: 1 of 3 checked files have 16 bits" in err
    assert "--images.value_range=0,4095 for 12-bit data" in err
    assert "--images.value_range=4095,0" in fails(
        "predict", "w.npz", "deep.tif", "--images.value_range=4095,0"
    )


def test_numbers_that_stand_for_names_are_told(here):
    """Weights of folders "5" to "9" without their names would say "2" of a seven."""
    save_weights(sample_weights(class_names=None), here / "w.npz", "released")
    write_pngs(here, sample_pixels(1))
    (here / "names.txt").write_text("\n".join(NAMES))
    note = "note: the weights do not name their classes: their numbers are used; --class_names=FILE gives names"
    for words in (
        ("predict", "w.npz", "000.png"),
        ("export", "w.npz", "--to=stablehlo", "--overwrite"),
    ):
        code, _, err = run(*words)
        assert (code, err) == (0, f"{note}, one a line.\n")
        assert run(*words, "--class_names=names.txt")[2] == ""

    weights = sample_weights()
    weights.parameters["head/linear/kernel"][:] = 0
    save_weights(weights, here / "zeros.npz", "released")

    assert "note: WARNING: the head is all zeros" in run("predict", "zeros.npz", "000.png")[2]

    write_classes(here / "images", np.arange(14) % 7, sample_pixels(14))
    code, _, err = run(
        "probe", "zeros.npz", "--data=folder:images", "--cache=none", "--method=least_squares"
    )

    assert code == 0
    assert "the head" not in err


def test_classes_of_imagenet_have_readable_names(here):
    """1,000 outputs without names: "tench" is printed, with a note."""
    arrays = arrays_of(dataclasses.replace(SQUARE, num_classes=1000), "released")
    arrays["head/bias"][:1] = 99
    write_npz(here / "w.npz", arrays, {})
    write_pngs(here, sample_pixels(1, (12, 12)))
    words = (
        "predict",
        "w.npz",
        "000.png",
        "--weights.num_heads=2",
        "--images.resize=direct",
        "--top=1",
    )
    code, out, err = run(*words)

    assert (code, out) == (0, "000.png   tench 100.0%\n")
    assert (
        "note: the weights do not name their classes: ImageNet's 1,000 names are used; --class_names="
        in err
    )


def write_run(folder):
    """A checkpoint with parameters and their Polyak average, as training leaves it; the head differs."""
    weights = sample_weights()
    model = from_weights(weights).module
    average = pytree.map_with_names(
        lambda name, leaf: -leaf if name.startswith("head/") else leaf, model
    )
    store = CheckpointStore(folder)
    store.save(
        5, {"model": model, "polyak": average}, metadata=describe_weights(weights), metrics={}
    )
    store.close()
    return model, average


def test_polyak_average_or_raw_parameters(here):
    model, average = write_run(here / "run")
    pixels = sample_pixels(2)
    write_pngs(here, pixels)
    for words, expected in (((), average), (("--weights.raw",), model)):
        (record,) = json.loads(run("predict", "run", "001.png", "--json", "--top=7", *words)[1])
        assert probabilities(record) == pytest.approx(
            softmax(logits_of(expected, pixels))[1], abs=1e-6
        )

        code, out, _ = run("export", "run", "--to=npz", "--output=out.npz", "--overwrite", *words)
        assert (code, ("Polyak average" if not words else "parameters") + " of step 5" in out) == (
            0,
            True,
        )

        leaves = {name: np.asarray(leaf) for name, leaf in pytree.named_leaves(expected).items()}
        assert_same(load_weights("out.npz").parameters, leaves)

    for inside in ("run/checkpoints", "run/checkpoints/5"):
        message = fails("evaluate", inside, "--data=digits")
        assert f"{inside} holds no vit_jax checkpoints" in message
        assert message.endswith(f": give the workdir, {here}/run.")


# Evaluate.


def figures(text):
    return dict(line.split(maxsplit=1) for line in text.splitlines())


def test_evaluate_prints_figures_and_writes_the_table(weights, here):
    pixels = sample_pixels(20)
    labels = softmax(logits_of(from_weights(weights).module, pixels)).argmax(axis=1)
    labels[:4] = (labels[:4] + 1) % 7
    for split in ("train", "test"):
        data = write_classes(here / "images" / split, labels, pixels)

    data = data.removesuffix("/test")
    code, out, err = run("evaluate", "w.npz", data, "--csv=table.csv", "--global_batch=6")

    assert (code, err) == (0, "")

    result = figures(out)
    assert result["weights"] == "w.npz (released)"
    assert (result["images"], result["accuracy"]) == ("20", "80.00%  (95 %: 58.40% to 91.93%)")

    rows = [line.split(",") for line in (here / "table.csv").read_text().splitlines()]
    assert [row[0] for row in rows] == ["class", *NAMES]
    assert sum(int(row[1]) for row in rows[1:]) == 20
    assert sum(int(row[2]) for row in rows[1:]) == 16

    code, out, _ = run("evaluate", "w.npz", data, "--split=train", "--csv=table.csv")
    assert (code, figures(out)["images"]) == (0, "20")


def test_evaluate_a_part_of_a_folder_without_splits(weights, here):
    data = write_classes(here / "images", [0] * 10 + [3] * 10 + [5] * 3, sample_pixels(23))
    words = ("--split=train", "--holdout_fraction=0.3", "--seed=1", "--classes=ant,dog")
    code, out, err = run("evaluate", "w.npz", data, *words)

    assert (code, err) == (0, "")
    assert figures(out)["data"] == f"train of {data.removeprefix('--data=')}, 14 of 23 images"


def test_evaluate_tells_unreadable_images_and_tables_that_cannot_be_written(
    weights, here, monkeypatch
):
    def full_disk(path, content):
        raise WriteError(errno.ENOSPC, "No space left on device", str(path))

    data = write_classes(here / "images", [0] * 4 + [1] * 4, sample_pixels(8))
    (here / "images/ant/002.png").write_bytes(b"")
    words = ("evaluate", "w.npz", data, "--split=train", "--seed=1")
    code, out, _ = run(*words)

    assert (code, figures(out)["images"]) == (0, "5, and 1 that cannot be read")

    monkeypatch.setattr("vit_jax.cli.weights.write_atomically", full_disk)
    code, out, err = run("evaluate", "w.npz", data, "--csv=table.csv")

    assert (code, figures(out)["images"]) == (
        2,
        "7, and 1 that cannot be read",
    )  # the figures are not lost
    assert "table.csv cannot be written" in err


# Export.


@pytest.mark.parametrize(
    ("a", "words", "written"),
    [
        (RESNET, ["--to=npz"], "source.npz"),
        (SEVEN, ["--to=safetensors"], "source.safetensors"),
        (
            SEVEN,
            ["--to=safetensors", "--names=huggingface", "--output=deep/h.safetensors"],
            "deep/h.safetensors",
        ),
        (SEVEN, ["--to=safetensors", "--output=folder"], "folder"),
    ],
)
def test_exported_weights_read_back_to_the_bit(here, a, words, written):
    weights = sample_weights(a, class_names=NAMES[: a.num_classes], training=TRAINING)
    save_weights(weights, here / "source", OWN)
    code, out, err = run("export", "source", *words)

    assert (code, err) == (0, "")
    assert written in out

    read = load_weights(here / written)
    assert (read.architecture, read.class_names) == (a, weights.class_names)
    assert (read.preprocessing, read.training) == (weights.preprocessing, TRAINING)
    assert_same(read.parameters, weights.parameters)
