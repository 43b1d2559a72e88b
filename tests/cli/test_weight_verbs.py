"""The verbs that use weights, from the words of the command to its output, files and exit code."""

import contextlib
import csv
import dataclasses
import errno
import io
import json
import os
import pathlib
import re
import shlex
import shutil
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
from vit_jax.weights.formats import write_npz, write_safetensors
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
    """Run a command that must fail as a user's mistake; return its message."""
    code, out, err = run(*words)
    assert (code, out) == (2, "")
    # Notes about the weights come before the message.
    message = err.splitlines()[-1]
    assert message.startswith("vit-jax: ")
    return message


def succeeds(*words):
    """Run a command that must succeed and suggest another; return its output and its notes."""
    code, out, err = run(*words)
    assert code == 0, err
    *notes, suggestion = err.splitlines(keepends=True)
    assert suggestion.startswith("next: ")
    return out, "".join(notes)


def read_probabilities(record, names=NAMES):
    """Return the probabilities of the classes in their order."""
    by_name = {one["class"]: one["probability"] for one in record["predictions"]}
    return [by_name[name] for name in names]


def compute_probabilities(weights, pixels, **options):
    return softmax(logits_of(from_weights(weights, **options).module, pixels))


def read_contents(folder):
    """Return all files by their path."""
    files = {}
    for path in folder.rglob("*"):
        if path.is_file():
            files[str(path.relative_to(folder))] = path.read_bytes()
    return files


def write_image(folder, name):
    """Write one image with this name."""
    (path,) = write_pngs(folder, sample_pixels(1))
    pathlib.Path(path).rename(folder / name)


def read_table(path):
    header, *rows = csv.reader(path.read_text().splitlines())
    return header, rows


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("predict", "CHECKPOINT, IMAGE…"),
        ("predict w.npz a.png --class_names=a.txt", "--class_names=a.txt"),
        ("predict w.npz a.png --class_names=a.png", "--class_names=a.png"),
        ("predict w.npz a.png --weights.num_heads=two", "--weights.num_heads=two: must be int"),
        ("predict w.npz a.png --weights.image_size=9", "must divide the image height of 9"),
        ("predict w.npz a.png --views=rotations", "--views=rotations: images of"),
        ("predict w.npz a.png --weights.raw", "w.npz has no Polyak average"),
        ("predict w.npz a.png --weights.raw", "omit --weights.raw."),
        ("predict w.npz a.png --raw", "omit --raw."),
        ("predict w.npz a.png --image-size=9", "must divide the image height of 9"),
        ("predict w.npz a.png --weights.compute_dtype=int8", "--weights.compute_dtype=int8: "),
        ("convert w.npz o.npz --compute_dtype=bfloat16", "--compute_dtype=bfloat16: has no effect"),
        ("convert w.npz,w.npz o.npz", "Use --average for the mean of several."),
        ("convert w.npz o.npz --average", "must be at least two weights to average"),
        ("evaluate nowhere --data=digits", "nowhere: "),
        ("export w.npz --to=npz", "w.npz exists: "),
        ("export w.npz --to=stablehlo --output=a.png", "a.png exists"),
        ("export w.npz --to=npz --output=out", "--output=out: "),
        ("export w.npz --to=npz --output=o.npz --names=timm", "--names=timm: "),
        ("export w.npz --to=npz --output=o.npz --images.resize=direct", "--images.resize=direct: "),
        ("export w.npz --to=npz --output=o.npz --resize=direct", "--resize=direct: "),
        ("export w.npz --to=npz --output=o.npz --outputs=features", "--outputs=features: "),
        ("export w.npz --to=stablehlo --output=o --outputs=feature", "--outputs=feature: must be"),
    ],
)
def test_wrong_words(weights, here, words, message):
    write_pngs(here, sample_pixels(1))
    (here / "000.png").rename(here / "a.png")
    before = read_contents(here)

    assert message in fails(*words.split(" "))
    assert read_contents(here) == before, "a mistake writes nothing"


def test_predict_names_on_standard_input(weights, here, monkeypatch):
    write_pngs(here, sample_pixels(3))
    odd = (here / "001.png").rename(here / os.fsdecode(b"caf\xe9 1.png"))
    lines = b"000.png\n\n" + os.fsencode(odd.name) + b"\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines)))

    out, _ = succeeds("predict", "w.npz", "002.png", "-", "000.png", "--json")

    assert [one["image"] for one in json.loads(out)] == ["002.png", "000.png", odd.name]


