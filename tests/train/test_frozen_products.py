"""The matrix products of a training step: each one that its gradients need, and no other."""

import jax
import pytest

from tests.train import small_runs as runs
from tests.train.test_lora import RANK, build
from vit_jax.tools.plan import hlo

HEAD = ("optimizer.trained=head",)
LAST = ("optimizer.trained=last:1", "model.scan_unroll=2")
LAST_OF_LOOP = ("optimizer.trained=last:1", "model.scan_unroll=1")
BIASES = ("optimizer.frozen=embedding/*,encoder/*/kernel,encoder/*/scale",)
KERNEL_SHAPES = ((16, 32), (32, 16))  # only kernels of the MLP have these shapes
# Products of one block: four projections, two layers of the MLP, scores and attention output.
FORWARD = 6 + 2
EMBEDDING = 1
# The head, and the gradients of its kernel and of its input.
HEAD_FORWARD = 1
HEAD_KERNEL = 1
HEAD_INPUT = 1
# The gradients of both factors of the scores and of the attention output.
ATTENTION = 4
INPUTS = 6  # the gradient of each layer's input
KERNELS = 6
# x A for queries, keys and values at once, and for three other layers; B for each of six.
LORA_FORWARD = 4 + 6
# The gradients of x A and of B for each layer, those of A and of x for each x. Queries, keys and
# values are of the first block: nothing before it is trained, so their input has no gradient.
LORA_BACKWARD = 6 + 6 + 4 + 3
LORA_INPUTS = INPUTS - 3

ALL_FORWARD = EMBEDDING + FORWARD + HEAD_FORWARD
ALL_BACKWARD = HEAD_KERNEL + HEAD_INPUT + ATTENTION
EXPECTED = {
    (): ALL_FORWARD + ALL_BACKWARD + INPUTS + KERNELS + EMBEDDING,
    RANK: ALL_FORWARD + ALL_BACKWARD + LORA_INPUTS + LORA_FORWARD + LORA_BACKWARD,
    HEAD: ALL_FORWARD + HEAD_KERNEL,
    BIASES: ALL_FORWARD + ALL_BACKWARD + INPUTS,
    # The frozen block has no backward pass. The trained block has a norm before its first products.
    LAST: ALL_FORWARD + FORWARD + ALL_BACKWARD + INPUTS + KERNELS,
}
EXPECTED[LAST_OF_LOOP] = EXPECTED[LAST]


def compile_gradients(*fields):
    """Return the compiled gradients of one block, or of one after a frozen block, as HLO."""
    depth = 2 if fields[:1] == LAST[:1] else 1
    network = ("model.pool=gap", "model.head=linear", f"model.depth={depth}")
    run = build(*fields, "model.remat=none", network=network)
    parts = run.step_parts

    def compute(state, batch):
        inputs = parts.prepare_inputs(state.step, batch)
        return parts.compute_gradients(state.model, inputs)

    lowered = jax.jit(compute).lower(run.abstract_state, runs.first_batch(run))
    return hlo.parse(lowered.compile().as_text())


def list_products(program):
    products = []
    for instruction in program.list_instructions():
        if instruction.opcode == "dot":
            products.append(instruction)
    return products


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param((), marks=pytest.mark.slow),
        RANK,
        HEAD,
        LAST,
        pytest.param(LAST_OF_LOOP, marks=pytest.mark.slow),
        pytest.param(BIASES, marks=pytest.mark.slow),
    ],
    ids=["all", "LoRA", "head", "last block", "last block of a loop", "biases"],
)
def test_a_step_has_the_products_that_its_gradients_need(fields):
    products = list_products(compile_gradients(*fields))
    gradients = []
    for product in products:
        if product.arrays[0].dims in KERNEL_SHAPES:
            gradients.append(product)

    assert len(products) == EXPECTED[fields]
    trains_kernels = fields in ((), LAST, LAST_OF_LOOP)
    assert bool(gradients) == trains_kernels, "frozen kernels have no gradient"
