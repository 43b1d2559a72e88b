"""Every option of a run, declared once.

A recipe in `configs/` returns one of these frozen dataclasses; the command line overrides single
fields (`--config.section.field=value`); `load` checks names and types, `resolve` checks values against
the dataset and the devices. A unit stands in the name of a field, or, for a `Duration`, in its value.
No jax is imported here, so recipes load anywhere.
"""

import dataclasses
from typing import Literal, NewType

Duration = NewType("Duration", str)
"""A length of training with its unit: "300 epochs", "500 steps", "1e6 examples" or "0.1 fraction"."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which network. `name` picks a row of `variants`; a number given beside it replaces the row's."""

    name: str  # "ViT-B/16"
    width: int | None = None
    depth: int | None = None
    mlp_dim: int | None = None
    num_heads: int | None = None
    pool: Literal["token", "gap", "map"] = "token"
    position_embedding: Literal["learned_1d", "learned_2d", "sincos2d", "none"] = "learned_1d"
    head: Literal["mlp", "linear"] = "mlp"  # mlp: one hidden layer of the model's width, then tanh
    head_bias_init: float = 0.0
    dropout_fraction: float = 0.0
    stochastic_depth_fraction: float = 0.0  # of the last block; rises linearly from 0 at the first
    gelu: Literal["tanh", "exact"] = "tanh"
    compute_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    remat: Literal["none", "dots", "full"] = "none"  # what the backward pass computes again
    scan_unroll: int = 1  # blocks per iteration of the loop over layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputConfig:
    """From stored images to uint8 batches."""

    train_split: str
    test_split: str
    data_dir: str | None = None  # where TFDS keeps prepared datasets; None: its own default
    holdout_fraction: float = 0.1  # of an image folder that has no split sub-folders
    image_size: tuple[int, int]  # height, width in pixels
    train_crop: Literal["inception", "shift", "none"] = "inception"
    crop_area_fraction: tuple[float, float] = (0.05, 1.0)
    crop_distribution: Literal["tf", "torchvision"] = "tf"  # uniform in height, or in area
    shift_pixels: int = 0  # for train_crop="shift"
    flip: bool = True
    randaugment_layers: int = 0
    randaugment_magnitude: int = 0
    mixup_alpha: float = 0.0
    test_resize: Literal["short_side", "direct"] = "short_side"
    test_crop_fraction: float = 0.875  # 224 out of a short side of 256
    cache_records: bool = False  # keep the encoded images in memory: for datasets that fit there
    max_unreadable: int = 100  # images a run may meet that cannot be decoded, before it stops
    num_workers: int | None = None  # processes; None: from the number of cores
    num_threads: int | None = None  # in each process; None: from the number of cores


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """What is minimised."""

    loss: Literal["softmax", "sigmoid"]
    label_smoothing_fraction: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Adam with decoupled weight decay, and what happens to a gradient before it."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    first_moment_dtype: Literal["float32", "bfloat16"] = "float32"
    weight_decay: float = 0.0
    weight_decay_meaning: Literal["paper", "paper_kernels", "big_vision"] = "paper"
    clip_global_norm: float | None = None
    accumulation_steps: int = 1  # micro-batches that make up one global batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate over time: linear warm-up from 0, then a decay."""

    learning_rate: float  # at its peak
    warmup: Duration
    decay: Literal["linear", "cosine", "rsqrt", "constant"]
    end_learning_rate: float = 0.0  # where linear and cosine arrive
    timescale: Duration = Duration("10000 steps")  # of rsqrt


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolyakConfig:
    """Exponential moving average of the parameters; when on, evaluation uses the average."""

    factor: float | None = None  # 0.9999 averages over about 10,000 steps; None: off
    start: Duration = Duration("0 steps")
    bias_correction: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingConfig:
    """How arrays are laid out over the devices."""

    parameters: Literal["replicated", "fsdp"] = "replicated"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """When and how the test split is evaluated; always once more at the end."""

    every: Duration
    global_batch: int | None = None  # None: the training batch


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is kept on disk to continue from. The last step is always saved, and every evaluated one if `keep_best`."""

    every: Duration
    keep_latest: int = 2
    keep_best: int = 1
    best_metric: Literal["test_accuracy", "test_loss"] = "test_accuracy"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What a run shows and writes."""

    every: Duration
    tensorboard: bool = True
    wandb_project: str | None = None
    profile_start_step: int | None = None
    profile_num_steps: int = 5
    compilation_cache: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """A pre-training run."""

    seed: int = 0
    data: str | None  # "digits", "tfds:NAME" or "folder:PATH"; None: the command line must say
    total: Duration
    global_batch: int
    resume_from: str | None = None  # a workdir whose whole state (step, optimiser) this run continues
    init_from: str | None = None  # a workdir whose weights this run starts from, at step 0
    model: ModelConfig
    input: InputConfig
    objective: ObjectiveConfig
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig
    polyak: PolyakConfig = PolyakConfig()
    sharding: ShardingConfig = ShardingConfig()
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig


RUNTIME_FIELDS = (
    "checkpoint",
    "evaluation",
    "logging",
    "sharding",
    "input.data_dir",
    "input.num_workers",
    "input.num_threads",
    "input.cache_records",
    "input.max_unreadable",
)
"""Sections and fields that say how a run is carried out, not what it computes: a continued run may change them."""
