"""Files and folders that a verb writes: checked before anything is loaded or computed."""

import pathlib
import tempfile

from vit_jax.cli.options import UsageError
from vit_jax.files import expanded, target_of


def output_file(given: str, field: str = "--output=") -> pathlib.Path:
    """Return the file that the value of an option names.

    Links are followed. A pipe or a device, which is written into, can be in a read-only folder.

    Raises:
      UsageError: it is a folder or a socket, or no file can be created beside it.
    """
    path = expanded(given)
    if path.is_dir():
        raise UsageError(f"{field}{given}: is a folder. Give the name of a file.")
    try:
        target = target_of(path)
    except OSError as error:
        raise UsageError(f"{field}{given}: cannot be written ({error.strerror}). Choose another.") from error
    if target is None:
        return path
    folder = target.parent if path.is_symlink() else path.parent
    if not folder.is_dir():
        raise UsageError(f"{field}{given}: {str(folder)!r} is no folder. Create it, or choose another.")
    _require_writable(folder, f"{field}{given}")
    return path


def output_folder(given: str, field: str = "--output=") -> pathlib.Path:
    """Return the folder that the value of an option names; it and its parents need not exist yet.

    Raises:
      UsageError: it is a file, or it cannot be created or written.
    """
    path = expanded(given)
    require_creatable(path, f"{field}{given}")
    return path


def require_creatable(folder: pathlib.Path, given: str) -> None:
    """Raise UsageError, which begins with `given`, if a folder neither exists nor can be created, or is read-only."""
    nearest = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not nearest.is_dir():
        raise UsageError(f"{given}: {str(nearest)!r} is no folder. Choose another.")
    _require_writable(nearest, given)


def _require_writable(folder: pathlib.Path, given: str) -> None:
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UsageError(
            f"{given}: no file can be created in {str(folder)!r} ({error.strerror}). Allow it, or choose another."
        ) from error
