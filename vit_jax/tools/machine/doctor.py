"""The report: every check in order, with the findings of all processes, as they are made."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax

from vit_jax import hosts
from vit_jax.config import RunConfig
from vit_jax.storage.files import expanded
from vit_jax.text.printable import first_line
from vit_jax.tools.machine import checks, hardware, reading, together
from vit_jax.tools.machine.checks import Check, Finding
from vit_jax.tools.plan.topology import Topology

SAME = ("versions", "devices")  # lines that must be the same in every process
_WIDTH = 18  # of the column of names


class ExaminationError(RuntimeError):
    """One of several processes fails in a check of all together; the message names the check."""


def examine(
    workdir: str | None,
    config: RunConfig | None,
    *,
    topology: Topology | None = None,
    with_hardware: bool = False,
) -> Iterator[tuple[str, list[Finding]]]:
    """Yield the name of each check with the findings of all processes.

    With a topology the recipe's data are compared with the step that is planned for it, not with
    the step on the devices here.

    Call it in every process of a run, after `hosts.start`. A check that all do together and that
    one cannot do ends all of them. Devices that are missing or compute wrongly end it, too, but not
    with the checks of the hardware.

    Raises:
      ExaminationError: this process cannot do a check, or the checks of the hardware have several
        processes.
    """
    if with_hardware and jax.process_count() > 1:
        raise ExaminationError(
            f"--hardware: examines the devices of one process, not of {jax.process_count()}. Start it on one machine, "
            "without a launcher."
        )
    folder = None if workdir is None else expanded(workdir).absolute()
    prepare = (
        None
        if config is None or topology
        else functools.cache(functools.partial(together.prepared, config))
    )
    needed = prepare and functools.partial(together.checkpoint_bytes, prepare)
    alone: dict[str, Check | None] = {
        "versions": checks.versions,
        "driver": checks.driver,
        "devices": checks.devices,
        "memory": checks.memory,
        "shared memory": checks.shared_memory,
        "disk": None if folder is None else functools.partial(checks.disk, folder, needed),
        "compilation": checks.compilation,
        "data path": functools.partial(reading.data_path, config, topology)
        if config and topology
        else None,
    }
    shared: dict[str, Check | None] = {
        "all-reduce": together.all_reduce,
        "checkpoint": None if folder is None else functools.partial(together.checkpoint, folder),
        "speed": prepare and functools.partial(together.speed, prepare),
    }
    for name, check in alone.items():
        if check is not None:
            findings = _gather(name, _perform(name, check))
            yield name, findings
            is_needed = name in ("devices", "compilation") and not with_hardware
            if is_needed and not all(finding.is_good for finding in findings):
                return
    for name, check in (shared | (hardware.checks(folder) if with_hardware else {})).items():
        if check is not None:
            yield name, _gather(name, _perform(name, check, ends_all=jax.process_count() > 1))


def lines(name: str, findings: Sequence[Finding]) -> list[str]:
    """Return one line for all processes if all is well; else one for each process with a fault and its remedy."""
    if all(finding.is_good for finding in findings):
        return [f"good   {name:<{_WIDTH}}{findings[0].found}"]
    wrong = [(process, finding) for process, finding in enumerate(findings) if not finding.is_good]
    place = "process {}: " if len(findings) > 1 else ""
    indent = " " * (7 + _WIDTH)
    return [
        f"wrong  {name:<{_WIDTH}}{place.format(process)}{finding.found}\n{indent}→ {finding.remedy}"
        for process, finding in wrong
    ]


def _perform(name: str, check: Check, *, ends_all: bool = False) -> Finding:
    """Return the finding of a check; an error is one, or ends all processes, which would wait for this one."""
    try:
        return check()
    except Exception as error:
        problem = f"{type(error).__name__}: {first_line(error)}"
        if ends_all:
            raise ExaminationError(f"{name}: {problem}") from error
        return Finding(problem, "mend what the message names")


def _gather(name: str, own: Finding) -> list[Finding]:
    everyone = [Finding(**values) for values in hosts.gather(dataclasses.asdict(own))]
    if name not in SAME:
        return everyone
    first = everyone[0].found
    remedy = f"process 0 has {first}: make all processes the same"
    return [
        finding
        if not finding.is_good or finding.found == first
        else dataclasses.replace(finding, remedy=remedy)
        for finding in everyone
    ]
