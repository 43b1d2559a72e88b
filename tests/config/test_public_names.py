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
            for_type_checkers.update((module, alias.name) for alias in node.names)

    on_first_use = set()
    for module, names in config.PUBLIC_NAMES.items():
        on_first_use.update((module, name) for name in names)

    assert on_first_use == for_type_checkers
    for _, name in on_first_use:
        assert hasattr(config, name)


PRINT_MODULES = """
import sys, vit_jax.config.architecture
print(*sorted(name for name in sys.modules if name.startswith('vit_jax.config.')))
"""


def test_an_unknown_name_is_no_attribute():
    with pytest.raises(AttributeError, match=r"vit_jax.config.*no_such_name"):
        config.no_such_name  # noqa: B018


def test_an_architecture_loads_neither_parsing_nor_checks():
    command = [sys.executable, "-c", PRINT_MODULES]
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
    )

    assert result.stdout.split() == [
        "vit_jax.config.architecture",
        "vit_jax.config.network_options",
        "vit_jax.config.rules",
        "vit_jax.config.sizes",
    ]
