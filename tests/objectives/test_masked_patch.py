"""Masked patches: targets, losses and shares of corruption, and that no hidden patch is seen."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from tests.models.small_models import filled
from tests.weights.small_networks import HYBRID, RESNET, VIT
from vit_jax.arrays import Batch, Corruption, ModelOutput, Targets
from vit_jax.config import ObjectiveConfig
from vit_jax.config.networks import read_architecture
from vit_jax.objectives import build_objective
from vit_jax.objectives.masked_patch import (
    CLASSES,
    MaskedPatch,
    count_patch_outputs,
)

KEY = jax.random.key(5)
PREDICTING = dataclasses.replace(
    VIT,
    num_classes=0,
    patch_outputs=CLASSES,
)


def build_config(target="mean_colour", **options):
    return ObjectiveConfig(
        kind="masked_patch",
        loss="softmax",
        patch_target=target,
        **options,
    )


def build_task(
    target="mean_colour",
    grid=(2, 3),
    patch_size=(4, 4),
    **options,
):
    config = build_config(target, **options)
    return MaskedPatch(config, grid, patch_size)


def build_batch(image):
    count = len(image)
    return Batch(
        image_BHWC=jnp.asarray(image),
        label_B=jnp.zeros(count, jnp.int32),
        mask_B=jnp.ones(count),
    )


def build_targets(target, mask, is_corrupted):
    """Return targets whose patches to predict are `target`, of the images of a mask."""
    return Targets(
        None,
        jnp.array(mask, jnp.float32),
        None,
        jnp.asarray(target),
        jnp.array(is_corrupted),
    )


def sample_images(*shape):
    """Return random images; the shape is their number, height and width."""
    rng = np.random.default_rng(0)
    return rng.integers(256, size=(*shape, 3), dtype=np.uint8)


def compute_targets(task, image):
    targets = task.compute_targets(jnp.asarray(image))
    return np.asarray(targets)


def compute_sums(task, patches, targets):
    """Return the sums of a loss as Python numbers."""
    output = ModelOutput(patches_BNO=jnp.asarray(patches))
    sums = task.sums(output, targets)
    return jax.tree.map(float, sums)


def test_mean_colours_by_hand():
    image = np.zeros((8, 12, 3), np.uint8)
    # Full red is level 7, and 32 of 255 is the first value of level 1.
    image[:4, :4] = (255, 0, 32)
    image[:4, 4:8] = (31, 255, 128)
    green = image[4:, 8:, 1]
    green[:] = 200
    # The mean of 16 pixels is 187.5.
    green[0, 0] = 0
    expected = np.zeros(6, int)
    expected[0] = 7 * 64 + 1
    expected[1] = 7 * 8 + 4
    expected[5] = 5 * 8

    task = build_task()
    targets = compute_targets(task, image[None])

    assert targets.ravel().tolist() == expected.tolist()


def test_colours_of_sixteen_parts_are_in_raster_order_within_the_patch():
    image = np.zeros((16, 24, 3), np.uint8)
    last_patch = image[8:, 16:]
    # Half of part (1, 2).
    last_patch[2, 4:6, 2] = 255
    task = build_task("colours_4x4", patch_size=(8, 8))

    targets = compute_targets(task, image[None])
    *patches, last_targets = targets[0].tolist()

    assert patches == 5 * [16 * [0]]
    # The mean is 127.5 of 255.
    assert last_targets.pop(1 * 4 + 2) == 4
    assert last_targets == 15 * [0]


def test_pixels_are_those_of_the_patch():
    image = sample_images(2, 8, 12)
    last_patch = image[1, 4:8, 8:12]
    expected = last_patch.reshape(-1) / 127.5 - 1

    targets = compute_targets(build_task("pixels"), image)

    assert targets.shape == (2, 6, 48)
    assert_allclose(targets[1, 5], expected, rtol=1e-6)


def test_classes_equal_numpy_at_every_edge():
    grey = np.arange(256, dtype=np.uint8)
    pixel = grey.reshape(-1, 1, 1, 1)
    image = np.tile(pixel, (1, 2, 4, 3))
    level = np.arange(256) * 8 // 255
    expected = np.minimum(7, level) * 73
    task = build_task(
        grid=(1, 2),
        patch_size=(2, 2),
    )

    targets = compute_targets(task, image)

    assert np.array_equal(targets[:, 0, 0], expected)


def test_loss_and_metrics_by_hand():
    """Only corrupted patches of images in the mask count: here both patches of the first image."""
    logits = np.zeros((2, 2, CLASSES), np.float32)
    logits[0, 0, 9] = 3.0
    targets = build_targets(
        target=[
            [[9], [9]],
            [[1], [2]],
        ],
        mask=[1, 0],
        is_corrupted=[
            [True, True],
            [True, False],
        ],
    )
    first_loss = np.log(np.exp(3) + 511) - 3
    second_loss = np.log(512)

    expected = {
        "loss": first_loss + second_loss,
        "correct": 1.0,
        "majority": 2.0,
        "weight": 2.0,
        "images": 1.0,
    }

    task = build_task()
    sums = compute_sums(task, logits, targets)

    assert sums == pytest.approx(expected, rel=1e-6)


def test_the_loss_of_parts_is_their_mean():
    target = np.zeros((1, 2, 16), np.int32)
    target[0, 0, :4] = 3
    targets = build_targets(
        target,
        mask=[1],
        is_corrupted=[[True, False]],
    )
    logits = np.zeros((1, 2, 16, CLASSES), np.float32)
    logits[..., 0] = 2
    exponentials = np.exp(2) + 511
    log_sum = np.log(exponentials)
    share = 12 / 16

    sums = compute_sums(
        build_task("colours_4x4"),
        logits.reshape(1, 2, -1),
        targets,
    )

    loss = log_sum - 2 * share
    assert sums["loss"] == pytest.approx(loss, rel=1e-6)
    assert sums["correct"] == pytest.approx(share)
    assert sums["majority"] == pytest.approx(share)


def test_the_loss_of_pixels_is_the_squared_error():
    first_patch = [0.5, -0.5]
    second_patch = [1.0, 1.0]
    targets = build_targets(
        target=[[first_patch, second_patch]],
        mask=[1],
        is_corrupted=[[True, False]],
    )
    task = build_task("pixels")
    predicted = np.zeros((1, 2, 2), np.float32)

    sums = compute_sums(task, predicted, targets)

    assert sums == {
        "loss": 0.25,
        "weight": 1.0,
        "images": 1.0,
    }


@pytest.mark.parametrize(
    ("fraction", "shares"),
    [
        (0.5, (0.8, 0.1, 0.1)),
        (0.15, (0.2, 0.5, 0.3)),
        (1.0, (1.0, 0.0, 0.0)),
    ],
)
def test_proportions_are_within_binomial_bounds(fraction, shares):
    """Shares are within five standard deviations, with a fixed key."""
    task = build_task(
        grid=(14, 14),
        patch_size=(1, 1),
        corrupted_fraction=fraction,
        corruption_shares=shares,
    )
    images = sample_images(200, 14, 14)
    batch = build_batch(images)
    patch_count = 200 * 196

    targets = task.prepare(
        batch,
        None,
        jnp.ones(200),
        KEY,
    )
    is_corrupted = np.asarray(targets.is_corrupted_BN)
    is_masked = np.asarray(targets.corruption.is_masked_BN)
    source = np.asarray(targets.corruption.source_BN)
    offset = source - np.arange(196)
    is_replaced = offset != 0
    is_changed = is_masked | is_replaced
    is_kept = is_corrupted & ~is_changed

    def check_share(is_chosen, share):
        variance = share * (1 - share) / patch_count
        deviation = np.sqrt(variance)
        error = is_chosen.mean() - share
        assert abs(error) <= 5 * deviation + 1e-12

    masked, replaced, kept = shares
    check_share(is_corrupted, fraction)
    check_share(is_masked, fraction * masked)
    check_share(is_replaced, fraction * replaced)
    check_share(is_kept, fraction * kept)

    assert not (is_masked & is_replaced).any()
    assert is_corrupted[is_changed].all()
    assert source.min() >= 0
    assert source.max() < 196

    if replaced:
        # Every other patch replaces some patch.
        offsets = offset[is_replaced] % 196
        assert set(offsets) == set(range(1, 196))


def test_another_key_hides_other_patches():
    batch = build_batch(sample_images(2, 8, 12))
    task = build_task()

    def find_corrupted(seed):
        targets = task.prepare(
            batch,
            None,
            jnp.ones(2),
            jax.random.key(seed),
        )
        return targets.is_corrupted_BN.tolist()

    assert find_corrupted(0) == find_corrupted(0)
    assert find_corrupted(0) != find_corrupted(1)


def test_nothing_of_a_hidden_patch_reaches_its_prediction():
    """No prediction has a gradient with respect to pixels of masked or replaced patches."""
    model = filled(PREDICTING)
    image = sample_images(1, 8, 12) / np.float32(255)
    is_masked_N = np.arange(6) == 1
    source_N = np.arange(6, dtype=np.int32)
    source_N[4] = 3
    corruption = Corruption(
        jnp.asarray(is_masked_N[None]),
        jnp.asarray(source_N[None]),
    )

    def score_patch(image, patch):
        output = model(image, corruption=corruption)
        prediction_O = output.patches_BNO[0, patch]
        return jnp.square(prediction_O).sum()

    compute_gradient = jax.jit(jax.grad(score_patch))

    for patch in (0, 1, 4):
        gradient = compute_gradient(image, patch)
        of_patches = np.reshape(gradient, (2, 4, 3, 4, 3))
        largest = np.abs(of_patches).max(axis=(1, 3, 4))
        seen = np.flatnonzero(largest > 0)
        assert seen.tolist() == [0, 2, 3, 5]


def test_the_number_of_outputs_of_a_patch():
    classes = ObjectiveConfig(loss="softmax")
    colours = build_config("colours_4x4")
    pixels = build_config("pixels")
    size = (16, 16)

    assert count_patch_outputs(classes, size) == 0
    assert count_patch_outputs(colours, size) == 16 * 512
    assert count_patch_outputs(pixels, size) == 768
    with pytest.raises(ValueError, match="4x4 equal cells"):
        count_patch_outputs(colours, (14, 14))


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        (HYBRID, {}),
        (RESNET, {}),
        (VIT, {"head": "mlp"}),
        (VIT, {"num_classes": 3}),
    ],
    ids=[
        "hybrid",
        "resnet",
        "mlp head",
        "classes",
    ],
)
def test_networks_that_cannot_predict_patches_are_rejected(architecture, changes):
    values = dataclasses.asdict(architecture)
    values |= {"num_classes": 0, "patch_outputs": 512}
    values |= changes
    message = r"must be a ViT without ResNet .* for masked patches"

    with pytest.raises(ValueError, match=message):
        read_architecture(values)


def test_a_network_of_one_patch_is_rejected():
    one_patch = dataclasses.replace(
        PREDICTING,
        image_size=(4, 4),
    )
    config = build_config("colours_4x4")

    with pytest.raises(ValueError, match="have one patch"):
        build_objective(config, one_patch)
