"""The search, by arithmetic: what is tried, what wins, and what it says to add."""

import dataclasses

import pytest

from tests.plan import small_plans as small
from vit_jax.config import ShardingConfig, load_recipe
from vit_jax.plan import search as module
from vit_jax.plan.dataset import JFT
from vit_jax.plan.report import found_to_json, found_to_text
from vit_jax.plan.search import search
from vit_jax.plan.topology import parse_topology
from vit_jax.train.assemble import architecture_of

H14 = "configs/pretrain_jft.py:ViT-H/14"


@pytest.fixture(scope="module")
def found():
    return search(load_recipe(H14), parse_topology("v5e:8x8"), JFT, can_compile=False)


def test_every_policy_and_sharding_is_looked_at_with_few_micro_batches(found):
    configs = [c.config for c in found.candidates]
    assert {config.model.remat for config in configs} == set(module.REMAT)
    assert {config.sharding.parameters for config in configs} == {"replicated", "fsdp"}
    assert {config.sharding.num_model_shards for config in configs} == {1, 2, 4}
    assert {config.global_batch for config in configs} == {4096}
    replicated = ShardingConfig(parameters="replicated")
    steps = {c.model.remat: c.optimizer.accumulation_steps for c in configs if c.sharding == replicated}
    assert steps["none"] > 1
    assert steps["full"] <= steps["none"]


def test_the_winner_is_the_fastest_that_fits_and_its_overrides_make_it(found):
    fitting = [c for c in found.candidates if c.needed_bytes <= found.usable_bytes]
    assert found.winner.fits
    assert found.winner.step_seconds == min(c.step_seconds for c in fitting)
    assert load_recipe(H14, found.overrides) == found.winner.config
    text = found_to_text(found)
    assert text.count(" | ") >= 3 * len(found.candidates)
    assert "|                      | fastest that fits" in text  # nothing was compiled, so nothing stands there
    assert f"add to the command: {' '.join(found.overrides)}" in text
    assert len(found_to_json(found)["candidates"]) == len(found.candidates)


def test_nothing_fits():
    config = small.recipe("model.width=8192", "model.mlp_dim=32768", "model.depth=64", "global_batch=1")
    found = search(config, parse_topology("v100:1"), small.dataset(config), can_compile=False)
    assert found.winner is None
    assert "Nothing fits" in found_to_text(found)


def test_other_batches_are_compared_by_image(monkeypatch):
    monkeypatch.setattr(module, "MODEL_SHARDS", (1,))
    config = small.recipe()
    found = search(config, parse_topology("h100:2"), small.dataset(config), can_compile=False, other_batches=True)
    assert {c.config.global_batch for c in found.candidates} == {8, 16, 32, 64, 128}
    rates = [c.seconds_per_image for c in found.candidates]
    assert rates == sorted(rates)


def test_what_is_in_doubt_is_tried_last(found):
    candidates = sorted(found.candidates, key=lambda c: c.needed_bytes)
    usable = candidates[len(candidates) // 2].needed_bytes
    order = module._in_order(candidates, usable, 1.15 * usable)
    is_sure = [candidate.needed_bytes <= usable for candidate in order]
    assert is_sure == sorted(is_sure, reverse=True)
    assert max(candidate.needed_bytes for candidate in order) <= 1.15 * usable
    sure = {c.config.model.remat for c in candidates if c.needed_bytes <= usable}
    assert {candidate.config.model.remat for candidate in order[: len(sure)]} == sure


def test_own_code_cannot_be_ordered_by_arithmetic(monkeypatch):
    config = load_recipe(H14)
    own = dataclasses.replace(architecture_of(config, 10), block="mine:Block")
    monkeypatch.setattr(module, "architecture_of", lambda *_: own)
    with pytest.raises(ValueError, match="mine:Block: no formula"):
        search(config, parse_topology("v5e:8x8"), JFT)


def test_no_layout_is_possible():
    config = small.recipe("global_batch=3")
    with pytest.raises(ValueError, match="No layout of this recipe is possible on h100:8"):
        search(config, parse_topology("h100:8"), small.dataset(config), can_compile=False)


def test_the_compiler_decides_between_the_best(monkeypatch, found):
    """A compiler that finds the first choice too large."""
    asked, real = [], module.make_plan

    def compiled(config, topology, dataset, **options):
        plan = real(config, topology, dataset, can_compile=False)
        asked.append(config)
        memory = dataclasses.replace(plan.memory, temporary=10**12) if len(asked) == 1 else plan.memory
        return dataclasses.replace(plan, memory=memory)

    monkeypatch.setattr(module, "make_plan", compiled)
    monkeypatch.setattr(module, "_candidates", lambda *_: [dataclasses.replace(c, plan=None) for c in found.candidates])
    found = search(load_recipe(H14), parse_topology("v5e:8x8"), JFT, num_tries=4)
    assert len(asked) == 4
    assert {config.model.remat for config in asked} == set(module.REMAT)
    assert found.winner.config != asked[0]
    assert "does not fit" in found_to_text(found)
