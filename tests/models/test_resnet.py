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
    assert_each_close,
    assert_same_up_to_rounding,
    filled,
    find_equations,
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


def small(
    name="R26x0.5",
    image_size=(48, 40),
    **options,
):
    options.setdefault("compute_dtype", "float32")
    config = ModelConfig(name=name, **options)
    return build_architecture(
        config,
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
    layer.kernel[...] /= layer.kernel[...].std()
    kernel = np.float64(layer.kernel[...])
    x = sample_map()

    axes = (0, 1, 2)
    mean = kernel.mean(axes)
    variance = kernel.var(axes)

    if added_to == "variance":
        divisor = np.sqrt(variance + 0.4)
    else:
        divisor = np.sqrt(variance) + 0.4
    standardised = (kernel - mean) / divisor
    expected = x @ standardised[0, 0]

    assert_near(layer(x), expected)


def sample_map():
    rng = np.random.default_rng(0)
    sample = rng.normal(size=(2, 5, 4, 64))
    return np.float32(sample)


def norm_groups(x, num_groups, epsilon):
    """Return a map normed by groups of channels in float64, by definition."""
    num_channels = x.shape[-1]
    flat = np.float64(x).reshape(len(x), -1, num_channels)
    normed = []
    for group in np.split(flat, num_groups, axis=-1):
        centred = group - group.mean((1, 2), keepdims=True)
        variance = group.var((1, 2), keepdims=True)
        normed.append(centred / np.sqrt(variance + epsilon))

    joined = np.concatenate(normed, axis=-1)
    return joined.reshape(x.shape)


def test_groups_are_normed_by_definition():
    architecture = small(group_norm_epsilon=0.5)
    norm = GroupNorm(64, architecture)
    x = sample_map()
    expected = norm_groups(x, 32, 0.5)

    assert_near(norm(x), expected)


def assert_near(found, expected):
    largest = np.abs(expected).max()
    assert_allclose(
        found,
        expected,
        rtol=1e-4,
        atol=1e-4 * largest,
    )


def run_stages(architecture, body, x):
    """Return the map after the root and after each stage."""

    @jax.jit
    def run(body, x):
        x = body.root(x)
        maps = [x]
        for number, _ in enumerate(architecture.units, start=1):
            stage = getattr(body, f"stage{number}")
            x = stage(x)
            maps.append(x)
        return maps

    return run(body, x)


@pytest.mark.parametrize(
    ("name", "image_size", "unit"),
    [
        pytest.param("R14x0.5", (33, 50), "preactivation", marks=pytest.mark.newest),
        pytest.param("R14x0.5", (33, 50), "postactivation", marks=pytest.mark.slow),
        pytest.param("R14x0.5+ViT-mu/8", (48, 32), None, marks=pytest.mark.slow),
        pytest.param("R+mu/16", (64, 32), None, marks=pytest.mark.newest),
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
    if architecture.has_transformer:
        body = model.stem
    else:
        body = model.body

    output = apply(model, x, intermediates=("stages",))
    plain = apply(model, x)
    root, *maps = run_stages(architecture, body, x)
    last = maps[-1] if maps else root

    assert len(maps) == len(architecture.units)
    for found, expected in zip(output.stages_BHWC, maps, strict=True):
        assert_near(found, expected)
    _, *map_size, map_channels = last.shape
    assert tuple(map_size) == architecture.map_size
    assert map_channels == architecture.map_channels
    assert plain.stages_BHWC is None

    if architecture.has_transformer:
        return

    if unit == "preactivation":
        last = nnx.relu(model.norm(last))
    pooled = last.mean((1, 2))
    tokens = last.reshape(2, -1, architecture.width)
    logits = model.head.linear(pooled)

    assert_near(output.tokens_BND, tokens)
    assert_near(output.features_BD, pooled)
    assert_near(output.logits_BK, logits)

    message = "names that this network has: stages"
    with pytest.raises(ValueError, match=message):
        apply(model, x, intermediates=("blocks",))


def test_group_norm_keeps_small_differences_on_a_large_mean():
    """The variance of x² minus the squared mean would lose them in float32."""
    norm = GroupNorm(32, small())
    x = np.full((1, 64, 1, 32), 1e4, np.float32)
    x[:, 1::2] += 1

    normed = norm(jnp.asarray(x))

    assert_allclose(np.unique(normed), [-1.0, 1.0], rtol=1e-3)


@pytest.mark.parametrize("mean", [0.0, 100.0])
def test_group_norm_for_cpus_gives_the_same_numbers_and_gradients(mean):
    norm = GroupNorm(64, small())
    rng = np.random.default_rng(0)
    x = jnp.float32(rng.normal(mean, 1.0, (2, 8, 6, 64)))
    dy = jnp.float32(rng.normal(size=x.shape))
    norm.scale[...] = jnp.float32(rng.normal(size=64))
    norm.bias[...] = jnp.float32(rng.normal(size=64))

    def compute(platform):
        with trace_for(FakeDevices(platform=platform)):
            y, pull_back = jax.vjp(lambda norm, x: norm(x), norm, x)
            return y, pull_back(dy)

    assert_each_close(compute("cpu"), compute("gpu"), 2e-5)


@pytest.mark.parametrize("mean", [0.0, 1.0, 100.0])
def test_group_norm_of_bfloat16_does_not_centre_and_is_as_exact(mean):
    """The variance of uncentred squares is wrong by some float32 epsilons of the squared mean.

    That is nothing beside the rounding of the map: here both are normed as they were rounded.
    """
    norm = GroupNorm(32, small(compute_dtype="bfloat16"))
    rng = np.random.default_rng(0)
    sample = rng.normal(mean, 1.0, (2, 16, 16, 32))
    x = jnp.bfloat16(sample)
    exact = norm_groups(x, 32, norm.epsilon)

    normed = np.float64(norm(x))

    assert_allclose(normed, exact, rtol=0.01, atol=2e-3)


@pytest.mark.parametrize(
    "size",
    [
        (8, 8),
        (7, 9),
        (1, 2),
    ],
)
@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_the_root_pools_among_zeros(platform, size):
    rng = np.random.default_rng(0)
    sample = rng.normal(-0.5, 1.0, (2, *size, 3))
    x = jnp.float32(sample)

    def pool_after_padding(x):
        padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
        return nnx.max_pool(
            padded,
            (3, 3),
            strides=(2, 2),
            padding="VALID",
        )

    expected, pull_back = jax.vjp(pool_after_padding, x)
    with trace_for(FakeDevices(platform=platform)):
        found, pull_back_found = jax.vjp(max_pool_among_zeros, x)
    weights = jnp.arange(1.0 * expected.size)
    gradient = weights.reshape(expected.shape)

    assert_array_equal(found, expected)
    assert_array_equal(pull_back_found(gradient), pull_back(gradient))


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
        for leaf in jax.tree.leaves(model):
            assert leaf.dtype == jnp.float32

        x = images(architecture).astype(dtype)
        return apply(model, x)

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
    architecture = small("R14x0.5", residual_unit=form)
    unit = Unit(64, 128, 2, architecture, rngs=nnx.Rngs(0))
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
            expected = pytest.approx(deviation, rel=0.1)
            assert float(leaf.std()) == expected, name


def build_stage(architecture, stride=1):
    """Build a stage of three units."""
    key = jax.random.key(0)
    return Stage(32, 128, stride, 3, architecture, key)


def test_units_of_a_stage_do_not_start_alike():
    stage = build_stage(small())
    first, second = stage.rest.conv2.kernel[...]

    assert not np.array_equal(first, second)


@pytest.mark.newest
@pytest.mark.parametrize(
    "change",
    [
        {"remat": "dots"},
        {"remat": "full", "scan_unroll": 2},
    ],
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
def test_units_are_in_no_loop_on_tpus_unless_little_is_kept(
    platform,
    remat,
    unroll,
):
    architecture = small(remat=remat)
    x = jnp.zeros((1, 8, 8, 32))

    def run(stage, x):
        return stage(x)

    stage = nnx.eval_shape(lambda: build_stage(architecture))
    with trace_for(FakeDevices(platform=platform)):
        program = jax.make_jaxpr(run)(stage, x)
    (loop,) = find_equations(program, "scan")

    assert loop.params["unroll"] == unroll


@functools.cache
def stage_gradient(**options):
    architecture = small("R14x0.5", **options)
    stage = build_stage(architecture, stride=2)
    key = jax.random.key(1)
    x = jax.random.normal(key, (2, 8, 8, 32))

    @jax.jit
    @jax.grad
    def differentiate(stage, x):
        return jnp.square(stage(x)).mean()

    return differentiate(stage, x)
