"""The meaning of the words after a verb, and the errors of words without one."""

import dataclasses
from typing import Annotated, ClassVar, Literal

import pytest

from tests.integration.commands import run
from tests.rejections import rejects
from vit_jax import cli
from vit_jax.cli.groups import GROUPS
from vit_jax.cli.loading import Reading
from vit_jax.cli.options import (
    REQUIRED,
    Group,
    Options,
    Overrides,
    PositiveShare,
    Recipe,
    Share,
    UsageError,
    argument,
    group,
    list_options,
    option,
    switch,
)
from vit_jax.cli.verbs import verb
from vit_jax.config.rules import Count, Number, Positive, When


def build_verb(*bases, **fields):
    return verb()(
        type(
            "Words",
            bases or (Options,),
            fields | {"__doc__": "Do nothing."},
        )
    )


def build_verb_with_arguments(*names):
    """Return a verb with positional arguments: "A", "A…" or "[A]"."""
    fields = {}
    hints = {}
    for name in names:
        form = name.strip("[]")
        attribute = form.strip("…").lower()
        default = None if name.startswith("[") else REQUIRED
        hints[attribute] = tuple[str, ...] if form.endswith("…") else str | None
        fields[attribute] = argument(form, "word", default)
    return build_verb(__annotations__=hints, **fields)


def test_options_and_switches():
    words = [
        "--data-dir=/a=b --c",
        "--json",
        "--form=b",
        "--data",
        "x.py",
        "--steps=1,20",
    ]
    options = VERB.parse(words)

    assert options.data == "x.py"
    assert options.data_dir == "/a=b --c"
    assert options.form == "b"
    assert options.json is True
    assert options.steps == (1, 20)
    assert options.top == 3
    assert options.rate is None


def test_overrides():
    recipe = "x.py:ViT-L/16,epochs=14"
    words = [
        "--config.a.b=1",
        f"--config={recipe}",
        "--workdir=w",
        "--config.seed",
        "2",
    ]
    options = Run.parse(words)

    assert options.config == recipe
    assert options.overrides == ["--config.a.b=1", "--config.seed=2"]


class Some(Options):
    """Do nothing."""

    data: str = option("DATA", "input", REQUIRED)
    top: Count = option("N", "classes", 3)
    data_dir: str | None = option("FOLDER", "of TFDS")
    form: Literal["a", "b", "c"] | None = option("", "of it")
    steps: tuple[Count, ...] | None = option("N,…", "several")
    rate: Positive | None = option("X", "rate")
    part: PositiveShare | None = option("X", "part")
    seed: Number | None = option("N", "seed")
    json: bool = switch("as JSON")
    fast: Annotated[bool, When("json")] = switch("with --json")
    slow: Annotated[str | None, When("form", "a", "b"), When("json", False)] = option(
        "X", "with --form=a or b"
    )

    def run(self):
        """Do nothing."""


@verb("--config=digits --workdir=x")
class Run(Recipe):
    """Run."""

    workdir: str = option("FOLDER", "of the run", REQUIRED)
    grid: list[str] = option("FIELD=A,B…", "values", [])


VERB = verb("--data=x")(Some)


class Pair(Options):
    """Read a word and data."""

    source: str = argument("SOURCE", "first word")
    data: str = option(
        "DATA",
        "second word, or an option",
        REQUIRED,
        is_positional=True,
    )


PAIR = verb("a b", "a --data=b")(Pair)


@pytest.mark.parametrize(
    "words",
    [
        ["a", "b"],
        ["a", "--data=b"],
        ["--data", "b", "a"],
    ],
)
def test_an_option_may_be_a_word(words):
    options = PAIR.parse(words)

    assert (options.source, options.data) == ("a", "b")
    assert PAIR.help(80).startswith("usage: vit-jax pair SOURCE DATA [OPTION …]")


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["a"], "Missing: DATA"),
        (["a", "b", "--data=c"], "b, --data=: are two values of DATA"),
        (["a", "b", "c"], "Unknown argument 'c'"),
    ],
)
def test_words_for_an_option_that_are_wrong(words, rule):
    with rejects(rule):
        PAIR.parse(words)


