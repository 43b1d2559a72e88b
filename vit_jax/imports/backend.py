"""The platform that JAX computes on: its default, and errors of its start as one message.

JAX is not imported here: `--help` needs no devices.
"""

import contextlib
import importlib.metadata
import importlib.util
import logging
import os
import pathlib
import pkgutil
import re
import sys
import tempfile
import types
from collections.abc import Iterable, Iterator, Mapping

_EXTRAS = {"cuda": "cuda", "gpu": "cuda", "tpu": "tpu"}
"""Extras of the package jax, by platform."""
NVIDIA_DEVICES = ("dev/nvidia[0-9]*", "dev/nvgpu*", "dev/nvhost*", "dev/dxg")
"""Files of devices: of servers, of Jetson (two), of WSL."""
_KNOWN = ("cpu", "cuda", "rocm", "tpu")
_GOOGLE = "0x1ae0"
"""Google as the vendor of a PCI device."""
_CUDA = ("12", "13")
"""Releases that JAX has plugins for: jax_cudaN_plugin, registered by jax_plugins.xla_cudaN."""
_SET_BY_JAX = {"TPU_LIBRARY_PATH", "TPU_SKIP_MDS_QUERY"}
"""Variables that JAX sets also without a TPU; programs that it starts inherit them."""


class BackendError(RuntimeError):
    """An installed platform has no devices that this process can use."""


@contextlib.contextmanager
def explain_backend_errors() -> Iterator[None]:
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
    """Return the error to raise in place of an error of JAX.

    `platforms` is the value of `JAX_PLATFORMS`, `root` the file system.
    """
    asked = _split_platforms(platforms)
    installed_plugins = _find_all_plugins()
    installed = _describe_installation(installed_plugins)
    for name in asked:
        if name != "cpu" and not _has_plugin(name, installed_plugins):
            return ValueError(
                f"JAX_PLATFORMS={platforms}: the platform {name!r} is not installed ({installed}). "
                f"Unset JAX_PLATFORMS, or {_advise_installation(name)}."
            )
    if {"cuda", "gpu"} & {*asked} and not _has_nvidia(root):
        return BackendError(
            f"JAX_PLATFORMS={platforms}: this machine shows no NVIDIA GPU ({installed}). "
            "Give the container or job its GPUs, or unset JAX_PLATFORMS."
        )
    field = "JAX"
    unset = ""
    if asked:
        field = f"JAX_PLATFORMS={platforms}"
        unset = ", or unset JAX_PLATFORMS"
    reason = str(error).partition("\n")[0] or type(error).__name__
    return BackendError(
        f"{field}: the devices cannot be used ({installed}). JAX says: {reason}\n"
        f"End other programs that hold the devices, or set JAX_PLATFORMS=cpu{unset}."
    )


def _split_platforms(platforms: str) -> list[str]:
    """Return the names in a value of `JAX_PLATFORMS`."""
    return list(filter(None, map(str.strip, platforms.split(","))))


def _describe_installation(installed_plugins: Mapping[str, str]) -> str:
    """Return the versions of JAX and of its plugins in words."""
    jax = importlib.metadata.version("jax")
    jaxlib = importlib.metadata.version("jaxlib")
    plugins_found = ", ".join(map(" ".join, installed_plugins.items())) or "none"
    return f"jax {jax}, jaxlib {jaxlib}, plugins: {plugins_found}"


def _has_plugin(platform: str, installed_plugins: Iterable[str]) -> bool:
    extra = _EXTRAS.get(platform, platform)
    return any(extra in plugin or platform in plugin for plugin in installed_plugins)


def _advise_installation(platform: str) -> str:
    if platform in _EXTRAS:
        return f"install it: pip install -U 'jax[{_EXTRAS[platform]}]'"
    if platform in _KNOWN:
        return "install its plugin"
    return f"choose one of {', '.join(_KNOWN)}"


def plugins() -> dict[str, str]:
    """Return the versions of the packages by which JAX uses TPUs and GPUs of NVIDIA."""
    names = set()
    for distribution in importlib.metadata.distributions():
        name = distribution.name or ""  # None for damaged metadata
        names.add(name.lower().replace("_", "-"))
    versions = {}
    for name in sorted(names):
        if re.fullmatch(r"jax-cuda\d+-plugin|libtpu", name):
            versions[name] = importlib.metadata.version(name)
    return versions


def _find_all_plugins() -> dict[str, str]:
    """Return all plugins, also those of other platforms, which register themselves."""
    versions = plugins()
    for entry in importlib.metadata.entry_points(group="jax_plugins"):
        if entry.dist is not None:
            versions[entry.dist.name] = entry.dist.version
    return versions


