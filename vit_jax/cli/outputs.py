"""Output of verbs: notes, errors, and files, which are checked before anything is computed."""

import os
import pathlib
import sys
import tempfile
from typing import NoReturn

from vit_jax.cli.options import UsageError
from vit_jax.storage.files import OUT_OF_FILES, TOO_MANY_FILES, expand_path, find_target
from vit_jax.text.printable import printable, printable_lines


def note(*texts: str) -> None:
    """Print notes on standard error, each as one line without control characters."""
    for text in texts:
        print(f"note: {printable(text)}", file=sys.stderr, flush=True)


def note_conversion(specification: str) -> None:
    """Print a note on fields of another system that a recipe sets without effect."""
    from vit_jax.config.specification import describe_conversion

    description = describe_conversion(specification)
    if description:
        note(description)


def suggest(command: str) -> None:
    """Print the next command on standard error, in the first process; "" is no command."""
    if command:
        _print_first(f"next: {printable(command)}")


def show_command(command: str) -> None:
    """Print the command that a short form stands for on standard error, in the first process."""
    _print_first(f"command: {printable(command)}")


def _print_first(line: str) -> None:
    # Verbs that have joined other processes have imported this module.
    internals = sys.modules.get("vit_jax.hosts.internals")
    if internals is None or internals.global_state.process_id == 0:
        print(line, file=sys.stderr, flush=True)


def fail(message: str, code: int) -> NoReturn:
    """End the program with a message."""
    print(f"vit-jax: {printable_lines(message)}", file=sys.stderr, flush=True)
    sys.exit(code)


def resolve_output_file(value: str, option: str = "--output=") -> pathlib.Path:
    """Return the file that the value of an option names.

    Links are followed. A pipe or a device, which is written into, can be in a read-only folder.

    Raises:
      UsageError: it is a folder or a socket, no file can be created beside it, or it is a file of a
        run.
    """
    path = expand_path(value)
    if path.is_dir():
        raise UsageError(f"{option}{value}: is a folder. Give the name of a file.")

    try:
        target = find_target(path)
    except OSError as error:
        raise UsageError(
            f"{option}{value}: cannot be written ({error.strerror}). Choose another."
        ) from error

    if target is not None:
        folder = target.parent if path.is_symlink() else path.parent
        if not folder.is_dir():
            raise UsageError(
                f"{option}{value}: {str(folder)!r} is no folder. Create it, or choose another."
            )
        require_creatable(folder, f"{option}{value}")

    reject_runs(path, f"{option}{value}")
    return path


def resolve_output_folder(value: str, option: str = "--output=") -> pathlib.Path:
    """Return the folder that the value of an option names; it and its parents need not exist yet.

    Raises:
      UsageError: it is a file, it cannot be created or written, or it is the workdir of a run.
    """
    path = expand_path(value)
    require_creatable(path, f"{option}{value}")
    reject_runs(path, f"{option}{value}")
    return path


def reject_runs(path: pathlib.Path, word: str) -> None:
    """Raise UsageError if writing a file or folder would change a run.

    `word` begins the message: the option and its value.
    """
    if not path.parent.is_dir():
        return  # a new folder is no run, and the check takes long to load

    from vit_jax.checkpoint.run_folders import require_outside_runs

    try:
        require_outside_runs(path, word)
    except ValueError as error:
        raise UsageError(str(error)) from None


def require_creatable(folder: pathlib.Path, word: str) -> None:
    """Raise UsageError if a folder is read-only, or neither exists nor can be created.

    `word` begins the message: the option and its value.
    """
    nearest = folder.absolute()
    while not nearest.exists():
        nearest = nearest.parent
    try:
        tempfile.TemporaryFile(dir=nearest).close()
    except OSError as error:
        raise UsageError(
            f"{word}: no file can be created in {str(nearest)!r} ({error.strerror}). "
            "Allow it, or choose another."
        ) from error


def describe_system_error(error: OSError, place: str) -> str:
    """Return the file of an error of the system, or a limit that was reached, and its words.

    Args:
      error: the error; Python's output and some libraries do not name the file.
      place: the file of an error that names none, unless the standard output has failed.
    """
    if error.errno in OUT_OF_FILES:
        return TOO_MANY_FILES.rstrip(".")
    if error.filename is None and _discard_failed_output():
        return f"standard output: {error.strerror}"
    return f"{error.filename or place}: {error.strerror}"


def _discard_failed_output() -> bool:
    """Return True if the standard output cannot be written; discard it, or the exit would fail."""
    try:
        print(flush=True)  # an empty line: after a failure the buffer may be empty
    except OSError:
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), sys.stdout.fileno())
        return True
    return False
