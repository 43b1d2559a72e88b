"""VTAB-1k: its 19 tasks, or a list of your own; `vit_jax.sweeps.vtab` runs them."""
