"""Renews the recorded plans: `python -m vit_jax.plan.record [NAME ...]` compiles the cases below, one after the other.

Figures go to tests/golden/plan.json, which the tests hold arithmetic to, and from there into the tables of the README
beside this file. Rows of cases that are not named stay as they are. Needs libtpu and a checkout of the repository.
"""

import dataclasses
import datetime
import importlib.metadata
import json
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

from vit_jax.config import PretrainConfig, load_recipe
from vit_jax.plan.dataset import choose_dataset
from vit_jax.plan.estimate import make_plan
from vit_jax.plan.memory import Memory
from vit_jax.plan.report import GIB, to_json
from vit_jax.plan.topology import parse_topology

ROOT = pathlib.Path(__file__).parents[2]
GOLDEN = ROOT / "tests/golden/plan.json"
README = pathlib.Path(__file__).parent / "README.md"

_JFT = "configs/pretrain_jft.py:"
_L16 = f"{_JFT}ViT-L/16,epochs=7"
_S16 = "configs/pretrain_s16_baseline.py:epochs=90"
_FSDP, _REPLICATED = "sharding.parameters=fsdp", "sharding.parameters=replicated"


@dataclasses.dataclass(frozen=True)
class Case:
    """One recorded plan: a recipe, a machine, and overrides without their `--config.`."""

    name: str
    recipe: str
    topology: str
    overrides: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        words = [f"--config={self.recipe}", f"--topology={self.topology}"]
        return " ".join(["vit-jax plan", *words, *(f"--config.{override}" for override in self.overrides)])


def _case(name: str, recipe: str, topology: str, *overrides: str) -> Case:
    return Case(name, recipe, topology, overrides)


HEADLINES = (
    _case("H/14 on v5e:16x16", f"{_JFT}ViT-H/14", "v5e:16x16"),
    _case("H/14 on v4:4x4x8", f"{_JFT}ViT-H/14", "v4:4x4x8"),
    _case("G/14 on v5p:8x8x8", f"{_JFT}ViT-H/14", "v5p:8x8x8", "model.name=ViT-G/14", "sharding.num_replicas=4"),
    _case("L/16 on v5e:4x4", _L16, "v5e:4x4", "global_batch=1024"),
    _case("L/16 on v5e:8x8", _L16, "v5e:8x8", "global_batch=4096"),
    _case("L/16 on v5e:16x16", _L16, "v5e:16x16", "global_batch=16384"),
)
SPREAD = (
    _case("S/16 none", _S16, "v5e:2x2", "global_batch=512", "model.remat=none"),
    _case("S/16 dots", _S16, "v5e:2x2", "global_batch=1024", "model.remat=dots"),
    _case("B/16 none", f"{_JFT}ViT-B/16", "v5e:2x2", "global_batch=128", "model.remat=none"),
    _case("B/16 dots", f"{_JFT}ViT-B/16", "v5e:2x2", "global_batch=256"),
    _case("B/16 full", f"{_JFT}ViT-B/16", "v5e:2x2", "global_batch=512", "model.remat=full"),
    _case("B/16 fsdp", f"{_JFT}ViT-B/16", "v5e:4x4", "global_batch=1024", _FSDP),
    _case("B/16 on v6e", f"{_JFT}ViT-B/16", "v6e:2x2", "global_batch=256"),
    _case("B/16 average", f"{_JFT}ViT-B/16", "v5e:2x2", "global_batch=128", "polyak.factor=0.9999"),
    _case("B/16 4 parts", f"{_JFT}ViT-B/16", "v5e:2x2", "global_batch=1024", "optimizer.accumulation_steps=4"),
    _case("B/16 2 model", f"{_JFT}ViT-B/16", "v5e:2x2", "global_batch=256", "sharding.num_model_shards=2"),
    _case("L/16 none", _L16, "v5p:2x2x1", "global_batch=256", "model.remat=none"),
    _case("L/16 full", _L16, "v5e:2x2", "global_batch=256", "model.remat=full"),
    _case("L/16 fsdp", _L16, "v5e:4x4", "global_batch=1024", "model.remat=full", _FSDP),
    _case("H/14 dots", f"{_JFT}ViT-H/14", "v5p:2x2x1", "global_batch=128", "model.remat=dots", _REPLICATED),
    _case("H/14 full", f"{_JFT}ViT-H/14", "v5p:2x2x1", "global_batch=128", _REPLICATED),
    _case("H/14 fsdp", f"{_JFT}ViT-H/14", "v5e:4x4", "global_batch=512"),
    _case("R50x1 dots", f"{_JFT}R50x1", "v5e:2x2", "global_batch=256"),
    _case("R50x1 none", f"{_JFT}R50x1", "v5e:2x2", "global_batch=128", "model.remat=none"),
    _case("R50+B/16 dots", f"{_JFT}R50+ViT-B/16", "v5e:2x2", "global_batch=128"),
)


