"""The shape of the code base: who may import whom, and what must not be there.

Every check is a function from sources (path in the repository → text) to complaints, so that each
is also shown to complain: a check that cannot fail proves nothing.
"""

import ast
import collections
import graphlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parent.parent
Sources = Mapping[str, str]

RANKS = (
    ("text",),
    ("imports",),
    ("storage",),
    ("config", "arrays", "pytree", "hosts"),
    ("kernels",),
    ("models", "data", "objectives", "optim", "sharding", "checkpoint"),
    ("evals", "weights"),
    ("train", "api"),
    ("tools.plan",),
    (
        "tools.figures",
        "tools.machine",
        "tools.prepare",
        "tools.export",
        "tools.inspection",
    ),
    ("tools.sweeps",),
    ("cli",),
)
OF_THE_PACKAGE = {
    ("", "api"),
    ("", "imports"),
}  # public names, imported on use; modules by their earlier names
RANK = {room: rank for rank, rooms in enumerate(RANKS) for room in rooms}
VERBS = {"vit_jax.train.pretrain", "vit_jax.train.finetune"}  # each on the one loop, and apart
LOOP = "vit_jax.train.loop"
NOT_IN_CONFIG = {
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax",
    "tensorflow",
}  # recipes load on any machine
DISPATCH = "vit_jax/kernels/dispatch.py"  # the forms that computations have on devices
CLOSURES = {  # files that an import loads
    "vit_jax.models.vit": 25,
    "vit_jax.train.step": 40,
    "vit_jax.train.loop": 90,
    "vit_jax.api.model": 70,
}
CONFIG_OF_MODELS = {
    "vit_jax.config",
    "vit_jax.config.architecture",
    "vit_jax.config.network_options",
    "vit_jax.config.rules",
    "vit_jax.config.sizes",
}
BUILDERS = ("models", "sharding")  # what an Architecture is for
READS = {"read_text", "read_bytes", "fromfile", "np.load", "json.load", "open"}
READ_WITHOUT_BOUND = {  # files of the system, of this package or of this process
    *(
        "vit_jax/cli/model_table.py",
        "vit_jax/tools/machine/checks.py",
        "vit_jax/hosts/notice.py",
        "vit_jax/train/lifecycle/lock.py",
        "vit_jax/tools/plan/aot.py",
    ),
    *(
        "vit_jax/train/lifecycle/agreement.py",
        "vit_jax/evals/imagenet_classes.py",
        "vit_jax/data/workers.py",
    ),
    *("vit_jax/cli/__init__.py", "vit_jax/imports/backend.py", "vit_jax/imports/extras.py"),
    "vit_jax/weights/formats/npz.py",  # members of an archive
    "vit_jax/evals/feature_cache.py",  # of the cache, after it was checked that they are regular
    "vit_jax/checkpoint/workarounds.py",  # the index of arrays that this process has written
}
READ_THROUGH = {
    "class_tokens": "num_class_tokens"
}  # a field, and the property that replaces its None
DECLARATIONS = ("vit_jax/config/network_options.py", "vit_jax/config/schema.py")
NETWORK_OWNERS = ("ModelConfig", "NetworkOptions", "ComputeOptions")
PRIVATE = (
    "vit_jax/hosts/internals.py",
    "vit_jax/checkpoint/workarounds.py",
)  # with a test of each name
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
            yield from (
                argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)
            )


def root_of(name: str) -> str:
    return name.partition(".")[0]


# Checks.


def room_of(module: str) -> str:
    """Return the folder or module below the package, or below `vit_jax.tools`."""
    names = module.split(".")[1:]
    return ".".join(names[:2] if names[:1] == ["tools"] else names[:1])


