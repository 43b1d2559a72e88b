"""Text of any origin has no power over a terminal."""

from vit_jax.text.printable import first_line, printable, printable_lines


def test_names_have_no_power_over_a_terminal():
    kept = "café 日本\u00a0👩\u200d🚀 cafe\u0301 שלום a\\b"

    assert printable(kept) == kept
    assert printable("\x1b]0;owned\x07\n\r\t\x9b2J\udce9\u2028\u202e") == (
        r"\x1b]0;owned\x07\n\r\t\x9b2J\udce9\u2028\u202e"
    )
    assert printable_lines("a\n\x1b[31m\nb") == "a\n\\x1b[31m\nb"


def test_one_line_of_a_long_error_is_shown():
    assert first_line(ValueError(" \n\nDisk full: a\n  Traceback")) == "Disk full: a"
    assert first_line(OSError(" \n")) == first_line(OSError()) == "OSError"
