"""Every recipe with every argument: golden values, length in steps, traced step.

The golden texts hold the defaults of the schema, and of each recipe the values that differ from
these. `UPDATE_GOLDEN=1 pytest tests/test_recipes.py` renews them.
"""

import collections
import dataclasses
import functools
import json
import os
import pathlib
import re
import runpy
import shlex
from typing import Any, NamedTuple, get_type_hints

import jax
import pytest

from tests.rejections import rejects
from vit_jax.arrays import abstract_batch
from vit_jax.config import FinetuneConfig, PretrainConfig, load_recipe, resolve, to_text
from vit_jax.config.variants import parse_name
from vit_jax.train.assemble import assemble
from vit_jax.train.state_builder import architecture_of

ROOT = pathlib.Path(__file__).parents[1]
CONFIGS = ROOT / "configs"
GOLDEN = pathlib.Path(__file__).parent / "golden" / "recipes"


class Dataset(NamedTuple):
    """Size and classes of a training split."""

    num_examples: int
    num_classes: int


DIGITS = Dataset(1_437, 10)
IMAGENET = Dataset(1_281_167, 1_000)
IMAGENET_21K = Dataset(14_200_000, 21_843)
JFT = Dataset(303_000_000, 18_291)


def list_rows(file: str, table: str, dataset: Dataset) -> dict[str, Dataset]:
    """Return a recipe for each row (model, epochs) of its table.

    The epochs are stated where the model has several rows.
    """
    rows = list(runpy.run_path(str(CONFIGS / file))[table])
    counts = collections.Counter(model for model, _ in rows)

    recipes = {}
    for model, epochs in rows:
        suffix = f",epochs={epochs}" if counts[model] > 1 else ""
        recipes[f"{file}:{model}{suffix}"] = dataset
    return recipes


OWN = Dataset(200, 3)


PETS = Dataset(3_680, 37)


FASHION = Dataset(60_000, 10)


FINETUNING = {  # the paper's Table 4, and BiT-HyperRule
    "ViT-B/16,cifar10": Dataset(50_000, 10),
    "R50x1,cifar10,rule=bit": Dataset(50_000, 10),
    "ViT-B/16,cifar100": Dataset(50_000, 100),
    "R50+ViT-B/16,cifar100": Dataset(50_000, 100),
    "ViT-B/16,pets": PETS,
    "R50x1,pets,rule=bit": PETS,
    "ViT-B/16,imagenet": IMAGENET,
    "ViT-L/16,imagenet": IMAGENET,
    "ViT-H/14,imagenet": IMAGENET,
    "R50x1,imagenet,rule=bit": IMAGENET,
    "ViT-B/16,flowers": Dataset(1_020, 102),
    "ViT-B/16,vtab": Dataset(1_000, 100),
    "any,own": OWN,
    "any,own,quick": OWN,
    "augreg,imagenet": IMAGENET,
    "augreg,pets": PETS,
    "mae,own": OWN,
    "dinov3,own": OWN,
    "siglip2,own": OWN,
    "mae,imagenet": IMAGENET,
    "ViT-L/16,imagenet,rule=mae": IMAGENET,
    "dinov3,imagenet": IMAGENET,
    "siglip2,imagenet": IMAGENET,
}

