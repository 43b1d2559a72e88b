"""Tar archives and parquet files of small images, as other projects write them."""

import io
import json
import tarfile

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def image(level, extension=".png"):
    """Return a small grey image as a file."""
    return cv2.imencode(extension, np.full((6, 5, 3), level, np.uint8))[1].tobytes()


def packed(*entries, **options):
    """A tar of (name, content) and of `TarInfo`s, which have no content."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", **options) as archive:
        for entry in entries:
            info = entry if isinstance(entry, tarfile.TarInfo) else tarfile.TarInfo(entry[0])
            info.size = 0 if isinstance(entry, tarfile.TarInfo) else len(entry[1])
            archive.addfile(
                info,
                None if isinstance(entry, tarfile.TarInfo) else io.BytesIO(entry[1]),
            )

    return file.getvalue()


def special(name, kind, target=""):
    """A member that is no file."""
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = target

    return info


def picture(number, kind=".jpg", size=(34, 40)):
    """An encoded image that no other number gives."""
    pixels = np.random.default_rng(number).integers(256, size=(*size, 3), dtype=np.uint8)
    return cv2.imencode(kind, cv2.GaussianBlur(pixels, (0, 0), 3))[1].tobytes()


def by_class(classes):
    """{class: {file name: content}} as a tar with a tar for each class."""
    return packed(*((f"{name}.tar", packed(*files.items())) for name, files in classes.items()))


def write_shard(path, members):
    """Write members, bytes by name, or the type and target of a special one, into a tar."""
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = (
        entry if isinstance(entry[1], bytes) else special(entry[0], *entry[1]) for entry in members
    )
    path.write_bytes(packed(*entries))

    return path


def samples(labels, first=0, kind="cls"):
    """Return the members of one sample for each label; the image of number n is of level n."""
    for number, label in enumerate(labels, first):
        stated = (
            str(label).encode()
            if kind == "cls"
            else json.dumps({"label": label, "id": number}).encode()
        )
        yield f"{number:05}.{kind}", stated
        yield f"{number:05}.png", image(number)


def write_parquet(
    path, labels, first=0, names=None, label="label", group=4, images=None, **columns
):
    """Write images of level n with labels; with `names` also the metadata of Hugging Face."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stored = (
        [{"bytes": image(n), "path": None} for n in range(first, first + len(labels))]
        if images is None
        else images
    )
    table = pa.table({"image": pa.array(stored, IMAGE), label: pa.array(labels)} | columns)

    if names is not None:
        features = {
            "image": {"_type": "Image"},
            label: {"names": list(names), "_type": "ClassLabel"},
        }
        table = table.replace_schema_metadata(
            {"huggingface": json.dumps({"info": {"features": features}})}
        )

    pq.write_table(table, path, row_group_size=group)
    return path
