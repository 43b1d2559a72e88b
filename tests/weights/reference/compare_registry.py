"""Compares the networks that `write_registry.py` wrote with ours; exits with 1 if one is read and differs.

python -m tests.weights.reference.compare_registry FOLDER [NAME ...]

It renews `FOLDER/results.json`, the names of models in `vit_jax/weights/families/` and the table in
`vit_jax/bench/AGREEMENT.md`. With names, the results of the other models are those of the last
walk. All models are tried that have no known reason to be rejected, in the list or not.
"""

import collections
import json
import pathlib
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from tests.columns import list_column
from tests.weights.reference.families import pixels
from vit_jax.models import build_model
from vit_jax.weights import architectures
from vit_jax.weights.families import NAMES, load_families
from vit_jax.weights.family import Sizes
from vit_jax.weights.formats import StoredArray
from vit_jax.weights.load import Weights, load_weights
from vit_jax.weights.recognise import recognise
from vit_jax.weights.sidecar import read_sidecar

ROOT = pathlib.Path(__file__).parents[3]
FAMILIES = ROOT / "vit_jax/weights/families"
ARCHITECTURES = ROOT / "vit_jax/weights/architectures.py"
PAGE = ROOT / "vit_jax/bench/AGREEMENT.md"
BLOCK = re.compile(
    r"(?<=<!-- generated: registry -->\n).*?(?=<!-- end of generated -->)",
    re.DOTALL,
)
TOLERANCE = 1e-5  # relative to the largest value
EXACT_GELU = "the exact GELU"


def apply_network(weights: Weights, images: np.ndarray) -> dict[str, np.ndarray]:
    """Return features and logits of images with values in [-1, 1]."""
    a = weights.architecture
    abstract = jax.eval_shape(lambda: build_model(a, jax.random.key(0)))
    leaves = list(map(jnp.asarray, weights.parameters.values()))
    model = jax.tree.unflatten(jax.tree.structure(abstract), leaves)

    @jax.jit
    def run(model, images):
        return model(images)

    output = run(model, jnp.float32(images))
    arrays = {"features": np.asarray(output.pooled_BD)}
    if output.logits_BK is not None:
        arrays["logits"] = np.asarray(output.logits_BK)
    return arrays


