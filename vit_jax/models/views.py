"""A network averaged over views of its images (test-time augmentation).

Legend: V views, B batch, H W image height and width, C channels.
"""

from collections.abc import Callable, Collection, Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from vit_jax.arrays import ModelOutput
from vit_jax.config.network_options import Views

_AVERAGED = ("logits_BK", "features_BD", "pooled_BD")
"""Outputs that do not depend on the places of tokens in the image."""


class ViewAverage(nnx.Module):
    """A network whose outputs are the means over views of each image.

    Views are "flip": the image and its mirror image; "flips": these, also upside down;
    "rotations": both rotated by 0, 90, 180 and 270 degrees, eight views of a square image.
    """

    def __init__(self, network: Callable[..., ModelOutput], views: Views):
        self.network = network
        self.views = views

    def __call__(self, image_BHWC: Array, *, intermediates: Collection[str] = ()) -> ModelOutput:
        """Return the means of logits and features; other outputs are absent.

        Raises:
          ValueError: intermediates, which have no mean.
        """
        if intermediates:
            raise ValueError(
                f"intermediates={intermediates!r}: must be () with views={self.views}."
            )

        def run(view_BHWC: Array) -> dict[str, Array | None]:
            output = self.network(view_BHWC)
            return {name: getattr(output, name, None) for name in _AVERAGED}

        views_VBHWC = jnp.stack(list(_generate_views(image_BHWC, self.views)))
        outputs = jax.lax.map(run, views_VBHWC)  # the network is compiled once
        means = jax.tree.map(lambda stacked: stacked.mean(axis=0), outputs)
        return ModelOutput(**means)


def count_views(views: Views) -> int:
    """Return the number of views of an image."""
    return {"flip": 2, "flips": 4, "rotations": 8}[views]


def _generate_views(image_BHWC: Array, views: Views) -> Iterator[Array]:
    mirrored_BHWC = jnp.flip(image_BHWC, 2)
    match views:
        case "flip":
            yield from (image_BHWC, mirrored_BHWC)
        case "flips":
            yield from (image_BHWC, mirrored_BHWC)
            yield from (jnp.flip(image_BHWC, 1), jnp.flip(mirrored_BHWC, 1))
        case "rotations":
            for start_BHWC in (image_BHWC, mirrored_BHWC):
                for quarter_turns in range(4):
                    yield jnp.rot90(start_BHWC, quarter_turns, axes=(1, 2))