@pytest.fixture
def arrays(here):
    """Write `a.npz` in MedMNIST's layout, with images of seven classes; return its arrays."""
    arrays = {"class_names": np.array(NAMES)}
    for seed, (split, size) in enumerate({"train": 21, "val": 7, "test": 14}.items()):
        arrays[f"{split}_images"] = sample_pixels(size, seed=seed)
        arrays[f"{split}_labels"] = np.arange(size)[:, None] % len(NAMES)
    np.savez(here / "a.npz", **arrays)
    return arrays


@pytest.mark.parametrize(
    ("options", "split"),
    [
        ([], "test"),
        (["--split=val"], "val"),
    ],
)
def test_predict_a_split_of_arrays(weights, here, arrays, options, split):
    pixels = arrays[f"{split}_images"]
    rows = compute_probabilities(weights, pixels)

    out, _ = succeeds("predict", "w.npz", "npz:a.npz", "--json", "--top=7", *options)

    for index, record in enumerate(json.loads(out)):
        assert record["image"] == f"a.npz:{split}_images[{index}]"
        assert read_probabilities(record) == pytest.approx(rows[index], abs=1e-6)


def test_evaluate_and_knn_read_arrays(weights, here, arrays):
    """The accuracy of evaluate equals that of the probabilities."""
    rows = compute_probabilities(weights, arrays["test_images"])
    correct = (rows.argmax(axis=1) == arrays["test_labels"][:, 0]).sum()

    out, _ = succeeds("evaluate", "w.npz", "npz:a.npz", "--json")
    assert json.loads(out)["accuracy"] == pytest.approx(correct / 14)

    out, _ = succeeds("knn", "w.npz", "--data=npz:a.npz", "--neighbours=3", "--json")
    assert "npz:a.npz" in out


def test_a_split_has_no_effect_on_files(weights, here):
    write_pngs(here, sample_pixels(1))

    assert "--split=val: has no effect on files" in fails(
        "predict", "w.npz", "000.png", "--split=val"
    )


def test_predict_reads_nothing_without_end(weights, here):
    """A pipe, a device and a file of 60 GB are images that cannot be read.

    The others are predicted.
    """
    write_pngs(here, sample_pixels(1))
    os.mkfifo(here / "pipe.png")
    (here / "large.png").touch()
    os.truncate(here / "large.png", 60 * 10**9)

    code, out, _ = run(
        "predict",
        "w.npz",
        "pipe.png",
        "/dev/zero",
        "large.png",
        "000.png",
    )

    reasons = [line.partition("cannot be read: ")[2] for line in out.splitlines()]
    assert code == 1
    assert reasons == [
        "The file is not read: it is not a regular file",
        "The file is not read: it is not a regular file",
        "The file is not read: it is larger than 1,073,741,824 bytes",
        "",
    ]


@pytest.mark.parametrize(
    ("options", "top"),
    [
        ([], 3),
        (["--top=1"], 1),
    ],
)
def test_predict_a_table_of_three_classes_unless_told(
    weights,
    here,
    options,
    top,
):
    pixels = sample_pixels(2)
    write_pngs(here, pixels)
    row = compute_probabilities(weights, pixels)[1]
    order = np.argsort(-row)[:top]
    expected = "   ".join(f"{NAMES[k]} {row[k]:.1%}" for k in order)

    out, _ = succeeds("predict", "w.npz", "000.png", "001.png", *options)

    assert out.splitlines()[1] == f"001.png   {expected}"


TABLE_COLUMNS = [
    "image",
    "error",
    "class_1",
    "probability_1",
    "class_2",
    "probability_2",
    "class_3",
    "probability_3",
]


