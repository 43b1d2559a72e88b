"""The platform that JAX computes on: its default, and errors of its start as one message.

JAX is not imported here: `--help` needs no devices.
"""

import contextlib
import importlib.metadata
import importlib.util
import os
import pathlib
import pkgutil
import re
from collections.abc import Iterator, Mapping

_EXTRAS = {"cuda": "cuda", "gpu": "cuda", "tpu": "tpu"}  # of the package jax, by platform
NVIDIA_DEVICES = ("dev/nvidia[0-9]*", "dev/nvgpu*", "dev/nvhost*", "dev/dxg")  # of servers, of Jetson, of WSL
_KNOWN = ("cpu", "cuda", "rocm", "tpu")
_GOOGLE = "0x1ae0"  # vendor of PCI devices
_SET_BY_JAX = {"TPU_LIBRARY_PATH", "TPU_SKIP_MDS_QUERY"}  # also without a TPU; programs that it starts inherit them


class BackendError(RuntimeError):
    """An installed platform has no devices that this process can use."""


@contextlib.contextmanager
def explained_backend() -> Iterator[None]:
    """Replace an error of JAX that occurs while it starts its devices.

    Raises:
      ValueError: `JAX_PLATFORMS` names a platform that is not installed.
      BackendError: the platform is installed and does not start.
    """
    try:
        yield
    except (BackendError, KeyboardInterrupt, SystemExit):
        raise
    except Exception as error:
        if _comes_from_start(error):
            raise explain(error, os.environ.get("JAX_PLATFORMS", "")) from error
        raise


def explain(error: Exception, platforms: str, root: pathlib.Path = pathlib.Path("/")) -> Exception:
    """Return the error to raise in the place of JAX's, for this value of `JAX_PLATFORMS`; `root` is the file system."""
    asked = [name.strip() for name in platforms.split(",") if name.strip()]
    found = _found_plugins()
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib"))
    installed = f"{versions}, plugins: {', '.join(f'{name} {v}' for name, v in found.items()) or 'none'}"
    for name in asked:
        if name == "cpu" or any(word in plugin for word in (_EXTRAS.get(name, name), name) for plugin in found):
            continue
        if name in _EXTRAS:
            fix = f"install it: pip install -U 'jax[{_EXTRAS[name]}]'"
        else:
            fix = "install its plugin" if name in _KNOWN else f"choose one of {', '.join(_KNOWN)}"
        return ValueError(
            f"JAX_PLATFORMS={platforms}: the platform {name!r} is not installed ({installed}). Unset JAX_PLATFORMS, or "
            f"{fix}."
        )
    if {"cuda", "gpu"} & {*asked} and not any(any(root.glob(pattern)) for pattern in NVIDIA_DEVICES):
        return BackendError(
            f"JAX_PLATFORMS={platforms}: this machine shows no NVIDIA GPU ({installed}). Give the container or job its "
            "GPUs, or unset JAX_PLATFORMS."
        )
    reason = str(error).partition("\n")[0] or type(error).__name__
    field, unset = (f"JAX_PLATFORMS={platforms}", ", or unset JAX_PLATFORMS") if asked else ("JAX", "")
    return BackendError(
        f"{field}: the devices cannot be used ({installed}). JAX says: {reason}\nEnd other programs that hold the "
        f"devices, or set JAX_PLATFORMS=cpu{unset}."
    )


def plugins() -> dict[str, str]:
    """Return the versions of the packages by which JAX uses TPUs and GPUs of NVIDIA."""
    given = (distribution.name or "" for distribution in importlib.metadata.distributions())  # None: it is damaged
    names = {name.lower().replace("_", "-") for name in given}
    found = sorted(name for name in names if re.fullmatch(r"jax-cuda\d+-plugin|libtpu", name))
    return {name: importlib.metadata.version(name) for name in found}


def _found_plugins() -> dict[str, str]:
    """Also those of other platforms, which register themselves."""
    entries = importlib.metadata.entry_points(group="jax_plugins")
    return plugins() | {entry.dist.name: entry.dist.version for entry in entries if entry.dist is not None}


def _comes_from_start(error: Exception) -> bool:
    """Whether the traceback passes the module of JAX that starts devices."""
    place = error.__traceback__
    while place is not None:
        if place.tb_frame.f_globals.get("__name__") == "jax._src.xla_bridge":
            return True
        place = place.tb_next
    return False


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

    libtpu and JAX's plugin for CUDA, installed for plans and tests, print several lines of errors when JAX starts them
    without a device. Wherever anything hints at an accelerator, JAX decides: its devices, its variables, or another
    plugin of JAX.
    """
    names_of_plugins = _plugin_modules()
    has_cuda = any("cuda" in name for name in names_of_plugins)
    if environment.get("JAX_PLATFORMS") or not (has_cuda or importlib.util.find_spec("libtpu")):
        return ""
    names = environment.keys() - _SET_BY_JAX
    if any(name.startswith(("TPU_", "JAX_FORCE_TPU")) for name in names):
        return ""
    devices = ("dev/accel*", "dev/vfio/[0-9]*", *NVIDIA_DEVICES, "dev/kfd")
    if has_tpu(root) or any(any(root.glob(pattern)) for pattern in devices):
        return ""
    return "" if any("cuda" not in name for name in names_of_plugins) else "cpu"


def _plugin_modules() -> set[str]:
    """Return the names of JAX's plugins: modules of the package jax_plugins, and entry points."""
    spec = importlib.util.find_spec("jax_plugins")
    places = (spec.submodule_search_locations if spec else None) or []
    return {module.name for module in pkgutil.iter_modules([*places])} | {
        entry.name for entry in importlib.metadata.entry_points(group="jax_plugins")
    }
