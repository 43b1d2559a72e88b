"""Record how other libraries resize images and tables of positions: tests/golden/resizing.npz.

    python tests/weights/reference/resizing.py tests/golden/resizing.npz

It needs Pillow, timm, torch, torchvision and transformers, in an environment of its own, and
nothing of ours.
"""

import sys

import numpy as np

FILTERS = ("bilinear", "bicubic")
IMAGE = (19, 26)
PHOTOGRAPH = (41, 64)
SIZES = ((7, 9), (25, 12), (19, 11), (1, 30))  # pixels of the resized image
NETWORKS = ((10, 10), (12, 8))  # image sizes of networks
CROP_FRACTIONS = (1.0, 0.875, 0.9)
GRIDS = (((7, 7), (3, 3)), ((7, 7), (12, 12)), ((5, 8), (6, 3)))  # old and new
POSITIONS = ("timm", "huggingface", "dinov2", "bilinear")


def image(size: tuple[int, int]) -> np.ndarray:
    rng = np.random.default_rng(size)
    return rng.integers(256, size=(*size, 3), dtype=np.uint8)


def table(grid: tuple[int, int]) -> np.ndarray:
    rng = np.random.default_rng(grid)
    return np.float32(rng.normal(size=(*grid, 1)))


def key(*parts: object) -> str:
    return " ".join(str(part).replace(" ", "") for part in parts)


def images_of_libraries() -> dict[str, np.ndarray]:
    from PIL import Image
    from timm.data.transforms_factory import transforms_imagenet_eval
    from transformers import CLIPImageProcessor, DINOv3ViTImageProcessor, ViTImageProcessor

    recorded = {}

    for name, number in zip(FILTERS, (2, 3), strict=True):
        for size in SIZES:
            resized = Image.fromarray(image(IMAGE)).resize(size[::-1], number)
            recorded[key("pillow", name, size)] = np.asarray(resized)

        photograph = Image.fromarray(image(PHOTOGRAPH))
        for size in NETWORKS:
            for fraction in CROP_FRACTIONS:
                timm = transforms_imagenet_eval(
                    size,
                    fraction,
                    interpolation=name,
                    normalize=False,
                )
                pixels = np.asarray(timm(photograph))
                name_of_case = key("timm", name, size, fraction)
                recorded[name_of_case] = pixels.transpose(1, 2, 0)

        asis = {
            "do_rescale": False,
            "do_normalize": False,
            "resample": number,
        }
        crop = CLIPImageProcessor(
            size={"shortest_edge": 11},
            crop_size={"height": 10, "width": 10},
            **asis,
        )
        squash = ViTImageProcessor(
            size={"height": 12, "width": 8},
            **asis,
        )

        for word, processor in (("crop", crop), ("squash", squash)):
            pixels = run_processor(processor, photograph)
            recorded[key("huggingface", name, word)] = pixels.astype(np.uint8)

    # Resizes floating point.
    dinov3 = DINOv3ViTImageProcessor(
        size={"height": 12, "width": 8},
        do_normalize=False,
    )
    pixels = run_processor(dinov3, photograph)
    recorded["dinov3"] = (pixels * 255).astype(np.float32)

    return recorded


def run_processor(processor, photograph) -> np.ndarray:
    """Return the pixels (H, W, 3) of one image by a processor of transformers."""
    batch = processor(photograph, return_tensors="np")
    pixels = np.asarray(batch["pixel_values"][0])
    return pixels.transpose(1, 2, 0)


def positions_of_libraries() -> dict[str, np.ndarray]:
    import torch
    from timm.layers import resample_abs_pos_embed
    from torch.nn.functional import interpolate

    def resized(
        name: str,
        old_hwD: np.ndarray,
        new: tuple[int, int],
    ) -> np.ndarray:
        old_height, old_width, depth = old_hwD.shape
        old_1Dhw = torch.tensor(old_hwD).permute(2, 0, 1)[None]
        match name:
            case "timm":
                new_1SD = resample_abs_pos_embed(
                    torch.tensor(old_hwD).reshape(1, -1, depth),
                    list(new),
                    old_size=[old_height, old_width],
                    num_prefix_tokens=0,
                )
                return new_1SD.reshape(*new, -1).numpy()
            case "huggingface":
                new_1Dhw = interpolate(
                    old_1Dhw,
                    size=new,
                    mode="bicubic",
                    align_corners=False,
                )
            case "dinov2":  # interpolate_pos_encoding with its interpolate_offset
                new_height, new_width = new
                new_1Dhw = interpolate(
                    old_1Dhw,
                    scale_factor=(
                        (new_height + 0.1) / old_height,
                        (new_width + 0.1) / old_width,
                    ),
                    mode="bicubic",
                    antialias=False,
                )
            case "bilinear":
                new_1Dhw = interpolate(
                    old_1Dhw,
                    size=new,
                    mode="bilinear",
                    align_corners=False,
                    antialias=True,
                )

        return new_1Dhw[0].permute(1, 2, 0).numpy()

    recorded = {}
    for name in POSITIONS:
        for old, new in GRIDS:
            recorded[key(name, old, new)] = resized(name, table(old), new)
    return recorded


def main() -> None:
    np.savez_compressed(
        sys.argv[1],
        **images_of_libraries(),
        **positions_of_libraries(),
    )


if __name__ == "__main__":
    main()
