"""Writing every format and reading it back: the same bits and the same facts."""

import dataclasses

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from tests.columns import list_column
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
from tests.weights.test_fit import build_model
from vit_jax.checkpoint import CheckpointReader, CheckpointStore
from vit_jax.config import adapt_architecture
from vit_jax.config.schema import AdaptConfig
from vit_jax.weights import load_weights
from vit_jax.weights.fit import fit
from vit_jax.weights.formats import open_arrays
from vit_jax.weights.head_edits import remove_head
from vit_jax.weights.names import FORMATS
from vit_jax.weights.saving import OWN, save_weights

NAMES = ("cat", "naïve dog", "a, b")
EXACT = [(name, network) for name, network in PAIRS if network != "sincos2d"]


def build_weights(a):
    names = NAMES if a.num_classes else None
    training = dataclasses.replace(TRAINING, classes=NAMES)
    return weights_of(
        a,
        class_names=names,
        preprocessing=PREPROCESSING,
        training=training,
    )


def build_path(folder, format_name):
    """Return the path of a file or folder of a format."""
    if format_name == OWN:
        return folder / "w"
    return folder / f"w{FORMATS[format_name].suffix}"


def select_parameters(parameters, *excluded):
    """Return the parameters whose names begin otherwise."""
    return {name: x for name, x in parameters.items() if not name.startswith(excluded)}


CUSTOM_POOL = "docs.examples.pooling:WeightedMean"

CUSTOM_HEAD = "docs.examples.head:CosineHead"

CUSTOM = dataclasses.replace(
    VIT,
    pool=CUSTOM_POOL,
    head=CUSTOM_HEAD,
)


@pytest.fixture
def custom_folder(tmp_path):
    """A folder of weights with a custom pooling and head."""
    save_weights(
        weights_of(CUSTOM, class_names=NAMES),
        tmp_path / "w",
        OWN,
    )
    return tmp_path / "w"


def test_a_custom_pooling_and_head_are_saved_and_loaded(custom_folder):
    """The metadata name both classes."""
    message = r"architecture\.(pool|head)='docs.*--weights.allow_code=docs "
    with pytest.raises(ValueError, match=message):
        load_weights(custom_folder)

    weights = load_weights(custom_folder, allow_code=("docs",))

    assert weights.architecture == CUSTOM
    assert_same(weights.parameters, weights_of(CUSTOM).parameters)
    assert {"pooling/score", "head/vectors", "head/log_scale"} <= weights.parameters.keys()


def test_a_custom_head_is_replaced_for_other_classes_and_the_pooling_stays(custom_folder):
    weights = load_weights(custom_folder, allow_code=("docs",))
    target = adapt_architecture(
        CUSTOM,
        AdaptConfig(),
        image_size=CUSTOM.image_size,
        num_classes=7,
    )

    fitted = fit(remove_head(weights), target).parameters

    assert target.pool == CUSTOM_POOL
    assert target.head == "linear"
    assert fitted["head/linear/kernel"].shape == (CUSTOM.width, 7)
    assert_same(
        {"score": fitted["pooling/score"]},
        {"score": weights.parameters["pooling/score"]},
    )


def test_a_custom_head_has_no_hidden_layer_to_keep():
    changes = AdaptConfig(head="zero_keep_hidden")
    message = r"head='zero_keep_hidden'.*no hidden layer"

    with pytest.raises(ValueError, match=message):
        adapt_architecture(
            CUSTOM,
            changes,
            image_size=CUSTOM.image_size,
            num_classes=7,
        )


IN_OUR_FORMAT = ["sincos2d", "learned_2d", "postactivation", *OURS]

ROUND_TRIPS = [*EXACT, *((OWN, network) for network in IN_OUR_FORMAT)]


@pytest.mark.parametrize(("format_name", "network"), ROUND_TRIPS)
def test_round_trips_are_bit_exact_and_carry_everything(
    format_name,
    network,
    tmp_path,
):
    a = dataclasses.replace(
        (NETWORKS | OURS)[network],
        layer_norm_epsilon=3e-6,
        gelu="exact",
    )
    written = build_weights(a)
    path = build_path(tmp_path, format_name)
    again = path.with_name(f"again{path.suffix}")

    statuses, _ = save_weights(written, path, format_name)
    read = load_weights(path)
    save_weights(read, again, format_name)

    assert read.architecture == a
    assert read.class_names == written.class_names
    assert read.preprocessing == PREPROCESSING
    assert read.training == written.training
    assert_same(read.parameters, written.parameters)
    if format_name != OWN:
        assert again.read_bytes() == path.read_bytes()
        with open_arrays(path) as file:
            arrays = set(file.arrays)
        assert set(list_column(statuses, "name")) == arrays
        assert set(list_column(read.statuses, "name")) == arrays


