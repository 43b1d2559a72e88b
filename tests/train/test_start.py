"""The start of a run: checkpoints of the same network and data, and weights adapted to its classes."""

import dataclasses
import math
import types

import jax
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from tests import tiny
from tests.rejections import rejects
from tests.train import small_runs as runs
from tests.weights.small_networks import NETWORKS, RESNET, VIT, weights_of
from vit_jax import pytree
from vit_jax.checkpoint import CheckpointReader
from vit_jax.config import AdaptConfig, load_recipe
from vit_jax.config.lengths import convert_lengths
from vit_jax.train import start
from vit_jax.train.assemble import assemble
from vit_jax.train.start import state_of_parameters
from vit_jax.train.starting_weights import adapt
from vit_jax.weights.fit import fit
from vit_jax.weights.head_edits import remove_head
from vit_jax.weights.saving import save_weights

FACTS = {
    "data": "folder:x",
    "num_examples": 160,
    "class_names": ["a", "b"],
    "global_batch": 16,
    "seed": 0,
}
FILES = {
    "train_files_sha256": "1" * 64,
    "test_files_sha256": "2" * 64,
}


def restore(stored, facts):
    """Return the step of the state that a run with these facts resumes from."""
    run = runs.build()
    metadata = {
        "architecture": dataclasses.asdict(run.architecture),
        **stored,
    }
    items = {
        "progress": {"step": 5},
        "model": None,
        "optimizer": None,
    }
    store = types.SimpleNamespace(
        folder="run",
        metadata=lambda step: metadata,
        restore=lambda step, items_: items,
    )

    return start.restore(run, store, 5, facts).step


@pytest.mark.parametrize(
    "stored",
    [FACTS, FACTS | FILES],
    ids=["before files were noted", "now"],
)
def test_the_same_data(stored):
    assert restore(stored, FACTS | FILES) == 5


def test_positions_added_elsewhere_are_of_another_network():
    """The parameters are the same.

    Checkpoints from before blocks could add positions do not say where.
    """
    older = dataclasses.asdict(runs.build().architecture)
    assert older.pop("position_layers") == "stem"
    shared = older | {"position_layers": "shared"}

    assert restore(FACTS | {"architecture": older}, FACTS) == 5
    with rejects("position_layers", "'shared'.*'stem'"):
        restore(FACTS | {"architecture": shared}, FACTS)


@pytest.mark.parametrize("name", FACTS | FILES)
def test_other_data(name):
    facts = FACTS | FILES
    other = 7 if isinstance(facts[name], int) else "other"

    with rejects(f"{name}=", "config.init_from"):
        restore(facts, facts | {name: other})


def test_the_data_of_a_run_in_phases():
    """At step 5, 16 images a step have seen as many as two steps of 8, two of 24 and one of 16."""
    in_phases = {
        "phases": [
            (2, 8),
            (4, 24),
        ],
        "global_batch": 16,
    }

    stored_phases = {
        "phases": [
            [2, 8],
            [4, 24],
        ]
    }
    stored_phase = {"phases": [[2, 8]]}

    assert restore(FACTS | stored_phases, FACTS) == 5
    assert restore(FACTS, FACTS | in_phases) == 5
    with rejects("phases=", "config.init_from"):
        restore(FACTS | stored_phase, FACTS)


def test_a_folder_without_checkpoints(tmp_path):
    run = runs.build(f"resume_from={tmp_path}")
    nothing = CheckpointReader(tmp_path)

    with rejects(f"config.resume_from={str(tmp_path)!r}", "checkpoint"):
        start.start_state(run, None, nothing, {})


WSD = (
    "schedule.decay=wsd",
    "schedule.warmup=2 steps",
    "schedule.cooldown=3 steps",
    "resume_from=trunk",
)


EVERY_STEP = [2, 4, 6, 8, 10]


def list_steps_to_continue(monkeypatch, *fields, trunk=()):
    """Return the steps of a trunk of 10 steps that a run with these fields may continue."""
    trunk_config = tiny.config(*WSD, "total=10 steps", *trunk)
    metadata = {
        "config": dataclasses.asdict(trunk_config),
        "num_examples": 160,
    }
    reader = types.SimpleNamespace(
        all_steps=lambda: EVERY_STEP,
        metadata=lambda step: metadata,
    )
    monkeypatch.setattr(start, "CheckpointReader", lambda folder: reader)

    config = tiny.config(*WSD, *fields)
    run = types.SimpleNamespace(
        config=config,
        steps=convert_lengths(config, 160),
    )
    _, steps = start.steps_to_continue(run)
    return steps


