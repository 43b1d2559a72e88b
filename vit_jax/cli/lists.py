"""Verbs that list models, weights and recipes, and show a recipe."""

import dataclasses
import json
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Self

from vit_jax.cli.groups import GROUPS, StartedRecipe, use_no_accelerator
from vit_jax.cli.help_text import (
    describe_group_fields,
    describe_recipe_fields,
    find_width,
    format_entry,
)
from vit_jax.cli.model_table import IMAGE_SIZE, NUM_CLASSES, ModelRow, read_models
from vit_jax.cli.options import Options, UsageError, argument, switch
from vit_jax.cli.outputs import note_conversion
from vit_jax.cli.verbs import verb
from vit_jax.storage.files import JsonObject
from vit_jax.text.nearest import did_you_mean

if TYPE_CHECKING:
    from vit_jax.config.recipes import Recipe as RecipeFile

_NOTE_OF_TABLE = """\
Accuracies of the authors: top-1 in percent on ImageNet-1k. Read the licence at the address."""
_NOTE_OF_ADDRESSES = """\
--list shows licence, pixels and accuracy of each family. {A,B} stands for each of these names."""
_HINT_OF_MODELS = """\
--weights lists the addresses of the weights. Other names: any patch size, R50x2+ViT-B/32, ...
`vit-jax weights --list` lists current families of pre-trained ViTs: DINOv3, SigLIP 2, ..."""


@verb("'ViT-B/*'", "ViT-B/16 --weights")
class Models(Options):
    """List networks by name with parameters, GFLOPs and public weights."""

    pattern: str = argument(
        "PATTERN", "text in the names, or a pattern such as 'ViT-B/*'; default: all", ""
    )
    weights: bool = switch("list the addresses of the public weights of each network")
    json: bool = switch("print everything as JSON")

    def suggest_next(self) -> str:
        """Return a training of the first network."""
        return "vit-jax pretrain DATA --config=pretrain_own:NAME"

    def run(self) -> None:
        from vit_jax.config.variants import MODEL_NAMES, list_models

        names = list_models(self.pattern)
        _require_match(self.pattern, names, MODEL_NAMES)
        models = read_models()
        rows = [models[name] for name in names]
        if self.json:
            print(json.dumps(list(map(_describe_model, rows)), indent=2))
            return
        _print_models(rows)
        if self.weights:
            _print_addresses(rows)
        else:
            print(_HINT_OF_MODELS)


def _describe_model(row: ModelRow) -> JsonObject:
    """Return the fields of a network in JSON."""
    return {
        "name": row.name,
        "parameters": row.num_parameters,
        "flops": row.num_flops,
        "weights": row.addresses,
    }


def _print_models(rows: Sequence[ModelRow]) -> None:
    """Print a table of networks."""
    from vit_jax.text.tables import align_table
    from vit_jax.weights.published import find_sources

    head = ("name", "million parameters", "GFLOPs", "public weights")
    lines = []
    for row in rows:
        line = [
            row.name,
            _shorten_number(row.num_parameters / 1e6),
            _shorten_number(row.num_flops / 1e9),
            ", ".join(find_sources(row.addresses)),
        ]
        lines.append(line)
    print(align_table(head, lines, (head[0], head[3])), end="")
    print(
        f"At {IMAGE_SIZE} x {IMAGE_SIZE} pixels, with a linear head of {NUM_CLASSES:,} classes; "
        "1 multiply-add: 2 FLOPs."
    )


def _print_addresses(rows: Sequence[ModelRow]) -> None:
    """Print the addresses of the public weights of each network."""
    for row in rows:
        print(f"\n{row.name}:", *(row.addresses or ["none"]), sep="\n  ")
    print(
        "\nhf://owner/name is downloaded by the verbs that take weights; "
        "download gs:// files yourself."
    )


def _require_match(pattern: str, matches: Collection[object], names: Collection[str]) -> None:
    """Raise UsageError, with similar names or all of them, if nothing matches a pattern."""
    if matches:
        return
    hint = did_you_mean(pattern, names)
    if not hint:
        hint = f" Use one of {', '.join(names)}."
    raise UsageError(f"PATTERN={pattern}: must match a name.{hint}")


