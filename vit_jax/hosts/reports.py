"""Messages between the processes of a run, as text in the key-value store of the coordination service."""

import dataclasses
import json
from typing import Any, Protocol

_ALL, _FIRST = "vit_jax/all", "vit_jax/first"  # messages of every process, and of the first one


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """State of a process."""

    beat: int  # counts reports: a process whose count stops has no sign of life
    host: str
    step: int | None  # last completed step; None before the first
    progress: int  # counts steps over all runs of the process
    idle_seconds: float | None  # since then; None while it does not train
    has_ended: bool = False  # normally: it waits for the others to end


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """The error that ends a process."""

    message: str
    exit_code: int
    step: int | None  # last completed step; None before the first


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """Why all processes end."""

    message: str
    exit_code: int


class Store(Protocol):
    """The part of JAX's client that is used."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None: ...

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]: ...


class Board:
    """Typed access to the store; every call may raise what the store raises."""

    def __init__(self, store: Store, process_id: int):
        self._store, self._process_id = store, process_id

    def post_report(self, report: Report) -> None:
        """Posts the state of this process: of the first one to all, of the others to the first."""
        where = _FIRST if self._process_id == 0 else _ALL
        self._set(f"{where}/report/{self._process_id}", report)

    def post_failure(self, failure: Failure) -> None:
        """Posts the error that ends this process."""
        self._set(f"{_ALL}/failure/{self._process_id}", failure)

    def post_verdict(self, verdict: Verdict) -> None:
        """By the first process: ends all."""
        self._set(f"{_FIRST}/verdict", verdict)

    def ask_for_stacks(self, processes: tuple[int, ...]) -> None:
        """By the first process: these print their stacks."""
        self._store.key_value_set(f"{_FIRST}/stacks", json.dumps(processes), allow_overwrite=True)

    def read_all(self) -> tuple[dict[int, Report], dict[int, Failure]]:
        """Messages of all processes; for the first process."""
        reports, failures = {}, {}
        for key, text in self._store.key_value_dir_get(_ALL):
            *_, kind, process = key.split("/")
            if kind == "report":
                reports[int(process)] = Report(**json.loads(text))
            else:
                failures[int(process)] = Failure(**json.loads(text))
        return reports, failures

    def read_first(self) -> tuple[Report | None, Verdict | None, tuple[int, ...]]:
        """Messages of the first process: its report, the verdict, and the processes to print stacks."""
        said = {key.removeprefix(f"{_FIRST}/"): json.loads(text) for key, text in self._store.key_value_dir_get(_FIRST)}
        report, verdict = said.get("report/0"), said.get("verdict")
        return (
            Report(**report) if report else None,
            Verdict(**verdict) if verdict else None,
            tuple(said.get("stacks", ())),
        )

    def _set(self, key: str, value: Any) -> None:
        self._store.key_value_set(key, json.dumps(dataclasses.asdict(value)), allow_overwrite=True)
