"""Model cards: their metadata, what they say, and that nothing of this machine is in them; uploads to the Hub."""

import ast
import collections
import dataclasses
import sys
import types
import xml.etree.ElementTree

import markdown
import pytest
import yaml

from tests.integration.commands import run, succeed
from tests.weights.small_networks import HYBRID, PREPROCESSING, TRAINING, VIT, weights_of
from vit_jax.imports.extras import install_command
from vit_jax.text.printable import printable
from vit_jax.weights.card import build_card
from vit_jax.weights.fit import remove_head
from vit_jax.weights.saving import OWN, save_weights

NAMES = ("cat", "dog | `x`", "bird")


def card_of(weights, folder, format_name):
    save_weights(weights, folder, format_name)
    _, front, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), text


@pytest.mark.parametrize(
    ("format_name", "library", "use"),
    [
        ("timm", "timm", 'timm.create_model("local-dir:my-vit", pretrained=True)'),
        (
            "huggingface",
            "transformers",
            'transformers.ViTForImageClassification.from_pretrained("my-vit")',
        ),
        (OWN, "vit_jax", 'vit_jax.load_model("my-vit")'),
    ],
)
def test_what_a_card_says(tmp_path, format_name, library, use):
    weights = weights_of(VIT, class_names=NAMES, preprocessing=PREPROCESSING, training=TRAINING)
    front, text = card_of(weights, tmp_path / "my-vit", format_name)
    tags = ["vision-transformer", "vit_jax"]

    assert front == {"library_name": library, "pipeline_tag": "image-classification", "tags": tags}

    count = sum(array.size for array in weights.parameters.values())
    assert f"# my-vit\n\nViT-custom/4, {count:,} parameters, 3 classes." in text
    assert "8 x 12 pixels" in text
    assert "0.875 of it" in text
    assert "| photographs | not known whether" in text
    assert "a folder of images, `images`" in text
    assert "/my/" not in text
    assert str(tmp_path) not in text
    assert "`cat`, `` dog | `x` ``, `bird`." in text
    assert use in text


HOSTILE = "</code><img src=x>\n\n# a|b ```\n```\n[x](http://evil) CLASS \x1b[2J"


@pytest.mark.parametrize("format_name", ["timm", "huggingface", OWN])
def test_names_stay_names(tmp_path, format_name):
    """Names of folders, classes and data are shown as text, whatever markup they have, and as one Python literal."""
    training = dataclasses.replace(TRAINING, data=f"tfds:{HOSTILE}")
    weights = weights_of(VIT, class_names=(HOSTILE, *NAMES[1:]), training=training)
    text = build_card(weights, format_name, HOSTILE)

    assert "\x1b" not in text

    parser = markdown.Markdown(extensions=["tables", "fenced_code"])
    page = xml.etree.ElementTree.fromstring(
        f"<page>{parser.convert(text.split('---', 2)[2])}</page>"
    )
    tags = collections.Counter(element.tag for element in page.iter())

    assert not {"img", "a"} & {*tags}
    assert [tags[tag] for tag in ("h1", "h2", "table", "pre")] == [1, 2, 1, 1]

    shown = printable(HOSTILE)
    assert "".join(page.find("h1").itertext()) == shown

    cells = ["".join(cell.itertext()) for cell in page.iter("td")]
    assert len(cells) == 2 * 6
    assert f"tfds:{shown}" in [cell.replace(r"\|", "|") for cell in cells]

    classes = page.findall("p")[-2 if format_name != OWN else -1]
    assert [code.text.strip() for code in classes.iter("code")] == [shown, NAMES[1], NAMES[2]]

    (code,) = page.iter("pre")
    literals = [
        node.value
        for node in ast.walk(ast.parse("".join(code.itertext())))
        if isinstance(node, ast.Constant)
    ]

    assert (f"local-dir:{HOSTILE}" if format_name == "timm" else HOSTILE) in literals


@pytest.mark.parametrize(
    ("is_upright", "words"),
    [
        (True, "turned upright"),
        (False, "taken as they are stored"),
    ],
)
def test_a_card_says_how_photographs_were_turned(tmp_path, is_upright, words):
    weights = weights_of(VIT, preprocessing=PREPROCESSING | {"exif_orientation": is_upright})
    assert f"| photographs | were {words}" in card_of(weights, tmp_path / "my-vit", "timm")[1]


def test_a_card_names_the_filter_of_the_resize(tmp_path):
    weights = weights_of(VIT, preprocessing=PREPROCESSING | {"interpolation": "bicubic"})
    assert (
        "the short side resized (bicubic, antialiased), and the middle"
        in card_of(weights, tmp_path / "my-vit", OWN)[1]
    )


