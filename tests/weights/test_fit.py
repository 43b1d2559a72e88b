"""Weights made to fit another head and another resolution: what changes, what does not, and what is told of it."""

import collections
import dataclasses
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.ndimage

from tests.models.small_models import abstract
from tests.weights.reference import resizing
from tests.weights.small_networks import NETWORKS, OURS, VIT, assert_same, weights_of
from vit_jax import pytree
from vit_jax.config import AdaptConfig, adapt_architecture
from vit_jax.weights.fit import cut_after_layer, fit, remove_head
from vit_jax.weights.names import list_shapes
from vit_jax.weights.position_resize import EQUALS, resize_grid, resize_offsets, resize_rows

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "resizing.npz"
MLP = NETWORKS["mlp_head"]
HEAD = ("head/linear/kernel", "head/linear/bias")
FILTERS = {
    "bilinear": (1, lambda x: 1 - x),
    "bicubic": (
        2,
        lambda x: 1.5 * x**3 - 2.5 * x**2 + 1 if x < 1 else -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2,
    ),
    "lanczos3": (3, lambda x: np.sinc(x) * np.sinc(x / 3)),
}
"""Radius and value at a distance: the triangle, Keys' cubic with a slope of -0.5, and the windowed sinc."""


def changed(a, **fields):
    return dataclasses.replace(a, **fields)


def doubled(a):
    return changed(a, image_size=(2 * a.image_size[0], 2 * a.image_size[1]))


def model_of(a, parameters):
    return pytree.from_named_leaves(abstract(a), jax.tree.map(jnp.asarray, dict(parameters)))


def words_of(fitted):
    return {status.name: status.status for status in fitted.statuses}


@pytest.mark.parametrize(
    ("name", "resize"),
    [*((name, True) for name in NETWORKS), ("token", False)],
)
def test_every_parameter_of_either_network_has_one_status(name, resize):
    source = NETWORKS[name]
    weights = weights_of(source)
    before = {name: array.copy() for name, array in weights.parameters.items()}
    target = changed(doubled(source) if resize else source, num_classes=7, head="linear")
    fitted = fit(remove_head(weights), target)

    assert_same(weights.parameters, before)  # nothing was changed in place

    expected = list_shapes(target)
    assert {name: array.shape for name, array in fitted.parameters.items()} == expected

    names = collections.Counter(status.name for status in fitted.statuses)
    expected = collections.Counter(list_shapes(source).keys() | list_shapes(target).keys())

    assert names == expected

    for name, words in words_of(fitted).items():
        source_array = weights.parameters.get(name)
        made = fitted.parameters.get(name)

        if words == "copied":
            assert made.tobytes() == source_array.tobytes()
        elif words == "replaced":
            assert name in HEAD
            assert not made.any()
            assert made.dtype == np.float32
        elif words == "dropped":
            assert made is None
            assert name.startswith("head/hidden/")
        else:
            assert resize

            (height, width), (new_height, new_width) = source.grid, target.grid
            grids = f"{height}x{width} to {new_height}x{new_width}"

            assert (
                name != "positions/table"
                or words == f"resized from {grids} (corners, as the released code)"
            )

            resized = made[0] if name == "positions/table" else made
            old = source_array[0] if name == "positions/table" else source_array
            grids = {"row": ((height, 1), (new_height, 1)), "column": ((width, 1), (new_width, 1))}
            grid = grids.get(
                name.removeprefix("positions/").removesuffix("_table"),
                (source.grid, target.grid),
            )

            assert resized.tobytes() == resize_rows(old, *grid, "corners").tobytes()


def test_a_head_of_the_same_classes_is_kept_unless_it_is_taken_away():
    weights = weights_of(MLP)
    kept = fit(weights, doubled(MLP))
    expected = {"copied"}

    assert {
        words_of(kept)[name] for name in (*HEAD, "head/hidden/kernel", "head/hidden/bias")
    } == expected
    assert all(
        kept.parameters[name].tobytes() == weights.parameters[name].tobytes() for name in HEAD
    )

    fitted = fit(
        remove_head(weights),
        MLP,
    )  # the same number of classes, and still a fresh last layer

    for name in ("head/hidden/kernel", "head/hidden/bias"):
        assert fitted.parameters[name].tobytes() == weights.parameters[name].tobytes()
        assert words_of(fitted)[name] == "copied"

    assert not any(fitted.parameters[name].any() for name in HEAD)

    summary = fit(
        remove_head(weights),
        changed(doubled(MLP), num_classes=5, head="linear"),
    ).summary()
    expected = (
        f"{len(weights.parameters) - 5} parameters copied, head/hidden/bias dropped, head/hidden/kernel dropped, "
        "head/linear/bias replaced, head/linear/kernel replaced, "
        "positions/table resized from 2x3 to 4x6 (corners, as the released code)"
    )

    assert summary == expected


