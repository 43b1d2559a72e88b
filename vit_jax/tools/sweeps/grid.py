"""Studies and sweeps: axes, whose values are overrides of a recipe. No run is started here.

Each run equals `vit-jax pretrain --config=RECIPE:ARGUMENT --config.FIELD=VALUE ...` in the same
folder.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping, Sequence

from vit_jax.config import FinetuneConfig, PretrainConfig, RunConfig, load_recipe
from vit_jax.config.parsing import load_studies

Overrides = Callable[[PretrainConfig, str, Sequence[str]], Sequence[str]]
"""Takes the config so far, a value of an axis and all values; returns overrides such as "model.pool=gap"."""
Point = Mapping[str, str]
"""A value of each axis, by its name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axis:
    """One direction of a grid.

    Attributes:
      name: of the column of the table, and of the option with an s at its end.
      overrides: overrides of a value.
      values: the paper's; (): the axis has an effect only if the command or the recipe gives
        values.
      takes: the fields that it sets, which the command must not set.
      is_searched: only the value with the best evaluation is shown.
    """

    name: str
    overrides: Overrides
    values: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    is_searched: bool = False

    @property
    def option(self) -> str:
        return self.name if self.name.endswith("s") else f"{self.name}s"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Picture:
    """The figure of results: each measure over `x`, with a colour for each value of the column `series`."""

    x: str  # column; a number, or a word for bars beside each other
    x_label: str  # with its unit
    series: str
    is_log: bool = True
    has_front: bool = False  # the Pareto front, and a name at each point


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """A study or a sweep.

    Attributes:
      name: as in the command.
      title: of the picture.
      about: figure or table of the paper, and the axes in words.
      axes: of the grid, besides the seed.
      picture: how results are drawn.
      config: overrides of all its runs; overrides of the recipe and of the command come after them.
      measures: names of results in `summary.json`, drawn side by side.
      stops_early: measures are those of the best evaluation by `checkpoint.best_metric`, not of the
        last.
      allows: returns True for points of the grid.
      is_trained: False for a study whose runs are timed.
      is_sweep: over any fields of a recipe; not drawn, and the deviation over seeds is shown, not
        the extremes.
    """

    name: str
    title: str
    about: str
    axes: tuple[Axis, ...]
    picture: Picture = Picture(x="", x_label="", series="")
    config: tuple[str, ...] = ()
    measures: tuple[str, ...] = ("test_accuracy",)
    stops_early: bool = False
    allows: Callable[[Point], bool] = lambda point: True
    is_trained: bool = True
    is_sweep: bool = False

    @property
    def all_axes(self) -> tuple[Axis, ...]:
        return (*self.axes, SEED)

    @property
    def measure_option(self) -> str:
        return "--metric=" if self.is_sweep else "--measures="

    def option(self, axis: Axis) -> str:
        return f"--grid={axis.name}=" if self.is_sweep else f"--{axis.option}="


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a grid."""

    point: Point
    recipe: str  # with its argument
    overrides: tuple[str, ...]
    config: RunConfig

    @property
    def name(self) -> str:
        """The name of its folder."""
        words = ",".join(f"{axis}={value}" for axis, value in self.point.items()) or "recipe"
        return re.sub(r"[^\w.,=+:-]", "_", words)


@dataclasses.dataclass(frozen=True)
class Grid:
    """The runs of a study with a recipe."""

    study: Study
    recipe: str
    runs: tuple[Run, ...]

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The axes that the runs have."""
        return tuple(axis for axis in self.study.all_axes if axis.name in self.runs[0].point)

    @property
    def is_finetuning(self) -> bool:
        return isinstance(self.runs[0].config, FinetuneConfig)


def field_axis(
    name: str,
    field: str,
    values: tuple[str, ...] = (),
    *,
    form: str = "{}",
    is_searched: bool = False,
) -> Axis:
    """Return an axis whose values, in a form, are those of one field."""

    def overrides(config: PretrainConfig, value: str, values: Sequence[str]) -> list[str]:
        return [f"{field}={form.format(value)}"]

    return Axis(
        name=name, overrides=overrides, values=values, takes=(field,), is_searched=is_searched
    )


SEED = field_axis("seed", "seed")
MODEL = "model"
"""The axis whose values are arguments of the recipe, with further overrides: "ViT-B/32,epochs=7,model.block=axial"."""


