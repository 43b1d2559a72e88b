import json
import math

import jax
import pytest

from vit_jax import cli
from vit_jax.bench.parts import Part, bench
from vit_jax.config import load_recipe

TINY = ["global_batch=16", "model.width=16", "model.mlp_dim=32", "model.depth=1", "model.num_heads=2"]
ALWAYS = ["step", "evaluation", "inference", "save, steps wait", "save, on disk", "restore"]


def test_figures_of_a_part():
    figures = Part("step", [0.01, 0.02, 0.03, 0.04, 0.1], batch=60).figures()
    expected = {"median": 30, "lower_quartile": 20, "upper_quartile": 40, "least": 10, "most": 100}
    expected = {f"{name}_milliseconds": value for name, value in expected.items()} | {"images_per_second": 2000}
    assert figures == pytest.approx(expected)


def test_every_part_is_timed(data_dir, capsys):
    overrides = [*TINY, f"input.data_dir={data_dir}", "logging.tensorboard=False"]
    config = load_recipe("configs/digits.py", [f"--config.{override}" for override in overrides])
    result = bench(config, num_steps=3, with_data=True)
    assert list(result["parts"]) == [*ALWAYS, "input", "input with step", "loop"]
    assert all(0 < value < math.inf for figures in result["parts"].values() for value in figures.values())
    assert (result["network"], result["global_batch"], result["num_devices"]) == ("ViT-mu/2", 16, 8)
    assert "mfu" not in result, "a CPU has no peak to compare with"
    assert capsys.readouterr().out == "", "what the loop prints is no result"


def test_command(capsys):
    words = ["bench", "--config=configs/digits.py", "--steps=1", *(f"--config.{override}" for override in TINY)]
    cli.main(words)
    table = capsys.readouterr().out
    assert [line for name in ALWAYS for line in table.splitlines() if line.startswith(name)] == table.splitlines()[3:]
    cli.main([*words, "--json"])
    result = json.loads(capsys.readouterr().out)
    assert list(result["parts"]) == ALWAYS
    assert result["version_jax"] == jax.__version__
    with pytest.raises(SystemExit):
        cli.main(["bench", "--config=configs/digits.py", "--steps=none"])


def test_fine_tuning_is_timed_too(capsys):
    recipe = "--config=configs/finetune.py:ViT-mu/16,own,image_size=32"
    cli.main(["bench", recipe, "--steps=1", "--config.global_batch=8"])
    assert "images/s" in capsys.readouterr().out
