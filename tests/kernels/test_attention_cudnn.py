"""cuDNN's attention without a GPU: its numbers, choice, kept activations and compiled calls."""

import collections
import functools
import json
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tests.models.small_models import FakeDevices
from tests.models.test_attention import distances, projections, results
from tests.models.test_vit import small
from vit_jax.arrays import abstract_batch
from vit_jax.config import ShardingConfig, load_recipe
from vit_jax.kernels import attention_cudnn, dispatch
from vit_jax.kernels.devices import trace_for
from vit_jax.models.attention import Attention, find_attention_form
from vit_jax.models.encoder import REMAT_POLICIES
from vit_jax.sharding import Placement, build_mesh
from vit_jax.tools.plan import aot
from vit_jax.tools.plan.topology import parse_topology
from vit_jax.train.assemble import assemble
from vit_jax.train.state_builder import architecture_of

BFLOAT16 = jnp.dtype("bfloat16")
FLOAT16 = jnp.dtype("float16")
FLOAT32 = jnp.dtype("float32")


def build_gpu(*compute_capability):
    return FakeDevices(
        platform="gpu",
        compute_capability=compute_capability,
    )


H100 = build_gpu(9, 0)
T4 = build_gpu(7, 5)
AMD = build_gpu(0, 0)
SIZES = {
    "length": 197,
    "num_heads": 3,
    "head_dim": 64,
    "dtype": BFLOAT16,
}


@pytest.fixture
def stand_in(monkeypatch):
    """Replace the calls of cuDNN by XLA; the backward call checks what the forward call gave."""

    def forward(query_BSTh, key_BSTh, value_BSTh):
        scale = query_BSTh.shape[-1] ** -0.5
        scores_BTSK = jnp.einsum(
            "BSTh,BKTh->BTSK",
            scale * query_BSTh,
            key_BSTh,
        )
        output_BTSh = jnp.einsum(
            "BTSK,BKTh->BTSh",
            jax.nn.softmax(scores_BTSK),
            value_BSTh,
        )
        log_sums_BTS = jax.nn.logsumexp(scores_BTSK, axis=-1)
        return output_BTSh, log_sums_BTS

    def backward(*operands_BSTh):
        *inputs, log_sums_BTS, gradient_BSTh, output_BSTh = operands_BSTh
        expected, pull_back = jax.vjp(forward, *inputs)
        output_BTSh = swap_tokens_and_heads(output_BSTh)
        gradient_BTSh = swap_tokens_and_heads(gradient_BSTh)

        same_output = jnp.allclose(expected[0], output_BTSh)
        same_sums = jnp.allclose(expected[1], log_sums_BTS)
        agree = same_sums & same_output

        checked = []
        zeros = jnp.zeros_like(log_sums_BTS)
        for gradient in pull_back((gradient_BTSh, zeros)):
            swapped = swap_tokens_and_heads(gradient)
            checked.append(jnp.where(agree, swapped, jnp.nan))
        return checked

    def ffi_call(target, results, **_):
        compute = backward if target.endswith("Backward") else forward
        workspace = jnp.zeros(0, jnp.uint8)

        def call(*operands):
            arrays = compute(*operands)
            return [*arrays[: len(results) - 1], workspace]

        return call

    monkeypatch.setattr(jax.ffi, "ffi_call", ffi_call)
    # The configuration of a call knows no float32.
    monkeypatch.setattr(attention_cudnn, "_describe_call", lambda *_: {})


def swap_tokens_and_heads(x):
    return x.swapaxes(1, 2)


@pytest.mark.parametrize("tokens", [16, 17])
def test_values_and_gradients_are_those_of_xla(tokens, stand_in):
    operands, gradient = projections(2, tokens, 3, 8, "float32")

    by_cudnn = results("cudnn", operands, gradient, 3)
    by_xla = results("xla", operands, gradient, 3)

    assert max(distances(by_cudnn, by_xla)) < 5e-6


