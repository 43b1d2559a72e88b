"""Masked patches: targets and loss by hand, how much is corrupted, and that nothing of a hidden patch is seen."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.small_models import filled
from tests.weights.small_networks import HYBRID, RESNET, VIT
from vit_jax.arrays import Batch, Corruption, ModelOutput, Targets
from vit_jax.config import ObjectiveConfig
from vit_jax.config.networks import read_architecture
from vit_jax.objectives import build_objective
from vit_jax.objectives.masked_patch import CLASSES, MaskedPatch, patch_outputs

KEY = jax.random.key(5)


def objective(target="mean_colour", grid=(2, 3), patch_size=(4, 4), **options):
    config = ObjectiveConfig(kind="masked_patch", loss="softmax", patch_target=target, **options)
    return MaskedPatch(config, grid, patch_size)


def batch_of(image, mask=None):
    mask = jnp.ones(len(image)) if mask is None else jnp.asarray(mask, jnp.float32)
    return Batch(
        image_BHWC=jnp.asarray(image),
        label_B=jnp.zeros(len(image), jnp.int32),
        mask_B=mask,
    )


def random_images(count, height=8, width=12):
    return np.random.default_rng(0).integers(0, 256, (count, height, width, 3), np.uint8)


def test_mean_colours_by_hand():
    image = np.zeros((1, 8, 12, 3), np.uint8)
    image[0, :4, :4] = (255, 0, 32)  # full red is level 7, 32 of 255 is the first value of level 1
    image[0, :4, 4:8] = (31, 255, 128)
    image[0, 4:, 8:, 1] = 200
    image[0, 4, 8, 1] = 0  # the mean of 16 pixels is 187.5
    actual = objective().compute_targets(jnp.asarray(image))[0, :, 0]

    assert actual.tolist() == [7 * 64 + 1, 0 * 64 + 7 * 8 + 4, 0, 0, 0, 5 * 8]


def test_colours_of_sixteen_parts_are_in_raster_order_within_the_patch():
    image = np.zeros((1, 16, 24, 3), np.uint8)
    image[0, 8 + 2, 16 + 4 : 16 + 6, 2] = 255  # patch (1, 2): half of its part (1, 2)
    actual = objective("colours_4x4", patch_size=(8, 8)).compute_targets(jnp.asarray(image))

    assert actual.shape == (1, 6, 16)
    assert [tuple(place) for place in np.argwhere(np.asarray(actual))] == [(0, 5, 1 * 4 + 2)]
    assert int(actual[0, 5, 6]) == 4  # 127.5 of 255


def test_pixels_are_those_of_the_patch():
    image = random_images(2)
    actual = np.asarray(objective("pixels").compute_targets(jnp.asarray(image)))

    assert actual.shape == (2, 6, 48)

    expected = image[1, 4:8, 8:12].reshape(-1) / 127.5 - 1
    np.testing.assert_allclose(actual[1, 5], expected, rtol=1e-6)


def test_classes_equal_numpy_at_every_edge():
    levels = np.arange(256, dtype=np.uint8)
    image = np.broadcast_to(levels[:, None, None, None], (256, 2, 4, 3))
    actual = objective(grid=(1, 2), patch_size=(2, 2)).compute_targets(jnp.asarray(image))[:, 0, 0]
    level = np.minimum(7, np.floor(8 * levels.astype(np.float64) / 255)).astype(int)

    assert np.array_equal(actual, level * 73)


def test_loss_and_metrics_by_hand():
    """Two images of two patches; the third patch is as it was, the second image does not count."""
    logits = np.zeros((2, 2, CLASSES), np.float32)
    logits[0, 0, 9] = 3.0
    target = jnp.array([[[9], [9]], [[1], [2]]])
    is_corrupted = jnp.array([[True, True], [True, False]])
    targets = Targets(None, jnp.array([1.0, 0.0]), None, target, is_corrupted)
    actual = {
        k: float(v)
        for k, v in objective().sums(ModelOutput(patches_BNO=jnp.asarray(logits)), targets).items()
    }
    right = np.log(np.exp(3) + 511) - 3
    expected = {
        "loss": right + np.log(512),
        "correct": 1.0,
        "majority": 2.0,
        "weight": 2.0,
        "images": 1.0,
    }

    assert actual == pytest.approx(expected, rel=1e-6)


def test_loss_of_parts_is_their_mean_and_of_pixels_the_squared_error():
    target = jnp.zeros((1, 2, 16), jnp.int32).at[0, 0, :4].set(3)
    is_corrupted = jnp.array([[True, False]])
    targets = Targets(None, jnp.ones(1), None, target, is_corrupted)
    logits = jnp.zeros((1, 2, 16, CLASSES)).at[..., 0].set(2.0).reshape(1, 2, -1)
    actual = objective("colours_4x4").sums(ModelOutput(patches_BNO=logits), targets)
    log_sum = np.log(np.exp(2) + 511)

    assert float(actual["loss"]) == pytest.approx(log_sum - 2 * 12 / 16, rel=1e-6)

    expected = pytest.approx((12 / 16, 12 / 16))
    assert (float(actual["correct"]), float(actual["majority"])) == expected

    pixels = Targets(
        None,
        jnp.ones(1),
        None,
        jnp.array([[[0.5, -0.5], [1.0, 1.0]]]),
        jnp.array([[True, False]]),
    )
    actual = objective("pixels").sums(ModelOutput(patches_BNO=jnp.zeros((1, 2, 2))), pixels)

    assert {k: float(v) for k, v in actual.items()} == {"loss": 0.25, "weight": 1.0, "images": 1.0}


@pytest.mark.parametrize(
    ("fraction", "shares"),
    [
        (0.5, (0.8, 0.1, 0.1)),
        (0.15, (0.2, 0.5, 0.3)),
        (1.0, (1.0, 0.0, 0.0)),
    ],
)
def test_proportions_are_within_binomial_bounds(fraction, shares):
    """Five standard deviations; the key is fixed."""
    task = objective(
        grid=(14, 14),
        patch_size=(1, 1),
        corrupted_fraction=fraction,
        corruption_shares=shares,
    )
    targets = task.prepare(batch_of(random_images(200, 14, 14)), None, jnp.ones(200), KEY)
    masked = np.asarray(targets.corruption.is_masked_BN)
    source = np.asarray(targets.corruption.source_BN)
    corrupted = np.asarray(targets.is_corrupted_BN)
    own = np.arange(196)
    moved = source != own
    number = 200 * 196

    for actual, share in (
        (corrupted, fraction),
        (masked, fraction * shares[0]),
        (moved, fraction * shares[1]),
        (corrupted & ~masked & ~moved, fraction * shares[2]),
    ):
        assert abs(actual.mean() - share) <= 5 * np.sqrt(share * (1 - share) / number) + 1e-12

    assert not (masked & moved).any()
    assert corrupted[masked | moved].all()
    assert source.min() >= 0
    assert source.max() < 196

    if shares[1]:
        counts = np.bincount((source - own)[moved] % 196, minlength=196)[1:]
        assert counts.min() > 0  # every other patch is drawn


def test_another_key_hides_other_patches():
    batch = batch_of(random_images(2))
    first, second = (
        objective().prepare(batch, None, jnp.ones(2), jax.random.key(seed)) for seed in (0, 1)
    )

    assert not np.array_equal(first.is_corrupted_BN, second.is_corrupted_BN)


PREDICTING = dataclasses.replace(VIT, num_classes=0, patch_outputs=CLASSES)


def test_nothing_of_a_hidden_patch_reaches_its_prediction():
    """The gradient of a patch's predictions with respect to its own pixels is zero where it is hidden or replaced."""
    model = filled(PREDICTING)
    image = jnp.asarray(random_images(1)).astype(jnp.float32) / 255
    is_masked = jnp.zeros((1, 6), bool).at[0, 1].set(True)
    source = jnp.arange(6, dtype=jnp.int32)[None].at[0, 4].set(3)
    corruption = Corruption(is_masked, source)

    @jax.jit
    def gradient(image, patch):
        return jax.grad(
            lambda x: jnp.sum(model(x, corruption=corruption).patches_BNO[0, patch] ** 2)
        )(image)

    for patch in (0, 1, 4):
        largest = np.abs(gradient(image, patch)[0]).reshape(2, 4, 3, 4, 3).max(axis=(1, 3, 4))
        assert (largest > 0).reshape(-1).tolist() == [True, False, True, True, False, True]


def test_networks_that_cannot_predict_patches():
    config = ObjectiveConfig(kind="masked_patch", loss="softmax", patch_target="colours_4x4")
    assert patch_outputs(ObjectiveConfig(loss="softmax"), (16, 16)) == 0
    assert patch_outputs(config, (16, 16)) == 16 * 512
    assert patch_outputs(dataclasses.replace(config, patch_target="pixels"), (16, 16)) == 768
    with pytest.raises(ValueError, match="4x4 equal cells"):
        patch_outputs(config, (14, 14))

    for a in (HYBRID, RESNET, dataclasses.replace(VIT, head="mlp"), VIT):
        values = dataclasses.asdict(
            dataclasses.replace(a, patch_outputs=512, num_classes=0 if a is not VIT else 3)
        )

        with pytest.raises(ValueError, match=r"must be a ViT without ResNet .* for masked patches"):
            read_architecture(values)

    one_patch = dataclasses.replace(PREDICTING, image_size=(4, 4))
    with pytest.raises(ValueError, match="have one patch"):
        build_objective(config, one_patch)
