"""Each set as TFDS and as its archive has it: which outputs take part, which answers are right, what is missing."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

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


@pytest.fixture(scope="module")
def unnamed():
    return make_weights(None, format="released")


@pytest.fixture(scope="module")
def logits(unnamed):
    return logits_of(from_weights(unnamed).module, PIXELS)


@pytest.fixture
def labels(logits):
    """Half of them are the network's first answer, so that it is right now and then, also within a subset."""

    def choose(subset=""):
        members = classes.members(subset)
        chosen = np.random.default_rng(6).choice(members, COUNT)
        chosen[::2] = members[logits[::2, members].argmax(axis=1)]
        return chosen

    return choose


def examples(labels, key="label", **more):
    rows = [
        dict(zip(more, values, strict=True)) for values in zip(*more.values(), strict=True)
    ] or [{}] * COUNT
    return [
        {"image": to_png(image), key: int(label), "file_name": name, **row}
        for image, label, name, row in zip(PIXELS, labels, FILES, rows, strict=True)
    ]


def write_folder(folder, labels, names=IDS):
    for image, label, name in zip(PIXELS, labels, FILES, strict=True):
        path = folder / names[label] / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(to_png(image))


def accuracy(logits, labels, subset=""):
    """(top 1, top 5) of the answers among the classes of a subset."""
    members = classes.members(subset)
    first = members[np.argsort(-logits[:, members], axis=1)[:, :5]]
    is_right = first == labels[:, None]
    return is_right[:, 0].mean(), is_right.any(axis=1).mean()


def evaluated(folder, *words, weights="w.npz"):
    """What `evaluate --json` finds, and the notes."""
    code, out, err = run(
        ["evaluate", str(folder / weights), f"--data_dir={folder}", "--json", *words]
    )
    assert code == 0, err
    return json.loads(out), err


@pytest.fixture
def here(tmp_path, unnamed):
    save_weights(unnamed, tmp_path / "w.npz", "released")
    return tmp_path


SINGLE = [one for one in SETS if one.name not in ("real", "objectnet")]


def test_the_whole_family(here, logits, labels):
    """Every set of TFDS at once, ReaL among them, and ObjectNet's absence; each by NumPy."""
    expected = {}
    for one in SINGLE:
        prepare(here, one.dataset, examples(labels(one.subset)))
        expected[one.name] = accuracy(logits, labels(one.subset), one.subset)

    sets = [[int(row.argmax())] if n % 3 else [] for n, row in enumerate(logits)]
    prepare(here, "imagenet2012_real", examples(labels(), "original_label", real_label=sets))
    found, notes = evaluated(here, "--data=imagenet")

    assert list(found["sets"]) == [one.name for one in SETS if one.name != "objectnet"]

    for name, (top1, top5) in expected.items():
        values = found["sets"][name]

        assert (values["accuracy"], values["top5_accuracy"]) == (
            pytest.approx(top1),
            pytest.approx(top5),
        ), name
        assert values["images"] == COUNT
        assert values["loss"] > 0

    unrestricted = accuracy(logits, labels("A"))[0]
    restricted = expected["a"][0]

    assert unrestricted < restricted, "or the restriction would prove nothing"

    real = found["sets"]["real"]
    assert (real["accuracy"], real["images"], real["loss"]) == (1, sum(map(bool, sets)), None)
    assert list(found["absent"]) == ["objectnet"]
    assert (
        "note: imagenet:objectnet is missing: unpack its archive, so that objectnet-1.0/images is in"
        in notes
    )
    assert "imagenet:a has 23 images here, and 7,500 were released." in notes

    out = succeed(["evaluate", str(here / "w.npz"), "--data=imagenet:a,v2", f"--data_dir={here}"])
    names = [line.split()[0] for line in out.splitlines()[4:]]

    assert names == ["a", "v2/matched-frequency", "v2/threshold-0.7", "v2/topimages"]


@pytest.mark.parametrize("one", SINGLE, ids=lambda one: one.name)
def test_a_set_as_its_archive_unpacks(here, logits, labels, one):
    """V2's folders are numbers, whose order as words is another."""
    chosen = labels(one.subset)
    write_folder(
        here / one.folders[-1], chosen, tuple(map(str, range(1000))) if "v2" in one.name else IDS
    )
    found, _ = evaluated(here, f"--data=imagenet:{one.name}")
    values = found["sets"][one.name]
    top1, top5 = accuracy(logits, chosen, one.subset)

    assert (values["accuracy"], values["top5_accuracy"]) == (
        pytest.approx(top1),
        pytest.approx(top5),
    )
    assert f"folder:{here / one.folders[-1]}" in values["data"]


def test_answers_outside_a_subset_are_not_given(here, unnamed, labels):
    """By hand: of three classes two are allowed; the third is the network's first answer and takes no part."""
    prepare(here, "imagenet_a", examples(labels("A")))
    label_map = open_family("imagenet:a", unnamed, data_dir=str(here))[0]["a"].label_map

    assert np.array_equal(np.flatnonzero(label_map.is_allowed_K), classes.members("A"))
    assert np.array_equal(label_map.listed, classes.members("A"))

    report = here / "report"
    evaluated(here, "--data=imagenet:a", f"--report={report}")
    answers = {line.split(",")[2] for line in (report / "images.csv").read_text().splitlines()[1:]}

    assert answers <= {classes.class_names()[number] for number in classes.members("A")}
    assert len((report / "classes.csv").read_text().splitlines()) == 201