def find_cudnn_calls(attend, dtype):
    """Return the calls of cuDNN in a program for GPUs that runs attention with its gradient."""
    operand = jnp.zeros((2, 16, 3, 8), dtype)

    def loss(*operands):
        output = attend(*operands)
        return output.astype(jnp.float32).sum()

    def run(*operands):
        differentiate = jax.grad(loss, argnums=(0, 1, 2))
        return attend(*operands), differentiate(*operands)

    traced = jax.jit(run).trace(operand, operand, operand)
    lowered = traced.lower(lowering_platforms=("cuda",))
    calls = []
    for line in lowered.as_text().splitlines():
        if "__cudnn$" in line:
            calls.append(describe_call(line))
    return calls


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_calls_are_those_of_jax(dtype, monkeypatch):
    """JAX lowers its own function for GPUs, where lengths are even, to the same calls."""
    monkeypatch.setattr(
        "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version",
        lambda: 91000,
    )
    attend_by_jax = functools.partial(
        jax.nn.dot_product_attention,
        implementation="cudnn",
    )

    calls = find_cudnn_calls(attention_cudnn._attend, dtype)
    expected = find_cudnn_calls(attend_by_jax, dtype)

    assert len(expected) == 3, "one without the log of the sums"
    assert calls == expected


DEFAULTS = ([], "0", 0, 0.0, False, "PRIMITIVE_TYPE_INVALID")


def remove_defaults(config):
    for name in list(config):
        if config[name] in DEFAULTS:
            del config[name]


def describe_call(line):
    """Return a call's target, attributes and types, without fields that XLA ignores or sets itself."""
    target = re.search(r'@"?(__cudnn\$\w+)', line)[1]
    types = line.rpartition(" : ")[2]
    attributes = re.findall(r"_layouts = \[(.*?xindex>)\]", line)
    assert len(attributes) == 2, "of operands and of results"

    backend = re.search(r'backend_config = "(.*?)(?<!\\)"[,}]', line)[1]
    unquoted = backend.replace("\\22", '"')
    config = json.loads(unquoted)["cudnn_fmha_backend_config"]
    config["algorithm"].pop("tuning_knobs", None)
    tensor_shape = config["intermediate_tensor_shape"]
    remove_defaults(tensor_shape)
    remove_defaults(tensor_shape["layout"])
    remove_defaults(config)
    config.pop("seed", None)
    return target, config, attributes, types


def test_devices_compute_their_images_and_heads(stand_in):
    sharding = ShardingConfig(num_model_shards=2)
    mesh = build_mesh(jax.devices()[:4], sharding)
    operands, gradient = projections(4, 17, 2, 8, "float32")
    expected = results("xla", operands, gradient, 2)

    with trace_for(Placement(mesh)):
        actual = results("cudnn", operands, gradient, 2)

    assert max(distances(actual, expected)) < 5e-6


@pytest.mark.parametrize(
    ("devices", "sizes", "form"),
    [
        (H100, {}, "cudnn"),
        (H100, {"length": 196, "dtype": FLOAT16}, "cudnn"),
        (H100, {"dtype": FLOAT32}, "xla"),
        (H100, {"head_dim": 20}, "xla"),
        (T4, {}, "xla"),
        (AMD, {}, "xla"),
        (None, {}, "xla"),  # the program may run anywhere
    ],
)
def test_auto_takes_cudnn_on_gpus_where_it_can(devices, sizes, form):
    sizes = SIZES | sizes

    with trace_for(devices):
        chosen = dispatch.choose_attention("auto", **sizes)

    assert chosen == form


@pytest.mark.parametrize(
    ("devices", "sizes", "rule"),
    [
        (H100, {"head_dim": 20}, "a multiple of 8 up to 256, not 20"),
        (H100, {"dtype": FLOAT32}, "bfloat16 or float16"),
        (T4, {}, "8.0, not 7.5"),
    ],
)
def test_the_explicit_form_is_rejected_with_the_rule(devices, sizes, rule):
    sizes = SIZES | sizes
    message = rf"model.attention='cudnn'.*{rule}.*Use auto or xla\."

    with (
        trace_for(devices),
        pytest.raises(ValueError, match=message),
    ):
        dispatch.choose_attention("cudnn", **sizes)