def test_predict_does_the_rest_when_some_cannot_be_read(weights, here):
    write_pngs(here / "photos", sample_pixels(3))
    (here / "photos/001.png").write_bytes(b"")

    code, out, err = run(
        "predict",
        "w.npz",
        "photos",
        "--json",
        "--csv=table.csv",
    )

    first, second, third = json.loads(out)
    assert code == 1
    assert err == "vit-jax: 1 of 3 images cannot be read: photos/001.png\n"
    assert "predictions" in first
    assert second == {"image": "photos/001.png", "error": "The file is empty"}
    assert "predictions" in third

    cells = []
    for one in first["predictions"]:
        cells += [one["class"], f"{one['probability']:.6f}"]
    header, rows = read_table(here / "table.csv")

    assert header == TABLE_COLUMNS
    assert len(rows) == 3
    assert rows[0] == ["photos/000.png", "", *cells]
    assert rows[1] == ["photos/001.png", "The file is empty", "", "", "", "", "", ""]
    assert run("predict", "w.npz", "photos", "--csv=-")[1] == (here / "table.csv").read_text()


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_predict_names_that_the_terminal_cannot_show(
    here,
    monkeypatch,
    encoding,
):
    """Bytes that are no text and scripts that the terminal lacks are escaped, in names of files and
    of classes.
    """
    names = (os.fsdecode(b"caf\xe9"), "café", *NAMES[2:])
    save_weights(
        sample_weights(class_names=names),
        here / "w",
        OWN,
    )
    write_image(here, os.fsdecode(b"\xe9.png"))
    output = io.BytesIO()
    monkeypatch.setattr(
        sys,
        "stdout",
        io.TextIOWrapper(output, encoding, errors="strict"),
    )

    cli.main(["predict", "w", ".", "--top=7"])
    text = output.getvalue()

    assert text.startswith((rb"\udce9.png   ", rb"./\udce9.png   "))
    assert rb"caf\udce9 " in text
    assert "café ".encode(encoding, "backslashreplace") in text

    cli.main(["predict", "w", ".", "--json", "--top=7"])
    (record,) = json.loads(output.getvalue()[len(text) :])

    assert {one["class"] for one in record["predictions"]} == set(names)


def test_names_from_files_have_no_power_over_the_terminal(here):
    """A class or a file may have a name that sets the title of a window, clears the screen or
    forges a line.
    """
    hostile = "\x1b]0;owned\x07"
    folder = here / "im\x1b[2Jages"
    save_weights(
        sample_weights(class_names=(hostile, *NAMES[1:])),
        here / "w",
        OWN,
    )
    folder.mkdir()
    write_pngs(folder, sample_pixels(1))
    (folder / "b\nvit-jax: all is well.png").write_bytes(b"")
    for name in (hostile, "cat\x1b[2J"):
        (folder / "classes" / name).mkdir(parents=True)
        (folder / "classes" / name / "a.png").write_bytes(b"")

    outcomes = [
        run("predict", "w", folder.name, "--top=7"),
        run("predict", "nowhere\x1b[2J", folder.name),
        run(
            "evaluate",
            "w",
            f"--data=folder:{folder.name}/classes",
            "--split=all",
        ),
    ]

    text = "".join(out + err for _, out, err in outcomes)
    assert "\x1b" not in text
    assert "\nvit-jax: all is well" not in text
    assert r"\x1b]0;owned\x07 " in text
    assert r"b\nvit-jax: all is well.png" in text
    assert r"nowhere\x1b[2J" in text
    assert r"know: cat\x1b[2J" in text

    records = json.loads(run("predict", "w", folder.name, "--top=7", "--json")[1])
    assert hostile in {one["class"] for one in records[0]["predictions"]}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_table_on_a_terminal_has_no_power_over_it(here, monkeypatch):
    """Control characters are escaped on a terminal; a pipe gets the names as they are."""
    save_weights(
        sample_weights(class_names=("c\x1b[2J", *NAMES[1:])),
        here / "w",
        OWN,
    )
    write_image(here, "a\x1b]0;owned\x07\r.png")
    words = [
        "predict",
        "w",
        *map(str, pathlib.Path().glob("a*")),
        "--csv=-",
        "--top=7",
    ]

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
    save_weights(
        sample_weights(class_names=("=1+2", "-3", *NAMES[2:])),
        here / "w",
        OWN,
    )
    write_image(here, "@SUM(A1).png")

    succeeds("predict", "w", "@SUM(A1).png", "--csv=t.csv", "--top=7")

    _, (row,) = read_table(here / "t.csv")
    image, _, *cells = row
    classes = cells[0::2]
    shares = [float(cell) for cell in cells[1::2]]

    assert image == "'@SUM(A1).png"
    assert set(classes) == {"'=1+2", "-3", *NAMES[2:]}
    assert sum(shares) == pytest.approx(1, abs=1e-5)


