"""Regular expressions that several tables of names use."""

NEVER = r"(?!)"
"""An expression without any match."""