def rank_violations(sources: Sources) -> list[str]:
    """Imports of an equal or higher rank, other than of one's own room, and rooms that the table does not know."""
    found = []
    for path, source in sources.items():
        room = room_of(module_name(path))
        if room == "__main__":
            room = "cli"
        elif room and room != "tools" and room not in RANK:
            found.append(f"{path}: room {room!r} is not in the table of ranks")
            continue
        for name in imports(path, source):
            target = room_of(name)
            if root_of(name) != "vit_jax" or target in ("", "__version__", room):
                continue
            if target not in RANK:
                found.append(f"{path}: imports {name}, which is in no room of the table")
            elif RANK[target] >= RANK.get(room, 0) and (room, target) not in OF_THE_PACKAGE:
                found.append(f"{path}: {room or 'the package'} must not import {name}")
    return found


def imports_at_load(path: str, source: str) -> set[str]:
    """Full dotted names that importing the file imports: none in functions or under TYPE_CHECKING."""
    statements = map(ast.unparse, executed_at_load(ast.parse(source, path)))
    return set(imports(path, "\n".join(statements)))


def executed_at_load(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the imports that run when the module of this node is imported, also in classes and branches."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for statement in child.orelse:
                yield from executed_at_load(ast.Module([statement], []))
            continue
        is_import = isinstance(child, ast.Import | ast.ImportFrom) or (
            isinstance(child, ast.Call) and ast.unparse(child.func).endswith("import_module")
        )
        if is_import:
            yield child
        yield from executed_at_load(child)


def tools_at_load(sources: Sources) -> list[str]:
    """Modules of the core that load tools when they are imported: a verb imports a tool inside its function."""
    found = []
    for path, source in sources.items():
        if path.startswith("vit_jax/tools/"):
            continue
        for name in sorted(imports_at_load(path, source)):
            if f"{name}.".startswith("vit_jax.tools."):
                found.append(f"{path}: imports {name} outside a function")
    return found


def loop_violations(sources: Sources) -> list[str]:
    """Verbs that import each other or do not train by the loop, and a loop over training steps beside the loop.

    Wherever a statement inside a `for` or `while` calls the train step, it is such a loop.
    """
    found = []
    for path, source in sources.items():
        module = module_name(path)
        names = set(imports(path, source))
        if module in VERBS:
            others = [
                name
                for name in names
                for verb in VERBS - {module}
                if f"{name}.".startswith(f"{verb}.")
            ]
            found += [f"{path}: imports {name}" for name in others]
            found += (
                []
                if any(f"{name}.".startswith(f"{LOOP}.") for name in names)
                else [f"{path}: imports no loop"]
            )
        if module.startswith("vit_jax.train.") and module != LOOP and has_step_loop(source):
            found.append(f"{path}: a loop over training steps")
    return found


def has_step_loop(source: str) -> bool:
    loops = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.For | ast.While)]
    calls = [node for loop in loops for node in ast.walk(loop) if isinstance(node, ast.Call)]
    return any(ast.unparse(call.func).rpartition(".")[2] == "train_step" for call in calls)


def import_cycles(sources: Sources) -> list[str]:
    """The first circle of imports among these files, also through imports inside functions."""
    modules = {module_name(path) for path in sources}
    graph = {}
    for path, source in sources.items():
        names = [(name, name.rpartition(".")[0]) for name in imports(path, source)]
        found = {next((name for name in pair if name in modules), None) for pair in names}
        graph[module_name(path)] = found - {None, module_name(path)}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [" -> ".join(error.args[1])]
    return []


def recipe_violations(sources: Sources) -> list[str]:
    """Recipes import vit_jax.config and the standard library, nothing else."""
    return [
        f"{path}: a recipe must not import {name}"
        for path, source in sources.items()
        for name in imports(path, source)
        if root_of(name) not in sys.stdlib_module_names
        and not f"{name}.".startswith("vit_jax.config.")
    ]


def foreign_violations(sources: Sources) -> list[str]:
    """`tensorflow` anywhere; anything that computes in `config/`."""
    found = []
    for path, source in sources.items():
        forbidden = NOT_IN_CONFIG if room_of(module_name(path)) == "config" else {"tensorflow"}
        found += [
            f"{path}: imports {name}"
            for name in imports(path, source)
            if root_of(name) in forbidden
        ]
    return found


