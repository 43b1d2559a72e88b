"""Grids: every run of every study is a config that can be trained, and differs from the recipe in
its own fields.
"""

import json

import pytest

from tests.columns import list_column
from vit_jax.config import build_architecture, load_recipe, resolve
from vit_jax.config.parsing import flatten, to_dict
from vit_jax.tools.sweeps.catalogue import STUDIES
from vit_jax.tools.sweeps.grid import make_grid

DIGITS = "digits_studies"
PAPER = "pretrain_jft"

NUM_EXAMPLES = {DIGITS: 1437, PAPER: 303_000_000}


def make_study_grid(name, recipe=DIGITS, overrides=(), **values):
    return make_grid(
        STUDIES[name],
        recipe,
        [f"--config.{word}" for word in overrides],
        values,
    )


def find_differences(one, other):
    """Return fields in which two runs differ, and their values in the second."""
    before = flatten(to_dict(one.config))
    after = flatten(to_dict(other.config))
    return {name: after[name] for name in after if before.get(name) != after[name]}


@pytest.mark.parametrize("recipe", [DIGITS, PAPER])
@pytest.mark.parametrize("name", STUDIES)
def test_every_run_can_be_trained(name, recipe):
    runs = make_study_grid(name, recipe).runs

    assert len(runs) > 1
    assert len(set(list_column(runs, "name"))) == len(runs)

    for run in runs:
        config = run.config
        num_examples = config.input.train_examples or NUM_EXAMPLES[recipe]
        assert resolve(config, num_examples=num_examples, num_devices=1).total > 1

        build_architecture(
            config.model,
            image_size=config.input.image_size,
            num_classes=10,
        )
        # It is a run of `vit-jax pretrain`.
        assert load_recipe(run.recipe, run.overrides) == config

        json.dumps(run.point)


def test_parts_of_the_data_are_trained_on_for_equally_many_steps():
    few, many = make_study_grid("data_size", models=["ViT-48"], examples=["70", "1140"]).runs
    few_steps = resolve(few.config, num_examples=70, num_devices=1)
    many_steps = resolve(
        many.config,
        num_examples=1140,
        num_devices=1,
    )

    assert few.config.input.train_examples == 70
    assert few_steps == many_steps
    assert few_steps.total == round(10 * 1140 / 32)
    assert find_differences(few, many) == {"input.train_examples": 1140}
    assert few.config.input.test_split == "train[80%:]"


def test_regularisers_are_searched_for_each_part():
    found = make_study_grid(
        "data_size",
        models=["ViT-48"],
        examples=["70"],
        weight_decays=["0.1", "0.3"],
        dropouts=["0", "0.1"],
    )
    configs = list_column(found.runs, "config")
    searched = [axis.name for axis in found.axes if axis.is_searched]

    assert searched == ["weight_decay", "dropout"]
    assert list_column(configs, "optimizer.weight_decay") == [0.1, 0.1, 0.3, 0.3]
    assert list_column(configs, "model.dropout_fraction") == [0, 0.1, 0, 0.1]


def test_models_are_arguments_of_the_recipe_with_further_fields():
    words = ["ViT-L/16,epochs=14", "ViT-B/32,model.name=ViT-b/32", "R50x1"]
    configs = list_column(make_study_grid("scaling", PAPER, models=words).runs, "config")

    assert list_column(configs, "model.name") == ["ViT-L/16", "ViT-b/32", "R50x1"]
    assert list_column(configs, "total") == ["14 epochs", "7 epochs", "7 epochs"]
    assert list_column(configs, "schedule.learning_rate") == [4e-4, 8e-4, 1e-3]

    (short,) = make_study_grid(
        "scaling",
        "digits_studies:epochs=2",
        models=["ResNet"],
        epochs=[],
    ).runs
    assert short.config.model.name == "R14x0.5"
    assert short.config.total == "2 epochs"
    assert short.name == "model=ResNet"


def test_table_8_has_eight_kinds_of_positions():
    runs = make_study_grid("positions", PAPER).runs

    assert [(run.point["position"], run.point["layer"]) for run in runs] == [
        ("none", "stem"),
        ("learned_1d", "stem"),
        ("learned_1d", "every"),
        ("learned_1d", "shared"),
        ("learned_2d", "stem"),
        ("learned_2d", "every"),
        ("learned_2d", "shared"),
        ("relative", "stem"),
    ]


