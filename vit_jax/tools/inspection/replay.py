"""A step of a run: restored, repeated and analysed.

`divergence.json` names the step that diverged. The state before it follows from a checkpoint, since
a resumed run repeats every step to the bit.
"""

import contextlib
import dataclasses
import json
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence

import jax

from vit_jax import hosts, pytree
from vit_jax.arrays import Batch
from vit_jax.checkpoint import CheckpointReader, CheckpointStore, DamagedCheckpoint
from vit_jax.checkpoint.presence import require_exact_path
from vit_jax.config import Architecture, FinetuneConfig, PretrainConfig, RunConfig
from vit_jax.config.check import validate
from vit_jax.config.parsing import find_references, from_dict
from vit_jax.data.subset import hold_out
from vit_jax.imports.references import StoredReference, mark_stored, parse_allowed_code
from vit_jax.storage.files import JsonObject, expand_path, write_atomically
from vit_jax.text.printable import printable
from vit_jax.tools.inspection.examination import Examination, list_intermediates
from vit_jax.tools.inspection.replay_report import REPORT_FILE, Replay
from vit_jax.train import overview
from vit_jax.train.assemble import assemble
from vit_jax.train.assembly import Assembly, CompiledStep
from vit_jax.train.divergence import list_records
from vit_jax.train.inputs import Datasets, open_datasets, open_train_batches
from vit_jax.train.lifecycle.workdir import TRIALS
from vit_jax.train.run_files import (
    CONFIG_FILE,
    DIVERGENCE_FILE,
    read_config,
    read_divergence,
    read_metrics,
)
from vit_jax.train.start import given_state, restore
from vit_jax.train.starting_weights import adapt
from vit_jax.train.state import TrainState, items_of
from vit_jax.train.state_builder import architecture_of
from vit_jax.train.step_compiler import Leaves
from vit_jax.weights.description import parse_architecture

FOLDER = "replay"
"""Sub-folder of a workdir, with one folder for each replayed step."""
Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenRun:
    """A run at a checkpoint, or at its start.

    Attributes:
      assembly: the parts of the run.
      data: the splits, open.
      state: the state from which steps are repeated.
      metadata: metadata of a checkpoint with this state.
      origin: a sentence on where the state comes from.
      is_start: True for the first state of the run, False for a checkpoint.
    """

    assembly: Assembly
    data: Datasets
    state: TrainState
    metadata: JsonObject
    origin: str
    is_start: bool

    @property
    def next_step(self) -> int:
        """The number of the first step that can be repeated."""
        return int(jax.device_get(self.state.step)) + 1


def replay(
    workdir: str,
    step: int | None = None,
    *,
    allow_code: str | Sequence[str] = (),
    say: Say = lambda line: None,
) -> Replay:
    """Repeat one step of a run; the folder `replay/step_N` of its workdir receives the report.

    The workdir is otherwise only read. Every process of a run calls this function.

    Args:
      workdir: the folder of a run, ended or not, or of a trial in its `search/`.
      step: from 1; None: the step of `divergence.json`.
      allow_code: packages whose code the workdir may name, as for `load_weights`.
      say: receives lines on the progress.

    Raises:
      ValueError: the run or the step does not exist, or its data or weights have been removed.
    """
    folder = require_workdir(workdir)
    divergence = read_divergence(folder)
    step = choose_step(folder, step, divergence)
    reader = CheckpointReader(folder, parse_allowed_code(allow_code))
    run = open_before(folder, reader, step, divergence, say)
    say(f"{run.origin}, {step - run.next_step:,} step(s) before step {step} to repeat")
    recorded = read_recorded(folder, step, divergence, say)

    assembly = run.assembly
    train_step = assembly.compile_train_step(run.next_step - 1)
    leaves, batch = repeat_steps(train_step, run, step)
    state = assembly.state_from(leaves)
    target = folder / FOLDER / f"step_{step}"
    save_state(target, step - 1, state, run.metadata)

    phase = assembly.select_phase(step)
    intermediates = list_intermediates(phase.architecture)
    examination = Examination(phase.step_parts, intermediates, phase.teacher_network)
    examine = assembly.compiler.jit_read_only(examination.examine)
    figures = jax.device_get(examine(state, batch))
    _, metrics = train_step.select(step)(
        leaves, batch
    )  # last, because it reuses the memory of the state

    record_B = list_records(assembly, run.data, step)
    result = Replay(
        step=step,
        start=run.origin,
        metrics={name: float(value) for name, value in jax.device_get(metrics).items()},
        recorded=recorded,
        figures=figures,
        record_B=record_B,
        name_B=[run.data.train.name_of(record) for record in record_B.tolist()],
        folder=target,
    )
    if hosts.is_first():
        write_atomically(target / REPORT_FILE, json.dumps(result.to_json(), indent=1) + "\n")
    return result


