"""Plans by arithmetic, the data they assume, and totals worked out by hand."""

import dataclasses
import json
import types

import pytest

from tests import tiny
from tests.tiny import flags
from tests.tools.plan import small_plans as small
from vit_jax.api import create_model
from vit_jax.config import ModelConfig, build_architecture, load_recipe
from vit_jax.imports import backend
from vit_jax.imports.extras import install_command
from vit_jax.models.flops import FLOPS_PER_MAC, FORWARDS_PER_TRAINING_STEP, forward_macs
from vit_jax.sharding import convolutions
from vit_jax.tools.plan import aot, estimate
from vit_jax.tools.plan.arithmetic import Roofline
from vit_jax.tools.plan.dataset import IMAGENET, JFT, choose_dataset
from vit_jax.tools.plan.estimate import make_plan
from vit_jax.tools.plan.report import to_json, to_text
from vit_jax.tools.plan.search import search
from vit_jax.tools.plan.topology import parse_topology
from vit_jax.train.starting_weights import adapt


def make_small_plan(topology, *overrides, **options):
    config = small.recipe(*overrides)
    return make_plan(
        config,
        parse_topology(topology),
        small.dataset(config),
        **options,
    )


def test_without_the_compiler_it_falls_back_and_says_so(monkeypatch):
    monkeypatch.setattr(estimate.aot, "has_compiler", lambda: False)
    plan = make_small_plan("v5e:2x2")

    assert plan.compiled is None
    assert f"libtpu is not installed; {install_command('tpu')}" in to_text(plan)
    with pytest.raises(ValueError, match="No compiler for v5e:2x2"):
        aot.list_devices(parse_topology("v5e:2x2"))


@pytest.mark.parametrize(
    ("plugins", "has_ptxas"),
    [
        (["libtpu"], True),
        (["jax-cuda12-plugin", "libtpu"], False),
    ],
)
def test_without_the_compiler_for_gpus_it_falls_back_and_says_so(
    monkeypatch,
    plugins,
    has_ptxas,
):
    monkeypatch.setattr(backend, "plugins", lambda: dict.fromkeys(plugins, "1.2"))
    monkeypatch.setattr(aot, "_has_ptxas", lambda: has_ptxas)
    plan = make_small_plan("h100:2")
    message = f"the compiler for GPUs is not installed; {install_command('plan-gpu')}"

    assert plan.compiled is None
    assert message in to_text(plan)
    with pytest.raises(ValueError, match="No compiler for h100:2"):
        aot.list_devices(parse_topology("h100:2"))


def test_what_is_too_large_does_not_fit():
    overrides = ("model.width=8192", "model.mlp_dim=32768", "model.depth=24")
    plan = make_small_plan("v100:1", *overrides, can_compile=False)

    assert plan.memory.total > plan.usable_bytes
    assert not plan.fits
    assert "DOES NOT FIT" in to_text(plan)


def test_json_holds_the_same_numbers():
    plan = make_small_plan(
        "2*h100:8",
        price_per_chip_hour=2.0,
        can_compile=False,
    )
    values = json.loads(json.dumps(to_json(plan)))

    assert values["basis"] == "arithmetic"
    assert values["needed_bytes"] == plan.memory.total
    num_bytes = values["memory"].values()
    seconds = values["roofline"].values()
    assert sum(num_bytes) == plan.memory.total
    assert values["step_seconds"] == pytest.approx(sum(seconds))
    assert values["totals"]["steps"] == plan.run.steps.total
    assert values["num_chips"] == 16


def test_the_data_of_a_recipe():
    recipe = "configs/pretrain_jft.py:ViT-H/14"
    config = load_recipe(recipe)
    imagenet = dataclasses.replace(config, data="tfds:imagenet2012")

    assert choose_dataset(f"/elsewhere/{recipe}", config) == JFT
    assert choose_dataset(recipe, imagenet) == IMAGENET

    both = choose_dataset(
        "own.py",
        config,
        num_examples=5,
        num_classes=7,
    )
    assert both.num_examples == 5
    assert both.num_classes == 7
    assert both.source == "the command line"

    one = choose_dataset(recipe, config, num_classes=7)
    assert one.num_examples == JFT.num_examples
    assert one.num_classes == 7
    assert "command line" in one.source


def test_data_of_unknown_size_are_rejected():
    recipe = "configs/pretrain_jft.py:ViT-H/14"
    config = load_recipe(recipe)
    photos = dataclasses.replace(config, data="folder:/my/images")
    message = "--num_examples=N and --num_classes=N"

    with pytest.raises(ValueError, match=message):
        choose_dataset(recipe, photos)

    with pytest.raises(ValueError, match="not known here"):
        choose_dataset("own.py", config, num_examples=5)


H14 = build_architecture(
    ModelConfig(name="ViT-H/14"),
    image_size=(224, 224),
    num_classes=18291,
)


