"""Each set of ImageNet in the form of TFDS and of its archive.

Tests show which outputs take part, which predictions are right, and how missing sets are reported.
"""

import dataclasses
import itertools
import json
import shutil

import numpy as np
import pytest

from tests.columns import list_column
from tests.evals.samples import logits_of, sample_pixels, to_png
from tests.evals.small_sets import prepare
from tests.evals.test_imagenet_classes import IDS, make_weights
from tests.integration.commands import run, succeed
from tests.rejections import rejects
from vit_jax.api import from_weights
from vit_jax.evals import imagenet_classes as classes
from vit_jax.tools.prepare.imagenet_sets import SETS, open_family
from vit_jax.weights.saving import save_weights

COUNT = 23
PIXELS = sample_pixels(COUNT)
FILES = [f"ILSVRC2012_val_{number + 1:08}.JPEG" for number in range(COUNT)]


def check_sets(sets, expected):
    """Every set with one label an image has the accuracy by NumPy, all images and a loss."""
    names = list_column(SETS, "name")
    names.remove("objectnet")

    assert list(sets) == names
    for name, accuracies in expected.items():
        values = sets[name]
        check_accuracy(values, accuracies)
        assert values["images"] == COUNT
        assert values["loss"] > 0


@pytest.fixture(scope="module")
def unnamed():
    return make_weights(None, format="released")


@pytest.fixture(scope="module")
def logits(unnamed):
    model = from_weights(unnamed)
    return logits_of(model.module, PIXELS)


@pytest.fixture
def labels(logits):
    """Return a function that makes labels.

    Half of them are the first prediction, also within a subset.
    """

    def choose(subset=""):
        members = classes.members(subset)
        rng = np.random.default_rng(6)
        chosen = rng.choice(members, COUNT)
        predictions = logits[:, members].argmax(axis=1)
        chosen[::2] = members[predictions[::2]]
        return chosen

    return choose


def make_examples(labels, key="label", **fields):
    """Return examples of TFDS; `fields` are lists of further values."""
    rows = []
    for n, label in enumerate(labels):
        row = {
            "image": to_png(PIXELS[n]),
            key: int(label),
            "file_name": FILES[n],
        }
        for name, values in fields.items():
            row[name] = values[n]
        rows.append(row)
    return rows


def write_folder(folder, labels, names=IDS):
    for image, label, name in zip(PIXELS, labels, FILES, strict=True):
        path = folder / names[label] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(to_png(image))


def compute_accuracy(logits, labels, subset=""):
    """Return top-1 and top-5 accuracy among the classes of a subset."""
    members = classes.members(subset)
    order = np.argsort(-logits[:, members], axis=1)
    top5_N5 = members[order[:, :5]]
    return average_right(top5_N5 == labels[:, None])


def average_right(is_right_N5):
    """Return top-1 and top-5 accuracy."""
    is_first_right = is_right_N5[:, 0]
    is_any_right = is_right_N5.any(axis=1)
    return is_first_right.mean(), is_any_right.mean()


def evaluate(folder, *words, weights="w.npz"):
    """Return the result of `evaluate --json`, and the notes."""
    command = [
        "evaluate",
        str(folder / weights),
        f"--data_dir={folder}",
        "--json",
        *words,
    ]
    code, out, err = run(command)
    assert code == 0, err
    return json.loads(out), err


def evaluate_set(folder, name, **options):
    """Return the metrics of one set."""
    result, _ = evaluate(folder, f"--data=imagenet:{name}", **options)
    return result["sets"][name]


def check_accuracy(values, expected):
    top1, top5 = expected
    assert values["accuracy"] == pytest.approx(top1)
    assert values["top5_accuracy"] == pytest.approx(top5)


def open_set(folder, name, weights):
    labelled, *_ = open_family(
        f"imagenet:{name}",
        weights,
        data_dir=str(folder),
    )
    return labelled[name]


def read_rows(path):
    """Return the rows of a table without its header."""
    _, *lines = path.read_text().splitlines()
    return [line.split(",") for line in lines]


@pytest.fixture
def here(tmp_path, unnamed):
    save_weights(unnamed, tmp_path / "w.npz", "released")
    return tmp_path


SINGLE = [one for one in SETS if one.name not in ("real", "objectnet")]