@pytest.fixture
def foreign(here):
    """Weights `foreign.npz` without a preparation of images or names of classes, and two images."""
    write_npz(
        here / "foreign.npz",
        arrays_of(SQUARE, "released"),
        {},
    )
    (here / "names.txt").write_text("ant\nbee\ncat\n")
    pixels = sample_pixels(2, (12, 12))
    write_pngs(here, pixels)
    return pixels


@pytest.mark.parametrize(
    "verb",
    [
        ["predict", "foreign.safetensors", "000.png"],
        ["export", "foreign.safetensors", "--to=stablehlo", "--output=p"],
    ],
    ids=["predict", "export"],
)
def test_images_of_a_foreign_file_need_a_preparation(foreign, here, verb):
    write_safetensors(here / "foreign.safetensors", arrays_of(SQUARE, "timm"))

    message = fails(*verb, "--weights.num_heads=2")

    assert "does not state how images are prepared: add --images.resize=direct" in message


def test_images_of_a_released_file_are_prepared_as_by_its_authors(foreign):
    words = [
        "predict",
        "foreign.npz",
        "000.png",
        "--weights.num_heads=2",
        "--json",
        "--top=9",
        "--class_names=names.txt",
    ]
    weights = load_weights("foreign.npz", num_heads=2)
    expected = compute_probabilities(weights, foreign, resize="direct")[0]
    out, err = succeeds(*words)

    assert "note: A square grid of 3x3 patches is assumed, of 12x12 images." in err
    assert "by the authors of the format, with --images.resize=direct" in err
    first, *_ = json.loads(out)
    assert read_probabilities(first, NAMES[:3]) == pytest.approx(expected, abs=1e-6)

    same, err = succeeds(*words, "--images.resize=direct")
    assert same == out
    assert "by the authors" not in err

    cropped, _ = succeeds(
        *words,
        "--images.resize=short_side",
        "--images.crop_fraction=0.5",
    )
    assert cropped != out


EXPORT_FOREIGN = [
    "export",
    "foreign.npz",
    "--to=stablehlo",
    "--weights.num_heads=2",
    "--output=p",
]


@pytest.mark.parametrize(
    ("preparation", "is_antialiased"),
    [
        (
            {
                "resize": "short_side",
                "crop_fraction": 0.875,
                "exif_orientation": "applied",
                "interpolation": "bicubic",
            },
            True,
        ),
        (
            {
                "resize": "short_side",
                "crop_fraction": 0.875,
                "exif_orientation": "ignored",
            },
            False,
        ),
    ],
    ids=["bicubic", "area"],
)
def test_programs_of_a_foreign_file_describe_the_preparation(
    foreign,
    here,
    preparation,
    is_antialiased,
):
    options = [f"--{name}={value}" for name, value in preparation.items()]
    succeeds(*EXPORT_FOREIGN, *options)

    written = json.loads((here / "p.json").read_text())["preprocessing"]
    rounding = "covers the input's size / crop_fraction, rounded down"

    assert preparation.items() <= written.items()
    assert ("bicubic with antialiasing" in written["filter"]) == is_antialiased
    assert (rounding in written["meaning"]) == is_antialiased


DEEP_FILES = ("deep.tif", "stated.png", "float.tif")


@pytest.fixture
def deep(here):
    """Three files of 12-bit values, and weights with and without their range.

    Returns the probabilities.
    """
    values = sample_pixels(1)[0].astype(np.uint16) * 16 + 3
    (here / "deep.tif").write_bytes(tiff(values))
    (here / "stated.png").write_bytes(png(values, 12))
    (here / "float.tif").write_bytes(tiff(values.astype(np.float32), pages=2))

    preprocessing = DIRECT | {"value_range": [0.0, 4095.0]}
    save_weights(
        sample_weights(),
        here / "w.npz",
        "released",
    )
    save_weights(
        sample_weights(preprocessing=preprocessing),
        here / "deep.npz",
        "released",
    )
    pixels = np.rint(values * (255 / 4095)).astype(np.uint8)
    return pytest.approx(compute_probabilities(sample_weights(), [pixels])[0], abs=1e-6)


