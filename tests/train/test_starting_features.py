"""The features that fine-tuning starts with are those of the verbs on frozen features."""

import json

import cv2
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.integration.commands import succeed
from tests.rejections import rejects
from tests.weights.small_networks import SQUARE, VIT, arrays_of, weights_of
from tests.weights.test_families import write
from tests.weights.test_photographs import GOLDEN as PHOTOGRAPHS
from vit_jax import load_model
from vit_jax.config import load_recipe
from vit_jax.data.sources import open_source
from vit_jax.data.transforms import build_evaluation_transform
from vit_jax.models import abstract_model
from vit_jax.train.run_defaults import choose_rule
from vit_jax.train.starting_weights import adapt, follow_weights
from vit_jax.weights import load_weights
from vit_jax.weights.description import describe_preparation
from vit_jax.weights.formats import write_npz

CASES = {
    "released": (12, 12),  # as AugReg's
    "huggingface/dinov2": (32, 32),  # config.json says 48: positions are resized
    "huggingface/siglip": (48, 48),
    "timm/clip": (64, 64),
    "timm/mae": (48, 48),  # without a head, like the next ones
    "timm/dinov2": (42, 42),
    "timm/dinov3": (48, 48),
}
"""Weights by case, with the image size of their preprocessing."""


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """A folder of two classes, with splits; sides of images differ."""
    folder = tmp_path_factory.mktemp("photographs")
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        for name in ("cat", "dog"):
            inside = folder / split / name
            inside.mkdir(parents=True)
            for number in range(4):
                image = rng.integers(0, 256, (70, 101 + number, 3), np.uint8)
                cv2.imwrite(
                    str(inside / f"{number}.png"),
                    cv2.GaussianBlur(image, (9, 9), 3),
                )
    return folder


@pytest.fixture
def download(tmp_path):
    """A function that writes the files of weights that a user downloads, and returns the folder."""

    def write_files(case):
        if case == "released":
            file = tmp_path / "weights.npz"
            write_npz(file, arrays_of(SQUARE, case), {})
            return file
        folder = write(case, tmp_path / "weights")
        if case.startswith("huggingface/"):
            processor = json.loads(str(PHOTOGRAPHS[f"{case} processor"]))
            if case == "huggingface/dinov2":
                processor |= {"crop_size": {"height": 32, "width": 32}}
                processor |= {"size": {"shortest_edge": 37}}
            (folder / "preprocessor_config.json").write_text(json.dumps(processor))
        return folder

    return write_files


def load_finetuning(weights, data, recipe="finetune:any,own", *overrides):
    fields = [f"init_from={weights}", f"data=folder:{data}", "model.compute_dtype=float32"]
    words = [f"--config.{field}" for field in (*fields, *overrides)]
    return load_recipe(choose_rule(recipe, words).recipe, words)


def extract_start(start, images):
    """Return the features of the network that a run starts with."""
    abstract = abstract_model(start.architecture)
    leaves = map(jnp.asarray, start.fitted.parameters.values())
    structure = jax.tree.structure(abstract)
    model = jax.tree.unflatten(structure, leaves)
    transform = build_evaluation_transform(start.config.input)
    pixels = np.stack([transform(image) for image in images])
    return np.asarray(model(jnp.asarray(pixels)).features_BD)


@pytest.mark.parametrize("case", CASES)
def test_fine_tuning_starts_with_the_features_of_the_weights(
    case,
    photographs,
    download,
):
    weights = download(case)
    config = load_finetuning(weights, photographs)
    train = open_source(config.data, "train", config.input, 0)
    records = [train[index] for index in range(4)]
    model = load_model(weights)
    pixels = np.stack([model.transform(record) for record in records])
    expected = np.asarray(model.module(jnp.asarray(pixels)).features_BD)

    start = adapt(config, train)

    assert start.config.input.image_size == CASES[case]
    transform = build_evaluation_transform(start.config.input)
    assert describe_preparation(transform) == describe_preparation(model.transform)
    np.testing.assert_allclose(
        extract_start(start, records),
        expected,
        atol=1e-6,
    )
    height, width = CASES[case]
    assert f"{height}x{width} pixels of the weights" in start.report
    preparation = "Test images are prepared as for the weights: test_resize="
    if case == "released":
        preparation = "The weights state no preparation: test images are resized directly."
    assert preparation in start.report
    assert "Pooling" not in start.report


def test_another_pooling_of_the_rule_is_reported(photographs, download):
    config = load_finetuning(download("timm/mae"), photographs, "finetune:any,imagenet")

    start = adapt(config, open_source(config.data, "train", config.input, 0))

    assert "Pooling is gap, in the weights token: config.model.pool." in start.report


def test_positions_are_resized_as_in_the_library_of_the_weights(photographs, download):
    weights = download("huggingface/dinov2")
    config = load_finetuning(weights, photographs, "finetune:any,own,image_size=64")
    train = open_source(config.data, "train", config.input, 0)

    start = adapt(config, train)
    model = load_model(weights, image_size=64)
    # The table of the file, 48 pixels, is resized once: not first to the 32 of the processor.
    expected = load_weights(weights, image_size=(64, 64)).parameters["positions/table"]

    assert "Positions are resized as in the library of the weights: huggingface." in start.report
    for table in (start.fitted.parameters["positions/table"], model.module.positions.table[...]):
        np.testing.assert_allclose(np.asarray(table), expected, atol=1e-6)


def test_values_of_the_command_line_stay(photographs, download):
    weights = download("huggingface/dinov2")
    overrides = ("input.test_resize=direct", "input.image_size=48")
    config = load_finetuning(
        weights,
        photographs,
        "finetune:any,own",
        *overrides,
    )

    start = adapt(
        config,
        open_source(config.data, "train", config.input, 0),
    )

    assert start.config.input == config.input


def test_images_of_rectangular_weights_are_not_rotated():
    config = load_recipe("configs/finetune.py:any,own,orientation=any")
    assert config.input.vertical_flip
    assert config.input.rotate90

    with rejects("config.input.rotate90=True", "not square.*image_size=12,12"):
        follow_weights(config, weights_of(VIT))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "recipe"),
    [
        ("huggingface/dinov2", "dinov3,own"),
        ("huggingface/siglip", "siglip2,own"),
        ("timm/clip", "any,own,quick"),
        ("timm/mae", "mae,own"),
    ],
)
def test_probe_features_and_a_run_have_the_same_features(
    case,
    recipe,
    photographs,
    download,
    tmp_path,
):
    """The run has a learning rate of almost zero."""
    weights = download(case)
    data = f"folder:{photographs}"
    run = tmp_path / "run"
    features = {}
    succeed(["probe", str(weights), data, "--penalty=1", f"--output={tmp_path / 'probe'}"])
    succeed(
        [
            "finetune",
            f"--config=finetune:{recipe}",
            f"--workdir={run}",
            f"--config.init_from={weights}",
            f"--config.data={data}",
            "--config.model.compute_dtype=float32",
            "--config.global_batch=8",
            "--config.total=1 steps",
            "--config.schedule.warmup=0 steps",
            "--config.schedule.learning_rate=1e-30",
            "--config.schedule.end_learning_rate=0",
        ]
    )
    for source in (weights, tmp_path / "probe", run):
        output = tmp_path / "features.npz"
        succeed(
            ["features", str(source), data, f"--output={output}", "--layer=pooled", "--cache=none"]
        )
        features[source] = np.load(output)["features"]

    expected = features[weights]
    assert expected.std() > 0.01
    for source in features:
        np.testing.assert_allclose(
            features[source],
            expected,
            atol=1e-5,
        )
