"""Every option of a run, declared once.

A recipe in `configs/` returns one of these frozen dataclasses; the command line overrides single
fields (`--config.section.field=value`). The unit is in the name of a field or, for a `Duration`, in
its value. The annotation of a field states its type, its range and which other field makes it
effective (`rules`); `check` applies it. The string below a field describes it in editors, in the
documentation and in `vit-jax show --help` (`descriptions`, which puts the forms of `data_kinds` in
the place of KINDS_OF_DATA).
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NewType, get_args

from vit_jax.config.evaluators import FROZEN_EVALUATORS, FrozenEvaluatorSpec, FrozenKind
from vit_jax.config.metric_names import BestMode
from vit_jax.config.network_options import (  # noqa: F401, all of them for recipes
    LEARNED_POSITIONS,
    AddedTo,
    AttentionForm,
    BlockForm,
    ComputeDtype,
    ComputeOptions,
    EmbeddingNorm,
    FinalNorm,
    Gelu,
    HeadForm,
    InitialValues,
    MlpForm,
    NetworkOptions,
    NormForm,
    Policy,
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
from vit_jax.config.rules import (
    Count,
    Fraction,
    LastBlocks,
    NotNegative,
    Number,
    Positive,
    Range,
    Reference,
    ResNet,
    Share,
    Transformer,
    When,
)
from vit_jax.config.sizes import RGB_CHANNELS
from vit_jax.config.variants import parse_name

Duration = NewType("Duration", str)
"""A length of training with its unit: "300 epochs", "500 steps", "1e6 examples" or "0.1
fraction"."""

