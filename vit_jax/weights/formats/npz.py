"""`.npz` files: a ZIP archive with one `.npy` member for each array; metadata is the archive's comment.

NumPy and everyone else who reads such a file sees exactly the arrays.
"""

import contextlib
import os
import pathlib
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.weights.formats import archive as archives
from vit_jax.weights.formats import metadata as metadata_texts
from vit_jax.weights.formats import npy
from vit_jax.weights.formats.arrays import ArrayFile, StoredArray, check_fits, check_name
from vit_jax.weights.formats.encoding import describe
from vit_jax.weights.formats.failures import DAMAGED, naming, shown
from vit_jax.weights.formats.whole import write_whole

_SUFFIX = ".npy"
_UNIX, _PERMISSIONS = 3, 0o600 << 16  # the same on every system


class NpzFile(ArrayFile):
    """An open archive."""

    def __init__(
        self,
        path: pathlib.Path,
        arrays: Mapping[str, StoredArray],
        metadata: dict[str, Any],
        archive: zipfile.ZipFile,
        resources: contextlib.ExitStack,
    ):
        super().__init__(path, arrays, metadata, resources)
        self._archive = archive

    def _read(self, name: str) -> np.ndarray:
        with self._archive.open(f"{name}{_SUFFIX}") as stream:
            header = npy.read_header(stream)
            if header.array != self.arrays[name]:
                raise ValueError("it has changed since the file was opened.")
            return npy.read_data(stream, header)


def open_npz(path: pathlib.Path, *, memory_bytes: int | None = None) -> NpzFile:
    """Checks an archive and reads the headers of its arrays.

    Args:
      path: the file.
      memory_bytes: the arrays must not need more; None for the physical memory.

    Raises:
      ValueError: anything about the file is not as it should be.
    """
    with naming(str(path)), contextlib.ExitStack() as resources:
        file = resources.enter_context(archives.BoundedFile(path))
        archive = resources.enter_context(zipfile.ZipFile(file))
        archives.check(archive, file)
        arrays = {_array_name(member.filename): _stored_array(archive, member) for member in archive.infolist()}
        check_fits(arrays.values(), memory_bytes)
        metadata = metadata_texts.from_comment(archive.comment)
        return NpzFile(path, arrays, metadata, archive, resources.pop_all())


def write_npz(
    path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray], metadata: Mapping[str, Any] | None = None
) -> None:
    """Writes arrays, ordered by name and not compressed, whole or not at all; equal input gives equal bytes.

    bfloat16 is written as NumPy does: two bytes without a kind (`|V2`).

    Args:
      path: the file, replaced if it exists.
      arrays: by name; read one at a time.
      metadata: JSON values.

    Raises:
      ValueError: a name, a dtype or metadata that such a file cannot hold, or the system refuses to write.
    """
    with naming(str(path)):
        comment = metadata_texts.to_comment(metadata or {})
        for name in arrays:
            describe(name, arrays[name])
    with write_whole(path) as file, zipfile.ZipFile(file, "w") as archive:
        archive.comment = comment
        for name in sorted(arrays):
            member = zipfile.ZipInfo(f"{name}{_SUFFIX}")  # dated 1980: equal input, equal bytes
            member.create_system, member.external_attr = _UNIX, _PERMISSIONS
            with archive.open(member, "w", force_zip64=True) as stream:
                npy.write(stream, arrays[name])


def _array_name(member_name: str) -> str:
    if not member_name.endswith(_SUFFIX):
        raise ValueError(f"the member {shown(member_name)} is not an array: it does not end in {_SUFFIX}.")
    name = member_name.removesuffix(_SUFFIX)
    check_name(name)
    return name


def _stored_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> StoredArray:
    with naming(f"member {shown(member.filename)}"), archive.open(member) as stream:
        header = npy.read_header(stream)
        num_bytes = member.file_size - header.num_bytes
        if header.array.num_bytes != num_bytes:
            raise ValueError(
                f"its shape {header.array.shape} of {header.array.dtype} takes {header.array.num_bytes:,} bytes, "
                f"and it has {num_bytes:,}. {DAMAGED}"
            )
        return header.array