def _shorten_number(value: float) -> str:
    """Return a number with three digits, or the digits before its decimal point and one more."""
    if value >= 10:
        return f"{value:,.1f}"
    return f"{value:.2f}"


@verb("--list", "dinov2 --list")
class Weights(Options):
    """List current families of pre-trained ViTs by address; with --list licence, pixels, accuracy."""

    pattern: str = argument("PATTERN", "families whose name contains this text; default: all", "")
    list: bool = switch("print the table of families before their addresses")
    json: bool = switch("print everything as JSON")

    def suggest_next(self) -> str:
        """Return the fine-tuning of one of the addresses."""
        return "vit-jax finetune ADDRESS DATA"

    def run(self) -> None:
        from vit_jax.text.tables import align_table
        from vit_jax.weights.published import RELEASE_HEAD, list_cells, list_releases

        known = {family.name: family for family in list_releases()}
        families = []
        for name, family in known.items():
            if self.pattern.casefold() in name.casefold():
                families.append(family)
        _require_match(self.pattern, families, known)

        if self.json:
            objects = [family._asdict() for family in families]
            print(json.dumps(objects, indent=2))
            return
        if self.list:
            print(align_table(RELEASE_HEAD, list(map(list_cells, families)), RELEASE_HEAD))
        for family in families:
            print(f"{family.name}:", *family.addresses, sep="\n  ", end="\n\n")
        print(_NOTE_OF_TABLE if self.list else _NOTE_OF_ADDRESSES)


@verb("digits", "pretrain --json")
class Recipes(Options):
    """List recipes with their data, length and arguments."""

    pattern: str = argument("PATTERN", "names that contain this text; default: all", "")
    json: bool = switch("print everything as JSON")

    def suggest_next(self) -> str:
        """Return the values of one of the recipes."""
        return "vit-jax show --config=NAME"

    def run(self) -> None:
        from vit_jax.config.recipes import list_recipes

        known = []
        recipes = []
        for recipe in list_recipes():
            known.append(recipe.name)
            if self.pattern in recipe.name:
                recipes.append(recipe)
        _require_match(self.pattern, recipes, known)

        if self.json:
            objects = list(map(dataclasses.asdict, recipes))
            print(json.dumps(objects, indent=2))
            return
        for recipe in recipes:
            _print_recipe(recipe, find_width())


def _print_recipe(recipe: "RecipeFile", width: int) -> None:
    """Print a recipe's description, and its verb, data, length and arguments."""
    data = "data by --config.data="
    if recipe.data is not None:
        data = f"data {recipe.data}"
    print(format_entry(recipe.name, recipe.description, width))
    print(format_entry("", f"vit-jax {recipe.verb}, {data}, {recipe.total} by default", width))
    argument_line = f"--config={recipe.name}:ARGUMENT, ARGUMENT is {recipe.argument}"
    print(format_entry("", argument_line, width))
    for table, rows in recipe.choices.items():
        print(format_entry("", f"{table}: {' '.join(rows)}", width))


def _describe_all_fields(width: int) -> str:
    """Return the fields of recipes and of groups of options."""
    parts = [describe_recipe_fields(width)]
    for group in GROUPS:
        parts.append(describe_group_fields(group, width))
    return "\n\n".join(parts) + "\n"


@verb(
    "--config=digits",
    "--config=finetune:ViT-B/16,cifar10 --config.seed=1",
    appendix=_describe_all_fields,
)
class Show(StartedRecipe):
    """Print every value of a recipe; with --help, describe all fields."""

    json: bool = switch("print a config as JSON, which --config=FILE.json reads")

    def suggest_next(self) -> str:
        """Return the run of the recipe."""
        return self.suggest_run()

    def complete(self, words: Sequence[str]) -> Self:
        """Return the options with the rule of the weights."""
        use_no_accelerator()
        return super().complete(words)

    def run(self) -> None:
        from vit_jax.config import to_dict, to_text

        config = self.load()
        note_conversion(self.config)
        if self.json:
            print(json.dumps(to_dict(config), indent=2))
        else:
            print(to_text(config), end="")
