"""The options of a network's form and of its computation, which configs and architectures have.

`schema` has the other options of a run, and says how fields are written.
"""

import dataclasses
from typing import Annotated, Literal

from vit_jax.config.rules import (
    Count,
    Fraction,
    NotNegative,
    Number,
    Positive,
    Reference,
    Transformer,
    When,
)

Pool = Literal["token", "gap", "map", "token_gap"]
HeadForm = Literal["mlp", "linear"]
PositionEmbedding = Literal["learned_1d", "learned_2d", "sincos2d", "none", "relative"]
PositionLayers = Literal["stem", "every", "shared"]
BlockForm = Literal["axial"]
Gelu = Literal["tanh", "exact", "quick"]
MlpForm = Literal["gelu", "swiglu", "swiglu_norm"]
NormForm = Literal["layer", "rms"]
PositionTokens = Literal["all", "patches"]
Rope = Literal["centred", "grid", "index"]
EmbeddingNorm = Literal["patches", "tokens"]
FinalNorm = Literal["tokens", "pooled", "none"]
QkvBias = Literal["all", "query_value", "none"]
UnitForm = Literal["preactivation", "postactivation"]
AddedTo = Literal["variance", "std"]
InitialValues = Literal["paper", "truncated_normal"]
StochasticDepthForm = Literal["linear", "constant"]
ComputeDtype = Literal["float32", "bfloat16"]
DtypeChoice = Literal["auto", "float32", "bfloat16"]
Policy = Literal["none", "dots", "attention", "full"]
Remat = Literal["auto", "none", "dots", "attention", "full"]
Views = Literal["flip", "flips", "rotations"]
"""Views of an image over which an evaluation averages: `models.views`."""
AttentionForm = Literal["auto", "xla", "pallas", "cudnn"]
LORA_RANK = 16
"""Rank of LoRA unless another is requested."""
LORA_FACTORS = ("lora_a", "lora_b")  # the last parts of the names of parameters
LEARNED_POSITIONS = ("learned_1d", "learned_2d", "relative")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputeOptions:
    """How a network computes, also that of the weights in fine-tuning."""

    compute_dtype: DtypeChoice = "auto"
    """Dtype of activations and matrix products. Parameters, norm statistics, softmax and loss stay
    in float32. auto: float32 on CPUs, where bfloat16 is slower, else bfloat16."""
    remat: Remat = "auto"
    """Rematerialisation: the backward pass recomputes nothing (none), all but matrix products
    (dots), all but attention outputs (attention), or each block from its input (full). Later values
    use less memory and more time. auto: the first that fits the memory of the devices; on CPUs
    dots for transformers."""
    scan_unroll: Count | None = None
    """Blocks or residual units per iteration of the loop over layers. None: all where remat is none
    or dots (blocks on TPUs and GPUs, residual units on TPUs) and all residual units on a CPU; else
    1."""
    attention: AttentionForm = "auto"
    """Implementation of attention. auto: pallas on TPUs and cudnn on GPUs in bfloat16 where they
    can, else xla."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class NetworkOptions(ComputeOptions):
    """The form of a network to train."""

    network: Reference | None = None
    """A user-defined network in place of the named one: called with (architecture, key), it returns
    a module from images to a ModelOutput. None: the named network."""
    head_bias_init: float = 0.0
    """Initial bias of the last layer. -10 suits the sigmoid loss: all classes begin improbable."""
    initial_values: Transformer[InitialValues] = "paper"
    """Initial parameters: those of the released code, with a head of zeros (paper), or all kernels
    and the class token from a truncated normal of 0.02, with biases of zero (truncated_normal, DeiT
    III)."""
    block: Transformer[BlockForm | Reference | None] = None
    """Axial attends along rows, then along columns, each followed by an MLP (ViT, App. D.6); a
    reference is a class that replaces `models.block.Block`. None: the standard block."""
    position_embedding: Transformer[PositionEmbedding | Reference] = "learned_1d"
    """Form of the position embedding (ViT, App. D.4). relative belongs to every block's
    attention."""
    position_layers: Transformer[PositionLayers] = "stem"
    """Add positions once (stem), or before every block, each with its own (every) or the same
    (shared; ViT, D.4)."""
    position_stddev: Transformer[
        Annotated[Positive, When("position_embedding", *LEARNED_POSITIONS, Reference)]
    ] = 0.02
    """Standard deviation of learned positions at initialisation; big_vision has width ** -0.5."""
    dropout_fraction: Transformer[Fraction] = 0.0
    """Fraction of activations that dropout sets to 0 (ViT, Table 3)."""
    stochastic_depth_fraction: Transformer[Fraction] = 0.0
    """Fraction of images that skip the last block, by stochastic_depth_form the other blocks too
    (AugReg)."""
    stochastic_depth_form: Transformer[
        Annotated[StochasticDepthForm, When("stochastic_depth_fraction")]
    ] = "linear"
    """Fraction of images that skip each block: rises linearly from 0 at the first block, or is
    constant (DeiT III)."""
    gelu: Transformer[Gelu] = "tanh"
    """GELU: exact, its tanh approximation, as the released code, or x * sigmoid(1.702 x) (quick),
    as CLIP."""
    layer_norm_epsilon: Transformer[Positive] = 1e-6
    """Added to the variance in each layer norm."""
    class_tokens: Transformer[Number | None] = None
    """Number of class tokens; pooling takes all, side by side. None: 1 if pool has the class token,
    else 0."""
    pool_num_heads: Transformer[Count | None] = None
    """Heads of attention pooling. None: num_heads."""
    registers: Transformer[Number] = 0
    """Number of learned tokens behind the class token that pooling ignores (Darcet et al.,
    2024)."""
    position_tokens: Transformer[PositionTokens] = "all"
    """Tokens with learned positions: all, or patches alone, without class token and registers."""
    rope: Transformer[Rope | None] = None
    """Rotary positions of queries and keys, beside position_embedding. Coordinates of patches are
    relative to the image (centred, DINOv3), relative to a grid of 16 x 16 (grid, EVA-02), or
    counted (index, PE). None: none."""
    layer_scale: Transformer[NotNegative | None] = None
    """Initial value of a learned vector that multiplies each residual branch. None: no such
    vector."""
    mlp: Transformer[MlpForm] = "gelu"
    """MLP of each block: two layers around a GELU, gated by SiLU (swiglu), or with a norm too
    (swiglu_norm, EVA-02)."""
    norm: Transformer[NormForm] = "layer"
    """Layer norm, or root mean square norm without bias (rms)."""
    embedding_norm: Transformer[EmbeddingNorm | None] = None
    """A norm before the first block: of patches without positions (AIMv2), or of all tokens (CLIP).
    None: none."""
    final_norm: Transformer[FinalNorm] = "tokens"
    """The norm after the last block: of all tokens, of the pooled features (pooled), or none."""
    attention_norm: Transformer[bool] = False
    """A norm of the attention output before its last projection (EVA-02 CLIP)."""
    patch_bias: Transformer[bool] = True
    """Bias of the patch embedding."""
    qkv_bias: Transformer[QkvBias] = "all"
    """Biases of queries, keys and values: all, of queries and values, or none."""
    linear_bias: Transformer[bool] = True
    """Biases of the attention output and of the MLP."""
