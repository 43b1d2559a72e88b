"""What words after a verb mean, and what is said of those that mean nothing."""

import re

import pytest

from vit_jax import cli
from vit_jax.cli.words import UsageError, fraction, split, whole

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
    ("words", "arguments", "message"),
    [
        ("--data=x --tpo=3", VERB, r"'--tpo=3'. Did you mean --top=\? See vit-jax verb --help.$"),
        ("--data=x --json=yes", VERB, r"'--json=yes'. Did you mean --json\?"),
        ("--data=x --config.seed=1", VERB, "'--config.seed=1'"),
        ("--data=x --top", VERB, "--top needs a value: --top=VALUE"),
        ("--data=x --form=d", VERB, "--form=d: choose a, b or c.$"),
        ("--data x", VERB, "--data needs a value: --data=VALUE"),
        ("--top=3", VERB, "Missing: --data="),
        ("--data=x more", VERB, "'more': arguments of this verb begin with --"),
        # fields of the config without its name, where there is a config; other verbs have none to set
        ("--init_from=w.npz", RUN, r"z'\. Did you mean --config.init_from=\? See"),
        ("--learning-rate=0.1", RUN, r"\. Did you mean --config.schedule.learning_rate=\? See"),
        ("--model.width=64", RUN, r"\. Did you mean --config.model.width=\? See"),
        ("--name=adam", RUN, r"\. Did you mean --config.model.name= or --config.optimizer.name=\? See"),
        ("--model=ViT-B/16", RUN, r"'--model=ViT-B/16'\. Did you mean --config.model.name=\? See"),
        ("--epochs=90", RUN, r'. Did you mean --config.total="N epochs"\? See'),
        ("--workdri=x", RUN, r". Did you mean --workdir=\? See"),
        ("--init_from=x", VERB, r"'--init_from=x'\. See"),
        # too few or too many
        ("", {"CHECKPOINT": "", "IMAGE…": ""}, "Expected CHECKPOINT IMAGE…, given nothing. See vit-jax verb --help"),
        ("a b c", {"SOURCE": "", "DESTINATION": ""}, "Expected SOURCE DESTINATION, given a b c"),
    ],
)
def test_wrong_words(words, arguments, message):
    with pytest.raises(UsageError, match=message):
        split(words.split(), arguments, "verb")


@pytest.mark.parametrize(
    "word",
    ["--data_dir=gs://b/tfds", "--config.data=folder:s3://b", "--data=a,gs://b", "gs://b/runs/x", "folder:gs://b"],
)
def test_addresses_of_buckets_are_refused(word):
    with pytest.raises(ValueError, match=f"^{re.escape(word)}: a folder is needed, .* Mount the bucket"):
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
    ("read", "name", "texts", "message"),
    [
        (whole, "top", ("0", "2.0", "²"), "must be a whole number from 1"),
        (whole, "seed", ("-1", "e"), "must be a whole number from 0"),
        (fraction, "x", ("0", "1.01", "-1", "nan", "inf", "most"), "must be a number above 0, up to 1"),
    ],
)
def test_what_is_no_such_number(read, name, texts, message):
    for text in texts:
        with pytest.raises(UsageError, match=f"--{name}={text}: {message}"):
            read({name: text}, name)