def _comes_from_start(error: Exception) -> bool:
    """Return True if the traceback passes the module of JAX that starts devices."""
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_globals.get("__name__") == "jax._src.xla_bridge":
            return True
        traceback = traceback.tb_next
    return False


def has_tpu(root: pathlib.Path) -> bool:
    """Return True if there is a TPU.

    It is a character device, or a PCI device of Google that is handed to programs.
    `launch/environment.sh` decides in the same way.
    """
    if any(root.glob("dev/accel[0-9]*")):
        return True
    vendors = root.glob("sys/bus/pci/drivers/vfio-pci/*/vendor")
    return any(file.read_text().strip() == _GOOGLE for file in vendors)


def default_platforms(environment: Mapping[str, str], root: pathlib.Path) -> str:
    """Return "cpu" where JAX would try an absent accelerator, and "" where its own choice is right.

    libtpu and the CUDA plugin, installed for plans and tests, print errors when JAX starts them
    without a device.
    """
    if environment.get("JAX_PLATFORMS") or not _has_only_cpus(environment, root):
        return ""
    if _find_registered_plugins() or importlib.util.find_spec("libtpu") is not None:
        return "cpu"
    return ""


def uses_only_cpus(environment: Mapping[str, str], root: pathlib.Path) -> bool:
    """Return True if JAX, which has not started yet, will certainly compute on CPUs."""
    asked = _split_platforms(environment.get("JAX_PLATFORMS", ""))
    if asked:
        return asked == ["cpu"]
    return _has_only_cpus(environment, root)


def _has_only_cpus(environment: Mapping[str, str], root: pathlib.Path) -> bool:
    """Return True unless anything hints at an accelerator.

    Hints are its devices, its variables, and another plugin of JAX. With a hint, JAX decides.
    """
    names = environment.keys() - _SET_BY_JAX
    if any(name.startswith(("TPU_", "JAX_FORCE_TPU")) for name in names):
        return False
    devices = ("dev/accel*", "dev/vfio/[0-9]*", "dev/kfd")
    if has_tpu(root) or _has_nvidia(root) or _has_files(root, devices):
        return False
    registered = _find_registered_plugins()
    return all(re.fullmatch(r"xla_cuda\d+", name) for name in registered)


def _find_registered_plugins() -> set[str]:
    """Return the names by which JAX finds plugins: modules in `jax_plugins`, and entry points."""
    names = set()
    for entry in importlib.metadata.entry_points(group="jax_plugins"):
        names.add(entry.name)
    spec = importlib.util.find_spec("jax_plugins")
    if spec is not None:
        folders = list(spec.submodule_search_locations or ())
        for module in pkgutil.iter_modules(folders):
            names.add(module.name)
    return names


def _has_nvidia(root: pathlib.Path) -> bool:
    return _has_files(root, NVIDIA_DEVICES)


def _has_files(root: pathlib.Path, patterns: Iterable[str]) -> bool:
    return any(any(root.glob(pattern)) for pattern in patterns)


def hide_cuda(environment: Mapping[str, str], root: pathlib.Path) -> None:
    """Keep JAX from loading the CUDA plugin where there is no GPU.

    The plugin prints lines and takes half a GB. Call this before JAX is imported. A plan loads the
    plugin itself (`load_cuda`).
    """
    asked = _split_platforms(environment.get("JAX_PLATFORMS", ""))
    if not _has_nvidia(root) and not {"cuda", "gpu"} & {*asked}:
        forbid_cuda()


def forbid_cuda() -> None:
    """Keep JAX, which is not imported yet, from loading the CUDA plugin in this process."""
    for release in _CUDA:
        hidden = types.ModuleType(f"jax_plugins.xla_cuda{release}")
        hidden.__dict__["initialize"] = lambda: None  # JAX calls it
        sys.modules.setdefault(hidden.__name__, hidden)
        # None makes Python's import fail, as if the plugin were absent.
        sys.modules.setdefault(f"jax_cuda{release}_plugin", None)  # type: ignore[arg-type]


def load_cuda() -> None:
    """Register the CUDA plugin with JAX after `hide_cuda`.

    Its messages about absent drivers are dropped.
    """
    installed = plugins()
    releases = [release for release in _CUDA if f"jax-cuda{release}-plugin" in installed]
    name = f"jax_plugins.xla_cuda{releases[0]}"
    del sys.modules[name]
    logging.getLogger(name).setLevel(logging.ERROR)
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        with tempfile.TemporaryFile() as dropped:
            os.dup2(dropped.fileno(), 2)  # the library writes to the descriptor
            importlib.import_module(name).initialize()
    finally:
        os.dup2(kept, 2)
        os.close(kept)
