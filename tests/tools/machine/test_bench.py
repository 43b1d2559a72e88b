"""The benchmark of a run: statistics of a part, and the parts that are timed."""

import json
import math

import jax
import pytest

from tests.tiny import NETWORK, RUN, flags
from vit_jax import cli
from vit_jax.tools.machine.bench import Part, to_text

ALWAYS = [
    "step",
    "evaluation",
    "inference",
    "save, steps wait",
    "save, on disk",
    "restore",
]


def test_figures_of_a_part():
    part = Part(
        "step",
        [0.01, 0.02, 0.03, 0.04, 0.1],
        batch=60,
    )

    assert part.figures() == pytest.approx(
        {
            "median_milliseconds": 30,
            "lower_quartile_milliseconds": 20,
            "upper_quartile_milliseconds": 40,
            "least_milliseconds": 10,
            "most_milliseconds": 100,
            "images_per_second": 2000,
        }
    )


@pytest.mark.slow
def test_every_part_is_timed(data_dir, capsys):
    overrides = flags(*RUN, f"input.data_dir={data_dir}")
    options = ["--steps=3", "--data", "--json"]

    cli.main(["bench", "--config=configs/digits.py", *options, *overrides])

    # The loop prints nothing.
    result = json.loads(capsys.readouterr().out)
    parts = result["parts"]
    assert list(parts) == [*ALWAYS, "input", "input with step", "loop"]
    assert result["network"] == "ViT-mu/2"
    assert result["global_batch"] == 16
    assert result["version_jax"] == jax.__version__
    assert "mfu" not in result, "a CPU has no peak to compare with"
    for figures in parts.values():
        for value in figures.values():
            assert 0 < value < math.inf

    rows = to_text(result).splitlines()[3:]
    for row, name in zip(rows, parts, strict=True):
        assert row.startswith(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "fields"),
    [
        ("finetune.py:ViT-mu/16,own,image_size=32", ["global_batch=8"]),
        ("digits_masked.py:pretrain", [*NETWORK, "global_batch=16"]),
    ],
)
def test_fine_tuning_and_masked_patches_are_timed_without_data(
    capsys,
    recipe,
    fields,
):
    cli.main(
        [
            "bench",
            f"--config=configs/{recipe}",
            "--steps=1",
            *flags(*fields),
        ]
    )

    rows = capsys.readouterr().out.splitlines()[3:]
    assert [row[:16].rstrip() for row in rows] == ALWAYS
