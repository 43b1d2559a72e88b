"""Verbs that list what there is: models and recipes."""

import dataclasses
import json
from typing import Any

from vit_jax.cli.verb import entry, verb
from vit_jax.cli.words import Given, UsageError

_PIXELS, _NUM_CLASSES = 224, 1000  # the defaults of `vit_jax.create_model`


@verb(
    {
        "[PATTERN]": "only names that contain this text or match this pattern, such as 'ViT-B/*'; all by default",
        "[--weights]": "list the addresses of the public weights of each network",
        "[--json]": "print everything as JSON",
    },
    "'ViT-B/*'",
    "ViT-B/16 --weights",
)
def models(given: Given) -> None:
    """List networks by name with parameters, GFLOPs and public weights."""
    options = given.options

    from vit_jax.config import ModelConfig, build_architecture
    from vit_jax.config.variants import MODEL_NAMES, list_models
    from vit_jax.models.flops import FLOPS_PER_MAC, count_parameters, forward_macs
    from vit_jax.nearest import did_you_mean
    from vit_jax.tables import aligned
    from vit_jax.weights.published import PUBLISHED, releases_of

    names = list_models(options.get("PATTERN", ""))
    if not names:
        hint = did_you_mean(options["PATTERN"], MODEL_NAMES)
        raise UsageError(f"PATTERN={options['PATTERN']}: must match a network.{hint} `vit-jax models` lists all.")
    found = list[dict[str, Any]]()
    for name in names:
        config = ModelConfig(name=name, head="linear")
        a = build_architecture(config, image_size=(_PIXELS, _PIXELS), num_classes=_NUM_CLASSES)
        flops = FLOPS_PER_MAC * forward_macs(a)
        weights = PUBLISHED.get(name, ())
        found.append({"name": name, "parameters": count_parameters(a), "flops": flops, "weights": weights})
    if "json" in options:
        print(json.dumps(found, indent=2))
        return
    head = ("name", "million parameters", "GFLOPs", "public weights")
    lines = [
        (row["name"], _short(row["parameters"] / 1e6), _short(row["flops"] / 1e9), ", ".join(releases_of(row["name"])))
        for row in found
    ]
    print(aligned(head, lines, (head[0], head[3])), end="")
    print(f"At {_PIXELS} x {_PIXELS} pixels with a linear head of {_NUM_CLASSES:,} classes; a multiply-add is 2 FLOPs.")
    if "weights" not in options:
        print("--weights lists the addresses of the weights. Other names: any patch size, R50x2+ViT-B/32, ...")
        print("`vit-jax weights --list` lists current families of pre-trained ViTs: DINOv3, SigLIP 2, ...")
        return
    for row in found:
        print("\n".join(("", f"{row['name']}:", *(f"  {address}" for address in row["weights"] or ["none"]))))
    print("\nhf://owner/name is downloaded by the verbs that take weights; download gs:// files yourself.")


def _short(value: float) -> str:
    return f"{value:,.1f}" if value >= 10 else f"{value:.2f}"


@verb(
    {
        "[PATTERN]": "only families whose name contains this text; all by default",
        "[--list]": "print the table of families before their addresses",
        "[--json]": "print everything as JSON",
    },
    "--list",
    "dinov2 --list",
)
def weights(given: Given) -> None:
    """List current families of pre-trained ViTs by their addresses; with --list licence, pixels and accuracy."""
    from vit_jax.tables import aligned
    from vit_jax.weights.published import FAMILIES, FAMILY_HEAD, family_cells

    pattern = given.options.get("PATTERN", "")
    found = [family for family in FAMILIES if pattern.casefold() in family.name.casefold()]
    if not found:
        names = ", ".join(family.name for family in FAMILIES)
        raise UsageError(f"PATTERN={pattern}: must be a part of a family's name: {names}.")
    if "json" in given.options:
        print(json.dumps([family._asdict() for family in found], indent=2))
        return
    if "list" in given.options:
        print(aligned(FAMILY_HEAD, [family_cells(family) for family in found], FAMILY_HEAD))
    for family in found:
        print(f"{family.name}:", *family.addresses, sep="\n  ", end="\n\n")
    if "list" in given.options:
        print(
            "Accuracies: of the authors, top-1 in percent on ImageNet-1k. Check the licence on the page of the weights."
        )
    else:
        print("--list shows licence, pixels and accuracy of each family. {A,B} stands for each of these names.")


@verb(
    {
        "[PATTERN]": "only names that contain this text; all by default",
        "[--json]": "print everything as JSON",
    },
    "digits",
    "pretrain --json",
)
def recipes(given: Given) -> None:
    """List recipes with their data, length and arguments."""
    from vit_jax.config.recipes import list_recipes

    pattern = given.options.get("PATTERN", "")
    found = [recipe for recipe in list_recipes() if pattern in recipe.name]
    if not found:
        raise UsageError(f"PATTERN={pattern}: must be a part of a recipe's name. `vit-jax recipes` lists all.")
    if "json" in given.options:
        print(json.dumps([dataclasses.asdict(recipe) for recipe in found], indent=2))
        return
    for recipe in found:
        data = "data by --config.data=" if recipe.data is None else f"data {recipe.data}"
        print(entry(recipe.name, recipe.description))
        print(entry("", f"vit-jax {recipe.verb}, {data}, {recipe.total} by default"))
        print(entry("", f"--config={recipe.name}:ARGUMENT, ARGUMENT is {recipe.argument}"))
        for table, rows in recipe.choices.items():
            print(entry("", f"{table}: {' '.join(rows)}"))
