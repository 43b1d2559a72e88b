"""Small datasets of the very form of TFDS's own: the same names, configs, versions, splits and features."""

import tensorflow_datasets as tfds

NAMES_FILE = tfds.core.tfds_path("datasets/imagenet2012/labels.txt")
VERSIONS = {
    "imagenet2012": "5.1.0",
    "imagenet2012_real": "1.0.0",
    "imagenet_v2": "3.0.0",
    "imagenet_a": "0.1.0",
}
VERSIONS |= {"imagenet_r": "0.2.0", "imagenet_sketch": "1.0.0"}
SPLITS = {"imagenet2012": "validation", "imagenet2012_real": "validation"}  # of the others "test"


def features_of(name):
    label = tfds.features.ClassLabel(names_file=NAMES_FILE)
    several = tfds.features.Sequence(tfds.features.ClassLabel(names_file=NAMES_FILE))
    labels = (
        {"original_label": label, "real_label": several}
        if name == "imagenet2012_real"
        else {"label": label}
    )
    image = (
        tfds.features.Image()
        if name == "imagenet_sketch"
        else tfds.features.Image(encoding_format="jpeg")
    )

    return tfds.features.FeaturesDict(
        {
            "image": image,
            **labels,
            "file_name": tfds.features.Text(),
        }
    )


def prepare(data_dir, dataset, examples):
    """Writes examples, dictionaries of the features, as `vit-jax prepare` would."""
    name_of_it, _, config = dataset.partition("/")

    class Builder(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        name = name_of_it
        VERSION = tfds.core.Version(VERSIONS[name_of_it])
        BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=config)] if config else []

        def _info(self):
            return tfds.core.DatasetInfo(builder=self, features=features_of(name_of_it))

        def _split_generators(self, dl_manager):
            return {SPLITS.get(name_of_it, "test"): enumerate(examples)}

        def _generate_examples(self):
            raise NotImplementedError

    Builder(data_dir=str(data_dir), file_format="array_record").download_and_prepare()
