"""Figures of the tables of `vit_jax/bench/README.md`, in tests/golden/bench.json."""

import json
import os
import pathlib
import platform
import re
from typing import Any

from docs.tables import renew

ROOT = pathlib.Path(__file__).parents[2]
GOLDEN = ROOT / "tests/golden/bench.json"
PAGE = ROOT / "vit_jax/bench/README.md"
Row = dict[str, Any]
Rows = dict[str, Row]


def load() -> dict[str, Rows]:
    """Return all recorded figures by table, then by row."""
    return json.loads(GOLDEN.read_text())


def store(name: str, rows: Rows) -> None:
    """Store the figures of a table, and write the tables of the page again."""
    from tests.bench.record import TABLES

    stored = load()
    stored[name] = rows
    GOLDEN.write_text(json.dumps(stored, indent=1) + "\n")
    PAGE.write_text(renew(PAGE.read_text(), TABLES))


def describe_machine() -> str:
    """Return the processor of this machine with its number of cores."""
    model = platform.processor()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    if cpuinfo.exists():
        match = re.search(r"model name\s*: (.+)", cpuinfo.read_text())
        if match:
            model = match[1]
    return f"{os.cpu_count()} cores of {model}"
