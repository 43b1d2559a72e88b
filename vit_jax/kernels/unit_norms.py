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
    """Sums over slices of rows, each (1, L), or sums of products."""

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
        sums = [x.sum(0, keepdims=True) for x in maps]
        self.add(*sums)

    def add_squares(self, x: Any) -> None:
        """Add the rows of a map, and apart their squares."""
        self.add_rows(x, x * x)

    def normalise(self, refs: Any, slot: NormSlot, u: Sizes) -> tuple[Any, Any]:
        """Store mean and 1 / deviation of the map of `add_squares`; return its norm's a and b."""
        statistics = getattr(refs, f"{slot.place}_statistics")
        affine = getattr(refs, f"{slot.place}_norms")
        first_row, second_row = _slice_rows(slot)

        total, total_of_squares = self.totals
        mean = average_groups(total, slot, u)
        mean_of_squares = average_groups(total_of_squares, slot, u)
        variance = jnp.maximum(mean_of_squares - mean * mean, 0.0)
        inverse = jax.lax.rsqrt(variance + u.epsilon)
        statistics[first_row] = mean
        statistics[second_row] = inverse

        a = inverse * affine[first_row]
        b = affine[second_row] - mean * a
        return a, b


class Norm:
    """A group norm a x + b, whose a and b depend on x, in the backward pass.

    Statistics, scale, a and b are (1, L).
    """

    def __init__(self, refs: Any, slot: NormSlot, u: Sizes):
        statistics = getattr(refs, f"{slot.place}_statistics")
        affine = getattr(refs, f"{slot.place}_norms")
        first_row, second_row = _slice_rows(slot)

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
        first_row, second_row = _slice_rows(self.slot)
        scale_gradient = self.inverse * (sum_gx - self.mean * sum_g)
        self.gradient[first_row] += scale_gradient
        self.gradient[second_row] += sum_g

        mean_g = average_groups(self.scale * sum_g, self.slot, self.unit)
        mean_gx = average_groups(self.scale * scale_gradient, self.slot, self.unit)
        c = -jnp.square(self.inverse) * mean_gx
        d = -self.inverse * mean_g - self.mean * c
        return self.a, c, d


def _slice_rows(slot: NormSlot) -> tuple[slice, slice]:
    """Return the rows of a norm: its mean or scale, and its 1 / deviation or bias."""
    first = slot.first
    second = first + 1
    end = first + 2
    return slice(first, second), slice(second, end)


def average_groups(sums_1L: Any, slot: NormSlot, u: Sizes) -> Any:
    """Return the mean of each channel's group, from sums over the rows of a norm's map."""
    group_size = u.normed_channels(slot) // NUM_GROUPS
    count = group_size * u.normed_rows(slot)
    num_lanes = sums_1L.shape[1]
    if num_lanes >= LANES:
        return _sum_groups(sums_1L, group_size, count)

    # A rotation needs complete tiles.
    num_copies = LANES // num_lanes
    complete_1L = jnp.concatenate([sums_1L] * num_copies, 1)
    means_1L = _sum_groups(complete_1L, group_size, count)
    return means_1L[:, :num_lanes]


def _sum_groups(sums_1L: Any, group_size: int, count: int) -> Any:
    """Return each group's sum divided by `count`; neighbours at growing distances are added."""
    num_lanes = sums_1L.shape[1]
    lane = jax.lax.broadcasted_iota(jnp.int32, sums_1L.shape, 1)

    distance = 1
    while distance < group_size:
        below = pltpu.roll(sums_1L, distance, 1)
        above = pltpu.roll(sums_1L, num_lanes - distance, 1)
        is_upper = lane & distance != 0
        sums_1L += jnp.where(is_upper, below, above)
        distance *= 2
    return sums_1L / count
