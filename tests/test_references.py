"""Texts that name a user's own code: which are such, and what is said of those that name nothing."""

import importlib
import sys

import pytest

from vit_jax.references import is_reference, resolve

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
    [None, 3, "", "a", "a.b", ":b", "a:", "a:b:c", "a b:c", "a.:b", ".a:b", "a:b.", "2a:b", "a-b:c", "a:b\n", "hf://a"],
)
def test_other_texts(text):
    assert all(map(is_reference, ("a:b", "a.b_2.C:d", "a:B.c", "_a:_b")))
    assert not is_reference(text)
    with pytest.raises(ValueError, match=r"config\.x=.* is not a reference: write package\.module:name"):
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
            r"^config\.x='minelib5:f': there is no such module\. Modules are looked for .* working directory",
        ),
        ("mine.sub:f", "there is no such module"),  # mine is a file
        ("mine:f", "mine has no 'f'; it has Net, value"),
        ("mine:Net.run", "mine has no 'Net.run'; it has Net"),
        ("minelib.empty:f", "minelib.empty has no 'f'; it has nothing"),
        ("minelib.broken:f", "importing it failed with RuntimeError: boom"),
        ("minelib.syntax:f", "importing it failed with SyntaxError"),
        ("minelib.needs:f", "importing it failed with ModuleNotFoundError: No module named 'no_such_package'"),
        ("minelib.prefix:f", "importing it failed with ModuleNotFoundError: No module named 'mineli'"),
    ],
)
def test_what_names_nothing_is_refused(modules, text, message):
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
