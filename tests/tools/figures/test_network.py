"""The figures that a network has, that each is drawn, and that its numbers are those of the
network.
"""

import dataclasses

import cv2
import numpy as np
import pytest

import vit_jax
from tests.columns import list_column
from tests.evals.samples import sample_pixels
from tests.weights.small_networks import (
    HYBRID,
    NETWORKS,
    RESNET,
    ROOT_HYBRID,
    VIT,
    weights_of,
)
from vit_jax.api import from_weights
from vit_jax.tools.figures import network, sheets
from vit_jax.tools.figures.drawing import new_figure
from vit_jax.tools.figures.network import (
    KINDS,
    cell_size,
    draw_distance,
    draw_filters,
    draw_heads,
    draw_pca,
    draw_positions,
    draw_rollout,
    draw_similar,
    explain_missing,
    select_heads,
)
from vit_jax.tools.figures.view import View, spread

OF_PARAMETERS = {"filters", "positions"}
OF_IMAGES = {"similar", "pca"}
OF_ATTENTION = {"distance", "rollout", "heads"}
OWN = {
    "num_classes": 3,
    "image_size": (8, 12),
    "width": 16,
    "depth": 2,
    "mlp_dim": 24,
    "num_heads": 2,
}

ALL = OF_PARAMETERS | OF_IMAGES | OF_ATTENTION

WITHOUT_TABLE = {"filters"} | OF_IMAGES | OF_ATTENTION


def list_available(model):
    available = set()
    for name, reason in explain_missing(model).items():
        if reason is None:
            available.add(name)
    return available


def change(architecture, **options):
    return dataclasses.replace(architecture, **options)


def build_model(architecture=VIT, **options):
    changed = change(architecture, **options)
    return from_weights(weights_of(changed))


@pytest.mark.parametrize(
    ("architecture", "names"),
    [
        (VIT, ALL),
        (NETWORKS["learned_2d"], ALL),
        (change(VIT, position_embedding="none"), WITHOUT_TABLE),
        (change(VIT, position_embedding="relative"), WITHOUT_TABLE),
        (change(VIT, position_layers="every"), ALL),
        (change(VIT, pool="gap", block="axial"), ALL),
        (HYBRID, ALL | {"gradcam"}),
        (change(HYBRID, num_classes=0), ALL),
        (RESNET, {"filters", "gradcam"} | OF_IMAGES),
        (change(RESNET, image_size=(8, 8)), {"filters"} | OF_IMAGES),
    ],
)
def test_figures_of_networks(architecture, names):
    model = build_model(architecture)

    assert list_available(model) == names


@pytest.mark.parametrize(
    ("option", "missing"),
    [
        ({"position_embedding": "docs.examples.positions:LearnedWaves"}, set()),
        ({"block": "docs.examples.block:ParallelBlock"}, set()),
        ({"block": "tests.tools.figures.own_parts:Forgetful"}, OF_ATTENTION),
        (
            {"network": "docs.examples.network:Mixer"},
            OF_PARAMETERS | OF_ATTENTION | {"pca"},
        ),
    ],
)
def test_figures_of_networks_with_custom_parts(option, missing):
    model = vit_jax.create_model("ViT-mu/4", **OWN, **option)

    assert list_available(model) == ALL - missing


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [
        (VIT, (4, 4)),
        (HYBRID, (8, 8)),
        (ROOT_HYBRID, (8, 8)),
        (RESNET, (8, 8)),
    ],
    ids=["vit", "hybrid", "hybrid of the root", "resnet"],
)
def test_cells(architecture, expected):
    assert cell_size(architecture) == expected


def test_components_of_known_kernels():
    """Filters of one hue that is brightest at the left, and of another at the right, have two
    components.
    """
    model = build_model()
    rng = np.random.default_rng(0)
    left_and_right = np.zeros((2, 4, 4, 3))
    left_and_right[0, :, 0, 0] = 1
    left_and_right[1, :, 3, 2] = 1
    strengths = rng.normal(size=(2, VIT.width))
    kernel = np.einsum(
        "fd,fhwc->hwcd",
        strengths,
        left_and_right,
    )
    model.module.embedding.kernel[...] = np.float32(kernel)

    covariance = np.cov(kernel.reshape(48, VIT.width))
    _, directions = np.linalg.eigh(covariance)
    expected = directions.T[::-1][:2]

    data = draw_filters(model, View()).data
    found = data["filters"].reshape(-1, 48)[:2]
    cosine = np.sum(found * expected, axis=1)

    assert data["explained"][:2].sum() == pytest.approx(1)
    assert np.allclose(np.abs(cosine), 1, atol=1e-5)


