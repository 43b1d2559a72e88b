"""Configs in the style of big_vision: fields with a counterpart, and those without."""

import ml_collections
import pytest

from tests.rejections import rejects
from vit_jax.config import FinetuneConfig, PretrainConfig, derive, load_recipe
from vit_jax.config.migration.convert import convert

TRAIN = "decode|inception_crop(64)|flip_lr|randaug(2,10)|value_range(-1, 1)|onehot(9, key='label')"
TEST = "decode|resize_small(80)|central_crop(64)|value_range(-1, 1)|keep('image', 'labels')"


def build(**changes):
    """Return a small config in the style of big_vision; a name has `__` between sections."""
    config = ml_collections.ConfigDict()
    config.total_epochs = 30
    config.num_classes = 9
    config.loss = "softmax_xent"
    config.input = {
        "data": {"name": "flowers", "split": "train[:90%]"},
        "batch_size": 96,
        "pp": TRAIN,
    }
    config.input.shuffle_buffer_size = 1000
    config.log_training_steps = 20
    config.ckpt_steps = 200
    config.model_name = "vit"
    config.model = {
        "variant": "S/16",
        "rep_size": True,
        "pool_type": "tok",
    }
    config.optax_name = "scale_by_adam"
    config.optax = {"mu_dtype": "bfloat16", "b2": 0.95}
    config.grad_clip_norm = 1.0
    config.lr = 0.002
    config.wd = 0.0003
    config.schedule = {"warmup_steps": 100, "decay_type": "cosine"}
    config.mixup = {"p": 0.2, "fold_in": None}
    test = {
        "type": "classification",
        "data": {"name": "flowers", "split": "test"},
        "pp_fn": TEST,
    }
    config.evals = {
        "val": dict(
            **test,
            loss_name="softmax_xent",
            log_steps=50,
        )
    }

    values = config.to_dict()
    for name, value in changes.items():
        *sections, field = name.split("__")
        section = values
        for key in sections:
            section = section.setdefault(key, {})
        section[field] = value
        if value is ...:
            del section[field]
    return ml_collections.ConfigDict(values, type_safe=False)


def read(**changes):
    return convert(build(**changes)).config


# Pre-training.


def test_a_config_of_a_vit():
    config = read()

    assert isinstance(config, PretrainConfig)
    assert config.data == "tfds:flowers"
    assert config.total == "30 epochs"
    assert config.global_batch == 96
    assert config.objective.loss == "softmax"
    assert config.checkpoint.every == "200 steps"
    assert config.logging.every == "20 steps"


def test_the_network_and_the_schedule():
    config = read()

    assert config.model.name == "ViT-S/16"
    assert config.model.head == "mlp"
    assert config.model.pool == "token"
    assert config.model.position_stddev == 384**-0.5
    assert config.model.compute_dtype == "float32"
    assert config.schedule.learning_rate == 0.002
    assert config.schedule.warmup == "100 steps"
    assert config.schedule.decay == "cosine"


def test_the_optimiser():
    optimizer = read().optimizer

    assert optimizer.name == "adam"
    assert optimizer.weight_decay == 0.0003
    assert optimizer.weight_decay_meaning == "big_vision"
    assert optimizer.first_moment_dtype == "bfloat16"
    assert (optimizer.beta1, optimizer.beta2) == (0.9, 0.95)
    assert optimizer.clip_global_norm == 1.0


def test_images_and_splits():
    inputs = read().input

    assert inputs.image_size == (64, 64)
    assert inputs.train_crop == "inception"
    assert inputs.crop_area_fraction == (0.05, 1.0)
    assert (inputs.randaugment_layers, inputs.randaugment_magnitude) == (2, 10)
    assert inputs.mixup_alpha == 0.2
    assert inputs.flip
    assert inputs.test_resize == "short_side"
    assert inputs.test_crop_fraction == 64 / 80
    assert (inputs.train_split, inputs.test_split) == ("train[:90%]", "test")


def test_fields_without_effect_are_reported():
    assert convert(build()).ignored == ("num_classes", "input.shuffle_buffer_size", "mixup.fold_in")


