"""Arithmetic of a forward pass and of training, by formula; `chips` says how fast a machine can do it.

Counted are the matrix products, as papers do: patch embedding, query, key, value and output projections,
QK^T and AV, both MLP layers, and the head. Norms, softmax, GELU and biases are not. No jax here.

Legend: MAC multiply-accumulate = 2 FLOPs; N patches, S tokens a block sees, D width, M mlp_dim, K classes.
"""

from vit_jax.config.variants import Architecture

FLOPS_PER_MAC = 2
FORWARDS_PER_TRAINING_STEP = 3  # the backward pass computes two gradients, each as dear as the forward pass


def forward_macs(architecture: Architecture) -> int:
    """Multiply-accumulates of one image's forward pass.

    For a linear head and no attention pooling: `N*P*P*3*D + L*(S*(4*D*D + 2*D*M) + 2*S*S*D) + D*K`.
    Divided by 1e9 these are the "GFLOPs" of many tables; the paper and Scaling Vision Transformers
    count twice as many, multiplications and additions apart.
    """
    a = architecture
    num_patches, patch_values = a.grid[0] * a.grid[1], a.patch_size[0] * a.patch_size[1] * 3
    embedding = num_patches * patch_values * a.width
    return embedding + a.depth * _block(a) + _pooling(a) + _head(a)


def training_flops_per_image(architecture: Architecture) -> int:
    """FLOPs of one training example, forward and backward; what rematerialisation computes again is not counted."""
    return FORWARDS_PER_TRAINING_STEP * FLOPS_PER_MAC * forward_macs(architecture)


def exaflops(architecture: Architecture, images: float) -> float:
    """Compute of a whole training run in units of 1e18 FLOPs, as in the last column of ViT, Table 6.

    Args:
      architecture: the network at its training resolution.
      images: examples seen in training, repeats included.

    Raises:
      ValueError: a negative number of images.
    """
    if images < 0:
        raise ValueError(f"images={images}: a run cannot see fewer than 0 images; give examples = steps * batch.")
    return training_flops_per_image(architecture) * images / 1e18


def _block(a: Architecture) -> int:
    tokens = a.sequence_length
    projections = tokens * 4 * a.width * a.width
    attention = 2 * tokens * tokens * a.width  # QK^T and AV; all heads together have the full width
    return projections + attention + tokens * _mlp(a)


def _mlp(a: Architecture) -> int:
    return 2 * a.width * a.mlp_dim


def _pooling(a: Architecture) -> int:
    if a.pool != "map":
        return 0
    tokens = a.sequence_length
    query_and_output = 2 * a.width * a.width  # of the one probe
    key_and_value = tokens * 2 * a.width * a.width
    return query_and_output + key_and_value + 2 * tokens * a.width + _mlp(a)


def _head(a: Architecture) -> int:
    hidden = a.width * a.width if a.head == "mlp" else 0
    return hidden + a.width * a.num_classes
