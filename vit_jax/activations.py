"""Names for the few activations whose layout decides memory and communication.

A model says what an activation is (`named(tokens, "tokens_BSD")`) and knows no mesh; whoever traces it for several
devices says, with `placed_by`, what the names mean. Outside of that a name changes nothing.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator

import jax

Place = Callable[[str, jax.Array], jax.Array]

_place: contextvars.ContextVar[Place | None] = contextvars.ContextVar("place", default=None)


def named(activation: jax.Array, name: str) -> jax.Array:
    """The activation, laid out as `placed_by` has it.

    Args:
      activation: of the dims that stand at the end of the name.
      name: "tokens_BSD", "heads_BSTh", "hidden_BSM" or "map_BHWC".
    """
    place = _place.get()
    return activation if place is None else place(name, activation)


@contextlib.contextmanager
def placed_by(place: Place) -> Iterator[None]:
    """Context, or decorator, of a step while it is traced: `place` gives every named activation its layout."""
    token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(token)