def test_the_baseline_of_2022_is_the_shipped_recipe():
    """The text of big_vision's ViT-S/16 on ImageNet, as a dictionary of its values."""
    size = "decode|resize_small(256)|central_crop(224)"
    config = read(
        total_epochs=90,
        input__data={"name": "imagenet2012", "split": "train[:99%]"},
        input__batch_size=1024,
        input__pp="decode_jpeg_and_inception_crop(224)|flip_lr|randaug(2,10)",
        model__pool_type="gap",
        model__posemb="sincos2d",
        optax={"mu_dtype": "bfloat16"},
        lr=0.001,
        wd=0.0001,
        schedule__warmup_steps=10_000,
        log_training_steps=100,
        ckpt_steps=2500,
        evals__val={
            "type": "classification",
            "data": {"name": "imagenet2012", "split": "validation"},
            "pp_fn": size,
            "log_steps": 5000,
        },
    )

    assert config == load_recipe("pretrain_s16_baseline")


@pytest.mark.parametrize(
    ("changes", "fields"),
    [
        ({"total_epochs": ..., "total_steps": 9}, {"total": "9 steps"}),
        ({"total_epochs": ..., "total_examples": 9e6}, {"total": "9000000.0 examples"}),
        ({"loss": ...}, {"objective.loss": "sigmoid"}),
        ({"seed": 3}, {"seed": 3}),
        ({"wd": None}, {"optimizer.weight_decay": 0.0}),
        ({"init_head_bias": -7.0}, {"model.head_bias_init": -7.0}),
        ({"input__cache_raw": True}, {"input.cache_records": True}),
        ({"input__data__data_dir": "/data"}, {"input.data_dir": "/data"}),
        ({"model__pool_type": ...}, {"model.pool": "gap"}),
        ({"model__rep_size": ...}, {"model.head": "linear"}),
        ({"model__rep_size": 384}, {"model.head": "mlp"}),
        (
            {"model__variant": "B", "model__patch_size": (8, 8)},
            {"model.name": "ViT-B/8x8", "model.position_stddev": 768**-0.5},
        ),
        ({"model__width": 96}, {"model.width": 96, "model.position_stddev": 96**-0.5}),
        ({"model__dropout": 0.1}, {"model.dropout_fraction": 0.1}),
        ({"model__dtype_mm": "bfloat16"}, {"model.compute_dtype": "bfloat16"}),
        (
            {"schedule__warmup_steps": ..., "schedule__warmup_percent": 0.1},
            {"schedule.warmup": "0.1 fraction"},
        ),
        ({"schedule__decay_type": ...}, {"schedule.decay": "constant"}),
        (
            {"schedule__decay_type": "linear", "schedule__linear_end": 0.01},
            {"schedule.decay": "linear", "schedule.end_learning_rate": 0.002 * 0.01},
        ),
        (
            {"schedule__decay_type": "rsqrt", "schedule__timescale": 500},
            {"schedule.decay": "rsqrt", "schedule.timescale": "500 steps"},
        ),
        (
            {"schedule__decay_type": ..., "schedule__cooldown_steps": 9},
            {
                "schedule.decay": "wsd",
                "schedule.cooldown": "9 steps",
                "schedule.cooldown_form": "linear",
            },
        ),
        (
            {
                "total_epochs": ...,
                "total_steps": 100,
                "schedule": {"steps": [30, 60], "mults": [0.1, 0.01]},
            },
            {
                "total": "100 steps",
                "schedule.warmup": "0 steps",
                "schedule.decay": "staircase",
                "schedule.drop_at_fraction": (0.3, 0.6),
            },
        ),
        (
            {"sharding_strategy": [(".*", 'fsdp(axis="data")')], "mesh": [("data", -1)]},
            {"sharding.parameters": "fsdp"},
        ),
    ],
)
def test_further_fields(changes, fields):
    assert read(**changes) == derive(read(), fields)


def test_a_resnet():
    config = read(
        model_name="bit",
        model={"depth": 50, "width": 2.0},
        optax_name="big_vision.momentum_hp",
        optax={},
    )

    assert config.model.name == "R50x2"
    assert config.model.residual_unit == "postactivation"
    assert config.optimizer.name == "sgd"
    assert config.optimizer.first_moment_dtype == "bfloat16"


# Evaluators.


def test_further_evaluators():
    train = {
        "type": "classification",
        "data": {"name": "flowers", "split": "train[:9]"},
        "pp_fn": TEST,
    }
    config = read(
        evals__train=dict(**train, log_epochs=2), evals__minival=dict(**train, log_steps=50)
    )
    evaluators = config.evaluation.evaluators

    assert config.evaluation.every == "50 steps"
    assert evaluators["train_split"].split == "train[:9]"
    assert evaluators["train_split"].every == "2 epochs"
    assert evaluators["minival"].every is None


