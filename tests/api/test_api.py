"""Models by name and of weights: calls, preparation and predictions of many images."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

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
from vit_jax.sharding import replicate
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
    save_weights(
        sample_weights(preprocessing=CROPPED),
        path,
        "released",
    )
    return path


# Networks by name.


def list_leaves(module):
    leaves = pytree.name_leaves(module)
    return {name: np.asarray(leaf) for name, leaf in leaves.items()}


def load(preprocessing=DIRECT, **options):
    """Return a model of the seeded weights with this preparation."""
    weights = sample_weights(preprocessing=preprocessing)
    return from_weights(weights, **options)


@pytest.mark.slow
def test_a_network_by_name_is_the_one_that_training_starts_with():
    model = vit_jax.create_model(
        "ViT-mu/4",
        **SMALL,
        pool="gap",
        seed=3,
    )

    config = ModelConfig(
        name="ViT-mu/4",
        depth=2,
        pool="gap",
        compute_dtype="float32",
    )
    architecture = build_architecture(
        config,
        image_size=(8, 12),
        num_classes=3,
    )

    build = jax.jit(lambda: build_model(architecture, jax.random.key(3)))
    expected = list_leaves(build())

    assert model.architecture == architecture
    assert_same(list_leaves(model.module), expected)
    assert model.class_names == ("0", "1", "2")
    assert model.transform == EvaluationTransform((8, 12), "short_side", 0.875)

    num_parameters = sum(array.size for array in list_leaves(expected).values())
    assert model.num_parameters == num_parameters
    assert repr(model) == (
        f"Model(ViT-mu/4, {num_parameters / 1e6:.3g} million parameters, 8x12 pixels, 3 classes, "
        "ViT-mu/4 with initial parameters of seed 3)"
    )


# Networks of weights.


@pytest.mark.parametrize("num_devices", [8, None])
def test_parameters_are_placed_as_the_sharding_states(num_devices):
    """Without a sharding, parameters are on one device."""
    sharding = None
    if num_devices is not None:
        mesh = jax.make_mesh((num_devices,), ("data",))
        sharding = replicate(mesh)
    weights = sample_weights(HYBRID, class_names=None)

    module = from_weights(weights, sharding=sharding).module

    for array in pytree.name_leaves(module).values():
        devices = array.sharding.device_set
        assert len(devices) == (num_devices or 1)
    assert_same(list_leaves(module), weights.parameters)


def test_a_stored_model(stored, seven):
    pixels = sample_pixels(2)

    model = vit_jax.load_model(stored)

    assert model.class_names == NAMES
    assert model.training is None
    assert model.source == f"{stored} (released)"
    expected = EvaluationTransform((8, 12), "short_side", 0.5, exif_orientation=True)
    assert model.transform == expected
    assert_array_equal(model(pixels).logits_BK, seven(pixels).logits_BK)


def test_models_have_no_dropout_and_no_remat(seven):
    random = dataclasses.replace(
        SEVEN,
        dropout_fraction=0.5,
        stochastic_depth_fraction=0.5,
        remat="full",
    )

    model = from_weights(sample_weights(random))

    assert model.architecture == seven.architecture


def test_classes_without_names_are_numbered():
    model = from_weights(sample_weights(class_names=None))

    assert model.class_names == tuple("0123456")


def test_another_head_and_another_size(stored):
    """The new head is zero, and the positions are resized."""
    model = vit_jax.load_model(
        stored,
        num_classes=2,
        image_size=(16, 12),
    )

    assert model.architecture.num_classes == 2
    assert model.architecture.image_size == (16, 12)
    assert model.class_names == ("0", "1")
    assert model.transform.image_size == (16, 12)
    notes = "\n".join(model.notes)
    assert "positions/table was resized from 2x3 to 4x3" in notes

    output = model(sample_pixels(2, (16, 12)))
    assert not output.logits_BK.any()
    assert output.tokens_BND.shape == (2, 12, 16)


def test_a_stored_model_without_its_head(stored, seven):
    pixels = sample_pixels(3)

    model = vit_jax.load_model(stored, num_classes=0)

    features = model.features(pixels)

    expected = seven(pixels).pooled_BD
    assert_allclose(features, expected, rtol=1e-5, atol=1e-6)


def test_options_that_do_not_exist_are_rejected(stored):
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
def test_weights_of_a_custom_loop_are_saved_with_their_description(
    stored,
    tmp_path,
    destination,
    to,
):
    model = vit_jax.load_model(stored)
    module = jax.tree.map(lambda leaf: leaf + 0.01, model.module)
    trained = dataclasses.replace(model, module=module)
    path = tmp_path / destination

    written = trained.save(path, to=to)
    loaded = vit_jax.load_model(path)

    assert written.destination.startswith(str(path))
    assert loaded.class_names == model.class_names
    assert loaded.transform == model.transform
    assert_same(list_leaves(loaded.module), list_leaves(trained.module))
    with pytest.raises(ValueError, match="exists"):
        trained.save(path, to=to)


@pytest.mark.slow
def test_a_workdir_of_a_network_with_a_custom_block(tmp_path):
    model = vit_jax.create_model(
        "ViT-mu/4",
        **SMALL,
        block="docs.examples.block:ParallelBlock",
    )
    store = CheckpointStore(tmp_path)
    class_names = ("a", "b", "c")
    metadata = describe(
        model.architecture,
        class_names,
        DIRECT,
        None,
    )
    store.save(
        5,
        {"model": model.module},
        metadata=metadata,
        metrics={},
    )
    store.close()
    pixels = sample_pixels(3)

    loaded = vit_jax.load_model(tmp_path, allow_code="docs")

    found = loaded.features(pixels)
    expected = model.features(pixels)

    assert loaded.class_names == class_names
    assert found == pytest.approx(expected, abs=1e-6)

    with_new_head = vit_jax.load_model(
        tmp_path,
        num_classes=2,
        allow_code="docs",
    )
    output = with_new_head(pixels)

    assert not output.logits_BK.any()


# Calls.


def test_uint8_and_floating_point_are_the_same_images(seven):
    pixels = sample_pixels(3)
    expected = logits_of(seven.module, pixels)
    on_device = jnp.asarray(pixels)
    normalised = np.asarray(normalise(on_device, "float32"))

    for images in (pixels, on_device, normalised):
        output = seven(images)
        assert output.logits_BK == pytest.approx(expected, abs=1e-5)


def test_a_model_can_be_traced(seven):
    pixels = sample_pixels(3)
    images = pixels / np.float32(127.5) - 1
    compute = jax.jit(lambda images: seven(images).logits_BK)

    traced = compute(images)

    expected = logits_of(seven.module, pixels)
    assert traced == pytest.approx(expected, abs=1e-4)


def test_intermediates_of_a_call(seven):
    pixels = sample_pixels(3)

    output = seven(pixels, intermediates=("blocks", "attention"))

    assert output.blocks_LBSD.shape == (2, 3, 7, 16)
    assert output.attention_LBTQS.shape == (2, 3, 2, 7, 7)
    without_intermediates = seven(pixels)
    assert_array_equal(output.logits_BK, without_intermediates.logits_BK)


def test_the_earlier_name_of_intermediates(seven):
    pixels = sample_pixels(3)

    output = seven(pixels, taps=("blocks", "attention"))

    expected = seven(pixels, intermediates=("blocks", "attention"))
    assert_array_equal(output.blocks_LBSD, expected.blocks_LBSD)
    assert_array_equal(output.attention_LBTQS, expected.attention_LBTQS)
    with pytest.raises(TypeError, match=r"given twice, also by its earlier name\. Remove taps="):
        seven(
            pixels,
            taps=("blocks",),
            intermediates=("blocks",),
        )


@pytest.mark.parametrize(
    ("name", "intermediate"),
    [
        ("ViT-mu/16", "blocks"),
        ("R14x0.5", "stages"),
    ],
)
def test_networks_accept_the_earlier_name_of_intermediates(name, intermediate):
    architecture = build_architecture(
        ModelConfig(name=name),
        image_size=(32, 32),
        num_classes=3,
    )
    model = abstract_model(architecture)
    image_BHWC = jax.ShapeDtypeStruct((2, 32, 32, 3), "float32")

    def run(**options):
        return jax.eval_shape(
            lambda model, x: model(x, **options),
            model,
            image_BHWC,
        )

    by_earlier_name = run(taps=(intermediate,))
    by_name = run(intermediates=(intermediate,))

    assert by_earlier_name == by_name
    assert by_name != run()


@pytest.mark.slow
def test_another_dtype(seven):
    pixels = sample_pixels(3)
    half = from_weights(sample_weights(), compute_dtype="bfloat16")

    found = half.predict(pixels)

    expected = seven.predict(pixels)
    output = half(pixels[:1])

    assert found.dtype == np.float32
    assert output.tokens_BND.dtype == jnp.bfloat16
    assert not np.array_equal(found, expected)
    assert found == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize(
    ("value", "dtype", "rule"),
    [
        (0, "int32", "int32"),
        (255, "float32", "255 to 255"),
        (np.nan, "float32", "nan"),
    ],
)
def test_values_that_are_not_prepared_are_rejected(
    seven,
    value,
    dtype,
    rule,
):
    images = np.full((1, 8, 12, 3), value, dtype)

    for use in (seven, seven.predict):
        with rejects("", rule):
            use(images)


def test_images_of_another_size_are_rejected(seven):
    images = sample_pixels(1, (12, 8))
    rule = r"uint8 \(1, 12, 8, 3\).*\(B, 8, 12, 3\)"

    for use in (seven, seven.predict):
        with rejects("", rule):
            use(images)


# Many images.


@pytest.mark.slow
def test_another_module(seven):
    zeros = jax.tree.map(lambda leaf: 0 * leaf, seven.module)
    model = dataclasses.replace(seven, module=zeros)

    found = model.predict(sample_pixels(1))

    expected = np.full((1, 7), 1 / 7)
    assert found == pytest.approx(expected)


@pytest.fixture
def used_devices(monkeypatch):
    """Numbers of devices on which arrays are put, as a set."""
    numbers = set()
    put = jax.device_put

    def record_put(array, where):
        numbers.add(len(where.device_set))
        return put(array, where)

    monkeypatch.setattr(jax, "device_put", record_put)
    return numbers


@pytest.mark.parametrize(
    ("count", "batch_size"),
    [
        (1, 64),
        (19, 8),
        (37, 20),
    ],
)
def test_every_image_once_on_all_devices(
    seven,
    tmp_path,
    used_devices,
    count,
    batch_size,
):
    pixels = sample_pixels(count)
    expected = softmax(logits_of(seven.module, pixels))
    paths = write_pngs(tmp_path, pixels)

    for images in (pixels, list(pixels), paths, iter(pixels)):
        found = seven.predict(images, batch_size=batch_size)

        assert found.shape == (count, 7)
        assert found.dtype == np.float32
        assert type(found) is np.ndarray
        assert found == pytest.approx(expected, abs=1e-6)

    assert used_devices == {len(jax.local_devices())} == {8}

    stream = seven.stream(pixels, "tokens_BND", batch_size=batch_size)
    tokens = np.stack(list(stream))
    output = seven(pixels)
    expected_tokens = np.asarray(output.tokens_BND)

    assert tokens == pytest.approx(expected_tokens, abs=1e-5)


@pytest.mark.slow
def test_a_network_without_classes_gives_features():
    model = from_weights(sample_weights(HEADLESS, class_names=None))
    pixels = sample_pixels(5)

    output = model(pixels)

    assert output.logits_BK is None
    assert_array_equal(output.features_BD, output.pooled_BD)
    features = model.features(pixels)
    expected = np.asarray(output.features_BD)
    assert features == pytest.approx(expected, abs=1e-5)


@pytest.mark.slow
def test_a_network_without_classes_predicts_nothing():
    model = from_weights(sample_weights(HEADLESS, class_names=None))

    with rejects("w.npz", "no classes"):
        model.predict(sample_pixels(1))
    with rejects("w.npz", "no classes"):
        list(predict(model, ["a.png"], 1))


@pytest.mark.slow
def test_a_network_without_classes_has_no_names():
    model = vit_jax.create_model("ViT-mu/4", **SMALL | {"num_classes": 0})

    assert model.class_names == ()


def test_images_of_every_kind_are_prepared(tmp_path):
    model = load(CROPPED)
    (image,) = sample_pixels(1, (20, 27))
    file = to_png(image)
    path = tmp_path / "a.png"
    path.write_bytes(file)
    images = [path, str(path), file, image, jnp.asarray(image)]

    prepared = model.preprocess(images)

    assert prepared.shape == (5, 8, 12, 3)
    assert prepared.dtype == np.uint8
    assert np.ptp(prepared, axis=0).max() == 0
    for one in (path, file, image, image[None]):
        assert_array_equal(model.preprocess(one), prepared[:1])

    found = model.predict(path)
    expected = model.predict(prepared[:1])

    assert found == pytest.approx(expected, abs=1e-6)


def test_images_that_cannot_be_read(seven, tmp_path):
    """A stream yields the error in the place of the row; other methods raise it."""
    paths = write_pngs(tmp_path, sample_pixels(3))
    pathlib.Path(paths[1]).write_bytes(b"")

    for use in (seven.predict, seven.features, seven.preprocess):
        with rejects("001.png", "empty"):
            use(paths)

    first, second, third = seven.stream(paths)
    assert isinstance(first, np.ndarray)
    assert isinstance(second, UnreadableImage)
    assert isinstance(third, np.ndarray)


@pytest.mark.parametrize("images", [[], sample_pixels(0)])
def test_no_images_are_rejected(seven, images):
    with rejects("images", "empty"):
        seven.predict(images)


def test_wrong_options_of_predictions_are_rejected(seven):
    pixels = sample_pixels(1)

    with rejects("token_BD", "ModelOutput"):
        next(seven.stream(pixels, "token_BD"))
    with rejects("batch_size=0"):
        seven.predict(pixels, batch_size=0)


# Preparation of images.

RESIZED = EvaluationTransform((8, 12), "direct", 1.0, exif_orientation=True)


@pytest.mark.parametrize(
    ("stored", "options", "resize", "crop_fraction"),
    [
        (DIRECT, {}, "direct", 1.0),
        (CROPPED, {"resize": "short_side", "crop_fraction": 0.5}, "short_side", 0.5),
        ({"resize": "direct"}, {}, "direct", 1.0),
        (
            {"resize": "short_side", "crop_fraction": None},
            {"crop_fraction": 0.9},
            "short_side",
            0.9,
        ),
        (None, {"resize": "direct"}, "direct", 1.0),
    ],
)
def test_how_images_are_resized(stored, options, resize, crop_fraction):
    model = load(stored, **options)

    expected = EvaluationTransform(
        (8, 12),
        resize,
        crop_fraction,
        exif_orientation=True,
    )
    assert model.transform == expected


@pytest.mark.parametrize(
    ("stored", "options", "changes"),
    [
        (
            {"exif_orientation": True},
            {},
            {"exif_orientation": True},
        ),
        (
            {"exif_orientation": False},
            {},
            {"exif_orientation": False},
        ),
        (
            {"exif_orientation": "yes"},
            {},
            {},
        ),
        (
            {},
            {"exif_orientation": True},
            {"exif_orientation": True},
        ),
        (
            {"exif_orientation": True},
            {"exif_orientation": False},
            {"exif_orientation": False},
        ),
        (
            {"value_range": None},
            {},
            {},
        ),
        (
            {"value_range": [0, 4095]},
            {},
            {"value_range": (0, 4095)},
        ),
        (
            {"value_range": [0, 4095]},
            {"value_range": (-1.5, 1)},
            {"value_range": (-1.5, 1)},
        ),
        (
            {"interpolation": "bicubic"},
            {},
            {"interpolation": "bicubic"},
        ),
        (
            {"interpolation": None},
            {"interpolation": "bilinear"},
            {"interpolation": "bilinear"},
        ),
        (
            {"interpolation": "bicubic", "resize_library": "timm"},
            {},
            {"interpolation": "bicubic", "library": "timm"},
        ),
    ],
)
def test_how_images_are_prepared(stored, options, changes):
    model = load(DIRECT | stored, **options)

    expected = dataclasses.replace(RESIZED, **changes)
    assert model.transform == expected


@pytest.mark.parametrize("stored", [None, {"resize": "short_side"}])
def test_weights_that_state_no_preparation_still_compute(stored, seven):
    model = load(stored)
    pixels = sample_pixels(2)

    found = model.predict(pixels)

    expected = seven.predict(pixels)
    assert found == pytest.approx(expected, abs=1e-6)
    for use in (model.preprocess, model.predict):
        with rejects("w.npz", "--images.resize=direct"):
            use(list(pixels))


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
        load(stored, **options)


def test_the_package_names_its_parts():
    """`tests/test_architecture.py` checks that importing the package imports no jax."""
    public = {"Data", "Model", "create_model", "list_models", "load_model", "open_data"}

    folder = pathlib.Path(vit_jax.__file__).parent
    assert vit_jax.list_models("ViT-B/8") == ["ViT-B/8"]
    assert dir(vit_jax) == sorted([*public, "__version__"])
    assert public <= set(vit_jax.__all__)
    assert (folder / "py.typed").is_file()
    with pytest.raises(AttributeError, match=r"'load_modl'\. Did you mean 'load_model'"):
        vit_jax.load_modl  # noqa: B018
    with pytest.raises(AttributeError, match="google-research/vision_transformer has a package"):
        vit_jax.models_vit  # noqa: B018
