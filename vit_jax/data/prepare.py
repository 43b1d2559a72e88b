"""Writes a dataset of the TFDS catalogue as ArrayRecord files, once; reading them needs no TensorFlow."""

import difflib
import importlib.util

import tensorflow_datasets as tfds

from vit_jax.data import digits


def prepare(name: str, *, data_dir: str | None = None, manual_dir: str | None = None) -> str:
    """Downloads and prepares a dataset, or finds it prepared.

    Args:
      name: "digits", or a dataset of the catalogue such as "cifar10" or "imagenet2012".
      data_dir: where TFDS keeps prepared datasets; None: its own default.
      manual_dir: of archives that must be downloaded by hand (ImageNet's two tar files).

    Returns:
      The folder of the prepared dataset.

    Raises:
      ValueError: unknown name, or TensorFlow, which the catalogue's own builders need, is not installed.
    """
    if name == "digits":
        return str(digits.prepare(data_dir))
    catalogue = tfds.list_builders(with_community_datasets=False)  # those of the community would be downloaded
    family = name.partition("/")[0].partition(":")[0]
    if family not in catalogue:
        near = difflib.get_close_matches(family, [*catalogue, "digits"], n=3)
        raise ValueError(f"TFDS has no dataset {name!r}. Nearest: {', '.join(near) or 'none'}.")
    builder = tfds.builder(name, data_dir=data_dir, file_format="array_record")
    if not builder.is_prepared():
        if importlib.util.find_spec("tensorflow") is None:
            raise ValueError(
                f"Preparing {name!r} needs TensorFlow, once, because TFDS's own builders do (training does not): "
                f"pip install 'vit_jax[prepare]', best in an environment of its own, and run the command again."
            )
        download = tfds.download.DownloadConfig(manual_dir=manual_dir)
        builder.download_and_prepare(download_config=download)
    return str(builder.data_path)
