"""The recorded tables of bench/README.md."""

import argparse

import pytest

from tests.bench import accelerators, record, store

STORED = store.load()


@pytest.mark.parametrize(
    "chosen",
    record.MEASURED,
    ids=lambda chosen: chosen.name,
)
def test_stored_rows_are_those_of_the_table(chosen):
    rows = STORED[chosen.name]

    assert tuple(rows) == chosen.rows
    for figures in rows.values():
        for column in chosen.columns:
            assert figures[column.figure] > 0


def test_planned_rows_are_those_of_the_table():
    expected = [step.key for step in accelerators.list_steps()]
    rows = STORED[accelerators.NAME]

    assert list(rows) == expected
    for figures in rows.values():
        assert figures["ms"] > 0
        assert figures["gib"] > 0


def test_other_rows_are_not_stored(monkeypatch):
    chosen = record.MEASURED[0]._replace(measure="tests.bench.test_record:measure_other_row")
    monkeypatch.setattr(
        record,
        "store",
        None,
    )

    with pytest.raises(ValueError, match=r"digits: measured \['another'\], and has rows"):
        record.renew_table(chosen, argparse.Namespace())


def measure_other_row(words):
    return {"another": {}}


def test_tables_that_need_more_are_skipped_unless_named(monkeypatch, capsys):
    renewed = []
    monkeypatch.setattr(
        record,
        "renew_table",
        lambda chosen, words: renewed.append(chosen.name),
    )
    monkeypatch.setattr(
        accelerators,
        "store_plans",
        lambda: renewed.append("plans"),
    )

    monkeypatch.setattr("sys.argv", ["record"])
    record.main()
    assert renewed == ["digits", "augmentations", "sources", "prepare", "plans"]
    assert (
        "input: skipped. python -m tests.bench.record input --tensorflow" in capsys.readouterr()[0]
    )

    renewed.clear()
    monkeypatch.setattr("sys.argv", ["record", "digits loop"])
    record.main()
    assert renewed == ["digits loop"]

    monkeypatch.setattr("sys.argv", ["record", "digit"])
    with pytest.raises(SystemExit):
        record.main()
    assert "digit: must be one of digits, digits loop" in capsys.readouterr()[1]
