"""Every rejection of a config value, and durations in steps."""

import importlib
import sys

import pytest

from tests.rejections import rejects
from vit_jax.config import (
    Duration,
    EvaluatorConfig,
    PhaseConfig,
    RunSteps,
    check,
    from_dict,
    load_recipe,
    resolve,
    to_dict,
    validate,
)
from vit_jax.config.lengths import Clock

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
CUSTOM = {"c": EvaluatorConfig(kind="math:hypot")}
FROZEN = {
    "few": EvaluatorConfig(kind="fewshot", arguments={"shots": (5, 10)}),
    "near": EvaluatorConfig(kind="knn"),
}
STAIRCASE = {"schedule.decay": "staircase"}
NO_AREAS = ((0.0, 1.0), (0.5, 0.4), (0.5, 1.1))
RGB_OPTIONS = {"randaugment_layers": 2, "three_augment": True, "color_jitter": 0.3}
NO_VALUES = ((1.0, 1.0), (4095.0, 0.0))
NO_DROPS = ((), (0.0, 0.5), (0.5, 1.0), (0.6, 0.3), (0.3, 0.3))
NO_RATES = (
    ((0.01, 0.0), "positive"),
    ((0.01, -0.1), "positive"),
    ((0.01, 0.03, 0.01), "differ"),
)
NO_PREFIXES = ("test", "validation", "train", "a-b")

FRACTIONS = (
    "model.dropout_fraction",
    "model.stochastic_depth_fraction",
    "objective.label_smoothing_fraction",
    "input.holdout_fraction",
    "optimizer.beta1",
    "optimizer.beta2",
    "optimizer.momentum",
)
NOT_NEGATIVE = (
    "optimizer.weight_decay",
    "schedule.learning_rate",
    "schedule.end_learning_rate",
    "input.mixup_alpha",
    "input.shift_pixels",
    "input.randaugment_layers",
    "input.randaugment_magnitude",
    "input.num_workers",
    "input.cutmix_alpha",
    "input.max_unreadable",
    "checkpoint.keep_best",
    "stop_early.min_delta",
)
AT_LEAST_ONE = (
    "checkpoint.keep_latest",
    "logging.profile_num_steps",
    "input.num_threads",
    "sharding.num_replicas",
    "sharding.num_model_shards",
    "optimizer.accumulation_steps",
    "stop_early.patience",
    "input.repeats",
    "input.train_examples",
    "input.train_examples_per_class",
    "global_batch",
)
SHARES = ("input.cutmix_fraction", "input.erasing_fraction", "input.color_jitter")
POSITIVE_SHARES = (
    "input.test_crop_fraction",
    "optimizer.layer_decay",
    "objective.corrupted_fraction",
)
POSITIVE = (
    "input.max_image_megapixels",
    "optimizer.epsilon",
    "optimizer.clip_global_norm",
    "logging.hang_seconds",
)


def change(fields, base=PRETRAINING):
    """Return the config with fields changed, by name with dots."""
    values = to_dict(base)
    for name, value in fields.items():
        *sections, field = name.split(".")
        section = values[sections[0]] if sections else values
        assert field in section, name
        section[field] = value
    return from_dict(type(base), values)


def get_first_field(fields):
    """Return the field that a message names."""
    return f"config.{next(iter(fields))}".replace("__", ".")


def list_values_out_of_range():
    """Return (field, value, rule) for the limits of all fields."""
    cases = [
        ("polyak.factor", -0.1, r"\(0, 1\).*0.9999"),
        ("polyak.factor", 0.0, r"\(0, 1\).*0.9999"),
        ("polyak.factor", 1.0, r"\(0, 1\).*0.9999"),
        ("seed", -1, r"\[0, 4294967295\]"),
        ("seed", 2**32, r"\[0, 4294967295\]"),
        ("input.image_size", (0, 8), "at least 1"),
        ("input.image_size", (8, 0), "at least 1"),
        ("objective.class_weights", (1.0, 0.0), "positive"),
    ]
    for names, values, rule in (
        (FRACTIONS, (-0.1, 1.0), r"\[0, 1\)"),
        (NOT_NEGATIVE, (-1,), "negative"),
        (AT_LEAST_ONE, (0,), "at least 1"),
        (POSITIVE, (0.0,), "positive"),
        (SHARES, (1.1,), r"\[0, 1\]"),
        (POSITIVE_SHARES, (0.0, 1.1), r"\(0, 1\]"),
    ):
        for name in names:
            cases += [(name, value, rule) for value in values]
    return cases


