"""The dtype of first moments.

Gradients, updates and parameters are float32. A first moment may be stored in bfloat16
(`config.optimizer.first_moment_dtype`), which saves memory. Every optimiser then follows one rule:
the moment is rounded when it is stored, and the updates that leave the optimiser have the dtype of
the gradients.

* Adam and optimisers of optax or of the user convert dtypes themselves. `allow_mixed_dtypes` allows
  that for the time of their update and casts the result.
* SGD: optax would multiply the moment in its own dtype. `add_momentum` multiplies in float32.
"""

import jax
import optax

from vit_jax.config.schema import OptimizerConfig


def allow_mixed_dtypes(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return `inner` with implicit promotion inside and updates of the gradients' dtype."""

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, optax.OptState]:
        with jax.numpy_dtype_promotion("standard"):
            steps, state = inner.update(updates, state, params)
        steps = jax.tree.map(lambda step, update: step.astype(update.dtype), steps, updates)
        return steps, state

    return optax.GradientTransformation(inner.init, update)


def add_momentum(config: OptimizerConfig) -> optax.GradientTransformation:
    """Return `m = momentum * m + g`, in float32, with `m` rounded to the dtype of first moments."""
    if not config.momentum:
        return optax.identity()
    momentum = optax.trace(config.momentum, accumulator_dtype=config.first_moment_dtype)

    def update(
        updates: optax.Updates,
        state: optax.TraceState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, optax.OptState]:
        # In bfloat16 the factor 0.9 would be 0.8984.
        float32_state = optax.TraceState(optax.tree.cast(state.trace, "float32"))
        return momentum.update(updates, float32_state, params)

    return optax.GradientTransformation(momentum.init, update)
