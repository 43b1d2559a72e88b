"""Conversion of configs of google-research/big_vision for supervised training of images.

A config with `model_init` is fine-tuning, every other one pre-training.
"""

from collections.abc import Mapping
from typing import Any

from vit_jax.config.migration.big_vision_networks import convert_network, convert_weights
from vit_jax.config.migration.big_vision_optimizers import convert_optimizer, convert_schedule
from vit_jax.config.migration.foreign_fields import ForeignFields, Section
from vit_jax.config.migration.image_ops import (
    convert_test_images,
    convert_train_images,
    require_few_shot_images,
)
from vit_jax.config.schema import FinetuneConfig, PretrainConfig, RunConfig

LOSSES = {"softmax_xent": "softmax", "sigmoid_xent": "sigmoid"}
TEST_NAMES = ("test", "val", "validation", "minival")
"""Evaluators that can be the test split, the preferred one first."""
_REAL = "imagenet2012_real"
_REAL_LABELS = "real_label"
"""The dataset of ImageNet ReaL in TFDS, and its feature with the correct classes."""
_NO_EFFECT = (
    "num_classes",
    "pp_modules",
    "prefetch_to_device",
    "ckpt_timeout",
    "sharding_rules",
    "fewshot",  # big_vision reads few-shot evaluators in `evals` only
    "input.cache",
    "input.num_parallel_calls",
    "input.prefetch",
    "input.shuffle_buffer_size",
    "mixup.fold_in",
    "model.remat_policy",
    "model.scan",
)
_NO_EFFECT_OF_EVALUATOR = ("cache", "cache_raw", "cache_final", "prefix", "skip_first")
_NO_EFFECT_OF_FEW_SHOT = ("prefix", "skip_first", "display_first", "runlocal")
_LOG_PERIOD = "0.01 fraction"
"""Time between log lines where the config states none."""


def is_big_vision(values: Mapping[str, Any]) -> bool:
    """Return True for the fields of a config of big_vision."""
    return "optax_name" in values or {"model_name", "input"} <= values.keys()


def convert_big_vision(fields: ForeignFields) -> tuple[type[RunConfig], Section]:
    """Return the kind of the run and the sections of its config; `fields` notes problems."""
    kind: type[RunConfig] = PretrainConfig
    if fields.peek("model_init"):
        kind = FinetuneConfig
    total = fields.take_duration("total", "")
    if not total:
        fields.reject(
            "total_steps",
            None,
            "give total_steps, total_epochs or total_examples",
        )
        total = "1 steps"

    evaluation, test_input = _convert_evaluators(fields)
    values: Section = {
        "seed": fields.take("seed", 0),
        "data": _convert_data(fields, "input.data.name"),
        "total": total,
        "global_batch": fields.require("input.batch_size"),
        "input": _convert_input(fields, test_input),
        "objective": {"loss": fields.take_choice("loss", LOSSES, "sigmoid_xent")},
        "schedule": convert_schedule(fields, total),
        "optimizer": convert_optimizer(fields),
        "evaluation": evaluation,
        "checkpoint": {"every": fields.take_duration("ckpt", "1 fraction")},
        "logging": {"every": fields.take_duration("log_training", _LOG_PERIOD)},
        "sharding": _convert_sharding(fields),
    }
    if kind is FinetuneConfig:
        values |= convert_weights(fields)
    else:
        values["model"] = convert_network(fields)
    fields.ignore(*_NO_EFFECT)
    fields.expect(
        "keep_ckpt_steps",
        None,
        fix="use --config.checkpoint.keep_latest",
    )
    return kind, values


# Data.


def _convert_data(fields: ForeignFields, name: str) -> str | None:
    """Return the address of a dataset of TFDS."""
    dataset = fields.take(name)
    if not isinstance(dataset, str):
        if dataset is None:
            fields.reject(
                name,
                None,
                "give one dataset of TFDS",
            )
        return None
    if dataset.startswith("bv:"):
        fix = "must be a dataset of TFDS; docs/data.md lists others, by --config.data"
        fields.reject(
            name,
            dataset,
            fix,
        )
    return f"tfds:{dataset}"


def _convert_input(fields: ForeignFields, test_input: Section) -> Section:
    """Return the section `input`, which has one image size for training and test."""
    section: Section = {"train_split": fields.require("input.data.split"), **test_input}
    operations = fields.require("input.pp")
    try:
        train_input = convert_train_images(operations or "")
    except ValueError as error:
        fields.reject(
            "input.pp",
            operations,
            str(error),
        )
        train_input = {}

    test_size = test_input.get("image_size", train_input.get("image_size"))
    if train_input.get("image_size", test_size) != test_size:
        fix = f"must have the image size of the test split, {test_size}"
        fields.reject(
            "input.pp",
            operations,
            fix,
        )
    section |= train_input
    section.setdefault("image_size", test_size or 1)
    data_dir = fields.take("input.data.data_dir")
    if data_dir is not None:
        section["data_dir"] = data_dir
    section["cache_records"] = bool(fields.take("input.cache_raw", False))
    section["mixup_alpha"] = fields.take("mixup.p", 0.0)
    return section


# Devices.


