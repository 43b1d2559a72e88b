"""`.npz` files: a ZIP archive with a `.npy` member for each array, and metadata as its comment.

NumPy reads and writes the arrays. Before it does, the directory of the archive and the header of
every array are compared with the size of the file, so that neither can claim memory; nothing is
unpickled.
"""

import contextlib
import os
import pathlib
import struct
import warnings
import zipfile
from collections.abc import Mapping
from typing import BinaryIO

import numpy as np

from vit_jax.storage.files import open_atomically, open_regular
from vit_jax.weights.formats import metadata as metadata_texts
from vit_jax.weights.formats import stored
from vit_jax.weights.formats.stored import BFLOAT16, DAMAGED, ArrayFile, StoredArray, naming, quote

# zipfile has no public name for the record that ends an archive, which is needed before it reads
# the directory: checked with Python 3.11 to 3.14. Places in its list: size of the directory, size
# of the comment, position.
PRIVATE = "_EndRecData"
_DIRECTORY_SIZE = 5
_COMMENT_SIZE = 7
_POSITION = 9

# Most bytes from one; deflate makes 258 from two bits.
_RATIOS = {
    zipfile.ZIP_STORED: 1,
    zipfile.ZIP_DEFLATED: 1032,
}
MAX_HEADER_BYTES = 10_000  # the limit of NumPy
# zipfile reads the directory as a whole, 30,000 entries a second.
MAX_DIRECTORY_BYTES = 256 * stored.MAX_ARRAYS
_SUFFIX = ".npy"
_DESCRIPTOR = 0x8
_MAX_DESCRIPTOR_BYTES = 24
_LOCAL_HEADER_BYTES = 30
_END_BYTES = 22
_UNIX = 3
_PERMISSIONS = 0o600 << 16  # the same on every system
# Version 3 has the layout of 2; it allows names of fields that no array here has.
_HEADERS = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
    (3, 0): np.lib.format.read_array_header_2_0,
}


def read_headers(path: pathlib.Path, resources: contextlib.ExitStack) -> ArrayFile:
    """Open and check an archive and read the headers of its arrays; `resources` close it."""
    file = resources.enter_context(open_regular(path))
    _check_end(file)
    archive = resources.enter_context(zipfile.ZipFile(file))
    stored.check_number(len(archive.infolist()))
    _check_members(archive, file)

    arrays = {}
    for member in archive.infolist():
        name = member.filename.removesuffix(_SUFFIX)
        arrays[name] = _read_header(archive, member)

    def read(name: str) -> np.ndarray:
        return _read_array(archive, name, arrays[name])

    metadata = metadata_texts.decode_comment(archive.comment)
    return ArrayFile(path, arrays, metadata, read)


def _check_end(file: BinaryIO) -> None:
    """Raise ValueError unless the directory has a possible size and the archive ends the file."""
    end = getattr(zipfile, PRIVATE)(file)
    if not end:  # ZipFile raises
        return

    directory_bytes = end[_DIRECTORY_SIZE]
    if directory_bytes > MAX_DIRECTORY_BYTES:
        raise ValueError(f"its directory takes {directory_bytes:,} bytes, more than any network's.")
    archive_bytes = end[_POSITION] + _END_BYTES + end[_COMMENT_SIZE]
    if archive_bytes != os.fstat(file.fileno()).st_size:
        raise ValueError(f"the archive does not end where the file does. {DAMAGED}")


def _read_array(archive: zipfile.ZipFile, name: str, expected: StoredArray) -> np.ndarray:
    """Return an array of an archive, which must still have the expected shape and dtype."""
    with (
        archive.open(f"{name}{_SUFFIX}") as stream,
        warnings.catch_warnings(action="ignore"),  # about headers of Python 2
    ):
        array = np.lib.format.read_array(
            stream,
            allow_pickle=False,
            max_header_size=MAX_HEADER_BYTES,
        )
        has_more = stream.read(1) != b""  # reading the end compares the checksum
        found = StoredArray(array.shape, _find_dtype(array.dtype))
        if has_more or found != expected:
            raise ValueError("it has changed since the file was opened.")

    if array.dtype.kind == "V":
        array = array.view(BFLOAT16)
    return array.astype(expected.dtype, order="C", copy=False)