def test_the_whole_family(here, logits, labels):
    """Every set of TFDS is evaluated at once, including ReaL; ObjectNet is reported as missing."""
    expected = {}
    for one in SINGLE:
        chosen = labels(one.subset)
        prepare(here, one.dataset, make_examples(chosen))
        expected[one.name] = compute_accuracy(logits, chosen, one.subset)
    real_labels = []
    for n, label in enumerate(logits.argmax(axis=1)):
        real_labels.append([int(label)] if n % 3 else [])
    real = make_examples(
        labels(),
        "original_label",
        real_label=real_labels,
    )
    prepare(here, "imagenet2012_real", real)

    found, notes = evaluate(here, "--data=imagenet")

    check_sets(found["sets"], expected)
    values = found["sets"]["real"]
    assert values["accuracy"] == 1
    assert values["images"] == sum(map(bool, real_labels))
    assert values["loss"] is None

    advice = "unpack its archive, so that objectnet-1.0/images is in"
    assert list(found["absent"]) == ["objectnet"]
    assert f"note: imagenet:objectnet is missing: {advice}" in notes
    assert "imagenet:a has 23 images here, and 7,500 were released." in notes

    unrestricted, _ = compute_accuracy(logits, labels("A"))
    assert unrestricted < expected["a"][0], "or the restriction would prove nothing"


def test_some_sets_of_the_family(here, labels):
    for one in SINGLE:
        if one.name == "a" or one.name.startswith("v2/"):
            examples = make_examples(labels(one.subset))
            prepare(here, one.dataset, examples)

    out = succeed(
        [
            "evaluate",
            str(here / "w.npz"),
            "--data=imagenet:a,v2",
            f"--data_dir={here}",
        ]
    )

    names = []
    for line in out.splitlines()[4:]:
        name, *_ = line.split()
        names.append(name)

    assert names == [
        "a",
        "v2/matched-frequency",
        "v2/threshold-0.7",
        "v2/topimages",
    ]


@pytest.mark.parametrize("one", SINGLE, ids=lambda one: one.name)
def test_a_set_as_its_archive_unpacks(here, logits, labels, one):
    """V2's folders are numbers, whose order as words is another."""
    folder = here / one.folders[-1]
    names = IDS
    if "v2" in one.name:
        names = list(map(str, range(1000)))
    chosen = labels(one.subset)
    write_folder(folder, chosen, names)
    expected = compute_accuracy(logits, chosen, one.subset)

    values = evaluate_set(here, one.name)

    check_accuracy(values, expected)
    assert f"folder:{folder}" in values["data"]


def test_classes_outside_a_subset_are_not_predicted(here, unnamed, labels):
    """The first prediction of the network takes no part if its class is not in the subset."""
    members = classes.members("A")
    class_names = classes.class_names()
    member_names = {class_names[number] for number in members}
    report = here / "report"
    examples = make_examples(labels("A"))
    prepare(here, "imagenet_a", examples)

    label_map = open_set(here, "a", unnamed).label_map
    evaluate(here, "--data=imagenet:a", f"--report={report}")
    allowed = np.flatnonzero(label_map.is_allowed_K)
    predictions = list_column(read_rows(report / "images.csv"), 2)

    assert np.array_equal(allowed, members)
    assert np.array_equal(label_map.listed, members)
    assert set(predictions) <= member_names
    assert len(read_rows(report / "classes.csv")) == 200


def replace_head(weights, parameters, class_names):
    """Return the weights with a head of these classes."""
    architecture = dataclasses.replace(
        weights.architecture,
        num_classes=len(class_names),
    )
    return dataclasses.replace(
        weights,
        architecture=architecture,
        parameters=parameters,
        class_names=tuple(class_names),
        format="",
    )


def test_a_head_of_more_classes_is_mapped_by_wordnet_id(here, labels):
    """The same parameters in another order have the same metrics, though outputs of no class are
    higher.
    """
    weights = make_weights(None, format="released")
    rng = np.random.default_rng(2)
    order = rng.permutation(1400)[:1000]
    names = [f"n{90_000_000 + place}" for place in range(1400)]
    for place, name in zip(order, IDS, strict=True):
        names[place] = name

    def widen(array, fill):
        wide = np.full((*array.shape[:-1], 1400), fill, np.float32)
        wide[..., order] = array
        return wide

    parameters = dict(weights.parameters)
    for name, fill in (
        ("head/linear/kernel", 0.0),
        ("head/linear/bias", 1e3),
    ):
        parameters[name] = widen(parameters[name], fill)
    save_weights(
        replace_head(weights, parameters, names),
        here / "wide.npz",
        "released",
    )
    write_folder(here / "val", labels())

    wide = evaluate_set(here, "validation", weights="wide.npz")
    narrow = evaluate_set(here, "validation")

    # The names of the confused classes are ImageNet's.
    for name in ("accuracy", "top5_accuracy", "most_confused"):
        assert wide[name] == narrow[name]
    for name in ("loss", "calibration_error"):
        assert wide[name] == pytest.approx(narrow[name], rel=1e-4)


