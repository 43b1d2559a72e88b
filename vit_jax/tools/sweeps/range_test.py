"""The learning-rate range test (Smith, 2017, arXiv:1506.01186, section 3.3).

A few steps of a recipe, each at a higher rate than the one before, until the loss diverges. Their
weights are discarded.
"""

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import pytree
from vit_jax.config import (
    Duration,
    FinetuneConfig,
    PolyakConfig,
    RunConfig,
    ScheduleConfig,
    SearchConfig,
    StopEarlyConfig,
)
from vit_jax.config.check import validate
from vit_jax.data.records import Source
from vit_jax.storage.files import JsonObject, use_compilation_cache
from vit_jax.tools.figures.drawing import BLUE, GREEN, GREY, RED, new_figure
from vit_jax.train.assemble import assemble
from vit_jax.train.assembly import Assembly
from vit_jax.train.inputs import open_datasets, open_train_batches
from vit_jax.train.metrics import READABLE_IMAGES
from vit_jax.train.start import first_state, state_of_parameters
from vit_jax.train.starting_weights import adapt
from vit_jax.train.state import TrainState
from vit_jax.train.state_builder import architecture_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEAST_STEPS = 20
WINDOW = 0.1  # fraction of all steps; losses are smoothed over it, and none of its steps diverges
# Multiple of the loss at the start above which it has diverged; or the spread, if that is more
MARGIN = 0.01


@dataclasses.dataclass(frozen=True)
class RangeTest:
    """Learning rates in ascending order, and the training loss after the step with each.

    The loss has diverged where its mean over the steps around is above the mean of the first steps,
    which learn nothing.
    """

    num_steps: int  # length of the complete test, which may have ended before
    rate_P: np.ndarray
    loss_P: np.ndarray  # finite
    became_infinite: bool  # after the last of them

    @property
    def half_window(self) -> int:
        return math.ceil(WINDOW * self.num_steps / 2)

    @property
    def smooth_P(self) -> np.ndarray:
        """Means over the window around each step, over fewer on both sides at the ends."""
        last = len(self.loss_P) - 1
        means = []
        for step in range(last + 1):
            num_neighbours = min(self.half_window, step, last - step)
            window = self.loss_P[step - num_neighbours : step + num_neighbours + 1]
            means.append(window.mean())
        return np.array(means)

    @property
    def diverged(self) -> int | None:
        """The first step at which the loss has diverged.

        None: it has not, as far as the window reaches.
        """
        smooth_P = self.smooth_P
        num_first = 2 * self.half_window
        if len(smooth_P) >= num_first:
            first_F = self.loss_P[:num_first]
            mean = first_F.mean()
            limit = mean + max(MARGIN * abs(mean), first_F.std())
            for step in range(num_first, len(smooth_P) - self.half_window):
                if smooth_P[step] > limit:
                    return step
        if self.became_infinite:
            return len(smooth_P) - 1
        return None

    @property
    def steepest(self) -> int:
        """The step where the smoothed loss falls fastest over the logarithm of the rate.

        Steps after the divergence do not count.
        """
        loss_P = self.smooth_P[: self.diverged]
        rate_P = self.rate_P[: self.diverged]
        slope_P = np.gradient(loss_P, np.log(rate_P))
        return int(np.argmin(slope_P))

    def suggestions(self) -> dict[str, float]:
        """Return learning rates to try, by the reason for each.

        Raises:
          ValueError: the loss did not fall before it diverged.
        """
        smooth_P = self.smooth_P[: self.diverged]
        if len(smooth_P) < 2 * self.half_window or smooth_P.min() >= smooth_P[0]:
            raise ValueError("The loss did not fall before it diverged: lower --low=.")
        suggestions = {"where the loss falls fastest": float(self.rate_P[self.steepest])}
        if self.diverged is not None:
            rate = float(self.rate_P[self.diverged])
            suggestions[f"a tenth of {rate:.2g}, where the loss diverges"] = rate / 10
        return suggestions

    def to_json(self) -> JsonObject:
        """Return all numbers as JSON values."""
        return {
            "learning_rates": self.rate_P.tolist(),
            "losses": self.loss_P.tolist(),
            "smoothed_losses": self.smooth_P.tolist(),
            "suggestions": self.suggestions(),
        }


