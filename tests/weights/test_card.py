"""Model cards: their metadata and text without paths of this machine, and uploads to the Hub."""

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
from tests.weights.small_networks import (
    HYBRID,
    PREPROCESSING,
    TRAINING,
    VIT,
    weights_of,
)
from vit_jax.imports.extras import install_command
from vit_jax.text.printable import printable
from vit_jax.weights.card import build_card
from vit_jax.weights.head_edits import remove_head
from vit_jax.weights.saving import OWN, save_weights

NAMES = ("cat", "dog | `x`", "bird")


def read_card(weights, folder, format_name):
    """Return the metadata and the text of the card of saved weights."""
    save_weights(weights, folder, format_name)
    _, metadata, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(metadata), text


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
def test_the_content_of_a_card(tmp_path, format_name, library, use):
    weights = weights_of(
        VIT,
        class_names=NAMES,
        preprocessing=PREPROCESSING,
        training=TRAINING,
    )
    count = sum(array.size for array in weights.parameters.values())

    metadata, text = read_card(weights, tmp_path / "my-vit", format_name)

    assert metadata == {
        "library_name": library,
        "pipeline_tag": "image-classification",
        "tags": ["vision-transformer", "vit_jax"],
    }
    assert f"# my-vit\n\nViT-custom/4, {count:,} parameters, 3 classes." in text
    assert "8 x 12 pixels" in text
    assert "0.875 of it" in text
    assert "| photographs | not known whether" in text
    assert "a folder of images, `images`" in text
    assert "/my/" not in text
    assert str(tmp_path) not in text
    assert "`cat`, `` dog | `x` ``, `bird`." in text
    assert use in text


def parse_page(card):
    """Return the text of a card as an XML tree."""
    parser = markdown.Markdown(extensions=["tables", "fenced_code"])
    text = card.split("---", 2)[2]
    return xml.etree.ElementTree.fromstring(f"<page>{parser.convert(text)}</page>")


def join_text(element):
    return "".join(element.itertext())


def find_literals(code):
    """Return the constants of Python code."""
    nodes = ast.walk(ast.parse(code))
    return [node.value for node in nodes if isinstance(node, ast.Constant)]


HOSTILE = "</code><img src=x>\n\n# a|b ```\n```\n[x](http://evil) CLASS \x1b[2J"


@pytest.mark.parametrize("format_name", ["timm", "huggingface", OWN])
def test_names_stay_names(tmp_path, format_name):
    """Names of folders, classes and data are shown as text, whatever markup they have.

    In code they are one Python literal.
    """
    training = dataclasses.replace(TRAINING, data=f"tfds:{HOSTILE}")
    weights = weights_of(
        VIT,
        class_names=(HOSTILE, *NAMES[1:]),
        training=training,
    )
    shown = printable(HOSTILE)
    argument = f"local-dir:{HOSTILE}" if format_name == "timm" else HOSTILE

    card = build_card(weights, format_name, HOSTILE)
    page = parse_page(card)
    counts = collections.Counter(element.tag for element in page.iter())
    cells = []
    for cell in page.iter("td"):
        cells.append(join_text(cell).replace(r"\|", "|"))

    classes = page.findall("p")[-1 if format_name == OWN else -2]
    class_names = [code.text.strip() for code in classes.iter("code")]
    (code,) = page.iter("pre")

    assert "\x1b" not in card
    assert counts["img"] == counts["a"] == 0
    assert counts["h1"] == counts["table"] == counts["pre"] == 1
    assert counts["h2"] == 2
    assert join_text(page.find("h1")) == shown
    assert len(cells) == 2 * 6
    assert f"tfds:{shown}" in cells
    assert class_names == [shown, NAMES[1], NAMES[2]]
    assert argument in find_literals(join_text(code))


@pytest.mark.parametrize(
    ("is_upright", "words"),
    [
        (True, "turned upright"),
        (False, "taken as they are stored"),
    ],
)
def test_a_card_says_how_photographs_were_turned(
    tmp_path,
    is_upright,
    words,
):
    weights = weights_of(VIT, preprocessing=PREPROCESSING | {"exif_orientation": is_upright})

    _, text = read_card(weights, tmp_path / "my-vit", "timm")

    assert f"| photographs | were {words}" in text


def test_a_card_names_the_filter_of_the_resize(tmp_path):
    weights = weights_of(VIT, preprocessing=PREPROCESSING | {"interpolation": "bicubic"})

    _, text = read_card(weights, tmp_path / "my-vit", OWN)

    assert "the short side resized (bicubic, antialiased), and the middle" in text


