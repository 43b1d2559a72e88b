"""Time of a program for a GPU, against sums made by hand."""

import math
import types

import pytest

from tests.tools.plan.record_gpus import list_kernels
from vit_jax.sharding.chips import find_chip
from vit_jax.sharding.fabrics import FABRICS
from vit_jax.tools.plan import gpu_kernels, gpu_targets, hlo
from vit_jax.tools.plan.compiled_memory import measure_memory
from vit_jax.tools.plan.gpu_kernels import (
    BANDWIDTH,
    COLUMN_SUMS,
    LAUNCH_SECONDS,
    PRODUCTS,
    Kernels,
)
from vit_jax.tools.plan.timeline import simulate_step
from vit_jax.tools.plan.topology import parse_topology

# As XLA for GPUs prints programs: two layers in a loop, whose kernels are stacked and whose results
# are kept.
TEXT = """\
HloModule jit_train_step, is_scheduled=true

%fused_slice (p0: bf16[2,64,32], p1: s32[]) -> bf16[64,32] {
  %p0 = bf16[2,64,32]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %flat = bf16[2,2048]{1,0} bitcast(%p0)
  %exact = f32[2,2048]{1,0} convert(%flat)
  %row = f32[1,2048]{1,0} dynamic-slice(%exact, %p1, %p1), dynamic_slice_sizes={1,2048}
  %rounded = bf16[1,2048]{1,0} convert(%row)
  ROOT %kernel = bf16[64,32]{1,0} bitcast(%rounded)
}

%fused_update (p2: bf16[2,256,32], p3: bf16[256,32], p4: s32[]) -> bf16[2,256,32] {
  %p2 = bf16[2,256,32]{2,1,0} parameter(0)
  %p3 = bf16[256,32]{1,0} parameter(1)
  %p4 = s32[] parameter(2)
  %one = bf16[1,256,32]{2,1,0} bitcast(%p3)
  %updated = bf16[2,256,32]{2,1,0} dynamic-update-slice(%p2, %one, %p4, %p4, %p4)
  ROOT %same = bf16[2,256,32]{2,1,0} bitcast(%updated)
}

%fused_dot (p5: f32[256,32], p6: f32[32,16]) -> (f32[256,16], f32[256,32]) {
  %p5 = f32[256,32]{1,0} parameter(0)
  %p6 = f32[32,16]{1,0} parameter(1)
  %dot = f32[256,16]{1,0} dot(%p5, %p6), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %twice = f32[256,32]{1,0} add(%p5, %p5)
  ROOT %both = (f32[256,16]{1,0}, f32[256,32]{1,0}) tuple(%dot, %twice)
}

%fresh (p7: bf16[]) -> bf16[2,256,32] {
  %p7 = bf16[] parameter(0)
  ROOT %zeros = bf16[2,256,32]{2,1,0} broadcast(%p7), dimensions={}
}

%body (state: (s32[], bf16[2,256,32], bf16[2,64,32], bf16[256,64])) -> (s32[], bf16[2,256,32], bf16[2,64,32]) {
  %state = (s32[], bf16[2,256,32]{2,1,0}, bf16[2,64,32]{2,1,0}, bf16[256,64]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %kept = bf16[2,256,32]{2,1,0} get-tuple-element(%state), index=1
  %kernels = bf16[2,64,32]{2,1,0} get-tuple-element(%state), index=2
  %x = bf16[256,64]{1,0} get-tuple-element(%state), index=3
  %loop_slice_fusion = bf16[64,32]{1,0} fusion(%kernels, %i), kind=kLoop, calls=%fused_slice, \
metadata={op_name="jit(train_step)/jvp()/while/body/mlp/slice"}
  %product = (bf16[256,32]{1,0}, s8[33554432]{0}) custom-call(%x, %loop_slice_fusion), \
custom_call_target="__cublas$lt$matmul", metadata={op_name="jit(train_step)/jvp()/while/body/mlp/dot_general"}, \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  %value = bf16[256,32]{1,0} get-tuple-element(%product), index=0
  %fusion-start = ((bf16[2,256,32]{2,1,0}, bf16[256,32]{1,0}, s32[]), bf16[2,256,32]{2,1,0}, u32[]) \
fusion-start(%kept, %value, %i), kind=kLoop, calls=%fused_update
  %fusion-done = bf16[2,256,32]{2,1,0} fusion-done(%fusion-start)
  ROOT %next = (s32[], bf16[2,256,32]{2,1,0}, bf16[2,64,32]{2,1,0}) tuple(%i, %fusion-done, %kernels)
}

%condition (ended: (s32[], bf16[2,256,32])) -> pred[] {
  %ended = (s32[], bf16[2,256,32]{2,1,0}) parameter(0)
  ROOT %less = pred[] fusion(%ended), kind=kLoop, calls=%fresh
}

ENTRY %main (kernel__.1: bf16[2,64,32], image.1: bf16[256,64]) -> f32[8,16] {
  %kernel__.1 = bf16[2,64,32]{2,1,0} parameter(0), metadata={op_name="state[\\'model/blocks/kernel\\']"}
  %image.1 = bf16[256,64]{1,0} parameter(1), metadata={op_name="batch.image_BHWC"}
  %zero = s32[] constant(0)
  %nil = bf16[] constant(0)
  %stack = bf16[2,256,32]{2,1,0} fusion(%nil), kind=kLoop, calls=%fresh
  %all-gather-start = ((bf16[32,64]{1,0}, bf16[8,8]{1,0}), (bf16[256,64]{1,0}, bf16[64,8]{1,0})) \
all-gather-start(%image.1, %image.1), channel_id=1, replica_groups=mesh['axis_0'=8] {'axis_0'}, dimensions={0}
  %before = (s32[], bf16[2,256,32]{2,1,0}, bf16[2,64,32]{2,1,0}, bf16[256,64]{1,0}) tuple(%zero, %stack, %kernel__.1, \
%image.1)
  %while = (s32[], bf16[2,256,32]{2,1,0}, bf16[2,64,32]{2,1,0}, bf16[256,64]{1,0}) while(%before), \
condition=%condition, body=%body, metadata={op_name="jit(train_step)/jvp()/while"}, \
backend_config={"known_trip_count":{"n":"2"},"known_init_step":{"init":"0","step":"1"}}
  %all-gather-done = (bf16[256,64]{1,0}, bf16[64,8]{1,0}) all-gather-done(%all-gather-start)
  %q = bf16[4,128,6,64]{3,2,1,0} constant({...})
  %fmha = (bf16[4,128,6,64]{3,2,1,0}, f32[4,6,128]{2,1,0}, u8[0]{0}) custom-call(%q, %q, %q), \
custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config":\
{"intermediate_tensor_shape":{"element_type":"BF16","dimensions":["4","6","128","128"],"layout":{}}}}
  %fmha.1 = (bf16[4,128,6,64]{3,2,1,0}, bf16[4,128,6,64]{3,2,1,0}) custom-call(%q, %q, %q), \
custom_call_target="__cudnn$fmhaSoftmaxBackward", backend_config={"cudnn_fmha_backend_config":\
{"intermediate_tensor_shape":{"element_type":"BF16","dimensions":["4","6","128","128"],"layout":{}}}}
  %map = bf16[2,16,16,8]{3,2,1,0} constant({...})
  %filter = bf16[3,3,8,32]{3,2,1,0} constant({...})
  %conv = (bf16[2,16,16,32]{3,2,1,0}, u8[64]{0}) custom-call(%map, %filter), window={size=3x3 pad=1_1x1_1}, \
dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$convForward"
  %output = bf16[2,16,16,32]{3,2,1,0} get-tuple-element(%conv), index=0
  %conv.1 = (bf16[3,3,8,32]{3,2,1,0}, u8[64]{0}) custom-call(%map, %output), window={size=3x3 pad=1_1x1_1}, \
dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$convBackwardFilter"
  %conv.2 = (bf16[2,16,16,8]{3,2,1,0}, u8[64]{0}) custom-call(%output, %filter), window={size=3x3 pad=1_1x1_1}, \
dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$convBackwardInput"
  %wide = f32[256,32]{1,0} constant({...})
  %narrow = f32[32,16]{1,0} constant({...})
  %dots = (f32[256,16]{1,0}, f32[256,32]{1,0}) fusion(%wide, %narrow), kind=kCustom, calls=%fused_dot
  %result = f32[256,16]{1,0} get-tuple-element(%dots), index=0
  ROOT %part = f32[8,16]{1,0} slice(%result), slice={[0:8], [0:16]}
}
"""
H100 = find_chip("H100 80GB HBM3")
PROGRAM = hlo.parse(TEXT)
KERNELS = Kernels(PROGRAM, H100)
SCORES = 4 * 6 * 128 * 128
ATTENTION = 2 * SCORES * 64  # FLOPs of one product of scores or values
SHARES = {"fmha": gpu_kernels.ATTENTION, "fmha.1": gpu_kernels.ATTENTION_BACKWARD}
CONVOLUTION = 2 * 2 * 16 * 16 * 32 * 3 * 3 * 8


