"""The layout that stands for `auto`: decided by formulas, written to config.json, kept when a run resumes."""

import dataclasses
import json
import shutil

import pytest

from tests import tiny
from tests.integration import commands
from tests.train import small_runs as runs
from tests.train.lifecycle.test_workdir import add_checkpoint, stored_config, take
from vit_jax.config import load_recipe
from vit_jax.sharding.fabrics import GIB
from vit_jax.tools.plan.arithmetic import estimate_memory
from vit_jax.tools.plan.dataset import choose_dataset
from vit_jax.tools.plan.topology import parse_topology
from vit_jax.train.assemble import architecture_of, assemble
from vit_jax.train.layout import POLICIES, RESERVE, keep_layout, usable_bytes

B16, L16 = (f"configs/pretrain_imagenet1k.py:ViT-{name}/16" for name in "BL")
H14 = "configs/pretrain_jft.py:ViT-H/14"


def assembled(recipe, machine, *overrides, **changes):
    """The run of a recipe on devices in name only, whose fields may change."""
    config = load_recipe(recipe, [f"--config.{override}" for override in overrides])
    dataset = choose_dataset(recipe, config)
    devices = [
        dataclasses.replace(device, **changes) for device in parse_topology(machine).stand_ins()
    ]
    architecture = architecture_of(config, dataset.num_classes)

    return assemble(config, architecture, num_examples=dataset.num_examples, devices=devices)


def layout(config):
    """Policy, micro-batches, parameters, replicas."""
    sharding = config.sharding
    return (
        config.model.remat,
        config.optimizer.accumulation_steps,
        sharding.parameters,
        sharding.num_replicas,
    )


def fits(run, machine):
    needed = estimate_memory(run, parse_topology(machine)).total
    return needed <= (1 - RESERVE) * usable_bytes(run.batch_sharding.mesh.devices.flat[0])


def test_on_cpus_nothing_is_computed_again_and_nothing_is_split():
    run = runs.assemble_config(
        runs.config("model.remat=auto", "sharding.parameters=auto"),
        devices=4,
    )

    assert layout(run.config) == ("none", 1, "replicated", None)
    assert run.architecture.remat == "none"


def test_the_tiny_run_has_written_its_layout(tiny_run):
    stored = stored_config(tiny_run.workdir)
    assert (stored["model"]["remat"], stored["optimizer"]["accumulation_steps"]) == ("none", 1)
    assert stored["sharding"]["parameters"] == "replicated"


def test_values_that_are_set_stay():
    given = (
        "model.remat=attention",
        "optimizer.accumulation_steps=2",
        "sharding.parameters=replicated",
    )

    assert layout(assembled(B16, "v5e:4x4", *given).config) == ("attention", 2, "replicated", None)

    given = ("sharding.num_replicas=4", "sharding.num_model_shards=2")
    run = assembled(B16, "v5e:4x4", *given)

    assert (run.config.sharding.num_replicas, run.config.sharding.num_model_shards) == (4, 2)
    assert run.config.model.remat == "none"


@pytest.mark.parametrize(
    "machine",
    ["v5e:4x4", "v5e:16x16", "v5p:2x2x4", "v6e:4x4", "h100:8", "2*v5e:8x8"],
)
@pytest.mark.parametrize("recipe", [B16, L16, H14])
def test_the_recipes_fit(recipe, machine):
    run = assembled(recipe, machine)
    assert run.architecture.remat == run.config.model.remat
    assert fits(run, machine)


def test_a_larger_batch_needs_more_parts_then_more_is_computed_again():
    """One device: parameters cannot be split."""
    found = []
    for batch in (16, 64, 128, 129, 512 + 1, 2048 + 1):  # odd numbers are not divided into parts
        run = assembled(L16, "v5e:1x1", f"global_batch={batch}", "evaluation.global_batch=16")
        found.append(
            (POLICIES.index(run.config.model.remat), run.config.optimizer.accumulation_steps)
        )

    assert found == sorted(found)
    assert found[0] == (0, 1)
    assert found[2][0] == 0
    assert found[2][1] > 1
    assert found[-1][0] == len(POLICIES) - 1


@pytest.mark.parametrize(
    ("machine", "batch", "parts"),
    [
        ("v5p:2x2x4", 4096, 4),
        ("v5e:4x4", 4096, 4),
        ("v5e:4x4", 1024, 1),
        ("v6e:4x4", 4096, 1),
        ("v5p:2x2x4", 4112, 1),
    ],
)
def test_large_micro_batches_are_split_where_they_are_slower(machine, batch, parts):
    """257 images on each chip cannot be divided; a v6e computes 256 at once."""
    assert (
        assembled(B16, machine, f"global_batch={batch}").config.optimizer.accumulation_steps
        == parts
    )


