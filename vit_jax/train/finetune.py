"""Fine-tuning: given weights, a new head, own images. `train/README.md` says how it differs from pre-training.

With a grid of learning rates it first chooses one on a held-out part of train, as the paper does (ViT, App. B.1.1).
"""

import functools

import jax

from vit_jax import hosts
from vit_jax.config import FinetuneConfig, resolve
from vit_jax.config.check import validate
from vit_jax.storage.files import JsonObject
from vit_jax.train import overview, rate_search
from vit_jax.train.assemble import Datasets, assemble, open_datasets
from vit_jax.train.layout import keep_layout
from vit_jax.train.lifecycle import workdir as workdirs
from vit_jax.train.lifecycle.agreement import require_agreement
from vit_jax.train.lifecycle.interruption import Interrupted, Interruption
from vit_jax.train.lifecycle.lock import WorkdirLock
from vit_jax.train.loop import train
from vit_jax.train.profiling import use_compilation_cache
from vit_jax.train.start import adapt, start_state


@hosts.ends_together(Interrupted)
def finetune(config: FinetuneConfig, workdir: str) -> JsonObject:
    """Fine-tune from the start, or resume wherever the workdir's last run was interrupted, in the search or after.

    The workdir is shared by all processes. Returns the content of `summary.json`.

    Raises:
      ValueError, FloatingPointError, SaveError, Interrupted: as `loop.train`, of the final run.
    """
    return tune(config, workdir)


def tune(config: FinetuneConfig, workdir: str, pause_fraction: float | None = None) -> JsonObject:
    """`finetune` as one of several runs of a command, which sees to it that all processes end together.

    It raises Paused, with its state saved, when the final run has been trained to `pause_fraction`.
    """
    hosts.start()  # before a user's own code is imported, which may use devices
    validate(config)
    use_compilation_cache(config.logging.compilation_cache)
    data = open_datasets(config)
    resolve(
        config, num_examples=len(data.train), num_devices=jax.device_count()
    )  # before weights are fetched
    workdirs.refuse_as_source(config.init_from, workdir)
    config = keep_layout(config, workdir, jax.device_count())
    architecture, fitted, report = adapt(config, data.train)
    shape = data.train.label_shape
    devices = jax.devices()
    first = assemble(
        config, architecture, num_examples=len(data.train), label_shape=shape, devices=devices
    )
    assert isinstance(first.config, FinetuneConfig)
    config = first.config
    architecture = first.architecture  # one layout for all runs
    with workdirs.claim(workdir, config) as claimed:
        start = overview.start_of(config, data, fitted.parameters)
        require_agreement(config, data, start["parameters_sha256"])
        workdirs.require_same_start(claimed.folder, start, config.init_from)
        if hosts.is_first():
            print(report, flush=True)

        with (
            Interruption() as interruption
        ):  # around all runs: what arrives between two of them is not lost

            def train_with(
                config: FinetuneConfig,
                data: Datasets,
                workdir: WorkdirLock,
                split: str,
                steps_after: int,
                pause_fraction: float | None = None,
            ) -> JsonObject:
                run = assemble(
                    config,
                    architecture,
                    num_examples=len(data.train),
                    label_shape=shape,
                    devices=devices,
                )
                return train(
                    run,
                    data,
                    workdir,
                    functools.partial(start_state, run, fitted),
                    interruption,
                    split=split,
                    steps_after=steps_after,
                    pause_fraction=pause_fraction,
                    fitted=fitted,
                )

            chosen = config
            trials = None
            if config.search.learning_rates:
                chosen, trials = rate_search.choose_learning_rate(
                    config, data, claimed.folder, train_with
                )
            summary = train_with(chosen, data, claimed, "test", 0, pause_fraction)
        if trials and hosts.is_first():
            print(rate_search.table(trials, chosen.schedule.learning_rate), flush=True)
        return summary
