"""Verbs for training: pretrain, finetune, show, prepare, bench."""

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from vit_jax.cli.words import UsageError, fail, split, whole

_OUT_OF_MEMORY = """\
The device has too little memory. Remedies, the cheapest first: optimizer.accumulation_steps (smaller micro-batches),
sharding.parameters=fsdp (parameters split over the devices), model.remat=dots or full (compute again, not keep), a \
smaller global_batch. JAX says:"""


def pretrain(words: Sequence[str]) -> None:
    """Trains from scratch, or resumes."""
    with preemptible():
        from vit_jax.config import PretrainConfig

        _train("pretrain", PretrainConfig, words)


def finetune(words: Sequence[str]) -> None:
    """Fine-tunes given weights, or resumes."""
    with preemptible():
        from vit_jax.config import FinetuneConfig

        _train("finetune", FinetuneConfig, words)


@contextlib.contextmanager
def preemptible() -> Iterator[None]:
    """SIGTERM while the run imports, opens data or waits for others: `train.interruption` is not there yet."""

    def end(*_: object) -> None:
        words = "stopped before the first step: there is nothing to save; the same command starts again"
        os.write(2, f"vit-jax: {words}\n".encode())
        os._exit(75)  # exits.PREEMPTED; nothing can be imported here, in the middle of an import

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        hosts = sys.modules.get("vit_jax.hosts")
        if hosts is None or hosts.this_process().num_processes == 1:  # with several, JAX has it since they joined
            signal.signal(signal.SIGTERM, before)


def _train(verb: str, kind: type, words: Sequence[str]) -> None:
    from vit_jax.config import load_recipe

    options, overrides, _ = split(words, required=("config", "workdir"))
    config, workdir = load_recipe(options["config"], overrides), options["workdir"]
    if not isinstance(config, kind):
        raise UsageError(f"{options['config']} is a recipe for {type(config).__name__}, not for {verb}.")
    _refuse_idle_holdout(config, overrides)
    train = getattr(importlib.import_module(f"vit_jax.train.{verb}"), verb)
    run_training(lambda: train(config, workdir), workdir)


def _refuse_idle_holdout(config: Any, overrides: Sequence[str]) -> None:
    """An option for the hold-out without any effect is an error; a recipe may set it for other data."""
    given = [word for word in overrides if word.startswith("--config.input.holdout_fraction")]
    if not given or config.data is None:
        return
    from vit_jax.data.folder import holds_out

    if not holds_out(config.data, config.input):
        raise UsageError(
            f"{given[-1]}: without effect on {config.data}; only a folder without split sub-folders has a part that is "
            "held out for testing. Leave it out."
        )


def run_training(loop: Callable[[], object], workdir: str) -> None:
    """Runs a training loop; converts its errors to one message and an exit code."""
    import jax

    from vit_jax.checkpoint import SaveError
    from vit_jax.data.pipeline import LostWorker
    from vit_jax.hosts import exits
    from vit_jax.train.interruption import Interrupted
    from vit_jax.train.lock import WorkdirLost

    try:
        loop()
    except Interrupted as interrupted:
        fail(str(interrupted), exits.PREEMPTED)
    except KeyboardInterrupt:
        fail("stopped at once; the last checkpoint is kept", exits.STOPPED)
    except (SaveError, LostWorker, WorkdirLost) as error:
        fail(str(error), exits.FAILED)
    except OSError as error:
        fail(f"{error.filename or workdir}: {error.strerror}. The last checkpoint is kept.", exits.FAILED)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        fail(f"{_OUT_OF_MEMORY}\n{error}", exits.FAILED)


def show(words: Sequence[str]) -> None:
    """Prints every value of a recipe."""
    from vit_jax.config import load_recipe, to_text

    options, overrides, _ = split(words, required=("config",))
    print(to_text(load_recipe(options["config"], overrides)), end="")


def prepare(words: Sequence[str]) -> None:
    """Writes a dataset as ArrayRecord files, or a smaller copy of an image folder."""
    from vit_jax.data.folder import folder_of

    optional = ("data_dir", "manual_dir", "short_side", "quality", "output")
    options, *_ = split(words, positional=("DATASET",), optional=optional)
    folder = folder_of(options["DATASET"])
    allowed, needed = (optional[2:], ("short_side", "output")) if folder else (optional[:2], ())
    if wrong := [name for name in optional if name in options and name not in allowed]:
        kind = "a folder" if folder else "the TFDS catalogue, only for folder:PATH"
        raise UsageError(f"--{wrong[0]}= is not for a dataset of {kind}. Leave it out.")
    if missing := [name for name in needed if name not in options]:
        raise UsageError(f"A folder needs --{missing[0]}= too: prepare folder:PATH --short_side=256 --output=FOLDER.")
    if folder is None:
        from vit_jax.data.tfds_source import prepare

        print(prepare(options["DATASET"], data_dir=options.get("data_dir"), manual_dir=options.get("manual_dir")))
        return
    from vit_jax.data.prepared import QUALITY, prepare_folder

    output = Path(options["output"]).expanduser()
    options = {"quality": str(QUALITY)} | options
    quality = whole(options, "quality")
    if quality > 100:
        raise UsageError(f"--quality={quality}: must be a whole number from 1 to 100.")
    counts = prepare_folder(folder, output, short_side=whole(options, "short_side"), quality=quality)
    print(f"{output}: {counts['reduced']:,} images made smaller, {counts['copied']:,} copied as they are")


def bench(words: Sequence[str]) -> None:
    """Times the parts of a recipe's run."""
    import json

    from vit_jax.config import load_recipe

    options, overrides, _ = split(words, required=("config",), optional=("steps",), switches=("data", "json"))
    num_steps = whole({"steps": "20"} | options, "steps")
    config = load_recipe(options["config"], overrides)

    from vit_jax.bench.parts import bench, to_text

    result = bench(config, num_steps=num_steps, with_data="data" in options)
    print(json.dumps(result, indent=2) + "\n" if "json" in options else to_text(result), end="")