def measure_difference(actual: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference, relative to the largest value."""
    difference = np.abs(actual - expected)
    return float(difference.max() / np.abs(expected).max())


def largest_difference(folder: pathlib.Path, **options: object) -> float:
    """Return the largest difference from timm's outputs, relative to their largest value.

    Raises:
      ValueError: the weights are rejected.
    """
    weights = load_weights(folder, **options)
    expected = dict(np.load(folder / "expected.npz"))
    size = expected.pop("size").tolist()
    ours = apply_network(weights, 2 * pixels(*size) - 1)

    assert expected.keys() <= ours.keys(), f"{folder.name}: only {', '.join(ours)}"
    assert expected, f"{folder.name} is read, and timm has no outputs to compare"

    differences = []
    for name, array in expected.items():
        differences.append(measure_difference(ours[name], array))

    return float(np.max(differences))


def read_full(folder: pathlib.Path) -> dict:
    """Return what timm says of the model in its full size."""
    return json.loads((folder / "full.json").read_text())


def check_full_size(folder: pathlib.Path) -> str:
    """Return how the network read from a published file, whose config has no arguments, differs from timm's; or ""."""
    full = read_full(folder)
    dtype = np.dtype(np.float32)
    arrays = {}
    for name, shape in full["shapes"].items():
        arrays[name] = StoredArray(tuple(shape), dtype)

    published = folder / "published"
    published.mkdir(exist_ok=True)
    config = json.dumps(full["config"])
    (published / "config.json").write_text(config)
    stated = read_sidecar(published).fields

    a = recognise(arrays, {}, stated=stated).architecture
    sizes = full["sizes"]
    ours = {
        "width": a.width,
        "depth": a.depth,
        "num_heads": a.num_heads,
    }

    if full["class"] == "ResNetV2" or ours == sizes:
        return ""

    return f"{ours} instead of {sizes}"


def compare(folder: pathlib.Path) -> dict[str, object]:
    """Return the result of one model."""
    try:
        check_full_size(folder)
        difference = largest_difference(folder)
    except ValueError as error:
        _, _, reason = str(error).rpartition("config.json: ")
        return {
            "status": "rejected",
            "reason": reason.replace(str(folder), ""),
        }

    result = {}
    if difference > TOLERANCE:
        exact = largest_difference(folder, gelu="exact")
        if exact <= TOLERANCE:
            difference = exact
            result["note"] = EXACT_GELU

    if problem := check_full_size(folder):
        result["full"] = problem

    is_equal = difference <= TOLERANCE and not problem
    status = "equal" if is_equal else "WRONG"
    return {"status": status, "difference": difference} | result


def sizes_of(folder: pathlib.Path) -> Sizes | None:
    """Return the sizes that timm gives a model; None for a ResNet."""
    full = read_full(folder)
    if full["class"] == "ResNetV2":
        return None

    return Sizes(**full["sizes"])


def find_row(name: str) -> tuple[str, str]:
    """Return the module of the family that has a model, and its row in the table of the page.

    Later families come first: the first one, ViT, has the models that no other has.
    """
    families = list(zip(NAMES, load_families(), strict=True))
    for module, family in reversed(families):
        for row, pattern in family.registry_rows.items():
            if re.match(pattern, name):
                return module, row

    raise ValueError(f"{name}: no family has it. Add a pattern to its registry_rows.")


def try_all_names(folder: pathlib.Path, names: Iterable[str]) -> None:
    """Let the reader of weights accept the names that it does not reject for a reason."""
    families = dict(zip(NAMES, load_families(), strict=True))
    for name in names:
        if architectures.find_unsupported(name) is None:
            module, _ = find_row(name)
            models = families[module].models

            assert isinstance(models, dict)

            models.setdefault(name, sizes_of(folder / name))


def models_blocks(sizes: Mapping[str, Sizes | None]) -> dict[str, list[str]]:
    """Return the lines of `_MODELS` by the module of their family."""
    groups: dict[str, dict] = {}
    for name, size in sizes.items():
        module, _ = find_row(name)
        by_size = groups.setdefault(module, {})
        names = by_size.setdefault(size or (0, 0, 0), [])
        names.append(name)

    blocks = {}
    for module, by_size in groups.items():
        lines = []
        for size, names in sorted(by_size.items()):
            heading = "resnet"
            if any(size):
                heading = "/".join(map(str, size))
            lines.append(heading)
            text = " ".join(sorted(names))
            lines += textwrap.wrap(
                text,
                100,
                initial_indent="  ",
                subsequent_indent="  ",
            )

        blocks[module] = lines

    return blocks


def deprecated_blocks(names: Mapping[str, str]) -> dict[str, list[str]]:
    """Return the lines of `_DEPRECATED` by the module of their family, from current names by older ones."""
    blocks: dict[str, list[str]] = {}
    for older, current in sorted(names.items()):
        module, _ = find_row(current)
        blocks.setdefault(module, []).append(f"{older} {current}")

    return blocks


def replace_block(
    text: str,
    constant: str,
    lines: list[str],
) -> str:
    """Return the text of a module with other lines of a constant, which must be there."""
    pattern = rf'(?<=\n{constant} = """\n).*?(?=""")'
    replaced, count = re.subn(
        pattern,
        "\n".join(lines) + "\n",
        text,
        flags=re.DOTALL,
    )

    if not count:
        raise ValueError(f'{constant} = """: is not in the module. Add it, with {lines[0]}, ...')

    return replaced


def renew_families(results: Mapping[str, Mapping[str, object]], folder: pathlib.Path) -> None:
    """Write the names and sizes of the models that are equal into the modules of their families."""
    registry = json.loads((folder / "registry.json").read_text())
    equal = []
    for name, result in results.items():
        if result["status"] == "equal":
            equal.append(name)

    deprecated = {}
    for old, name in registry["deprecated"].items():
        if name in equal:
            deprecated[old] = name

    sizes = {name: sizes_of(folder / name) for name in equal}
    blocks = {
        "_MODELS": models_blocks(sizes),
        "_DEPRECATED": deprecated_blocks(deprecated),
    }

    for constant, by_module in blocks.items():
        for module, lines in by_module.items():
            path = FAMILIES / f"{module}.py"
            renewed = replace_block(path.read_text(), constant, lines)
            path.write_text(renewed)

    text = re.sub(
        r'(?<=TIMM_VERSION = ")[^"]*',
        registry["version"],
        ARCHITECTURES.read_text(),
    )
    ARCHITECTURES.write_text(text)


def equal_rows(results: Mapping[str, Mapping[str, object]]) -> list[str]:
    """Return the rows of families that are read."""
    differences = collections.defaultdict(list)
    for name, result in results.items():
        if result["status"] == "equal":
            _, row = find_row(name)
            note = result.get("note")
            differences[row].append((result["difference"], note))

    rows = []
    for family in load_families():
        for row in family.registry_rows:
            found = differences[row]
            count = len(found)
            largest, _ = max(found)
            exact = sum(note is not None for _, note in found)
            remark = f"{exact} with `gelu=exact`" if exact else ""
            rows.append(f"| {row} | {count} | | {largest:.1e} | {remark} |")

    return rows


def rejected_rows(results: Mapping[str, Mapping[str, object]]) -> list[str]:
    """Return the rows of families that are rejected, with the reason."""
    reasons = collections.Counter()
    for result in results.values():
        if result["status"] != "equal":
            text = str(result.get("reason", f"WRONG: {result}"))
            match = re.search(r"': (.+?) is not supported: it has (.+)\. Take", text)
            key = match.groups() if match else ("other", text)
            reasons[key] += 1

    rows = []
    for (family, reason), count in sorted(reasons.items()):
        rows.append(f"| {family} | | {count} | | {reason} |")
    return rows


def renew(text: str, results: Mapping[str, Mapping[str, object]]) -> str:
    """Return the page with a new table."""
    head = [
        "| family | equal | rejected | largest difference | reason, or option |",
        "|---|---|---|---|---|",
    ]
    counts = collections.Counter(list_column(results.values(), "status"))
    num_equal = counts.pop("equal")
    num_others = counts.total()
    total = f"| all | {num_equal} | {num_others} | | |"
    lines = [
        *head,
        *equal_rows(results),
        *rejected_rows(results),
        total,
        "",
    ]

    return BLOCK.sub(lambda match: "\n".join(lines), text)


def main(folder: pathlib.Path, names: list[str]) -> int:
    """Compare the models and print one line for each; return the number of models that are read and differ."""
    registry = json.loads((folder / "registry.json").read_text())
    known = registry["names"]
    try_all_names(folder, known)
    results_file = folder / "results.json"
    results = {}
    if names:
        results = json.loads(results_file.read_text())

    for name in names or known:
        try:
            results[name] = compare(folder / name)
        except Exception as error:  # a crash is a result of the walk
            results[name] = {
                "status": "CRASH",
                "reason": f"{type(error).__name__}: {error}",
            }

        print(name, *results[name].values(), flush=True)
        jax.clear_caches()

    results_file.write_text(json.dumps(results, indent=1) + "\n")
    renew_families(results, folder)
    PAGE.write_text(renew(PAGE.read_text(), results))

    statuses = list_column(results.values(), "status")
    return statuses.count("WRONG") + statuses.count("CRASH")


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]), sys.argv[2:]) > 0)