def test_the_last_override_of_a_field_counts():
    overrides = ["--config.seed=1", "--config.total=9", "--config.seed=2"]
    options = Run.parse(["--config=x", "--workdir=w", *overrides])

    assert options.overrides == ["--config.seed=2", "--config.total=9"]


def test_an_option_that_may_be_repeated_keeps_every_value():
    words = [
        "--config=x",
        "--grid",
        "a.b=1,2",
        "--workdir=w",
        "--grid=c=x y;z",
        "--config.seed=2",
    ]
    options = Run.parse(words)

    assert options.grid == ["a.b=1,2", "c=x y;z"]
    assert options.overrides == ["--config.seed=2"]
    # Each command has a new list.
    assert Run.parse(["--config=x", "--workdir=w"]).grid == []


@pytest.mark.parametrize(
    ("words", "names", "values"),
    [
        (["a", "b"], ("FIRST", "SECOND"), {"first": "a", "second": "b"}),
        (["a", "b", "c d", "e"], ("FIRST", "MORE…"), {"first": "a", "more": ["b", "c d", "e"]}),
        (["-", "./-x"], ("FIRST", "MORE…"), {"first": "-", "more": ["./-x"]}),
        (["a"], ("FIRST", "[SECOND]"), {"first": "a", "second": None}),
        (["a", "b"], ("FIRST", "[SECOND]"), {"first": "a", "second": "b"}),
        ([], (), {}),
    ],
)
def test_positional_words(words, names, values):
    assert vars(build_verb_with_arguments(*names).parse(words)) == values


def test_words_may_stand_between_options():
    words = ["--top=1", "w.npz", "--json", "a.png", "--csv=x.csv", "b.png"]
    options = cli.VERBS["predict"].parse(words)

    assert options.checkpoint == "w.npz"
    assert [*options.files] == ["a.png", "b.png"]
    assert options.top == 1


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("--data=x --tpo=3", r"'--tpo=3'.*Did you mean --top\?.*vit-jax some --help"),
        ("--data=x --json=yes", "--json takes no value"),
        ("--data=x --config.seed=1", "'--config.seed=1'"),
        ("--folder=photos", r"'--folder=photos'\. Did you mean --data=folder:photos\?"),
        ("--data=x --top", "--top needs a value"),
        ("--data=x --top=", "--top=: must have a value"),
        ("--data=x --form=d", "--form=d.*'a', 'b', 'c'"),
        ("--data=x -f", "'-f'"),
        ("--top=3", "Missing.*--data"),
        ("--data=x more", "'more'"),
        # The verb has no config.
        ("--init_from=x", r"'--init_from=x'\. See"),
        # Options without effect
        ("--data=x --fast", "--fast: has no effect without --json"),
        ("--data=x --slow=1", "--slow=1: has no effect without --form=a or b"),
        ("--data=x --slow=1 --form=a --json", "--slow=1: has no effect with --json"),
    ],
)
def test_wrong_words(words, rule):
    with pytest.raises(UsageError, match=rule):
        VERB.parse(words.split())


