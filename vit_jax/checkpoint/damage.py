"""Tell a damaged checkpoint from an error that says nothing about its files: a failing disk, no device, a bug."""

import errno
import os
import pathlib
import re
import stat

import jax

from vit_jax.storage.buckets import BucketPath
from vit_jax.storage.files import MAX_JSON_BYTES, parse_json, read_bounded, read_json
from vit_jax.text.printable import first_line

METADATA = "metadata"
_DATA = "d"  # the folder of the files that hold arrays
_TREE = "_METADATA"  # orbax's description of an item
_DESCRIPTIONS = ("_CHECKPOINT_METADATA", _TREE, "_sharding", "manifest.ocdbt", METADATA, "metrics")
_MISSING = {
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
}  # errors of the system that are damage
# tensorstore raises ValueError for every failure. Its text begins with the status, except INVALID_ARGUMENT.
_STATUS = re.compile(r"(?:([A-Z_]+): )?Error (?:opening|reading|decoding|parsing) ")
_DAMAGE = {None, "DATA_LOSS", "FAILED_PRECONDITION", "NOT_FOUND", "OUT_OF_RANGE"}
_OF_DEVICES = (
    RuntimeError,
    jax.errors.JaxRuntimeError,
)  # classes of errors of JAX; subclasses have other meanings
_SHARDING = "_sharding"  # orbax's description of the layout of arrays
_ARRAYS = "array_metadatas"  # orbax's folder of shapes of pieces
_PARSERS = {
    "array_metadata": _ARRAYS,
    "sharding": _SHARDING,
}  # part of the name of a function, and what it parses
_ERROR_NUMBER = re.compile(r"os_error_code='(\d+)'|OS error (\d+)")


class DamagedCheckpoint(ValueError):
    """A checkpoint that is incomplete or holds other bytes than were written.

    Args:
      folder: the checkpoint.
      problem: what is damaged, in a few words.
    """

    def __init__(self, folder: pathlib.Path, problem: str):
        super().__init__(f"{folder} is damaged: {problem}.")
        self.problem = problem


def damage_of(error: Exception, folder: pathlib.Path) -> str:
    """Return the damage of files in `folder` that an error reports; raise the error if it reports none.

    orbax and tensorstore parse files without checking them, so that a changed byte can end in any exception. Every
    exception means damage but errors of the system, of memory and of a device.

    Raises:
      OSError: in the place of a ValueError by which tensorstore reports an error of the system.
    """
    cause = (
        error.__cause__
        if type(error) is Exception and isinstance(error.__cause__, Exception)
        else error
    )
    status = _STATUS.match(str(cause)) if isinstance(cause, ValueError) else None
    if isinstance(cause, OSError):
        is_damage = (
            isinstance(cause, FileNotFoundError) or cause.errno in _MISSING
        )  # orbax's has no number
    elif status:
        number = next(
            (
                int(number)
                for pair in _ERROR_NUMBER.findall(str(cause))
                for number in pair
                if number
            ),
            None,
        )
        is_damage = number in _MISSING or (number is None and status[1] in _DAMAGE)
        if not is_damage:
            number = number or errno.EIO
            raise OSError(
                number, f"{os.strerror(number)} ({reason(cause)})", str(folder)
            ) from error
    else:
        is_damage = not (isinstance(cause, MemoryError) or type(cause) in _OF_DEVICES)
    if not is_damage:
        raise error
    if isinstance(cause, DamagedCheckpoint | OSError) or str(folder) in str(cause):
        return reason(cause)  # which names the file
    return f"{_name_file(folder, cause)} cannot be parsed ({type(cause).__name__}: {reason(cause)})"


def damage_of_description(error: Exception, item: pathlib.Path) -> str:
    """Return the damage that an error reports while orbax reads the description of an item; raise it if there is none.

    Only the description itself is known to be damaged if it lacks a key; other errors are those of `damage_of`.
    """
    is_parsed = isinstance(
        error, (AttributeError, LookupError, RecursionError, TypeError, ValueError)
    )
    if is_parsed and not _STATUS.match(str(error)) and not _is_description(item / _TREE):
        return f"{item.name}/{_TREE} cannot be parsed"
    return damage_of(error, item)


def _name_file(folder: pathlib.Path, error: BaseException) -> str:
    """Return the description that is not JSON, or whose parser in orbax raised an error; otherwise the folder."""
    for file in folder.rglob("*"):
        if file.name in (_TREE, _SHARDING) or file.parent.name == _ARRAYS:
            try:
                read_json(file)
            except ValueError:
                return str(file.relative_to(folder.parent))
    trace = error.__traceback__
    functions = []
    while trace is not None:
        functions.append(trace.tb_frame.f_code.co_filename + trace.tb_frame.f_code.co_name)
        trace = trace.tb_next
    for part, name in _PARSERS.items():
        if any(part in function for function in functions):
            return name
    return folder.name


def _is_description(file: pathlib.Path) -> bool:
    try:
        for entry in parse_json(read_bounded(file, MAX_JSON_BYTES))["tree_metadata"].values():
            _ = [(key["key"], key["key_type"]) for key in entry["key_metadata"]]
            _ = [entry["value_metadata"][name] for name in ("value_type", "skip_deserialize")]
    except (AttributeError, LookupError, TypeError, ValueError):
        return False
    return True


def require_plain_files(folder: pathlib.Path) -> None:
    """Raise ValueError for anything but folders and regular files, and for files of a wrong size other than data.

    A link to a device would be read without end.
    """
    files = (
        folder.objects()
        if isinstance(folder, BucketPath)
        else ((path, path.stat()) for path in folder.rglob("*"))
    )
    for path, status in files:
        problem = ""
        size = status.st_size
        if stat.S_ISDIR(status.st_mode):
            problem = (
                "is a link to a folder" if path.is_symlink() else ""
            )  # which is not walked here
        elif not stat.S_ISREG(status.st_mode):
            problem = "is not a regular file"
        elif (not size and path.name in _DESCRIPTIONS) or (
            size > MAX_JSON_BYTES and path.parent.name != _DATA
        ):
            problem = f"has {size} bytes"
        if problem:
            raise ValueError(f"{path.relative_to(folder)} {problem}")


def reason(error: BaseException) -> str:
    """Return what an error says in one line, without the specification of an array."""
    if isinstance(error, DamagedCheckpoint):
        return error.problem
    return re.split(r" \[tensorstore_spec|\. See full", first_line(error))[0][:200].rstrip(".")
