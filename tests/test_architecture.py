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
RANK = {}
for rank, rooms in enumerate(RANKS):
    RANK |= dict.fromkeys(rooms, rank)
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
    "vit_jax/imports/huge_pages.py",  # a setting of the system
    "vit_jax/weights/formats/npz.py",  # members of an archive
    "vit_jax/data/kinds/array_files.py",  # the same
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
    sources = {}
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            if path.is_file() and path.suffix != ".pyc":
                sources[path.relative_to(ROOT).as_posix()] = path.read_text()
    return sources


def module_name(path: str) -> str:
    """`vit_jax/models/vit.py` → `vit_jax.models.vit`; a package's `__init__` has the package's name."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(path: str, source: str) -> Iterator[str]:
    """Full dotted names that a file imports, at any depth; of `from a import b`, `a.b`."""
    for node in ast.walk(ast.parse(source, path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            prefix = _resolve_prefix(path, node)
            for alias in node.names:
                yield f"{prefix}.{alias.name}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            for argument in node.args[:1]:
                if isinstance(argument, ast.Constant):
                    yield argument.value


def _resolve_prefix(path: str, node: ast.ImportFrom) -> str:
    """Return the full name of the module that a file imports from."""
    parts = []
    if node.level:
        package = PurePosixPath(path).parent.parts
        parts += package[: len(package) - node.level + 1]
    if node.module:
        parts.append(node.module)
    return ".".join(parts)


def iterate_imports(sources: Sources) -> Iterator[tuple[str, str]]:
    """Yield path and full dotted name of all imports of these files."""
    for path, source in sources.items():
        for name in imports(path, source):
            yield path, name


def is_below(name: str, module: str) -> bool:
    """Return True for a module and the names inside of it."""
    return f"{name}.".startswith(f"{module}.")


def exclude_path(sources: Sources, excluded: str) -> dict[str, str]:
    return {path: source for path, source in sources.items() if path != excluded}


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
            if is_below(name, "vit_jax.tools"):
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
            for verb in VERBS - {module}:
                found += [f"{path}: imports {name}" for name in names if is_below(name, verb)]
            if not any(is_below(name, LOOP) for name in names):
                found.append(f"{path}: imports no loop")
        if module.startswith("vit_jax.train.") and module != LOOP and has_step_loop(source):
            found.append(f"{path}: a loop over training steps")
    return found


STEPS = ("train_step", "advance")  # of an assembly, and of its live state


def has_step_loop(source: str) -> bool:
    for loop in ast.walk(ast.parse(source)):
        if not isinstance(loop, ast.For | ast.While):
            continue
        for node in ast.walk(loop):
            if isinstance(node, ast.Call) and last_name(node.func) in STEPS:
                return True
    return False


def last_name(node: ast.AST) -> str:
    """Return the name behind the last dot of an expression."""
    return ast.unparse(node).rpartition(".")[2]


def import_cycles(sources: Sources) -> list[str]:
    """The first circle of imports among these files, also through imports inside functions."""
    modules = {module_name(path) for path in sources}
    graph = {module: set() for module in modules}
    for path, name in iterate_imports(sources):
        target = name
        if target not in modules:
            target = name.rpartition(".")[0]
        module = module_name(path)
        if target in modules and target != module:
            graph[module].add(target)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [" -> ".join(error.args[1])]
    return []


def recipe_violations(sources: Sources) -> list[str]:
    """Recipes import vit_jax.config and the standard library, nothing else."""
    found = []
    for path, name in iterate_imports(sources):
        is_standard = root_of(name) in sys.stdlib_module_names
        if not is_standard and not is_below(name, "vit_jax.config"):
            found.append(f"{path}: a recipe must not import {name}")
    return found


def foreign_violations(sources: Sources) -> list[str]:
    """`tensorflow` anywhere; anything that computes in `config/`."""
    found = []
    for path, name in iterate_imports(sources):
        forbidden = {"tensorflow"}
        if room_of(module_name(path)) == "config":
            forbidden = NOT_IN_CONFIG
        if root_of(name) in forbidden:
            found.append(f"{path}: imports {name}")
    return found


def platform_violations(sources: Sources) -> list[str]:
    """Uses of `devices.platform` outside of the dispatch of kernels."""
    found = []
    for path, source in exclude_path(sources, DISPATCH).items():
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
    paths = {module_name(path): path for path in sources}
    loaded = set[str]()
    pending = [module]
    while pending:
        name = pending.pop()
        if name not in paths or name in loaded:
            continue
        loaded.add(name)
        path = paths[name]
        pending.append(name.rpartition(".")[0])
        for imported in imports_at_module_level(path, sources[path]):
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
    others = exclude_path(sources, "vit_jax/text/nearest.py")
    return [
        f"{path}: imports difflib" for path, name in iterate_imports(others) if name == "difflib"
    ]


def unbounded_reads(sources: Sources) -> list[str]:
    """Reads that do not go through vit_jax/storage/files.py: of a device they have no end, and for a pipe they wait."""
    found = []
    for path, source in exclude_path(sources, "vit_jax/storage/files.py").items():
        if path in READ_WITHOUT_BOUND:
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and is_read(node):
                found.append(
                    f"{path}: {ast.unparse(node)} reads without a bound; "
                    "vit_jax/storage/files.py has functions"
                )
    return found


def is_read(call: ast.Call) -> bool:
    """Return True for a call that may read a file."""
    name = ast.unparse(call.func)
    if READS.isdisjoint({name, last_name(call.func)}):
        return False
    if not name.endswith("open") or not call.args:
        return True
    *_, last = call.args
    mode = last.value if isinstance(last, ast.Constant) else "r"
    return not isinstance(mode, str) or set(mode).isdisjoint("wax")


def shared_names(paths: list[str]) -> list[str]:
    """Modules of the package whose basename another module has."""
    by_name = collections.defaultdict(list)
    for path in paths:
        if path.startswith("vit_jax/") and path.endswith(".py"):
            by_name[PurePosixPath(path).name].append(path)
    by_name.pop("__init__.py", None)

    found = []
    for modules in by_name.values():
        if len(modules) > 1:
            found += modules
    return found


def private_imports(sources: Sources) -> list[str]:
    """Imports of private modules of other packages outside of `PRIVATE`."""
    found = []
    for path, name in iterate_imports(sources):
        if "._src" in name and path not in PRIVATE:
            found.append(f"{path}: imports {name}")
    return found


def small_folders(paths: list[str]) -> list[str]:
    """Folders of the package with fewer than two modules beside `__init__.py`, where one module would do.

    A folder may hold folders alone.
    """
    sizes = collections.Counter()
    for path in paths:
        if path.startswith("vit_jax/") and path.endswith(".py"):
            sizes[PurePosixPath(path).parent] += 1

    of_folders = {folder.parent for folder in sizes}
    small = []
    for folder, size in sizes.items():
        has_folders_alone = size == 1 and folder in of_folders
        if size < 3 and not has_folders_alone:
            small.append(folder.as_posix())
    return sorted(small)


def nameless(paths: list[str]) -> list[str]:
    """Files and folders whose name, or its last word, says nothing: `utils.py`, `image_utils.py`, `lib/`."""
    found = []
    for path in paths:
        for part in PurePosixPath(path).parts:
            stem = part.partition(".")[0]
            if stem.split("_")[-1] in NAMELESS:
                found.append(path)
                break
    return found


def untested_folders(sources: Sources, tests: list[str]) -> list[str]:
    """Folders of the package that hold code and have no test file in the folder of the same name under tests/."""
    tested = set()
    for test in map(PurePosixPath, tests):
        if test.name.startswith("test_"):
            tested.add(str(test.parent))

    untested = set()
    for path, source in sources.items():
        folder = str(PurePosixPath(path).parent)
        folder_of_tests = folder.replace("vit_jax", "tests", 1)
        if folder != "vit_jax" and has_code(source) and folder_of_tests not in tested:
            untested.add(folder)
    return sorted(untested)


def has_code(source: str) -> bool:
    """Return True if there is more than a docstring."""
    return any(not isinstance(node, ast.Expr) for node in ast.parse(source).body)


def fields_by_class(source: str) -> dict[str, set[str]]:
    fields = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            fields[node.name] = {entry.target.id for entry in node.body if is_field(entry)}
    return fields


def is_field(entry: ast.stmt) -> bool:
    return isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name)


def attributes_read(source: str) -> set[str]:
    """Names read as `x.name`, `getattr(x, "name")`, or `getattr(x, n)` with n running over literal names."""
    tree = ast.parse(source)
    literals = collect_literals(tree)
    read = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            read.add(node.attr)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            name = node.args[1]
            if isinstance(name, ast.Constant):
                read.add(name.value)
            else:
                read |= literals[ast.unparse(name)]
    return read


def collect_literals(tree: ast.AST) -> collections.defaultdict[str, set[str]]:
    """Return the constants over which each variable of a loop or comprehension runs."""
    literals = collections.defaultdict(set)
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.comprehension) and isinstance(node.target, ast.Name):
            for element in getattr(node.iter, "elts", []):
                if isinstance(element, ast.Constant):
                    literals[node.target.id].add(element.value)
    return literals


def unread_fields(sources: Sources) -> list[str]:
    """Options that nothing reads: whoever sets one is silently ignored.

    What `Architecture` takes over from `ModelConfig` is copied and checked in config/, which uses
    nothing: models/ or sharding/ must read it. Fields are told apart by name only: one `every` that
    is read hides another that is not.
    """
    declared: dict[str, set[str]] = {}
    for path in DECLARATIONS:
        declared |= fields_by_class(sources.get(path, ""))
    by_anyone = set()
    by_builders = set()
    for path, source in sources.items():
        if path in DECLARATIONS:
            continue
        names = attributes_read(source)
        by_anyone |= names
        if room_of(module_name(path)) in BUILDERS:
            by_builders |= names

    copies = fields_by_class(sources["vit_jax/config/architecture.py"])
    taken_over = copies["Architecture"] - {"name"}
    found = []
    for owner, fields in declared.items():
        for name in sorted(fields):
            field = READ_THROUGH.get(name, name)
            is_copied = owner in NETWORK_OWNERS and field in taken_over
            readers = by_builders if is_copied else by_anyone
            if field not in readers:
                found.append(f"{owner}.{field}")
    return found


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
        [sys.executable, "-c", report],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
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
