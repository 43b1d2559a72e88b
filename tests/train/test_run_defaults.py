"""Defaults of runs by weights, data and memory."""

import cv2
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.weights.test_families import write
from vit_jax.checkpoint.store import CheckpointStore
from vit_jax.config import load_recipe
from vit_jax.models import abstract_model
from vit_jax.sharding.fabrics import GIB
from vit_jax.train import run_defaults
from vit_jax.train.run_defaults import choose_finetuning, choose_lora, choose_pretraining
from vit_jax.weights import load_weights
from vit_jax.weights.fit import fit
from vit_jax.weights.saving import describe_weights

LORA = ["optimizer.name=adam", "schedule.learning_rate=0.001", "optimizer.lora_rank=16"]


def write_images(folder, number, names=("cat", "dog")):
    """Write small images of each class; a tenth is held out."""
    for name in names:
        inside = folder / name
        inside.mkdir(parents=True)
        for index in range(number):
            cv2.imwrite(
                str(inside / f"{index}.png"),
                np.full((8, 8, 3), index % 256, np.uint8),
            )
    return f"folder:{folder}"


@pytest.fixture
def start(tmp_path):
    """A function that returns the overrides with weights and data."""

    def write_files(case, number=20):
        weights = write(case, tmp_path / "weights")
        data = write_images(tmp_path / "images", number)
        return [f"--config.init_from={weights}", f"--config.data={data}"]

    return write_files


@pytest.mark.parametrize(
    ("case", "recipe"),
    [
        ("huggingface/dinov2", "finetune:dinov3,own"),
        ("huggingface/siglip", "finetune:siglip2,own"),
        ("timm/clip", "finetune:siglip2,own"),
        ("timm/mae", "finetune:mae,own"),
        ("timm/eva02_small", "finetune:any,own,quick"),
    ],
)
def test_the_recipe_is_that_of_the_family(start, case, recipe):
    defaults = choose_finetuning(None, start(case), uses_devices=False)

    assert defaults.recipe == recipe


def write_run(folder, weights, **changes):
    """Write the checkpoint of a run that began with weights."""
    leaves = map(jnp.asarray, weights.parameters.values())
    model = jax.tree.unflatten(jax.tree.structure(abstract_model(weights.architecture)), leaves)
    store = CheckpointStore(folder)
    metadata = describe_weights(weights) | changes
    store.save(3, {"model": model}, metadata=metadata, metrics={})
    store.close()
    return folder


@pytest.mark.parametrize(
    ("changes", "recipe"),
    [
        ({}, "finetune:dinov3,own"),
        ({"finetuning_rule": "other"}, "finetune:any,own,quick"),
        (
            {"finetuning_rule": "", "config": {"init_from": "hf://facebook/dinov2-base"}},
            "finetune:dinov3,own",
        ),
        ({"finetuning_rule": "", "config": {"init_from": "runs/mine"}}, "finetune:any,own,quick"),
    ],
)
def test_a_run_has_the_recipe_of_the_weights_that_it_began_with(
    start,
    tmp_path,
    changes,
    recipe,
):
    published, data = start("huggingface/dinov2")
    weights = load_weights(published.partition("=")[2])
    run = write_run(tmp_path / "run", weights, **changes)

    defaults = choose_finetuning(None, [f"--config.init_from={run}", data], uses_devices=False)

    assert defaults.recipe == recipe
    if not changes:
        assert defaults == choose_finetuning(None, [published, data], uses_devices=False)
    assert fit(weights, weights.architecture).finetuning_rule == "dinov3"


@pytest.mark.parametrize(
    ("case", "recipe", "override", "rule"),
    [
        ("huggingface/dinov2", "finetune:any,own", "seed=1", ",rule=dinov3"),
        ("huggingface/dinov2", "configs/finetune.py", "seed=1", ":any,rule=dinov3"),
        ("timm/mae", "finetune:any,crop=resize", "input.image_size=48", ",rule=mae"),
        ("timm/eva02_small", "finetune:any,own", "seed=1", ""),
        ("timm/mae", "finetune:any,own,quick", "seed=1", ""),
        ("timm/mae", "finetune:any,own,rule=paper", "seed=1", ""),
        ("timm/mae", "finetune:dinov3,own", "seed=1", ""),
        ("timm/mae", "finetune:ViT-B/16,own", "seed=1", ""),
        ("timm/mae", "finetune:any,own", "optimizer.name=sgd", ""),
        ("timm/mae", "finetune:any,own", "schedule.learning_rate=0.01", ""),
        ("timm/mae", "finetune:any,own", "search.learning_rates=0.1,0.2", ""),
        ("timm/mae", "digits", "seed=1", ""),
    ],
)
def test_any_takes_the_rule_of_the_family(
    start,
    case,
    recipe,
    override,
    rule,
):
    """A rule of the user stays, and so does one whose learning rate the user chooses."""
    words = [f"--config.{override}"]
    if recipe != "digits":
        words += start(case)

    defaults = choose_finetuning(recipe, words)

    assert defaults.recipe == f"{recipe}{rule}"
    assert defaults.overrides == []
    assert len(defaults.reasons) == bool(rule)


