"""The shape of the code base: who may import whom, and what must not be there.

Every check is a function from sources (path in the repository → text) to complaints, so that each is also shown to
complain: a check that cannot fail proves nothing.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parent.parent
Sources = Mapping[str, str]

RANKS = (
    ("references", "files"),
    ("config", "activations", "arrays", "positions", "pytree", "hosts"),
    ("models", "data", "objectives", "optim", "sharding", "checkpoint", "cost"),
    ("evals", "weights"),
    ("train", "api"),
    ("plan", "analysis", "bench", "inference"),
    ("cli",),
)
RANK = {room: rank for rank, rooms in enumerate(RANKS) for room in rooms}
APART = (("vit_jax.train.pretrain", "vit_jax.train.finetune"),)  # read side by side with diff
NOT_IN_CONFIG = {"jax", "jaxlib", "flax", "optax", "orbax", "tensorflow"}  # recipes load on any machine
BUILDERS = ("models", "cost")  # what an Architecture is for
NAMELESS = {"utils", "common", "helpers", "misc", "lib", "base"}


# Reading sources.


def read_sources(*patterns: str) -> dict[str, str]:
    paths = sorted(path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file())
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in paths}


def module_name(path: str) -> str:
    """`vit_jax/models/vit.py` → `vit_jax.models.vit`; a package's `__init__` has the package's name."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(path: str, source: str) -> Iterator[str]:
    """Full dotted names that a file imports, at any depth; of `from a import b`, `a.b`."""
    package = list(PurePosixPath(path).parent.parts)
    for node in ast.walk(ast.parse(source, path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*parts, *([node.module] if node.module else [])])
            yield from (f"{prefix}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant))


def root_of(name: str) -> str:
    return name.partition(".")[0]


# Checks.


def room_of(module: str) -> str:
    return module.removeprefix("vit_jax").lstrip(".").partition(".")[0]


def rank_violations(sources: Sources) -> list[str]:
    """Imports of an equal or higher rank, other than of one's own room, and rooms that the table does not know."""
    found = []
    for path, source in sources.items():
        room = room_of(module_name(path))
        if room == "__main__":
            room = "cli"
        elif room and room not in RANK:
            found.append(f"{path}: room {room!r} is not in the table of ranks")
            continue
        for name in imports(path, source):
            target = room_of(name)
            if root_of(name) != "vit_jax" or target in ("", "__version__", room):
                continue
            if target not in RANK:
                found.append(f"{path}: imports {name}, which is in no room of the table")
            elif RANK[target] >= RANK.get(room, 0) and (room, target) != ("", "api"):  # the package imports it on use
                found.append(f"{path}: {room or 'the package'} must not import {name}")
    return found


def apart_violations(sources: Sources) -> list[str]:
    found = []
    for path, source in sources.items():
        names = set(imports(path, source))
        for pair in APART:
            if module_name(path) in pair:
                (other,) = set(pair) - {module_name(path)}
                found += [f"{path}: imports {name}" for name in names if f"{name}.".startswith(f"{other}.")]
    return found


def recipe_violations(sources: Sources) -> list[str]:
    """Recipes import vit_jax.config and the standard library, nothing else."""
    return [
        f"{path}: a recipe must not import {name}"
        for path, source in sources.items()
        for name in imports(path, source)
        if root_of(name) not in sys.stdlib_module_names and not f"{name}.".startswith("vit_jax.config.")
    ]


def foreign_violations(sources: Sources) -> list[str]:
    """`tensorflow` anywhere; anything that computes in `config/`."""
    found = []
    for path, source in sources.items():
        forbidden = NOT_IN_CONFIG if room_of(module_name(path)) == "config" else {"tensorflow"}
        found += [f"{path}: imports {name}" for name in imports(path, source) if root_of(name) in forbidden]
    return found


def nameless(paths: list[str]) -> list[str]:
    """Files and folders whose name, or its last word, says nothing: `utils.py`, `image_utils.py`, `lib/`."""
    return [
        path
        for path in paths
        if any(part.partition(".")[0].split("_")[-1] in NAMELESS for part in PurePosixPath(path).parts)
    ]


def untested_folders(sources: Sources, tests: list[str]) -> list[str]:
    """Folders of the package that hold code and have no test file in the folder of the same name under tests/."""
    tested = {str(PurePosixPath(path).parent) for path in tests if PurePosixPath(path).name.startswith("test_")}
    folders = {str(PurePosixPath(path).parent) for path, source in sources.items() if has_code(source)}
    return sorted(f for f in folders - {"vit_jax"} if f.replace("vit_jax", "tests", 1) not in tested)


def has_code(source: str) -> bool:
    """Whether there is more than a docstring."""
    return any(not isinstance(node, ast.Expr) for node in ast.parse(source).body)


def fields_by_class(source: str) -> dict[str, set[str]]:
    return {
        node.name: {entry.target.id for entry in node.body if is_field(entry)}
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
    }


def is_field(entry: ast.stmt) -> bool:
    return isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)


