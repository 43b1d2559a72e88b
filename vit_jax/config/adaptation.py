"""Changes of a network in fine-tuning: another image size, another pooling, a new head."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from vit_jax.config.architecture import Architecture
from vit_jax.config.architecture_rules import require_valid
from vit_jax.config.field_checks import find_out_of_range, reject
from vit_jax.config.network_options import LEARNED_POSITIONS
from vit_jax.config.networks import build_named_architecture, read_compute_options
from vit_jax.config.schema import AdaptConfig

FINETUNE_DROPOUT = {"ViT-L/16": 0.1, "ViT-H/14": 0.1, "R50+ViT-B/16": 0.1, "R50+ViT-L/32": 0.1}
"""Dropout of vision_transformer, configs/models.py. It is 0 for other networks, and for weights
without a hidden layer in the head: AugReg's, whose config (configs/augreg.py) sets it to 0, and
fine-tuned ones."""

_COMPARED_FIELDS = (
    "family",
    "width",
    "depth",
    "mlp_dim",
    "num_heads",
    "patch_size",
    "units",
    "width_factor",
)


def adapt_architecture(
    a: Architecture,
    config: AdaptConfig,
    *,
    image_size: tuple[int, int],
    num_classes: int,
    channels: int | None = None,
) -> Architecture:
    """Return the network that fine-tunes weights of `a` on images of this height and width.

    `channels` are those of the images; None: as in `a`.

    Raises:
      ValueError: `a` is not the network that `config.name` names (every difference is listed), or
        does not fit the image size, or an option has no effect on it.
    """
    if config.name is not None:
        _require_network(a, config.name)
    dropout = config.dropout_fraction
    if dropout is None:
        dropout = _find_published_dropout(a)
    if channels is None:
        channels = a.channels
    reject(_find_problems(a, config))
    reject(_find_channel_problems(a, config, channels))

    # At the size of the weights, the border was accepted when `a` was made.
    drops_border = config.uncovered_border == "drop" or image_size == a.image_size
    head = a.head
    if config.head == "zero":
        head = "linear"
    resized = set_image_size(
        a,
        image_size,
        rope_rescale=config.rope_rescale,
        drops_border=drops_border,
    )
    pooled = set_pooling(resized, config.pool, config.final_norm)
    adapted = dataclasses.replace(
        pooled,
        num_classes=num_classes,
        channels=channels,
        patch_outputs=0,
        head=head,
        head_bias_init=0.0,
        dropout_fraction=dropout,
        stochastic_depth_fraction=config.stochastic_depth_fraction,
        stochastic_depth_form=config.stochastic_depth_form,
        **read_compute_options(config),
    )
    return require_valid(adapted, drops_border=drops_border)


def set_image_size(
    a: Architecture,
    image_size: tuple[int, int],
    *,
    rope_rescale: bool = False,
    drops_border: bool = False,
) -> Architecture:
    """Return the same network for images of another height and width in pixels.

    `rope_rescale` scales rotary positions that count patches to the grid of `a`; `drops_border`
    ignores pixels that no patch covers.

    Raises:
      ValueError: patches do not divide the image size.
    """
    rope_grid = a.rope_grid
    if rope_rescale and a.rope == "index" and rope_grid is None:
        rope_grid = a.grid
    resized = dataclasses.replace(a, image_size=image_size, rope_grid=rope_grid)
    return require_valid(resized, drops_border=drops_border)


def set_pooling(a: Architecture, pool: str | None, final_norm: str | None) -> Architecture:
    """Return the same network with another pooling or last norm; None keeps the present one.

    Class tokens stay, also those that are no longer pooled.

    Raises:
      ValueError: the network has no tokens to pool so.
    """
    fields: dict[str, Any] = {}
    if final_norm not in (None, a.final_norm):
        fields["final_norm"] = final_norm
    if pool not in (None, a.pool):
        is_implied = a.num_class_tokens == int(pool in ("token", "token_gap"))
        fields["pool"] = pool
        fields["class_tokens"] = None if is_implied else a.num_class_tokens
        fields["pool_num_heads"] = None

    problem = _find_pooling_problem(a, fields)
    if problem is not None:
        raise ValueError(f"config.model.pool={pool!r}: {problem}")
    return require_valid(dataclasses.replace(a, **fields), drops_border=True)


def _find_pooling_problem(a: Architecture, changes: dict[str, Any]) -> str | None:
    """Return the reason why a network cannot have these fields, None if it can."""
    pool = changes.get("pool")
    if changes and (not a.has_transformer or a.network is not None):
        rule = f"has no effect on {a.name}, which is no built-in transformer"
        return f"{rule}. Use None, also for final_norm."
    if pool == "map":
        rule = "must be token, gap or token_gap: the weights have no attention pooling"
        return f"{rule}. Use None, or gap."
    if pool in ("token", "token_gap") and not a.num_class_tokens:
        return "must be gap: the weights have no class token. Use None, or gap."
    return None


def _find_problems(a: Architecture, config: AdaptConfig) -> Iterator[str]:
    """Yield options that are out of range or have no effect on the network of the weights."""
    yield from find_out_of_range(config, "model.")
    for field in ("dropout_fraction", "stochastic_depth_fraction"):
        value = getattr(config, field)
        if value and not a.has_transformer:
            yield f"model.{field}={value}: has no effect on {a.name}, without a Transformer. Use 0."
    yield from _find_position_problems(a, config)
    yield from _find_head_problems(a, config)


def _find_channel_problems(a: Architecture, config: AdaptConfig, channels: int) -> Iterator[str]:
    if config.channel_weights != "cyclic" and channels == a.channels:
        rule = f"has no effect on images with the {channels} channels of the weights"
        yield f"model.channel_weights={config.channel_weights!r}: {rule}. Use cyclic."


def _find_position_problems(a: Architecture, config: AdaptConfig) -> Iterator[str]:
    resize = config.position_resize
    is_resized = a.has_transformer and a.position_embedding in LEARNED_POSITIONS
    if resize not in ("corners", "library") and not is_resized:
        rule = f"has no effect on {a.name}, without learned positions"
        yield f"model.position_resize={resize!r}: {rule}. Use corners."
    if config.rope_rescale and a.rope != "index":
        rule = f"has no effect on {a.name}, with rope={a.rope!r}"
        yield f"model.rope_rescale=True: {rule}. Use False."


def _find_head_problems(a: Architecture, config: AdaptConfig) -> Iterator[str]:
    changes = {}
    for name in ("pool", "final_norm"):
        value = getattr(config, name)
        if value not in (None, getattr(a, name)):
            changes[name] = value
    if changes and config.head != "zero":
        rule = f"must be zero with other features ({changes})"
        yield f"model.head={config.head!r}: {rule}. Use zero."
    if config.head == "zero_keep_hidden" and a.head != "mlp":
        rule = f"has no effect on {a.name}, whose head has no hidden layer"
        yield f"model.head='zero_keep_hidden': {rule}. Use zero."


def _require_network(a: Architecture, name: str) -> None:
    """Raise ValueError with each difference, unless this is the network of the name."""
    different = _compare_numbers(a, name)
    if not different:
        return
    text = f"config.model.name={name!r}: must be the network of the weights, {a.name}:"
    for field, (there, here) in different.items():
        text += f"\n  {field}: there {there}, {name} has {here}"
    raise ValueError(text)


def _find_published_dropout(a: Architecture) -> float:
    """Return the dropout with which the authors fine-tuned a network."""
    if a.head != "mlp":
        return 0.0
    for name, dropout in FINETUNE_DROPOUT.items():
        if not _compare_numbers(a, name):
            return dropout
    return 0.0


def _compare_numbers(a: Architecture, name: str) -> dict[str, tuple[object, object]]:
    """Return the numbers of `a` and of the network of a name, by field, where they differ."""
    b = build_named_architecture(name)
    different = {}
    for field in _COMPARED_FIELDS:
        if getattr(a, field) != getattr(b, field):
            different[field] = (getattr(a, field), getattr(b, field))
    return different
