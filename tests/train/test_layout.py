"""The layout that stands for `auto`: decided by formulas, written to config.json, kept on resume."""

import dataclasses
import json
import shutil

import pytest

from tests import tiny
from tests.integration import commands
from tests.train import small_runs as runs
from tests.train.lifecycle.test_workdir import add_checkpoint, claim_and_end, stored_config
from vit_jax.config import derive, load_recipe
from vit_jax.config.specification import store_config
from vit_jax.sharding.fabrics import GIB
from vit_jax.tools.plan.arithmetic import estimate_memory
from vit_jax.tools.plan.dataset import choose_dataset
from vit_jax.tools.plan.topology import parse_topology
from vit_jax.train.assemble import assemble
from vit_jax.train.layout import POLICIES, RESERVE, keep_layout, usable_bytes
from vit_jax.train.state_builder import architecture_of

B16 = "configs/pretrain_imagenet1k.py:ViT-B/16"
L16 = "configs/pretrain_imagenet1k.py:ViT-L/16"
H14 = "configs/pretrain_jft.py:ViT-H/14"


def assemble_recipe(recipe, machine, *overrides, **changes):
    """Return the run of a recipe on devices in name only, whose fields may change."""
    config = load_recipe(recipe, [f"--config.{override}" for override in overrides])
    dataset = choose_dataset(recipe, config)
    architecture = architecture_of(config, dataset.num_classes)
    devices = []
    for device in parse_topology(machine).stand_ins():
        devices.append(dataclasses.replace(device, **changes))

    return assemble(
        config,
        architecture,
        num_examples=dataset.num_examples,
        devices=devices,
    )


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


def test_on_cpus_all_but_products_is_recomputed_and_nothing_is_split():
    run = runs.assemble_config(
        runs.config("model.remat=auto", "sharding.parameters=auto"),
        devices=4,
    )

    assert layout(run.config) == ("dots", 1, "replicated", None)
    assert run.architecture.remat == "dots"


@pytest.mark.parametrize(
    ("platform", "override", "dtype"),
    [
        ("cpu", "auto", "float32"),
        ("gpu", "auto", "bfloat16"),
        ("tpu", "auto", "bfloat16"),
        ("cpu", "bfloat16", "bfloat16"),
        ("gpu", "float32", "float32"),
    ],
)
def test_the_compute_dtype_is_that_of_the_platform(
    platform,
    override,
    dtype,
):
    machine = "v5e:1x1" if platform == "tpu" else "h100:1"
    overrides = (f"model.compute_dtype={override}", "global_batch=64")
    run = assemble_recipe(B16, machine, *overrides, platform=platform)

    assert run.config.model.compute_dtype == dtype
    assert run.architecture.compute_dtype == dtype


def test_residual_units_on_a_cpu_keep_all_maps():
    run = assemble_recipe("configs/pretrain_jft.py:R50x1", "h100:1", platform="cpu")

    assert run.config.model.remat == "none"
    assert run.config.model.compute_dtype == "float32"


def test_a_resumed_run_keeps_its_dtype_and_policy(tmp_path):
    stored = runs.config("model.compute_dtype=bfloat16", "model.remat=full")
    claim_and_end(tmp_path / "run", stored)
    add_checkpoint(tmp_path / "run")
    resumed = runs.config("model.compute_dtype=auto", "model.remat=auto")
    kept = keep_layout(resumed, str(tmp_path / "run"), 1)

    assert kept.model.compute_dtype == "bfloat16"
    assert kept.model.remat == "full"


def test_the_tiny_run_has_written_its_layout(tiny_run):
    stored = stored_config(tiny_run.workdir)

    assert stored["model"]["remat"] == "none"
    assert stored["optimizer"]["accumulation_steps"] == 1
    assert stored["sharding"]["parameters"] == "replicated"


def test_policies_that_are_set_stay():
    run = assemble_recipe(
        B16,
        "v5e:4x4",
        "model.remat=attention",
        "optimizer.accumulation_steps=2",
        "sharding.parameters=replicated",
    )

    assert layout(run.config) == ("attention", 2, "replicated", None)


def test_axes_that_are_set_stay():
    run = assemble_recipe(
        B16,
        "v5e:4x4",
        "sharding.num_replicas=4",
        "sharding.num_model_shards=2",
    )

    assert run.config.sharding.num_replicas == 4
    assert run.config.sharding.num_model_shards == 2
    assert run.config.model.remat == "none"


def decide_layout(batch):
    """Return the index of the policy and the number of micro-batches of one device."""
    run = assemble_recipe(L16, "v5e:1x1", f"global_batch={batch}", "evaluation.global_batch=16")
    policy = POLICIES.index(run.config.model.remat)
    return policy, run.config.optimizer.accumulation_steps


@pytest.mark.parametrize(
    "machine",
    ["v5e:4x4", "v5e:16x16", "v5p:2x2x4", "v6e:4x4", "h100:8", "2*v5e:8x8"],
)
@pytest.mark.parametrize("recipe", [B16, L16, H14])
def test_the_recipes_fit(recipe, machine):
    run = assemble_recipe(recipe, machine)
    assert run.architecture.remat == run.config.model.remat
    assert fits(run, machine)


