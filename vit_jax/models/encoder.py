"""The encoder: L blocks with stacked parameters, which a scan runs in turn, and the final norm.

Legend: B batch, S sequence length, D width, T heads, L depth.
"""

import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from vit_jax.config.architecture import Architecture
from vit_jax.kernels import ATTENTION_OUTPUT, LOG_SUMS, MIDDLE, STATISTICS, dispatch
from vit_jax.kernels.devices import constrain
from vit_jax.models.block import AxialBlock, Block
from vit_jax.models.norm import build_norm
from vit_jax.models.positions import Positions, add_positions, build_positions

_save_only = jax.checkpoint_policies.save_only_these_names
_SMALL = (STATISTICS, ATTENTION_OUTPUT, LOG_SUMS, MIDDLE)
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

    drop_fraction: Array  # probability of stochastic depth
    key: Array | None


class EncoderOutput(NamedTuple):
    """Tokens after the final norm, and intermediates; None for those that were not asked for."""

    tokens_BSD: Array
    blocks_LBSD: Array | None  # outputs of the blocks
    attention_LBTSS: Array | None  # attention weights of the blocks


class EncoderBlock(Protocol):
    """A block as the encoder calls it: built in, or a user's class that `a.block` refers to.

    The arguments are those of `Block`. `with_attention` is for models that return attention
    weights; `positions` are set by `build_block`.
    """

    positions: Positions

    def __call__(self, x_BSD: Array, drop_fraction: Array, key: Array | None) -> Array:
        """Return the output (B, S, D)."""

    def with_attention(
        self, x_BSD: Array, drop_fraction: Array, key: Array | None
    ) -> tuple[Array, Array]:
        """Return the output and the attention weights (B, T, S, S)."""


class Encoder(nnx.Module):
    """L blocks and the final norm.

    The blocks are equal but for their parameters. `blocks` holds them as one module whose
    parameters have a leading axis of L; the scan over it runs one block after the other, so that
    the program has the code of a block once.

    `remat` chooses what the backward pass computes again, `scan_unroll` the number of blocks in one
    iteration of the scan: one compiles fast, all copy nothing.
    """

    def __init__(
        self,
        a: Architecture,
        key: Array,
        *,
        has_block_positions: bool,
    ):
        block_keys = jax.random.split(key, a.depth)
        build_one = functools.partial(build_block, a, has_positions=has_block_positions)
        self.blocks: EncoderBlock = jax.vmap(build_one)(block_keys)
        self.norm = build_norm(a) if a.final_norm == "tokens" else None
        self.depth = a.depth
        self.remat = a.remat
        self.lora_scale: float | None = None
        self.scan_unroll = a.scan_unroll or 1
        self.scan_unroll_on_accelerators = a.scan_unroll_on_accelerators
        self.has_block_positions = has_block_positions
        self.dropout_fraction = a.dropout_fraction
        self.first_drop_fraction = 0.0
        self.last_drop_fraction = a.stochastic_depth_fraction
        if a.stochastic_depth_form == "constant":
            self.first_drop_fraction = self.last_drop_fraction

    def __call__(
        self,
        x_BSD: Array,
        key: Array | None,
        intermediates: Collection[str],
        shared_positions: Positions | None,
    ) -> EncoderOutput:
        """Run the blocks and the final norm.

        Args:
          x_BSD: embedded tokens.
          key: random key of dropout and stochastic depth; None outside training.
          intermediates: activations to return, "blocks" and "attention"; others are not kept.
          shared_positions: added to the input of every block, where blocks have no positions.

        Raises:
          ValueError: the blocks cannot return the attention weights that are asked for.
        """
        keeps_outputs = "blocks" in intermediates
        keeps_attention = "attention" in intermediates
        if keeps_attention:
            require_attention_weights(self.blocks, intermediates)

        def run_block(x_BSD: Array, layer: tuple[EncoderBlock, LayerInputs]) -> tuple[Array, tuple]:
            block, inputs = layer
            block = self._adapt(block)
            positions = block.positions if self.has_block_positions else shared_positions
            x_BSD = add_positions(x_BSD, positions)
            x_BSD, weights_BTSS = apply_block(block, x_BSD, inputs, keeps_attention)
            output_BSD = x_BSD if keeps_outputs else None
            return x_BSD, (output_BSD, weights_BTSS)

        if self.remat != "none":
            policy = REMAT_POLICIES[self.remat]
            run_block = jax.checkpoint(run_block, policy=policy, prevent_cse=False)

        layers = (self.blocks, self._build_layer_inputs(key))
        unroll = dispatch.choose_block_unroll(
            self.scan_unroll,
            self.scan_unroll_on_accelerators,
        )
        x_BSD, kept = jax.lax.scan(run_block, x_BSD, layers, unroll=unroll)

        outputs_LBSD, weights_LBTSS = kept
        if weights_LBTSS is not None:  # axial blocks have (L, 2, B, T, S, S)
            shape_BTSS = weights_LBTSS.shape[-4:]
            weights_LBTSS = weights_LBTSS.reshape(-1, *shape_BTSS)
        if self.norm is not None:
            x_BSD = self.norm(x_BSD)
        return EncoderOutput(x_BSD, outputs_LBSD, weights_LBTSS)

    def _build_layer_inputs(self, key: Array | None) -> LayerInputs:
        """Return for each block its fraction of stochastic depth and its key.

        Fractions grow linearly with depth, or are constant.
        """
        fractions_L = jnp.linspace(self.first_drop_fraction, self.last_drop_fraction, self.depth)
        is_random = self.dropout_fraction > 0 or self.last_drop_fraction > 0
        if key is None or not is_random:
            return LayerInputs(fractions_L, None)
        keys_L = jax.random.split(key, self.depth)
        return LayerInputs(fractions_L, keys_L)

    def _adapt(self, block: EncoderBlock) -> EncoderBlock:
        """Return a block with the LoRA factors added to its kernels, if there are any."""
        if self.lora_scale is None:
            return block

        from vit_jax.models.lora import adapt_block

        return adapt_block(block, self.lora_scale)


def build_block(a: Architecture, key: Array, *, has_positions: bool) -> EncoderBlock:
    """Return one block, with positions that are added to its input if `has_positions`."""
    block_class = find_block_class(a)
    block: EncoderBlock = block_class(a, rngs=nnx.Rngs(key))
    if has_positions:
        position_key = jax.random.fold_in(key, 0)
        block.positions = build_positions(a, rngs=nnx.Rngs(position_key))
    return block


def apply_block(
    block: EncoderBlock,
    x_BSD: Array,
    inputs: LayerInputs,
    keeps_attention: bool,
) -> tuple[Array, Array | None]:
    """Return the output of a block, and its attention weights or None."""
    weights_BTSS = None
    if keeps_attention:
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


def require_attention_weights(block: EncoderBlock, intermediates: Collection[str]) -> None:
    """Raise ValueError for a user-defined block that does not return its attention weights."""
    if hasattr(block, "with_attention"):
        return
    rule = f"{type(block).__name__} has no method with_attention"
    raise ValueError(
        f"intermediates={tuple(intermediates)}: {rule}. Define it, or remove 'attention'."
    )
