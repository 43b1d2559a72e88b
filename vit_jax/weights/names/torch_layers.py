r"""How PyTorch's layers keep what ours keep: rules for a dense layer, a norm and a projection of heads.

A group of the pattern may stand in the foreign name as \1.
"""

from vit_jax.weights.names.entry import Rule


def norm_rules(ours: str, theirs: str) -> list[Rule]:
    """Scale and bias of a norm."""
    return [Rule(f"{ours}/scale", f"{theirs}.weight"), Rule(f"{ours}/bias", f"{theirs}.bias")]


def dense_rules(ours: str, theirs: str) -> list[Rule]:
    """Kernel (inputs, outputs) and bias."""
    return [Rule(f"{ours}/kernel", f"{theirs}.weight", "io->oi"), Rule(f"{ours}/bias", f"{theirs}.bias")]


def patch_rules(ours: str, theirs: str) -> list[Rule]:
    """A convolution's kernel and bias."""
    return [Rule(f"{ours}/kernel", f"{theirs}.weight", "hwio->oihw"), Rule(f"{ours}/bias", f"{theirs}.bias")]


def projection_rules(ours: str, theirs: str) -> list[Rule]:
    """From width to heads; what `ours` finds for the same foreign name is joined."""
    return [
        Rule(f"{ours}/kernel", f"{theirs}.weight", "DTh->(Th)D"),
        Rule(f"{ours}/bias", f"{theirs}.bias", "Th->(Th)"),
    ]


def out_rules(ours: str, theirs: str) -> list[Rule]:
    """From heads back to width."""
    return [Rule(f"{ours}/kernel", f"{theirs}.weight", "ThD->D(Th)"), Rule(f"{ours}/bias", f"{theirs}.bias")]
