"""Weights fitted to another head and resolution: parameters that change, and the report of them."""

import collections
import dataclasses
import itertools
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.ndimage
from numpy.testing import assert_allclose, assert_array_equal

from tests.columns import list_column
from tests.models.small_models import abstract
from tests.weights.reference import resizing
from tests.weights.small_networks import (
    NETWORKS,
    OURS,
    VIT,
    assert_same,
    weights_of,
)
from vit_jax import pytree
from vit_jax.config import AdaptConfig, adapt_architecture
from vit_jax.weights.fit import fit
from vit_jax.weights.head_edits import cut_after_layer, remove_head
from vit_jax.weights.names import list_shapes
from vit_jax.weights.position_resize import EQUALS, resize_grid, resize_offsets, resize_rows


def compute_bicubic(x):
    if x < 1:
        return 1.5 * x**3 - 2.5 * x**2 + 1
    return -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2


GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "resizing.npz"
MLP = NETWORKS["mlp_head"]
HEAD = ("head/linear/kernel", "head/linear/bias")
# Radius and value at a distance: the triangle, Keys' cubic with a slope of -0.5, and the windowed
# sinc.
FILTERS = {
    "bilinear": (1, lambda x: 1 - x),
    "bicubic": (2, compute_bicubic),
    "lanczos3": (3, lambda x: np.sinc(x) * np.sinc(x / 3)),
}


def change(instance, /, **fields):
    return dataclasses.replace(instance, **fields)


def double_image(architecture):
    height, width = architecture.image_size
    return change(architecture, image_size=(2 * height, 2 * width))


def build_model(architecture, parameters):
    arrays = jax.tree.map(jnp.asarray, dict(parameters))
    return pytree.from_named_leaves(abstract(architecture), arrays)


def find_statuses(fitted):
    names = list_column(fitted.statuses, "name")
    statuses = list_column(fitted.statuses, "status")
    return dict(zip(names, statuses, strict=True))


def read_shapes(weights):
    shapes = {}
    for name, array in weights.parameters.items():
        shapes[name] = array.shape
    return shapes


def assert_same_bits(actual, expected):
    assert actual.tobytes() == expected.tobytes()


def check_head(name, array):
    """A replaced parameter is a zero of the head."""
    assert name in HEAD
    assert not array.any()
    assert array.dtype == np.float32


def check_resized(
    name,
    status,
    old,
    new,
    source,
    target,
):
    """A resized table of positions has the values of `resize_rows`."""
    old_grid = source.grid
    new_grid = target.grid
    if name == "positions/table":
        words = "resized from {}x{} to {}x{} (corners, as the released code)"
        assert status == words.format(*old_grid, *new_grid)
        old = old[0]
        new = new[0]
    elif name == "positions/row_table":
        old_grid = (old_grid[0], 1)
        new_grid = (new_grid[0], 1)
    elif name == "positions/column_table":
        old_grid = (old_grid[1], 1)
        new_grid = (new_grid[1], 1)

    expected = resize_rows(old, old_grid, new_grid, "corners")
    assert_same_bits(new, expected)


CASES = [(name, True) for name in NETWORKS]


@pytest.mark.parametrize(("name", "resize"), [*CASES, ("token", False)])
def test_every_parameter_of_either_network_has_one_status(name, resize):
    source = NETWORKS[name]
    weights = weights_of(source)
    target = change(source, num_classes=7, head="linear")
    if resize:
        target = double_image(target)
    names = list_shapes(source).keys() | list_shapes(target).keys()

    fitted = fit(remove_head(weights), target)
    counts = collections.Counter(list_column(fitted.statuses, "name"))

    assert_same(weights.parameters, weights_of(source).parameters)
    assert read_shapes(fitted) == list_shapes(target)
    assert counts == dict.fromkeys(names, 1)
    for parameter, status in find_statuses(fitted).items():
        old = weights.parameters.get(parameter)
        new = fitted.parameters.get(parameter)
        if status == "copied":
            assert_same_bits(new, old)
        elif status == "replaced":
            check_head(parameter, new)
        elif status == "dropped":
            assert new is None
            assert parameter.startswith("head/hidden/")
        else:
            assert resize
            check_resized(parameter, status, old, new, source, target)


