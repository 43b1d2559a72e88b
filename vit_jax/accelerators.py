"""Accelerators of this machine by their device files, without JAX."""

import importlib.metadata
import importlib.util
import pathlib
from collections.abc import Mapping

_GOOGLE = "0x1ae0"  # vendor of PCI devices
_SET_BY_JAX = {"TPU_LIBRARY_PATH", "TPU_SKIP_MDS_QUERY"}  # also without a TPU; programs that it starts inherit them


def has_tpu(root: pathlib.Path) -> bool:
    """Whether there is a TPU: a character device, or a PCI device of Google that is handed to programs.

    `launch/environment.sh` decides in the same way.
    """
    if any(root.glob("dev/accel[0-9]*")):
        return True
    vendors = root.glob("sys/bus/pci/drivers/vfio-pci/*/vendor")
    return any(file.read_text().strip() == _GOOGLE for file in vendors)


def default_platforms(environment: Mapping[str, str], root: pathlib.Path) -> str:
    """Return "cpu" where JAX would try a TPU that is absent, and "" where its own choice is right.

    libtpu, installed for plans and tests, prints several lines of errors when JAX starts it without a TPU. Wherever
    anything hints at an accelerator, JAX decides: its devices, its variables, or a plugin of JAX.
    """
    if environment.get("JAX_PLATFORMS") or importlib.util.find_spec("libtpu") is None:
        return ""
    names = environment.keys() - _SET_BY_JAX
    if any(name.startswith(("TPU_", "JAX_FORCE_TPU")) for name in names):
        return ""
    devices = ("dev/accel*", "dev/vfio/[0-9]*", "dev/nvidia[0-9]*", "dev/dxg", "dev/kfd")
    if has_tpu(root) or any(any(root.glob(pattern)) for pattern in devices):
        return ""
    if importlib.util.find_spec("jax_plugins") or importlib.metadata.entry_points(group="jax_plugins"):
        return ""
    return "cpu"
