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
from vit_jax.cli.options import Options, Recipe, list_arguments, list_options
from vit_jax.config.network_options import AddedTo, Gelu, PositionEmbedding, Rope
from vit_jax.hosts import exits
from vit_jax.tools.sweeps.catalogue import STUDIES
from vit_jax.weights import OPTIONS

ROOT = pathlib.Path(__file__).parents[2]
PAGES = (*ROOT.glob("docs/*.md"), *ROOT.glob("vit_jax/*/*.md"))
DOCUMENTS = [
    "README.md",
    "configs/README.md",
    "launch/README.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in PAGES),
]


# First words of clauses without a noun or an imperative verb
NO_NOUN = re.compile(r"(also|as|default|for|from|of|only|some|that|to|what|where|which)\b")


def show(*words):
    return succeed(words)


def test_help_is_a_short_list_of_verbs():
    text = show()
    entries = dict(line.split(maxsplit=1) for line in text.splitlines() if line.startswith("  "))

    assert entries == {name: verb.summary for name, verb in cli.VERBS.items()}
    for words in ("--help", "help", "-h"):
        assert show(words) == text
    for line in filter(None, text.splitlines()):
        assert len(line) <= 120
        assert line.endswith(".")


@pytest.mark.parametrize("name", ["global_batch", "max_unreadable"])
def test_a_limit_has_one_default(name):
    """Every verb with this limit describes it by the same line."""
    lines = set()
    for verb in cli.VERBS.values():
        for line in re.findall(rf"^  --{name}\b.*$", verb.help(), re.MULTILINE):
            lines.add(" ".join(line.split()))

    assert len(lines) == 1


def test_verbs_have_the_names_of_their_classes():
    for name, verb in cli.VERBS.items():
        assert verb.name == name


PRINT_MODULES = """
import sys
from vit_jax import cli
cli.VERBS["recipes"].help()
print(*(name for name in sys.modules if name.startswith("vit_jax.cli.")))
"""


def test_a_verb_imports_no_other_verbs():
    command = [sys.executable, "-c", PRINT_MODULES]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = {name.removeprefix("vit_jax.cli.") for name in done.stdout.split()}

    assert "lists" in loaded
    assert loaded.isdisjoint({"analysis", "frozen", "planning", "sweeps", "training", "weights"})


def drop_recipe_fields(text):
    """Return the help of a verb without the fields of recipes."""
    return text.partition("\n\nFields of a recipe")[0]


def read_positional(usage):
    """Return the positional arguments in the first line of a help."""
    words = re.split(r" --| \[OPTION", " ".join(usage.split()))[0] + " "
    return re.findall(r"(?<= )\[?[A-Z]+…?\]?(?= )", words)


@pytest.mark.parametrize("verb", cli.VERBS)
def test_the_help_of_a_verb_has_every_argument(verb):
    text = show(verb, "--help")
    usage, _, entries = drop_recipe_fields(text).partition("\n\n")
    entries = entries.partition("Examples:\n")[0]
    flags = re.findall(
        r"^  --([\w.]+)",
        entries,
        re.MULTILINE,
    )
    arguments = re.findall(
        r"^  (\[?[A-Z]+…?\]?)(?=  |$)",
        entries,
        re.MULTILINE,
    )

    positional = []
    for option in list_options(cli.VERBS[verb].options):
        if option.is_positional:
            positional.append(option.form)
            assert option.form in usage

    assert show("help", verb) == text
    assert show(verb, "word", "-h") == text
    assert flags == cli.VERBS[verb].flags
    assert arguments == [word for word in read_positional(usage) if word not in positional]


@pytest.mark.parametrize("verb", cli.VERBS)
def test_a_verb_suggests_the_next_command(verb):
    assert cli.VERBS[verb].options.suggest_next is not Options.suggest_next


@pytest.mark.parametrize("verb", cli.VERBS)
def test_the_help_of_a_verb_has_two_examples_that_it_takes(verb):
    _, examples = drop_recipe_fields(show(verb, "--help")).split("Examples:\n")
    lines = examples.replace("\\\n", "").splitlines()

    assert len(lines) == 2
    for line in lines:
        program, name, *words = shlex.split(line)
        options = cli.VERBS[verb].parse(words)
        assert program == "vit-jax"
        assert name == verb
        if isinstance(options, Recipe):
            options.load()


