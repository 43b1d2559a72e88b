"""Tar archives and parquet files of small images, as other projects write them."""

import io
import json
import tarfile

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from vit_jax.data.decoding.images import decode

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def encode(extension, pixels, *options):
    """Return the file that OpenCV makes of grey levels, BGR or BGRA."""
    _, file = cv2.imencode(extension, pixels, options)
    return file.tobytes()


def image(level, extension=".png"):
    """Return a small grey image as a file."""
    pixels = np.full((6, 5, 3), level, np.uint8)
    return encode(extension, pixels)


def read_levels(source):
    """Return the grey level of each image of a source."""
    levels = []
    for index in range(len(source)):
        pixels = decode(source[index].image)
        levels.append(int(pixels[0, 0, 0]))
    return levels


def make_row(content, path=None):
    """Return a value of a column of images in parquet."""
    return {"bytes": content, "path": path}


def packed(*entries, **options):
    """Return a tar of (name, content) and of `TarInfo`s, which have no content."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", **options) as archive:
        for entry in entries:
            if isinstance(entry, tarfile.TarInfo):
                archive.addfile(entry)
                continue

            name, content = entry
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))

    return file.getvalue()


def special(name, kind, target=""):
    """Return a member that is no file."""
    info = tarfile.TarInfo(name)
    info.type = kind
    info.linkname = target
    return info


def picture(number, kind=".jpg", size=(34, 40)):
    """Return an encoded image that no other number gives."""
    pixels = np.random.default_rng(number).integers(
        256,
        size=(*size, 3),
        dtype=np.uint8,
    )
    smooth = cv2.GaussianBlur(pixels, (0, 0), 3)
    return encode(kind, smooth)


def by_class(classes):
    """Return {class: {file name: content}} as a tar with a tar for each class."""
    tars = []
    for name, files in classes.items():
        tars.append((f"{name}.tar", packed(*files.items())))
    return packed(*tars)


def write_shard(path, members):
    """Write members, bytes by name, or the type and target of a special one, into a tar."""
    entries = []
    for name, content in members:
        if isinstance(content, bytes):
            entries.append((name, content))
        else:
            entries.append(special(name, *content))

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(packed(*entries))
    return path


def samples(labels, first=0, kind="cls"):
    """Yield the members of one sample for each label; the image of number n is of level n."""
    for number, label in enumerate(labels, first):
        if kind == "cls":
            stated = str(label)
        else:
            stated = json.dumps({"label": label, "id": number})
        yield f"{number:05}.{kind}", stated.encode()
        yield f"{number:05}.png", image(number)


def write_parquet(
    path,
    labels,
    first=0,
    names=None,
    label="label",
    group=4,
    images=None,
    image_column="image",
    **columns,
):
    """Write images of level n with labels; with `names` also the metadata of Hugging Face."""
    if images is None:
        levels = range(first, first + len(labels))
        images = [make_row(image(level)) for level in levels]
    columns[image_column] = pa.array(images, IMAGE)
    columns[label] = pa.array(labels)
    table = pa.table(columns)
    if names is not None:
        features = {
            image_column: {"_type": "Image"},
            label: {"names": list(names), "_type": "ClassLabel"},
        }
        metadata = json.dumps({"info": {"features": features}})
        table = table.replace_schema_metadata({"huggingface": metadata})

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, row_group_size=group)
    return path