RECIPES = {
    **{f"finetune.py:{recipe}": dataset for recipe, dataset in FINETUNING.items()},
    "digits_transfer.py:pretrain": Dataset(718, 5),
    "digits_transfer.py:untrained": Dataset(718, 5),
    "digits_transfer.py:finetune": Dataset(718, 5),
    "digits_transfer.py:scratch": Dataset(718, 5),
    "digits_masked.py:pretrain": DIGITS,
    "digits_masked.py:untrained": DIGITS,
    "digits_masked.py:finetune": DIGITS,
    "digits_masked.py:scratch": DIGITS,
    "digits_studies.py:ViT-48": DIGITS,
    "digits_studies.py:Axial-48": DIGITS,
    "digits_studies.py:ResNet": DIGITS,
    "digits_studies.py:Hybrid": DIGITS,
    "masked_patch.py:ViT-B/16": JFT,
    **list_rows("pretrain_jft.py", "LEARNING_RATES", JFT),
    **list_rows("pretrain_imagenet21k.py", "ROWS", IMAGENET_21K),
    "pretrain_imagenet1k.py:ViT-B/16": IMAGENET,
    "pretrain_imagenet1k.py:ViT-B/32": IMAGENET,
    "pretrain_imagenet1k.py:ViT-L/16": IMAGENET,
    "pretrain_imagenet1k.py:ViT-L/32": IMAGENET,
    "pretrain_imagenet1k.py:ViT-B/16,loss=softmax": IMAGENET,
    "pretrain_own.py:ViT-Ti/16": Dataset(10_000, 20),
    "pretrain_own.py:ViT-Ti/16,examples=1000": Dataset(1_000, 5),
    "pretrain_own.py:ViT-S/16,examples=100000": Dataset(100_000, 100),
    "pretrain_own.py:R50x1": Dataset(10_000, 20),
    "pretrain_s16_baseline.py:epochs=90": IMAGENET,
    "pretrain_s16_baseline.py:epochs=150": IMAGENET,
    "pretrain_s16_baseline.py:epochs=300": IMAGENET,
    "pretrain_augreg.py:B/16": IMAGENET_21K,
    "pretrain_augreg.py:B/16,aug=medium1": IMAGENET_21K,
    "pretrain_augreg.py:R26+S/32": IMAGENET_21K,
    "pretrain_augreg.py:S/16,data=i1k": IMAGENET,
    "pretrain_deit3.py:B/16": IMAGENET,
    "pretrain_deit3.py:B/16,stage=finetune": IMAGENET,
    "pretrain_deit3.py:H/14,data=i21k": IMAGENET_21K,
    "fashion.py:R14x0.5": FASHION,
    "fashion.py:ViT-64": FASHION,
    "fashion.py:Hybrid-64": FASHION,
    "digits.py": DIGITS,
    "digits.py:R14x0.5": DIGITS,
    "digits.py:R14x0.5+ViT-mu/4": DIGITS,
}


def name_file(recipe: str) -> str:
    return recipe.partition(".py")[0]


FILES = sorted({name_file(recipe) for recipe in RECIPES})


@functools.cache
def load(recipe: str) -> Any:
    return load_recipe(f"configs/{recipe}")


def list_recipes(file: str) -> list[str]:
    return [recipe for recipe in RECIPES if name_file(recipe) == file]


@functools.cache
def build_defaults(kind: type) -> Any:
    """Return a config with "required" in every field that has no default."""
    config = object.__new__(kind)
    hints = get_type_hints(kind)

    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if field.default is not dataclasses.MISSING:
            value = field.default
        elif field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        elif dataclasses.is_dataclass(hint):
            value = build_defaults(hint)
        else:
            value = "required"
        object.__setattr__(config, field.name, value)

    return config


def describe_differences(config: Any) -> str:
    """Return the class of a config and the lines of `to_text` that its defaults do not have.

    Lines of the defaults that the config lacks may hold nothing but an empty section.
    """
    kind = type(config)
    lines = to_text(config).splitlines(keepends=True)
    default_lines = to_text(build_defaults(kind)).splitlines(keepends=True)

    names = {line.partition(":")[0] for line in lines}
    for line in default_lines:
        assert line.partition(":")[0] in names or line.endswith(": {}\n")

    text = f"{kind.__name__}\n"
    for line in lines:
        if line not in default_lines:
            text += line
    return text


def describe_file(file: str) -> str:
    """Return the golden text of a recipe, or of the defaults."""
    parts = []
    if file == "defaults":
        for kind in (PretrainConfig, FinetuneConfig):
            text = to_text(build_defaults(kind))
            parts.append(f"[{kind.__name__}]\n{text}")
    else:
        for recipe in list_recipes(file):
            text = describe_differences(load(recipe))
            parts.append(f"[{recipe}]\n{text}")
    return "\n".join(parts)


@pytest.mark.parametrize("file", ["defaults", *FILES])
def test_values_are_the_golden_ones(file: str) -> None:
    path = GOLDEN / f"{file}.txt"
    text = describe_file(file)
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.write_text(text)

    assert path.is_file(), f"{file} has no golden text: run once with UPDATE_GOLDEN=1"
    expected = path.read_text().split("\n")
    assert text.split("\n") == expected, "run once with UPDATE_GOLDEN=1 if the change is intended"


def test_every_recipe_is_listed_here_and_no_golden_text_is_stale() -> None:
    golden = os.listdir(GOLDEN)
    expected = [f"{name}.txt" for name in ("defaults", *FILES)]
    recipes = {path.stem for path in CONFIGS.glob("*.py")}

    assert recipes == set(FILES)
    assert sorted(golden) == sorted(expected), "delete the texts that no recipe has"


