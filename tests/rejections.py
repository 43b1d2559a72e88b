"""Rejections of bad input, by field and rule: the sentence around them may change."""

import re

import pytest


def rejects(field, rule=""):
    """Expect a ValueError that names the field and then the rule, a regular expression, in any case."""
    return pytest.raises(ValueError, match=f"(?is){re.escape(field)}.*{rule}")
