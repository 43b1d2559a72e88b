"""Models by name and of weights: called, prepared for and run over many images, against one image at a time."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vit_jax
from tests.evals.samples import (
    CROPPED,
    DIRECT,
    NAMES,
    SEVEN,
    logits_of,
    sample_pixels,
    sample_weights,
    softmax,
    to_png,
    write_pngs,
)
from tests.rejections import rejects
from tests.weights.small_networks import HYBRID, assert_same
from vit_jax import pytree
from vit_jax.api import from_weights
from vit_jax.api.predictions import predict
from vit_jax.arrays import normalise
from vit_jax.checkpoint.store import CheckpointStore
from vit_jax.config import ModelConfig, build_architecture
from vit_jax.data.decoding.images import UnreadableImage
from vit_jax.data.transforms import EvaluationTransform
from vit_jax.models import abstract_model, build_model
from vit_jax.tools.export.programs import export_stablehlo
from vit_jax.weights.description import describe
from vit_jax.weights.saving import save_weights

SMALL = {"num_classes": 3, "image_size": (8, 12), "depth": 2}
HEADLESS = dataclasses.replace(SEVEN, num_classes=0)


@pytest.fixture(scope="module")
def seven():
    return from_weights(sample_weights())


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A file of weights whose images are prepared by a crop of the middle."""
    path = tmp_path_factory.mktemp("stored") / "w.npz"
    save_weights(sample_weights(preprocessing=CROPPED), path, "released")

    return path


# Made by name.


@pytest.mark.slow
def test_a_network_by_name_is_the_one_that_training_starts_with():
    model = vit_jax.create_model("ViT-mu/4", **SMALL, pool="gap", seed=3)
    config = ModelConfig(
        name="ViT-mu/4",
        depth=2,
        pool="gap",
        compute_dtype="float32",
    )
    architecture = build_architecture(config, image_size=(8, 12), num_classes=3)

    assert model.architecture == architecture

    expected = jax.jit(lambda: build_model(architecture, jax.random.key(3)))()
    assert_same(
        *(
            {n: np.asarray(x) for n, x in pytree.named_leaves(m).items()}
            for m in (model.module, expected)
        )
    )
    assert model.class_names == ("0", "1", "2")
    assert model.transform == EvaluationTransform((8, 12), "short_side", 0.875)
    assert (
        repr(model)
        == "Model(ViT-mu/4, 8x12 pixels, 3 classes, ViT-mu/4 with initial parameters of seed 3)"
    )


def test_an_option_that_does_not_exist():
    with rejects("model.detph", "model.depth"):
        vit_jax.create_model("ViT-mu/4", detph=2)


# Made of weights.


