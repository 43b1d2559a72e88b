"""Exported programs run without this package, on any number of images, and give what `predict` gives."""

import dataclasses
import json
import os
import subprocess
import sys

import cv2
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.tree_util import Partial

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
from vit_jax.api import from_weights, load_model
from vit_jax.api.predictions import predict
from vit_jax.arrays import ModelOutput
from vit_jax.data.records import Record
from vit_jax.tools.export.programs import export_onnx, export_stablehlo
from vit_jax.weights.formats import open_arrays, write_safetensors
from vit_jax.weights.saving import save_weights

NETWORKS = {
    "vit": SEVEN,
    "map": dataclasses.replace(SEVEN, pool="map", head="mlp", gelu="exact"),
    "hybrid": dataclasses.replace(HYBRID, num_classes=len(NAMES)),
    "resnet": dataclasses.replace(RESNET, num_classes=len(NAMES)),
    "axial": dataclasses.replace(SEVEN, block="axial", pool="gap"),
}
SQUARE = dataclasses.replace(SEVEN, image_size=(12, 12))
IN_ONNX = NETWORKS | {
    "positions": dataclasses.replace(
        SEVEN, position_embedding="learned_2d", position_layers="every", head="mlp"
    ),
    "relative": dataclasses.replace(SEVEN, position_embedding="relative", pool="gap"),
    "postactivation": dataclasses.replace(NETWORKS["resnet"], residual_unit="postactivation"),
}
BATCHES = {
    "vit": (1, 7),
    "map": (3,),
    "axial": (3,),
    "hybrid": (3,),
    "resnet": (1, 7),
    "half": (7,),
}

# What somebody without this package would write, in a Python that has nothing but jax.
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


def probabilities(model, paths):
    """(N, K), what `predict` says of files that can be read, in the order of the model's classes."""
    found = [record["predictions"] for record in predict(model, paths, 99)]
    named = [{one["class"]: one["probability"] for one in predictions} for predictions in found]
    return np.array([[row[name] for name in model.class_names] for row in named])


def write_exported(folder, name, model):
    """The program, and prepared images for it; returns what `predict` says of these."""
    pixels = sample_pixels(max(BATCHES[name]), model.architecture.image_size)
    export_stablehlo(model, folder / f"{name}.stablehlo")
    np.save(folder / f"{name}.npy", pixels)
    return probabilities(model, write_pngs(folder / name, pixels))


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """A folder in which a foreign process ran every exported program; what it said, and what `predict` says."""
    folder = tmp_path_factory.mktemp("elsewhere")
    expected = {}
    for name, a in NETWORKS.items():
        expected[name] = write_exported(folder, name, from_weights(sample_weights(a)))
    half = from_weights(sample_weights(), compute_dtype="bfloat16")
    expected["half"] = write_exported(folder, "half", half)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-I", "-c", FOREIGN, json.dumps(BATCHES)]
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return folder, result.stdout.splitlines(), expected


@pytest.mark.newest
@pytest.mark.parametrize(
    ("name", "batch"), [(name, batch) for name in BATCHES for batch in BATCHES[name]]
)
def test_outputs_elsewhere_are_those_of_predict(elsewhere, name, batch):
    """Programs of half precision may round to eight bits at other places: probabilities move by a few of 2**-8."""
    folder, said, expected = elsewhere
    found = np.load(folder / f"{name}_{batch}.npy")

    assert found.shape == (batch, len(NAMES))
    assert np.abs(found - expected[name][:batch]).max() < (0.02 if name == "half" else 1e-5)
    assert expected[name].std(axis=0).max() > 0.01, "images that look the same would prove little"
    assert not np.array_equal(expected["half"], expected["vit"])
    assert f"{name} cpu cuda tpu uint8 float32" in said


def triangles(old, new):
    """Weights (new, old) of a triangle around each new pixel, two new pixels wide (two old ones where they grow)."""
    stretch = max(old / new, 1)
    distance = np.abs(np.arange(old) + 0.5 - (np.arange(new)[:, None] + 0.5) * old / new) / stretch
    weights = np.maximum(1 - distance, 0)
    return weights / weights.sum(axis=1, keepdims=True)


