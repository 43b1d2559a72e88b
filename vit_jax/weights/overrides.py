"""Options for weights whose file does not state everything.

This module imports no jax: the command line reads the options for its help.
"""

OPTIONS = {
    "architecture": (
        "NAME",
        "name of the network in timm or transformers, if config.json has none or an unknown one",
    ),
    "image_size": ("H,W", "height and width of the images in pixels, or one number for both"),
    "num_heads": ("N", "heads of attention"),
    "gelu": ("tanh|exact|quick", "form of the activation"),
    "layer_norm_epsilon": ("X", "epsilon of every layer norm"),
    "group_norm_epsilon": ("X", "epsilon of every group norm"),
    "standardization_epsilon": ("X", "epsilon of weight standardisation"),
    "standardization_epsilon_added_to": ("variance|std", "statistic that this epsilon is added to"),
    "rope": ("centred|grid|index", "rotary positions, of DINOv3, EVA-02 or PE"),
    "position_embedding": ("learned_1d|learned_2d|sincos2d|none", "kind of position embedding"),
}
"""Name and fields of the architecture for files that do not state them: form and meaning."""
