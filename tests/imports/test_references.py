"""Texts that name custom code: their form, and errors about names of nothing."""

import copy
import dataclasses
import importlib
import pickle
import sys

import pytest

from tests.columns import list_column
from tests.weights.small_networks import VIT
from vit_jax.imports.references import (
    CodeNotAllowed,
    StoredReference,
    is_reference,
    mark_stored,
    parse_allowed_code,
    resolve,
)

SOURCE = """
class Net:
    @staticmethod
    def build():
        return 3

_private = 1
value = 7
"""


@pytest.fixture
def modules(tmp_path, monkeypatch):
    """Writes modules into the working directory, which a run need not have on its path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    before = set(sys.modules)

    def write(**sources):
        for name, source in sources.items():
            path = tmp_path.joinpath(*name.split("__")).with_suffix(".py")
            path.parent.mkdir(exist_ok=True)
            path.write_text(source)
        importlib.invalidate_caches()

    yield write
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("mine", "minelib"):
            del sys.modules[name]


@pytest.mark.parametrize(
    "text",
    [
        None,
        3,
        "",
        "a",
        "a.b",
        ":b",
        "a:",
        "a:b:c",
        "a b:c",
        "a.:b",
        ".a:b",
        "a:b.",
        "2a:b",
        "a-b:c",
        "a:b\n",
        "hf://a",
    ],
)
def test_other_texts(text):
    assert all(map(is_reference, ("a:b", "a.b_2.C:d", "a:B.c", "_a:_b")))
    assert not is_reference(text)

    with pytest.raises(
        ValueError,
        match=r"config\.x=.* is not a reference: write package\.module:name",
    ):
        resolve(text, "config.x")


def test_names_in_modules_of_the_working_directory(modules, monkeypatch):
    modules(mine=SOURCE, minelib__sub="from mine import value")

    assert resolve("mine:Net.build", "config.x")() == 3
    assert resolve("minelib.sub:value", "config.x") == 7

    modules(fractions="Fraction = None")  # hides no installed package
    monkeypatch.delitem(sys.modules, "fractions", raising=False)

    assert resolve("fractions:Fraction", "config.x") is not None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "minelib5:f",
            r"^config\.x='minelib5:f': there is no such module\. .* working directory.* PYTHONPATH",
        ),
        ("mine:valeu", "mine has no 'valeu'; it has Net, value. Did you mean 'value'?"),
        ("optax:lionn", r"optax has no 'lionn'\. Did you mean 'lion'\?$"),
        ("optax:zzzz", r"optax has no 'zzzz'; it has (\w+, ){20}\.\.\.\.$"),
        ("mine.sub:f", "there is no such module"),  # mine is a file
        ("mine:f", "mine has no 'f'; it has Net, value"),
        ("mine:Net.run", "mine has no 'Net.run'; it has Net"),
        ("minelib.empty:f", "minelib.empty has no 'f'; it has nothing"),
        ("minelib.broken:f", "importing it failed with RuntimeError: boom"),
        ("minelib.syntax:f", "importing it failed with SyntaxError"),
        (
            "minelib.needs:f",
            "importing it failed with ModuleNotFoundError: No module named 'no_such_package'",
        ),
        (
            "minelib.prefix:f",
            "importing it failed with ModuleNotFoundError: No module named 'mineli'",
        ),
    ],
)
def test_references_to_nothing_are_rejected(modules, text, message):
    modules(
        mine=SOURCE,
        minelib__empty="",
        minelib__broken="raise RuntimeError('boom')",
        minelib__syntax="def",
        minelib__needs="import no_such_package",
        minelib__prefix="import mineli",  # the beginning of the name that is asked for
    )
    with pytest.raises(ValueError, match=message):
        resolve(text, "config.x")


def stored(text, *allowed):
    return mark_stored({"part": [text]}, "w.npz", allowed)["part"][0]


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("mine:value", ()),
        ("mine:value", ("min", "mine2", "mine.sub", "minelib", "mine:Net")),
        ("minelib.sub:value", ("minelib.su", "mine", "sub")),
        ("mine:sys.exit", ("mine",)),  # what an allowed module imports
        ("mine:exit", ("mine",)),
        ("mine:Net.build.__globals__.clear", ("mine",)),
        ("mine:Net.__class__", ("mine",)),
    ],
)
def test_a_file_names_no_code_that_is_not_allowed(modules, text, allowed):
    modules(mine=f"from sys import exit\nimport sys\n{SOURCE}", minelib__sub="value = 7")
    with pytest.raises(
        CodeNotAllowed,
        match=rf"^part\.0='{text}': w\.npz names code of (\w+), .* --weights.allow_code=\S*\1 ",
    ):
        resolve(stored(text, *allowed), "config.x")

    assert (text.partition(":")[0] in sys.modules) == (allowed == ("mine",))


def test_a_file_names_allowed_code(modules):
    modules(mine=f"from sys import exit\n{SOURCE}", minelib__sub="value = 7")

    assert resolve(stored("mine:Net.build", "other", "mine"), "config.x")() == 3
    assert resolve(stored("minelib.sub:value", "minelib"), "config.x") == 7
    assert resolve(stored("minelib.sub:value", "minelib.sub"), "config.x") == 7
    assert resolve(stored("mine:exit", "mine", "sys"), "config.x") is sys.exit
    assert (
        resolve(stored("mine:exit", "mine:exit"), "config.x") is sys.exit
    )  # the very reference, named by the user


def test_marks_stay():
    """Every text of metadata that can be resolved is marked, in copies too; its value is unchanged."""
    metadata = {
        "a": "x:y",
        "b": {"c": ["x:y", 3, None, "plain", {"d": "x.z:y.w"}]},
        "e": "tfds:cifar10",
    }
    marked = mark_stored(copy.deepcopy(metadata), "w.npz", ("x",))

    assert marked == metadata

    references = [marked["a"], marked["b"]["c"][0], marked["b"]["c"][4]["d"], marked["e"]]

    expected = ["a", "b.c.0", "b.c.4.d", "e"]
    assert list_column(references, "field") == expected
    assert type(marked["b"]["c"][3]) is str

    a = dataclasses.replace(VIT, block=references[0])
    copies = (copy.deepcopy(a), pickle.loads(pickle.dumps(a)), dataclasses.replace(a, depth=3))

    for again in (*(other.block for other in copies), dataclasses.asdict(a)["block"]):
        assert isinstance(again, StoredReference)
        assert again == "x:y"
        assert again.file == "w.npz"
        assert again.field == "a"
        assert again.allowed == ("x",)

    assert StoredReference("x:y").allowed == ()


def test_packages():
    assert parse_allowed_code("") == parse_allowed_code(()) == ()
    assert parse_allowed_code("a,b.c") == parse_allowed_code(["a", "b.c"]) == ("a", "b.c")

    for wrong in ("a-b", "a b", ".", "a.", "*", "a:", ["a", 3]):
        with pytest.raises(ValueError, match=r"^allow_code=.*: must be the name of a package\."):
            parse_allowed_code(wrong)


def test_packages_of_the_environment_are_allowed_too(monkeypatch):
    monkeypatch.setenv("VIT_JAX_ALLOW_CODE", "b.c,mine")

    assert parse_allowed_code("a,b.c") == ("a", "b.c", "mine")
    assert parse_allowed_code(()) == ("b.c", "mine")

    monkeypatch.setenv("VIT_JAX_ALLOW_CODE", "a b")
    with pytest.raises(ValueError, match=r"^VIT_JAX_ALLOW_CODE='a b': must be the name of a pack"):
        parse_allowed_code("a")


def test_the_working_directory_is_not_searched_for_an_installed_package(modules):
    """Nor for what that package lacks, later in this process."""
    modules(minelib="value = 3")
    resolve("fractions:Fraction", "config.x")

    assert "minelib" not in sys.modules

    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("minelib")

    assert resolve("minelib:value", "config.x") == 3