@pytest.mark.parametrize("verb", cli.VERBS)
def test_the_help_of_a_verb_fits_one_screen(verb, monkeypatch):
    """40 lines of 100 columns; no line is longer than the terminal is wide.

    Fields of recipes follow in `show`.
    """
    for columns in (72, 80, 100, 120, 160):
        monkeypatch.setenv("COLUMNS", str(columns))
        text = show(verb, "--help")
        longest_line = max(len(line) for line in text.splitlines())
        assert longest_line <= max(columns, measure_longest_word(text) + 7)
        if columns >= 100:
            assert len(drop_recipe_fields(text).splitlines()) <= 40

    narrow = cli.VERBS[verb].help(72).count("\n")
    wide = cli.VERBS[verb].help(160).count("\n")

    assert wide < narrow or narrow < 15


@pytest.mark.parametrize("verb", cli.VERBS)
def test_the_help_of_an_option_begins_with_a_noun_or_an_imperative(verb):
    kind = cli.VERBS[verb].options
    for option in (*list_arguments(kind), *list_options(kind)):
        assert not NO_NOUN.match(option.meaning), f"{option.name}: {option.meaning}"


def measure_longest_word(text):
    """Return the length of an example's longest word, which is not broken."""
    examples = text.partition("Examples:\n")[2].partition("\n\n")[0]
    return max(len(word) for word in examples.split())


def list_declared_options():
    """Return the names of all options of verbs and groups that code has to read by name."""
    names = set()
    for verb in cli.VERBS.values():
        names.update(verb.flags)
    names -= {"config.SECTION.FIELD", "weights.FIELD", "images.FIELD"}

    for kind in GROUPS:
        names.update(option.name for option in list_options(kind) if option.name not in OPTIONS)
    for study in STUDIES.values():
        names -= {axis.option for axis in study.all_axes}
    return names - {"measures"}


def test_the_help_of_a_verb_hides_earlier_names():
    text = show("evaluate", "--help")

    assert "--weights.FIELD VALUE" in text
    assert "--images.FIELD VALUE" in text
    for kind in GROUPS:
        for option in list_options(kind):
            assert f" --{option.name}" not in text
            assert option.name in text, "the group lists its fields"
    assert "--weights=" not in text


def test_the_help_of_show_describes_the_fields_of_groups():
    text = " ".join(show("show", "--help").split())
    for kind in GROUPS:
        assert f"set by --{kind.PREFIX}.FIELD=VALUE" in text
        for option in list_options(kind):
            assert f"{option.name} {option.meaning} [" in text


def test_every_option_is_read():
    code = "".join(path.read_text() for path in (ROOT / "vit_jax/cli").glob("*.py"))
    for name in list_declared_options():
        assert re.search(rf'[.]{name}\b|"{name}"', code), name


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gelu", Gelu),
        ("standardization_epsilon_added_to", AddedTo),
        ("position_embedding", PositionEmbedding),
        ("rope", Rope),
    ],
)
def test_choices_of_weights_are_those_of_the_schema(name, kind):
    """No other format has relative positions."""
    form, _ = OPTIONS[name]

    assert form.split("|") == [choice for choice in get_args(kind) if choice != "relative"]


def test_only_these_options_of_weights_have_choices():
    with_choices = {name for name, (form, _) in OPTIONS.items() if "|" in form}
    expected = {
        "gelu",
        "standardization_epsilon_added_to",
        "position_embedding",
        "rope",
    }

    assert with_choices == expected


def read_commands(document):
    """Return the lines in blocks of code, with arrays of the shell and continued lines joined."""
    blocks = re.findall(
        r"```(?:sh)?\n(.*?)```",
        document,
        re.DOTALL,
    )
    text = "\n".join(blocks).replace("\\\n", " ")
    for name, words in re.findall(r"^(\w+)=\((.*?)\)$", text, re.DOTALL | re.MULTILINE):
        text = text.replace(f'"${{{name}[@]}}"', words.replace("\n", " "))
    return text.splitlines()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_of_the_documents_are_taken(document):
    """Every word in a command of a block of code is known to its verb."""
    for line in read_commands((ROOT / document).read_text()):
        if line.startswith("vit-jax ") and not re.search(r"…|\[OPTIONS\]", line):
            verb, *words = cli.join_verb(shlex.split(line, comments=True)[1:])
            cli.VERBS[verb].parse(words)


def test_a_verb_of_two_words():
    text = cli.VERBS["inspect-data"].help()

    assert show("help", "inspect", "data") == text
    assert show("inspect", "data", "--help") == text


def test_version():
    assert show("--version").startswith(f"vit_jax {vit_jax.__version__}, JAX ")


@pytest.mark.parametrize(
    "words",
    [
        ["help", "pretain"],
        ["pretain", "--help"],
        ["pretain"],
    ],
)
def test_unknown_verbs(words):
    outcome = run(words)

    assert outcome.code == 2
    assert "There is no verb 'pretain'. Did you mean 'pretrain'?" in outcome.err