ALL_DIMENSIONS = {
    "model.depth": 6,
    "model.width": 72,
    "model.num_heads": 6,
    "model.mlp_dim": 288,
}


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("depth:2", {"model.depth": 8}),
        # Heads keep their 12 numbers.
        ("width:0.5", {"model.width": 24, "model.num_heads": 2}),
        ("mlp:2", {"model.mlp_dim": 384}),
        ("patch:2", {"model.name": "ViT-mu/4"}),
        ("all:1.5", ALL_DIMENSIONS),
    ],
)
def test_shapes_are_multiples_of_the_recipes(shape, expected):
    base, other = make_study_grid("shape", shapes=["base", shape]).runs
    found = find_differences(base, other)

    assert expected.items() <= found.items()
    assert all(name.startswith("model.") for name in found)


def test_the_base_shape_may_be_chosen():
    (run,) = make_study_grid("shape", overrides=["model.depth=2"], shapes=["depth:2"]).runs
    assert run.config.model.depth == 4


def test_sgd_has_the_hyper_parameters_of_big_transfer():
    adam, sgd = (run.config for run in make_study_grid("optimizer", PAPER, models=["R50x1"]).runs)

    assert adam.optimizer.name == "adam"
    assert adam.schedule.learning_rate == 1e-3
    assert adam.optimizer.weight_decay == 0.1

    assert sgd.optimizer.name == "sgd"
    assert sgd.optimizer.momentum == 0.9
    assert sgd.optimizer.weight_decay == 1e-4
    assert sgd.schedule.learning_rate == pytest.approx(0.03 * 4096 / 256)

    # BiT-L is trained for 40 epochs.
    drops = [round(40 * fraction) for fraction in sgd.schedule.drop_at_fraction]
    assert sgd.schedule.decay == "staircase"
    assert drops == [10, 23, 30, 37]


def test_learning_rates_are_multiples_of_the_recipes():
    values = {
        "models": ["R50x1"],
        "optimizers": ["adam"],
        "rate_factors": ["0.5"],
    }
    (run,) = make_study_grid("optimizer", PAPER, **values).runs

    assert run.config.schedule.learning_rate == 5e-4


def test_images_are_as_large_as_patches_cover():
    runs = make_study_grid("speed", PAPER, models=["ViT-H/14", "R50+ViT-B/32"]).runs
    sides = [run.config.input.image_size[0] for run in runs]

    assert sides == [56, 126, 224, 378, 504, 64, 128, 224, 384, 512]


NOT_MODELS = "pooling has no --models=; it has --pools=, --learning"

NOT_MEAN = "pool=mean.*config.model.pool='mean': must be one of"

NOT_HEADS = "give base, or depth, width, mlp, patch or all"

NOT_MANY = "--examples=many: a whole number from 1 is needed"

NOT_ONE = "--image_sizes=1: a whole number from 2 is needed"

NOT_A_NUMBER = "--rate_factors=a: a positive number is needed"

NOT_LION = "--optimizers=lion: must be one of adam, sgd"


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("pooling", {"models": ["ViT-48"]}, NOT_MODELS),
        ("pooling", {"pools": ["gap", "gap"]}, "a value occurs twice"),
        ("pooling", {"pools": ["mean"]}, NOT_MEAN),
        ("shape", {"shapes": ["heads:2"]}, NOT_HEADS),
        ("shape", {"shapes": ["width:1.3"]}, "48 times 1.3 is no whole number"),
        ("data_size", {"examples": ["70", "many"]}, NOT_MANY),
        ("speed", {"image_sizes": ["1"]}, NOT_ONE),
        ("optimizer", {"rate_factors": ["a"]}, NOT_A_NUMBER),
        ("optimizer", {"optimizers": ["lion"]}, NOT_LION),
        (
            "positions",
            {"positions": ["none"], "layers": ["every"]},
            "no run with these values",
        ),
    ],
)
def test_mistakes(name, values, message):
    with pytest.raises(ValueError, match=message):
        make_study_grid(name, **values)


def test_a_field_that_the_study_sets_is_rejected():
    message = r"is set for each run\. Use --pools="

    with pytest.raises(ValueError, match=message):
        make_study_grid("pooling", overrides=["model.pool=gap"])


def test_a_recipe_for_fine_tuning_is_rejected():
    message = "a recipe for FinetuneConfig; studies pre-train"

    with pytest.raises(ValueError, match=message):
        make_study_grid("pooling", "finetune:ViT-B/16,pets")


def test_patches_of_a_network_without_transformer_are_rejected():
    message = r"--shapes=patch:2: R14x0.5 has no transformer"

    with pytest.raises(ValueError, match=message):
        make_study_grid(
            "shape",
            f"{DIGITS}:ResNet",
            shapes=["patch:2"],
        )
