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

from vit_jax.arrays import ABSENT
from vit_jax.config.architecture import Architecture
from vit_jax.kernels import ATTENTION_OUTPUT, LOG_SUMS, MIDDLE, REDUCED, STATISTICS, dispatch
from vit_jax.kernels.devices import constrain
from vit_jax.models.block import Block
from vit_jax.models.norm import build_norm, identity
from vit_jax.models.positions import Positions, add_positions, build_positions

# Activations that the forward pass keeps for the backward pass, which computes all others again.
# The input of each block is kept in any case. Layers name their activations by `checkpoint_name`.
# MIDDLE is the sum after the attention branch; LOG_SUMS are of the softmax, STATISTICS of norms,
# REDUCED of LoRA.
_keep_only = jax.checkpoint_policies.save_only_these_names
_ATTENTION_RESULTS = (ATTENTION_OUTPUT, LOG_SUMS, MIDDLE)
_SMALL_RESULTS = (STATISTICS, REDUCED)
REMAT_POLICIES: dict[str, Callable[..., bool]] = {
    # Outputs of all layers (products with parameters) and of attention.
    "dots": _keep_only(*_SMALL_RESULTS, *_ATTENTION_RESULTS, "query", "key", "value", "hidden"),
    # Outputs of attention only, which cost the most to compute again.
    "attention": _keep_only(*_SMALL_RESULTS, *_ATTENTION_RESULTS),
    # Statistics of norms only: nearly everything is computed again.
    "full": _keep_only(STATISTICS),
}


class EncoderBlock(Protocol):
    """A block as the encoder calls it: built in, or a user's class that `a.block` refers to.

    The arguments are those of `Block`. A user's class may lack `token_BS`, which is passed only to
    built-in blocks (`apply_block`), and `with_attention`, which is for models that return attention
    weights.
    """

    positions: Positions  # only with position_layers="every", set by `build_block`

    def __call__(
        self,
        x_BSD: Array,
        drop_fraction: Array,
        key: Array | None,
        token_BS: Array | None = None,
    ) -> Array:
        """Return the output (B, S, D)."""

    def with_attention(
        self,
        x_BSD: Array,
        drop_fraction: Array,
        key: Array | None,
        token_BS: Array | None = None,
    ) -> tuple[Array, Array]:
        """Return the output and the attention weights (B, T, S, S), or (2, B, T, S, S) if axial."""


class Layer(NamedTuple):
    """A block, and what it needs to drop values in one call.

    Attributes:
      block: the block.
      drop_fraction: scalar, fraction of the examples that skip a branch (stochastic depth).
      key: random key of dropout and stochastic depth; None outside training.
    """

    block: EncoderBlock
    drop_fraction: Array
    key: Array | None


StackedLayers = Layer
"""All layers: every array has a leading axis of L, which a scan takes apart."""


class BlockActivations(NamedTuple):
    """Activations of a block; a scan stacks those of all, with a leading axis of L.

    They have the types of arrays, but are `ABSENT` unless they are asked for: a pytree without
    leaves, which a scan leaves as it is.

    Attributes:
      output: (B, S, D).
      attention: weights (B, T, S, S), or (2, B, T, S, S) of an axial block.
    """

    output: Array
    attention: Array


RunLayer = Callable[[Array, Layer], tuple[Array, BlockActivations]]


