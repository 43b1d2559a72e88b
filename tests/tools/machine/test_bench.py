import json
import math

import jax
import pytest

from tests.tiny import NETWORK, RUN, flags
from vit_jax import cli
from vit_jax.tools.machine.bench import Part, to_text

ALWAYS = ["step", "evaluation", "inference", "save, steps wait", "save, on disk", "restore"]


def test_figures_of_a_part():
    figures = Part("step", [0.01, 0.02, 0.03, 0.04, 0.1], batch=60).figures()
    expected = {"median": 30, "lower_quartile": 20, "upper_quartile": 40, "least": 10, "most": 100}
    expected = {f"{name}_milliseconds": value for name, value in expected.items()} | {
        "images_per_second": 2000
    }

    assert figures == pytest.approx(expected)


@pytest.mark.slow
def test_every_part_is_timed(data_dir, capsys):
    overrides = flags(*RUN, f"input.data_dir={data_dir}")
    cli.main(["bench", "--config=configs/digits.py", "--steps=3", "--data", "--json", *overrides])
    result = json.loads(capsys.readouterr().out)  # and nothing that the loop prints

    assert list(result["parts"]) == [*ALWAYS, "input", "input with step", "loop"]
    assert all(
        0 < value < math.inf for figures in result["parts"].values() for value in figures.values()
    )
    assert (result["network"], result["global_batch"], result["version_jax"]) == (
        "ViT-mu/2",
        16,
        jax.__version__,
    )
    assert "mfu" not in result, "a CPU has no peak to compare with"

    rows = to_text(result).splitlines()[3:]
    assert [row[: len(name)] for row, name in zip(rows, result["parts"], strict=True)] == list(
        result["parts"]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "fields"),
    [
        ("finetune.py:ViT-mu/16,own,image_size=32", ["global_batch=8"]),
        ("digits_masked.py:pretrain", [*NETWORK, "global_batch=16"]),
    ],
)
def test_fine_tuning_and_masked_patches_are_timed_without_data(capsys, recipe, fields):
    cli.main(["bench", f"--config=configs/{recipe}", "--steps=1", *flags(*fields)])
    assert [row[:16].rstrip() for row in capsys.readouterr().out.splitlines()[3:]] == ALWAYS
