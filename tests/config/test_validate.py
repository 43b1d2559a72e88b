"""Every rejection of a config value that needs neither the dataset nor the devices; nothing else rejects one."""

import importlib
import sys

import pytest

from tests.rejections import rejects
from vit_jax.config import EvaluatorConfig, from_dict, load_recipe, to_dict
from vit_jax.config.validate import validate

PRETRAINING = load_recipe("configs/digits.py")
FINETUNING = load_recipe("configs/finetune.py:any,own")
ONE_RATE = {"search.learning_rates": (), "schedule.learning_rate": 0.01}
INCEPTION = {"input.train_crop": "inception", "input.shift_pixels": 0}
RESIZE = {"input.train_crop": "resize", "input.shift_pixels": 0}
LION = {"optimizer.name": "optax:lion", "optimizer.weight_decay": 0.0}
BIG_VISION = {"optimizer.weight_decay_meaning": "big_vision", "optimizer.weight_decay": 0.1}
HEAD = {"optimizer.trained": "head"}
MASKED = {"objective.kind": "masked_patch", "input.mixup_alpha": 0.0}
ANY = {"v2": EvaluatorConfig()}
FROZEN = {"few": EvaluatorConfig(kind="fewshot", arguments={"shots": (5, 10)}), "near": EvaluatorConfig(kind="knn")}
STAIRCASE = {"schedule.decay": "staircase"}
NO_AREAS = ((0.0, 1.0), (0.5, 0.4), (0.5, 1.1))
NO_VALUES = ((1.0, 1.0), (4095.0, 0.0))
NO_DROPS = ((), (0.0, 0.5), (0.5, 1.0), (0.6, 0.3), (0.3, 0.3))
NO_RATES = ((0.01, 0.0), (0.01, -0.1), (0.01, 0.03, 0.01))
NO_PREFIXES = ("test", "validation", "train", "a-b")

FRACTIONS = ("model.dropout_fraction", "model.stochastic_depth_fraction", "objective.label_smoothing_fraction")
FRACTIONS += ("input.holdout_fraction", "polyak.factor", "optimizer.beta1", "optimizer.beta2", "optimizer.momentum")
NOT_NEGATIVE = ("optimizer.weight_decay", "schedule.learning_rate", "schedule.end_learning_rate", "input.mixup_alpha")
NOT_NEGATIVE += ("input.shift_pixels", "input.randaugment_layers", "input.randaugment_magnitude", "input.num_workers")
NOT_NEGATIVE += ("input.cutmix_alpha", "input.max_unreadable", "checkpoint.keep_best", "seed", "stop_early.min_delta")
AT_LEAST_ONE = ("checkpoint.keep_latest", "logging.profile_num_steps", "input.num_threads", "sharding.num_replicas")
AT_LEAST_ONE += ("sharding.num_model_shards", "optimizer.accumulation_steps", "stop_early.patience")
AT_LEAST_ONE += ("input.repeats",)
SHARES = ("input.cutmix_fraction", "input.erasing_fraction", "input.color_jitter", "input.test_crop_fraction")
POSITIVE = ("input.test_crop_fraction", "input.max_image_megapixels")
POSITIVE += ("optimizer.epsilon", "optimizer.clip_global_norm", "optimizer.layer_decay", "logging.hang_seconds")


def change(fields, base=PRETRAINING):
    """The config with fields changed, by name with dots."""
    values = to_dict(base)
    for name, value in fields.items():
        *sections, field = name.split(".")
        section = values[sections[0]] if sections else values
        assert field in section, name
        section[field] = value
    return from_dict(type(base), values)


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        *((name, value, r"\[0, 1\)") for name in FRACTIONS for value in (-0.1, 1.0)),
        *((name, -1, "negative") for name in NOT_NEGATIVE),
        *((name, 0, "at least 1") for name in AT_LEAST_ONE),
        *((name, 0.0, "positive") for name in POSITIVE),
        *((name, 1.1, r"\[0, 1\]") for name in SHARES),
        ("optimizer.layer_decay", 1.1, "at most 1"),
        ("polyak.factor", 0.0, "between 0 and 1"),
    ],
)
def test_values_out_of_range(name, value, rule):
    with rejects(f"config.{name}={value}", rule):
        validate(change({name: value}))