def test_without_weights_any_stays():
    assert choose_finetuning("finetune:any,own", []) == ("finetune:any,own", [], [])


@pytest.mark.parametrize(
    ("given", "searches", "added"),
    [
        ("seed=1", False, [*LORA]),
        ("seed=1", True, [*LORA, "search.learning_rates="]),
        ("optimizer.name=sgd", False, ["schedule.learning_rate=0.001", "optimizer.lora_rank=16"]),
        (
            "search.learning_rates=1e-3,1e-4",
            True,
            ["optimizer.name=adam", "optimizer.lora_rank=16"],
        ),
    ],
)
def test_lora_has_one_learning_rate_unless_the_user_searches(
    given,
    searches,
    added,
):
    overrides = choose_lora([f"--config.{given}"], 16, searches=searches)

    assert sorted(overrides) == sorted(added)


@pytest.mark.parametrize(
    ("number", "given", "overrides"),
    [
        (20, [], ["global_batch=32", "total=200steps"]),
        (20, ["--config.total=3epochs"], ["global_batch=32"]),
        (20, ["--config.global_batch=8"], ["total=200steps"]),
        (400, [], []),
    ],
)
def test_the_length_follows_the_number_of_images(
    start,
    number,
    given,
    overrides,
):
    """18 of 20 images of each class are for training; a few make at least 200 steps."""
    words = [*start("huggingface/dinov2", number), *given]

    defaults = choose_finetuning(None, words, uses_devices=False)

    assert defaults.overrides == overrides


def test_many_images_have_a_limit_of_steps(start, monkeypatch):
    monkeypatch.setattr(run_defaults, "MOST_STEPS", 210)

    defaults = choose_finetuning(
        None,
        start("huggingface/dinov2", 400),
        uses_devices=False,
    )

    assert defaults.overrides == ["total=210steps"]


@pytest.mark.parametrize(
    ("gib", "overrides", "reason"),
    [
        (1.0, [], "all parameters: a step"),
        (0.0, [*LORA], "LoRA of rank 16, which may not fit"),
    ],
)
def test_lora_or_all_parameters_by_the_memory(
    start,
    monkeypatch,
    gib,
    overrides,
    reason,
):
    monkeypatch.setattr(run_defaults, "_count_available_bytes", lambda: int(gib * GIB))
    words = [*start("huggingface/dinov2"), "--config.global_batch=8", "--config.total=9steps"]

    defaults = choose_finetuning(None, words)

    assert defaults.overrides == overrides
    assert reason in defaults.reasons[-1]
    load_recipe(defaults.recipe, [*words, *defaults.overrides])


def test_values_of_the_optimizer_stay(start, monkeypatch):
    monkeypatch.setattr(run_defaults, "_count_available_bytes", lambda: 0)
    words = [*start("huggingface/dinov2"), "--config.optimizer.layer_decay=1"]

    assert not choose_finetuning(None, words).overrides[2:]


@pytest.mark.parametrize("number", [20, 60])
def test_pretraining_by_the_number_of_images(tmp_path, monkeypatch, number):
    monkeypatch.setattr(run_defaults, "MOST_SCRATCH_IMAGES", 50)
    data = write_images(tmp_path / "images", number)

    defaults = choose_pretraining(None, data, [f"--config.data={data}"])
    config = load_recipe(defaults.recipe, [f"--config.data={data}", *defaults.overrides])

    expected = "pretrain_own:ViT-Ti/16,examples=36" if number == 20 else "pretrain_s16_baseline"
    assert defaults.recipe == expected
    assert config.input.train_split == "train"
    assert config.input.test_split == "test"
    assert config.global_batch <= 2 * number


def test_several_labels_have_an_independent_loss(tmp_path, start):
    words = start("huggingface/siglip")
    table = tmp_path / "labels.csv"
    rows = [f"images/cat/{index}.png,cat|grey" for index in range(20)]
    rows += [f"images/dog/{index}.png,dog" for index in range(20)]
    table.write_text("\n".join(["image,labels", *rows]))

    defaults = choose_finetuning(
        None,
        [*words[:1], f"--config.data=csv:{table}"],
        uses_devices=False,
    )

    assert "objective.loss=sigmoid" in defaults.overrides
