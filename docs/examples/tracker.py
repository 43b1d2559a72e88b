"""A tracker: config and metrics of a run in MLflow.

`logging.writers` takes classes with the methods `start`, `write` and `close`.

They are called in the first process of a run, beside `metrics.jsonl`. A resumed run continues the
run of MLflow.

Run it:

    pip install mlflow-skinny
    vit-jax pretrain --config=digits --workdir=runs/tracked \
        --config.logging.writers=docs.examples.tracker:MLflow
"""

import pathlib
from collections.abc import Mapping
from typing import Any

import mlflow

from vit_jax.config.parsing import flatten


class MLflow:
    """A run of MLflow, on the server that MLFLOW_TRACKING_URI names."""

    def start(self, workdir: pathlib.Path, config: Mapping[str, Any], start_step: int) -> None:
        """Open the run of a workdir, or continue it."""
        id_file = workdir / "mlflow-run-id"
        if id_file.exists():
            mlflow.start_run(run_id=id_file.read_text())
            return
        run = mlflow.start_run(run_name=workdir.name)
        id_file.write_text(run.info.run_id)
        mlflow.log_params(flatten(config))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step."""
        mlflow.log_metrics(dict(metrics), step=step)

    def close(self) -> None:
        """End the run."""
        mlflow.end_run()
