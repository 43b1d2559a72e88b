"""The recorded cases and the tables made of them."""

import pytest

from vit_jax.plan import record


@pytest.fixture(scope="module")
def rows():
    return record.load()


def test_names_are_unique_and_commands_can_be_typed():
    cases = [*record.HEADLINES, *record.SPREAD]
    assert len({case.name for case in cases}) == len(cases)
    assert record.HEADLINES[0].command == "vit-jax plan --config=configs/pretrain_jft.py:ViT-H/14 --topology=v5e:16x16"
    assert " --config.global_batch=1024" in record.HEADLINES[3].command


def test_recorded_commands_are_those_of_the_cases(rows):
    commands = {case.name: case.command for case in (*record.HEADLINES, *record.SPREAD)}
    assert {name: row["command"] for name, row in rows.items()} == {name: commands[name] for name in rows}


@pytest.mark.parametrize("make", [record.headline_table, record.scaling_table, record.spread_table])
def test_the_readme_has_the_tables_of_what_is_recorded(rows, make):
    table = make(rows)
    assert table.count("\n") > 3
    assert table in record.README.read_text()


def test_a_row_of_a_step_that_did_not_fit(rows):
    row = rows["H/14 on v4:4x4x8"] | {"memory": None, "fits": False, "needed_bytes": None, "timeline": {}}
    assert "| no |" in record.headline_table({"H/14 on v4:4x4x8": row})


def test_writing_keeps_other_rows_and_the_prose(rows, tmp_path, monkeypatch):
    monkeypatch.setattr(record, "GOLDEN", tmp_path / "plan.json")
    monkeypatch.setattr(record, "README", tmp_path / "README.md")
    marks = "".join(
        f"<!-- {mark} -->\nold\n<!-- end of {mark} -->\nprose\n" for mark in ("headlines", "scaling", "spread")
    )
    record.README.write_text(f"# Head\n{marks}")
    record.write({"H/14 on v5e:16x16": rows["H/14 on v5e:16x16"]})
    text = record.README.read_text()
    assert text.startswith("# Head\n<!-- headlines -->\n| |")
    assert text.count("prose") == 3
    assert "old" not in text
    assert list(record.load()) == ["H/14 on v5e:16x16"]
