"""Processes of one run that differ are told so, by name and value."""

import jax
import pytest

from tests.train import small_runs as runs
from vit_jax import hosts
from vit_jax.train.assemble import open_datasets
from vit_jax.train.lifecycle.agreement import describe_differences, require_agreement

FACTS = {"config.seed": 0, "classes": ["cat", "dog"], "train_files_sha256": "1", "weights": None}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"config.seed": 1}, "process 1: config.seed is 1, in process 0 0"),
        ({"classes": ["cat"]}, "process 1: of the classes only one of the two has 'dog'"),
        ({"classes": ["dog", "cat"]}, "process 1: classes is ['dog', 'cat'], in process 0 ['cat', 'dog']"),
        ({"train_files_sha256": "2"}, "process 1: the train files have other names or classes"),
        ({"config.evaluation.evaluators.mine.split": "x"}, "evaluators.mine.split is 'x', in process 0 None"),
    ],
)
def test_what_differs_is_named_with_its_process(changes, line):
    message = describe_differences([FACTS, FACTS | changes, FACTS])
    assert line in message
    assert len(message.splitlines()) == 1


def test_of_many_differences_ten_are_named():
    many = [{f"config.{number}": process for number in range(40)} for process in range(2)]
    assert "; and 30 more. Start" in describe_differences(many)


def test_a_run_compares_itself_with_the_others(data_dir, monkeypatch):
    """What may differ between hosts is left out: where data lie, and what a machine can do."""
    config = runs.config(f"input.data_dir={data_dir}")
    data = open_datasets(config)
    require_agreement(config, data)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    everyone = []
    monkeypatch.setattr(hosts, "gather", lambda facts: [everyone.append(facts) or facts])
    require_agreement(config, data)
    other = runs.config("input.data_dir=/elsewhere", "input.num_workers=3", "logging.tensorboard=True")
    monkeypatch.setattr(hosts, "gather", lambda facts: [*everyone, facts])
    require_agreement(other, data)
    monkeypatch.setattr(hosts, "gather", lambda facts: [facts, facts | {"config.seed": 7}])
    with pytest.raises(ValueError, match=r"process 1: config\.seed is 7, in process 0 0"):
        require_agreement(config, data)