@pytest.mark.parametrize("file", FILES)
def test_without_an_argument_a_recipe_is_one_that_is_listed(file: str) -> None:
    assert load(f"{file}.py") in [load(recipe) for recipe in list_recipes(file)]


@pytest.mark.parametrize(
    ("crop", "pixels"),
    [
        ("inception", None),
        ("resize", 448),
        ("resize_short_side", 448),
    ],
)
def test_the_crop_of_fine_tuning(crop: str, pixels: int | None) -> None:
    inputs = load(f"finetune.py:ViT-B/16,cifar10,crop={crop}").input

    assert inputs.train_crop == crop
    assert inputs.train_resize_pixels == pixels


@pytest.mark.parametrize("pixels", [384, 224])
def test_the_resize_of_test_images_of_fine_tuning(pixels: int) -> None:
    """The crop fraction is big_vision's; the released code resizes directly, as by default."""
    recipe = f"finetune.py:ViT-B/16,cifar10,image_size={pixels}"

    cropped = load(f"{recipe},test_resize=short_side").input

    assert cropped.test_resize == "short_side"
    assert cropped.test_crop_fraction == 384 / 448
    assert load(f"{recipe},test_resize=direct") == load(recipe)


@pytest.mark.parametrize("rule", ["mae", "dinov3", "siglip2"])
def test_rules_of_fine_tuning(rule: str) -> None:
    config = load(f"finetune.py:{rule}")

    assert load(f"finetune.py:{rule},own") == config
    assert load(f"finetune.py:any,own,rule={rule}") == config
    assert load(f"finetune.py:{rule},pets,image_size=384").input.image_size == (384, 384)


def test_fine_tuning_of_table_5() -> None:
    config = load("finetune.py:ViT-L/16,imagenet,image_size=384")

    assert config.input.image_size == (384, 384)
    assert config.polyak.factor is None


@pytest.mark.parametrize(
    ("recipe", "dataset", "thousands"),
    [
        ("pretrain_jft.py:ViT-B/16", JFT, 517.8),
        ("pretrain_jft.py:ViT-L/16,epochs=14", JFT, 1035.6),
        ("pretrain_imagenet21k.py:ViT-L/32,epochs=30", IMAGENET_21K, 104.0),
        ("pretrain_imagenet1k.py:ViT-B/16", IMAGENET, 93.8),
        ("pretrain_s16_baseline.py", Dataset(1_268_355, 1_000), 111.5),
    ],
)
def test_lengths_in_steps(
    recipe: str,
    dataset: Dataset,
    thousands: float,
) -> None:
    """Evaluated steps are also saved, so that the best is among the checkpoints."""
    steps = resolve(
        load(recipe),
        num_examples=dataset.num_examples,
        num_devices=8,
    )

    assert round(steps.total / 1000, 1) == thousands
    assert steps.warmup == 10_000
    assert steps.evaluate_every % steps.checkpoint_every == 0


