"""Verbs that list models, weights and recipes."""

import dataclasses
import json
from typing import Any

from vit_jax.cli.options import UsageError, argument, entry, switch, verb

_PIXELS, _NUM_CLASSES = 224, 1000  # the defaults of `vit_jax.create_model`


@verb("'ViT-B/*'", "ViT-B/16 --weights")
class Models:
    """List networks by name with parameters, GFLOPs and public weights."""

    pattern: str = argument("PATTERN", "text in the names, or a pattern such as 'ViT-B/*'; default: all", "")
    weights: bool = switch("list the addresses of the public weights of each network")
    json: bool = switch("print everything as JSON")

    def run(self) -> None:
        from vit_jax.config import ModelConfig, build_architecture
        from vit_jax.config.variants import MODEL_NAMES, list_models
        from vit_jax.models.flops import FLOPS_PER_MAC, count_parameters, forward_macs
        from vit_jax.nearest import did_you_mean
        from vit_jax.tables import aligned
        from vit_jax.weights.published import PUBLISHED, releases_of

        names = list_models(self.pattern)
        if not names:
            hint = did_you_mean(self.pattern, MODEL_NAMES)
            raise UsageError(f"PATTERN={self.pattern}: must match a network.{hint} `vit-jax models` lists all.")
        found = list[dict[str, Any]]()
        for name in names:
            config = ModelConfig(name=name, head="linear")
            a = build_architecture(config, image_size=(_PIXELS, _PIXELS), num_classes=_NUM_CLASSES)
            flops = FLOPS_PER_MAC * forward_macs(a)
            weights = PUBLISHED.get(name, ())
            found.append({"name": name, "parameters": count_parameters(a), "flops": flops, "weights": weights})
        if self.json:
            print(json.dumps(found, indent=2))
            return
        head = ("name", "million parameters", "GFLOPs", "public weights")
        lines = [
            (
                row["name"],
                _short(row["parameters"] / 1e6),
                _short(row["flops"] / 1e9),
                ", ".join(releases_of(row["name"])),
            )
            for row in found
        ]
        print(aligned(head, lines, (head[0], head[3])), end="")
        print(
            f"At {_PIXELS} x {_PIXELS} pixels, with a linear head of {_NUM_CLASSES:,} classes; 1 multiply-add: 2 FLOPs."
        )
        if not self.weights:
            print("--weights lists the addresses of the weights. Other names: any patch size, R50x2+ViT-B/32, ...")
            print("`vit-jax weights --list` lists current families of pre-trained ViTs: DINOv3, SigLIP 2, ...")
            return
        for row in found:
            print("\n".join(("", f"{row['name']}:", *(f"  {address}" for address in row["weights"] or ["none"]))))
        print("\nhf://owner/name is downloaded by the verbs that take weights; download gs:// files yourself.")


def _short(value: float) -> str:
    return f"{value:,.1f}" if value >= 10 else f"{value:.2f}"


@verb("--list", "dinov2 --list")
class Weights:
    """List current families of pre-trained ViTs by their addresses; with --list licence, pixels and accuracy."""

    pattern: str = argument("PATTERN", "families whose name contains this text; default: all", "")
    list: bool = switch("print the table of families before their addresses")
    json: bool = switch("print everything as JSON")

    def run(self) -> None:
        from vit_jax.tables import aligned
        from vit_jax.weights.published import FAMILIES, FAMILY_HEAD, family_cells

        pattern = self.pattern
        found = [family for family in FAMILIES if pattern.casefold() in family.name.casefold()]
        if not found:
            names = ", ".join(family.name for family in FAMILIES)
            raise UsageError(f"PATTERN={pattern}: must be a part of a family's name: {names}.")
        if self.json:
            print(json.dumps([family._asdict() for family in found], indent=2))
            return
        if self.list:
            print(aligned(FAMILY_HEAD, [family_cells(family) for family in found], FAMILY_HEAD))
        for family in found:
            print(f"{family.name}:", *family.addresses, sep="\n  ", end="\n\n")
        if self.list:
            print("Accuracies of the authors: top-1 in percent on ImageNet-1k. Read the licence at the address.")
        else:
            print("--list shows licence, pixels and accuracy of each family. {A,B} stands for each of these names.")


@verb("digits", "pretrain --json")
class Recipes:
    """List recipes with their data, length and arguments."""

    pattern: str = argument("PATTERN", "names that contain this text; default: all", "")
    json: bool = switch("print everything as JSON")

    def run(self) -> None:
        from vit_jax.config.recipes import list_recipes

        pattern = self.pattern
        found = [recipe for recipe in list_recipes() if pattern in recipe.name]
        if not found:
            raise UsageError(f"PATTERN={pattern}: must be a part of a recipe's name. `vit-jax recipes` lists all.")
        if self.json:
            print(json.dumps([dataclasses.asdict(recipe) for recipe in found], indent=2))
            return
        for recipe in found:
            data = "data by --config.data=" if recipe.data is None else f"data {recipe.data}"
            print(entry(recipe.name, recipe.description))
            print(entry("", f"vit-jax {recipe.verb}, {data}, {recipe.total} by default"))
            print(entry("", f"--config={recipe.name}:ARGUMENT, ARGUMENT is {recipe.argument}"))
            for table, rows in recipe.choices.items():
                print(entry("", f"{table}: {' '.join(rows)}"))
