"""The verb inspect, from the words of the command to the files that it writes."""

import dataclasses
import sys

import numpy as np
import pytest

from tests.evals.samples import sample_pixels, sample_weights, to_png, write_pngs
from tests.integration.commands import run, succeed
from tests.weights.small_networks import RESNET, weights_of
from vit_jax.arrays import Batch
from vit_jax.config import load_recipe
from vit_jax.imports.extras import install_command
from vit_jax.tools.figures import network
from vit_jax.tools.figures.data_sheet import caption
from vit_jax.train.inputs import open_datasets, train_stream
from vit_jax.train.step import mix_batch, step_keys
from vit_jax.weights.saving import OWN, save_weights

DRAWN = ("filters", "positions", "distance", "rollout", "heads", "similar", "pca")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Weights `vit` and `resnet`, and a folder `images` of ten images."""
    folder = tmp_path_factory.mktemp("inspect")
    save_weights(sample_weights(), folder / "vit", OWN)
    save_weights(
        dataclasses.replace(weights_of(RESNET), preprocessing=None), folder / "resnet", OWN
    )
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
    """Pictures that are not drawn: what is tested is which, and of what."""

    def draw_nothing(model, view):
        size = 0 if view.images_NHWC is None else len(view.images_NHWC)
        return network.Figure(b"png", {"size": np.array(size), "heads": np.array(view.heads)})

    kinds = {name: kind._replace(draw=draw_nothing) for name, kind in network.KINDS.items()}
    monkeypatch.setattr(network, "KINDS", kinds)


@pytest.mark.slow
def test_all_pictures_and_their_numbers(here):
    code, out, err = run(
        [
            "inspect",
            "vit",
            "--images=images",
            "--output=new/pictures",
            "--num_images=6",
            "--shown=2",
        ]
    )

    assert code == 0, err
    assert out.split() == [
        f"new/pictures/{name}.{form}" for name in DRAWN for form in ("png", "npz")
    ]
    assert "note: gradcam is skipped: ViT-custom/4 has no ResNet." in err
    assert "note: reconstructions is skipped" in err
    for name in DRAWN:
        assert (here / f"new/pictures/{name}.png").read_bytes().startswith(b"\x89PNG")

    with np.load(here / "new/pictures/similar.npz") as numbers:
        assert numbers["names"].tolist() == [
            f"images/{number:03}.png" for number in (0, 2, 4, 5, 7, 9)
        ]

    with np.load(here / "new/pictures/distance.npz") as numbers:
        assert numbers["distance_pixels"].shape == (2, 2)
        assert 0 < numbers["distance_pixels"].min() < numbers["distance_pixels"].max() < 12


def test_without_images_what_needs_none(here, quick):
    code, out, err = run(["inspect", "vit", "all", "--output=o"])

    assert (code, out.split()) == (
        0,
        ["o/filters.png", "o/filters.npz", "o/positions.png", "o/positions.npz"],
    )
    assert "note: distance is skipped: it needs --images=." in err


def test_one_image_is_enough_for_all_but_similar(here, quick):
    code, out, err = run(["inspect", "vit", "--images=images/000.png", "--output=o"])

    assert code == 0
    assert (
        "note: similar is skipped: it needs at least 2 images, and --images=images/000.png has 1."
        in err
    )
    assert "o/pca.png" in out.split()

    code, out, err = run(["inspect", "vit", "similar", "--images=images/000.png", "--output=p"])
    assert (code, out) == (2, "")
    assert "similar: it needs at least 2 images" in err


def test_chosen_heads_of_a_pattern_of_files(here, quick):
    assert succeed(
        ["inspect", "vit", "heads", "--images=images/00[1-3].png", "--heads=2:1,1:2", "--output=o"]
    )

    with np.load(here / "o/heads.npz") as numbers:
        assert numbers["heads"].tolist() == [[2, 1], [1, 2]]
        assert numbers["size"] == 3

    (here / "o/heads.png").write_bytes(b"old")

    assert succeed(["inspect", "vit", "heads", "--images=images", "--output=o"])
    assert (here / "o/heads.png").read_bytes() == b"png", "files of the same name are replaced"


def test_data_of_a_recipe(here, quick):
    """A folder with classes, of which the test split is taken; names match nothing in the weights."""
    for split in ("train", "test"):
        for number, pixels in enumerate(sample_pixels(4)):
            path = here / "data" / split / f"class{number % 2}" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(to_png(pixels))
    assert succeed(
        ["inspect", "vit", "pca", "--images=folder:data", "--num_images=3", "--output=o"]
    )

    with np.load(here / "o/pca.npz") as numbers:
        assert numbers["size"] == 3


def test_images_that_cannot_be_read_are_left_out(here, quick):
    (here / "some").mkdir()
    (here / "some/a.png").write_bytes(to_png(sample_pixels(1)[0]))
    (here / "some/b.png").write_bytes(b"rubbish")
    code, _, err = run(["inspect", "vit", "pca", "--images=some", "--output=o"])

    assert code == 0
    assert "note: 1 images cannot be read and are left out: some/b.png" in err
    assert (
        "none of 1 images can be read"
        in run(["inspect", "vit", "pca", "--images=some/b.png", "--output=o"]).err
    )


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
    """The sheets show the batch of the first step: the same mixture of pixels and labels as the training step has."""
    words = [
        "--config=digits",
        "--config.input.mixup_alpha=0",
        "--config.input.cutmix_alpha=1.0",
        "--shown=6",
    ]
    words += ["--config.objective.label_smoothing_fraction=0.1"]
    out = succeed(["inspect", "data", *words, f"--output={tmp_path}/o"])

    assert out.split() == [
        f"{tmp_path}/o/{name}.{form}" for name in ("train", "test") for form in ("png", "npz")
    ]
    for name in ("train", "test"):
        assert (tmp_path / f"o/{name}.png").read_bytes().startswith(b"\x89PNG")

    train, test = (np.load(tmp_path / f"o/{name}.npz") for name in ("train", "test"))
    config = load_recipe("digits", words[1:-2] + words[-1:])
    source = open_datasets(config).train
    host = train_stream(config, source, np.arange(config.global_batch), 0, 1)[0]
    batch = Batch(image_BHWC=host.image, label_B=host.label, mask_B=host.mask)
    image, label = mix_batch(
        config.input, 10, config.model.compute_dtype, batch, step_keys(config.seed, 0)[0]
    )

    np.testing.assert_array_equal(
        train["image"], np.clip((np.asarray(image, np.float32)[:6] + 1) / 2, 0, 1)
    )
    np.testing.assert_allclose(train["label"], 0.9 * np.asarray(label)[:6] + 0.01, rtol=1e-5)
    assert np.array_equal(train["record"], host.record_index[:6])
    assert ((train["label"] > 0.05).sum(axis=1) == 2).any()
    assert test["label"].max(axis=1).tolist() == [1.0] * 6


def test_a_sheet_has_the_size_of_the_first_phase(tmp_path):
    words = [
        "--config=digits",
        "--config.phases.small.until=0.5 fraction",
        "--config.phases.small.image_size=4",
    ]
    words += ["--config.phases.small.global_batch=2", "--shown=3", f"--output={tmp_path}/o"]
    succeed(["inspect", "data", *words])
    train, test = (np.load(tmp_path / f"o/{name}.npz")["image"].shape for name in ("train", "test"))

    assert (train, test) == ((2, 4, 4, 3), (3, 8, 8, 3))


def test_data_without_a_dataset_is_rejected(tmp_path):
    code, _, err = run(["inspect", "data", "--config=pretrain_own", f"--output={tmp_path}/o"])

    assert code == 2
    assert "config.data=None: must be set" in err
    assert not (tmp_path / "o").exists()


def test_captions():
    names = ("cat", "dog", "a name of many letters that a sheet has no room for")

    assert caption(np.array([0.27, 0.73, 0.0]), names) == "dog 0.73\ncat 0.27"
    assert caption(np.array([0.0, 1.0, 0.0]), names) == "dog 1.00"
    assert len(caption(np.array([0.0, 0.0, 1.0]), names)) < 30
