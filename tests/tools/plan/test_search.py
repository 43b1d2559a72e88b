"""The search by arithmetic: which layouts are tried, which one wins, and which overrides it
suggests.
"""

import dataclasses

import pytest

from tests.columns import list_column
from tests.tools.plan import small_plans as small
from vit_jax.config import ShardingConfig, load_recipe
from vit_jax.tools.plan import search as module
from vit_jax.tools.plan.dataset import JFT
from vit_jax.tools.plan.estimate import Network
from vit_jax.tools.plan.report import result_to_json, result_to_text
from vit_jax.tools.plan.search import search
from vit_jax.tools.plan.topology import parse_topology
from vit_jax.train.layout import POLICIES
from vit_jax.train.state_builder import architecture_of

H14 = "configs/pretrain_jft.py:ViT-H/14"


@pytest.fixture(scope="module")
def result():
    return search(
        load_recipe(H14),
        parse_topology("v5e:8x8"),
        JFT,
        can_compile=False,
    )


def test_every_policy_and_sharding_is_looked_at_with_few_micro_batches(result):
    configs = list_column(result.candidates, "config")

    assert set(list_column(configs, "model.remat")) == set(POLICIES)
    assert set(list_column(configs, "sharding.parameters")) == {"replicated", "fsdp"}
    assert set(list_column(configs, "sharding.num_model_shards")) == {1, 2, 4}
    assert set(list_column(configs, "global_batch")) == {4096}

    steps = {}
    for config in configs:
        if config.sharding == ShardingConfig(parameters="replicated"):
            steps[config.model.remat] = config.optimizer.accumulation_steps

    assert steps["none"] > 1
    assert steps["full"] <= steps["none"]


def test_the_winner_is_the_fastest_that_fits_and_its_overrides_make_it(result):
    fitting = []
    for c in result.candidates:
        if c.needed_bytes <= result.usable_bytes:
            fitting.append(c)

    assert result.winner.fits
    assert result.winner.step_seconds == min(c.step_seconds for c in fitting)
    resolved = [*result.overrides, "--config.model.compute_dtype=bfloat16"]
    assert load_recipe(H14, resolved) == result.winner.config
    assert len(result_to_json(result)["candidates"]) == len(result.candidates)


def test_the_text_has_a_row_for_each_candidate_and_the_overrides_of_the_winner(result):
    text = result_to_text(result)
    num_rows = 1 + len(result.candidates)
    rows = [read_cells(line) for line in text.splitlines()[:num_rows]]
    endings = [row[-3:] for row in rows]
    not_compiled = ["", "", "fastest that fits"]

    assert {len(row) for row in rows} == {11}
    assert endings.count(not_compiled) == 1
    assert f"add to the command: {' '.join(result.overrides)}" in text


def read_cells(line):
    return [cell.strip() for cell in line.split("|")]


def test_nothing_fits():
    config = small.recipe(
        "model.width=8192",
        "model.mlp_dim=32768",
        "model.depth=64",
        "global_batch=1",
    )
    result = search(
        config,
        parse_topology("v100:1"),
        small.dataset(config),
        can_compile=False,
    )

    assert result.winner is None
    assert "Nothing fits" in result_to_text(result)


def test_other_batches_are_compared_by_image(monkeypatch):
    monkeypatch.setattr(module, "MODEL_SHARDS", (1,))
    config = small.recipe()
    result = search(
        config,
        parse_topology("h100:2"),
        small.dataset(config),
        can_compile=False,
        other_batches=True,
    )

    assert set(list_column(result.candidates, "config.global_batch")) == {8, 16, 32, 64, 128}

    rates = list_column(result.candidates, "seconds_per_image")
    assert rates == sorted(rates)


def search_compiled(monkeypatch, plan, topology, num_tries, fitting):
    """Search with a compiler for which only the tries with these numbers fit.

    Returns the result, and the candidates in the order in which they were compiled.
    """
    tried = []
    small_memory = plan.memory
    large_memory = dataclasses.replace(plan.memory, temporary=10**12)

    def compile_plan(config, *_, **__):
        tried.append(config)
        memory = small_memory if len(tried) in fitting else large_memory
        return dataclasses.replace(
            plan,
            config=config,
            memory=memory,
        )

    monkeypatch.setattr(module, "make_plan", compile_plan)
    result = search(
        load_recipe(H14),
        parse_topology(topology),
        JFT,
        num_tries=num_tries,
    )

    order = [find_candidate(result, config) for config in tried]
    return result, order


def find_candidate(result, config):
    return next(c for c in result.candidates if c.config == config)


def count_below(candidates, num_bytes):
    return sum(c.needed_bytes <= num_bytes for c in candidates)


def test_what_is_in_doubt_is_tried_last(monkeypatch, result):
    result, order = search_compiled(
        monkeypatch,
        result.winner,
        "v5e:2x2",
        1,
        set(),
    )
    sure = result.usable_bytes
    limit = 1.15 * result.usable_bytes
    num_sure = count_below(result.candidates, sure)
    num_tried = count_below(result.candidates, limit)

    assert num_sure < num_tried < len(result.candidates), "or this proves nothing"

    are_sure = [c.needed_bytes <= sure for c in order]
    assert are_sure == [True] * num_sure + [False] * (num_tried - num_sure)
    assert max(c.needed_bytes for c in order) <= limit
    assert result.winner is None


@pytest.mark.slow
def test_tries_are_spent_on_the_least_recomputation_that_fits(monkeypatch, result):
    result, order = search_compiled(
        monkeypatch,
        result.winner,
        "v5e:16x16",
        4,
        {3},
    )
    step_seconds = list_column(order, "step_seconds")
    shardings = list_column(order, "config.sharding")

    assert list_column(order, "config.model.remat") == ["none"] * 4
    assert step_seconds == sorted(step_seconds)
    assert ("fsdp", 16) in [(s.parameters, s.num_replicas) for s in shardings]
    assert result.winner.config == order[2].config

    _, order = search_compiled(
        monkeypatch,
        result.winner,
        "v5e:2x2",
        20,
        set(),
    )
    usable_bytes = parse_topology("v5e:2x2").fabric.usable_bytes
    fitting = [c for c in order if c.needed_bytes <= usable_bytes]
    policies = list_column(fitting, "config.model.remat")
    num_none = policies.count("none")

    assert policies[:num_none] == ["none"] * num_none
    assert {*policies} == {*POLICIES}


def test_the_compiler_decides_between_the_best(monkeypatch, result):
    result, order = search_compiled(
        monkeypatch,
        result.winner,
        "v100:2",
        3,
        {2},
    )

    assert len(order) == 3
    assert result.winner.config == order[1].config
    assert "does not fit" in result_to_text(result)


def test_custom_code_cannot_be_ordered_by_arithmetic(monkeypatch):
    config = load_recipe(H14)
    own = dataclasses.replace(
        architecture_of(config, 10),
        block="mine:Block",
    )
    monkeypatch.setattr(module, "find_network", lambda *_: Network(own))

    with pytest.raises(ValueError, match="mine:Block: no formula"):
        search(config, parse_topology("v5e:8x8"), JFT)


def test_no_layout_is_possible():
    config = small.recipe("global_batch=3")
    message = "No layout of this recipe is possible on h100:8"

    with pytest.raises(ValueError, match=message):
        search(
            config,
            parse_topology("h100:8"),
            small.dataset(config),
            can_compile=False,
        )
