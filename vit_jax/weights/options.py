"""What a caller may state of weights whose file does not. No jax here: the command line reads it for its help."""

OPTIONS = (
    "image_size",
    "num_heads",
    "gelu",
    "layer_norm_epsilon",
    "group_norm_epsilon",
    "standardization_epsilon",
    "standardization_epsilon_added_to",
    "position_embedding",
)
"""Fields of the architecture that `load_weights` takes, for weights whose file does not state them."""