@pytest.mark.parametrize(
    ("recipe", "field", "rule"),
    [
        ("pretrain_imagenet1k.py:ViT-B/16,loss=hinge", "loss='hinge'", "sigmoid, softmax"),
        ("fashion.py:R50x1", "'R50x1'", "ViT-32, .*config.model.name"),
        ("digits.py:R26x0.5", "'R26x0.5'", "ViT-mu/2, R14x0.5, .*config.model.name"),
        ("finetune.py:cifar10", "model.name='cifar10'", "nearest"),
        ("finetune.py:dinov2,own", "model.name='dinov2'", "any, augreg, mae, dinov3, siglip2"),
        (
            "finetune.py:ViT-B/16,cifar",
            "task='cifar'",
            "cifar10, cifar100, pets, flowers, imagenet, vtab, ",
        ),
        (
            "finetune.py:ViT-B/16,pets,rule=bitt",
            "rule='bitt'",
            "paper, bit, quick, augreg, mae, dinov3, siglip2",
        ),
        ("finetune.py:mae,pets,rule=bit", "rule=bit", "mae is a rule already"),
        ("finetune.py:ViT-B/16,own,rule=bit", "rule=bit", "number of training images.*examples=N"),
        (
            "finetune.py:ViT-B/16,pets,crop=center",
            "crop='center'",
            "inception, resize, resize_short_side",
        ),
        ("finetune.py:R50x1,pets,rule=bit,crop=resize", "crop=resize", "no effect.*rule=bit"),
        ("finetune.py:ViT-B/16,pets,test_resize=crop", "test_resize='crop'", "direct, short_side"),
        (
            "finetune.py:R50x1,pets,rule=bit,test_resize=direct",
            "test_resize=direct",
            "no effect.*rule=bit",
        ),
        ("finetune.py:ViT-B/16,pets,examples=5", "examples=", "rule=bit"),
        ("finetune.py:any,own,orientation=up", "orientation='up'", "upright, any"),
        ("pretrain_own.py:ViT-Ti/16,orientation=up", "orientation='up'", "upright, any"),
        (
            "pretrain_own.py:ViT-Ti/16,examples=200000",
            "examples=200000",
            "1 to 100,000.*pretrain_imagenet1k",
        ),
        ("finetune.py:augreg,pets,rule=bit", "rule=bit", "augreg is a rule already"),
        ("pretrain_augreg.py:ViT-H/14", "model=ViT-H/14", "Ti/16, S/32, .*R50.L/32"),
        ("pretrain_augreg.py:S/16,data=i2k", "data=i2k", "i21k, i1k"),
        (
            "pretrain_augreg.py:S_8-i21k-300ep-lr_0.001-aug_none-wd_0.1-do_0.0-sd_0.0",
            "model=S/8",
            "Ti/16, S/32",
        ),
        ("pretrain_deit3.py:Ti/16", "model=Ti/16", "S/16, B/16, L/16, H/14"),
        ("pretrain_deit3.py:ViT-H/16", "model=ViT-H/16", "S/16, B/16, L/16, H/14"),
        ("pretrain_deit3.py:B/16,epochs=300", "epochs=300", "400 or 800"),
        ("pretrain_deit3.py:B/16,stage=tune", "stage=tune", "pretrain, finetune"),
        ("pretrain_deit3.py:S/16,stage=finetune", "stage=finetune", "224 pixels"),
        ("digits_transfer.py:tune", "stage='tune'", "pretrain, untrained, finetune, scratch"),
    ],
)
def test_bad_argument(recipe: str, field: str, rule: str) -> None:
    with rejects(field, rule):
        load(recipe)


def describe_step(recipe: str) -> str:
    """Return the config without what changes no line of a step.

    These are the length, the learning rate, the data and the numbers in the name of a network.
    """
    config = load(recipe)
    stripped = dataclasses.replace(
        config,
        total="",
        schedule={},
        model=dataclasses.replace(
            config.model,
            name="ViT-B/16",
            remat="none",
        ),
        data=None,
        input={},
        sharding={},
    )
    return to_text(stripped)


def choose_steps() -> list[Any]:
    """Return one recipe of each kind of step, ViTs if there are any: they are traced fastest."""
    resnets_first = sorted(RECIPES, key=lambda recipe: "R" not in recipe)
    recipe_of_step = {}
    for recipe in resnets_first:
        recipe_of_step[describe_step(recipe)] = recipe

    parameters = []
    for recipe in recipe_of_step.values():
        marks = () if recipe == "digits.py" else pytest.mark.slow
        parameters.append(pytest.param(recipe, marks=marks))
    return parameters


def name_network(config: Any) -> Any:
    """Give ViT-B/16 to a recipe for weights of any network, and image sizes that it divides."""
    if config.model.name is not None:
        return config

    inputs = config.input
    if inputs.image_size is None or inputs.image_size[0] % 16:
        inputs = dataclasses.replace(inputs, image_size=(32, 32))
    model = dataclasses.replace(config.model, name="ViT-B/16")
    return dataclasses.replace(config, model=model, input=inputs)


def list_shapes(tree: Any) -> list[Any]:
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]


@pytest.mark.parametrize("recipe", choose_steps())
def test_step_keeps_the_shapes_of_the_state(recipe: str) -> None:
    """The step is traced, which takes no memory."""
    config = name_network(load(recipe))
    dataset = RECIPES[recipe]
    architecture = architecture_of(config, dataset.num_classes)
    run = assemble(
        config,
        architecture,
        num_examples=dataset.num_examples,
        devices=jax.devices()[:1],
    )
    batch = abstract_batch(
        config.global_batch,
        architecture.image_shape,
        run.batch_sharding,
    )
    before = run.abstract_state

    after, metrics = jax.eval_shape(run.train_step, before, batch)

    assert jax.tree.structure(after) == jax.tree.structure(before)
    assert list_shapes(after) == list_shapes(before)
    for metric in metrics.values():
        assert metric.shape == ()


