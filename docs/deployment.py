"""Compare the programs of weights: size, speed and difference from the network, as a table.

    python docs/deployment.py runs/mine
    python docs/deployment.py runs/mine --data=folder:my-images

Each runtime computes features and logits of the same images. Speeds are divided by that of the
network in JAX, in rounds that visit every runtime, so that the load of the machine is the same for
all. The difference is the largest one of features, relative to their range. With labelled data the
accuracy of each runtime is a further column.
"""

import argparse
import importlib.util
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import export

import vit_jax
from docs.tables import table
from vit_jax.config.schema import InputConfig
from vit_jax.data.sources import open_source
from vit_jax.tools.export.programs import export_onnx, export_stablehlo

BATCH_SIZE = 8
NUM_ROUNDS = 7
OUTPUTS = ("features", "logits")
Run = Callable[[np.ndarray], list[np.ndarray]]


def build_runtimes(model: vit_jax.Model, folder: pathlib.Path) -> dict[str, tuple[Run, int]]:
    """Return the function from images to features and logits, and the bytes of the file, by runtime."""
    import onnxruntime
    from onnxruntime.quantization import QuantType, quantize_dynamic

    stablehlo, _ = export_stablehlo(model, folder / "m.stablehlo", outputs=OUTPUTS)
    (onnx,) = export_onnx(model, folder / "m.onnx", outputs=OUTPUTS)
    int8 = folder / "int8.onnx"
    quantize_dynamic(onnx, int8, op_types_to_quantize=["MatMul"], weight_type=QuantType.QInt8)

    program = export.deserialize(stablehlo.read_bytes())
    parameters = sum(leaf.nbytes for leaf in jax.tree.leaves(model.module))
    runtimes = {
        "JAX, this package": (_make_model_run(model), parameters),
        "StableHLO": (_make_program_run(program), stablehlo.stat().st_size),
    }
    for name, file in (("ONNX Runtime, float32", onnx), ("ONNX Runtime, int8", int8)):
        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        runtimes[name] = (_make_session_run(session), file.stat().st_size)
    if importlib.util.find_spec("openvino") is not None:
        import openvino

        precision = {"INFERENCE_PRECISION_HINT": "f32"}
        network = openvino.compile_model(onnx, "CPU", precision)
        runtimes["OpenVINO, float32"] = (_make_network_run(network), onnx.stat().st_size)
    return runtimes


def _make_model_run(model: vit_jax.Model) -> Run:
    def run(images: np.ndarray) -> list[np.ndarray]:
        output = compute(images)
        return [np.asarray(output.features_BD), np.asarray(output.logits_BK)]

    compute = jax.jit(model)
    return run


def _make_program_run(program: Any) -> Run:
    def run(images: np.ndarray) -> list[np.ndarray]:
        outputs = program.call(images)
        return [np.asarray(outputs[name]) for name in OUTPUTS]

    return run


def _make_session_run(session: Any) -> Run:
    return lambda images: session.run(list(OUTPUTS), {"images": images})


def _make_network_run(network: Any) -> Run:
    return lambda images: list(network(images).values())


def measure_speeds(runtimes: dict[str, tuple[Run, int]], images: np.ndarray) -> dict[str, float]:
    """Return the speed of each runtime, divided by that of the first one."""
    seconds: dict[str, list[float]] = {name: [] for name in runtimes}
    for run, _ in runtimes.values():
        run(images)  # compiles
    for _ in range(NUM_ROUNDS):
        for name, (run, _) in runtimes.items():
            start = time.perf_counter()
            run(images)
            seconds[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    first = next(iter(medians.values()))
    return {name: first / median for name, median in medians.items()}


def read_images(model: vit_jax.Model, data: str | None) -> tuple[np.ndarray, np.ndarray | None]:
    """Return prepared images, with labels if data are given; else random images."""
    height, width = model.architecture.image_size
    if data is None:
        shape = (BATCH_SIZE, height, width, 3)
        return np.random.default_rng(0).integers(0, 256, shape, np.uint8), None
    config = InputConfig(train_split="train", test_split="test", image_size=(height, width))
    source = open_source(data, "test", config, seed=0)
    assert model.transform is not None
    images = np.stack([model.transform(source[index]) for index in range(len(source))])
    return images, source.labels


def compare(weights: str, data: str | None) -> str:
    """Return the table, in Markdown."""
    model = vit_jax.load_model(weights)
    images, labels = read_images(model, data)
    with tempfile.TemporaryDirectory() as folder:
        runtimes = build_runtimes(model, pathlib.Path(folder))
        speeds = measure_speeds(runtimes, images[:BATCH_SIZE])
        rows = []
        expected = None
        for name, (run, size) in runtimes.items():
            features, logits = run(images)
            if expected is None:
                expected = features
            difference = np.abs(features - expected).max() / np.ptp(expected)
            row = [name, f"{size / 1e6:.1f} MB", f"{speeds[name]:.2f}", f"{difference:.0e}"]
            if labels is not None:
                row.append(f"{(logits.argmax(axis=1) == labels).mean():.2%}")
            rows.append(row)
    columns = ["runtime", "file", "speed", "difference"]
    if labels is not None:
        columns.append("accuracy")
    return table(columns, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights")
    parser.add_argument("--data")
    options = parser.parse_args()
    print(compare(options.weights, options.data), end="")
