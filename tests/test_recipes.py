"""Every recipe with every argument: golden values, length in steps, traced step.

The golden texts hold the defaults of the schema, and of each recipe the values that differ from
these. `UPDATE_GOLDEN=1 pytest tests/test_recipes.py` renews them.
"""

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
from vit_jax.train.assemble import architecture_of, assemble

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


def rows_of(file: str, table: str, dataset: Dataset) -> dict[str, Dataset]:
    """A recipe for each row (model, epochs) of its table; with the epochs where its model has several."""
    rows = list(runpy.run_path(str(CONFIGS / file))[table])
    models = [model for model, _ in rows]
    epochs_of = {row: f",epochs={row[1]}" if models.count(row[0]) > 1 else "" for row in rows}

    return {f"{file}:{model}{epochs_of[model, epochs]}": dataset for model, epochs in rows}


# ViT, Table 4, and BiT-HyperRule.
FINETUNING = {
    **dict.fromkeys(("ViT-B/16,cifar10", "R50x1,cifar10,rule=bit"), Dataset(50_000, 10)),
    **dict.fromkeys(("ViT-B/16,cifar100", "R50+ViT-B/16,cifar100"), Dataset(50_000, 100)),
    **dict.fromkeys(("ViT-B/16,pets", "R50x1,pets,rule=bit"), Dataset(3_680, 37)),
    **dict.fromkeys(("ViT-B/16,imagenet", "ViT-L/16,imagenet", "ViT-H/14,imagenet"), IMAGENET),
    "R50x1,imagenet,rule=bit": IMAGENET,
    "ViT-B/16,flowers": Dataset(1_020, 102),
    "ViT-B/16,vtab": Dataset(1_000, 100),
    **dict.fromkeys(("any,own", "any,own,quick"), Dataset(200, 3)),
    "augreg,imagenet": IMAGENET,
    "augreg,pets": Dataset(3_680, 37),
    **dict.fromkeys(("mae,own", "dinov3,own", "siglip2,own"), Dataset(200, 3)),
    **dict.fromkeys(
        ("mae,imagenet", "ViT-L/16,imagenet,rule=mae", "dinov3,imagenet", "siglip2,imagenet"),
        IMAGENET,
    ),
}

RECIPES = {
    **{f"finetune.py:{recipe}": dataset for recipe, dataset in FINETUNING.items()},
    **{
        f"digits_transfer.py:{s}": Dataset(718, 5)
        for s in ("pretrain", "untrained", "finetune", "scratch")
    },
    **{f"digits_masked.py:{s}": DIGITS for s in ("pretrain", "untrained", "finetune", "scratch")},
    **{
        f"digits_studies.py:{model}": DIGITS for model in ("ViT-48", "Axial-48", "ResNet", "Hybrid")
    },
    "masked_patch.py:ViT-B/16": JFT,
    **rows_of("pretrain_jft.py", "LEARNING_RATES", JFT),
    **rows_of("pretrain_imagenet21k.py", "ROWS", IMAGENET_21K),
    **{
        f"pretrain_imagenet1k.py:ViT-{s}": IMAGENET
        for s in ("B/16", "B/32", "L/16", "L/32", "B/16,loss=softmax")
    },
    "pretrain_own.py:ViT-Ti/16": Dataset(10_000, 20),
    "pretrain_own.py:ViT-Ti/16,examples=1000": Dataset(1_000, 5),
    "pretrain_own.py:ViT-S/16,examples=100000": Dataset(100_000, 100),
    "pretrain_own.py:R50x1": Dataset(10_000, 20),
    **{f"pretrain_s16_baseline.py:epochs={epochs}": IMAGENET for epochs in (90, 150, 300)},
    **{
        f"pretrain_augreg.py:{model}": IMAGENET_21K
        for model in ("B/16", "B/16,aug=medium1", "R26+S/32")
    },
    "pretrain_augreg.py:S/16,data=i1k": IMAGENET,
    **{f"pretrain_deit3.py:{row}": IMAGENET for row in ("B/16", "B/16,stage=finetune")},
    "pretrain_deit3.py:H/14,data=i21k": IMAGENET_21K,
    **{f"digits.py{model}": DIGITS for model in ("", ":R14x0.5", ":R14x0.5+ViT-mu/4")},
}

