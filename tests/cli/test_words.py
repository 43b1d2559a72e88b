"""The meaning of the words after a verb, and the errors of those without one."""

import pytest

from tests.rejections import rejects
from vit_jax import cli
from vit_jax.cli.words import UsageError, fraction, positive, share, split, value_range, whole, wholes


def read_range(options, name):
    return value_range(options)


VERB = {"--data=DATA": "", "[--top=3]": "", "[--data_dir=FOLDER]": "", "[--form=a|b|c]": "", "[--json]": ""}
OVERRIDES = {"[--config.SECTION.FIELD=VALUE]": ""}
RUN = {"--config=RECIPE": "", "--workdir=FOLDER": ""} | OVERRIDES


def test_options_switches_and_overrides():
    given = split(
        ["--config.a.b=1", "--config=x.py", "--data-dir=/a=b --c", "--json", "--config.seed=2", "--form=b"],
        {"--config=RECIPE": "", "[--data_dir=X]": "", "[--top=3]": "", "[--form=a|b]": "", "[--json]": ""} | OVERRIDES,
        "verb",
    )
    assert given.options == {"config": "x.py", "data_dir": "/a=b --c", "json": "true", "form": "b"}
    assert given.overrides == ["--config.a.b=1", "--config.seed=2"]


def test_an_option_that_may_be_repeated_keeps_every_value():
    form = {"--grid=FIELD=A,B…": "", "[--form=a|b]": ""} | OVERRIDES
    given = split(["--grid", "a.b=1,2", "--form=b", "--grid=c=x y;z", "--config.seed=2"], form, "verb")
    assert given == ({"grid": "a.b=1,2\nc=x y;z", "form": "b"}, ["--config.seed=2"], ())


@pytest.mark.parametrize(
    ("words", "names", "named", "more"),
    [
        (["a", "b"], ("FIRST", "SECOND"), {"FIRST": "a", "SECOND": "b"}, ()),
        (["a", "b", "c d", "e"], ("FIRST", "MORE…"), {"FIRST": "a"}, ("b", "c d", "e")),
        (["-", "-x"], ("FIRST", "MORE…"), {"FIRST": "-"}, ("-x",)),
        (["a"], ("FIRST", "[SECOND]"), {"FIRST": "a"}, ()),
        (["a", "b"], ("FIRST", "[SECOND]"), {"FIRST": "a", "SECOND": "b"}, ()),
        ([], (), {}, ()),
    ],
)
def test_positional_words(words, names, named, more):
    given = split(words, dict.fromkeys(names, ""), "verb")
    assert (given.options, given.more) == (named, more)


@pytest.mark.parametrize(
    ("words", "arguments", "rule"),
    [
        ("--data=x --tpo=3", VERB, r"'--tpo=3'.*Did you mean --top=\?.*vit-jax verb --help"),
        ("--data=x --json=yes", VERB, r"'--json=yes'.*Did you mean --json\?"),
        ("--data=x --config.seed=1", VERB, "'--config.seed=1'"),
        ("--folder=photos", VERB, r"'--folder=photos'\. Did you mean --data=folder:photos\?"),
        ("--folder=photos", RUN, r"Did you mean --config.data=folder:photos\?"),
        ("--folder=photos", {"[--form=a]": ""}, r"'--folder=photos'\. Did you mean --form=\?"),
        ("--data=x --top", VERB, "--top.*--top=VALUE"),
        ("--grid", {"--grid=FIELD=A,B…": ""}, "--grid.*--grid=VALUE"),
        ("--data=x --form=d", VERB, "--form=d.*a, b or c"),
        ("--data x", VERB, "--data=VALUE"),
        ("--top=3", VERB, "Missing.*--data="),
        ("--data=x more", VERB, "'more'.*--"),
        # fields of the config without its name, where there is a config; other verbs have none to set
        ("--init_from=w.npz", RUN, r"Did you mean --config.init_from=\?"),
        ("--learning-rate=0.1", RUN, r"Did you mean --config.schedule.learning_rate=\?"),
        ("--model.width=64", RUN, r"Did you mean --config.model.width=\?"),
        ("--name=adam", RUN, r"Did you mean --config.model.name= or --config.optimizer.name=\?"),
        ("--model=ViT-B/16", RUN, r"'--model=ViT-B/16'.*Did you mean --config.model.name=\?"),
        ("--epochs=90", RUN, r'Did you mean --config.total="N epochs"\?'),
        ("--workdri=x", RUN, r"Did you mean --workdir=\?"),
        ("--init_from=x", VERB, r"'--init_from=x'\. See"),
        # too few or too many
        ("", {"CHECKPOINT": "", "IMAGE…": ""}, "CHECKPOINT IMAGE….*nothing.*vit-jax verb --help"),
        ("a b c", {"SOURCE": "", "DESTINATION": ""}, "SOURCE DESTINATION.*a b c"),
    ],
)
def test_wrong_words(words, arguments, rule):
    with pytest.raises(UsageError, match=rule):
        split(words.split(), arguments, "verb")