def list_documented_commands() -> list[list[str]]:
    """Return the `--config` words of every command; a command may go on after a backslash."""
    docs = ROOT / "docs"
    pages = (CONFIGS / "README.md", docs / "custom_images.md", docs / "data.md")

    commands = []
    for page in pages:
        text = page.read_text().replace("\\\n", " ")
        for command in re.findall(r"[^`\n]*--config=[^`\n]*", text):
            words = shlex.split(command)
            commands.append([word for word in words if word.startswith("--config")])
    return commands


@pytest.mark.parametrize("words", list_documented_commands(), ids=" ".join)
def test_command_of_the_readme(words: list[str]) -> None:
    recipe, *overrides = words

    config = load_recipe(recipe.removeprefix("--config="), overrides)

    assert isinstance(config, PretrainConfig | FinetuneConfig)


def test_readme_has_every_recipe() -> None:
    aliases = {
        "pretrain_s16_baseline.py:epochs=90": "pretrain_s16_baseline.py",
        "pretrain_deit3.py:B/16": "pretrain_deit3.py",
    }
    shown = {recipe for recipe, *_ in list_documented_commands()}

    for recipe in RECIPES:
        shortest = aliases.get(recipe, recipe)
        assert f"--config=configs/{shortest}" in shown


@pytest.mark.parametrize(
    ("recipe", "pixels", "border"),
    [
        ("ViT-H/14,cifar10", 384, "drop"),  # the released code has 27 x 27 patches
        ("ViT-H/14,pets,rule=bit", 480, "drop"),
        ("ViT-H/14,cifar10,image_size=378", 378, "refuse"),
        ("ViT-H/14,own", 224, "refuse"),
        ("ViT-B/16,cifar10", 384, "refuse"),
    ],
)
def test_resolution_fits_the_patches(
    recipe: str,
    pixels: int,
    border: str,
) -> None:
    config = load(f"finetune.py:{recipe}")

    assert config.input.image_size == (pixels, pixels)
    assert config.model.uncovered_border == border

    patches = pixels // parse_name(config.model.name).patch[0]
    assert architecture_of(config, 10).grid == (patches, patches)


def read_golden(name: str) -> Any:
    return json.loads((ROOT / "tests/golden" / f"{name}.json").read_text())


AUGREG = read_golden("augreg")
BASELINE = read_golden("s16_baseline")
DEIT3 = read_golden("deit3")


def read_readme_row(words: str) -> list[str]:
    """Return the cells of the row of a command in the tables of recipes."""
    lines = (CONFIGS / "README.md").read_text().splitlines()
    rows = [line for line in lines if f"`{words}`" in line]

    assert len(rows) == 1, words
    return [cell.strip() for cell in rows[0].strip("|").split("|")]


@pytest.mark.parametrize("data", AUGREG["aug_setting"])
def test_augreg_is_as_released(data):
    released = AUGREG["optimizer"]

    for model, aug in AUGREG["aug_setting"][data].items():
        config = load_recipe(f"pretrain_augreg:{model},data={data}")
        inputs = config.input
        optimizer = config.optimizer
        layers, magnitude = AUGREG["randaug"][aug] or (0, 0)

        assert inputs.randaugment_layers == layers
        assert inputs.randaugment_magnitude == magnitude
        assert inputs.mixup_alpha == AUGREG["mixup"][aug]
        assert config.global_batch == AUGREG["batch_size"]
        assert config.total == f"{AUGREG['epochs']} epochs"
        assert config.model.head_bias_init == AUGREG["head_bias"][data]
        assert config.schedule.learning_rate == released["lr"]
        assert config.schedule.warmup == "10000 steps"
        assert optimizer.weight_decay * released["lr"] == pytest.approx(released["wd"])
        assert optimizer.clip_global_norm == 1.0
        assert optimizer.first_moment_dtype == released["mu_dtype"]


@pytest.mark.parametrize("name", AUGREG["released"])
def test_augreg_by_the_name_of_a_released_file(name):
    """Both files of a network name it: the pre-trained and the fine-tuned one."""
    model, depth = AUGREG["released"][name]
    pattern = r"aug_(\w+)-wd_([\d.]+)-do_([\d.]+)-sd_([\d.]+)"
    aug, weight_decay, dropout, stochastic_depth = re.search(pattern, name).groups()

    config = load_recipe(f"pretrain_augreg:{name}")
    of_finetuned = load_recipe(f"pretrain_augreg:{name}--imagenet2012-steps_20k.npz")

    assert of_finetuned == config
    assert config.model.name == model
    assert architecture_of(config, 21_843).depth == depth
    assert config.input.mixup_alpha == AUGREG["mixup"][aug]
    assert config.optimizer.weight_decay == float(weight_decay)
    assert config.model.dropout_fraction == float(dropout)
    assert config.model.stochastic_depth_fraction == float(stochastic_depth)