def test_one_split_by_two_names_is_one_evaluation():
    again = {
        "type": "classification",
        "data": {"name": "flowers", "split": "test"},
        "pp_fn": TEST,
    }

    assert read(evals__test=dict(**again, log_steps=50)).evaluation == read().evaluation


# Fine-tuning.


def test_a_config_with_weights_is_fine_tuning():
    config = read(
        model_init="howto-i21k-S/16",
        model_load={"dont_load": ["head/kernel", "head/bias"]},
        model={"variant": "S/16", "pool_type": "tok"},
    )

    assert isinstance(config, FinetuneConfig)
    assert config.init_from.startswith("gs://vit_models/augreg/S_16-i21k-300ep")
    assert config.model.name == "ViT-S/16"
    assert config.model.head == "zero"
    assert config.search.learning_rates == ()


@pytest.mark.parametrize(
    ("changes", "address", "head"),
    [
        ({"model_init": "w.npz"}, "w.npz", "keep"),
        ({"model_init": "i1k-s16-90ep"}, "gs://big_vision/vit_s16_i1k_90ep.npz", "keep"),
        (
            {"model_init": "w.npz", "model_load": {"dont_load": ["head/bias", "head/kernel"]}},
            "w.npz",
            "zero_keep_hidden",
        ),
        (
            {"model_init": "M", "model_name": "bit_paper", "model": {"depth": 50, "width": 1}},
            "gs://bit_models/BiT-M-R50x1.npz",
            "keep",
        ),
    ],
)
def test_weights_and_head(changes, address, head):
    config = read(**changes)

    assert config.init_from == address
    assert config.model.head == head


# Fields without a counterpart.


REAL = {"type": "classification", "data": {"name": "imagenet2012_real", "split": "validation"}}


FEW_SHOT_IMAGES = 'decode|resize(73)|central_crop(64)|value_range(-1,1)|keep("image", "label")'
FEW_SHOT = {
    "type": "fewshot_lsr",
    "representation_layer": "pre_logits",
    "shots": (1, 5),
    "l2_reg": 2.0**10,
    "num_seeds": 2,
    "prefix": "",
    "log_steps": 25,
    "datasets": {
        "cars": ("cars196:2.1.0", "train", "test"),
        "uc_merced": ("uc_merced", "train[:1000]", "train[1000:]"),
    },
    "pp_train": FEW_SHOT_IMAGES,
    "pp_eval": FEW_SHOT_IMAGES,
    "display_first": [("pets", 10)],
}
"""An evaluator as `common_fewshot.get_fewshot_lsr` of big_vision returns it."""


def test_few_shot_evaluators():
    evaluators = read(evals__fewshot=FEW_SHOT).evaluation.evaluators

    few = evaluators["fewshot_uc_merced"]
    assert few.kind == "fewshot"
    assert few.data == "tfds:uc_merced"
    assert few.train_split == "train[:1000]"
    assert few.split == "train[1000:]"
    assert few.every == "25 steps"
    assert few.arguments == {"shots": (1, 5), "seeds": (0, 1), "l2": 1024.0}
    assert evaluators["fewshot_cars"].data == "tfds:cars196:2.1.0"


