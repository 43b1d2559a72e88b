"""Phases of a pre-training run: earlier steps with another image size, batch or patch dropout.

Parameters have the shapes of the last phase from the first step on; `train.resizing` has the
network of an earlier one. So the state, the optimiser and checkpoints know no phases.
"""

import dataclasses
from typing import TypeVar

from vit_jax.config import Architecture, RunConfig
from vit_jax.config.adaptation import set_image_size
from vit_jax.config.lengths import Phase

C = TypeVar("C", bound=RunConfig)


def apply_phase(config: C, phase: Phase) -> C:
    """Return the config of a phase; a resize before the crop is in proportion to the images."""
    resize_pixels = config.input.train_resize_pixels
    if resize_pixels is not None:
        scale = max(phase.image_size) / max(config.input.pixels)
        resize_pixels = round(resize_pixels * scale)
    inputs = dataclasses.replace(
        config.input,
        image_size=phase.image_size,
        patch_dropout=phase.patch_dropout,
        train_resize_pixels=resize_pixels,
    )
    return dataclasses.replace(config, input=inputs, global_batch=phase.global_batch)


def shrink_sequence(architecture: Architecture, config: RunConfig) -> Architecture:
    """Return a network whose sequence has the length of training, for formulas.

    With patch dropout its image is a line of the kept patches. A hybrid stays as it is: its ResNet
    sees the whole image.
    """
    fraction = config.input.patch_dropout
    if not fraction or architecture.has_resnet:
        return architecture
    num_kept = architecture.count_kept_patches(fraction)
    height, width = architecture.patch_size
    return dataclasses.replace(architecture, image_size=(height, num_kept * width))


def resize_architecture(architecture: Architecture, phase: Phase) -> Architecture:
    """Return the network for images of a phase.

    Raises:
      ValueError: the network cannot take images of this size.
    """
    try:
        return set_image_size(architecture, phase.image_size)
    except ValueError as error:
        raise ValueError(f"config.phases: {error}") from None
