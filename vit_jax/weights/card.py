"""The model card of a folder of weights: README.md with the use.

It begins with the metadata that the Hugging Face Hub reads.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.config.architecture import Architecture
from vit_jax.config.field_checks import is_value_range
from vit_jax.storage.files import open_regular, write_atomically
from vit_jax.text.tables import markdown_code, markdown_text
from vit_jax.weights.description import TrainingData
from vit_jax.weights.folding import OURS, format_numbers, read_normalisation
from vit_jax.weights.library_lookup import name_huggingface_class
from vit_jax.weights.load import Weights

CARD = "README.md"
_BEGINNING = "---\nlibrary_name: "
MAX_CLASSES = 20  # in a list
HUB_LICENCES = ("apache-2.0", "mit", "cc-by-nc-4.0")
_LIBRARY = {
    "timm": "timm",
    "huggingface": "transformers",
    "vit_jax": "vit_jax",
}
# Code that loads the folder {}.
_USE = {
    "timm": "import timm\n\nmodel = timm.create_model({}, pretrained=True)",
    "huggingface": "import transformers\n\nmodel = transformers.CLASS.from_pretrained({})",
    "vit_jax": (
        "import vit_jax\n\n"
        "model = vit_jax.load_model({})\n"
        'model.predict(["image.jpg"])  # probabilities'
    ),
}
# Sentences by `is_multilabel`.
_OUTPUTS = {
    True: "multi-label: the sigmoid of each logit is the probability of its class",
    False: "single-label: the softmax of the logits gives the probabilities",
}
# Sentences by `exif_orientation`.
_PHOTOGRAPHS: dict[object, str] = {
    True: (
        "were turned upright as their Exif data say, before the preparation: "
        "`PIL.ImageOps.exif_transpose`"
    ),
    False: "were taken as they are stored; their orientation in Exif data was ignored",
    None: "not known whether they were turned upright as their Exif data say",
}


_ALSO_READ = "`vit_jax.load_model` and `vit-jax finetune` read the same folder, without any option."


def write_card(weights: Weights, format_name: str, folder: pathlib.Path) -> None:
    """Write the card into the folder of the weights, unless another README.md is there."""
    path = folder / CARD
    if path.exists():
        with open_regular(path) as file:
            beginning = file.read(len(_BEGINNING))
        if beginning != _BEGINNING.encode():
            return

    text = build_card(weights, format_name, folder.absolute().name)
    write_atomically(path, text)


def build_card(weights: Weights, format_name: str, name: str) -> str:
    """Return the text of a card, without paths of this machine: folders of images by name only."""
    a = weights.architecture
    count = sum(array.size for array in weights.parameters.values())
    head = "no classifier: it ends in its features"
    if a.num_classes:
        head = f"{a.num_classes:,} classes"

    lines = [f"{_BEGINNING}{_LIBRARY[format_name]}"]
    for field, value in _build_front_matter(weights).items():
        lines.append(f"{field}: {json.dumps(value)}")
    lines += ["---", ""]

    lines += [f"# {markdown_text(name)}", ""]
    lines += [f"{markdown_text(a.name)}, {count:,} parameters, {head}.", ""]

    lines += ["| | |", "|---|---|"]
    for field, cell in _build_rows(weights, format_name).items():
        lines.append(f"| {field} | {cell} |")
    lines.append("")

    if a.num_classes:
        lines += ["## Classes", "", _list_classes(weights.class_names), ""]
    lines += ["## Use", "", "```python", _write_code(a, format_name, name), "```", ""]
    if format_name != "vit_jax":
        lines += [_ALSO_READ, ""]
    return "\n".join(lines)


def _build_front_matter(weights: Weights) -> dict[str, object]:
    """Return the fields that the Hub reads."""
    a = weights.architecture
    front: dict[str, object] = {}
    if weights.licence in HUB_LICENCES:
        front["license"] = weights.licence
    elif weights.licence:
        front["license"] = "other"
        front["license_name"] = weights.licence

    if a.num_classes:
        front["pipeline_tag"] = "image-classification"
    else:
        front["pipeline_tag"] = "image-feature-extraction"
    network = "vision-transformer" if a.has_transformer else "resnet"
    front["tags"] = [network, "vit_jax"]
    return front


def _build_rows(weights: Weights, format_name: str) -> dict[str, str]:
    """Return the rows of the table."""
    a = weights.architecture
    prepared = weights.preprocessing or {}
    height, width = a.image_size
    scaling = _describe_scaling(weights, format_name)
    rows = {
        "images": f"RGB, {height} x {width} pixels (height x width), {scaling}",
        "preparation": _describe_preparation(prepared),
    }
    if a.num_classes:
        rows["outputs"] = _OUTPUTS[weights.is_multilabel]
    orientation = prepared.get("exif_orientation")
    rows["photographs"] = _PHOTOGRAPHS.get(orientation, _PHOTOGRAPHS[None])

    values: Any = prepared.get("value_range")
    if is_value_range(values):
        low, high = values
        rows["more than 8 bits"] = (
            f"values from {low:g} to {high:g} become 0 to 255, before the preparation"
        )

    if weights.licence:
        rows["licence of the pre-trained weights"] = markdown_text(weights.licence)
    rows["trained on"] = _describe_training(weights.training)
    rows["computed with"] = _describe_details(a)
    return rows


def _describe_training(training: TrainingData | None) -> str:
    if training is None:
        return "not known"
    data = _describe_data(training.data)
    if not training.lora_rank:
        return data
    return f"{data}, LoRA of rank {training.lora_rank}, merged"


def _write_code(a: Architecture, format_name: str, name: str) -> str:
    """Return the code that loads the folder."""
    code = _USE[format_name]
    if format_name == "huggingface":
        code = code.replace("CLASS", name_huggingface_class(a))
    source = name
    if format_name == "timm":
        source = f"local-dir:{name}"
    return code.format(json.dumps(source))  # a literal of Python on one line


def _describe_scaling(weights: Weights, format_name: str) -> str:
    """Return the scaling of pixels for the arrays of the file."""
    pixels = read_normalisation(weights.preprocessing)
    if format_name == "vit_jax" or pixels == OURS:
        return "scaled to [-1, 1]"
    mean = format_numbers(pixels.mean)
    std = format_numbers(pixels.std)
    return f"scaled to [0, 1], less the mean ({mean}), divided by the standard deviation ({std})"


_LISTINGS = {
    "folder": "a folder",
    "csv": "a table",
}


def _describe_data(data: str) -> str:
    """Return the data of a config, without the parent folders of a path."""
    kind, colon, path = data.partition(":")
    if not colon or kind not in _LISTINGS:
        return markdown_code(data, in_table=True)
    name = markdown_code(pathlib.Path(path).name, in_table=True)
    return f"{_LISTINGS[kind]} of images, {name}"


def _describe_preparation(prepared: Mapping[str, object]) -> str:
    if "resize" not in prepared:
        return "not known"

    how = "resized"
    filter_name = prepared.get("interpolation")
    if filter_name:
        how = f"resized ({markdown_text(str(filter_name))}, antialiased)"
    if prepared["resize"] == "direct":
        return f"both sides {how} to the size of the input"
    crop_fraction = prepared.get("crop_fraction", 1)
    return f"the short side {how}, and the middle kept: {crop_fraction:g} of it"


def _describe_details(a: Architecture) -> str:
    terms = []
    if a.has_transformer:
        terms.append(f"GELU {markdown_text(a.gelu)}, layer norm epsilon {a.layer_norm_epsilon:g}")
    if a.has_resnet:
        standardization = f"weight standardisation {a.standardization_epsilon:g}"
        terms.append(f"group norm epsilon {a.group_norm_epsilon:g}, {standardization}")
    return "; ".join(terms)


def _list_classes(names: Sequence[str] | None) -> str:
    if names is None:
        return "Their names are not known."
    first = ", ".join(map(markdown_code, names[:MAX_CLASSES]))
    rest = len(names) - MAX_CLASSES
    if rest > 0:
        return f"{first} and {rest:,} more."
    return f"{first}."