@pytest.mark.parametrize(
    ("weights", "options"),
    [
        ("deep.npz", []),
        ("w.npz", ["--images.value_range=0,4095"]),
    ],
)
def test_values_of_more_than_8_bits(deep, weights, options):
    """The range of training is that of predict, unless another is given."""
    out, err = succeeds(
        "predict",
        weights,
        *DEEP_FILES,
        "--json",
        "--top=9",
        *options,
    )

    assert err == (
        "note: 1 of 3 checked files have several pages: page 1 of 2 is used; "
        "input.channels reads pages as bands.\n"
    )
    for record in json.loads(out):
        assert read_probabilities(record) == deep


def test_values_of_more_than_8_bits_without_a_range(deep):
    """A note counts the files."""
    code, out, err = run("predict", "w.npz", *DEEP_FILES, "--json", "--top=9")
    dark, stated, unread = json.loads(out)

    assert code == 1
    assert read_probabilities(stated) == deep
    assert read_probabilities(dark) != deep
    assert "--images.value_range=0,1" in unread["error"]
    assert "note: 1 of 3 checked files have 16 bits" in err
    assert "--images.value_range=0,4095 for 12-bit data" in err


def test_a_wrong_range_of_values(deep):
    message = fails(
        "predict",
        "w.npz",
        "deep.tif",
        "--images.value_range=4095,0",
    )
    assert "--images.value_range=4095,0" in message


@pytest.mark.parametrize(
    "words",
    [
        ("predict", "w.npz", "000.png"),
        ("export", "w.npz", "--to=stablehlo", "--overwrite"),
    ],
    ids=["predict", "export"],
)
def test_numbers_that_stand_for_names_are_told(here, words):
    """Weights of folders "5" to "9" without their names would say "2" of a seven."""
    save_weights(
        sample_weights(class_names=None),
        here / "w.npz",
        "released",
    )
    write_pngs(here, sample_pixels(1))
    (here / "names.txt").write_text("\n".join(NAMES))
    _, err = succeeds(*words)
    _, named_err = succeeds(*words, "--class_names=names.txt")

    assert err == (
        "note: the weights do not name their classes: their numbers are used; "
        "--class_names=FILE gives names, one a line.\n"
    )
    assert named_err == ""


def test_a_head_of_zeros_is_told(here):
    """Probes do not use the head."""
    weights = sample_weights()
    weights.parameters["head/linear/kernel"][:] = 0
    save_weights(weights, here / "zeros.npz", "released")
    write_pngs(here, sample_pixels(1))
    write_classes(
        here / "images",
        np.arange(14) % 7,
        sample_pixels(14),
    )

    assert "note: WARNING: the head is all zeros" in run("predict", "zeros.npz", "000.png")[2]

    probe = ["--data=folder:images", "--cache=none", "--method=least_squares"]
    _, err = succeeds("probe", "zeros.npz", *probe)

    assert "the head" not in err


def test_classes_of_imagenet_have_readable_names(here):
    """1,000 outputs without names: "tench" is printed, with a note."""
    arrays = arrays_of(dataclasses.replace(SQUARE, num_classes=1000), "released")
    arrays["head/bias"][:1] = 99
    write_npz(here / "w.npz", arrays, {})
    write_pngs(here, sample_pixels(1, (12, 12)))
    options = ["--weights.num_heads=2", "--images.resize=direct", "--top=1"]
    note = "the weights do not name their classes: ImageNet's 1,000 names are used"

    out, err = succeeds("predict", "w.npz", "000.png", *options)

    assert out == "000.png   tench 100.0%\n"
    assert f"note: {note}; --class_names=" in err


def write_run(folder):
    """Write a checkpoint of training with parameters and their Polyak average; the head differs."""
    weights = sample_weights()
    model = from_weights(weights).module

    def negate_head(name, leaf):
        return -leaf if name.startswith("head/") else leaf

    average = pytree.map_with_names(negate_head, model)
    items = {"model": model, "polyak": average}
    store = CheckpointStore(folder)
    store.save(
        5,
        items,
        metadata=describe_weights(weights),
        metrics={},
    )
    store.close()
    return {"model": model, "average": average}


