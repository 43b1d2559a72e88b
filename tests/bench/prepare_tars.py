"""Measure `vit-jax prepare tar:…`: images/s, CPU time and peak memory of reading, writing and checking.

    python tests/bench/prepare_tars.py FOLDER [--rounds=3]

Two archives are written into FOLDER by the first run, each with 100 tars in one: 20,000 JPEGs of 64
x 64 pixels, and 4,000 with the sizes of ImageNet's (`input_against_tf_data.make`: 500 x 375 and
others, 106 kB on average). Each round prepares both from the start, with a part held out. Times of
the stages include the start of Python (2 s of CPU time).
"""

import argparse
import io
import os
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import input_against_tf_data
import numpy as np

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

    The peak is of the largest process so far.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "vit_jax", *words],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)

    cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, cpu_seconds, after.ru_maxrss / 1024


def measure(title, words, count):
    """Run a command for this number of images and print its figures."""
    seconds, cpu_seconds, peak = time_command(words)
    cpu_per_image = cpu_seconds / count
    hours = OF_FALL11 * cpu_per_image / 3600
    figures = (
        f"{count / seconds:,.0f} images/s on {os.cpu_count()} cores",
        f"{1e3 * cpu_per_image:.2f} CPU ms an image",
        f"{hours:.1f} core hours for {OF_FALL11:,}",
        f"peak {peak:,.0f} MiB",
        f"load {os.getloadavg()[0]:.1f}",
    )
    print(f"{title}: {', '.join(figures)}", flush=True)


def add(archive, name, content):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    data_dir = arguments.folder / "prepared"

    for make, count in ((small, 20_000), (photographs, 4000)):
        name = make.__name__
        path = arguments.folder / f"{name}.tar"
        if not path.exists():
            pack(make(), path)

        prepare = [
            "prepare",
            f"tar:{path}",
            f"--name={name}",
            f"--data_dir={data_dir}",
            "--holdout_per_class=5",
        ]
        check = ["prepare", name, f"--data_dir={data_dir}", "--check"]
        for _ in range(arguments.rounds):
            shutil.rmtree(data_dir, ignore_errors=True)
            measure(f"{name} prepare", prepare, count)
            measure(f"{name} check", check, count)


if __name__ == "__main__":
    main()
