"""The MLP of a block: two dense layers around a GELU, or gated (SwiGLU; Shazeer, 2020).

Legend: B batch, S sequence length, R = B S, D width, M MLP dimension.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from vit_jax.config.architecture import Architecture
from vit_jax.kernels import REDUCED, dispatch
from vit_jax.kernels.devices import constrain
from vit_jax.models.attention import XAVIER_UNIFORM, Linear
from vit_jax.models.dropout import Site, dropout
from vit_jax.models.norm import build_norm

_KEEP_REDUCED = jax.checkpoint_policies.save_only_these_names(REDUCED)
NEARLY_ZERO = nnx.initializers.normal(stddev=1e-6)


def quick_gelu(x: Array, is_recomputed: bool = False) -> Array:
    """Return the approximation of GELU that CLIP was trained with."""
    del is_recomputed  # XLA chooses what the backward pass keeps
    return x * jax.nn.sigmoid(1.702 * x)


GELUS: dict[str, Callable[..., Array]] = {
    "tanh": functools.partial(dispatch.gelu, approximate=True),  # released JAX code
    "exact": functools.partial(dispatch.gelu, approximate=False),  # PyTorch ports
    "quick": quick_gelu,
}


class Mlp(nnx.Module):
    """Dense layers to M hidden units and back, dropout after each (ViT, App. B.1).

    Without a gate the hidden units are GELU(expand(x)), in a form of `GELUS`; with one they are
    silu(gate(x)) * expand(x). A `norm` follows them. With `is_block_recomputed` the backward pass
    computes the complete block again.
    """

    def __init__(
        self,
        width: int,
        mlp_dim: int,
        *,
        form: str,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        is_gated: bool = False,
        norm: Callable[[Array], Array] | None = None,
        use_bias: bool = True,
        dropout_fraction: float = 0.0,
        is_block_recomputed: bool = False,
    ):
        dense = functools.partial(
            Linear,
            kernel_init=XAVIER_UNIFORM,
            bias_init=NEARLY_ZERO,
            use_bias=use_bias,
            dtype=dtype,
            dot_general=dispatch.dot_general,
            rngs=rngs,
        )
        self.expand = dense(width, mlp_dim)
        self.contract = dense(mlp_dim, width)
        self.gate = dense(width, mlp_dim) if is_gated else None
        self.norm = norm
        self.form = form
        self.dropout_fraction = dropout_fraction
        self.is_block_recomputed = is_block_recomputed

    @property
    def recomputes_activation(self) -> bool:
        """True if the backward pass computes activated units again, and only hidden ones are kept.

        With LoRA it needs them for the gradient of one thin factor.
        """
        return self.contract.lora_scale is not None

    @jax.named_scope("mlp")
    def __call__(
        self,
        x: Array,
        key: Array | None = None,
        output_scale: Array | None = None,
    ) -> Array:
        """Return an array of the shape of `x`, (B, S, D) or (R, D), times `output_scale` (D,).

        Without a key there is no dropout.
        """
        hidden = self._project_hidden(self.expand, x)
        gate = None
        if self.gate is not None:
            gate = self._project_hidden(self.gate, x)

        contract: Callable[..., Array] = functools.partial(
            self._contract_hidden,
            key=key,
            output_scale=output_scale,
        )
        if self.recomputes_activation:
            contract = dispatch.recompute(
                contract, _KEEP_REDUCED, is_nested=self.is_block_recomputed
            )
        output = contract(hidden, gate)
        return dropout(output, self.dropout_fraction, key, Site.MLP_OUTPUT)

    def _contract_hidden(
        self,
        hidden: Array,
        gate: Array | None,
        key: Array | None,
        output_scale: Array | None,
    ) -> Array:
        """Return the product of activated hidden units with the second kernel, as `__call__` does."""
        if gate is None:
            hidden = GELUS[self.form](hidden, is_recomputed=self.recomputes_activation)
        else:
            hidden = jax.nn.silu(gate) * hidden
        if self.norm is not None:
            hidden = self.norm(hidden)

        hidden = dropout(hidden, self.dropout_fraction, key, Site.MLP_HIDDEN)
        return self.contract(hidden, output_scale=output_scale)

    def _project_hidden(self, layer: Linear, x: Array) -> Array:
        """Return a layer's hidden units, with a sharding and a name for rematerialisation."""
        dimensions = {3: "hidden_BSM", 2: "hidden_RM"}[x.ndim]
        hidden = constrain(layer(x), dimensions)
        return checkpoint_name(hidden, "hidden")


def build_mlp(a: Architecture, *, rngs: nnx.Rngs) -> Mlp:
    """Return the MLP of a block."""
    norm = None
    if a.mlp == "swiglu_norm":
        norm = build_norm(a, a.mlp_dim)
    return Mlp(
        a.width,
        a.mlp_dim,
        form=a.gelu,
        dtype=jnp.dtype(a.compute_dtype),
        rngs=rngs,
        is_gated=a.mlp != "gelu",
        norm=norm,
        use_bias=a.linear_bias,
        dropout_fraction=a.dropout_fraction,
        is_block_recomputed=a.remat != "none",
    )