def attributes_read(source: str) -> set[str]:
    """Names read as `x.name`, `getattr(x, "name")`, or `getattr(x, n)` with n running over literal names."""
    tree, read = ast.parse(source), set()
    literals: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.comprehension) and isinstance(node.target, ast.Name):
            constants = {e.value for e in getattr(node.iter, "elts", []) if isinstance(e, ast.Constant)}
            literals.setdefault(node.target.id, set()).update(constants)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            read.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            name = node.args[1]
            read |= {name.value} if isinstance(name, ast.Constant) else literals.get(ast.unparse(name), set())
    return read


def unread_fields(sources: Sources) -> list[str]:
    """Options that nothing reads: whoever sets one is silently ignored.

    What `Architecture` takes over from `ModelConfig` is copied and checked in config/, which uses nothing: models/ or
    cost/ must read it. Fields are told apart by name only: one `every` that is read hides another that is not.
    """
    schema = "vit_jax/config/schema.py"
    read = {path: attributes_read(source) for path, source in sources.items() if path != schema}
    by_anyone = set().union(*read.values())
    by_builders = set().union(*(names for path, names in read.items() if room_of(module_name(path)) in BUILDERS))
    taken_over = fields_by_class(sources["vit_jax/config/architecture.py"])["Architecture"] - {"name"}
    return [
        f"{owner}.{field}"
        for owner, fields in fields_by_class(sources[schema]).items()
        for field in sorted(fields)
        if field not in (by_builders if owner == "ModelConfig" and field in taken_over else by_anyone)
    ]


# The code base passes.


@pytest.fixture(scope="module")
def package() -> dict[str, str]:
    return read_sources("vit_jax/**/*.py")


def test_imports_follow_the_ranks(package):
    assert rank_violations(package) == []


def test_the_two_loops_do_not_import_each_other(package):
    assert apart_violations(package) == []


def test_recipes_import_only_config():
    assert recipe_violations(read_sources("configs/**/*.py")) == []


def test_no_tensorflow_and_no_jax_in_config(package):
    assert foreign_violations(package) == []


def test_every_file_has_a_name():
    assert nameless(list(read_sources("vit_jax/**/*.*", "configs/**/*.*", "launch/**/*.*", "tests/**/*.py"))) == []


def test_every_folder_is_tested(package):
    assert untested_folders(package, list(read_sources("tests/**/*.py"))) == []


def test_every_option_is_read(package):
    assert unread_fields(package) == []