def record(case: Case) -> dict[str, Any]:
    """Compiles a case; the figures that are kept of it."""
    config = _config(case)
    plan = to_json(make_plan(config, parse_topology(case.topology), choose_dataset(case.recipe, config)))
    line = plan.pop("timeline") or {}
    for name in ("dataset", "reason", "roofline", "compile_seconds"):
        plan.pop(name)
    versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
    collectives = line.get("collectives", [])[:3]
    return {
        "name": case.name,
        "command": case.command,
        **plan,
        "timeline": {name: value for name, value in line.items() if name.endswith("_seconds")},
        "dearest_collectives": collectives,
        "versions": versions,
        "date": datetime.date.today().isoformat(),
    }


def arithmetic_of(case: Case) -> tuple[Memory, float]:
    """What arithmetic says of the same case: memory of one chip, seconds of a step."""
    config, topology = _config(case), parse_topology(case.topology)
    plan = make_plan(config, topology, choose_dataset(case.recipe, config), can_compile=False)
    assert plan.memory is not None
    return plan.memory, plan.step_seconds


def _config(case: Case) -> PretrainConfig:
    config = load_recipe(case.recipe, [f"--config.{override}" for override in case.overrides])
    assert isinstance(config, PretrainConfig)
    return config


def load() -> dict[str, Any]:
    """All recorded figures by name of the case."""
    rows: dict[str, Any] = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    return rows


def write(rows: dict[str, Any]) -> None:
    """Stores the figures, in the order of the cases, and renews the README's tables."""
    order = [case.name for case in (*HEADLINES, *SPREAD)]
    rows = {name: rows[name] for name in order if name in rows}
    GOLDEN.write_text(json.dumps(rows, indent=1) + "\n")
    text = README.read_text()
    for mark, make in (("headlines", headline_table), ("scaling", scaling_table), ("spread", spread_table)):
        begin, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->\n"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}{make(rows)}{end}{after}"
    README.write_text(text)


def headline_table(rows: dict[str, Any]) -> str:
    """What the issue asks for: memory, time and cost of runs on pods."""
    columns: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
        ("fits", lambda row: "yes" if row["fits"] else "no"),
        ("GiB a chip, of", lambda row: f"{(row['needed_bytes'] or 0) / GIB:.2f}, {row['usable_bytes'] / GIB:.2f}"),
        ("parameters", _gib("parameters")),
        ("optimiser", _gib("optimizer")),
        ("activations", _gib("activations")),
        ("gradients", _gib("gradients")),
        ("temporary", _gib("temporary")),
        ("step, ms", lambda row: f"{1e3 * row['step_seconds']:,.1f}"),
        ("waiting for collectives, ms", lambda row: f"{1e3 * row['timeline'].get('collective_seconds', 0):,.1f}"),
        ("MFU", lambda row: f"{row['totals']['mfu']:.1%}"),
        ("days", lambda row: f"{row['totals']['days']:,.2f}"),
        ("chip-hours", lambda row: f"{row['totals']['chip_hours']:,.0f}"),
        ("exaFLOPs", lambda row: f"{row['totals']['exaflops']:,.0f}"),
    )
    return _table(columns, {case.name: rows[case.name] for case in HEADLINES if case.name in rows})


