"""The commands at the top of docs/custom_images.md, from a folder to predicted labels.

Its commands are copied. Options at the end of the two trainings make the network tiny and the runs
short.
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
SHORTER = {"pretrain": flags(*NETWORK, "total=20 steps")}
SHORTER |= {"finetune": flags("total=8 steps", "schedule.warmup=2 steps", "global_batch=64")}


def commands_of_the_page():
    """Return the program that makes the folder, and the commands as lists of words."""
    section = (ROOT / "docs/custom_images.md").read_text()
    code = re.search(r"```sh\n(.*?)```", section, re.DOTALL)[1]
    program = re.search(r"python - <<'END'\n(.*?)\nEND\n", code, re.DOTALL)
    lines = code[program.end() :].replace("\\\n", " ").splitlines()

    return program[1], [line.split() for line in lines if line.strip()]


@pytest.fixture(scope="module")
def ran(data_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("commands")
    program, lines = commands_of_the_page()
    outputs = {}

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("TFDS_DATA_DIR", data_dir)
        exec(program, {})

        for name, verb, *words in lines:
            assert name == "vit-jax"
            outputs[verb] = commands.succeed([verb, *words, *SHORTER.get(verb, [])])

    return folder, outputs


def test_every_verb_runs(ran):
    assert list(ran[1]) == ["pretrain", "finetune", "evaluate", "predict", "export"]


def test_evaluation_sees_the_test_images_of_training(ran):
    folder, outputs = ran
    (trained,) = re.findall(r"^test accuracy ([\d.]+%)", outputs["finetune"], re.MULTILINE)

    assert re.search(r"^accuracy +([\d.]+%)", outputs["evaluate"], re.MULTILINE)[1] == trained
    assert re.search(
        r"^data +test of folder:my-images, 89 of 896 images$",
        outputs["evaluate"],
        re.MULTILINE,
    )

    training = load_weights(folder / "runs/mine").training

    assert training.data == f"folder:{folder.resolve()}/my-images"
    assert training.test_split == "test"
    assert (folder / "classes.csv").read_text().startswith("class,images,")


def test_every_image_gets_a_label(ran):
    folder, outputs = ran
    lines = outputs["predict"].splitlines()

    assert len(lines) == len(list((folder / "my-images" / "7").iterdir()))
    assert all(re.search(r"\.png +[5-9] [\d.]+%", line) for line in lines)


def test_the_exported_program_runs(ran):
    folder, _ = ran
    program = export.deserialize(bytearray((folder / "mine.stablehlo").read_bytes()))
    probabilities = np.asarray(program.call(jax.numpy.zeros((3, 16, 16, 3), "uint8")))

    np.testing.assert_allclose(probabilities.sum(axis=1), 1.0, rtol=1e-5)