def test_the_norm_moves_with_the_pooling_and_attention_pooling_is_left_out():
    weights = weights_of(VIT)
    norm = ("encoder/norm/scale", "encoder/norm/bias")
    target = adapt_architecture(
        VIT,
        AdaptConfig(pool="gap", final_norm="pooled"),
        image_size=(8, 12),
        num_classes=2,
    )
    fitted = fit(weights, target)
    expected = list_shapes(target)

    assert {name: array.shape for name, array in fitted.parameters.items()} == expected

    for name in norm:
        moved = name.replace("encoder/norm", "pooled_norm")
        assert words_of(fitted)[name] == f"moved to {moved}"
        assert fitted.parameters[moved].tobytes() == weights.parameters[name].tobytes()

    back = fit(
        dataclasses.replace(weights, architecture=target, parameters=fitted.parameters),
        VIT,
    ).parameters

    assert all(back[name].tobytes() == weights.parameters[name].tobytes() for name in norm)

    bare = changed(VIT, final_norm="none")
    new = fit(weights_of(bare), target)
    expected = [[1.0] * 16, [0.0] * 16]

    assert [
        new.parameters[f"pooled_norm/{name}"].tolist() for name in ("scale", "bias")
    ] == expected
    assert words_of(new)["pooled_norm/scale"] == "new"
    assert [words_of(fit(weights, bare))[name] for name in norm] == ["dropped"] * 2

    pooling = changed(VIT, pool="map")
    gap = adapt_architecture(pooling, AdaptConfig(pool="gap"), image_size=(8, 12), num_classes=3)

    assert gap.prefix_length == 0

    fitted = fit(weights_of(pooling), gap)
    words = words_of(fitted)

    assert "pooling/* (15 parameters) dropped" in fitted.summary()
    assert {how for name, how in words.items() if name.startswith("pooling/")} == {"dropped"}


@pytest.mark.parametrize(
    ("options", "layer"),
    [
        ({}, "token_mean"),
        ({"pool": "map", "class_tokens": 1, "registers": 2, "head": "mlp"}, "token_mean"),
        ({"pool": "gap", "class_tokens": 2, "final_norm": "pooled"}, "token"),
        ({"pool": "map"}, "mean"),
        ({"head": "mlp"}, "pooled"),
        ({"head": "mlp"}, "pre_logits"),
    ],
)
def test_a_network_that_ends_in_a_layer_has_the_layer_as_its_features(options, layer):
    weights = weights_of(changed(VIT, **options))
    ended = cut_after_layer(weights, layer)

    assert {name: array.shape for name, array in ended.parameters.items()} == list_shapes(
        ended.architecture
    )

    pixels = np.random.default_rng(0).uniform(-1, 1, (2, 8, 12, 3)).astype(np.float32)
    of_layer, of_network = (
        model_of(w.architecture, w.parameters)(pixels) for w in (weights, ended)
    )
    token = of_layer.prefix_BPD[:, : weights.architecture.num_class_tokens].reshape(2, -1)
    mean = of_layer.tokens_BND.mean(axis=1)
    expected = {"token": token, "mean": mean, "token_mean": np.concatenate([token, mean], axis=1)}
    expected |= {"pooled": of_layer.pooled_BD, "pre_logits": of_layer.features_BD}

    np.testing.assert_allclose(of_network.features_BD, expected[layer], rtol=0, atol=1e-6)


