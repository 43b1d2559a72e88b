"""Studies and sweeps: axes, whose values are overrides of a recipe. No run is started here.

Each run equals `vit-jax pretrain --config=RECIPE:ARGUMENT --config.FIELD=VALUE ...` in the same
folder.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping, Sequence

from vit_jax.config import FinetuneConfig, PretrainConfig, RunConfig, load_recipe
from vit_jax.config.specification import load_studies

Overrides = Callable[[PretrainConfig, str, Sequence[str]], Sequence[str]]
"""Takes the config so far, a value of an axis and all its values; returns overrides."""
Point = Mapping[str, str]
"""A value of each axis, by its name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Axis:
    """One direction of a grid.

    Attributes:
      name: head of the column of the table; the option has an s at its end.
      overrides: returns the overrides of a value.
      values: the paper's; (): the axis has an effect only if the command or the recipe gives
        values.
      fields: the fields that the axis sets, which the command must not set.
      is_searched: only the value with the best evaluation is shown.
    """

    name: str
    overrides: Overrides
    values: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    is_searched: bool = False

    @property
    def option(self) -> str:
        if self.name.endswith("s"):
            return self.name
        return f"{self.name}s"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plot:
    """The plot of results: each measure over `x`, with a colour for each series."""

    x: str  # column; a number, or a word for bars beside each other
    x_label: str  # with its unit
    series: str
    is_log: bool = True
    has_front: bool = False  # the Pareto front, and a name at each point


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """A study or a sweep.

    Attributes:
      name: its name in the command.
      title: title of the plot.
      about: figure or table of the paper, and the axes in words.
      axes: axes of the grid, besides the seed.
      plot: the plot of the results.
      config: overrides of all its runs; overrides of the recipe and of the command come after them.
      measures: names of results in `summary.json`, drawn side by side.
      stops_early: measures belong to the best evaluation by `checkpoint.best_metric`, not to the
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
    plot: Plot = Plot(x="", x_label="", series="")
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

    def format_option(self, axis: Axis) -> str:
        """Return the option of the command that gives the values of an axis."""
        if self.is_sweep:
            return f"--grid={axis.name}="
        return f"--{axis.option}="


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
        values = [f"{axis}={value}" for axis, value in self.point.items()]
        return re.sub(r"[^\w.,=+:-]", "_", ",".join(values) or "recipe")


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


def build_field_axis(
    name: str,
    field: str,
    values: tuple[str, ...] = (),
    *,
    form: str = "{}",
    is_searched: bool = False,
) -> Axis:
    """Return an axis over one field, whose values are inserted into a form."""

    def build_overrides(
        config: PretrainConfig,
        value: str,
        values: Sequence[str],
    ) -> list[str]:
        return [f"{field}={form.format(value)}"]

    return Axis(
        name=name,
        overrides=build_overrides,
        values=values,
        fields=(field,),
        is_searched=is_searched,
    )


SEED = build_field_axis("seed", "seed")
MODEL = "model"
"""The axis of models.

