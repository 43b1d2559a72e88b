"""A step of a run once more: its state from a checkpoint, the steps after that repeated, then the step taken apart.

A run keeps nothing for this. A step that diverges is seen one step late, when its state is gone: `divergence.json`
names the step, and the state before it follows from a checkpoint, since a resumed run repeats every step to the bit.
"""

import contextlib
import dataclasses
import functools
import json
import math
import pathlib
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np

from vit_jax import hosts, pytree
from vit_jax.checkpoint import CheckpointReader, CheckpointStore, DamagedCheckpoint
from vit_jax.checkpoint.presence import require_exact_path
from vit_jax.config import FinetuneConfig, PretrainConfig, RunConfig, to_dict
from vit_jax.config.check import validate
from vit_jax.config.parsing import from_dict, references
from vit_jax.data.subset import hold_out
from vit_jax.imports.references import StoredReference, allowed_code, mark_stored
from vit_jax.storage.files import JsonObject, expanded, write_atomically
from vit_jax.text.printable import printable
from vit_jax.text.tables import aligned
from vit_jax.train import overview
from vit_jax.train.assemble import (
    Assembly,
    Datasets,
    architecture_of,
    assemble,
    open_datasets,
    open_train_batches,
    train_stream,
)
from vit_jax.train.examination import KINDS, Figures, in_forward_order
from vit_jax.train.lifecycle.workdir import TRIALS
from vit_jax.train.metrics import FINITE
from vit_jax.train.run_files import (
    CONFIG_FILE,
    DIVERGENCE_FILE,
    read_config,
    read_divergence,
    read_metrics,
)
from vit_jax.train.start import adapt, given_state, restore
from vit_jax.train.state import TrainState, items_of
from vit_jax.weights.description import stored_architecture

FOLDER = "replay"  # sub-folder of a workdir, with one for each step
REPORT_FILE = "replay.json"
MOST_EXAMPLES = 10  # that are printed


def record_divergence(
    folder: pathlib.Path, run: Assembly, data: Datasets, step: int, metrics: Mapping[str, float]
) -> str:
    """Write `divergence.json` into the workdir; return the sentence that tells how to look into the step."""
    record = {
        "step": step,
        "metrics": dict(metrics),
        "records": _records(run, data, step).tolist(),
        "checkpoint": max(
            (before for before in CheckpointReader(folder).all_steps() if before < step),
            default=None,
        ),
        **overview.machine(),
        "config": to_dict(run.config),
    }
    if hosts.is_first():
        write_atomically(folder / DIVERGENCE_FILE, json.dumps(record) + "\n")
    code = sorted({text.partition(":")[0].partition(".")[0] for _, text in references(run.config)})
    words = [
        "vit-jax",
        "replay",
        shlex.quote(str(folder)),
        *([f"--weights.allow_code={','.join(code)}"] if code else []),
    ]
    return f"`{' '.join(words)}` repeats the step with norms by layer and the loss of each image."


