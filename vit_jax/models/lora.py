"""LoRA (Hu et al., 2021): thin factors A and B beside the kernels of blocks.

They are parameters of the linear layers, "encoder/blocks/mlp/expand/lora_a" beside ".../kernel".
`models.attention.Linear` multiplies them.

Legend: L layers, I O channels of a kernel's input and output, r rank.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import nnx
from jax import Array

from vit_jax import pytree
from vit_jax.config.architecture import Architecture
from vit_jax.config.network_options import LORA_FACTORS
from vit_jax.imports.reference_form import is_reference

if TYPE_CHECKING:
    from vit_jax.config.schema import OptimizerConfig

Shape = tuple[int, ...]
A, B = LORA_FACTORS
_KERNEL = re.compile(r"(encoder/blocks/.*(?:attention|mlp)/(\w+))/kernel")
_STREAM = 2**32 - 1  # stream of random numbers; no step has this number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora:
    """The factors of a network."""

    rank: int
    scale: float
    layers: tuple[str, ...]  # (): all of attention and MLP


def build_lora(config: "OptimizerConfig") -> Lora | None:
    """Return the factors that a run trains; None without LoRA."""
    rank = config.lora_rank
    if rank is None:
        return None
    alpha = config.lora_alpha if config.lora_alpha is not None else rank
    return Lora(
        rank=rank,
        scale=alpha / rank,
        layers=config.lora_layers,
    )


def require_adaptable(a: Architecture, *, is_standard: bool = True) -> None:
    """Raise ValueError unless the blocks of a network are built in.

    Without `is_standard`, `a` does not describe the network.
    """
    has_built_in_blocks = a.has_transformer and a.network is None and not is_reference(a.block)
    if is_standard and has_built_in_blocks:
        return

    rule = f"must be None for {a.name}, which has no built-in blocks of attention and MLP"
    raise ValueError(
        f"config.optimizer.lora_rank: {rule}. Use optimizer.frozen to choose what is trained."
    )


def list_factor_shapes(shapes: Mapping[str, Shape], lora: Lora) -> dict[str, Shape]:
    """Return the shapes of the factors by name, (L, I, r) and (L, r, O), for these parameters.

    Raises:
      ValueError: the rank is larger than a side of a kernel, or the blocks have no such layer.
    """
    factors = dict[str, Shape]()
    layers = set[str]()
    for name, shape in shapes.items():
        match = _KERNEL.fullmatch(name)
        if match is None:
            continue
        path, layer = match.groups()
        if lora.layers and layer not in lora.layers:
            continue

        depth, inputs, outputs = shape
        largest_rank = min(inputs, outputs)
        if not 1 <= lora.rank <= largest_rank:
            rule = f"must lie in [1, {largest_rank}], for {name}"
            raise ValueError(f"config.optimizer.lora_rank={lora.rank}: {rule}. Use 4 to 64.")

        factors[f"{path}/{A}"] = (depth, inputs, lora.rank)
        factors[f"{path}/{B}"] = (depth, lora.rank, outputs)
        layers.add(layer)

    for layer in lora.layers:
        if layer not in layers:
            names = ",".join(lora.layers)
            raise ValueError(f"config.optimizer.lora_layers={names}: the blocks have no {layer}.")
    return factors


def build_initial_factors(shapes: Mapping[str, Shape], key: Array) -> dict[str, Array]:
    """Return initial values: A uniform within 1 / sqrt(I), as in the paper's code; B zero."""
    lora_key = jax.random.fold_in(key, _STREAM)
    keys = jax.random.split(lora_key, len(shapes))

    factors = {}
    for name, factor_key in zip(sorted(shapes), keys, strict=True):
        shape = shapes[name]
        bound = 0.0
        if name.endswith(A):
            inputs = shape[-2]
            bound = 1 / math.sqrt(inputs)
        factors[name] = jax.random.uniform(
            factor_key,
            shape,
            minval=-bound,
            maxval=bound,
        )
    return factors


def add_factors(model: nnx.Module, lora: Lora, key: Array) -> nnx.Module:
    """Add factors with initial values to the linear layers of a network, and return it.

    Raises:
      ValueError: the factors do not fit the network.
    """
    leaves = pytree.name_leaves(model)
    shapes = {name: leaf.shape for name, leaf in leaves.items()}
    shapes_of_factors = list_factor_shapes(shapes, lora)
    factors = build_initial_factors(shapes_of_factors, key)

    for name, array in factors.items():
        layer = _find_layer(model, name)
        _, _, attribute = name.rpartition("/")
        setattr(layer, attribute, nnx.Param(array))
        layer.lora_scale = lora.scale
    return model


def store_frozen_kernels(model: nnx.Module, dtype: str) -> nnx.Module:
    """Store the kernels of attention and MLP, which LoRA freezes, in the compute dtype.

    The step reads them in this dtype only. Factors keep float32.
    """
    for name in pytree.name_leaves(model):
        if _KERNEL.fullmatch(name):
            layer = _find_layer(model, name)
            kernel_LIO = layer.kernel[...]
            layer.kernel = nnx.Param(kernel_LIO.astype(dtype))
    return model


def _find_layer(module: object, name: str) -> Any:
    """Return the layer that a parameter belongs to."""
    layer_path = name.split("/")[:-1]
    return functools.reduce(getattr, layer_path, module)


def merge(parameters: Mapping[str, np.ndarray], lora: Lora) -> dict[str, np.ndarray]:
    """Return the parameters of an equal network without factors: W + scale * A B in float32."""
    merged = {}
    for name, array in parameters.items():
        if name.endswith((f"/{A}", f"/{B}")):
            continue

        array = array.astype(np.float32, copy=False)  # frozen kernels have the compute dtype
        layer = name.removesuffix("/kernel")
        if f"{layer}/{A}" in parameters:
            a_LIr = parameters[f"{layer}/{A}"]
            b_LrO = parameters[f"{layer}/{B}"]
            product_LIO = np.matmul(a_LIr, b_LrO)
            array = array + np.float32(lora.scale) * product_LIO
        merged[name] = array
    return merged
