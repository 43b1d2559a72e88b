import pytest

from vit_jax.weights.answers import ANSWERS, normal_answers


def test_what_is_not_given_is_left_out():
    given = {"image_size": [8, 12], "num_heads": None, "gelu": "tanh", "layer_norm_epsilon": 1e-6}
    assert normal_answers(given | {"group_norm_epsilon": 1}) == {
        "image_size": (8, 12),
        "gelu": "tanh",
        "layer_norm_epsilon": 1e-6,
        "group_norm_epsilon": 1,
    }


@pytest.mark.parametrize("name", ANSWERS)
def test_every_answer_has_a_possible_and_an_impossible_value(name):
    """That none is let through unchecked, and none is always refused."""
    possible = {"image_size": (8, 8), "num_heads": 4, "gelu": "exact", "position_embedding": "sincos2d"}
    possible["standardization_epsilon_added_to"] = "variance"
    assert normal_answers({name: possible.get(name, 1e-6)})
    with pytest.raises(ValueError, match=f"^{name}='foo': (give|choose) "):
        normal_answers({name: "foo"})


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ({"gelu": "foo"}, "gelu='foo': choose tanh or exact"),
        ({"layer_norm_epsilon": float("nan")}, "layer_norm_epsilon=nan: give a number above 0, such as 1e-6"),
        ({"group_norm_epsilon": float("inf")}, "group_norm_epsilon=inf: give a number above 0"),
        ({"standardization_epsilon": -1e-6}, "standardization_epsilon=-1e-06: give a number above 0"),
        ({"num_heads": 0}, "num_heads=0: give a divisor of the network's width"),
        ({"image_size": (0, 8)}, r"image_size=\(0, 8\): give height and width in pixels, such as 224,224"),
        ({"image_size": [8]}, r"image_size=\[8\]: give height and width"),
    ],
)
def test_an_impossible_answer_is_named(answer, words):
    with pytest.raises(ValueError, match=words):
        normal_answers(answer)
