"""Renew the recorded plans for GPUs: `python -m tests.tools.plan.record_gpus [NAME ...]` compiles the cases below.

Figures are stored in tests/golden/plan_gpus.json and shown in the README of `vit_jax/plan`. They
are estimates of programs that nothing has executed. Needs the extra plan-gpu and a checkout of the
repository.
"""

import importlib.metadata
import json
import math
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple
from unittest import mock

from docs.tables import find_origin, table
from vit_jax.config import ModelConfig, RunConfig, adapt_architecture, load_recipe
from vit_jax.config.networks import build_architecture
from vit_jax.config.parsing import from_dict
from vit_jax.tools.plan import gpu_kernels, hlo
from vit_jax.tools.plan.dataset import Dataset, choose_dataset
from vit_jax.tools.plan.estimate import Network, Plan, find_network, make_plan
from vit_jax.tools.plan.hlo import Instruction
from vit_jax.tools.plan.timeline import simulate_step
from vit_jax.tools.plan.topology import make_collective_seconds, parse_topology

ROOT = pathlib.Path(__file__).parents[3]
GOLDEN = ROOT / "tests/golden/plan_gpus.json"
MEASURED = GOLDEN.with_name("measured_gpus.json")
MACHINES = ("h100:1", "h100:8", "a100-80gb:8", "b200:8")
GIB = 2**30


class Case(NamedTuple):
    """A recipe, its overrides without `--config.`, and the images of each GPU; None: the recipe's batch.

    `dataset` has the numbers that a recipe without a dataset needs. `peer_ms` is the roofline of a
    step of big_vision on H100s with the same images of each. `weights` are the fields of the
    network of the weights that a fine-tuning recipe begins with. `before` has the figures before
    a change: GiB, milliseconds of the roofline and the number of kernels.
    """

    name: str
    recipe: str
    overrides: str = ""
    images: int | None = None
    machines: tuple[str, ...] = MACHINES
    dataset: tuple[tuple[str, int], ...] = ()
    peer_ms: float | None = None
    weights: tuple[tuple[str, Any], ...] = ()
    before: tuple[float, float, int] | None = None

    def find_network(self, machine: str) -> Network:
        """Return the network, which that of the weights decides where there are any."""
        config = self.load(machine)
        num_classes = self.find_dataset(machine).num_classes
        if not self.weights:
            return find_network(config, num_classes)
        model = from_dict(ModelConfig, dict(self.weights), "model.")
        before = build_architecture(
            model,
            image_size=(560, 560),  # patches of 14 and of 16 pixels divide it
            num_classes=0,
        )
        adapted = adapt_architecture(
            before,
            config.model,
            image_size=config.input.image_size,
            num_classes=num_classes,
        )
        return Network(adapted)

    def load(self, machine: str) -> RunConfig:
        """Return the config on a machine."""
        words = self.command(machine)
        return load_recipe(
            self.recipe,
            [word for word in words if word.startswith("--config.")],
        )

    def find_dataset(self, machine: str) -> Dataset:
        """Return the training data."""
        return choose_dataset(
            self.recipe,
            self.load(machine),
            **dict(self.dataset),
        )

    def command(self, machine: str) -> list[str]:
        """Return the words of the verb plan."""
        overrides = self.overrides.split()
        if self.images is not None:
            overrides.append(f"global_batch={self.images * parse_topology(machine).num_chips}")

        words = [f"--config={self.recipe}", f"--topology={machine}"]
        words += [f"--{name}={number}" for name, number in self.dataset]
        words += [f"--config.{override}" for override in overrides]
        return words


