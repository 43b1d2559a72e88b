"""The least cycles that the matrix units of a TPU v5e need for a training step.

`python -m tests.tools.plan.matrix_limit` prints it for pre-training. With names of cases, such as
"DINOv3 B/16, 64 images, all parameters", it compiles fine-tuning for one v5e, stores the figures in
tests/golden/matrix_limit.json and renews the table of `vit_jax/bench/PLANS.md`.

Its four units hold 128 x 128 weights each and take a row of 128 values a cycle. Contracted
dimensions and columns are padded to complete tiles, rows are not. A convolution is one product for
each tap of its kernel, as XLA does; that of the root is one product of all taps. In the gradient of
weights the rows are contracted, and the better of the two ways to lay out the channels counts.
Nothing but products is counted.
"""

import importlib.metadata
import json
import pathlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from docs.tables import find_origin, table
from tests.tools.plan.record_gpus import Case, build_dinov3_case
from vit_jax.config import Architecture, ModelConfig
from vit_jax.config.networks import build_architecture
from vit_jax.sharding import convolutions
from vit_jax.tools.plan.estimate import make_plan
from vit_jax.tools.plan.topology import parse_topology

ROOT = pathlib.Path(__file__).parents[3]
GOLDEN = ROOT / "tests/golden/matrix_limit.json"
MACHINE = "v5e:1x1"
UNITS = 4
TILE = 128
GIB = 2**30
MILLION = 1e6
TUNING = (
    build_dinov3_case("S", 64, "", machine=MACHINE),
    build_dinov3_case("B", 16, "", machine=MACHINE),
    build_dinov3_case("B", 64, "", machine=MACHINE),
    build_dinov3_case("L", 64, "", machine=MACHINE),
)
Row = dict[str, Any]


class Product(NamedTuple):
    """A matrix product, computed `count` times in the forward pass."""

    count: int
    rows: int
    contracted: int
    columns: int


def limit(architecture: Architecture, images: int) -> float:
    """Return the cycles of a step with this number of images on a chip."""
    cycles = 0.0
    for index, product in enumerate(_list_products(architecture, images)):
        contracted_tiles = _count_tiles(product.contracted)
        column_tiles = _count_tiles(product.columns)
        forward = product.rows * contracted_tiles * column_tiles
        # The images, which the first product reads, have no gradient.
        input_gradient = forward if index > 0 else 0
        weight_gradient = _count_tiles(product.rows) * min(
            product.contracted * column_tiles, product.columns * contracted_tiles
        )
        cycles += product.count * (forward + input_gradient + weight_gradient)
    return cycles / UNITS


def _list_products(a: Architecture, images: int) -> Iterator[Product]:
    """Yield the products of the forward pass."""
    if a.has_resnet:
        yield from _list_resnet_products(a, images)
    if a.has_transformer:
        yield from _list_transformer_products(a, images)
    yield Product(1, images, a.width, a.num_classes)


def _list_resnet_products(a: Architecture, images: int) -> Iterator[Product]:
    root = convolutions.root(a)
    yield Product(
        1,
        images * _area(root),
        root.kernel**2 * root.inputs,
        root.outputs,
    )

    for unit in convolutions.residual_units(a):
        for conv in unit.convolutions:
            yield Product(
                conv.kernel**2,
                images * _area(conv),
                conv.inputs,
                conv.outputs,
            )


def _list_transformer_products(a: Architecture, images: int) -> Iterator[Product]:
    length = a.sequence_length
    tokens = images * length
    patches = images * a.grid[0] * a.grid[1]
    patch_values = a.patch_size[0] * a.patch_size[1] * a.map_channels
    head = a.width // a.num_heads
    heads = a.depth * a.num_heads * images

    yield Product(1, patches, patch_values, a.width)
    yield Product(4 * a.depth, tokens, a.width, a.width)
    yield Product(a.depth, tokens, a.width, a.mlp_dim)
    yield Product(a.depth, tokens, a.mlp_dim, a.width)
    yield Product(heads, length, head, length)
    yield Product(heads, length, length, head)


def _area(conv: convolutions.Convolution) -> int:
    return conv.output_size[0] * conv.output_size[1]


def _count_tiles(size: int) -> int:
    return -(-size // TILE)


def record(case: Case) -> Row:
    """Compile a fine-tuning step and return the figures to store."""
    topology = parse_topology(MACHINE)
    network = case.find_network(MACHINE)
    plan = make_plan(
        case.load(MACHINE),
        topology,
        case.find_dataset(MACHINE),
        network=network,
    )
    line = plan.timeline
    needed = plan.needed_bytes
    assert line is not None, plan.reason
    assert needed is not None
    assert case.images is not None

    cycles_of_second = topology.fabric.clock_hertz
    return {
        "name": case.name,
        "command": " ".join(["vit-jax plan", *case.command(MACHINE)]),
        "limit_cycles": limit(network.architecture, case.images),
        "fusion_cycles": round(cycles_of_second * line.compute_seconds),
        "kernel_cycles": round(cycles_of_second * line.kernel_seconds),
        "ms": round(1e3 * line.seconds, 2),
        "gib": round(needed / GIB, 2),
        "unknown": [line.num_unknown_loops, line.num_unknown_kernels],
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "libtpu")},
        **find_origin(),
    }


def load() -> dict[str, Row]:
    """Return all recorded figures by name of the case."""
    if not GOLDEN.exists():
        return {}
    return json.loads(GOLDEN.read_text())


def write(row: Row) -> None:
    """Store the figures of a case and renew the tables of the page."""
    from tests.tools.plan.record import store

    rows = load() | {row["name"]: row}
    store(GOLDEN, rows, [case.name for case in TUNING])


def limit_table() -> str:
    """Return the table of fine-tuning beside the limit, in millions of cycles."""
    lines = []
    for row in load().values():
        compiled = row["fusion_cycles"] + row["kernel_cycles"]
        lines.append(
            [
                row["name"].replace(", all parameters", ""),
                f"{row['limit_cycles'] / MILLION:.1f}",
                f"{compiled / MILLION:.1f}",
                f"{row['limit_cycles'] / compiled:.0%}",
                f"{row['ms']:.1f}",
                f"{row['gib']:.1f}",
            ]
        )
    return table(("fine-tuning", "limit", "compiled", "share", "ms", "GiB"), lines)


def print_limits() -> None:
    """Print the limit of four networks."""
    for name, images in (("R50x1", 64), ("R50+ViT-B/16", 32), ("ViT-B/16", 64), ("ViT-L/16", 64)):
        model = ModelConfig(name=name)
        architecture = build_architecture(
            model,
            image_size=(224, 224),
            num_classes=1000,
        )
        cycles = limit(architecture, images)
        print(f"{name}, {images} images: {cycles / MILLION:.1f} million cycles")


def main(names: Sequence[str]) -> None:
    """Record the named cases; without names, print limits."""
    if not names:
        print_limits()
    for case in TUNING:
        if case.name in names:
            print(" ".join(case.command(MACHINE)), flush=True)
            write(record(case))


if __name__ == "__main__":
    main(sys.argv[1:])
