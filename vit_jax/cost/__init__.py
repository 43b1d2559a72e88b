"""FLOPs and memory of our networks by formula; speeds of chips and their networks. No jax here."""

from vit_jax.config.architecture import Architecture


def require_formulas(architecture: Architecture) -> Architecture:
    """The architecture, if formulas know all of its parts.

    Raises:
      ValueError: a part is the user's own code.
    """
    if architecture.is_standard:
        return architecture
    own = ", ".join(architecture.custom_parts.values())
    raise ValueError(f"{own}: no formula gives the cost of a user's own code. Use the compiled step's figures.")
