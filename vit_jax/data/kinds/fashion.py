"""Fashion-MNIST: 60,000 training and 10,000 test images of clothes, grey, 28 x 28 pixels.

The four files are those of Zalando Research (Xiao et al., 2017, arXiv:1708.07747). Debian's package
`dataset-fashion-mnist` has the same content. Digests of the content are checked whenever files are
opened.
"""

import functools
import gzip
import hashlib
import io
import logging
import urllib.request
import zlib
from pathlib import Path
from typing import cast

from vit_jax.data.kinds.array_files import explain_damage, open_stream
from vit_jax.data.kinds.array_listing import Idx
from vit_jax.data.kinds.listing import parse_split
from vit_jax.data.records import Source
from vit_jax.data.subset import select_part
from vit_jax.storage import is_address
from vit_jax.storage.files import cache_folder, expand_path, make_folder, write_atomically

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com"
"""Address in the README of the data set."""
CLASS_NAMES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
DIGESTS = {
    "train-images-idx3-ubyte": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
"""SHA-256 of each file, decompressed."""
_MAX_FILE_BYTES = 2**26
"""Limit of a downloaded file; the largest one has 26 MB."""
_TIMEOUT_SECONDS = 60


def open_fashion(name: str, split: str, data_dir: str | None) -> Source:
    """Open "train" or "test", or a part such as "train[:90%]", chosen by hashes in each class.

    Args:
      name: "", because the data have no further name.
      split: the split.
      data_dir: folder with the files; None: Debian's folder or the user's cache, into which missing
        files are downloaded.

    Raises:
      ValueError: no such split; files are missing, damaged or of other data.
    """
    whole, low, high = parse_split(split)
    listing = Idx(find_folder(data_dir))
    if whole not in listing.arrays:
        raise ValueError(f"Fashion-MNIST has no split {split!r}; it has 'train' and 'test'.")
    for stored in listing.arrays[whole]:
        _require_digest(stored.path, stored.state)
    source = listing.read(whole, CLASS_NAMES)
    if (low, high) == (0.0, 1.0):
        return source
    return select_part(source, low, high, seed=0)


def find_folder(data_dir: str | None = None) -> Path:
    """Return the folder with the files; download them into the user's cache if there is none.

    Raises:
      ValueError: `data_dir` does not have them, or they cannot be downloaded.
    """
    if data_dir is not None:
        if is_address(data_dir):
            raise ValueError(
                f"input.data_dir={data_dir}: must be a folder of this machine for Fashion-MNIST."
            )
        folder = expand_path(data_dir)
        Idx(folder).require()
        return folder
    if Idx(DEBIAN_FOLDER).exists():
        return DEBIAN_FOLDER
    folder = cache_folder("fashion-mnist")
    for name in DIGESTS:
        path = folder / f"{name}.gz"
        if not path.exists():
            _download(f"{URL}/{path.name}", path)
    return folder


@functools.lru_cache(len(DIGESTS))
def _require_digest(path: str, state: tuple[int, ...]) -> None:
    """Raise ValueError for a file with other content; the state is part of the cache's key."""
    name = Path(path).name.removesuffix(".gz").replace(".idx", "-idx")
    with explain_damage(path), open_stream(path) as stream:
        digest = hashlib.file_digest(cast(io.BufferedReader, stream), "sha256").hexdigest()
    if digest != DIGESTS[name]:
        raise ValueError(
            f"{path}: is not the file of Fashion-MNIST: the SHA-256 of its content is {digest}, "
            f"not {DIGESTS[name]}. Remove it to download it again, or read it by idx:FOLDER."
        )


def _download(address: str, path: Path) -> None:
    """Download a file, which replaces `path` if its content has the known digest.

    Raises:
      ValueError: the address does not answer, or has other content.
    """
    logging.getLogger(__name__).info("downloading %s", address)
    try:
        with urllib.request.urlopen(address, timeout=_TIMEOUT_SECONDS) as answer:
            compressed = answer.read(_MAX_FILE_BYTES)
        content = gzip.decompress(compressed)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(
            f"{address}: cannot be downloaded ({error}). Install Debian's package "
            "dataset-fashion-mnist, or copy the four files and add --config.input.data_dir=FOLDER."
        ) from error
    digest = hashlib.sha256(content).hexdigest()
    if digest != DIGESTS[path.stem]:
        raise ValueError(f"{address}: has the SHA-256 {digest}, not {DIGESTS[path.stem]}.")
    with make_folder(path.parent):
        write_atomically(path, compressed)
