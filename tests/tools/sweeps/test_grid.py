"""Grids: every run of every study is a config that can be trained, and differs from the recipe in what it should."""

import json

import pytest

from vit_jax.config import build_architecture, load_recipe, resolve
from vit_jax.config.parsing import flatten, to_dict
from vit_jax.tools.sweeps.catalogue import STUDIES
from vit_jax.tools.sweeps.grid import make_grid

DIGITS = "digits_studies"
PAPER = "pretrain_jft"


def grid(name, recipe=DIGITS, overrides=(), **given):
    return make_grid(STUDIES[name], recipe, [f"--config.{word}" for word in overrides], given)


def differences(one, other):
    """Fields in which two runs differ, and their values in the second."""
    before, after = (flatten(to_dict(run.config)) for run in (one, other))
    return {name: after[name] for name in after if before.get(name) != after[name]}


@pytest.mark.parametrize("recipe", [DIGITS, PAPER])
@pytest.mark.parametrize("name", STUDIES)
def test_every_run_can_be_trained(name, recipe):
    found = grid(name, recipe)
    assert len({run.name for run in found.runs}) == len(found.runs) > 1

    for run in found.runs:
        examples = run.config.input.train_examples or {DIGITS: 1437, PAPER: 303_000_000}[recipe]
        assert resolve(run.config, num_examples=examples, num_devices=1).total > 1

        build_architecture(run.config.model, image_size=run.config.input.image_size, num_classes=10)
        assert (
            load_recipe(run.recipe, run.overrides) == run.config
        )  # it is a run of `vit-jax pretrain`

        json.dumps(run.point)


def test_parts_of_the_data_are_trained_on_for_equally_many_steps():
    runs = grid("data_size", models=["ViT-48"], examples=["70", "1140"]).runs
    few, many = (
        resolve(run.config, num_examples=run.config.input.train_examples, num_devices=1)
        for run in runs
    )

    assert few == many
    assert few.total == round(10 * 1140 / 32)
    assert differences(*runs) == {"input.train_examples": 1140}
    assert runs[0].config.input.test_split == "train[80%:]"


def test_regularisers_are_searched_for_each_part():
    found = grid(
        "data_size",
        models=["ViT-48"],
        examples=["70"],
        weight_decays=["0.1", "0.3"],
        dropouts=["0", "0.1"],
    )

    assert [axis.name for axis in found.axes if axis.is_searched] == ["weight_decay", "dropout"]
    assert [
        (r.config.optimizer.weight_decay, r.config.model.dropout_fraction) for r in found.runs
    ] == [*((0.1, 0), (0.1, 0.1), (0.3, 0), (0.3, 0.1))]


def test_models_are_arguments_of_the_recipe_with_further_fields():
    words = ["ViT-L/16,epochs=14", "ViT-B/32,model.name=ViT-b/32", "R50x1"]
    configs = [run.config for run in grid("scaling", PAPER, models=words).runs]

    assert [(c.model.name, c.total, c.schedule.learning_rate) for c in configs] == [
        *(
            ("ViT-L/16", "14 epochs", 4e-4),
            ("ViT-b/32", "7 epochs", 8e-4),
            ("R50x1", "7 epochs", 1e-3),
        )
    ]

    short = grid("scaling", "digits_studies:epochs=2", models=["ResNet"], epochs=[]).runs[0]
    assert (short.config.model.name, short.config.total, short.name) == (
        "R14x0.5",
        "2 epochs",
        "model=ResNet",
    )


def test_table_8_has_eight_kinds_of_positions():
    points = [(run.point["position"], run.point["layer"]) for run in grid("positions", PAPER).runs]
    learned = [
        (kind, layer)
        for kind in ("learned_1d", "learned_2d")
        for layer in ("stem", "every", "shared")
    ]

    assert points == [("none", "stem"), *learned, ("relative", "stem")]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("depth:2", {"model.depth": 8}),
        ("width:0.5", {"model.width": 24, "model.num_heads": 2}),  # heads keep their 12 numbers
        ("mlp:2", {"model.mlp_dim": 384}),
        ("patch:2", {"model.name": "ViT-mu/4"}),
        (
            "all:1.5",
            {"model.depth": 6, "model.width": 72, "model.num_heads": 6, "model.mlp_dim": 288},
        ),
    ],
)
def test_shapes_are_multiples_of_the_recipes(shape, expected):
    base, other = grid("shape", shapes=["base", shape]).runs
    found = differences(base, other)

    assert {name: found[name] for name in expected} == expected
    assert all(name.startswith("model.") for name in found)


