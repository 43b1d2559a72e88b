"""Public names of the package: listed once for type checkers and once for imports on first use."""

import ast
import inspect
import subprocess
import sys

import pytest

from vit_jax import config


def test_both_lists_of_names_agree():
    for_type_checkers = set()
    for node in ast.walk(ast.parse(inspect.getsource(config))):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("vit_jax.config."):
            module = node.module.rpartition(".")[2]
            for_type_checkers |= {(module, alias.name) for alias in node.names}

    on_first_use = {
        (module, name) for module, names in config.PUBLIC_NAMES.items() for name in names
    }

    assert on_first_use == for_type_checkers
    assert all(hasattr(config, name) for _, name in on_first_use)


def test_an_unknown_name_is_no_attribute():
    with pytest.raises(AttributeError, match=r"vit_jax.config.*no_such_name"):
        config.no_such_name  # noqa: B018


def test_an_architecture_loads_neither_parsing_nor_checks():
    report = (
        "import sys, vit_jax.config.architecture\n"
        "print(*sorted(name for name in sys.modules if name.startswith('vit_jax.config.')))"
    )
    result = subprocess.run(
        [sys.executable, "-c", report], capture_output=True, text=True, check=True
    )
    names = ("architecture", "network_options", "rules", "sizes")

    assert result.stdout.split() == [f"vit_jax.config.{name}" for name in names]
