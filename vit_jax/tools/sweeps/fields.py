"""Sweeps over any fields of a recipe: from words `FIELD=A,B,...` to settings, all or drawn at random."""

import dataclasses
import itertools
import math
import random
import re
from collections.abc import Mapping, Sequence

from vit_jax.config import load_recipe, to_text
from vit_jax.tools.sweeps.grid import SEED, Axis, Grid, Study, field_axis, make_runs

_RANGE = re.compile(r"(log|uniform)\((.*),(.*)\)")
_MOST_DRAWS = 1000  # in a row that give no new setting


@dataclasses.dataclass(frozen=True)
class Range:
    """A range of numbers to draw from: uniformly, or the logarithm uniformly."""

    is_log: bool
    low: float
    high: float

    def draw(self, rng: random.Random) -> str:
        """Return a number, rounded to three digits."""
        if self.is_log:
            return f"{math.exp(rng.uniform(math.log(self.low), math.log(self.high))):.3g}"
        return f"{rng.uniform(self.low, self.high):.3g}"


def make_sweep(
    recipe: str,
    overrides: Sequence[str],
    words: Sequence[str],
    *,
    metric: str | None = None,
    num_settings: int | None = None,
    seed: int = 0,
) -> Grid:
    """Return every combination of values, or `num_settings` random ones; each with every value of `seed`.

    Args:
      recipe: "digits", "configs/x.py:ARGUMENT".
      overrides: of the command, "--config.model.width=64".
      words: "FIELD=A,B", "FIELD=A,B;C,D" for values with commas, "FIELD=log(LOW,HIGH)" or
        "FIELD=uniform(LOW,HIGH)".
      metric: by which settings are compared; None: `checkpoint.best_metric`.
      num_settings: number of random settings; None: all combinations. The first N of more settings
        are the same.
      seed: random seed.

    Raises:
      ValueError: other words, a range without `num_settings`, fewer settings than that, two equal
        runs, or an invalid config.
    """
    values: dict[str, Range | tuple[str, ...]] = {}
    for word in words:
        field, choices = _parse(word)
        if field in values:
            raise ValueError(
                f"--grid={word}: {field} has a --grid= already. Give all its values in one."
            )
        if isinstance(choices, Range) and (num_settings is None or field == SEED.name):
            raise ValueError(
                f"--grid={word}: must be a list A,B. A range needs --random=N, and seeds are whole numbers."
            )
        values[field] = choices
    fields = sorted(values, key=lambda field: field == SEED.name)  # the seed comes last
    seeds = values.pop(SEED.name, ())
    assert not isinstance(seeds, Range)
    if num_settings is None:
        lists = [
            choices for choices in values.values() if not isinstance(choices, Range)
        ]  # all of them
        settings = [dict(zip(values, one, strict=True)) for one in itertools.product(*lists)]
    else:
        settings = _draw(values, num_settings, random.Random(seed))
    axes: dict[Axis, Sequence[str]] = {}
    for field, choices in values.items():
        drawn = dict.fromkeys(setting[field] for setting in settings)
        axes[field_axis(field, field)] = tuple(drawn) if isinstance(choices, Range) else choices
    study = Study(
        name="sweep",
        title="Sweep",
        about=f"a sweep over {', '.join(fields)}",
        axes=tuple(axes),
        measures=(metric or load_recipe(recipe, overrides).checkpoint.best_metric,),
        is_sweep=True,
    )
    if seeds:
        axes[SEED] = seeds
        settings = [setting | {SEED.name: one} for setting in settings for one in seeds]
    grid = make_runs(study, recipe, overrides, axes, settings)
    seen: dict[str, str] = {}
    for run in grid.runs:
        if (other := seen.setdefault(to_text(run.config), run.name)) != run.name:
            raise ValueError(
                f"{other} and {run.name} are the same run. Leave one of the values out."
            )
    return grid


def _parse(word: str) -> tuple[str, Range | tuple[str, ...]]:
    """Return the field and its values."""
    field, _, text = word.removeprefix("config.").partition("=")
    if match := _RANGE.fullmatch(text):
        try:
            ends = Range(match[1] == "log", float(match[2]), float(match[3]))
        except ValueError:
            ends = Range(False, math.nan, math.nan)
        if not (0 if ends.is_log else -math.inf) < ends.low < ends.high < math.inf:
            raise ValueError(
                f"--grid={word}: must be two numbers, LOW below HIGH, of log above 0: log(1e-5,1e-2)."
            )
        return field, ends
    values = tuple(text.split(";" if ";" in text else ","))
    if not field or "" in values:
        raise ValueError(f"--grid={word}: must be FIELD=VALUE,VALUE,... without an empty value.")
    return field, values


def _draw(
    values: Mapping[str, Range | tuple[str, ...]], number: int, rng: random.Random
) -> list[dict[str, str]]:
    """Return different settings."""
    settings = list[dict[str, str]]()
    misses = 0
    while len(settings) < number:
        drawn = {
            name: v.draw(rng) if isinstance(v, Range) else rng.choice(v)
            for name, v in values.items()
        }
        misses = misses + 1 if drawn in settings else 0
        if misses > _MOST_DRAWS:
            raise ValueError(
                f"--random={number}: there are only {len(settings)} different settings. Draw fewer."
            )
        if not misses:
            settings.append(drawn)
    return settings
