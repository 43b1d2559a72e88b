"""Names that are no fields, and the fields that people mean by them."""

import pytest

from tests.rejections import rejects
from vit_jax.config import FinetuneConfig, InputConfig, PretrainConfig
from vit_jax.config.parsing import from_dict, list_field_paths
from vit_jax.config.synonyms import MEANT, find_meant_fields

PRETRAINING = list_field_paths(PretrainConfig)
FINETUNING = list_field_paths(FinetuneConfig)


def test_every_word_means_a_field_and_is_none():
    known = {*PRETRAINING, *FINETUNING}
    meant = {field.partition("=")[0] for field in MEANT.values()}
    names = {field.rpartition(".")[2] for field in known}

    assert meant <= known
    assert names.isdisjoint(MEANT)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("batch_size", ["global_batch"]),
        ("Batch-Size", ["global_batch"]),
        ("input.batch_size", ["global_batch"]),
        ("epochs", ['total="N epochs"']),
        ("optimizer.clip", ["optimizer.clip_global_norm"]),
        ("lr", ["schedule.learning_rate"]),
        ("hidden_size", ["model.width"]),
        ("learning_rate", ["schedule.learning_rate"]),  # under its section
        ("wdith", ["model.width"]),
        ("input.mixup", ["input.mixup_alpha"]),
        ("input.cutmix", ["input.cutmix_alpha"]),
        ("input.random_erasing", ["input.erasing_fraction"]),
        ("save_total_limit", ["checkpoint.keep_latest"]),
        ("eval_batch_size", ["evaluation.global_batch"]),
        ("fsdp", ["sharding.parameters"]),
        ("zzzz", []),
    ],
)
def test_fields_meant(name, fields):
    assert find_meant_fields(name, PRETRAINING) == fields


def test_a_word_for_what_this_kind_of_run_has_not():
    assert find_meant_fields("resume", PRETRAINING) == ["resume_from"]
    assert "resume_from" not in find_meant_fields("resume", FINETUNING)


@pytest.mark.parametrize("name", ["cutmix_minmax", "CutMix-MinMax"])
def test_a_feature_that_is_not_included(name):
    with rejects(f"There is no field 'input.{name}'", "Use input.cutmix_alpha alone"):
        from_dict(InputConfig, {name: 1.0}, "input.")