def compute_totals(
    topology,
    *,
    steps=864_000,
    seconds=0.1,
    price=1.5,
    in_phases=False,
    architecture=H14,
):
    """Return the totals of H/14 with 4096 images a step.

    In phases, half of the steps have half of the images, with a quarter of the FLOPs of each.
    """
    config = load_recipe("configs/pretrain_jft.py:ViT-H/14")
    flops = FORWARDS_PER_TRAINING_STEP * FLOPS_PER_MAC * forward_macs(H14)
    phases = [(steps, 4096, flops)]
    if in_phases:
        early = (steps // 2, 2048, flops // 4)
        late = (steps - steps // 2, 4096, flops)
        phases = [early, late]

    run = types.SimpleNamespace(
        steps=types.SimpleNamespace(total=steps),
        architecture=architecture,
        training_flops_per_image=flops,
        images=lambda step: sum(count * batch for count, batch, _ in phases),
        training_flops=lambda step: sum(count * batch * flops for count, batch, flops in phases),
        earlier=phases[:-1],
    )
    plan = estimate.Plan(
        config,
        parse_topology(topology),
        JFT,
        estimate.Network(architecture),
        run,
        None,
        "",
        None,
        None,
        Roofline(seconds, 0, 0, 0),
        price,
    )
    return plan.totals


def test_a_day_on_a_pod():
    total = compute_totals("v5p:8x8x8")
    useful = total.exaflops * 1e18 / (total.days * 86400)

    assert total.core_days == pytest.approx(1024)  # two TensorCores a chip
    assert total.days == pytest.approx(1)
    assert total.chip_hours == pytest.approx(512 * 24)
    assert total.price == pytest.approx(512 * 24 * 1.5)
    assert total.steps == 864_000
    assert total.images == 864_000 * 4096
    assert total.images_per_second == pytest.approx(40_960)
    assert total.mfu == pytest.approx(useful / (512 * 459e12))
    # The share of the peak of TPU v3 cores, 61.5 TFLOP/s each, is the same.
    v3_cores = total.tpu_v3_core_days / total.days
    assert total.mfu == pytest.approx(useful / (v3_cores * 61.5e12))


def test_totals_of_phases():
    complete = compute_totals("v5p:8x8x8")
    total = compute_totals("v5p:8x8x8", in_phases=True)
    share = 0.5 + 0.5 / 8

    assert total.days == pytest.approx(share)
    assert total.images == pytest.approx(0.75 * complete.images)
    assert total.exaflops == pytest.approx(share * complete.exaflops)


def test_totals_of_custom_code_on_gpus():
    """GPUs have no TPU cores, and custom code has no known FLOPs."""
    custom = dataclasses.replace(H14, block="mine:Block")
    total = compute_totals(
        "h100:8",
        price=None,
        architecture=custom,
    )

    assert total.price is None
    assert total.core_days == pytest.approx(8)
    assert total.mfu is None
    assert total.exaflops is None


def test_totals_of_the_paper():
    """The paper counts 2,500 TPUv3-core-days for 4,262 exaFLOPs: these are 32 % of their peak."""
    steps = round(14 * 303e6 / 4096)
    seconds = 4262e18 / steps / (0.32 * 256 * 197e12)
    total = compute_totals(
        "v5e:16x16",
        steps=steps,
        seconds=seconds,
    )

    assert total.tpu_v3_core_days == pytest.approx(2500, rel=0.03)


@pytest.mark.parametrize(
    ("machine", "bandwidth_bound"),
    [("v5e:4x4", False), ("v6e:4x4", True)],
)
def test_the_least_time_of_a_step(machine, bandwidth_bound):
    """Products of 768 x 768 read and write more than they compute on v6e.

    Those of the MLP never do.
    """
    recipe = "configs/pretrain_imagenet1k.py:ViT-B/16"
    topology = parse_topology(machine)
    config = load_recipe(recipe, ["--config.sharding.parameters=replicated"])
    plan = make_plan(config, topology, IMAGENET, can_compile=False)

    tokens = 256 * 197
    width = 768
    peak = topology.chip.peak_bf16_flops
    bandwidth = topology.chip.memory_bandwidth_bytes_per_second
    mlp = 6 * 2 * tokens * width * 4 * width / peak
    out_compute = 3 * 2 * tokens * width**2 / peak
    out_memory = 3 * 2 * (2 * tokens * width + width**2) / bandwidth
    # Without query, key, value, attention, embedding, head and update.
    least = 12 * (mlp + max(out_compute, out_memory))
    flops = plan.run.training_flops_per_image * 256 / peak

    assert max(least, flops) < plan.limit_seconds < 1.35 * flops
    assert (plan.limit_seconds > 1.2 * flops) == bandwidth_bound
    assert "of this limit" in to_text(plan)


def test_the_least_time_of_a_resnet_is_not_known():
    recipe = "configs/pretrain_jft.py:R50x1"
    plan = make_plan(
        load_recipe(recipe),
        parse_topology("v5e:4x4"),
        JFT,
        can_compile=False,
    )

    assert plan.limit_seconds is None
    assert "of this limit" not in to_text(plan)


@pytest.fixture(scope="module")
def weights_path(tmp_path_factory):
    """Return weights that differ from their namesake: width, registers and layer scale."""
    path = tmp_path_factory.mktemp("weights") / "network"
    options = {
        "width": 24,
        "depth": 2,
        "mlp_dim": 48,
        "num_heads": 2,
        "registers": 3,
    }
    model = create_model(
        "ViT-Ti/16",
        image_size=32,
        num_classes=5,
        layer_scale=0.1,
        **options,
    )
    model.save(path, to="vit_jax")
    return path


def load_finetuning(*overrides):
    """Return a config that fine-tunes images of 48 pixels on the digits."""
    words = ("data=digits", "input.image_size=48", "global_batch=8", *overrides)
    return load_recipe("configs/finetune.py:any,own,rule=quick", flags(*words))


def test_fine_tuning_is_planned_for_the_network_of_its_weights(weights_path):
    config = load_finetuning(f"init_from={weights_path}")
    plan = make_plan(
        config,
        parse_topology("h100"),
        small.dataset(config),
        can_compile=False,
    )
    trained, *_ = adapt(config, tiny.source(20))

    assert plan.network.architecture == trained
    assert plan.run.architecture.width == 24
    assert plan.run.architecture.image_size == (48, 48)
    assert f"weights  {weights_path} (vit_jax" in to_text(plan)
    assert to_json(plan)["weights"] == plan.network.origin


@pytest.mark.parametrize("channels", [1, 4, 13])
def test_a_plan_counts_the_channels_of_images(weights_path, channels):
    """The weights are of RGB. Bands travel as float32, RGB as bytes."""
    start = f"init_from={weights_path}"
    rgb = plan_channels(load_finetuning(start))
    plan = plan_channels(load_finetuning(start, f"input.channels={channels}"))
    a = plan.run.architecture
    values = (channels - 3) * a.patch_size[0] * a.patch_size[1]
    flops = FORWARDS_PER_TRAINING_STEP * FLOPS_PER_MAC * 9 * values * a.width

    assert a.channels == channels
    assert plan.memory.batch == pytest.approx(4 * channels / 3 * rgb.memory.batch)
    assert plan.memory.parameters - rgb.memory.parameters == 4 * values * a.width
    more_flops = plan.run.training_flops_per_image - rgb.run.training_flops_per_image
    assert more_flops == flops
    assert (plan.limit_seconds > rgb.limit_seconds) == (channels > 3)


@pytest.mark.parametrize("name", ["R14x0.5", "R14x0.5+ViT-mu/4"])
def test_a_plan_counts_the_channels_of_a_resnet(name):
    recipe = f"configs/digits.py:{name}"
    rgb = plan_channels(load_recipe(recipe))
    plan = plan_channels(load_recipe(recipe, flags("input.channels=13")))
    root = convolutions.root(plan.run.architecture)
    more_values = 10 * root.kernel**2 * root.outputs

    assert root.inputs == 13
    assert plan.memory.parameters - rgb.memory.parameters == 4 * more_values
    assert plan.run.training_flops_per_image > rgb.run.training_flops_per_image


def plan_channels(config):
    return make_plan(
        config,
        parse_topology("h100"),
        small.dataset(config),
        can_compile=False,
    )


def test_a_plan_of_lora_keeps_moments_of_the_factors_alone(weights_path):
    config = load_finetuning(f"init_from={weights_path}")
    adapted = load_finetuning(f"init_from={weights_path}", "optimizer.lora_rank=2")
    machine = parse_topology("h100")
    dataset = small.dataset(config)
    plan = make_plan(config, machine, dataset, can_compile=False)
    lora_plan = make_plan(adapted, machine, dataset, can_compile=False)

    assert lora_plan.memory.optimizer < plan.memory.optimizer
    # Frozen kernels are stored in bfloat16.
    assert lora_plan.memory.parameters < plan.memory.parameters
    assert lora_plan.step_seconds < plan.step_seconds


def test_a_search_keeps_the_network_of_the_weights(weights_path):
    config = load_finetuning(f"init_from={weights_path}")
    result = search(
        config,
        parse_topology("h100:2"),
        small.dataset(config),
        can_compile=False,
    )

    assert result.winner.run.architecture.registers == 3


def test_weights_on_another_machine_are_planned_by_the_name():
    overrides = ("model.name=ViT-Ti/16", "init_from=/nowhere/weights")
    config = load_finetuning(*overrides)
    plan = make_plan(
        config,
        parse_topology("h100"),
        small.dataset(config),
        can_compile=False,
    )

    assert plan.run.architecture.name == "ViT-Ti/16"
    assert "/nowhere/weights is not on this machine" in to_text(plan)

    message = "/nowhere/weights: there is no such file"
    with pytest.raises(ValueError, match=message):
        estimate.find_network(load_finetuning("init_from=/nowhere/weights"), 10)