def platform_violations(sources: Sources) -> list[str]:
    """Uses of `devices.platform` outside of the dispatch of kernels."""
    others = {path: source for path, source in sources.items() if path != DISPATCH}
    found = []
    for path, source in others.items():
        if "vit_jax.kernels.devices.platform" in set(imports(path, source)):
            found.append(f"{path}: imports platform; let {DISPATCH} choose the form")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "devices.platform":
                found.append(f"{path}: asks for the platform; let {DISPATCH} choose the form")
    return found


def closure_violations(sources: Sources) -> list[str]:
    """Modules whose imports at module level load more files than `CLOSURES` allows, or forbidden ones."""
    found = []
    for module, limit in CLOSURES.items():
        loaded = import_closure(module, sources)
        if len(loaded) > limit:
            found.append(f"{module}: loads {len(loaded)} files, at most {limit} are allowed")
    for module in sorted(import_closure("vit_jax.models.vit", sources) - CONFIG_OF_MODELS):
        if room_of(module) == "config":
            found.append(f"vit_jax.models.vit: loads {module}, of config/ beyond the architecture")
    return found


def import_closure(module: str, sources: Sources) -> set[str]:
    """Return the modules that importing a module loads, itself and packages included."""
    sources_of_modules = {module_name(path): (path, source) for path, source in sources.items()}
    loaded = set[str]()
    pending = [module]
    while pending:
        name = pending.pop()
        if name not in sources_of_modules or name in loaded:
            continue
        loaded.add(name)
        path, source = sources_of_modules[name]
        pending.append(name.rpartition(".")[0])
        for imported in imports_at_module_level(path, source):
            pending += [imported, imported.rpartition(".")[0]]
    return loaded


def imports_at_module_level(path: str, source: str) -> Iterator[str]:
    """Imports outside of functions and of `if TYPE_CHECKING`."""
    statements = []
    for node in ast.parse(source, path).body:
        is_for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if not is_for_types and not isinstance(node, ast.FunctionDef | ast.ClassDef):
            statements.append(ast.unparse(node))
    return imports(path, "\n".join(statements))


def second_spelling_helpers(sources: Sources) -> list[str]:
    """Modules beside vit_jax/text/nearest.py that compare spellings."""
    others = {path: source for path, source in sources.items() if path != "vit_jax/text/nearest.py"}
    return [
        f"{path}: imports difflib"
        for path, source in others.items()
        if "difflib" in set(imports(path, source))
    ]


def unbounded_reads(sources: Sources) -> list[str]:
    """Reads that do not go through vit_jax/storage/files.py: of a device they have no end, and for a pipe they wait."""
    found = []
    for path, source in sources.items():
        calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
        for call in calls if path not in {*READ_WITHOUT_BOUND, "vit_jax/storage/files.py"} else ():
            name = ast.unparse(call.func)
            mode = next((one.value for one in call.args[-1:] if isinstance(one, ast.Constant)), "r")
            is_writing = (
                name.endswith("open") and isinstance(mode, str) and not set(mode).isdisjoint("wax")
            )
            if not READS.isdisjoint({name, name.rpartition(".")[2]}) and not is_writing:
                found.append(
                    f"{path}: {ast.unparse(call)} reads without a bound; vit_jax/storage/files.py has functions"
                )
    return found


def shared_names(paths: list[str]) -> list[str]:
    """Modules of the package whose basename another module has."""
    modules = [path for path in paths if path.startswith("vit_jax/") and path.endswith(".py")]
    names = collections.Counter(PurePosixPath(path).name for path in modules)
    return [
        path
        for path in modules
        if names[name := PurePosixPath(path).name] > 1 and name != "__init__.py"
    ]


def private_imports(sources: Sources) -> list[str]:
    """Imports of private modules of other packages outside of `PRIVATE`."""
    names = (
        (path, name)
        for path, source in sources.items()
        if path not in PRIVATE
        for name in imports(path, source)
    )
    return [f"{path}: imports {name}" for path, name in names if "._src" in name]


