"""Record what libraries make of a photograph: pixels by their processors, and features: tests/golden/photographs.npz.

    python tests/weights/reference/photographs.py tests/golden/photographs.npz

`run_families.py` states what it needs.
"""

import json
import pathlib
import sys
import tempfile

import numpy as np

OPENAI = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
SQUARE = {"height": 48, "width": 48}
# Case of `run_families.py`: class of transformers and its arguments, in proportion to the released
# ones
PROCESSORS = {
    "dinov2": (
        "BitImageProcessor",
        {
            "size": {"shortest_edge": 55},
            "crop_size": SQUARE,
            "do_center_crop": True,
            "resample": 3,
            **IMAGENET,
        },
    ),
    "dinov3": (
        "DINOv3ViTImageProcessor",
        {
            "size": SQUARE,
            "resample": 2,
            **IMAGENET,
        },
    ),
    "siglip": ("SiglipImageProcessor", {"size": SQUARE, "resample": 3}),
    "clip": (
        "CLIPImageProcessor",
        {
            "size": {"shortest_edge": 48},
            "crop_size": SQUARE,
            **OPENAI,
        },
    ),
    "radio": (
        "CLIPImageProcessor",
        {
            "size": {"shortest_edge": 48},
            "crop_size": SQUARE,
            "do_normalize": False,
        },
    ),
}
# Cases whose preprocessing is that of timm's own configuration.
TIMM = (
    "mae",
    "dinov3",
    "pe_core",
    "eva02_clip",
)


def photograph() -> np.ndarray:
    """Return an image uint8 (97, 150, 3) of shaded areas, edges and a fine texture."""
    y, x = np.mgrid[0:97, 0:150] / 97
    chance = np.random.default_rng(5)
    image = np.zeros((97, 150, 3))

    for centre_y, centre_x, radius in chance.uniform([0, 0, 0.1], [1, 1.5, 0.5], size=(12, 3)):
        inside = np.hypot(y - centre_y, x - centre_x) < radius
        image[inside] = chance.uniform(0, 200, 3) + 50 * y[inside][:, None]

    image += 8 * np.sin(60 * x)[..., None] + chance.normal(scale=4, size=image.shape)
    return np.clip(image, 0, 255).astype(np.uint8)


def main(path: pathlib.Path) -> None:
    import timm
    import torch
    import transformers
    from PIL import Image
    from run_families import build_huggingface, build_timm

    image = Image.fromarray(photograph())
    recorded = {}

    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        for case, (name, arguments) in PROCESSORS.items():
            processor = getattr(transformers, name)(**arguments)
            processor.save_pretrained(folder)
            stated = json.loads((pathlib.Path(folder) / "preprocessor_config.json").read_text())
            x = processor(image, return_tensors="pt")["pixel_values"]
            output = build_huggingface(case, pathlib.Path(folder))[0](x)
            names = (
                "logits",
                "image_embeds",
                "summary",
                "pooler_output",
            )
            features = next(output[name] for name in names if name in output)
            mean, std = (
                ([0.0] * 3, [1.0] * 3)
                if case == "radio"
                else (processor.image_mean, processor.image_std)
            )
            add(recorded, f"huggingface/{case}", x, mean, std, features)
            recorded[f"huggingface/{case} processor"] = np.array(json.dumps(stated))

        for case in TIMM:
            model, arguments = build_timm(case)
            sizes = (3, arguments["img_size"], arguments["img_size"])
            config = timm.data.resolve_data_config(
                {"input_size": sizes},
                model=model,
            )
            x = timm.data.create_transform(**config)(image)[None]
            features = model.forward_head(
                model.forward_features(x),
                pre_logits=True,
            )
            add(
                recorded,
                f"timm/{case}",
                x,
                config["mean"],
                config["std"],
                features,
            )

    np.savez_compressed(path, **recorded)


def add(
    recorded: dict,
    case: str,
    x: object,
    mean: list[float],
    std: list[float],
    features: object,
) -> None:
    grey = (x[0].numpy().transpose(1, 2, 0) * std + mean) * 255
    recorded[f"{case} pixels"] = np.round(grey).astype(np.uint8)
    recorded[f"{case} features"] = features.numpy()[0]


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