@pytest.mark.parametrize(
    ("format_name", "pool", "form"),
    [
        ("released", "gap", "learned_2d"),
        ("timm", "token", "none"),
        ("huggingface", "token", "sincos2d"),
    ],
)
def test_other_positions_become_a_learned_table_that_computes_the_same(
    format_name,
    pool,
    form,
    tmp_path,
):
    a = dataclasses.replace(
        VIT,
        position_embedding=form,
        pool=pool,
    )
    parameters = networks.parameters(a)
    model = build_model(a, parameters)
    position_names = tuple(name for name in parameters if name.startswith("positions/"))
    path = build_path(tmp_path, format_name)

    statuses, notes = save_weights(build_weights(a), path, format_name)
    read = load_weights(path)
    (status,) = [status for status in statuses if status.status.startswith("made of")]

    assert read.architecture == dataclasses.replace(a, position_embedding="learned_1d")
    assert_array_equal(read.parameters["positions/table"], model.positions())
    assert_same(
        select_parameters(read.parameters, "positions/table"),
        select_parameters(parameters, "positions/"),
    )
    assert status.status == f"made of {form}"
    assert status.ours == position_names
    assert any(f"positions ({form}) are written as a learned table" in note for note in notes)


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("network", OURS)
def test_blocks_and_positions_that_no_other_format_has_are_rejected_by_name(
    format_name,
    network,
    tmp_path,
):
    message = rf"{format_name} cannot hold .* has (block|position_\w+)='.*: write vit_jax"

    with pytest.raises(ValueError, match=message):
        save_weights(
            weights_of(OURS[network]),
            tmp_path / "w",
            format_name,
        )

    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("format_name", ["released", "timm", "huggingface", OWN])
def test_without_the_head_the_features_remain(format_name, tmp_path):
    a = dataclasses.replace(VIT, head="mlp")
    path = build_path(tmp_path, format_name)
    kept = select_parameters(networks.parameters(a), "head/")
    no_classes = {
        "head/linear/kernel": np.zeros((16, 0), np.float32),
        "head/linear/bias": np.zeros(0, np.float32),
    }

    statuses, _ = save_weights(
        build_weights(a),
        path,
        format_name,
        without_head=True,
    )
    left_out = []
    for status in statuses:
        if status.status == "dropped":
            left_out.append(status.ours[0])

    read = load_weights(path)

    assert sorted(left_out) == [
        "head/hidden/bias",
        "head/hidden/kernel",
        "head/linear/bias",
        "head/linear/kernel",
    ]
    assert read.architecture == dataclasses.replace(VIT, num_classes=0)
    assert read.class_names is None
    assert_same(read.parameters, kept | no_classes)


def test_a_checkpoint_of_weights_alone_has_one_step(tmp_path):
    save_weights(build_weights(NETWORKS["resnet"]), tmp_path, OWN)
    # It replaces the first one.
    save_weights(build_weights(VIT), tmp_path, OWN)
    reader = CheckpointReader(tmp_path)

    assert load_weights(tmp_path).architecture == VIT
    assert reader.all_steps() == [0]
    assert reader.item_names(0) == {"model", "metadata"}


def test_a_checkpoint_of_weights_replaces_no_run(tmp_path):
    save_weights(build_weights(VIT), tmp_path, OWN)
    store = CheckpointStore(tmp_path)
    store.save(
        4,
        {"model": {"a": np.zeros(1, np.float32)}},
        metadata={},
        metrics={},
    )
    store.close()
    message = r"holds checkpoints of a run \(4\): choose another folder"

    with pytest.raises(ValueError, match=message):
        save_weights(weights_of(SQUARE), tmp_path, OWN)


def test_two_processes_save_into_one_folder(tmp_path, monkeypatch):
    """One saves completely while the other is between its arrays and the new name."""
    wait = CheckpointStore.wait
    calls = []

    def save_another_first(store):
        wait(store)
        if not calls:
            calls.append(store)
            save_weights(build_weights(NETWORKS["resnet"]), tmp_path, OWN)

    monkeypatch.setattr(CheckpointStore, "wait", save_another_first)

    save_weights(build_weights(VIT), tmp_path, OWN)

    assert load_weights(tmp_path).architecture == VIT
    assert sorted(path.name for path in tmp_path.iterdir()) == ["README.md", "checkpoints"]