@pytest.mark.parametrize(
    ("task", "length"),
    [
        ("pets", AUGREG["finetuning"]),
        ("imagenet", AUGREG["finetuning"]["imagenet2012"]),
    ],
    ids=["pets", "imagenet"],
)
def test_fine_tuning_of_augreg_is_as_released(task, length):
    released = AUGREG["finetuning"]
    config = load(f"finetune.py:augreg,{task}")
    optimizer = config.optimizer
    inputs = config.input

    actual = {
        "learning_rates": config.search.learning_rates,
        "total": config.total,
        "decay": config.schedule.decay,
        "warmup": config.schedule.warmup,
        "global_batch": config.global_batch,
        "optimizer": optimizer.name,
        "momentum": optimizer.momentum,
        "weight_decay": optimizer.weight_decay,
        "clip_global_norm": optimizer.clip_global_norm,
        "first_moment_dtype": optimizer.first_moment_dtype,
        "dropout_fraction": config.model.dropout_fraction,
        "train_resize_pixels": inputs.train_resize_pixels,
        "image_size": inputs.image_size,
    }

    assert actual == {
        "learning_rates": tuple(released["lr"]),
        "total": f"{length['total_steps']} steps",
        "decay": "cosine",
        "warmup": f"{length['warmup_steps']} steps",
        "global_batch": released["batch"],
        "optimizer": "sgd",
        "momentum": released["momentum"],
        "weight_decay": 0.0,
        "clip_global_norm": 1.0,
        "first_moment_dtype": released["optim_dtype"],
        "dropout_fraction": released["dropout_rate"],
        "train_resize_pixels": released["resize"]["384"],
        "image_size": (384, 384),
    }


def test_small_images_in_fine_tuning_of_augreg():
    inputs = load("finetune.py:augreg,vtab,image_size=224").input

    assert inputs.train_resize_pixels == AUGREG["finetuning"]["resize"]["224"]
    assert inputs.image_size == (224, 224)


def test_the_rule_of_augreg():
    assert load("finetune.py:augreg") == load("finetune.py:any,own,rule=augreg")
    assert load("finetune.py:ViT-B/16,pets,rule=augreg").model.name == "ViT-B/16"


@pytest.mark.parametrize("name", AUGREG["finetuning"]["imagenet2012_at_384"])
def test_expected_accuracies_of_augreg(name):
    """The row of each released file has its accuracy; the text names the rates."""
    rate, accuracy = AUGREG["finetuning"]["imagenet2012_at_384"][name]
    (file,) = (file for file in AUGREG["released"] if file.startswith(f"{name}-"))
    config = load_recipe(f"pretrain_augreg:{file}")

    text = (CONFIGS / "README.md").read_text()
    commands = re.findall(r"`--config=configs/pretrain_augreg.py:([^` ]*)`", text)
    (row,) = (row for row in commands if load_recipe(f"pretrain_augreg:{row}") == config)
    cells = read_readme_row(f"--config=configs/pretrain_augreg.py:{row}")

    models = runpy.run_path(str(CONFIGS / "pretrain_augreg.py"))["MODELS"]
    model, _, accuracy_cell, *_ = cells
    has_large_rate = model in ("B/16", "S/16", "Ti/16", "R+Ti/16")

    assert model in models
    assert accuracy_cell == f"{accuracy:.2f}"
    assert has_large_rate == (rate == 0.03)


