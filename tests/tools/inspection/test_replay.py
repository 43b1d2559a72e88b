"""A step that diverges is recorded and repeated to the bit, with norms by layer and the loss of
each image.
"""

import hashlib
import json
import math
import shutil

import numpy as np
import pytest

from tests import tiny
from tests.columns import list_column
from tests.integration import commands
from tests.rejections import rejects
from tests.train.poison import COUNT, POISONED
from vit_jax.checkpoint import CheckpointStore
from vit_jax.checkpoint.damage import METADATA
from vit_jax.checkpoint.reader import DIGESTS
from vit_jax.config import load_recipe
from vit_jax.data.order import UniformOrder
from vit_jax.tools.inspection import replay as replays
from vit_jax.tools.inspection.examination import KINDS, compute_norms, sort_layers
from vit_jax.tools.inspection.replay import replay
from vit_jax.tools.inspection.replay_report import REPORT_FILE
from vit_jax.train.finetune import finetune
from vit_jax.train.pretrain import pretrain
from vit_jax.train.run_files import read_divergence
from vit_jax.weights import load_weights

BATCH = 16
FIELDS = (
    "data=tests.train.poison:open_data",
    "input.mixup_alpha=0.0",
    *tiny.LENGTH,
    "evaluation.every=6 steps",
)
OURS = "tests"  # the package that the workdirs name

pytestmark = [
    pytest.mark.usefixtures("compiled_once"),
    pytest.mark.xdist_group("tiny"),
]


def list_records(num_steps):
    """Return the records of each step, by the permutation of each epoch alone."""
    order = UniformOrder(0, COUNT)
    records = []
    for position in range(num_steps * BATCH):
        record, _ = order.find(position)
        records.append(record)
    return np.array(records).reshape(num_steps, BATCH)


@pytest.fixture(scope="module")
def diverge(tmp_path_factory):
    """Return a function that trains with a loss of `poison`, and returns the workdir and the error."""

    def train(loss, *fields):
        workdir = tmp_path_factory.mktemp("diverged") / "run"
        config = tiny.config(
            *FIELDS,
            f"objective.loss=tests.train.poison:{loss}",
            *fields,
        )
        with pytest.raises(FloatingPointError) as raised:
            pretrain(config, str(workdir))
        return workdir, str(raised.value)

    return train


@pytest.fixture(scope="module")
def diverged(diverge):
    return diverge("infinite")


@pytest.fixture
def copy(diverged, tmp_path):
    workdir, _ = diverged
    return shutil.copytree(
        workdir,
        tmp_path / "run",
        ignore=shutil.ignore_patterns(replays.FOLDER),
    )