def test_a_larger_batch_needs_more_parts_then_more_is_computed_again():
    """Parameters of one device cannot be split, and odd batches not divided into parts."""
    layouts = []
    for batch in (16, 64, 128, 129, 512 + 1, 2048 + 1):
        layouts.append(decide_layout(batch))

    policy_of_128, parts_of_128 = layouts[2]
    policy_of_the_largest, _ = layouts[-1]

    assert layouts == sorted(layouts)
    assert layouts[0] == (0, 1)
    assert policy_of_128 == 0
    assert parts_of_128 > 1
    assert policy_of_the_largest == len(POLICIES) - 1


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
def test_large_micro_batches_are_split_where_they_are_slower(
    machine,
    batch,
    parts,
):
    """257 images on each chip cannot be divided; a v6e computes 256 at once."""
    run = assemble_recipe(B16, machine, f"global_batch={batch}")

    assert run.config.optimizer.accumulation_steps == parts


def test_narrow_networks_are_faster_with_large_micro_batches():
    narrow = ("model.width=384", "model.mlp_dim=1536", "model.num_heads=6")
    assert assemble_recipe(B16, "v5e:4x4", *narrow).config.optimizer.accumulation_steps == 1


@pytest.mark.parametrize("batch", [1, 16, 4096])
def test_one_device_has_nothing_to_split_parameters_over(batch):
    run = assemble_recipe(H14, "v5e:1x1", f"global_batch={batch}")

    assert run.config.sharding.parameters == "replicated"


def test_parameters_are_split_where_their_update_would_take_long():
    few_gpus = assemble_recipe(B16, "h100:8").config.sharding
    many_tpus = assemble_recipe(B16, "v5e:16x16").config.sharding

    assert few_gpus.parameters == "replicated"
    assert many_tpus.parameters == "fsdp"
    assert many_tpus.num_replicas == 16


def test_parameters_are_split_where_they_do_not_fit():
    wide = ("model.width=4096", "model.mlp_dim=16384", "model.num_heads=32")
    run = assemble_recipe(L16, "v5e:4x4", *wide)

    assert run.config.sharding.parameters == "fsdp"
    assert fits(run, "v5e:4x4")


def test_without_a_fit_the_layout_needs_the_least_memory():
    huge = ("model.width=8192", "model.mlp_dim=32768", "model.depth=96", "model.num_heads=64")

    run = assemble_recipe(L16, "v5e:2x2", *huge)

    assert not fits(run, "v5e:2x2")
    assert run.config.model.remat == "full"
    assert run.config.sharding.parameters == "fsdp"


def measure_device(machine):
    return usable_bytes(parse_topology(machine).stand_ins()[0])


def test_a_device_of_an_unknown_kind_is_assumed_to_have_16_gib():
    unknown = assemble_recipe(L16, "v5e:4x4", device_kind="TPU v99")
    device = unknown.batch_sharding.mesh.devices.flat[0]

    assert usable_bytes(device) == 16 * GIB
    assert "auto" not in layout(unknown.config)
    assert fits(unknown, "v5e:4x4")


def test_usable_memory_of_known_devices():
    assert measure_device("v6e:1x1") > 31 * GIB
    assert measure_device("h100:1") == 60 * GIB


def test_all_processes_find_the_same():
    """Only the kind of the devices and their number count, not which of them a process has."""
    first = assemble_recipe(H14, "v5e:8x8", process_index=0)
    fourth = assemble_recipe(H14, "v5e:8x8", process_index=3)

    assert first.config == fourth.config


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
    """It keeps its policy, and micro-batches and replicas that divide the batch and the devices."""
    auto = runs.config("model.remat=auto")
    claim_and_end(tmp_path, runs.config(*RESOLVED))
    assert keep_layout(auto, str(tmp_path), num_devices) == auto, "there is no checkpoint to resume"

    add_checkpoint(tmp_path)
    kept = keep_layout(auto, str(tmp_path), num_devices)
    with_auto_layout = dataclasses.replace(
        kept,
        model=auto.model,
        optimizer=auto.optimizer,
        sharding=auto.sharding,
    )

    assert layout(kept) == expected
    assert with_auto_layout == auto


@pytest.mark.parametrize("num_devices", [8, 4, 16, 1])
def test_a_resumed_run_takes_values_that_are_set(tmp_path, num_devices):
    config = runs.config(
        "model.remat=dots",
        "sharding.parameters=replicated",
        "optimizer.accumulation_steps=4",
    )
    claim_and_end(tmp_path, runs.config(*RESOLVED))
    add_checkpoint(tmp_path)

    assert keep_layout(config, str(tmp_path), num_devices) == config


def test_a_verb_that_resumes_a_run_keeps_its_layout(
    tiny_run,
    data_dir,
    tmp_path,
):
    workdir = shutil.copytree(tiny_run.workdir, tmp_path / "run")
    config = stored_config(workdir)
    config["model"]["remat"] = "dots"
    (workdir / "config.json").write_text(json.dumps(config))
    words = commands.pretraining(data_dir, workdir, *tiny.LENGTH, "model.remat=auto")
    out = commands.succeed(words)

    assert "remat dots" in out
    assert stored_config(workdir)["model"]["remat"] == "dots"


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"model": {"remat": "auto"}}',
        '{"sharding": {"parameters": 3}}',
        "{}",
    ],
)
def test_a_stored_config_without_a_layout(tmp_path, text):
    add_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(text)
    assert keep_layout(runs.config(), str(tmp_path), 1) == runs.config()


def test_the_config_of_a_run_is_the_requested_one(tiny_run):
    stored = load_recipe(str(tiny_run.workdir / "config.json"))

    assert stored == tiny_run.config


def test_a_stored_config_chooses_its_layout_again(tiny_run, tmp_path):
    requested = derive(tiny_run.config, {"model.remat": "auto"})
    content = store_config(tiny_run.config, requested)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(content))

    assert content["model"]["remat"] == "none"
    assert load_recipe(str(file)) == requested