@pytest.mark.parametrize(
    ("name", "num_bytes", "flops"),
    [
        # One layer's kernel of the stack, read through a bitcast and a conversion.
        ("loop_slice_fusion", 2 * 64 * 32 * 2 + 4, 0),
        # The update of one layer, in place.
        ("fusion-start", 2 * 256 * 32 * 2 + 4, 0),
        # The workspace does not count.
        ("product", 2 * (256 * 64 + 64 * 32 + 256 * 32), 2 * 256 * 64 * 32),
        ("fmha", None, 2 * ATTENTION),
        ("fmha.1", None, 5 * ATTENTION),
        ("conv", None, CONVOLUTION),
        ("conv.1", None, CONVOLUTION),
        ("conv.2", None, CONVOLUTION),
        ("dots", 4 * (2 * 256 * 32 + 32 * 16 + 256 * 16), 2 * 256 * 32 * 16),
        ("part", 2 * 4 * 8 * 16, 0),
        ("stack", 2 + 2 * 2 * 256 * 32, 0),
    ],
)
def test_bytes_and_flops(name, num_bytes, flops):
    instruction = KERNELS.makers[name]

    assert KERNELS.count_flops(instruction) == flops
    if num_bytes is not None:
        assert KERNELS.count_bytes(instruction) == num_bytes


