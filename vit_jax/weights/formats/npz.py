"""`.npz` files: a ZIP archive with one `.npy` member for each array; metadata is the archive's comment.

NumPy reads and writes the arrays. Before it does, the directory of the archive and the header of every array are
compared with the size of the file, so that neither can claim memory; nothing is unpickled.
"""

import contextlib
import os
import pathlib
import struct
import warnings
import zipfile
from collections.abc import Mapping
from typing import IO, Any, BinaryIO

import numpy as np

from vit_jax.files import open_atomically, open_regular
from vit_jax.weights.formats import arrays as stored_arrays
from vit_jax.weights.formats import metadata as metadata_texts
from vit_jax.weights.formats.arrays import BFLOAT16, DAMAGED, ArrayFile, StoredArray, naming, shown

MAX_DEFLATE_RATIO = 1032  # 258 bytes from two bits
MAX_HEADER_BYTES = 10_000  # NumPy's own limit
MAX_DIRECTORY_BYTES = 256 * stored_arrays.MAX_ARRAYS  # zipfile reads it as a whole, 30,000 entries a second
_DIRECTORY_SIZE = 5  # the place in what zipfile finds at the end of an archive
_SUFFIX = ".npy"
_DESCRIPTOR, _MAX_DESCRIPTOR_BYTES = 0x8, 24
_LOCAL_HEADER_BYTES, _END_BYTES = 30, 22
_UNIX, _PERMISSIONS = 3, 0o600 << 16  # the same on every system
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
    (3, 0): np.lib.format.read_array_header_2_0,  # the same layout; it allows names of fields that no array here has
}


def read_headers(path: pathlib.Path, resources: contextlib.ExitStack) -> ArrayFile:
    """Opens and checks an archive and reads the headers of its arrays; `resources` close it."""
    file = resources.enter_context(open_regular(path))
    if (end := zipfile._EndRecData(file)) and end[_DIRECTORY_SIZE] > MAX_DIRECTORY_BYTES:  # type: ignore[attr-defined]
        raise ValueError(f"its directory takes {end[_DIRECTORY_SIZE]:,} bytes, more than any network's.")
    archive = resources.enter_context(zipfile.ZipFile(file))
    stored_arrays.check_number(len(archive.infolist()))
    _check_members(archive, file)
    arrays = {member.filename.removesuffix(_SUFFIX): _stored_array(archive, member) for member in archive.infolist()}

    def read(name: str) -> np.ndarray:
        with archive.open(f"{name}{_SUFFIX}") as stream, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # headers that Python 2 wrote
            array = np.lib.format.read_array(stream, allow_pickle=False, max_header_size=MAX_HEADER_BYTES)
            if stream.read(1) or (array.shape, _dtype(array.dtype)) != arrays[name]:  # the end has the checksum
                raise ValueError("it has changed since the file was opened.")
        array = array.view(BFLOAT16) if array.dtype.kind == "V" else array
        return array.astype(arrays[name].dtype, order="C", copy=False)

    return ArrayFile(path, arrays, metadata_texts.from_comment(archive.comment), read)