@pytest.mark.parametrize(
    ("option", "rule"),
    [
        ("--top=0", "--top=.*0.*(int|at least 1)"),
        ("--top=2.0", "--top=.*2.0.*(int|at least 1)"),
        ("--top=²", "--top=.*².*(int|at least 1)"),
        ("--seed=-1", "--seed=.*-1.*(int|not be negative)"),
        ("--seed=e", "--seed=.*e.*(int|not be negative)"),
        ("--steps=0", "--steps=.*(int|at least 1)"),
        ("--steps=1,x", "--steps=.*(int|at least 1)"),
        ("--part=0", r"--part=.*(\(0, 1\]|finite|float)"),
        ("--part=1.01", r"--part=.*(\(0, 1\]|finite|float)"),
        ("--part=nan", r"--part=.*(\(0, 1\]|finite|float)"),
        ("--part=most", r"--part=.*(\(0, 1\]|finite|float)"),
        ("--rate=0", "--rate=.*(positive|finite|float)"),
        ("--rate=-1", "--rate=.*(positive|finite|float)"),
        ("--rate=inf", "--rate=.*(positive|finite|float)"),
        ("--rate=x", "--rate=.*(positive|finite|float)"),
    ],
)
def test_wrong_values(option, rule):
    with pytest.raises(UsageError, match=rule):
        VERB.parse(["--data=x", option])


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("--folder=photos", r"Did you mean --config.data=folder:photos\?"),
        ("--grid", "--grid needs a value"),
        # Fields of the config without its name
        ("--init_from=w.npz", r"Did you mean --config.init_from=\?"),
        ("--learning-rate=0.1", r"Did you mean --config.schedule.learning_rate=\?"),
        ("--model.width=64", r"Did you mean --config.model.width=\?"),
        ("--name=adam", r"Did you mean --config.model.name= or --config.optimizer.name=\?"),
        ("--model=ViT-B/16", r"'--model=ViT-B/16'.*Did you mean --config.model.name=\?"),
        ("--epochs=90", r'Did you mean --config.total="N epochs"\?'),
        ("--workdri=x", r"Did you mean --workdir\?"),
    ],
)
def test_wrong_words_of_a_verb_with_a_recipe(words, rule):
    with pytest.raises(UsageError, match=rule):
        Run.parse(words.split())


@pytest.mark.parametrize(
    ("words", "names", "rule"),
    [
        ("", ("CHECKPOINT", "IMAGE…"), "Missing: CHECKPOINT, IMAGE….*vit-jax words --help"),
        ("a b c", ("SOURCE", "DESTINATION"), "'c'"),
    ],
    ids=["too few", "too many"],
)
def test_wrong_numbers_of_positional_words(words, names, rule):
    with pytest.raises(UsageError, match=rule):
        build_verb_with_arguments(*names).parse(words.split())


@pytest.mark.parametrize(
    "word",
    [
        "--output=gs://b/x",
        "--config.data=folder:s3://b",
        "--data=a,s3://b",
        "gs://b/runs/x",
        "folder:gs://b",
    ],
)
def test_addresses_of_buckets_are_rejected(word):
    with rejects(word, "folder.*mount the bucket"):
        VERB.parse([word])


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        ("pretrain", ["--config=x", "--workdir=gs://b/run", "--config.data=folder:gs://b/x"]),
        ("evaluate", ["gs://b/run", "--data=wds:gs://b/{0..3}.tar", "--data_dir=gs://b/tfds"]),
        ("status", ["gs://b/run", "gs://b/runs"]),
        ("duplicates", ["--weights=gs://b/x.npz", "folder:a", "--against=folder:gs://b/x"]),
    ],
)
def test_addresses_of_buckets_are_taken_where_they_are_read(verb, words):
    assert cli.VERBS[verb].parse(words)
    with pytest.raises(ValueError, match="Mount the bucket"):
        cli.VERBS[verb].parse([word.replace("gs://", "s3://") for word in words])


@pytest.mark.parametrize("name", ["sweep", "study", "vtab"])
def test_no_folder_is_made_of_an_address_that_is_rejected(
    name,
    tmp_path,
    monkeypatch,
):
    monkeypatch.chdir(tmp_path)
    outcome = run([name, "--config=digits", "--workdir=gs://bucket/run"])

    assert outcome.code == 2
    assert "gcsfuse BUCKET FOLDER" in outcome.err
    assert not list(tmp_path.iterdir())


def test_options_without_effect_are_those_with_another_value_than_their_default():
    options = VERB.parse(
        [
            "--data=x",
            "--top=3",
            "--rate=2",
            "--json",
            "--steps=1,2",
        ]
    )

    assert options.collect_values("top", "rate", "part") == {"top": 3, "rate": 2.0}

    options.reject_ineffective(("top", "part"), "here")
    with rejects("--steps=1,2, --rate=2.0, --json: ", "has no effect here. Leave it out."):
        options.reject_ineffective(("top", "rate", "part", "json", "steps"), "here")


