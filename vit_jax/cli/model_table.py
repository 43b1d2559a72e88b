"""Sizes of the listed networks and addresses of their public weights, recorded in a file.

Measuring them builds 48 abstract networks, which takes seconds; the file is read without JAX.
`UPDATE_GOLDEN=1 ./launch/test.sh --all tests/cli/test_model_table.py` measures and writes it anew.
"""

import importlib.resources
from typing import NamedTuple

IMAGE_SIZE = 224
NUM_CLASSES = 1000  # the defaults of `vit_jax.create_model`
FILE = "model_table.tsv"


class ModelRow(NamedTuple):
    """A network for images of `IMAGE_SIZE`, with a linear head of `NUM_CLASSES`.

    Attributes:
      name: name of the network.
      num_parameters: number of parameters.
      num_flops: operations of one image; a multiply-add counts as two.
      addresses: addresses of public weights.
    """

    name: str
    num_parameters: int
    num_flops: int
    addresses: tuple[str, ...]


def read_models() -> dict[str, ModelRow]:
    """Return the recorded networks by name."""
    file = importlib.resources.files(__package__) / FILE
    rows = {}
    for line in file.read_text("utf-8").splitlines():
        name, num_parameters, num_flops, *addresses = line.split("\t")
        rows[name] = ModelRow(name, int(num_parameters), int(num_flops), tuple(addresses))
    return rows
