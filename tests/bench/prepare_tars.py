"""Measures `vit-jax prepare tar:…`: images/s, CPU time and peak memory of reading, writing and checking.

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
    """JPEGs of 2 kB."""
    import cv2

    rng = np.random.default_rng(0)
    for _ in range(count):
        pixels = cv2.resize(
            rng.integers(256, size=(6, 6, 3), dtype=np.uint8),
            (64, 64),
            interpolation=cv2.INTER_CUBIC,
        )
        yield cv2.imencode(".jpg", pixels)[1].tobytes()


def photographs(count=4000):
    """JPEGs of 106 kB."""
    with tempfile.TemporaryDirectory() as scratch:
        input_against_tf_data.make(Path(scratch), count)
        yield from (path.read_bytes() for path in sorted(Path(scratch).glob("*/*.jpg")))


def pack(images, path):
    """Writes a tar of tars."""
    images = list(images)
    with tarfile.open(path, "w") as whole:
        for label in range(CLASSES):
            part = io.BytesIO()
            with tarfile.open(fileobj=part, mode="w") as archive:
                for number, image in enumerate(images[label::CLASSES]):
                    add(archive, f"n{label:08}_{number}.JPEG", image)
            add(whole, f"n{label:08}.tar", part.getvalue())


def add(archive, name, content):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    archive.addfile(info, io.BytesIO(content))


def timed(words):
    """Seconds, CPU seconds and peak MiB of a command; its peak is that of the largest process so far."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "vit_jax", *words], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began, cpu, after.ru_maxrss / 1024


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    for make, count in ((small, 20_000), (photographs, 4000)):
        path = given.folder / f"{make.__name__}.tar"
        if not path.exists():
            pack(make(), path)
        for _ in range(given.rounds):
            data_dir = given.folder / "prepared"
            shutil.rmtree(data_dir, ignore_errors=True)
            words = [f"--name={make.__name__}", f"--data_dir={data_dir}", "--holdout_per_class=5"]
            for what, command in (
                ("prepare", ["prepare", f"tar:{path}", *words]),
                ("check", ["prepare", make.__name__, f"--data_dir={data_dir}", "--check"]),
            ):
                seconds, cpu, peak = timed(command)
                hours = OF_FALL11 * cpu / count / 3600
                print(
                    f"{make.__name__} {what}: {count / seconds:,.0f} images/s on {os.cpu_count()} cores, "
                    f"{1e3 * cpu / count:.2f} CPU ms an image, {hours:.1f} core hours for {OF_FALL11:,}, "
                    f"peak {peak:,.0f} MiB, load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