@pytest.mark.parametrize("flag", ["--images.value_range", "--value_range"])
@pytest.mark.parametrize("text", ["1", "1,2,3", "a,b", "2,1", "1,1", "0,inf", "nan,1"])
def test_a_wrong_range_of_values(flag, text):
    with rejects(f"{flag}={text}", "finite.*LOW < HIGH"):
        build_verb(Reading).parse([f"{flag}={text}"])


def test_shares_of_several_machines():
    parse = build_verb(Share).parse

    assert parse([]).share == (0, 1)
    assert parse(["--index=2", "--count=3"]).share == (2, 3)

    too_high = parse(["--index=3", "--count=3"])
    with rejects("--index=", r"\[0, 3\).*--count="):
        _ = too_high.share

    without_index = parse(["--count=2"])
    with rejects("--index=", r"None.*\[0, 2\).*--count="):
        _ = without_index.share

    with rejects("--index=0", "without --count"):
        parse(["--index=0"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Colours(Group):
    """Colours of the output."""

    PREFIX: ClassVar[str] = "colours"

    name: str | None = option("NAME", "name of a palette")
    depth: Annotated[Count | None, When("name")] = option("N", "bits")


class Painting(Options):
    """Do nothing."""

    colours: Colours = group(Colours)
    plain: bool = switch("without colours")


PAINT = verb("--colours.name=x")(Painting)
# By field of a group: the text of an option, and its value
VALUES = {
    "allow_code": ("a,b.c", "a,b.c"),
    "raw": (None, True),
    "image_size": ("12,16", (12, 16)),
    "architecture": ("vit", "vit"),
    "num_heads": ("3", 3),
    "gelu": ("quick", "quick"),
    "layer_norm_epsilon": ("1e-5", 1e-5),
    "group_norm_epsilon": ("1e-5", 1e-5),
    "standardization_epsilon": ("1e-5", 1e-5),
    "standardization_epsilon_added_to": ("std", "std"),
    "rope": ("grid", "grid"),
    "position_embedding": ("none", "none"),
    "compute_dtype": ("bfloat16", "bfloat16"),
    "resize": ("direct", "direct"),
    "crop_fraction": ("0.5", 0.5),
    "interpolation": ("bicubic", "bicubic"),
    "exif_orientation": ("ignored", "ignored"),
    "value_range": ("0,4095", (0.0, 4095.0)),
    "channels": ("4", 4),
    "bands": ("4,3,2", (4, 3, 2)),
    "channel_mean": ("1,2.5", (1.0, 2.5)),
    "channel_std": ("1,2.5", (1.0, 2.5)),
    "channel_weights": ("zero", "zero"),
}
FIELDS = [(kind.PREFIX, option.name) for kind in GROUPS for option in list_options(kind)]


@pytest.mark.parametrize(("prefix", "name"), FIELDS, ids=lambda text: text)
def test_every_field_of_a_group_has_its_earlier_name(prefix, name):
    """The option, its earlier name and the earlier name with dashes have the same value."""
    text, value = VALUES[name]
    end = "" if text is None else f"={text}"
    reading = build_verb(Reading)

    for flag in (f"--{prefix}.{name}", f"--{name}", f"--{name.replace('_', '-')}"):
        options = reading.parse([flag + end])
        assert getattr(getattr(options, prefix), name) == value

    assert reading.parse([]) != options
    with rejects(f"--{name}, --{prefix}.{name}: ", "two names of one option"):
        reading.parse([f"--{name}{end}", f"--{prefix}.{name}{end}"])


def list_verbs_with(flag):
    return {name for name, verb in cli.VERBS.items() if flag in verb.flags}


def test_verbs_take_groups():
    with_weights = list_verbs_with("weights.FIELD")
    with_images = list_verbs_with("images.FIELD")
    computing = {
        "evaluate",
        "predict",
        "export",
        "inspect",
        "fewshot",
        "probe",
        "knn",
        "features",
    }

    assert with_images == computing | {"duplicates"}
    assert with_weights == with_images | {"convert", "replay", "report"}


@pytest.mark.parametrize("name", ["replay", "report"])
def test_verbs_that_read_a_run_take_allowed_code(name):
    options = cli.VERBS[name].parse(["runs/x", "--weights.allow_code=a"])

    assert options == cli.VERBS[name].parse(["runs/x", "--allow_code=a"])
    assert options.weights.allow_code == "a"


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        ("--weights.num_heads=two", "--weights.num_heads=two: must be int"),
        ("--num-heads=two", "--num-heads=two: must be int"),
        ("--weights.raw=1", "--weights.raw takes no value"),
        ("--gelu", "--gelu needs a value"),
        ("--images.image_size=3", r"Did you mean --weights.image_size\?"),
        ("--weights.gello=exact", r"Did you mean --weights.gelu\?"),
        ("--resise=direct", r"Did you mean --images.resize\?"),
        ("--weights=w", "Unknown argument '--weights=w'"),
    ],
)
def test_wrong_fields_of_groups(words, rule):
    with pytest.raises(UsageError, match=rule):
        build_verb(Reading).parse(words.split())