@pytest.mark.parametrize(("name", "value", "rule"), list_values_out_of_range())
def test_values_out_of_range(name, value, rule):
    with rejects(f"config.{name}={value}", rule):
        validate(change({name: value}))


def test_limits_are_allowed():
    at_zero = dict.fromkeys((*FRACTIONS, *NOT_NEGATIVE, "seed"), 0)
    at_one = dict.fromkeys((*AT_LEAST_ONE, *POSITIVE), 1)
    others = {
        **INCEPTION,
        "input.crop_area_fraction": (1.0, 1.0),
        "input.train_resize_pixels": None,
        "input.test_resize": "short_side",
        "input.randaugment_layers": 1,
        "logging.profile_start_step": 1,
        "optimizer.momentum": 0.9,
        "polyak.factor": 0.5,
        # Early stopping needs it.
        "checkpoint.keep_best": 1,
        # It excludes train_examples_per_class.
        "input.train_examples": None,
    }

    validate(change(at_zero | at_one | others))


@pytest.mark.parametrize(
    "fields",
    [
        {**RESIZE, "input.train_resize_pixels": 8},
        {**LION, "optimizer.arguments": {"b1": 0.9}},
        {
            "optimizer.frozen": ("embedding/*",),
            "optimizer.learning_rate_multipliers": {"head/*": 10},
        },
        {"evaluation.evaluators": ANY, "checkpoint.best_metric": "v2_loss"},
        {"evaluation.evaluators": FROZEN, "checkpoint.best_metric": "few_10shot_accuracy"},
        {"evaluation.evaluators": FROZEN, "checkpoint.best_metric": "near_20nn_accuracy"},
        {
            "evaluation.evaluators": CUSTOM,
            "checkpoint.best_metric": "c_ece",
            "checkpoint.best_mode": "min",
        },
        {
            "evaluation.evaluators": CUSTOM,
            "checkpoint.best_metric": "c_calibration_error",
            "checkpoint.best_mode": "auto",
        },
        {"checkpoint.best_metric": "none", "checkpoint.keep_best": 0},
    ],
)
def test_values_that_fit_each_other(fields):
    validate(change(fields))


@pytest.mark.parametrize(
    "fields",
    [
        # Without a search there are no validation images.
        {**ONE_RATE, "search.validation_fraction": 0.0},
        # Frozen features have no dropout, not even that of the released configs.
        {**HEAD, "model.dropout_fraction": None},
        {**HEAD, "model.dropout_fraction": 0.0},
        # Features are learned for a head that is not zero.
        {"optimizer.frozen": ("head/*",), "model.head_stddev": 0.02},
        {"optimizer.frozen": ("head/*",), "model.head": "keep"},
        {"optimizer.frozen": ("head/*/bias",)},
        # The learning rate is that of the trials.
        {**BIG_VISION, "optimizer.name": "adam", "optimizer.momentum": 0.9},
    ],
    ids=[
        "no search",
        "no dropout",
        "dropout of 0",
        "random head",
        "kept head",
        "frozen bias",
        "weight decay",
    ],
)
def test_values_that_fit_fine_tuning(fields):
    validate(change(fields, FINETUNING))