_IMAGENET = "pretrain_imagenet1k:"
_JFT = "pretrain_jft:"
_BARE = "model.dropout_fraction=0 model.pool=gap"
_FAST = "model.remat=none model.scan_unroll={}"
_ONE = ("h100:1",)
_EIGHT = ("h100:8",)
TABLE = (
    Case("S/16", f"{_IMAGENET}ViT-S/16", f"{_FAST.format(12)}", 256),
    Case(
        "S/16 bare",
        "pretrain_s16_baseline",
        f"model.compute_dtype=bfloat16 {_FAST.format(12)}",
        256,
        _ONE,
        peer_ms=32.9,
    ),
    Case("B/16", f"{_IMAGENET}ViT-B/16", _FAST.format(12), 256),
    Case(
        "B/16 bare", f"{_IMAGENET}ViT-B/16", f"{_BARE} {_FAST.format(12)}", 256, _ONE, peer_ms=73.1
    ),
    Case(
        "L/16",
        f"{_IMAGENET}ViT-L/16",
        f"sharding.parameters=fsdp {_FAST.format(24)}",
        128,
        peer_ms=111.8,
    ),
    Case("H/14", f"{_JFT}ViT-H/14", "model.remat=dots model.scan_unroll=1", 64),
    Case(
        "H/14 unrolled",
        f"{_JFT}ViT-H/14",
        f"sharding.parameters=fsdp {_FAST.format(32)}",
        64,
        _EIGHT,
        peer_ms=130.6,
    ),
)
RECIPE_NAMES = (
    f"{_IMAGENET}ViT-B/16",
    f"{_IMAGENET}ViT-L/16",
    f"{_JFT}ViT-H/14",
    f"{_JFT}R50x1",
    f"{_JFT}R50+ViT-B/16",
    "pretrain_imagenet21k:ViT-B/16",
    "pretrain_s16_baseline",
    "digits",
    "digits_masked",
    "digits_transfer",
    "masked_patch",
    "pretrain_own",
    "finetune:ViT-B/16,cifar10",
    "finetune:ViT-L/16,imagenet",
)

DATASETS = {
    "masked_patch": (("num_examples", 303_000_000), ("num_classes", 1)),
    "pretrain_own": (("num_examples", 10_000), ("num_classes", 10)),
}
# Every recipe with its default values.
RECIPES = tuple(
    Case(name, name, machines=_EIGHT, dataset=DATASETS.get(name, ())) for name in RECIPE_NAMES
)
_DINOV2 = (
    ("name", "ViT-B/14"),
    ("registers", 4),
    ("layer_scale", 1e-5),
    ("gelu", "exact"),
    ("head", "linear"),
)
_FROM_DINOV2 = "init_from=hf://facebook/dinov2-with-registers-base"
FINETUNING = (
    Case(
        "finetune:dinov3,imagenet from DINOv2 B/14",
        "finetune:dinov3,imagenet",
        _FROM_DINOV2,
        machines=_EIGHT,
        weights=_DINOV2,
    ),
    Case(
        "the same, LoRA of rank 8",
        "finetune:dinov3,imagenet",
        f"{_FROM_DINOV2} optimizer.lora_rank=8",
        machines=_EIGHT,
        weights=_DINOV2,
    ),
)
_LORA = "optimizer.lora_rank=16 optimizer.layer_decay=1.0"
_LAST = "optimizer.trained=last:4"
KINDS = {
    "": "all parameters",
    _LORA: "LoRA of rank 16",
    _LAST: "the last 4 blocks",
}


def build_dinov3_case(
    size: str,
    images: int,
    overrides: str,
    before: tuple[float, float, int] | None = None,
    machine: str = "h100:1",
) -> Case:
    """Return the fine-tuning of a DINOv3 ViT on one machine."""
    kind = KINDS[overrides]
    weights = (
        ("name", f"ViT-{size}/16"),
        ("head", "linear"),
        ("pool", "token"),
        ("position_embedding", "none"),
        ("registers", 4),
        ("rope", "centred"),
        ("layer_scale", 1e-5),
        ("gelu", "exact"),
        ("layer_norm_epsilon", 1e-5),
        ("qkv_bias", "query_value"),
    )
    return Case(
        f"DINOv3 {size}/16, {images} images, {kind}",
        f"finetune:ViT-{size}/16,own,rule=dinov3",
        overrides,
        images,
        (machine,),
        dataset=(("num_examples", 50_000), ("num_classes", 10)),
        weights=weights,
        before=before,
    )


# Figures before are of commit a5ac162e.
TUNING = (
    build_dinov3_case("B", 64, "", (5.24, 15.29, 797)),
    build_dinov3_case("B", 64, _LORA, (4.16, 15.20, 1180)),
    build_dinov3_case("B", 64, _LAST),
    build_dinov3_case("S", 64, ""),
    build_dinov3_case("S", 64, _LORA),
    build_dinov3_case("B", 16, ""),
    build_dinov3_case("B", 16, _LORA),
)
_NODES = ("h100:8", "2*h100:8", "4*h100:8", "a100-80gb:8")
_G14 = "model.name=ViT-g/14 model.remat=dots model.scan_unroll=1"
PUBLIC = (Case("g/14", f"{_JFT}ViT-H/14", _G14, 64, _NODES),)  # NVIDIA has measured it with NeMo
CASES = (*TABLE, *RECIPES, *FINETUNING, *TUNING, *PUBLIC)
Row = dict[str, Any]
FULL_RATES = {
    "PRODUCTS": 1.0,
    "ATTENTION": 1.0,
    "ATTENTION_BACKWARD": 1.0,
    "BANDWIDTH": 1.0,
    "COLUMN_SUMS": 1.0,
    "OPERATIONS_PER_FLOP": math.inf,
}
"""Rates of the roofline."""