def make_grid(
    study: Study, recipe: str, overrides: Sequence[str], chosen: Mapping[str, Sequence[str]]
) -> Grid:
    """Return the product of the axes' values: those `chosen`, else of the recipe's table `STUDIES`, else of the study.

    Args:
      study: of `catalogue.STUDIES`.
      recipe: "digits_studies", "configs/x.py:ARGUMENT".
      overrides: of the command, "--config.seed=1".
      chosen: values by option, "models".

    Raises:
      ValueError: an option that the study does not have, a field that it sets itself, or an invalid
        config.
    """
    table = {**load_studies(recipe).get(study.name, {}), **chosen}
    config = (*study.config, *table.pop("config", ()))
    measures = tuple(table.pop("measures", study.measures))
    study = dataclasses.replace(study, config=config, measures=measures)
    known = {axis.option: axis for axis in study.all_axes}
    if unknown := [option for option in table if option not in known]:
        raise ValueError(
            f"The study {study.name} has no --{unknown[0]}=; it has --{'=, --'.join(known)}=."
        )
    values = {
        axis: tuple(map(str, table.get(option, axis.values))) for option, axis in known.items()
    }
    axes = {axis: choices for axis, choices in values.items() if choices}
    names = [axis.name for axis in axes]
    points = [
        dict(zip(names, combination, strict=True))
        for combination in itertools.product(*axes.values())
    ]
    return make_runs(
        study, recipe, overrides, axes, [point for point in points if study.allows(point)]
    )


def make_runs(
    study: Study,
    recipe: str,
    overrides: Sequence[str],
    axes: Mapping[Axis, Sequence[str]],
    points: Sequence[Point],
) -> Grid:
    """Return one run for each point.

    Raises:
      ValueError: a repeated value, an override that an axis sets itself, no point, or an invalid
        config.
    """
    for axis, values in axes.items():
        require_different(study.option(axis), values)
    reject_taken(overrides, {name: study.option(axis) for axis in axes for name in axis.takes})
    runs = tuple(_make_run(study, recipe, overrides, point, axes) for point in points)
    if not runs:
        raise ValueError(f"The study {study.name} has no run with these values.")
    return Grid(study, recipe, runs)


def require_different(option: str, values: Sequence[object]) -> None:
    """Raise ValueError if a value of an option "--name=" occurs twice."""
    if len({*values}) < len(values):
        raise ValueError(f"{option}{','.join(map(str, values))}: a value occurs twice.")


def reject_taken(overrides: Sequence[str], options: Mapping[str, str]) -> None:
    """Raise ValueError for an override of a field that is set for each run, by the option in `options`."""
    for word in overrides:
        if option := options.get(word.removeprefix("--config.").partition("=")[0]):
            raise ValueError(f"{word}: is set for each run. Use {option}.")


def _make_run(
    study: Study,
    recipe: str,
    overrides: Sequence[str],
    point: Point,
    axes: Mapping[Axis, Sequence[str]],
) -> Run:
    before = [*(f"--config.{word}" for word in study.config), *overrides]
    own: list[str] = []
    if MODEL in point:
        recipe, own = _with_model(recipe, point[MODEL])
    try:
        for axis, values in axes.items():
            config = load_recipe(recipe, [*before, *own])
            if not isinstance(config, PretrainConfig) and not study.is_sweep:
                raise ValueError(
                    f"{recipe} is a recipe for {type(config).__name__}; studies pre-train."
                )
            own += [f"--config.{word}" for word in axis.overrides(config, point[axis.name], values)]
        config = load_recipe(recipe, [*before, *own])
    except ValueError as error:
        raise ValueError(
            f"{', '.join(f'{name}={value}' for name, value in point.items())}: {error}"
        ) from None
    return Run(point, recipe, (*before, *own), config)


def _with_model(recipe: str, model: str) -> tuple[str, list[str]]:
    """Return the recipe with the argument in a value of the axis of models, and the overrides in it."""
    path, _, argument = recipe.partition(":")
    words = model.split(",")
    fields = [word for word in words if re.match(r"[^=]*\.[^=]*=", word)]
    arguments = [
        *(word for word in words if word and word not in fields),
        *([argument] if argument else []),
    ]
    return f"{path}:{','.join(arguments)}", [f"--config.{field}" for field in fields]


def on_machine(grid: Grid, machine: str) -> Grid:
    """Return the runs as planned for another machine, with other folders than runs measured on this one."""
    runs = (dataclasses.replace(run, point={**run.point, "machine": machine}) for run in grid.runs)
    return dataclasses.replace(grid, runs=tuple(runs))
