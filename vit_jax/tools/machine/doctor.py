"""The report: every check in order, with the findings of all processes, as they are made."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from vit_jax import hosts
from vit_jax.config import RunConfig
from vit_jax.storage.files import expand_path
from vit_jax.text.printable import first_line
from vit_jax.tools.machine import checks, hardware, reading, together
from vit_jax.tools.machine.checks import Check, Finding
from vit_jax.tools.plan.topology import Topology

EQUAL_CHECKS = ("versions", "devices")  # every process must find the same
ESSENTIAL_CHECKS = ("devices", "compilation")  # other checks need devices that compute
_NAME_WIDTH = 18  # width of the column of names


class ExaminationError(RuntimeError):
    """A check of all processes together fails in one of them; the message names the check."""


def examine(
    workdir: str | None,
    config: RunConfig | None,
    *,
    topology: Topology | None = None,
    with_hardware: bool = False,
) -> Iterator[tuple[str, list[Finding]]]:
    """Yield the name of each check with the findings of all processes.

    With a topology the recipe's data are compared with the planned step of that machine, not with
    the step on the devices of this machine.

    Call it in every process of a run, after `hosts.start`. If a check of all processes together
    fails in one of them, all checks end. They also end if devices are missing or compute wrongly,
    except with the checks of the hardware.

    Raises:
      ExaminationError: a check of all processes together fails in this process, or the checks of
        the hardware have several processes.
    """
    num_processes = jax.process_count()
    if with_hardware and num_processes > 1:
        raise ExaminationError(
            f"--hardware: examines the devices of one process, not of {num_processes}. "
            "Start it on one machine, without a launcher."
        )
    folder = None if workdir is None else expand_path(workdir).absolute()
    prepare = None
    if config is not None and topology is None:
        prepare = functools.cache(functools.partial(together.prepare_run, config))

    local_checks = _list_local_checks(folder, prepare)
    if config is not None and topology is not None:
        local_checks["data path"] = functools.partial(reading.check_data_path, config, topology)
    for name, check in local_checks.items():
        findings = _gather(name, _perform(name, check))
        yield name, findings
        is_good = all(finding.is_good for finding in findings)
        if name in ESSENTIAL_CHECKS and not is_good and not with_hardware:
            return

    shared_checks = _list_shared_checks(folder, prepare)
    if with_hardware:
        shared_checks |= hardware.list_checks(folder)
    for name, check in shared_checks.items():
        yield name, _gather(name, _perform(name, check, ends_all=num_processes > 1))


def _list_local_checks(workdir: Path | None, prepare: together.Prepare | None) -> dict[str, Check]:
    """Return the checks that each process makes for its machine, in the order of the report."""
    local_checks: dict[str, Check] = {
        "versions": checks.check_versions,
        "driver": checks.check_driver,
        "devices": checks.check_devices,
        "memory": checks.check_memory,
        "shared memory": checks.check_shared_memory,
    }
    if workdir is not None:
        count_bytes = None
        if prepare is not None:
            count_bytes = functools.partial(together.count_checkpoint_bytes, prepare)
        local_checks["disk"] = functools.partial(checks.check_disk, workdir, count_bytes)
    local_checks["compilation"] = checks.check_compilation
    return local_checks


def _list_shared_checks(workdir: Path | None, prepare: together.Prepare | None) -> dict[str, Check]:
    """Return the checks that all processes make together, in the order of the report."""
    shared_checks: dict[str, Check] = {"all-reduce": together.check_all_reduce}
    if workdir is not None:
        shared_checks["checkpoint"] = functools.partial(together.check_checkpoint, workdir)
    if prepare is not None:
        shared_checks["speed"] = functools.partial(together.check_speed, prepare)
    return shared_checks


def format_findings(name: str, findings: Sequence[Finding]) -> list[str]:
    """Return one line if all findings are good, otherwise one line for each fault and its remedy."""
    indent = " " * (7 + _NAME_WIDTH)
    lines = []
    for process, finding in enumerate(findings):
        if finding.is_good:
            continue
        found = finding.found
        if len(findings) > 1:
            found = f"process {process}: {found}"
        lines.append(f"wrong  {name:<{_NAME_WIDTH}}{found}\n{indent}→ {finding.remedy}")
    return lines or [f"good   {name:<{_NAME_WIDTH}}{findings[0].found}"]


def _perform(name: str, check: Check, *, ends_all: bool = False) -> Finding:
    """Return the finding of a check. An error becomes a finding.

    With `ends_all` an error ends all processes, because the others would wait for this one.
    """
    try:
        return check()
    except Exception as error:
        problem = f"{type(error).__name__}: {first_line(error)}"
        if ends_all:
            raise ExaminationError(f"{name}: {problem}") from error
        return Finding(problem, "mend what the message names")


def _gather(name: str, finding: Finding) -> list[Finding]:
    """Return the findings of all processes; in some checks all must be equal to the first."""
    findings = [Finding(**values) for values in hosts.gather(dataclasses.asdict(finding))]
    if name not in EQUAL_CHECKS:
        return findings
    first = findings[0].found
    remedy = f"process 0 has {first}: make all processes the same"
    for process, other in enumerate(findings):
        if other.is_good and other.found != first:
            findings[process] = dataclasses.replace(other, remedy=remedy)
    return findings
