"""Outputs averaged over views of an image (test-time augmentation)."""

import dataclasses

import jax
import numpy as np
import pytest

import vit_jax

OPTIONS = {"width": 16, "depth": 2, "mlp_dim": 32, "num_heads": 2, "num_classes": 3}


@pytest.fixture(scope="module")
def model():
    """A network whose parameters are all random, also those of the head."""
    model = vit_jax.create_model(
        "ViT-Ti/4",
        image_size=12,
        head="linear",
        **OPTIONS,
    )
    rng = np.random.default_rng(1)

    def add_noise(leaf):
        noise = rng.normal(size=leaf.shape)
        return leaf + 0.1 * noise.astype(np.float32)

    module = jax.tree.map(add_noise, model.module)
    return dataclasses.replace(model, module=module)


@pytest.fixture(scope="module")
def images():
    rng = np.random.default_rng(0)
    return rng.integers(256, size=(5, 12, 12, 3), dtype=np.uint8)


def list_views(images, views):
    """Return the views, each made in another way than by the network."""
    match views:
        case "flip":
            return [images, np.flip(images, axis=2)]
        case "flips":
            upside_down = np.flip(images, axis=1)
            return [
                *list_views(images, "flip"),
                *list_views(upside_down, "flip"),
            ]
        case "rotations":
            transposed = images.transpose(0, 2, 1, 3)
            return [
                *list_views(images, "flips"),
                *list_views(transposed, "flips"),
            ]


@pytest.mark.parametrize("views", ["flip", "flips", "rotations"])
def test_outputs_are_means_over_the_views(model, images, views):
    expected = [model(view) for view in list_views(images, views)]

    found = model.average_views(views)(images)

    for name in ("logits_BK", "features_BD"):
        arrays = [getattr(output, name) for output in expected]
        np.testing.assert_allclose(
            getattr(found, name),
            np.mean(arrays, axis=0),
            rtol=1e-5,
            atol=1e-6,
        )
    assert found.tokens_BND is None


def test_predictions_and_parameters(model, images, tmp_path):
    averaged = model.average_views("flips")

    upright = averaged.predict(images)
    mirrored = averaged.predict(images[:, :, ::-1])

    np.testing.assert_allclose(upright, mirrored, atol=1e-6)

    averaged.save(tmp_path / "weights")
    stored = vit_jax.load_model(tmp_path / "weights")
    np.testing.assert_array_equal(
        stored.predict(images),
        model.predict(images),
    )


def test_views_that_are_rejected(model, images):
    with pytest.raises(ValueError, match="views='tencrop': must be one of flip, flips, rotations"):
        model.average_views("tencrop")
    with pytest.raises(ValueError, match=r"intermediates.*with views=flip"):
        model.average_views("flip")(images, intermediates="blocks")
    wide = vit_jax.create_model("ViT-Ti/4", image_size=(8, 12), **OPTIONS)
    with pytest.raises(ValueError, match=r"must be square, and have 8x12 pixels\. Use flips"):
        wide.average_views("rotations")
