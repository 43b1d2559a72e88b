"""The encoder: L blocks with stacked parameters, which a scan runs in turn, and the final norm.

Legend: B batch, S sequence length, D width, T heads, L depth.
"""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.config.architecture import Architecture
from vit_jax.kernels import ATTENTION_OUTPUT, LOG_SUMS, STATISTICS, dispatch
from vit_jax.kernels.devices import constrain
from vit_jax.models.block import AxialBlock, Block
from vit_jax.models.norm import build_norm
from vit_jax.models.positions import add_positions, build_positions

_save_only = jax.checkpoint_policies.save_only_these_names
_SMALL = (STATISTICS, ATTENTION_OUTPUT, LOG_SUMS, "middle")
REMAT_POLICIES: dict[str, Callable[..., bool]] = {
    # Keep outputs of matrix products, but no scores.
    "dots": _save_only(*_SMALL, "query", "key", "value", "hidden"),
    # Keep attention outputs and the residual sums after attention.
    "attention": _save_only(*_SMALL),
    # Keep the input of each block, and the means of its norms.
    "full": _save_only(STATISTICS),
}
BLOCKS: dict[str | None, Callable[..., Any]] = {None: Block, "axial": AxialBlock}


class LayerInputs(NamedTuple):
    """Inputs of a block beside the tokens; of all blocks with a leading axis of L."""

    drop_fraction: jax.Array  # of stochastic depth
    key: jax.Array | None


class Encoder(nnx.Module):
    """L blocks and the final norm.

    `blocks` is one block, each of whose parameters has a leading axis of L. `remat` chooses what
    the backward pass computes again, `scan_unroll` the number of blocks in one iteration of the
    loop: one compiles fast, all copy nothing. A user-defined block (`a.block`) is a class with the
    constructor and call of `Block`; one with a `with_attention` also gives attention weights.
    """

    def __init__(self, a: Architecture, key: jax.Array):
        block_class = find_block_class(a)

        def build_block(key: jax.Array) -> nnx.Module:
            block = block_class(a, rngs=nnx.Rngs(key))
            if a.position_layers == "every":
                position_key = jax.random.fold_in(key, 0)
                block.positions = build_positions(a, rngs=nnx.Rngs(position_key))
            return block

        block_keys = jax.random.split(key, a.depth)
        self.blocks: Any = jax.vmap(build_block)(block_keys)
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
        intermediates: Collection[str] = (),
        positions: nnx.Module | None = None,
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """Run the blocks.

        Args:
          x_BSD: embedded tokens.
          key: of dropout and stochastic depth; None outside training.
          intermediates: activations to return, "blocks" and "attention"; others are not kept.
          positions: added to the input of every block, where all add the same.

        Returns:
          Tokens after the final norm, every block's output (L, B, S, D), its attention weights (L,
          B, T, S, S).
        """
        needs_attention = "attention" in intermediates
        if needs_attention and not hasattr(self.blocks, "with_attention"):
            rule = f"{type(self.blocks).__name__} has no method with_attention"
            raise ValueError(
                f"intermediates={tuple(intermediates)}: {rule}. Define it, or leave 'attention' out."
            )

        def run_block(x_BSD: jax.Array, layer: tuple[Any, LayerInputs]) -> tuple[jax.Array, tuple]:
            block, inputs = layer
            x_BSD, weights_BTSS = self._run_block(
                block,
                x_BSD,
                inputs,
                positions,
                needs_attention=needs_attention,
            )
            if "blocks" in intermediates:
                return x_BSD, (x_BSD, weights_BTSS)
            return x_BSD, (None, weights_BTSS)

        if self.remat != "none":
            policy = REMAT_POLICIES[self.remat]
            run_block = jax.checkpoint(run_block, policy=policy, prevent_cse=False)

        layers = (self.blocks, self._build_layer_inputs(key))
        unroll = dispatch.choose_block_unroll(
            self.scan_unroll,
            self.scan_unroll_on_accelerators,
        )
        x_BSD, kept = jax.lax.scan(run_block, x_BSD, layers, unroll=unroll)

        blocks_LBSD, attention_LBTSS = kept
        if attention_LBTSS is not None:  # a block may have several
            shape_BTSS = attention_LBTSS.shape[-4:]
            attention_LBTSS = attention_LBTSS.reshape(-1, *shape_BTSS)
        if self.norm is not None:
            x_BSD = self.norm(x_BSD)
        return x_BSD, blocks_LBSD, attention_LBTSS

    def _build_layer_inputs(self, key: jax.Array | None) -> LayerInputs:
        """Return for each block its fraction of stochastic depth and its key.

        Fractions grow linearly with depth, or are constant.
        """
        last_fraction = self.stochastic_depth_fraction
        first_fraction = 0.0
        if self.has_constant_depth_form:
            first_fraction = last_fraction
        fractions_L = jnp.linspace(first_fraction, last_fraction, self.depth)

        is_random = self.dropout_fraction > 0 or self.stochastic_depth_fraction > 0
        if key is None or not is_random:
            return LayerInputs(fractions_L, None)
        keys_L = jax.random.split(key, self.depth)
        return LayerInputs(fractions_L, keys_L)

    def _run_block(
        self,
        block: Any,
        x_BSD: jax.Array,
        inputs: LayerInputs,
        shared_positions: nnx.Module | None,
        *,
        needs_attention: bool,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Return a block's output and its attention weights, or None."""
        if self.lora_scale is not None:
            from vit_jax.models.lora import adapt_block

            block = adapt_block(block, self.lora_scale)

        if self.position_layers == "every":
            x_BSD = add_positions(x_BSD, block.positions)
        elif self.position_layers == "shared":
            x_BSD = add_positions(x_BSD, shared_positions)

        weights_BTSS = None
        if needs_attention:
            x_BSD, weights_BTSS = block.with_attention(x_BSD, *inputs)
        else:
            x_BSD = block(x_BSD, *inputs)
        return constrain(x_BSD, "tokens_BSD"), weights_BTSS


def find_block_class(a: Architecture) -> Callable[..., Any]:
    """Return the class of the blocks: built in, or the class that `a.block` refers to."""
    if a.block in BLOCKS:
        return BLOCKS[a.block]

    from vit_jax.imports.references import resolve

    block_class: Callable[..., Any] = resolve(a.block or "", "config.model.block")
    return block_class
