"""Errors of JAX when it starts its devices, as one message: what was asked for, what is installed, what to do.

JAX is not imported here: `--help` needs no devices.
"""

import contextlib
import importlib.metadata
import os
import re
from collections.abc import Iterator

_EXTRAS = {"cuda": "cuda", "gpu": "cuda", "tpu": "tpu"}  # of the package jax, by platform
_KNOWN = ("cpu", "cuda", "rocm", "tpu")


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


def explain(error: Exception, platforms: str) -> Exception:
    """Return the error to raise in the place of JAX's, for this value of `JAX_PLATFORMS`."""
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