def small_folders(paths: list[str]) -> list[str]:
    """Folders of the package with fewer than two modules beside `__init__.py`, where one module would do.

    A folder may hold folders alone.
    """
    modules = [
        PurePosixPath(path)
        for path in paths
        if path.startswith("vit_jax/") and path.endswith(".py")
    ]
    sizes = collections.Counter(path.parent for path in modules)
    of_folders = {folder.parent for folder in sizes}
    small = {folder for folder, size in sizes.items() if size < 3}
    empty = {folder for folder, size in sizes.items() if size == 1}
    return sorted(folder.as_posix() for folder in small - (empty & of_folders))


def nameless(paths: list[str]) -> list[str]:
    """Files and folders whose name, or its last word, says nothing: `utils.py`, `image_utils.py`, `lib/`."""
    return [
        path
        for path in paths
        if any(
            part.partition(".")[0].split("_")[-1] in NAMELESS for part in PurePosixPath(path).parts
        )
    ]


def untested_folders(sources: Sources, tests: list[str]) -> list[str]:
    """Folders of the package that hold code and have no test file in the folder of the same name under tests/."""
    tested = {
        str(PurePosixPath(path).parent)
        for path in tests
        if PurePosixPath(path).name.startswith("test_")
    }
    folders = {
        str(PurePosixPath(path).parent) for path, source in sources.items() if has_code(source)
    }
    return sorted(
        f for f in folders - {"vit_jax"} if f.replace("vit_jax", "tests", 1) not in tested
    )


def has_code(source: str) -> bool:
    """Return True if there is more than a docstring."""
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
    tree = ast.parse(source)
    read = set()
    literals: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.comprehension) and isinstance(node.target, ast.Name):
            constants = {
                e.value for e in getattr(node.iter, "elts", []) if isinstance(e, ast.Constant)
            }
            literals.setdefault(node.target.id, set()).update(constants)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            read.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            name = node.args[1]
            read |= (
                {name.value}
                if isinstance(name, ast.Constant)
                else literals.get(ast.unparse(name), set())
            )
    return read


def unread_fields(sources: Sources) -> list[str]:
    """Options that nothing reads: whoever sets one is silently ignored.

    What `Architecture` takes over from `ModelConfig` is copied and checked in config/, which uses
    nothing: models/ or sharding/ must read it. Fields are told apart by name only: one `every` that
    is read hides another that is not.
    """
    declared: dict[str, set[str]] = {}
    for path in DECLARATIONS:
        declared |= fields_by_class(sources.get(path, ""))
    read = {
        path: attributes_read(source)
        for path, source in sources.items()
        if path not in DECLARATIONS
    }
    by_anyone = set().union(*read.values())
    by_builders = set().union(
        *(names for path, names in read.items() if room_of(module_name(path)) in BUILDERS)
    )
    taken_over = fields_by_class(sources["vit_jax/config/architecture.py"])["Architecture"] - {
        "name"
    }
    return [
        f"{owner}.{field}"
        for owner, fields in declared.items()
        for field in sorted(READ_THROUGH.get(name, name) for name in fields)
        if field
        not in (by_builders if owner in NETWORK_OWNERS and field in taken_over else by_anyone)
    ]


# The code base passes.

PACKAGE = read_sources("vit_jax/**/*.py")
COMPLAINTS = {
    "ranks": lambda: rank_violations(PACKAGE),
    "tools": lambda: tools_at_load(PACKAGE),
    "one loop": lambda: loop_violations(PACKAGE),
    "circles": lambda: import_cycles(PACKAGE),
    "recipes": lambda: recipe_violations(read_sources("configs/**/*.py")),
    "reads": lambda: unbounded_reads(PACKAGE),
    "spelling": lambda: second_spelling_helpers(PACKAGE),
    "foreign": lambda: foreign_violations(PACKAGE),
    "platform": lambda: platform_violations(PACKAGE),
    "closures": lambda: closure_violations(PACKAGE),
    "shared names": lambda: shared_names(PACKAGE),
    "small folders": lambda: small_folders(PACKAGE),
    "private": lambda: private_imports(PACKAGE),
    "names": lambda: nameless(
        [*PACKAGE, *read_sources("configs/**/*.*", "launch/**/*.*", "tests/**/*.py")]
    ),
    "tested": lambda: untested_folders(PACKAGE, list(read_sources("tests/**/*.py"))),
    "options": lambda: unread_fields(PACKAGE),
}


