"""Plans by arithmetic: whole, with their reason, and with the numbers of the layout."""

import json

import pytest

from tests.plan import small_plans as small
from vit_jax.plan import aot, estimate
from vit_jax.plan.estimate import make_plan
from vit_jax.plan.report import to_json, to_text
from vit_jax.plan.topology import parse_topology


def planned(topology, *overrides, **options):
    config = small.recipe(*overrides)
    return make_plan(config, parse_topology(topology), small.dataset(config), **options)


def test_gpus_are_planned_by_arithmetic():
    plan = planned("h100:8", price_per_chip_hour=2.0)
    assert not plan.is_compiled
    assert plan.fits
    text = to_text(plan)
    assert "basis    arithmetic, nothing was compiled: compilers for GPUs need the GPU" in text
    assert "1 replicas x 8 data x 1 model" in text
    assert "price" in text


def test_without_the_compiler_it_falls_back_and_says_so(monkeypatch):
    monkeypatch.setattr(estimate.aot, "has_compiler", lambda: False)
    plan = planned("v5e:2x2")
    assert not plan.is_compiled
    assert "libtpu is not installed here; pip install 'vit_jax[tpu]'" in to_text(plan)
    with pytest.raises(ValueError, match="no compiler for v5e:2x2"):
        aot.topology_devices(parse_topology("v5e:2x2"))


def test_fsdp_takes_less_state_and_names_its_collectives():
    whole, split = (
        planned("h100:8", f"sharding.parameters={name}", "model.width=64") for name in ("replicated", "fsdp")
    )
    assert split.memory.state < 0.3 * whole.memory.state
    assert split.memory.batch == whole.memory.batch
    assert split.roofline.collective_seconds > whole.roofline.collective_seconds


def test_model_shards_are_in_the_layout_and_cost_collectives():
    plan = planned("h100:8", "sharding.num_model_shards=2")
    assert to_json(plan)["mesh"] == {"replica": 1, "data": 4, "model": 2}
    assert plan.roofline.collective_seconds > planned("h100:8").roofline.collective_seconds


def test_what_is_too_large_does_not_fit():
    plan = planned("v100:1", "model.width=8192", "model.mlp_dim=32768", "model.depth=24")
    assert plan.memory.total > plan.usable_bytes
    assert not plan.fits
    assert "DOES NOT FIT" in to_text(plan)


def test_json_holds_the_same_numbers():
    plan = planned("2*h100:8", price_per_chip_hour=2.0)
    values = json.loads(json.dumps(to_json(plan)))
    assert values["basis"] == "arithmetic"
    assert sum(values["memory"].values()) == values["needed_bytes"] == plan.memory.total
    assert values["step_seconds"] == pytest.approx(sum(values["roofline"].values()))
    assert values["totals"]["price"] == pytest.approx(2.0 * values["totals"]["chip_hours"])
    assert values["totals"]["steps"] == plan.run.steps.total
    assert values["num_chips"] == 16


def test_a_batch_that_the_machine_does_not_divide():
    with pytest.raises(ValueError, match="global_batch=32 is not divisible by 256"):
        planned("v5e:16x16", can_compile=False)