def compute_digests(folder):
    """Return digests of all files except those of replays."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and replays.FOLDER not in path.parts:
            found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def compute_total(norms):
    """Return the norm of all layers together."""
    return math.sqrt(sum(float(norm) ** 2 for norm in norms.values()))


def check_sums(found, *, loss_tolerance=1e-5):
    """The norms of layers and the losses of images add up to the metrics of the step."""
    gradient_norm = compute_total(found.figures["gradient"])
    mean_loss = found.figures["loss_B"].mean()

    assert gradient_norm == pytest.approx(found.metrics["gradient_norm"], rel=1e-5)
    assert mean_loss == pytest.approx(found.metrics["train_loss"], rel=loss_tolerance)


POISONED_LOSS = f"the loss of record {POISONED}, record {POISONED}"


def test_the_record_of_a_divergence(diverged):
    """The error names in one line the step, and the command that repeats it."""
    workdir, message = diverged
    found = read_divergence(workdir)
    records = list_records(6)
    (index,) = np.flatnonzero((records == POISONED).any(axis=1))
    step = index + 1

    assert found["step"] == step
    assert found["records"] == records[index].tolist()
    assert found["metrics"]["train_loss"] == math.inf
    assert found["checkpoint"] == index // 2 * 2
    assert max(commands.losses(workdir)) == step - 1

    assert message.startswith(f"Step {step}: the loss is inf, ")
    assert f"`vit-jax replay {workdir} --weights.allow_code=tests` repeats the step" in message
    assert "\n" not in message


def test_the_step_is_repeated_to_the_bit(diverged):
    workdir, _ = diverged
    before = compute_digests(workdir)
    step = read_divergence(workdir)["step"]

    found = replay(str(workdir), allow_code=OURS)

    is_infinite_B = ~np.isfinite(found.figures["loss_B"])
    is_poisoned_B = found.record_B == POISONED
    assert found.step == step
    assert found.differences == []
    assert found.first_cause == POISONED_LOSS
    assert found.record_B[is_infinite_B].tolist() == [POISONED]
    assert found.figures["label_B"][is_poisoned_B] == 9
    assert compute_digests(workdir) == before

    written = json.loads((found.folder / REPORT_FILE).read_text())
    records = list_column(written["examples"], "record")
    assert written["first_not_finite"] == found.first_cause
    assert records == found.record_B.tolist()
    assert f"| {POISONED} |" in " ".join(found.to_text().split())

    weights = load_weights(found.folder, allow_code=OURS)
    assert weights.source.endswith(f"step {step - 1})")


@pytest.mark.slow
def test_a_finite_loss_with_a_gradient_that_is_not(diverge):
    workdir, message = diverge("steep")
    assert "the norm of the gradient is nan" in message

    found = replay(str(workdir), allow_code=OURS)
    assert found.differences == []
    assert np.isfinite(found.metrics["train_loss"])
    assert found.first_cause == "the gradient of head"


@pytest.mark.slow
def test_any_step_of_a_healthy_run(tiny_run, tmp_path):
    """The sums over layers and examples are those of the run.

    The state is that of an uninterrupted run.
    """
    workdir = shutil.copytree(tiny_run.workdir, tmp_path / "run")
    for step in commands.checkpoint_steps(workdir)[:-1]:
        shutil.rmtree(workdir / "checkpoints" / str(step))

    found = replay(str(workdir), 5)

    assert found.start == "starting from scratch with seed 0"
    assert found.differences == []
    assert found.first_cause == ""
    assert found.metrics["train_loss"] == commands.losses(tiny_run.workdir)[5]
    assert read_array_digests(found.folder, 4) == read_array_digests(tiny_run.workdir, 4)

    check_sums(found)
    update_norm = compute_total(found.figures["update"])
    assert update_norm == pytest.approx(found.metrics["update_norm"], rel=1e-5)


def read_array_digests(workdir, step):
    """Return digests of every array of the state: parameters, optimiser, average."""
    path = workdir / "checkpoints" / str(step) / METADATA / METADATA
    return json.loads(path.read_text())[DIGESTS]


def test_norms_by_layer():
    """Layers that are stacked count one by one.

    Rows are in the order in which a hybrid runs them.
    """
    rest = {"conv1": {"kernel": np.array([[3.0, 4.0], [0.0, 2.0]])}}
    blocks = {
        "mlp": {"kernel": np.ones((11, 4))},
        "attention": {"bias": np.zeros((11, 1))},
    }
    tree = {
        "head": {"linear": {"bias": np.array([1.0])}},
        "encoder": {
            "blocks": blocks,
            "norm": {"scale": np.array([2.0])},
        },
        "stem": {
            "stage1": {
                "rest": rest,
                "first": {"conv1": np.array([7.0])},
            },
            "root": {"conv": np.array([6.0])},
        },
    }

    found = {}
    for name, norm in compute_norms(tree).items():
        found[name] = float(norm)

    assert found["stem/stage1/rest/0"] == 5.0
    assert found["encoder/blocks/10"] == 2.0
    assert sort_layers(dict.fromkeys(KINDS, found)) == [
        "stem/root",
        "stem/stage1/first",
        "stem/stage1/rest/0",
        "stem/stage1/rest/1",
        *(f"encoder/blocks/{i}" for i in range(11)),
        "encoder/norm",
        "head",
    ]


def test_other_figures_than_the_run_wrote_are_named(copy):
    lines = commands.metrics(copy)
    for line in lines:
        if line["step"] == 3:
            line["train_loss"] = 0.5
    (copy / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    found = replay(str(copy), 3, allow_code=OURS)

    assert found.differences == ["train_loss"]
    assert found.first_cause == ""
    assert "not the step of the run: train_loss 0.5 then, " in found.to_text()


def test_a_killed_replay_leaves_the_run_as_it_was(copy, monkeypatch):
    def stop(self, *arguments, **options):
        raise KeyboardInterrupt

    before = compute_digests(copy)
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "save", stop)
        with pytest.raises(KeyboardInterrupt):
            replay(str(copy), allow_code=OURS)

    assert compute_digests(copy) == before

    assert replay(str(copy), allow_code=OURS).differences == []
    assert compute_digests(copy) == before


def test_a_damaged_checkpoint_is_skipped(copy):
    (step,) = commands.checkpoint_steps(copy)
    model = copy / "checkpoints" / str(step) / "model"
    next(model.rglob("_METADATA")).write_text("{")
    said = []

    found = replay(str(copy), allow_code=OURS, say=said.append)

    assert found.start == "starting from scratch with seed 0"
    assert "damaged" in said[0]
    assert found.differences == []


def test_runs_and_steps_that_cannot_be_replayed(copy, tmp_path):
    with rejects("", "is not the workdir of a run"):
        replay(str(tmp_path))

    with rejects("--step=7", "must be from 1 to 6"):
        replay(str(copy), 7, allow_code=OURS)

    with rejects("config.objective.loss", "names code of tests, which is not an allowed package"):
        replay(str(copy), allow_code="another")

    outcome = commands.run(["replay", str(copy), "--step=0"])
    assert outcome.code == 2
    assert outcome.err == "vit-jax: --step=0: must be at least 1.\n"


def test_a_stored_tracker_is_not_imported_without_permission(copy):
    """`divergence.json` or `config.json` of somebody else may name any class."""
    for name in ("divergence.json", "config.json"):
        stored = json.loads((copy / name).read_text())
        config = stored.get("config", stored)
        config["logging"]["writers"] = ["evil:Tracker"]
        (copy / name).write_text(json.dumps(stored))

    with rejects("logging.writers", "names code of evil, .* --weights.allow_code=tests,evil"):
        replay(str(copy), allow_code=OURS)


def test_damaged_and_missing_files_of_a_run(copy, tmp_path):
    (copy / "divergence.json").write_text('{"step": 3, "metrics": {}}')
    with rejects("divergence.json", "must have config"):
        replay(str(copy))

    (copy / "divergence.json").unlink()
    with rejects("no step has diverged", "--step=N"):
        replay(str(copy))

    (copy / replays.FOLDER).symlink_to(tmp_path)
    with rejects(replays.FOLDER, "is a link"):
        replay(str(copy), 3, allow_code=OURS)


def test_a_run_that_starts_again_forgets(tiny_run, tmp_path):
    """It repeats the step, and records it again if it diverges again."""
    shutil.copytree(tiny_run.workdir, tmp_path / "run")
    (tmp_path / "run" / "divergence.json").write_text("{}")
    pretrain(tiny_run.config, str(tmp_path / "run"))

    assert not (tmp_path / "run" / "divergence.json").exists()


LENGTH = (
    "total=4 steps",
    "schedule.warmup=1 step",
    "logging.every=1 step",
    "checkpoint.every=2 steps",
    "evaluation.every=4 steps",
    "logging.tensorboard=False",
)
LENGTH += ("evaluation.every=4 steps", "logging.tensorboard=False")


@pytest.mark.slow
def test_micro_batches_on_shards_in_an_early_phase(diverge):
    """The images of each micro-batch are spread over the batch.

    The loss is still that of its record.
    """
    workdir, _ = diverge(
        "infinite",
        "optimizer.accumulation_steps=2",
        "model.dropout_fraction=0.1",
        "sharding.parameters=fsdp",
        "phases.small.until=3 steps",
        "phases.small.image_size=4",
        "phases.small.global_batch=32",
    )
    expected_records = list_records(4)[2:].reshape(-1).tolist()

    found = replay(str(workdir), allow_code=OURS)

    assert found.step == 2
    assert len(found.record_B) == 32
    assert found.differences == []
    assert found.record_B.tolist() == expected_records
    assert read_divergence(workdir)["records"] == expected_records
    assert found.first_cause == POISONED_LOSS


@pytest.mark.slow
def test_masked_patches(data_dir, tmp_path):
    fields = (
        *LENGTH,
        f"input.data_dir={data_dir}",
        "objective.kind=masked_patch",
        "input.mixup_alpha=0.0",
    )
    pretrain(tiny.config(*fields), str(tmp_path))

    found = replay(str(tmp_path), 4)

    assert found.differences == []
    assert found.first_cause == ""
    check_sums(found, loss_tolerance=2e-2)


@pytest.mark.slow
def test_fine_tuning_and_its_trials(data_dir, tiny_run, tmp_path):
    """After a search the learning rate is the chosen one.

    A trial has another part of the data, and no checkpoint.
    """
    fields = (
        *LENGTH,
        f"input.data_dir={data_dir}",
        "global_batch=16",
        f"init_from={tiny_run.workdir}",
        "search.learning_rates=0.01,1e30",
        "search.validation_fraction=0.3",
    )
    recipe = f"{tiny.ROOT / 'configs' / 'digits_transfer.py'}:finetune"
    trial = tmp_path / "search" / "learning_rate=1e+30"
    finetune(load_recipe(recipe, tiny.flags(*fields)), str(tmp_path))

    found = replay(str(tmp_path), 4)
    assert found.start == "from the checkpoint of step 2"
    assert found.differences == []
    assert found.first_cause == ""
    assert found.metrics["learning_rate"] < 0.01

    found = replay(str(trial))
    assert found.start == f"starting at step 0 with the weights of {tiny_run.workdir}"
    assert found.differences == []
    assert found.first_cause
