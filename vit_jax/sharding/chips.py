"""Peak arithmetic, memory and bandwidth of accelerators, from their vendors' data sheets.

One `Chip` is one device as jax counts them. A TPU v2, v3 or 7x chip shows up as two devices, so its
numbers are halved here; v4 and v5p fuse their two cores into one device. No jax here.
"""

import dataclasses

GIB = 2**30
TERA = 1e12


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device.

    Attributes:
      name: short and unique.
      device_kinds: values of `jax.Device.device_kind`, without "NVIDIA " or "Tesla ".
      peak_bf16_flops: FLOP/s of dense matrix products with float32 sums; in float16 where the
        source says that there is no bfloat16.
      memory_bytes: nominal memory. Vendors' GB of device memory are GiB; ECC and the driver keep a
        few per cent.
      memory_bandwidth_bytes_per_second: between that memory and the cores.
      source: the document with these numbers.
    """

    name: str
    device_kinds: tuple[str, ...]
    peak_bf16_flops: float
    memory_bytes: int
    memory_bandwidth_bytes_per_second: float
    source: str


def _build_chip(
    name: str,
    *,
    device_kinds: tuple[str, ...] = (),
    bf16_teraflops: float,
    memory_gib: int,
    terabytes_per_second: float,
    source: str,
) -> Chip:
    """Return a chip from the units of data sheets; jax calls it by its name unless stated."""
    return Chip(
        name=name,
        device_kinds=device_kinds or (name,),
        peak_bf16_flops=bf16_teraflops * TERA,
        memory_bytes=memory_gib * GIB,
        memory_bandwidth_bytes_per_second=terabytes_per_second * TERA,
        source=source,
    )


CHIPS = (
    _build_chip(
        "TPU v2",
        bf16_teraflops=46 / 2,
        memory_gib=8,
        terabytes_per_second=0.7 / 2,
        source="Norrie et al., IEEE Micro 2021 (per core)",
    ),
    _build_chip(
        "TPU v3",
        bf16_teraflops=123 / 2,
        memory_gib=16,
        terabytes_per_second=0.9 / 2,
        source="Google Cloud TPU v3 page (per core)",
    ),
    _build_chip(
        "TPU v4",
        bf16_teraflops=275,
        memory_gib=32,
        terabytes_per_second=1.2,
        source="Google Cloud TPU v4 page",
    ),
    _build_chip(
        "TPU v5e",
        device_kinds=("TPU v5 lite", "TPU v5e"),
        bf16_teraflops=197,
        memory_gib=16,
        terabytes_per_second=0.819,
        source="Google Cloud TPU v5e page",
    ),
    _build_chip(
        "TPU v5p",
        device_kinds=("TPU v5", "TPU v5p"),
        bf16_teraflops=459,
        memory_gib=95,
        terabytes_per_second=2.765,
        source="Google Cloud TPU v5p page",
    ),
    _build_chip(
        "TPU v6e",
        device_kinds=("TPU v6 lite", "TPU v6e"),
        bf16_teraflops=918,
        memory_gib=32,
        terabytes_per_second=1.638,
        source="Google Cloud TPU v6e page",
    ),
    _build_chip(
        "TPU 7x",
        device_kinds=("TPU7x",),
        bf16_teraflops=2307 / 2,
        memory_gib=96,
        terabytes_per_second=7.38 / 2,
        source="Google Cloud TPU7x page (per core)",
    ),
    _build_chip(
        "P100 SXM2",
        device_kinds=("P100-SXM2-16GB",),
        bf16_teraflops=21.2,
        memory_gib=16,
        terabytes_per_second=0.732,
        source="NVIDIA P100 data sheet; float16",
    ),
    _build_chip(
        "P100 PCIe",
        device_kinds=("P100-PCIE-16GB",),
        bf16_teraflops=18.7,
        memory_gib=16,
        terabytes_per_second=0.732,
        source="NVIDIA P100 data sheet; float16",
    ),
    _build_chip(
        "V100 SXM2 16GB",
        device_kinds=("V100-SXM2-16GB",),
        bf16_teraflops=125,
        memory_gib=16,
        terabytes_per_second=0.9,
        source="NVIDIA V100 data sheet; float16",
    ),
    _build_chip(
        "V100 SXM2 32GB",
        device_kinds=("V100-SXM2-32GB",),
        bf16_teraflops=125,
        memory_gib=32,
        terabytes_per_second=0.9,
        source="NVIDIA V100 data sheet; float16",
    ),
    _build_chip(
        "V100 PCIe 16GB",
        device_kinds=("V100-PCIE-16GB",),
        bf16_teraflops=112,
        memory_gib=16,
        terabytes_per_second=0.9,
        source="NVIDIA V100 data sheet; float16",
    ),
    _build_chip(
        "V100 PCIe 32GB",
        device_kinds=("V100-PCIE-32GB",),
        bf16_teraflops=112,
        memory_gib=32,
        terabytes_per_second=0.9,
        source="NVIDIA V100 data sheet; float16",
    ),
    _build_chip(
        "T4",
        bf16_teraflops=65,
        memory_gib=16,
        terabytes_per_second=0.32,
        source="NVIDIA T4 data sheet; float16",
    ),
    _build_chip(
        "A100 SXM 40GB",
        device_kinds=("A100-SXM4-40GB",),
        bf16_teraflops=312,
        memory_gib=40,
        terabytes_per_second=1.555,
        source="NVIDIA A100 data sheet",
    ),
    _build_chip(
        "A100 SXM 80GB",
        device_kinds=("A100-SXM4-80GB",),
        bf16_teraflops=312,
        memory_gib=80,
        terabytes_per_second=2.039,
        source="NVIDIA A100 data sheet",
    ),
    _build_chip(
        "A100 PCIe 40GB",
        device_kinds=("A100-PCIE-40GB",),
        bf16_teraflops=312,
        memory_gib=40,
        terabytes_per_second=1.555,
        source="NVIDIA A100 data sheet",
    ),
    _build_chip(
        "A100 PCIe 80GB",
        device_kinds=("A100 80GB PCIe",),
        bf16_teraflops=312,
        memory_gib=80,
        terabytes_per_second=1.935,
        source="NVIDIA A100 data sheet",
    ),
    _build_chip(
        "A10G",
        bf16_teraflops=70,
        memory_gib=24,
        terabytes_per_second=0.6,
        source="NVIDIA A10G data sheet",
    ),
    _build_chip(
        "L4",
        bf16_teraflops=121,
        memory_gib=24,
        terabytes_per_second=0.3,
        source="NVIDIA L4 data sheet, half of its sparse figure",
    ),
    _build_chip(
        "H100 SXM",
        device_kinds=("H100 80GB HBM3",),
        bf16_teraflops=989.4,
        memory_gib=80,
        terabytes_per_second=3.35,
        source="NVIDIA H100 white paper",
    ),
    _build_chip(
        "H100 PCIe",
        bf16_teraflops=756,
        memory_gib=80,
        terabytes_per_second=2.0,
        source="NVIDIA H100 white paper",
    ),
    _build_chip(
        "H200",
        bf16_teraflops=989.4,
        memory_gib=141,
        terabytes_per_second=4.8,
        source="NVIDIA H200 data sheet, half of its sparse figure",
    ),
    _build_chip(
        "B200",
        bf16_teraflops=2250,
        memory_gib=180,
        terabytes_per_second=8.0,
        source="NVIDIA DGX and HGX B200 data sheets, an eighth",
    ),
    _build_chip(
        "RTX 3090",
        device_kinds=("GeForce RTX 3090",),
        bf16_teraflops=71,
        memory_gib=24,
        terabytes_per_second=0.936,
        source="NVIDIA GA102 white paper",
    ),
    _build_chip(
        "RTX 4090",
        device_kinds=("GeForce RTX 4090",),
        bf16_teraflops=165.2,
        memory_gib=24,
        terabytes_per_second=1.008,
        source="NVIDIA Ada white paper",
    ),
)


def find_chip(device_kind: str) -> Chip | None:
    """Return the chip that jax calls `device_kind`, or None.

    Only complete names match: a slice of a GPU ("... MIG 1g.10gb") or a variant without a row here
    is unknown.
    """
    kind = device_kind.removeprefix("NVIDIA ").removeprefix("Tesla ")
    for chip in CHIPS:
        if kind in chip.device_kinds:
            return chip
    return None
