"""Steps compiled for GPUs that this machine does not have, where the plugin of the compiler is installed.

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
from vit_jax.tools.plan.arithmetic import estimate_memory
from vit_jax.tools.plan.dataset import choose_dataset
from vit_jax.tools.plan.estimate import make_plan
from vit_jax.tools.plan.report import to_text
from vit_jax.tools.plan.topology import parse_topology

MISSING = aot.explain_missing_compiler(parse_topology("h100:1"))
pytestmark = [pytest.mark.tools, pytest.mark.skipif(bool(MISSING), reason=MISSING)]
HALF = ["--config.model.compute_dtype=bfloat16"]
S16 = "pretrain_imagenet1k:ViT-S/16"
L16 = "pretrain_imagenet1k:ViT-L/16"
H14 = "pretrain_jft:ViT-H/14"
LOOP = ("model.remat=dots", "model.scan_unroll=1", "optimizer.accumulation_steps=1")


def plan_recipe(recipe, topology, *overrides):
    path = f"configs/{recipe.replace(':', '.py:')}"
    config = load_recipe(path, [f"--config.{override}" for override in overrides])
    return make_plan(
        config,
        parse_topology(topology),
        choose_dataset(recipe, config),
    )


def describe_devices(devices):
    described = []
    for device in devices:
        kind = device.device_kind.removeprefix("NVIDIA ")
        described.append((device.id, kind, device.process_index))
    return described


@pytest.mark.newest
@pytest.mark.parametrize(
    "name",
    [*(f"{kind}:2" for kind in gpu_targets.TARGETS), "2*h100:4"],
)
def test_stand_ins_are_like_the_devices_of_the_compiler(name):
    topology = parse_topology(name)
    before = dict(os.environ)

    real = describe_devices(aot.list_devices(topology))
    stand_ins = []
    for d in topology.stand_ins():
        stand_ins.append((d.id, d.device_kind, d.process_index))

    assert real == stand_ins
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    "kind", ["a100-80gb", pytest.param("b200", marks=pytest.mark.newest), "l4"]
)
def test_a_step_is_compiled_for_each_kind(kind):
    """Kinds of memory sum up, the state agrees with arithmetic, and products and fusions take time."""
    config = small.recipe("model.compute_dtype=bfloat16")
    plan = make_plan(
        config,
        parse_topology(f"{kind}:2"),
        small.dataset(config),
    )
    timeline = plan.timeline

    assert plan.fits, plan.reason
    assert timeline.compute_seconds > 0
    assert timeline.kernel_seconds > 0
    assert {len(c.devices) for c in timeline.collectives} == {2}
    assert timeline.num_unknown_loops == 0
    assert timeline.num_unknown_kernels == 0
    assert "bytes at 90% of the bandwidth" in to_text(plan)

    arithmetic = estimate_memory(plan.run, plan.topology)
    for name in ("parameters", "optimizer", "average"):
        expected = getattr(arithmetic, name)
        assert getattr(plan.memory, name) == pytest.approx(expected, rel=0.01)


def test_nodes_hold_replicas():
    config = small.recipe("sharding.parameters=fsdp", "model.compute_dtype=bfloat16")
    plan = make_plan(
        config,
        parse_topology("2*h100:4"),
        small.dataset(config),
    )
    collectives = plan.timeline.collectives
    over_the_network = []
    for c in collectives:
        if c.devices == (0, 4):
            over_the_network.append(c)

    gathers = [c for c in collectives if c.operation == "all-gather"]

    assert dict(plan.run.batch_sharding.mesh.shape) == {
        "replica": 2,
        "data": 4,
        "model": 1,
    }
    assert over_the_network
    assert min(c.seconds for c in over_the_network) > 20e-6
    assert {len(c.devices) for c in gathers} == {4}


def test_s16_fits_one_h100_and_its_time_is_plausible():
    plan = plan_recipe(S16, "h100:1", "global_batch=256", *LOOP)
    flops = plan.run.training_flops_per_image * 256
    product_seconds = flops / plan.topology.chip.peak_bf16_flops

    assert plan.fits
    assert 4 < plan.memory.total / 2**30 < 10
    assert plan.memory.activations > 0.2 * plan.memory.total, "kept by the loop"
    assert product_seconds < plan.step_seconds < 10 * product_seconds


@pytest.fixture(scope="module")
def small_b16():
    """The step of a B/16 of two layers, compiled for one H100."""
    overrides = ("global_batch=32", "model.depth=2", *LOOP, "model.remat=none")
    plan = plan_recipe("pretrain_imagenet1k:ViT-B/16", "h100:1", *overrides)
    return plan.compiled.text


def test_cublas_computes_biases_gelu_and_sums(small_b16):
    """Separate kernels would read and write the hidden units once more."""
    epilogues = re.findall(r'"epilogue":"([A-Z_]+)"', small_b16)
    sums = re.findall(r'"beta":1\b', small_b16)

    # Once, in the loop over layers: its gradient needs the input, which is kept.
    assert epilogues.count("BIAS_GELU_AUX") == 1
    # The gradients through queries, keys and values are added.
    assert len(sums) == 2


def test_an_update_writes_kernels_in_their_place(small_b16):
    """A copy would read and write each parameter once more."""
    shapes = re.findall(r"= f32\[([\d,]+)\]\S* copy\(", small_b16)

    assert "= f32[2,768,3072]" in small_b16
    assert "2,768,3072" not in shapes
    assert "2,3072,768" not in shapes


def test_an_update_adds_up_rows(small_b16):
    """A sum over all values at once would halve the speed of the kernel."""
    programs = hlo.parse(small_b16)
    updates = []
    for instruction in programs.computations[programs.entry]:
        shapes = [array.dims for array in instruction.arrays]
        if instruction.opcode == "fusion" and shapes.count((2, 768, 3072)) > 1:
            updates.append(shapes)

    assert updates
    for shapes in updates:
        others = [shape for shape in shapes if shape != (2, 768, 3072)]
        assert set(others) <= {(2, 768)}


def test_h14_with_a_thousand_images_does_not_fit_one_h100():
    plan = plan_recipe(H14, "h100:1", "global_batch=1024", *LOOP)

    assert isinstance(plan.compiled, aot.Executable), "XLA for GPUs compiles also what does not fit"
    assert not plan.fits
    assert "DOES NOT FIT" in to_text(plan)


@pytest.mark.newest
def test_l16_with_fsdp_gathers_and_scatters_beside_its_products():
    plan = plan_recipe(
        L16,
        "h100:8",
        "sharding.parameters=fsdp",
        "global_batch=1024",
        *LOOP,
    )
    opcodes = set()
    for instructions in hlo.parse(plan.compiled.text).computations.values():
        opcodes.update(instruction.opcode for instruction in instructions)
    expected = {
        "all-gather-start",
        "all-gather-done",
        "reduce-scatter-start",
        "reduce-scatter-done",
    }

    assert expected <= opcodes

    seconds = {"all-gather": 0.0, "reduce-scatter": 0.0}
    for collective in plan.timeline.collectives:
        if collective.operation in seconds:
            seconds[collective.operation] += collective.count * collective.seconds

    assert min(seconds.values()) > 0
    assert plan.timeline.collective_seconds < 0.5 * sum(seconds.values()), "most of it is hidden"


def build_command(verb, data_dir, workdir):
    if verb == "doctor":
        return ["doctor"]
    if verb == "plan":
        recipe = f"--config={small.RECIPE}"
        return [
            "plan",
            "--topology=h100:2",
            recipe,
            *small.WORDS,
            *HALF,
            "--json",
        ]
    return commands.pretraining(
        data_dir,
        workdir,
        *LENGTH,
        "input.num_workers=1",
    )


@pytest.mark.parametrize("verb", ["doctor", "plan", "pretrain"])
@pytest.mark.skipif(
    backend.default_platforms({}, pathlib.Path("/")) == "", reason="there may be an accelerator"
)
def test_a_command_says_nothing_about_absent_gpus(verb, data_dir, tmp_path):
    """Data workers print nothing about them either. A plan finds cuDNN."""
    variables = {}
    for name, value in os.environ.items():
        if name != "JAX_PLATFORMS":
            variables[name] = value

    words = build_command(verb, data_dir, tmp_path / "run")
    command = [sys.executable, "-m", "vit_jax", *words]

    ended = subprocess.run(
        command,
        env=variables,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )

    assert ended.returncode == 0
    (line,) = ended.stderr.splitlines()
    assert line.startswith(("next: vit-jax pretrain", "next: vit-jax evaluate"))
    if verb == "plan":
        values = json.loads(ended.stdout)
        assert values["basis"] == "compiled"
        assert values["attention"] == "cudnn"
