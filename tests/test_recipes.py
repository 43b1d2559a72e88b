"""Every recipe with every argument: its values as golden text, its numbers against the papers, its step traced.

`UPDATE_GOLDEN=1 pytest tests/test_recipes.py` renews the golden texts.
"""

import dataclasses
import os
import pathlib
import re
import runpy
import shlex
from typing import Any

import jax
import pytest

from vit_jax import pytree
from vit_jax.arrays import abstract_batch
from vit_jax.config import VIT_SIZES, PretrainConfig, build_architecture, load_recipe, resolve, to_text
from vit_jax.train.assemble import assemble

ROOT = pathlib.Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
GOLDEN = pathlib.Path(__file__).parent / "golden" / "recipes"


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Size and classes of a training split."""

    num_examples: int
    num_classes: int


DIGITS = Dataset(1_437, 10)
IMAGENET = Dataset(1_281_167, 1_000)
IMAGENET_21K = Dataset(14_200_000, 21_843)
JFT = Dataset(303_000_000, 18_291)

# ViT, Table 3: base learning rate, decay, weight decay, dropout of every ViT row.
TABLE_3 = {
    "pretrain_jft.py:ViT-B/16": (JFT, "7 epochs", 8e-4, "linear", 0.1, 0.0),
    "pretrain_jft.py:ViT-B/32": (JFT, "7 epochs", 8e-4, "linear", 0.1, 0.0),
    "pretrain_jft.py:ViT-L/32": (JFT, "7 epochs", 6e-4, "linear", 0.1, 0.0),
    "pretrain_jft.py:ViT-L/16,epochs=7": (JFT, "7 epochs", 4e-4, "linear", 0.1, 0.0),
    "pretrain_jft.py:ViT-L/16,epochs=14": (JFT, "14 epochs", 4e-4, "linear", 0.1, 0.0),
    "pretrain_jft.py:ViT-H/14": (JFT, "14 epochs", 3e-4, "linear", 0.1, 0.0),
    "pretrain_imagenet21k.py:ViT-B/16": (IMAGENET_21K, "90 epochs", 1e-3, "linear", 0.03, 0.1),
    "pretrain_imagenet21k.py:ViT-B/32": (IMAGENET_21K, "90 epochs", 1e-3, "linear", 0.03, 0.1),
    "pretrain_imagenet21k.py:ViT-L/16,epochs=30": (IMAGENET_21K, "30 epochs", 1e-3, "linear", 0.03, 0.1),
    "pretrain_imagenet21k.py:ViT-L/16,epochs=90": (IMAGENET_21K, "90 epochs", 1e-3, "linear", 0.03, 0.1),
    "pretrain_imagenet21k.py:ViT-L/32,epochs=30": (IMAGENET_21K, "30 epochs", 1e-3, "linear", 0.03, 0.1),
    "pretrain_imagenet21k.py:ViT-L/32,epochs=90": (IMAGENET_21K, "90 epochs", 1e-3, "linear", 0.03, 0.1),
    "pretrain_imagenet1k.py:ViT-B/16": (IMAGENET, "300 epochs", 3e-3, "cosine", 0.3, 0.1),
    "pretrain_imagenet1k.py:ViT-B/32": (IMAGENET, "300 epochs", 3e-3, "cosine", 0.3, 0.1),
    "pretrain_imagenet1k.py:ViT-L/16": (IMAGENET, "300 epochs", 3e-3, "cosine", 0.3, 0.1),
    "pretrain_imagenet1k.py:ViT-L/32": (IMAGENET, "300 epochs", 3e-3, "cosine", 0.3, 0.1),
}
BASELINE = {f"pretrain_s16_baseline.py:epochs={epochs}": IMAGENET for epochs in (90, 150, 300)}

RECIPES = {
    **{recipe: row[0] for recipe, row in TABLE_3.items()},
    "pretrain_imagenet1k.py:ViT-B/16,loss=softmax": IMAGENET,
    **BASELINE,
    "digits.py": DIGITS,
}


def load(recipe: str, *overrides: str) -> Any:
    return load_recipe(f"configs/{recipe}", overrides)


def golden_path(recipe: str) -> pathlib.Path:
    return GOLDEN / (re.sub(r"[^\w=-]+", "_", recipe.replace(".py", "")) + ".txt")


# The golden texts.


@pytest.mark.parametrize("recipe", RECIPES)
def test_values_are_the_golden_ones(recipe: str) -> None:
    text, path = to_text(load(recipe)), golden_path(recipe)
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert path.is_file(), f"{recipe} has no golden text: run once with UPDATE_GOLDEN=1"
    assert text == path.read_text()


def test_every_recipe_is_listed_here() -> None:
    assert {path.name for path in CONFIGS.glob("*.py")} == {recipe.partition(":")[0] for recipe in RECIPES}


def test_no_golden_text_is_stale() -> None:
    expected = {golden_path(recipe) for recipe in RECIPES}
    assert len(expected) == len(RECIPES)
    assert set(GOLDEN.iterdir()) == expected, "delete the texts that no recipe has"


@pytest.mark.parametrize(
    ("file", "table"), [("pretrain_jft.py", "LEARNING_RATES"), ("pretrain_imagenet21k.py", "ROWS")]
)
def test_every_row_of_a_recipe_is_listed_here(file: str, table: str) -> None:
    rows = runpy.run_path(str(CONFIGS / file))[table]
    listed = [load(recipe) for recipe in RECIPES if recipe.startswith(file)]
    assert sorted((model, f"{epochs} epochs") for model, epochs in rows) == sorted(
        (c.model.name, c.total) for c in listed
    )


@pytest.mark.parametrize("file", sorted({recipe.partition(":")[0] for recipe in RECIPES}))
def test_without_an_argument_a_recipe_is_one_that_is_listed(file: str) -> None:
    assert load(file) in [load(recipe) for recipe in RECIPES if recipe.startswith(file)]


# The papers' numbers.


@pytest.mark.parametrize("recipe", TABLE_3)
def test_table_3(recipe: str) -> None:
    config = load(recipe)
    _, total, learning_rate, decay, weight_decay, dropout = TABLE_3[recipe]
    assert config.model.name == recipe.partition(":")[2].partition(",")[0]
    assert (config.total, config.schedule.learning_rate, config.schedule.decay) == (total, learning_rate, decay)
    assert (config.optimizer.weight_decay, config.model.dropout_fraction) == (weight_decay, dropout)
    assert config.optimizer.weight_decay_meaning == "paper"
    assert (config.global_batch, config.schedule.warmup) == (4096, "10000 steps")
    assert (config.optimizer.beta1, config.optimizer.beta2) == (0.9, 0.999)


@pytest.mark.parametrize("recipe", TABLE_3)
def test_what_is_common_to_the_rows_of_table_3(recipe: str) -> None:
    config, is_imagenet = load(recipe), "imagenet1k" in recipe
    assert config.schedule.end_learning_rate == (0.0 if is_imagenet else 1e-5)
    assert config.optimizer.clip_global_norm == (1.0 if is_imagenet else None)
    model, inputs = config.model, config.input
    assert (model.pool, model.position_embedding, model.head) == ("token", "learned_1d", "mlp")
    assert (model.stochastic_depth_fraction, config.polyak.factor) == (0.0, None)
    assert (config.objective.loss, model.head_bias_init) == ("sigmoid", -10.0)
    assert (inputs.image_size, inputs.train_crop, inputs.crop_area_fraction) == ((224, 224), "inception", (0.05, 1.0))
    assert (inputs.flip, inputs.randaugment_layers, inputs.mixup_alpha) == (True, 0, 0.0)
    assert (inputs.test_resize, inputs.test_crop_fraction) == ("short_side", 224 / 256)


def test_baseline_is_that_of_its_paper() -> None:
    """2205.01580 and big_vision's vit_s16_i1k.py."""
    config = load("pretrain_s16_baseline.py")
    model, inputs, optimizer = config.model, config.input, config.optimizer
    assert (config.total, config.global_batch, config.objective.loss, config.seed) == ("90 epochs", 1024, "softmax", 0)
    assert (model.name, model.pool, model.position_embedding, model.head) == ("ViT-S/16", "gap", "sincos2d", "mlp")
    assert (model.dropout_fraction, model.stochastic_depth_fraction, model.head_bias_init) == (0.0, 0.0, 0.0)
    assert (inputs.train_split, inputs.test_split) == ("train[:99%]", "validation")
    assert (inputs.train_crop, inputs.flip, inputs.crop_area_fraction) == ("inception", True, (0.05, 1.0))
    assert (inputs.randaugment_layers, inputs.randaugment_magnitude, inputs.mixup_alpha) == (2, 10, 0.2)
    assert (inputs.image_size, inputs.test_resize, inputs.test_crop_fraction) == ((224, 224), "short_side", 224 / 256)
    assert (optimizer.weight_decay, optimizer.weight_decay_meaning) == (1e-4, "big_vision")
    assert (optimizer.clip_global_norm, optimizer.first_moment_dtype) == (1.0, "bfloat16")
    schedule = config.schedule
    assert (schedule.learning_rate, schedule.decay, schedule.end_learning_rate) == (1e-3, "cosine", 0.0)
    assert schedule.warmup == "10000 steps"


