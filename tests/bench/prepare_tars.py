"""Measure `vit-jax prepare tar:…`: images/s, CPU time and peak memory of reading, writing and checking.

    python -m tests.bench.record prepare

Two archives are written by the first run, each with 100 tars in one: 20,000 JPEGs of 64
x 64 pixels, and 4,000 with the sizes of ImageNet's (`input_against_tf_data.make`: 500 x 375 and
others, 106 kB on average). Each round prepares both from the start, with a part held out. Times of
the stages include the start of Python (2 s of CPU time).
"""

import io
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import numpy as np

from tests.bench import input_against_tf_data

CLASSES = 100
OF_FALL11 = 14_197_122


def small(count=20_000):
    """Yield JPEGs of 2 kB."""
    import cv2

    rng = np.random.default_rng(0)
    for _ in range(count):
        colours = rng.integers(256, size=(6, 6, 3), dtype=np.uint8)
        pixels = cv2.resize(
            colours,
            (64, 64),
            interpolation=cv2.INTER_CUBIC,
        )
        yield cv2.imencode(".jpg", pixels)[1].tobytes()


def photographs(count=4000):
    """Yield JPEGs of 106 kB."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        input_against_tf_data.make(folder, count)
        for path in sorted(folder.glob("*/*.jpg")):
            yield path.read_bytes()


def pack(images, path):
    """Write a tar of tars."""
    images = list(images)
    with tarfile.open(path, "w") as whole:
        for label in range(CLASSES):
            part = io.BytesIO()
            with tarfile.open(fileobj=part, mode="w") as archive:
                for number, image in enumerate(images[label::CLASSES]):
                    add(
                        archive,
                        f"n{label:08}_{number}.JPEG",
                        image,
                    )
            add(whole, f"n{label:08}.tar", part.getvalue())


def time_command(words):
    """Return seconds, CPU seconds and peak MiB of a command.

    A small process starts it: Linux counts the memory of the starting process in the peak.
    """
    command = [sys.executable, "-m", "tests.bench.prepare_tars", *words]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    *_, last_line = done.stdout.splitlines()
    return json.loads(last_line)


def measure(words, count):
    """Run a command for this number of images; return its figures."""
    seconds, cpu_seconds, peak = time_command(words)
    cpu_per_image = cpu_seconds / count
    figures = {
        "images_per_second": count / seconds,
        "cpu_ms": 1e3 * cpu_per_image,
        "core_hours": OF_FALL11 * cpu_per_image / 3600,
        "peak_mib": peak,
    }
    print(" ".join(words), figures, flush=True)
    return figures


def add(archive, name, content):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def measure_rows(words):
    """Return the medians of the rounds of `words` by row of the table."""
    folder = words.folder / "tars"
    folder.mkdir(parents=True, exist_ok=True)
    data_dir = folder / "prepared"
    rows = {}
    for name, (make, count) in ARCHIVES.items():
        path = folder / f"{make.__name__}.tar"
        if not path.exists():
            pack(make(), path)

        prepare = [
            "prepare",
            f"tar:{path}",
            f"--name={make.__name__}",
            f"--data_dir={data_dir}",
            "--holdout_per_class=5",
        ]
        check = ["prepare", make.__name__, f"--data_dir={data_dir}", "--check"]
        prepared = []
        checked = []
        for _ in range(words.rounds):
            shutil.rmtree(data_dir, ignore_errors=True)
            prepared.append(measure(prepare, count))
            checked.append(measure(check, count))
        rows[name] = take_medians(prepared)
        rows[f"{name}, `--check`"] = take_medians(checked)
    return rows


def take_medians(rounds):
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def main():
    """Run a command of vit-jax; print its seconds, CPU seconds and peak MiB."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "vit_jax", *sys.argv[1:]], check=True)
    seconds = time.perf_counter() - start
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_seconds = usage.ru_utime + usage.ru_stime
    print(json.dumps([seconds, cpu_seconds, usage.ru_maxrss / 1024]))


ARCHIVES = {
    "20,000 JPEGs of 64 x 64 pixels, 2 kB": (small, 20_000),
    "4,000 JPEGs of ImageNet's sizes, 106 kB": (photographs, 4000),
}


if __name__ == "__main__":
    main()
