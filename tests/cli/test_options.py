"""The meaning of the words after a verb, and the errors of those without one."""

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


def verb_of(*bases, **fields):
    return verb()(type("Words", bases or (Options,), fields | {"__doc__": "Do nothing."}))


def words_of(*names):
    """A verb with positional arguments: "A", "A…" or "[A]"."""
    fields = {}
    hints = {}
    for name in names:
        form = name.strip("[]")
        hints[form.strip("…").lower()] = tuple[str, ...] if form.endswith("…") else str | None
        fields[form.strip("…").lower()] = argument(
            form, "word", None if name.startswith("[") else REQUIRED
        )
    return verb_of(__annotations__=hints, **fields)


def test_options_switches_and_overrides():
    options = VERB.parse(
        ["--data-dir=/a=b --c", "--json", "--form=b", "--data", "x.py", "--steps=1,20"]
    )

    assert (options.data, options.data_dir, options.form, options.json) == (
        "x.py",
        "/a=b --c",
        "b",
        True,
    )
    assert (options.steps, options.top, options.rate) == ((1, 20), 3, None)

    options = Run.parse(
        ["--config.a.b=1", "--config=x.py:ViT-L/16,epochs=14", "--workdir=w", "--config.seed", "2"]
    )
    assert (options.config, options.overrides) == (
        "x.py:ViT-L/16,epochs=14",
        ["--config.a.b=1", "--config.seed=2"],
    )


def test_the_last_override_of_a_field_counts():
    options = Run.parse(
        ["--config=x", "--workdir=w", "--config.seed=1", "--config.total=9", "--config.seed=2"]
    )
    assert options.overrides == ["--config.seed=2", "--config.total=9"]


def test_an_option_that_may_be_repeated_keeps_every_value():
    words = ["--config=x", "--grid", "a.b=1,2", "--workdir=w", "--grid=c=x y;z", "--config.seed=2"]
    options = Run.parse(words)

    assert (options.grid, options.overrides) == (["a.b=1,2", "c=x y;z"], ["--config.seed=2"])
    assert Run.parse(["--config=x", "--workdir=w"]).grid == []  # a new list


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
    assert vars(words_of(*names).parse(words)) == values


def test_words_may_stand_between_options():
    options = cli.VERBS["predict"].parse(
        ["--top=1", "w.npz", "--json", "a.png", "--csv=x.csv", "b.png"]
    )
    assert (options.checkpoint, [*options.files], options.top) == ("w.npz", ["a.png", "b.png"], 1)