@pytest.mark.parametrize("epochs", [90, 150, 300])
def test_the_baseline_is_as_released(epochs):
    config = load(f"pretrain_s16_baseline.py:epochs={epochs}")
    inputs = config.input
    model = config.model
    optimizer = config.optimizer
    schedule = config.schedule

    actual = {
        "total": config.total,
        "data": config.data,
        "train_split": inputs.train_split,
        "global_batch": config.global_batch,
        "loss": config.objective.loss,
        "image_size": inputs.image_size,
        "test_crop_fraction": inputs.test_crop_fraction,
        "randaugment": [inputs.randaugment_layers, inputs.randaugment_magnitude],
        "mixup": inputs.mixup_alpha,
        "variant": model.name,
        "head": model.head == "mlp",
        "pool": model.pool,
        "position_embedding": model.position_embedding,
        "clip_global_norm": optimizer.clip_global_norm,
        "first_moment_dtype": optimizer.first_moment_dtype,
        "weight_decay": optimizer.weight_decay,
        "weight_decay_meaning": optimizer.weight_decay_meaning,
        "learning_rate": schedule.learning_rate,
        "decay": schedule.decay,
        "warmup": schedule.warmup,
    }

    assert set(BASELINE["model"]) == {"variant", "rep_size", "pool_type", "posemb"}
    assert actual == {
        "total": f"{epochs} epochs",
        "data": f"tfds:{BASELINE['dataset']}",
        "train_split": BASELINE["train_split"],
        "global_batch": BASELINE["batch_size"],
        "loss": "softmax",
        "image_size": (BASELINE["crop"], BASELINE["crop"]),
        "test_crop_fraction": BASELINE["crop"] / BASELINE["resize_small"],
        "randaugment": BASELINE["randaug"],
        "mixup": BASELINE["mixup"],
        "variant": f"ViT-{BASELINE['model']['variant']}",
        "head": BASELINE["model"]["rep_size"],
        "pool": BASELINE["model"]["pool_type"],
        "position_embedding": BASELINE["model"]["posemb"],
        "clip_global_norm": 1.0,
        "first_moment_dtype": BASELINE["mu_dtype"],
        "weight_decay": BASELINE["wd"],
        "weight_decay_meaning": "big_vision",
        "learning_rate": BASELINE["lr"],
        "decay": BASELINE["decay_type"],
        "warmup": f"{BASELINE['warmup_steps']} steps",
    }


def test_the_usual_length_of_the_baseline():
    assert load("pretrain_s16_baseline.py").total == f"{BASELINE['num_epochs']} epochs"


@pytest.mark.parametrize("epochs", [90, 150, 300])
def test_the_readme_has_the_results_of_the_baseline(epochs):
    suffix = "" if epochs == 90 else f":epochs={epochs}"

    cells = read_readme_row(f"--config=configs/pretrain_s16_baseline.py{suffix}")

    assert str(BASELINE["expected"][str(epochs)]) in cells
    for number in BASELINE["reproduced"].get(str(epochs), []):
        assert f"{number}" in (CONFIGS / "README.md").read_text()


class Deit3Row(NamedTuple):
    """A row of the JAX reproduction: a kind of run, a model, epochs and numbers."""

    kind: str
    model: str
    epochs: int
    numbers: tuple

    @property
    def stage(self) -> str:
        return "finetune" if "-ft-" in self.kind else "pretrain"

    @property
    def data(self) -> str:
        return self.kind.partition("-")[0].replace("in", "i")

    def load(self):
        """Return the config of the recipe."""
        arguments = f"data={self.data},epochs={self.epochs},stage={self.stage}"
        return load_recipe(f"pretrain_deit3:{self.model},{arguments}")

    def released_values(self) -> dict[str, Any]:
        """Return the values of the reproduction's config."""
        columns = DEIT3["columns"][3:]
        values = DEIT3["common"] | DEIT3["kinds"][self.kind]
        return values | dict(zip(columns, self.numbers, strict=True))


DEIT3_ROWS = []
for kind, model, epochs, *numbers in DEIT3["rows"]:
    DEIT3_ROWS.append(Deit3Row(kind, model, epochs, tuple(numbers)))


# Names of the JAX reproduction
AUGMENTATIONS = {
    (True, 0, 0): "3a",
    (False, 2, 9): "rand-m9-mstd0.5-inc1",
}


DEIT3_CROPS = {
    ("inception", (0.08, 1.0), "torchvision"): "rrc",
    ("simple", (0.05, 1.0), "tf"): "src",
}


DEIT3_LOSSES = {"bce": "bce", "softmax": "ce"}


DEIT3_OPTIMIZERS = {"adam": "adamw", "lamb": "lamb"}


DEIT3_POSITIONS = {("learned_1d", "patches"): "learnable"}


