"""The compiler for GPUs: where its plugin is installed, steps compiled for GPUs that this machine does not have.

All of them take about 80 CPU seconds with JAX 0.10.2.
"""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.integration import commands
from tests.tiny import LENGTH, ROOT
from tests.tools.plan import small_plans as small
from vit_jax.config import load_recipe
from vit_jax.imports import backend
from vit_jax.tools.plan import aot, gpu_targets, hlo
from vit_jax.tools.plan.arithmetic import arithmetic_memory
from vit_jax.tools.plan.dataset import choose_dataset
from vit_jax.tools.plan.estimate import make_plan
from vit_jax.tools.plan.report import to_text
from vit_jax.tools.plan.topology import parse_topology

MISSING = aot.missing_compiler(parse_topology("h100:1"))
pytestmark = [pytest.mark.tools, pytest.mark.skipif(bool(MISSING), reason=MISSING)]
HALF = ["--config.model.compute_dtype=bfloat16"]
S16 = "pretrain_imagenet1k:ViT-S/16"
L16 = "pretrain_imagenet1k:ViT-L/16"
H14 = "pretrain_jft:ViT-H/14"
LOOP = ("model.remat=dots", "model.scan_unroll=1", "optimizer.accumulation_steps=1")


def planned(recipe, topology, *overrides):
    config = load_recipe(
        f"configs/{recipe.replace(':', '.py:')}", [f"--config.{override}" for override in overrides]
    )
    return make_plan(config, parse_topology(topology), choose_dataset(recipe, config))


@pytest.mark.parametrize("name", [f"{kind}:2" for kind in gpu_targets.TARGETS] + ["2*h100:4"])
def test_stand_ins_are_like_the_devices_of_the_compiler(name):
    topology = parse_topology(name)
    before = dict(os.environ)
    real = [
        (d.id, d.device_kind.removeprefix("NVIDIA "), d.process_index)
        for d in aot.topology_devices(topology)
    ]

    assert real == [(d.id, d.device_kind, d.process_index) for d in topology.stand_ins()]
    assert dict(os.environ) == before


@pytest.mark.newest
@pytest.mark.parametrize("kind", ["a100-80gb", "b200", "l4"])
def test_a_step_is_compiled_for_each_kind(kind):
    """Memory of kinds that sum up, and the state of arithmetic; products and fusions take time."""
    config = small.recipe("model.compute_dtype=bfloat16")
    plan = make_plan(config, parse_topology(f"{kind}:2"), small.dataset(config))

    assert plan.fits, plan.reason
    assert min(plan.timeline.compute_seconds, plan.timeline.kernel_seconds) > 0
    assert {len(c.devices) for c in plan.timeline.collectives} == {2}
    assert (plan.timeline.num_unknown_loops, plan.timeline.num_unknown_kernels) == (0, 0)

    arithmetic = arithmetic_memory(plan.run, plan.topology)
    for kind in ("parameters", "optimizer", "average"):
        assert getattr(plan.memory, kind) == pytest.approx(getattr(arithmetic, kind), rel=0.01)
    assert "bytes at 90% of the bandwidth" in to_text(plan)


def test_nodes_hold_replicas():
    config = small.recipe("sharding.parameters=fsdp", "model.compute_dtype=bfloat16")
    plan = make_plan(config, parse_topology("2*h100:4"), small.dataset(config))

    assert dict(plan.run.batch_sharding.mesh.shape) == {"replica": 2, "data": 4, "model": 1}

    across = [c for c in plan.timeline.collectives if c.devices == (0, 4)]
    assert across
    assert min(c.seconds for c in across) > 20e-6, "over the network"
    assert {len(c.devices) for c in plan.timeline.collectives if c.operation == "all-gather"} == {4}


@pytest.mark.newest
def test_s16_fits_one_h100_and_its_time_is_plausible():
    plan = planned(S16, "h100:1", "global_batch=256", *LOOP)

    assert plan.fits
    assert 4 < plan.memory.total / 2**30 < 10
    assert plan.memory.activations > 0.2 * plan.memory.total, "what the loop keeps"

    products = plan.run.training_flops_per_image * 256 / plan.topology.chip.peak_bf16_flops
    assert products < plan.step_seconds < 10 * products


def test_cublas_computes_biases_gelu_and_sums():
    """Or kernels of their own would read and write the hidden units once more."""
    overrides = ("global_batch=32", "model.depth=2", *LOOP, "model.remat=none")
    plan = planned("pretrain_imagenet1k:ViT-B/16", "h100:1", *overrides)
    epilogues = re.findall(r'"epilogue":"([A-Z_]+)"', plan.compiled.text)

    assert epilogues.count("BIAS_GELU_AUX") == 1, (
        "in the loop over layers; the gradient needs the input, which is kept"
    )
    assert len(re.findall(r'"beta":1\b', plan.compiled.text)) == 2, (
        "of the gradients through queries, keys and values"
    )


def test_h14_with_a_thousand_images_does_not_fit_one_h100():
    plan = planned(H14, "h100:1", "global_batch=1024", *LOOP)

    assert isinstance(plan.compiled, aot.Executable), "XLA for GPUs compiles also what does not fit"
    assert not plan.fits
    assert "DOES NOT FIT" in to_text(plan)


@pytest.mark.newest
def test_l16_with_fsdp_gathers_and_scatters_beside_its_products():
    plan = planned(L16, "h100:8", "sharding.parameters=fsdp", "global_batch=1024", *LOOP)
    opcodes = {i.opcode for c in hlo.parse(plan.compiled.text).computations.values() for i in c}

    assert {
        "all-gather-start",
        "all-gather-done",
        "reduce-scatter-start",
        "reduce-scatter-done",
    } <= opcodes

    totals = {"all-gather": 0.0, "reduce-scatter": 0.0}
    for collective in plan.timeline.collectives:
        if collective.operation in totals:
            totals[collective.operation] += collective.count * collective.seconds

    assert min(totals.values()) > 0
    assert plan.timeline.collective_seconds < 0.5 * sum(totals.values()), "most of it is hidden"


@pytest.mark.parametrize("verb", ["doctor", "plan", "pretrain"])
@pytest.mark.skipif(
    backend.default_platforms({}, pathlib.Path("/")) == "", reason="there may be an accelerator"
)
def test_a_command_says_nothing_about_absent_gpus(verb, data_dir, tmp_path):
    """Neither do data workers. A plan finds cuDNN."""
    words = {
        "doctor": ["doctor"],
        "plan": [
            "plan",
            "--topology=h100:2",
            f"--config={small.RECIPE}",
            *small.WORDS,
            *HALF,
            "--json",
        ],
        "pretrain": commands.pretraining(
            data_dir, tmp_path / "run", *LENGTH, "input.num_workers=1"
        ),
    }[verb]
    variables = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    command = [sys.executable, "-m", "vit_jax", *words]
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, cwd=ROOT)

    assert (ended.returncode, ended.stderr) == (0, "")

    if verb == "plan":
        values = json.loads(ended.stdout)
        assert (values["basis"], values["attention"]) == ("compiled", "cudnn")
