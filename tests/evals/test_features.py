"""Which vector is a feature, hashes of pixels, and features that are not finite."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.inference.samples import sample_pixels
from tests.models.small_models import apply, filled
from tests.weights.small_networks import HYBRID, RESNET, VIT
from vit_jax.arrays import Batch, normalise
from vit_jax.config.architecture import Architecture
from vit_jax.evals.features import Features, collect, feature_rows, hashes, make_feature_step, num_in_both


def batch_of(pixels, mask=None):
    mask = np.ones(len(pixels), np.float32) if mask is None else np.asarray(mask, np.float32)
    return Batch(image_BHWC=jnp.asarray(pixels), label_B=jnp.zeros(len(pixels), jnp.int32), mask_B=jnp.asarray(mask))


def feature(a: Architecture, layer: str, pixels):
    step = jax.jit(make_feature_step(layer, a))
    return np.asarray(step(filled(a), batch_of(pixels))["feature_BD"])


def layers(a, pixels, *taps):
    return apply(filled(a), normalise(jnp.asarray(pixels), "float32"), taps=taps)


def test_layers_of_a_transformer():
    pixels = sample_pixels(2, VIT.image_size)
    output = layers(VIT, pixels, "blocks")
    assert VIT.pool == "token"
    expected = {
        "pre_logits": output.features_BD,
        "pooled": output.pooled_BD,
        "token": output.pooled_BD,
        "mean": np.asarray(output.tokens_BND).mean(axis=1),
        "token_mean": np.concatenate([output.pooled_BD, np.asarray(output.tokens_BND).mean(axis=1)], axis=1),
        "block:1": output.blocks_LBSD[0, :, 0],
        f"block:{VIT.depth}": output.blocks_LBSD[-1, :, 0],
    }
    for layer, value in expected.items():
        np.testing.assert_allclose(feature(VIT, layer, pixels), np.asarray(value), rtol=1e-5, atol=1e-5)


def test_token_and_mean_behind_registers_are_what_token_gap_pools():
    a = dataclasses.replace(VIT, pool="token_gap", registers=2)
    pixels = sample_pixels(2, a.image_size)
    pooled = layers(a, pixels).pooled_BD
    assert pooled.shape == (2, 2 * a.width)
    np.testing.assert_allclose(feature(a, "token_mean", pixels), pooled, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pool", ["gap", "map"])
def test_the_class_token_is_a_feature_also_where_it_is_not_pooled(pool):
    a = dataclasses.replace(VIT, pool=pool, class_tokens=1, registers=2)
    pixels = sample_pixels(2, a.image_size)
    output = layers(a, pixels)
    token, mean = output.prefix_BPD[:, 0], np.asarray(output.tokens_BND).mean(axis=1)
    np.testing.assert_allclose(feature(a, "token", pixels), token, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(feature(a, "token_mean", pixels), np.concatenate([token, mean], 1), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_block_without_class_token_and_stages():
    pixels = sample_pixels(2, VIT.image_size)
    gap = dataclasses.replace(VIT, pool="gap")
    blocks = layers(gap, pixels, "blocks").blocks_LBSD
    np.testing.assert_allclose(feature(gap, "block:1", pixels), np.asarray(blocks[0]).mean(axis=1), atol=1e-5)
    for a in (RESNET, HYBRID):
        pixels = sample_pixels(2, a.image_size)
        output = layers(a, pixels, "stages")
        stage = np.asarray(output.stages_BHWC[0]).mean(axis=(1, 2))
        np.testing.assert_allclose(feature(a, "stage:1", pixels), stage, rtol=1e-5, atol=1e-5)
        if a is RESNET:
            np.testing.assert_allclose(feature(a, "mean", pixels), output.pooled_BD, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("a", "layer", "message"),
    [
        (VIT, "logits", "choose one of pre_logits, pooled"),
        (VIT, "block:0", "N counts from 1"),
        (VIT, "block:99", f"has {VIT.depth} blocks"),
        (VIT, "stage:1", "has 0 stages"),
        (RESNET, "block:1", "has 0 blocks"),
        (RESNET, "token", "has no class token"),
        (RESNET, "token_mean", "has no class token"),
        (dataclasses.replace(VIT, pool="gap"), "token_mean", "has no class token"),
    ],
)
def test_layers_that_are_not_there(a, layer, message):
    with pytest.raises(ValueError, match=message):
        make_feature_step(layer, a)


def test_equal_pixels_have_equal_hashes_and_others_have_not():
    pixels = sample_pixels(40, VIT.image_size)
    pixels[7] = pixels[3]
    pixels[8] = pixels[3]
    pixels[8, 0, 0, 0] ^= 1  # one bit
    pixels[9] = pixels[3][:, ::-1]
    pixels[10], pixels[11] = 0, 1
    step = make_feature_step("pooled", VIT)
    found = hashes(np.asarray(step(filled(VIT), batch_of(pixels))["hash_B2"]))
    assert found[3] == found[7]
    assert len(np.unique(found)) == 39


def open_batches(batches):
    @contextlib.contextmanager
    def opened():
        yield iter(batches)

    return opened


def fake_step(_, batch):
    return {
        "feature_BD": batch.image_BHWC.reshape(len(batch.image_BHWC), -1)[:, :2].astype(jnp.float32),
        "hash_B2": jnp.zeros((len(batch.image_BHWC), 2), jnp.uint32),
        "mask_B": batch.mask_B,
    }


def test_padding_is_left_out_and_unreadable_images_keep_their_place():
    pixels = sample_pixels(6, (2, 2))
    batches = [batch_of(pixels[:3]), batch_of(pixels[3:], [1, 0, 0])]
    found = collect(open_batches(batches), fake_step, None, np.arange(5, dtype=np.int32))
    assert found.is_read_N.tolist() == [True, True, True, True, False]
    assert np.array_equal(found.feature_ND, pixels.reshape(6, -1)[:5, :2])
    assert found.readable().label_N.tolist() == [0, 1, 2, 3]


def test_features_that_are_not_finite():
    def broken(_, batch):
        results = fake_step(_, batch)
        return results | {"feature_BD": results["feature_BD"].at[1, 0].set(jnp.nan)}

    with pytest.raises(ValueError, match="features of 1 of the images 0 to 2 are not finite"):
        list(feature_rows(open_batches([batch_of(sample_pixels(3, (2, 2)))]), broken, None, 3))


def test_images_on_both_sides():
    def side(numbers, unreadable=()):
        hash_N = np.array(numbers, np.uint64)
        is_read = np.array([number not in unreadable for number in numbers])
        return Features(np.zeros((len(hash_N), 1)), np.zeros(len(hash_N), np.int32), is_read, hash_N)

    assert num_in_both(side([1, 2, 3, 4], unreadable=[4]), side([3, 3, 2, 4, 9])) == 3