@pytest.mark.parametrize(
    ("options", "kind", "description"),
    [
        ([], "average", "Polyak average of step 5"),
        (["--weights.raw"], "model", "parameters of step 5"),
    ],
    ids=["average", "raw"],
)
def test_polyak_average_or_raw_parameters(here, options, kind, description):
    expected = write_run(here / "run")[kind]
    pixels = sample_pixels(2)
    write_pngs(here, pixels)
    expected_row = softmax(logits_of(expected, pixels))[1]
    leaves = {name: np.asarray(leaf) for name, leaf in pytree.name_leaves(expected).items()}

    out, _ = succeeds(
        "predict",
        "run",
        "001.png",
        "--json",
        "--top=7",
        *options,
    )
    (record,) = json.loads(out)

    assert read_probabilities(record) == pytest.approx(expected_row, abs=1e-6)

    out, _ = succeeds(
        "export",
        "run",
        "--to=npz",
        "--output=out.npz",
        *options,
    )
    assert description in out
    assert_same(load_weights("out.npz").parameters, leaves)


def test_the_mean_of_a_step_and_a_file(here):
    leaves = write_run(here / "run")["model"]
    average = load_weights("run").parameters
    save_weights(sample_weights(), here / "w.npz", "released")

    run("convert", "run@5,w.npz", "mean.npz", "--average")
    means = load_weights("mean.npz").parameters

    for name, leaf in pytree.name_leaves(leaves).items():
        np.testing.assert_allclose(
            means[name],
            (average[name] + leaf) / 2,
            rtol=1e-6,
            err_msg=name,
        )


def test_folders_inside_a_run_are_no_checkpoints(here):
    write_run(here / "run")

    for inside in ("run/checkpoints", "run/checkpoints/5"):
        message = fails("evaluate", inside, "--data=digits")
        assert f"{inside} holds no vit_jax checkpoints" in message
        assert message.endswith(f": give the workdir, {here}/run.")


@pytest.mark.parametrize(
    ("num_classes", "words", "names"),
    [
        (0, [], ["features", "tokens"]),
        (7, ["--outputs=features,logits"], ["features", "logits"]),
    ],
)
def test_export_features(here, num_classes, words, names):
    a = dataclasses.replace(SEVEN, num_classes=num_classes)
    class_names = NAMES if num_classes else None
    save_weights(
        sample_weights(a, class_names=class_names),
        here / "w.npz",
        "released",
    )

    out, err = succeeds("export", "w.npz", "--to=stablehlo", "--output=w.stablehlo", *words)

    assert err == ""
    assert out.splitlines() == ["w.stablehlo", "w.stablehlo.json"]
    description = json.loads((here / "w.stablehlo.json").read_text())
    assert list(description["outputs"]) == names


@pytest.mark.parametrize("kind", ["stablehlo", "onnx"])
def test_export_prints_a_line_that_runs_the_program(here, weights, kind):
    """The line is for a shell; its code runs here, since a process takes seconds for JAX."""
    if kind == "onnx":
        pytest.importorskip("onnxruntime")
    black = np.zeros((1, *weights.architecture.image_size, 3), np.uint8)
    (expected,) = from_weights(weights).predict(black)
    output = f"it's {kind}"

    code, _, err = run("export", "w.npz", f"--to={kind}", f"--output={output}")
    python, option, program = shlex.split(err.splitlines()[-1].removeprefix("next: "))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(program, {})

    assert code == 0, err
    assert shutil.which(python) is not None
    assert option == "-c"
    numbers = re.findall(r"\d\.\d+(?:e-?\d+)?", printed.getvalue())
    assert list(map(float, numbers)) == pytest.approx(expected, abs=1e-4)


def read_figures(text):
    return dict(line.split(maxsplit=1) for line in text.splitlines())


def test_evaluate_prints_figures_and_writes_the_table(weights, here):
    pixels = sample_pixels(20)
    labels = compute_probabilities(weights, pixels).argmax(axis=1)
    labels[:4] = (labels[:4] + 1) % 7
    write_classes(here / "images" / "train", labels, pixels)
    data = write_classes(
        here / "images" / "test",
        labels,
        pixels,
    ).removesuffix("/test")

    out, err = succeeds(
        "evaluate",
        "w.npz",
        data,
        "--csv=table.csv",
        "--global_batch=6",
    )

    result = read_figures(out)
    assert err == ""
    assert result["weights"] == "w.npz (released)"
    assert result["images"] == "20"
    assert result["accuracy"] == "80.00%  (95 %: 58.40% to 91.93%)"

    header, rows = read_table(here / "table.csv")
    assert [header[0], *(row[0] for row in rows)] == ["class", *NAMES]
    assert sum(int(row[1]) for row in rows) == 20
    assert sum(int(row[2]) for row in rows) == 16

    out, _ = succeeds(
        "evaluate",
        "w.npz",
        data,
        "--split=train",
        "--csv=table.csv",
    )
    assert read_figures(out)["images"] == "20"


