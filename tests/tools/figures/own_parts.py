"""A custom block without attention weights."""

from flax import nnx


class Forgetful(nnx.Module):
    """An encoder block that scales its input by one."""

    def __init__(self, a, *, rngs):
        self.scale = nnx.Param(nnx.initializers.ones(rngs.params(), (a.width,)))

    def __call__(self, x_BSD, drop_fraction, key):
        return x_BSD * self.scale[...]
