"""An optimiser: Muon for the matrices inside the blocks, AdamW for everything else.

`optimizer.name`, `optimizer.arguments` take
`(learning_rate=schedule, **arguments) -> optax.GradientTransformation`.

An optimiser of optax needs no file:
`--config.optimizer.name=optax:lion --config.optimizer.arguments.b1=0.95`. An optimiser sees each
layer's arrays under their names: "encoder/blocks/3/mlp/expand/kernel" (D, M). `optax.contrib:muon`
trains all kernels; this one trains the embedding and the head by AdamW.

Run it:

    vit-jax pretrain --config=digits --workdir=runs/muon --config.optimizer.weight_decay=0 \
        --config.optimizer.name=docs.examples.optimizer:muon_in_blocks \
        --config.optimizer.arguments.weight_decay=0.1
"""

import optax
from optax.contrib import MuonDimensionNumbers, muon


def muon_in_blocks(
    *,
    learning_rate: optax.ScalarOrSchedule,
    weight_decay: float = 0.0,
) -> optax.GradientTransformation:
    """Return the optimiser; in the blocks all kernels are matrices."""

    def describe_dimensions(parameters: optax.Params) -> dict:
        """Return the dimensions of each array that Muon trains, None for the other arrays."""
        dimensions: dict = dict.fromkeys(parameters)
        for name in parameters:
            if is_block_kernel(name):
                dimensions[name] = MuonDimensionNumbers(0, 1)
        return dimensions

    return muon(
        learning_rate,
        weight_decay=weight_decay,
        muon_weight_dimension_numbers=describe_dimensions,
    )


def is_block_kernel(name: str) -> bool:
    """Return True for a kernel of a block."""
    return name.startswith("encoder/blocks/") and name.endswith("/kernel")
