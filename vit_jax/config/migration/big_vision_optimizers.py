"""Optimisers of big_vision, and the schedules of their learning rates."""

import math
from collections.abc import Sequence

from vit_jax.config.migration.foreign_fields import DTYPES, ForeignFields, Section

OPTIMIZERS = {"scale_by_adam": "adam", "big_vision.momentum_hp": "sgd"}
DECAYS = {
    "linear": "linear",
    "polynomial": "linear",
    "cosine": "cosine",
    "rsqrt": "rsqrt",
    "stair": "staircase",
}


def convert_optimizer(fields: ForeignFields) -> Section:
    """Return the section `optimizer`."""
    fix = "use scale_by_adam or big_vision.momentum_hp, or --config.optimizer.name=optax:NAME"
    name = fields.take_choice(
        "optax_name",
        OPTIMIZERS,
        "scale_by_adam",
        fix,
    )
    section: Section = {
        "name": name,
        "weight_decay": fields.take("wd") or 0.0,
        "weight_decay_meaning": "big_vision",
        "clip_global_norm": fields.take("grad_clip_norm") or None,
    }
    section |= _convert_moments(fields, name)
    patterns = "use --config.optimizer.learning_rate_multipliers with the names here"
    fields.expect(
        "lr_mults",
        None,
        [],
        (),
        fix=patterns,
    )
    kernels = "decay is of all kernels: remove it"
    fields.expect(
        "wd_mults",
        None,
        [(".*/kernel$", 1.0)],
        ((".*/kernel$", 1.0),),
        fix=kernels,
    )
    fields.expect(
        "grad_clip_per_example",
        False,
        fix="use grad_clip_norm alone",
    )
    return section


def _convert_moments(fields: ForeignFields, name: str) -> Section:
    """Return the options of the moments of Adam, or of the momentum of SGD."""
    if name == "adam":
        return {
            "first_moment_dtype": fields.take_choice("optax.mu_dtype", DTYPES, "float32"),
            "beta1": fields.take("optax.b1", 0.9),
            "beta2": fields.take("optax.b2", 0.999),
            "epsilon": fields.take("optax.eps", 1e-8),
        }
    fields.expect("optax.nesterov", False, fix="momentum is without Nesterov: remove it")
    return {
        "first_moment_dtype": fields.take_choice("optax.dtype", DTYPES, "bfloat16"),
        "momentum": fields.take("optax.momentum", 0.9),
    }


def convert_schedule(fields: ForeignFields, total: str) -> Section:
    """Return the section `schedule`; big_vision's schedules are factors of `lr`."""
    rate = fields.require("lr")
    section: Section = {
        "learning_rate": rate,
        "warmup": fields.take_duration("schedule.warmup", "0 steps"),
    }
    if isinstance(fields.peek("schedule"), list | tuple):
        frozen = "must be one schedule; use --config.optimizer.frozen for frozen parameters"
        fields.reject(
            "schedule",
            fields.take("schedule"),
            frozen,
        )
        return section | {"decay": "constant"}

    decay = fields.take_choice(
        "schedule.decay_type",
        DECAYS,
        "stair",
    )
    section["decay"] = decay
    if decay == "linear":
        end = fields.take("schedule.linear_end", 0)
        end = fields.take("schedule.end", end)
        section["end_learning_rate"] = end * (rate or 0)
        fields.expect(
            "schedule.power",
            1,
            fix="the decay is linear: remove it",
        )
    elif decay == "rsqrt":
        if "schedule.timescale" in fields:
            section["timescale"] = f"{fields.take('schedule.timescale')} steps"
        else:
            section["timescale"] = fields.take_duration("schedule.timescale", "10000 steps")
        fields.expect(
            "schedule.shift",
            0,
            fix="use --config.resume_from to continue a run",
        )
    elif decay == "staircase":
        section |= _convert_drops(fields, total)
    _convert_cooldown(fields, section)
    return section


def _convert_drops(fields: ForeignFields, total: str) -> Section:
    """Return a constant rate, or one that falls to a tenth at some steps."""
    steps = fields.take("schedule.steps") or ()
    factors = list(fields.take("schedule.mults") or ())
    if not steps:
        return {"decay": "constant"}
    tenths = [float(f"1e-{drop}") for drop in range(1, len(steps) + 1)]
    number, _, unit = total.partition(" ")
    if not _are_close(factors, tenths):
        fields.reject(
            "schedule.mults",
            factors,
            f"must be {tenths}: each drop is to a tenth",
        )
    if unit != "steps":
        fields.reject(
            "schedule.steps",
            steps,
            "needs total_steps",
        )
        return {"decay": "constant"}
    fractions = [step / float(number) for step in steps]
    return {"decay": "staircase", "drop_at_fraction": fractions}


def _are_close(values: Sequence[float], others: Sequence[float]) -> bool:
    if len(values) != len(others):
        return False
    return all(map(math.isclose, values, others))


def _convert_cooldown(fields: ForeignFields, section: Section) -> None:
    """Convert a linear cooldown after a constant rate, the only one with a counterpart."""
    if not fields.has_duration("schedule.cooldown"):
        return
    cooldown = fields.take_duration("schedule.cooldown", "")
    if section["decay"] == "constant":
        section |= {"decay": "wsd", "cooldown": cooldown, "cooldown_form": "linear"}
        return
    fix = "a cooldown needs a constant rate: remove decay_type, or use --config.schedule.decay=wsd"
    fields.reject(
        "schedule.cooldown",
        cooldown,
        fix,
    )
