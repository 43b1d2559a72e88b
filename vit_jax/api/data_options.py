"""Options of `open_data`, which type checkers compare with its calls."""

from typing import Literal, TypedDict

from vit_jax.config.schema import Interpolation


class DataOptions(TypedDict, total=False):
    """Fields of `config.InputConfig`, which explains them, without those of the training step."""

    data_dir: str | None
    holdout_fraction: float
    exclude: str | None
    classes: tuple[str, ...]
    sampling: Literal["uniform", "balanced"]
    train_examples: int | None
    train_examples_per_class: int | None
    train_crop: Literal["inception", "resize", "resize_short_side", "simple", "shift", "none"]
    train_resize_pixels: int | None
    crop_area_fraction: tuple[float, float]
    crop_distribution: Literal["tf", "torchvision"]
    train_interpolation: Interpolation | None
    shift_pixels: int
    flip: bool
    vertical_flip: bool
    rotate90: bool
    randaugment_layers: int
    randaugment_magnitude: int
    randaugment_arithmetic: Literal["wrapping", "saturating"]
    three_augment: bool
    color_jitter: float
    augmentations: tuple[str, ...]
    erasing_fraction: float
    test_resize: Literal["short_side", "direct", "weights"]
    test_crop_fraction: float
    test_interpolation: Interpolation | None
    test_resize_library: Literal["huggingface", "timm"]
    repeats: int
    cache_records: bool
    exif_orientation: bool
    channels: int
    bands: tuple[int, ...]
    channel_mean: tuple[float, ...]
    channel_std: tuple[float, ...]
    value_range: tuple[float, float] | None
    max_image_megapixels: float
    max_unreadable: int | None
    num_workers: int | None
    num_threads: int | None
