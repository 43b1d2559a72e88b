"""Compiled programs that are kept on disk for other processes."""

import jax

from vit_jax.storage.files import cache_folder


def use_compilation_cache(enabled: bool) -> None:
    """Keep compiled programs for other processes, unless the user has chosen a cache of JAX."""
    if enabled and not jax.config.jax_compilation_cache_dir:  # type: ignore[attr-defined]
        jax.config.update("jax_compilation_cache_dir", str(cache_folder("xla")))