FILES = sorted({recipe.partition(".py")[0] for recipe in RECIPES})


@functools.cache
def load(recipe: str) -> Any:
    return load_recipe(f"configs/{recipe}")


@functools.cache
def defaults_of(kind: type) -> Any:
    """A config with "required" in every field that has no default."""
    config = object.__new__(kind)
    hints = get_type_hints(kind)

    for field in dataclasses.fields(kind):
        value = (
            field.default
            if field.default_factory is dataclasses.MISSING
            else field.default_factory()
        )
        if value is dataclasses.MISSING:  # the fields of a section may have defaults
            value = (
                defaults_of(hints[field.name])
                if dataclasses.is_dataclass(hints[field.name])
                else "required"
            )

        object.__setattr__(config, field.name, value)

    return config


def differences(config: Any) -> str:
    """The class of a config and the lines of `to_text` that its defaults do not have."""
    lines, defaults = (
        to_text(each).splitlines(keepends=True) for each in (config, defaults_of(type(config)))
    )
    names = {line.partition(":")[0] for line in lines}

    assert all(
        line.endswith(": {}\n") for line in defaults if line.partition(":")[0] not in names
    )  # else lost

    return "".join(
        [f"{type(config).__name__}\n", *(line for line in lines if line not in defaults)]
    )


@pytest.mark.parametrize("file", ["defaults", *FILES])
def test_values_are_the_golden_ones(file: str) -> None:
    texts = {
        recipe: differences(load(recipe))
        for recipe in RECIPES
        if recipe.partition(".py")[0] == file
    }
    if file == "defaults":
        texts = {
            kind.__name__: to_text(defaults_of(kind)) for kind in (PretrainConfig, FinetuneConfig)
        }

    text = "\n".join(f"[{name}]\n{text}" for name, text in texts.items())
    path = GOLDEN / f"{file}.txt"

    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.write_text(text)

    assert path.is_file(), f"{file} has no golden text: run once with UPDATE_GOLDEN=1"
    assert text.split("\n") == path.read_text().split("\n"), (
        "run once with UPDATE_GOLDEN=1 if the change is intended"
    )


def test_every_recipe_is_listed_here_and_no_golden_text_is_stale() -> None:
    assert {path.stem for path in CONFIGS.glob("*.py")} == set(FILES)
    assert {path.stem for path in GOLDEN.iterdir()} == {"defaults", *FILES}, (
        "delete the texts that no recipe has"
    )


@pytest.mark.parametrize("file", FILES)
def test_without_an_argument_a_recipe_is_one_that_is_listed(file: str) -> None:
    assert load(f"{file}.py") in [
        load(recipe) for recipe in RECIPES if recipe.partition(".py")[0] == file
    ]


def test_arguments_of_fine_tuning() -> None:
    for crop, pixels in (("inception", None), ("resize", 448), ("resize_short_side", 448)):
        inputs = load(f"finetune.py:ViT-B/16,cifar10,crop={crop}").input

        assert inputs.train_crop == crop
        assert inputs.train_resize_pixels == pixels

    for pixels in (384, 224):
        recipe = f"finetune.py:ViT-B/16,cifar10,image_size={pixels}"
        cropped = load(f"{recipe},test_resize=short_side").input

        assert cropped.test_resize == "short_side"
        assert cropped.test_crop_fraction == 384 / 448  # as in big_vision
        assert load(f"{recipe},test_resize=direct") == load(recipe)  # the released code's

    for rule in ("mae", "dinov3", "siglip2"):
        assert (
            load(f"finetune.py:{rule}")
            == load(f"finetune.py:{rule},own")
            == load(f"finetune.py:any,own,rule={rule}")
        )

        image_size = load(f"finetune.py:{rule},pets,image_size=384").input.image_size

        assert image_size == (384, 384)

    table_5 = load("finetune.py:ViT-L/16,imagenet,image_size=384")

    assert table_5.input.image_size == (384, 384)
    assert table_5.polyak.factor is None


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
def test_lengths_in_steps(recipe: str, dataset: Dataset, thousands: float) -> None:
    steps = resolve(load(recipe), num_examples=dataset.num_examples, num_devices=8)

    assert round(steps.total / 1000, 1) == thousands
    assert steps.warmup == 10_000
    assert (
        steps.evaluate_every % steps.checkpoint_every == 0
    )  # the best is chosen among steps that are also saved