Values are arguments of the recipe, with further overrides: "ViT-B/32,epochs=7,model.block=axial".
"""


def make_grid(
    study: Study,
    recipe: str,
    overrides: Sequence[str],
    chosen: Mapping[str, Sequence[str]],
) -> Grid:
    """Return the product of the axes' values.

    They are the values `chosen`, else of the recipe's table `STUDIES`, else of the study.

    Args:
      study: a study of `catalogue.STUDIES`.
      recipe: "digits_studies", "configs/x.py:ARGUMENT".
      overrides: words of the command, "--config.seed=1".
      chosen: values by option, "models".

    Raises:
      ValueError: an option that the study does not have, a field that it sets itself, or an invalid
        config.
    """
    table = {**load_studies(recipe).get(study.name, {}), **chosen}
    config = (*study.config, *table.pop("config", ()))
    measures = tuple(table.pop("measures", study.measures))
    study = dataclasses.replace(study, config=config, measures=measures)
    axes = _collect_values(study, table)

    points = []
    for combination in itertools.product(*axes.values()):
        names = (axis.name for axis in axes)
        point = dict(zip(names, combination, strict=True))
        if study.allows(point):
            points.append(point)
    return make_runs(study, recipe, overrides, axes, points)


def _collect_values(
    study: Study,
    table: Mapping[str, Sequence[object]],
) -> dict[Axis, tuple[str, ...]]:
    """Return the values of each axis that has some, from a table by option."""
    axes_by_option = {axis.option: axis for axis in study.all_axes}
    for option in table:
        if option not in axes_by_option:
            known = "=, --".join(axes_by_option)
            raise ValueError(f"The study {study.name} has no --{option}=; it has --{known}=.")

    values_by_axis = {}
    for option, axis in axes_by_option.items():
        values = tuple(map(str, table.get(option, axis.values)))
        if values:
            values_by_axis[axis] = values
    return values_by_axis


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
    options: dict[str, str] = {}
    for axis, values in axes.items():
        option = study.format_option(axis)
        require_different(option, values)
        options |= dict.fromkeys(axis.fields, option)
    reject_overrides(overrides, options)

    runs = tuple(_make_run(study, recipe, overrides, point, axes) for point in points)
    if not runs:
        raise ValueError(f"The study {study.name} has no run with these values.")
    return Grid(study, recipe, runs)


def require_different(option: str, values: Sequence[object]) -> None:
    """Raise ValueError if a value of an option "--name=" occurs twice."""
    if len({*values}) < len(values):
        raise ValueError(f"{option}{','.join(map(str, values))}: a value occurs twice.")


def reject_overrides(overrides: Sequence[str], options: Mapping[str, str]) -> None:
    """Raise ValueError for an override of a field that one of the `options` sets for each run."""
    for word in overrides:
        field, _, _ = word.removeprefix("--config.").partition("=")
        if field in options:
            raise ValueError(f"{word}: is set for each run. Use {options[field]}.")


def _make_run(
    study: Study,
    recipe: str,
    overrides: Sequence[str],
    point: Point,
    axes: Mapping[Axis, Sequence[str]],
) -> Run:
    """Return the run of a point; the overrides of an axis may depend on the axes before it."""
    words = [f"--config.{word}" for word in study.config]
    words += overrides
    if MODEL in point:
        recipe, fields = _split_model(recipe, point[MODEL])
        words += fields
    try:
        for axis, values in axes.items():
            config = load_recipe(recipe, words)
            if not isinstance(config, PretrainConfig) and not study.is_sweep:
                raise ValueError(
                    f"{recipe} is a recipe for {type(config).__name__}; studies pre-train."
                )
            for word in axis.overrides(config, point[axis.name], values):
                words.append(f"--config.{word}")
        config = load_recipe(recipe, words)
    except ValueError as error:
        values_of_point = ", ".join(f"{name}={value}" for name, value in point.items())
        raise ValueError(f"{values_of_point}: {error}") from None
    return Run(point, recipe, tuple(words), config)


def _split_model(recipe: str, model: str) -> tuple[str, list[str]]:
    """Return the recipe with the argument in a model, and the overrides in it."""
    path, _, recipe_argument = recipe.partition(":")
    arguments = []
    overrides = []
    for word in model.split(","):
        if re.match(r"[^=]*\.[^=]*=", word):
            overrides.append(f"--config.{word}")
        elif word:
            arguments.append(word)
    if recipe_argument:
        arguments.append(recipe_argument)
    return f"{path}:{','.join(arguments)}", overrides


def plan_on_machine(grid: Grid, machine: str) -> Grid:
    """Return the runs as planned for another machine.

    Their folders differ from those of runs measured on this one.
    """
    runs = []
    for run in grid.runs:
        point = {**run.point, "machine": machine}
        runs.append(dataclasses.replace(run, point=point))
    return dataclasses.replace(grid, runs=tuple(runs))