def test_a_field_of_a_group_without_effect():
    with rejects("--colours.depth=3: ", "has no effect without --colours.name"):
        PAINT.parse(["--colours.depth=3"])

    with rejects("--depth=3: ", "has no effect without --colours.name"):
        PAINT.parse(["--depth=3"])

    options = PAINT.parse(["--colours.name=x", "--depth=3"])
    for names in (["colours"], ["colours.name", "colours.depth"]):
        with rejects("--colours.name=x, --colours.depth=3: ", "has no effect here"):
            options.reject_ineffective(names, "here")

    options.reject_ineffective(["plain"], "here")


@pytest.mark.parametrize("flag", ["--weights.raw", "--raw"])
def test_errors_of_a_verb_name_an_option_as_it_was_written(flag):
    def run(self):
        raise ValueError("w.npz: leave out --weights.raw. --weights.rawest is another.")

    with pytest.raises(ValueError, match=rf"leave out {flag}\. --weights\.rawest is another"):
        build_verb(Reading, run=run)([flag])


def test_a_group_and_an_option_may_have_the_same_name():
    """--images=FILES beside --images.FIELD, and --weights=CHECKPOINT beside --weights.FIELD."""
    words = [
        "w.npz",
        "--output=o",
        "--images=photos",
        "--images.resize=direct",
    ]
    options = cli.VERBS["inspect"].parse(words)

    assert options.files == "photos"
    assert options.images.resize == "direct"

    words = [
        "folder:a",
        "--against=folder:b",
        "--weights=w.npz",
        "--weights.raw",
    ]
    options = cli.VERBS["duplicates"].parse(words)

    assert options.checkpoint == "w.npz"
    assert options.weights.raw is True


def test_allowed_code_is_a_field_of_a_recipe():
    """A verb that takes a recipe passes it on as an override; the others have it in a group."""
    reading = build_verb(Reading)
    overridden = build_verb(Overrides)

    assert reading.parse(["--allow-code=a,b.c"]).weights.allow_code == "a,b.c"
    assert overridden.parse(["--allow_code=a,b.c"]).overrides == ["--config.allow_code=a,b.c"]
    with rejects("--config.allow_code, --allow_code: ", "two names of one option"):
        overridden.parse(["--config.allow_code=a", "--allow_code=b"])


def test_the_help_of_verbs_tells_where_allowed_code_is_set():
    arguments = {"CHECKPOINT", "SOURCE", "WORKDIR"}
    texts = [verb.help() for verb in cli.VERBS.values()]
    weights_texts = [text for text in texts if arguments & {*text.split()[:4]}]
    recipe_texts = [text for text in texts if "--config RECIPE" in text]

    assert len(weights_texts) >= 11
    for text in weights_texts:
        assert "allow_code" in text
        assert "--weights.FIELD" in text
    for text in recipe_texts:
        assert "--config.SECTION.FIELD" in text
