"""Speed over batches: the search with a device that is made up, and a small network measured and compiled."""

import pytest

from tests.integration.commands import succeed
from tests.tools.plan.test_aot import needs_libtpu
from tests.tools.sweeps.test_runs import rows
from vit_jax.tools.sweeps.speed import find_peak

SMALL = [
    "--config=digits_studies",
    "--image_sizes=16",
    "--config.model.depth=1",
    "--config.global_batch=1",
]


def test_the_fastest_and_the_largest_batch():
    summary = find_peak({1: 0.1, 2: 0.1, 4: 0.4, 8: None}.get, most=64)

    assert (summary["images_per_second"], summary["fastest_batch"]) == (20, 2)
    assert (summary["largest_batch"], summary["is_limited_by_memory"]) == (4, True)
    assert find_peak({1: 0.1, 2: 0.1}.get, most=3)["is_limited_by_memory"] is False
    with pytest.raises(ValueError, match="not even for one image"):
        find_peak({1: None}.get, most=4)


@pytest.mark.parametrize(
    "topology",
    [
        pytest.param(None, marks=pytest.mark.slow),
        pytest.param("v5e:1x1", marks=[needs_libtpu, pytest.mark.tools]),
    ],
)
def test_a_network_is_measured_or_planned(topology, tmp_path):
    where = [f"--topology={topology}"] if topology else []
    words = [
        "study",
        "speed",
        *SMALL,
        "--models=ViT-16",
        "--measures=images_per_second,largest_batch",
    ]
    out = succeed([*words, f"--workdir={tmp_path}", *where])
    (row,) = rows(tmp_path)

    assert row["images_per_second"] > 0
    assert (row["largest_batch"], row["image_size"], row.get("machine")) == (1, "16", topology)
    assert out.endswith((tmp_path / "study.md").read_text())
