"""Verbs on images of four bands: arrays, and TIFFs of one page for each band."""

import json
import shlex

import numpy as np
import pytest
import tifffile

import vit_jax
from tests.integration.commands import run, succeed
from vit_jax.config import load_recipe
from vit_jax.train.run_defaults import choose_finetuning


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """Return a folder with weights, arrays and a TIFF of four bands of 16 bits."""
    folder = tmp_path_factory.mktemp("four")
    model = vit_jax.create_model(
        "ViT-mu/4",
        image_size=8,
        num_classes=2,
        channels=4,
        value_range=(0, 65_535),
        seed=1,
    )
    rng = np.random.default_rng(0)
    kernel = model.module.head.linear.kernel
    kernel[...] = rng.normal(size=kernel.shape)
    model.save(folder / "weights")

    shape = (12, 8, 8, 4)
    images = rng.integers(
        0,
        65_536,
        shape,
        np.uint16,
    )
    labels = np.arange(12) % 2
    test = [8, 9, 2]  # the last one is a training image
    np.savez(
        folder / "four.npz",
        train_images=images[:8],
        train_labels=labels[:8],
        test_images=images[test],
        test_labels=labels[test],
    )
    pages = np.moveaxis(
        images[8],
        -1,
        0,
    )
    tifffile.imwrite(
        folder / "pages.tif",
        pages,
        photometric="minisblack",
    )
    return folder


def predict(four, *words):
    out = succeed(["predict", str(four / "weights"), *words, "--json"])
    return [record["predictions"] for record in json.loads(out)]


def test_a_split_and_pages_have_the_same_predictions(four):
    of_split = predict(
        four,
        f"npz:{four}/four.npz",
        "--split=test",
    )
    of_pages = predict(
        four,
        str(four / "pages.tif"),
    )

    assert len(of_split) == 3
    assert of_split[0] != of_split[1]
    assert of_pages == of_split[:1]


@pytest.mark.parametrize(
    "given",
    [
        [],
        ["--config.input.channels=1", "--config.input.bands=3", "--config.input.value_range=0,9"],
    ],
)
def test_fine_tuning_reads_the_bands_of_the_weights(four, given):
    words = [f"--config.init_from={four}/weights", f"--config.data=npz:{four}/four.npz", *given]

    defaults = choose_finetuning(None, words, uses_devices=False)

    added = [f"--config.{override}" for override in defaults.overrides]
    inputs = load_recipe(defaults.recipe, [*words, *added]).input
    if given:
        assert (inputs.channels, inputs.bands) == (1, (3,))
        assert inputs.channel_mean == ()
    else:
        assert (inputs.channels, inputs.bands) == (4, ())
        assert inputs.channel_mean == inputs.channel_std == (32_767.5,) * 4


def test_copies_are_found_among_bands(four):
    data = f"npz:{four}/four.npz"
    words = ["duplicates", data, f"--against={data}", f"--weights={four}/weights"]

    succeed([*words, f"--output={four}/pairs.csv"])

    _, *pairs = (four / "pairs.csv").read_text().splitlines()
    assert len(pairs) == 1


@pytest.mark.parametrize(
    "kind",
    ["onnx", "stablehlo"],
)
def test_the_printed_program_runs(four, tmp_path, kind, capsys):
    path = str(tmp_path / f"four.{kind}")

    outcome = run(["export", str(four / "weights"), f"--to={kind}", f"--output={path}"])

    assert outcome.code == 0, outcome.err
    command = shlex.split(outcome.err.rpartition("next: ")[2])
    exec(
        command[-1],
        {},
    )
    assert capsys.readouterr().out


def test_data_of_other_bands_are_rejected(four):
    np.savez(
        four / "five.npz",
        images=np.zeros(
            (4, 8, 8, 5),
            np.uint8,
        ),
        labels=np.arange(4) % 2,
    )

    outcome = run(["predict", str(four / "weights"), f"npz:{four}/five.npz"])

    assert outcome.code == 2
    assert "it has 5 bands, and the network takes 4" in outcome.err
