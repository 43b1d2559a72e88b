"""Networks as programs of other runtimes: StableHLO and ONNX."""
