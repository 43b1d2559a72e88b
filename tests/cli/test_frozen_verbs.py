"""The verbs on frozen features, from the words of the command to their output."""

import json

import numpy as np
import pytest

import vit_jax
from tests.evals.samples import sample_pixels, sample_weights, write_classes
from tests.integration.commands import run as run_words
from tests.integration.commands import succeed
from vit_jax.evals.features import Extractor
from vit_jax.weights.saving import OWN, save_weights


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """Weights, and the data of 40 images in two splits, as words of a command."""
    folder = tmp_path_factory.mktemp("transfer")
    save_weights(sample_weights(), folder / "weights", OWN)
    for split, seed in (("train", 0), ("test", 1)):
        write_classes(
            folder / "images" / split,
            np.arange(21) % 7,
            sample_pixels(21, seed=seed),
        )
    return [
        str(folder / "weights"),
        f"--data=folder:{folder / 'images'}",
        f"--cache={folder / 'cache'}",
    ]


def test_fewshot(words):
    result = json.loads(
        succeed(
            [
                "fewshot",
                *words,
                "--shots=1,3",
                "--seeds=0,4",
                "--json",
            ]
        )
    )
    (dataset,) = result["datasets"].values()

    assert list(dataset) == ["1", "3"]
    assert len(dataset["1"]["seeds"]) == 2
    assert dataset["1"]["test_images"] == 21
    assert result["preparation"]["value_range"] is None


@pytest.mark.parametrize(
    ("options", "criterion"),
    [
        (["--sampling=first"], "the best mean accuracy of 2"),
        (["--penalty-choice=mean_rank"], "the best mean rank of 2"),
    ],
)
def test_fewshot_searches_the_penalty(words, options, criterion):
    text = succeed(["fewshot", *words, "--shots=2", "--l2=1,100", *options])
    assert criterion in text


def test_fewshot_with_a_range_of_values(words):
    options = ["--shots=2", "--json", "--images.value_range=0,4095"]
    result = json.loads(succeed(["fewshot", *words, *options]))

    assert result["preparation"]["value_range"] == [0.0, 4095.0]


def test_probe(words):
    assert "least_squares, penalty 1024" in succeed(["probe", *words, "--method=least_squares"])
    assert "logistic, penalty 3" in succeed(["probe", *words, "--penalty=3", "--layer=block:1"])


def test_knn(words):
    outcome = run_words(["knn", *words, "--neighbours=2,50"])

    assert "2 neighbours" in outcome.out
    assert "too few training images for 50 neighbours" in outcome.err


def test_features(words, tmp_path):
    output = tmp_path / "f.npz"
    out = succeed(["features", *words, f"--output={output}", "--split=train"])

    assert "21 x 16 float32" in out
    with np.load(output) as arrays:
        for name in arrays["names"].tolist():
            assert "/train/" in name


@pytest.mark.parametrize(
    ("method", "more", "image_size"),
    [
        ("logistic", ["--layer=token_mean", "--weights.image_size=12,16"], (12, 16)),
        ("least_squares", [], (8, 12)),
    ],
)
def test_a_saved_probe_is_used_as_weights(
    words,
    tmp_path,
    method,
    more,
    image_size,
):
    """`evaluate` finds the accuracy that `probe` reports, on the images that were not trained on."""
    output = tmp_path / "probe"
    _, data, _ = words
    options = [
        f"--method={method}",
        "--penalty=2",
        "--folds=3",
        *more,
        f"--output={output}",
    ]

    outcome = run_words(["probe", *words, *options, "--json"])
    (result,) = json.loads(outcome.out)["datasets"].values()

    assert len(result["folds"]) == 3
    assert f"vit-jax predict {output} IMAGE" in outcome.err

    evaluated = json.loads(succeed(["evaluate", str(output), data, "--json"]))
    assert evaluated["accuracy"] == result["accuracy"]

    model = vit_jax.load_model(output)
    assert len(model.class_names) == 7
    assert model.architecture.image_size == image_size
    assert model.training.train_split == "train"

    again = ["probe", *words, *options]
    assert "exists" in run_words(again).err
    assert run_words([*again, "--overwrite"]).code == 0


def test_a_default_cache_that_cannot_be_written_is_not_used(
    words,
    tmp_path,
    monkeypatch,
):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    cache = tmp_path / "file/vit_jax/features"

    outcome = run_words(["knn", *words[:-1], "--neighbours=2"])

    assert outcome.code == 0
    assert "2 neighbours" in outcome.out
    assert f"note: {cache} is not writable: features are not kept" in outcome.err


@pytest.mark.parametrize(
    ("verb", "argument", "more"),
    [
        ("probe", "--folds=1", []),
        ("probe", "--overwrite", []),
        ("probe", "--output=photo.jpg", []),
        ("probe", "--layer=block:1", ["--output=x"]),
        ("probe", "--preprocessing=fewshot", ["--output=x"]),
        ("features", "--output=f.txt", []),
        ("fewshot", "--seeds=1", ["--sampling=first"]),
        ("fewshot", "--images.crop_fraction=0.5", []),
        ("knn", "--data_dir=x", []),
    ],
)
def test_mistakes(words, verb, argument, more):
    outcome = run_words([verb, *words, argument, *more])

    assert outcome.code == 2
    assert outcome.err.startswith(f"vit-jax: {argument.partition('=')[0]}")


@pytest.mark.parametrize(
    ("verb", "more", "message"),
    [
        ("probe", ["--folds=22"], "--folds=22: must be at most the number of training images, 21"),
        ("probe", ["--method=least_squares", "--folds=1000"], "--folds=1000: must be at most"),
        ("knn", ["--neighbours=22,50"], "neighbours=22: must be at most 21"),
    ],
)
def test_too_few_images_are_an_error_before_features_are_computed(
    words,
    monkeypatch,
    verb,
    more,
    message,
):
    monkeypatch.setattr(Extractor, "extract", None)
    outcome = run_words([verb, *words, *more])

    assert outcome.code != 0
    assert message in outcome.err


def test_a_search_of_the_penalty_needs_images_before_features_are_computed(
    words,
    tmp_path,
    monkeypatch,
):
    monkeypatch.setattr(Extractor, "extract", None)
    few = tmp_path / "few"
    write_classes(
        few / "train",
        np.arange(4),
        sample_pixels(4),
    )
    write_classes(
        few / "test",
        np.arange(4),
        sample_pixels(4),
    )

    outcome = run_words(["probe", words[0], f"--data=folder:{few}"])

    assert outcome.code != 0
    assert "4 training images: no class has enough images" in outcome.err


def test_features_of_a_folder_with_one_class_and_a_test_split(words, tmp_path):
    weights, *_ = words
    folder = tmp_path / "tested"
    output = tmp_path / "f.npz"
    write_classes(
        folder / "test",
        np.zeros(3, int),
        sample_pixels(3),
    )
    options = [f"--data=folder:{folder}", f"--output={output}", "--cache=none"]

    assert "3 x 16 float32" in succeed(["features", weights, *options])

    with np.load(output) as arrays:
        assert arrays["labels"].tolist() == [0, 0, 0]
        assert len(arrays["class_names"]) == 1
