from vit_jax.weights.report import ArrayStatus, joined_names, table


def test_names_that_differ_in_one_place_are_joined():
    assert joined_names(()) == ""
    assert joined_names(("a/b",)) == "a/b"
    assert joined_names(("a/query/kernel", "a/key/kernel", "a/value/kernel")) == "a/{query,key,value}/kernel"
    assert joined_names([f"blocks/{layer}/x" for layer in range(12)]) == "blocks/{0..11}/x"


def test_the_table_has_a_line_for_each_array():
    statuses = [
        ArrayStatus("a.weight", ("a/kernel",), (2, 3), "float32", "transposed"),
        ArrayStatus("opt/x", (), (), "float32", "ignored"),
    ]
    assert table(statuses).splitlines() == [
        "  array     our parameter  shape   dtype    status",
        "  a.weight  a/kernel       2x3     float32  transposed",
        "  opt/x     -              scalar  float32  ignored",
    ]
