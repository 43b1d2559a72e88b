"""Verbs on images of four bands: arrays, and TIFFs of one page for each band."""

import dataclasses
import json
import shlex

import numpy as np
import pytest
import tifffile

import vit_jax
from tests.integration.commands import run, succeed
from vit_jax.api import from_weights
from vit_jax.config import load_recipe
from vit_jax.data.sources import open_source
from vit_jax.data.transforms import build_evaluation_transform
from vit_jax.train.inputs import measure_channels
from vit_jax.train.run_defaults import choose_finetuning
from vit_jax.train.starting_weights import adapt
from vit_jax.weights import load_weights
from vit_jax.weights.description import describe_preparation
from vit_jax.weights.folding import Normalisation, describe_normalisation, fold
from vit_jax.weights.saving import save_weights


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


@pytest.fixture(scope="module")
def thirteen(tmp_path_factory):
    """Return a folder with weights of RGB as of timm, and arrays of 13 bands of 16 bits."""
    folder = tmp_path_factory.mktemp("thirteen")
    model = vit_jax.create_model(
        "ViT-mu/4",
        image_size=8,
        num_classes=2,
        head="linear",
        seed=1,
    )
    model.save(folder / "plain")
    weights = load_weights(folder / "plain")
    normalisation = Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    folded = dataclasses.replace(
        weights,
        parameters=fold(weights.parameters, normalisation),
        preprocessing={**weights.preprocessing, **describe_normalisation(normalisation)},
    )
    save_weights(folded, folder / "rgb", "vit_jax")
    rng = np.random.default_rng(0)
    splits = {}
    for split, count in (("train", 12), ("test", 6)):
        splits[f"{split}_images"] = rng.integers(
            900,
            4_000,
            (count, 8, 8, 13),
            np.uint16,
        )
        splits[f"{split}_labels"] = np.arange(count) % 2
    np.savez(folder / "data.npz", **splits)
    return folder


def build_start(folder, *overrides):
    """Return the network with which fine-tuning begins, and its preparation of images."""
    words = [f"--config.init_from={folder}/rgb", f"--config.data=npz:{folder}/data.npz", *overrides]
    defaults = choose_finetuning(None, words, uses_devices=False)
    added = [f"--config.{override}" for override in defaults.overrides]
    config = load_recipe(defaults.recipe, [*words, *added])
    train = open_source(config.data, "train", config.input, config.seed)
    config = measure_channels(config, train, str(folder / "none"))
    weights = load_weights(folder / "rgb")
    start = adapt(config, train, weights)
    preparation = describe_preparation(build_evaluation_transform(start.config.input))
    adapted = weights.replace_network(start.architecture, start.fitted.parameters)
    return from_weights(dataclasses.replace(adapted, preprocessing=preparation)), start.report


@pytest.mark.parametrize(
    ("channels", "more", "note"),
    [
        (13, [], "repeated in turn, times 3/13, as timm"),
        (4, ["bands=4,3,2,9", "channel_weights=zero"], "the first 3 kernels are kept"),
        (1, ["bands=12", "value_range=0,4095"], "the kernels are summed"),
    ],
)
def test_frozen_features_are_those_with_which_fine_tuning_begins(
    thirteen,
    tmp_path,
    channels,
    more,
    note,
):
    fields = [f"channels={channels}", *more]
    overrides = []
    for field in fields:
        section = "model" if field.startswith("channel_weights") else "input"
        overrides.append(f"--config.{section}.{field}")
    model, report = build_start(thirteen, *overrides)
    images = np.load(thirteen / "data.npz")["test_images"]
    expected = model.features(list(images))
    data = f"npz:{thirteen}/data.npz"
    options = [f"--images.{field}" for field in fields] + ["--cache=none"]

    outcome = run(["features", f"{thirteen}/rgb", data, f"--output={tmp_path}/f.npz", *options])

    assert note in outcome.err
    assert note in report
    np.testing.assert_allclose(np.load(tmp_path / "f.npz")["features"], expected, atol=1e-5)
    if channels == 13:
        probe = [f"--output={tmp_path}/probe", "--penalty=2"]
        succeed(["probe", f"{thirteen}/rgb", f"--data={data}", *probe, *options])
        saved = vit_jax.load_model(tmp_path / "probe")
        np.testing.assert_allclose(saved.features(list(images)), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["--images.bands=1,2,3,4"], "Set --images.channels=4"),
        (["--images.bands=1,2,14"], "wants band 14. Choose bands from 1 to 13"),
        (["--images.channels=33"], r"must lie in [1, 32]"),
        (["--images.channels=4"], "has 13 bands, and the network takes 4"),
        (["--images.channels=13", "--images.channel_mean=1,2"], "must be 13 numbers each"),
        (["--images.channel_weights=zero"], "has no effect without --images.channels"),
        (["--images.channels=3", "--images.channel_weights=zero"], "the 3 channels of the weights"),
        ([], "on frozen features --images. in place of --config.input."),
    ],
)
def test_mistakes_of_channels(thirteen, words, rule):
    data = f"--data=npz:{thirteen}/data.npz"

    outcome = run(["knn", f"{thirteen}/rgb", data, "--cache=none", *words])

    assert outcome.code == 2
    assert rule in outcome.err


def test_files_do_not_normalise_other_channels(thirteen, tmp_path):
    words = ["export", f"{thirteen}/rgb", "--to=stablehlo", f"--output={tmp_path}/x"]

    outcome = run([*words, "--images.channels=4"])

    assert outcome.code == 2
    assert "Add --images.value_range=LOW,HIGH" in outcome.err


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