def test_limits_are_allowed():
    options = {**INCEPTION, "input.test_resize": "short_side", "optimizer.momentum": 0.9, "polyak.factor": 0.5}
    options["checkpoint.keep_best"] = 1  # which early stopping needs
    at_zero = dict.fromkeys((*FRACTIONS, *NOT_NEGATIVE), 0)
    at_one = dict.fromkeys((*AT_LEAST_ONE, *POSITIVE, "input.train_resize_pixels", "logging.profile_start_step"), 1)
    crops = {"input.crop_area_fraction": (1.0, 1.0), "input.train_resize_pixels": None}
    validate(change(at_zero | at_one | options | crops))
    validate(change({**RESIZE, "input.train_resize_pixels": 8}))
    validate(change(LION | {"optimizer.arguments": {"b1": 0.9}}))
    validate(change({"optimizer.frozen": ("embedding/*",), "optimizer.learning_rate_multipliers": {"head/*": 10}}))
    validate(change({"evaluation.evaluators": ANY, "checkpoint.best_metric": "v2_loss"}))
    validate(change({"evaluation.evaluators": FROZEN, "checkpoint.best_metric": "few_10shot_accuracy"}))
    validate(change({"evaluation.evaluators": FROZEN, "checkpoint.best_metric": "near_20nn_accuracy"}))
    validate(change({"checkpoint.best_metric": "none", "checkpoint.keep_best": 0}))
    validate(change({**ONE_RATE, "search.validation_fraction": 0.0}, FINETUNING))  # of no search
    for fraction in (None, 0.0):  # not even that of the released configs
        validate(change({**HEAD, "model.dropout_fraction": fraction}, FINETUNING))
    validate(change({**BIG_VISION, "optimizer.name": "adam", "optimizer.momentum": 0.9}, FINETUNING))  # of trials


# The message names the first of the fields.


@pytest.mark.parametrize(
    "fields",
    [
        {"polyak.start": "5 steps", "polyak.factor": None},
        {"schedule.timescale": "5 steps"},
        {"schedule.drop_at_fraction": (0.5,)},
        {"schedule.end_learning_rate": 1e-5, "schedule.decay": "rsqrt"},
        {"optimizer.momentum": 0.5},
        {"optimizer.beta1": 0.95, "optimizer.name": "sgd"},
        {"optimizer.weight_decay": 0.1, "optimizer.name": "optax:lion"},
        {"optimizer.first_moment_dtype": "bfloat16", **LION},
        {"optimizer.arguments": {"b1": 0.9}},
        {"optimizer.layer_decay": 0.9, **HEAD},
        {"optimizer.frozen": ("norm/*",), **HEAD},
        {"input.crop_area_fraction": (0.5, 1.0)},
        {"input.test_crop_fraction": 0.5},
        {"input.randaugment_arithmetic": "saturating"},
        {"input.mixup_alpha": 0.4, "objective.kind": "masked_patch"},
        {"input.cutmix_alpha": 1.0, **MASKED},
        {"input.cutmix_fraction": 0.2, "input.cutmix_alpha": 1.0, "input.mixup_alpha": 0.0},
        {"objective.label_smoothing_fraction": 0.1, **MASKED},
        {"objective.corrupted_fraction": 0.3},
        {"logging.profile_num_steps": 3},
        {"stop_early.min_delta": 0.1},
    ],
)
def test_a_setting_without_effect_is_rejected(fields):
    with rejects(f"config.{next(iter(fields))}=", "no effect without"):
        validate(change(fields))


