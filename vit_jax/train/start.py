"""How a run starts: its own checkpoint, else a given one, else given weights, else from scratch."""

import dataclasses
import pathlib
from typing import Any

import jax

from vit_jax.checkpoint.store import FOLDER, CheckpointStore, has_checkpoints
from vit_jax.train.assemble import Assembly
from vit_jax.train.state import TrainState


def items_of(state: TrainState) -> dict[str, Any]:
    """The state as the items of a checkpoint."""
    items = {"progress": {"step": state.step}, "model": state.model, "optimizer": state.optimizer}
    return items if state.polyak is None else items | {"polyak": state.polyak}


def start_state(assembly: Assembly, own: CheckpointStore, metadata: dict[str, Any]) -> tuple[TrainState, str]:
    """The state a run begins with, and a sentence that says where it comes from.

    Args:
      assembly: the run.
      own: the checkpoints of its own workdir.
      metadata: what this run's checkpoints will say of their data; must agree with what is continued.

    Raises:
      ValueError: what is asked for does not exist or does not fit.
    """
    config = assembly.config
    step = own.latest_step()
    if step is not None:
        return _restore_all(assembly, own, step, metadata), f"continuing from this workdir's checkpoint of step {step}"
    if config.resume_from is not None:
        store, step = _open(config.resume_from, "resume_from")
        return _restore_all(assembly, store, step, metadata), f"continuing from step {step} of {config.resume_from}"
    if config.init_from is not None:
        store, step = _open(config.init_from, "init_from")
        text = f"starting at step 0 with the weights of step {step} of {config.init_from}"
        return _restore_weights(assembly, store, step), text
    return assembly.init_state(), f"starting from scratch with seed {config.seed}"


def _restore_all(assembly: Assembly, store: CheckpointStore, step: int, metadata: dict[str, Any]) -> TrainState:
    stored = store.metadata(step)
    _require_same_network(assembly, stored, store)
    for name in ("data", "num_examples", "class_names", "global_batch", "seed"):
        if stored.get(name) != metadata[name]:
            raise ValueError(
                f"The checkpoint in {store.folder} was trained with {name}={_short(stored.get(name))}, this run has "
                f"{_short(metadata[name])}: continuing would not see the same images. To start anew from its weights, "
                f"use config.init_from and another workdir."
            )
    restored = store.restore(step, items_of(assembly.abstract_state))
    return TrainState(
        step=restored["progress"]["step"],
        model=restored["model"],
        optimizer=restored["optimizer"],
        polyak=restored.get("polyak"),
    )


def _restore_weights(assembly: Assembly, store: CheckpointStore, step: int) -> TrainState:
    """The Polyak average where the checkpoint has one, for it is what was judged; else the parameters."""
    _require_same_network(assembly, store.metadata(step), store)
    name = "polyak" if "polyak" in store.item_names(step) else "model"
    model = store.restore(step, {name: assembly.abstract_state.model})[name]
    state = assembly.init_state()
    polyak = None if state.polyak is None else jax.tree.map(lambda leaf: leaf.copy(), model)
    return dataclasses.replace(state, model=model, polyak=polyak)


def _require_same_network(assembly: Assembly, stored: dict[str, Any], store: CheckpointStore) -> None:
    """Of two networks with the same shapes one may still compute something else than the other."""
    given = dataclasses.asdict(assembly.architecture)
    different = [
        f"  {name}: there {stored['architecture'].get(name)!r}, here {given[name]!r}"
        for name in ("pool", "position_embedding", "head", "gelu", "num_heads")
        if stored["architecture"].get(name) != given[name]
    ]
    if different:
        raise ValueError(f"The checkpoint in {store.folder} is of another network:\n" + "\n".join(different))


def _open(workdir: str, field: str) -> tuple[CheckpointStore, int]:
    path = pathlib.Path(workdir).expanduser()
    if not has_checkpoints(path):
        raise ValueError(
            f"config.{field}={workdir!r} is not a workdir with a checkpoint: "
            f"give the folder of a run, the one with the sub-folder {FOLDER}/ in it."
        )
    store = CheckpointStore(path, read_only=True)
    step = store.latest_step()
    assert step is not None
    return store, step


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