@dataclasses.dataclass(frozen=True)
class Replay:
    """A step of a run, repeated.

    B global batch.
    """

    step: int
    start: str  # a sentence on the state from which steps were repeated
    metrics: Mapping[str, float]  # of the step
    recorded: (
        Mapping[str, float] | None
    )  # those that the run wrote; None if it wrote none for this step
    figures: Figures  # as from `examination`, on the host
    record_B: np.ndarray
    name_B: Sequence[str]
    folder: pathlib.Path  # of the report, and of the state before the step

    @property
    def differences(self) -> list[str]:
        """Metrics that are not equal to the bit to those that the run wrote."""
        recorded = self.recorded or {}
        same = functools.partial(np.array_equal, equal_nan=True)
        return [
            name
            for name in FINITE
            if name in recorded and not same(recorded[name], self.metrics[name])
        ]

    @property
    def first_cause(self) -> str:
        """The first value that is not finite, in the order in which a step computes them; "" if all are."""
        return next((words for words, value in self._values() if not math.isfinite(value)), "")

    def _values(self) -> Iterator[tuple[str, float]]:
        layers = in_forward_order(self.figures)
        for words, kind, order in (
            ("the parameters of {}, before this step: replay an earlier one", "parameters", layers),
            ("the output of {}", "largest", layers),
            ("", "loss_B", ()),
            ("the gradient of {}", "gradient", layers[::-1]),
            ("the update of {}", "update", layers[::-1]),
        ):
            yield from (
                (words.format(layer), self.figures[kind].get(layer, 0.0)) for layer in order
            )
            if kind == "loss_B":
                rows = zip(self.record_B, self.name_B, self.figures[kind], strict=True)
                yield from (
                    (f"the loss of record {record}, {name}", loss) for record, name, loss in rows
                )

    def to_json(self) -> JsonObject:
        """Return everything as values of JSON."""
        return {
            "step": self.step,
            "start": self.start,
            "metrics": dict(self.metrics),
            "recorded": None if self.recorded is None else dict(self.recorded),
            "first_not_finite": self.first_cause or None,
            "layers": self._layers(),
            "examples": self._examples(),
        }

    def _layers(self) -> dict[str, dict[str, float]]:
        return {
            layer: {
                kind: float(self.figures[kind][layer])
                for kind in KINDS
                if layer in self.figures[kind]
            }
            for layer in in_forward_order(self.figures)
        }

    def _examples(self) -> list[JsonObject]:
        columns = (self.record_B, *(self.figures[name] for name in ("label_B", "loss_B", "mask_B")))
        rows = zip(*(column.tolist() for column in columns), self.name_B, strict=True)
        return [
            dict(zip(("record", "label", "loss", "mask", "name"), row, strict=True)) for row in rows
        ]

    def to_text(self) -> str:
        """Return the report that is printed."""
        layers = [
            [layer, *(_figure(values.get(kind)) for kind in KINDS)]
            for layer, values in self._layers().items()
        ]
        worst = sorted(
            self._examples(), key=lambda example: (math.isfinite(example["loss"]), -example["loss"])
        )
        examples = [
            [
                str(one["record"]),
                _label(one["label"]),
                _figure(one["loss"] if one["mask"] else None),
                one["name"],
            ]
            for one in worst[:MOST_EXAMPLES]
        ]
        metrics = ", ".join(
            f"{words} {_figure(self.metrics[name])}" for name, words in FINITE.items()
        )
        cause = self.first_cause
        return "\n".join(
            [
                f"step {self.step}: {metrics}",
                self._comparison(),
                f"first value that is not finite: {printable(cause)}"
                if cause
                else "all values are finite",
                "",
                aligned(("layer", *KINDS), layers, words=("layer",)),
                aligned(("record", "label", "loss", "name"), examples, words=("name",)),
                f"{self.folder}: all figures in {REPORT_FILE}, and the state before the step: for `inspect` and other "
                "verbs, for config.init_from, and for config.resume_from to continue from it",
            ]
        )

    def _comparison(self) -> str:
        if self.recorded is None:
            return "the run wrote no metrics of this step to compare with"
        if not self.differences:
            return "loss and norms equal those of the run to the bit"
        lines = [
            f"{name} {self.recorded[name]!r} then, {self.metrics[name]!r} now"
            for name in self.differences
        ]
        return f"not the step of the run: {'; '.join(lines)}. Other devices, versions or code?"


def replay(
    workdir: str,
    step: int | None = None,
    *,
    allow_code: str | Sequence[str] = (),
    say: Callable[[str], None] = lambda line: None,
) -> Replay:
    """Repeat one step of a run, and write what it did into the folder `replay/step_N` of its workdir.

    The workdir is otherwise only read. Every process of a run of several calls this.

    Args:
      workdir: of a run, ended or not, or of a trial in its `search/`.
      step: from 1; None: that of `divergence.json`.
      allow_code: packages whose code the workdir may name, as for `load_weights`.
      say: receives lines on the progress.

    Raises:
      ValueError: there is no such run or step, or its data or weights are not there any more.
    """
    folder = expanded(workdir).absolute()
    require_exact_path(folder)
    if not (folder / CONFIG_FILE).is_file():
        raise ValueError(
            f"{folder} is not the workdir of a run: it has no {CONFIG_FILE}. Give one that has."
        )
    diverged = read_divergence(folder)
    if step is None and diverged is None:
        raise ValueError(
            f"{folder}: no step has diverged, there is no {DIVERGENCE_FILE}. Give --step=N for any step."
        )
    step = step or diverged["step"]  # type: ignore[index]
    reader = CheckpointReader(folder, allowed_code(allow_code))
    for start in [*(saved for saved in reversed(reader.all_steps()) if saved < step), None]:
        try:
            run, data, state, metadata, origin = _open(folder, reader, start, diverged)
            break
        except DamagedCheckpoint as error:
            say(printable(str(error)))
    first = int(jax.device_get(state.step)) + 1
    total = run.steps.total
    least = first if start is None else 1
    if not least <= step <= total:
        raise ValueError(f"--step={step}: must be from {least} to {total}, the steps of this run.")
    say(f"{origin}, {step - first:,} step(s) before step {step} to repeat")
    written = [
        line for line in read_metrics(folder) if line["step"] == step and "train_loss" in line
    ]
    if diverged is not None and diverged["step"] == step:
        written.append(diverged["metrics"])
        for name, here in overview.machine().items():
            if diverged.get(name, here) != here:
                say(
                    f"note     {name}: {printable(str(diverged[name]))} then, {here} now; figures may differ"
                )
    train_step = run.compile_train_step(first - 1)
    leaves = pytree.named_leaves(state)
    with open_train_batches(run, data.train, first - 1) as (batches, _):
        for _ in range(first, step):
            leaves, _ = train_step(leaves, next(batches))
        batch = next(batches)
    state = run.state_from(leaves)
    into = folder / FOLDER / f"step_{step}"
    _save(into, step - 1, state, metadata)
    figures = jax.device_get(run.in_phase(step).examination(state, batch))
    _, metrics = train_step(leaves, batch)  # last, since it takes over the memory of the state
    record_B = _records(run, data, step)
    result = Replay(
        step=step,
        start=origin,
        metrics={name: float(value) for name, value in jax.device_get(metrics).items()},
        recorded=written[-1] if written else None,
        figures=figures,
        record_B=record_B,
        name_B=[data.train.name_of(record) for record in record_B.tolist()],
        folder=into,
    )
    if hosts.is_first():
        write_atomically(into / REPORT_FILE, json.dumps(result.to_json(), indent=1) + "\n")
    return result