@pytest.mark.parametrize(
    ("fields", "needed"),
    [
        ({"polyak.start": "5 steps", "polyak.factor": None}, "polyak.factor"),
        ({"schedule.timescale": "5 steps"}, "schedule.decay"),
        ({"schedule.drop_at_fraction": (0.5,)}, "schedule.decay"),
        ({"schedule.end_learning_rate": 1e-5, "schedule.decay": "rsqrt"}, "schedule.decay"),
        ({"optimizer.momentum": 0.5}, "optimizer.name"),
        ({"optimizer.beta1": 0.95, "optimizer.name": "sgd"}, "optimizer.name"),
        ({"optimizer.weight_decay": 0.1, "optimizer.name": "optax:lion"}, "optimizer.name"),
        ({"optimizer.first_moment_dtype": "bfloat16", **LION}, "optimizer.name"),
        ({"optimizer.arguments": {"b1": 0.9}}, "optimizer.name"),
        ({"optimizer.layer_decay": 0.9, **HEAD}, "optimizer.trained"),
        ({"optimizer.frozen": ("norm/*",), **HEAD}, "optimizer.trained"),
        ({"input.crop_area_fraction": (0.5, 1.0)}, "input.train_crop"),
        ({"input.test_crop_fraction": 0.5}, "input.test_resize"),
        ({"input.randaugment_arithmetic": "saturating"}, "input.randaugment_layers"),
        ({"input.mixup_alpha": 0.4, "objective.kind": "masked_patch"}, "objective.kind"),
        ({"input.cutmix_alpha": 1.0, **MASKED}, "objective.kind"),
        (
            {"input.cutmix_fraction": 0.2, "input.cutmix_alpha": 1.0, "input.mixup_alpha": 0.0},
            "input.mixup_alpha",
        ),
        ({"objective.label_smoothing_fraction": 0.1, **MASKED}, "objective.kind"),
        ({"objective.corrupted_fraction": 0.3}, "objective.kind"),
        ({"logging.profile_num_steps": 3}, "logging.profile_start_step"),
        (
            {"input.randaugment_magnitude": 5, "input.randaugment_layers": 0},
            "input.randaugment_layers",
        ),
        ({"input.shift_pixels": 1, "input.train_crop": "none"}, "input.train_crop"),
        ({"input.train_resize_pixels": 9}, "input.train_crop"),
        ({"resume_step": 5}, "resume_from"),
        ({"stop_early.patience": 2, "checkpoint.keep_best": 0}, "checkpoint.keep_best"),
        ({"stop_early.min_delta": 0.1}, "stop_early.patience"),
    ],
)
def test_a_setting_without_effect_is_rejected(fields, needed):
    with rejects(f"{get_first_field(fields)}=", f"no effect with {needed}.*Set {needed}"):
        validate(change(fields))


