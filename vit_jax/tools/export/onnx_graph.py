"""A traced program as an ONNX graph: the operations of our networks, and no others.

Values that do not depend on the images become constants. The loop over layers is unrolled, so that
every runtime can read the graph. `programs.py` writes and checks files.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import numpy as np
import onnx
from jax.extend import core
from jax.typing import ArrayLike
from onnx import helper

from vit_jax.tools.export.onnx_nodes import (
    Graph,
    Operation,
    Tensor,
    Value,
    are_constants,
    is_fixed,
    make_rejection,
)
from vit_jax.tools.export.onnx_operations import ARRANGEMENTS, ELEMENTWISE, broadcast_shapes

OPSET = 18  # the first in which every reduction takes its axes as an input
_UNCHANGED = ("name", "stop_gradient", "copy", "copy_p", "optimization_barrier")
Equation = Any  # a `JaxprEqn`; JAX does not type the shapes of its values


def to_onnx(
    program: Callable[[jax.Array], tuple[jax.Array, ...]],
    names: Sequence[str],
    images: jax.ShapeDtypeStruct,
) -> onnx.ModelProto:
    """Return the graph of a function.

    Args:
      program: maps "images", (B, H, W, C), any B, to arrays whose first dimension is B.
      names: names of the outputs, in their order.
      images: shape and dtype of the images, with a symbolic batch.

    Raises:
      ValueError: the function has an unsupported operation.
    """
    closed = jax.make_jaxpr(program)(images)

    graph = Graph(Tensor("images", images.shape))
    results = add_program(graph, closed.jaxpr, closed.consts, [graph.images])
    outputs = []
    for name, result, output in zip(names, results, closed.out_avals, strict=True):
        complete = graph.broadcast(result, output.shape)
        graph.add("Identity", complete, name=name)
        outputs.append(_describe_tensor(name, output))

    proto = helper.make_graph(
        graph.nodes,
        "vit_jax",
        [_describe_tensor("images", images)],
        outputs,
        graph.initializers,
    )
    opset = [helper.make_opsetid("", OPSET)]
    version = helper.find_min_ir_version_for(opset)  # so that older runtimes can read it
    return helper.make_model(
        proto,
        opset_imports=opset,
        ir_version=version,
        producer_name="vit_jax",
    )


def _describe_tensor(
    name: str,
    array: jax.ShapeDtypeStruct | jax.core.ShapedArray,
) -> onnx.ValueInfoProto:
    """Return the description of an input or output, whose first dimension is the batch."""
    kind = helper.np_dtype_to_tensor_dtype(array.dtype)
    return helper.make_tensor_value_info(name, kind, ["batch", *array.shape[1:]])


def add_program(
    graph: Graph,
    jaxpr: core.Jaxpr,
    constants: Sequence[ArrayLike],
    inputs: Sequence[Value],
) -> list[Value]:
    """Add the equations of a program and return its outputs."""
    values = dict[core.Var, Value]()
    values |= zip(jaxpr.constvars, map(np.asarray, constants), strict=True)
    values |= zip(jaxpr.invars, inputs, strict=True)

    def read(variable: core.Var | core.Literal) -> Value:
        if isinstance(variable, core.Literal):
            literal = cast(jax.core.ShapedArray, variable.aval)
            return np.asarray(variable.val, literal.dtype)
        return values[variable]

    for equation in jaxpr.eqns:
        arguments = [read(variable) for variable in equation.invars]
        results = _add_equation(graph, equation, arguments)
        values |= zip(equation.outvars, results, strict=True)
    return [read(variable) for variable in jaxpr.outvars]


def _add_equation(
    graph: Graph,
    equation: Equation,
    inputs: list[Value],
) -> list[Value]:
    """Add the nodes of an equation, or compute it if its inputs are constants."""
    name = equation.primitive.name
    params = equation.params
    called = params.get("jaxpr") or params.get("call_jaxpr")
    if called:
        return _add_call(graph, equation, called, inputs)
    if name in _UNCHANGED:
        return inputs

    shape = equation.outvars[0].aval.shape
    if name == "broadcast_in_dim":
        operation = Operation(name, inputs, shape, params)
        return [_insert_dimensions(graph, operation)]
    if is_fixed(shape) and are_constants(inputs):
        return _compute(graph, equation, inputs)
    if name in ELEMENTWISE:
        add_nodes = ELEMENTWISE[name]
        operation = Operation(name, inputs, broadcast_shapes(inputs), params)
        return [add_nodes(graph, operation)]
    if name in ARRANGEMENTS:
        add_nodes = ARRANGEMENTS[name]
        complete = _broadcast_all(graph, inputs, equation.invars)
        operation = Operation(name, complete, shape, params)
        return [add_nodes(graph, operation)]
    raise make_rejection(name)


def _add_call(
    graph: Graph,
    equation: Equation,
    called: core.Jaxpr | core.ClosedJaxpr,
    inputs: list[Value],
) -> list[Value]:
    """Add the equations of a called function, or of all iterations of a loop."""
    body: Any = getattr(called, "jaxpr", called)
    constants = getattr(called, "consts", ())
    if equation.primitive.name == "scan":
        return _unroll(graph, equation, body, constants, inputs)
    return add_program(graph, body, constants, inputs)


def _unroll(
    graph: Graph,
    equation: Equation,
    body: Any,
    constants: Sequence[ArrayLike],
    inputs: list[Value],
) -> list[Value]:
    """Unroll a loop over constants, such as the parameters of layers.

    The inputs are the constants of the loop, the initial carry, and stacked arrays, of which
    each iteration takes a row. The loop may return only its carry.
    """
    num_unstacked = 0
    for outside, inside in zip(equation.invars, body.invars, strict=True):
        if outside.aval.ndim == inside.aval.ndim:
            num_unstacked += 1
    num_fixed = num_unstacked - len(body.outvars)
    stacked = _broadcast_all(
        graph,
        inputs[num_unstacked:],
        equation.invars[num_unstacked:],
    )

    returns_stack = False
    for outside, inside in zip(equation.outvars, body.outvars, strict=True):
        if outside.aval.ndim != inside.aval.ndim:
            returns_stack = True
    if returns_stack or not are_constants(stacked):
        raise make_rejection("a loop over activations")

    fixed = inputs[:num_fixed]
    carry = inputs[num_fixed:num_unstacked]
    for number in range(equation.params["length"]):
        layer = [np.asarray(array[number]) for array in stacked]
        carry = add_program(graph, body, constants, [*fixed, *carry, *layer])
    return carry


def _compute(
    graph: Graph,
    equation: Equation,
    inputs: Sequence[Value],
) -> list[Value]:
    """Return the constant results of an equation."""
    arrays = _broadcast_all(graph, inputs, equation.invars)
    results = equation.primitive.bind(*arrays, **equation.params)
    if not equation.primitive.multiple_results:
        results = [results]
    return [np.asarray(result) for result in results]


def _broadcast_all(
    graph: Graph,
    inputs: Sequence[Value],
    variables: Sequence[Any],
) -> list[Value]:
    """Return the values of variables in the shapes that they have in JAX."""
    complete = []
    for value, variable in zip(inputs, variables, strict=True):
        complete.append(graph.broadcast(value, variable.aval.shape))
    return complete


def _insert_dimensions(graph: Graph, operation: Operation) -> Value:
    """Insert dimensions of 1; later operations broadcast them."""
    (x,) = operation.inputs
    sizes = [1] * len(operation.shape)
    axes = operation.params["broadcast_dimensions"]
    for axis, size in zip(axes, x.shape, strict=True):
        sizes[axis] = size
    return graph.reshape(x, sizes)