def test_evaluate_and_predict_average_over_views(weights, here):
    pixels = sample_pixels(6)
    logits = logits_of(from_weights(weights).module, pixels)
    mirrored = logits_of(from_weights(weights).module, pixels[:, :, ::-1])
    expected = softmax((logits + mirrored) / 2)
    data = write_classes(here / "images", expected.argmax(axis=1), pixels)
    (file, *_) = sorted((here / "images").rglob("000.png"))

    evaluated, _ = succeeds("evaluate", "w.npz", data, "--split=all", "--views=flip", "--json")
    plain, _ = succeeds("evaluate", "w.npz", data, "--split=all", "--json")
    predicted, _ = succeeds("predict", "w.npz", str(file), "--views=flip", "--top=1", "--json")

    result = json.loads(evaluated)
    assert result["accuracy"] == 1
    assert result["loss"] == pytest.approx(-np.log(expected.max(axis=1)).mean(), rel=1e-5)
    assert result["gflops_per_image"] == 2 * json.loads(plain)["gflops_per_image"]
    (likely,) = json.loads(predicted)[0]["predictions"]
    assert likely["probability"] == pytest.approx(expected[0].max(), rel=1e-5)


def test_evaluate_a_part_of_a_folder_without_splits(weights, here):
    labels = [0] * 10 + [3] * 10 + [5] * 3
    data = write_classes(
        here / "images",
        labels,
        sample_pixels(23),
    )
    words = ("--split=train", "--holdout_fraction=0.3", "--seed=1", "--classes=ant,dog")

    out, err = succeeds("evaluate", "w.npz", data, *words)

    assert err == ""
    assert read_figures(out)["data"] == f"train of {data.removeprefix('--data=')}, 14 of 23 images"


@pytest.fixture
def data_with_an_empty_file(weights, here):
    data = write_classes(
        here / "images",
        [0] * 4 + [1] * 4,
        sample_pixels(8),
    )
    (here / "images/ant/002.png").write_bytes(b"")
    return data


def test_evaluate_tells_unreadable_images(data_with_an_empty_file):
    words = ("--split=train", "--seed=1")
    out, _ = succeeds("evaluate", "w.npz", data_with_an_empty_file, *words)

    assert read_figures(out)["images"] == "5, and 1 that cannot be read"


def test_evaluate_prints_figures_also_if_the_table_cannot_be_written(
    data_with_an_empty_file,
    monkeypatch,
):
    def fail(path, content):
        raise WriteError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("vit_jax.cli.weights.write_atomically", fail)
    code, out, err = run(
        "evaluate",
        "w.npz",
        data_with_an_empty_file,
        "--csv=table.csv",
    )

    assert code == 2
    assert read_figures(out)["images"] == "7, and 1 that cannot be read"
    assert "table.csv cannot be written" in err


HUGGING_FACE = [
    "--to=safetensors",
    "--names=huggingface",
    "--output=deep/h.safetensors",
]


@pytest.mark.parametrize(
    ("a", "words", "written"),
    [
        (RESNET, ["--to=npz"], "source.npz"),
        (SEVEN, ["--to=safetensors"], "source.safetensors"),
        (SEVEN, HUGGING_FACE, "deep/h.safetensors"),
        (SEVEN, ["--to=safetensors", "--output=folder"], "folder"),
    ],
    ids=["npz", "safetensors", "names of Hugging Face", "folder"],
)
def test_exported_weights_read_back_to_the_bit(here, a, words, written):
    weights = sample_weights(
        a,
        class_names=NAMES[: a.num_classes],
        training=TRAINING,
    )
    save_weights(weights, here / "source", OWN)

    out, err = succeeds("export", "source", *words)

    assert err == ""
    assert written in out

    read = load_weights(here / written)
    assert read.architecture == a
    assert read.class_names == weights.class_names
    assert read.preprocessing == weights.preprocessing
    assert read.training == TRAINING
    assert_same(read.parameters, weights.parameters)
