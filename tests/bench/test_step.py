import math

import pytest

from vit_jax import cli
from vit_jax.bench.step import bench_input, bench_step
from vit_jax.config import load_recipe

TINY = ["global_batch=16", "model.width=16", "model.mlp_dim=32", "model.depth=1", "model.num_heads=2"]


def tiny(*overrides):
    return load_recipe("configs/digits.py", [f"--config.{override}" for override in (*TINY, *overrides)])


def test_step_figures_agree_with_each_other():
    figures = dict(bench_step(tiny(), num_steps=2))
    assert figures["images_per_second"] == pytest.approx(16 / figures["step_milliseconds"] * 1000)
    assert figures["compile_seconds"] > 0
    assert all(math.isfinite(value) for value in figures.values())
    assert "mfu" not in figures, "a CPU has no peak to compare with"


def test_input_is_timed_without_a_model(data_dir):
    figures = dict(bench_input(tiny(f"input.data_dir={data_dir}"), num_steps=3))
    assert figures["input_images_per_second"] > 0


def test_command(capsys):
    cli.main(["bench", "--config=configs/digits.py", "--steps=1", *(f"--config.{override}" for override in TINY)])
    assert "images_per_second" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        cli.main(["bench", "--config=configs/digits.py", "--steps=none"])


def test_fine_tuning_is_timed_too(capsys):
    recipe = "--config=configs/finetune.py:ViT-mu/16,own,image_size=32"
    cli.main(["bench", recipe, "--steps=1", "--config.global_batch=8"])
    assert "images_per_second" in capsys.readouterr().out