CASES = {  # stored size, and what the words of the description come to
    "direct, smaller": (
        DIRECT,
        (20, 27),
        lambda image: resize_by_weights(image, (8, 12), build_bilinear_weights),
    ),
    "direct, larger": (
        DIRECT,
        (5, 7),
        lambda image: resize_by_weights(image, (8, 12), build_bilinear_weights),
    ),
    # To cover (16, 24) the second side shrinks from 27 to 24, the first from 20 to 17.8.
    "short side, smaller": (
        CROPPED,
        (20, 27),
        lambda image: resize_by_weights(image, (18, 24), build_area_weights)[5:13, 6:18],
    ),
    "short side, larger": (
        CROPPED,
        (10, 14),
        lambda image: resize_by_weights(image, (17, 24), build_area_weights)[4:12, 6:18],
    ),
    "direct, antialiased": (
        DIRECT | {"interpolation": "bilinear"},
        (20, 27),
        lambda image: resize_by_weights(image, (8, 12), triangles),
    ),
    # The input is no square: 17.8 is rounded to the nearest.
    "short side, antialiased": (
        CROPPED | {"interpolation": "bilinear"},
        (20, 27),
        lambda image: resize_by_weights(image, (18, 24), triangles)[5:13, 6:18],
    ),
    "short side, antialiased, even": (  # half of 19 - 8 is 5.5
        CROPPED | {"interpolation": "bilinear", "resize_library": "timm"},
        (19, 24),
        lambda image: resize_by_weights(image, (19, 24), triangles)[6:14, 6:18],
    ),
}


@pytest.mark.parametrize(("preprocessing", "size", "prepare"), CASES.values(), ids=CASES)
def test_the_words_on_preparation_are_true(preprocessing, size, prepare):
    """Followed with arithmetic of one's own, to the rounding; the words themselves are in the next two tests."""
    model = from_weights(sample_weights(preprocessing=preprocessing))
    image = sample_pixels(1, size)[0]
    bgra = np.dstack([image[..., ::-1], np.full(size, 90, np.uint8)])
    found = model.transform(Record(cv2.imencode(".png", bgra)[1].tobytes(), 0))

    assert np.abs(found - prepare(image)).max() <= 1 + 1e-9  # half for each of two passes


@pytest.mark.slow
def test_the_words_on_direct_preparation(elsewhere):
    words = json.loads((elsewhere[0] / "vit.stablehlo.json").read_text())["preprocessing"]

    assert words.pop("filter").startswith("bilinear")
    assert words.pop("meaning") == "both sides are resized to those of the input"
    assert words == {
        "resize": "direct",
        "crop_fraction": 1,
        "exif_orientation": "ignored",
        "alpha": "dropped",
    }


def test_the_description_beside_it_prepares_images(tmp_path):
    """What stands in it is enough to come from a file to the answers of `predict`."""
    weights = sample_weights(preprocessing=CROPPED)
    files = export_stablehlo(from_weights(weights), tmp_path / "net.bin")

    assert files == [tmp_path / "net.bin", tmp_path / "net.bin.json"]
    assert json.loads(files[1].read_text()) == {
        "network": "ViT-custom/4",
        "input": {"dtype": "uint8", "shape": ["batch", 8, 12, 3], "colours": "RGB"},
        "output": {
            "dtype": "float32",
            "shape": ["batch", 7],
            "meaning": "probabilities: softmax of the logits",
        },
        "class_names": list(NAMES),
        "preprocessing": {
            "resize": "short_side",
            "crop_fraction": 0.5,
            "meaning": "resized to the smallest image of the same shape that covers the input's size / crop_fraction, "
            "rounded; its sides are rounded too, and the middle is kept, from half the difference rounded down",
            "filter": "area, the mean over what a new pixel covers, also where it is smaller than an old one",
            "exif_orientation": "ignored",
            "alpha": "dropped",
        },
        "platforms": ["cpu", "cuda", "tpu"],
        "weights": "w.npz (released)",
    }

    (image,) = sample_pixels(1, size=(16, 24))
    (tmp_path / "a.png").write_bytes(to_png(image))
    (expected,) = probabilities(from_weights(weights), [str(tmp_path / "a.png")])
    prepared = image[4:12, 6:18]  # the middle half of an image that is twice the network's size

    assert np.array_equal(prepared, from_weights(weights).transform(Record(to_png(image), 0)))

    program = export.deserialize(files[0].read_bytes())
    assert program.call(prepared[None])[0] == pytest.approx(expected, abs=1e-5)

    for image in (np.zeros((1, 12, 8, 3), np.uint8), np.zeros((1, 8, 12, 3), np.float32)):
        with pytest.raises(ValueError, match=r"(?i)shape|dtype"):
            program.call(image)


def test_what_exists_is_kept_unless_overwritten(tmp_path):
    model = from_weights(sample_weights())
    for taken in ("net", "net.json"):
        (tmp_path / taken).write_text("precious")

        with rejects(taken, "exists.*--overwrite"):
            export_stablehlo(model, tmp_path / "net")

        assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [
            (taken, "precious")
        ]

        (tmp_path / taken).unlink()

    (tmp_path / "net").touch()
    export_stablehlo(model, tmp_path / "net", overwrite=True)

    assert sorted(path.name for path in tmp_path.iterdir() if path.stat().st_size) == [
        "net",
        "net.json",
    ]
    with rejects("nowhere"):
        export_stablehlo(model, tmp_path / "nowhere" / "net")


