"""Small datasets with TFDS's names, configs, versions, splits and features."""

import tensorflow_datasets as tfds

NAMES_FILE = tfds.core.tfds_path("datasets/imagenet2012/labels.txt")
VERSIONS = {
    "imagenet2012": "5.1.0",
    "imagenet2012_real": "1.0.0",
    "imagenet_v2": "3.0.0",
    "imagenet_a": "0.1.0",
    "imagenet_r": "0.2.0",
    "imagenet_sketch": "1.0.0",
}
SPLITS = {  # "test" for the others
    "imagenet2012": "validation",
    "imagenet2012_real": "validation",
}


def build_features(name):
    label = tfds.features.ClassLabel(names_file=NAMES_FILE)
    features = {
        "image": tfds.features.Image(encoding_format="jpeg"),
        "label": label,
        "file_name": tfds.features.Text(),
    }
    if name == "imagenet_sketch":
        features["image"] = tfds.features.Image()
    if name == "imagenet2012_real":
        del features["label"]
        features["original_label"] = label
        features["real_label"] = tfds.features.Sequence(
            tfds.features.ClassLabel(names_file=NAMES_FILE)
        )
    return tfds.features.FeaturesDict(features)


def prepare(data_dir, dataset, examples):
    """Write examples, dictionaries of the features, as `vit-jax prepare` would."""
    dataset_name, _, config = dataset.partition("/")

    class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        name = dataset_name
        VERSION = tfds.core.Version(VERSIONS[dataset_name])
        BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=config)] if config else []

        def _info(self):
            return tfds.core.DatasetInfo(builder=self, features=build_features(dataset_name))

        def _split_generators(self, dl_manager):
            return {SPLITS.get(dataset_name, "test"): enumerate(examples)}

        def _generate_examples(self):
            raise NotImplementedError

    Builder(data_dir=str(data_dir), file_format="array_record").download_and_prepare()
