"""A training step taken apart: norms by layer, and the loss of each example.

Legend: A micro-batches, B global batch, L blocks, S tokens, D width, H W C map of a stage.
"""

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from vit_jax import pytree
from vit_jax.arrays import Batch, ModelOutput, Targets
from vit_jax.config import Architecture, RunConfig
from vit_jax.objectives import Objective
from vit_jax.train.state import TrainState
from vit_jax.train.step import View, make_gradients, same

Figures = dict[str, Any]
KINDS = ("parameters", "output", "largest", "gradient", "update")
"""Norms of the parameters before the step, their gradients and their updates; of a layer's output the root mean square
and the largest absolute value."""

_STACK = re.compile(r"((?:encoder/blocks|(?:body|stem)/stage\d+/rest)/)")
_LAYER = re.compile(
    r"(?:body|stem)/stage\d+/\w+|(?:body|stem|encoder)/\w+|[^/]+"
)  # of a parameter that is not stacked
_FORWARD = (  # the order in which a network runs its layers
    *(
        "(?:body|stem)/root",
        "(?:body|stem)/.*",
        "embedding.*",
        "class_token",
        "register_tokens",
        "positions.*",
    ),
    *("encoder/blocks/.*", "encoder/norm", "norm", "(?!head).*", "head.*"),
)
_NUMBER = re.compile(r"(\d+)")


def make_examination(
    config: RunConfig,
    architecture: Architecture,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    view: View = same,
) -> Callable[[TrainState, Batch], Figures]:
    """Return (state, batch) -> figures of the training step: one of `KINDS` by layer, and "loss_B" by example."""
    gradients_of = make_gradients(
        config, architecture, objective, view, _make_look(objective), _taps(architecture)
    )

    def examine(state: TrainState, batch: Batch) -> Figures:
        _, gradients, seen = gradients_of(state, batch)
        updates, _ = optimizer.update(gradients, state.optimizer, state.model)
        outputs = {name: jnp.sqrt(squares_A.mean()) for name, squares_A in seen["squares"].items()}
        return {
            "parameters": norms(state.model),
            "output": outputs,
            "largest": {name: largest_A.max() for name, largest_A in seen["largest"].items()},
            "gradient": norms(gradients),
            "update": norms(updates),
            "loss_B": seen["loss"].T.reshape(
                -1
            ),  # micro-batch a has the examples a, A + a, 2 A + a, ...
            "label_B": batch.label_B,
            "mask_B": batch.mask_B,
        }

    return examine


def _taps(a: Architecture) -> tuple[str, ...]:
    """Outputs of layers that the network returns on request; a user-defined network need not know the word."""
    if a.network is not None:
        return ()
    return (*(["blocks"] if a.has_transformer else []), *(["stages"] if a.has_resnet else []))


def _make_look(objective: Objective) -> Callable[[ModelOutput, Targets], Figures]:
    def loss_of_example(output: ModelOutput, targets: Targets) -> jax.Array:
        sums = objective.sums(*jax.tree.map(lambda x: x[None], (output, targets)))
        return sums["loss"] / jnp.maximum(sums["weight"], jnp.finfo(jnp.float32).tiny)

    def look(output: ModelOutput, targets: Targets) -> Figures:
        layers = {name: x.astype(jnp.float32) for name, x in _outputs(output)}
        alone = dataclasses.replace(
            output, blocks_LBSD=None, attention_LBTQS=None, stages_BHWC=None
        )
        return {
            "loss": jax.vmap(loss_of_example)(alone, targets),
            "squares": {name: jnp.square(x).mean() for name, x in layers.items()},
            "largest": {name: jnp.abs(x).max() for name, x in layers.items()},
        }

    return look


def _outputs(output: ModelOutput) -> Iterator[tuple[str, jax.Array]]:
    """Yield the outputs of layers with their names."""
    for number, map_BHWC in enumerate(output.stages_BHWC or (), 1):
        yield f"{'body' if output.blocks_LBSD is None else 'stem'}/stage{number}", map_BHWC
    if output.blocks_LBSD is not None:
        yield from ((f"encoder/blocks/{i}", x_BSD) for i, x_BSD in enumerate(output.blocks_LBSD))
    for name, x in (
        ("pooling", output.pooled_BD),
        ("head", output.logits_BK),
        ("head", output.patches_BNO),
    ):
        if x is not None:
            yield name, x


def norms(tree: object) -> dict[str, jax.Array]:
    """Return the norm of all arrays of each layer, also of layers that share an array."""
    squares: dict[str, jax.Array] = {}
    for name, leaf in pytree.named_leaves(tree).items():
        x = leaf.astype(jnp.float32)
        match = _STACK.match(name)
        layers = (
            {f"{match[1]}{i}": x[i] for i in range(leaf.shape[0])} if match else {layer_of(name): x}
        )
        for layer, values in layers.items():
            squares[layer] = squares.get(layer, 0.0) + jnp.square(values).sum()
    return {name: jnp.sqrt(total) for name, total in squares.items()}


def layer_of(name: str) -> str:
    """Return the layer of a parameter: "encoder/norm" of "encoder/norm/scale"."""
    match = _LAYER.match(name)
    assert match, name
    return match[0]


def in_forward_order(figures: Figures) -> list[str]:
    """Return the names of all layers, in the order in which the network runs them."""

    def place(name: str) -> tuple[int, list[int | str]]:
        rank = next(rank for rank, pattern in enumerate(_FORWARD) if re.fullmatch(pattern, name))
        return rank, [int(part) if part.isdigit() else part for part in _NUMBER.split(name)]

    return sorted({name for kind in KINDS for name in figures[kind]}, key=place)
