"""Checks of a config.

`run_rules` and `evaluation_rules` have the rules of a run, `architecture_rules` those of the
network. `lengths` converts durations to steps.

`validate` needs the config alone; `resolve` the size of the dataset and the devices, `require_fit`
the network, `require_labels` the kind of labels.
"""

import itertools
from collections.abc import Iterator, Mapping

from vit_jax.config import evaluation_rules, run_rules
from vit_jax.config.architecture import Architecture
from vit_jax.config.field_checks import find_ineffective_fields, find_out_of_range, reject
from vit_jax.config.lengths import (
    RunSteps,
    convert_lengths,
    get_phases,
    list_patch_dropouts,
)
from vit_jax.config.metric_names import MULTILABEL_RESULTS
from vit_jax.config.parsing import find_references, flatten, to_dict
from vit_jax.config.schema import RunConfig
from vit_jax.imports.references import resolve as import_reference
from vit_jax.storage.files import reject_bucket

_FROM_BUCKETS = ("data", "input.data_dir", "init_from", "objective.teacher", "resume_from")


def validate(config: RunConfig) -> None:
    """Check values one by one and against each other, and import the code that references name.

    Raises:
      ValueError: a value that cannot work, with what would.
    """
    _reject_buckets(config)
    # References come first: whether other fields have an effect depends on what exists.
    for name, value in find_references(config):
        import_reference(value, f"config.{name}")
    problems = itertools.chain(
        find_out_of_range(config),
        find_ineffective_fields(config, config),
        run_rules.find_problems(config),
        evaluation_rules.find_problems(config),
        run_rules.find_start_problems(config),
    )
    reject(problems)


def _reject_buckets(config: RunConfig) -> None:
    """Raise ValueError for a gs:// path in a field that needs a local one."""
    for name, value in flatten(to_dict(config)).items():
        if isinstance(value, str):
            is_data_of_evaluator = name.endswith(".data")
            is_read = name in _FROM_BUCKETS or is_data_of_evaluator
            reject_bucket(value, f"config.{name}={value}", allowed=is_read)


def resolve(config: RunConfig, *, num_examples: int, num_devices: int) -> RunSteps:
    """Convert durations to steps.

    Args:
      config: the config.
      num_examples: size of the training split.
      num_devices: number of devices of all processes.

    Raises:
      ValueError: a value that does not suit the dataset or the devices, with what would. `validate`
        checks the others.
    """
    require_divisible(config, num_devices)
    return convert_lengths(config, num_examples)


def require_divisible(config: RunConfig, num_devices: int) -> None:
    """Check that the devices can share parameters and batches equally.

    Raises:
      ValueError: they cannot.
    """
    reject(_find_mesh_problems(config, num_devices))
    reject(_find_batch_problems(config, num_devices))


def require_fit(config: RunConfig, a: Architecture, platform: str) -> None:
    """Check values that must suit the network and the platform ("cpu", "gpu" or "tpu").

    Raises:
      ValueError: one does not.
    """
    reject(_find_network_problems(config, a, platform))


def require_labels(config: RunConfig, *, is_multilabel: bool, frozen: Mapping[str, bool]) -> None:
    """Check values that are for single-label or for multi-label data alone.

    Args:
      config: the config.
      is_multilabel: images of the training split have several labels.
      frozen: the same for the data of each evaluator on frozen features, by its name.

    Raises:
      ValueError: a value does not suit the data.
    """
    if not is_multilabel:
        reject(_find_single_label_problems(config))
    reject(_find_frozen_problems(config, frozen))
    if is_multilabel:
        reject(_find_multilabel_problems(config))


# The devices.


def _find_mesh_problems(config: RunConfig, num_devices: int) -> Iterator[str]:
    replicas = config.sharding.num_replicas or 1
    shards = config.sharding.num_model_shards
    if num_devices % (replicas * shards):
        mesh = f"num_replicas={replicas} x num_model_shards={shards}"
        yield f"sharding: {mesh} must divide the {num_devices} device(s). Choose divisors."