def test_a_kernel_takes_the_longer_of_both(monkeypatch):
    product = KERNELS.makers["product"]
    memory_seconds = KERNELS.count_bytes(product) / (BANDWIDTH * 3.35e12)
    product_seconds = 2 * 256 * 64 * 32 / (PRODUCTS * 989.4e12)

    assert KERNELS.estimate_seconds(product) == pytest.approx(memory_seconds + LAUNCH_SECONDS)

    monkeypatch.setattr(gpu_kernels, "BANDWIDTH", 1e9)
    assert KERNELS.estimate_seconds(product) == pytest.approx(product_seconds + LAUNCH_SECONDS)

    # TF32 has half the peak.
    wide = Kernels(
        hlo.parse(TEXT.replace("%x = bf16[256,64]", "%x = f32[256,64]")),
        H100,
    )
    expected = 2 * (KERNELS.estimate_seconds(product) - LAUNCH_SECONDS)

    assert wide.estimate_seconds(wide.makers["product"]) - LAUNCH_SECONDS == pytest.approx(expected)


ELEMENTWISE = """\
HloModule gelu, is_scheduled=true

%fused (p0: bf16[256,32]) -> (f32[32], bf16[256,32]) {
  %p0 = bf16[256,32]{1,0} parameter(0)
  %square = bf16[256,32]{1,0} multiply(%p0, %p0)
  %wide = f32[256,32]{1,0} convert(%square)
  %exponential = f32[256,32]{1,0} exponential(%wide)
  %zero = f32[] constant(0)
  %sum = f32[32]{0} reduce(%exponential, %zero), dimensions={0}, to_apply=%add
  %copy = bf16[256,32]{1,0} copy(%p0)
  ROOT %both = (f32[32]{0}, bf16[256,32]{1,0}) tuple(%sum, %copy)
}

ENTRY %main (x: bf16[256,32]) -> (f32[32], bf16[256,32]) {
  %x = bf16[256,32]{1,0} parameter(0)
  ROOT %fusion = (f32[32]{0}, bf16[256,32]{1,0}) fusion(%x), kind=kInput, calls=%fused
}
"""


def test_elementwise_operations(monkeypatch):
    """A product of bfloat16 counts twice, an exponential ten times; copies do not count."""
    kernels = Kernels(hlo.parse(ELEMENTWISE), H100)
    fusion = kernels.makers["fusion"]
    num_operations = 256 * 32 * (2 + 1 + 10 + 1)

    assert kernels.count_operations(fusion) == num_operations

    monkeypatch.setattr(gpu_kernels, "COLUMN_SUMS", 1e9)
    seconds = kernels.estimate_seconds(fusion) - LAUNCH_SECONDS
    assert seconds == pytest.approx(num_operations / 24e12)


@pytest.mark.parametrize(
    ("layout", "share"),
    [("{1,0}", COLUMN_SUMS), ("{0,1}", BANDWIDTH)],
    ids=["columns", "rows"],
)
def test_sums_of_values_that_are_not_adjacent(monkeypatch, layout, share):
    """They attain a share of the bandwidth of their own."""
    monkeypatch.setattr(gpu_kernels, "OPERATIONS_PER_FLOP", math.inf)
    text = ELEMENTWISE.replace("f32[256,32]{1,0}", f"f32[256,32]{layout}")
    kernels = Kernels(hlo.parse(text), H100)
    num_bytes = 2 * 2 * 256 * 32 + 4 * 32

    seconds = kernels.estimate_seconds(kernels.makers["fusion"]) - LAUNCH_SECONDS

    assert seconds == pytest.approx(num_bytes / (share * H100.memory_bandwidth_bytes_per_second))