class Encoder(nnx.Module):
    """L blocks and the final norm.

    The blocks are equal but for their parameters. `blocks` holds them as one module whose
    parameters have a leading axis of L; the scan over it runs one block after the other, so that
    the program has the code of a block once.
    """

    def __init__(self, a: Architecture, key: Array):
        block_keys = jax.random.split(key, a.depth)
        build_one = functools.partial(build_block, a)
        # One module, whose parameters are those of all blocks.
        self.blocks: EncoderBlock = jax.vmap(build_one)(block_keys)
        self.norm = build_norm(a) if a.final_norm == "tokens" else identity

        self.depth = a.depth
        self.has_positions_in_blocks = a.position_layers == "every"
        self.is_random = a.dropout_fraction > 0 or a.stochastic_depth_fraction > 0
        self.last_drop_fraction = a.stochastic_depth_fraction
        self.first_drop_fraction = a.stochastic_depth_fraction
        if a.stochastic_depth_form == "linear":
            self.first_drop_fraction = 0.0

        self.remat = a.remat  # "none", or a policy of `REMAT_POLICIES`
        # Blocks in one iteration of the scan. One compiles fastest; with all of them, the scan
        # copies no activations from one iteration to the next.
        self.unroll_on_cpu = a.scan_unroll_on_cpu
        self.unroll_on_accelerators = a.scan_unroll_on_accelerators

    def __call__(
        self,
        x_BSD: Array,
        key: Array | None,
        *,
        intermediates: Collection[str],
        shared_positions: Positions | None = None,
        token_BS: Array | None = None,
        num_trained: int | None = None,
    ) -> tuple[Array, BlockActivations]:
        """Return the tokens after the final norm, and activations of all blocks.

        Args:
          x_BSD: embedded tokens.
          key: random key of dropout and stochastic depth; None outside training.
          intermediates: names of the activations to return: "blocks", "attention". Others are not
            for the encoder.
          shared_positions: added to the input of every block, unless each has its own; None: the
            tokens have theirs already.
          token_BS: indices of the tokens in the complete sequence, if patches have been dropped.
          num_trained: number of blocks at the end that have gradients; None: all.

        Raises:
          ValueError: the blocks cannot return the attention weights that are asked for.
        """
        if "attention" in intermediates:
            require_attention_weights(self.blocks, intermediates)

        def run_layer(x_BSD: Array, layer: Layer) -> tuple[Array, BlockActivations]:
            positions = shared_positions
            if self.has_positions_in_blocks:
                positions = layer.block.positions
            x_BSD = add_positions(x_BSD, positions, token_BS)
            return apply_block(layer, x_BSD, token_BS, intermediates)

        layers = self._make_layers(key)
        if num_trained is None or num_trained == self.depth:
            x_BSD, activations = self._scan(run_layer, x_BSD, layers)
        else:
            # To slice stacked parameters is to copy them. The trained blocks are few, so these are
            # sliced; the frozen ones are read from the stack one at a time.
            num_frozen = self.depth - num_trained
            x_BSD, first_activations = self._scan_frozen(run_layer, x_BSD, num_frozen)
            last_layers = jax.tree.map(lambda leaf_L: leaf_L[num_frozen:], layers)
            x_BSD, last_activations = self._scan(run_layer, x_BSD, last_layers)
            activations = jax.tree.map(join_layers, first_activations, last_activations)
        return self.norm(x_BSD), activations

    def _scan(
        self,
        run_layer: RunLayer,
        x_BSD: Array,
        layers: StackedLayers,
    ) -> tuple[Array, BlockActivations]:
        """Run layers one after the other; return the output and their stacked activations."""
        run_layer = rematerialise(run_layer, self.remat)
        return dispatch.scan_layers(run_layer, x_BSD, layers, self._choose_unroll())

    def _scan_frozen(
        self,
        run_layer: RunLayer,
        x_BSD: Array,
        num_frozen: int,
    ) -> tuple[Array, BlockActivations]:
        """Run the first blocks without gradients and dropout; return what `_scan` returns.

        The scan is over the numbers of the blocks.
        """
        blocks = jax.lax.stop_gradient(self.blocks)
        x_BSD = jax.lax.stop_gradient(x_BSD)

        def run_frozen_layer(x_BSD: Array, number: Array) -> tuple[Array, BlockActivations]:
            block = jax.tree.map(
                lambda leaf_L: jax.lax.dynamic_index_in_dim(leaf_L, number, keepdims=False),
                blocks,
            )
            return run_layer(x_BSD, Layer(block, drop_fraction=jnp.float32(0), key=None))

        numbers = jnp.arange(num_frozen)
        return jax.lax.scan(run_frozen_layer, x_BSD, numbers, unroll=self._choose_unroll())

    def _choose_unroll(self) -> int:
        """Return the number of blocks in one iteration of a scan."""
        return dispatch.choose_block_unroll(self.unroll_on_cpu, self.unroll_on_accelerators)

    def _make_layers(self, key: Array | None) -> StackedLayers:
        """Return all layers for one call: the blocks with their fractions and keys."""
        drop_fraction_L = jnp.linspace(
            self.first_drop_fraction, self.last_drop_fraction, self.depth
        )
        key_L = None
        if key is not None and self.is_random:
            key_L = jax.random.split(key, self.depth)
        return Layer(self.blocks, drop_fraction_L, key_L)


def rematerialise(run_layer: RunLayer, policy: str) -> RunLayer:
    """Return the function, whose backward pass computes again what `policy` does not keep."""
    if policy == "none":
        return run_layer
    return jax.checkpoint(run_layer, policy=REMAT_POLICIES[policy], prevent_cse=False)


def join_layers(first_L: Array, last_L: Array) -> Array:
    """Return the arrays of the first and of the last layers as one."""
    return jnp.concatenate([first_L, last_L])


def apply_block(
    layer: Layer,
    x_BSD: Array,
    token_BS: Array | None,
    intermediates: Collection[str],
) -> tuple[Array, BlockActivations]:
    """Return the output of a block, and the activations with the names `intermediates`."""
    block, drop_fraction, key = layer
    options = {}
    if token_BS is not None:  # only in built-in blocks: `config.check` rejects the others
        options["token_BS"] = token_BS

    attention = ABSENT
    if "attention" in intermediates:
        x_BSD, attention = block.with_attention(x_BSD, drop_fraction, key, **options)
    else:
        x_BSD = block(x_BSD, drop_fraction, key, **options)
    x_BSD = constrain(x_BSD, "tokens_BSD")

    output = x_BSD if "blocks" in intermediates else ABSENT
    return x_BSD, BlockActivations(output, attention)


def build_block(a: Architecture, key: Array) -> EncoderBlock:
    """Return one block, with its own positions for position_layers="every"."""
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


def require_attention_weights(block: EncoderBlock, intermediates: Collection[str]) -> None:
    """Raise ValueError for a user-defined block that does not return its attention weights."""
    if hasattr(block, "with_attention"):
        return
    rule = f"{type(block).__name__} has no method with_attention"
    raise ValueError(
        f"intermediates={tuple(intermediates)}: {rule}. Define it, or remove 'attention'."
    )
