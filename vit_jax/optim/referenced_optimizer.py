"""Optimisers of optax or of the user, which a config names by a reference such as "optax:lion"."""

import contextlib
from collections.abc import Iterator

import optax
import optax.contrib

from vit_jax.config.schema import OptimizerConfig
from vit_jax.imports.references import explain_call, resolve
from vit_jax.optim.per_layer import adapt_optimizer, describe_matrices
from vit_jax.optim.schedules import Schedule
from vit_jax.optim.zero_start import lift_zeros, scales_by_norm
from vit_jax.text.printable import first_line

_FIELD = "config.optimizer.name"


def build_referenced_optimizer(
    config: OptimizerConfig, schedule: Schedule
) -> optax.GradientTransformation:
    """Build the optimiser that `config.name` refers to, adapted to a network.

    It is called with `learning_rate=schedule` and `config.arguments`, and sees parameters by name,
    those of each layer apart (`per_layer`). If its steps are proportional to the norm of the
    parameter, it sees stand-ins of parameters close to zero (`optim.zero_start`).

    Raises:
      ValueError: the reference cannot be called with the schedule and the arguments, or gives no
        optimiser.
    """
    arguments = dict(config.arguments)
    described = f"config.optimizer.arguments={arguments}"
    with explain_call(f"{_FIELD}={config.name!r}", f"learning_rate and {described}"):
        build = resolve(config.name, _FIELD)
        if build is optax.contrib.muon:
            arguments = {"muon_weight_dimension_numbers": describe_matrices} | arguments
        inner = build(learning_rate=schedule, **arguments)
    if not _is_transformation(inner):
        raise ValueError(
            f"{_FIELD}={config.name!r} gives {type(inner).__name__}, not an "
            "optax.GradientTransformation."
        )
    if scales_by_norm(build, config.arguments):
        inner = lift_zeros(inner)
    return adapt_optimizer(_name_errors(inner, f"{_FIELD}={config.name!r} with {described}"))


def _is_transformation(value: object) -> bool:
    has_init = callable(getattr(value, "init", None))
    has_update = callable(getattr(value, "update", None))
    return has_init and has_update


def _name_errors(inner: optax.GradientTransformation, subject: str) -> optax.GradientTransformation:
    """Return `inner`, whose errors become ValueErrors that name the options."""

    @contextlib.contextmanager
    def explain_errors(stage: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a value of a wrong type may lead to any error
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise ValueError(f"{subject} fails at {stage}: {reason}") from error

    def init(params: optax.Params) -> optax.OptState:
        with explain_errors("its first state"):
            return inner.init(params)

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
    ) -> tuple[optax.Updates, optax.OptState]:
        with explain_errors("an update"):
            return inner.update(updates, state, params)

    return optax.GradientTransformation(init, update)