def test_attention_computes_complete_tiles(monkeypatch):
    monkeypatch.setattr(gpu_kernels, "BANDWIDTH", 1e9)
    odd_text = TEXT.replace('"4","6","128","128"', '"4", "6", "100", "100"')
    odd_text = odd_text.replace('":', '": ')  # as JAX 0.10 prints it
    odd = Kernels(hlo.parse(odd_text), H100)

    for name, share in SHARES.items():
        instruction = KERNELS.makers[name]
        flops = KERNELS.count_flops(instruction)
        seconds = KERNELS.estimate_seconds(instruction)

        product_seconds = seconds - LAUNCH_SECONDS
        assert product_seconds == pytest.approx(flops / (share * 989.4e12))
        assert odd.estimate_seconds(odd.makers[name]) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "name",
    ["state", "kept", "all-gather-start", "all-gather-done", "zero"],
)
def test_instructions_that_run_no_kernel_take_no_time(name):
    assert KERNELS.estimate_seconds(KERNELS.makers[name]) == 0


@pytest.mark.parametrize("collective", [0.0, 1.0])
def test_the_timeline_of_tpus_takes_these_prices(collective):
    """Loops count by their known length, libraries' calls apart, and a collective beside the loop
    is hidden.
    """
    fabric = types.SimpleNamespace(
        network_bytes_per_second=1e9,
        clock_hertz=0,
    )
    machine = types.SimpleNamespace(
        is_tpu=False,
        chip=H100,
        fabric=fabric,
    )
    sizes = []

    def collective_seconds(_, num_bytes, devices):
        sizes.append((num_bytes, len(devices)))
        return collective

    line = simulate_step(PROGRAM, machine, collective_seconds, {})

    price = {}
    for name, instruction in KERNELS.makers.items():
        price[name] = KERNELS.estimate_seconds(instruction)

    products = 2 * price["product"]
    slices = 2 * price["loop_slice_fusion"]
    updates = 2 * price["fusion-start"]
    attention = price["fmha"] + price["fmha.1"]
    convolutions = price["conv"] + price["conv.1"] + price["conv.2"]
    outside = price["stack"] + price["dots"] + price["part"]
    hidden = slices + updates + products
    complete_arrays = 2 * (256 * 64 + 64 * 8)

    assert line.kernel_seconds == pytest.approx(products + attention + convolutions)
    assert line.compute_seconds == pytest.approx(slices + updates + outside)
    assert sizes == [(complete_arrays, 8)]
    assert line.collective_seconds == pytest.approx(max(0, collective - hidden))
    assert line.phases["mlp"] == pytest.approx(products + slices)


def test_memory_that_a_loop_fills_is_kept():
    parameters = 2 * 2 * 64 * 32
    batch = 2 * 256 * 64
    activations = 2 * 2 * 256 * 32
    stats = types.SimpleNamespace(
        argument_size_in_bytes=parameters + batch,
        temp_size_in_bytes=100_000,
        output_size_in_bytes=0,
        alias_size_in_bytes=0,
        generated_code_size_in_bytes=0,
    )

    memory = measure_memory(stats, PROGRAM)

    assert memory.parameters == parameters
    assert memory.batch == batch
    assert memory.activations == activations
    assert memory.temporary == 100_000 - activations


def test_every_kind_of_gpu_is_described():
    kinds = {fabric.kind for fabric in FABRICS if fabric.num_axes == 0}
    text = gpu_targets.describe_target(parse_topology("4*l4:8"))

    assert set(gpu_targets.TARGETS) == kinds
    assert '"NVIDIA L4"' in text
    assert "major: 8 minor: 9" in text
    assert f"device_memory_size: {24 * 2**30}" in text
    assert "memory_bandwidth: 300000000000" in text


def test_kernels_of_a_program_are_listed():
    header, _, *lines = list_kernels(TEXT).splitlines()
    milliseconds = []
    for line in lines:
        milliseconds.append(float(line.split("|")[1]))

    assert header.split("|")[1:4] == [" ms ", " number ", " MB each "]
    assert milliseconds == sorted(milliseconds, reverse=True)
    assert any("__cudnn$fmhaSoftmaxBackward" in line for line in lines)
    assert not any("parameter" in line for line in lines)