def test_a_head_of_more_classes_is_mapped_by_wordnet_id(here, logits, labels):
    """The same parameters among others, in another order: the same figures, though outputs of no class are higher."""
    weights = make_weights(None, format="released")
    order = np.random.default_rng(2).permutation(1400)[:1000]
    names = np.array([f"n{90_000_000 + place}" for place in range(1400)], object)
    names[order] = IDS
    parameters = dict(weights.parameters)
    for name, fill in (("head/linear/kernel", 0.0), ("head/linear/bias", 1e3)):
        wide = np.full((*parameters[name].shape[:-1], 1400), fill, np.float32)
        wide[..., order] = parameters[name]
        parameters[name] = wide

    a = dataclasses.replace(weights.architecture, num_classes=1400)
    wide = dataclasses.replace(
        weights, architecture=a, parameters=parameters, class_names=tuple(names), format=""
    )
    save_weights(wide, here / "wide.npz", "released")
    write_folder(here / "val", labels())
    found, _ = evaluated(here, "--data=imagenet:validation", weights="wide.npz")
    same, _ = evaluated(here, "--data=imagenet:validation")
    wide = found["sets"]["validation"]
    narrow = same["sets"]["validation"]

    for name in ("accuracy", "top5_accuracy"):
        assert wide[name] == narrow[name]
    for name in ("loss", "calibration_error"):
        assert wide[name] == pytest.approx(narrow[name], rel=1e-4)
    assert wide["most_confused"] == narrow["most_confused"], "names are ImageNet's"


def test_a_class_that_the_head_lacks_is_never_right(here, logits, labels):
    """Without the output of the class that most images have been given as their label."""
    chosen = labels()
    lacking = int(chosen[0])
    kept = np.delete(np.arange(1000), lacking)
    weights = make_weights(None, format="released")
    parameters = {
        name: p[..., kept] if name.startswith("head/") else p
        for name, p in weights.parameters.items()
    }
    a = dataclasses.replace(weights.architecture, num_classes=999)
    names = tuple(IDS[number] for number in kept)
    lean = dataclasses.replace(
        weights, architecture=a, parameters=parameters, class_names=names, format=""
    )
    save_weights(lean, here / "lean.npz", "released")
    write_folder(here / "val", chosen)
    found, notes = evaluated(here, "--data=imagenet:validation", weights="lean.npz")
    values = found["sets"]["validation"]
    first = kept[logits[:, kept].argmax(axis=1)]

    assert (values["accuracy"], values["loss"]) == (
        pytest.approx((first == chosen).mean()),
        None,
    )
    assert (
        f"has no output for {classes.class_names()[lacking]}, which are never its answer" in notes
    )


# ReaL.


@pytest.mark.parametrize("form", ["tfds", "tfds and file", "folder and file"])
def test_real_by_hand(here, logits, labels, form):
    """Image n has the network's answer of place n % 4 among its two labels, or none; the first answer is right where
    that is place 0, and one of the first five is right wherever there are labels.
    """
    order = np.argsort(-logits, axis=1)
    sets = [[int(order[n, 500]), int(order[n, n % 4])] if n % 5 else [] for n in range(COUNT)]
    words = ["--data=imagenet:real"]
    if form == "tfds":
        prepare(here, "imagenet2012_real", examples(labels(), "original_label", real_label=sets))
    else:
        (here / "real.json").write_text(json.dumps(sets))
        words.append(f"--real={here / 'real.json'}")

    if form == "tfds and file":
        prepare(here, "imagenet2012", examples(labels()))
    elif form == "folder and file":
        write_folder(here / "val", labels())

    found, _ = evaluated(here, *words, f"--report={here / 'report'}")
    values = found["sets"]["real"]
    counted = [n for n in range(COUNT) if n % 5]

    assert values["images"] == len(counted) == 18
    assert values["accuracy"] == pytest.approx(np.mean([n % 4 == 0 for n in counted]))
    assert values["top5_accuracy"] == 1
    assert values["loss"] is None

    rows = [
        line.rsplit(",", 1)[1]
        for line in (here / "report" / "images.csv").read_text().splitlines()[1:]
    ]
    assert sorted(rows) == sorted(str(int(n % 4 == 0)) for n in counted)


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ("no json", "real.json.*JSON"),
        ('{"a": 1}', "real.json.*0 to 999"),
        ("[[1], [1000]]", "real.json.*0 to 999"),
        ("[[1], [2]]", "ILSVRC2012_val_00000003.JPEG.*real.json.*2 lists"),
        ("[" + ", ".join(["[]"] * COUNT) + "]", "no image has a label"),
    ],
)
def test_files_that_are_not_reals(here, unnamed, content, rule):
    write_folder(here / "val", np.arange(COUNT))
    (here / "real.json").write_text(content)

    with rejects("", rule):
        open_family("imagenet:real", unnamed, data_dir=str(here), real=str(here / "real.json"))