PositionResize = Literal[
    "library", "corners", "bilinear", "bicubic", "lanczos3", "huggingface", "dinov2"
]
ChannelWeights = Literal["cyclic", "zero"]
PatchTarget = Literal["mean_colour", "colours_4x4", "pixels"]
Interpolation = Literal["bilinear", "bicubic"]
INTERPOLATIONS = get_args(Interpolation)
LoraLayer = Literal["query", "key", "value", "out", "expand", "gate", "contract"]
ADAPTIVE = When("name", "adam", "lamb")
BUILT_IN = When("name", "adam", "lamb", "sgd")  # optimisers
CLASSIFYING = When("objective.kind", "classification")
PREDICTING_PATCHES = When("objective.kind", "masked_patch")
TRAINING_ALL = When("trained", "all")
TRAINING_BLOCKS = When("trained", "all", LastBlocks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(NetworkOptions):
    """The network to train: `name` selects its sizes, and a number beside it replaces one."""

    name: str
    """The network, such as "ViT-B/16", "R50x1" or "R50+ViT-B/16"; `vit-jax models` lists names."""
    pool: Pool | Reference | None = None
    """How tokens become one feature vector: class token, mean over patches (gap), both side by side
    (token_gap), or attention pooling (map); a reference is a class that replaces
    `models.heads.AttentionPooling` of a transformer. None: token for transformers, gap for ResNets
    and axial blocks."""
    head: HeadForm | Reference | None = None
    """The classifier: mlp has one hidden layer of the model's width, then tanh (ViT, sec. 3.1);
    linear has none; a reference is a class that replaces `models.heads.Head`. None: mlp for
    transformers, linear for ResNets and masked patches."""
    width: Transformer[Count | None] = None
    """Length D of each token. None: the length of the named network."""
    depth: Transformer[Count | None] = None
    """Number of blocks. None: the number of the named network."""
    mlp_dim: Transformer[Count | None] = None
    """Hidden units of the MLP in each block. None: the number of the named network."""
    num_heads: Transformer[Count | None] = None
    """Attention heads of each block; must divide width. None: the number of the named network."""
    residual_unit: ResNet[UnitForm | None] = None
    """Form of the residual unit. None: preactivation (BiT) for a ResNet, postactivation (ViT, 4.1)
    for a hybrid."""
    group_norm_epsilon: ResNet[Positive | None] = None
    """Added to the variance in each group norm. None: 1e-5 or 1e-6, by the residual unit."""
    standardization_epsilon: ResNet[Positive | None] = None
    """Added in weight standardisation. None: 1e-10 or 1e-5, by the residual unit."""
    standardization_epsilon_added_to: ResNet[AddedTo | None] = None
    """Statistic to which standardization_epsilon is added. None: variance for preactivation, else
    std."""

    def __post_init__(self) -> None:
        parse_name(self.name)  # rejects an unknown name wherever a config is made


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptConfig(ComputeOptions):
    """Changes of the network of the weights in fine-tuning; other sizes come with the weights."""

    name: str | None = None
    """The network that init_from must hold, such as "ViT-B/16". None: any."""
    head: Literal["zero", "zero_keep_hidden", "keep", "select"] = "zero"
    """The last layer: zero replaces it by zeros and removes a hidden layer (ViT, sec. 3.2),
    zero_keep_hidden keeps the hidden layer, keep changes nothing, select keeps the outputs of the
    data's classes, found by name (DeiT III)."""
    head_stddev: Annotated[NotNegative, When("head", "zero", "zero_keep_hidden")] = 0.0
    """Standard deviation of a new last layer, from a truncated normal (MAE: 2e-5). 0: zeros."""
    position_resize: PositionResize = "corners"
    """Interpolation of learned positions for another image size (ViT, sec. 3.2). corners: as the
    released code; bilinear, bicubic, lanczos3: antialiased, bicubic as timm; huggingface: bicubic
    without antialiasing, as Hugging Face; dinov2: the same with DINOv2's offset of 0.1; library: as
    the library whose names the weights have."""
    channel_weights: ChannelWeights = "cyclic"
    """Kernel of the first layer for other channels than those of the weights: cyclic repeats the
    channels in turn, multiplied by 3 / channels, and sums them for one channel, as timm; zero keeps
    the first channels and adds zeros."""
    rope_rescale: bool = False
    """For another image size with model.rope=index (Perception Encoder): scale the places of
    patches to the grid of the weights, as in timm, instead of counting beyond it, as its
    authors."""
    pool: Pool | None = None
    """Change the pooling: token, gap or token_gap; attention pooling is then dropped. None: as in
    the weights."""
    final_norm: FinalNorm | None = None
    """Change the norm after the last block: tokens, pooled (as MAE) or none. None: as in the
    weights."""
    uncovered_border: Literal["refuse", "drop"] = "refuse"
    """An image size that patches do not divide: `refuse` rejects it, `drop` drops the border, as the
    released code."""
    dropout_fraction: Fraction | None = None
    """Fraction of activations that dropout sets to 0. None: as the authors fine-tuned these
    weights, 0 or 0.1."""
    stochastic_depth_fraction: Fraction = 0.0
    """Fraction of images that skip the last block, by stochastic_depth_form the other blocks
    too."""
    stochastic_depth_form: Annotated[StochasticDepthForm, When("stochastic_depth_fraction")] = (
        "linear"
    )
    """Fraction of images that skip each block: rises linearly from 0 at the first block, or is
    constant (DeiT III)."""

    def __post_init__(self) -> None:
        if self.name is not None:
            parse_name(self.name)


@dataclasses.dataclass(frozen=True, kw_only=True)
class InputConfig:
    """The input: from stored images to uint8 batches."""

    train_split: str
    """Split to train on, such as "train" or "train[:99%]"."""
    test_split: str
    """Split to evaluate on, such as "validation" or "train[99%:]"."""
    data_dir: str | None = None
    """Folder of prepared TFDS datasets, or of the files of fashion. None: the default of TFDS,
    ~/tensorflow_datasets; of fashion Debian's folder, else downloaded files."""
    holdout_fraction: Fraction = 0.1
    """Fraction of each class that is held out as test split; only for images in files without
    splits."""
    image_size: tuple[Count, Count] | None
    """Height and width in pixels; one number sets both. None: those of the weights, in
    fine-tuning."""
    exclude: str | None = None
    """File with the ids of records that are not trained on, from vit-jax duplicates --write. None:
    train on all."""
    classes: tuple[str, ...] = ()
    """Names of the classes to use, numbered in this order. (): all classes of the dataset."""
    sampling: Literal["uniform", "balanced"] = "uniform"
    """In training, uniform takes each image equally often, balanced takes each class equally
    often."""
    train_examples: Count | None = None
    """Number of training images, chosen by the seed; a larger choice contains the smaller ones.
    None: all."""
    train_examples_per_class: Count | None = None
    """Number of training images of each class, chosen by the seed. None: all."""
    train_crop: Literal["inception", "resize", "resize_short_side", "simple", "shift", "none"] = (
        "inception"
    )
    """Crop in training: a random area (inception); resize both sides or the short side to
    train_resize_pixels, then a random crop; resize the short side to image_size, mirror 4 pixels at
    each border, then a random crop (simple, DeiT III); resize to image_size, then a random shift;
    or only resize to image_size (none)."""
    train_resize_pixels: Annotated[
        Count | None, When("train_crop", "resize", "resize_short_side")
    ] = None
    """Pixels of the sides before a random crop (BiT-HyperRule)."""
    crop_area_fraction: Annotated[tuple[float, float], When("train_crop", "inception")] = (
        0.05,
        1.0,
    )
    """Least and largest fraction of the image's area in an inception crop."""
    crop_distribution: Annotated[Literal["tf", "torchvision"], When("train_crop", "inception")] = (
        "tf"
    )
    """Inception crop uniform in height, as TensorFlow (used for ViT), or in area, as
    torchvision."""
    train_interpolation: Interpolation | None = None
    """Antialiased filter of resizing in training, as Pillow and torchvision (DeiT III, MAE:
    bicubic). None: sample without antialiasing; average areas where the short side is resized."""
    shift_pixels: Annotated[Number, When("train_crop", "shift")] = 0
    """Largest shift in pixels in each direction."""
    flip: bool = True
    """Flip half of the training images from left to right."""
    vertical_flip: bool = False
    """Flip half of the training images upside down: for microscopes and satellites, whose images
    have no upright direction."""
    rotate90: bool = False
    """Rotate each training image by 0, 90, 180 or 270 degrees with equal probability. Images must be
    square."""
    randaugment_layers: Number = 0
    """Number of RandAugment operations per training image (AugReg uses 2). 0: off."""
    randaugment_magnitude: Annotated[Number, When("randaugment_layers")] = 0
    """Strength of each RandAugment operation, from 0 to 10 or more (AugReg uses 10, 15 and 20)."""
    randaugment_arithmetic: Annotated[
        Literal["wrapping", "saturating"], When("randaugment_layers")
    ] = "wrapping"
    """For magnitudes from 10: wrapping overflows bytes, as the released code; saturating stops at
    the limits."""
    three_augment: bool = False
    """Apply one of grayscale, solarize and Gaussian blur to each training image (ThreeAugment, DeiT
    III)."""
    color_jitter: Share = 0.0
    """Largest change of brightness, contrast and saturation, in random order (DeiT III: 0.3). 0:
    off."""
    augmentations: tuple[Reference, ...] = ()
    """User-defined augmentations after those above: each a function of (image uint8 HWC, numpy
    generator)."""
    mixup_alpha: Annotated[NotNegative, CLASSIFYING] = 0.0
    """Both parameters of mixup's beta distribution of two images' shares (AugReg: 0, 0.2, 0.5,
    0.8). 0: off."""
    cutmix_alpha: Annotated[NotNegative, CLASSIFYING] = 0.0
    """Both parameters of the beta distribution of the area of another image (DeiT III: 1). 0:
    off."""
    cutmix_fraction: Annotated[Share, When("mixup_alpha"), When("cutmix_alpha")] = 0.5
    """Fraction of steps with CutMix instead of mixup."""
    erasing_fraction: Share = 0.0
    """Fraction of training images of which a random rectangle becomes noise (random erasing). 0:
    off."""
    patch_dropout: Annotated[Fraction, CLASSIFYING] = 0.0
    """Fraction of the patches of each training image that a transformer does not compute
    (PatchDropout, FLIP), in other phases by phases.NAME.patch_dropout. 0: off."""
    test_resize: Literal["short_side", "direct", "weights"] = "short_side"
    """Resize in evaluation: the short side, then a central crop; both sides directly, without a
    crop; or, in fine-tuning, as the weights state, with their crop and filter."""
    test_crop_fraction: Annotated[float, Range("(0, 1]"), When("test_resize", "short_side")] = 0.875
    """Fraction of the resized sides that the central crop keeps: 224 of 256 pixels."""
    test_interpolation: Interpolation | None = None
    """Antialiased filter in evaluation, as in timm and Hugging Face. None: average areas for
    test_resize="short_side", sample without antialiasing for "direct", as the released code."""
    test_resize_library: Annotated[Literal["huggingface", "timm"], When("test_interpolation")] = (
        "huggingface"
    )
    """Library whose rounding of sizes and crops the evaluation has."""
    repeats: Count = 1
    """Number of augmented copies of each chosen image (repeated augmentation, DeiT: 3); a batch
    then holds about global_batch / repeats images. An epoch counts copies."""
    cache_records: bool = False
    """Keep encoded images in memory; for datasets that fit."""
    exif_orientation: bool = False
    """Rotate photographs upright by their EXIF orientation, in training and wherever the weights
    are used."""
    channels: Annotated[int, Range("[1, 32]")] = RGB_CHANNELS
    """Channels of the network's input. 3: RGB of 8 bits, to which grey and deeper files are
    converted. Other numbers, and bands: the values of each band, also of pages of a TIFF, as
    stored, normalised."""
    bands: tuple[Count, ...] = ()
    """Numbers of the stored bands to read, in this order, counted from 1, such as 4,3,2. (): all
    bands, or RGB for channels=3."""
    channel_mean: tuple[float, ...] = ()
    """Stored value of each channel that becomes 0. (): by value_range, else the mean of the training
    images, which the run stores."""
    channel_std: tuple[Positive, ...] = ()
    """Difference from channel_mean that becomes 1. (): by value_range, else the standard deviation
    of the training images."""
    value_range: tuple[float, float] | None = None
    """Values that become 0 and 255 beyond 8 bits: (0.0, 4095.0) for 12 bits; with other channels or
    bands, values that become -1 and 1. None: as a file states, else 16 bits."""
    max_image_megapixels: Positive = 180.0
    """Largest image in millions of pixels; a larger one counts as unreadable."""
    max_unreadable: Number | None = None
    """Number of unreadable images of a split that each process skips before the run stops. None:
    100, or a tenth of the images if that is fewer. A split without a readable image always stops
    the run."""
    num_workers: Number | None = None
    """Processes that decode images; 0 decodes in the main process. None: chosen by the number of
    cores."""
    num_threads: Count | None = None
    """Decoding threads of each process. None: chosen by the number of cores."""

    @property
    def reads_bands(self) -> bool:
        """True for bands as stored, False for RGB of 8 bits."""
        return self.channels != RGB_CHANNELS or bool(self.bands)

    @property
    def standardises_bands(self) -> bool:
        """True if each band gets mean 0 and deviation 1; False for pixels from -1 to 1."""
        return self.reads_bands and self.value_range is None

    @property
    def pixel_dtype(self) -> str:
        """Dtype of prepared images: uint8 for RGB, float32 for normalised bands."""
        return "float32" if self.reads_bands else "uint8"

    @property
    def pixels(self) -> tuple[int, int]:
        """Height and width, once those of the weights are known."""
        assert self.image_size is not None, "train.starting_weights sets it"
        return self.image_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """The loss to minimise: of class labels, or of hidden patches (ViT, sec. 4.6)."""

    kind: Literal["classification", "masked_patch"] = "classification"
    """Learn class labels, or predict hidden patches without labels (ViT, sec. 4.6)."""
    loss: Literal["softmax", "sigmoid", "bce"] | Reference
    """Loss of class labels; sigmoid treats classes independently and sums over them; bce takes
    every class with a share in a mixed label for present and averages over classes (DeiT III). A
    reference is called with (logits_BK, label_BK) and returns loss_B."""
    label_smoothing_fraction: Annotated[Fraction, CLASSIFYING] = 0.0
    """Fraction of each label that is spread evenly over all classes. 0: off."""
    class_weights: Annotated[tuple[Positive, ...], CLASSIFYING] = ()
    """Relative weight of each class in the training loss, in the order of the classes. (): equal
    weights."""
    teacher: Annotated[str | None, CLASSIFYING] = None
    """Weights or workdir of a trained network whose predictions are learned beside the labels
    (distillation). None: off."""
    distillation: Annotated[Literal["soft", "hard"], When("teacher")] = "soft"
    """Learn the teacher's probabilities (soft), or its class (hard, DeiT). A network with
    class_tokens=2 learns them with its second token (DeiT)."""
    distillation_weight: Annotated[Share, When("teacher")] = 0.5
    """Share of the teacher in the loss; the labels have the rest."""
    distillation_temperature: Annotated[Positive, When("teacher"), When("distillation", "soft")] = (
        1.0
    )
    """Divides the logits of both networks; the divergence is multiplied by its square."""
    corrupted_fraction: Annotated[float, Range("(0, 1]"), PREDICTING_PATCHES] = 0.5
    """Fraction of patches that are corrupted (ViT, App. B.1.2)."""
    corruption_shares: Annotated[
        tuple[NotNegative, NotNegative, NotNegative], PREDICTING_PATCHES
    ] = (0.8, 0.1, 0.1)
    """Shares of corrupted patches that become [mask], become another patch, or stay unchanged (ViT,
    App. B.1.2)."""
    patch_target: Annotated[PatchTarget, PREDICTING_PATCHES] = "mean_colour"
    """Predict mean colours (512 classes), those of 4 x 4 cells, or all pixels (L2 loss; ViT, App.
    B.1.2)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimiser, the transformations of gradients before it, and the trained parameters."""

    name: Literal["adam", "lamb", "sgd"] | Reference = "adam"
    """adam (with weight_decay: AdamW), lamb (AdamW whose update of each kernel has the norm of the
    kernel), sgd with momentum, or a reference such as "optax:lion". A parameter that begins at zero
    has the steps of one with a standard deviation of 0.02 under lamb, optax:lamb, optax:lars,
    optax:fromage and optax:adafactor."""
    arguments: Annotated[Mapping[str, Any], When("name", Reference)] = dataclasses.field(
        default_factory=dict
    )
    """Arguments by name: --config.optimizer.arguments.b1=0.95."""
    momentum: Annotated[Fraction, When("name", "sgd")] = 0.9
    """Momentum, without Nesterov (ViT, App. B.1.1)."""
    beta1: Annotated[Fraction, ADAPTIVE] = 0.9
    """Decay of the first moment (ViT, sec. 4.1)."""
    beta2: Annotated[Fraction, ADAPTIVE] = 0.999
    """Decay of the second moment (ViT, sec. 4.1)."""
    epsilon: Annotated[Positive, ADAPTIVE] = 1e-8
    """Added to the root of the second moment."""
    first_moment_dtype: Annotated[Literal["float32", "bfloat16"], BUILT_IN] = "float32"
    """Dtype of the stored first moment or momentum. bfloat16 saves memory and rounds Adam's
    beta1=0.9 to 0.8984."""
    weight_decay: Annotated[NotNegative, BUILT_IN] = 0.0
    """Decoupled weight decay (ViT, Table 3: 0.1, 0.03 or 0.3), as weight_decay_meaning defines it.
    0: off."""
    weight_decay_meaning: Literal["paper", "paper_kernels", "big_vision"] = "paper"
    """paper: learning rate times decay, for all parameters; paper_kernels: for kernels and factors
    of LoRA only; big_vision: for these, relative to the peak learning rate, so that its 1e-4 is the
    paper's 0.1 at a peak of 1e-3."""
    clip_global_norm: Positive | None = None
    """Largest global norm of the gradient; a larger gradient is scaled down (ViT, Table 3: 1).
    None: off."""
    accumulation_steps: Count | None = None
    """Micro-batches of a global batch; more use less memory. None: as few as fit, chosen together
    with model.remat."""
    layer_decay: Annotated[float, Range("(0, 1]"), TRAINING_BLOCKS] = 1.0
    """Factor on the learning rate for each layer further from the head. 1: off."""
    learning_rate_multipliers: Mapping[
        str, Annotated[float, Range("(0, inf)", "Use config.optimizer.frozen to keep parameters.")]
    ] = dataclasses.field(default_factory=dict)
    """Factors on the learning rate by pattern of parameter names, such as "embedding/*"; the first
    match counts."""
    trained: Literal["all", "head"] | LastBlocks = "all"
    """Train all parameters, only the head (a linear probe on frozen features), or with last:4 the
    last 4 blocks of a transformer, the final norm and the head. What is frozen has no dropout."""
    frozen: Annotated[tuple[str, ...], TRAINING_BLOCKS] = ()
    """Patterns of names of parameters that are not trained, such as "embedding/*" or
    "encoder/*/bias"."""
    lora_rank: Annotated[Count | None, TRAINING_ALL] = None
    """LoRA (Hu et al., 2021) in fine-tuning: train the head and, beside each kernel of lora_layers,
    two factors of this rank; all other parameters are frozen. None: off."""
    lora_alpha: Annotated[Positive | None, When("lora_rank")] = None
    """A kernel gains lora_alpha / lora_rank times the product of its factors. None: lora_rank, a
    scale of 1."""
    lora_layers: Annotated[tuple[LoraLayer, ...], When("lora_rank")] = ()
    """Layers of each block with factors: query, key, value, out; expand, gate, contract of the MLP.
    (): all."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate over time: linear warm-up from 0, then a decay."""

    learning_rate: NotNegative
    """Learning rate at its peak, after the warm-up."""
    warmup: Duration
    """Length of the linear warm-up from 0 (ViT, Table 3: 10,000 steps)."""
    decay: Literal["linear", "cosine", "rsqrt", "constant", "staircase", "wsd"] | Reference
    """Form of the decay; wsd (warm-up, stable, decay) is constant until the cooldown. A reference
    is called with (learning_rate, warmup_steps, total_steps) and returns the complete schedule from
    step to learning rate."""
    end_learning_rate: Annotated[NotNegative, When("decay", "linear", "cosine", "wsd")] = 0.0
    """Learning rate at the end of a linear or cosine decay, or of a cooldown."""
    cooldown: Annotated[Duration, When("decay", "wsd")] = Duration("0.2 fraction")
    """Length of the decay at the end of the run."""
    cooldown_form: Annotated[Literal["linear", "sqrt"], When("decay", "wsd")] = "sqrt"
    """Form of the cooldown: linear, or 1 - sqrt(progress) (Haegele et al., 2024)."""
    timescale: Annotated[Duration, When("decay", "rsqrt")] = Duration("10000 steps")
    """Time scale: learning_rate / sqrt(1 + time since the warm-up / timescale)."""
    drop_at_fraction: Annotated[tuple[float, ...], When("decay", "staircase")] = (0.3, 0.6, 0.9)
    """Fractions of the run after which the learning rate is divided by 10 (BiT-HyperRule)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolyakConfig:
    """Exponential moving average of the parameters; when on, evaluation uses the average."""

    factor: Annotated[float, Range("(0, 1)", "Use 0.9999, or None for off.")] | None = None
    """Weight of the previous average at each step (ViT, sec. 4.1: 0.9999, about 10,000 steps).
    None: off."""
    start: Annotated[Duration, When("factor")] = Duration("0 steps")
    """Time at which averaging starts."""
    bias_correction: Annotated[bool, When("factor")] = True
    """Remove the weight of the parameters before the start, as Adam does for its moments."""
    warmup: Annotated[Literal["ratio", "power"] | None, When("factor")] = None
    """Rising weight of the previous average, up to factor, in place of bias_correction: (1 + n) /
    (10 + n) (ratio, TensorFlow) or 1 - (1 + n) ** (-2 / 3) (power, timm) after n averaged steps.
    None: factor from the start."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingConfig:
    """Layout of arrays over the devices: a mesh of replicas x data x model shards.

    The data axis has the remaining devices. A batch is split over replicas and data.
    """

    parameters: Literal["auto", "replicated", "fsdp"] = "auto"
    """Keep parameters, optimiser state and average complete on each device, or split them over the
    data axis (fsdp). auto: the layout that fits the memory of the devices, with num_replicas if
    that is None."""
    num_replicas: Count | None = None
    """Groups of devices that each hold all parameters. None: by parameters=auto, else one per TPU
    slice or node."""
    num_model_shards: Count = 1
    """Tensor parallelism: devices that share the heads and hidden units of each layer. 1: off."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluatorConfig:
    """An evaluation beside the test split; its name is the prefix of its results."""

    kind: Literal["classification", FrozenKind] | Reference = "classification"
    """classification of another split; fewshot or knn on frozen features of train_split; a
    reference is called with (split, run, **arguments)."""
    data: str | None = None
    """Dataset, written as config.data. None: the dataset of the run."""
    split: str | None = None
    """Split to evaluate. None: input.test_split."""
    train_split: Annotated[str | None, When("kind", *FROZEN_EVALUATORS)] = None
    """Split to learn from. None: input.train_split."""
    every: Duration | None = None
    """Time between evaluations. None: evaluation.every."""
    label_sets: Annotated[str | None, When("kind", "classification")] = None
    """Correct classes of each image, one or more; images without are skipped: a feature of a dataset
    of TFDS, or a JSON file with a list of classes for each image, as real.json of ImageNet ReaL."""
    arguments: Annotated[Mapping[str, Any], When("kind", *FROZEN_EVALUATORS, Reference)] = (
        dataclasses.field(default_factory=dict)
    )
    """By name: shots, seeds, l2, sampling, layer (fewshot); neighbours, temperature, layer (knn);
    any (reference)."""

    @property
    def frozen(self) -> FrozenEvaluatorSpec | None:
        """The kind on frozen features; None for others."""
        return next((kind for name, kind in FROZEN_EVALUATORS.items() if name == self.kind), None)

    @property
    def numbers(self) -> tuple[Any, ...]:
        """The shots of fewshot or the neighbours of knn; () for other kinds."""
        return (
            as_tuple(self.arguments.get(self.frozen.number_argument, self.frozen.default))
            if self.frozen
            else ()
        )


def as_tuple(values: Any) -> tuple[Any, ...]:
    """Return several values, or one, as a tuple."""
    return tuple(values) if isinstance(values, list | tuple) else (values,)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """When and how to evaluate the test split, and further evaluations by name."""

    every: Duration
    """Time between evaluations of the test split; the last step is always evaluated."""
    global_batch: Count | None = None
    """Images per evaluation step on all devices. None: config.global_batch."""
    metrics: Annotated[tuple[str | Reference, ...], CLASSIFYING] = ()
    """Further metrics of classification, such as top5_accuracy, calibration_error, f1_macro or
    user-defined ones."""
    evaluators: Mapping[str, EvaluatorConfig] = dataclasses.field(default_factory=dict)
    """Further evaluations by name: --config.evaluation.evaluators.NAME.kind=knn."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints to resume from.

    The last step is always saved, and every evaluated step if `keep_best`.
    """

    every: Duration
    """Time between checkpoints; the last step is always saved."""
    keep_latest: Count = 2
    """Number of newest checkpoints to keep."""
    keep_best: Number = 1
    """Number of best checkpoints by best_metric to keep besides. 0: none."""
    best_metric: str = "test_accuracy"
    """Metric of any evaluator that defines the best checkpoint. For multi-label data an accuracy
    means the mean average precision."""
    best_mode: BestMode = "auto"
    """Better values of best_metric. auto: as its evaluator states, the lower of losses, errors and
    costs, the higher of other built-in metrics; any other result needs max or min."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StopEarlyConfig:
    """Early stopping: end the run when evaluations no longer improve `checkpoint.best_metric`.

    The best checkpoint is then the result of the run: the summary and the weights are of that step.
    """

    patience: Annotated[Count | None, When("checkpoint.keep_best")] = None
    """Evaluations in a row without improvement after which the run ends. None: off."""
    min_delta: Annotated[NotNegative, When("patience")] = 0.0
    """Least change of the metric that counts as an improvement, in units of the metric."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Log lines and files of a run."""

    every: Duration
    """Time between log lines with training metrics."""
    parameters: bool = False
    """List every parameter before the first step, not only their groups; same as --parameters."""
    tensorboard: bool = True
    """Write TensorBoard event files to tensorboard/ in the workdir."""
    wandb_project: str | None = None
    """Weights & Biases project to log to. None: off."""
    writers: tuple[Reference, ...] = ()
    """Classes that send the config and the metrics to other trackers, such as MLflow."""
    profile_start_step: int | None = None
    """First step of a profiler trace, written to profile/ in the workdir. None: no trace."""
    profile_num_steps: Annotated[Count, When("profile_start_step")] = 5
    """Number of steps in the profiler trace."""
    compilation_cache: bool = True
    """Keep compiled programs on disk, so that the next start is faster."""
    hang_seconds: Positive | None = 600.0
    """Seconds without a step after which the run warns; after twice as many it ends. None:
    never."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _AnyRun:
    """The fields of every run."""

    seed: Annotated[int, Range(f"[0, {2**32 - 1}]")] = 0
    """Random seed of initialisation, data order, augmentation and dropout."""
    data: str | None
    """Dataset: KINDS_OF_DATA or a reference. None: required on the command line."""
    total: Duration
    """Length of the run, such as "300 epochs", "500 steps" or "1e6 examples"."""
    global_batch: Count
    """Images per step on all devices together."""
    init_from: str | None = None
    """Weights to start from at step 0: a workdir, .npz, .safetensors or hf://owner/name. None:
    random weights."""
    allow_code: tuple[str, ...] = ()
    """Python packages whose code the weights of init_from may run. (): none."""
    model: ModelConfig | AdaptConfig
    """The network."""
    input: InputConfig
    """Splits, crops, augmentation and decoding of images."""
    objective: ObjectiveConfig
    """The loss."""
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
    """The optimiser, weight decay, clipping and frozen parameters."""
    schedule: ScheduleConfig
    """The learning rate over time."""
    polyak: PolyakConfig = PolyakConfig()
    """Exponential moving average of the parameters."""
    sharding: ShardingConfig = ShardingConfig()
    """Layout of arrays over the devices."""
    evaluation: EvaluationConfig
    """When and how to evaluate."""
    checkpoint: CheckpointConfig
    """When to save, and which checkpoints to keep."""
    stop_early: StopEarlyConfig = StopEarlyConfig()
    """Early stopping."""
    logging: LoggingConfig
    """Logs, profiles and the watchdog."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseConfig:
    """An earlier phase of a run, with another image size, batch or patch dropout.

    Evaluations have the size of the run, and networks keep its shapes: learned positions are
    resized in each step.
    """

    until: Duration
    """Time at which the phase ends; "fraction" is of `total`, in the unit of it. Later phases end
    later."""
    image_size: tuple[Count, Count] | None = None
    """Height and width in pixels; one number sets both. None: input.image_size."""
    global_batch: Count | None = None
    """Images per step on all devices together. None: config.global_batch."""
    patch_dropout: Fraction | None = None
    """Fraction of the patches of each training image that are dropped. None:
    input.patch_dropout."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PretrainConfig(_AnyRun):
    """A pre-training run."""

    model: ModelConfig
    """The network to train."""
    resume_from: str | None = None
    """Workdir of another run whose complete state (step, parameters, optimiser) this run continues.
    None: off."""
    phases: Mapping[str, PhaseConfig] = dataclasses.field(default_factory=dict)
    """Earlier phases by name, in order: --config.phases.NAME.until="0.5 fraction". The last has the
    run's sizes."""
    resume_step: Annotated[int | None, When("resume_from")] = None
    """Step of resume_from's checkpoint. None: the newest; with decay=wsd the newest with this run's
    learning rate."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """Search for the learning rate, as in the paper.

    Each is tried on a part of the training split; the run trains on the whole split with the best.
    """

    learning_rates: tuple[Positive, ...] = ()
    """Learning rates to try (ViT, Table 4). (): no search, schedule.learning_rate is used."""
    validation_fraction: float = 0.1
    """Fraction of each class of the training split that the search holds out for validation."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneConfig(_AnyRun):
    """A fine-tuning run: the weights of `init_from`, a new head, other images."""

    model: AdaptConfig = AdaptConfig()
    """Changes of the network of the weights."""
    search: SearchConfig = SearchConfig()
    """Search for the learning rate; with it, schedule.learning_rate is 0."""


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
"""Sections and fields of the execution of a run, not of its computation.

A continued run may change them, to resume with fewer devices and less memory. Other micro-batches
have other dropout masks.
"""