@pytest.mark.parametrize("complaints", COMPLAINTS.values(), ids=COMPLAINTS)
def test_the_code_base_has_none(complaints):
    assert complaints() == []


def test_the_loop_is_seen():
    assert has_step_loop(PACKAGE["vit_jax/train/loop.py"])


@pytest.mark.parametrize(
    ("statement", "forbidden"),
    [
        ("import vit_jax, vit_jax.weights", ("jax", "tensorflow", "numpy", "vit_jax.config")),
        (
            "import importlib, pkgutil, vit_jax.config as c\n"
            "for m in pkgutil.iter_modules(c.__path__): importlib.import_module(f'{c.__name__}.{m.name}')",
            ("jax", "flax", "tensorflow", "vit_jax.arrays"),
        ),
        (
            "from vit_jax.config import load_recipe, resolve\n"
            "resolve(load_recipe('digits', ['--config.seed=1']), num_examples=1437, num_devices=1)",
            ("jax", "jaxlib", "flax", "optax", "tensorflow"),
        ),
    ],
    ids=["package", "config", "resolved_recipe"],
)
def test_importing_loads_nothing_heavy(statement, forbidden):
    report = f"import sys\n{statement}\nprint(*(m for m in {forbidden!r} if m in sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", report], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert result.stdout.split() == []


# Each check complains where it should.