def _find_batch_problems(config: RunConfig, num_devices: int) -> Iterator[str]:
    """Yield each batch that devices and micro-batches cannot share equally."""
    shards = config.sharding.num_model_shards
    devices = f"{num_devices} device(s)"
    if shards > 1:
        devices += f" / {shards} model shards"
    num_shares = num_devices // shards  # model shards see the same examples

    accumulation = config.optimizer.accumulation_steps or 1
    num_training_shares = num_shares * accumulation
    training_devices = devices
    if num_training_shares != num_shares:
        training_devices += f" x {accumulation} micro-batches"

    training_batches: dict[str, int | None] = {"global_batch": config.global_batch}
    for name, phase in get_phases(config).items():
        training_batches[f"phases.{name}.global_batch"] = phase.global_batch
    for field, batch in training_batches.items():
        yield from _find_remainder(field, batch, num_training_shares, training_devices)

    evaluation_batch = config.evaluation.global_batch
    yield from _find_remainder("evaluation.global_batch", evaluation_batch, num_shares, devices)


def _find_remainder(field: str, batch: int | None, divisor: int, devices: str) -> Iterator[str]:
    """Yield the problem of a batch that the divisor does not divide."""
    if batch is None or batch % divisor == 0:
        return
    below = batch // divisor * divisor
    allowed = str(divisor)
    if below:
        allowed = f"{below} or {below + divisor}"
    yield f"{field}={batch}: must be divisible by {devices}. Use {allowed}."


# The network and the platform.


def _find_network_problems(config: RunConfig, a: Architecture, platform: str) -> Iterator[str]:
    weights = config.objective.class_weights
    if len(weights) not in (0, a.num_classes):
        rule = "must have one number for each class"
        yield f"objective.class_weights={weights}: {rule}. Give {a.num_classes}."

    form = config.model.attention
    if form == "cudnn" and platform != "gpu":
        rule = f"must run on an NVIDIA GPU, and here is {platform}"
        yield f"model.attention='cudnn': {rule}. Use auto."
    if form != "auto" and not a.has_transformer:
        rule = f"has no effect on {a.name}, which has no attention"
        yield f"model.attention={form!r}: {rule}. Use auto."

    for field in list_patch_dropouts(config):
        reason = _find_need_of_patches(a)
        if reason:
            yield f"{field}: has no effect on {a.name}, {reason}. Use 0."

    shards = config.sharding.num_model_shards
    if a.is_standard and a.num_heads % shards:
        rule = f"must divide the {a.num_heads} heads of {a.name}"
        yield f"sharding.num_model_shards={shards}: {rule}. Choose a divisor."


def _find_need_of_patches(a: Architecture) -> str:
    """Return why a network needs all patches of an image; "" for one that does not."""
    if not a.has_transformer:
        return "which has no tokens"
    if a.network is not None:
        return f"whose code is {a.network}"
    if a.block is not None:
        return f"whose blocks need all patches (model.block={a.block!r})"
    if a.position_embedding == "relative":
        return "whose position_embedding='relative' needs all patches"
    return ""


# The labels.


def _find_single_label_problems(config: RunConfig) -> Iterator[str]:
    metric = config.checkpoint.best_metric
    if metric.endswith(MULTILABEL_RESULTS):
        rule = "must be a metric of single-label data"
        yield f"checkpoint.best_metric={metric!r}: {rule}. Use test_accuracy."


def _find_frozen_problems(config: RunConfig, frozen: Mapping[str, bool]) -> Iterator[str]:
    """Yield evaluators on frozen features whose data have several labels an image."""
    for name, is_multilabel in frozen.items():
        if is_multilabel:
            kind = config.evaluation.evaluators[name].kind
            field = f"evaluation.evaluators.{name}.kind={kind!r}"
            yield f"{field}: must have single-label data. Remove the evaluator."


def _find_multilabel_problems(config: RunConfig) -> Iterator[str]:
    objective = config.objective
    if objective.kind == "classification" and objective.loss == "softmax":
        fix = "Use config.objective.loss=sigmoid"
        yield f"objective.loss='softmax': must have single-label data. {fix}."
    weights = objective.class_weights
    if weights:
        rule = "must be unset for multi-label data"
        yield f"objective.class_weights={weights}: {rule}. Leave it at ()."
    if objective.teacher is not None:
        yield f"objective.teacher={objective.teacher!r}: must have single-label data. Use None."
    if config.input.sampling == "balanced":
        yield "input.sampling='balanced': must have single-label data. Use uniform."
