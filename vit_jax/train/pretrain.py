"""Pre-training: from a config to a trained model in a workdir."""

import jax

from vit_jax import hosts
from vit_jax.config import PretrainConfig
from vit_jax.config.check import validate
from vit_jax.storage.files import JsonObject, use_compilation_cache
from vit_jax.train.assemble import assemble
from vit_jax.train.inputs import measure_channels, open_datasets, pin_datasets
from vit_jax.train.layout import keep_layout
from vit_jax.train.lifecycle import workdir as workdirs
from vit_jax.train.lifecycle.agreement import require_agreement
from vit_jax.train.lifecycle.interruption import Interrupted, Interruption
from vit_jax.train.loop import train
from vit_jax.train.session import Session
from vit_jax.train.state_builder import architecture_of


@hosts.ends_together(Interrupted)
def pretrain(config: PretrainConfig, workdir: str) -> JsonObject:
    """Train from the start, or resume from the workdir's last checkpoint.

    The workdir is shared by all processes. Returns the content of `summary.json`.

    Raises:
      ValueError, FloatingPointError, SaveError, Interrupted: see `loop.train`.
    """
    return learn(config, workdir)


def learn(config: PretrainConfig, workdir: str, pause_fraction: float | None = None) -> JsonObject:
    """`pretrain` as one of several runs of a command, which ends all processes together.

    It raises Paused, with its state saved, when it has been trained to `pause_fraction`.
    """
    hosts.start()  # before a user's own code is imported, which may use devices
    validate(config)
    use_compilation_cache(config.logging.compilation_cache)
    requested = config
    config = pin_datasets(config, workdir)
    data = open_datasets(config)
    config = measure_channels(config, data.train, workdir)
    require_agreement(config, data)
    workdirs.reject_as_source(config.objective.teacher, workdir, "objective.teacher")
    kept = keep_layout(config, workdir, jax.device_count())
    run = assemble(
        kept,
        architecture_of(kept, data.train.num_classes),
        num_examples=len(data.train),
        label_shape=data.train.label_shape,
        devices=jax.devices(),
    )
    run.require_classes(data.train.class_names)
    with (
        workdirs.claim(workdir, run.config, requested) as claimed,
        Interruption() as interruption,
    ):
        session = Session(
            run=run,
            data=data,
            workdir=claimed,
            interruption=interruption,
            pause_fraction=pause_fraction,
        )
        return train(session)
