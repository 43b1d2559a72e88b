"""Errors that `--check` finds before a machine is rented, and its message about data on other
machines.
"""

import pathlib

import pytest
import tensorflow_datasets as tfds
from PIL import Image

from tests import tiny
from vit_jax.config import load_recipe
from vit_jax.config.lengths import convert_lengths
from vit_jax.data.sources import open_source
from vit_jax.tools.plan.dataset import choose_dataset
from vit_jax.tools.plan.preflight import check_start

REMOTE = pathlib.Path("/mnt/remote")


def check(*overrides, **options):
    return check_start("tiny", tiny.config(*overrides), **options)


def test_one_line():
    (line,) = check()

    assert "1,437 training and 360 test images of 10 classes" in line
    assert "on 1 device (" in line


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.num_heads=7", "num_heads=7"),
        ("model.depth=0", "depth=0"),
        ("input.image_size=9", "image height of 9"),
        ("optimizer.accumulation_steps=7", "7 micro-batches"),
        ("optimizer.frozen=nothing/here", "no parameter matches 'nothing/here'"),
        ("optimizer.learning_rate_multipliers.no/such=2", "no parameter matches 'no/such'"),
        ("data=folder:/nowhere", "folder:/nowhere: there is no such folder"),
        ("data=tfds:imagenet20012", "Nearest: imagenet2012"),
        ("init_from=/nowhere", "/nowhere: there is no such file or folder"),
        ("resume_from=/nowhere", "resume_from='/nowhere' is not a workdir"),
        ("schedule.warmup=100 epochs", "must end before the run"),
        (
            "objective.loss=tests.tools.plan.test_preflight:wrong_loss",
            "A training step cannot be traced: dot_general requires contracting dimensions",
        ),
    ],
)
def test_a_recipe_that_cannot_start(override, message):
    with pytest.raises(ValueError, match=message):
        check(override)


EVALUATORS_THAT_CANNOT_START = [
    (
        ["kind=classification", "data=imagenet:real"],
        r"evaluators.more.data='imagenet:real': only `vit-jax evaluate`",
    ),
    (
        ["kind=knn", "data=foldr:/mnt/remote/x"],
        r"evaluators.more.data='foldr:/mnt/remote/x': .*'folder'",
    ),
    (
        ["kind=knn", "data=vtab:dmlap"],
        "dmlab",
    ),
    (
        ["kind=knn", "arguments.layer=block:99"],
        r"evaluators.more.*layer='block:99': must be one of",
    ),
    (
        ["kind=fewshot", "arguments.shots=0"],
        r"evaluators.more.*shots",
    ),
]


@pytest.mark.parametrize(
    ("data", "remote"),
    [
        ("data=digits", None),
        ("data=folder:/mnt/remote/photos", REMOTE),
    ],
    ids=["here", "elsewhere"],
)
@pytest.mark.parametrize(("options", "message"), EVALUATORS_THAT_CANNOT_START)
def test_an_evaluator_that_cannot_start(options, message, data, remote):
    evaluator = [f"evaluation.evaluators.more.{option}" for option in options]
    with pytest.raises(ValueError, match=message):
        check(data, *evaluator, remote=remote)


def test_more_neighbours_than_training_images():
    evaluator = (
        "evaluation.evaluators.near.kind=knn",
        "evaluation.evaluators.near.arguments.neighbours=1,2000",
    )
    message = r"evaluators.near: 2000 neighbours of 1437 training images"

    with pytest.raises(ValueError, match=message):
        check(*evaluator)

    check("data=folder:/mnt/remote/photos", *evaluator, remote=REMOTE)


def test_data_and_weights_that_only_the_machines_have():
    overrides = ("data=folder:/mnt/remote/photos", "init_from=/mnt/remote/run")
    first, *unseen = check(*overrides, remote=REMOTE)

    assert "folder:/mnt/remote/photos is not visible from here" in first
    assert unseen == [
        "not visible from here: /mnt/remote/photos",
        "not visible from here: /mnt/remote/run",
    ]

    _, *unseen = check(
        "data=tfds:cifar10",
        "input.data_dir=/mnt/remote/tfds",
        remote=REMOTE,
    )
    assert unseen == ["not visible from here: /mnt/remote/tfds/cifar10"]

    with pytest.raises(ValueError, match="num_heads=7"):
        check("data=folder:/mnt/remote/photos", "model.num_heads=7", remote=REMOTE)


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ("vtab:dmlab", "dmlab"),
        ("tfds:cifar10:3.0.2", "cifar10"),
    ],
)
def test_datasets_in_the_default_folder_of_the_machines(data, name):
    _, unseen = check(f"data={data}", remote=pathlib.Path("/"))
    folder = tfds.core.constants.DATA_DIR

    assert unseen == f"not visible from here: {folder}/{name}"


