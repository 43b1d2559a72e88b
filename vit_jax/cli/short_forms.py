"""Short forms of verbs: `finetune WEIGHTS DATA` and the like, completed to the command that repeats them.

What the words leave open is chosen by the weights, the data and the machine
(`train.run_defaults`), printed with its reasons and then as the long command.
"""

import pathlib
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from vit_jax.cli.loading import require_weights_first
from vit_jax.cli.options import UsageError, format_command
from vit_jax.config.data_kinds import REFERENCE_FORM, find_kind, infer_data, spell_forms
from vit_jax.imports.reference_form import is_reference
from vit_jax.text.nearest import did_you_mean

RUNS = pathlib.Path("runs")
"""Folder of new runs, in the working directory."""
_PREFIX = "--config."


class LongForm(NamedTuple):
    """The options of a training verb without its short form."""

    config: str
    workdir: str
    overrides: list[str]


def complete_run(
    verb: str,
    *,
    weights: str | None,
    data: str | None,
    config: str | None,
    workdir: str | None,
    overrides: Sequence[str],
    others: Sequence[str],
    uses_devices: bool,
) -> LongForm:
    """Return the complete options of a run; print what was chosen, in the first process.

    Args:
      verb: pretrain or finetune.
      weights: the word for them, of finetune.
      data: the word for them.
      config: the recipe of the command line.
      workdir: the one of the command line.
      overrides: words "--config.FIELD=VALUE".
      others: further words, repeated in the long command.
      uses_devices: choose by the memory of the devices.

    Raises:
      UsageError: words are missing, exchanged, given twice, or name nothing.
      ValueError: weights or data cannot be opened.
    """
    given = _add_words(verb, weights, data, overrides)
    _require_words(verb, config, given)

    from vit_jax import hosts
    from vit_jax.train.run_defaults import choose_finetuning, choose_pretraining

    hosts.start()
    if verb == "finetune":
        defaults = choose_finetuning(config, given, uses_devices=uses_devices)
    else:
        defaults = choose_pretraining(config, _get_value(given, "data"), given)
    words = [*(f"{_PREFIX}{override}" for override in defaults.overrides), *given]
    if workdir is None:
        workdir = _choose_workdir(defaults.recipe, words, is_short=data is not None)

    completed = LongForm(defaults.recipe, workdir, words)
    if hosts.is_first():
        for reason in defaults.reasons:
            print(reason)
        options = [f"--config={completed.config}", f"--workdir={workdir}"]
        print(f"command  {format_command(verb, *options, *words, *others)}", flush=True)
    return completed


# Words.


def _add_words(
    verb: str, weights: str | None, data: str | None, overrides: Sequence[str]
) -> list[str]:
    """Return the overrides with those that the words for weights and data stand for."""
    if weights is not None and data is not None:
        require_weights_first(verb, weights, data)
    words = {"init_from": weights, "data": data}
    if data is not None:
        words["data"] = read_dataset(data)
    added = []
    for field, value in words.items():
        if value is None:
            continue
        for override in overrides:
            if override.startswith(f"{_PREFIX}{field}="):
                raise UsageError(f"{override}, {value}: are two values of {field}. Give one.")
        added.append(f"{_PREFIX}{field}={value}")
    return [*added, *overrides]


def _require_words(verb: str, config: str | None, overrides: Sequence[str]) -> None:
    """Raise UsageError for a command without recipe that lacks weights or data."""
    if config is not None:
        return
    forms = {"init_from": "WEIGHTS", "data": "DATA"}
    if verb == "pretrain":
        del forms["init_from"]
    missing = [form for field, form in forms.items() if not _has_value(overrides, field)]
    if missing:
        raise UsageError(
            f"Missing: {' '.join(missing)}. Use vit-jax {verb} {' '.join(forms.values())}, "
            f"or --config=RECIPE; see vit-jax {verb} --help."
        )


def read_dataset(word: str) -> str:
    """Return data with their kind.

    Raises:
      UsageError: there is no such file or folder, and no data kind or reference.
    """
    data = infer_data(word)
    if find_kind(data) is not None or is_reference(data):
        return data
    if word.endswith(".npz") and pathlib.Path(word).is_file():
        raise UsageError(f"DATA={word}: must have its kind. Use npz:{word} for images and labels.")
    here = [path.name for path in pathlib.Path().iterdir()]
    hint = did_you_mean(word, here)
    raise UsageError(
        f"DATA={word}: there is no such file or folder.{hint} Give a folder of images, a .csv, "
        f".parquet or .tar, or {spell_forms()}, {REFERENCE_FORM}."
    )


def _has_value(overrides: Iterable[str], field: str) -> bool:
    return any(override.startswith(f"{_PREFIX}{field}=") for override in overrides)


def _get_value(overrides: Iterable[str], field: str) -> str:
    """Return the last value of a field among overrides, "" without one."""
    value = ""
    for override in overrides:
        if override.startswith(f"{_PREFIX}{field}="):
            value = override.partition("=")[2]
    return value


# New folders.


def _choose_workdir(recipe: str, words: Sequence[str], *, is_short: bool) -> str:
    """Return a new folder in runs/, or that of a run with this config, which is resumed.

    It has the name of the data in a short form, and else of the recipe. All processes have the
    choice of the first one.
    """
    from vit_jax import hosts
    from vit_jax.config import load_recipe
    from vit_jax.train.lifecycle.workdir import has_same_config

    config = load_recipe(recipe, words)
    name = _name_recipe(recipe)
    if is_short and config.data is not None:
        name = name_data(config.data)
    chosen = ""
    if hosts.is_first():
        for path in list_numbered(RUNS / name):
            if is_free(path) or has_same_config(path, config):
                chosen = str(path)
                break
    workdir: str = hosts.gather(chosen)[0]
    return workdir


def _name_recipe(recipe: str) -> str:
    """Return the name of a recipe's file; of the config.json of a run, the name of its folder."""
    path = pathlib.Path(recipe.rpartition("://")[2].partition(":")[0])
    if path.name == "config.json":
        return path.absolute().parent.name or path.stem
    return path.stem


def choose_new_folder(name: str) -> str:
    """Return the first of runs/NAME, runs/NAME-2, … that is free."""
    return str(next(filter(is_free, list_numbered(RUNS / name))))


def list_numbered(path: pathlib.Path) -> Iterable[pathlib.Path]:
    """Yield a path, then with "-2", "-3" and so on at its end."""
    yield path
    number = 2
    while True:
        yield path.with_name(f"{path.name}-{number}")
        number += 1


def is_free(path: pathlib.Path) -> bool:
    """Return True for a path that does not exist, and for an empty folder."""
    if not path.is_dir():
        return not (path.exists() or path.is_symlink())
    return not any(path.iterdir())


def name_data(data: str) -> str:
    """Return the name of data for a folder: of "folder:/my/photos" and "csv:photos.csv" photos."""
    text = data.partition(":")[2] or data
    path = pathlib.Path(text.partition("#")[0])
    if path.name in ("", ".", ".."):
        path = path.resolve()
    for part in (path.name, path.parent.name):
        name = part
        for suffix in (".csv", ".npz", ".parquet", ".tar"):
            name = name.removesuffix(suffix)
        name = re.sub(r"[^\w.-]+", "-", name).strip("-.")
        if name:
            return name
    return "run"
