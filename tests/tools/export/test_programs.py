"""Exported programs run without this package, on any number of images, and return the result of
`predict`.
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

import cv2
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.tree_util import Partial
from numpy.testing import assert_allclose

from tests.data.decoding.test_images import (
    build_area_weights,
    build_bilinear_weights,
    resize_by_weights,
)
from tests.evals.samples import (
    CROPPED,
    DIRECT,
    NAMES,
    SEVEN,
    logits_of,
    sample_pixels,
    sample_weights,
    softmax,
    to_png,
    write_pngs,
)
from tests.rejections import rejects
from tests.weights.small_networks import HYBRID, RESNET
from tests.weights.test_families import write as write_family
from vit_jax.api import from_weights, load_model
from vit_jax.api.predictions import predict
from vit_jax.arrays import ModelOutput
from vit_jax.data.records import Record
from vit_jax.tools.export.programs import export_onnx, export_stablehlo
from vit_jax.weights.formats import open_arrays, write_safetensors
from vit_jax.weights.saving import save_weights

NETWORKS = {
    "vit": SEVEN,
    "map": dataclasses.replace(
        SEVEN,
        pool="map",
        head="mlp",
        gelu="exact",
    ),
    "hybrid": dataclasses.replace(HYBRID, num_classes=len(NAMES)),
    "resnet": dataclasses.replace(RESNET, num_classes=len(NAMES)),
    "axial": dataclasses.replace(SEVEN, block="axial", pool="gap"),
}
SQUARE = dataclasses.replace(SEVEN, image_size=(12, 12))
IN_ONNX = NETWORKS | {
    "positions": dataclasses.replace(
        SEVEN,
        position_embedding="learned_2d",
        position_layers="every",
        head="mlp",
    ),
    "relative": dataclasses.replace(
        SEVEN,
        position_embedding="relative",
        pool="gap",
    ),
    "postactivation": dataclasses.replace(
        NETWORKS["resnet"],
        residual_unit="postactivation",
    ),
}
BATCHES = {
    "vit": (1, 7),
    "map": (3,),
    "axial": (3,),
    "hybrid": (3,),
    "resnet": (1, 7),
    "half": (7,),
}

# The program of somebody without this package, in a Python that has nothing but jax.
FOREIGN = """
import json, pathlib, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"vit_jax", "flax", "optax", "orbax", "cv2", "grain", "ml_collections"}:
            raise ImportError(f"{name} is not on this machine")

sys.meta_path.insert(0, Refuse())
try:
    import vit_jax
except ImportError:
    pass
else:
    raise SystemExit("vit_jax can be imported: this proves nothing")

import numpy as np
from jax import export

for name, batches in json.loads(sys.argv[1]).items():
    program = export.deserialize(pathlib.Path(f"{name}.stablehlo").read_bytes())
    print(name, *program.platforms, program.in_avals[0].dtype, program.out_avals[0].dtype)
    images = np.load(f"{name}.npy")
    for batch in batches:
        np.save(f"{name}_{batch}.npy", program.call(images[:batch]))
