"""The verb that prepares datasets, and the complete path of the data without TensorFlow."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vit_jax.data.prepare import prepare

SCRIPT = """
import sys
import numpy as np
from vit_jax.config.schema import InputConfig
from vit_jax.data import pipeline, placement, prepare, sources, transforms, unreadable, workers

if __name__ == "__main__":
    config = InputConfig(train_split="train[:90%]", test_split="test", image_size=(8, 8), data_dir=sys.argv[1])
    prepare.prepare("digits", data_dir=sys.argv[1])
    source = sources.open_source("digits", "train[:90%]", config, 0)
    with pipeline.train_batches(source, transforms.build_train_transform(config), seed=0, global_batch=4,
                                rows=np.arange(4), start_step=0, num_steps=2,
                                parallelism=workers.Parallelism(1, 1)) as batches:
        assert [batch.mask.sum() for batch in batches] == [4, 4]
    assert "tensorflow" not in sys.modules
"""


def test_digits_are_prepared_once(data_dir):
    assert Path(prepare("digits", data_dir=data_dir)).is_relative_to(data_dir)


def test_unknown_name_offers_the_nearest(tmp_path):
    with pytest.raises(ValueError, match=r"no dataset .cifar1O.\. Nearest: cifar10"):
        prepare("cifar1O", data_dir=str(tmp_path))


def test_without_tensorflow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs TensorFlow.*pip install 'vit_jax\[prepare\]'"):
        prepare("cifar10", data_dir=str(tmp_path))


def test_tensorflow_is_never_imported(data_dir, tmp_path):
    """A module of that name, found first, ends whichever process imports it."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "tensorflow.py").write_text("import os, sys\nsys.stderr.write('TensorFlow imported')\nos._exit(3)\n")
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{root}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(tmp_path / "script.py"), data_dir]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "TensorFlow imported" not in done.stderr