@pytest.mark.parametrize(
    ("recipe", "dataset", "thousands"),
    [
        ("pretrain_jft.py:ViT-B/16", JFT, 517.8),
        ("pretrain_jft.py:ViT-L/16,epochs=14", JFT, 1035.6),
        ("pretrain_imagenet21k.py:ViT-B/32", IMAGENET_21K, 312.0),
        ("pretrain_imagenet21k.py:ViT-L/32,epochs=30", IMAGENET_21K, 104.0),
        ("pretrain_imagenet1k.py:ViT-B/16", IMAGENET, 93.8),
        ("pretrain_s16_baseline.py", Dataset(1_268_355, 1_000), 111.5),
    ],
)
def test_lengths_in_steps(recipe: str, dataset: Dataset, thousands: float) -> None:
    steps = resolve(load(recipe), num_examples=dataset.num_examples, num_devices=8)
    assert round(steps.total / 1000, 1) == thousands
    assert steps.warmup == 10_000
    assert steps.evaluate_every % steps.checkpoint_every == 0  # the best is chosen among steps that are also saved


def test_softmax_on_imagenet_starts_without_a_bias() -> None:
    config = load("pretrain_imagenet1k.py:ViT-B/16,loss=softmax")
    assert (config.objective.loss, config.model.head_bias_init) == ("softmax", 0.0)


