"""The verb inspect, from the words of the command to the files that it writes."""

import dataclasses
import sys

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from tests.evals.samples import sample_pixels, sample_weights, to_png, write_pngs
from tests.integration.commands import run, succeed
from tests.weights.small_networks import RESNET, weights_of
from vit_jax.arrays import Batch
from vit_jax.config import load_recipe
from vit_jax.imports.extras import install_command
from vit_jax.tools.figures import network
from vit_jax.tools.figures.data_sheet import write_caption
from vit_jax.train.inputs import open_datasets, train_stream
from vit_jax.train.step import mix_batch, step_keys
from vit_jax.weights.saving import OWN, save_weights

DRAWN = ("filters", "positions", "distance", "rollout", "heads", "similar", "pca")

FORMS = ("png", "npz")


def list_outputs(folder, *names):
    """Return the files of these figures in the order in which the verb prints them."""
    return [f"{folder}/{name}.{form}" for name in names for form in FORMS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Weights `vit` and `resnet`, and a folder `images` of ten images."""
    folder = tmp_path_factory.mktemp("inspect")
    resnet = dataclasses.replace(weights_of(RESNET), preprocessing=None)
    save_weights(sample_weights(), folder / "vit", OWN)
    save_weights(resnet, folder / "resnet", OWN)
    write_pngs(folder / "images", sample_pixels(10))
    return folder


@pytest.fixture
def here(folder, tmp_path, monkeypatch):
    for name in ("vit", "resnet", "images"):
        (tmp_path / name).symlink_to(folder / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def quick(monkeypatch):
    """Figures that are not drawn: tests show which ones are drawn, and of which images."""

    def draw_nothing(model, view):
        size = 0 if view.images_NHWC is None else len(view.images_NHWC)
        return network.Figure(b"png", {"size": np.array(size), "heads": np.array(view.heads)})

    kinds = {name: kind._replace(draw=draw_nothing) for name, kind in network.KINDS.items()}
    monkeypatch.setattr(network, "KINDS", kinds)


@pytest.mark.slow
def test_all_figures_and_their_numbers(here):
    output = "new/pictures"
    options = [
        "--images=images",
        f"--output={output}",
        "--num_images=6",
        "--shown=2",
    ]

    code, out, err = run(["inspect", "vit", *options])

    assert code == 0, err
    assert out.split() == list_outputs(output, *DRAWN)
    assert "note: gradcam is skipped: ViT-custom/4 has no ResNet." in err
    assert "note: reconstructions is skipped" in err
    for name in DRAWN:
        assert (here / output / f"{name}.png").read_bytes().startswith(b"\x89PNG")

    with np.load(here / output / "similar.npz") as numbers:
        assert numbers["names"].tolist() == [
            "images/000.png",
            "images/002.png",
            "images/004.png",
            "images/005.png",
            "images/007.png",
            "images/009.png",
        ]

    with np.load(here / output / "distance.npz") as numbers:
        distances = numbers["distance_pixels"]
    assert distances.shape == (2, 2)
    assert 0 < distances.min() < distances.max() < 12


def test_without_images_what_needs_none(here, quick):
    code, out, err = run(["inspect", "vit", "all", "--output=o"])

    assert code == 0
    assert out.split() == list_outputs("o", "filters", "positions")
    assert "note: distance is skipped: it needs --images=." in err


def test_one_image_is_enough_for_all_but_similar(here, quick):
    image = "--images=images/000.png"
    reason = f"it needs at least 2 images, and {image} has 1."

    code, out, err = run(["inspect", "vit", image, "--output=o"])
    assert code == 0
    assert f"note: similar is skipped: {reason}" in err
    assert "o/pca.png" in out.split()

    code, out, err = run(["inspect", "vit", "similar", image, "--output=p"])
    assert code == 2
    assert out == ""
    assert "similar: it needs at least 2 images" in err


def test_chosen_heads_of_a_pattern_of_files(here, quick):
    options = ["--images=images/00[1-3].png", "--heads=2:1,1:2", "--output=o"]

    assert succeed(["inspect", "vit", "heads", *options])

    with np.load(here / "o/heads.npz") as numbers:
        assert numbers["heads"].tolist() == [[2, 1], [1, 2]]
        assert numbers["size"] == 3


def test_files_of_the_same_name_are_replaced(here, quick):
    (here / "o").mkdir()
    (here / "o/heads.png").write_bytes(b"old")

    assert succeed(["inspect", "vit", "heads", "--images=images", "--output=o"])
    assert (here / "o/heads.png").read_bytes() == b"png"


def test_data_of_a_recipe(here, quick):
    """The test split of a folder with classes is taken; its names match nothing in the weights."""
    for split in ("train", "test"):
        for number, pixels in enumerate(sample_pixels(4)):
            path = here / "data" / split / f"class{number % 2}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(to_png(pixels))

    options = ["--images=folder:data", "--num_images=3", "--output=o"]
    assert succeed(["inspect", "vit", "pca", *options])

    with np.load(here / "o/pca.npz") as numbers:
        assert numbers["size"] == 3


def test_images_that_cannot_be_read_are_excluded(here, quick):
    (here / "some").mkdir()
    (here / "some/a.png").write_bytes(to_png(sample_pixels(1)[0]))
    (here / "some/b.png").write_bytes(b"rubbish")

    code, _, err = run(
        [
            "inspect",
            "vit",
            "pca",
            "--images=some",
            "--output=o",
        ]
    )
    assert code == 0
    assert "note: 1 images cannot be read and are skipped: some/b.png" in err

    outcome = run(
        [
            "inspect",
            "vit",
            "pca",
            "--images=some/b.png",
            "--output=o",
        ]
    )
    assert "none of 1 images can be read" in outcome.err


SHEET_OVERRIDES = [
    "--config.input.mixup_alpha=0",
    "--config.input.cutmix_alpha=1.0",
    "--config.objective.label_smoothing_fraction=0.1",
]


def compute_first_batch():
    """Return the batch of the host, and the images and labels of the first training step."""
    config = load_recipe("digits", SHEET_OVERRIDES)
    source = open_datasets(config).train
    host = train_stream(
        config,
        source,
        np.arange(config.global_batch),
        0,
        1,
    )[0]
    batch = Batch(
        image_BHWC=host.image,
        label_B=host.label,
        mask_B=host.mask,
    )
    mix_key, _ = step_keys(config.seed, 0)
    image, label = mix_batch(
        config.input,
        10,
        config.model.compute_dtype,
        batch,
        mix_key,
    )
    return host, np.asarray(image, np.float32), np.asarray(label)


MISTAKES = [
    (["vit", "filter", "--output=o"], "Did you mean 'filters'?"),
    (["vit", ",", "--output=o"], "WHAT=: must be one of "),
    (["vit", "all,filters", "--output=o"], "WHAT=all: must be one of "),
    (["vit", "rollout", "--output=o"], "WHAT=rollout: must have images"),
    (
        ["vit", "rollout", "--images=images", "--split=test", "--output=o"],
        "--split: has no effect on files",
    ),
    (
        ["vit", "filters", "--images=images", "--output=o"],
        "--images=images: has no effect on filters",
    ),
    (["vit", "filters", "--shown=3", "--output=o"], "--shown=3: has no effect without --images"),
    (["vit", "filters", "--heads=1:1", "--output=o"], "--heads: has no effect on filters"),
    (["vit", "heads", "--heads=0:1", "--images=images", "--output=o"], "LAYER:HEAD"),
    (
        ["vit", "heads", "--heads=2:3", "--images=images", "--output=o"],
        "layers 1 to 2 and heads 1 to 2",
    ),
    (["vit", "gradcam", "--images=images", "--output=o"], "gradcam: ViT-custom/4 has no ResNet"),
    (
        ["vit", "reconstructions", "--images=images", "--output=o"],
        "config.objective.kind=masked_patch",
    ),
    (["vit", "filters", "--output=images/000.png"], "images/000.png"),
    (
        ["resnet", "rollout", "--images=images", "--images.resize=direct", "--output=o"],
        "R-customx0.5 has no attention",
    ),
]


@pytest.mark.parametrize(
    ("words", "message"), MISTAKES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_mistakes(here, quick, words, message):
    code, out, err = run(["inspect", *words])

    assert (code, out) == (2, "")
    assert message in err
    assert not (here / "o").exists()


def test_without_matplotlib_it_says_so_first(here, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = run(["inspect", "nothing", "--output=o"])

    assert code == 2
    assert install_command("figures") in err


def test_sheets_of_the_data_of_a_recipe(tmp_path):
    """The sheets show the batch of the first step: the same mixture of pixels and labels as the
    training step has.
    """
    output = tmp_path / "o"
    words = [
        "--config=digits",
        *SHEET_OVERRIDES,
        "--shown=6",
        f"--output={output}",
    ]
    host, image, label = compute_first_batch()
    expected_image = np.clip((image[:6] + 1) / 2, 0, 1)
    expected_label = 0.9 * label[:6] + 0.01

    out = succeed(["inspect", "data", *words])

    assert out.split() == list_outputs(output, "train", "test")
    assert (output / "train.png").read_bytes().startswith(b"\x89PNG")
    assert (output / "test.png").read_bytes().startswith(b"\x89PNG")

    train = np.load(output / "train.npz")
    assert_array_equal(train["image"], expected_image)
    assert_allclose(
        train["label"],
        expected_label,
        rtol=1e-5,
    )
    assert np.array_equal(train["record"], host.record_index[:6])
    assert ((train["label"] > 0.05).sum(axis=1) == 2).any()

    test = np.load(output / "test.npz")
    assert test["label"].max(axis=1).tolist() == [1.0] * 6


def test_a_sheet_has_the_size_of_the_first_phase(tmp_path):
    output = tmp_path / "o"
    words = [
        "--config=digits",
        "--config.phases.small.until=0.5 fraction",
        "--config.phases.small.image_size=4",
        "--config.phases.small.global_batch=2",
        "--shown=3",
        f"--output={output}",
    ]

    succeed(["inspect", "data", *words])

    assert np.load(output / "train.npz")["image"].shape == (2, 4, 4, 3)
    assert np.load(output / "test.npz")["image"].shape == (3, 8, 8, 3)


def test_data_without_a_dataset_is_rejected(tmp_path):
    code, _, err = run(
        [
            "inspect",
            "data",
            "--config=pretrain_own",
            f"--output={tmp_path}/o",
        ]
    )

    assert code == 2
    assert "config.data=None: must be set" in err
    assert not (tmp_path / "o").exists()


def test_captions():
    names = ("cat", "dog", "a name of many letters that a sheet has no room for")

    assert write_caption(np.array([0.27, 0.73, 0.0]), names) == "dog 0.73\ncat 0.27"
    assert write_caption(np.array([0.0, 1.0, 0.0]), names) == "dog 1.00"
    assert len(write_caption(np.array([0.0, 0.0, 1.0]), names)) < 30
