"""The datasets of VTAB with made-up content, in TFDS's features, files and sizes.

Record i of a split has the labels that the number i % PERIOD gives. So few distinct records are
stored in groups that compress them, and 737,280 take half a second.
"""

import pathlib

import numpy as np
import tensorflow_datasets as tfds
from array_record.python import array_record_module
from tensorflow_datasets.core import example_serializer

from tests.data.packed_files import encode

THREE_SPLITS = {
    "train": 1000,
    "validation": 300,
    "test": 300,
}
SIZES = {  # splits with parts have TFDS's sizes; the others are shorter
    "caltech101": {"train": 3060, "test": 300},
    "cifar100": {"train": 50_000, "test": 300},
    "dtd": {"train": 1880, "validation": 1880, "test": 300},
    "oxford_flowers102": {
        "train": 1020,
        "validation": 1020,
        "test": 300,
    },
    "oxford_iiit_pet": {"train": 3680, "test": 300},
    "sun397/tfds": THREE_SPLITS,
    "svhn_cropped": {"train": 73_257, "test": 300, "extra": 300},
    "patch_camelyon": THREE_SPLITS,
    "eurosat/rgb": {"train": 27_000},
    "resisc45": {"train": 31_500},
    "diabetic_retinopathy_detection/btgraham-300": {"sample": 10} | THREE_SPLITS,
    "clevr": THREE_SPLITS | {"train": 70_000},
    "dmlab": THREE_SPLITS,
    "dsprites": {"train": 737_280},
    "kitti": THREE_SPLITS,
    "smallnorb": {"train": 1000, "test": 24_300},
}
# Distinct records, repeated: a prime, so that parts with a wrong start have other labels
PERIOD = 997


def builder_of(dataset, version=""):
    """Return TFDS's builder of the version that it would prepare.

    No TensorFlow is imported, and nothing is written.
    """
    name = f"{dataset}:{version}" if version else dataset
    return tfds.builder(
        name,
        data_dir="none",
        file_format="array_record",
    )


def keep_example(number, example):
    return example


def write(folder, dataset, version="", sizes=None, changed=keep_example):
    """Prepare a dataset and return its version.

    `changed` may alter the example of a number below `PERIOD`.
    """
    if sizes is None:
        sizes = SIZES[dataset]
    builder = builder_of(dataset, version)
    features = builder.info.features
    version = str(builder.version)
    serialized_info = features.get_serialized_info()
    serializer = example_serializer.ExampleSerializer(serialized_info)
    records = []
    for number in range(PERIOD):
        example = changed(number, example_of(features, number))
        encoded = features.encode_example(example)
        records.append(serializer.serialize_example(encoded))

    path = pathlib.Path(folder, dataset, version)
    path.mkdir(parents=True)
    template = tfds.core.ShardedFileTemplate(
        path,
        f"{builder.name}-{{SPLIT}}.{{FILEFORMAT}}-{{SHARD_X_OF_Y}}",
        builder.name,
        filetype_suffix="array_record",
    )
    infos = []
    for split, size in sizes.items():
        file = path / f"{builder.name}-{split}.array_record-00000-of-00001"
        write_repeated(file, records, size)
        num_bytes = file.stat().st_size
        infos.append(tfds.core.SplitInfo(split, [size], num_bytes, template))

    info = builder.info
    info.set_splits(tfds.core.SplitDict(infos))
    info.write_to_directory(path)
    return version


def write_repeated(file, records, size):
    """Write this number of records, which repeat the given ones."""
    writer = array_record_module.ArrayRecordWriter(str(file), "group_size:1024")
    for number in range(size):
        writer.write(records[number % len(records)])
    writer.close()


def example_of(features, number):
    """Return an example whose labels are its number.

    Objects are 3 to 10, at distances of 0.5 to 12.
    """
    return {name: value_of(name, feature, number) for name, feature in features.items()}


def value_of(name, feature, number):
    """Return the value of one feature of an example."""
    if isinstance(feature, tfds.features.Image):
        pixels = np.full((4, 6, feature.shape[-1]), number % 2, np.uint8)
        return encode(".png", pixels)
    if isinstance(feature, tfds.features.ClassLabel):
        return number % feature.num_classes
    if isinstance(feature, tfds.features.BBoxFeature):
        return tfds.features.BBox(0.0, 0.0, 1.0, 1.0)
    if isinstance(feature, tfds.features.Sequence):
        num_objects = 3 + number % 8
        return [example_of(feature.feature, number) for _ in range(num_objects)]
    if isinstance(feature, tfds.features.Text):
        return f"{name} {number}"

    distance = (1 + number % 24) / 2
    return np.full(feature.shape, distance, np.float32)