@pytest.mark.parametrize(
    "name",
    [n if IN_ONNX[n].family == "vit" else pytest.param(n, marks=pytest.mark.slow) for n in IN_ONNX],
)
def test_an_onnx_file_answers_as_the_model(name, tmp_path):
    """By another runtime, to the rounding of float32 in other orders of summation; any number of images."""
    onnx = pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    a = IN_ONNX[name]
    model = from_weights(sample_weights(a))
    pixels = sample_pixels(3, a.image_size)
    expected = np.asarray(jax.nn.softmax(model(pixels).logits_BK))

    assert export_onnx(model, tmp_path / "net.onnx") == [tmp_path / "net.onnx"]
    onnx.checker.check_model(tmp_path / "net.onnx", full_check=True)

    session = onnxruntime.InferenceSession(tmp_path / "net.onnx")
    (given,), (returned,) = session.get_inputs(), session.get_outputs()

    assert (given.name, given.type, given.shape) == (
        "images",
        "tensor(uint8)",
        ["batch", *a.image_size, 3],
    )
    assert (returned.name, returned.type, returned.shape) == (
        "probabilities",
        "tensor(float)",
        ["batch", 7],
    )
    for batch in (1, 3):
        assert session.run(None, {"images": pixels[:batch]})[0] == pytest.approx(
            expected[:batch], abs=1e-5
        )
    assert expected.std(axis=0).max() > 0.01, "images that look the same would prove little"


def test_an_onnx_file_describes_itself(tmp_path):
    """As the file beside a StableHLO program does."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    model = from_weights(sample_weights(preprocessing=CROPPED))
    (path,) = export_onnx(model, tmp_path / "net.onnx")
    beside = json.loads(export_stablehlo(model, tmp_path / "net")[1].read_text())
    stored = {entry.key: json.loads(entry.value) for entry in onnx.load(path).metadata_props}

    assert stored | {"platforms": ["cpu", "cuda", "tpu"]} == beside


def test_programs_of_multi_label_weights_of_hugging_face_have_sigmoids(tmp_path):
    """The folder's config.json alone states it; the program and its description follow."""
    save_weights(
        sample_weights(SQUARE, DIRECT | {"image_size": [12, 12]}),
        tmp_path / "folder",
        "huggingface",
    )
    with open_arrays(tmp_path / "folder/model.safetensors") as file:
        write_safetensors(file.path, {name: file.read(name) for name in file.arrays}, {})

    config = json.loads((tmp_path / "folder/config.json").read_text())
    pixels = sample_pixels(2, size=(12, 12))
    for kind, normalise in (
        ("single", softmax),
        ("multi", lambda logits: 1 / (1 + np.exp(-logits))),
    ):
        stated = config | {"problem_type": f"{kind}_label_classification"}
        (tmp_path / "folder/config.json").write_text(json.dumps(stated))
        model = load_model(tmp_path / "folder")
        program, beside = export_stablehlo(model, tmp_path / f"{kind}.stablehlo")
        probabilities = export.deserialize(program.read_bytes()).call(pixels)

        np.testing.assert_allclose(
            probabilities, normalise(logits_of(model.module, pixels)), atol=1e-6
        )

        word = "sigmoid" if kind == "multi" else "softmax"
        assert word in json.loads(beside.read_text())["output"]["meaning"]


def test_what_cannot_be_written_right_as_onnx_is_rejected(tmp_path, monkeypatch):
    """A wrong conversion, an operation that is not known, half precision, a library that is not there: no file."""
    pytest.importorskip("onnxruntime")
    graph = pytest.importorskip("vit_jax.tools.export.onnx_graph")
    model = from_weights(sample_weights())

    def fails(rule, model=model):
        with rejects("", rule):
            export_onnx(model, tmp_path / "net.onnx")
        assert list(tmp_path.iterdir()) == []

    fails("float32", from_weights(sample_weights(), compute_dtype="bfloat16"))
    own = Partial(
        lambda module, images: ModelOutput(jnp.sort(module(images).logits_BK)), model.module
    )
    fails("operation.*sort.*--to=stablehlo", dataclasses.replace(model, module=own))
    convert = graph.to_onnx
    monkeypatch.setattr(
        graph, "to_onnx", lambda program, size: convert(lambda images: program(images) / 2, size)
    )
    fails("ViT-custom/4.*differ by .*more than .*--to=stablehlo")
    monkeypatch.setitem(sys.modules, "onnx", None)
    fails(r"pip install .*\[onnx\]")