@pytest.mark.parametrize(
    ("fields", "trunk", "steps"),
    [
        # The cooldown of the branch begins at 5.
        (["total=8 steps"], [], [2, 4]),
        # The cooldown of the trunk begins at 7.
        (["total=20 steps"], [], [2, 4, 6]),
        (["total=20 steps"], ["schedule.decay=constant"], EVERY_STEP),
        (["total=20 steps", "resume_step=4"], [], [4]),
        (["total=20 steps", "schedule.decay=cosine"], [], EVERY_STEP),
    ],
)
def test_a_branch_continues_steps_before_both_cooldowns(
    monkeypatch,
    fields,
    trunk,
    steps,
):
    found = list_steps_to_continue(monkeypatch, *fields, trunk=trunk)

    assert found == steps


@pytest.mark.parametrize(
    ("fields", "field", "rule"),
    [
        (
            ("total=20 steps", "resume_step=8"),
            "resume_from='trunk'",
            "before both cooldowns",
        ),
        (
            ("total=8 steps", "resume_step=6"),
            "resume_from='trunk'",
            "before both cooldowns",
        ),
        (
            ("total=20 steps", "schedule.learning_rate=0.1"),
            "resume_from='trunk'",
            "learning rates of this run",
        ),
        (
            ("total=20 steps", "schedule.warmup=3 steps"),
            "resume_from='trunk'",
            "learning rates of this run",
        ),
        (
            ("total=20 steps", "resume_step=5"),
            "resume_step=5",
            r"\[2, 4, 6, 8, 10\]",
        ),
    ],
)
def test_a_branch_whose_rate_would_jump_is_rejected(
    monkeypatch,
    fields,
    field,
    rule,
):
    with rejects(f"config.{field}", rule):
        list_steps_to_continue(monkeypatch, *fields)


MLP = NETWORKS["mlp_head"]
RECIPE = load_recipe("configs/finetune.py:any,own")


def config(init_from, *, image_size=(16, 24), **model):
    """Fine-tuning at twice the resolution of the small networks."""
    model.setdefault("compute_dtype", "float32")
    replace = dataclasses.replace
    return replace(
        RECIPE,
        init_from=init_from and str(init_from),
        global_batch=16,
        model=AdaptConfig(**model),
        input=replace(RECIPE.input, image_size=image_size),
        schedule=replace(RECIPE.schedule, learning_rate=0.01),
        search=replace(RECIPE.search, learning_rates=()),
    )


def source(*class_names):
    """Return one image of each class."""
    return tiny.source(len(class_names), class_names)


@pytest.fixture
def save(tmp_path):
    """A function that writes a network's weights and returns their path."""

    def write(a, name="weights.safetensors", format_name="timm", **details):
        path = tmp_path / name
        save_weights(weights_of(a, **details), path, format_name)
        return path

    return write


def select_last_layer(fitted):
    layer = {}
    for name, array in fitted.parameters.items():
        if name.startswith("head/linear/"):
            layer[name] = array
    return layer


def test_weights_get_a_new_head(save):
    """Even the same class names are no reason to keep the head."""
    path = save(VIT, class_names=("a", "b", "c"))

    architecture, fitted, _, words = adapt(
        config(path),
        source("a", "b", "c"),
    )
    expected = fit(remove_head(weights_of(VIT)), architecture)
    first_line, second_line, *_ = words.splitlines()

    assert architecture.num_classes == 3
    assert architecture.image_size == (16, 24)
    assert architecture.head == "linear"
    for name, array in expected.parameters.items():
        assert fitted.parameters[name].tobytes() == array.tobytes(), name
    for array in select_last_layer(fitted).values():
        assert not array.any()
    assert first_line.startswith(f"weights  {path} (")
    assert second_line == f"         {expected.summary()}"


@pytest.mark.parametrize(
    ("head", "has_hidden", "expected"),
    [
        ("zero", False, "linear"),
        ("zero_keep_hidden", True, "mlp"),
    ],
)
def test_a_hidden_layer_stays_where_the_config_asks(
    save,
    head,
    has_hidden,
    expected,
):
    path = save(MLP, "workdir", "vit_jax")

    architecture, fitted, *_ = adapt(
        config(path, head=head),
        source("x", "y"),
    )

    assert architecture.head == expected
    assert ("head/hidden/kernel" in fitted.parameters) == has_hidden
    assert fitted.parameters["head/linear/kernel"].shape == (16, 2)
    for array in select_last_layer(fitted).values():
        assert not array.any()


@pytest.mark.parametrize("names", [("a", "b", "c"), None])
def test_a_complete_head_stays_where_the_config_asks(save, names):
    """The classes are the same, or as many where nobody knows their names."""
    path = save(VIT, class_names=names)
    stored = weights_of(VIT).parameters

    _, fitted, *_ = adapt(
        config(path, head="keep"),
        source("a", "b", "c"),
    )

    for name, array in select_last_layer(fitted).items():
        assert array.tobytes() == stored[name].tobytes()