def _convert_sharding(fields: ForeignFields) -> Section:
    """Return the section `sharding`: parameters on all devices, or split over them."""
    fields.expect(
        "mesh",
        [("data", -1)],
        (("data", -1),),
        fix="use --config.sharding; remove it",
    )
    strategy = fields.take("sharding_strategy")
    if strategy is None:
        return {}
    rule = str(strategy[0][-1]) if len(strategy) == 1 else ""
    if rule.startswith("fsdp"):
        return {"parameters": "fsdp"}
    if rule != "replicate":
        fields.reject(
            "sharding_strategy",
            strategy,
            "use --config.sharding.parameters=fsdp",
        )
    return {"parameters": "replicated"}


# Evaluation.


def _convert_evaluators(fields: ForeignFields) -> tuple[Section, Section]:
    """Return the section `evaluation`, and the fields of `input` of the test split."""
    names = fields.list_section("evals")
    test = next((name for name in TEST_NAMES if name in names), None)
    if test is None:
        fix = f"must have a classification evaluator {', '.join(TEST_NAMES[:-1])} or minival"
        fields.reject(
            "evals",
            names,
            fix,
        )
        fields.drop("evals")
        return {"every": "1 fraction"}, {"test_split": "test"}

    every, data, test_input = _convert_evaluator(fields, test)
    evaluators: Section = {}
    names.remove(test)
    for name in names:
        if fields.peek(f"evals.{name}.type", name) == "fewshot_lsr":
            evaluators |= _convert_few_shot(fields, name, every, test_input.get("image_size"))
            continue
        period, source, images = _convert_evaluator(fields, name)
        if images and _get_preparation(images) != _get_preparation(test_input):
            fields.reject(
                f"evals.{name}.pp_fn",
                "…",
                f"must prepare images as evals.{test}",
            )
        if (source, images.get("test_split")) == (data, test_input.get("test_split")):
            continue  # the test split by another name
        evaluator: Section = {"data": source, "split": images.get("test_split")}
        if source == f"tfds:{_REAL}":
            evaluator["label_sets"] = _REAL_LABELS
        if period != every:
            evaluator["every"] = period
        evaluators[_name_evaluator(name)] = evaluator
    return {"every": every, "evaluators": evaluators}, test_input


def _convert_few_shot(
    fields: ForeignFields, name: str, every: str | None, image_size: Any
) -> Section:
    """Return an evaluator for each dataset of a few-shot evaluator.

    Its images must have the preparation of the released protocol, for the network's image size.
    """
    section = f"evals.{name}"
    fields.take(f"{section}.type")
    fields.expect(
        f"{section}.representation_layer",
        "pre_logits",
        fix="must be pre_logits; other layers: --config.evaluation.evaluators.NAME.arguments",
    )
    for field in ("pp_train", "pp_eval"):
        operations = fields.take(f"{section}.{field}", "")
        try:
            require_few_shot_images(operations, image_size)
        except ValueError as error:
            fields.reject(f"{section}.{field}", operations, str(error))
    arguments = {
        "shots": fields.take(f"{section}.shots", (1, 5, 10, 25)),
        "seeds": tuple(range(fields.take(f"{section}.num_seeds", 3))),
        "l2": fields.take(f"{section}.l2_reg", 1024.0),
    }
    period = fields.take_duration(f"{section}.log", "1 fraction")
    fields.expect(f"{section}.label_key", "label", fix="must be label")
    fields.ignore(*(f"{section}.{option}" for option in _NO_EFFECT_OF_FEW_SHOT))

    evaluators: Section = {}
    for dataset in fields.list_section(f"{section}.datasets"):
        data, train_split, split = fields.take(f"{section}.datasets.{dataset}")
        evaluator: Section = {
            "kind": "fewshot",
            "data": f"tfds:{data}",
            "train_split": train_split,
            "split": split,
            "arguments": arguments,
        }
        if period != every:
            evaluator["every"] = period
        evaluators[_name_evaluator(f"{name}_{dataset}")] = evaluator
    return evaluators


def _name_evaluator(name: str) -> str:
    """Return a name that is a prefix of results and no name of a split."""
    if name in ("test", "train", "validation"):
        return f"{name}_split"
    return name.replace("-", "_").replace("/", "_")


def _get_preparation(images: Section) -> Section:
    """Return the fields of the preparation of images, without the split."""
    preparation = dict(images)
    preparation.pop("test_split", None)
    return preparation


def _convert_evaluator(fields: ForeignFields, name: str) -> tuple[str, str | None, Section]:
    """Return the time between evaluations, the data, and the fields of `input` of an evaluator."""
    section = f"evals.{name}"
    kind = fields.take(f"{section}.type", name)
    if kind != "classification":
        fields.drop(section)
        fields.reject(
            section,
            kind,
            "remove it: only classification and fewshot_lsr can be converted",
        )
        return "1 fraction", None, {}

    data = _convert_data(fields, f"{section}.data.name")
    split = fields.require(f"{section}.data.split")
    operations = fields.take(f"{section}.pp_fn", "")
    if data == f"tfds:{_REAL}":  # the evaluator reads the sets of labels by itself
        operations = operations.replace(_REAL_LABELS, "label")
    try:
        images = convert_test_images(operations)
    except ValueError as error:
        fields.reject(
            f"{section}.pp_fn",
            operations,
            str(error),
        )
        images = {}
    loss = fields.peek("loss", "sigmoid_xent")
    fields.expect(
        f"{section}.loss_name",
        loss,
        *LOSSES,
        fix="the loss is that of training",
    )
    fields.ignore(*(f"{section}.{option}" for option in _NO_EFFECT_OF_EVALUATOR))
    every = fields.take_duration(f"{section}.log", "1 fraction")
    return every, data, {"test_split": split, **images}
