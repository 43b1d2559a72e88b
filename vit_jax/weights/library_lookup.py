"""The model of timm and the class of transformers for a network, found in all families."""

from collections.abc import Sequence
from typing import TypeVar

from vit_jax.config.architecture import Architecture
from vit_jax.weights.families import load_families
from vit_jax.weights.library_models import ANY, LibraryModel, TimmModel, TransformersModel

Model = TypeVar("Model", bound=LibraryModel)

_WITH_RESNET = TimmModel(name="", held={"position_tokens": ANY})


def find_timm_model(a: Architecture) -> TimmModel:
    """Return timm's model that computes most parts of a network."""
    if a.family != "vit":
        return _WITH_RESNET
    models: list[TimmModel] = []
    for family in load_families():
        models += family.timm_models
    return _find_nearest(models, a)


def find_timm_body(a: Architecture) -> str | None:
    """Return the name of timm's model with the ResNet of a network; None if there is none."""
    for family in load_families():
        name = family.timm_bodies.get((a.family, a.units, a.width_factor))
        if name is not None:
            return name
    return None


def find_huggingface_model(a: Architecture) -> TransformersModel:
    """Return the class of transformers that computes most parts of a ViT."""
    models: list[TransformersModel] = []
    for family in load_families():
        models += family.transformers_models
    return _find_nearest(models, a)


def name_huggingface_class(a: Architecture) -> str:
    """Return the name of the class of transformers, with a classifier if the network has one."""
    model = find_huggingface_model(a)
    if a.num_classes:
        return model.classifier
    return model.name


def _find_nearest(models: Sequence[Model], a: Architecture) -> Model:
    """Return the model that lacks the fewest parts; one with the same rotary positions first."""

    def count_lacking(model: Model) -> tuple[bool, int, int]:
        lacking = model.find_lacking(a)
        return "rope" in lacking, len(lacking), -model.preference

    return min(models, key=count_lacking)
