import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.small_models import abstract, apply, filled, images, initialised, size
from vit_jax import pytree
from vit_jax.config import Architecture, ModelConfig, build_architecture
from vit_jax.cost.parameters import count_parameters

GOLDEN = json.loads((pathlib.Path(__file__).parents[1] / "golden" / "parameter_counts.json").read_text())
POOLS = ("token", "gap", "map")
POSITIONS = ("learned_1d", "learned_2d", "sincos2d", "none")


def small(image_size=(16, 8), num_classes=10, **options) -> Architecture:
    options = {"name": "ViT-mu/4", "depth": 2, "compute_dtype": "float32"} | options
    return build_architecture(ModelConfig(**options), image_size=image_size, num_classes=num_classes)


@pytest.mark.parametrize(
    "row", GOLDEN, ids=lambda row: f"{row['name']}-{row['image_size']}-{row['num_classes']}-{row['pool']}-{row['head']}"
)
def test_parameters_are_those_of_the_golden_file(row):
    backbone_only = row["head"] == "none"
    config = ModelConfig(name=row["name"], pool=row["pool"], head="linear" if backbone_only else row["head"])
    image_size = row["image_size"] if isinstance(row["image_size"], list) else [row["image_size"]] * 2
    architecture = build_architecture(config, image_size=tuple(image_size), num_classes=row["num_classes"] or 1)
    model = abstract(architecture)
    assert size(model) - (size(model.head) if backbone_only else 0) == row["parameters"]


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("head", ["mlp", "linear"])
def test_count_by_formula_equals_count_by_building(pool, positions, head):
    architecture = small(pool=pool, position_embedding=positions, head=head)
    assert size(abstract(architecture)) == count_parameters(architecture)


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shapes_and_dtypes_for_any_height_and_width(pool, positions, dtype):
    architecture = small(pool=pool, position_embedding=positions, compute_dtype=dtype, image_size=(24, 8))
    model = filled(architecture)
    output = apply(model, images(architecture))
    assert output.logits_BK.shape == (2, 10)
    assert output.tokens_BND.shape == (2, 6 * 2, 32)
    assert output.features_BD.shape == output.pooled_BD.shape == (2, 32)
    assert output.logits_BK.dtype == jnp.float32
    assert output.tokens_BND.dtype == jnp.dtype(dtype)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(model))


def test_patches_may_be_oblong():
    architecture = small(name="ViT-mu/4x2", image_size=(8, 8))
    assert architecture.grid == (2, 4)
    assert apply(filled(architecture), images(architecture)).tokens_BND.shape == (2, 8, 32)


def test_patch_embedding_equals_a_convolution():
    architecture = small(image_size=(16, 12))
    embedding = filled(architecture).embedding
    x = images(architecture)
    expected = jax.lax.conv_general_dilated(
        x, embedding.kernel[...], (4, 4), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    np.testing.assert_allclose(embedding(x), expected.reshape(2, -1, 32) + embedding.bias[...], atol=1e-5)


@pytest.mark.parametrize("bias", [0.0, -10.0])
def test_zero_head_gives_the_bias_for_any_image(bias):
    architecture = small(head_bias_init=bias)
    logits = apply(initialised(architecture), images(architecture)).logits_BK
    np.testing.assert_array_equal(logits, np.full((2, 10), bias, np.float32))


def test_forward_pass_equals_numpy():
    """An independent float64 implementation of equations 1 to 4 on the same weights."""
    architecture = small(head="mlp")
    model = filled(architecture)
    x = images(architecture)
    expected = numpy_vit({name: np.float64(leaf) for name, leaf in pytree.named_leaves(model).items()}, x)
    np.testing.assert_allclose(apply(model, x).logits_BK, expected, rtol=1e-4, atol=1e-4)


def numpy_vit(p, x, patch=4, eps=1e-6):
    def norm(x, name, layer=...):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * p[f"{name}/scale"][layer] + p[f"{name}/bias"][layer]

    def gelu(x):
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    x = np.float64(x)
    batch, height, width, _ = x.shape
    tokens = np.stack(
        [
            np.tensordot(x[:, r : r + patch, c : c + patch], p["embedding/kernel"], 3) + p["embedding/bias"]
            for r in range(0, height, patch)
            for c in range(0, width, patch)
        ],
        axis=1,
    )
    x = np.concatenate([np.repeat(p["class_token"], batch, 0), tokens], 1) + p["positions/table"]
    for layer in range(2):
        block = "encoder/blocks"
        y = norm(x, f"{block}/attention_norm", layer)
        q, k, v = (
            np.einsum("bsd,dth->bsth", y, p[f"{block}/attention/{n}/kernel"][layer])
            + p[f"{block}/attention/{n}/bias"][layer]
            for n in ("query", "key", "value")
        )
        logits = np.einsum("bqth,bsth->btqs", q, k) / np.sqrt(q.shape[-1])
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("btqs,bsth->bqth", weights, v)
        x = (
            x
            + np.einsum("bqth,thd->bqd", mixed, p[f"{block}/attention/out/kernel"][layer])
            + p[f"{block}/attention/out/bias"][layer]
        )
        y = norm(x, f"{block}/mlp_norm", layer)
        y = gelu(y @ p[f"{block}/mlp/expand/kernel"][layer] + p[f"{block}/mlp/expand/bias"][layer])
        x = x + y @ p[f"{block}/mlp/contract/kernel"][layer] + p[f"{block}/mlp/contract/bias"][layer]
    x = norm(x, "encoder/norm")[:, 0]
    x = np.tanh(x @ p["head/hidden/kernel"] + p["head/hidden/bias"])
    return x @ p["head/linear/kernel"] + p["head/linear/bias"]


def test_gelu_forms_differ_in_the_fourth_digit_only():
    model = {}
    for form in ("tanh", "exact"):
        architecture = small(gelu=form)
        model[form] = apply(filled(architecture), images(architecture)).logits_BK
    difference = jnp.abs(model["tanh"] - model["exact"]).max() / jnp.abs(model["tanh"]).max()
    assert 1e-7 < difference < 1e-2


@pytest.mark.parametrize("remat", ["dots", "full"])
def test_rematerialisation_changes_no_gradient(remat):
    gradients = [gradient(small(remat=mode, dropout_fraction=0.1)) for mode in ("none", remat)]
    assert_same_up_to_rounding(*gradients)


def test_unrolling_the_scan_changes_nothing():
    assert_same_up_to_rounding(*(gradient(small(scan_unroll=unroll)) for unroll in (1, 2)))


def assert_same_up_to_rounding(a, b):
    """Sums in another order differ by some float32 epsilons of the largest term, here the largest gradient."""
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(a))
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * scale)