def test_a_class_that_the_head_lacks_is_never_right(here, logits, labels):
    """The head has no output for the class that is the label of most images."""
    chosen = labels()
    lacking = int(chosen[0])
    kept = np.delete(np.arange(1000), lacking)
    weights = make_weights(None, format="released")
    parameters = dict(weights.parameters)
    for name in parameters:
        if name.startswith("head/"):
            parameters[name] = parameters[name][..., kept]
    names = [IDS[number] for number in kept]
    save_weights(
        replace_head(weights, parameters, names),
        here / "lean.npz",
        "released",
    )
    write_folder(here / "val", chosen)

    is_right = kept[logits[:, kept].argmax(axis=1)] == chosen
    lacking_name = classes.class_names()[lacking]

    found, notes = evaluate(
        here,
        "--data=imagenet:validation",
        weights="lean.npz",
    )
    values = found["sets"]["validation"]

    assert values["accuracy"] == pytest.approx(is_right.mean())
    assert values["loss"] is None
    assert f"has no output for {lacking_name}, which are never its answer" in notes


def label_real(order):
    """Return two labels for four of five images, and none for the others.

    Image n has the class on place n % 4 among its labels, so the first prediction is right where that
    place is 0, and one of the first five is right wherever there are labels.
    """
    real_labels = []
    for n in range(COUNT):
        labels = []
        if n % 5 != 0:
            labels = [int(order[n, 500]), int(order[n, n % 4])]
        real_labels.append(labels)
    return real_labels


@pytest.mark.parametrize("form", ["tfds", "tfds and file", "folder and file"])
def test_real_by_hand(here, logits, labels, form):
    real_labels = label_real(np.argsort(-logits, axis=1))
    words = ["--data=imagenet:real", f"--report={here / 'report'}"]
    if form == "tfds":
        rows = make_examples(
            labels(),
            "original_label",
            real_label=real_labels,
        )
        prepare(here, "imagenet2012_real", rows)
    else:
        (here / "real.json").write_text(json.dumps(real_labels))
        words.append(f"--real={here / 'real.json'}")

    if form == "tfds and file":
        prepare(here, "imagenet2012", make_examples(labels()))
    elif form == "folder and file":
        write_folder(here / "val", labels())

    found, _ = evaluate(here, *words)

    values = found["sets"]["real"]
    numbers = np.arange(COUNT)
    labelled = numbers[numbers % 5 != 0]
    num_right = sum(labelled % 4 == 0)

    assert len(labelled) == 18
    assert values["images"] == 18
    assert values["accuracy"] == pytest.approx(num_right / 18)
    assert values["top5_accuracy"] == 1
    assert values["loss"] is None

    rows = read_rows(here / "report/images.csv")
    is_right = list_column(rows, -1)

    assert len(is_right) == 18
    assert is_right.count("1") == num_right


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ("no json", "real.json.*JSON"),
        ('{"a": 1}', "real.json.*0 to 999"),
        ("[[1], [1000]]", "real.json.*0 to 999"),
        ("[[1], [2]]", "ILSVRC2012_val_00000003.JPEG.*real.json.*2 lists"),
        (json.dumps([[]] * COUNT), "no image has a label"),
    ],
)
def test_files_that_are_not_reals(here, unnamed, content, rule):
    write_folder(here / "val", np.arange(COUNT))
    (here / "real.json").write_text(content)

    with rejects("", rule):
        open_family(
            "imagenet:real",
            unnamed,
            data_dir=str(here),
            real=str(here / "real.json"),
        )


FOLDERS = {
    "alarm_clock": "Alarm clock",
    "banana": "Banana",
    "briefcase": "Briefcase",
}
OBJECTS = {
    "Alarm clock": "analog clock; digital clock",
    "Banana": "banana",
}
RIGHT = {"alarm_clock": (409, 530), "banana": (954,)}


def add_red_border(image):
    height, width, _ = image.shape
    framed = np.zeros((height + 4, width + 4, 3), np.uint8)
    framed[..., 0] = 255
    framed[2:-2, 2:-2] = image
    return framed


def write_objectnet(root, pixels, folders):
    """Write images within a red border of two pixels, and the mappings."""
    for number, folder in enumerate(folders):
        path = root / "objectnet-1.0/images" / folder / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        framed = add_red_border(pixels[number])
        path.write_bytes(to_png(framed))

    mappings = root / "objectnet-1.0/mappings"
    mappings.mkdir()
    for name, mapping in (
        ("folder_to_objectnet_label", FOLDERS),
        ("objectnet_to_imagenet_1k", OBJECTS),
    ):
        path = mappings / f"{name}.json"
        path.write_text(json.dumps(mapping))