def record(case: Case, machine: str) -> Row:
    """Compile a case and return the figures to store."""
    words = case.command(machine)
    topology = parse_topology(machine)
    config = case.load(machine)
    network = case.find_network(machine)
    plan = make_plan(
        config,
        topology,
        case.find_dataset(machine),
        network=network,
    )
    line = plan.timeline
    totals = plan.totals
    needed = plan.needed_bytes
    assert line is not None, plan.reason
    assert totals is not None
    assert needed is not None
    return {
        "name": case.name,
        "machine": machine,
        "command": " ".join(["vit-jax plan", *words]),
        "attention": plan.attention_form,
        "images": config.global_batch // topology.num_chips,
        "gib": round(needed / GIB, 2),
        "fits": plan.fits,
        "ms": round(1e3 * line.seconds, 2),
        "kernels": _count_kernels(plan),
        "roofline_ms": round(1e3 * _roofline_seconds(plan), 2),
        "collectives_ms": round(1e3 * line.collective_seconds, 2),
        "images_per_second": round(totals.images_per_second),
        "mfu": None if totals.mfu is None else round(totals.mfu, 4),
        "unknown": [line.num_unknown_loops, line.num_unknown_kernels],
        "compile_seconds": round(getattr(plan.compiled, "compile_seconds", 0)),
        "jax": importlib.metadata.version("jax"),
        **find_origin(),
    }


def _roofline_seconds(plan: Plan) -> float:
    """Return the time at the full peak and the full bandwidth."""
    topology = plan.topology
    devices = plan.run.batch_sharding.mesh.devices.flat
    collective_seconds = make_collective_seconds(devices, topology)

    with mock.patch.multiple(gpu_kernels, **FULL_RATES):
        program = hlo.parse(getattr(plan.compiled, "text", ""))
        return simulate_step(program, topology, collective_seconds, {}).seconds


def _count_kernels(plan: Plan) -> int:
    """Return the number of kernels that an unrolled step starts."""
    program = hlo.parse(getattr(plan.compiled, "text", ""))
    kernels = gpu_kernels.Kernels(program, plan.topology.chip)
    seconds = map(kernels.estimate_seconds, program.computations[program.entry])
    return sum(duration > 0 for duration in seconds)


def list_kernels(text: str) -> str:
    """Return a table of the kernels of an unrolled program for an H100, the slowest kind first.

    Kernels of a kind have the same operation and result. Times are those of the roofline.
    """
    program = hlo.parse(text)
    kernels = gpu_kernels.Kernels(program, parse_topology("h100:1").chip)
    groups: dict[tuple[str, str, str], list[Instruction]] = {}
    for instruction in program.computations[program.entry]:
        operation = re.sub(r"\d+", "", instruction.find(r'op_name="([^"]*)"'))
        result = instruction.shape.replace("{1,0}", "").replace("|", "")
        kind = instruction.target or instruction.find(r"kind=k(\w+)") or instruction.opcode
        groups.setdefault((kind, operation, result), []).append(instruction)

    lines = []
    with mock.patch.multiple(gpu_kernels, **FULL_RATES):
        for (kind, operation, result), instructions in groups.items():
            seconds = sum(map(kernels.estimate_seconds, instructions))
            num_bytes = kernels.count_bytes(instructions[0])
            line = [f"{1e3 * seconds:.3f}", str(len(instructions)), f"{num_bytes / 1e6:.1f}"]
            if seconds:
                lines.append((seconds, [*line, kind, result[:60], operation[-60:]]))

    lines.sort(reverse=True)
    columns = ("ms", "number", "MB each", "kind", "result", "operation")
    return table(columns, [line for _, line in lines])


def load() -> dict[str, Row]:
    """Return all recorded figures by case and machine."""
    if not GOLDEN.exists():
        return {}
    return json.loads(GOLDEN.read_text())


