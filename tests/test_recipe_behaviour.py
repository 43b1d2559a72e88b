"""What the values of each recipe do, on tiny networks, against numbers from the authors' formulas.

`test_recipes.py` compares the values themselves.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax import pytree
from vit_jax.config import load_recipe
from vit_jax.config.architecture import Architecture, adapt_architecture, build_architecture
from vit_jax.config.schema import FinetuneConfig, ModelConfig
from vit_jax.models import build_model

DEPTH = 4
TINY = {"width": 16, "depth": DEPTH, "mlp_dim": 16, "num_heads": 2, "compute_dtype": "float32"}
FAMILIES = {
    "paper": "pretrain_imagenet21k:ViT-B/16",
    "paper, fine-tuning": "finetune:ViT-B/16,cifar10",
    "AugReg": "pretrain_augreg:L/16,aug=strong1,sd=0.1",
    "DeiT III": "pretrain_deit3:L/16",
    "DeiT III, fine-tuning": "pretrain_deit3:L/16,data=i21k,stage=finetune",
    "MAE": "finetune:mae,imagenet",
    "DINOv3": "finetune:dinov3,imagenet",
    "SigLIP 2": "finetune:siglip2,imagenet",
    "baseline S/16": "pretrain_s16_baseline",
}


@functools.cache
def recipe(family: str):
    return load_recipe(FAMILIES[family])


def tiny_architecture(family: str) -> Architecture:
    """Return the network of a recipe with small sizes."""
    config = recipe(family)
    model = config.model
    is_tuned = isinstance(config, FinetuneConfig)
    if is_tuned:
        model = ModelConfig(name="ViT-Ti/8", head="linear")
    model = dataclasses.replace(model, **TINY, name="ViT-Ti/8", remat="none")
    architecture = build_architecture(model, image_size=(16, 16), num_classes=5)
    if not is_tuned:
        return architecture
    changes = {"name": None, "head": "zero", "remat": "none", "compute_dtype": "float32"}
    adapted = dataclasses.replace(config.model, **changes)
    return adapt_architecture(architecture, adapted, image_size=(16, 16), num_classes=5)


DROP_RATES = {
    "paper": [0.0] * DEPTH,
    "AugReg": [0.1 * block / (DEPTH - 1) for block in range(DEPTH)],
    "DeiT III": [0.4] * DEPTH,
    "DeiT III, fine-tuning": [0.3] * DEPTH,
    "MAE": [0.1 * block / (DEPTH - 1) for block in range(DEPTH)],
    "DINOv3": [0.1 * block / (DEPTH - 1) for block in range(DEPTH)],
    "SigLIP 2": [0.0] * DEPTH,
    "baseline S/16": [0.0] * DEPTH,
}


@pytest.mark.parametrize("family", DROP_RATES)
def test_drop_rate_of_each_block(family):
    """A block leaves an image as it is with the square of its rate, for it has two residual branches."""
    architecture = dataclasses.replace(tiny_architecture(family), dropout_fraction=0.0)
    if not any(DROP_RATES[family]):
        assert architecture.stochastic_depth_fraction == 0
        return
    model = jax.jit(build_model, static_argnums=0)(architecture, jax.random.key(0))
    images = jnp.asarray(np.random.default_rng(0).normal(size=(4000, 16, 16, 3)), jnp.float32)

    @jax.jit
    def count_unchanged(model, images):
        outputs = model(images, dropout_key=jax.random.key(1), taps=("blocks",)).blocks_LBSD
        return (outputs[1:] == outputs[:-1]).all(axis=(2, 3)).mean(axis=1)

    unchanged = np.asarray(count_unchanged(model, images))
    rates = np.asarray(DROP_RATES[family])[1:]  # the tap has no input of the first block
    np.testing.assert_allclose(unchanged, np.square(rates), atol=0.02)
    assert np.all(unchanged[rates > 0.09] > 0)


def initial_parameters(family: str) -> dict[str, np.ndarray]:
    """Return the parameters of a recipe's network before the first step, wider and so with exact deviations."""
    architecture = dataclasses.replace(tiny_architecture(family), width=64, mlp_dim=96)
    model = jax.jit(build_model, static_argnums=0)(architecture, jax.random.key(0))
    return {name: np.asarray(leaf) for name, leaf in pytree.named_leaves(model).items()}


XAVIER = (2 / (64 + 64)) ** 0.5
XAVIER_MLP = (2 / (64 + 96)) ** 0.5
LECUN = (1 / (8 * 8 * 3)) ** 0.5
PAPER_STDDEVS = {
    "embedding/kernel": LECUN,
    "encoder/blocks/attention/query/kernel": XAVIER,
    "encoder/blocks/attention/out/kernel": XAVIER,
    "encoder/blocks/mlp/expand/kernel": XAVIER_MLP,
    "encoder/blocks/mlp/contract/kernel": XAVIER_MLP,
    "encoder/blocks/mlp/expand/bias": 1e-6,
    "positions/table": 0.02,
    "class_token": 0.0,
    "head/linear/kernel": 0.0,
}
DEIT3_STDDEVS = {name: 0.02 for name in PAPER_STDDEVS if name.endswith(("kernel", "table", "token"))}
INITIAL_STDDEVS = {
    "paper": PAPER_STDDEVS,
    "AugReg": PAPER_STDDEVS,
    "DeiT III": DEIT3_STDDEVS | {"encoder/blocks/mlp/expand/bias": 0.0, "encoder/blocks/attention/query/bias": 0.0},
    "baseline S/16": {n: s for n, s in PAPER_STDDEVS.items() if n not in ("positions/table", "class_token")},
}


@pytest.mark.parametrize("family", INITIAL_STDDEVS)
def test_standard_deviations_of_initial_values(family):
    parameters = initial_parameters(family)
    for name, stddev in INITIAL_STDDEVS[family].items():
        tolerance = 5 * stddev / np.sqrt(2 * parameters[name].size)  # of an estimated deviation
        assert parameters[name].std() == pytest.approx(stddev, abs=tolerance), name
        assert abs(parameters[name].mean()) <= 5 * stddev / np.sqrt(parameters[name].size), name
    if family == "DeiT III":
        largest = 2 * 0.02 / 0.8796
        assert all(np.abs(parameters[name]).max() <= largest + 1e-6 for name in DEIT3_STDDEVS)
        assert np.unique(parameters["encoder/blocks/attention_scale"]).tolist() == [np.float32(1e-4)]