def test_a_missing_optimizer_is_reported_before_the_weight_decay_of_the_recipe():
    missing = {"optimizer.weight_decay": 0.1, "optimizer.name": "optax:lionn"}
    with rejects("config.optimizer.name='optax:lionn'", "Did you mean 'lion'"):
        validate(change(missing))

    lion = {"optimizer.weight_decay": 0.1, "optimizer.name": "optax:lion"}
    remedy = r"or add --config\.optimizer\.weight_decay=0\.0\.$"
    with rejects("config.optimizer.weight_decay=0.1", remedy):
        validate(change(lion))


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"init_from": "a", "resume_from": "b"}, "='a'.*None with resume_from"),
        (
            {"objective.label_smoothing_fraction": 0.1, "objective.loss": "bce"},
            "=0.1.*loss='bce'.*sigmoid",
        ),
        ({"polyak.warmup": "ratio", "polyak.factor": 0.9}, "'ratio'.*bias_correction=False"),
        ({"input.data_dir": "s3://b/tfds"}, "=s3://b/tfds.*folder"),
        ({"input.exclude": "gs://b/list.json"}, "=gs://b/list.json.*folder.*docs/gcs.md"),
        # input
        ({"input.test_split": "train"}, "'train'"),
        *(
            ({"input.crop_area_fraction": area, **INCEPTION}, "0 < low <= high <= 1")
            for area in NO_AREAS
        ),
        *(({"input.value_range": values}, "finite numbers, low < high") for values in NO_VALUES),
        ({"input.channels": 33}, r"\[1, 32\]"),
        ({"input.bands": (1, 2, 3, 8)}, "must be 3 numbers.*input.channels=4"),
        ({"input.bands": (0, 1, 2)}, "at least 1"),
        ({"input.channel_mean": (1.0,) * 3, "input.channel_std": (1.0,) * 3}, "no effect on RGB"),
        ({"input.channel_mean": (1.0, 2.0), "input.channels": 2}, "Give both"),
        *(
            ({f"input.{name}": value, "input.channels": 4}, f"must be off with.*{name}=")
            for name, value in RGB_OPTIONS.items()
        ),
        ({"input.shift_pixels": 0}, "=0.*at least 1.*train_crop='shift'"),
        (
            {"input.rotate90": True, "input.image_size": (8, 10)},
            r"image_size=\(8, 10\), which is not square. Use image_size=10,10",
        ),
        (
            {
                "input.rotate90": True,
                "phases": {"small": PhaseConfig(until=Duration("9 steps"), image_size=(4, 6))},
            },
            r"image_size=\(4, 6\)",
        ),
        ({"input.train_resize_pixels": None, **RESIZE}, "=None.*train_crop='resize'"),
        (
            {"input.train_resize_pixels": 9, **RESIZE, "input.image_size": (8, 10)},
            "=9.*at least 10",
        ),
        ({"input.train_examples": 9, "input.train_examples_per_class": 2}, "=9.*per_class=2"),
        # objective
        ({"objective.loss": "sigmoid", **MASKED}, "='sigmoid'.*'softmax'"),
        (
            {"objective.corruption_shares": (0.5, 0.1, 0.1), **MASKED},
            r"=\(0.5, 0.1, 0.1\).*sum to 1",
        ),
        ({"optimizer.trained": "head", **MASKED}, "='head'.*masked_patch"),
        # optimizer
        (
            {"optimizer.learning_rate_multipliers": {"head/*": 0.0}},
            r"head/\*.*=0.0.*positive.*optimizer.frozen",
        ),
        ({**BIG_VISION, "schedule.learning_rate": 0.0}, "='big_vision'.*learning rate.*0"),
        ({"optimizer.name": "math:lion", "optimizer.weight_decay": 0.0}, "='math:lion': math has"),
        # schedule
        ({"schedule.end_learning_rate": 1.0}, r"=1.0.*\[0, 0.003\]"),
        *(
            ({"schedule.drop_at_fraction": drops, **STAIRCASE}, r"ascending.*\(0, 1\)")
            for drops in NO_DROPS
        ),
        # evaluations
        *(({"evaluation.evaluators": {name: {}}}, f"{name}.*prefix") for name in NO_PREFIXES),
        (
            {"evaluation.evaluators": {"v2": {"arguments": {"k": 3}}}},
            "v2.arguments.*no effect.*'classification'",
        ),
        (
            {"evaluation.evaluators": {"v2": {"train_split": "x"}}},
            "v2.train_split.*no effect.*'classification'",
        ),
        (
            {"evaluation.evaluators": {"f": {"kind": "fewshot", "arguments": {"shot": 5}}}},
            "f.arguments.shot.*Did you mean shots",
        ),
        (
            {"evaluation.evaluators": {"f": {"kind": "knn", "train_split": "test"}}},
            "f.*train_split.*'test'",
        ),
        (
            {"checkpoint.best_metric": "few_1shot_accuracy", "evaluation.evaluators": FROZEN},
            "few_5.*few_10.*near_20nn",
        ),
        ({"checkpoint.best_mode": "min"}, "'min'.*no effect.*test_accuracy"),
        ({"checkpoint.best_metric": "test_a"}, "='test_a'.*test_accuracy, test_loss"),
        (
            {
                "checkpoint.best_metric": "test_accuracy",
                **MASKED,
                "objective.patch_target": "pixels",
            },
            "one of test_loss\\.",
        ),
        ({"allow_code": ("a-b",)}, "='a-b'.*package"),
    ],
)
def test_values_that_do_not_fit_each_other(fields, rule):
    with rejects(get_first_field(fields), rule):
        validate(change(fields))


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"objective.kind": "masked_patch"}, "='masked_patch'.*pre-training"),
        (
            {"schedule.learning_rate": 0.01},
            r"=0.01: must be 0 with config.search.learning_rates=\(0.001, ",
        ),
        (
            {"schedule.learning_rate": 0.0, "search.learning_rates": ()},
            "=0.0.*search.learning_rates",
        ),
        ({"optimizer.frozen": ("head/*",)}, "='head/.*zeros stop all gradients.*head_stddev"),
        (
            {"optimizer.frozen": ("*/kernel",), "model.head": "zero_keep_hidden"},
            "must not freeze the new head",
        ),
        *(({"search.learning_rates": rates}, rule) for rates, rule in NO_RATES),
        *(({"search.validation_fraction": part}, rf"={part}.*\(0, 1\)") for part in (0.0, 1.0)),
    ],
)
def test_values_that_do_not_fit_fine_tuning(fields, rule):
    with rejects(get_first_field(fields), rule):
        validate(change(fields, FINETUNING))


