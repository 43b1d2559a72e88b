"""Writing every format and reading it back: the same bits and the same facts."""

import dataclasses

import numpy as np
import pytest

from tests.weights.names.test_formats import PAIRS
from tests.weights.reference import networks
from tests.weights.small_networks import (
    NETWORKS,
    OURS,
    PREPROCESSING,
    SQUARE,
    TRAINING,
    VIT,
    assert_same,
    weights_of,
)
from tests.weights.test_fit import model_of
from vit_jax.checkpoint import CheckpointReader, CheckpointStore
from vit_jax.config import adapt_architecture
from vit_jax.config.schema import AdaptConfig
from vit_jax.weights import load_weights
from vit_jax.weights.fit import fit, remove_head
from vit_jax.weights.formats import open_arrays
from vit_jax.weights.names import FORMATS
from vit_jax.weights.saving import OWN, save_weights

NAMES = ("cat", "naïve dog", "a, b")
EXACT = [(name, network) for name, network in PAIRS if network != "sincos2d"]


def detailed(a):
    names = NAMES if a.num_classes else None
    training = dataclasses.replace(TRAINING, classes=NAMES)
    return weights_of(a, class_names=names, preprocessing=PREPROCESSING, training=training)


def test_a_custom_pooling_and_head_are_saved_loaded_and_replaced(tmp_path):
    """The metadata name both classes.

    A head for other classes is a new linear one; the pooling stays.
    """
    parts = {"pool": "docs.examples.pooling:WeightedMean", "head": "docs.examples.head:CosineHead"}
    a = dataclasses.replace(VIT, **parts)
    written = weights_of(a, class_names=NAMES)
    save_weights(written, tmp_path / "w", OWN)

    with pytest.raises(
        ValueError, match=r"architecture\.(pool|head)='docs.*--weights.allow_code=docs "
    ):
        load_weights(tmp_path / "w")

    read = load_weights(tmp_path / "w", allow_code=("docs",))
    assert read.architecture == a
    assert_same(read.parameters, written.parameters)
    assert {"pooling/score", "head/vectors", "head/log_scale"} <= read.parameters.keys()

    target = adapt_architecture(a, AdaptConfig(), image_size=a.image_size, num_classes=7)
    assert (target.pool, target.head) == (parts["pool"], "linear")

    fitted = fit(remove_head(read), target).parameters
    assert fitted["head/linear/kernel"].shape == (a.width, 7)
    assert_same({"score": fitted["pooling/score"]}, {"score": written.parameters["pooling/score"]})
    with pytest.raises(ValueError, match=r"head='zero_keep_hidden'.*no hidden layer"):
        adapt_architecture(
            a,
            AdaptConfig(head="zero_keep_hidden"),
            image_size=a.image_size,
            num_classes=7,
        )


@pytest.mark.parametrize(
    ("format_name", "network"),
    [*EXACT, *((OWN, n) for n in ("sincos2d", "learned_2d", "postactivation", *OURS))],
)
def test_round_trips_are_bit_exact_and_carry_everything(format_name, network, tmp_path):
    a = dataclasses.replace((NETWORKS | OURS)[network], layer_norm_epsilon=3e-6, gelu="exact")
    written = detailed(a)
    path = tmp_path / f"w{'' if format_name == OWN else FORMATS[format_name].suffix}"
    statuses, _ = save_weights(written, path, format_name)
    read = load_weights(path)
    again = path.with_name(f"again{path.suffix}")
    save_weights(read, again, format_name)

    assert format_name == OWN or again.read_bytes() == path.read_bytes()
    assert read.architecture == a

    expected = (written.class_names, PREPROCESSING, written.training)
    assert (read.class_names, read.preprocessing, read.training) == expected
    assert_same(read.parameters, written.parameters)

    if format_name != OWN:
        with open_arrays(path) as file:
            assert (
                {status.name for status in statuses}
                == {status.name for status in read.statuses}
                == set(file.arrays)
            )


@pytest.mark.parametrize(
    ("format_name", "pool", "form"),
    [
        ("released", "gap", "learned_2d"),
        ("timm", "token", "none"),
        ("huggingface", "token", "sincos2d"),
    ],
)
def test_other_positions_become_a_learned_table_that_computes_the_same(
    format_name, pool, form, tmp_path
):
    a = dataclasses.replace(VIT, position_embedding=form, pool=pool)
    path = tmp_path / f"w{FORMATS[format_name].suffix}"
    statuses, notes = save_weights(detailed(a), path, format_name)
    read = load_weights(path)

    assert read.architecture == dataclasses.replace(a, position_embedding="learned_1d")

    model = model_of(a, networks.parameters(a))
    np.testing.assert_array_equal(read.parameters["positions/table"], model.positions())

    kept = {
        name: array
        for name, array in networks.parameters(a).items()
        if not name.startswith("positions/")
    }

    assert_same(
        {name: array for name, array in read.parameters.items() if name != "positions/table"},
        kept,
    )

    (status,) = [status for status in statuses if status.status.startswith("made of")]
    assert status.status == f"made of {form}"

    expected = tuple(name for name in networks.parameters(a) if name.startswith("positions/"))
    assert status.ours == expected
    assert [note for note in notes if f"positions ({form}) are written as a learned table" in note]


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("network", OURS)
def test_blocks_and_positions_that_no_other_format_has_are_refused_by_name(
    format_name, network, tmp_path
):
    with pytest.raises(
        ValueError,
        match=rf"{format_name} cannot hold .* has (block|position_\w+)='.*: write vit_jax",
    ):
        save_weights(weights_of(OURS[network]), tmp_path / "w", format_name)

    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("format_name", ["released", "timm", "huggingface", OWN])
