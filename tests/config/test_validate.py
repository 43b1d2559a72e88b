"""Every refusal of a config value that needs neither the dataset nor the devices; nothing else refuses one."""

import importlib
import sys

import pytest

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
ANY = {"v2": EvaluatorConfig()}
FROZEN = {"few": EvaluatorConfig(kind="fewshot", arguments={"shots": (5, 10)}), "near": EvaluatorConfig(kind="knn")}

FRACTIONS = ("model.dropout_fraction", "model.stochastic_depth_fraction", "objective.label_smoothing_fraction")
FRACTIONS += ("input.holdout_fraction", "polyak.factor", "optimizer.beta1", "optimizer.beta2", "optimizer.momentum")
NOT_NEGATIVE = ("optimizer.weight_decay", "schedule.learning_rate", "schedule.end_learning_rate", "input.mixup_alpha")
NOT_NEGATIVE += ("input.shift_pixels", "input.randaugment_layers", "input.randaugment_magnitude", "input.num_workers")
NOT_NEGATIVE += ("input.max_unreadable", "checkpoint.keep_best", "seed", "stop_early.min_delta")
AT_LEAST_ONE = ("checkpoint.keep_latest", "logging.profile_num_steps", "input.num_threads", "sharding.num_replicas")
AT_LEAST_ONE += ("sharding.num_model_shards", "optimizer.accumulation_steps", "stop_early.patience")
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
        *((name, value, r"must lie in \[0, 1\)") for name in FRACTIONS for value in (-0.1, 1.0)),
        *((name, -1, "must not be negative") for name in NOT_NEGATIVE),
        *((name, 0, "must be at least 1") for name in AT_LEAST_ONE),
        *((name, 0.0, "must be positive") for name in POSITIVE),
        ("input.test_crop_fraction", 1.1, r"must lie in \[0, 1\]"),
        ("optimizer.layer_decay", 1.1, "at most 1, where 1 is off"),
        ("polyak.factor", 0.0, "must lie between 0 and 1, for example 0.9999; None for off"),
    ],
)
def test_values_out_of_range(name, value, rule):
    with pytest.raises(ValueError, match=rf"^config\.{name}={value}(\.0)?: .*{rule}"):
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


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"polyak.factor": None, "polyak.start": "5 steps"}, "polyak.start"),
        ({"schedule.timescale": "5 steps"}, "schedule.timescale"),
        ({"schedule.drop_at_fraction": (0.5,)}, "schedule.drop_at_fraction"),
        ({"schedule.decay": "rsqrt", "schedule.end_learning_rate": 1e-5}, "schedule.end_learning_rate"),
        ({"optimizer.momentum": 0.5}, "optimizer.momentum"),
        ({"optimizer.name": "sgd", "optimizer.beta1": 0.95}, "optimizer.beta1"),
        (LION | {"optimizer.weight_decay": 0.1}, "optimizer.weight_decay"),
        (LION | {"optimizer.first_moment_dtype": "bfloat16"}, "optimizer.first_moment_dtype"),
        ({"optimizer.arguments": {"b1": 0.9}}, "optimizer.arguments"),
        ({**HEAD, "optimizer.layer_decay": 0.9}, "optimizer.layer_decay"),
        ({**HEAD, "optimizer.frozen": ("norm/*",)}, "optimizer.frozen"),
        ({"input.crop_area_fraction": (0.5, 1.0)}, "input.crop_area_fraction"),
        ({"input.test_crop_fraction": 0.5}, "input.test_crop_fraction"),
        ({"input.randaugment_arithmetic": "saturating"}, "input.randaugment_arithmetic"),
        ({"logging.profile_num_steps": 3}, "logging.profile_num_steps"),
        ({"stop_early.min_delta": 0.1}, "stop_early.min_delta"),
    ],
)
def test_a_setting_without_effect_is_refused(fields, name):
    with pytest.raises(ValueError, match=rf"config\.{name}=.* has no effect without"):
        validate(change(fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"init_from": "a", "resume_from": "b"}, "config.init_from and config.resume_from are both set"),
        ({"input.data_dir": "gs://b/tfds"}, "config.input.data_dir=gs://b/tfds: a folder is needed"),
        # input
        ({"input.image_size": (0, 8)}, r"input.image_size=\(0, 8\): height and width must be at least 1"),
        ({"input.test_split": "train"}, "input.test_split are both 'train': the run would be tested on"),
        *(
            ({**INCEPTION, "input.crop_area_fraction": area}, "crop_area_fraction=.* must be 0 < low <= high <= 1")
            for area in ((0.0, 1.0), (0.5, 0.4), (0.5, 1.1))
        ),
        ({"input.shift_pixels": 0}, "shift_pixels=0 with train_crop='shift': give at least 1"),
        ({"input.train_crop": "none"}, "shift_pixels=1 with train_crop='none'"),
        ({"input.randaugment_magnitude": 5}, "randaugment_layers=0 and randaugment_magnitude=5: give both"),
        ({"input.train_resize_pixels": 9}, "train_resize_pixels=9 with train_crop='shift': give a number with"),
        (RESIZE, "train_resize_pixels=None with train_crop='resize'"),
        (
            {**RESIZE, "input.train_resize_pixels": 9, "input.image_size": (8, 10)},
            r"train_resize_pixels=9: a crop of image_size \(8, 10\) does not fit; give at least 10",
        ),
        # optimizer
        (
            {"optimizer.learning_rate_multipliers": {"head/*": 0.0}},
            r"multipliers\['head/\*'\]=0.0: must be positive. .* use config.optimizer.frozen=head/\*",
        ),
        ({**BIG_VISION, "schedule.learning_rate": 0.0}, "'big_vision' divides by the peak learning rate, which is 0"),
        ({**HEAD, "model.dropout_fraction": 0.1}, "the features are frozen: dropout has no effect"),
        # schedule
        ({"schedule.end_learning_rate": 1.0}, "end_learning_rate=1.0: must lie between 0 and learning_rate=0.003"),
        *(
            (
                {"schedule.decay": "staircase", "schedule.drop_at_fraction": fractions},
                r"drop_at_fraction=.*: must be one or more ascending numbers between 0 and 1",
            )
            for fractions in ((), (0.0, 0.5), (0.5, 1.0), (0.6, 0.3), (0.3, 0.3))
        ),
        # evaluations
        *(
            ({"evaluation.evaluators": {name: {}}}, f"evaluators.{name}: the name is a prefix of results")
            for name in ("test", "validation", "train", "a-b")
        ),
        ({"evaluation.evaluators": {"v2": {"arguments": {"k": 3}}}}, "v2.arguments have no effect with kind='classif"),
        (
            {"evaluation.evaluators": {"f": {"kind": "fewshot", "arguments": {"shot": 5}}}},
            "arguments.shot is unknown. Did",
        ),
        ({"evaluation.evaluators": {"f": {"kind": "knn", "train_split": "test"}}}, "f: split and train_split are both"),
        ({"evaluation.evaluators": {"v2": {"train_split": "x"}}}, "v2.train_split has no effect with kind='classif"),
        (
            {"evaluation.evaluators": FROZEN, "checkpoint.best_metric": "few_1shot_accuracy"},
            "no result .*: test_accuracy, test_loss, few_5shot_accuracy, few_10shot_accuracy, near_20nn_accuracy.",
        ),
        ({"checkpoint.best_metric": "test_a"}, "best_metric='test_a' is no result .*: test_accuracy, test_loss."),
        ({"stop_early.patience": 2, "checkpoint.keep_best": 0}, "patience with config.checkpoint.keep_best=0: keep"),
        ({"stop_early.patience": 2, "checkpoint.best_metric": "val_loss"}, "best_metric='val_loss' is no result"),
        ({"seed": 2**32}, "config.seed=4294967296: give 0 to"),
        ({"objective.class_weights": (1.0, 0.0)}, r"class_weights=\(1.0, 0.0\): must be positive"),
        (
            {"input.train_examples": 0},
            "train_examples=0 and train_examples_per_class=None: give one of them, at least 1",
        ),
        ({"input.train_examples": 9, "input.train_examples_per_class": 2}, "give one of them"),
        ({"input.train_examples_per_class": 0}, "train_examples_per_class=0: give at least 1"),
        # references
        ({"optimizer.name": "math:lion", "optimizer.weight_decay": 0.0}, "config.optimizer.name='math:lion': math has"),
    ],
)
def test_values_that_do_not_fit_each_other(fields, message):
    with pytest.raises(ValueError, match=message):
        validate(change(fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"schedule.learning_rate": 0.01},
            r"config.schedule.learning_rate=0.01 and config.search.learning_rates=\(0.001, .* are both set",
        ),
        ({"search.learning_rates": ()}, "learning_rate=0.0 and .*learning_rates is empty: nothing would be learnt"),
        *(
            ({"search.learning_rates": rates}, r"must be positive and different from each other")
            for rates in ((0.01, 0.0), (0.01, -0.1), (0.01, 0.03, 0.01))
        ),
        *(
            ({"search.validation_fraction": part}, f"validation_fraction={part}: must lie between 0 and 1")
            for part in (0.0, 1.0)
        ),
        ({**HEAD, "model.dropout_fraction": 0.1}, "features are frozen: dropout has no effect"),
    ],
)
def test_what_fine_tuning_refuses(fields, message):
    with pytest.raises(ValueError, match=message):
        validate(change(fields, FINETUNING))


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