def test_parameters_are_placed_as_the_sharding_states():
    mesh = jax.make_mesh((8,), ("data",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    weights = sample_weights(HYBRID, class_names=None)

    for sharding, num_devices in ((everywhere, 8), (None, 1)):
        found = pytree.named_leaves(from_weights(weights, sharding=sharding).module)

        assert {len(array.sharding.device_set) for array in found.values()} == {num_devices}
        assert_same({name: np.asarray(array) for name, array in found.items()}, weights.parameters)


def test_a_stored_model_without_dropout_and_with_its_names(stored, seven):
    model = vit_jax.load_model(stored)

    assert model.class_names == NAMES
    assert model.training is None
    assert model.source == f"{stored} (released)"
    assert model.transform == EvaluationTransform((8, 12), "short_side", 0.5)

    pixels = sample_pixels(2)

    np.testing.assert_array_equal(model(pixels).logits_BK, seven(pixels).logits_BK)

    random = dataclasses.replace(
        SEVEN,
        dropout_fraction=0.5,
        stochastic_depth_fraction=0.5,
        remat="full",
    )

    assert from_weights(sample_weights(random)).architecture == seven.architecture

    class_names = from_weights(sample_weights(class_names=None)).class_names

    assert class_names == tuple("0123456")


def test_another_head_and_another_size(stored, seven):
    model = vit_jax.load_model(stored, num_classes=2, image_size=(16, 12))

    assert model.architecture.num_classes == 2
    assert model.architecture.image_size == (16, 12)
    assert model.class_names == ("0", "1")
    assert model.transform.image_size == (16, 12)
    assert any("positions/table was resized from 2x3 to 4x3" in note for note in model.notes)

    output = model(sample_pixels(2, (16, 12)))

    assert not output.logits_BK.any()
    assert output.tokens_BND.shape == (2, 12, 16)

    features = vit_jax.load_model(stored, num_classes=0).features(sample_pixels(3))

    np.testing.assert_allclose(features, seven(sample_pixels(3)).pooled_BD, rtol=1e-5, atol=1e-6)

    with pytest.raises(TypeError, match=r"heads.*image_size"):
        vit_jax.load_model(stored, facts={"heads": 2})


@pytest.mark.parametrize(
    ("destination", "to"),
    [
        ("mine", None),
        ("w.npz", None),
        ("timm", "timm"),
    ],
)
def test_what_a_loop_of_ones_own_trained_is_saved_with_all_that_belongs_to_it(
    stored, tmp_path, destination, to
):
    model = vit_jax.load_model(stored)
    trained = dataclasses.replace(
        model,
        module=jax.tree.map(lambda leaf: leaf + 0.01, model.module),
    )
    written = trained.save(tmp_path / destination, to=to).destination
    again = vit_jax.load_model(tmp_path / destination)

    assert written.startswith(str(tmp_path / destination))
    assert again.class_names == model.class_names
    assert again.transform == model.transform
    assert_same(
        *(
            {n: np.asarray(x) for n, x in pytree.named_leaves(m.module).items()}
            for m in (again, trained)
        )
    )

    with pytest.raises(ValueError, match="exists"):
        trained.save(tmp_path / destination, to=to)


@pytest.mark.slow
def test_a_workdir_of_a_network_with_a_block_of_ones_own(tmp_path):
    model = vit_jax.create_model("ViT-mu/4", **SMALL, block="docs.examples.block:ParallelBlock")
    store = CheckpointStore(tmp_path)
    metadata = describe(model.architecture, ("a", "b", "c"), DIRECT, None)
    store.save(5, {"model": model.module}, metadata=metadata, metrics={})
    store.close()
    loaded = vit_jax.load_model(tmp_path, allow_code="docs")

    assert loaded.class_names == ("a", "b", "c")
    assert loaded.features(sample_pixels(3)) == pytest.approx(
        model.features(sample_pixels(3)),
        abs=1e-6,
    )
    assert not vit_jax.load_model(tmp_path, num_classes=2, allow_code="docs")(
        sample_pixels(1)
    ).logits_BK.any()


# Called.


def test_uint8_and_floating_point_are_the_same_images(seven):
    pixels = sample_pixels(3)
    expected = logits_of(seven.module, pixels)

    for images in (
        pixels,
        jnp.asarray(pixels),
        np.asarray(normalise(jnp.asarray(pixels), "float32")),
    ):
        assert seven(images).logits_BK == pytest.approx(expected, abs=1e-5)

    traced = jax.jit(lambda images: seven(images).logits_BK)(pixels / np.float32(127.5) - 1)

    assert traced == pytest.approx(expected, abs=1e-4)

    output = seven(pixels, intermediates=("blocks", "attention"))

    assert output.blocks_LBSD.shape == (2, 3, 7, 16)
    assert output.attention_LBTQS.shape == (2, 3, 2, 7, 7)
    np.testing.assert_array_equal(output.logits_BK, seven(pixels).logits_BK)


def test_the_earlier_name_of_intermediates(seven):
    pixels = sample_pixels(3)
    expected = seven(pixels, intermediates=("blocks", "attention"))
    output = seven(pixels, taps=("blocks", "attention"))
    np.testing.assert_array_equal(output.blocks_LBSD, expected.blocks_LBSD)
    np.testing.assert_array_equal(output.attention_LBTQS, expected.attention_LBTQS)
    with pytest.raises(TypeError, match="taps= is the earlier name of intermediates="):
        seven(pixels, taps=("blocks",), intermediates=("blocks",))


@pytest.mark.parametrize(("name", "intermediate"), [("ViT-mu/16", "blocks"), ("R14x0.5", "stages")])
def test_networks_accept_the_earlier_name_of_intermediates(name, intermediate):
    architecture = build_architecture(ModelConfig(name=name), image_size=(32, 32), num_classes=3)
    model = abstract_model(architecture)
    image_BHWC = jax.ShapeDtypeStruct((2, 32, 32, 3), "float32")

    def run(**options):
        return jax.eval_shape(lambda model, x: model(x, **options), model, image_BHWC)

    assert run(taps=(intermediate,)) == run(intermediates=(intermediate,)) != run()


@pytest.mark.slow
def test_another_dtype_and_another_module(seven):
    half = from_weights(sample_weights(), compute_dtype="bfloat16")
    found = half.predict(sample_pixels(3))

    expected = seven.predict(sample_pixels(3))
    assert found.dtype == np.float32
    assert half(sample_pixels(1)).tokens_BND.dtype == jnp.bfloat16
    assert not np.array_equal(found, expected)
    assert found == pytest.approx(expected, abs=0.1)

    zeros = dataclasses.replace(seven, module=jax.tree.map(lambda leaf: 0 * leaf, seven.module))

    assert zeros.predict(sample_pixels(1)) == pytest.approx(np.full((1, 7), 1 / 7))


@pytest.mark.parametrize(
    ("images", "rule"),
    [
        (np.zeros((1, 12, 8, 3), np.uint8), r"uint8 \(1, 12, 8, 3\).*\(B, 8, 12, 3\)"),
        (np.zeros((1, 8, 12, 3), np.int32), "int32"),
        (np.full((1, 8, 12, 3), 255, np.float32), "255 to 255"),
        (np.full((1, 8, 12, 3), np.nan, np.float32), "nan"),
    ],
)
def test_images_that_are_not_prepared_are_rejected(seven, images, rule):
    for use in (seven, seven.predict):
        with rejects("", rule):
            use(images)


# Over many images.


@pytest.mark.parametrize(
    ("count", "batch_size"),
    [
        (1, 64),
        (19, 8),
        (37, 20),
    ],
)
def test_every_image_once_on_all_devices(seven, tmp_path, monkeypatch, count, batch_size):
    put = jax.device_put
    used = set()
    monkeypatch.setattr(
        jax,
        "device_put",
        lambda array, where: used.add(len(where.device_set)) or put(array, where),
    )
    pixels = sample_pixels(count)

    expected = softmax(logits_of(seven.module, pixels))
    for images in (pixels, list(pixels), write_pngs(tmp_path, pixels), iter(pixels)):
        found = seven.predict(images, batch_size=batch_size)

        assert found.shape == (count, 7)
        assert found.dtype == np.float32
        assert type(found) is np.ndarray
        assert found == pytest.approx(expected, abs=1e-6)

    assert used == {len(jax.local_devices())} == {8}

    tokens = np.stack(list(seven.stream(pixels, "tokens_BND", batch_size=batch_size)))

    assert tokens == pytest.approx(np.asarray(seven(pixels).tokens_BND), abs=1e-5)


@pytest.mark.slow
def test_a_network_without_classes_gives_features(tmp_path):
    model = from_weights(sample_weights(HEADLESS, class_names=None))
    pixels = sample_pixels(5)
    output = model(pixels)

    assert output.logits_BK is None
    np.testing.assert_array_equal(output.features_BD, output.pooled_BD)
    assert model.features(pixels) == pytest.approx(np.asarray(output.features_BD), abs=1e-5)

    for use in (
        lambda: model.predict(pixels),
        lambda: list(predict(model, ["a.png"], 1)),
        lambda: export_stablehlo(model, tmp_path / "program"),
    ):
        with rejects("w.npz", "no classes"):
            use()

    class_names = vit_jax.create_model("ViT-mu/4", **SMALL | {"num_classes": 0}).class_names

    assert class_names == ()


def test_images_of_every_kind_are_prepared(tmp_path):
    model = from_weights(sample_weights(preprocessing=CROPPED))
    image = sample_pixels(1, (20, 27))[0]
    path = tmp_path / "a.png"
    path.write_bytes(to_png(image))
    prepared = model.preprocess([path, str(path), to_png(image), image, jnp.asarray(image)])

    assert prepared.shape == (5, 8, 12, 3)
    assert prepared.dtype == np.uint8
    assert np.ptp(prepared, axis=0).max() == 0

    for one in (path, to_png(image), image, image[None]):
        np.testing.assert_array_equal(model.preprocess(one), prepared[:1])

    assert model.predict(path) == pytest.approx(model.predict(prepared[:1]), abs=1e-6)


def test_images_that_cannot_be_read(seven, tmp_path):
    paths = write_pngs(tmp_path, sample_pixels(3))
    pathlib.Path(paths[1]).write_bytes(b"")

    for use in (seven.predict, seven.features, seven.preprocess):
        with rejects("001.png", "empty"):
            use(paths)

    found = list(seven.stream(paths))

    assert [isinstance(row, UnreadableImage) for row in found] == [False, True, False]

    for nothing in ([], np.zeros((0, 8, 12, 3), np.uint8)):
        with rejects("images", "empty"):
            seven.predict(nothing)

    with rejects("token_BD", "ModelOutput"):
        next(seven.stream(paths, "token_BD"))
    with rejects("batch_size=0"):
        seven.predict(paths, batch_size=0)


# How images are prepared.

DEFAULTS = ("direct", 1.0, 180.0, False, None)


@pytest.mark.parametrize(
    ("stored", "options", "expected"),
    [
        (DIRECT, {}, ("direct", 1.0)),
        (CROPPED, {"resize": "short_side", "crop_fraction": 0.5}, ("short_side", 0.5)),
        ({"resize": "direct"}, {}, ("direct", 1.0)),
        (
            {"resize": "short_side", "crop_fraction": None},
            {"crop_fraction": 0.9},
            ("short_side", 0.9),
        ),
        (None, {"resize": "direct"}, ("direct", 1.0)),
        (DIRECT | {"exif_orientation": True}, {}, ("direct", 1.0, 180.0, True)),
        (DIRECT | {"exif_orientation": "yes"}, {}, ("direct", 1.0)),
        (DIRECT, {"exif_orientation": True}, ("direct", 1.0, 180.0, True)),
        (DIRECT | {"exif_orientation": True}, {"exif_orientation": False}, ("direct", 1.0)),
        (DIRECT | {"value_range": None}, {}, ("direct", 1.0)),
        (DIRECT | {"value_range": [0, 4095]}, {}, ("direct", 1.0, 180.0, False, (0, 4095))),
        (
            DIRECT | {"value_range": [0, 4095]},
            {"value_range": (-1.5, 1)},
            ("direct", 1.0, 180.0, False, (-1.5, 1)),
        ),
        (DIRECT | {"interpolation": "bicubic"}, {}, (*DEFAULTS, "bicubic")),
        (DIRECT | {"interpolation": None}, {"interpolation": "bilinear"}, (*DEFAULTS, "bilinear")),
        (
            DIRECT | {"interpolation": "bicubic", "resize_library": "timm"},
            {},
            (*DEFAULTS, "bicubic", "timm"),
        ),
    ],
)
def test_how_images_are_prepared(stored, options, expected):
    model = from_weights(sample_weights(preprocessing=stored), **options)
    assert model.transform == EvaluationTransform((8, 12), *expected)


@pytest.mark.parametrize(
    "stored",
    [
        None,
        {"resize": "short_side"},
    ],
)
def test_weights_that_do_not_state_it_still_compute(stored, seven):
    model = from_weights(sample_weights(preprocessing=stored))

    assert model.predict(sample_pixels(2)) == pytest.approx(
        seven.predict(sample_pixels(2)),
        abs=1e-6,
    )

    for use in (model.preprocess, model.predict):
        with rejects("w.npz", "--images.resize=direct"):
            use(list(sample_pixels(2)))


@pytest.mark.parametrize(
    ("stored", "options", "rule"),
    [
        (None, {"resize": "short_side"}, "--images.crop_fraction="),
        (None, {"exif_orientation": True}, "--images.resize=direct"),
        (None, {"value_range": (0, 1)}, "--images.resize=direct"),
        (DIRECT, {"value_range": (1, 0)}, r"value_range=\(1, 0\).*low < high"),
        (DIRECT | {"value_range": [0, "1"]}, {}, "value_range=.*finite numbers"),
        (DIRECT | {"value_range": 7}, {}, "value_range=7.*finite numbers"),
        (None, {"resize": "crop", "crop_fraction": 0.9}, "resize='crop'.*direct or short_side"),
        (
            None,
            {"resize": "direct", "crop_fraction": 0.9},
            "crop_fraction=0.9.*no effect.*resize=direct",
        ),
        (CROPPED, {"resize": "direct"}, "resize=direct.*resize=short_side"),
        (None, {"interpolation": "bicubic"}, "--images.resize=direct"),
        (DIRECT, {"interpolation": "lanczos"}, "interpolation='lanczos'.*bilinear or bicubic"),
        (
            DIRECT | {"interpolation": ["bicubic"]},
            {},
            r"interpolation=\['bicubic'\].*bilinear or bicubic",
        ),
        (
            DIRECT | {"interpolation": "bicubic"},
            {"interpolation": "bilinear"},
            "interpolation=bilinear.*=bicubic",
        ),
        (
            {"resize": ["direct"], "crop_fraction": 1},
            {},
            r"resize=\['direct'\].*direct or short_side",
        ),
        ({"resize": "short_side", "crop_fraction": "most"}, {}, r"crop_fraction='most'.*\(0, 1\]"),
        (
            {"resize": "short_side", "crop_fraction": float("nan")},
            {},
            r"crop_fraction=nan.*\(0, 1\]",
        ),
    ],
)
def test_preparations_that_are_rejected(stored, options, rule):
    with rejects("", rule):
        from_weights(sample_weights(preprocessing=stored), **options)


def test_the_package_names_its_parts():
    """Without jax on import: tests/test_architecture.py."""
    assert vit_jax.list_models("ViT-B/8") == ["ViT-B/8"]
    assert {"create_model", "list_models", "load_model", "Model"} <= set(dir(vit_jax)) & set(
        vit_jax.__all__
    )

    with pytest.raises(AttributeError, match="no attribute 'make_model'"):
        vit_jax.make_model  # noqa: B018

    assert (pathlib.Path(vit_jax.__file__).parent / "py.typed").is_file()