@pytest.mark.parametrize(
    ("words", "parser", "rule"),
    [
        ("--data=x --tpo=3", VERB, r"'--tpo=3'.*Did you mean --top\?.*vit-jax some --help"),
        ("--data=x --json=yes", VERB, "--json takes no value"),
        ("--data=x --config.seed=1", VERB, "'--config.seed=1'"),
        ("--folder=photos", VERB, r"'--folder=photos'\. Did you mean --data=folder:photos\?"),
        ("--folder=photos", Run, r"Did you mean --config.data=folder:photos\?"),
        ("--data=x --top", VERB, "--top needs a value"),
        ("--data=x --top=", VERB, "--top=: must have a value"),
        ("--grid", Run, "--grid needs a value"),
        ("--data=x --form=d", VERB, "--form=d.*'a', 'b', 'c'"),
        ("--data=x -f", VERB, "'-f'"),
        ("--top=3", VERB, "Missing.*--data"),
        ("--data=x more", VERB, "'more'"),
        # values
        *(
            (f"--data=x --top={text}", VERB, f"--top=.*{text}.*(int|at least 1)")
            for text in ("0", "2.0", "²")
        ),
        *(
            (f"--data=x --seed={text}", VERB, f"--seed=.*{text}.*(int|not be negative)")
            for text in ("-1", "e")
        ),
        *(
            (f"--data=x --steps={text}", VERB, "--steps=.*(int|at least 1)")
            for text in ("0", "1,x")
        ),
        *(
            (f"--data=x --part={text}", VERB, r"--part=.*(\(0, 1\]|finite|float)")
            for text in ("0", "1.01", "nan", "most")
        ),
        *(
            (f"--data=x --rate={text}", VERB, "--rate=.*(positive|finite|float)")
            for text in ("0", "-1", "inf", "x")
        ),
        # without effect
        ("--data=x --fast", VERB, "--fast: has no effect without --json"),
        ("--data=x --slow=1", VERB, "--slow=1: has no effect without --form=a or b"),
        ("--data=x --slow=1 --form=a --json", VERB, "--slow=1: has no effect with --json"),
        # fields of the config without its name, where there is a config; other verbs have none to
        # set
        ("--init_from=w.npz", Run, r"Did you mean --config.init_from=\?"),
        ("--learning-rate=0.1", Run, r"Did you mean --config.schedule.learning_rate=\?"),
        ("--model.width=64", Run, r"Did you mean --config.model.width=\?"),
        ("--name=adam", Run, r"Did you mean --config.model.name= or --config.optimizer.name=\?"),
        ("--model=ViT-B/16", Run, r"'--model=ViT-B/16'.*Did you mean --config.model.name=\?"),
        ("--epochs=90", Run, r'Did you mean --config.total="N epochs"\?'),
        ("--workdri=x", Run, r"Did you mean --workdir\?"),
        ("--init_from=x", VERB, r"'--init_from=x'\. See"),
        # too few or too many
        ("", words_of("CHECKPOINT", "IMAGE…"), "Missing: CHECKPOINT, IMAGE….*vit-jax words --help"),
        ("a b c", words_of("SOURCE", "DESTINATION"), "'c'"),
    ],
)
def test_wrong_words(words, parser, rule):
    with pytest.raises(UsageError, match=rule):
        parser.parse(words.split())


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
def test_no_folder_is_made_of_an_address_that_is_rejected(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = run([name, "--config=digits", "--workdir=gs://bucket/run"])

    assert (outcome.code, "gcsfuse BUCKET FOLDER" in outcome.err) == (2, True)
    assert not list(tmp_path.iterdir())


def test_options_without_effect_are_those_with_another_value_than_their_default():
    options = VERB.parse(["--data=x", "--top=3", "--rate=2", "--json", "--steps=1,2"])
    assert options.collect_values("top", "rate", "part") == {"top": 3, "rate": 2.0}

    options.reject_ineffective(("top", "part"), "here")
    with rejects("--steps=1,2, --rate=2.0, --json: ", "has no effect here. Leave it out."):
        options.reject_ineffective(("top", "rate", "part", "json", "steps"), "here")


@pytest.mark.parametrize("text", ["1", "1,2,3", "a,b", "2,1", "1,1", "0,inf", "nan,1"])
def test_a_wrong_range_of_values(text):
    for flag in ("--images.value_range", "--value_range"):
        with rejects(f"{flag}={text}", "finite.*LOW < HIGH"):
            verb_of(Reading).parse([f"{flag}={text}"])


def test_shares_of_several_machines():
    share = verb_of(Share).parse

    assert (share([]).share, share(["--index=2", "--count=3"]).share) == ((0, 1), (2, 3))
    for words, rule in (("--index=3 --count=3", r"\[0, 3\)"), ("--count=2", r"None.*\[0, 2\)")):
        with rejects("--index=", f"{rule}.*--count="):
            _ = share(words.split()).share
    with rejects("--index=0", "without --count"):
        share(["--index=0"])


# Groups of options.


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
VALUES = {  # of a field of a group: a word, and its value
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
}
FIELDS = [(kind.PREFIX, option.name) for kind in GROUPS for option in list_options(kind)]


@pytest.mark.parametrize(("prefix", "name"), FIELDS, ids=lambda text: text)
def test_every_field_of_a_group_has_its_earlier_name(prefix, name):
    """The option, its earlier name and the earlier name with dashes have the same value."""
    text, value = VALUES[name]
    end = "" if text is None else f"={text}"
    for flag in (f"--{prefix}.{name}", f"--{name}", f"--{name.replace('_', '-')}"):
        options = verb_of(Reading).parse([flag + end])
        assert getattr(getattr(options, prefix), name) == value

    assert verb_of(Reading).parse([]) != options
    with rejects(f"--{name}, --{prefix}.{name}: ", "two names of one option"):
        verb_of(Reading).parse([f"--{name}{end}", f"--{prefix}.{name}{end}"])


def test_verbs_take_groups():
    """Each of the verbs that read weights, from the words of the command to the fields."""
    with_weights = {name for name, verb in cli.VERBS.items() if "weights.FIELD" in verb.flags}
    with_images = {name for name, verb in cli.VERBS.items() if "images.FIELD" in verb.flags}
    computing = {"evaluate", "predict", "export", "inspect", "fewshot", "probe", "knn", "features"}

    assert with_images == computing | {"duplicates"}
    assert with_weights == with_images | {"convert", "replay", "report"}

    for name in ("replay", "report"):
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
        verb_of(Reading).parse(words.split())


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
        verb_of(Reading, run=run)([flag])


def test_a_group_and_an_option_may_have_the_same_name():
    """--images=FILES beside --images.FIELD, and --weights=CHECKPOINT beside --weights.FIELD."""
    words = ["w.npz", "--output=o", "--images=photos", "--images.resize=direct"]
    options = cli.VERBS["inspect"].parse(words)

    assert (options.files, options.images.resize) == ("photos", "direct")

    words = ["folder:a", "--against=folder:b", "--weights=w.npz", "--weights.raw"]
    options = cli.VERBS["duplicates"].parse(words)

    assert (options.checkpoint, options.weights.raw) == ("w.npz", True)


def test_allowed_code_is_a_field_of_a_recipe():
    """A verb that takes a recipe passes it on as an override; the others have it in a group."""
    allowed = verb_of(Reading)
    assert allowed.parse(["--allow-code=a,b.c"]).weights.allow_code == "a,b.c"

    overridden = verb_of(Overrides)
    assert overridden.parse(["--allow_code=a,b.c"]).overrides == ["--config.allow_code=a,b.c"]
    with rejects("--config.allow_code, --allow_code: ", "two names of one option"):
        overridden.parse(["--config.allow_code=a", "--allow_code=b"])

    texts = [verb.help() for verb in cli.VERBS.values()]
    of_weights = [
        text for text in texts if {"CHECKPOINT", "SOURCE", "WORKDIR"} & {*text.split()[:4]}
    ]
    of_recipes = [text for text in texts if "--config RECIPE" in text]

    assert len(of_weights) >= 11
    assert all("allow_code" in text and "--weights.FIELD" in text for text in of_weights)
    assert all("--config.SECTION.FIELD" in text for text in of_recipes)
