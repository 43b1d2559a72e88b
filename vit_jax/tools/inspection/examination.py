"""Analysis of a training step: norms by layer, and the loss of each example.

Legend: A micro-batches, B global batch, L blocks, S tokens, D width, H W C map of a stage.
"""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax import pytree
from vit_jax.arrays import ABSENT, Batch, ModelOutput, Targets
from vit_jax.config import Architecture
from vit_jax.objectives import Objective
from vit_jax.train.state import TrainState
from vit_jax.train.step import LossInputs, StepParts, TeacherNetwork, split_batch

Figures = dict[str, Any]
KINDS = ("parameters", "output", "largest", "gradient", "update")
"""Figures of a layer.

Norms of the parameters before the step, of their gradients and their updates; the root mean square
and the largest absolute value of the output.
"""

_STACKED_LAYER = re.compile(r"((?:encoder/blocks|(?:body|stem)/stage\d+/rest)/)")
_LAYER = re.compile(r"(?:body|stem)/stage\d+/\w+|(?:body|stem|encoder)/\w+|[^/]+")
"""The layer of a parameter that is not stacked."""
_FORWARD_ORDER = (
    "(?:body|stem)/root",
    "(?:body|stem)/.*",
    "embedding.*",
    "class_token",
    "register_tokens",
    "positions.*",
    "encoder/blocks/.*",
    "encoder/norm",
    "norm",
    "(?!head).*",
    "head.*",
)
"""Patterns of layers in the order in which a network runs them."""
_NUMBER = re.compile(r"(\d+)")


@dataclasses.dataclass(frozen=True)
class Examination:
    """Analysis of a training step.

    Attributes:
      parts: the parts of the step, also of a phase.
      intermediates: outputs of layers that the network returns on request, see `ModelOutput`.
      teacher: the network of the teacher; None for a run without one.
    """

    parts: StepParts
    intermediates: tuple[str, ...]
    teacher: TeacherNetwork | None

    def examine(self, state: TrainState, batch: Batch) -> Figures:
        """Return figures of the step: `KINDS` by layer, and "loss_B" by example."""
        inputs = self.parts.prepare_inputs(state.step, batch)
        gradients, _ = self.parts.compute_gradients(state.model, inputs, self.teacher)
        updates, _ = self.parts.optimizer.update(gradients, state.optimizer, state.model)

        figures = self.observe_outputs(state.model, inputs)
        figures["parameters"] = compute_norms(state.model)
        figures["gradient"] = compute_norms(gradients)
        figures["update"] = compute_norms(updates)
        figures["label_B"] = batch.label_B
        figures["mask_B"] = batch.mask_B
        return figures

    def observe_outputs(
        self,
        model: nnx.Module,
        inputs: LossInputs,
    ) -> Figures:
        """Return losses of examples and figures of layers, from one more forward pass.

        It has the dropout of the step.
        """
        num_micro_batches = self.parts.num_micro_batches
        observe = functools.partial(self.observe_micro_batch, model)
        if num_micro_batches == 1:
            observed = observe(inputs)
            observed_A = jax.tree.map(lambda x: x[None], observed)
        else:
            micro_batches = split_batch(inputs, num_micro_batches)
            observed_A = jax.lax.map(observe, micro_batches)

        figures: Figures = {"output": {}, "largest": {}}
        for name, square_A in observed_A["square"].items():
            figures["output"][name] = jnp.sqrt(square_A.mean())
        for name, largest_A in observed_A["largest"].items():
            figures["largest"][name] = largest_A.max()
        # Micro-batch a has the examples a, A + a, 2 A + a, ...
        figures["loss_B"] = observed_A["loss"].T.reshape(-1)
        return figures

    def observe_micro_batch(
        self,
        model: nnx.Module,
        inputs: LossInputs,
    ) -> Figures:
        """Return the results of `measure_output` for one micro-batch."""
        output = self.parts.predict(model, inputs, self.intermediates)
        targets = self.parts.complete_targets(inputs, self.teacher)
        return measure_output(self.parts.objective, output, targets)


