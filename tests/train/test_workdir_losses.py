"""Runs whose checkpoints are damaged, or whose workdir is removed while they use it."""

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

pytestmark = [
    pytest.mark.usefixtures("compiled_once"),
    pytest.mark.xdist_group("tiny"),
]


@pytest.fixture(scope="module")
def config(tiny_run):
    tiny = tiny_run.config
    return dataclasses.replace(
        tiny,
        evaluation=dataclasses.replace(tiny.evaluation, every="6 steps"),
        checkpoint=dataclasses.replace(tiny.checkpoint, keep_latest=3),
        logging=dataclasses.replace(tiny.logging, tensorboard=True),
    )


@pytest.fixture
def workdir(uninterrupted, tmp_path):
    """A copy of the finished workdir."""
    return shutil.copytree(uninterrupted[1], tmp_path / "run")


@pytest.fixture(scope="module")
def uninterrupted(config, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("uninterrupted")
    return pretrain(config, str(workdir)), workdir


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_is_set_aside(
    config,
    uninterrupted,
    workdir,
    capsys,
):
    summary, reference = uninterrupted
    (workdir / "checkpoints/6/metadata/metadata").write_text("")
    shutil.rmtree(workdir / "checkpoints/4")
    (workdir / "checkpoints/4").mkdir()

    resumed = pretrain(config, str(workdir))
    out = capsys.readouterr().out

    for step in (6, 4):
        (line,) = [line for line in out.splitlines() if f"checkpoints/{step} is damaged" in line]
        assert line.endswith(f"It was moved to {workdir}/damaged_checkpoints/{step}.")
    assert "continuing from this workdir's checkpoint of step 2" in out
    assert resumed["parameters_sha256"] == summary["parameters_sha256"]
    assert commands.checkpoint_steps(workdir) == [2, 4, 6]
    assert commands.curve(workdir) == commands.curve(reference)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "Input/output error"),
        MemoryError(),
    ],
)
def test_a_checkpoint_that_cannot_be_read_now_stays_in_its_place(
    config,
    workdir,
    monkeypatch,
    error,
):
    restore = ocp.PyTreeCheckpointHandler.restore

    def fail(handler, path, *words, **options):
        if "6" in path.parts:
            raise error
        return restore(handler, path, *words, **options)

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", fail)

    with pytest.raises(type(error)) as raised:
        pretrain(config, str(workdir))

    assert raised.value is error
    assert commands.checkpoint_steps(workdir) == [2, 4, 6]
    assert not (workdir / "damaged_checkpoints").exists()


def test_without_a_good_checkpoint_nothing_is_moved(config, workdir):
    for step in (2, 4, 6):
        (workdir / f"checkpoints/{step}/model/manifest.ocdbt").write_text("")
    message = r"can be used\. .* to start over, choose another workdir.*\n.*/6 is damaged"

    with pytest.raises(ValueError, match=message):
        pretrain(config, str(workdir))

    assert commands.checkpoint_steps(workdir) == [2, 4, 6]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_workdir_that_goes_ends_the_run_at_the_next_write(
    config,
    tmp_path,
    monkeypatch,
    replaced,
):
    run = tmp_path / "run"
    gone = tmp_path / "gone"
    count = itertools.count(1)

    def remove_workdir():
        # The checkpoint is written behind the steps.
        while commands.checkpoint_steps(run) != [2]:
            pass
        run.rename(gone)
        if replaced:
            run.mkdir()

    def is_requested(self):
        if next(count) == 3:
            remove_workdir()
        return False

    monkeypatch.setattr(Interruption, "is_requested", is_requested)
    message = "was removed or replaced while the run used it"

    with pytest.raises(WorkdirLost, match=message):
        pretrain(config, str(run))

    assert next(count) <= 6
    assert commands.checkpoint_steps(gone) == [2]


@pytest.mark.parametrize("moment", ["before", "while it is written"])
def test_a_save_does_not_make_a_removed_workdir_again(
    config,
    tmp_path,
    monkeypatch,
    moment,
):
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

    message = "was removed or replaced while the run used it"
    with pytest.raises(WorkdirLost, match=message):
        pretrain(config, str(tmp_path / "run"))

    assert list(tmp_path.rglob("*")) == []
