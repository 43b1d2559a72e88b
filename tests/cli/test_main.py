"""The command itself: its help, and how it ends when nobody waits for it any more."""

import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys
from typing import get_args

import pytest

import vit_jax
from tests.integration.commands import run, succeed
from vit_jax import cli
from vit_jax.cli.groups import GROUPS
from vit_jax.cli.options import Recipe, list_arguments, list_options
from vit_jax.config.network_options import AddedTo, Gelu, PositionEmbedding, Rope
from vit_jax.hosts import exits
from vit_jax.tools.sweeps.catalogue import STUDIES
from vit_jax.weights import OPTIONS

ROOT = pathlib.Path(__file__).parents[2]
DOCUMENTS = [
    *("README.md", "configs/README.md", "launch/README.md"),
    *sorted(
        path.relative_to(ROOT).as_posix()
        for path in (*ROOT.glob("docs/*.md"), *ROOT.glob("vit_jax/*/*.md"))
    ),
]


# First words of clauses without a noun or an imperative verb
NO_NOUN = re.compile(r"(also|as|default|for|from|of|only|some|that|to|what|where|which)\b")


def shown(*words):
    return succeed(words)


def test_help_is_a_short_list_of_verbs():
    text = shown()
    assert text == shown("--help") == shown("help") == shown("-h")

    entries = dict(line.split(maxsplit=1) for line in text.splitlines() if line.startswith("  "))
    assert entries == {name: verb.summary for name, verb in cli.VERBS.items()}
    assert all(len(line) <= 120 and line.endswith(".") for line in text.splitlines() if line)


def test_a_limit_has_one_default():
    """The same number of images at a time, and of images that may be unreadable, in every verb that has them."""
    for name in ("global_batch", "max_unreadable"):
        pattern = rf"^  --{name}\b.*$"
        lines = {
            line
            for verb in cli.VERBS.values()
            for line in re.findall(pattern, verb.help(), re.MULTILINE)
        }
        assert len({" ".join(line.split()) for line in lines}) == 1


def test_verbs_have_the_names_of_their_classes():
    assert {name: verb.name for name, verb in cli.VERBS.items()} == {
        name: name for name in cli.VERBS
    }


def test_a_verb_imports_no_other_verbs():
    program = """
import sys
from vit_jax import cli
cli.VERBS["recipes"].help()
print(*(name for name in sys.modules if name.startswith("vit_jax.cli.")))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    loaded = {name.removeprefix("vit_jax.cli.") for name in done.stdout.split()}

    assert "lists" in loaded
    assert loaded.isdisjoint({"analysis", "frozen", "planning", "sweeps", "training", "weights"})


@pytest.mark.parametrize("verb", cli.VERBS)
def test_the_help_of_a_verb_has_every_argument_and_two_examples_that_it_takes(verb):
    text = shown(verb, "--help")
    assert text == shown("help", verb) == shown(verb, "word", "-h")

    lines, examples = text.partition("\n\nFields of a recipe")[0].split("Examples:\n")
    examples = examples.replace("\\\n", "")
    usage, _, entries = lines.partition("\n\n")

    assert re.findall(r"^  --([\w.]+)", entries, re.MULTILINE) == cli.VERBS[verb].flags

    first_line = " ".join(usage.split())
    positional = re.findall(
        r"(?<= )\[?[A-Z]+…?\]?(?= )", re.split(" --| \\[OPTION", first_line)[0] + " "
    )

    assert re.findall(r"^  (\[?[A-Z]+…?\]?)(?=  |$)", entries, re.MULTILINE) == positional
    assert len(examples.splitlines()) == 2

    for line in examples.splitlines():
        name, given_verb, *words = shlex.split(line)
        options = cli.VERBS[verb].parse(words)

        assert (name, given_verb) == ("vit-jax", verb)

        if isinstance(options, Recipe):
            options.load()


@pytest.mark.parametrize("verb", cli.VERBS)
def test_the_help_of_a_verb_fits_one_screen(verb, monkeypatch):
    """40 lines of 100 columns; no line is longer than the terminal is wide.

    Fields of recipes follow in `show`.
    """
    for columns in (72, 80, 100, 120, 160):
        monkeypatch.setenv("COLUMNS", str(columns))
        text = shown(verb, "--help")

        assert max(map(len, text.splitlines())) <= max(columns, longest_word(text) + 7)

        lines = text.partition("\n\nFields of a recipe")[0].splitlines()
        assert columns < 100 or len(lines) <= 40

    narrow, wide = (cli.VERBS[verb].help(columns).count("\n") for columns in (72, 160))

    assert wide < narrow or narrow < 15


@pytest.mark.parametrize("verb", cli.VERBS)
def test_the_help_of_an_option_begins_with_a_noun_or_an_imperative(verb):
    kind = cli.VERBS[verb].options
    for option in (*list_arguments(kind), *list_options(kind)):
        assert not NO_NOUN.match(option.meaning), f"{option.name}: {option.meaning}"


def longest_word(text):
    """The length of an example's longest word, which is not broken."""
    examples = text.partition("Examples:\n")[2].partition("\n\n")[0]
    return max(len(word) for word in examples.split())