"""


def predict_probabilities(model, paths):
    """Return the result of `predict` for readable files as (N, K), in the order of the model's
    classes.
    """
    rows = []
    for record in predict(model, paths, 99):
        by_class = {one["class"]: one["probability"] for one in record["predictions"]}
        rows.append([by_class[name] for name in model.class_names])
    return np.array(rows)


def write_exported(folder, name, model):
    """Write the program and prepared images for it; return the result of `predict` for these."""
    pixels = sample_pixels(
        max(BATCHES[name]),
        model.architecture.image_size,
    )
    export_stablehlo(model, folder / f"{name}.stablehlo")
    np.save(folder / f"{name}.npy", pixels)
    return predict_probabilities(model, write_pngs(folder / name, pixels))


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """A folder in which a foreign process ran every exported program.

    Returns the folder, the lines of the process, and the results of `predict` by program.
    """
    folder = tmp_path_factory.mktemp("elsewhere")
    expected = {}
    for name, a in NETWORKS.items():
        expected[name] = write_exported(
            folder,
            name,
            from_weights(sample_weights(a)),
        )
    half = from_weights(sample_weights(), compute_dtype="bfloat16")
    expected["half"] = write_exported(folder, "half", half)

    environment = dict(os.environ)
    environment.pop("PYTHONPATH", None)
    command = [sys.executable, "-I", "-c", FOREIGN, json.dumps(BATCHES)]
    result = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return folder, result.stdout.splitlines(), expected


@pytest.mark.newest
@pytest.mark.parametrize(
    ("name", "batch"),
    [
        ("vit", 1),
        ("vit", 7),
        ("map", 3),
        ("axial", 3),
        ("hybrid", 3),
        ("resnet", 1),
        ("resnet", 7),
        ("half", 7),
    ],
)
def test_outputs_elsewhere_are_those_of_predict(elsewhere, name, batch):
    """Programs of half precision may round to eight bits at other places: probabilities move by a
    few of 2**-8.
    """
    folder, said, expected = elsewhere
    tolerance = 0.02 if name == "half" else 1e-5

    found = np.load(folder / f"{name}_{batch}.npy")

    assert found.shape == (batch, len(NAMES))
    assert np.abs(found - expected[name][:batch]).max() < tolerance
    assert expected[name].std(axis=0).max() > 0.01, "images that look the same would prove little"
    assert not np.array_equal(expected["half"], expected["vit"])
    assert f"{name} cpu cuda tpu uint8 float32" in said


def build_triangle_weights(old, new):
    """Return weights (new, old) of a triangle around each new pixel.

    It is two new pixels wide, or two old ones where the image grows.
    """
    stretch = max(old / new, 1)
    old_centres = np.arange(old) + 0.5
    new_centres = (np.arange(new)[:, None] + 0.5) * old / new
    distance = np.abs(old_centres - new_centres) / stretch
    weights = np.maximum(1 - distance, 0)
    return weights / weights.sum(axis=1, keepdims=True)


class Case(NamedTuple):
    """The stored size of an image, the size after resizing, and the place of the crop of 8 x 12."""

    preprocessing: dict
    size: tuple[int, int]
    resized_size: tuple[int, int]
    weights: Callable
    crop: tuple[int, int] = (0, 0)


ANTIALIASED = {"interpolation": "bilinear"}


CASES = {
    "direct, smaller": Case(DIRECT, (20, 27), (8, 12), build_bilinear_weights),
    "direct, larger": Case(DIRECT, (5, 7), (8, 12), build_bilinear_weights),
    # To cover (16, 24) the second side shrinks from 27 to 24, the first from 20 to 17.8.
    "short side, smaller": Case(
        CROPPED,
        (20, 27),
        (18, 24),
        build_area_weights,
        (5, 6),
    ),
    "short side, larger": Case(
        CROPPED,
        (10, 14),
        (17, 24),
        build_area_weights,
        (4, 6),
    ),
    "direct, antialiased": Case(
        DIRECT | ANTIALIASED,
        (20, 27),
        (8, 12),
        build_triangle_weights,
    ),
    # The input is no square: 17.8 is rounded to the nearest.
    "short side, antialiased": Case(
        CROPPED | ANTIALIASED,
        (20, 27),
        (18, 24),
        build_triangle_weights,
        (5, 6),
    ),
    # Half of 19 - 8 is 5.5.
    "short side, antialiased, even": Case(
        CROPPED | ANTIALIASED | {"resize_library": "timm"},
        (19, 24),
        (19, 24),
        build_triangle_weights,
        (6, 6),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_words_on_preparation_are_true(case):
    """They are followed with separate arithmetic, to the rounding.

    The next two tests check the words themselves.
    """
    model = from_weights(sample_weights(preprocessing=case.preprocessing))
    image = sample_pixels(1, case.size)[0]
    top, left = case.crop
    complete = resize_by_weights(image, case.resized_size, case.weights)
    expected = complete[top : top + 8, left : left + 12]

    alpha = np.full(case.size, 90, np.uint8)
    bgra = np.dstack([image[..., ::-1], alpha])
    _, file = cv2.imencode(".png", bgra)
    found = model.transform(Record(file.tobytes(), 0))

    # Half a level for each of two passes.
    assert np.abs(found - expected).max() <= 1 + 1e-9


@pytest.mark.slow
def test_the_words_on_direct_preparation(elsewhere):
    folder, _, _ = elsewhere
    description = (folder / "vit.stablehlo.json").read_text()
    words = json.loads(description)["preprocessing"]

    assert words.pop("filter").startswith("bilinear")
    assert words.pop("meaning") == "both sides are resized to those of the input"
    assert words == {
        "resize": "direct",
        "crop_fraction": 1,
        "exif_orientation": "applied",
        "alpha": "dropped",
    }


DESCRIPTION = {
    "network": "ViT-custom/4",
    "input": {
        "dtype": "uint8",
        "shape": ["batch", 8, 12, 3],
        "colours": "RGB",
    },
    "output": {
        "dtype": "float32",
        "shape": ["batch", 7],
        "meaning": "probabilities: softmax of the logits",
    },
    "class_names": list(NAMES),
    "preprocessing": {
        "resize": "short_side",
        "crop_fraction": 0.5,
        "meaning": "resized to the smallest image of the same shape that covers the input's size "
        "/ crop_fraction, rounded; its sides are rounded too, and the middle is kept, from half "
        "the difference rounded down",
        "filter": "area, the mean over what a new pixel covers, also where it is smaller than an "
        "old one",
        "exif_orientation": "applied",
        "alpha": "dropped",
    },
    "platforms": ["cpu", "cuda", "tpu"],
    "weights": "w.npz (released)",
}


def test_the_description_beside_it_prepares_images(tmp_path):
    """It is enough to come from a file to the result of `predict`."""
    model = from_weights(sample_weights(preprocessing=CROPPED))
    (image,) = sample_pixels(1, size=(16, 24))
    (tmp_path / "a.png").write_bytes(to_png(image))
    (expected,) = predict_probabilities(model, [str(tmp_path / "a.png")])
    # The middle half of an image that is twice the network's size.
    prepared = image[4:12, 6:18]

    files = export_stablehlo(model, tmp_path / "net.bin")

    assert files == [tmp_path / "net.bin", tmp_path / "net.bin.json"]
    assert json.loads(files[1].read_text()) == DESCRIPTION
    record = Record(to_png(image), 0)
    assert np.array_equal(prepared, model.transform(record))

    program = export.deserialize(files[0].read_bytes())
    assert program.call(prepared[None])[0] == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ValueError, match=r"(?i)shape"):
        program.call(np.zeros((1, 12, 8, 3), np.uint8))

    with pytest.raises(ValueError, match=r"(?i)dtype"):
        program.call(np.zeros((1, 8, 12, 3), np.float32))


@pytest.mark.parametrize("taken", ["net", "net.json"])
def test_existing_files_are_kept(tmp_path, taken):
    model = from_weights(sample_weights())
    (tmp_path / taken).write_text("precious")

    with rejects(taken, "exists.*--overwrite"):
        export_stablehlo(model, tmp_path / "net")

    (file,) = tmp_path.iterdir()
    assert file.name == taken
    assert file.read_text() == "precious"


def test_existing_files_are_overwritten_on_request(tmp_path):
    model = from_weights(sample_weights())
    (tmp_path / "net").touch()

    export_stablehlo(model, tmp_path / "net", overwrite=True)

    written = []
    for path in sorted(tmp_path.iterdir()):
        if path.stat().st_size:
            written.append(path.name)
    assert written == ["net", "net.json"]
    with rejects("nowhere"):
        export_stablehlo(model, tmp_path / "nowhere" / "net")


def list_onnx_networks():
    """Return the names of networks; those with convolutions take longer."""
    names = []
    for name, a in IN_ONNX.items():
        marks = [] if a.family == "vit" else [pytest.mark.slow]
        names.append(pytest.param(name, marks=marks))
    return names


@pytest.mark.parametrize("name", list_onnx_networks())
def test_an_onnx_file_answers_as_the_model(name, tmp_path):
    """Another runtime agrees to the rounding of float32 in other orders of summation, for any
    number of images.
    """
    onnx = pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    a = IN_ONNX[name]
    model = from_weights(sample_weights(a))
    pixels = sample_pixels(3, a.image_size)
    logits_BK = model(pixels).logits_BK
    expected = np.asarray(jax.nn.softmax(logits_BK))

    assert export_onnx(model, tmp_path / "net.onnx") == [tmp_path / "net.onnx"]
    onnx.checker.check_model(
        tmp_path / "net.onnx",
        full_check=True,
    )

    session = onnxruntime.InferenceSession(tmp_path / "net.onnx")
    (images,) = session.get_inputs()
    assert images.name == "images"
    assert images.type == "tensor(uint8)"
    assert images.shape == ["batch", *a.image_size, 3]

    (output,) = session.get_outputs()
    assert output.name == "probabilities"
    assert output.type == "tensor(float)"
    assert output.shape == ["batch", 7]

    for batch in (1, 3):
        (found,) = session.run(None, {"images": pixels[:batch]})
        assert found == pytest.approx(expected[:batch], abs=1e-5)
    assert expected.std(axis=0).max() > 0.01, "images that look the same would prove little"


def test_an_onnx_file_describes_itself(tmp_path):
    """Its metadata is that of the file beside a StableHLO program."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    model = from_weights(sample_weights(preprocessing=CROPPED))

    (path,) = export_onnx(model, tmp_path / "net.onnx")
    _, description = export_stablehlo(model, tmp_path / "net")

    stored = {}
    for entry in onnx.load(path).metadata_props:
        stored[entry.key] = json.loads(entry.value)

    stored["platforms"] = ["cpu", "cuda", "tpu"]

    assert stored == json.loads(description.read_text())