@pytest.mark.parametrize(
    ("options", "form"),
    [
        ({}, "cudnn"),
        ({"pool": "gap", "block": "axial"}, "xla"),
        (
            {
                "pool": "gap",
                "block": "axial",
                "attention": "cudnn",
            },
            "cudnn",
        ),
        ({"pool": "gap", "position_embedding": "relative"}, "xla"),
    ],
    ids=["plain", "axial", "axial by cuDNN", "relative positions"],
)
def test_forms_of_architectures(options, form):
    architecture = small(
        width=128,
        num_heads=2,
        compute_dtype="bfloat16",
        **options,
    )

    with trace_for(H100):
        found = find_attention_form(architecture)

    assert found == form


@pytest.mark.parametrize(
    ("remat", "forwards"),
    [
        ("dots", 1),
        ("attention", 1),
        ("full", 2),
    ],
)
def test_rematerialisation_keeps_what_cudnn_computed(remat, forwards):
    attention = Attention(64, 2, dtype=BFLOAT16, rngs=nnx.Rngs(0), form="cudnn")
    x = jnp.zeros((2, 17, 64), BFLOAT16)

    @functools.partial(
        jax.checkpoint,
        policy=REMAT_POLICIES[remat],
        prevent_cse=False,
    )
    def attend(attention, x):
        output = attention(x, x)
        return output.astype(jnp.float32).sum()

    differentiate = jax.grad(attend, argnums=1)
    program = jax.make_jaxpr(differentiate)(attention, x)
    targets = re.findall(r"target_name=__cudnn\$(\w+)", str(program))
    calls = collections.Counter(targets)

    assert calls["fmhaSoftmax"] == forwards
    assert calls["fmhaSoftmaxBackward"] == 1


MISSING = aot.explain_missing_compiler(parse_topology("h100:1"))
FIELDS = (
    "model.depth=2",
    "model.width=128",
    "model.mlp_dim=256",
    "model.num_heads=2",
    "model.compute_dtype=bfloat16",
    "global_batch=16",
    "evaluation.global_batch=16",
    "model.remat=dots",
    "model.scan_unroll=1",
    "sharding.parameters=replicated",
    # Mixup and Adam have no part in attention. They take a third of the time of the compiler.
    "input.mixup_alpha=0",
    "optimizer.name=sgd",
    "optimizer.clip_global_norm=None",
)
# In the body of the loop over blocks.
ONE_CALL = {
    "fmhaSoftmax": 1,
    "fmhaSoftmaxBackward": 1,
}
PROGRAMS = {
    "197 tokens, full remat": (
        ONE_CALL | {"fmhaSoftmax": 2},
        1,
        "train",
        "model.pool=token",
        "model.remat=full",
    ),
    "196 tokens, data": (ONE_CALL, 8, "train", "sharding.parameters=fsdp"),
    "257 tokens, data x model": (
        ONE_CALL,
        8,
        "train",
        "model.pool=token",
        "model.name=ViT-S/14",
        "model.remat=attention",
        "sharding.num_model_shards=2",
    ),
    "evaluation": (
        {"fmhaSoftmax": 1},
        8,
        "evaluation",
        "model.pool=token",
        "sharding.num_model_shards=2",
    ),
}


def compile_case(step, num_gpus, fields):
    """Return the program of a step for GPUs that need not be there."""
    flags = [f"--config.{field}" for field in (*FIELDS, *fields)]
    config = load_recipe("configs/pretrain_s16_baseline.py", flags)
    devices = aot.list_devices(parse_topology(f"h100:{num_gpus}"))
    run = assemble(
        config,
        architecture_of(config, 1000),
        num_examples=10_000,
        devices=devices,
    )
    if step == "train":
        return aot.compile_step(run)

    batch = abstract_batch(
        run.evaluation_batch,
        run.architecture.image_shape,
        run.batch_sharding,
    )

    def lower():
        return run.evaluation_step.lower(run.abstract_state, batch)

    return aot.compile_program(lower, devices[0])


@pytest.mark.tools
@pytest.mark.skipif(bool(MISSING), reason=MISSING)
@pytest.mark.newest
@pytest.mark.parametrize("case", PROGRAMS)
def test_a_step_compiled_for_gpus_calls_cudnn(case):
    calls, num_gpus, step, *fields = PROGRAMS[case]

    text = compile_case(step, num_gpus, fields).text
    targets = re.findall(r'custom_call_target="__cudnn\$(\w+)"', text)

    assert collections.Counter(targets) == calls
