"""The norms of gradients, updates and parameters among the metrics of a training step."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from vit_jax.config import RunConfig, RunSteps
from vit_jax.kernels import dispatch

_SMALL_SIZE = 2**16
"""Values of an array whose squares one kernel adds up with those of other small arrays."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepNorms:
    """How a step computes its norms: in the form that costs the least time on its devices.

    Attributes:
      clips_gradients: the optimizer clips by the norm of the gradients.
      logged_every: steps from one that is logged to the next. Only these measure the norm of their
        update; None: all steps do.
      last_step: number of the last step, which is logged, too.
      sums_rows_first: norms are sums of `sum_squares`.
    """

    clips_gradients: bool
    logged_every: int | None
    last_step: int
    sums_rows_first: bool

    def measure(
        self,
        step: jax.Array,
        gradients: optax.Updates,
        updates: optax.Updates,
        model: nnx.Module,
    ) -> dict[str, jax.Array]:
        """Return the norms after a step by name; `model` is the updated one.

        Gradients and updates are those of trained parameters: the others are zeros.
        """
        return {
            "gradient_norm": self._measure_gradients(gradients),
            "update_norm": self._measure_update(updates, step),
            # Fused with the update of the parameters, this norm would make XLA copy them on GPUs.
            "parameter_norm": self.compute(dispatch.stop_fusion(model)),
        }

    def compute(self, tree: optax.Updates) -> jax.Array:
        """Return the norm of all values of a tree."""
        if not self.sums_rows_first:
            return optax.tree.norm(tree)
        return jnp.sqrt(sum_squares(tree))

    def _measure_gradients(self, gradients: optax.Updates) -> jax.Array:
        """Return the norm of the gradients.

        Clipping computes `optax.tree.norm` of them, too. XLA computes equal expressions once.
        """
        if self.clips_gradients:
            return optax.tree.norm(gradients)
        return self.compute(gradients)

    def _measure_update(self, updates: optax.Updates, step: jax.Array) -> jax.Array:
        """Return the norm of the updates; NaN after steps that do not measure it.

        XLA for TPUs fuses the other norms with the update of the parameters. This one takes two
        more passes over them.
        """
        if self.logged_every is None:
            return self.compute(updates)
        is_logged = (step % self.logged_every == 0) | (step == self.last_step)
        return jax.lax.cond(is_logged, self.compute, _skip_norm, updates)


def choose_norms(config: RunConfig, steps: RunSteps, platform: str) -> StepNorms:
    """Return how the step of a run computes its norms on the devices of a platform."""
    # Measuring only some updates needs a `lax.cond`, for which the host waits on GPUs.
    measures_all = steps.log_every == 1 or platform == "gpu"
    # Then no sum over parameters needs a collective.
    holds_all_parameters = (
        config.sharding.parameters == "replicated" and config.sharding.num_model_shards == 1
    )
    return StepNorms(
        clips_gradients=config.optimizer.clip_global_norm is not None,
        logged_every=None if measures_all else steps.log_every,
        last_step=steps.total,
        sums_rows_first=platform == "gpu" and holds_all_parameters,
    )


def sum_squares(tree: optax.Updates) -> jax.Array:
    """Return the sum of the squares of all values: of each row first, then of all rows.

    XLA for GPUs joins the update of a parameter and the sum over it in one kernel. With a sum for
    each row this kernel takes as long as memory needs, with one for the array it takes longer: 255
    and 455 microseconds on an H100 for 28 million parameters, their moments and gradients. The
    barrier keeps XLA from adding up the rows in the same kernel. Small arrays, whose kernels take
    the time of a launch, are added up together.
    """
    small_squares = []
    sums = []
    for leaf in jax.tree.leaves(tree):
        squares = jnp.square(leaf.astype(jnp.float32))
        if squares.size <= _SMALL_SIZE:
            small_squares.append(squares.ravel())
        else:
            sums.append(squares.sum(-1).ravel())
    sums = jax.lax.optimization_barrier(sums)
    # One sum over all arrays takes three kernels. Without the maximum XLA makes it one of each.
    joined = jnp.concatenate([*small_squares, *sums])
    return jnp.maximum(joined, 0.0).sum()


def _skip_norm(updates: optax.Updates) -> jax.Array:
    """Return NaN in the place of the norm."""
    del updates
    return jnp.float32(jnp.nan)