def require_workdir(workdir: str) -> pathlib.Path:
    """Return the folder of a run.

    Raises:
      ValueError: it is not the workdir of a run.
    """
    folder = expand_path(workdir).absolute()
    require_exact_path(folder)
    if not (folder / CONFIG_FILE).is_file():
        raise ValueError(
            f"{folder} is not the workdir of a run: it has no {CONFIG_FILE}. Give one that has."
        )
    return folder


def choose_step(
    folder: pathlib.Path,
    step: int | None,
    divergence: JsonObject | None,
) -> int:
    """Return the step to repeat: the given one, else the one that diverged."""
    if step is not None:
        return step
    if divergence is None:
        raise ValueError(
            f"{folder}: no step has diverged, there is no {DIVERGENCE_FILE}. "
            "Give --step=N for any step."
        )
    diverged_step: int = divergence["step"]
    return diverged_step


def open_before(
    folder: pathlib.Path,
    reader: CheckpointReader,
    step: int,
    divergence: JsonObject | None,
    say: Say,
) -> OpenRun:
    """Open a run at its newest undamaged checkpoint before a step, or at its start.

    Raises:
      ValueError: the run has no such step.
    """
    config = read_run_config(folder, reader, divergence)
    validate(config)
    data = open_data(folder, config)
    run = None
    for saved_step in reversed(reader.all_steps()):
        if saved_step >= step:
            continue
        try:
            run = open_checkpoint(config, data, reader, saved_step)
            break
        except DamagedCheckpoint as error:
            say(printable(str(error)))
    if run is None:
        run = open_start(config, data)

    total = run.assembly.steps.total
    least = run.next_step if run.is_start else 1
    if not least <= step <= total:
        raise ValueError(f"--step={step}: must be from {least} to {total}, the steps of this run.")
    return run


def open_data(folder: pathlib.Path, config: RunConfig) -> Datasets:
    """Open the data of a run; for a trial of a search these are parts of the training split."""
    data = open_datasets(config)
    search_folder = folder.parents[1]
    if folder.parent.name != TRIALS or not (search_folder / CONFIG_FILE).exists():
        return data
    search = from_dict(FinetuneConfig, read_config(search_folder)).search
    learned, held_out = hold_out(data.train, search.validation_fraction, config.seed)
    return Datasets(learned, held_out)


def open_checkpoint(
    config: RunConfig,
    data: Datasets,
    reader: CheckpointReader,
    saved_step: int,
) -> OpenRun:
    """Open a run at a checkpoint.

    Raises:
      DamagedCheckpoint: files of the checkpoint are damaged.
    """
    stored = reader.metadata(saved_step)
    assembly = _assemble(config, parse_architecture(stored), data)
    metadata = overview.checkpoint_metadata(assembly, data, None)
    return OpenRun(
        assembly=assembly,
        data=data,
        state=restore(assembly, reader, saved_step, metadata),
        metadata=stored,
        origin=f"from the checkpoint of step {saved_step}",
        is_start=False,
    )


def open_start(config: RunConfig, data: Datasets) -> OpenRun:
    """Open a run at its first state."""
    fitted = None
    if isinstance(config, FinetuneConfig):
        start = adapt(config, data.train)
        architecture = start.architecture
        fitted = start.fitted
        config = start.config
    else:
        architecture = architecture_of(config, data.train.num_classes)
    assembly = _assemble(config, architecture, data)
    metadata = overview.checkpoint_metadata(assembly, data, fitted)
    state, origin = given_state(assembly, fitted, metadata)
    return OpenRun(
        assembly=assembly,
        data=data,
        state=state,
        metadata={**metadata, "wall_seconds": 0.0},
        origin=origin,
        is_start=True,
    )