def test_a_missing_optimizer_is_reported_before_the_weight_decay_of_the_recipe():
    with rejects("config.optimizer.name='optax:lionn'", "Did you mean 'lion'"):
        validate(change({"optimizer.weight_decay": 0.1, "optimizer.name": "optax:lionn"}))
    with rejects("config.optimizer.weight_decay=0.1", r"or add --config\.optimizer\.weight_decay=0\.0\.$"):
        validate(change({"optimizer.weight_decay": 0.1, "optimizer.name": "optax:lion"}))


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"init_from": "a", "resume_from": "b"}, "resume_from.*both"),
        ({"resume_step": 5}, "=5.*resume_from"),
        ({"objective.label_smoothing_fraction": 0.1, "objective.loss": "bce"}, "=0.1.*loss='bce'.*sigmoid"),
        ({"polyak.warmup": "ratio", "polyak.factor": 0.9}, "'ratio'.*bias_correction=False"),
        ({"input.data_dir": "gs://b/tfds"}, "=gs://b/tfds.*folder"),
        # input
        ({"input.image_size": (0, 8)}, r"=\(0, 8\).*at least 1"),
        ({"input.test_split": "train"}, "'train'"),
        *(({"input.crop_area_fraction": area, **INCEPTION}, "0 < low <= high <= 1") for area in NO_AREAS),
        *(({"input.value_range": values}, "finite numbers, low < high") for values in NO_VALUES),
        ({"input.shift_pixels": 0}, "=0.*train_crop='shift'.*at least 1"),
        ({"input.shift_pixels": 1, "input.train_crop": "none"}, "=1.*train_crop='none'"),
        ({"input.randaugment_layers": 0, "input.randaugment_magnitude": 5}, "=0.*magnitude=5"),
        ({"input.train_resize_pixels": 9}, "=9.*train_crop='shift'"),
        ({"input.train_resize_pixels": None, **RESIZE}, "=None.*train_crop='resize'"),
        ({"input.train_resize_pixels": 9, **RESIZE, "input.image_size": (8, 10)}, "=9.*at least 10"),
        ({"input.train_examples": 0}, "=0.*at least 1"),
        ({"input.train_examples": 9, "input.train_examples_per_class": 2}, "=9.*per_class=2"),
        ({"input.train_examples_per_class": 0}, "=0.*at least 1"),
        # objective
        ({"objective.class_weights": (1.0, 0.0)}, r"=\(1.0, 0.0\).*positive"),
        ({"objective.loss": "sigmoid", **MASKED}, "='sigmoid'.*'softmax'"),
        ({"objective.corrupted_fraction": 0.0, **MASKED}, "=0.0.*between 0 and 1"),
        ({"objective.corruption_shares": (0.5, 0.1, 0.1), **MASKED}, r"=\(0.5, 0.1, 0.1\).*sum to 1"),
        ({"optimizer.trained": "head", **MASKED}, "='head'.*masked_patch"),
        # optimizer
        ({"optimizer.learning_rate_multipliers": {"head/*": 0.0}}, r"head/\*.*=0.0.*positive.*frozen=head/\*"),
        ({**BIG_VISION, "schedule.learning_rate": 0.0}, "='big_vision'.*learning rate.*0"),
        ({"optimizer.name": "math:lion", "optimizer.weight_decay": 0.0}, "='math:lion': math has"),
        # schedule
        ({"schedule.end_learning_rate": 1.0}, "=1.0.*between 0 and.*0.003"),
        *(({"schedule.drop_at_fraction": drops, **STAIRCASE}, "ascending.*between 0 and 1") for drops in NO_DROPS),
        # evaluations
        *(({"evaluation.evaluators": {name: {}}}, f"{name}.*prefix") for name in NO_PREFIXES),
        ({"evaluation.evaluators": {"v2": {"arguments": {"k": 3}}}}, "v2.arguments.*no effect.*'classification'"),
        ({"evaluation.evaluators": {"v2": {"train_split": "x"}}}, "v2.train_split.*no effect.*'classification'"),
        ({"evaluation.evaluators": {"f": {"kind": "fewshot", "arguments": {"shot": 5}}}}, "f.arguments.shot.*'?shots"),
        ({"evaluation.evaluators": {"f": {"kind": "knn", "train_split": "test"}}}, "f.*train_split.*'test'"),
        ({"checkpoint.best_metric": "few_1shot_accuracy", "evaluation.evaluators": FROZEN}, "few_5.*few_10.*near_20nn"),
        ({"checkpoint.best_metric": "test_a"}, "='test_a'.*test_accuracy, test_loss"),
        ({"checkpoint.best_metric": "test_accuracy", **MASKED, "objective.patch_target": "pixels"}, ": test_loss"),
        ({"stop_early.patience": 2, "checkpoint.keep_best": 0}, "keep_best=0"),
        ({"allow_code": ("a-b",)}, "='a-b'.*package"),
        ({"seed": 2**32}, r"=4294967296.*2\*\*32 - 1"),
    ],
)
def test_values_that_do_not_fit_each_other(fields, rule):
    with rejects(f"config.{next(iter(fields))}", rule):
        validate(change(fields))


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"objective.kind": "masked_patch"}, "='masked_patch'.*pre-training"),
        ({"schedule.learning_rate": 0.01}, r"=0.01.*search.learning_rates=\(0.001, .*both"),
        ({"schedule.learning_rate": 0.0, "search.learning_rates": ()}, "=0.0.*search.learning_rates"),
        *(({"search.learning_rates": rates}, "positive.*different") for rates in NO_RATES),
        *(({"search.validation_fraction": part}, f"={part}.*between 0 and 1") for part in (0.0, 1.0)),
    ],
)
def test_values_that_do_not_fit_fine_tuning(fields, rule):
    with rejects(f"config.{next(iter(fields))}", rule):
        validate(change(fields, FINETUNING))


@pytest.mark.parametrize("base", [PRETRAINING, FINETUNING], ids=["pretrain", "finetune"])
def test_dropout_on_frozen_features(base):
    with rejects("config.model", "optimizer.trained='head'.*no effect"):
        validate(change({**HEAD, "model.dropout_fraction": 0.1}, base))


def test_only_fields_that_may_be_references_are_imported(tmp_path, monkeypatch):
    """Other texts may have the same form: a workdir, a project, an evaluator's own argument."""
    evaluators = {"v2": {"kind": "mine:f", "arguments": {"text": "no_module:x"}, "data": "folder:x"}}
    other = {"init_from": "runs:best", "logging.wandb_project": "team:x", "evaluation.evaluators": evaluators}
    (tmp_path / "mine.py").write_text("def f(): pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    importlib.invalidate_caches()
    validate(change(other))
    assert sys.modules.pop("mine").f