def test_the_base_shape_may_be_chosen():
    (run,) = grid("shape", overrides=["model.depth=2"], shapes=["depth:2"]).runs
    assert run.config.model.depth == 4


def test_sgd_has_the_hyper_parameters_of_big_transfer():
    adam, sgd = (run.config for run in grid("optimizer", PAPER, models=["R50x1"]).runs)

    assert (adam.optimizer.name, adam.schedule.learning_rate, adam.optimizer.weight_decay) == (
        "adam",
        1e-3,
        0.1,
    )
    assert (sgd.optimizer.name, sgd.optimizer.momentum, sgd.optimizer.weight_decay) == (
        "sgd",
        0.9,
        1e-4,
    )
    assert sgd.schedule.learning_rate == pytest.approx(0.03 * 4096 / 256)

    drops = [round(40 * fraction) for fraction in sgd.schedule.drop_at_fraction]
    assert (sgd.schedule.decay, drops) == ("staircase", [10, 23, 30, 37])  # of BiT-L's 40 epochs

    (slow,) = grid(
        "optimizer", PAPER, models=["R50x1"], optimizers=["adam"], rate_factors=["0.5"]
    ).runs
    assert slow.config.schedule.learning_rate == 5e-4


def test_images_are_as_large_as_patches_cover():
    sides = [
        run.config.input.image_size[0]
        for run in grid("speed", PAPER, models=["ViT-H/14", "R50+ViT-B/32"]).runs
    ]
    assert sides == [56, 126, 224, 378, 504, 64, 128, 224, 384, 512]


@pytest.mark.parametrize(
    ("name", "recipe", "overrides", "given", "message"),
    [
        (
            "pooling",
            DIGITS,
            [],
            {"models": ["ViT-48"]},
            "pooling has no --models=; it has --pools=, --learning",
        ),
        ("pooling", DIGITS, ["model.pool=gap"], {}, r"is set for each run\. Use --pools="),
        ("pooling", DIGITS, [], {"pools": ["gap", "gap"]}, "a value occurs twice"),
        (
            "pooling",
            DIGITS,
            [],
            {"pools": ["mean"]},
            "pool=mean.*config.model.pool='mean': must be one of",
        ),
        (
            "pooling",
            "finetune:ViT-B/16,pets",
            [],
            {},
            "a recipe for FinetuneConfig; studies pre-train",
        ),
        (
            "shape",
            DIGITS,
            [],
            {"shapes": ["heads:2"]},
            "give base, or depth, width, mlp, patch or all",
        ),
        ("shape", DIGITS, [], {"shapes": ["width:1.3"]}, "48 times 1.3 is no whole number"),
        (
            "shape",
            f"{DIGITS}:ResNet",
            [],
            {"shapes": ["patch:2"]},
            "--shapes=patch:2: R14x0.5 has no transformer",
        ),
        (
            "data_size",
            DIGITS,
            [],
            {"examples": ["70", "many"]},
            "--examples=many: a whole number from 1 is needed",
        ),
        (
            "speed",
            DIGITS,
            [],
            {"image_sizes": ["1"]},
            "--image_sizes=1: a whole number from 2 is needed",
        ),
        (
            "optimizer",
            DIGITS,
            [],
            {"rate_factors": ["a"]},
            "--rate_factors=a: a positive number is needed",
        ),
        (
            "optimizer",
            DIGITS,
            [],
            {"optimizers": ["lion"]},
            "--optimizers=lion: must be one of adam, sgd",
        ),
        (
            "positions",
            DIGITS,
            [],
            {"positions": ["none"], "layers": ["every"]},
            "no run with these values",
        ),
    ],
)
def test_mistakes(name, recipe, overrides, given, message):
    with pytest.raises(ValueError, match=message):
        grid(name, recipe, overrides, **given)