def test_evaluators_with_label_sets():
    """The evaluator of big_vision's `vit_s16_i1k`, with the preparation of its `pp_eval`."""
    preparation = TEST.replace("keep", "onehot(9, key='real_label', key_result='labels')|keep")
    evaluators = read(evals__real=REAL | {"pp_fn": preparation}).evaluation.evaluators

    assert evaluators["real"].data == "tfds:imagenet2012_real"
    assert evaluators["real"].split == "validation"
    assert evaluators["real"].label_sets == "real_label"


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"nothing": 3}, "config.nothing=3: remove it"),
        ({"batch": 3}, "config.batch=3: remove it, and use --config.global_batch"),
        ({"loss": "sigmoid_focal"}, "config.loss='sigmoid_focal': only 'softmax_xent'"),
        ({"lr": ...}, "config.lr: must be set"),
        ({"total_epochs": ...}, "config.total_steps=None: give"),
        ({"model_name": "mlp_mixer"}, "model_name='mlp_mixer': only vit"),
        ({"model__variant": "XL/3"}, "config.model.variant='XL/3'"),
        ({"model__pool_type": "none"}, "pool_type='none': only 'gap', 'tok'"),
        ({"model__rep_size": 17}, "rep_size=17: must be True"),
        ({"model__head_zeroinit": False}, "head_zeroinit=False: remove it"),
        ({"model_name": "bit", "model": {"depth": [1, 2]}}, "model.depth="),
        ({"model_init": "M-imagenet2012"}, "model_init=.*`vit-jax weights`"),
        ({"model_init": "w.npz", "init_head_bias": -7.0}, "init_head_bias=-7.0"),
        ({"model_init": "w.npz", "model_name": "x"}, "model_name='x'"),
        ({"model_init": "w.npz", "model_load": {"dont_load": ["cls"]}}, "dont_load="),
        ({"optax_name": "scale_by_lion"}, "optax_name=.*optax:NAME"),
        ({"optax__eps_root": 1e-3}, "config.optax.eps_root=0.001"),
        ({"lr_mults": [(".*", 2)]}, "learning_rate_multipliers"),
        ({"wd_mults": [(".*", 1)]}, "wd_mults=.*kernels"),
        ({"schedule": [(".*", None)]}, "config.schedule=.*optimizer.frozen"),
        ({"schedule__cooldown_steps": 9}, "schedule.cooldown='9 steps': .*wsd"),
        ({"schedule": {"steps": [1], "mults": [0.5]}}, "schedule.mults=.*tenth.*schedule.steps"),
        ({"mesh": [("data", 2)]}, "config.mesh="),
        ({"sharding_strategy": [(".*", "x")]}, "sharding_strategy=.*fsdp"),
        ({"input__pp": "decode|crop(3)"}, "input.pp=.*crop has no counterpart"),
        ({"input__pp": "decode|inception_crop(32)"}, "image size of the test split, 64"),
        ({"input__data": {"flowers": 1, "pets": 2}}, "input.data.name=None"),
        ({"input__data__name": "bv:jsonl"}, "'bv:jsonl': must be a dataset of TFDS"),
        ({"evals": {"x": REAL}}, "config.evals=.*classification"),
        ({"evals__few": {"type": "fewshot_lsr", "shots": 1}}, "evals.few.pp_train='': .*resize"),
        ({"evals__few": FEW_SHOT | {"pp_eval": "resize(64)"}}, "evals.few.pp_eval='resize"),
        ({"evals__few": FEW_SHOT | {"representation_layer": "x"}}, "layer='x': must be pre_logits"),
        ({"evals__few": FEW_SHOT | {"label_key": "x"}}, "label_key='x': must be label"),
        ({"evals__val__pp_fn": "decode"}, "evals.val.pp_fn='decode'"),
        (
            {
                "evals__v2": {
                    "type": "classification",
                    "data": {"name": "x", "split": "y"},
                    "pp_fn": "resize(64)",
                }
            },
            "evals.v2.pp_fn=.*as evals.val",
        ),
    ],
)
def test_fields_without_a_counterpart(changes, rule):
    with rejects("", rule) as caught:
        read(**changes)
    assert "\n" not in str(caught.value)


def test_all_problems_are_in_one_error():
    with rejects("of big_vision", "config.lr: must be set; .*config.one=1: .*config.two=2: "):
        read(lr=..., one=1, two=2)


def test_a_value_of_the_wrong_type_names_our_field():
    with rejects("config.schedule.learning_rate='fast'", "float"):
        read(lr="fast")


def test_another_config_dict_is_rejected():
    with rejects("a ConfigDict", "has a, b.*PretrainConfig"):
        convert(ml_collections.ConfigDict({"b": 1, "a": 2}))
    with rejects("a ConfigDict", "no fields"):
        convert(ml_collections.ConfigDict())


# Files.


def test_a_file_of_big_vision(tmp_path, monkeypatch):
    (tmp_path / "common.py").write_text("import ml_collections\nNew = ml_collections.ConfigDict\n")
    file = tmp_path / "mine.py"
    file.write_text(
        f"""
import big_vision.configs.common as common

def get_config(arg=None):
    return common.New({build().to_dict()!r})
"""
    )

    assert load_recipe(str(file)) == read()
    assert load_recipe(str(file), ["--config.seed=3"]) == read(seed=3)


def test_the_error_names_the_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        f"""
import ml_collections

def get_config():
    return ml_collections.ConfigDict({build(nothing=1).to_dict()!r})
"""
    )

    with rejects(f"{file}: fields of big_vision", "config.nothing=1"):
        load_recipe(str(file))
