"""A network averaged over views of its images (test-time augmentation).

Legend: V views, B batch, H W image height and width, C channels.
"""

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from vit_jax.arrays import ModelOutput
from vit_jax.config.network_options import Views

_AVERAGED = ("logits_BK", "features_BD", "pooled_BD")
"""Outputs that do not depend on the places of tokens in the image."""
_VIEWS: Mapping[Views, Sequence[tuple[bool, int]]] = {
    "flip": ((False, 0), (True, 0)),
    "flips": ((False, 0), (True, 0), (True, 2), (False, 2)),
    "rotations": tuple(itertools.product((False, True), range(4))),
}
"""True for the mirror image, and the number of quarter turns after it, for each view by name."""


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
    return len(_VIEWS[views])


def _generate_views(image_BHWC: Array, views: Views) -> Iterator[Array]:
    for is_mirrored, quarter_turns in _VIEWS[views]:
        view_BHWC = image_BHWC
        if is_mirrored:
            view_BHWC = jnp.flip(view_BHWC, 2)
        yield jnp.rot90(view_BHWC, quarter_turns, axes=(1, 2))