@pytest.mark.parametrize(
    ("recipe", "field", "rule"),
    [
        ("pretrain_imagenet1k.py:ViT-B/16,loss=hinge", "loss='hinge'", "sigmoid, softmax"),
        ("digits.py:R26x0.5", "'R26x0.5'", "ViT-mu/2, R14x0.5, .*config.model.name"),
        ("finetune.py:cifar10", "model.name='cifar10'", "nearest"),
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
        (
            "pretrain_own.py:ViT-Ti/16,examples=200000",
            "examples=200000",
            "1 to 100,000.*pretrain_imagenet1k",
        ),
        ("finetune.py:augreg,pets,rule=bit", "rule=bit", "augreg is a rule already"),
        ("pretrain_deit3.py:Ti/16", "model=Ti/16", "S/16, B/16, L/16, H/14"),
        ("pretrain_deit3.py:B/16,epochs=300", "epochs=300", "400 or 800"),
        ("pretrain_deit3.py:B/16,stage=tune", "stage=tune", "pretrain, finetune"),
        ("pretrain_deit3.py:S/16,stage=finetune", "stage=finetune", "224 pixels"),
        ("digits_transfer.py:tune", "stage='tune'", "pretrain, untrained, finetune, scratch"),
    ],
)
def test_bad_argument(recipe: str, field: str, rule: str) -> None:
    with rejects(field, rule):
        load(recipe)


def kind_of_step(recipe: str) -> str:
    """Length, learning rate, network and the numbers in a name change no line of a step."""
    config = load(recipe)
    model = dataclasses.replace(config.model, name="ViT-B/16", remat="none")

    return to_text(
        dataclasses.replace(
            config,
            total="",
            schedule={},
            model=model,
            data=None,
            input={},
            sharding={},
        )
    )


RESNETS_FIRST = sorted(
    RECIPES,
    key=lambda recipe: "R" not in recipe,
)  # of a kind, a ViT is traced soonest


STEPS = {kind_of_step(recipe): recipe for recipe in RESNETS_FIRST}.values()


@pytest.mark.parametrize(
    "recipe",
    [r if r == "digits.py" else pytest.param(r, marks=pytest.mark.slow) for r in STEPS],
)
def test_step_keeps_the_shapes_of_the_state(recipe: str) -> None:
    """Traced, which takes no memory.

    A recipe for weights of any network is given those of ViT-B/16.
    """
    config = load(recipe)
    dataset = RECIPES[recipe]

    if config.model.name is None:
        model = dataclasses.replace(config.model, name="ViT-B/16")
        inputs = config.input

        if inputs.image_size[0] % 16:  # for weights with smaller patches
            inputs = dataclasses.replace(inputs, image_size=(32, 32))

        config = dataclasses.replace(config, model=model, input=inputs)

    architecture = architecture_of(config, dataset.num_classes)
    run = assemble(
        config,
        architecture,
        num_examples=dataset.num_examples,
        devices=jax.devices()[:1],
    )
    batch = abstract_batch(config.global_batch, architecture.image_size, run.batch_sharding)
    after, metrics = jax.eval_shape(run.train_step, run.abstract_state, batch)

    assert jax.tree.structure(after) == jax.tree.structure(run.abstract_state)

    before, after = (
        [(x.shape, x.dtype) for x in jax.tree.leaves(tree)] for tree in (run.abstract_state, after)
    )

    assert after == before
    assert {metric.shape for metric in metrics.values()} == {()}


