"""cuDNN's form of attention without a GPU: padding against XLA's form, choice, what is kept; compiled for H100s."""

import functools
import importlib.util
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tests.models import gpu_programs
from tests.models.small_models import Place
from tests.models.test_attention import distances, projections, results
from tests.models.test_vit import small
from vit_jax.activations import placed_by
from vit_jax.config import ShardingConfig
from vit_jax.models import attention_cudnn
from vit_jax.models.attention import Attention, choose_form
from vit_jax.models.block import attention_form
from vit_jax.models.transformer import REMAT_POLICIES
from vit_jax.sharding import Placement, build_mesh

H100, T4 = (Place(platform="gpu", compute_capability=version) for version in ((9, 0), (7, 5)))
SIZES = {"length": 197, "num_heads": 3, "head_dim": 64, "dtype": jnp.dtype("bfloat16")}


@pytest.fixture
def cudnn(monkeypatch):
    """JAX finds a cuDNN, so that its rules hold for operands, and nothing can be executed."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000)


@pytest.fixture
def stand_in(monkeypatch):
    """Attention by XLA that masks padded keys, rejects odd lengths and returns anything in padded rows."""
    attention = jax.nn.dot_product_attention

    def attend(query, key, value, *, query_seq_lengths, key_value_seq_lengths, implementation):
        assert implementation == "cudnn"
        length = query.shape[1]
        assert length % 2 == 0
        if query_seq_lengths is None:
            return attention(query, key, value)
        is_key = jnp.arange(length) < key_value_seq_lengths[:, None]
        is_query = jnp.arange(length) < query_seq_lengths[:, None]
        key, value = (jnp.where(is_key[..., None, None], x, 0) for x in (key, value))
        output = attention(query, key, value, mask=is_key[:, None, None, :])
        return jnp.where(is_query[..., None, None], output, 1e9)

    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)


@pytest.mark.parametrize("tokens", [16, 17])
def test_padding_changes_neither_values_nor_gradients(tokens, stand_in):
    operands, gradient = projections(2, tokens, 3, 8, "float32")
    found = distances(results("cudnn", operands, gradient, 3), results("xla", operands, gradient, 3))
    assert max(found) < 5e-6


def test_devices_compute_their_images_and_heads(stand_in):
    mesh = build_mesh(jax.devices()[:4], ShardingConfig(num_model_shards=2))
    operands, gradient = projections(4, 17, 2, 8, "float32")
    with placed_by(Placement(mesh)):
        found = results("cudnn", operands, gradient, 2)
    assert max(distances(found, results("xla", operands, gradient, 2))) < 5e-6


@pytest.mark.parametrize(
    ("place", "sizes", "form"),
    [
        (H100, {}, "cudnn"),
        (H100, {"length": 196, "dtype": jnp.dtype("float16")}, "cudnn"),
        (H100, {"dtype": jnp.dtype("float32")}, "xla"),
        (H100, {"head_dim": 20}, "xla"),
        (T4, {}, "xla"),
        (None, {}, "xla"),  # the program may run anywhere
    ],
)
def test_auto_takes_cudnn_on_gpus_where_jax_allows_it(place, sizes, form, cudnn):
    with placed_by(place):
        assert choose_form("auto", **(SIZES | sizes)) == form


def test_without_cudnn_auto_falls_back_and_the_explicit_form_is_rejected(monkeypatch):
    def check():
        raise RuntimeError("cuDNN is not detected.")

    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", check)
    with placed_by(H100):
        assert choose_form("auto", **SIZES) == "xla"
        with pytest.raises(ValueError, match=r"model.attention='cudnn'.*not detected\. Use auto or xla\."):
            choose_form("cudnn", **SIZES)


@pytest.mark.parametrize(
    ("place", "sizes", "rule"),
    [
        (H100, {"head_dim": 20}, "multiple of 8"),
        (H100, {"dtype": jnp.dtype("float32")}, "fp16"),
        (T4, {}, "8.0, not 7.5"),
    ],
)
def test_the_explicit_form_is_rejected_with_the_rule(place, sizes, rule, cudnn):
    with placed_by(place), pytest.raises(ValueError, match=rf"model.attention='cudnn'.*{rule}.*Use auto or xla\."):
        choose_form("cudnn", **(SIZES | sizes))


def test_forms_of_architectures(cudnn):
    sizes = {"width": 128, "num_heads": 2, "compute_dtype": "bfloat16"}
    with placed_by(H100):
        assert attention_form(small(**sizes)) == "cudnn"
        assert attention_form(small(**sizes, pool="gap", block="axial")) == "xla"
        assert attention_form(small(**sizes, pool="gap", block="axial", attention="cudnn")) == "cudnn"
        assert attention_form(small(**sizes, pool="gap", position_embedding="relative")) == "xla"


@pytest.mark.parametrize(("remat", "forwards"), [("dots", 1), ("attention", 1), ("full", 2)])
def test_rematerialisation_keeps_what_cudnn_computed(remat, forwards, cudnn):
    attention = Attention(64, 2, dtype=jnp.dtype("bfloat16"), rngs=nnx.Rngs(0), form="cudnn")

    @functools.partial(jax.checkpoint, policy=REMAT_POLICIES[remat], prevent_cse=False)
    def attend(attention, x):
        return attention(x, x).astype(jnp.float32).sum()

    program = str(jax.make_jaxpr(jax.grad(attend, argnums=1))(attention, jnp.zeros((2, 17, 64), jnp.bfloat16)))
    assert program.count(f"= {attention_cudnn.FORWARD}[") == forwards
    assert program.count(f"= {attention_cudnn.FORWARD.replace('fwd', 'bwd')}[") == 1


def _has_wheels():
    try:
        return all(importlib.util.find_spec(wheel) for wheel in gpu_programs.WHEELS)
    except ModuleNotFoundError:  # the package that would hold one
        return False


ONE_CALL = {"fmhaSoftmax": 1, "fmhaSoftmaxBackward": 1}  # in the body of the loop over blocks
PROGRAMS = {
    "196 tokens": (ONE_CALL, 1, "train"),
    "197 tokens": (ONE_CALL, 1, "train", "model.pool=token"),
    "257 tokens": (ONE_CALL, 1, "train", "model.pool=token", "model.name=ViT-S/14", "model.remat=attention"),
    "full remat": (ONE_CALL | {"fmhaSoftmax": 2}, 1, "train", "model.pool=token", "model.remat=full"),
    "196, data": (ONE_CALL, 8, "train", "sharding.parameters=fsdp"),
    "197, data": (ONE_CALL, 8, "train", "model.pool=token", "model.remat=none"),
    "197, data x model": (ONE_CALL, 8, "train", "model.pool=token", "sharding.num_model_shards=2"),
    "evaluation": ({"fmhaSoftmax": 1}, 8, "evaluation", "model.pool=token", "sharding.num_model_shards=2"),
    "float32": ({}, 1, "train", "model.compute_dtype=float32"),
    "small heads": ({}, 1, "train", "model.num_heads=96"),
}


@pytest.mark.tools
@pytest.mark.newest
@pytest.mark.skipif(not _has_wheels(), reason="jax-cuda12-plugin or nvidia-cudnn-cu12 is not installed")
def test_steps_compiled_for_gpus_call_cudnn():
    cases = {name: case for name, (_, *case) in PROGRAMS.items()}
    command = [sys.executable, "-m", "tests.models.gpu_programs", json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {name: calls for name, (calls, *_) in PROGRAMS.items()}
