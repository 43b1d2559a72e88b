"""The data path of a host beside a planned step: the needed speed, the measured speed, and the
verdict.
"""

import json
import time

import pytest

from tests import tiny
from tests.integration.commands import run
from tests.tiny import RECIPE, RUN, flags
from vit_jax.data.kinds.in_memory import MemorySource
from vit_jax.data.workers import Parallelism
from vit_jax.tools.machine import reading


class Slow(MemorySource):
    """Records of which each takes a time to read."""

    seconds = 0.02

    def image_of(self, index):
        time.sleep(self.seconds)
        return super().image_of(index)


def test_reading_is_timed_with_all_threads(monkeypatch):
    pixels = tiny.source(20)
    source = Slow(pixels.images, pixels.labels, pixels.class_names)

    monkeypatch.setattr(reading, "MOST_RECORDS", 8)
    parallelism = Parallelism(num_workers=2, num_threads=2)
    read, read_bytes = reading.measure_reading(source, parallelism)

    assert 0 < read <= 4 / Slow.seconds
    assert read_bytes == pytest.approx(read * source.images[0].nbytes)

    monkeypatch.setattr(reading, "READ_SECONDS", 0.0)
    monkeypatch.setattr(reading, "MOST_RECORDS", 10**6)
    read, _ = reading.measure_reading(source, Parallelism(0, 1))

    assert read <= 1 / Slow.seconds


@pytest.mark.usefixtures("enough_memory")
@pytest.mark.parametrize(
    ("read", "decoded", "code", "verdict", "remedy"),
    [
        (2.0, 2.0, 0, "good ", ""),
        (0.5, 0.5, 1, "wrong", "reading is too slow"),
        (2.0, 0.5, 1, "wrong", "decoding is too slow"),
    ],
)
def test_the_planned_step_decides(
    data_dir,
    monkeypatch,
    read,
    decoded,
    code,
    verdict,
    remedy,
):
    """Speeds are multiples of the speed that each of the eight hosts of two slices needs."""
    batches = ("global_batch=64", "evaluation.global_batch=128")
    overrides = flags(*RUN, *batches, f"input.data_dir={data_dir}")
    words = [f"--config={RECIPE}", *overrides, "--topology=2*v5litepod-16"]
    plan = json.loads(run(["plan", *words, "--arithmetic", "--json"]).out)
    needed = plan["totals"]["images_per_second"] / 8
    monkeypatch.setattr(reading, "measure_reading", lambda *_: (read * needed, 1e6))
    monkeypatch.setattr(reading, "measure_decoding", lambda *_: decoded * needed)

    outcome = run(["doctor", *words])

    assert outcome.code == code, outcome.out
    assert remedy in outcome.out
    assert "\ngood   speed" not in outcome.out

    line = next(line for line in outcome.out.splitlines() if "data path" in line)
    assert line.startswith(verdict)
    assert f"needs {needed:,.0f} on each of 8 host(s)" in line


def test_speeds_of_real_data(data_dir):
    overrides = flags(*RUN, f"input.data_dir={data_dir}")
    outcome = run(
        [
            "doctor",
            f"--config={RECIPE}",
            *overrides,
            "--topology=v5e:1x1",
            "--json",
        ]
    )

    report = json.loads(outcome.out)
    (finding,) = next(findings for findings in report if findings[0]["name"] == "data path")
    read = finding["figures"]["read_images_per_second"]
    prepared = finding["figures"]["images_per_second"]
    needed = finding["figures"]["needed_images_per_second"]
    is_too_slow = min(read, prepared) < needed

    assert read > 0
    assert prepared > 0
    assert bool(finding["remedy"]) == is_too_slow
