"""The argument of a recipe: by position, by name, as a row of a table."""

import pytest

from tests.rejections import rejects
from vit_jax.config import choose_row, parse_argument

DEFAULTS = {
    "model": "ViT-B/16",
    "epochs": 300,
    "rate": 1e-3,
    "average": False,
}
ROWS = (("ViT-B/16", 7), ("ViT-L/16", 7), ("ViT-L/16", 14))


@pytest.mark.parametrize(
    ("argument", "changed"),
    [
        ("", {}),
        ("ViT-L/16", {"model": "ViT-L/16"}),
        (" ViT-L/16 , epochs=14 ", {"model": "ViT-L/16", "epochs": 14}),
        ("epochs=14,model=ViT-L/16", {"model": "ViT-L/16", "epochs": 14}),
        ("rate=1", {"rate": 1.0}),
        ("average=True", {"average": True}),
        ("model=a=b", {"model": "a=b"}),
    ],
)
def test_values_by_position_and_by_name(argument, changed):
    values = parse_argument(argument, **DEFAULTS)

    assert values == DEFAULTS | changed
    assert [type(value) for value in values.values()] == [str, int, float, bool]


@pytest.mark.parametrize(
    ("argument", "field", "rule"),
    [
        ("epoch=14", "'epoch'", "model, epochs, rate, average.*did you mean 'epochs'"),
        ("zzz=14", "'zzz'", "model, epochs, rate, average"),
        ("a,1,2,true,extra", "'extra'", "too many.*model, epochs, rate, average"),
        ("epochs=1.5", "epochs=1.5", "int"),
        ("rate=fast", "rate='fast'", "float"),
        ("average=yes", "average='yes'", "true or false"),
        ("epochs=7,epochs=14", "epochs", "twice"),
    ],
)
def test_bad_argument(argument, field, rule):
    with rejects(field, rule):
        parse_argument(argument, **DEFAULTS)


def test_row():
    rows = {"": 0, "B/16": 0, "ViT-L/16,7": 1, "ViT-L/16,epochs=14": 2}
    for argument, number in rows.items():
        assert (
            choose_row(argument, ROWS)
            == choose_row(argument, dict.fromkeys(ROWS, 1e-3))
            == ROWS[number]
        )


@pytest.mark.parametrize(
    ("argument", "rule"),
    [
        ("ViT-L/16", "epochs=7 or epochs=14"),
        ("ViT-B/16,epochs=14", "ViT-B/16,epochs=7; ViT-L/16,epochs=7; ViT-L/16,epochs=14"),
        ("B/32", "ViT-B/16,epochs=7; "),
    ],
)
def test_no_such_row(argument, rule):
    with rejects(argument, rule):
        choose_row(argument, ROWS)
