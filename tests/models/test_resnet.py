"""ResNets and hybrids against float64 NumPy implementations of the published code's definitions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.small_models import abstract, apply, filled, images, size
from vit_jax import pytree
from vit_jax.config import ModelConfig, build_architecture
from vit_jax.models.convolution import GroupNorm, StandardizedConv, standardize
from vit_jax.models.resnet import Stage, Unit


def small(name="R26x0.5", image_size=(48, 40), **options):
    options = {"compute_dtype": "float32"} | options
    return build_architecture(ModelConfig(name=name, **options), image_size=image_size, num_classes=7)


HYBRIDS = ("R26x0.5+ViT-mu/16", "R14x0.5+ViT-mu/8", "R+mu/16")


# Definitions, written without the package's code.


def conv(x, kernel, stride, pads, epsilon, added_to):
    """Standardised convolution. pads: (before, after) of both axes."""
    kernel = np.float64(kernel)
    centred = kernel - kernel.mean((0, 1, 2))
    variance = (centred**2).mean((0, 1, 2))
    kernel = centred / (np.sqrt(variance + epsilon) if added_to == "variance" else np.sqrt(variance) + epsilon)
    x = np.pad(x, ((0, 0), pads[0], pads[1], (0, 0)))
    k = kernel.shape[0]
    rows, columns = (x.shape[1] - k) // stride + 1, (x.shape[2] - k) // stride + 1
    out = np.zeros((x.shape[0], rows, columns, kernel.shape[3]))
    for i in range(k):
        for j in range(k):
            part = x[:, i : i + stride * rows : stride, j : j + stride * columns : stride]
            out += part[:, :rows, :columns] @ kernel[i, j]
    return out


def same(length, k, stride):
    """TensorFlow's padding: as much as needed, the odd one after."""
    total = max((-(-length // stride) - 1) * stride + k - length, 0)
    return total // 2, total - total // 2


def group_norm(x, scale, bias, epsilon):
    out = np.empty_like(x)
    per_group = x.shape[-1] // 32
    for group in range(32):
        channels = slice(group * per_group, (group + 1) * per_group)
        values = x[..., channels]
        mean = values.mean((1, 2, 3), keepdims=True)
        variance = ((values - mean) ** 2).mean((1, 2, 3), keepdims=True)
        out[..., channels] = (values - mean) / np.sqrt(variance + epsilon)
    return out * np.float64(scale) + np.float64(bias)


def pool(x, pads, fill):
    x = np.pad(x, ((0, 0), pads[0], pads[1], (0, 0)), constant_values=fill)
    rows, columns = (x.shape[1] - 3) // 2 + 1, (x.shape[2] - 3) // 2 + 1
    windows = [x[:, i : i + 2 * rows : 2, j : j + 2 * columns : 2] for i in range(3) for j in range(3)]
    return np.max([window[:, :rows, :columns] for window in windows], axis=0)


def relu(x):
    return np.maximum(x, 0)


def units(p, prefix, num_stages):
    """Parameters of every unit in order, with the stride of the unit: (parameters by short name, stride)."""
    for stage in range(1, num_stages + 1):
        names = [name for name in p if name.startswith(f"{prefix}/stage{stage}/")]
        first = {n.split("/first/")[1]: p[n] for n in names if "/first/" in n}
        rest = {n.split("/rest/")[1]: p[n] for n in names if "/rest/" in n}
        yield first, 1 if stage == 1 else 2
        for row in range(len(next(iter(rest.values()))) if rest else 0):
            yield {name: value[row] for name, value in rest.items()}, 1


def numpy_bit(p, x, num_stages):
    """bit_jax/models.py: pre-activation units, zero-padded pooling."""

    def std_conv(x, kernel, stride=1, pad=0):
        return conv(x, kernel, stride, ((pad, pad), (pad, pad)), 1e-10, "variance")

    def norm_relu(x, u, name):
        return relu(group_norm(x, u[f"{name}/scale"], u[f"{name}/bias"], 1e-5))

    x = std_conv(np.float64(x), p["body/root/conv/kernel"], 2, 3)
    x = pool(x, ((1, 1), (1, 1)), 0.0)
    for u, stride in units(p, "body", num_stages):
        y = norm_relu(x, u, "norm1")
        shortcut = std_conv(y, u["shortcut/conv/kernel"], stride) if "shortcut/conv/kernel" in u else x
        y = std_conv(y, u["conv1/kernel"])
        y = std_conv(norm_relu(y, u, "norm2"), u["conv2/kernel"], stride, 1)
        x = shortcut + std_conv(norm_relu(y, u, "norm3"), u["conv3/kernel"])
    x = norm_relu(x, p, "norm").mean((1, 2))
    return x @ np.float64(p["head/linear/kernel"]) + p["head/linear/bias"]


def numpy_stem(p, x, prefix, num_stages):
    """vision_transformer, models_resnet.py: post-activation units, SAME padding. The root's map and each unit's."""

    def std_conv(x, kernel, stride=1):
        pads = [same(length, kernel.shape[0], stride) for length in x.shape[1:3]]
        return conv(x, kernel, stride, pads, 1e-5, "std")

    def norm(x, u, name):
        return group_norm(x, u[f"{name}/scale"], u[f"{name}/bias"], 1e-6)

    x = std_conv(np.float64(x), p[f"{prefix}/root/conv/kernel"], 2)
    x = relu(norm(x, p, f"{prefix}/root/norm"))
    maps = [pool(x, [same(length, 3, 2) for length in x.shape[1:3]], -np.inf)]
    for u, stride in units(p, prefix, num_stages):
        x = shortcut = maps[-1]
        if "shortcut/conv/kernel" in u:
            shortcut = norm(std_conv(x, u["shortcut/conv/kernel"], stride), u, "shortcut/norm")
        y = relu(norm(std_conv(x, u["conv1/kernel"]), u, "norm1"))
        y = relu(norm(std_conv(y, u["conv2/kernel"], stride), u, "norm2"))
        maps.append(relu(shortcut + norm(std_conv(y, u["conv3/kernel"]), u, "norm3")))
    return maps


# Our modules against them. 48 x 40 is odd after four halvings, so that padding on one side only is met.


@pytest.mark.parametrize(("name", "image_size"), [("R26x0.5", (48, 40)), ("R14x0.5", (33, 50))])
def test_bit_equals_numpy(name, image_size):
    architecture = small(name, image_size=image_size)
    model = filled(architecture)
    x = images(architecture)
    assert_near(apply(model, x).logits_BK, numpy_bit(pytree.named_leaves(model), x, 4))


def assert_near(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("name", HYBRIDS[1:])
def test_stem_of_a_hybrid_equals_numpy(name):
    architecture = small(name, image_size=(48, 32) if name != "R+mu/16" else (64, 32))
    model, x = filled(architecture), images(architecture)
    maps = numpy_stem(pytree.named_leaves(model), x, "stem", len(architecture.units))
    output = apply(model, x, taps=("stages", "blocks"))
    stages = [maps[last] for last in np.cumsum(architecture.units, dtype=int)]
    assert len(output.stages_BHWC) == len(stages)
    for found, expected in zip(output.stages_BHWC, stages, strict=True):
        assert_near(found, expected)
    assert maps[-1].shape[1:] == (*architecture.map_size, architecture.map_channels)
    assert_near(jax.jit(lambda model, x: model.stem(x)[0])(model, x), maps[-1])
    assert output.blocks_LBSD.shape == (1, 2, architecture.sequence_length, 32)


def test_post_activation_resnet_equals_numpy():
    architecture = small("R14x0.5", residual_unit="postactivation")
    model, x = filled(architecture), images(architecture)
    p = pytree.named_leaves(model)
    maps, output = numpy_stem(p, x, "body", 4), apply(model, x, taps=("stages",))
    for found, expected in zip(output.stages_BHWC, maps[1:], strict=True):
        assert_near(found, expected)
    assert_near(output.logits_BK, maps[-1].mean((1, 2)) @ np.float64(p["head/linear/kernel"]) + p["head/linear/bias"])
    assert apply(model, x).stages_BHWC is None
    with pytest.raises(ValueError, match="names that this network has: stages"):
        apply(model, x, taps=("blocks",))


# Each of the constants that the releases differ in changes the result.


@pytest.mark.parametrize(
    "option",
    [
        {"group_norm_epsilon": 1e-2},
        {"standardization_epsilon": 1e-2},
        {"standardization_epsilon_added_to": "std", "standardization_epsilon": 1e-2},
        {"residual_unit": "postactivation"},
    ],
    ids=str,
)
def test_constants_matter(option):
    x = jax.random.normal(jax.random.key(1), (2, 6, 6, 32))
    units = [Unit(32, 128, 1, small("R14x0.5", **changed), rngs=nnx.Rngs(0)) for changed in ({}, option)]
    if "residual_unit" in option:
        assert size(units[0]) != size(units[1])
    else:
        assert not np.allclose(units[0](x), units[1](x), rtol=1e-3)


@pytest.mark.parametrize("added_to", ["variance", "std"])
def test_standardised_kernels_have_mean_0_and_variance_1(added_to):
    kernel = jax.random.normal(jax.random.key(0), (3, 3, 16, 8)) * 3.0 + 1.0
    kernel = standardize(kernel, 1e-10, added_to)
    np.testing.assert_allclose(kernel.mean((0, 1, 2)), 0.0, atol=1e-6)
    np.testing.assert_allclose(kernel.var((0, 1, 2)), 1.0, rtol=1e-5)


def test_group_norm_keeps_small_differences_on_a_large_mean():
    """The variance of x² minus the squared mean would lose them in float32."""
    architecture = small()
    norm = GroupNorm(32, architecture)
    x = 1e4 + jnp.tile(jnp.array([0.0, 1.0]), 32)[None, :, None, None] * jnp.ones((1, 64, 1, 32))
    np.testing.assert_allclose(jnp.unique(norm(x)), [-1.0, 1.0], rtol=1e-3)


# Shapes, counts, dtypes.


@pytest.mark.parametrize(
    ("name", "units", "map_channels", "grid_224", "grid_384"),
    [
        ("R+Ti/16", (), 64, 7, 12),
        ("R26+S/32", (2, 2, 2, 2), 2048, 7, 12),
        ("R50+ViT-B/32", (3, 4, 6, 3), 2048, 7, 12),
        ("R50+ViT-L/16", (3, 4, 9), 1024, 14, 24),
    ],
)
def test_hybrids_of_the_reference(name, units, map_channels, grid_224, grid_384):
    for pixels, grid in ((224, grid_224), (384, grid_384)):
        architecture = small(name, image_size=(pixels, pixels))
        assert (architecture.units, architecture.map_channels) == (units, map_channels)
        assert architecture.grid == (grid, grid)
        assert abstract(architecture).positions.table.shape == (1, grid * grid + 1, architecture.width)


def test_stage_4_of_a_resnet_is_7_by_7_at_224():
    architecture = small("R50x1", image_size=(224, 224))
    image = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    output = jax.eval_shape(lambda model, image: model(image), abstract(architecture), image)
    assert output.tokens_BND.shape == (1, 49, 2048)
    assert output.pooled_BD.shape == output.features_BD.shape == (1, 2048)


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


# Initial values and gradients.


@pytest.mark.parametrize("form", ["preactivation", "postactivation"])
def test_initial_values(form):
    """A post-activation unit begins as the identity; kernels are LeCun normal."""
    unit = Unit(64, 128, 2, small("R14x0.5", residual_unit=form), rngs=nnx.Rngs(0))
    for name, leaf in pytree.named_leaves(unit).items():
        if name.endswith("scale"):
            assert (leaf == (0 if form == "postactivation" and name == "norm3/scale" else 1)).all(), name
        elif name.endswith("bias"):
            assert (leaf == 0).all(), name
        else:
            assert float(leaf.std()) == pytest.approx(np.prod(leaf.shape[:3]) ** -0.5, rel=0.1), name


def test_units_of_a_stage_start_differently():
    stage = Stage(32, 128, 1, 3, small(), jax.random.key(0))
    first, second = stage.rest.conv2.kernel[...]
    assert not np.array_equal(first, second)


@pytest.fixture(scope="module")
def plain_gradient():
    return stage_gradient()


@pytest.mark.parametrize("change", [{"remat": "dots"}, {"remat": "full"}, {"scan_unroll": 2}], ids=str)
def test_rematerialisation_and_unrolling_change_no_gradient(change, plain_gradient):
    changed = stage_gradient(**change)
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(plain_gradient))
    for x, y in zip(*map(jax.tree.leaves, (plain_gradient, changed)), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-4 * scale)


def stage_gradient(**options):
    stage = Stage(32, 128, 2, 3, small("R14x0.5", **options), jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (2, 8, 8, 32))
    return jax.jit(jax.grad(lambda stage, x: jnp.square(stage(x)).mean()))(stage, x)


def test_a_convolution_keeps_its_stride_and_padding():
    architecture = small()
    layer = StandardizedConv(3, 4, 5, stride=2, padding=[(1, 1), (1, 1)], a=architecture, rngs=nnx.Rngs(0))
    assert layer(jnp.zeros((1, 9, 8, 4))).shape == (1, 5, 4, 5)
