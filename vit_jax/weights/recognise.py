"""From names, shapes and metadata of a file to its format and the whole architecture of its network.

What the file decides is derived, what a format fixes is its default, and what nobody says is asked for. No data is
read here.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.config.architecture import Architecture
from vit_jax.weights.answers import normal_answers, refuse_contradictions
from vit_jax.weights.derive import complete
from vit_jax.weights.description import stored_architecture
from vit_jax.weights.formats import StoredArray
from vit_jax.weights.names import FORMATS, Entry, Facts, Shape, released


@dataclasses.dataclass(frozen=True)
class Recognised:
    """A file that is understood.

    Attributes:
      format: "released", "big_vision", "bit", "timm" or "huggingface".
      architecture: of the network in it.
      entries: arrays that the file must have, under the format's own names.
      names: the format's own name → name in the file; everything that must be read.
      ignored: names in the file of what is no part of the network.
      is_class_row_missing: the table of positions has none for the class token, which then gets zeros.
      assumptions: a sentence for each thing that the file does not say.
    """

    format: str
    architecture: Architecture
    entries: Sequence[Entry]
    names: Mapping[str, str]
    ignored: Sequence[str]
    is_class_row_missing: bool
    assumptions: Sequence[str]


def recognise(
    arrays: Mapping[str, StoredArray],
    metadata: Mapping[str, Any],
    *,
    stated: Mapping[str, Any] | None = None,
    answers: Mapping[str, Any] | None = None,
) -> Recognised:
    """Finds out what is in a file.

    Args:
      arrays: what the file announces.
      metadata: what we wrote into it; empty for a file from elsewhere.
      stated: fields of the architecture that a configuration beside the file gives, and its `pool`.
      answers: fields of the architecture from `answers.ANSWERS` that the user gives; they count more than `stated`.

    Raises:
      ValueError: an unknown format, a network that ours cannot compute, an answer that is missing or contradicts
        the file.
    """
    given = normal_answers(answers or {})
    name, names = _find_format(arrays)
    shapes = {canonical: arrays[in_file].shape for canonical, in_file in names.items()}
    label = "big_vision" if name == "released" and released.is_big_vision(shapes, names) else name
    if metadata:
        architecture = stored_architecture(metadata)
        assumptions: list[str] = []
        refuse_contradictions(given, dataclasses.asdict(architecture), "the file's metadata")
        is_row_missing = False
    else:
        facts = _facts(name, shapes)
        architecture, is_row_missing, assumptions = complete(facts, dict(stated or {}), given)
    entries = FORMATS[name].entries(architecture, shapes)
    if is_row_missing:
        short = (1, architecture.sequence_length - 1, architecture.width)
        entries = [dataclasses.replace(e, part=short) if e.ours == ("positions/table",) else e for e in entries]
    used = set(names.values())
    return Recognised(
        format=label,
        architecture=architecture,
        entries=entries,
        names=names,
        ignored=[in_file for in_file in arrays if in_file not in used],
        is_class_row_missing=is_row_missing,
        assumptions=assumptions,
    )


def _find_format(arrays: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    for name, format_ in FORMATS.items():
        try:
            names = format_.canonical(arrays)
        except ValueError as error:
            raise ValueError(f"the file has the names of {name}, but {error}") from error
        if names is not None:
            return name, names
    some = ", ".join(list(arrays)[:4])
    raise ValueError(
        f"its {len(arrays)} arrays have names of no known format ({some}, ...). Known are the released ViT, "
        f"big_vision, Big Transfer, timm (VisionTransformer and its hybrids, ResNetV2) and Hugging Face (ViT)"
    )


def _facts(name: str, shapes: Mapping[str, Shape]) -> Facts:
    try:
        return FORMATS[name].facts(shapes)
    except ValueError as error:
        raise ValueError(f"the file has the names of {name}, but {error}") from error