def write_npz(
    path: str | os.PathLike[str],
    arrays: Mapping[str, np.ndarray],
    metadata: Mapping[str, object] | None = None,
) -> None:
    """Write arrays, ordered by name and not compressed, completely or not at all.

    Equal input gives equal bytes. bfloat16 is written as NumPy does: two bytes without a kind
    (`|V2`).

    Raises:
      ValueError: a name, a dtype or metadata that such a file cannot hold, or the system cannot
        write it.
    """
    with naming(str(path)):
        comment = metadata_texts.encode_comment(metadata or {})
        ordered = stored.prepare_arrays(arrays)
    with open_atomically(path) as file, zipfile.ZipFile(file, "w") as archive:
        archive.comment = comment
        for name, array in ordered.items():
            member = zipfile.ZipInfo(f"{name}{_SUFFIX}")  # dated 1980: equal input, equal bytes
            member.create_system = _UNIX
            member.external_attr = _PERMISSIONS
            plain = array
            if array.dtype == BFLOAT16:
                plain = array.view("V2")
            with archive.open(member, "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, plain, version=(1, 0), allow_pickle=False)


def _check_members(archive: zipfile.ZipFile, file: BinaryIO) -> None:
    """Raise ValueError unless members fill the file up to the directory, side by side.

    Their sizes must be possible.
    """
    members = sorted(archive.infolist(), key=lambda member: member.header_offset)
    names = {member.filename for member in members}
    if len(names) < len(members):
        raise ValueError(f"a member is in it twice. {DAMAGED}")

    end = 0
    slack = 0
    for member in members:
        with naming(f"member {quote(member.orig_filename)}"):
            _check_start(member.header_offset, end, slack)
            _check_sizes(member)
            end = _find_end(member, file)
        has_descriptor = member.flag_bits & _DESCRIPTOR
        slack = _MAX_DESCRIPTOR_BYTES if has_descriptor else 0
    with naming("its directory"):
        _check_start(archive.start_dir, end, slack)


def _check_start(start: int, end: int, slack: int) -> None:
    """Raise ValueError unless a part starts at the end of the one before it, but for some slack."""
    if not 0 <= start - end <= slack:
        raise ValueError(
            f"it starts at byte {start:,}, and the part before it ends at {end:,}. {DAMAGED}"
        )


def _check_sizes(member: zipfile.ZipInfo) -> None:
    """Raise ValueError unless a member can be as large as it claims."""
    ratio = _RATIOS.get(member.compress_type, -1)
    if member.file_size > ratio * member.compress_size:
        raise ValueError(
            f"it claims to hold {member.file_size:,} bytes in {member.compress_size:,}, "
            f"compressed by method {member.compress_type}: must be method 0 or 8, "
            f"and possible with it. {DAMAGED}"
        )


def _find_end(member: zipfile.ZipInfo, file: BinaryIO) -> int:
    """Return the byte after a member, by the lengths that its local header states."""
    start = member.header_offset
    file.seek(start + _LOCAL_HEADER_BYTES - 4)
    name_bytes, extra_bytes = struct.unpack("<2H", file.read(4))
    return start + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes + member.compress_size


def _read_header(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> StoredArray:
    """Return the shape and dtype that the header of a member states."""
    name = member.orig_filename  # zipfile cuts `filename` at a zero byte, which no name may have
    if not name.endswith(_SUFFIX):
        raise ValueError(f"the member {quote(name)} is not an array: it does not end in {_SUFFIX}.")
    stored.check_name(name.removesuffix(_SUFFIX))

    with naming(f"member {quote(name)}"), archive.open(member) as stream:
        version = np.lib.format.read_magic(stream)
        if version not in _HEADERS:
            raise ValueError(
                f"it is of version {version} of the .npy format; versions 1, 2 and 3 are read."
            )
        with warnings.catch_warnings(action="ignore"):
            shape, _, dtype = _HEADERS[version](stream, max_header_size=MAX_HEADER_BYTES)
        array = StoredArray(tuple(map(int, shape)), _find_dtype(dtype))

        num_bytes = member.file_size - stream.tell()
        if min(array.shape, default=0) < 0 or array.num_bytes != num_bytes:
            raise ValueError(
                f"its shape {array.shape} of {array.dtype} takes {array.num_bytes:,} bytes, "
                f"and it has {num_bytes:,}. {DAMAGED}"
            )
        return array


def _find_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype in the machine's byte order.

    NumPy writes bfloat16, which it does not know, as two bytes.
    """
    native = dtype.newbyteorder("=")
    if dtype == np.dtype("V2"):
        native = BFLOAT16
    if native not in stored.DTYPES:
        raise ValueError(f"it is of type {quote(str(dtype))}, which is not read. {stored.ALLOWED}")
    return native