def read_run_config(
    folder: pathlib.Path,
    reader: CheckpointReader,
    divergence: JsonObject | None,
) -> RunConfig:
    """Return the config of the run, with the learning rate of its search if it had one.

    The last start of a run may have changed its layout. The record of a divergence has the config
    of that start.
    """
    if divergence is not None:
        values = _mark(divergence["config"], folder / DIVERGENCE_FILE, reader)
    else:
        values = _mark(read_config(folder), folder / CONFIG_FILE, reader)
        for saved_step in reader.all_steps():  # the config of the newest one is returned
            with contextlib.suppress(DamagedCheckpoint):
                values = reader.metadata(saved_step).get("config", values)

    kind: type[RunConfig] = FinetuneConfig if "search" in values else PretrainConfig
    config = from_dict(kind, values)
    # Checked before weights are read, which may name the same code as the config.
    for _, reference in find_references(config):
        if isinstance(reference, StoredReference):
            reference.require_allowed()
    if isinstance(config, FinetuneConfig) and config.search.learning_rates:
        raise ValueError(
            f"{folder}: its final run has not begun. "
            f"Give a trial of its search, a folder in {TRIALS}/."
        )
    return dataclasses.replace(config, allow_code=reader.allowed)


def read_recorded(
    folder: pathlib.Path,
    step: int,
    divergence: JsonObject | None,
    say: Say,
) -> Mapping[str, float] | None:
    """Return the metrics that the run wrote for a step, or None; report different versions."""
    if divergence is not None and divergence["step"] == step:
        for name, here in overview.machine().items():
            there = divergence.get(name, here)
            if there != here:
                say(
                    f"note     {name}: {printable(str(there))} then, {here} now; figures may differ"
                )
        metrics: Mapping[str, float] = divergence["metrics"]
        return metrics

    recorded = None
    for line in read_metrics(folder):
        if line["step"] == step and "train_loss" in line:
            recorded = line
    return recorded


def repeat_steps(
    train_step: CompiledStep,
    run: OpenRun,
    step: int,
) -> tuple[Leaves, Batch]:
    """Return the leaves of the state before a step, and the batch of the step."""
    first = run.next_step
    leaves = pytree.name_leaves(run.state)
    with open_train_batches(run.assembly, run.data.train, first - 1) as (batches, _):
        for number in range(first, step):
            leaves, _ = train_step.select(number)(leaves, next(batches))
        return leaves, next(batches)


def save_state(
    target: pathlib.Path,
    step: int,
    state: TrainState,
    metadata: Mapping[str, object],
) -> None:
    """Save a state as a workdir for other verbs; it replaces the state of an earlier replay."""
    if hosts.is_first():
        if target.parent.is_symlink():
            raise ValueError(
                f"{target.parent} is a link: a replay writes only into the workdir. "
                "Remove the link."
            )
        shutil.rmtree(target, ignore_errors=True)
    hosts.wait_for_all("earlier replay removed")
    with contextlib.closing(CheckpointStore(target)) as store:
        complete = {**metadata, "owes_evaluation": False}
        store.save(step, items_of(state), metadata=complete, metrics={})
        store.wait()


def _assemble(
    config: RunConfig,
    architecture: Architecture,
    data: Datasets,
) -> Assembly:
    """Build the parts of the run for the devices of this machine."""
    return assemble(
        config,
        architecture,
        num_examples=len(data.train),
        label_shape=data.train.label_shape,
        devices=jax.devices(),
    )


def _mark(
    config: JsonObject,
    file: pathlib.Path,
    reader: CheckpointReader,
) -> JsonObject:
    """Return the config of a file whose references are imported only from allowed packages."""
    marked: JsonObject = mark_stored({"config": config}, str(file), reader.allowed)["config"]
    return marked