HIDDEN = ("head/hidden/kernel", "head/hidden/bias")


def test_a_head_of_the_same_classes_is_kept():
    weights = weights_of(MLP)

    fitted = fit(weights, double_image(MLP))
    statuses = find_statuses(fitted)

    for name in (*HEAD, *HIDDEN):
        assert statuses[name] == "copied"
    for name in HEAD:
        assert_same_bits(fitted.parameters[name], weights.parameters[name])


def test_a_head_that_is_taken_away_is_fresh_also_for_the_same_number_of_classes():
    weights = weights_of(MLP)

    fitted = fit(remove_head(weights), MLP)
    statuses = find_statuses(fitted)

    for name in HIDDEN:
        assert statuses[name] == "copied"
        assert_same_bits(fitted.parameters[name], weights.parameters[name])
    for name in HEAD:
        assert not fitted.parameters[name].any()


def test_the_summary_counts_copies_and_lists_other_parameters():
    weights = weights_of(MLP)
    target = change(
        double_image(MLP),
        num_classes=5,
        head="linear",
    )
    num_copied = len(weights.parameters) - 5
    expected = (
        f"{num_copied} parameters copied, "
        "head/hidden/bias dropped, head/hidden/kernel dropped, "
        "head/linear/bias replaced, head/linear/kernel replaced, "
        "positions/table resized from 2x3 to 4x6 (corners, as the released code)"
    )

    fitted = fit(remove_head(weights), target)

    assert fitted.summary() == expected


NORM = ("encoder/norm/scale", "encoder/norm/bias")

POOLED_NORM = ("pooled_norm/scale", "pooled_norm/bias")


@pytest.fixture
def with_pooled_norm():
    """The architecture with the norm behind the pooling."""
    changes = AdaptConfig(pool="gap", final_norm="pooled")
    return adapt_architecture(
        VIT,
        changes,
        image_size=(8, 12),
        num_classes=2,
    )


def test_the_norm_moves_with_the_pooling_and_back(with_pooled_norm):
    weights = weights_of(VIT)

    fitted = fit(weights, with_pooled_norm)
    moved = change(
        weights,
        architecture=with_pooled_norm,
        parameters=fitted.parameters,
    )
    back = fit(moved, VIT)
    statuses = find_statuses(fitted)

    assert read_shapes(fitted) == list_shapes(with_pooled_norm)
    for old_name, new_name in zip(NORM, POOLED_NORM, strict=True):
        array = weights.parameters[old_name]
        assert statuses[old_name] == f"moved to {new_name}"
        assert_same_bits(fitted.parameters[new_name], array)
        assert_same_bits(back.parameters[old_name], array)


def test_a_norm_that_the_source_lacks_is_new(with_pooled_norm):
    bare = change(VIT, final_norm="none")

    fitted = fit(weights_of(bare), with_pooled_norm)
    scale = fitted.parameters["pooled_norm/scale"]
    bias = fitted.parameters["pooled_norm/bias"]
    statuses = find_statuses(fitted)

    assert scale.tolist() == [1.0] * 16
    assert bias.tolist() == [0.0] * 16
    assert statuses["pooled_norm/scale"] == "new"


def test_a_norm_that_the_target_lacks_is_left_out():
    bare = change(VIT, final_norm="none")

    fitted = fit(weights_of(VIT), bare)
    statuses = find_statuses(fitted)

    for name in NORM:
        assert statuses[name] == "dropped"


def test_attention_pooling_is_left_out():
    pooling = change(VIT, pool="map")
    gap = adapt_architecture(
        pooling,
        AdaptConfig(pool="gap"),
        image_size=(8, 12),
        num_classes=3,
    )

    fitted = fit(weights_of(pooling), gap)
    statuses = set()
    for name, status in find_statuses(fitted).items():
        if name.startswith("pooling/"):
            statuses.add(status)

    assert gap.prefix_length == 0
    assert "pooling/* (15 parameters) dropped" in fitted.summary()
    assert statuses == {"dropped"}


def select_features(output, layer, num_class_tokens):
    """Return the features that a layer has, from the output of a complete network."""
    token = output.prefix_BPD[:, :num_class_tokens].reshape(2, -1)
    mean = output.tokens_BND.mean(axis=1)
    features = {
        "token": token,
        "mean": mean,
        "token_mean": np.concatenate([token, mean], axis=1),
        "pooled": output.pooled_BD,
        "pre_logits": output.features_BD,
    }
    return features[layer]


