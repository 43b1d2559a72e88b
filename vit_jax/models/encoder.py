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
from vit_jax.models.block import Block
from vit_jax.models.norm import build_norm, identity
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


class BlockIntermediates(NamedTuple):
    """Intermediates of a block, or of all with a leading axis of L; None unless asked for."""

    output_BSD: Array | None
    attention_BTSS: Array | None  # (2, B, T, S, S) of an axial block


class Encoder(nnx.Module):
    """L blocks and the final norm.

    The blocks are equal but for their parameters. `blocks` holds them as one module whose
    parameters have a leading axis of L; the scan over it runs one block after the other, so that
    the program has the code of a block once.
    """

    def __init__(self, a: Architecture, key: Array):
        block_keys = jax.random.split(key, a.depth)
        build_one = functools.partial(build_block, a)
        self.blocks: EncoderBlock = jax.vmap(build_one)(block_keys)
        self.norm = build_norm(a) if a.final_norm == "tokens" else identity

        self.depth = a.depth
        self.has_block_positions = a.position_layers == "every"
        self.is_random = a.dropout_fraction > 0 or a.stochastic_depth_fraction > 0
        grows = a.stochastic_depth_form == "linear"
        self.first_drop_fraction = 0.0 if grows else a.stochastic_depth_fraction
        self.last_drop_fraction = a.stochastic_depth_fraction

        # Activations that the backward pass computes again, and the number of blocks in one
        # iteration of the scan: one compiles fast, all copy nothing.
        self.remat = a.remat
        self.num_frozen_blocks = 0  # first blocks that keep no activations and have no gradients
        self.unroll_on_cpu = a.scan_unroll or 1
        self.unroll_on_accelerators = a.scan_unroll_on_accelerators

    def __call__(
        self,
        x_BSD: Array,
        key: Array | None,
        intermediates: Collection[str],
        shared_positions: Positions | None,
        token_BS: Array | None = None,
    ) -> tuple[Array, BlockIntermediates]:
        """Return the tokens after the final norm, and intermediates of all blocks.

        Args:
          x_BSD: embedded tokens.
          key: random key of dropout and stochastic depth; None outside training.
          intermediates: activations to return, "blocks" and "attention"; others are not kept.
          shared_positions: added to the input of every block; None adds nothing.
          token_BS: indices of the tokens in the complete sequence, where patches are dropped.

        Raises:
          ValueError: the blocks cannot return the attention weights that are asked for.
        """
        if "attention" in intermediates:
            require_attention_weights(self.blocks, intermediates)

        def run_block(x_BSD: Array, layer: tuple) -> tuple[Array, BlockIntermediates]:
            block, drop_fraction, block_key = layer
            positions = block.positions if self.has_block_positions else shared_positions
            x_BSD = add_positions(x_BSD, positions, token_BS)
            return apply_block(block, x_BSD, drop_fraction, block_key, intermediates, token_BS)

        num_frozen = self.num_frozen_blocks
        unroll = dispatch.choose_block_unroll(self.unroll_on_cpu, self.unroll_on_accelerators)
        x_BSD, frozen_kept = self._run_frozen(run_block, x_BSD, unroll)

        layers = (self.blocks, *self._list_drop_arguments(key))
        if num_frozen:
            layers = jax.tree.map(lambda leaf: leaf[num_frozen:], layers)
        run_block = rematerialise(run_block, self.remat)
        x_BSD, kept = jax.lax.scan(run_block, x_BSD, layers, unroll=unroll)
        if num_frozen:
            kept = jax.tree.map(lambda *parts: jnp.concatenate(parts), frozen_kept, kept)
        return self.norm(x_BSD), kept

    def _run_frozen(
        self,
        run_block: Callable[..., Any],
        x_BSD: Array,
        unroll: int,
    ) -> tuple[Array, BlockIntermediates | None]:
        """Return the output and the intermediates of frozen blocks, which drop nothing.

        They read their parameters from the arrays of all blocks, since a loop over the first ones
        would copy these.
        """
        if not self.num_frozen_blocks:
            return x_BSD, None
        blocks = jax.lax.stop_gradient(self.blocks)

        def run_layer(x_BSD: Array, layer: Array) -> tuple[Array, BlockIntermediates]:
            block = jax.tree.map(
                lambda leaf: jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False),
                blocks,
            )
            return run_block(x_BSD, (block, jnp.float32(0), None))

        numbers = jnp.arange(self.num_frozen_blocks)
        x_BSD = jax.lax.stop_gradient(x_BSD)
        return jax.lax.scan(run_layer, x_BSD, numbers, unroll=unroll)

    def _list_drop_arguments(self, key: Array | None) -> tuple[Array, Array | None]:
        """Return the fraction of stochastic depth and the key of each block."""
        drop_fraction_L = jnp.linspace(
            self.first_drop_fraction, self.last_drop_fraction, self.depth
        )
        if key is None or not self.is_random:
            return drop_fraction_L, None
        return drop_fraction_L, jax.random.split(key, self.depth)


