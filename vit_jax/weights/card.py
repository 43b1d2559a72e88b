"""The model card of a folder of weights: README.md with the metadata that the Hugging Face Hub reads, and the use."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from vit_jax.config.validate import is_value_range
from vit_jax.files import open_regular, write_atomically
from vit_jax.tables import markdown_code, markdown_text
from vit_jax.weights.folding import OURS, stored_normalisation
from vit_jax.weights.load import Weights
from vit_jax.weights.names.classes import huggingface_class

CARD = "README.md"
_BEGINNING = "---\nlibrary_name: "
MOST_CLASSES = 20  # that a card names
HUB_LICENCES = ("apache-2.0", "mit", "cc-by-nc-4.0")
_LIBRARY = {"timm": "timm", "huggingface": "transformers", "vit_jax": "vit_jax"}
_USE = {  # {} is the folder
    "timm": "import timm\n\nmodel = timm.create_model({}, pretrained=True)",
    "huggingface": "import transformers\n\nmodel = transformers.CLASS.from_pretrained({})",
    "vit_jax": 'import vit_jax\n\nmodel = vit_jax.load_model({})\nmodel.predict(["image.jpg"])  # probabilities',
}


def write_card(weights: Weights, format_name: str, folder: pathlib.Path) -> None:
    """Writes the card into the folder of the weights, unless there is a README.md that is no card."""
    path = folder / CARD
    if not path.exists() or _is_card(path):
        write_atomically(path, model_card(weights, format_name, folder.absolute().name))


def _is_card(path: pathlib.Path) -> bool:
    with open_regular(path) as file:
        return file.read(len(_BEGINNING)) == _BEGINNING.encode()


def model_card(weights: Weights, format_name: str, name: str) -> str:
    """The text of a card; paths of this machine are not in it, of a folder of images only its name."""
    a = weights.architecture
    count = sum(array.size for array in weights.parameters.values())
    height, width = a.image_size
    head = f"{a.num_classes:,} classes" if a.num_classes else "no classifier: it ends in its features"
    training = weights.training and _data(weights.training.data)
    fields = {
        **_licence(weights.licence),
        "pipeline_tag": "image-classification" if a.num_classes else "image-feature-extraction",
        "tags": ["vision-transformer" if a.has_transformer else "resnet", "vit_jax"],
    }
    lines = [
        f"{_BEGINNING}{_LIBRARY[format_name]}",
        *(f"{field}: {json.dumps(value)}" for field, value in fields.items()),
        "---",
        "",
    ]
    lines += [f"# {markdown_text(name)}", "", f"{markdown_text(a.name)}, {count:,} parameters, {head}.", ""]
    scaled = _scaling(weights, format_name)
    lines += ["| | |", "|---|---|", f"| images | RGB, {height} x {width} pixels (height x width), {scaled} |"]
    lines += [f"| preparation | {_preparation(weights.preprocessing)} |"]
    lines += [f"| photographs | {_photographs(weights.preprocessing)} |"]
    values: Any = (weights.preprocessing or {}).get("value_range")
    if is_value_range(values):
        low, high = values
        lines += [f"| more than 8 bits | values from {low:g} to {high:g} become 0 to 255, before the preparation |"]
    if weights.licence:
        lines += [f"| licence of the pre-trained weights | {markdown_text(weights.licence)} |"]
    rank = weights.training and weights.training.lora_rank
    lora = f", LoRA of rank {rank}, merged" if rank else ""
    lines += [f"| trained on | {training or 'not known'}{lora} |", f"| computed with | {_details(weights)} |", ""]
    if a.num_classes:
        lines += ["## Classes", "", _classes(weights), ""]
    classes = huggingface_class(a) if format_name == "huggingface" else ""
    source = json.dumps(f"local-dir:{name}" if format_name == "timm" else name)  # a literal of Python on one line
    use = _USE[format_name].replace("CLASS", classes).format(source)
    lines += ["## Use", "", "```python", use, "```", ""]
    if format_name != "vit_jax":
        lines += ["`vit_jax.load_model` and `vit-jax finetune` read the same folder, without any option.", ""]
    return "\n".join(lines)


def _licence(licence: str) -> dict[str, str]:
    """Return the fields that the Hub reads; it knows some licences by name."""
    if not licence or licence in HUB_LICENCES:
        return {"license": licence} if licence else {}
    return {"license": "other", "license_name": licence}


def _scaling(weights: Weights, format_name: str) -> str:
    """Return how pixels are scaled for the arrays of the file."""
    pixels = stored_normalisation(weights.preprocessing)
    if format_name == "vit_jax" or pixels == OURS:
        return "scaled to [-1, 1]"
    mean, std = (", ".join(f"{number:g}" for number in numbers) for numbers in pixels)
    return f"scaled to [0, 1], less the mean ({mean}), divided by the standard deviation ({std})"


def _data(data: str) -> str:
    """Data as in a config, without the folders that lead to it."""
    kind, colon, path = data.partition(":")
    listing = {"folder": "a folder", "csv": "a table"}.get(kind) if colon else None
    return (
        f"{listing} of images, {markdown_code(pathlib.Path(path).name, in_table=True)}"
        if listing
        else markdown_code(data, in_table=True)
    )


def _preparation(preprocessing: Mapping[str, Any] | None) -> str:
    if preprocessing is None or "resize" not in preprocessing:
        return "not known"
    filter_name = preprocessing.get("interpolation")
    how = f"resized ({markdown_text(str(filter_name))}, antialiased)" if filter_name else "resized"
    if preprocessing["resize"] == "direct":
        return f"both sides {how} to those of the input"
    return f"the short side {how}, and the middle kept: {preprocessing.get('crop_fraction', 1):g} of it"


def _photographs(preprocessing: Mapping[str, Any] | None) -> str:
    match (preprocessing or {}).get("exif_orientation"):
        case True:
            return "were turned upright as their Exif data say, before the preparation: `PIL.ImageOps.exif_transpose`"
        case False:
            return "were taken as they are stored; their orientation in Exif data was ignored"
    return "not known whether they were turned upright as their Exif data say"


def _details(weights: Weights) -> str:
    a = weights.architecture
    parts = [f"GELU {markdown_text(a.gelu)}, layer norm epsilon {a.layer_norm_epsilon:g}"] if a.has_transformer else []
    if a.has_resnet:
        parts.append(
            f"group norm epsilon {a.group_norm_epsilon:g}, weight standardisation {a.standardization_epsilon:g}"
        )
    return "; ".join(parts)


def _classes(weights: Weights) -> str:
    if weights.class_names is None:
        return "Their names are not known."
    shown = [markdown_code(name) for name in weights.class_names[:MOST_CLASSES]]
    rest = len(weights.class_names) - len(shown)
    return ", ".join(shown) + (f" and {rest:,} more." if rest else ".")