HEADLESS = {
    "vit": dataclasses.replace(SEVEN, num_classes=0),
    "registers": dataclasses.replace(
        SEVEN,
        num_classes=0,
        registers=2,
    ),
    "resnet": dataclasses.replace(RESNET, num_classes=0),
    "timm/dinov3": None,
    "timm/dinov2_reg": None,
    "timm/siglip": None,
}
"""Networks without classes: small ones, and weights of families as their libraries write them."""


def load_headless(name, folder):
    """Return a network without classes."""
    a = HEADLESS[name]
    if a is not None:
        return from_weights(sample_weights(a, class_names=None))
    return load_model(write_family(name, folder / "weights"))


def check_features(model, found, pixels):
    """Features and tokens by name equal those of the network, to 1e-5 of the largest value."""
    expected = model(pixels)
    for name, array in (("features", expected.features_BD), ("tokens", expected.tokens_BND)):
        largest = float(np.abs(array).max())
        np.testing.assert_allclose(
            found[name],
            array,
            atol=1e-5 * max(1, largest),
        )
        assert np.std(found[name], axis=0).max() > 0.01 * largest, "images must differ"


@pytest.mark.parametrize(
    "name",
    [
        "vit",
        "registers",
        "timm/dinov3",
        "timm/dinov2_reg",
        "timm/siglip",
        pytest.param("resnet", marks=pytest.mark.slow),
    ],
)
def test_onnx_features_of_weights_without_classes(name, tmp_path):
    pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    model = load_headless(name, tmp_path)
    assert model.architecture.num_classes == 0

    (path,) = export_onnx(model, tmp_path / "net.onnx")

    session = onnxruntime.InferenceSession(path)
    assert [output.name for output in session.get_outputs()] == ["features", "tokens"]
    assert {output.shape[0] for output in session.get_outputs()} == {"batch"}
    for batch in (1, 4):
        pixels = sample_pixels(4, model.architecture.image_size)[:batch]
        found = dict(
            zip(["features", "tokens"], session.run(None, {"images": pixels}), strict=True)
        )
        if batch > 1:
            check_features(model, found, pixels)
        else:
            assert found["features"].shape[0] == 1


