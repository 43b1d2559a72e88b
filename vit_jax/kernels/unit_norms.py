"""Group norms in the kernel for residual units: sums over rows, and norms a x + b.

Legend: L lanes.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from vit_jax.config.sizes import NUM_GROUPS
from vit_jax.kernels.unit_sizes import LANES, NormSlot, Sizes


class Sums:
    """Sums over slices of rows."""

    def __init__(self) -> None:
        self.totals: list[Any] = []

    def add(self, *values: Any) -> None:
        """Add values of a slice to the totals, one for each."""
        if not self.totals:
            self.totals = list(values)
            return
        for index, value in enumerate(values):
            self.totals[index] = self.totals[index] + value

    def add_rows(self, *maps: Any) -> None:
        """Add the sum over rows of each map."""
        self.add(*(x.sum(0, keepdims=True) for x in maps))

    def add_squares(self, x: Any) -> None:
        """Add the rows of a map, and apart their squares."""
        self.add_rows(x, x * x)

    def normalise(self, refs: Any, slot: NormSlot, u: Sizes) -> tuple[Any, Any]:
        """Store mean and 1 / deviation of the map of `add_squares`; return its norm's a and b."""
        statistics = getattr(refs, f"{slot.place}_statistics")
        affine = getattr(refs, f"{slot.place}_norms")
        scale_row = slice(slot.first, slot.first + 1)
        bias_row = slice(slot.first + 1, slot.first + 2)

        total, total_of_squares = self.totals
        mean = average_groups(total, slot, u)
        mean_of_squares = average_groups(total_of_squares, slot, u)
        variance = jnp.maximum(mean_of_squares - mean * mean, 0.0)
        inverse = jax.lax.rsqrt(variance + u.epsilon)
        statistics[scale_row] = mean
        statistics[bias_row] = inverse
        a = inverse * affine[scale_row]
        return a, affine[bias_row] - mean * a


class Norm:
    """A group norm a x + b, whose a and b depend on x, in the backward pass."""

    def __init__(self, refs: Any, slot: NormSlot, u: Sizes):
        statistics = getattr(refs, f"{slot.place}_statistics")
        affine = getattr(refs, f"{slot.place}_norms")
        first_row = slice(slot.first, slot.first + 1)
        second_row = slice(slot.first + 1, slot.first + 2)

        self.mean = statistics[first_row]
        self.inverse = statistics[second_row]
        self.scale = affine[first_row]
        bias = affine[second_row]
        self.a = self.inverse * self.scale
        self.b = bias - self.mean * self.a
        self.gradient = getattr(refs, f"of_{slot.place}_norms")
        self.slot = slot
        self.unit = u

    def differentiate(self, sum_g: Any, sum_gx: Any) -> tuple[Any, Any, Any]:
        """Add to the gradients of scale and bias; return a, c, d of the gradient a g + c x + d.

        Arguments are the sums of g and g x over positions, where g is the gradient of the output.
        """
        scale_gradient = self.inverse * (sum_gx - self.mean * sum_g)
        first = self.slot.first
        self.gradient[first : first + 1] += scale_gradient
        self.gradient[first + 1 : first + 2] += sum_g

        mean_g = average_groups(self.scale * sum_g, self.slot, self.unit)
        mean_gx = average_groups(self.scale * scale_gradient, self.slot, self.unit)
        c = -jnp.square(self.inverse) * mean_gx
        d = -self.inverse * mean_g - self.mean * c
        return self.a, c, d


def average_groups(sums_1L: Any, slot: NormSlot, u: Sizes) -> Any:
    """Return the mean of each channel's group, from sums over the rows of a norm's map."""
    group_size = u.normed_channels(slot) // NUM_GROUPS
    count = group_size * u.normed_rows(slot)
    num_lanes = sums_1L.shape[1]
    if num_lanes < LANES:  # a rotation needs complete tiles
        complete_1L = jnp.concatenate([sums_1L] * (LANES // num_lanes), 1)
        return _sum_groups(complete_1L, group_size, count)[:, :num_lanes]
    return _sum_groups(sums_1L, group_size, count)


def _sum_groups(sums_1L: Any, group_size: int, count: int) -> Any:
    """Return each group's sum divided by `count`; neighbours at growing distances are added."""
    num_lanes = sums_1L.shape[1]
    lane = jax.lax.broadcasted_iota(jnp.int32, sums_1L.shape, 1)
    distance = 1
    while distance < group_size:
        below = pltpu.roll(sums_1L, distance, 1)
        above = pltpu.roll(sums_1L, num_lanes - distance, 1)
        sums_1L += jnp.where(lane & distance != 0, below, above)
        distance *= 2
    return sums_1L / count
