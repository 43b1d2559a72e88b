"""Writes tar shards and parquet files of small images, as other projects do."""

import json

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.data.archives import packed, special

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def image(level, extension=".png"):
    """Return a small grey image as a file."""
    return cv2.imencode(extension, np.full((6, 5, 3), level, np.uint8))[1].tobytes()


def write_shard(path, members):
    """Write members, bytes by name, or the type and target of a special one, into a tar."""
    path.parent.mkdir(parents=True, exist_ok=True)
    entries = (entry if isinstance(entry[1], bytes) else special(entry[0], *entry[1]) for entry in members)
    path.write_bytes(packed(*entries))
    return path


def samples(labels, first=0, kind="cls"):
    """Return the members of one sample for each label; the image of number n is of level n."""
    for number, label in enumerate(labels, first):
        stated = str(label).encode() if kind == "cls" else json.dumps({"label": label, "id": number}).encode()
        yield f"{number:05}.{kind}", stated
        yield f"{number:05}.png", image(number)


def write_parquet(path, labels, first=0, names=None, label="label", group=4, images=None, **columns):
    """Write images of level n with labels; with `names` also the metadata of Hugging Face."""
    path.parent.mkdir(parents=True, exist_ok=True)
    stored = (
        [{"bytes": image(n), "path": None} for n in range(first, first + len(labels))] if images is None else images
    )
    table = pa.table({"image": pa.array(stored, IMAGE), label: pa.array(labels)} | columns)
    if names is not None:
        features = {"image": {"_type": "Image"}, label: {"names": list(names), "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, path, row_group_size=group)
    return path
