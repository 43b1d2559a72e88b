"""The model card of a folder of weights: README.md with the metadata that the Hugging Face Hub reads, and the use."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from vit_jax.config.architecture import Architecture
from vit_jax.config.check import is_value_range
from vit_jax.storage.files import open_regular, write_atomically
from vit_jax.text.tables import markdown_code, markdown_text
from vit_jax.weights.folding import OURS, stored_normalisation
from vit_jax.weights.load import Weights
from vit_jax.weights.names.library_classes import huggingface_class

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
_OUTPUTS = {  # by `is_multilabel`
    True: "multi-label: the sigmoid of each logit is the probability of its class",
    False: "single-label: the softmax of the logits gives the probabilities",
}
_PHOTOGRAPHS: dict[object, str] = {  # by `exif_orientation`
    True: "were turned upright as their Exif data say, before the preparation: `PIL.ImageOps.exif_transpose`",
    False: "were taken as they are stored; their orientation in Exif data was ignored",
    None: "not known whether they were turned upright as their Exif data say",
}


def write_card(weights: Weights, format_name: str, folder: pathlib.Path) -> None:
    """Write the card into the folder of the weights, unless it has a README.md that is not a card."""
    path = folder / CARD
    if path.exists():
        with open_regular(path) as file:
            if file.read(len(_BEGINNING)) != _BEGINNING.encode():
                return
    write_atomically(path, model_card(weights, format_name, folder.absolute().name))


def model_card(weights: Weights, format_name: str, name: str) -> str:
    """Return the text of a card, without paths of this machine; a folder of images has its name only."""
    a = weights.architecture
    training = weights.training
    licence = weights.licence
    prepared = weights.preprocessing or {}
    count = sum(array.size for array in weights.parameters.values())
    height, width = a.image_size
    head = (
        f"{a.num_classes:,} classes" if a.num_classes else "no classifier: it ends in its features"
    )
    front: dict[str, object] = {}
    if licence:  # the Hub knows some licences by name
        front = (
            {"license": licence}
            if licence in HUB_LICENCES
            else {"license": "other", "license_name": licence}
        )
    front["pipeline_tag"] = "image-classification" if a.num_classes else "image-feature-extraction"
    front["tags"] = ["vision-transformer" if a.has_transformer else "resnet", "vit_jax"]
    rows = {
        "images": f"RGB, {height} x {width} pixels (height x width), {_scaling(weights, format_name)}",
        "preparation": _preparation(prepared),
        **({"outputs": _OUTPUTS[weights.is_multilabel]} if a.num_classes else {}),
        "photographs": _PHOTOGRAPHS.get(prepared.get("exif_orientation"), _PHOTOGRAPHS[None]),
    }
    values: Any = prepared.get("value_range")
    if is_value_range(values):
        low, high = values
        rows["more than 8 bits"] = (
            f"values from {low:g} to {high:g} become 0 to 255, before the preparation"
        )
    if licence:
        rows["licence of the pre-trained weights"] = markdown_text(licence)
    lora = f", LoRA of rank {training.lora_rank}, merged" if training and training.lora_rank else ""
    rows["trained on"] = f"{_data(training.data) if training else 'not known'}{lora}"
    rows["computed with"] = _details(a)
    classes = ["## Classes", "", _classes(weights.class_names), ""] if a.num_classes else []
    class_of_library = huggingface_class(a) if format_name == "huggingface" else ""
    source = json.dumps(
        f"local-dir:{name}" if format_name == "timm" else name
    )  # a literal of Python on one line
    use = _USE[format_name].replace("CLASS", class_of_library).format(source)
    also = "`vit_jax.load_model` and `vit-jax finetune` read the same folder, without any option."
    lines = [
        f"{_BEGINNING}{_LIBRARY[format_name]}",
        *(f"{field}: {json.dumps(value)}" for field, value in front.items()),
        *(
            "---",
            "",
            f"# {markdown_text(name)}",
            "",
            f"{markdown_text(a.name)}, {count:,} parameters, {head}.",
            "",
        ),
        *("| | |", "|---|---|", *(f"| {field} | {value} |" for field, value in rows.items()), ""),
        *(*classes, "## Use", "", "```python", use, "```", ""),
        *([] if format_name == "vit_jax" else [also, ""]),
    ]
    return "\n".join(lines)


def _scaling(weights: Weights, format_name: str) -> str:
    """Return how pixels are scaled for the arrays of the file."""
    pixels = stored_normalisation(weights.preprocessing)
    if format_name == "vit_jax" or pixels == OURS:
        return "scaled to [-1, 1]"
    mean, std = (", ".join(f"{number:g}" for number in numbers) for numbers in pixels)
    return f"scaled to [0, 1], less the mean ({mean}), divided by the standard deviation ({std})"


def _data(data: str) -> str:
    """Return data as in a config, without the folders that lead to it."""
    kind, colon, path = data.partition(":")
    if colon and kind in ("folder", "csv"):
        listing = {"folder": "a folder", "csv": "a table"}[kind]
        return f"{listing} of images, {markdown_code(pathlib.Path(path).name, in_table=True)}"
    return markdown_code(data, in_table=True)


def _preparation(prepared: Mapping[str, object]) -> str:
    if "resize" not in prepared:
        return "not known"
    filter_name = prepared.get("interpolation")
    how = f"resized ({markdown_text(str(filter_name))}, antialiased)" if filter_name else "resized"
    if prepared["resize"] == "direct":
        return f"both sides {how} to those of the input"
    return f"the short side {how}, and the middle kept: {prepared.get('crop_fraction', 1):g} of it"


def _details(a: Architecture) -> str:
    terms = (
        [f"GELU {markdown_text(a.gelu)}, layer norm epsilon {a.layer_norm_epsilon:g}"]
        if a.has_transformer
        else []
    )
    if a.has_resnet:
        standardization = f"weight standardisation {a.standardization_epsilon:g}"
        terms.append(f"group norm epsilon {a.group_norm_epsilon:g}, {standardization}")
    return "; ".join(terms)


def _classes(names: Sequence[str] | None) -> str:
    if names is None:
        return "Their names are not known."
    rest = len(names) - MOST_CLASSES
    return ", ".join(map(markdown_code, names[:MOST_CLASSES])) + (
        f" and {rest:,} more." if rest > 0 else "."
    )