def test_the_help_of_a_verb_hides_earlier_names():
    text = shown("evaluate", "--help")

    assert "--weights.FIELD VALUE" in text
    assert "--images.FIELD VALUE" in text
    for kind in GROUPS:
        for option in list_options(kind):
            assert f" --{option.name}" not in text
            assert option.name in text, "the group lists its fields"
    assert "--weights=" not in text


def test_the_help_of_show_describes_the_fields_of_groups():
    text = " ".join(shown("show", "--help").split())
    for kind in GROUPS:
        assert f"set by --{kind.PREFIX}.FIELD=VALUE" in text
        for option in list_options(kind):
            assert f"{option.name} {option.meaning} [" in text


def test_every_option_is_read():
    code = "".join(path.read_text() for path in (ROOT / "vit_jax/cli").glob("*.py"))
    declared = {flag for verb in cli.VERBS.values() for flag in verb.flags} - {
        "config.SECTION.FIELD",
        "weights.FIELD",
        "images.FIELD",
    }
    declared |= {option.name for kind in GROUPS for option in list_options(kind)} - set(OPTIONS)
    declared -= {axis.option for study in STUDIES.values() for axis in study.all_axes} | {
        "measures"
    }

    assert not [name for name in declared if not re.search(rf'[.]{name}\b|"{name}"', code)]


def test_choices_of_weights_are_those_of_the_schema():
    allowed = {
        "gelu": Gelu,
        "standardization_epsilon_added_to": AddedTo,
        "position_embedding": PositionEmbedding,
    }
    allowed["rope"] = Rope
    choices = {name: form.split("|") for name, (form, _) in OPTIONS.items() if "|" in form}
    expected = {
        name: [one for one in get_args(kind) if one != "relative"] for name, kind in allowed.items()
    }

    assert choices == expected  # no other format has relative positions


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_of_the_documents_are_taken(document):
    """Those in blocks of code, with their arrays of the shell; every word is one that the verb knows."""
    blocks = re.findall(r"```(?:sh)?\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    text = "\n".join(blocks).replace("\\\n", " ")
    for name, words in re.findall(r"^(\w+)=\((.*?)\)$", text, re.DOTALL | re.MULTILINE):
        text = text.replace(f'"${{{name}[@]}}"', words.replace("\n", " "))

    for line in text.splitlines():
        if not line.startswith("vit-jax ") or re.search(r"…|\[OPTIONS\]", line):
            continue
        verb, *words = cli.join_verb(shlex.split(line, comments=True)[1:])
        cli.VERBS[verb].parse(words)


def test_a_verb_of_two_words():
    text = cli.VERBS["inspect-data"].help()
    assert shown("help", "inspect", "data") == shown("inspect", "data", "--help") == text


def test_version_and_unknown_verbs():
    assert shown("--version").startswith(f"vit_jax {vit_jax.__version__}, JAX ")
    for words in (["help", "pretain"], ["pretain", "--help"], ["pretain"]):
        outcome = run(words)
        assert outcome.code == 2
        assert "There is no verb 'pretain'. Did you mean 'pretrain'?" in outcome.err


def test_ctrl_c_is_one_line(monkeypatch):
    def interrupted(words):
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.VERBS, "predict", interrupted)
    monkeypatch.setattr(os, "_exit", sys.exit)  # pytest stays

    assert run(["predict", "w.npz", "a.png"]) == (130, "", "vit-jax: stopped\n")


