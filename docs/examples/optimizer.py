"""An optimiser: Muon for the matrices inside the blocks, AdamW for everything else.

`optimizer.name`, `optimizer.arguments` take `(learning_rate=schedule, **arguments) -> optax.GradientTransformation`.

Any optimiser of optax needs no file at all: `--config.optimizer.name=optax:lion --config.optimizer.arguments.b1=0.95`.
This one does, because our blocks are stacked: Muon has to know which dimensions of (L, D, T, h) make up a matrix.

Run it:

    vit-jax pretrain --config=digits --workdir=runs/muon --config.optimizer.weight_decay=0 \
        --config.optimizer.name=docs.examples.optimizer:muon_in_blocks --config.optimizer.arguments.weight_decay=0.1
"""

import optax
from optax.contrib import MuonDimensionNumbers, muon

MATRICES = {  # leading dimension: the layer
    "attention/query/kernel": MuonDimensionNumbers(1, (2, 3)),
    "attention/key/kernel": MuonDimensionNumbers(1, (2, 3)),
    "attention/value/kernel": MuonDimensionNumbers(1, (2, 3)),
    "attention/out/kernel": MuonDimensionNumbers((1, 2), 3),
    "mlp/expand/kernel": MuonDimensionNumbers(1, 2),
    "mlp/contract/kernel": MuonDimensionNumbers(1, 2),
}


def muon_in_blocks(*, learning_rate: optax.ScalarOrSchedule, weight_decay: float = 0.0) -> optax.GradientTransformation:
    """Sees the parameters as a dictionary by name: "encoder/blocks/mlp/expand/kernel" and so on."""

    def dimension_numbers(parameters: optax.Params) -> dict:
        return {name: next((d for end, d in MATRICES.items() if name.endswith(end)), None) for name in parameters}

    return muon(learning_rate, weight_decay=weight_decay, muon_weight_dimension_numbers=dimension_numbers)