@pytest.mark.parametrize("size", VIT_SIZES)
def test_any_vit_trains_on_imagenet(size: str) -> None:
    config = load(f"pretrain_imagenet1k.py:ViT-{size}/16")
    assert build_architecture(config.model, image_size=(224, 224), num_classes=1000).width == VIT_SIZES[size].width


@pytest.mark.parametrize("recipe", ["pretrain_jft.py", "pretrain_imagenet21k.py"])
def test_private_or_unlisted_data_is_left_to_the_command_line(recipe: str) -> None:
    assert load(recipe).data is None
    assert load(recipe, "--config.data=folder:images").data == "folder:images"


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("pretrain_jft.py:ViT-H/16", r"no row ViT-H/16\. Its rows: ViT-B/16,epochs=7; .*ViT-H/14,epochs=14\."),
        ("pretrain_jft.py:ViT-B/16,epochs=14", "no row ViT-B/16,epochs=14"),
        ("pretrain_jft.py:ViT-L/16", "several lengths: add epochs=7 or epochs=14"),
        ("pretrain_imagenet21k.py:ViT-H/14", "no row ViT-H/14"),
        ("pretrain_imagenet21k.py:ViT-L/32", "add epochs=30 or epochs=90"),
        ("pretrain_imagenet21k.py:ViT-L/32,epoch=30", "Did you mean 'epochs'"),
        ("pretrain_imagenet1k.py:ViT-B/16,loss=hinge", "loss='hinge' is not one of sigmoid, softmax"),
        ("pretrain_s16_baseline.py:90.5", "epochs='90.5' is not of type int"),
    ],
)
def test_bad_argument(recipe: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(recipe)


# The step that would run.


def trace_step(config: PretrainConfig, dataset: Dataset, num_devices: int) -> tuple[Any, Any, Any]:
    """Abstract state before a step, and abstract state and metrics after it; takes no memory."""
    devices = jax.devices()[:num_devices]
    run = assemble(config, num_classes=dataset.num_classes, num_examples=dataset.num_examples, devices=devices)
    batch = abstract_batch(config.global_batch, run.architecture.image_size, run.batch_sharding)
    return run.abstract_state, *jax.eval_shape(run.train_step, run.abstract_state, batch)


def shapes(tree: Any) -> dict[str, Any]:
    return {name: (leaf.shape, leaf.dtype) for name, leaf in pytree.named_leaves(tree).items()}


@pytest.mark.parametrize("recipe", RECIPES)
def test_step_keeps_the_shapes_of_the_state(recipe: str) -> None:
    num_devices = 1 if recipe in ("digits.py", "pretrain_imagenet1k.py:ViT-B/16") else 8
    before, after, metrics = trace_step(load(recipe), RECIPES[recipe], num_devices)
    assert shapes(after) == shapes(before)
    assert jax.tree.structure(after) == jax.tree.structure(before)
    assert {metric.shape for metric in metrics.values()} == {()}


# What configs/README.md says.


def readme_commands() -> list[list[str]]:
    """The `--config` words of every command in code; a command may go on after a backslash."""
    text = (CONFIGS / "README.md").read_text().replace("\\\n", " ")
    commands = re.findall(r"[^`\n]*--config=[^`\n]*", text)
    return [[word for word in shlex.split(command) if word.startswith("--config")] for command in commands]


@pytest.mark.parametrize("words", readme_commands(), ids=" ".join)
def test_command_of_the_readme(words: list[str]) -> None:
    recipe, *overrides = words
    assert isinstance(load_recipe(recipe.removeprefix("--config="), overrides), PretrainConfig)


def test_readme_has_every_recipe() -> None:
    shown = {words[0].removeprefix("--config=configs/") for words in readme_commands()}
    aliases = {"pretrain_s16_baseline.py:epochs=90": "pretrain_s16_baseline.py"}
    assert {aliases.get(recipe, recipe) for recipe in RECIPES} <= shown
