"""Tar archives of small images, made in memory."""

import io
import tarfile

import cv2
import numpy as np


def packed(*entries, **options):
    """A tar of (name, content) and of `TarInfo`s, which have no content."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", **options) as archive:
        for entry in entries:
            info = entry if isinstance(entry, tarfile.TarInfo) else tarfile.TarInfo(entry[0])
            info.size = 0 if isinstance(entry, tarfile.TarInfo) else len(entry[1])
            archive.addfile(info, None if isinstance(entry, tarfile.TarInfo) else io.BytesIO(entry[1]))
    return file.getvalue()


def special(name, kind, target=""):
    """A member that is no file."""
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def picture(number, kind=".jpg", size=(34, 40)):
    """An encoded image that no other number gives."""
    pixels = np.random.default_rng(number).integers(256, size=(*size, 3), dtype=np.uint8)
    return cv2.imencode(kind, cv2.GaussianBlur(pixels, (0, 0), 3))[1].tobytes()


def by_class(classes):
    """{class: {file name: content}} as a tar with a tar for each class."""
    return packed(*((f"{name}.tar", packed(*files.items())) for name, files in classes.items()))
