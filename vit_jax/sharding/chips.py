"""Peak arithmetic, memory and bandwidth of accelerators, from their vendors' data sheets.

One `Chip` is one device as jax counts them. A TPU v2, v3 or 7x chip shows up as two devices, so its
numbers are halved here; v4 and v5p fuse their two cores into one device. No jax here.
"""

import dataclasses

GIB = 2**30
TERA = 1e12


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device."""

    name: str  # short and unique
    # Values of `jax.Device.device_kind`, without "NVIDIA " or "Tesla ".
    device_kinds: tuple[str, ...]
    # FLOP/s of dense matrix products with float32 sums; in float16 where the source says that there
    # is no bfloat16.
    peak_bf16_flops: float
    # Nominal: vendors' GB of device memory are GiB; ECC and the driver keep a few per cent.
    memory_bytes: int
    memory_bandwidth_bytes_per_second: float  # between that memory and the cores
    source: str  # the document that the numbers are from


# fmt: off
CHIPS = (
    Chip("TPU v2", ("TPU v2",), 46 / 2 * TERA, 8 * GIB, 0.7 / 2 * TERA, "Norrie et al., IEEE Micro 2021 (per core)"),
    Chip("TPU v3", ("TPU v3",), 123 / 2 * TERA, 16 * GIB, 0.9 / 2 * TERA, "Google Cloud TPU v3 page (per core)"),
    Chip("TPU v4", ("TPU v4",), 275 * TERA, 32 * GIB, 1.2 * TERA, "Google Cloud TPU v4 page"),
    Chip("TPU v5e", ("TPU v5 lite", "TPU v5e"), 197 * TERA, 16 * GIB, 0.819 * TERA, "Google Cloud TPU v5e page"),
    Chip("TPU v5p", ("TPU v5", "TPU v5p"), 459 * TERA, 95 * GIB, 2.765 * TERA, "Google Cloud TPU v5p page"),
    Chip("TPU v6e", ("TPU v6 lite", "TPU v6e"), 918 * TERA, 32 * GIB, 1.638 * TERA, "Google Cloud TPU v6e page"),
    Chip("TPU 7x", ("TPU7x",), 2307 / 2 * TERA, 96 * GIB, 7.38 / 2 * TERA, "Google Cloud TPU7x page (per core)"),
    Chip("P100 SXM2", ("P100-SXM2-16GB",), 21.2 * TERA, 16 * GIB, 0.732 * TERA, "NVIDIA P100 data sheet; float16"),
    Chip("P100 PCIe", ("P100-PCIE-16GB",), 18.7 * TERA, 16 * GIB, 0.732 * TERA, "NVIDIA P100 data sheet; float16"),
    Chip("V100 SXM2 16GB", ("V100-SXM2-16GB",), 125 * TERA, 16 * GIB, 0.9 * TERA, "NVIDIA V100 data sheet; float16"),
    Chip("V100 SXM2 32GB", ("V100-SXM2-32GB",), 125 * TERA, 32 * GIB, 0.9 * TERA, "NVIDIA V100 data sheet; float16"),
    Chip("V100 PCIe 16GB", ("V100-PCIE-16GB",), 112 * TERA, 16 * GIB, 0.9 * TERA, "NVIDIA V100 data sheet; float16"),
    Chip("V100 PCIe 32GB", ("V100-PCIE-32GB",), 112 * TERA, 32 * GIB, 0.9 * TERA, "NVIDIA V100 data sheet; float16"),
    Chip("T4", ("T4",), 65 * TERA, 16 * GIB, 0.32 * TERA, "NVIDIA T4 data sheet; float16"),
    Chip("A100 SXM 40GB", ("A100-SXM4-40GB",), 312 * TERA, 40 * GIB, 1.555 * TERA, "NVIDIA A100 data sheet"),
    Chip("A100 SXM 80GB", ("A100-SXM4-80GB",), 312 * TERA, 80 * GIB, 2.039 * TERA, "NVIDIA A100 data sheet"),
    Chip("A100 PCIe 40GB", ("A100-PCIE-40GB",), 312 * TERA, 40 * GIB, 1.555 * TERA, "NVIDIA A100 data sheet"),
    Chip("A100 PCIe 80GB", ("A100 80GB PCIe",), 312 * TERA, 80 * GIB, 1.935 * TERA, "NVIDIA A100 data sheet"),
    Chip("A10G", ("A10G",), 70 * TERA, 24 * GIB, 0.6 * TERA, "NVIDIA A10G data sheet"),
    Chip("L4", ("L4",), 121 * TERA, 24 * GIB, 0.3 * TERA, "NVIDIA L4 data sheet, half of its sparse figure"),
    Chip("H100 SXM", ("H100 80GB HBM3",), 989.4 * TERA, 80 * GIB, 3.35 * TERA, "NVIDIA H100 white paper"),
    Chip("H100 PCIe", ("H100 PCIe",), 756 * TERA, 80 * GIB, 2.0 * TERA, "NVIDIA H100 white paper"),
    Chip("H200", ("H200",), 989.4 * TERA, 141 * GIB, 4.8 * TERA, "NVIDIA H200 data sheet, half of its sparse figure"),
    Chip("B200", ("B200",), 2250 * TERA, 180 * GIB, 8.0 * TERA, "NVIDIA DGX and HGX B200 data sheets, an eighth"),
    Chip("RTX 3090", ("GeForce RTX 3090",), 71 * TERA, 24 * GIB, 0.936 * TERA, "NVIDIA GA102 white paper"),
    Chip("RTX 4090", ("GeForce RTX 4090",), 165.2 * TERA, 24 * GIB, 1.008 * TERA, "NVIDIA Ada white paper"),
)
# fmt: on


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