@pytest.mark.parametrize(
    ("names", "here", "rule"),
    [
        (
            ("a", "b", "c"),
            ("a", "b"),
            r"3 .*\['a', 'b', 'c'\].*2 .*\['a', 'b'\]",
        ),
        (
            ("a", "b", "c"),
            ("a", "c", "b"),
            r"3 .*3 .*\['a', 'c', 'b'\]",
        ),
        (None, ("a", "b"), "3 .*not named.*2 "),
        (
            None,
            ("0", "10", "2"),
            r"another order \(\['0', '10', '2'\]\)",
        ),
        (
            None,
            ("1", "2", "3"),
            "another order.*leading zeros",
        ),
    ],
)
def test_a_head_of_other_classes_cannot_stay(save, names, here, rule):
    path = save(VIT, class_names=names)
    keeping = config(path, head="keep")

    with rejects("config.model.head='keep'", f"{rule}.*head=zero"):
        adapt(keeping, source(*here))


def test_outputs_of_the_classes_of_the_data_are_selected(save):
    """By name, in the order of the data; one class of the data has no output."""
    path = save(
        VIT,
        "workdir",
        "vit_jax",
        class_names=("a", "b", "c"),
    )
    stored = weights_of(VIT).parameters
    old_kernel = stored["head/linear/kernel"]
    old_bias = stored["head/linear/bias"]

    architecture, fitted, *_ = adapt(
        config(path, head="select"),
        source("c", "x", "a"),
    )
    kernel = fitted.parameters["head/linear/kernel"]
    bias = fitted.parameters["head/linear/bias"]

    assert architecture.num_classes == 3
    assert_array_equal(kernel[:, [0, 2]], old_kernel[:, [2, 0]])
    assert_array_equal(bias[[0, 2]], old_bias[[2, 0]])
    assert not kernel[:, 1].any()
    assert bias[1] == pytest.approx(old_bias[[0, 2]].mean())


@pytest.mark.parametrize("names", [("a", "b", "c"), None])
def test_no_class_of_the_data_has_an_output(save, names):
    path = save(VIT, class_names=names)

    selecting = config(path, head="select")

    with rejects("config.model.head='select'", "2 were not found.*head_stddev"):
        adapt(selecting, source("x", "y"))


def test_a_new_last_layer_has_the_deviation_of_the_config(save):
    path = save(VIT, class_names=("a", "b", "c"))
    spread = config(path, head_stddev=2e-5)
    classes = source(*map(str, range(400)))

    _, first, *_ = adapt(spread, classes)
    _, second, *_ = adapt(spread, classes)
    kernel = first.parameters["head/linear/kernel"]
    bias = first.parameters["head/linear/bias"]

    assert_array_equal(kernel, second.parameters["head/linear/kernel"])
    assert kernel.std() == pytest.approx(2e-5, rel=0.05)
    assert not bias.any()


def test_no_weights():
    with rejects("config.init_from", "--config.init_from=PATH"):
        adapt(config(None), source("a", "b"))


def test_a_run_starts_with_these_parameters_and_a_loss_of_ln_k(save):
    """Eight devices share the parameters."""
    path = save(RESNET, "workdir", "vit_jax")
    sharded = config(path, image_size=RESNET.image_size)
    sharding = dataclasses.replace(sharded.sharding, parameters="fsdp")
    sharded = dataclasses.replace(sharded, sharding=sharding)
    architecture, fitted, *_ = adapt(sharded, source(*"abcdefghij"))
    run = assemble(
        sharded,
        architecture,
        num_examples=160,
        devices=jax.devices(),
    )

    state = state_of_parameters(run, fitted.parameters, str(path))
    sums, _ = run.evaluation_step(state, runs.first_batch(run))
    mean_loss = float(sums["loss"]) / 16
    leaves = pytree.name_leaves(state.model)
    abstract = pytree.name_leaves(run.abstract_state.model)

    assert int(state.step) == 0
    assert mean_loss == pytest.approx(math.log(10), abs=1e-6)
    assert leaves.keys() == fitted.parameters.keys()
    for name, array in fitted.parameters.items():
        leaf = leaves[name]
        assert np.asarray(leaf).tobytes() == array.tobytes(), name
        assert leaf.sharding == abstract[name].sharding


def test_parameters_of_another_network_are_all_named():
    run = runs.build()
    parameters = {}
    for name, leaf in pytree.name_leaves(run.abstract_state.model).items():
        parameters[name] = np.zeros(leaf.shape, np.float32)
    del parameters["encoder/norm/bias"]
    parameters["head/linear/bias"] = np.zeros(3, np.float32)

    with rejects("here", "ViT-mu/2") as error:
        state_of_parameters(run, parameters, "here")

    message = str(error.value)
    assert "missing: encoder/norm/bias (16,)" in message
    assert "shape: head/linear/bias is (3,), the model has (10,)" in message