@pytest.mark.parametrize(
    ("options", "layer"),
    [
        ({}, "token_mean"),
        (
            {
                "pool": "map",
                "class_tokens": 1,
                "registers": 2,
                "head": "mlp",
            },
            "token_mean",
        ),
        (
            {
                "pool": "gap",
                "class_tokens": 2,
                "final_norm": "pooled",
            },
            "token",
        ),
        ({"pool": "map"}, "mean"),
        ({"head": "mlp"}, "pooled"),
        ({"head": "mlp"}, "pre_logits"),
    ],
)
def test_a_network_that_ends_in_a_layer_has_the_layer_as_its_features(options, layer):
    weights = weights_of(change(VIT, **options))
    architecture = weights.architecture
    model = build_model(architecture, weights.parameters)
    rng = np.random.default_rng(0)
    pixels = np.float32(rng.uniform(-1, 1, (2, 8, 12, 3)))
    expected = select_features(
        model(pixels),
        layer,
        architecture.num_class_tokens,
    )

    ended = cut_after_layer(weights, layer)
    ended_model = build_model(ended.architecture, ended.parameters)
    output = ended_model(pixels)

    assert read_shapes(ended) == list_shapes(ended.architecture)
    assert_allclose(
        output.features_BD,
        expected,
        rtol=0,
        atol=1e-6,
    )


@pytest.mark.parametrize("network", OURS)
def test_positions_in_blocks_are_resized(network):
    source = OURS[network]
    target = double_image(source)
    weights = weights_of(source)
    tables = set()
    for name in weights.parameters:
        if "positions/" in name and not name.endswith("class_row"):
            tables.add(name)

    fitted = fit(weights, target)
    statuses = find_statuses(fitted)
    resized = {name for name, status in statuses.items() if status != "copied"}

    assert read_shapes(fitted) == list_shapes(target)
    assert resized == tables


def test_tables_of_blocks_are_resized_block_by_block():
    source = OURS["every"]
    target = double_image(source)
    weights = weights_of(source)
    name = "encoder/blocks/positions/table"

    fitted = fit(weights, target)
    old_tables = weights.parameters[name]
    new_tables = fitted.parameters[name]

    for old, new in zip(old_tables, new_tables, strict=True):
        expected = resize_rows(
            old[0],
            source.grid,
            target.grid,
            "corners",
        )
        assert_array_equal(new[0], expected)


def test_offsets_of_axial_blocks_are_resized_along_a_line():
    source = OURS["axial_relative"]

    fitted = fit(weights_of(source), double_image(source))
    resized = set()
    for status in find_statuses(fitted).values():
        words, _, _ = status.partition(" (")
        resized.add(words)

    assert resized == {
        "copied",
        "resized from 1x3 to 1x6",
        "resized from 1x2 to 1x4",
    }


@pytest.mark.parametrize("method", EQUALS)
def test_positions_are_resized_by_the_method_and_a_bias_begins_where_the_target_says(method):
    weights = weights_of(VIT)
    target = change(
        double_image(VIT),
        num_classes=4,
        head_bias_init=-10.0,
    )
    old = weights.parameters["positions/table"][0]
    expected = resize_rows(old, VIT.grid, target.grid, method)

    fitted = fit(weights, target, position_resize=method).parameters
    table = fitted["positions/table"][0]
    kernel = fitted["head/linear/kernel"]
    bias = fitted["head/linear/bias"]

    assert_same_bits(table, expected)
    # The row of the class token stays.
    assert_same_bits(expected[0], old[0])
    assert kernel.tolist() == [[0.0] * 4] * 16
    assert bias.tolist() == [-10.0] * 4


def test_weights_without_the_head_have_no_classes():
    weights = weights_of(VIT, class_names=("a", "b", "c"))

    headless = remove_head(weights, keep_hidden=False)

    assert headless.architecture == change(VIT, num_classes=0)
    assert headless.class_names is None
    assert read_shapes(headless) == list_shapes(headless.architecture)


