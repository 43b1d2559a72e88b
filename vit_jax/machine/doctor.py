"""The report: every check in order, what all processes found, told as it is found."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence

import jax

from vit_jax import hosts
from vit_jax.config import RunConfig
from vit_jax.files import expanded, first_line
from vit_jax.machine import checks, hardware, reading, together
from vit_jax.machine.checks import Finding
from vit_jax.plan.topology import Topology

SAME = ("versions", "devices")  # lines that must be the same in every process
_WIDTH = 18  # of the column of names
Check = Callable[[], Finding]


class ExaminationError(RuntimeError):
    """One of several processes fails in a check of all together; the message names the check."""


def examine(
    workdir: str | None, config: RunConfig | None, *, topology: Topology | None = None, with_hardware: bool = False
) -> Iterator[list[Finding]]:
    """Yield what each process found, by check and process id.

    With a topology the recipe's data are compared with the step that is planned for it, not with the step on the
    devices here.

    Call it in every process of a run, after `hosts.start`. A check that all do together and that one cannot do ends
    all of them. Devices that are missing or compute wrongly end it, too, but not with the checks of the hardware.

    Raises:
      ExaminationError: this process cannot do a check, or the checks of the hardware have several processes.
    """
    if with_hardware and jax.process_count() > 1:
        raise ExaminationError(
            f"--hardware: examines the devices of one process, not of {jax.process_count()}. Start it on one machine, "
            "without a launcher."
        )
    alone: list[Check] = [checks.versions, checks.driver, checks.devices, checks.memory, checks.shared_memory]
    folder = None if workdir is None else expanded(workdir).absolute()
    measured = config if topology is None else None
    recipe = [] if measured is None else [functools.cache(functools.partial(together.prepared, measured))]
    needed = [functools.partial(together.checkpoint_bytes, prepare) for prepare in recipe]
    alone += [] if folder is None else [functools.partial(checks.disk, folder, *needed)]
    alone.append(checks.compilation)
    alone += [] if config is None or topology is None else [functools.partial(reading.data_path, config, topology)]
    for check in alone:
        findings = _gather(_attempt(check))
        yield findings
        is_needed = findings[0].name in ("devices", "compilation") and not with_hardware
        if is_needed and not all(finding.is_good for finding in findings):
            return
    shared: list[Check] = [together.all_reduce]
    shared += [] if folder is None else [functools.partial(together.checkpoint, folder)]
    shared += [functools.partial(together.speed, prepare) for prepare in recipe]
    shared += hardware.checks(folder) if with_hardware else []
    for check in shared:
        yield _gather(_attempt(check) if jax.process_count() == 1 else _do_together(check))


def lines(findings: Sequence[Finding]) -> list[str]:
    """Return one line for all processes if all is well; else one for each process with a fault and its remedy."""
    if all(finding.is_good for finding in findings):
        return [f"good   {findings[0].name:<{_WIDTH}}{findings[0].found}"]
    wrong = [(process, finding) for process, finding in enumerate(findings) if not finding.is_good]
    place = "process {}: " if len(findings) > 1 else ""
    indent = " " * (7 + _WIDTH)
    return [
        f"wrong  {finding.name:<{_WIDTH}}{place.format(process)}{finding.found}\n{indent}→ {finding.remedy}"
        for process, finding in wrong
    ]


def name_of(check: Check) -> str:
    """Return the name in the report: of the function, and of its arguments that are text."""
    function, arguments = (check.func, check.args) if isinstance(check, functools.partial) else (check, ())
    return " ".join([function.__name__.replace("_", " "), *(each for each in arguments if isinstance(each, str))])


def _attempt(check: Check) -> Finding:
    """Return the finding of a check; an error is a finding, too."""
    try:
        return check()
    except Exception as error:
        return Finding(name_of(check), f"{type(error).__name__}: {first_line(error)}", "mend what the message names")


def _do_together(check: Check) -> Finding:
    """Others wait for the process that an error ends: it ends them all."""
    try:
        return check()
    except Exception as error:
        raise ExaminationError(f"{name_of(check)}: {type(error).__name__}: {first_line(error)}") from error


def _gather(own: Finding) -> list[Finding]:
    everyone = [Finding(**values) for values in hosts.gather(dataclasses.asdict(own))]
    if own.name not in SAME:
        return everyone
    first = everyone[0].found
    remedy = f"process 0 has {first}: make all processes the same"
    return [
        finding if not finding.is_good or finding.found == first else dataclasses.replace(finding, remedy=remedy)
        for finding in everyone
    ]