@pytest.mark.parametrize("base", [PRETRAINING, FINETUNING], ids=["pretrain", "finetune"])
def test_dropout_on_frozen_features(base):
    with rejects("config.model", "no effect.*optimizer.trained='head'"):
        validate(change({**HEAD, "model.dropout_fraction": 0.1}, base))


def test_only_fields_that_may_be_references_are_imported(tmp_path, monkeypatch):
    """Other texts may have the same form: a workdir, a project, an evaluator's argument."""
    evaluator = {
        "kind": "mine:f",
        "arguments": {"text": "no_module:x"},
        "data": "folder:x",
    }
    fields = {
        "init_from": "runs:best",
        "logging.wandb_project": "team:x",
        "evaluation.evaluators": {"v2": evaluator},
    }
    (tmp_path / "mine.py").write_text("def f(): pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    importlib.invalidate_caches()

    validate(change(fields))

    assert sys.modules.pop("mine").f


CLOCK = Clock(global_batch=32, num_examples=1000, total_steps=200)


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("1 step", 1),
        ("10_000 steps", 10_000),
        ("1e3 steps", 1000),
        ("  7   steps ", 7),
        ("20steps", 20),
        ("1e3examples", 31),
        ("90 epochs", 2812),  # 90 * 1000 / 32 = 2812.5, to even
        ("1 epoch", 31),  # 31.25
        ("1e6 examples", 31_250),
        ("1 example", 1),  # a length above zero is never no step
        ("0.1 fraction", 20),
        ("0.001 fraction", 1),
        ("0 steps", 0),
        ("0 fraction", 0),
    ],
)
def test_steps(text, steps):
    assert CLOCK.to_steps(text) == steps


FORMS = [
    "",
    "90",
    "epochs",
    "90days",
    "90 days",
    "-1 steps",
    "nan steps",
    "inf epochs",
    "9 0 steps",
    "1,5 epochs",
]


@pytest.mark.parametrize("text", FORMS)
def test_not_a_duration(text):
    with rejects(f"'{text}'", "a number and a unit.*'500 steps'"):
        Clock(global_batch=32, num_examples=1000).to_steps(text)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("1.5 fraction", r"\[0, 1\]"),
        # The run has no length yet.
        ("0.5 fraction", "fraction of itself"),
    ],
)
def test_not_a_fraction_of_the_run(text, rule):
    with rejects(f"'{text}'", rule):
        Clock(global_batch=32, num_examples=1000).to_steps(text)


LENGTHS = {
    "total": "200 epochs",
    "schedule.warmup": "10 epochs",
    "evaluation.every": "50 epochs",
}
BASE = change({"global_batch": 128, **LENGTHS})


def resolve_steps(num_devices=8, config=BASE, **fields):
    """Return the lengths of the config with changed fields, given as `section__field=value`."""
    changed = {name.replace("__", "."): value for name, value in fields.items()}
    return resolve(
        change(changed, config),
        num_examples=1280,
        num_devices=num_devices,
    )