@pytest.mark.parametrize("name", ["vit", "timm/dinov3"])
def test_stablehlo_features_of_weights_without_classes(name, tmp_path):
    model = load_headless(name, tmp_path)
    pixels = sample_pixels(4, model.architecture.image_size)

    path, description = export_stablehlo(model, tmp_path / "net.stablehlo")

    found = export.deserialize(path.read_bytes()).call(pixels)
    check_features(model, found, pixels)
    described = json.loads(description.read_text())
    assert described["class_names"] == []
    width = model.architecture.width
    assert described["outputs"]["features"]["shape"] == ["batch", width]
    assert described["outputs"]["tokens"]["shape"] == [
        "batch",
        *found["tokens"].shape[1:],
    ]


def test_chosen_outputs_of_a_classifier(tmp_path):
    pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    model = from_weights(sample_weights(NETWORKS["map"]))
    pixels = sample_pixels(3)
    outputs = ("features", "logits", "probabilities")

    (path,) = export_onnx(model, tmp_path / "net.onnx", outputs=outputs)
    program, _ = export_stablehlo(model, tmp_path / "net", outputs=outputs)

    expected = model(pixels)
    by_name = export.deserialize(program.read_bytes()).call(pixels)
    for found in (
        onnxruntime.InferenceSession(path).run(list(outputs), {"images": pixels}),
        [by_name[name] for name in outputs],
    ):
        features, logits, probabilities = found
        np.testing.assert_allclose(features, expected.features_BD, atol=1e-5)
        np.testing.assert_allclose(logits, expected.logits_BK, atol=1e-5)
        np.testing.assert_allclose(
            probabilities,
            softmax(logits),
            atol=1e-5,
        )


