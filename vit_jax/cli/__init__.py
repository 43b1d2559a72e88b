"""The command line: one subcommand is one verb. Verbs import what they need, so that help is fast."""

import importlib.metadata
import io
import os
import pathlib
import platform
import signal
import sys
from collections.abc import Sequence
from typing import Any

from vit_jax import __version__
from vit_jax.cli import (
    analysis,
    frozen,
    lists,
    planning,
    preparation,
    run_reports,
    stop,
    sweeps,
    training,
    weights,
)
from vit_jax.cli.options import Verb, fail
from vit_jax.cli.outputs import describe_system_error
from vit_jax.imports.backend import BackendError, default_platforms, explained_backend, hide_cuda
from vit_jax.text.nearest import did_you_mean

_ALL: Any = (  # in the order of the help
    *(training.Pretrain, training.Finetune, training.Replay, training.LrRange, sweeps.Sweep),
    *(weights.Evaluate, weights.Predict, weights.Export, weights.Convert),
    *(frozen.Fewshot, frozen.Probe, frozen.Knn, frozen.Features, frozen.Duplicates, sweeps.Vtab),
    *(
        sweeps.Study,
        run_reports.Status,
        run_reports.Plot,
        run_reports.Report,
        analysis.Inspect,
        analysis.InspectData,
    ),
    *(lists.Models, lists.Weights, lists.Recipes, lists.Show),
    *(planning.Plan, preparation.Prepare, training.Bench, training.Doctor),
)
VERBS: dict[str, Verb] = {verb.name: verb for verb in _ALL}
_HELP = ("help", "--help", "-h")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one verb; a ValueError becomes one message and exit code 2, devices that do not start exit code 1.

    SIGTERM ends it with exit code 75, Ctrl-C and a closed output with those of a shell, unless the verb handles them.
    """
    _open_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(
            errors="backslashreplace"
        )  # names of files and classes may contain undecodable bytes
    try:
        with stop.orderly_end():
            try:
                _run(list(sys.argv[1:] if arguments is None else arguments))
            finally:
                sys.stdout.flush()  # an error at exit could not be handled
    except KeyboardInterrupt as error:
        stop.leave(error)
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # discards the rest of the output
        sys.exit(128 + signal.SIGPIPE)
    except (ValueError, FloatingPointError, BackendError) as error:
        if os.environ.get("VIT_JAX_TRACEBACK"):
            raise
        fail(str(error), 2 if isinstance(error, ValueError) else 1)
    except OSError as error:  # of a disk or a network; launchers start the command again
        if os.environ.get("VIT_JAX_TRACEBACK") or error.strerror is None:
            raise
        fail(
            f"{describe_system_error(error, 'the system')}. Check the path, permissions and free space.",
            1,
        )


def _open_streams() -> None:
    """Replace closed standard streams by an empty input or a discarded output, so that no file takes their place."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - open until the process ends


def _run(words: Sequence[str]) -> None:
    verb, *rest = join_verb(words) if words else ["help"]
    if verb == "--version":
        print(
            f"vit_jax {__version__}, JAX {importlib.metadata.version('jax')}, Python {platform.python_version()}"
        )
    elif verb in _HELP and not rest:
        print(_overview(), end="")
    elif verb in _HELP:
        print(_find(join_verb(rest)[0]).help(), end="")
    elif not {"--help", "-h"}.isdisjoint(rest):
        print(_find(verb).help(), end="")
    else:
        if platforms := default_platforms(os.environ, pathlib.Path("/")):
            os.environ["JAX_PLATFORMS"] = platforms  # before JAX is imported
        hide_cuda(os.environ, pathlib.Path("/"))
        with explained_backend():
            _find(verb)(rest)


def join_verb(words: Sequence[str]) -> list[str]:
    """Return the words with a verb of two words as one: "inspect data" is "inspect-data"."""
    joined = "-".join(words[:2])
    return [joined, *words[2:]] if joined in VERBS else list(words)


def _overview() -> str:
    verbs = "".join(f"  {name:<13}{verb.summary}\n" for name, verb in VERBS.items())
    return f"""\
vit-jax: train, fine-tune and use Vision Transformers in JAX.

{verbs}
`vit-jax VERB --help` shows the arguments of a verb with examples, `vit-jax --version` the versions.
VIT_JAX_TRACEBACK=1 in the environment prints the traceback of an error.
"""


def _find(name: str) -> Verb:
    if name not in VERBS:
        hint = did_you_mean(name, VERBS)
        fail(f"There is no verb {name!r}.{hint} Verbs: {', '.join(VERBS)}.", 2)
    return VERBS[name]