def test_data_of_an_evaluator_that_only_the_machines_have():
    data = "evaluation.evaluators.more.data=csv:/mnt/remote/table.csv"
    first, *unseen = check("data=digits", data, remote=REMOTE)

    assert "not visible" in first
    assert unseen == ["not visible from here: /mnt/remote/table.csv"]


@pytest.mark.parametrize(
    "split",
    ["train", "train[:99%]", "train[99%:]", "train[:1000]"],
)
def test_a_plan_counts_the_steps_of_the_run(split):
    """Opened data and the table of a plan give one number of steps."""
    overrides = ("total=90 epochs", f"input.train_split={split}", "global_batch=8")
    config = tiny.config(*overrides)
    opened = open_source("digits", split, config.input, config.seed)
    steps = convert_lengths(config, len(opened)).total
    dataset = choose_dataset("tiny", config)

    (line,) = check(*overrides)
    assert f"{steps:,} steps of" in line
    assert convert_lengths(config, dataset.num_examples).total == steps


def test_the_steps_of_s16_on_imagenet():
    """The recipe trains on 99 % of ImageNet, of which TFDS makes 1,268,355 images."""
    recipe = "configs/pretrain_s16_baseline.py"
    config = load_recipe(f"{tiny.ROOT}/{recipe}")
    line, _ = check_start(recipe, config, remote=pathlib.Path("/"))

    assert "111,477 steps of 1,024 images" in line
    assert choose_dataset(recipe, config).num_examples == 1_268_355


def test_a_length_in_epochs_of_unknown_data():
    photos = "data=folder:/mnt/remote/photos"
    line, _ = check(photos, "total=3 epochs", "schedule.warmup=0 steps", remote=REMOTE)
    assert "3 epochs of unknown size in steps of 16 images" in line

    line, _ = check(photos, "total=7 steps", "schedule.warmup=0 steps", remote=REMOTE)
    assert "7 steps of 16 images" in line


def test_a_plan_opens_data_of_this_machine(tmp_path):
    for name in ("train/a/1", "train/a/2", "train/b/1", "test/a/1", "test/b/1"):
        path = tmp_path / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(path)
    config = tiny.config(f"data=folder:{tmp_path}")
    dataset = choose_dataset("tiny", config)

    assert (dataset.num_examples, dataset.num_classes) == (3, 2)
    assert dataset.source == "on this machine"


def test_relative_paths_are_looked_for_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, line = check(
        "data=digits",
        "input.data_dir=tfds",
        remote=pathlib.Path("/"),
    )

    assert line == "looked for here: tfds"


def wrong_loss(logits_BK, label_BK):
    return logits_BK @ label_BK


@pytest.mark.xdist_group("tiny")
def test_weights(tiny_run):
    """Weights and data are opened; a network that differs from the weights is rejected."""
    same = f"init_from={tiny_run.workdir}"
    check(same)

    with pytest.raises(ValueError, match="does not fit"):
        check(same, "model.width=32")


def test_a_network_that_the_weights_decide_and_are_elsewhere():
    recipe = f"{tiny.ROOT}/configs/finetune.py:any,own"
    config = load_recipe(recipe, tiny.flags("data=digits", "init_from=/there/run"))

    line, _ = check_start(
        "finetune",
        config,
        num_devices=8,
        remote=pathlib.Path("/"),
    )

    assert "the network is that of /there/run, and is not checked; digits with 1,437" in line

    message = r"/there/run: there is no such file or folder"
    with pytest.raises(ValueError, match=message):
        check_start("finetune", config)


def test_a_dataset_of_the_catalogue_that_is_not_prepared(tmp_path):
    message = r"not prepared in .*; run: vit-jax prepare cifar10"

    with pytest.raises(ValueError, match=message):
        check("data=tfds:cifar10", f"input.data_dir={tmp_path}")


def test_attention_by_cudnn(monkeypatch):
    """Machines without cuDNN check the recipe as its machines would."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.cuda_versions", None)
    message = r"cuDNN rejects this attention: it needs bfloat16 or float16, not float32"

    check("model.attention=cudnn", "model.compute_dtype=bfloat16")

    with pytest.raises(ValueError, match=message):
        check("model.attention=cudnn", "model.compute_dtype=float32")


def test_devices():
    (line,) = check("sharding.num_model_shards=2", num_devices=8, num_slices=2)

    assert "on 8 devices (2 replica x 2 data x 2 model)" in line

    message = r"--devices=3: must be divisible by --slices=2"
    with pytest.raises(ValueError, match=message):
        check(num_devices=3, num_slices=2)

    with pytest.raises(ValueError, match="must divide the 3 device"):
        check("sharding.num_model_shards=2", num_devices=3)