def readme_commands() -> list[list[str]]:
    """The `--config` words of every command in code; a command may go on after a backslash."""
    docs = ROOT / "docs"
    pages = (CONFIGS / "README.md", docs / "custom_images.md", docs / "data.md")
    text = "\n".join(page.read_text() for page in pages).replace("\\\n", " ")
    commands = re.findall(r"[^`\n]*--config=[^`\n]*", text)

    return [
        [word for word in shlex.split(command) if word.startswith("--config")]
        for command in commands
    ]


@pytest.mark.parametrize("words", readme_commands(), ids=" ".join)
def test_command_of_the_readme(words: list[str]) -> None:
    recipe, *overrides = words

    assert isinstance(
        load_recipe(recipe.removeprefix("--config="), overrides),
        PretrainConfig | FinetuneConfig,
    )


def test_readme_has_every_recipe() -> None:
    shown = {words[0].removeprefix("--config=configs/") for words in readme_commands()}
    aliases = {"pretrain_s16_baseline.py:epochs=90": "pretrain_s16_baseline.py"}
    aliases["pretrain_deit3.py:B/16"] = "pretrain_deit3.py"

    assert {aliases.get(recipe, recipe) for recipe in RECIPES} <= shown


def test_resolution_fits_the_patches() -> None:
    for recipe, pixels, border in (
        ("ViT-H/14,cifar10", 384, "drop"),  # as the released code, which has 27 x 27 patches
        ("ViT-H/14,pets,rule=bit", 480, "drop"),
        ("ViT-H/14,cifar10,image_size=378", 378, "refuse"),
        ("ViT-H/14,own", 224, "refuse"),
        ("ViT-B/16,cifar10", 384, "refuse"),
    ):
        config = load(f"finetune.py:{recipe}")

        assert config.input.image_size == (pixels, pixels)
        assert config.model.uncovered_border == border

        expected_grid = (pixels // parse_name(config.model.name).patch[0],) * 2
        assert architecture_of(config, 10).grid == expected_grid


AUGREG, BASELINE, DEIT3 = (
    json.loads((ROOT / "tests/golden" / f"{name}.json").read_text())
    for name in ("augreg", "s16_baseline", "deit3")
)


def readme_row(words: str) -> list[str]:
    """The cells of the row of a command in the tables of recipes."""
    rows = [
        line for line in (CONFIGS / "README.md").read_text().splitlines() if f"`{words}`" in line
    ]

    assert len(rows) == 1, words

    return [cell.strip() for cell in rows[0].strip("|").split("|")]


@pytest.mark.parametrize("data", AUGREG["aug_setting"])
def test_augreg_is_as_released(data):
    for model, aug in AUGREG["aug_setting"][data].items():
        config = load_recipe(f"pretrain_augreg:{model},data={data}")
        inputs = config.input
        optimizer = config.optimizer
        released = AUGREG["optimizer"]
        randaugment = (inputs.randaugment_layers, inputs.randaugment_magnitude)

        assert randaugment == tuple(AUGREG["randaug"][aug] or (0, 0))
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
    model, depth = AUGREG["released"][name]
    aug = re.search(r"aug_(\w+)-wd_([\d.]+)-do_([\d.]+)-sd_([\d.]+)", name)
    configs = [
        load_recipe(f"pretrain_augreg:{form}")
        for form in (name, f"{name}--imagenet2012-steps_20k.npz")
    ]

    assert configs[0] == configs[1]

    config = configs[0]

    assert config.model.name == model
    assert architecture_of(config, 21_843).depth == depth
    assert config.input.mixup_alpha == AUGREG["mixup"][aug[1]]
    assert config.optimizer.weight_decay == float(aug[2])
    assert config.model.dropout_fraction == float(aug[3])
    assert config.model.stochastic_depth_fraction == float(aug[4])


def test_fine_tuning_of_augreg_is_as_released():
    released = AUGREG["finetuning"]
    for task, length in (("pets", released), ("imagenet", released["imagenet2012"])):
        config = load(f"finetune.py:augreg,{task}")
        optimizer = config.optimizer
        inputs = config.input

        assert config.search.learning_rates == tuple(released["lr"])
        assert config.total == f"{length['total_steps']} steps"
        assert config.schedule.decay == "cosine"
        assert config.schedule.warmup == f"{length['warmup_steps']} steps"
        assert config.global_batch == released["batch"]
        assert optimizer.name == "sgd"
        assert optimizer.momentum == released["momentum"]
        assert optimizer.weight_decay == 0.0
        assert optimizer.clip_global_norm == 1.0
        assert optimizer.first_moment_dtype == released["optim_dtype"]
        assert config.model.dropout_fraction == released["dropout_rate"]
        assert inputs.train_resize_pixels == released["resize"]["384"]
        assert inputs.image_size == (384, 384)

    small = load("finetune.py:augreg,vtab,image_size=224")

    assert small.input.train_resize_pixels == released["resize"]["224"]
    assert small.input.image_size == (224, 224)
    assert load("finetune.py:augreg") == load("finetune.py:any,own,rule=augreg")
    assert load("finetune.py:ViT-B/16,pets,rule=augreg").model.name == "ViT-B/16"


def test_expected_accuracies_of_augreg():
    """The row of each released file, and the rates that the text names."""
    table = runpy.run_path(str(CONFIGS / "pretrain_augreg.py"))
    text = (CONFIGS / "README.md").read_text()

    for name, (rate, accuracy) in AUGREG["finetuning"]["imagenet2012_at_384"].items():
        (file,) = (file for file in AUGREG["released"] if file.startswith(f"{name}-"))
        config = load_recipe(f"pretrain_augreg:{file}")
        commands = re.findall(r"`--config=configs/pretrain_augreg.py:([^` ]*)`", text)
        (row,) = (row for row in commands if load_recipe(f"pretrain_augreg:{row}") == config)
        cells = readme_row(f"--config=configs/pretrain_augreg.py:{row}")

        assert cells[2] == f"{accuracy:.2f}"
        assert (cells[0] in ("B/16", "S/16", "Ti/16", "R+Ti/16")) == (rate == 0.03)
        assert cells[0] in table["MODELS"]


@pytest.mark.parametrize("epochs", [90, 150, 300])
def test_the_baseline_is_as_released(epochs):
    config = load(f"pretrain_s16_baseline.py:epochs={epochs}")
    released = BASELINE
    inputs = config.input
    model = config.model
    optimizer = config.optimizer
    schedule = config.schedule

    assert config.total == f"{epochs} epochs"
    assert load("pretrain_s16_baseline.py").total == f"{released['num_epochs']} epochs"
    assert config.data == f"tfds:{released['dataset']}"
    assert inputs.train_split == released["train_split"]
    assert config.global_batch == released["batch_size"]
    assert config.objective.loss == "softmax"
    assert inputs.image_size == (released["crop"],) * 2
    assert inputs.test_crop_fraction == released["crop"] / released["resize_small"]
    assert [inputs.randaugment_layers, inputs.randaugment_magnitude] == released["randaug"]
    assert inputs.mixup_alpha == released["mixup"]

    described = {"variant": model.name.removeprefix("ViT-"), "rep_size": model.head == "mlp"}

    assert (
        described | {"pool_type": model.pool, "posemb": model.position_embedding}
        == released["model"]
    )
    assert optimizer.clip_global_norm == 1.0
    assert optimizer.first_moment_dtype == released["mu_dtype"]
    assert optimizer.weight_decay == released["wd"]
    assert optimizer.weight_decay_meaning == "big_vision"
    assert schedule.learning_rate == released["lr"]
    assert schedule.decay == released["decay_type"]
    assert schedule.warmup == f"{released['warmup_steps']} steps"

    suffix = "" if epochs == 90 else f":epochs={epochs}"
    expected = readme_row(f"--config=configs/pretrain_s16_baseline.py{suffix}")
    assert str(released["expected"][str(epochs)]) in expected

    for number in released["reproduced"].get(str(epochs), []):
        assert f"{number}" in (CONFIGS / "README.md").read_text()


@pytest.mark.parametrize("row", DEIT3["rows"], ids=lambda row: " ".join(map(str, row[:3])))
def test_deit3_is_as_released(row):
    """Every value of the JAX reproduction's configs, in its own names."""
    kind, model, epochs, *numbers = row
    released = (
        DEIT3["common"]
        | DEIT3["kinds"][kind]
        | dict(zip(DEIT3["columns"][3:], numbers, strict=True))
    )
    stage = "finetune" if "-ft-" in kind else "pretrain"
    data = kind.partition("-")[0].replace("in", "i")
    config = load_recipe(f"pretrain_deit3:{model},data={data},epochs={epochs},stage={stage}")
    inputs = config.input
    optimizer = config.optimizer
    schedule = config.schedule
    objective = config.objective
    augmentations = {(True, 0, 0): "3a", (False, 2, 9): "rand-m9-mstd0.5-inc1"}
    crop = (inputs.train_crop, inputs.crop_area_fraction, inputs.crop_distribution)
    actual = {
        "train-batch-size": config.global_batch,
        "color-jitter": inputs.color_jitter,
        "auto-augment": augmentations[
            inputs.three_augment, inputs.randaugment_layers, inputs.randaugment_magnitude
        ],
        "random-crop": {
            ("inception", (0.08, 1.0), "torchvision"): "rrc",
            ("simple", (0.05, 1.0), "tf"): "src",
        }[crop],
        "random-erasing": inputs.erasing_fraction,
        "test-crop-ratio": inputs.test_crop_fraction,
        "augment-repeats": inputs.repeats,
        "mixup": inputs.mixup_alpha,
        "cutmix": inputs.cutmix_alpha,
        "criterion": {"bce": "bce", "softmax": "ce"}[objective.loss],
        "label-smoothing": objective.label_smoothing_fraction,
        "optimizer": {"adam": "adamw", "lamb": "lamb"}[optimizer.name],
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

    if stage == "pretrain":
        architecture = architecture_of(config, 1_000)
        learnable = {("learned_1d", "patches"): "learnable"}
        actual["layerscale"] = architecture.layer_scale
        actual["posemb"] = learnable[architecture.position_embedding, architecture.position_tokens]
        actual |= {
            "pooling": {"token": "cls"}[architecture.pool],
            "dropout": architecture.dropout_fraction,
        }

        assert config.model.name == f"ViT-{model}"
        assert architecture.head == "linear"
    else:  # the network comes with the weights
        actual |= {name: released[name] for name in ("layerscale", "posemb", "pooling", "dropout")}

        assert config.model.name == f"ViT-{model}"
        assert config.model.position_resize == "bicubic"

    assert actual == released
    assert optimizer.weight_decay_meaning == "paper_kernels"

    if stage == "pretrain" and (expected := DEIT3["expected"][kind][model].get(str(epochs))):
        options = [
            *(["data=i21k"] if data == "i21k" else []),
            *([f"epochs={epochs}"] if epochs in (800, 240) else []),
        ]
        argument = ",".join([model, *options])
        cells = readme_row(
            "--config=configs/pretrain_deit3.py" + (f":{argument}" if argument != "B/16" else "")
        )

        assert cells[2] == str(epochs)
        assert cells[3].partition(" ")[0] == str(expected)


@pytest.mark.parametrize(
    ("argument", "field", "rule"),
    [
        ("H/14", "model=H/14", "R50+L/32"),
        ("B/16,data=jft", "data=jft", "i21k, i1k"),
        ("B/16,aug=weak", "aug=weak", "medium2"),
        ("R+Ti/16,data=i1k", "aug=", "no choice"),
        ("B_16-i21k-300ep-lr_0.01-aug_none-wd_0.1-do_0.0-sd_0.0", "lr_0.01", "0.001"),
    ],
)
def test_augreg_rejections(argument, field, rule):
    with rejects(field, re.escape(rule)):
        load_recipe(f"pretrain_augreg:{argument}")
