"""Weights of any format: read, recognised, fitted to a network, and written.

States of runs are in `checkpoint`. This module imports no jax: the command line reads `OPTIONS` for its help.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vit_jax.weights.load import Weights, load_weights

__all__ = ["OPTIONS", "Weights", "load_weights"]

OPTIONS = {
    "image_size": ("H,W", "height and width of the images in pixels, or one number for both"),
    "num_heads": ("N", "heads of attention"),
    "gelu": ("tanh|exact|quick", "form of the activation"),
    "layer_norm_epsilon": ("X", "of every layer norm"),
    "group_norm_epsilon": ("X", "of every group norm"),
    "standardization_epsilon": ("X", "of weight standardisation"),
    "standardization_epsilon_added_to": ("variance|std", "where it is added"),
    "rope": ("centred|grid|index", "rotary positions, of DINOv3, EVA-02 or PE"),
    "position_embedding": ("learned_1d|learned_2d|sincos2d|none", "kind of positions"),
}
"""Fields of the architecture that `load_weights` takes, where the file does not state them: form and meaning."""


def __getattr__(name: str) -> Any:
    """Import on first use, so that the command line reads its options without JAX."""
    if name not in ("Weights", "load_weights"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vit_jax.weights import load

    return getattr(load, name)
