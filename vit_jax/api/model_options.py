"""Options of `create_model` and `load_model`, which type checkers compare with their calls."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Literal, TypedDict, cast

from vit_jax.config.network_options import (
    AddedTo,
    AttentionForm,
    BlockForm,
    ComputeDtype,
    EmbeddingNorm,
    FinalNorm,
    Gelu,
    HeadForm,
    InitialValues,
    MlpForm,
    NormForm,
    Pool,
    PositionEmbedding,
    PositionLayers,
    PositionTokens,
    QkvBias,
    Remat,
    Rope,
    StochasticDepthForm,
    UnitForm,
)
from vit_jax.config.schema import ChannelWeights, Interpolation, PositionResize
from vit_jax.text.nearest import did_you_mean

Resize = Literal["short_side", "direct"]


class ModelOptions(TypedDict, total=False):
    """Fields of `config.ModelConfig`, which explains them, beside name and compute dtype.

    A `str` beside other types is a reference "package.module:name".
    """

    remat: Remat
    scan_unroll: int | None
    attention: AttentionForm
    network: str | None
    head_bias_init: float
    initial_values: InitialValues
    block: BlockForm | str | None
    position_embedding: PositionEmbedding | str
    position_layers: PositionLayers
    position_stddev: float
    dropout_fraction: float
    stochastic_depth_fraction: float
    stochastic_depth_form: StochasticDepthForm
    gelu: Gelu
    layer_norm_epsilon: float
    class_tokens: int | None
    pool_num_heads: int | None
    registers: int
    position_tokens: PositionTokens
    rope: Rope | None
    layer_scale: float | None
    mlp: MlpForm
    norm: NormForm
    embedding_norm: EmbeddingNorm | None
    final_norm: FinalNorm
    attention_norm: bool
    patch_bias: bool
    qkv_bias: QkvBias
    linear_bias: bool
    pool: Pool | str | None
    head: HeadForm | str | None
    width: int | None
    depth: int | None
    mlp_dim: int | None
    num_heads: int | None
    residual_unit: UnitForm | None
    group_norm_epsilon: float | None
    standardization_epsilon: float | None
    standardization_epsilon_added_to: AddedTo | None


class BuildOptions(TypedDict, total=False):
    """Options of `from_weights`, which explains them, beside classes and image size."""

    compute_dtype: ComputeDtype
    resize: Resize | None
    crop_fraction: float | None
    interpolation: Interpolation | None
    exif_orientation: bool | None
    value_range: tuple[float, float] | None
    position_resize: PositionResize
    channels: int | None
    channel_weights: ChannelWeights


class StatedOptions(TypedDict, total=False):
    """Values that a file of weights may not state, of `weights.OPTIONS`, beside the image size."""

    architecture: str
    num_heads: int
    gelu: Gelu
    layer_norm_epsilon: float
    group_norm_epsilon: float
    standardization_epsilon: float
    standardization_epsilon_added_to: AddedTo
    rope: Rope
    position_embedding: PositionEmbedding


class LoadOptions(BuildOptions, StatedOptions, total=False):
    """Further options of `load_model`."""


def require_known_options(
    function: Callable[..., object],
    given: Iterable[str],
    further: Iterable[str],
    advice: Mapping[str, str] = MappingProxyType({}),
    error: type[Exception] = ValueError,
) -> None:
    """Raise an error for the first option that a function does not have.

    Args:
      function: has keyword-only parameters.
      given: names of options.
      further: names of its options that are no parameters.
      advice: by name, what to do in the place of options that users expect.
      error: the error.
    """
    known = set(further)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            known.add(parameter.name)
    for name in given:
        if name in advice:
            raise error(f"{function.__name__} has no {name}=: {advice[name]}.")
        if name not in known:
            hint = did_you_mean(name, known)
            raise error(f"{function.__name__} has no option {name}=.{hint}")


def split_load_options(
    options: Mapping[str, object],
) -> tuple[BuildOptions, dict[str, object]]:
    """Return the options of `from_weights`, and the values that a file may not state.

    All options are known.
    """
    build_options = {}
    stated = {}
    for name, value in options.items():
        if name in StatedOptions.__optional_keys__:
            stated[name] = value
        else:
            build_options[name] = value
    return cast(BuildOptions, build_options), stated