@pytest.mark.parametrize("values", [[0.0, 4095.0], None, "wide"])
def test_a_card_says_how_values_of_more_than_8_bits_were_mapped(tmp_path, values):
    text = card_of(
        weights_of(VIT, preprocessing=PREPROCESSING | {"value_range": values}),
        tmp_path / "my-vit",
        OWN,
    )[1]
    is_mapped = values == [0.0, 4095.0]

    assert ("| more than 8 bits | values from 0 to 4095 become 0 to 255" in text) == is_mapped
    assert ("more than 8 bits" in text) == is_mapped


@pytest.mark.parametrize("format_name", ["timm", "huggingface", OWN])
def test_a_card_says_how_outputs_become_probabilities(format_name):
    several = weights_of(VIT, has_several_labels=True)
    assert "| outputs | multi-label: the sigmoid of each logit" in build_card(
        several,
        format_name,
        "x",
    )

    trained = weights_of(VIT, training=dataclasses.replace(TRAINING, is_multilabel=True))
    assert "| outputs | multi-label: the sigmoid of each logit" in build_card(
        trained,
        format_name,
        "x",
    )
    assert "| outputs | single-label: the softmax of the logits" in build_card(
        weights_of(VIT),
        format_name,
        "x",
    )

    features = weights_of(dataclasses.replace(VIT, num_classes=0))
    assert "| outputs |" not in build_card(features, format_name, "x")


def test_what_is_not_known_is_said(tmp_path):
    front, text = card_of(
        remove_head(weights_of(HYBRID), keep_hidden=False),
        tmp_path / "features",
        "timm",
    )

    assert front["pipeline_tag"] == "image-feature-extraction"
    assert "no classifier: it ends in its features" in text
    assert "| preparation | not known |" in text
    assert "| trained on | not known |" in text
    assert "## Classes" not in text

    many = weights_of(VIT, class_names=None)
    assert "Their names are not known." in card_of(many, tmp_path / "nameless", OWN)[1]


def test_a_readme_of_ones_own_stays(tmp_path):
    (tmp_path / "README.md").write_text("mine\n")
    save_weights(weights_of(VIT), tmp_path, OWN)

    assert (tmp_path / "README.md").read_text() == "mine\n"

    (tmp_path / "README.md").unlink()
    for weights in (weights_of(VIT), weights_of(HYBRID)):
        save_weights(weights, tmp_path, "timm")

    assert weights.architecture.name in (tmp_path / "README.md").read_text()


@pytest.fixture
def hub(monkeypatch):
    """Stands in for huggingface_hub; what was uploaded."""
    calls = []

    class HfApi:
        def create_repo(self, name, *, exist_ok):
            if name.startswith("nobody/"):
                raise OSError("401")
            calls.append((name, exist_ok))

        def upload_folder(self, *, repo_id, folder_path):
            calls.append((repo_id, folder_path))

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(HfApi=HfApi))

    return calls


def test_an_upload(tmp_path, monkeypatch, hub):
    monkeypatch.chdir(tmp_path)
    save_weights(weights_of(VIT, class_names=NAMES), tmp_path / "w", OWN)
    out = succeed(["convert", "w", "my-vit", "--to=timm", "--push=hf://me/my-vit"])

    assert out.splitlines()[-1] == "uploaded to hf://me/my-vit"
    assert hub == [("me/my-vit", True), ("me/my-vit", "my-vit")]

    outcome = run(["convert", "w", "other", "--to=timm", "--push=hf://nobody/x"])
    expected = (2, True)

    assert (
        outcome.code,
        "other is written, and cannot be uploaded to hf://nobody/x: 401" in outcome.err,
    ) == expected
    assert (tmp_path / "other/model.safetensors").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["new", "--push=hf://me/x"], "must be of a folder. Use --to=timm or --to=huggingface"),
        (["new.safetensors", "--to=timm", "--push=hf://me/x"], "must be of a folder"),
        (["new", "--to=timm", "--push=me/x"], "is not an address of the form hf://owner/name"),
        (
            ["new", "--to=timm", "--push=hf://me/x@v1"],
            "a revision is made by the upload; give hf://owner/name.",
        ),
    ],
)
def test_refused_uploads_write_nothing(tmp_path, monkeypatch, hub, words, message):
    monkeypatch.chdir(tmp_path)
    outcome = run(["convert", "w", *words])

    assert (outcome.code, message in outcome.err) == (2, True), outcome.err
    assert not list(tmp_path.iterdir())

    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    outcome = run(["convert", "w", "new", "--to=timm", "--push=hf://me/x"])

    assert f"{install_command('hub')}, or upload the folder yourself" in outcome.err
