"""ResNets and hybrids: their constants, stages, initial values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.small_models import FakeDevices, apply, assert_same_up_to_rounding, filled, images
from vit_jax import pytree
from vit_jax.config import ModelConfig, build_architecture
from vit_jax.kernels.devices import trace_for
from vit_jax.models.resnet import GroupNorm, Stage, StandardizedConv, Unit, max_pool_among_zeros


def small(name="R26x0.5", image_size=(48, 40), **options):
    options = {"compute_dtype": "float32"} | options
    return build_architecture(
        ModelConfig(name=name, **options),
        image_size=image_size,
        num_classes=7,
    )


# The forward passes are compared with the libraries' in tests/weights/test_reference_logits.


@pytest.mark.parametrize("added_to", ["variance", "std"])
def test_constants_in_which_the_releases_differ(added_to):
    """Standardised kernels and group norm by their definitions, with constants that change the result."""
    a = small(
        group_norm_epsilon=0.5,
        standardization_epsilon=0.4,
        standardization_epsilon_added_to=added_to,
    )
    layer = StandardizedConv(1, 64, 3, a, rngs=nnx.Rngs(0))
    x = np.asarray(jax.random.normal(jax.random.key(0), (2, 5, 4, 64)))
    kernel = np.float64(layer.kernel[...] / layer.kernel[...].std())
    layer.kernel[...] = jnp.float32(kernel)
    variance = kernel.var((0, 1, 2))
    divisor = np.sqrt(variance + 0.4) if added_to == "variance" else np.sqrt(variance) + 0.4

    assert_near(layer(x), x @ ((kernel - kernel.mean((0, 1, 2))) / divisor)[0, 0])

    norm = GroupNorm(64, a)
    groups = np.float64(x).reshape(2, 20, 32, 2)
    centred = groups - groups.mean((1, 3), keepdims=True)
    expected = centred / np.sqrt((centred**2).mean((1, 3), keepdims=True) + 0.5)

    assert_near(norm(x), expected.reshape(x.shape))


def assert_near(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


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
    architecture = small(name, image_size=image_size, residual_unit=unit)
    model = filled(architecture)
    x = images(architecture)
    output = apply(model, x, intermediates=("stages",))
    body = model.stem if architecture.has_transformer else model.body

    @jax.jit
    def run(body, x):
        maps = [body.root(x)]
        for stage in range(1, len(architecture.units) + 1):
            maps.append(getattr(body, f"stage{stage}")(maps[-1]))

        return maps

    maps = run(body, x)
    assert len(output.stages_BHWC) == len(architecture.units)

    for found, expected in zip(output.stages_BHWC, maps[1:], strict=True):
        assert_near(found, expected)

    assert maps[-1].shape[1:] == (*architecture.map_size, architecture.map_channels)
    assert apply(model, x).stages_BHWC is None

    if not architecture.has_transformer:
        last = maps[-1] if unit == "postactivation" else nnx.relu(model.norm(maps[-1]))
        assert_near(output.tokens_BND, last.reshape(2, -1, architecture.width))
        assert_near(output.features_BD, last.mean((1, 2)))
        assert_near(output.logits_BK, model.head.linear(last.mean((1, 2))))
        with pytest.raises(ValueError, match="names that this network has: stages"):
            apply(model, x, intermediates=("blocks",))


def test_group_norm_keeps_small_differences_on_a_large_mean():
    """The variance of x² minus the squared mean would lose them in float32."""
    norm = GroupNorm(32, small())
    x = 1e4 + jnp.tile(jnp.array([0.0, 1.0]), 32)[None, :, None, None] * jnp.ones((1, 64, 1, 32))

    np.testing.assert_allclose(jnp.unique(norm(x)), [-1.0, 1.0], rtol=1e-3)


@pytest.mark.parametrize("mean", [0.0, 1.0, 100.0])
def test_group_norm_of_bfloat16_does_not_centre_and_is_as_exact(mean):
    """The variance of uncentred squares is wrong by some float32 epsilons of the squared mean, which is nothing beside
    the rounding of the map: here both are normed as they were rounded."""
    norm = GroupNorm(32, small(compute_dtype="bfloat16"))
    x = jnp.asarray(np.random.default_rng(0).normal(mean, 1.0, (2, 16, 16, 32)), jnp.bfloat16)
    groups = np.asarray(x, np.float64).reshape(2, 256, 32, 1)
    centred = groups - groups.mean((1, 3), keepdims=True)
    exact = centred / np.sqrt(np.square(centred).mean((1, 3), keepdims=True) + norm.epsilon)

    np.testing.assert_allclose(
        np.float64(norm(x)).reshape(exact.shape),
        exact,
        rtol=0.01,
        atol=2e-3,
    )


@pytest.mark.parametrize("size", [(8, 8), (7, 9), (1, 2)])
def test_the_root_pools_among_zeros(size):
    x = jnp.asarray(np.random.default_rng(0).normal(-0.5, 1.0, (2, *size, 3)), jnp.float32)

    def padded(x):
        return nnx.max_pool(
            jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))),
            (3, 3),
            strides=(2, 2),
            padding="VALID",
        )

    np.testing.assert_array_equal(max_pool_among_zeros(x), padded(x))

    weights = jnp.arange(padded(x).size, dtype=jnp.float32).reshape(padded(x).shape)
    gradients = [
        jax.grad(lambda x, f=f: (f(x) * weights).sum())(x) for f in (max_pool_among_zeros, padded)
    ]

    np.testing.assert_array_equal(*gradients)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["R14x0.5", "R14x0.5+ViT-mu/8"])
def test_bfloat16_computes_near_float32_and_keeps_parameters(name):
    outputs = []
    for dtype in ("float32", "bfloat16"):
        architecture = small(name, image_size=(32, 32), compute_dtype=dtype)
        model = filled(architecture)
        outputs.append(apply(model, images(architecture).astype(dtype)))

        assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(model))

    assert outputs[1].tokens_BND.dtype == jnp.bfloat16
    assert outputs[1].logits_BK.dtype == jnp.float32

    scale = float(jnp.abs(outputs[0].logits_BK).max())
    np.testing.assert_allclose(outputs[1].logits_BK, outputs[0].logits_BK, atol=0.1 * scale)


@pytest.mark.parametrize("form", ["preactivation", "postactivation"])
def test_initial_values(form):
    """A post-activation unit begins as the identity; kernels are LeCun normal."""
    unit = Unit(64, 128, 2, small("R14x0.5", residual_unit=form), rngs=nnx.Rngs(0))
    for name, leaf in pytree.named_leaves(unit).items():
        if name.endswith("scale"):
            assert (
                leaf == (0 if form == "postactivation" and name == "norm3/scale" else 1)
            ).all(), name
        elif name.endswith("bias"):
            assert (leaf == 0).all(), name
        else:
            assert float(leaf.std()) == pytest.approx(np.prod(leaf.shape[:3]) ** -0.5, rel=0.1), (
                name
            )

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
    assert_same_up_to_rounding(stage_gradient(), stage_gradient(**change), tolerance=1e-4)


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
    with trace_for(FakeDevices(platform=platform)):
        program = jax.make_jaxpr(lambda stage, x: stage(x))(stage, jnp.zeros((1, 8, 8, 32)))

    (loop,) = [equation for equation in program.eqns if equation.primitive.name == "scan"]
    assert loop.params["unroll"] == unroll


@functools.cache
def stage_gradient(**options):
    stage = Stage(32, 128, 2, 3, small("R14x0.5", **options), jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (2, 8, 8, 32))
    return jax.jit(jax.grad(lambda stage, x: jnp.square(stage(x)).mean()))(stage, x)
