"""Speed over batches: the search with a device that is made up, and a small network measured and
compiled.
"""

import pytest

from tests.integration.commands import succeed
from tests.tools.plan.test_aot import needs_libtpu
from tests.tools.sweeps.test_runs import read_rows
from vit_jax.tools.sweeps.speed import find_peak

SMALL = [
    "--config=digits_studies",
    "--image_sizes=16",
    "--config.model.depth=1",
    "--config.global_batch=1",
]


def test_the_fastest_and_the_largest_batch():
    seconds = {1: 0.1, 2: 0.1, 4: 0.4, 8: None}
    summary = find_peak(seconds.get, most=64)

    assert summary["images_per_second"] == 20
    assert summary["fastest_batch"] == 2
    assert summary["largest_batch"] == 4
    assert summary["is_limited_by_memory"] is True


def test_a_search_that_memory_does_not_limit():
    summary = find_peak({1: 0.1, 2: 0.1}.get, most=3)
    assert summary["is_limited_by_memory"] is False


def test_memory_that_is_too_small_for_one_image():
    with pytest.raises(ValueError, match="not even for one image"):
        find_peak({1: None}.get, most=4)


@pytest.mark.parametrize(
    ("topology", "options"),
    [
        pytest.param(None, [], marks=pytest.mark.slow),
        pytest.param(
            "v5e:1x1",
            ["--topology=v5e:1x1"],
            marks=[needs_libtpu, pytest.mark.tools],
        ),
    ],
)
def test_a_network_is_measured_or_planned(topology, options, tmp_path):
    out = succeed(
        [
            "study",
            "speed",
            *SMALL,
            "--models=ViT-16",
            "--measures=images_per_second,largest_batch",
            f"--workdir={tmp_path}",
            *options,
        ]
    )
    (row,) = read_rows(tmp_path)

    assert row["images_per_second"] > 0
    assert row["largest_batch"] == 1
    assert row["image_size"] == "16"
    assert row.get("machine") == topology
    assert out.endswith((tmp_path / "study.md").read_text())
