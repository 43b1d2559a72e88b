"""What words after a verb mean, and what is said of those that mean nothing."""

import pytest

from vit_jax.cli.words import UsageError, fraction, split, whole

VERB = {"required": ("data",), "optional": ("top", "data_dir"), "switches": ("json",)}


def test_options_switches_and_overrides():
    options, overrides, _ = split(
        ["--config.a.b=1", "--config=x.py", "--data-dir=/a=b --c", "--json", "--config.seed=2"],
        required=("config",),
        optional=("data_dir", "top"),
        switches=("json", "raw"),
    )
    assert options == {"config": "x.py", "data_dir": "/a=b --c", "json": "true"}
    assert overrides == ["--config.a.b=1", "--config.seed=2"]


@pytest.mark.parametrize(
    ("words", "names", "named", "more"),
    [
        (["a", "b"], ("FIRST", "SECOND"), {"FIRST": "a", "SECOND": "b"}, ()),
        (["a", "b", "c d", "e"], ("FIRST", "MORE…"), {"FIRST": "a"}, ("b", "c d", "e")),
        (["-", "-x"], ("FIRST", "MORE…"), {"FIRST": "-"}, ("-x",)),
        ([], (), {}, ()),
    ],
)
def test_positional_words(words, names, named, more):
    options, _, rest = split(words, positional=names)
    assert (options, rest) == (named, more)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data=x", "--tpo=3"], r"Unknown argument '--tpo=3'. Did you mean --top=\? Known: --data=, --top=, --d"),
        (["--data=x", "--json=yes"], r"Unknown argument '--json=yes'. Did you mean --json\?"),
        (["--data=x", "--config.seed=1"], "Unknown argument '--config.seed=1'"),
        (["--data=x", "--top"], "--top needs a value: --top=VALUE"),
        (["--data", "x"], "--data needs a value: --data=VALUE"),
        (["--top=3"], "Missing: --data="),
        (["--data=x", "more"], "Unknown argument 'more': arguments of this verb begin with --"),
    ],
)
def test_wrong_words(words, message):
    with pytest.raises(UsageError, match=message):
        split(words, **VERB)


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("--init_from=w.npz", r" Did you mean --config.init_from=\?"),
        ("--learning-rate=0.1", r" Did you mean --config.schedule.learning_rate=\?"),
        ("--model.width=64", r" Did you mean --config.model.width=\?"),
        ("--name=adam", r" Did you mean --config.model.name= or --config.optimizer.name=\?"),
        ("--model=ViT-B/16", ""),
    ],
)
def test_fields_of_the_config_without_its_name(word, hint):
    """Where there is a config; other verbs have none to set."""
    with pytest.raises(UsageError, match=rf"^Unknown argument '{word}'\.{hint} Known: --config=, --workdir=$"):
        split([word], required=("config", "workdir"))
    with pytest.raises(UsageError, match=r"'--init_from=x'\. Known: --data="):
        split(["--init_from=x"], **VERB)


@pytest.mark.parametrize(
    ("words", "names", "message"),
    [
        ([], ("CHECKPOINT", "IMAGE…"), "Expected CHECKPOINT IMAGE…, given nothing. See vit-jax --help"),
        (["a", "b", "c"], ("SOURCE", "DESTINATION"), "Expected SOURCE DESTINATION, given a b c"),
    ],
)
def test_too_few_or_too_many_words(words, names, message):
    with pytest.raises(UsageError, match=message):
        split(words, positional=names)


def test_whole_numbers():
    for name, text, value in (("top", "1", 1), ("seed", "0", 0), ("max_unreadable", "07", 7)):
        assert whole({name: text}, name) == value
    for name, text, lowest in (
        ("top", "0", 1),
        ("seed", "-1", 0),
        ("top", "2.0", 1),
        ("top", "²", 1),
        ("seed", "e", 0),
    ):
        with pytest.raises(UsageError, match=f"--{name}={text}: must be a whole number from {lowest}"):
            whole({name: text}, name)


def test_fractions():
    assert [fraction({"x": text}, "x") for text in ("1", "0.875", "1e-3")] == [1.0, 0.875, 0.001]
    for text in ("0", "1.01", "-1", "nan", "inf", "most"):
        with pytest.raises(UsageError, match=f"--x={text}: must be a number above 0, up to 1"):
            fraction({"x": text}, "x")