def write_npz(
    path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray], metadata: Mapping[str, Any] | None = None
) -> None:
    """Writes arrays, ordered by name and not compressed, completely or not at all; equal input gives equal bytes.

    bfloat16 is written as NumPy does: two bytes without a kind (`|V2`).

    Raises:
      ValueError: a name, a dtype or metadata that such a file cannot hold, or the system refuses to write.
    """
    with naming(str(path)):
        comment, stored = metadata_texts.to_comment(metadata or {}), stored_arrays.to_stored(arrays)
    with open_atomically(path) as file, zipfile.ZipFile(file, "w") as archive:
        archive.comment = comment
        for name, array in stored.items():
            member = zipfile.ZipInfo(f"{name}{_SUFFIX}")  # dated 1980: equal input, equal bytes
            member.create_system, member.external_attr = _UNIX, _PERMISSIONS
            plain = array.view("V2") if array.dtype == BFLOAT16 else array
            with archive.open(member, "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, plain, version=(1, 0), allow_pickle=False)


def _check_members(archive: zipfile.ZipFile, file: BinaryIO) -> None:
    """Members are side by side from the start of the file to the directory: none hidden, shared or of a false size."""
    if len(archive.namelist()) != len(set(archive.namelist())):
        raise ValueError(f"a member is in it twice. {DAMAGED}")
    file.seek(-_END_BYTES - len(archive.comment), os.SEEK_END)
    record = file.read(_END_BYTES)
    if record[:4] != b"PK\x05\x06" or record[-2:] != len(archive.comment).to_bytes(2, "little"):
        raise ValueError(f"the archive does not end where the file does. {DAMAGED}")
    end, slack = 0, 0
    for member in sorted(archive.infolist(), key=lambda member: member.header_offset):
        with naming(f"member {shown(member.orig_filename)}"):
            ratio = {zipfile.ZIP_STORED: 1, zipfile.ZIP_DEFLATED: MAX_DEFLATE_RATIO}.get(member.compress_type)
            if ratio is None:
                raise ValueError(f"it is compressed by method {member.compress_type}; only 0 and 8 are read.")
            if member.file_size > ratio * member.compress_size:
                raise ValueError(
                    f"it claims to hold {member.file_size:,} bytes, which its {member.compress_size:,} in the file "
                    f"cannot be. {DAMAGED}"
                )
            if member.orig_filename != member.filename:
                raise ValueError("its name is ambiguous.")
            _check_adjacent(member.header_offset, end, slack)
            file.seek(member.header_offset + _LOCAL_HEADER_BYTES - 4)
            name_and_extra_bytes = sum(struct.unpack("<2H", file.read(4)))
            end = member.header_offset + _LOCAL_HEADER_BYTES + name_and_extra_bytes + member.compress_size
            slack = _MAX_DESCRIPTOR_BYTES if member.flag_bits & _DESCRIPTOR else 0
    with naming("its directory"):
        _check_adjacent(archive.start_dir, end, slack)


def _check_adjacent(offset: int, end: int, slack: int) -> None:
    if not 0 <= offset - end <= slack:
        raise ValueError(f"it starts at byte {offset:,}, and what is before it ends at {end:,}. {DAMAGED}")


def _stored_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> StoredArray:
    if not member.filename.endswith(_SUFFIX):
        raise ValueError(f"the member {shown(member.filename)} is not an array: it does not end in {_SUFFIX}.")
    stored_arrays.check_name(member.filename.removesuffix(_SUFFIX))
    with naming(f"member {shown(member.filename)}"), archive.open(member) as stream:
        array = _read_header(stream)
        num_bytes = member.file_size - stream.tell()
        if min(array.shape, default=0) < 0 or array.num_bytes != num_bytes:
            raise ValueError(
                f"its shape {array.shape} of {array.dtype} takes {array.num_bytes:,} bytes, "
                f"and it has {num_bytes:,}. {DAMAGED}"
            )
        return array


def _read_header(stream: IO[bytes]) -> StoredArray:
    version = np.lib.format.read_magic(stream)
    if version not in _HEADERS:
        raise ValueError(f"it is of version {version} of the .npy format; versions 1, 2 and 3 are read.")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shape, _, dtype = _HEADERS[version](stream, max_header_size=MAX_HEADER_BYTES)
    return StoredArray(tuple(map(int, shape)), _dtype(dtype))


def _dtype(stored: np.dtype) -> np.dtype:
    """Two bytes of no kind are how NumPy writes a bfloat16, which it does not know."""
    dtype = BFLOAT16 if stored == np.dtype("V2") else stored.newbyteorder("=")
    if dtype not in stored_arrays.DTYPES:
        raise ValueError(f"it is of type {shown(str(stored))}, which is not read. {stored_arrays.ALLOWED}")
    return dtype