@pytest.mark.parametrize("network", OURS)
def test_positions_in_blocks_are_resized_block_by_block(network):
    a = OURS[network]
    target = doubled(OURS[network])
    before = weights_of(a).parameters
    fitted = fit(weights_of(a), target)
    expected = list_shapes(target)

    assert {name: array.shape for name, array in fitted.parameters.items()} == expected

    resized = {name: words for name, words in words_of(fitted).items() if words != "copied"}
    tables = {name for name in before if "positions/" in name and not name.endswith("class_row")}

    assert resized.keys() == tables

    if network == "every":
        for old, new in zip(
            *(p["encoder/blocks/positions/table"] for p in (before, fitted.parameters)),
            strict=True,
        ):
            np.testing.assert_array_equal(
                new[0],
                resize_rows(old[0], a.grid, target.grid, "corners"),
            )

    if network == "axial_relative":
        expected = {"resized from 1x3 to 1x6", "resized from 1x2 to 1x4"}
        assert {words.partition(" (")[0] for words in resized.values()} == expected


@pytest.mark.parametrize("method", EQUALS)
def test_positions_are_resized_by_the_method_and_a_bias_begins_where_the_target_says(method):
    target = changed(doubled(VIT), num_classes=4, head_bias_init=-10.0)
    weights = weights_of(VIT, class_names=("a", "b", "c"))
    fitted = fit(weights, target, position_resize=method).parameters
    expected = resize_rows(weights.parameters["positions/table"][0], VIT.grid, target.grid, method)

    assert fitted["positions/table"][0].tobytes() == expected.tobytes()
    assert (
        expected[0].tobytes() == weights.parameters["positions/table"][0, 0].tobytes()
    )  # the class token's
    assert fitted["head/linear/kernel"].tolist() == [[0.0] * 4] * 16
    assert fitted["head/linear/bias"].tolist() == [-10.0] * 4

    empty = remove_head(weights, keep_hidden=False)
    assert (empty.architecture, empty.class_names) == (changed(VIT, num_classes=0), None)
    assert {name: array.shape for name, array in empty.parameters.items()} == list_shapes(
        empty.architecture
    )


def test_every_mismatch_is_listed_at_once():
    weights = weights_of(VIT)
    parameters = {
        name: array for name, array in weights.parameters.items() if name != "class_token"
    }
    parameters["encoder/extra/bias"] = np.zeros(3, np.float32)
    weights = dataclasses.replace(weights, parameters=parameters, source="w.npz (released)")
    target = changed(doubled(VIT), width=24, depth=5, num_classes=7, head="mlp", name="ViT-other/4")

    with pytest.raises(
        ValueError, match=r"^w\.npz \(released\) does not fit ViT-other/4 \(ViT-custom/4 is"
    ) as error:
        fit(remove_head(weights), target)

    told = str(error.value)
    assert "missing: head/hidden/kernel (24, 24)" in told
    assert "missing: class_token (1, 1, 24)" in told
    assert "left over: encoder/extra/bias (3,)" in told
    assert (
        "shape: encoder/blocks/mlp/expand/kernel is (2, 16, 24), the model has (5, 24, 24)" in told
    )

    expected = list_shapes(target)
    shared = list_shapes(doubled(VIT)).items() - {(name, expected.get(name)) for name in expected}
    different = {name for name, _ in shared} - {*HEAD, "class_token"}

    assert {line.split()[1] for line in told.splitlines() if "shape:" in line} == different


# Tables of positions on other grids: against numbers worked by hand, SciPy, and filters written
# out.


def table(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_three_by_two_becomes_five_by_four():
    """New rows lie at 0, 1/2, 1, 3/2, 2 of the old ones, new columns at 0, 1/3, 2/3, 1."""
    expected = [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9], [18, 19, 20, 21], [30, 31, 32, 33]]
    resized = resize_grid(np.array([[0, 3], [6, 9], [30, 33]], np.float32)[..., None], (5, 4))

    np.testing.assert_allclose(resized[..., 0], expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        *(((14, 14), (24, 24)), ((7, 7), (37, 5)), ((3, 5), (7, 4)), ((1, 6), (1, 9))),
        *(((6, 1), (9, 1)), ((5, 4), (1, 6)), ((5, 4), (1, 1)), ((1, 1), (3, 2))),
    ],
)
def test_corners_are_the_order_1_zoom_of_scipy(old, new):
    old_hwD = table(*old, 3)
    zoom = (new[0] / old[0], new[1] / old[1], 1)
    expected = scipy.ndimage.zoom(old_hwD.astype(np.float64), zoom, order=1)
    resized = resize_grid(old_hwD, new)

    assert resized.shape == (*new, 3)
    assert resized.dtype == np.float32
    np.testing.assert_allclose(
        resized,
        expected,
        rtol=0,
        atol=5e-7,
    )  # the last bit of float32 below 4 is worth 2.4e-7

    for corner in ((0, 0), (0, -1), (-1, 0), (-1, -1)) if min(*old, *new) > 1 else ():
        assert resized[corner].tobytes() == old_hwD[corner].tobytes()

    flat_SD = np.concatenate(
        [table(1, 3), old_hwD.reshape(-1, 3)]
    )  # the row of a class token stays
    resized_SD = resize_rows(flat_SD, old, new, "corners")

    np.testing.assert_array_equal(resized_SD, np.concatenate([flat_SD[:1], resized.reshape(-1, 3)]))


