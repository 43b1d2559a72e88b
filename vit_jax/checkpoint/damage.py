"""Tell a damaged checkpoint from other errors: a failing disk, a missing device, a bug."""

import errno
import os
import pathlib
import re
import stat
from collections.abc import Iterator
from typing import Any, cast

import jax

from vit_jax.storage.files import (
    MAX_JSON_BYTES,
    is_in_bucket,
    parse_json,
    read_bounded,
    read_json,
)
from vit_jax.text.printable import first_line

METADATA = "metadata"
_DATA = "d"  # the folder of the files that hold arrays
_TREE = "_METADATA"  # orbax's description of an item
_DESCRIPTIONS = ("_CHECKPOINT_METADATA", _TREE, "_sharding", "manifest.ocdbt", METADATA, "metrics")
# Errors of the system that are damage.
_MISSING = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}
# tensorstore raises ValueError for every failure. The text begins with the status, except
# INVALID_ARGUMENT.
_STATUS = re.compile(r"(?:([A-Z_]+): )?Error (?:opening|reading|decoding|parsing) ")
_DAMAGE = {None, "DATA_LOSS", "FAILED_PRECONDITION", "NOT_FOUND", "OUT_OF_RANGE"}
# Errors of devices by JAX; subclasses have other meanings.
_DEVICE_ERRORS = (RuntimeError, jax.errors.JaxRuntimeError)
_SHARDING = "_sharding"  # orbax's description of the layout of arrays
_ARRAYS = "array_metadatas"  # orbax's folder of shapes of pieces
# Files by a part of the name of the function that parses them.
_PARSERS = {"array_metadata": _ARRAYS, "sharding": _SHARDING}
_MAX_ERROR_CHARACTERS = 200
_SPECIFICATION = re.compile(r" \[tensorstore_spec|\. See full")
_ERROR_NUMBER = re.compile(r"os_error_code='(\d+)'|OS error (\d+)")


class DamagedCheckpoint(ValueError):
    """A checkpoint that is incomplete or holds other bytes than were written.

    Args:
      folder: the checkpoint.
      problem: the damaged part, in a few words.
    """

    def __init__(self, folder: pathlib.Path, problem: str):
        super().__init__(f"{folder} is damaged: {problem}.")
        self.problem = problem


def describe_damage(error: Exception, folder: pathlib.Path) -> str:
    """Return the damage of files in `folder` that an error reports; raise the error otherwise.

    orbax and tensorstore parse files without checking them, so that a changed byte can end in any
    exception. Every exception means damage, except errors of the system, of memory and of a device.

    Raises:
      OSError: an error of the system, which tensorstore reports by a ValueError.
    """
    cause = error
    if type(error) is Exception and isinstance(error.__cause__, Exception):
        cause = error.__cause__
    system_error = _find_system_error(cause, folder)
    if system_error is not None:
        raise system_error from error
    if not _means_damage(cause):
        raise error
    if isinstance(cause, DamagedCheckpoint | OSError) or str(folder) in str(cause):
        return describe_error(cause)  # its text names the file
    file = _name_file(folder, cause)
    return f"{file} cannot be parsed ({type(cause).__name__}: {describe_error(cause)})"


def _find_system_error(error: Exception, folder: pathlib.Path) -> OSError | None:
    """Return the error of the system, other than damage, that an error of tensorstore reports."""
    if not isinstance(error, ValueError):
        return None
    status = _STATUS.match(str(error))
    if status is None:
        return None
    number = _find_error_number(str(error))
    if number in _MISSING:
        return None
    if number is None and status[1] in _DAMAGE:
        return None
    number = number or errno.EIO
    return OSError(number, f"{os.strerror(number)} ({describe_error(error)})", str(folder))


def _find_error_number(text: str) -> int | None:
    """Return the first number of an error of the system in a text of tensorstore."""
    for groups in _ERROR_NUMBER.findall(text):
        for number in groups:
            if number:
                return int(number)
    return None


def _means_damage(error: Exception) -> bool:
    """Return whether an error means damaged files, unless tensorstore reports one of the system."""
    if isinstance(error, FileNotFoundError):  # an error of orbax, without a number
        return True
    if isinstance(error, OSError):
        return error.errno in _MISSING
    return not isinstance(error, MemoryError) and type(error) not in _DEVICE_ERRORS


def describe_item_damage(error: Exception, item: pathlib.Path) -> str:
    """Return the damage that an error reports while orbax reads the description of an item.

    It is the description itself if that lacks a key; otherwise the damage of `describe_damage`.
    """
    is_parsed = isinstance(
        error, (AttributeError, LookupError, RecursionError, TypeError, ValueError)
    )
    if is_parsed and not _STATUS.match(str(error)) and not _is_description(item / _TREE):
        return f"{item.name}/{_TREE} cannot be parsed"
    return describe_damage(error, item)


def _name_file(folder: pathlib.Path, error: BaseException) -> str:
    """Return the description that is no JSON or whose parser failed; otherwise the folder."""
    for file in folder.rglob("*"):
        if file.name in (_TREE, _SHARDING) or file.parent.name == _ARRAYS:
            try:
                read_json(file)
            except ValueError:
                return str(file.relative_to(folder.parent))

    functions = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        functions.append(f"{code.co_filename}{code.co_name}")
        trace = trace.tb_next
    for part, name in _PARSERS.items():
        if any(part in function for function in functions):
            return name
    return folder.name


def _is_description(file: pathlib.Path) -> bool:
    try:
        entries = parse_json(read_bounded(file, MAX_JSON_BYTES))["tree_metadata"].values()
        for entry in entries:
            for key in entry["key_metadata"]:
                _ = key["key"], key["key_type"]
            value = entry["value_metadata"]
            _ = value["value_type"], value["skip_deserialize"]
    except (AttributeError, LookupError, TypeError, ValueError):
        return False
    return True


def require_plain_files(folder: pathlib.Path) -> None:
    """Raise ValueError for special files and for descriptions of a wrong size.

    A link to a device would be read without end.
    """
    for path, status in _list_files(folder):
        problem = _find_problem(path, status)
        if problem:
            raise ValueError(f"{path.relative_to(folder)} {problem}")


def _list_files(folder: pathlib.Path) -> Iterator[tuple[pathlib.Path, os.stat_result]]:
    """Yield all paths below a folder with their status."""
    if is_in_bucket(folder):
        yield from cast(Any, folder).objects()
        return
    for path in folder.rglob("*"):
        yield path, path.stat()


def _find_problem(path: pathlib.Path, status: os.stat_result) -> str:
    """Return the reason not to read a path; "" without any."""
    if stat.S_ISDIR(status.st_mode):
        return "is a link to a folder" if path.is_symlink() else ""
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file"
    size = status.st_size
    is_empty = size == 0 and path.name in _DESCRIPTIONS
    is_too_large = size > MAX_JSON_BYTES and path.parent.name != _DATA
    if is_empty or is_too_large:
        return f"has {size} bytes"
    return ""


def describe_error(error: BaseException) -> str:
    """Return the text of an error in one line, without the specification of an array."""
    if isinstance(error, DamagedCheckpoint):
        return error.problem
    text, *_ = _SPECIFICATION.split(first_line(error))
    return text[:_MAX_ERROR_CHARACTERS].rstrip(".")