# ObjectNet.

FOLDERS = {"alarm_clock": "Alarm clock", "banana": "Banana", "briefcase": "Briefcase"}
OBJECTS = {"Alarm clock": "analog clock; digital clock", "Banana": "banana"}
RIGHT = {"alarm_clock": (409, 530), "banana": (954,)}


def write_objectnet(root, pixels, folders):
    """Images within a red border of two pixels."""
    for number, (image, folder) in enumerate(zip(pixels, folders, strict=True)):
        framed = np.full((image.shape[0] + 4, image.shape[1] + 4, 3), (255, 0, 0), np.uint8)
        framed[2:-2, 2:-2] = image
        path = root / "objectnet-1.0" / "images" / folder / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(to_png(framed))
    mappings = root / "objectnet-1.0" / "mappings"
    mappings.mkdir()
    (mappings / "folder_to_objectnet_label.json").write_text(json.dumps(FOLDERS))
    (mappings / "objectnet_to_imagenet_1k.json").write_text(json.dumps(OBJECTS))


def test_objectnet(here, unnamed, logits):
    """The answer is right where it is one of the object's classes; objects that ImageNet does not have are left out."""
    folders = [("alarm_clock", "banana", "briefcase")[n % 3] for n in range(COUNT)]
    write_objectnet(here, PIXELS, folders)
    labelled = open_family("imagenet:objectnet", unnamed, data_dir=str(here))[0]["objectnet"]
    kept = sorted((folder, n) for n, folder in enumerate(folders) if folder != "briefcase")

    assert len(labelled.source) == len(kept)
    for index, (folder, number) in enumerate(kept):
        assert np.array_equal(labelled.source[index].image, PIXELS[number]), (
            "not a pixel more or less is removed"
        )
        assert labelled.source.class_names[labelled.source[index].label] == folder

    found, _ = evaluated(here, "--data=imagenet:objectnet")
    first = np.argsort(-logits, axis=1)[:, :5]
    rights = np.array([np.isin(first[number], RIGHT[folder]) for folder, number in kept])
    values = found["sets"]["objectnet"]

    assert values["accuracy"] == pytest.approx(rights[:, 0].mean())
    assert values["top5_accuracy"] == pytest.approx(rights.any(axis=1).mean())

    label_map = labelled.label_map
    answers = np.array([[409, 530, 954, 0]] * len(kept))
    labels = labelled.source.labels
    by_hand = [
        [True, True, False, False] if label == 0 else [False, False, True, False]
        for label in labels
    ]

    assert label_map.is_right(np.arange(len(kept)), labels, answers).tolist() == by_hand


def test_objectnet_without_its_mappings(here, unnamed):
    write_objectnet(here, PIXELS[:2], ["alarm_clock", "banana"])
    mapping = here / "objectnet-1.0" / "mappings" / "objectnet_to_imagenet_1k.json"
    for content, rule in (
        ('{"Banana": "bananas"}', "mappings"),
        ('{"Banana": 7}', "mappings"),
        ("{}", "no class"),
    ):
        mapping.write_text(content)
        with rejects("objectnet", rule):
            open_family("imagenet:objectnet", unnamed, data_dir=str(here))

    shutil.rmtree(mapping.parent)

    with rejects("folder_to_objectnet_label.json", "read"):
        open_family("imagenet:objectnet", unnamed, data_dir=str(here))


# What is not there, and what is not meant.


def test_nothing_is_there(here, unnamed):
    with rejects("imagenet:a") as error:
        open_family("imagenet", unnamed, data_dir=str(here))

    lines = str(error.value).splitlines()
    assert len(lines) == len(SETS)
    for name, said in (
        (
            "validation",
            f"vit-jax prepare imagenet2012 --data_dir={here} --manual_dir=FOLDER, which holds ILSVRC",
        ),
        ("real", "or give --real=real.json"),
        (
            "v2/topimages",
            f"vit-jax prepare imagenet_v2/topimages --data_dir={here}; or unpack its archive, so that",
        ),
        (
            "sketch",
            f"vit-jax prepare imagenet_sketch --data_dir={here}; or unpack its archive, so that sketch is in",
        ),
    ):
        assert any(line.startswith(f"imagenet:{name} is") and said in line for line in lines), name


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
    for one in (one for one in SETS if one.subset):
        write_folder(here / one.folders[0], labels(one.subset))

    code, out, err = run(["evaluate", str(here / "w.npz"), f"--data_dir={here}", *words])

    assert (code, out) == (2, "")
    assert message in err


def test_classes_of_another_set_are_rejected(here, unnamed):
    others = np.setdiff1d(np.arange(1000), classes.members("R"))[:COUNT]
    write_folder(here / "imagenet-r", others)

    with rejects("imagenet:r", IDS[others[0]]):
        open_family("imagenet:r", unnamed, data_dir=str(here))