def _list_keys(cases: Sequence[Case]) -> list[tuple[Case, str]]:
    """Return each case with the key of its record, for each of its machines."""
    keys = []
    for case in cases:
        for machine in case.machines:
            keys.append((case, f"{case.name} on {machine}"))
    return keys


def write(row: Row) -> None:
    """Store the figures of a case and renew the tables of the page."""
    from tests.tools.plan.record import store

    rows = load() | {f"{row['name']} on {row['machine']}": row}
    store(GOLDEN, rows, [key for _, key in _list_keys(CASES)])


def _rows(cases: Sequence[Case]) -> list[tuple[Case, Row]]:
    rows = load()
    return [(case, rows[key]) for case, key in _list_keys(cases) if key in rows]


def list_rows() -> list[tuple[Case, str, Row]]:
    """Return each recorded case, its machine and its figures."""
    return [(case, row["machine"], row) for case, row in _rows(CASES)]


MACHINE_COLUMNS = (
    "",
    "machine",
    "images a GPU",
    "GiB",
    "ms",
    "images/s",
    "MFU",
    "roofline, ms",
    "big_vision's, ms",
)


def machine_table() -> str:
    """Return the table of models on machines."""
    lines = []
    for case, row in _rows(TABLE):
        has_peer = case.peer_ms is not None and row["machine"].startswith("h100")
        lines.append(
            [
                case.name,
                row["machine"],
                str(row["images"]),
                f"{row['gib']:.2f}",
                f"{row['ms']:.1f}",
                f"{row['images_per_second']:,}",
                f"{row['mfu']:.1%}",
                f"{row['roofline_ms']:.1f}",
                str(case.peer_ms) if has_peer else "–",
            ]
        )
    return table(MACHINE_COLUMNS, lines)


def recipe_table() -> str:
    """Return the table of all recipes on eight H100s."""
    lines = []
    for case, row in _rows((*RECIPES, *FINETUNING)):
        fits = "" if row["fits"] else ", does not fit"
        lines.append(
            [
                f"`{case.name}`",
                f"{row['images']:,}",
                f"{row['gib']:.2f}{fits}",
                f"{row['ms']:.1f}",
                "–" if row["mfu"] is None else f"{row['mfu']:.1%}",
                row["attention"] or "–",
            ]
        )
    return table(
        (
            "recipe",
            "images a GPU",
            "GiB",
            "ms",
            "MFU",
            "attention",
        ),
        lines,
    )


def tuning_table() -> str:
    """Return the table of fine-tuning on one H100, with the figures before."""
    lines = []
    for case, row in _rows(TUNING):
        before = [""] * 3
        if case.before is not None:
            gib, milliseconds, num_kernels = case.before
            before = [f"{gib:.2f}", f"{milliseconds:.1f}", f"{num_kernels:,}"]
        lines.append(
            [
                case.name,
                *before,
                f"{row['gib']:.2f}",
                f"{row['roofline_ms']:.1f}",
                f"{row['kernels']:,}",
                f"{row['ms']:.1f}",
            ]
        )
    columns = (
        "",
        "GiB before",
        "roofline before, ms",
        "kernels before",
        "GiB",
        "roofline, ms",
        "kernels",
        "plan, ms",
    )
    return table(columns, lines)


def measured_table() -> str:
    """Return the table of steps measured on one H100, beside their plans."""
    content = json.loads(MEASURED.read_text())
    lines = []
    for name, row in content["steps"].items():
        times = []
        for key in ("before_ms", "ms", "model_ms"):
            milliseconds = row[key]
            times.append("–" if milliseconds is None else f"{milliseconds:.1f}")
        lines.append(
            [
                name,
                str(row["images"]),
                *times,
                f"{row['gib']:.1f}",
            ]
        )
    columns = (
        "",
        "images",
        "before, ms",
        "ms",
        "kernels by rates, ms",
        "GiB",
    )
    return table(columns, lines)


def main(names: Sequence[str]) -> None:
    """Record the named cases, such as "B/16" or "B/16 on h100:8", or all.

    For a program of `vit-jax plan --hlo=FILE.hlo`, list its kernels instead.
    """
    for name in names:
        if name.endswith(".hlo"):
            print(list_kernels(pathlib.Path(name).read_text()))
            return

    for case in CASES:
        for machine in case.machines:
            key = f"{case.name} on {machine}"
            if not names or case.name in names or key in names:
                print(" ".join(case.command(machine)), flush=True)
                write(record(case, machine))


if __name__ == "__main__":
    main(sys.argv[1:])