@pytest.fixture
def prepared(monkeypatch):
    """The environments in which the command has changed how its process allocates memory."""
    environments = []
    monkeypatch.setattr(cli, "use_huge_pages", environments.append)
    for name in ("pretrain", "predict"):
        monkeypatch.setitem(cli.VERBS, name, lambda words: None)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    return environments


def test_training_on_cpus_changes_the_allocation_of_its_process(monkeypatch, prepared):
    monkeypatch.setattr(sys, "argv", ["vit-jax", "pretrain", "digits"])
    cli.main()

    assert prepared == [os.environ]


@pytest.mark.parametrize(
    ("words", "platforms"),
    [
        (["predict", "a"], "cpu"),
        (["pretrain", "digits"], "cuda"),
        (["--version"], "cpu"),
    ],
)
def test_other_commands_keep_the_default_allocation(
    monkeypatch,
    prepared,
    words,
    platforms,
):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    monkeypatch.setattr(sys, "argv", ["vit-jax", *words])
    cli.main()

    assert not prepared


def test_a_caller_of_the_command_keeps_its_allocation(prepared):
    cli.main(["pretrain", "digits"])

    assert not prepared


@pytest.fixture
def staying(monkeypatch):
    """The end of the command raises SystemExit, so pytest stays."""
    monkeypatch.setattr(os, "_exit", sys.exit)


def test_ctrl_c_is_one_line(monkeypatch, staying):
    def interrupt(words):
        raise KeyboardInterrupt

    monkeypatch.setitem(cli.VERBS, "predict", interrupt)

    assert run(["predict", "w.npz", "a.png"]) == (130, "", "vit-jax: stopped\n")


def terminate(words):
    signal.raise_signal(signal.SIGTERM)


def terminate_as_error(words):
    try:
        terminate(words)
    except BaseException as error:
        raise ValueError("cannot be read") from error


@pytest.mark.parametrize("verb", [terminate, terminate_as_error])
def test_sigterm_has_the_code_that_starts_the_command_again(
    monkeypatch,
    staying,
    verb,
):
    """So it has where a library turns it into an error."""
    handler = signal.getsignal(signal.SIGTERM)
    hook = sys.unraisablehook
    message = "vit-jax: stopped by SIGTERM; repeat the command\n"
    monkeypatch.setitem(cli.VERBS, "predict", verb)

    assert run(["predict", "w.npz", "a.png"]) == (exits.PREEMPTED, "", message)
    assert signal.getsignal(signal.SIGTERM) == handler
    assert sys.unraisablehook == hook


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


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 75),
        (signal.SIGINT, 130),
    ],
)
def test_a_signal_is_not_lost_in_a_callback(number, code):
    """Python prints errors that are raised there and forgets them.

    JAX has such a callback of the garbage collector.
    """
    words = [sys.executable, "-c", IN_A_CALLBACK, str(int(number))]
    result = subprocess.run(
        words,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
    )

    assert result.returncode == code, result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith("vit-jax: stopped")


@pytest.mark.parametrize("words", ["show --config=configs/digits.py", "--help"])
def test_an_output_that_nobody_reads(words):
    """`| head -1` closes the output before its end."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    command = [sys.executable, "-m", "vit_jax", *words.split()]
    result = subprocess.run(
        command,
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    os.close(write_end)

    assert result.returncode == 128 + signal.SIGPIPE
    assert result.stderr == ""


NO_IMAGES = (
    "vit-jax: No images are named. Give files, folders or patterns such as 'photos/*.jpg', "
    "or - and names.\n"
)


@pytest.mark.parametrize(
    ("redirection", "words", "code", "err"),
    [
        (">&-", "recipes", 0, "next: vit-jax show --config=NAME\n"),
        ("<&-", "predict weights.npz -", 2, NO_IMAGES),
        ("<&- >&- 2>&-", "recipes nothing", 2, ""),
    ],
)
def test_closed_standard_streams(redirection, words, code, err):
    shell = ["bash", "-c", f'exec "$@" {redirection}', "bash"]
    command = [*shell, sys.executable, "-m", "vit_jax", *words.split()]

    result = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, stdin=subprocess.DEVNULL
    )

    assert result.returncode == code
    assert result.stdout == ""
    assert result.stderr == err


def test_an_error_of_the_file_system_is_one_line(monkeypatch):
    def reject(words):
        raise PermissionError(13, "Permission denied", "/home/me")

    monkeypatch.setitem(cli.VERBS, "predict", reject)
    outcome = run(["predict", "w.npz", "a.png"])

    assert outcome.code == 1
    assert outcome.err.startswith("vit-jax: /home/me: Permission denied. ")

    monkeypatch.setenv("VIT_JAX_TRACEBACK", "1")
    with pytest.raises(PermissionError):
        cli.main(["predict", "w.npz", "a.png"])
