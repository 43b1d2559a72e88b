"""Nodes and constants of an ONNX graph, and the changes of shape that several operations need."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard, TypeVar

import numpy as np
import onnx
from onnx import helper, numpy_helper

V = TypeVar("V")
Dimension = Any  # an int, or a symbolic dimension of JAX
Shape = Sequence[Dimension]


class Tensor(NamedTuple):
    """Output of a node.

    Its shape may have 1 where the value in JAX is repeated: ONNX broadcasts as NumPy does.
    """

    name: str
    shape: tuple[Dimension, ...]


Value = np.ndarray | Tensor


class Operation(NamedTuple):
    """An operation of JAX that becomes nodes.

    Attributes:
      name: name of the primitive.
      inputs: its arguments.
      shape: shape of its result in JAX.
      params: its parameters by name.
    """

    name: str
    inputs: list[Value]
    shape: Shape
    params: Mapping[str, Any]


class Graph:
    """Nodes and constants, added in the order of the program."""

    def __init__(self, images: Tensor):
        self.nodes = list[onnx.NodeProto]()
        self.initializers = list[onnx.TensorProto]()
        self.images = images
        self.batch = images.shape[0]
        # Names of constants by identity. Arrays are kept, so that identities are unique.
        self._constants: dict[int, tuple[str, np.ndarray]] = {}

    def add(
        self,
        kind: str,
        *inputs: Value,
        shape: Shape = (),
        name: str = "",
        **attributes: Any,
    ) -> Tensor:
        """Add a node and return its output."""
        name = name or f"{kind}_{len(self.nodes)}"
        node = helper.make_node(
            kind,
            inputs=list(map(self._find_name, inputs)),
            outputs=[name],
            name=name,
            **attributes,
        )
        self.nodes.append(node)
        return Tensor(name, tuple(shape))

    def _find_name(self, value: Value) -> str:
        """Return the name of a tensor, or of a constant, which is added when it is new."""
        if isinstance(value, Tensor):
            return value.name

        if id(value) not in self._constants:
            name = f"constant_{len(self._constants)}"
            content = np.ascontiguousarray(value).reshape(value.shape)
            initializer = numpy_helper.from_array(content, name)
            self.initializers.append(initializer)
            self._constants[id(value)] = (name, value)
        name, _ = self._constants[id(value)]
        return name

    def broadcast(self, value: Value, shape: Shape) -> Value:
        """Broadcast a value to a shape."""
        if value.shape == tuple(shape):
            return value
        if isinstance(value, np.ndarray) and is_fixed(shape):
            return np.broadcast_to(value, shape)

        sizes: list[Value] = []
        for size in shape:
            if type(size) is int:
                sizes.append(np.array([size]))
            else:
                sizes.append(self._multiply_batch(size))
        complete_shape = self.add("Concat", *sizes, axis=0)
        return self.add("Expand", value, complete_shape, shape=shape)

    def _multiply_batch(self, size: Dimension) -> Tensor:
        """Return a size that is a multiple of the batch, as the graph computes it."""
        batch = self.add("Shape", self.images, start=0, end=1)
        if size == self.batch:
            return batch
        factor = int(size // self.batch)
        return self.add("Mul", batch, np.array([factor]))

    def reshape(self, x: Value, shape: Shape) -> Value:
        """Return the values in another shape, of which one size may depend on the batch."""
        if x.shape == tuple(shape):
            return x
        if isinstance(x, np.ndarray):
            return x.reshape(shape)
        sizes = np.full(len(shape), -1, np.int64)
        for axis, size in enumerate(shape):
            if type(size) is int:
                sizes[axis] = size
        return self.add("Reshape", x, sizes, shape=shape)

    def transpose(self, x: Value, order: Sequence[int]) -> Value:
        """Return the values with the axes in another order."""
        if isinstance(x, np.ndarray):
            return x.transpose(order)
        shape = select(x.shape, order)
        return self.add("Transpose", x, shape=shape, perm=list(order))


def select(values: Sequence[V], axes: Sequence[int]) -> list[V]:
    """Return the values of some axes, in their order."""
    return [values[axis] for axis in axes]


def is_fixed(shape: Shape) -> bool:
    """Return True if no dimension depends on the batch."""
    return all(type(size) is int for size in shape)


def are_constants(values: Sequence[Value]) -> TypeGuard[Sequence[np.ndarray]]:
    """Return True if no value depends on the images."""
    return all(isinstance(value, np.ndarray) for value in values)


def make_rejection(operation: str) -> ValueError:
    """Return the error of an operation that has no form in ONNX."""
    return ValueError(
        f"--to=onnx: the network has an unsupported operation: {operation}. "
        "Use --to=stablehlo or --to=safetensors."
    )
