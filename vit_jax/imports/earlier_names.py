"""Modules by the names that earlier versions documented, for imports and references of users.

Modules of google-research/vision_transformer, whose package has the same name, are named as such.
"""

import importlib
import importlib.machinery
import sys
import types
from collections.abc import Sequence

MOVED = {
    "vit_jax.data.image_files": "vit_jax.data.kinds.image_files",
    "vit_jax.data.images": "vit_jax.data.decoding.images",
    "vit_jax.data.in_memory": "vit_jax.data.kinds.in_memory",
    "vit_jax.data.tfds_source": "vit_jax.data.kinds.tfds_source",
    "vit_jax.data.vtab_tasks": "vit_jax.data.kinds.vtab_tasks",
    "vit_jax.figures": "vit_jax.tools.figures",
    "vit_jax.machine": "vit_jax.tools.machine",
    "vit_jax.models.activations": "vit_jax.kernels.devices",
    "vit_jax.models.embed": "vit_jax.models.embedding",
    "vit_jax.models.head": "vit_jax.models.heads",
    "vit_jax.models.position_tables": "vit_jax.models.positions",
    "vit_jax.models.transformer": "vit_jax.models.encoder",
    "vit_jax.plan": "vit_jax.tools.plan",
    "vit_jax.sweeps": "vit_jax.tools.sweeps",
}
"""Earlier name of a module or folder: its present name."""

GOOGLE_MODULES = frozenset(
    {
        "vit_jax.configs",
        "vit_jax.inference_time",
        "vit_jax.input_pipeline",
        "vit_jax.main",
        "vit_jax.models_lit",
        "vit_jax.models_mixer",
        "vit_jax.models_resnet",
        "vit_jax.models_vit",
        "vit_jax.preprocess",
        "vit_jax.utils",
    }
)
"""Modules of google-research/vision_transformer that are none of this package."""


def find_present_name(name: str) -> str | None:
    """Return the present name of a module that was moved, or None for another module."""
    for earlier, present in MOVED.items():
        if name == earlier or name.startswith(f"{earlier}."):
            return present + name.removeprefix(earlier)
    return None


class EarlierNames:
    """An importer that gives the present module for an earlier name.

    Both names are the same module object.

    It has no base class: `importlib.abc` would add ten milliseconds to each start.
    """

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        """Return a specification for earlier names only.

        Raises:
          ModuleNotFoundError: the module is one of google-research/vision_transformer.
        """
        if fullname in GOOGLE_MODULES:
            # With the argument `name`, `from vit_jax import utils` would hide the message.
            raise ModuleNotFoundError(
                f"{fullname} is a module of google-research/vision_transformer, which installs "
                "another package named vit_jax: use a separate environment for each. "
                "This package: vit_jax.create_model, vit_jax.load_model."
            )
        if find_present_name(fullname) is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, self)  # type: ignore[arg-type] # no base

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        """Let Python create the module, which `exec_module` replaces."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Replace the new module of the earlier name by the present one."""
        present_name = find_present_name(module.__name__)
        assert present_name, module.__name__
        sys.modules[module.__name__] = importlib.import_module(present_name)


def install_earlier_names() -> None:
    """Let Python's import system find modules by their earlier names, once for a process."""
    if not any(isinstance(finder, EarlierNames) for finder in sys.meta_path):
        # The finder of files comes later: it finds some modules below a moved folder.
        sys.meta_path.insert(0, EarlierNames())
