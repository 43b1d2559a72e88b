"""What the compiler is told beside the shardings."""

from jax.sharding import Mesh

# Where a collective meets a matrix product, XLA for TPUs replaces both by a loop which hands parts round ("windowed
# einsum"). By its own count of cycles a step of ViT-B/16 with FSDP takes four times as long with these loops as with
# collectives (plan/README.md). From this many MiB on it may have them.
TPU_OPTIONS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}


def compiler_options(mesh: Mesh) -> dict[str, str] | None:
    """Options of `jax.jit` for a step on this mesh, or None."""
    return TPU_OPTIONS if mesh.devices.flat[0].platform == "tpu" else None
