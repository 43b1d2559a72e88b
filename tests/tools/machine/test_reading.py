"""The data path of a host beside a planned step: what is needed, what is measured, and the verdict."""

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
    read, read_bytes = reading.read_speed(source, Parallelism(num_workers=2, num_threads=2))

    assert 0 < read <= 4 / Slow.seconds
    assert read_bytes == pytest.approx(read * source.images[0].nbytes)

    monkeypatch.setattr(reading, "READ_SECONDS", 0.0)
    monkeypatch.setattr(reading, "MOST_RECORDS", 10**6)

    assert reading.read_speed(source, Parallelism(0, 1))[0] <= 1 / Slow.seconds


@pytest.mark.parametrize(
    ("read", "decoded", "remedy"),
    [(2.0, 2.0, ""), (0.5, 0.5, "reading is too slow"), (2.0, 0.5, "decoding is too slow")],
)
def test_the_planned_step_decides(data_dir, monkeypatch, read, decoded, remedy):
    """Speeds are multiples of what each of the eight hosts of two slices needs."""
    words = [
        f"--config={RECIPE}",
        *flags(
            *RUN, "global_batch=64", "evaluation.global_batch=128", f"input.data_dir={data_dir}"
        ),
    ]
    machine = "--topology=2*v5litepod-16"
    plan = json.loads(run(["plan", *words, machine, "--arithmetic", "--json"]).out)
    needed = plan["totals"]["images_per_second"] / 8
    monkeypatch.setattr(reading, "read_speed", lambda *_: (read * needed, 1e6))
    monkeypatch.setattr(reading, "decode_speed", lambda *_: decoded * needed)
    outcome = run(["doctor", *words, machine])

    assert outcome.code == (1 if remedy else 0), outcome.out

    line = next(line for line in outcome.out.splitlines() if "data path" in line)
    assert line.startswith("wrong" if remedy else "good ")
    assert f"needs {needed:,.0f} on each of 8 host(s)" in line
    assert remedy in outcome.out
    assert "\ngood   speed" not in outcome.out


def test_speeds_of_real_data(data_dir):
    words = [
        f"--config={RECIPE}",
        *flags(*RUN, f"input.data_dir={data_dir}"),
        "--topology=v5e:1x1",
        "--json",
    ]
    report = json.loads(run(["doctor", *words]).out)
    (finding,) = next(findings for findings in report if findings[0]["name"] == "data path")
    figures = finding["figures"]

    assert figures["read_images_per_second"] > 0
    assert figures["images_per_second"] > 0
    assert bool(finding["remedy"]) == (
        min(figures["read_images_per_second"], figures["images_per_second"])
        < figures["needed_images_per_second"]
    )