@pytest.fixture
def objectnet(here):
    """Write ObjectNet.

    Return (folder, number) of the images whose objects ImageNet has, in their order.
    """
    cycle = itertools.cycle(FOLDERS)
    folders = list(itertools.islice(cycle, COUNT))
    write_objectnet(here, PIXELS, folders)

    known = []
    for n, folder in enumerate(folders):
        if folder != "briefcase":
            known.append((folder, n))
    return sorted(known)


def test_images_of_objectnet(here, unnamed, objectnet):
    """Objects that ImageNet does not have are excluded, and exactly the border is removed."""
    source = open_set(here, "objectnet", unnamed).source

    assert len(source) == len(objectnet)
    for index, (folder, number) in enumerate(objectnet):
        record = source[index]
        assert np.array_equal(record.image, PIXELS[number])
        assert source.class_names[record.label] == folder


def test_accuracy_of_objectnet(here, logits, objectnet):
    """A prediction is right if it is one of the object's classes."""
    top5 = np.argsort(-logits, axis=1)[:, :5]
    is_right = []
    for folder, number in objectnet:
        is_right.append(np.isin(top5[number], RIGHT[folder]))
    expected = average_right(np.array(is_right))

    values = evaluate_set(here, "objectnet")

    check_accuracy(values, expected)


def test_right_predictions_of_objectnet(here, unnamed, objectnet):
    labelled = open_set(here, "objectnet", unnamed)
    labels = labelled.source.labels
    count = len(objectnet)
    predictions = np.tile([409, 530, 954, 0], (count, 1))
    alarm_clock = [True, True, False, False]
    banana = [False, False, True, False]

    is_right = labelled.label_map.is_right(
        np.arange(count),
        labels,
        predictions,
    )

    for row, label in zip(is_right.tolist(), labels, strict=True):
        assert row == (alarm_clock if label == 0 else banana)


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ('{"Banana": "bananas"}', "mappings"),
        ('{"Banana": 7}', "mappings"),
        ("{}", "no class"),
    ],
)
def test_objectnet_with_a_wrong_mapping(here, unnamed, content, rule):
    write_objectnet(here, PIXELS[:2], ["alarm_clock", "banana"])
    mapping = here / "objectnet-1.0/mappings/objectnet_to_imagenet_1k.json"
    mapping.write_text(content)

    with rejects("objectnet", rule):
        open_set(here, "objectnet", unnamed)


def test_objectnet_without_its_mappings(here, unnamed):
    write_objectnet(here, PIXELS[:2], ["alarm_clock", "banana"])
    shutil.rmtree(here / "objectnet-1.0" / "mappings")

    with rejects("folder_to_objectnet_label.json", "read"):
        open_set(here, "objectnet", unnamed)


def test_missing_sets_are_listed_with_their_commands(here, unnamed):
    prepared = f"vit-jax prepare {{}} --data_dir={here}"
    validation = prepared.format("imagenet2012")
    topimages = prepared.format("imagenet_v2/topimages")
    sketch = prepared.format("imagenet_sketch")
    expected = {
        "validation": f"{validation} --manual_dir=FOLDER, which holds ILSVRC",
        "real": "or give --real=real.json",
        "v2/topimages": f"{topimages}; or unpack its archive, so that",
        "sketch": f"{sketch}; or unpack its archive, so that sketch is in",
    }

    with rejects("imagenet:a") as error:
        open_family("imagenet", unnamed, data_dir=str(here))

    lines = str(error.value).splitlines()
    assert len(lines) == len(SETS)
    for name, advice in expected.items():
        (line,) = [line for line in lines if line.startswith(f"imagenet:{name} is")]
        assert advice in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data=imagenet:sketsh"], "Did you mean 'sketch'? Known: validation, real, v2/"),
        (["--data=imagenet:a", "--real=r.json"], "--real=r.json: without effect on imagenet:a"),
        (
            ["--data=imagenet:a", "--split=test", "--seed=1"],
            "--split=test, --seed=1: has no effect on imagenet:a",
        ),
        (["--data=digits", "--real=r.json"], "--real=r.json: has no effect on digits"),
        (["--data=imagenet:a,r", "--csv=x.csv"], "--csv="),
    ],
)
def test_wrong_words(here, labels, words, message):
    for one in SETS:
        if one.subset:
            write_folder(here / one.folders[0], labels(one.subset))

    code, out, err = run(
        [
            "evaluate",
            str(here / "w.npz"),
            f"--data_dir={here}",
            *words,
        ]
    )

    assert (code, out) == (2, "")
    assert message in err


def test_classes_of_another_set_are_rejected(here, unnamed):
    others = np.setdiff1d(np.arange(1000), classes.members("R"))[:COUNT]
    write_folder(here / "imagenet-r", others)

    with rejects("imagenet:r", IDS[others[0]]):
        open_family("imagenet:r", unnamed, data_dir=str(here))