@pytest.mark.parametrize(
    "word",
    ["--data_dir=gs://b/tfds", "--config.data=folder:s3://b", "--data=a,gs://b", "gs://b/runs/x", "folder:gs://b"],
)
def test_addresses_of_buckets_are_rejected(word):
    with rejects(word, "folder.*mount the bucket"):
        split([word], VERB | OVERRIDES | {"NAME": ""}, "verb")


@pytest.mark.parametrize("verb", [name for name, verb in cli.VERBS.items() if "--workdir=FOLDER" in verb.arguments])
def test_no_folder_is_made_of_an_address(verb, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_:
        cli.main([verb, "--config=digits", "--workdir=gs://bucket/run"])
    assert exit_.value.code == 2
    assert "gcsfuse BUCKET FOLDER" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_numbers():
    assert [whole({name: text}, name) for name, text in (("top", "1"), ("seed", "0"), ("top", "07"))] == [1, 0, 7]
    assert [fraction({"x": text}, "x") for text in ("1", "0.875", "1e-3")] == [1.0, 0.875, 0.001]


@pytest.mark.parametrize(
    ("read", "name", "texts", "rule"),
    [
        (whole, "top", ("0", "2.0", "²"), "whole number.*1"),
        (whole, "seed", ("-1", "e"), "whole number.*0"),
        (wholes, "shots", ("0", "1,x", "1,,2"), "whole numbers.*1"),
        (fraction, "x", ("0", "1.01", "-1", "nan", "inf", "most"), "above 0, up to 1"),
        (positive, "l2", ("0", "-1", "inf", "x"), "positive"),
        (
            read_range,
            "value_range",
            ("1", "1,2,3", "a,b", "2,1", "1,1", "0,inf", "nan,1"),
            "finite.*LOW < HIGH",
        ),
    ],
)
def test_what_is_no_such_number(read, name, texts, rule):
    for text in texts:
        with rejects(f"--{name}={text}", rule):
            read({name: text}, name)


def test_a_range_of_values():
    assert value_range({"value_range": "-1.5,4095"}) == (-1.5, 4095.0)
    assert value_range({}) is None


def test_shares_of_several_machines():
    assert (share({}), share({"index": "2", "count": "3"})) == ((0, 1), (2, 3))
    for options, rule in (({"index": "3", "count": "3"}, "from 0"), ({"index": "0"}, "both"), ({"count": "2"}, "both")):
        with rejects("--index=", f"--count=.*{rule}"):
            share(options)


def test_allowed_code_is_a_field_of_a_recipe():
    """A verb that takes a recipe passes it on as an override; the others have it as an option."""
    table = {"[--allow_code=PACKAGE,…]": ""}
    assert split(["--allow-code=a,b.c"], table, "verb").options == {"allow_code": "a,b.c"}
    given = split(["--allow_code=a,b.c"], table | {"[--config.SECTION.FIELD=VALUE]": ""}, "verb")
    assert (given.options, given.overrides) == ({}, ["--config.allow_code=a,b.c"])
    verbs = [verb.arguments.keys() for verb in cli.VERBS.values()]
    with_weights = [forms for forms in verbs if forms & {"CHECKPOINT", "WEIGHTS", "SOURCE", "WORKDIR"}]
    with_recipe = [forms for forms in verbs if any(form.strip("[").startswith("--config=") for form in forms)]
    assert len(with_weights) >= 11
    assert all(table.keys() <= forms for forms in with_weights + with_recipe)
