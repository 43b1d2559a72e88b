"""Plans by arithmetic, the data they assume, and totals worked out by hand."""

import dataclasses
import json
import types

import pytest

from tests.tools.plan import small_plans as small
from vit_jax.config import ModelConfig, build_architecture, load_recipe
from vit_jax.imports import backend
from vit_jax.imports.extras import install_command
from vit_jax.models.flops import FLOPS_PER_MAC, FORWARDS_PER_TRAINING_STEP, forward_macs
from vit_jax.tools.plan import aot, estimate
from vit_jax.tools.plan.arithmetic import Roofline
from vit_jax.tools.plan.dataset import IMAGENET, JFT, choose_dataset
from vit_jax.tools.plan.estimate import make_plan
from vit_jax.tools.plan.report import to_json, to_text
from vit_jax.tools.plan.topology import parse_topology


def planned(topology, *overrides, **options):
    config = small.recipe(*overrides)
    return make_plan(config, parse_topology(topology), small.dataset(config), **options)


def test_without_the_compiler_it_falls_back_and_says_so(monkeypatch):
    monkeypatch.setattr(estimate.aot, "has_compiler", lambda: False)
    plan = planned("v5e:2x2")

    assert plan.compiled is None
    assert f"libtpu is not installed; {install_command('tpu')}" in to_text(plan)
    with pytest.raises(ValueError, match="No compiler for v5e:2x2"):
        aot.topology_devices(parse_topology("v5e:2x2"))


@pytest.mark.parametrize(
    ("plugins", "has_ptxas"), [(["libtpu"], True), (["jax-cuda12-plugin", "libtpu"], False)]
)
def test_without_the_compiler_for_gpus_it_falls_back_and_says_so(monkeypatch, plugins, has_ptxas):
    monkeypatch.setattr(backend, "plugins", lambda: dict.fromkeys(plugins, "1.2"))
    monkeypatch.setattr(aot, "_has_ptxas", lambda: has_ptxas)
    plan = planned("h100:2")

    assert plan.compiled is None
    assert f"the compiler for GPUs is not installed; {install_command('plan-gpu')}" in to_text(plan)
    with pytest.raises(ValueError, match="No compiler for h100:2"):
        aot.topology_devices(parse_topology("h100:2"))


def test_what_is_too_large_does_not_fit():
    plan = planned(
        "v100:1", "model.width=8192", "model.mlp_dim=32768", "model.depth=24", can_compile=False
    )

    assert plan.memory.total > plan.usable_bytes
    assert not plan.fits
    assert "DOES NOT FIT" in to_text(plan)


def test_json_holds_the_same_numbers():
    plan = planned("2*h100:8", price_per_chip_hour=2.0, can_compile=False)
    values = json.loads(json.dumps(to_json(plan)))

    assert values["basis"] == "arithmetic"
    assert sum(values["memory"].values()) == values["needed_bytes"] == plan.memory.total
    assert values["step_seconds"] == pytest.approx(sum(values["roofline"].values()))
    assert values["totals"]["steps"] == plan.run.steps.total
    assert values["num_chips"] == 16


def test_the_data_of_a_recipe():
    recipe = "configs/pretrain_jft.py:ViT-H/14"
    config = load_recipe(recipe)

    assert choose_dataset(f"/elsewhere/{recipe}", config) == JFT
    assert choose_dataset(recipe, dataclasses.replace(config, data="tfds:imagenet2012")) == IMAGENET

    both = choose_dataset("own.py", config, num_examples=5, num_classes=7)
    assert (both.num_examples, both.num_classes, both.source) == (5, 7, "the command line")

    one = choose_dataset(recipe, config, num_classes=7)
    assert (one.num_examples, one.num_classes) == (JFT.num_examples, 7)
    assert "command line" in one.source
    with pytest.raises(ValueError, match="--num_examples=N and --num_classes=N"):
        choose_dataset(recipe, dataclasses.replace(config, data="folder:/my/images"))

    with pytest.raises(ValueError, match="not known here"):
        choose_dataset("own.py", config, num_examples=5)


