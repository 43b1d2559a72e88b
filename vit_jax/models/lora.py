"""LoRA (Hu et al., 2021): beside each kernel W of a block two thin factors, so that it computes as W + scale * A B.

The factors are parameters of the linear layers, "encoder/blocks/mlp/expand/lora_a" beside ".../kernel".

Legend: L layers, I O channels of a kernel's input and output, r rank.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax import pytree
from vit_jax.config import Architecture
from vit_jax.config.network_options import LORA_FACTORS
from vit_jax.imports.reference_form import is_reference

if TYPE_CHECKING:
    from vit_jax.config.schema import OptimizerConfig

Shape = tuple[int, ...]
A, B = LORA_FACTORS
_KERNEL = re.compile(r"(encoder/blocks/.*(?:attention|mlp)/(\w+))/kernel")
_STREAM = 2**32 - 1  # of random numbers; no step has this number


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora:
    """The factors of a network."""

    rank: int
    scale: float
    layers: tuple[str, ...]  # (): all of attention and MLP


def lora_of(config: "OptimizerConfig") -> Lora | None:
    """Return the factors that a run trains; None without LoRA."""
    if config.lora_rank is None:
        return None
    alpha = config.lora_rank if config.lora_alpha is None else config.lora_alpha
    return Lora(rank=config.lora_rank, scale=alpha / config.lora_rank, layers=config.lora_layers)


def require_adaptable(a: Architecture, *, is_standard: bool = True) -> None:
    """Raise ValueError unless the blocks of a network are built in; `is_standard`: `a` describes the network."""
    if not is_standard or a.network is not None or is_reference(a.block) or not a.has_transformer:
        rule = f"must be None for {a.name}, which has no built-in blocks of attention and MLP"
        raise ValueError(
            f"config.optimizer.lora_rank: {rule}. Use optimizer.frozen to choose what is trained."
        )


def factor_shapes(shapes: Mapping[str, Shape], lora: Lora) -> dict[str, Shape]:
    """Return the shapes of the factors, (L, I, r) and (L, r, O), by name, for parameters of these shapes.

    Raises:
      ValueError: the rank is larger than a side of a kernel, or the blocks have no such layer.
    """
    factors = dict[str, Shape]()
    layers = set[str]()
    for name, shape in shapes.items():
        match = _KERNEL.fullmatch(name)
        if match is None or (lora.layers and match[2] not in lora.layers):
            continue
        depth, inputs, outputs = shape
        if not 1 <= lora.rank <= (most := min(inputs, outputs)):
            raise ValueError(
                f"config.optimizer.lora_rank={lora.rank}: must lie in [1, {most}], for {name}. Use 4 to 64."
            )
        factors |= {
            f"{match[1]}/{A}": (depth, inputs, lora.rank),
            f"{match[1]}/{B}": (depth, lora.rank, outputs),
        }
        layers.add(match[2])
    if missing := [layer for layer in lora.layers if layer not in layers]:
        raise ValueError(
            f"config.optimizer.lora_layers={','.join(lora.layers)}: the blocks have no {missing[0]}."
        )
    return factors


def initial_factors(shapes: Mapping[str, Shape], key: jax.Array) -> dict[str, jax.Array]:
    """Return the initial value of each factor: A uniform within 1 / sqrt(I), as in the paper's code; B zero."""
    keys = jax.random.split(jax.random.fold_in(key, _STREAM), len(shapes))

    def initial(name: str, key: jax.Array) -> jax.Array:
        bound = 1 / math.sqrt(shapes[name][-2]) if name.endswith(A) else 0.0
        return jax.random.uniform(key, shapes[name], minval=-bound, maxval=bound)

    return {name: initial(name, key) for name, key in zip(sorted(shapes), keys, strict=True)}


def add_factors(model: Any, lora: Lora, key: jax.Array) -> Any:
    """Add factors with initial values to the linear layers of a network, and return it.

    Raises:
      ValueError: as `factor_shapes`.
    """
    shapes = {name: leaf.shape for name, leaf in pytree.named_leaves(model).items()}
    for name, array in initial_factors(factor_shapes(shapes, lora), key).items():
        setattr(_layer(model, name), name.rpartition("/")[2], nnx.Param(array))
    model.encoder.lora_scale = lora.scale
    return model


def adapted(block: Any, scale: float) -> Any:
    """Return one block whose kernels are W + scale * A B."""
    for name in pytree.named_leaves(block):
        if name.endswith(f"/{A}"):
            layer = _layer(block, name)
            product_IO = jnp.matmul(layer.lora_a[...], layer.lora_b[...], precision="highest")
            layer.kernel = nnx.Param(layer.kernel[...] + scale * product_IO)
    return block


def _layer(module: Any, name: str) -> Any:
    """Return the layer that a parameter belongs to."""
    return functools.reduce(getattr, name.split("/")[:-1], module)


def merge(parameters: Mapping[str, np.ndarray], lora: Lora) -> dict[str, np.ndarray]:
    """Return the parameters of the plain network that computes the same, W + scale * A B in float32."""
    merged = {
        name: array for name, array in parameters.items() if not name.endswith((f"/{A}", f"/{B}"))
    }
    for name in merged:
        layer = name.removesuffix("/kernel")
        if f"{layer}/{A}" in parameters:
            product = np.matmul(parameters[f"{layer}/{A}"], parameters[f"{layer}/{B}"])
            merged[name] = merged[name] + np.float32(lora.scale) * product
    return merged