@pytest.mark.parametrize(
    ("outputs", "rule"),
    [
        (("feature",), "--outputs=feature: must be.*probabilities, logits, features, tokens"),
        (("tokens", "tokens"), "--outputs=tokens,tokens: must be different"),
        (("features", "logits"), "has no classes"),
    ],
)
def test_outputs_that_the_network_does_not_have(outputs, rule, tmp_path):
    model = from_weights(sample_weights(HEADLESS["vit"], class_names=None))

    with rejects("", rule):
        export_stablehlo(model, tmp_path / "net", outputs=outputs)

    assert list(tmp_path.iterdir()) == []


def compute_sigmoid(logits):
    return 1 / (1 + np.exp(-logits))


@pytest.fixture
def huggingface_folder(tmp_path):
    """Weights of Hugging Face whose arrays have no metadata."""
    folder = tmp_path / "folder"
    preprocessing = DIRECT | {"image_size": [12, 12]}
    save_weights(sample_weights(SQUARE, preprocessing), folder, "huggingface")
    with open_arrays(folder / "model.safetensors") as file:
        arrays = {name: file.read(name) for name in file.arrays}
        write_safetensors(file.path, arrays, {})
    return folder


@pytest.mark.parametrize(
    ("kind", "normalise", "word"),
    [
        ("single", softmax, "softmax"),
        ("multi", compute_sigmoid, "sigmoid"),
    ],
)
def test_programs_of_multi_label_weights_of_hugging_face_have_sigmoids(
    huggingface_folder,
    kind,
    normalise,
    word,
):
    """The folder's config.json alone states it; the program and its description follow."""
    config_file = huggingface_folder / "config.json"
    config = json.loads(config_file.read_text())
    config["problem_type"] = f"{kind}_label_classification"
    config_file.write_text(json.dumps(config))
    pixels = sample_pixels(2, size=(12, 12))
    model = load_model(huggingface_folder)
    expected = normalise(logits_of(model.module, pixels))

    program, description = export_stablehlo(model, huggingface_folder.parent / "net.stablehlo")

    found = export.deserialize(program.read_bytes()).call(pixels)
    assert_allclose(found, expected, atol=1e-6)
    described = json.loads(description.read_text())
    assert word in described["output"]["meaning"]


def sort_logits(module, images):
    return ModelOutput(jnp.sort(module(images).logits_BK))


@pytest.fixture
def onnx_graph():
    pytest.importorskip("onnxruntime")
    return pytest.importorskip("vit_jax.tools.export.onnx_graph")


def check_onnx_is_rejected(folder, model, rule):
    """The export raises the error and leaves no file."""
    with rejects("", rule):
        export_onnx(model, folder / "net.onnx")
    assert list(folder.iterdir()) == []


def test_half_precision_is_rejected_as_onnx(onnx_graph, tmp_path):
    model = from_weights(sample_weights(), compute_dtype="bfloat16")
    check_onnx_is_rejected(tmp_path, model, "float32")


def test_an_unknown_operation_is_rejected_as_onnx(onnx_graph, tmp_path):
    model = from_weights(sample_weights())
    custom = dataclasses.replace(
        model,
        module=Partial(sort_logits, model.module),
    )

    check_onnx_is_rejected(tmp_path, custom, "operation.*sort.*--to=stablehlo")


def test_a_wrong_conversion_is_rejected(onnx_graph, tmp_path, monkeypatch):
    convert = onnx_graph.to_onnx

    def convert_wrongly(program, names, size):
        return convert(lambda images: (program(images)[0] / 2,), names, size)

    monkeypatch.setattr(onnx_graph, "to_onnx", convert_wrongly)
    model = from_weights(sample_weights())
    rule = "ViT-custom/4.*differ by .*more than .*--to=stablehlo"

    check_onnx_is_rejected(tmp_path, model, rule)


def test_onnx_that_is_not_installed_is_named(
    onnx_graph,
    tmp_path,
    monkeypatch,
):
    monkeypatch.setitem(sys.modules, "onnx", None)
    model = from_weights(sample_weights())

    check_onnx_is_rejected(tmp_path, model, r"pip install .*\[onnx\]")