def test_sigterm_has_the_code_that_starts_the_command_again(monkeypatch):
    """Also where a library turns it into an error."""

    def terminated(words):
        signal.raise_signal(signal.SIGTERM)

    def wrapped(words):
        try:
            terminated(words)
        except BaseException as error:
            raise ValueError("cannot be read") from error

    monkeypatch.setattr(os, "_exit", sys.exit)  # pytest stays
    before = signal.getsignal(signal.SIGTERM), sys.unraisablehook
    for verb in (terminated, wrapped):
        monkeypatch.setitem(cli.VERBS, "predict", verb)
        message = "vit-jax: stopped by SIGTERM; repeat the command\n"

        assert run(["predict", "w.npz", "a.png"]) == (exits.PREEMPTED, "", message)
        assert (signal.getsignal(signal.SIGTERM), sys.unraisablehook) == before


IN_A_CALLBACK = """
import gc, os, signal, sys, time
from vit_jax import cli
from vit_jax.cli.options import Recipe

def callback(*_):
    gc.callbacks.clear()
    os.kill(os.getpid(), int(sys.argv[1]))
    time.sleep(0)

def verb(words):
    gc.callbacks.append(callback)
    gc.collect()
    time.sleep(600)

cli.VERBS["predict"] = verb
cli.main(["predict"])
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_is_not_lost_in_a_callback(number, code):
    """Python prints what is raised there and forgets it; JAX has such a callback of the garbage collector."""
    words = [sys.executable, "-c", IN_A_CALLBACK, str(int(number))]
    result = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=ROOT)

    assert (result.returncode, result.stderr.count("\n")) == (code, 1), result.stderr
    assert result.stderr.startswith("vit-jax: stopped")


@pytest.mark.parametrize("words", ["show --config=configs/digits.py", "--help"])
def test_an_output_that_nobody_reads(words):
    """As `| head -1` leaves it."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "vit_jax", *words.split()]
    result = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    os.close(write_end)

    assert (result.returncode, result.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize(
    ("redirection", "words", "code", "err"),
    [
        (">&-", "recipes", 0, ""),
        (
            "<&-",
            "predict weights.npz -",
            2,
            "vit-jax: No images are named. Give files, folders or patterns such as 'photos/*.jpg', or - and names.\n",
        ),
        ("<&- >&- 2>&-", "recipes nothing", 2, ""),
    ],
)
def test_closed_standard_streams(redirection, words, code, err):
    command = [
        "bash",
        "-c",
        f'exec "$@" {redirection}',
        "bash",
        sys.executable,
        "-m",
        "vit_jax",
        *words.split(),
    ]
    result = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, stdin=subprocess.DEVNULL
    )

    assert (result.returncode, result.stdout, result.stderr) == (code, "", err)


def test_an_error_of_the_file_system_is_one_line(monkeypatch):
    def refused(words):
        raise PermissionError(13, "Permission denied", "/home/me")

    monkeypatch.setitem(cli.VERBS, "predict", refused)
    outcome = run(["predict", "w.npz", "a.png"])

    assert (outcome.code, outcome.err.partition(". ")[0]) == (
        1,
        "vit-jax: /home/me: Permission denied",
    )

    monkeypatch.setenv("VIT_JAX_TRACEBACK", "1")
    with pytest.raises(PermissionError):
        cli.main(["predict", "w.npz", "a.png"])
