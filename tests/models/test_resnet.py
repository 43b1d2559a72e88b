"""ResNets and hybrids: their constants, stages, initial values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from numpy.testing import assert_allclose, assert_array_equal

from tests.models.small_models import (
    FakeDevices,
    apply,
    assert_same_up_to_rounding,
    filled,
    images,
)
from vit_jax import pytree
from vit_jax.config import ModelConfig, build_architecture
from vit_jax.kernels.devices import trace_for
from vit_jax.models.resnet import (
    GroupNorm,
    Stage,
    StandardizedConv,
    Unit,
    max_pool_among_zeros,
)


def compute_moments(kernel):
    """Return the mean and the variance of each output channel."""
    axes = (0, 1, 2)
    return kernel.mean(axes), kernel.var(axes)


def small(name="R26x0.5", image_size=(48, 40), **options):
    options = {"compute_dtype": "float32"} | options
    return build_architecture(
        ModelConfig(name=name, **options),
        image_size=image_size,
        num_classes=7,
    )


# The forward passes are compared with the libraries' in tests/weights/test_reference_logits.


@pytest.mark.parametrize("added_to", ["variance", "std"])
def test_kernels_are_standardised_by_definition(added_to):
    """A large constant changes the result; releases differ in where they add it."""
    architecture = small(
        standardization_epsilon=0.4,
        standardization_epsilon_added_to=added_to,
    )
    layer = StandardizedConv(1, 64, 3, architecture, rngs=nnx.Rngs(0))
    kernel = np.float64(layer.kernel[...] / layer.kernel[...].std())
    layer.kernel[...] = jnp.float32(kernel)
    x = sample_map()
    mean, variance = compute_moments(kernel)
    if added_to == "variance":
        divisor = np.sqrt(variance + 0.4)
    else:
        divisor = np.sqrt(variance) + 0.4
    standardised = (kernel - mean) / divisor

    assert_near(layer(x), x @ standardised[0, 0])


def sample_map():
    return np.asarray(jax.random.normal(jax.random.key(0), (2, 5, 4, 64)))


def norm_groups(x, num_groups, epsilon):
    """Return a map normed by groups of channels in float64, by definition."""
    batch, height, width, channels = x.shape
    groups = np.float64(x).reshape(batch, height * width, num_groups, channels // num_groups)
    centred = groups - groups.mean((1, 3), keepdims=True)
    variance = np.square(centred).mean((1, 3), keepdims=True)
    return (centred / np.sqrt(variance + epsilon)).reshape(x.shape)


def test_groups_are_normed_by_definition():
    norm = GroupNorm(64, small(group_norm_epsilon=0.5))
    x = sample_map()

    assert_near(norm(x), norm_groups(x, 32, 0.5))


def assert_near(found, expected):
    largest = np.abs(expected).max()
    assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * largest)


def run_stages(architecture, body, x):
    """Return the map after the root and after each stage."""

    @jax.jit
    def run(body, x):
        maps = [body.root(x)]
        for stage in range(1, len(architecture.units) + 1):
            run_stage = getattr(body, f"stage{stage}")
            maps.append(run_stage(maps[-1]))
        return maps

    return run(body, x)


@pytest.mark.newest
@pytest.mark.parametrize(
    ("name", "image_size", "unit"),
    [
        ("R14x0.5", (33, 50), "preactivation"),
        ("R14x0.5", (33, 50), "postactivation"),
        ("R14x0.5+ViT-mu/8", (48, 32), None),
        ("R+mu/16", (64, 32), None),
    ],
)
def test_stages_are_run_in_order(name, image_size, unit):
    architecture = small(
        name,
        image_size=image_size,
        residual_unit=unit,
    )
    model = filled(architecture)
    x = images(architecture)
    body = model.stem if architecture.has_transformer else model.body

    output = apply(model, x, intermediates=("stages",))
    maps = run_stages(architecture, body, x)

    assert len(output.stages_BHWC) == len(architecture.units)
    for found, expected in zip(output.stages_BHWC, maps[1:], strict=True):
        assert_near(found, expected)
    assert maps[-1].shape[1:] == (*architecture.map_size, architecture.map_channels)
    assert apply(model, x).stages_BHWC is None

    if architecture.has_transformer:
        return

    last = maps[-1]
    if unit == "preactivation":
        last = nnx.relu(model.norm(last))
    pooled = last.mean((1, 2))

    assert_near(
        output.tokens_BND,
        last.reshape(2, -1, architecture.width),
    )
    assert_near(output.features_BD, pooled)
    assert_near(output.logits_BK, model.head.linear(pooled))

    message = "names that this network has: stages"
    with pytest.raises(ValueError, match=message):
        apply(model, x, intermediates=("blocks",))


def test_group_norm_keeps_small_differences_on_a_large_mean():
    """The variance of x² minus the squared mean would lose them in float32."""
    norm = GroupNorm(32, small())
    difference_H = jnp.tile(jnp.array([0.0, 1.0]), 32)
    x = 1e4 + difference_H[None, :, None, None] * jnp.ones((1, 64, 1, 32))

    assert_allclose(jnp.unique(norm(x)), [-1.0, 1.0], rtol=1e-3)


@pytest.mark.parametrize("mean", [0.0, 1.0, 100.0])
def test_group_norm_of_bfloat16_does_not_centre_and_is_as_exact(mean):
    """The variance of uncentred squares is wrong by some float32 epsilons of the squared mean.

    That is nothing beside the rounding of the map: here both are normed as they were rounded.
    """
    norm = GroupNorm(32, small(compute_dtype="bfloat16"))
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(mean, 1.0, (2, 16, 16, 32)), jnp.bfloat16)
    exact = norm_groups(np.asarray(x, np.float64), 32, norm.epsilon)

    assert_allclose(np.float64(norm(x)), exact, rtol=0.01, atol=2e-3)


@pytest.mark.parametrize("size", [(8, 8), (7, 9), (1, 2)])
def test_the_root_pools_among_zeros(size):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(-0.5, 1.0, (2, *size, 3)), jnp.float32)

    def pool_after_padding(x):
        padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        return nnx.max_pool(
            padded,
            (3, 3),
            strides=(2, 2),
            padding="VALID",
        )

    expected = pool_after_padding(x)
    weights = jnp.arange(expected.size, dtype=jnp.float32).reshape(expected.shape)

    def compute_gradient(pool):
        return jax.grad(lambda x: (pool(x) * weights).sum())(x)

    assert_array_equal(max_pool_among_zeros(x), expected)
    assert_array_equal(
        compute_gradient(max_pool_among_zeros),
        compute_gradient(pool_after_padding),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["R14x0.5", "R14x0.5+ViT-mu/8"])
def test_bfloat16_computes_near_float32_and_keeps_parameters(name):
    def compute(dtype):
        architecture = small(
            name,
            image_size=(32, 32),
            compute_dtype=dtype,
        )
        model = filled(architecture)
        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(model))
        return apply(model, images(architecture).astype(dtype))

    exact = compute("float32")
    rounded = compute("bfloat16")
    scale = float(jnp.abs(exact.logits_BK).max())

    assert rounded.tokens_BND.dtype == jnp.bfloat16
    assert rounded.logits_BK.dtype == jnp.float32
    assert_allclose(
        rounded.logits_BK,
        exact.logits_BK,
        atol=0.1 * scale,
    )


@pytest.mark.parametrize("form", ["preactivation", "postactivation"])
def test_initial_values_of_a_unit(form):
    """A post-activation unit begins as the identity; kernels are LeCun normal."""
    unit = Unit(64, 128, 2, small("R14x0.5", residual_unit=form), rngs=nnx.Rngs(0))
    last_scale = 0 if form == "postactivation" else 1

    for name, leaf in pytree.name_leaves(unit).items():
        if name == "norm3/scale":
            assert (leaf == last_scale).all(), name
        elif name.endswith("scale"):
            assert (leaf == 1).all(), name
        elif name.endswith("bias"):
            assert (leaf == 0).all(), name
        else:
            deviation = np.prod(leaf.shape[:3]) ** -0.5
            assert float(leaf.std()) == pytest.approx(deviation, rel=0.1), name


def test_units_of_a_stage_do_not_start_alike():
    stage = Stage(32, 128, 1, 3, small(), jax.random.key(0))
    first, second = stage.rest.conv2.kernel[...]

    assert not np.array_equal(first, second)


@pytest.mark.newest
@pytest.mark.parametrize(
    "change",
    [{"remat": "dots"}, {"remat": "full", "scan_unroll": 2}],
    ids=str,
)
def test_rematerialisation_and_unrolling_change_no_gradient(change):
    assert_same_up_to_rounding(
        stage_gradient(),
        stage_gradient(**change),
        tolerance=1e-4,
    )


@pytest.mark.parametrize(
    ("platform", "remat", "unroll"),
    [
        ("tpu", "dots", 2),
        ("tpu", "full", 1),
        ("gpu", "dots", 1),
    ],
)
def test_units_are_in_no_loop_on_tpus_unless_little_is_kept(platform, remat, unroll):
    stage = nnx.eval_shape(lambda: Stage(32, 128, 1, 3, small(remat=remat), jax.random.key(0)))
    x = jnp.zeros((1, 8, 8, 32))

    with trace_for(FakeDevices(platform=platform)):
        program = jax.make_jaxpr(lambda stage, x: stage(x))(stage, x)
    (loop,) = [equation for equation in program.eqns if equation.primitive.name == "scan"]

    assert loop.params["unroll"] == unroll


@functools.cache
def stage_gradient(**options):
    stage = Stage(32, 128, 2, 3, small("R14x0.5", **options), jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (2, 8, 8, 32))

    def loss(stage, x):
        return jnp.square(stage(x)).mean()

    return jax.jit(jax.grad(loss))(stage, x)