def totals(topology, *, steps=864_000, seconds=0.1, price=1.5, in_phases=False, **changes):
    """H/14 has 4096 images a step; in phases, half of the steps have half of them, of a quarter of the FLOPs."""
    config = load_recipe("configs/pretrain_jft.py:ViT-H/14")
    h14 = build_architecture(ModelConfig(name="ViT-H/14"), image_size=(224, 224), num_classes=18291)
    flops = FORWARDS_PER_TRAINING_STEP * FLOPS_PER_MAC * forward_macs(h14)
    early = (steps // 2, 2048, flops // 4)
    late = (steps - steps // 2, 4096, flops)
    phases = [early, late] if in_phases else [(steps, 4096, flops)]
    run = types.SimpleNamespace(
        steps=types.SimpleNamespace(total=steps),
        architecture=dataclasses.replace(h14, **changes),
        training_flops_per_image=flops,
        images=lambda step: sum(count * batch for count, batch, _ in phases),
        training_flops=lambda step: sum(count * batch * flops for count, batch, flops in phases),
        earlier=phases[:-1],
    )
    topology = parse_topology(topology)
    time = Roofline(seconds, 0, 0, 0)
    return estimate.Plan(config, topology, JFT, run, None, "", None, None, time, price).totals


def test_a_day_on_a_pod():
    total = totals("v5p:8x8x8")

    assert total.core_days == pytest.approx(1024)  # two TensorCores a chip
    assert (total.days, total.chip_hours, total.price) == pytest.approx(
        (1, 512 * 24, 512 * 24 * 1.5)
    )
    assert (total.steps, total.images) == (864_000, 864_000 * 4096)
    assert total.images_per_second == pytest.approx(40_960)

    useful = total.exaflops * 1e18 / (total.days * 86400)
    assert total.mfu == pytest.approx(useful / (512 * 459e12))
    # the same share of the peak of TPU v3 cores, 61.5 TFLOP/s each
    assert total.mfu == pytest.approx(useful / (total.tpu_v3_core_days / total.days * 61.5e12))

    halved = totals("v5p:8x8x8", in_phases=True)
    assert (halved.days, halved.images) == pytest.approx((0.5 + 0.5 / 8, 0.75 * total.images))
    assert halved.exaflops == pytest.approx((0.5 + 0.5 / 8) * total.exaflops)

    total = totals(
        "h100:8", price=None, block="mine:Block"
    )  # GPUs have no cores, own code has no FLOPs
    assert (total.price, total.core_days, total.mfu, total.exaflops) == (
        None,
        pytest.approx(8),
        None,
        None,
    )

    # The paper counts 2,500 TPUv3-core-days for 4,262 exaFLOPs: these are 32 % of their peak.
    steps = round(14 * 303e6 / 4096)
    total = totals("v5e:16x16", steps=steps, seconds=4262e18 / steps / (0.32 * 256 * 197e12))

    assert total.tpu_v3_core_days == pytest.approx(2500, rel=0.03)


@pytest.mark.parametrize(("machine", "bandwidth_bound"), [("v5e:4x4", False), ("v6e:4x4", True)])
def test_the_least_time_of_a_step(machine, bandwidth_bound):
    """By hand: products of 768 x 768 read and write more than they compute on v6e, those of the MLP never."""
    recipe = "configs/pretrain_imagenet1k.py:ViT-B/16"
    topology = parse_topology(machine)
    config = load_recipe(recipe, ["--config.sharding.parameters=replicated"])
    plan = make_plan(config, topology, IMAGENET, can_compile=False)
    tokens = 256 * 197
    width = 768
    chip = topology.chip
    mlp = 6 * 2 * tokens * width * 4 * width / chip.peak_bf16_flops
    out = 3 * 2 * (2 * tokens * width + width**2) / chip.memory_bandwidth_bytes_per_second
    out = max(out, 3 * 2 * tokens * width**2 / chip.peak_bf16_flops)
    least = 12 * (mlp + out)  # without query, key, value, attention, embedding, head and update
    flops = plan.run.training_flops_per_image * 256 / chip.peak_bf16_flops

    assert max(least, flops) < plan.limit_seconds < 1.35 * flops
    assert (plan.limit_seconds > 1.2 * flops) == bandwidth_bound
    assert "of this limit" in to_text(plan)


def test_the_least_time_of_a_resnet_is_not_known():
    recipe = "configs/pretrain_jft.py:R50x1"
    plan = make_plan(load_recipe(recipe), parse_topology("v5e:4x4"), JFT, can_compile=False)

    assert plan.limit_seconds is None
    assert "of this limit" not in to_text(plan)
