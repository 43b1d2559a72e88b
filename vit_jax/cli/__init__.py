"""The command line: one subcommand is one verb. Verbs import what they need; help is fast."""

import collections
import gc
import importlib
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
from vit_jax.cli import stop
from vit_jax.cli.outputs import describe_system_error, fail
from vit_jax.cli.verbs import Verb
from vit_jax.imports.backend import (
    BackendError,
    default_platforms,
    explain_backend_errors,
    hide_cuda,
    uses_only_cpus,
)
from vit_jax.imports.huge_pages import use_huge_pages
from vit_jax.text.nearest import did_you_mean


class Verbs(collections.UserDict[str, Any]):
    """Verbs by name, in the order of the help; the module of a verb is imported when it is used."""

    def __getitem__(self, name: str) -> Any:
        verb = self.data[name]
        if isinstance(verb, str):
            module, _, kind = verb.partition(".")
            verb = getattr(importlib.import_module(f"vit_jax.cli.{module}"), kind)
            self.data[name] = verb
        return verb


VERBS = Verbs(
    {
        "pretrain": "training.Pretrain",
        "finetune": "training.Finetune",
        "replay": "training.Replay",
        "lr-range": "training.LrRange",
        "sweep": "sweeps.Sweep",
        "evaluate": "weights.Evaluate",
        "predict": "weights.Predict",
        "export": "weights.Export",
        "convert": "weights.Convert",
        "fewshot": "frozen.Fewshot",
        "probe": "frozen.Probe",
        "knn": "frozen.Knn",
        "features": "frozen.Features",
        "duplicates": "frozen.Duplicates",
        "vtab": "sweeps.Vtab",
        "study": "sweeps.Study",
        "status": "run_reports.Status",
        "plot": "run_reports.Plot",
        "report": "run_reports.Report",
        "inspect": "analysis.Inspect",
        "inspect-data": "analysis.InspectData",
        "models": "lists.Models",
        "weights": "lists.Weights",
        "recipes": "lists.Recipes",
        "show": "lists.Show",
        "plan": "planning.Plan",
        "prepare": "preparation.Prepare",
        "bench": "training.Bench",
        "doctor": "training.Doctor",
    }
)
_HELP = ("help", "--help", "-h")
_TRAINING = {"pretrain", "finetune", "replay", "lr-range", "sweep", "vtab", "study", "bench"}
"""Verbs that take many training steps."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one verb; a ValueError becomes one message and exit code 2, devices that do not start exit code 1.

    SIGTERM ends it with exit code 75, Ctrl-C and a closed output with those of a shell, unless the
    verb handles them.
    """
    _open_streams()
    if arguments is None:
        arguments = sys.argv[1:]
        _choose_allocation(arguments)
    try:
        with stop.end_in_order():
            try:
                _run(arguments)
            finally:
                sys.stdout.flush()  # an error at exit could not be handled
    except KeyboardInterrupt as error:
        stop.leave(error)
    except BrokenPipeError:
        # Discard the rest of the output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)
    except (ValueError, FloatingPointError, BackendError) as error:
        if os.environ.get("VIT_JAX_TRACEBACK"):
            raise
        fail(str(error), 2 if isinstance(error, ValueError) else 1)
    except OSError as error:  # a disk or a network failed; launchers start the command again
        if os.environ.get("VIT_JAX_TRACEBACK") or error.strerror is None:
            raise
        problem = describe_system_error(error, "the system")
        fail(f"{problem}. Check the path, permissions and free space.", 1)


def _open_streams() -> None:
    """Replace closed standard streams by an empty input or a discarded output, so that no file takes their place.

    Names of files and classes may contain undecodable bytes, which the output escapes.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - open until the process ends
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def _run(words: Sequence[str]) -> None:
    """Print the help that the words ask for, or run their verb."""
    verb, *rest = join_verb(words) or ["help"]
    if verb == "--version":
        print(_describe_versions())
    elif verb in _HELP and not rest:
        print(_describe_verbs(), end="")
    elif verb in _HELP:
        print(_find(join_verb(rest)[0]).help(), end="")
    elif not {"--help", "-h"}.isdisjoint(rest):
        print(_find(verb).help(), end="")
    else:
        _choose_devices()
        # Tracing allocates many objects and leaves little garbage: the default, 700, takes a tenth
        # of the time until the first step.
        gc.set_threshold(50_000, 10, 10)
        with explain_backend_errors():
            _find(verb)(rest)


def _choose_devices() -> None:
    """Set the platforms of JAX in the environment, before JAX is imported."""
    platforms = default_platforms(os.environ, pathlib.Path("/"))
    if platforms:
        os.environ["JAX_PLATFORMS"] = platforms
    hide_cuda(os.environ, pathlib.Path("/"))


def _choose_allocation(words: Sequence[str]) -> None:
    """Let a command that only trains on CPUs use huge pages."""
    verb = join_verb(words)[:1]
    if _TRAINING.issuperset(verb) and uses_only_cpus(os.environ, pathlib.Path("/")):
        use_huge_pages(os.environ)


def _describe_versions() -> str:
    jax_version = importlib.metadata.version("jax")
    return f"vit_jax {__version__}, JAX {jax_version}, Python {platform.python_version()}"


def join_verb(words: Sequence[str]) -> list[str]:
    """Return the words with a verb of two words as one: "inspect data" is "inspect-data"."""
    joined = "-".join(words[:2])
    if joined in VERBS:
        return [joined, *words[2:]]
    return list(words)


def _describe_verbs() -> str:
    """Return the help of the command: its verbs, each in one line."""
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
    verb: Verb = VERBS[name]
    return verb