def test_without_the_head_the_features_remain(format_name, tmp_path):
    a = dataclasses.replace(VIT, head="mlp")
    path = tmp_path / f"w{'' if format_name == OWN else FORMATS[format_name].suffix}"
    statuses, _ = save_weights(detailed(a), path, format_name, without_head=True)
    dropped = [status.ours[0] for status in statuses if status.status == "dropped"]
    expected = [
        f"head/{layer}/{leaf}" for layer in ("hidden", "linear") for leaf in ("bias", "kernel")
    ]

    assert sorted(dropped) == expected

    read = load_weights(path)
    assert read.architecture == dataclasses.replace(VIT, num_classes=0)
    assert read.class_names is None

    kept = {
        name: array
        for name, array in networks.parameters(a).items()
        if not name.startswith("head/")
    }
    empty = {
        "head/linear/kernel": np.zeros((16, 0), np.float32),
        "head/linear/bias": np.zeros(0, np.float32),
    }

    assert_same(read.parameters, kept | empty)


def test_a_checkpoint_of_weights_alone_has_one_step_and_replaces_no_run(tmp_path):
    save_weights(detailed(NETWORKS["resnet"]), tmp_path, OWN)
    save_weights(detailed(VIT), tmp_path, OWN)  # over it

    assert load_weights(tmp_path).architecture == VIT

    store = CheckpointStore(tmp_path)
    assert CheckpointReader(tmp_path).all_steps() == [0]
    assert CheckpointReader(tmp_path).item_names(0) == {"model", "metadata"}

    store.save(4, {"model": {"a": np.zeros(1, np.float32)}}, metadata={}, metrics={})
    store.close()

    with pytest.raises(
        ValueError, match=r"holds checkpoints of a run \(4\): choose another folder"
    ):
        save_weights(weights_of(SQUARE), tmp_path, OWN)


def test_two_processes_save_into_one_folder(tmp_path, monkeypatch):
    """One saves completely while the other is between its arrays and the new name."""
    wait = CheckpointStore.wait
    calls = []

    def save_first(store):
        wait(store)
        if not calls:
            calls.append(store)
            save_weights(detailed(NETWORKS["resnet"]), tmp_path, OWN)

    monkeypatch.setattr(CheckpointStore, "wait", save_first)
    save_weights(detailed(VIT), tmp_path, OWN)

    assert load_weights(tmp_path).architecture == VIT
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "checkpoints"]


def test_class_names_for_which_a_npz_has_no_room_stand_beside(tmp_path):
    chance = np.random.default_rng(0)
    names = tuple(chance.bytes(12).hex() for _ in range(9000))
    weights = weights_of(dataclasses.replace(VIT, num_classes=9000), class_names=names)
    path = tmp_path / "w.npz"
    _, notes = save_weights(weights, path, "released")

    assert (tmp_path / "w.npz.classes.txt").read_text().splitlines() == list(names)
    assert any("no room for 9,000 class names: they are in" in note for note in notes)

    read = load_weights(path)
    assert (read.class_names, read.notes) == (names, [])

    for classes, expected in (((), TRAINING), (names, None)):  # no room for these
        trained = dataclasses.replace(
            weights,
            training=dataclasses.replace(TRAINING, classes=classes),
        )
        save_weights(trained, path, "released")

        assert load_weights(path).training == expected

    (tmp_path / "w.npz.classes.txt").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"w\.npz\.classes\.txt: 'utf-8' codec can't decode"):
        load_weights(path)

    moved = path.rename(tmp_path / "moved.npz")
    read = load_weights(moved)

    assert read.class_names is None

    note = f"Its class names should be in {moved}.classes.txt, which does not exist: bring it, or give class_names."
    assert read.notes == [note]
    assert load_weights(moved, class_names=names).class_names == names

    odd = dataclasses.replace(weights, class_names=("two\nlines", *names[1:]))
    with pytest.raises(ValueError, match="class names of several lines"):
        save_weights(odd, path, "released")


def test_what_readers_compute_otherwise_is_said(tmp_path):
    _, notes = save_weights(weights_of(VIT), tmp_path / "w.safetensors", "timm")
    assert len(notes) == 1
    assert "go with gelu=tanh; readers of timm files compute with exact" in notes[0]

    _, notes = save_weights(detailed(VIT), tmp_path / "folder", "timm")  # config.json says it
    assert notes == []

    _, notes = save_weights(
        weights_of(dataclasses.replace(VIT, gelu="exact")),
        tmp_path / "w.npz",
        "released",
    )

    assert "compute with tanh" in notes[0]

    _, notes = save_weights(weights_of(NETWORKS["mlp_head"]), tmp_path / "h.npz", "released")
    assert notes == ["timm silently ignores the hidden layer of the head (pre_logits)."]

    _, notes = save_weights(weights_of(NETWORKS["hybrid"]), tmp_path / "w.safetensors", "timm")
    fields = [
        "gelu",
        "group_norm_epsilon",
        "standardization_epsilon",
        "standardization_epsilon_added_to",
    ]

    assert [note.split("=")[0].split()[-1] for note in notes] == fields
