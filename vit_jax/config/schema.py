"""Every option of a run, declared once.

A recipe in `configs/` returns one of these frozen dataclasses; the command line overrides single fields
(`--config.section.field=value`). The unit is in the name of a field or, for a `Duration`, in its value.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NewType

from vit_jax.config.variants import parse_name

Duration = NewType("Duration", str)
"""A length of training with its unit: "300 epochs", "500 steps", "1e6 examples" or "0.1 fraction"."""

Reference = NewType("Reference", str)
"""A user's own part in the place of one of ours: "package.module:name", imported by `vit_jax.references`."""

Pool = Literal["token", "gap", "map"]
HeadForm = Literal["mlp", "linear"]
PositionEmbedding = Literal["learned_1d", "learned_2d", "sincos2d", "none", "relative"]
PositionLayers = Literal["stem", "every", "shared"]
BlockForm = Literal["axial"]
Gelu = Literal["tanh", "exact"]
UnitForm = Literal["preactivation", "postactivation"]
AddedTo = Literal["variance", "std"]
ComputeDtype = Literal["float32", "bfloat16"]
Remat = Literal["none", "dots", "attention", "full"]
AttentionForm = Literal["auto", "xla", "pallas", "cudnn"]
PatchTarget = Literal["mean_colour", "colours_4x4", "pixels"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which network. `name` picks rows of `variants`; a number given beside it replaces the row's.

    None is the family's own value: transformers have a class token and a hidden layer in the head, ResNets average
    over positions and have none; the residual units and epsilons are those of `variants.RESIDUAL_UNITS`.
    """

    name: str  # "ViT-B/16", "R50x1", "R50+ViT-B/16"
    network: Reference | None = None  # called with (architecture, key); gives a module from images to a ModelOutput
    pool: Pool | None = None
    head: HeadForm | None = None  # mlp: one hidden layer of the model's width, then tanh
    head_bias_init: float = 0.0
    compute_dtype: ComputeDtype = "bfloat16"
    remat: Remat = "none"  # what the backward pass computes again
    # blocks, or residual units, per iteration of the loop over them; None: one, or all: of units on a CPU, of both on
    # a TPU where remat is none or dots
    scan_unroll: int | None = None
    attention: AttentionForm = "auto"  # how its core is computed: "pallas" on TPUs in bfloat16, else "xla"
    # of a transformer
    width: int | None = None
    depth: int | None = None
    mlp_dim: int | None = None
    num_heads: int | None = None
    # axial: attention along rows and an MLP, then along columns and another; or a class in the place of
    # `models.block.Block`
    block: BlockForm | Reference | None = None
    position_embedding: PositionEmbedding | Reference = "learned_1d"  # relative: a part of every block's attention
    # added once, before the blocks; or to the input of every block, with parameters of its own, or the same for all
    position_layers: PositionLayers = "stem"
    position_stddev: float = 0.02  # of learned positions at the start; big_vision has width ** -0.5
    dropout_fraction: float = 0.0
    stochastic_depth_fraction: float = 0.0  # of the last block; rises linearly from 0 at the first
    gelu: Gelu = "tanh"
    layer_norm_epsilon: float = 1e-6
    # of a ResNet, alone or under a transformer
    residual_unit: UnitForm | None = None
    group_norm_epsilon: float | None = None
    standardization_epsilon: float | None = None
    standardization_epsilon_added_to: AddedTo | None = None

    def __post_init__(self) -> None:
        parse_name(self.name)  # an unknown one is refused wherever a config is made, before anything is built


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptConfig:
    """How fine-tuning changes the network of the given weights; its other numbers come with them."""

    name: str | None = None  # "ViT-B/16": what init_from must hold; None: whatever it holds
    head: Literal["zero", "zero_keep_hidden", "keep"] = "zero"  # of the last layer; zero removes a hidden one too
    position_resize: Literal["corners", "bilinear", "bicubic", "lanczos3"] = "corners"
    # where a ViT's patches do not divide input.image_size; drop: the last rows and columns are not seen, as in the
    # released code, which has 27 x 27 patches of 14 pixels on images of 384
    uncovered_border: Literal["refuse", "drop"] = "refuse"
    dropout_fraction: float | None = None  # None: as its authors fine-tuned these weights, see FINETUNE_DROPOUT
    stochastic_depth_fraction: float = 0.0
    compute_dtype: ComputeDtype = "bfloat16"
    remat: Remat = "none"
    scan_unroll: int | None = None
    attention: AttentionForm = "auto"

    def __post_init__(self) -> None:
        if self.name is not None:
            parse_name(self.name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputConfig:
    """From stored images to uint8 batches."""

    train_split: str
    test_split: str
    data_dir: str | None = None  # where TFDS keeps prepared datasets; None: its own default
    holdout_fraction: float = 0.1  # of image files that have no splits
    image_size: tuple[int, int]  # height, width in pixels
    classes: tuple[str, ...] = ()  # only these, numbered in this order; (): all of the dataset
    # in training: each image, or each class, as often as any other
    sampling: Literal["uniform", "balanced"] = "uniform"
    train_examples: int | None = None  # this many in all, chosen by the seed, fewer among more of them; None: all
    train_examples_per_class: int | None = None  # this many of each class, chosen by the seed; None: all
    train_crop: Literal["inception", "resize", "resize_short_side", "shift", "none"] = "inception"
    train_resize_pixels: int | None = None  # both sides, or the short one, before a random crop: for resize…
    crop_area_fraction: tuple[float, float] = (0.05, 1.0)
    crop_distribution: Literal["tf", "torchvision"] = "tf"  # uniform in height, or in area
    shift_pixels: int = 0  # for train_crop="shift"
    flip: bool = True
    randaugment_layers: int = 0
    randaugment_magnitude: int = 0
    randaugment_arithmetic: Literal["wrapping", "saturating"] = "wrapping"  # as released, in bytes; or beyond them
    augmentations: tuple[Reference, ...] = ()  # after RandAugment: each from (image uint8 HWC, numpy rng) to another
    mixup_alpha: float = 0.0
    test_resize: Literal["short_side", "direct"] = "short_side"
    test_crop_fraction: float = 0.875  # 224 out of a short side of 256
    cache_records: bool = False  # keep the encoded images in memory: for datasets that fit there
    exif_orientation: bool = False  # turn photographs upright, in training and wherever the weights are used
    max_image_megapixels: float = 180.0  # an image whose header states more counts as unreadable
    max_unreadable: int = 100  # images that each process may meet and cannot decode, before it stops
    num_workers: int | None = None  # processes; None: from the number of cores
    num_threads: int | None = None  # in each process; None: from the number of cores


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """What is minimised: a loss of class labels, or of the looks of patches that are hidden (ViT, sec. 4.6)."""

    kind: Literal["classification", "masked_patch"] = "classification"
    loss: Literal["softmax", "sigmoid"] | Reference  # of one's own: (logits_BK, label_BK) -> loss_B
    label_smoothing_fraction: float = 0.0
    class_weights: tuple[float, ...] = ()  # what an image of each class counts in training, in proportion; (): 1
    # of masked_patch
    corrupted_fraction: float = 0.5  # of the patches
    corruption_shares: tuple[float, float, float] = (0.8, 0.1, 0.1)  # to [mask], to another of the image, left as it is
    # the mean colour of a patch in 3 bits a channel (512 classes), that of each of its 4 x 4 parts, or its pixels (L2)
    patch_target: PatchTarget = "mean_colour"


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Adam with decoupled weight decay, SGD with momentum, or any other, and what happens to a gradient before it."""

    name: Literal["adam", "sgd"] | Reference = "adam"  # "optax:lion", "optax.contrib:muon", or one's own
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of a reference, by name
    momentum: float = 0.9  # of SGD
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    # of Adam's first moment or SGD's momentum as stored. In bfloat16 optax rounds the factor too: beta1=0.9 is 0.8984
    # in effect, here and in the released code; SGD's momentum is 0.8984 there, and 0.9 here
    first_moment_dtype: Literal["float32", "bfloat16"] = "float32"
    weight_decay: float = 0.0
    weight_decay_meaning: Literal["paper", "paper_kernels", "big_vision"] = "paper"
    clip_global_norm: float | None = None
    accumulation_steps: int = 1  # micro-batches that make up one global batch
    layer_decay: float = 1.0  # what the learning rate is multiplied by for each layer further from the head
    learning_rate_multipliers: Mapping[str, float] = dataclasses.field(default_factory=dict)  # by path: "embedding/*"
    trained: Literal["all", "head"] = "all"  # head: a linear probe on frozen features
    frozen: tuple[str, ...] = ()  # paths of parameters that stay as they are: "embedding/*", "encoder/*/bias"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate over time: linear warm-up from 0, then a decay."""

    learning_rate: float  # at its peak
    warmup: Duration
    # a reference: (learning_rate, warmup_steps, total_steps) -> rate of a step, in the place of all of this
    decay: Literal["linear", "cosine", "rsqrt", "constant", "staircase"] | Reference
    end_learning_rate: float = 0.0  # where linear and cosine arrive
    timescale: Duration = Duration("10000 steps")  # of rsqrt
    drop_at_fraction: tuple[float, ...] = (0.3, 0.6, 0.9)  # of the run: where a staircase divides by 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolyakConfig:
    """Exponential moving average of the parameters; when on, evaluation uses the average."""

    factor: float | None = None  # 0.9999 averages over about 10,000 steps; None: off
    start: Duration = Duration("0 steps")
    bias_correction: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingConfig:
    """How arrays are laid out over the devices: a mesh of replicas x data x model shards.

    The data axis has the devices that the other two leave; a batch is split over replicas and data.
    """

    parameters: Literal["replicated", "fsdp"] = "replicated"  # with optimiser and average: on each device, or split
    num_replicas: int | None = None  # groups that each hold all parameters; None: one for each TPU slice, or node
    num_model_shards: int = 1  # tensor parallelism: devices that share each layer's heads and hidden units


USUAL_SHOTS, USUAL_NEIGHBOURS = (5,), (20,)  # of the evaluators fewshot and knn
FROZEN_ARGUMENTS = {
    "fewshot": ("shots", "seeds", "l2", "sampling", "layer"),
    "knn": ("neighbours", "temperature", "layer"),
}


MULTILABEL_RESULTS = ("mean_average_precision", "f1_micro", "f1_macro")
"""Of evaluations of images that may have several labels, in the place of the accuracy."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluatorConfig:
    """One more evaluation beside that of the test split; its results carry its name as a prefix."""

    # fewshot and knn learn from frozen features of train_split; one's own is called with (split, run, **arguments)
    kind: Literal["classification", "fewshot", "knn"] | Reference = "classification"
    data: str | None = None  # as in PretrainConfig; None: the run's
    split: str | None = None  # None: input.test_split
    train_split: str | None = None  # of fewshot and knn; None: input.train_split
    every: Duration | None = None  # None: evaluation.every
    # by name, of all kinds but classification: of fewshot those of `evals.fewshot.FewShot`, of knn neighbours and
    # temperature, of both the layer
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def numbers(self) -> tuple[Any, ...]:
        """Of fewshot the shots, of knn the neighbours, each with results of its own."""
        name, usual = ("shots", USUAL_SHOTS) if self.kind == "fewshot" else ("neighbours", USUAL_NEIGHBOURS)
        return as_tuple(self.arguments.get(name, usual))


def as_tuple(values: Any) -> tuple[Any, ...]:
    """Several values, or one alone, as the command line has an argument that may be either."""
    return tuple(values) if isinstance(values, list | tuple) else (values,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """When and how the test split is evaluated, always once more at the end; and further evaluations by name."""

    every: Duration
    global_batch: int | None = None  # None: the training batch
    evaluators: Mapping[str, EvaluatorConfig] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is kept on disk to continue from. The last step is always saved, and every evaluated one if `keep_best`."""

    every: Duration
    keep_latest: int = 2
    keep_best: int = 1
    # of any evaluator; of one that ends in "_loss" the lowest is best. Where images may have several labels,
    # an accuracy means the mean average precision
    best_metric: str = "test_accuracy"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopEarlyConfig:
    """The end of a run before its last step, when evaluations do not improve `checkpoint.best_metric` any more.

    The best checkpoint is then the run's result: its summary is of that step, and other verbs take the weights there.
    """

    patience: int | None = None  # evaluations in a row without improvement, after which the run ends; None: off
    min_delta: float = 0.0  # what improves by no more than this does not count as an improvement


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What a run shows and writes."""

    every: Duration
    parameters: bool = False  # list every parameter before the first step, not their groups; --parameters
    tensorboard: bool = True
    wandb_project: str | None = None
    profile_start_step: int | None = None
    profile_num_steps: int = 5
    compilation_cache: bool = True
    hang_seconds: float | None = 600.0  # without a step: a warning, at twice as many the end; None: never


@dataclasses.dataclass(frozen=True, kw_only=True)
class _AnyRun:
    """What every kind of run has."""

    seed: int = 0
    data: str | None  # "digits", "tfds:NAME", "vtab:TASK", "folder:PATH", "csv:FILE" or a reference; None: say it
    total: Duration
    global_batch: int
    init_from: str | None = None  # weights to start from at step 0: a workdir, an .npz or a .safetensors
    allow_code: tuple[str, ...] = ()  # packages whose code the weights of init_from may name; --allow_code
    model: ModelConfig | AdaptConfig
    input: InputConfig
    objective: ObjectiveConfig
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig
    polyak: PolyakConfig = PolyakConfig()
    sharding: ShardingConfig = ShardingConfig()
    evaluation: EvaluationConfig
    checkpoint: CheckpointConfig
    stop_early: StopEarlyConfig = StopEarlyConfig()
    logging: LoggingConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainConfig(_AnyRun):
    """A pre-training run."""

    model: ModelConfig
    resume_from: str | None = None  # a workdir whose complete state (step, optimiser) this run continues


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """The learning rate found as in the paper: each is tried on train less a held-out part, the best trains on all."""

    learning_rates: tuple[float, ...] = ()  # (): no search, schedule.learning_rate is used
    validation_fraction: float = 0.1  # of every class of the training split


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneConfig(_AnyRun):
    """A fine-tuning run: the weights of `init_from` (also hf://owner/name), a new head, own images."""

    model: AdaptConfig = AdaptConfig()
    search: SearchConfig = SearchConfig()  # where it finds the rate, schedule.learning_rate is 0


RunConfig = PretrainConfig | FinetuneConfig

RUNTIME_FIELDS = (
    "allow_code",
    "checkpoint",
    "evaluation",
    "stop_early",
    "logging",
    "sharding",
    "model.remat",
    "model.scan_unroll",
    "model.attention",
    "optimizer.accumulation_steps",
    "input.data_dir",
    "input.num_workers",
    "input.num_threads",
    "input.cache_records",
    "input.max_unreadable",
)
"""Sections and fields that say how a run is carried out, not what it computes: a continued run may change them.

So it may resume with fewer devices and less memory. Other micro-batches have other dropout masks.
"""