def test_root_kernels_are_shown_as_they_are():
    model = build_model(RESNET)
    kernel_HWCD = np.asarray(model.module.body.root.conv.kernel[...])

    figure = draw_filters(model, View())
    filters = figure.data["filters"]

    assert filters.shape == (32, 7, 7, 3)
    assert np.array_equal(filters[5], kernel_HWCD[..., 5])


def compute_cosine(one, other):
    squares = (one @ one) * (other @ other)
    return one @ other / np.sqrt(squares)


@pytest.mark.parametrize(
    ("pool", "num_class_tokens"),
    [
        ("token", 1),
        ("gap", 0),
    ],
)
def test_positions_are_compared_without_the_class_token(pool, num_class_tokens):
    model = build_model(pool=pool)
    table = np.asarray(model.module.positions())
    patches = table[0, num_class_tokens:]
    cosine = compute_cosine(patches[1], patches[5])

    figure = draw_positions(model, View())
    similarity = figure.data["similarity"]

    assert similarity.shape == (2, 3, 2, 3)
    assert similarity[0, 1, 1, 2] == pytest.approx(cosine, abs=1e-6)


def test_positions_of_every_block_are_compared_apart():
    model = build_model(position_layers="every")
    positions = model.module.encoder.blocks.positions
    tables = np.asarray(positions.table[...])

    figure = draw_positions(model, View())
    similarity = figure.data["similarity"]

    assert similarity.shape == (2, 2, 3, 2, 3)
    for layer in range(2):
        patches = tables[layer, 0, 1:]
        cosine = compute_cosine(patches[0], patches[4])
        assert similarity[layer, 0, 0, 1, 1] == pytest.approx(cosine, abs=1e-6)


