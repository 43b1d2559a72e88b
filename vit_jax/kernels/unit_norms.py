"""Group norms in the kernel for residual units: sums over rows, and norms a x + b.

Legend: L lanes.
"""

from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas import tpu as pltpu

from vit_jax.config.sizes import NUM_GROUPS
from vit_jax.kernels.unit_sizes import LANES, NormSlot, Ref, UnitSizes


class NormRefs(NamedTuple):
    """References to the arrays of a norm, in the chip's memory, and its rows in them."""

    affine: Ref  # scale and bias
    statistics: Ref  # mean and 1 / deviation
    first_row: slice  # scale, or mean
    second_row: slice  # bias, or 1 / deviation


def find_norm_refs(refs: SimpleNamespace, slot: NormSlot) -> NormRefs:
    """Return the references of the norm in a slot."""
    first = slot.first
    second = first + 1
    return NormRefs(
        affine=getattr(refs, f"{slot.kind}_norms"),
        statistics=getattr(refs, f"{slot.kind}_statistics"),
        first_row=slice(first, second),
        second_row=slice(second, second + 1),
    )


class Sums:
    """Sums over slices of rows, each (1, L), or sums of products."""

    def __init__(self) -> None:
        self.totals: list[Array] = []

    def add(self, *values: Array) -> None:
        """Add values of a slice to the totals, one for each."""
        if not self.totals:
            self.totals = list(values)
            return
        for index, value in enumerate(values):
            self.totals[index] = self.totals[index] + value

    def add_rows(self, *maps: Array) -> None:
        """Add the sum over rows of each map."""
        sums = [x.sum(0, keepdims=True) for x in maps]
        self.add(*sums)

    def add_squares(self, x: Array) -> None:
        """Add the rows of a map, and separately their squares."""
        self.add_rows(x, x * x)

    def normalise(
        self,
        refs: SimpleNamespace,
        slot: NormSlot,
        unit: UnitSizes,
    ) -> tuple[Array, Array]:
        """Store mean and 1 / deviation of the map of `add_squares`; return its norm's a and b."""
        norm = find_norm_refs(refs, slot)
        total, total_of_squares = self.totals
        mean = average_groups(total, slot, unit)
        mean_of_squares = average_groups(total_of_squares, slot, unit)
        variance = jnp.maximum(mean_of_squares - mean * mean, 0.0)
        inverse = jax.lax.rsqrt(variance + unit.epsilon)
        norm.statistics[norm.first_row] = mean
        norm.statistics[norm.second_row] = inverse

        scale = norm.affine[norm.first_row]
        a = inverse * scale
        bias = norm.affine[norm.second_row]
        b = bias - mean * a
        return a, b


class Norm:
    """A group norm a x + b, whose a and b depend on x, in the backward pass.

    Statistics, scale, a and b are (1, L).
    """

    def __init__(
        self,
        refs: SimpleNamespace,
        slot: NormSlot,
        unit: UnitSizes,
    ):
        norm = find_norm_refs(refs, slot)
        self.mean = norm.statistics[norm.first_row]
        self.inverse = norm.statistics[norm.second_row]
        self.scale = norm.affine[norm.first_row]
        bias = norm.affine[norm.second_row]

        self.a = self.inverse * self.scale
        self.b = bias - self.mean * self.a
        self.first_row = norm.first_row
        self.second_row = norm.second_row
        self.gradient = getattr(refs, f"grad_{slot.kind}_norms")
        self.slot = slot
        self.unit = unit

    def differentiate(
        self,
        sum_g: Array,
        sum_gx: Array,
    ) -> tuple[Array, Array, Array]:
        """Add to the gradients of scale and bias; return a, c, d of the gradient a g + c x + d.

        Args:
          sum_g: sum over positions of g, the gradient of the output.
          sum_gx: sum over positions of g x.
        """
        scale_gradient = self.inverse * (sum_gx - self.mean * sum_g)
        self.gradient[self.first_row] += scale_gradient
        self.gradient[self.second_row] += sum_g

        mean_g = average_groups(self.scale * sum_g, self.slot, self.unit)
        mean_gx = average_groups(self.scale * scale_gradient, self.slot, self.unit)
        c = -jnp.square(self.inverse) * mean_gx
        d = -self.inverse * mean_g - self.mean * c
        return self.a, c, d


def average_groups(
    sums_1L: Array,
    slot: NormSlot,
    unit: UnitSizes,
) -> Array:
    """Return the mean of each channel's group, from sums over the rows of a norm's map."""
    group_size = unit.count_normed_channels(slot) // NUM_GROUPS
    num_values = group_size * unit.count_normed_rows(slot)
    num_lanes = sums_1L.shape[1]
    if num_lanes >= LANES:
        return _sum_groups(sums_1L, group_size) / num_values

    # A rotation needs complete tiles.
    num_copies = LANES // num_lanes
    complete_1L = jnp.concatenate([sums_1L] * num_copies, 1)
    means_1L = _sum_groups(complete_1L, group_size) / num_values
    return means_1L[:, :num_lanes]


def _sum_groups(sums_1L: Array, group_size: int) -> Array:
    """Return for each lane the sum of its group.

    In each step every lane adds the sum of the lane whose number differs in one bit.
    """
    num_lanes = sums_1L.shape[1]
    lane = jax.lax.broadcasted_iota(jnp.int32, sums_1L.shape, 1)

    distance = 1
    while distance < group_size:
        below = pltpu.roll(sums_1L, distance, 1)
        above = pltpu.roll(sums_1L, num_lanes - distance, 1)
        is_upper = lane & distance != 0
        sums_1L += jnp.where(is_upper, below, above)
        distance *= 2
    return sums_1L