def rematerialise(run_block: Callable[..., Any], policy: str) -> Callable[..., Any]:
    """Return the function, whose backward pass computes again what `policy` does not keep."""
    if policy == "none":
        return run_block
    return jax.checkpoint(run_block, policy=REMAT_POLICIES[policy], prevent_cse=False)


def apply_block(
    block: EncoderBlock,
    x_BSD: Array,
    drop_fraction: Array,
    key: Array | None,
    intermediates: Collection[str],
    token_BS: Array | None,
) -> tuple[Array, BlockIntermediates]:
    """Return the output of a block, and the intermediates that are asked for."""
    attention_BTSS = None
    if "attention" in intermediates:
        x_BSD, attention_BTSS = block.with_attention(x_BSD, drop_fraction, key)
    elif token_BS is not None:
        assert isinstance(block, Block), "config.check rejects patch dropout in other blocks"
        attend = functools.partial(block.attention, token_BS=token_BS)
        x_BSD = block(x_BSD, drop_fraction, key, attend)
    else:
        x_BSD = block(x_BSD, drop_fraction, key)
    x_BSD = constrain(x_BSD, "tokens_BSD")

    output_BSD = x_BSD if "blocks" in intermediates else None
    return x_BSD, BlockIntermediates(output_BSD, attention_BTSS)


def build_block(a: Architecture, key: Array) -> EncoderBlock:
    """Return one block, with positions that are added to its input if every block has some."""
    block_class = find_block_class(a)
    block: EncoderBlock = block_class(a, rngs=nnx.Rngs(key))
    if a.position_layers == "every":
        position_key = jax.random.fold_in(key, 0)
        block.positions = build_positions(a, rngs=nnx.Rngs(position_key))
    return block


def find_block_class(a: Architecture) -> Callable[..., Any]:
    """Return the class of the blocks: built in, or the class that `a.block` refers to."""
    if a.block is None:
        return Block
    if a.block == "axial":
        from vit_jax.models.axial import AxialBlock

        return AxialBlock

    from vit_jax.imports.references import resolve

    block_class: Callable[..., Any] = resolve(a.block, "config.model.block")
    return block_class


def require_encoder(a: Architecture, trained: str, *, is_standard: bool) -> None:
    """Raise ValueError unless a network has this encoder, of which the last blocks can be trained.

    Without `is_standard`, `a` does not describe the network.
    """
    if is_standard and a.has_transformer and a.network is None:
        return
    rule = f"must be 'all' or 'head' for {a.name}, which has no built-in encoder of blocks"
    raise ValueError(
        f"config.optimizer.trained={trained!r}: {rule}. Use optimizer.frozen to choose what is trained."
    )


def require_attention_weights(block: EncoderBlock, intermediates: Collection[str]) -> None:
    """Raise ValueError for a user-defined block that does not return its attention weights."""
    if hasattr(block, "with_attention"):
        return
    rule = f"{type(block).__name__} has no method with_attention"
    raise ValueError(
        f"intermediates={tuple(intermediates)}: {rule}. Define it, or remove 'attention'."
    )