def scaling_table(rows: dict[str, Any]) -> str:
    """L/16 at 64 images a chip on more and more chips."""
    chosen = {name: row for name, row in rows.items() if name.startswith("L/16 on v5e")}
    if not chosen:
        return ""
    first = next(iter(chosen.values()))["step_seconds"]
    columns: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
        ("chips", lambda row: str(row["num_chips"])),
        ("step, ms", lambda row: f"{1e3 * row['step_seconds']:,.1f}"),
        ("of that of 16 chips", lambda row: f"{row['step_seconds'] / first:.3f}"),
        ("dearest collective", lambda row: _collective(row["dearest_collectives"][0])),
    )
    return _table(columns, chosen)


def spread_table(rows: dict[str, Any]) -> str:
    """Compiled memory and time beside arithmetic."""
    cases = [case for case in (*HEADLINES, *SPREAD) if rows.get(case.name, {}).get("memory")]
    arithmetic = {case.name: arithmetic_of(case) for case in cases}

    def of(name: str) -> tuple[Memory, Memory, float]:
        return Memory(**rows[name]["memory"]), *arithmetic[name]

    columns: tuple[tuple[str, Callable[[dict[str, Any]], str]], ...] = (
        ("machine", lambda row: row["topology"]),
        ("images a chip", lambda row: f"{row['global_batch'] // row['num_chips']:,}"),
        ("remat", lambda row: row["remat"]),
        ("parameters", lambda row: row["sharding"]),
        ("state, GB", lambda row: f"{of(row['name'])[0].state / 1e9:.3f}"),
        ("arithmetic", lambda row: f"{of(row['name'])[1].state / of(row['name'])[0].state - 1:+.2%}"),
        ("total, GB", lambda row: f"{of(row['name'])[0].total / 1e9:.2f}"),
        ("arithmetic", lambda row: f"{of(row['name'])[1].total / of(row['name'])[0].total - 1:+.1%}"),
        ("step, ms", lambda row: f"{1e3 * row['step_seconds']:,.0f}"),
        ("arithmetic, ms", lambda row: f"{1e3 * of(row['name'])[2]:,.0f}"),
    )
    return _table(columns, {case.name: rows[case.name] for case in cases})


def _gib(kind: str) -> Callable[[dict[str, Any]], str]:
    return lambda row: f"{row['memory'][kind] / GIB:.3f}" if row["memory"] else ""


def _collective(fact: dict[str, Any]) -> str:
    return (
        f"{fact['count']} × {fact['operation']} of {fact['num_bytes'] / 1e6:,.1f} MB over {fact['devices']}: "
        f"{1e3 * fact['count'] * fact['waited_seconds']:.1f} ms waited"
    )


def _table(columns: Sequence[tuple[str, Callable[[dict[str, Any]], str]]], rows: dict[str, dict[str, Any]]) -> str:
    head = "| | " + " | ".join(title for title, _ in columns) + " |\n"
    rule = "|---" * (len(columns) + 1) + "|\n"
    body = "".join(f"| {name} | " + " | ".join(cell(row) for _, cell in columns) + " |\n" for name, row in rows.items())
    return head + rule + body


def main(names: Sequence[str]) -> None:
    """Records the named cases, or all."""
    cases = [case for case in (*HEADLINES, *SPREAD) if not names or case.name in names]
    for case in cases:
        print(case.command, flush=True)
        row = record(case)
        write(load() | {case.name: row})


if __name__ == "__main__":
    main(sys.argv[1:])
