"""Sweeps over any fields of a recipe: from words `FIELD=A,B,...` to settings."""

import dataclasses
import itertools
import math
import random
import re
from collections.abc import Mapping, Sequence

from vit_jax.config import RunConfig, load_recipe, to_text
from vit_jax.tools.sweeps.grid import SEED, Axis, Grid, Study, build_field_axis, make_runs
from vit_jax.train.run_defaults import choose_rule, read_rule

_RANGE = re.compile(r"(log|uniform)\((.*),(.*)\)")
_MOST_REPEATS = 1000  # samples in a row that are known settings, before sampling ends

Setting = dict[str, str]


@dataclasses.dataclass(frozen=True)
class Range:
    """A range of numbers to sample from: uniformly, or the logarithm uniformly."""

    is_log: bool
    low: float
    high: float

    def sample(self, rng: random.Random) -> str:
        """Return a number, rounded to three digits."""
        if self.is_log:
            value = math.exp(rng.uniform(math.log(self.low), math.log(self.high)))
        else:
            value = rng.uniform(self.low, self.high)
        return f"{value:.3g}"


Choices = Range | tuple[str, ...]


def make_sweep(
    recipe: str,
    overrides: Sequence[str],
    words: Sequence[str],
    *,
    metric: str | None = None,
    num_settings: int | None = None,
    seed: int = 0,
) -> Grid:
    """Return every combination of values, or `num_settings` random ones.

    Each setting is repeated with every value of `seed`.

    Args:
      recipe: "digits", "configs/x.py:ARGUMENT".
      overrides: words of the command, "--config.model.width=64".
      words: "FIELD=A,B", "FIELD=A,B;C,D" for values with commas, "FIELD=log(LOW,HIGH)" or
        "FIELD=uniform(LOW,HIGH)".
      metric: result that settings are compared by; None: `checkpoint.best_metric`.
      num_settings: number of random settings; None: all combinations. The first N of more settings
        are the same.
      seed: random seed.

    Raises:
      ValueError: other words, a range without `num_settings`, fewer settings than that, two equal
        runs, or an invalid config.
    """
    choices = _parse_words(words, is_random=num_settings is not None)
    seeds = choices.pop(SEED.name, ())
    assert not isinstance(seeds, Range)
    if num_settings is None:
        settings = _combine_values(choices)
    else:
        settings = _sample_settings(choices, num_settings, random.Random(seed))

    axes = _build_axes(choices, settings)
    fields = list(choices)
    measure = metric or load_recipe(recipe, overrides).checkpoint.best_metric
    if seeds:
        fields.append(SEED.name)
    study = Study(
        name="sweep",
        title="Sweep",
        about=f"a sweep over {', '.join(fields)}",
        axes=tuple(axes),
        measures=(measure,),
        is_sweep=True,
    )
    if seeds:
        axes[SEED] = seeds
        settings = [setting | {SEED.name: value} for setting in settings for value in seeds]
    grid = make_runs(study, recipe, overrides, axes, settings)
    _reject_equal_runs(grid)
    return grid


def follow_weights(grid: Grid) -> Grid:
    """Return the runs with the rules for the families of their weights, where the recipe leaves them open.

    Raises:
      ValueError: weights cannot be read.
    """
    known: dict[str | None, str] = {}

    def read_once(config: RunConfig) -> str:
        if config.init_from not in known:
            known[config.init_from] = read_rule(config)
        return known[config.init_from]

    runs = []
    for run in grid.runs:
        recipe = choose_rule(run.recipe, run.overrides, read_once).recipe
        config = run.config
        if recipe != run.recipe:
            config = load_recipe(recipe, run.overrides)
        runs.append(dataclasses.replace(run, recipe=recipe, config=config))
    return dataclasses.replace(grid, runs=tuple(runs))


def _parse_words(words: Sequence[str], *, is_random: bool) -> dict[str, Choices]:
    """Return the choices by field, each field with one word."""
    choices_by_field: dict[str, Choices] = {}
    for word in words:
        field, choices = _parse_word(word)
        if field in choices_by_field:
            raise ValueError(
                f"--grid={word}: {field} has a --grid= already. Give all its values in one."
            )
        if isinstance(choices, Range) and (not is_random or field == SEED.name):
            raise ValueError(
                f"--grid={word}: must be a list A,B. A range needs --random=N, "
                "and seeds are whole numbers."
            )
        choices_by_field[field] = choices
    return choices_by_field


def _parse_word(word: str) -> tuple[str, Choices]:
    """Return the field and its values."""
    field, _, text = word.removeprefix("config.").partition("=")
    if match := _RANGE.fullmatch(text):
        return field, _parse_range(word, *match.groups())

    separator = ";" if ";" in text else ","
    values = tuple(text.split(separator))
    if not field or "" in values:
        raise ValueError(f"--grid={word}: must be FIELD=VALUE,VALUE,... without an empty value.")
    return field, values


def _parse_range(
    word: str,
    kind: str,
    low_text: str,
    high_text: str,
) -> Range:
    is_log = kind == "log"
    least = 0 if is_log else -math.inf
    try:
        low = float(low_text)
        high = float(high_text)
    except ValueError:
        low = high = math.nan  # fails the check below
    if not least < low < high < math.inf:
        raise ValueError(
            f"--grid={word}: must be two numbers, LOW below HIGH, of log above 0: log(1e-5,1e-2)."
        )
    return Range(is_log, low, high)


def _combine_values(choices_by_field: Mapping[str, Choices]) -> list[Setting]:
    """Return all combinations of lists of values."""
    lists = []
    for choices in choices_by_field.values():
        assert not isinstance(choices, Range), "a range needs a number of settings"
        lists.append(choices)
    combinations = itertools.product(*lists)
    return [dict(zip(choices_by_field, values, strict=True)) for values in combinations]


def _sample_settings(
    choices_by_field: Mapping[str, Choices],
    num_settings: int,
    rng: random.Random,
) -> list[Setting]:
    """Return different random settings."""
    settings: list[Setting] = []
    num_repeats = 0
    while len(settings) < num_settings:
        setting = _sample_setting(choices_by_field, rng)
        if setting not in settings:
            settings.append(setting)
            num_repeats = 0
            continue
        num_repeats += 1
        if num_repeats > _MOST_REPEATS:
            raise ValueError(
                f"--random={num_settings}: there are only {len(settings)} different settings. "
                "Use fewer."
            )
    return settings


def _sample_setting(choices_by_field: Mapping[str, Choices], rng: random.Random) -> Setting:
    setting = {}
    for field, choices in choices_by_field.items():
        if isinstance(choices, Range):
            setting[field] = choices.sample(rng)
        else:
            setting[field] = rng.choice(choices)
    return setting


def _build_axes(
    choices_by_field: Mapping[str, Choices],
    settings: Sequence[Setting],
) -> dict[Axis, Sequence[str]]:
    """Return an axis for each field with its values; for a range, the sampled ones."""
    axes: dict[Axis, Sequence[str]] = {}
    for field, choices in choices_by_field.items():
        values = choices
        if isinstance(values, Range):
            values = tuple(dict.fromkeys(setting[field] for setting in settings))
        axes[build_field_axis(field, field)] = values
    return axes


def _reject_equal_runs(grid: Grid) -> None:
    """Raise ValueError if two settings give the same config, as 0.1 and 1e-1 do."""
    names: dict[str, str] = {}
    for run in grid.runs:
        first = names.setdefault(to_text(run.config), run.name)
        if first != run.name:
            raise ValueError(f"{first} and {run.name} are the same run. Remove one of the values.")