@pytest.mark.parametrize("count", [3, 14, 16, 37])
def test_ticks_of_positions_are_evenly_spaced(count):
    axes = new_figure(4, 4).subplots()
    similarity = np.zeros((count, count, count, count), np.float32)

    network._draw_similarities(axes, similarity, network.MOST_TICKS)
    labels = [int(text.get_text()) for text in axes.get_xticklabels()]

    assert labels[0] == 1
    assert len(set(np.diff(labels))) == 1
    assert len(labels) <= network.MOST_TICKS
    assert len(labels) >= min(count, network.MOST_TICKS // 2)


def test_rows_and_columns_are_two_attentions_of_a_block():
    """Attention along rows of three patches of 4 pixels looks no farther than 8.

    Along columns of two patches it looks no farther than 4.
    """
    model = build_model(pool="gap", block="axial")
    view = View(
        images_NHWC=sample_pixels(2),
        heads=((4, 1),),
    )

    figure = draw_distance(model, view)
    distance = figure.data["distance_pixels"]
    along_rows = distance[::2]
    along_columns = distance[1::2]

    assert distance.shape == (4, 2)
    assert along_rows.max() < 8
    assert along_columns.max() < 4
    assert select_heads(model, view.heads) == view.heads
    with pytest.raises(ValueError, match="layers 1 to 4"):
        select_heads(model, ((5, 1),))


@pytest.fixture
def sheets_drawn(monkeypatch):
    """The options of the sheets that were drawn, in order."""
    drawn = []

    def record_options(*_, **options):
        drawn.append(options)
        return b""

    monkeypatch.setattr(sheets, "draw_sheet", record_options)
    return drawn


def test_a_network_that_is_damaged_is_rejected():
    model = build_model()
    model.module.encoder.norm.scale[...] *= np.float32(np.nan)
    view = View(images_NHWC=sample_pixels(2))

    with pytest.raises(ValueError, match="image 0 are not finite"):
        draw_pca(model, view)


def test_images_have_their_predicted_classes(sheets_drawn):
    model = build_model()
    images = sample_pixels(2, size=VIT.image_size)
    view = View(images_NHWC=images)
    expected = []
    for row in np.asarray(model.predict(images)):
        name = model.class_names[row.argmax()]
        expected.append(f"{name} {row.max():.0%}")

    draw_heads(model, view)
    draw_rollout(model, view)

    heads, rollout = sheets_drawn
    assert rollout["column_names"] == expected
    check_captions(heads["captions"], expected)


def test_images_of_a_network_without_classes_have_no_predicted_classes(sheets_drawn):
    model = build_model(num_classes=0)
    images = sample_pixels(2, size=VIT.image_size)
    view = View(images_NHWC=images)

    draw_heads(model, view)
    draw_rollout(model, view)

    heads, rollout = sheets_drawn
    assert rollout["column_names"] == ["", ""]
    check_captions(heads["captions"], ["image", "image"])


def check_captions(captions, expected_images):
    """The first column has the images, and the others the heads of the last layer."""
    heads = [f"layer {VIT.depth}, head {head + 1}" for head in range(VIT.num_heads)]

    assert list_column(captions, 0) == expected_images
    assert captions[1][1:] == heads


def test_similar_images_are_found_among_all():
    """The last six of twelve images are the first six with a little noise."""
    pixels = sample_pixels(6)
    rng = np.random.default_rng(1)
    noise = rng.integers(0, 3, pixels.shape)
    noisy = np.clip(pixels + noise, 0, 255)
    images = np.uint8([*pixels, *noisy])
    model = build_model()
    view = View(images_NHWC=images, shown=4)

    data = draw_similar(model, view).data
    nearest = data["nearest"]

    assert spread(12, 4).tolist() == [0, 4, 7, 11]
    assert data["images"].tolist() == [0, 4, 7, 11]
    assert nearest.shape == (4, 6)
    assert nearest[:, 0].tolist() == [6, 10, 1, 5]
    assert np.diff(data["cosine"]).max() <= 0

    one_image = View(images_NHWC=pixels[:1])
    with pytest.raises(ValueError, match="at least two"):
        draw_similar(model, one_image)


def test_directions_of_colours_are_those_of_all_images(monkeypatch):
    model = build_model()
    pixels = sample_pixels(4)
    tokens_BND = np.asarray(model(pixels).tokens_BND)
    rows = tokens_BND.reshape(-1, VIT.width)
    covariance = np.cov(rows.T)
    variance = np.linalg.eigvalsh(covariance)[::-1]
    expected = variance[:3] / variance.sum()
    view = View(images_NHWC=pixels, shown=2)

    data = draw_pca(model, view).data
    explained = data["explained"]

    assert data["components"].shape == (2, 2, 3, 3)
    assert np.allclose(explained, expected, atol=1e-5)

    monkeypatch.setattr("vit_jax.tools.figures.network.MOST_ROWS", 12)
    fewer_rows = draw_pca(model, View(images_NHWC=pixels))

    assert not np.allclose(fewer_rows.data["explained"], explained)


def check_figure(figure, name):
    """The figure has a usual size, shows something, and its numbers are finite."""
    pixels = cv2.imdecode(
        np.frombuffer(figure.png, np.uint8),
        cv2.IMREAD_COLOR,
    )

    assert min(pixels.shape[:2]) > 150, name
    assert pixels.shape[1] <= 900, name
    assert pixels.std() > 10, name
    for array in figure.data.values():
        if array.dtype.kind == "f":
            assert np.isfinite(array).all(), name


@pytest.mark.slow
def test_every_figure_is_drawn():
    """A hybrid and a network for masked patches have all of them together."""
    masked = dataclasses.replace(
        VIT,
        pool="map",
        num_classes=0,
        patch_outputs=512,
    )
    drawn = set()

    for architecture, names in (
        (HYBRID, {*KINDS} - {"reconstructions"}),
        (masked, {"reconstructions", "rollout"}),
    ):
        model = build_model(architecture)
        images = sample_pixels(3, architecture.image_size)
        view = View(
            images_NHWC=images,
            names=["a", "b", "c"],
            shown=2,
        )
        for name in names:
            figure = KINDS[name].draw(model, view)
            check_figure(figure, name)
            drawn.add(name)

    assert drawn == {*KINDS}
