"""The same network for images of other channels, bands or normalisation."""

import dataclasses
from collections.abc import Mapping

from vit_jax.config.architecture_rules import require_valid
from vit_jax.data.decoding.bands import BandChoice
from vit_jax.weights.channels import describe_adaptation
from vit_jax.weights.fit import fit
from vit_jax.weights.folding import OURS, read_normalisation, unfold
from vit_jax.weights.load import Weights


def fit_channels(weights: Weights, channels: int, method: str, option: str) -> Weights:
    """Return the same network for other channels, with a note on the change.

    It expects pixels from -1 to 1: the preprocessing loses its mean, deviation and bands, which
    belong to the channels of the source.

    Args:
      weights: weights of another number of channels.
      channels: number of channels of the images.
      method: the same as for `adapt_channels`.
      option: name of the option that chooses the method, for the note.

    Raises:
      ValueError: the number is not allowed.
    """
    architecture = dataclasses.replace(weights.architecture, channels=channels)
    # As before, the patches need not cover the image up to its border.
    target = require_valid(architecture, drops_border=True)
    fitted = fit(weights, target, channel_weights=method)
    changed = weights.replace_network(target, fitted.parameters)
    preprocessing = _drop_fields(weights.preprocessing, "bands", "mean", "std")
    changed = dataclasses.replace(changed, preprocessing=preprocessing or None)
    note = describe_adaptation(weights.architecture.channels, channels, method, option)
    return changed.add_note(note)


def expect_standardised_channels(weights: Weights) -> Weights:
    """Return the same network for channels with mean 0 and deviation 1, as its library trained it.

    `weights.folding` has put the mean and deviation of the library into the first kernel, which
    takes pixels from -1 to 1. This takes them out. Weights of a library that trains on pixels from
    -1 to 1 remain as they are.
    """
    normalisation = read_normalisation(weights.preprocessing)
    if normalisation == OURS:
        return weights
    preprocessing = _drop_fields(weights.preprocessing, "mean", "std")
    return dataclasses.replace(
        weights,
        parameters=unfold(weights.parameters, normalisation),
        preprocessing=preprocessing or None,
    )


def set_bands(
    weights: Weights,
    channels: int,
    bands: BandChoice | None,
    method: str,
    option: str,
) -> Weights:
    """Return the network for images of these bands, which are noted in its preprocessing.

    Args:
      weights: weights of any number of channels.
      channels: number of channels of the images.
      bands: bands of the images, with their normalisation; None: RGB.
      method: the same as for `adapt_channels`.
      option: name of the option that chooses the method, for the note.

    Raises:
      ValueError: the number is not allowed.
    """
    if channels != weights.architecture.channels:
        weights = fit_channels(weights, channels, method, option)
    preprocessing = _drop_fields(weights.preprocessing, "bands")
    if bands is not None:
        preprocessing["bands"] = dataclasses.asdict(bands)
    return dataclasses.replace(weights, preprocessing=preprocessing or None)


def _drop_fields(preprocessing: Mapping[str, object] | None, *fields: str) -> dict[str, object]:
    """Return the preprocessing of weights without some fields; empty for None."""
    kept = dict(preprocessing or {})
    for field in fields:
        kept.pop(field, None)
    return kept
