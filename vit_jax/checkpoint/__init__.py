"""Training states on disk."""

from vit_jax.checkpoint.reader import CheckpointReader, DamagedCheckpoint
from vit_jax.checkpoint.store import CheckpointStore, SaveError

__all__ = ["CheckpointReader", "CheckpointStore", "DamagedCheckpoint", "SaveError"]
