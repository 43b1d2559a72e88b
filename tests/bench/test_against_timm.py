import math

import pytest

from tests.bench import against_timm

RESULT = {"batch": 2, "training": [0.4, 0.5, 0.6], "inference": [0.1, 0.1, 0.1], "peak_bytes": None}


@pytest.mark.slow
def test_ours_is_measured_on_the_machine_at_hand():
    found = against_timm.measure_ours("mu/16@32", batch=2, steps=2)
    assert [len(found[name]) for name in ("training", "inference")] == [2, 2]
    assert all(0 < seconds < math.inf for seconds in found["training"] + found["inference"])


def test_the_table_has_speeds_beside_the_ceiling_and_timm():
    twice = RESULT | {"training": [0.2, 0.25, 0.3], "peak_bytes": 2**30}
    ceiling = 3 * against_timm.flops_per_image("S/16@32") * 16
    row = against_timm.table({"S/16@32": {"ours, xla": twice, "timm": RESULT}}, ceiling).splitlines()[2]
    assert [cell.strip() for cell in row.split("|")[3:-1]] == ["2", "8.0, 7.3 to 8.9", "50%", "2.00", "1.0", "20.0"]
