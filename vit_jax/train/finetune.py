"""Fine-tuning: given weights, a new head, your images.

`train/README.md` says how it differs from pre-training.

With a grid of learning rates it first chooses one on a held-out part of train, as the paper does
(ViT, App. B.1.1).
"""

import dataclasses

import jax

from vit_jax import hosts
from vit_jax.config import Architecture, FinetuneConfig, resolve
from vit_jax.config.check import validate
from vit_jax.storage.files import JsonObject, use_compilation_cache
from vit_jax.train import overview, rate_search
from vit_jax.train.assemble import assemble
from vit_jax.train.inputs import Datasets, measure_channels, open_datasets, pin_datasets
from vit_jax.train.layout import keep_layout
from vit_jax.train.lifecycle import workdir as workdirs
from vit_jax.train.lifecycle.agreement import require_agreement
from vit_jax.train.lifecycle.interruption import Interrupted, Interruption
from vit_jax.train.lifecycle.lock import WorkdirLock
from vit_jax.train.loop import train
from vit_jax.train.session import Session
from vit_jax.train.starting_weights import adapt
from vit_jax.weights import Weights
from vit_jax.weights.fit import Fitted


@hosts.ends_together(Interrupted)
def finetune(config: FinetuneConfig, workdir: str) -> JsonObject:
    """Fine-tune from the start, or resume in the search or in the final run.

    The workdir is shared by all processes. Returns the content of `summary.json`.

    Raises:
      ValueError, FloatingPointError, SaveError, Interrupted: see `loop.train`, of the final run.
    """
    return tune(config, workdir)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainer:
    """Trains runs of one command, which begin with the same weights.

    Attributes:
      architecture: the network, with the layout of all runs.
      fitted: the weights that each run starts with.
      interruption: interruption of the command.
      teacher_weights: weights of `config.objective.teacher`; None without one.
    """

    architecture: Architecture
    fitted: Fitted
    interruption: Interruption
    teacher_weights: Weights | None

    def train(
        self,
        config: FinetuneConfig,
        data: Datasets,
        workdir: WorkdirLock,
        later_steps: int = 0,
        pause_fraction: float | None = None,
    ) -> JsonObject:
        """Train the final run, or a trial of the search; arguments as for `Session`."""
        run = assemble(
            config,
            self.architecture,
            num_examples=len(data.train),
            label_shape=data.train.label_shape,
            devices=jax.devices(),
            teacher_weights=self.teacher_weights,
        )
        session = Session(
            run=run,
            data=data,
            workdir=workdir,
            interruption=self.interruption,
            fitted=self.fitted,
            pause_fraction=pause_fraction,
            later_steps=later_steps,
        )
        return train(session)


def tune(config: FinetuneConfig, workdir: str, pause_fraction: float | None = None) -> JsonObject:
    """`finetune` as one of several runs of a command, which ends all processes together.

    It raises Paused, with its state saved, when the final run has been trained to `pause_fraction`.
    """
    hosts.start()  # before a user's own code is imported, which may use devices
    validate(config)
    use_compilation_cache(config.logging.compilation_cache)
    requested = config
    config = pin_datasets(config, workdir)
    data = open_datasets(config)
    config = measure_channels(config, data.train, workdir)
    # Before weights are fetched: lengths that do not suit the data.
    resolve(config, num_examples=len(data.train), num_devices=jax.device_count())
    workdirs.reject_as_source(config.init_from, workdir)
    workdirs.reject_as_source(config.objective.teacher, workdir, "objective.teacher")
    kept = keep_layout(config, workdir, jax.device_count())
    start = adapt(kept, data.train)
    fitted = start.fitted
    run = assemble(
        start.config,
        start.architecture,
        num_examples=len(data.train),
        label_shape=data.train.label_shape,
        devices=jax.devices(),
    )
    run.require_classes(data.train.class_names)
    assert isinstance(run.config, FinetuneConfig)
    laid_out = run.config  # one layout for all runs

    with workdirs.claim(workdir, laid_out, requested) as claimed:
        identity = overview.start_of(laid_out, data, fitted.parameters)
        require_agreement(laid_out, data, identity["parameters_sha256"])
        workdirs.require_same_start(claimed.folder, identity, laid_out.init_from)
        if hosts.is_first():
            print(start.report, flush=True)

        # Around all runs: a signal between two of them is not lost.
        with Interruption() as interruption:
            trainer = Trainer(
                architecture=run.architecture,
                fitted=fitted,
                interruption=interruption,
                teacher_weights=run.teacher.weights if run.teacher is not None else None,
            )
            chosen = laid_out
            trials = None
            if laid_out.search.learning_rates:
                chosen, trials = rate_search.choose_learning_rate(
                    laid_out,
                    data,
                    claimed.folder,
                    trainer.train,
                    requested=requested,
                )
            summary = trainer.train(chosen, data, claimed, pause_fraction=pause_fraction)

        if trials and hosts.is_first():
            print(rate_search.table(trials, chosen.schedule.learning_rate), flush=True)
        return summary
