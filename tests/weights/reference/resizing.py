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
                recorded[key("timm", name, size, fraction)] = np.asarray(
                    timm(photograph)
                ).transpose(1, 2, 0)

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
            pixels = processor(photograph, return_tensors="np")["pixel_values"][0]
            recorded[key("huggingface", name, word)] = pixels.transpose(1, 2, 0).astype(np.uint8)

    # Resizes floating point.
    dinov3 = DINOv3ViTImageProcessor(
        size={"height": 12, "width": 8},
        do_normalize=False,
    )
    pixels = np.asarray(dinov3(photograph, return_tensors="np")["pixel_values"][0])
    recorded["dinov3"] = (pixels.transpose(1, 2, 0) * 255).astype(np.float32)

    return recorded


def positions_of_libraries() -> dict[str, np.ndarray]:
    import torch
    from timm.layers import resample_abs_pos_embed
    from torch.nn.functional import interpolate

    def resized(
        name: str,
        old_hwD: np.ndarray,
        new: tuple[int, int],
    ) -> np.ndarray:
        old_1Dhw = torch.tensor(old_hwD).permute(2, 0, 1)[None]
        match name:
            case "timm":
                flat_1SD = torch.tensor(old_hwD).reshape(1, -1, old_hwD.shape[2])
                options = {
                    "old_size": list(old_hwD.shape[:2]),
                    "num_prefix_tokens": 0,
                }

                return (
                    resample_abs_pos_embed(flat_1SD, list(new), **options).reshape(*new, -1).numpy()
                )
            case "huggingface":
                new_1Dhw = interpolate(
                    old_1Dhw,
                    size=new,
                    mode="bicubic",
                    align_corners=False,
                )
            case "dinov2":  # interpolate_pos_encoding with its interpolate_offset
                scale = tuple((n + 0.1) / o for n, o in zip(new, old_hwD.shape[:2], strict=True))
                new_1Dhw = interpolate(
                    old_1Dhw,
                    scale_factor=scale,
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

    return {
        key(name, *grids): resized(name, table(grids[0]), grids[1])
        for name in POSITIONS
        for grids in GRIDS
    }


def main() -> None:
    np.savez_compressed(
        sys.argv[1],
        **images_of_libraries(),
        **positions_of_libraries(),
    )


if __name__ == "__main__":
    main()
