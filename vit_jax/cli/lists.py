"""Verbs that list models, weights and recipes, and show a recipe."""

import dataclasses
import json
from collections.abc import Collection
from typing import Any

from vit_jax.cli.options import (
    Options,
    Recipe,
    UsageError,
    argument,
    entry,
    fields_of_recipes,
    switch,
    verb,
)
from vit_jax.text.nearest import did_you_mean

_PIXELS = 224
_NUM_CLASSES = 1000  # the defaults of `vit_jax.create_model`


@verb("'ViT-B/*'", "ViT-B/16 --weights")
class Models(Options):
    """List networks by name with parameters, GFLOPs and public weights."""

    pattern: str = argument(
        "PATTERN", "text in the names, or a pattern such as 'ViT-B/*'; default: all", ""
    )
    weights: bool = switch("list the addresses of the public weights of each network")
    json: bool = switch("print everything as JSON")

    def run(self) -> None:
        from vit_jax.config import ModelConfig, build_architecture
        from vit_jax.config.variants import MODEL_NAMES, list_models
        from vit_jax.models.flops import FLOPS_PER_MAC, count_parameters, forward_macs
        from vit_jax.text.tables import aligned
        from vit_jax.weights.published import PUBLISHED, releases_of

        names = list_models(self.pattern)
        _require_match(self.pattern, names, MODEL_NAMES)
        rows = list[dict[str, Any]]()
        lines = list[list[str]]()
        for name in names:
            config = ModelConfig(name=name, head="linear")
            a = build_architecture(config, image_size=(_PIXELS, _PIXELS), num_classes=_NUM_CLASSES)
            parameters = count_parameters(a)
            flops = FLOPS_PER_MAC * forward_macs(a)
            rows.append(
                {
                    "name": name,
                    "parameters": parameters,
                    "flops": flops,
                    "weights": PUBLISHED.get(name, ()),
                }
            )
            lines.append(
                [name, _short(parameters / 1e6), _short(flops / 1e9), ", ".join(releases_of(name))]
            )
        if self.json:
            print(json.dumps(rows, indent=2))
            return
        head = ("name", "million parameters", "GFLOPs", "public weights")
        print(aligned(head, lines, (head[0], head[3])), end="")
        print(
            f"At {_PIXELS} x {_PIXELS} pixels, with a linear head of {_NUM_CLASSES:,} classes; 1 multiply-add: 2 FLOPs."
        )
        if not self.weights:
            print(
                "--weights lists the addresses of the weights. Other names: any patch size, R50x2+ViT-B/32, ..."
            )
            print(
                "`vit-jax weights --list` lists current families of pre-trained ViTs: DINOv3, SigLIP 2, ..."
            )
            return
        for row in rows:
            print(f"\n{row['name']}:", *(row["weights"] or ["none"]), sep="\n  ")
        print(
            "\nhf://owner/name is downloaded by the verbs that take weights; download gs:// files yourself."
        )


def _require_match(pattern: str, matches: Collection[object], names: Collection[str]) -> None:
    if not matches:
        hint = did_you_mean(pattern, names) or f" Use one of {', '.join(names)}."
        raise UsageError(f"PATTERN={pattern}: must match a name.{hint}")


def _short(value: float) -> str:
    return f"{value:,.1f}" if value >= 10 else f"{value:.2f}"


@verb("--list", "dinov2 --list")
class Weights(Options):
    """List current families of pre-trained ViTs by their addresses; with --list licence, pixels and accuracy."""

    pattern: str = argument("PATTERN", "families whose name contains this text; default: all", "")
    list: bool = switch("print the table of families before their addresses")
    json: bool = switch("print everything as JSON")

    def run(self) -> None:
        from vit_jax.text.tables import aligned
        from vit_jax.weights.published import FAMILIES, FAMILY_HEAD, family_cells

        families = [
            family for family in FAMILIES if self.pattern.casefold() in family.name.casefold()
        ]
        _require_match(self.pattern, families, [family.name for family in FAMILIES])
        if self.json:
            print(json.dumps([family._asdict() for family in families], indent=2))
            return
        if self.list:
            print(aligned(FAMILY_HEAD, list(map(family_cells, families)), FAMILY_HEAD))
        for family in families:
            print(f"{family.name}:", *family.addresses, sep="\n  ", end="\n\n")
        if self.list:
            print(
                "Accuracies of the authors: top-1 in percent on ImageNet-1k. Read the licence at the address."
            )
        else:
            print(
                "--list shows licence, pixels and accuracy of each family. {A,B} stands for each of these names."
            )


@verb("digits", "pretrain --json")
class Recipes(Options):
    """List recipes with their data, length and arguments."""

    pattern: str = argument("PATTERN", "names that contain this text; default: all", "")
    json: bool = switch("print everything as JSON")

    def run(self) -> None:
        from vit_jax.config.recipes import list_recipes

        recipes = [recipe for recipe in list_recipes() if self.pattern in recipe.name]
        _require_match(self.pattern, recipes, [recipe.name for recipe in list_recipes()])
        if self.json:
            print(json.dumps(list(map(dataclasses.asdict, recipes)), indent=2))
            return
        for recipe in recipes:
            data = "data by --config.data=" if recipe.data is None else f"data {recipe.data}"
            print(entry(recipe.name, recipe.description))
            print(entry("", f"vit-jax {recipe.verb}, {data}, {recipe.total} by default"))
            print(entry("", f"--config={recipe.name}:ARGUMENT, ARGUMENT is {recipe.argument}"))
            for table, rows in recipe.choices.items():
                print(entry("", f"{table}: {' '.join(rows)}"))


@verb(
    "--config=digits",
    "--config=finetune:ViT-B/16,cifar10 --config.seed=1",
    appendix=fields_of_recipes,
)
class Show(Recipe):
    """Print every value of a recipe; with --help, describe all fields."""

    def run(self) -> None:
        from vit_jax.config import to_text

        print(to_text(self.load()), end="")