@pytest.mark.parametrize("values", [[0.0, 4095.0], None, "wide"])
def test_a_card_says_how_values_of_more_than_8_bits_were_mapped(tmp_path, values):
    weights = weights_of(VIT, preprocessing=PREPROCESSING | {"value_range": values})
    is_mapped = values == [0.0, 4095.0]

    _, text = read_card(weights, tmp_path / "my-vit", OWN)

    assert ("| more than 8 bits | values from 0 to 4095 become 0 to 255" in text) == is_mapped
    assert ("more than 8 bits" in text) == is_mapped


MULTILABEL = dataclasses.replace(TRAINING, is_multilabel=True)


@pytest.mark.parametrize("format_name", ["timm", "huggingface", OWN])
@pytest.mark.parametrize(
    ("weights", "outputs"),
    [
        (weights_of(VIT, has_several_labels=True), "multi-label: the sigmoid of each logit"),
        (weights_of(VIT, training=MULTILABEL), "multi-label: the sigmoid of each logit"),
        (weights_of(VIT), "single-label: the softmax of the logits"),
    ],
    ids=["stated", "trained", "single-label"],
)
def test_a_card_says_how_outputs_become_probabilities(
    format_name,
    weights,
    outputs,
):
    assert f"| outputs | {outputs}" in build_card(weights, format_name, "x")


@pytest.mark.parametrize("format_name", ["timm", "huggingface", OWN])
def test_features_become_no_probabilities(format_name):
    features = weights_of(dataclasses.replace(VIT, num_classes=0))

    assert "| outputs |" not in build_card(features, format_name, "x")


def test_unknown_facts_are_stated(tmp_path):
    weights = remove_head(weights_of(HYBRID), keep_hidden=False)

    metadata, text = read_card(weights, tmp_path / "features", "timm")

    assert metadata["pipeline_tag"] == "image-feature-extraction"
    assert "no classifier: it ends in its features" in text
    assert "| preparation | not known |" in text
    assert "| trained on | not known |" in text
    assert "## Classes" not in text


def test_classes_without_names_are_stated(tmp_path):
    _, text = read_card(
        weights_of(VIT, class_names=None),
        tmp_path / "nameless",
        OWN,
    )

    assert "Their names are not known." in text


def test_a_readme_of_the_user_stays(tmp_path):
    (tmp_path / "README.md").write_text("mine\n")

    save_weights(weights_of(VIT), tmp_path, OWN)

    assert (tmp_path / "README.md").read_text() == "mine\n"


def test_a_card_is_replaced_with_its_weights(tmp_path):
    save_weights(weights_of(VIT), tmp_path, "timm")
    save_weights(weights_of(HYBRID), tmp_path, "timm")

    assert HYBRID.name in (tmp_path / "README.md").read_text()


@pytest.fixture
def hub(monkeypatch):
    """Replace huggingface_hub, and return the list of uploads."""
    calls = []

    class HfApi:
        def create_repo(self, name, *, exist_ok):
            if name.startswith("nobody/"):
                raise OSError("401")
            calls.append((name, exist_ok))

        def upload_folder(self, *, repo_id, folder_path):
            calls.append((repo_id, folder_path))

    monkeypatch.setitem(
        sys.modules,
        "huggingface_hub",
        types.SimpleNamespace(HfApi=HfApi),
    )
    return calls


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """Weights in the folder `w` of the current folder."""
    monkeypatch.chdir(tmp_path)
    save_weights(
        weights_of(VIT, class_names=NAMES),
        tmp_path / "w",
        OWN,
    )


def test_an_upload(saved, hub):
    out = succeed(["convert", "w", "my-vit", "--to=timm", "--push=hf://me/my-vit"])

    assert out.splitlines()[-1] == "uploaded to hf://me/my-vit"
    assert hub == [("me/my-vit", True), ("me/my-vit", "my-vit")]


def test_a_failed_upload_keeps_the_folder(saved, hub, tmp_path):
    result = run(["convert", "w", "other", "--to=timm", "--push=hf://nobody/x"])

    assert result.code == 2
    assert "other is written, and cannot be uploaded to hf://nobody/x: 401" in result.err
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
def test_rejected_uploads_write_nothing(
    tmp_path,
    monkeypatch,
    hub,
    words,
    message,
):
    monkeypatch.chdir(tmp_path)

    result = run(["convert", "w", *words])

    assert result.code == 2
    assert message in result.err
    assert not list(tmp_path.iterdir())


def test_without_the_library_an_upload_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)

    result = run(["convert", "w", "new", "--to=timm", "--push=hf://me/x"])

    assert f"{install_command('hub')}, or upload the folder yourself" in result.err
