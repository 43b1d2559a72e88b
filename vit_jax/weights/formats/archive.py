"""A ZIP archive that is what it says: members side by side inside the file, under proper names, not encrypted.

What is checked here is the frame. The data of a member is held to its checksum when it is read.
"""

import io
import os
import struct
import zipfile

from vit_jax.weights.formats.failures import DAMAGED, naming, repeated, shown

MAX_READ_BYTES = 4 * 2**20  # also of the table of contents: tens of thousands of arrays
MAX_DEFLATE_RATIO = 1032  # 258 bytes from two bits
_ENCRYPTED, _DESCRIPTOR = 0x1 | 0x40 | 0x2000, 0x8
_MAX_DESCRIPTOR_BYTES = 24
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_LOCAL_MAGIC, _END_MAGIC = b"PK\x03\x04", b"PK\x05\x06"
_END_BYTES = 22


class BoundedFile(io.FileIO):
    """A file that gives little at once, so that a lying length in a header cannot take memory."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Reads up to `size` bytes, or the rest.

        Raises:
          ValueError: that would be more than `MAX_READ_BYTES`.
        """
        if size is None or size < 0:
            size = max(0, os.fstat(self.fileno()).st_size - self.tell())
        if size > MAX_READ_BYTES:
            raise ValueError(
                f"a part of its frame takes {size:,} bytes; at most {MAX_READ_BYTES:,} are read. {DAMAGED}"
            )
        return super().read(size) or b""


def check(archive: zipfile.ZipFile, file: BoundedFile) -> None:
    """Holds the frame of an archive to the file it is in.

    Args:
      archive: open for reading.
      file: what it was opened on.

    Raises:
      ValueError: a member is odd, or the archive has gaps, overlaps, or more behind its end.
    """
    _check_end(archive, file)
    twice = repeated(member.filename for member in archive.infolist())
    if twice is not None:
        raise ValueError(f"the member {shown(twice)} is in it twice.")
    end, slack = 0, 0
    for member in sorted(archive.infolist(), key=lambda member: member.header_offset):
        with naming(f"member {shown(member.orig_filename)}"):
            _check_member(member)
            _check_adjacent(member.header_offset, end, slack)
            end = _data_offset(member, file) + member.compress_size
            slack = _MAX_DESCRIPTOR_BYTES if member.flag_bits & _DESCRIPTOR else 0
    with naming("its table of contents"):
        _check_adjacent(archive.start_dir, end, slack)


def _check_end(archive: zipfile.ZipFile, file: BoundedFile) -> None:
    """The end record lies where its comment leaves it, so nothing was cut off or appended."""
    file.seek(-_END_BYTES - len(archive.comment), io.SEEK_END)
    record = file.read(_END_BYTES)
    if record[:4] != _END_MAGIC or struct.unpack("<H", record[-2:])[0] != len(archive.comment):
        raise ValueError(f"the archive does not end where the file does. {DAMAGED}")


def _check_member(member: zipfile.ZipInfo) -> None:
    if member.flag_bits & _ENCRYPTED:
        raise ValueError("it is encrypted; write it without a password.")
    if member.orig_filename != member.filename:
        raise ValueError("its name is ambiguous.")
    if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise ValueError(
            f"it is compressed by method {member.compress_type}; stored (0) and deflated (8) members are read."
        )
    if member.compress_type == zipfile.ZIP_STORED:
        possible = member.file_size == member.compress_size
    else:
        possible = member.file_size <= MAX_DEFLATE_RATIO * member.compress_size
    if not possible:
        raise ValueError(
            f"it claims to hold {member.file_size:,} bytes, which its {member.compress_size:,} in the file cannot be. "
            f"{DAMAGED}"
        )


def _check_adjacent(offset: int, end: int, slack: int) -> None:
    if not 0 <= offset - end <= slack:
        relation = "overlaps the one before" if offset < end else "does not follow the one before"
        raise ValueError(f"it starts at byte {offset:,} and {relation}, which ends at {end:,}. {DAMAGED}")


def _data_offset(member: zipfile.ZipInfo, file: BoundedFile) -> int:
    """Where the data starts, by the header before it, which must agree with the table of contents."""
    file.seek(member.header_offset)
    magic, _, flags, method, *_, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    if magic != _LOCAL_MAGIC or (flags, method) != (member.flag_bits, member.compress_type):
        raise ValueError(f"its own header differs from the table of contents. {DAMAGED}")
    return member.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
