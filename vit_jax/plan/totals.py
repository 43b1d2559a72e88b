"""From the time of a step to the whole recipe: chip-hours, core-days, cost and arithmetic."""

import dataclasses

from vit_jax.config import Architecture
from vit_jax.cost.chips import find_chip, mfu
from vit_jax.cost.flops import exaflops, training_flops_per_image
from vit_jax.plan.topology import Topology


@dataclasses.dataclass(frozen=True)
class Totals:
    """A whole recipe.

    Attributes:
      steps: updates, of all its runs.
      images: seen, repeats included.
      exaflops: 1e18 FLOPs, forward and backward, nothing computed twice.
      images_per_second: on all chips.
      mfu: fraction of the chips' peak that this arithmetic is.
      days: from the first step to the last: no evaluation, no checkpoint, no interruption.
      chip_hours: chips x hours.
      core_days: TensorCores x days; the paper counts so (TPU v3, two a chip). Of GPUs, GPUs x days.
      tpu_v3_core_days: those days of this many cores of a TPU v3 that do the same arithmetic at the same MFU.
      price: of all chip-hours; None where no price was given.
    """

    steps: int
    images: int
    exaflops: float
    images_per_second: float
    mfu: float
    days: float
    chip_hours: float
    core_days: float
    tpu_v3_core_days: float
    price: float | None


def run_totals(
    architecture: Architecture,
    topology: Topology,
    *,
    steps: int,
    global_batch: int,
    step_seconds: float,
    price_per_chip_hour: float | None,
) -> Totals:
    """Adds the steps up."""
    images, speed = steps * global_batch, global_batch / step_seconds
    days = steps * step_seconds / 86400
    v3 = find_chip("TPU v3")
    assert v3 is not None
    chip_days = days * topology.num_chips
    return Totals(
        steps=steps,
        images=images,
        exaflops=exaflops(architecture, images),
        images_per_second=speed,
        mfu=mfu(speed * training_flops_per_image(architecture) / topology.num_chips, topology.chip),
        days=days,
        chip_hours=24 * chip_days,
        core_days=chip_days * topology.fabric.cores_per_chip,
        tpu_v3_core_days=chip_days * topology.chip.peak_bf16_flops / v3.peak_bf16_flops,
        price=None if price_per_chip_hour is None else 24 * chip_days * price_per_chip_hour,
    )
