"""How a process of a run ends: the exit codes that launchers act on; `train/README.md` has the table for people."""

FAILED = 1  # an error that starting again does not mend by itself: a full disk, a loss that is not finite, a bug
MISUSED = 2  # the user has to change something: an option, the data, the workdir
PREEMPTED = 75  # asked to end, saved; sysexits.h: "temporary failure, try again"
LOST = 76  # another process was lost or hangs, or did not come: start all of them again
STOPPED = 130  # Ctrl-C twice: at once, without saving


def code_of(error: BaseException) -> int:
    """The exit code of a run that ends with this error."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else FAILED
    if isinstance(error, KeyboardInterrupt):
        return STOPPED
    return MISUSED if isinstance(error, ValueError) else FAILED