def test_narrow_networks_are_faster_with_large_micro_batches():
    narrow = ("model.width=384", "model.mlp_dim=1536", "model.num_heads=6")
    assert assembled(B16, "v5e:4x4", *narrow).config.optimizer.accumulation_steps == 1


def test_one_device_has_nothing_to_split_parameters_over():
    for batch in (1, 16, 4096):
        run = assembled(H14, "v5e:1x1", f"global_batch={batch}")
        assert run.config.sharding.parameters == "replicated"


def test_parameters_are_split_where_their_update_would_take_long():
    large, small = (assembled(B16, machine).config.sharding for machine in ("h100:8", "v5e:16x16"))
    assert (large.parameters, small.parameters, small.num_replicas) == ("replicated", "fsdp", 16)


def test_parameters_are_split_where_they_do_not_fit():
    wide = ("model.width=4096", "model.mlp_dim=16384", "model.num_heads=32")
    run = assembled(L16, "v5e:4x4", *wide)

    assert run.config.sharding.parameters == "fsdp"
    assert fits(run, "v5e:4x4")


def test_without_a_fit_the_layout_needs_the_least_memory():
    huge = ("model.width=8192", "model.mlp_dim=32768", "model.depth=96", "model.num_heads=64")
    run = assembled(L16, "v5e:2x2", *huge)

    assert not fits(run, "v5e:2x2")
    assert (run.config.model.remat, run.config.sharding.parameters) == ("full", "fsdp")


def test_a_device_of_an_unknown_kind_is_assumed_to_have_16_gib():
    unknown = assembled(L16, "v5e:4x4", device_kind="TPU v99")
    assert usable_bytes(unknown.batch_sharding.mesh.devices.flat[0]) == 16 * GIB
    assert "auto" not in layout(unknown.config)
    assert fits(unknown, "v5e:4x4")
    assert usable_bytes(parse_topology("v6e:1x1").stand_ins()[0]) > 31 * GIB
    assert usable_bytes(parse_topology("h100:1").stand_ins()[0]) == 60 * GIB


def test_all_processes_find_the_same():
    """Only the kind of the devices and their number count, not which of them a process has."""
    one, other = (assembled(H14, "v5e:8x8", process_index=index).config for index in (0, 3))
    assert one == other


RESOLVED = (
    "model.remat=full",
    "optimizer.accumulation_steps=2",
    "sharding.parameters=fsdp",
    "sharding.num_replicas=2",
)


@pytest.mark.parametrize(
    ("num_devices", "expected"),
    [
        (8, ("full", 2, "fsdp", 2)),
        (4, ("full", 2, "fsdp", 2)),
        (16, ("full", None, "fsdp", 2)),
        (1, ("full", 2, "auto", None)),
    ],
)
def test_a_resumed_run_keeps_its_layout(tmp_path, num_devices, expected):
    """Its policy always, its micro-batches and replicas where they divide the batch and the devices."""
    begun = runs.config(*RESOLVED)
    auto = runs.config()
    take(tmp_path, begun)

    assert keep_layout(auto, str(tmp_path), num_devices) == auto, "there is no checkpoint to resume"

    add_checkpoint(tmp_path)
    kept = keep_layout(auto, str(tmp_path), num_devices)

    assert layout(kept) == expected

    rest = {"model": auto.model, "optimizer": auto.optimizer, "sharding": auto.sharding}
    assert dataclasses.replace(kept, **rest) == auto

    other = runs.config(
        "model.remat=dots",
        "sharding.parameters=replicated",
        "optimizer.accumulation_steps=4",
    )

    assert keep_layout(other, str(tmp_path), num_devices) == other


def test_a_verb_that_resumes_a_run_keeps_its_layout(tiny_run, data_dir, tmp_path):
    workdir = shutil.copytree(tiny_run.workdir, tmp_path / "run")
    config = stored_config(workdir)
    config["model"]["remat"] = "dots"
    (workdir / "config.json").write_text(json.dumps(config))
    out = commands.succeed(commands.pretraining(data_dir, workdir, *tiny.LENGTH))

    assert "remat dots" in out
    assert stored_config(workdir)["model"]["remat"] == "dots"


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"model": {"remat": "auto"}}', '{"sharding": {"parameters": 3}}', "{}"],
)
def test_a_stored_config_without_a_layout(tmp_path, text):
    add_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(text)
    assert keep_layout(runs.config(), str(tmp_path), 1) == runs.config()