def test_every_length_becomes_steps():
    """An epoch has 10 steps."""
    steps = resolve_steps(
        total="20 epochs",
        schedule__warmup="0.1 fraction",
        schedule__decay="rsqrt",
        schedule__timescale="1280 examples",
        polyak__start="3 epochs",
        evaluation__every="50 steps",
        evaluation__evaluators={"v2": {"every": "2 epochs"}, "v3": {}},
        checkpoint__every="0.5 fraction",
        logging__every="1 example",
    )

    assert steps == RunSteps(
        total=200,
        warmup=20,
        timescale=10,
        cooldown=40,
        polyak_start=30,
        evaluate_every=50,
        checkpoint_every=100,
        log_every=1,
        evaluators_every={"v2": 20, "v3": 50},
    )


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"global_batch": 100}, "100.*divisible by 8.*96 or 104"),
        ({"evaluation__global_batch": 12}, "12.*divisible by 8.*8 or 16"),
        (
            {"global_batch": 40, "optimizer__accumulation_steps": 4},
            "40.*divisible by.*4 micro-batches.*32 or 64",
        ),
        (
            {"global_batch": 10, "sharding__num_model_shards": 2},
            "10.*divisible by.*2 model shards.*8 or 12",
        ),
        (
            {"global_batch": 2560, "total": "10 epochs", "schedule__warmup": "10 steps"},
            "2560.*at most the 1280",
        ),
        ({"global_batch": 2560, "total": "0.1 epochs"}, "2560.*at most the 1280"),
        ({"total": "0 epochs"}, "'0 epochs'.*at least one"),
        ({"polyak__start": "1 fraction", "polyak__factor": 0.9}, "'1 fraction'.*2000 of 2000"),
        ({"schedule__warmup": "10 epochs", "total": "5 epochs"}, "'10 epochs'.*100 of 50.*before"),
        ({"evaluation__every": "0 steps"}, "at least one step"),
        ({"evaluation__evaluators": {"v2": {"every": "0 steps"}}}, "v2.every.*at least one step"),
        ({"logging__every": "0 fraction"}, "at least one step"),
        (
            {"schedule__timescale": "0 steps", "schedule__decay": "rsqrt"},
            "'0 steps'.*at least 1 step",
        ),
        (
            {"schedule__drop_at_fraction": (0.02, 0.5), "schedule__decay": "staircase"},
            "after the warm-up.*step 40.*step 100",
        ),
        ({"stop_early__patience": 3}, "at most 2.*4 evaluations of test_accuracy.*500 of 2000"),
        *(({"logging__profile_start_step": step}, f"{step}.*1 to 2000") for step in (-1, 0, 2001)),
    ],
)
def test_what_does_not_fit_the_dataset_or_the_devices(fields, rule):
    with rejects(get_first_field(fields), rule):
        resolve_steps(**fields)


def test_a_mesh_that_does_not_divide_the_devices():
    with rejects("config.sharding", "num_replicas=4.*num_model_shards=4.*divide.*8"):
        resolve_steps(sharding__num_replicas=4, sharding__num_model_shards=4)


def test_lengths_are_resolved_without_a_second_validation(monkeypatch):
    def fail(config):
        pytest.fail("validated again")

    monkeypatch.setattr(check, "find_out_of_range", fail)

    assert resolve_steps().total == 2000
    with pytest.raises(pytest.fail.Exception):
        validate(BASE)


@pytest.mark.parametrize(
    ("fields", "total"),
    [
        (
            {
                "global_batch": 64,
                "optimizer__accumulation_steps": 8,
                "evaluation__global_batch": 24,
            },
            4000,
        ),
        ({"evaluation__global_batch": None}, 2000),
        # A step has more than an epoch.
        ({"global_batch": 2560}, 100),
    ],
)
def test_lengths_that_fit(fields, total):
    assert resolve_steps(**fields).total == total


def test_the_length_of_fine_tuning():
    assert resolve_steps(config=FINETUNING).total == 400


def test_the_shortest_run():
    shortest = resolve_steps(total="1 step", schedule__warmup="0 steps")

    assert shortest.total == 1
    assert shortest.warmup == 0
    assert shortest.evaluate_every == 500