def describe_in_deit3_words(config) -> dict[str, Any]:
    """Return the values of a config by the names of the reproduction, without the network's."""
    inputs = config.input
    optimizer = config.optimizer
    schedule = config.schedule
    objective = config.objective
    augmentation = (
        inputs.three_augment,
        inputs.randaugment_layers,
        inputs.randaugment_magnitude,
    )
    crop = (inputs.train_crop, inputs.crop_area_fraction, inputs.crop_distribution)

    return {
        "train-batch-size": config.global_batch,
        "color-jitter": inputs.color_jitter,
        "auto-augment": AUGMENTATIONS[augmentation],
        "random-crop": DEIT3_CROPS[crop],
        "random-erasing": inputs.erasing_fraction,
        "test-crop-ratio": inputs.test_crop_fraction,
        "augment-repeats": inputs.repeats,
        "mixup": inputs.mixup_alpha,
        "cutmix": inputs.cutmix_alpha,
        "criterion": DEIT3_LOSSES[objective.loss],
        "label-smoothing": objective.label_smoothing_fraction,
        "optimizer": DEIT3_OPTIMIZERS[optimizer.name],
        "adam-b1": optimizer.beta1,
        "adam-b2": optimizer.beta2,
        "adam-eps": optimizer.epsilon,
        "lr-decay": optimizer.layer_decay,
        "clip-grad": optimizer.clip_global_norm or 0.0,
        "warmup-epochs": int(schedule.warmup.removesuffix(" epochs")),
        "end-learning-rate": schedule.end_learning_rate,
        "training-epochs": int(config.total.removesuffix(" epochs")),
        "image-size": inputs.image_size[0],
        "learning-rate": schedule.learning_rate,
        "weight-decay": optimizer.weight_decay,
        "droppath": config.model.stochastic_depth_fraction,
    }


def describe_deit3_network(config) -> dict[str, Any]:
    """Return the values of a pre-training config that describe the network."""
    architecture = architecture_of(config, 1_000)
    positions = (architecture.position_embedding, architecture.position_tokens)

    assert architecture.head == "linear"
    return {
        "layerscale": architecture.layer_scale,
        "posemb": DEIT3_POSITIONS[positions],
        "pooling": {"token": "cls"}[architecture.pool],
        "dropout": architecture.dropout_fraction,
    }


@pytest.mark.parametrize("row", DEIT3_ROWS, ids=lambda row: " ".join(map(str, row[:3])))
def test_deit3_is_as_released(row):
    """Every value of the JAX reproduction's configs is that of the recipe.

    In fine-tuning, the network comes with the weights.
    """
    config = row.load()
    released = row.released_values()

    actual = describe_in_deit3_words(config)
    if row.stage == "pretrain":
        actual |= describe_deit3_network(config)
    else:
        for name in ("layerscale", "posemb", "pooling", "dropout"):
            actual[name] = released[name]
        assert config.model.position_resize == "bicubic"

    assert actual == released
    assert config.model.name == f"ViT-{row.model}"
    assert config.optimizer.weight_decay_meaning == "paper_kernels"


def read_expected_accuracy(row: Deit3Row) -> Any:
    """Return the accuracy that the reproduction states for a row; None if it states none."""
    if row.stage != "pretrain":
        return None
    return DEIT3["expected"][row.kind][row.model].get(str(row.epochs))


@pytest.mark.parametrize(
    "row",
    [row for row in DEIT3_ROWS if read_expected_accuracy(row)],
    ids=lambda row: " ".join(map(str, row[:3])),
)
def test_the_readme_has_the_results_of_deit3(row):
    options = [row.model]
    if row.data == "i21k":
        options.append("data=i21k")
    if row.epochs in (800, 240):
        options.append(f"epochs={row.epochs}")
    argument = ",".join(options)
    suffix = "" if argument == "B/16" else f":{argument}"

    cells = read_readme_row(f"--config=configs/pretrain_deit3.py{suffix}")

    assert cells[2] == str(row.epochs)
    assert cells[3].partition(" ")[0] == str(read_expected_accuracy(row))


@pytest.mark.parametrize(
    ("argument", "field", "rule"),
    [
        ("H/14", "model=H/14", "R50+L/32"),
        ("B/16,data=jft", "data=jft", "i21k, i1k"),
        ("B/16,aug=weak", "aug=weak", "medium2"),
        ("R+Ti/16,data=i1k", "model=R+Ti/16,data=i1k", "name no augmentation"),
        ("B_16-i21k-300ep-lr_0.01-aug_none-wd_0.1-do_0.0-sd_0.0", "lr_0.01", "0.001"),
    ],
)
def test_augreg_rejections(argument, field, rule):
    with rejects(field, re.escape(rule)):
        load_recipe(f"pretrain_augreg:{argument}")
