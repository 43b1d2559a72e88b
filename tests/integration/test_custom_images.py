"""The commands at the top of docs/custom_images.md, from a folder to predicted labels.

The commands are copied. Further options make the network tiny and the two trainings short.
"""

import re

import jax
import numpy as np
import pytest
from jax import export

from tests.integration import commands
from tests.tiny import NETWORK, ROOT, flags
from vit_jax.weights import load_weights

pytestmark = pytest.mark.slow
# A checkpoint takes as long as many steps.
AT_THE_END = ("evaluation.every=1 fraction", "checkpoint.every=1 fraction")
SHORTER = {
    "pretrain": flags(*NETWORK, "total=20 steps", *AT_THE_END),
    "finetune": flags("total=8 steps", "schedule.warmup=2 steps", "global_batch=64", *AT_THE_END),
}


def read_page():
    """Return the program that makes the folder, and the commands as lists of words."""
    text = (ROOT / "docs/custom_images.md").read_text()
    code = re.search(r"```sh\n(.*?)```", text, re.DOTALL)[1]
    program = re.search(r"python - <<'END'\n(.*?)\nEND\n", code, re.DOTALL)
    lines = code[program.end() :].replace("\\\n", " ").splitlines()

    return program[1], [line.split() for line in lines if line.strip()]


@pytest.fixture(scope="module")
def page(data_dir, tmp_path_factory):
    """The folder of the commands, and the output of each verb."""
    folder = tmp_path_factory.mktemp("commands")
    program, lines = read_page()

    outputs = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("TFDS_DATA_DIR", data_dir)
        exec(program, {})
        for name, verb, *words in lines:
            assert name == "vit-jax"
            outputs[verb] = commands.succeed([verb, *words, *SHORTER.get(verb, [])])

    return folder, outputs


def test_every_verb_runs(page):
    _, outputs = page

    assert list(outputs) == ["pretrain", "finetune", "evaluate", "predict", "export"]


def find_line(pattern, text):
    return re.search(pattern, text, re.MULTILINE)


def test_evaluation_sees_the_test_images_of_training(page):
    folder, outputs = page

    trained = find_line(r"^test accuracy ([\d.]+%)", outputs["finetune"])
    evaluated = find_line(r"^accuracy +([\d.]+%)", outputs["evaluate"])
    assert evaluated[1] == trained[1]

    data = r"^data +test of folder:my-images, 89 of 896 images$"
    assert find_line(data, outputs["evaluate"])
    assert (folder / "classes.csv").read_text().startswith("class,images,")


def test_weights_state_the_data_of_training(page):
    folder, _ = page

    training = load_weights(folder / "runs/mine").training

    assert training.data == f"folder:{folder.resolve()}/my-images"
    assert training.test_split == "test"


def test_every_image_gets_a_label(page):
    folder, outputs = page

    lines = outputs["predict"].splitlines()

    assert len(lines) == len(list((folder / "my-images" / "7").iterdir()))
    for line in lines:
        assert re.search(r"\.png +[5-9] [\d.]+%", line)


def test_the_exported_program_runs(page):
    folder, _ = page
    content = bytearray((folder / "mine.stablehlo").read_bytes())
    program = export.deserialize(content)

    black = jax.numpy.zeros((3, 16, 16, 3), "uint8")
    probabilities = np.asarray(program.call(black))

    np.testing.assert_allclose(probabilities.sum(axis=1), 1.0, rtol=1e-5)
