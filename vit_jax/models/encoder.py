"""The encoder: blocks stacked into one and run by a scan; from its tokens to logits.

Legend: B batch, S sequence length, D width, T heads, L depth, K classes.
"""

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.config import Architecture
from vit_jax.imports.references import resolve
from vit_jax.kernels import attention_pallas
from vit_jax.kernels.devices import named, platform
from vit_jax.models import lora
from vit_jax.models.block import AxialBlock, Block
from vit_jax.models.norm import build_norm
from vit_jax.models.positions import add_positions, build_positions

_save_only = jax.checkpoint_policies.save_only_these_names
_SMALL = ("statistics", attention_pallas.MIXTURE, attention_pallas.LOG_SUMS, "middle")
REMAT_POLICIES: dict[str, Callable[..., bool]] = {
    # Keeps what matrix products give, but no scores.
    "dots": _save_only(*_SMALL, "query", "key", "value", "hidden"),
    # Keeps what attention gave, and the sum with its input.
    "attention": _save_only(*_SMALL),
    "full": _save_only("statistics"),  # keeps the input of each block, and the means in its norms
}


def standardized(x: jax.Array, axes: int | tuple[int, ...], epsilon: float) -> jax.Array:
    """Float32 of mean 0 and variance 1 over the axes; `epsilon` is added to the variance, that of centred values."""
    centred = x.astype(jnp.float32)
    centred = centred - centred.mean(axis=axes, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(axis=axes, keepdims=True) + epsilon)


BLOCKS: dict[str | None, Callable[..., Any]] = {None: Block, "axial": AxialBlock}


class Encoder(nnx.Module):
    """L blocks as one with a leading layer axis, and the final norm.

    `remat` says what the backward pass computes again, `scan_unroll` how many blocks one iteration of the loop holds:
    one compiles fast, all copy nothing. A user-defined block (`a.block`) is a class with the constructor and call of
    `Block`; one with a `with_attention` also gives attention weights.
    """

    def __init__(self, a: Architecture, key: jax.Array):
        kind = BLOCKS.get(a.block) or resolve(a.block or "", "config.model.block")

        def build_block(key: jax.Array) -> nnx.Module:
            block = kind(a, rngs=nnx.Rngs(key))
            if a.position_layers == "every":
                block.positions = build_positions(a, rngs=nnx.Rngs(jax.random.fold_in(key, 0)))
            return block

        self.blocks: Any = jax.vmap(build_block)(jax.random.split(key, a.depth))
        self.norm = build_norm(a) if a.final_norm == "tokens" else None
        self.depth = a.depth
        self.remat = a.remat
        self.lora_scale: float | None = None
        self.scan_unroll = a.scan_unroll or 1
        self.scan_unroll_on_accelerators = a.scan_unroll_on_accelerators
        self.position_layers = a.position_layers
        self.dropout_fraction = a.dropout_fraction
        self.stochastic_depth_fraction = a.stochastic_depth_fraction
        self.has_constant_depth_form = a.stochastic_depth_form == "constant"

    def __call__(
        self,
        x_BSD: jax.Array,
        key: jax.Array | None,
        taps: Collection[str] = (),
        positions: nnx.Module | None = None,
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """Run the blocks.

        Args:
          x_BSD: embedded tokens.
          key: of dropout and stochastic depth; None outside training.
          taps: "blocks" and "attention" are returned; what is not named is not kept.
          positions: added to the input of every block, where all add the same.

        Returns:
          Tokens after the final norm, every block's output (L, B, S, D), its attention weights (L, B, T, S, S).
        """
        if "attention" in taps and not hasattr(self.blocks, "with_attention"):
            lacks = f"{type(self.blocks).__name__} has no method with_attention"
            raise ValueError(f"taps={tuple(taps)}: {lacks}. Define it, or leave 'attention' out.")
        first_fraction = self.stochastic_depth_fraction if self.has_constant_depth_form else 0.0
        fractions_L = jnp.linspace(first_fraction, self.stochastic_depth_fraction, self.depth)
        is_random = self.dropout_fraction > 0 or self.stochastic_depth_fraction > 0
        keys_L = jax.random.split(key, self.depth) if is_random and key is not None else None

        def run_block(x_BSD: jax.Array, layer: tuple) -> tuple[jax.Array, tuple]:
            block, *inputs = layer
            if self.lora_scale is not None:
                block = lora.adapted(block, self.lora_scale)
            if self.position_layers != "stem":
                x_BSD = add_positions(
                    x_BSD, block.positions if self.position_layers == "every" else positions
                )
            x_BSD, weights_BTQS = (
                block.with_attention(x_BSD, *inputs)
                if "attention" in taps
                else (block(x_BSD, *inputs), None)
            )
            x_BSD = named(x_BSD, "tokens_BSD")
            return x_BSD, (x_BSD if "blocks" in taps else None, weights_BTQS)

        if self.remat != "none":
            run_block = jax.checkpoint(
                run_block, policy=REMAT_POLICIES[self.remat], prevent_cse=False
            )
        layers = (self.blocks, fractions_L, keys_L)
        unroll = self.scan_unroll if platform() == "cpu" else self.scan_unroll_on_accelerators
        x_BSD, (blocks_LBSD, attention_LBTQS) = jax.lax.scan(
            run_block, x_BSD, layers, unroll=unroll
        )
        if attention_LBTQS is not None:  # a block may have several
            attention_LBTQS = attention_LBTQS.reshape(-1, *attention_LBTQS.shape[-4:])
        return (x_BSD if self.norm is None else self.norm(x_BSD)), blocks_LBSD, attention_LBTQS