def _open(
    folder: pathlib.Path, reader: CheckpointReader, start: int | None, diverged: JsonObject | None
) -> tuple[Assembly, Datasets, TrainState, JsonObject, str]:
    """The run's parts and data, the state of a checkpoint or the first one, its metadata, and where it is from."""
    config = _config_of(folder, reader, diverged)
    validate(config)
    data = open_datasets(config)
    if folder.parent.name == TRIALS and (folder.parents[1] / CONFIG_FILE).exists():
        search = from_dict(FinetuneConfig, read_config(folder.parents[1])).search
        data = Datasets(*hold_out(data.train, search.validation_fraction, config.seed))
    fitted = None
    if start is not None:
        architecture = stored_architecture(reader.metadata(start))
    elif isinstance(config, FinetuneConfig):
        architecture, fitted, _ = adapt(config, data.train)
    else:
        architecture = architecture_of(config, data.train.num_classes)
    shape = data.train.label_shape
    run = assemble(
        config, architecture, num_examples=len(data.train), label_shape=shape, devices=jax.devices()
    )
    metadata = overview.checkpoint_metadata(run, data, fitted)
    if start is not None:
        origin = f"from the checkpoint of step {start}"
        return run, data, restore(run, reader, start, metadata), reader.metadata(start), origin
    state, origin = given_state(run, fitted, metadata)
    return run, data, state, metadata | {"wall_seconds": 0.0}, origin


def _config_of(
    folder: pathlib.Path, reader: CheckpointReader, diverged: JsonObject | None
) -> RunConfig:
    """The config as the run had it: after a search with the learning rate that was chosen."""
    # That of a divergence is of the last start of the run, which may have changed its layout.
    file, stored = (
        (DIVERGENCE_FILE, diverged["config"]) if diverged else (CONFIG_FILE, read_config(folder))
    )
    values = mark_stored({"config": stored}, str(folder / file), reader.allowed)["config"]
    if diverged is None:
        for saved in reader.all_steps():  # the newest one counts
            with contextlib.suppress(DamagedCheckpoint):
                values = reader.metadata(saved).get("config", values)
    kind: type[RunConfig] = FinetuneConfig if "search" in values else PretrainConfig
    config = from_dict(kind, values)
    for _, reference in references(config):
        if isinstance(
            reference, StoredReference
        ):  # before weights, which may name what the config names
            reference.require_allowed()
    if isinstance(config, FinetuneConfig) and config.search.learning_rates:
        raise ValueError(
            f"{folder}: its final run has not begun. Give a trial of its search, a folder in {TRIALS}/."
        )
    return dataclasses.replace(config, allow_code=reader.allowed)


def _records(run: Assembly, data: Datasets, step: int) -> np.ndarray:
    """The records of all rows of the batch of a step, (B,)."""
    config = run.in_phase(step).config
    before = run.images(step - 1)
    rows = np.arange(config.global_batch)
    return train_stream(config, data.train, rows, step - 1, run.steps.total, before).records(0)


def _save(into: pathlib.Path, step: int, state: TrainState, metadata: Mapping[str, object]) -> None:
    """Save a state in a folder that is a workdir for other verbs; it replaces that of an earlier replay."""
    if hosts.is_first():
        if into.parent.is_symlink():
            raise ValueError(
                f"{into.parent} is a link: a replay writes only into the workdir. Remove the link."
            )
        shutil.rmtree(into, ignore_errors=True)
    hosts.wait_for_all("earlier replay removed")
    with contextlib.closing(CheckpointStore(into)) as store:
        store.save(
            step, items_of(state), metadata={**metadata, "owes_evaluation": False}, metrics={}
        )
        store.wait()


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.4g}"


def _label(label: int | list[int]) -> str:
    return (
        str(label) if isinstance(label, int) else ",".join(map(str, np.flatnonzero(label).tolist()))
    )