def find_different_shapes(source, target):
    """Return the names of the parameters whose shapes differ."""
    shapes = list_shapes(target)
    different = set()
    for name, shape in list_shapes(source).items():
        if shape != shapes.get(name):
            different.add(name)
    return different


def test_every_mismatch_is_listed_at_once():
    parameters = dict(weights_of(VIT).parameters)
    del parameters["class_token"]
    parameters["encoder/extra/bias"] = np.zeros(3, np.float32)
    weights = change(
        weights_of(VIT),
        parameters=parameters,
        source="w.npz (released)",
    )
    target = change(
        double_image(VIT),
        width=24,
        depth=5,
        num_classes=7,
        head="mlp",
        name="ViT-other/4",
    )
    different = find_different_shapes(double_image(VIT), target)
    different -= {*HEAD, "class_token"}
    first_line = r"^w\.npz \(released\) does not fit ViT-other/4; it is for ViT-custom/4:"

    with pytest.raises(ValueError, match=first_line) as error:
        fit(remove_head(weights), target)

    message = str(error.value)
    listed = re.findall("shape: ([^ ]+)", message)
    kernel = "encoder/blocks/mlp/expand/kernel"

    assert "missing: head/hidden/kernel (24, 24)" in message
    assert "missing: class_token (1, 1, 24)" in message
    assert "left over: encoder/extra/bias (3,)" in message
    assert f"shape: {kernel} is (2, 16, 24), the model has (5, 24, 24)" in message
    assert set(listed) == different


# Tables of positions on other grids, held to numbers by hand, SciPy, and filters by definition.


def sample_table(*shape):
    rng = np.random.default_rng(0)
    return np.float32(rng.normal(size=shape))


def test_three_by_two_becomes_five_by_four():
    """New rows lie at 0, 1/2, 1, 3/2, 2 of the old ones, new columns at 0, 1/3, 2/3, 1."""
    table = np.array([0, 3, 6, 9, 30, 33], np.float32)
    old_hwD = table.reshape(3, 2, 1)
    expected = [
        [0, 1, 2, 3],
        [3, 4, 5, 6],
        [6, 7, 8, 9],
        [18, 19, 20, 21],
        [30, 31, 32, 33],
    ]

    resized = resize_grid(old_hwD, (5, 4))

    assert_allclose(resized[..., 0], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ((14, 14), (24, 24)),
        ((7, 7), (37, 5)),
        ((3, 5), (7, 4)),
        ((1, 6), (1, 9)),
        ((6, 1), (9, 1)),
        ((5, 4), (1, 6)),
        ((5, 4), (1, 1)),
        ((1, 1), (3, 2)),
    ],
)
def test_corners_are_the_order_1_zoom_of_scipy(old, new):
    old_hwD = sample_table(*old, 3)
    expected = scipy.ndimage.zoom(
        np.float64(old_hwD),
        (new[0] / old[0], new[1] / old[1], 1),
        order=1,
    )

    resized = resize_grid(old_hwD, new)

    assert resized.shape == (*new, 3)
    assert resized.dtype == np.float32
    # The last bit of float32 below 4 is worth 2.4e-7.
    assert_allclose(resized, expected, rtol=0, atol=5e-7)
    if min(*old, *new) > 1:
        for corner in ((0, 0), (0, -1), (-1, 0), (-1, -1)):
            assert_same_bits(resized[corner], old_hwD[corner])

    # The row of a class token stays.
    class_row = sample_table(1, 3)

    def flatten(table_hwD):
        rows = table_hwD.reshape(-1, 3)
        return np.concatenate([class_row, rows])

    resized_SD = resize_rows(
        flatten(old_hwD),
        old,
        new,
        "corners",
    )
    assert_array_equal(resized_SD, flatten(resized))


def test_offsets_in_a_row_of_two_become_those_of_three():
    # Offsets -1, 0 and 1, and three rows of a class token.
    table = np.array([2, 4, 10, -1, -2, -3], np.float32)
    expected = [2, 3, 4, 7, 10, -1, -2, -3]

    resized = resize_offsets(
        table[:, None],
        (1, 2),
        (1, 3),
        "corners",
    )

    assert resized.ravel().tolist() == expected


