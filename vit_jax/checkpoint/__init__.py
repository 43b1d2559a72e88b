"""Training states on disk."""

from vit_jax.checkpoint.store import CheckpointStore, SaveError

__all__ = ["CheckpointStore", "SaveError"]