def test_offsets_in_a_row_of_two_become_those_of_three():
    table = np.array(
        [[2], [4], [10], [-1], [-2], [-3]],
        np.float32,
    )  # offsets -1, 0, 1; a class token's
    expected = [2, 3, 4, 7, 10, -1, -2, -3]

    assert resize_offsets(table, (1, 2), (1, 3), "corners").ravel().tolist() == expected


def test_an_offset_in_raster_order_is_the_mean_over_the_pairs_of_patches_that_have_it():
    """Pair by pair: where the old grid is stretched over the new, the offset lies between four old ones."""
    (rows, columns), (_, new_columns) = old, new = (2, 3), (3, 4)
    offsets_Rh = table(11, 2)
    sums = np.zeros((23, 2))
    counts = np.zeros(23)
    patches = list(np.ndindex(new))

    for query, key in ((q, k) for q in patches for k in patches):
        y, x = (
            (q - k) * (n - 1) / (m - 1) for q, k, n, m in zip(query, key, old, new, strict=True)
        )
        place = (query[0] - key[0]) * new_columns + query[1] - key[1] + 11
        counts[place] += 1

        for row, column in np.ndindex(2 * rows - 1, 2 * columns - 1):
            row = row - rows + 1
            column = column - columns + 1
            share = max(0, 1 - abs(y - row)) * max(0, 1 - abs(x - column))
            sums[place] += share * offsets_Rh[row * columns + column + 5]

    np.testing.assert_allclose(
        resize_offsets(offsets_Rh, old, new, "corners"),
        sums / counts[:, None],
        atol=1e-6,
    )
    assert resize_offsets(offsets_Rh, old, (3, 2), "corners").shape == (11, 2)


def by_filter(old_n, new_n, method):
    """(new, old): each new sample's weights, samples in the middles of cells; widened where cells become fewer."""
    radius, value = FILTERS[method]
    stretch = max(old_n / new_n, 1.0)
    rows = []

    for i in range(new_n):
        centre = (i + 0.5) * old_n / new_n
        distances = [abs(j + 0.5 - centre) / stretch for j in range(old_n)]
        weights = [float(value(x)) if x < radius else 0.0 for x in distances]
        rows.append([weight / math.fsum(weights) for weight in weights])

    return np.array(rows)


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
    old_hwD = table(*old, 3)
    rows, columns = (by_filter(*sizes, method) for sizes in zip(old, new, strict=True))
    expected = np.stack(
        [rows @ channel @ columns.T for channel in np.moveaxis(old_hwD.astype(np.float64), -1, 0)],
        -1,
    )
    resized = resize_grid(old_hwD, new, method)

    assert resized.dtype == np.float32
    np.testing.assert_allclose(
        resized,
        expected,
        rtol=0,
        atol=2e-5,
    )  # weights and sums are float32 there
    assert np.abs(resized - resize_grid(old_hwD, new)).max() > 1e-2
    assert resize_grid(old_hwD, old, method).tobytes() == old_hwD.tobytes()


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
    with np.load(GOLDEN) as golden:
        expected = golden[resizing.key(library, *grids)]

    old_hwD = resizing.table(grids[0])
    np.testing.assert_allclose(resize_grid(old_hwD, grids[1], method), expected, rtol=0, atol=1e-5)
    assert np.abs(resize_grid(old_hwD, grids[1], "corners") - expected).max() > 1e-2
    assert resize_grid(old_hwD, grids[0], method) is old_hwD


def test_an_unknown_filter_is_refused_whatever_the_grid():
    for grid in ((2, 2), (3, 3)):
        with pytest.raises(
            ValueError, match="'nearest': use one of corners, bilinear, bicubic, lanczos3"
        ):
            resize_grid(table(2, 2, 1), grid, "nearest")