@pytest.mark.parametrize(
    ("statement", "forbidden"),
    [
        ("import vit_jax, vit_jax.weights", ("jax", "tensorflow", "numpy", "vit_jax.config")),
        (
            "import importlib, pkgutil, vit_jax.config as c\n"
            "for m in pkgutil.iter_modules(c.__path__): importlib.import_module(f'{c.__name__}.{m.name}')",
            ("jax", "flax", "tensorflow", "vit_jax.arrays"),
        ),
    ],
    ids=["package", "config"],
)
def test_importing_loads_nothing_heavy(statement, forbidden):
    report = f"import sys\n{statement}\nprint(*(m for m in {forbidden!r} if m in sys.modules))"
    result = subprocess.run([sys.executable, "-c", report], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


# Each check complains where it should.


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("vit_jax/models/vit.py", "import vit_jax.data.mixup"),  # a sibling
        ("vit_jax/config/load.py", "from vit_jax import pytree"),  # a sibling of rank 0
        ("vit_jax/evals/fewshot.py", "from vit_jax.train import state"),  # a higher rank
        ("vit_jax/plan/memory.py", "from vit_jax.bench import step"),
        ("vit_jax/arrays.py", "def f():\n    from vit_jax.models.vit import ViT"),  # inside a function
        ("vit_jax/data/pipeline.py", "from ..models import vit"),  # relative
        ("vit_jax/data/pipeline.py", "import importlib\nimportlib.import_module('vit_jax.models')"),
        ("vit_jax/__init__.py", "from vit_jax.config import schema"),
        ("vit_jax/tools/x.py", ""),  # a room nobody agreed on
        ("vit_jax/train/state.py", "import vit_jax.tools"),
    ],
)
def test_rank_violations_are_found(path, source):
    assert len(rank_violations({path: source})) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("vit_jax/models/vit.py", "import jax\nfrom vit_jax.models import embed\nfrom vit_jax.arrays import Batch"),
        ("vit_jax/models/vit.py", "from . import embed\nfrom .. import arrays\nfrom vit_jax import __version__"),
        ("vit_jax/plan/aot.py", "from vit_jax.train import assemble"),
        ("vit_jax/cli.py", "from vit_jax.bench import step"),
        ("vit_jax/__main__.py", "from vit_jax.cli import main"),
        ("vit_jax/__init__.py", "def f():\n    from vit_jax import api"),
    ],
)
def test_allowed_imports_pass(path, source):
    assert rank_violations({path: source}) == []


@pytest.mark.parametrize(
    "source", ["from vit_jax.train import finetune", "from vit_jax.train.finetune import run", "from . import finetune"]
)
def test_one_loop_importing_the_other_is_found(source):
    assert len(apart_violations({"vit_jax/train/pretrain.py": source})) == 1
    assert apart_violations({"vit_jax/cli.py": source}) == []


def test_recipes_that_reach_further_are_found():
    allowed = "import dataclasses\nfrom vit_jax.config import schema\nfrom vit_jax.config.schema import ModelConfig\n"
    assert recipe_violations({"configs/x.py": allowed}) == []
    for name in ("jax", "ml_collections", "vit_jax.models", "vit_jax.configuration"):
        assert len(recipe_violations({"configs/x.py": f"{allowed}import {name}"})) == 1


def test_foreign_imports_are_found():
    assert len(foreign_violations({"vit_jax/data/sources.py": "import tensorflow as tf"})) == 1
    assert len(foreign_violations({"vit_jax/config/load.py": "def f():\n    import jax.numpy as jnp"})) == 1
    assert foreign_violations({"vit_jax/data/sources.py": "import jax\nimport tensorflow_datasets as tfds"}) == []


def test_names_that_say_nothing_are_found():
    paths = ["vit_jax/utils.py", "vit_jax/common/x.py", "tests/test_helpers.py", "vit_jax/data/image_utils.py"]
    assert nameless([*paths, "vit_jax/models/vit.py", "configs/pretrain_s16_baseline.py"]) == paths


def test_untested_folders_are_found():
    sources = {
        "vit_jax/__init__.py": "x = 1",
        "vit_jax/plan/__init__.py": '"""Doc."""',
        "vit_jax/cost/flops.py": "x = 1",
    }
    assert untested_folders(sources, ["tests/cost/conftest.py"]) == ["vit_jax/cost"]
    assert untested_folders(sources, ["tests/cost/test_flops.py"]) == []


def test_unread_options_are_found():
    fields = (
        "class ModelConfig:\n    width: int\n    gelu: str = 'tanh'\nclass RunConfig:\n    seed: int\n    total: str\n"
    )
    architecture = "class Architecture:\n    name: str\n    width: int\n    gelu: str\n"
    sources = {
        "vit_jax/config/schema.py": f"{fields}def f(c):\n    return c.total",  # the schema itself does not count
        "vit_jax/config/architecture.py": f"{architecture}def check(a):\n    return a.gelu",  # nor does checking a copy
        "vit_jax/models/vit.py": "def build(a):\n    return [getattr(a, n) for n in ('width',)]",
        "vit_jax/train/pretrain.py": "def run(c):\n    c.total = 3\n    return c.seed",  # nor does writing
    }
    assert unread_fields(sources) == ["ModelConfig.gelu", "RunConfig.total"]