def gradient(architecture):
    model = filled(architecture)

    def loss(model):
        return jnp.square(model(images(architecture), dropout_key=jax.random.key(5)).logits_BK).mean()

    return jax.jit(jax.grad(loss))(model)


def test_dropout_needs_a_key_and_is_a_function_of_it():
    architecture = small(dropout_fraction=0.5)
    model = filled(architecture)
    x = images(architecture)
    plain = apply(model, x).logits_BK
    first, again, other = (apply(model, x, dropout_key=jax.random.key(seed)).logits_BK for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)
    assert not np.allclose(first, plain)


def test_stochastic_depth_spares_the_first_block_and_drops_whole_examples():
    from vit_jax.models.transformer import dropout

    branch = jnp.ones((1000, 3, 4))
    kept = dropout(branch, 0.25, jax.random.key(0), dims=1)
    per_example = np.unique(np.asarray(kept).reshape(1000, -1), axis=1)
    assert per_example.shape == (1000, 1), "an example is kept or dropped as a whole"
    np.testing.assert_allclose(np.unique(kept), [0.0, 1 / 0.75], rtol=1e-6)
    assert abs(float(kept.mean()) - 1.0) < 0.1
    architecture = small(depth=1, stochastic_depth_fraction=0.9)
    model = filled(architecture)
    x = images(architecture)
    np.testing.assert_allclose(
        apply(model, x, dropout_key=jax.random.key(1)).logits_BK, apply(model, x).logits_BK, rtol=1e-5
    )


def test_learned_2d_positions_share_rows_and_columns():
    architecture = small(position_embedding="learned_2d", image_size=(12, 8))
    table = filled(architecture).positions()[0, 1:].reshape(3, 2, 32)
    np.testing.assert_array_equal(table[0, :, :16], table[2, :, :16])  # x half: by column
    np.testing.assert_array_equal(table[:, 0, 16:], table[:, 1, 16:])  # y half: by row


@pytest.mark.parametrize(
    ("name", "std"),
    [("positions/table", 0.02), ("encoder/blocks/mlp/expand/bias", 1e-6), ("embedding/kernel", (1 / 768) ** 0.5)],
)
def test_standard_deviations_of_initialisers(name, std):
    architecture = small(name="ViT-Ti/16", image_size=(64, 64))
    leaf = pytree.named_leaves(initialised(architecture))[name]
    assert float(leaf.std()) == pytest.approx(std, rel=0.05)


@pytest.mark.parametrize("projection", ["query", "key", "value", "out"])
def test_attention_kernels_are_xavier_uniform_as_one_matrix(projection):
    architecture = small(name="ViT-Ti/16", image_size=(64, 64))
    kernel = getattr(initialised(architecture).encoder.blocks.attention, projection).kernel[...]
    limit = (6 / (192 + 192)) ** 0.5
    assert 0.99 * limit < float(jnp.abs(kernel).max()) <= limit
    assert not np.array_equal(kernel[0], kernel[1]), "layers must not start alike"


def test_zero_and_one_initialisers():
    leaves = pytree.named_leaves(initialised(small()))
    for name, leaf in leaves.items():
        if name.endswith("scale"):
            assert (leaf == 1).all(), name
        elif (name.endswith("bias") and "mlp" not in name) or name in ("class_token", "head/linear/kernel"):
            assert (leaf == 0).all(), name


def test_two_builds_are_the_same_tree():
    a, b = initialised(small()), abstract(small())
    assert jax.tree.structure(a) == jax.tree.structure(b)
