"""The config of a run from an `ml_collections.ConfigDict` of another system."""

from typing import Any, NamedTuple

from vit_jax.config.migration.big_vision import convert_big_vision, is_big_vision
from vit_jax.config.migration.foreign_fields import ForeignFields
from vit_jax.config.migration.vision_transformer_configs import (
    convert_vision_transformer,
    is_vision_transformer,
)
from vit_jax.config.parsing import from_dict
from vit_jax.config.schema import RunConfig


class Conversion(NamedTuple):
    """A converted config.

    Attributes:
      config: the config.
      system: name of the other system.
      ignored: names of its fields without an effect on the results here.
    """

    config: RunConfig
    system: str
    ignored: tuple[str, ...]


def convert(config: Any) -> Conversion:
    """Return the config of a run for a ConfigDict of big_vision or vision_transformer.

    Raises:
      ValueError: it is of another system, or fields have no counterpart; the error has all of them.
    """
    values = config.to_dict()
    if is_vision_transformer(values):
        fields = ForeignFields(values, "vision_transformer")
        kind, sections = convert_vision_transformer(fields)
    elif is_big_vision(values):
        fields = ForeignFields(values, "big_vision")
        kind, sections = convert_big_vision(fields)
    else:
        shown = ", ".join(sorted(map(str, values))[:5])
        raise ValueError(
            "a ConfigDict must be of big_vision (model_name, optax_name) or of vision_transformer "
            f"(base_lr, pretrained_dir), and has {shown or 'no fields'}. "
            "Return a config such as PretrainConfig."
        )
    fields.require_all_converted()
    return Conversion(from_dict(kind, sections), fields.system, tuple(fields.ignored))