LOOP_IMPORT = "from vit_jax.train.loop import train"
FIELDS = "class ModelConfig:\n    width: int\n    gelu: str = 'tanh'\nclass RunConfig:\n    seed: int\n    total: str\n"
RECIPE = "import dataclasses\nfrom vit_jax.config import schema\nfrom vit_jax.config.schema import ModelConfig\n"
CASES = [  # a check, sources, and how many complaints
    (rank_violations, {"vit_jax/models/vit.py": "import vit_jax.data.mixing"}, 1),  # a sibling
    (
        rank_violations,
        {"vit_jax/config/parsing.py": "from vit_jax import pytree"},
        1,
    ),  # a sibling of rank 0
    (
        rank_violations,
        {"vit_jax/evals/fewshot.py": "from vit_jax.train import state"},
        1,
    ),  # a higher rank
    (
        rank_violations,
        {"vit_jax/tools/plan/memory.py": "from vit_jax.tools.machine import step"},
        1,
    ),
    (
        rank_violations,
        {"vit_jax/arrays.py": "def f():\n    from vit_jax.models.vit import ViT"},
        1,
    ),  # in a function
    (rank_violations, {"vit_jax/data/pipeline.py": "from ..models import vit"}, 1),  # relative
    (
        rank_violations,
        {"vit_jax/data/x.py": "import importlib\nimportlib.import_module('vit_jax.models')"},
        1,
    ),
    (rank_violations, {"vit_jax/__init__.py": "from vit_jax.config import schema"}, 1),
    (rank_violations, {"vit_jax/tools/x.py": ""}, 1),  # a room that the table does not have
    (rank_violations, {"vit_jax/train/state.py": "import vit_jax.tools"}, 1),
    (
        rank_violations,
        {"vit_jax/models/vit.py": "from vit_jax.models import embed\nfrom .. import arrays"},
        0,
    ),
    (
        rank_violations,
        {"vit_jax/models/vit.py": "from . import embed\nfrom vit_jax import __version__"},
        0,
    ),
    (rank_violations, {"vit_jax/tools/plan/aot.py": "from vit_jax.train import assemble"}, 0),
    (rank_violations, {"vit_jax/cli.py": "from vit_jax.tools.machine import step"}, 0),
    (rank_violations, {"vit_jax/__main__.py": "from vit_jax.cli import main"}, 0),
    (rank_violations, {"vit_jax/__init__.py": "def f():\n    from vit_jax import api"}, 0),
    (tools_at_load, {"vit_jax/cli/x.py": "from vit_jax.tools.plan import memory"}, 1),
    (tools_at_load, {"vit_jax/cli/x.py": "import vit_jax.tools.plan.memory as m"}, 1),
    (tools_at_load, {"vit_jax/cli/x.py": "from vit_jax import config, tools"}, 1),
    (tools_at_load, {"vit_jax/cli/x.py": "from ..tools import status"}, 1),
    (tools_at_load, {"vit_jax/cli/x.py": "class V:\n    from vit_jax.tools import status"}, 1),
    (tools_at_load, {"vit_jax/api/x.py": "try:\n    import vit_jax.tools\nfinally:\n    pass"}, 1),
    (tools_at_load, {"vit_jax/cli/x.py": "m = import_module('vit_jax.tools.status')"}, 1),
    (
        tools_at_load,
        {"vit_jax/cli/x.py": "if TYPE_CHECKING:\n    pass\nelse:\n    import vit_jax.tools.status"},
        1,
    ),
    (tools_at_load, {"vit_jax/train/loop.py": "from vit_jax.tools.status import read_all"}, 1),
    (
        tools_at_load,
        {
            "vit_jax/cli/x.py": "class V:\n    def run(self):\n        from vit_jax.tools import status",
            "vit_jax/cli/y.py": "if TYPE_CHECKING:\n    from vit_jax.tools.status import Run",
            "vit_jax/tools/plan/x.py": "import vit_jax.tools.status",
        },
        0,
    ),
    (
        loop_violations,
        {"vit_jax/train/pretrain.py": f"{LOOP_IMPORT}\nfrom vit_jax.train import finetune"},
        1,
    ),
    (
        loop_violations,
        {
            "vit_jax/train/pretrain.py": "from .loop import train\nfrom vit_jax.train.finetune import run"
        },
        1,
    ),
    (loop_violations, {"vit_jax/train/finetune.py": "import jax"}, 1),
    (
        loop_violations,
        {
            "vit_jax/train/rate_search.py": "for step in steps:\n    state = run.train_step(state, batch)"
        },
        1,
    ),
    (
        loop_violations,
        {"vit_jax/train/start.py": "def f():\n    while True:\n        train_step(state, batch)"},
        1,
    ),
    (
        loop_violations,
        {"vit_jax/train/pretrain.py": f"{LOOP_IMPORT}\nfor rate in rates:\n    train(rate)"},
        0,
    ),
    (loop_violations, {"vit_jax/train/loop.py": "for step in range(3):\n    train_step(state)"}, 0),
    (
        import_cycles,
        {
            "vit_jax/data/sources.py": "def f():\n    from vit_jax.data import folder",
            "vit_jax/data/folder.py": "from vit_jax.data.records import few",
            "vit_jax/data/records.py": "from .sources import Source",
        },
        1,
    ),
    (
        import_cycles,
        {
            "vit_jax/data/x.py": "from . import y",
            "vit_jax/data/y.py": "import vit_jax.data.missing",
        },
        0,
    ),
    (
        platform_violations,
        {"vit_jax/models/x.py": "from vit_jax.kernels.devices import trace_for, platform"},
        1,
    ),
    (
        platform_violations,
        {
            "vit_jax/models/x.py": "from vit_jax.kernels import devices\nif devices.platform() == 1: pass"
        },
        1,
    ),
    (platform_violations, {DISPATCH: "from vit_jax.kernels.devices import platform"}, 0),
    (
        closure_violations,
        {
            "vit_jax/models/vit.py": "from vit_jax.config import schema\nfrom vit_jax.models import x",
            "vit_jax/models/x.py": "def f():\n    from vit_jax.config import check",
            "vit_jax/config/schema.py": "",
            "vit_jax/config/check.py": "",
        },
        1,
    ),
    (
        closure_violations,
        {
            "vit_jax/models/vit.py": "\n".join(f"import vit_jax.models.x{n}" for n in range(25)),
            **{f"vit_jax/models/x{n}.py": "" for n in range(25)},
        },
        1,
    ),
    (recipe_violations, {"configs/x.py": RECIPE}, 0),
    (
        recipe_violations,
        {
            "configs/x.py": f"{RECIPE}import jax, ml_collections, vit_jax.models, vit_jax.configuration"
        },
        4,
    ),
    (foreign_violations, {"vit_jax/data/sources.py": "import tensorflow as tf"}, 1),
    (foreign_violations, {"vit_jax/config/parsing.py": "def f():\n    import jax.numpy as jnp"}, 1),
    (
        foreign_violations,
        {"vit_jax/data/sources.py": "import jax\nimport tensorflow_datasets as tfds"},
        0,
    ),
    (
        unbounded_reads,
        {
            "vit_jax/data/x.py": "open(p)\np.open('rb')\np.read_text()\nnp.load(p)\njson.load(f)",
            "vit_jax/data/y.py": "read_bounded(p, 9)\nopen(p, 'wb')\np.open('a')\np.write_text('')",
            "vit_jax/storage/files.py": "open(p)",
        },
        5,
    ),
    (
        second_spelling_helpers,
        {
            "vit_jax/data/x.py": "def f():\n    import difflib",
            "vit_jax/text/nearest.py": "import difflib",
        },
        1,
    ),
    (
        nameless,
        [
            "vit_jax/utils.py",
            "vit_jax/common/x.py",
            "tests/test_helpers.py",
            "vit_jax/data/image_utils.py",
        ],
        4,
    ),
    (nameless, ["vit_jax/models/vit.py", "configs/pretrain_s16_baseline.py"], 0),
    (
        shared_names,
        ["vit_jax/a/x.py", "vit_jax/b/x.py", "vit_jax/a/__init__.py", "vit_jax/b/__init__.py"],
        2,
    ),
    (shared_names, ["vit_jax/a/x.py", "vit_jax/b/y.py", "tests/x.py", "docs/y.py"], 0),
    (
        private_imports,
        {"a.py": "from jax._src import core", PRIVATE[0]: "from jax._src import core"},
        1,
    ),
    (
        small_folders,
        [
            "vit_jax/a/x.py",
            "vit_jax/a/__init__.py",
            "vit_jax/b/x.py",
            "vit_jax/b/y.py",
            "vit_jax/b/z.py",
            "vit_jax/c/__init__.py",
            *(f"vit_jax/c/d/{name}.py" for name in "xyz"),
        ],
        1,
    ),
    (
        lambda sources: untested_folders(sources, ["tests/tools/plan/conftest.py"]),
        {
            "vit_jax/__init__.py": "x = 1",
            "vit_jax/tools/plan/__init__.py": '"""Doc."""',
            "vit_jax/tools/plan/chips.py": "x = 1",
        },
        1,
    ),
    (
        lambda sources: untested_folders(sources, ["tests/tools/plan/test_chips.py"]),
        {"vit_jax/tools/plan/chips.py": "x = 1"},
        0,
    ),
    (
        unread_fields,
        {
            # The schema itself does not count
            "vit_jax/config/schema.py": f"{FIELDS}def f(c):\n    return c.total",
            "vit_jax/config/architecture.py": "class Architecture:\n    name: str\n    width: int\n    gelu: str\n"
            "def check(a):\n    return a.gelu",  # nor does checking a copy
            "vit_jax/models/vit.py": "def build(a):\n    return [getattr(a, n) for n in ('width',)]",
            # Nor does writing
            "vit_jax/train/pretrain.py": "def run(c):\n    c.total = 3\n    return c.seed",
        },
        2,
    ),
]


@pytest.mark.parametrize(("check", "sources", "number"), CASES)
def test_a_check_complains_where_it_should(check, sources, number):
    assert len(check(sources)) == number
