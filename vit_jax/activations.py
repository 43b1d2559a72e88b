"""Names for the few activations whose layout decides memory and communication.

A model names an activation (`named(tokens, "tokens_BSD")`) and knows no mesh; `placed_by` gives the names a layout
while a step for several devices is traced. Without it a name changes nothing.
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
      activation: with the dims at the end of the name.
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