@pytest.fixture(scope="module")
def many_classes():
    """Weights with more class names than an .npz has room for."""
    rng = np.random.default_rng(0)
    names = tuple(rng.bytes(12).hex() for _ in range(9000))
    return weights_of(
        dataclasses.replace(VIT, num_classes=9000),
        class_names=names,
    )


def test_class_names_for_which_a_npz_has_no_room_stand_beside(tmp_path, many_classes):
    names = many_classes.class_names
    path = tmp_path / "w.npz"

    _, notes = save_weights(many_classes, path, "released")
    read = load_weights(path)

    assert (tmp_path / "w.npz.classes.txt").read_text().splitlines() == list(names)
    assert any("no room for 9,000 class names: they are in" in note for note in notes)
    assert read.class_names == names
    assert read.notes == []


@pytest.mark.parametrize("has_room", [True, False])
def test_training_data_without_room_for_their_classes_are_not_stored(
    has_room,
    tmp_path,
    many_classes,
):
    classes = () if has_room else many_classes.class_names
    training = dataclasses.replace(TRAINING, classes=classes)
    path = tmp_path / "w.npz"

    save_weights(
        dataclasses.replace(many_classes, training=training),
        path,
        "released",
    )

    assert load_weights(path).training == (TRAINING if has_room else None)


def test_class_names_beside_that_are_no_text_are_an_error(tmp_path, many_classes):
    path = tmp_path / "w.npz"
    save_weights(many_classes, path, "released")
    (tmp_path / "w.npz.classes.txt").write_bytes(b"\xff")
    message = r"w\.npz\.classes\.txt: 'utf-8' codec can't decode"

    with pytest.raises(ValueError, match=message):
        load_weights(path)


def test_class_names_that_were_left_behind_are_missed(tmp_path, many_classes):
    names = many_classes.class_names
    save_weights(many_classes, tmp_path / "w.npz", "released")
    moved = (tmp_path / "w.npz").rename(tmp_path / "moved.npz")

    read = load_weights(moved)

    assert read.class_names is None
    assert read.notes == [
        f"Its class names should be in {moved}.classes.txt, which does not exist: "
        "fetch it, or give class_names."
    ]
    assert load_weights(moved, class_names=names).class_names == names


def test_class_names_of_several_lines_cannot_stand_beside(tmp_path, many_classes):
    names = ("two\nlines", *many_classes.class_names[1:])
    odd = dataclasses.replace(many_classes, class_names=names)

    with pytest.raises(ValueError, match="class names of several lines"):
        save_weights(odd, tmp_path / "w.npz", "released")


def save_and_read_notes(weights, path, format_name):
    _, notes = save_weights(weights, path, format_name)
    return notes


def test_notes_say_where_readers_of_a_format_compute_otherwise(tmp_path):
    exact = dataclasses.replace(VIT, gelu="exact")

    to_timm = save_and_read_notes(weights_of(VIT), tmp_path / "w.safetensors", "timm")
    to_released = save_and_read_notes(weights_of(exact), tmp_path / "w.npz", "released")

    assert len(to_timm) == 1
    assert "go with gelu=tanh; readers of timm files compute with exact" in to_timm[0]
    assert "compute with tanh" in to_released[0]


def test_a_folder_needs_no_notes_because_its_config_has_the_facts(tmp_path):
    assert save_and_read_notes(build_weights(VIT), tmp_path / "folder", "timm") == []


def test_a_note_says_that_timm_ignores_a_hidden_layer(tmp_path):
    notes = save_and_read_notes(
        weights_of(NETWORKS["mlp_head"]),
        tmp_path / "h.npz",
        "released",
    )

    assert notes == ["timm silently ignores the hidden layer of the head (pre_logits)."]


def test_notes_of_a_hybrid_name_every_constant(tmp_path):
    notes = save_and_read_notes(
        weights_of(NETWORKS["hybrid"]),
        tmp_path / "w.safetensors",
        "timm",
    )
    fields = []
    for note in notes:
        fields.append(note.split("=")[0].split()[-1])

    assert fields == [
        "gelu",
        "group_norm_epsilon",
        "standardization_epsilon",
        "standardization_epsilon_added_to",
    ]
