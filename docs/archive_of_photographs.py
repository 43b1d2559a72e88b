"""Write train.tar, a tar of one tar for each of three classes, and a folder `test` with copies of nine of its images.

Two classes are windows of the two photographs of scikit-learn, the third one is clouds of noise.
One image is cut off, another one is tiny.
"""

import io
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.ndimage import gaussian_filter
from sklearn.datasets import load_sample_images

PHOTOGRAPHS = load_sample_images().images
CLASSES = ("n00000001", "n00000002", "n00000003")
GENERATOR = np.random.default_rng(0)


def window(photograph: np.ndarray) -> Image.Image:
    """Return a random part of a photograph."""
    side = int(GENERATOR.integers(90, 200))
    top, left = (GENERATOR.integers(0, length - side) for length in photograph.shape[:2])
    return Image.fromarray(photograph[top : top + side, left : left + side]).resize((96, 80))


def cloud() -> Image.Image:
    """Return smooth noise in colours."""
    values = gaussian_filter(
        GENERATOR.normal(size=(80, 96, 3)), (*[GENERATOR.uniform(3, 9)] * 2, 0)
    )
    return Image.fromarray(((values - values.min()) / np.ptp(values) * 255).astype(np.uint8))


def jpeg(image: Image.Image) -> bytes:
    """Return the bytes of a JPEG file."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    """Append a file to a tar."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def main() -> None:
    """Write the archive and the folder here."""
    with tarfile.open("train.tar", "w") as outer:
        for number, name in enumerate(CLASSES):
            folder = Path("test", name)
            inner = io.BytesIO()
            folder.mkdir(parents=True, exist_ok=True)
            with tarfile.open(fileobj=inner, mode="w") as tar:
                for index in range(40):
                    image = window(PHOTOGRAPHS[number]) if number < 2 else cloud()
                    add(tar, f"{name}_{index}.JPEG", jpeg(image))
                    if index < 3:
                        mirrored = image.resize((72, 60)).transpose(Image.Transpose.FLIP_LEFT_RIGHT)
                        mirrored.save(folder / f"copy_{index}.jpg", quality=60)
                if number == 1:
                    add(tar, f"{name}_40.JPEG", jpeg(window(PHOTOGRAPHS[1]))[:700])
                if number == 2:
                    add(tar, f"{name}_40.JPEG", jpeg(cloud().resize((20, 20))))
            for index in range(7):
                image = window(PHOTOGRAPHS[number]) if number < 2 else cloud()
                image.save(folder / f"new_{index}.jpg")
            add(outer, f"{name}.tar", inner.getvalue())


if __name__ == "__main__":
    main()
