"""An optimiser: Muon for the matrices inside the blocks, AdamW for everything else.

`optimizer.name`, `optimizer.arguments` take `(learning_rate=schedule, **arguments) -> optax.GradientTransformation`.

Any optimiser of optax needs no file at all: `--config.optimizer.name=optax:lion --config.optimizer.arguments.b1=0.95`.
It sees the arrays of each layer apart, by name: "encoder/blocks/3/mlp/expand/kernel" (D, M).
`optax.contrib:muon` itself trains all kernels; this one leaves the embedding and the head to AdamW.

Run it:

    vit-jax pretrain --config=digits --workdir=runs/muon --config.optimizer.weight_decay=0 \
        --config.optimizer.name=docs.examples.optimizer:muon_in_blocks --config.optimizer.arguments.weight_decay=0.1
"""

import optax
from optax.contrib import MuonDimensionNumbers, muon


def muon_in_blocks(
    *, learning_rate: optax.ScalarOrSchedule, weight_decay: float = 0.0
) -> optax.GradientTransformation:
    """Return the optimiser; in the blocks all kernels are matrices."""

    def dimension_numbers(parameters: optax.Params) -> dict:
        return {
            name: MuonDimensionNumbers(0, 1) if is_block_kernel(name) else None
            for name in parameters
        }

    return muon(
        learning_rate, weight_decay=weight_decay, muon_weight_dimension_numbers=dimension_numbers
    )


def is_block_kernel(name: str) -> bool:
    """Return True for a kernel of a block."""
    return name.startswith("encoder/blocks/") and name.endswith("/kernel")