def interpolate_offset(offsets_Rh, grid, y, x):
    """Return the value between the four offsets around (y, x)."""
    rows, columns = grid
    total = np.zeros(offsets_Rh.shape[1])
    for row in range(1 - rows, rows):
        for column in range(1 - columns, columns):
            row_share = max(0, 1 - abs(y - row))
            column_share = max(0, 1 - abs(x - column))
            offset = offsets_Rh[row * columns + column + 5]
            total += row_share * column_share * offset
    return total


def test_an_offset_in_raster_order_is_the_mean_over_the_pairs_of_patches_that_have_it():
    """The old grid is stretched over the new one, so the offset of a pair lies between four old ones."""
    old = (2, 3)
    new = (3, 4)
    offsets_Rh = sample_table(11, 2)
    sums = np.zeros((23, 2))
    counts = np.zeros(23)

    for query, key in itertools.product(np.ndindex(new), repeat=2):
        down, right = np.subtract(query, key)
        y = down / 2  # from 3 rows to 2
        x = right * 2 / 3  # from 4 columns to 3
        index = down * 4 + right + 11
        counts[index] += 1
        sums[index] += interpolate_offset(offsets_Rh, old, y, x)

    resized = resize_offsets(offsets_Rh, old, new, "corners")
    turned = resize_offsets(offsets_Rh, old, (3, 2), "corners")

    assert_allclose(resized, sums / counts[:, None], atol=1e-6)
    assert turned.shape == (11, 2)


def build_filter(old_n, new_n, method):
    """Return the weights (new, old) of each new sample.

    Samples lie in the middles of cells. The filter is wider where cells become fewer.
    """
    radius, compute_value = FILTERS[method]
    stretch = max(old_n / new_n, 1.0)
    weights = np.zeros((new_n, old_n))

    for i, j in np.ndindex(new_n, old_n):
        centre = (i + 0.5) * old_n / new_n
        distance = abs(j + 0.5 - centre) / stretch
        if distance < radius:
            weights[i, j] = compute_value(distance)

    return weights / weights.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("method", FILTERS)
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ((14, 14), (24, 24)),
        ((9, 4), (5, 7)),
        ((1, 6), (1, 3)),
    ],
)
def test_other_filters(old, new, method):
    old_hwD = sample_table(*old, 3)
    expected = np.einsum(
        "Hh,Ww,hwD->HWD",
        build_filter(old[0], new[0], method),
        build_filter(old[1], new[1], method),
        np.float64(old_hwD),
    )

    resized = resize_grid(old_hwD, new, method)
    by_corners = resize_grid(old_hwD, new)
    unchanged = resize_grid(old_hwD, old, method)

    assert resized.dtype == np.float32
    # Weights and sums of the resize are float32.
    assert_allclose(resized, expected, rtol=0, atol=2e-5)
    assert np.abs(resized - by_corners).max() > 1e-2
    assert_same_bits(unchanged, old_hwD)


@pytest.mark.parametrize(
    ("library", "method"),
    [
        ("timm", "bicubic"),
        ("huggingface", "huggingface"),
        ("dinov2", "dinov2"),
        ("bilinear", "bilinear"),
    ],
)
@pytest.mark.parametrize("grids", resizing.GRIDS)
def test_positions_are_those_of_the_library(library, method, grids):
    """Recorded from timm's resample_abs_pos_embed and PyTorch's interpolate (reference/resizing.py)."""
    old, new = grids
    old_hwD = resizing.table(old)
    with np.load(GOLDEN) as golden:
        expected = golden[resizing.key(library, old, new)]

    resized = resize_grid(old_hwD, new, method)
    by_corners = resize_grid(old_hwD, new, "corners")
    unchanged = resize_grid(old_hwD, old, method)

    assert_allclose(resized, expected, rtol=0, atol=1e-5)
    assert np.abs(by_corners - expected).max() > 1e-2
    assert unchanged is old_hwD


@pytest.mark.parametrize("grid", [(2, 2), (3, 3)])
def test_an_unknown_filter_is_rejected_whatever_the_grid(grid):
    table = sample_table(2, 2, 1)
    message = "'nearest': use one of corners, bilinear, bicubic, lanczos3"

    with pytest.raises(ValueError, match=message):
        resize_grid(table, grid, "nearest")
