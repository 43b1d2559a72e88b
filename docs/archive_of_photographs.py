"""Write train.tar, an archive of three classes, and a folder `test` with copies of nine images.

The archive holds an archive for each class. Two classes are windows of the two photographs of
scikit-learn, the third one is clouds of noise. One image is truncated, another one is tiny.
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


def crop_window(photograph: np.ndarray) -> Image.Image:
    """Return a random part of a photograph."""
    side = int(GENERATOR.integers(90, 200))
    height, width, _ = photograph.shape
    top = GENERATOR.integers(0, height - side)
    left = GENERATOR.integers(0, width - side)
    window = photograph[top : top + side, left : left + side]
    return Image.fromarray(window).resize((96, 80))


def make_cloud() -> Image.Image:
    """Return smooth noise in colours."""
    noise = GENERATOR.normal(size=(80, 96, 3))
    sigma = GENERATOR.uniform(3, 9)
    values = gaussian_filter(noise, (sigma, sigma, 0))
    pixels = (values - values.min()) / np.ptp(values) * 255
    return Image.fromarray(pixels.astype(np.uint8))


def make_image(number: int) -> Image.Image:
    """Return an image of a class."""
    if number < len(PHOTOGRAPHS):
        return crop_window(PHOTOGRAPHS[number])
    return make_cloud()


def encode(image: Image.Image) -> bytes:
    """Return the bytes of a JPEG file."""
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    """Append a file to a tar."""
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def write_class(number: int, name: str, folder: Path) -> bytes:
    """Return the archive of a class; write mirrored copies of its first images into a folder."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for index in range(40):
            image = make_image(number)
            add(tar, f"{name}_{index}.JPEG", encode(image))
            if index < 3:
                mirrored = image.resize((72, 60)).transpose(Image.Transpose.FLIP_LEFT_RIGHT)
                mirrored.save(folder / f"copy_{index}.jpg", quality=60)
        if number == 1:
            truncated = encode(make_image(number))[:700]
            add(tar, f"{name}_40.JPEG", truncated)
        if number == 2:
            tiny = make_image(number).resize((20, 20))
            add(tar, f"{name}_40.JPEG", encode(tiny))
    return content.getvalue()


def main() -> None:
    """Write the archive and the folder into the working directory."""
    with tarfile.open("train.tar", "w") as tar:
        for number, name in enumerate(CLASSES):
            folder = Path("test", name)
            folder.mkdir(parents=True, exist_ok=True)
            content = write_class(number, name, folder)
            for index in range(7):
                make_image(number).save(folder / f"new_{index}.jpg")
            add(tar, f"{name}.tar", content)


if __name__ == "__main__":
    main()
