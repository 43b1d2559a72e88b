"""The command line: one subcommand is one verb. Imports stand inside the verbs, so that help comes at once."""

import difflib
import os
import sys
from collections.abc import Callable, Sequence

HELP = """\
vit-jax: train Vision Transformers in JAX.

  vit-jax pretrain --config=RECIPE[:ARGUMENT] --workdir=FOLDER [--config.SECTION.FIELD=VALUE ...]
      Train from scratch, or go on where the workdir's last checkpoint ends.
  vit-jax prepare DATASET [--data_dir=FOLDER] [--manual_dir=FOLDER]
      Write a dataset of the TFDS catalogue as ArrayRecord files, once.
  vit-jax show --config=RECIPE[:ARGUMENT] [--config.SECTION.FIELD=VALUE ...]
      Print every effective value of a recipe.
  vit-jax bench --config=RECIPE[:ARGUMENT] [--steps=20] [--input] [--config.SECTION.FIELD=VALUE ...]
      Time the recipe's training step on made-up images, or with --input its input pipeline.

VIT_JAX_TRACEBACK=1 in the environment shows where an error comes from.
Recipes are in configs/; configs/README.md says which command stands for which row of the paper.
"""


_OUT_OF_MEMORY = """\
The device has too little memory. In the order of what they cost: optimizer.accumulation_steps (smaller micro-batches),
sharding.parameters=fsdp (parameters split over the devices), model.remat=dots or full (compute again, not keep), a \
smaller global_batch. JAX says:"""


class UsageError(ValueError):
    """The words of the command are wrong."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one verb; errors that a user can mend are one message and exit code 2."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("help", "--help", "-h") or "--help" in words:
        print(HELP, end="")
        return
    verb, *rest = words
    if verb not in VERBS:
        near = difflib.get_close_matches(verb, VERBS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        _fail(f"There is no verb {verb!r}.{hint} Verbs: {', '.join(VERBS)}.", 2)
    try:
        VERBS[verb](rest)
    except (ValueError, FloatingPointError) as error:
        if os.environ.get("VIT_JAX_TRACEBACK"):
            raise
        _fail(str(error), 2 if isinstance(error, ValueError) else 1)


def _pretrain(words: Sequence[str]) -> None:
    from vit_jax.config import PretrainConfig, load_recipe

    options, overrides = _split(words, required=("config", "workdir"))
    config = load_recipe(options["config"], overrides)
    if not isinstance(config, PretrainConfig):
        raise UsageError(f"{options['config']} is a recipe for {type(config).__name__}, not for pretrain.")

    import jax

    from vit_jax.checkpoint import SaveError
    from vit_jax.data.pipeline import LostWorker
    from vit_jax.train.interruption import EXIT_CODE, Interrupted
    from vit_jax.train.pretrain import pretrain

    try:
        pretrain(config, options["workdir"])
    except Interrupted as interrupted:
        _fail(str(interrupted), EXIT_CODE)
    except KeyboardInterrupt:
        _fail("stopped at once; what the last checkpoint holds is kept", 130)
    except (SaveError, LostWorker) as error:
        _fail(str(error), 1)
    except OSError as error:
        _fail(f"{error.filename or options['workdir']}: {error.strerror}. The last checkpoint is untouched.", 1)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        _fail(f"{_OUT_OF_MEMORY}\n{error}", 1)


def _prepare(words: Sequence[str]) -> None:
    from vit_jax.data.prepare import prepare

    names = [word for word in words if not word.startswith("--")]
    options, _ = _split([word for word in words if word.startswith("--")], optional=("data_dir", "manual_dir"))
    if len(names) != 1:
        raise UsageError("prepare takes the name of one dataset, for example: vit-jax prepare cifar10")
    print(prepare(names[0], data_dir=options.get("data_dir"), manual_dir=options.get("manual_dir")))


def _show(words: Sequence[str]) -> None:
    from vit_jax.config import load_recipe, to_text

    options, overrides = _split(words, required=("config",))
    print(to_text(load_recipe(options["config"], overrides)), end="")


def _bench(words: Sequence[str]) -> None:
    from vit_jax.config import load_recipe

    of_input = "--input" in words
    options, overrides = _split([w for w in words if w != "--input"], required=("config",), optional=("steps",))
    num_steps = options.get("steps", "20")
    if not num_steps.isdecimal() or num_steps == "0":
        raise UsageError(f"--steps={num_steps}: must be a whole number from 1.")
    config = load_recipe(options["config"], overrides)

    from vit_jax.bench.step import bench_input, bench_step

    results = (bench_input if of_input else bench_step)(config, num_steps=int(num_steps))
    for name, value in results:
        print(f"{name:<24} {value:,.4g}", flush=True)


VERBS: dict[str, Callable[[Sequence[str]], None]] = {
    "pretrain": _pretrain,
    "prepare": _prepare,
    "show": _show,
    "bench": _bench,
}


def _split(
    words: Sequence[str], *, required: Sequence[str] = (), optional: Sequence[str] = ()
) -> tuple[dict[str, str], list[str]]:
    """Options of the verb by name, and `--config.FIELD=VALUE` overrides in their order."""
    options: dict[str, str] = {}
    overrides: list[str] = []
    known = [*required, *optional]
    for word in words:
        if word.startswith("--config."):
            overrides.append(word)
            continue
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean --{near[0]}=?" if near else ""
            raise UsageError(f"Unknown argument {word!r}.{hint} Known: {', '.join(f'--{k}=' for k in known)}")
        if not equals or not value:
            raise UsageError(f"--{name} needs a value: --{name}=VALUE")
        options[name] = value
    missing = [f"--{name}=" for name in required if name not in options]
    if missing:
        raise UsageError(f"Missing: {', '.join(missing)}. See vit-jax --help.")
    return options, overrides


def _fail(message: str, code: int) -> None:
    print(f"vit-jax: {message}", file=sys.stderr, flush=True)
    sys.exit(code)