def run_range_test(
    config: RunConfig,
    low: float,
    high: float,
    num_steps: int,
) -> RangeTest:
    """Train with rates from `low` to `high` on this machine, at most `num_steps` of them.

    Nothing is written.

    Random numbers depend on the config's seed. Warm-up, decay, average and evaluations of the
    config are ignored.

    Raises:
      ValueError: the config, its data or its weights cannot be used, or there are too few steps.
    """
    if not low < high or num_steps < LEAST_STEPS:
        raise ValueError(
            f"From --low={low:g} to --high={high:g} in {num_steps} steps: "
            f"at least {LEAST_STEPS} upwards."
        )
    validate(config)
    if getattr(config, "resume_from", None) is not None:
        raise ValueError(
            "config.resume_from: the test begins at step 0; use config.init_from for its weights."
        )
    use_compilation_cache(config.logging.compilation_cache)

    run, source, state = _assemble(_shorten(config, high, num_steps), low, high, num_steps)
    step = run.compile_train_step()
    leaves = pytree.name_leaves(state)
    rates: list[float] = []
    losses: list[float] = []
    with open_train_batches(run, source, 0) as (batches, _):
        numbered = enumerate(itertools.islice(batches, num_steps + 1), 1)
        for number, batch in numbered:
            leaves, metrics = step.select(number)(leaves, batch)
            if float(metrics[READABLE_IMAGES]) == 0:
                raise ValueError(
                    f"config.global_batch={config.global_batch}: no image of a batch can be read."
                )
            # The loss is measured before the update of its step, so it belongs to the rate before
            loss = float(metrics["train_loss"])
            is_finite = math.isfinite(loss)
            if rates and is_finite:
                losses.append(loss)
            rates_of_losses = np.array(rates[: len(losses)])
            test = RangeTest(num_steps, rates_of_losses, np.array(losses), not is_finite)
            if test.diverged is not None or not is_finite:
                break
            rates.append(float(metrics["learning_rate"]))
    return test


def _assemble(
    config: RunConfig,
    low: float,
    high: float,
    num_steps: int,
) -> tuple[Assembly, Source, TrainState]:
    """Return the run, its training images, and its first state."""

    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        progress = jnp.asarray(step, jnp.float32) / (num_steps - 1)
        return low * (high / low) ** progress

    train = open_datasets(config).train
    weights = None
    if isinstance(config, FinetuneConfig):
        start = adapt(config, train)
        architecture = start.architecture
        weights = start.fitted
        config = start.config
    else:
        architecture = architecture_of(config, train.num_classes)
    run = assemble(
        config,
        architecture,
        num_examples=len(train),
        label_shape=train.label_shape,
        devices=jax.devices(),
        schedule=schedule,
    )
    if weights is None:
        state, *_ = first_state(run)
    else:
        state = state_of_parameters(run, weights.parameters, str(config.init_from))
    return run, train, state


def _shorten(config: RunConfig, high: float, num_steps: int) -> RunConfig:
    """Return the config of the test.

    It has one step more than rates, for the loss after the last one.
    """
    if isinstance(config, FinetuneConfig):
        config = dataclasses.replace(config, search=SearchConfig())
    return dataclasses.replace(
        config,
        total=Duration(f"{num_steps + 1} steps"),
        schedule=ScheduleConfig(learning_rate=high, warmup=Duration("0 steps"), decay="constant"),
        polyak=PolyakConfig(),
        evaluation=dataclasses.replace(config.evaluation, evaluators={}),
        checkpoint=dataclasses.replace(config.checkpoint, keep_best=0),
        stop_early=StopEarlyConfig(),
        logging=dataclasses.replace(config.logging, profile_start_step=None, profile_num_steps=5),
    )


def draw(test: RangeTest, title: str) -> "Figure":
    """Return a figure of the losses over the rates, with the suggested rates."""
    figure = new_figure(6.4, 4.0)
    axes = figure.subplots()
    axes.plot(
        test.rate_P,
        test.loss_P,
        ".",
        color=GREY,
        markersize=3,
        label="loss of a step",
    )
    window_steps = 2 * test.half_window + 1
    axes.plot(
        test.rate_P,
        test.smooth_P,
        color=BLUE,
        label=f"mean of {window_steps} steps",
    )
    suggestions = test.suggestions()
    for (reason, rate), colour in zip(suggestions.items(), (GREEN, RED), strict=False):
        axes.axvline(
            rate,
            color=colour,
            linestyle="--",
            label=f"{rate:.2g}: {reason}",
        )

    lowest = test.smooth_P.min()
    highest = test.smooth_P.max()
    spread = highest - lowest  # a single loss may be far outside
    axes.set(
        xscale="log",
        xlabel="learning rate",
        ylabel="training loss",
        title=title,
        ylim=(lowest - spread, highest + spread),
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="lower left")
    return figure
