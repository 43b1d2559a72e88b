"""What happens to a run whose checkpoints are damaged, or whose workdir goes while it uses it."""

import dataclasses
import errno
import itertools
import shutil

import orbax.checkpoint as ocp
import pytest

from tests.integration import commands
from vit_jax.checkpoint import CheckpointStore
from vit_jax.train.lifecycle.interruption import Interruption
from vit_jax.train.lifecycle.lock import WorkdirLost
from vit_jax.train.pretrain import pretrain

pytestmark = [pytest.mark.usefixtures("compiled_once"), pytest.mark.xdist_group("tiny")]


@pytest.fixture(scope="module")
def config(tiny_run):
    evaluation = dataclasses.replace(tiny_run.config.evaluation, every="6 steps")
    checkpoint = dataclasses.replace(tiny_run.config.checkpoint, keep_latest=3)
    logging = dataclasses.replace(tiny_run.config.logging, tensorboard=True)

    return dataclasses.replace(
        tiny_run.config,
        evaluation=evaluation,
        checkpoint=checkpoint,
        logging=logging,
    )


@pytest.fixture(scope="module")
def uninterrupted(config, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("uninterrupted")
    return pretrain(config, str(workdir)), workdir


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_is_set_aside(config, uninterrupted, tmp_path, capsys):
    summary, reference = uninterrupted
    shutil.copytree(reference, tmp_path / "run")
    (tmp_path / "run/checkpoints/6/metadata/metadata").write_text("")
    shutil.rmtree(tmp_path / "run/checkpoints/4")
    (tmp_path / "run/checkpoints/4").mkdir()
    again = pretrain(config, str(tmp_path / "run"))
    out = capsys.readouterr().out

    for step in (6, 4):
        (line,) = [line for line in out.splitlines() if f"checkpoints/{step} is damaged" in line]
        assert line.endswith(f"It was moved to {tmp_path}/run/damaged_checkpoints/{step}.")

    assert "continuing from this workdir's checkpoint of step 2" in out
    assert again["parameters_sha256"] == summary["parameters_sha256"]
    assert commands.checkpoint_steps(tmp_path / "run") == [2, 4, 6]
    assert commands.curve(tmp_path / "run") == commands.curve(reference)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "Input/output error"),
        MemoryError(),
    ],
)
def test_a_checkpoint_that_cannot_be_read_now_stays_in_its_place(
    config, uninterrupted, tmp_path, monkeypatch, error
):
    shutil.copytree(uninterrupted[1], tmp_path / "run")
    restore = ocp.PyTreeCheckpointHandler.restore

    def fail(handler, path, *words, **options):
        if "6" in path.parts:
            raise error
        return restore(handler, path, *words, **options)

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", fail)
    with pytest.raises(type(error)) as raised:
        pretrain(config, str(tmp_path / "run"))

    assert raised.value is error
    assert commands.checkpoint_steps(tmp_path / "run") == [2, 4, 6]
    assert not (tmp_path / "run/damaged_checkpoints").exists()


def test_without_a_good_checkpoint_nothing_is_moved(config, uninterrupted, tmp_path):
    shutil.copytree(uninterrupted[1], tmp_path / "run")
    for step in (2, 4, 6):
        (tmp_path / f"run/checkpoints/{step}/model/manifest.ocdbt").write_text("")

    with pytest.raises(
        ValueError,
        match=r"can be used\. .* to start over, choose another workdir.*\n.*/6 is damaged",
    ):
        pretrain(config, str(tmp_path / "run"))

    assert commands.checkpoint_steps(tmp_path / "run") == [2, 4, 6]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_workdir_that_goes_ends_the_run_at_the_next_write(
    config, tmp_path, monkeypatch, replaced
):
    count = itertools.count(1)

    def is_requested(self):
        if next(count) == 3:
            while commands.checkpoint_steps(tmp_path / "run") != [
                2
            ]:  # it is written behind the steps
                pass

            (tmp_path / "run").rename(tmp_path / "gone")
            if replaced:
                (tmp_path / "run").mkdir()

        return False

    monkeypatch.setattr(Interruption, "is_requested", is_requested)
    with pytest.raises(WorkdirLost, match="was removed or replaced while the run used it"):
        pretrain(config, str(tmp_path / "run"))

    assert next(count) <= 6
    assert commands.checkpoint_steps(tmp_path / "gone") == [2]


@pytest.mark.parametrize("moment", ["before", "while it is written"])
def test_a_save_does_not_make_a_removed_workdir_again(config, tmp_path, monkeypatch, moment):
    """Nor does the message speak of checkpoints that went with it."""
    save = CheckpointStore.save

    def remove():
        # At once: files may come while a folder is removed.
        (tmp_path / "run").rename(tmp_path / "gone")
        shutil.rmtree(tmp_path / "gone")

    def save_and_remove(store, step, *words, **options):
        if step == 4 and moment == "before":
            store.wait()
            remove()

        save(store, step, *words, **options)
        if step == 4:
            remove()

    monkeypatch.setattr(CheckpointStore, "save", save_and_remove)
    with pytest.raises(WorkdirLost, match="was removed or replaced while the run used it"):
        pretrain(config, str(tmp_path / "run"))

    assert list(tmp_path.rglob("*")) == []