def list_intermediates(architecture: Architecture) -> tuple[str, ...]:
    """Return the intermediates that the network can return; none of a user-defined network."""
    if architecture.network is not None:
        return ()
    names = []
    if architecture.has_transformer:
        names.append("blocks")
    if architecture.has_resnet:
        names.append("stages")
    return tuple(names)


def measure_output(
    objective: Objective,
    output: ModelOutput,
    targets: Targets,
) -> Figures:
    """Return the losses of examples; mean squares and largest values of layers' outputs.

    Args:
      objective: the loss of the step.
      output: the output for one micro-batch, with intermediates.
      targets: targets of the micro-batch.
    """

    def compute_loss(output: ModelOutput, targets: Targets) -> jax.Array:
        one_example = jax.tree.map(lambda x: x[None], (output, targets))
        sums = objective.sums(*one_example)
        least_weight = jnp.finfo(jnp.float32).tiny
        return sums["loss"] / jnp.maximum(sums["weight"], least_weight)

    predictions = dataclasses.replace(
        output,
        blocks_LBSD=ABSENT,
        attention_LBTQS=ABSENT,
        stages_BHWC=ABSENT,
    )
    figures: Figures = {"loss": jax.vmap(compute_loss)(predictions, targets)}
    figures["square"] = {}
    figures["largest"] = {}
    for name, activation in name_outputs(output).items():
        x = activation.astype(jnp.float32)
        figures["square"][name] = jnp.square(x).mean()
        figures["largest"][name] = jnp.abs(x).max()
    return figures


def name_outputs(output: ModelOutput) -> dict[str, jax.Array]:
    """Return the outputs of layers by the name of the layer."""
    has_blocks = output.blocks_LBSD is not None
    resnet = "stem" if has_blocks else "body"
    outputs = {}
    for number, map_BHWC in enumerate(output.stages_BHWC or (), 1):
        outputs[f"{resnet}/stage{number}"] = map_BHWC
    if has_blocks:
        for number, tokens_BSD in enumerate(output.blocks_LBSD):
            outputs[f"encoder/blocks/{number}"] = tokens_BSD
    if output.pooled_BD is not None:
        outputs["pooling"] = output.pooled_BD
    if output.logits_BK is not None:
        outputs["head"] = output.logits_BK
    if output.patches_BNO is not None:
        outputs["head"] = output.patches_BNO
    return outputs


def compute_norms(tree: object) -> dict[str, jax.Array]:
    """Return the norm of all arrays of each layer, also of layers that share an array."""
    squares: dict[str, jax.Array] = {}
    for name, leaf in pytree.name_leaves(tree).items():
        values = leaf.astype(jnp.float32)
        for layer, values_of_layer in split_layers(name, values).items():
            square = jnp.square(values_of_layer).sum()
            squares[layer] = squares.get(layer, 0.0) + square
    return {name: jnp.sqrt(total) for name, total in squares.items()}


def split_layers(name: str, array: jax.Array) -> dict[str, jax.Array]:
    """Return the part of each layer; an array of stacked layers has several."""
    match = _STACKED_LAYER.match(name)
    if match is None:
        return {find_layer(name): array}
    layers = {}
    for number in range(array.shape[0]):
        layers[f"{match[1]}{number}"] = array[number]
    return layers


def find_layer(name: str) -> str:
    """Return the layer of a parameter: "encoder/norm" of "encoder/norm/scale"."""
    match = _LAYER.match(name)
    assert match, name
    return match[0]


def sort_layers(figures: Figures) -> list[str]:
    """Return the names of all layers, in the order in which the network runs them."""
    names: set[str] = set()
    for kind in KINDS:
        names.update(figures[kind])
    return sorted(names, key=_find_position)


def _find_position(name: str) -> tuple[int, list[int | str]]:
    """Return the sort key of a layer: its place in the network, and its name."""
    place = 0
    while not re.fullmatch(_FORWARD_ORDER[place], name):
        place += 1

    parts: list[int | str] = []
    for part in _NUMBER.split(name):
        if part.isdigit():
            parts.append(int(part))
        else:
            parts.append(part)
    return place, parts
