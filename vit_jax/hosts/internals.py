"""Private names of JAX that this folder uses.

Checked with JAX 0.10.2 and 0.12.0; a test holds their behaviour.
"""

from jax._src import clusters
from jax._src.cloud_tpu_init import running_in_cloud_tpu_vm
from jax._src.distributed import global_state

__all__ = ["clusters", "global_state", "running_in_cloud_tpu_vm"]
