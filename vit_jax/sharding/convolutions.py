"""The convolutions of a ResNet, from the image to its last map.

They follow the descriptions of BiT and of ViT's hybrids, not the modules of `models`, so that each
can reveal an error of the other. No jax here.
"""

import dataclasses
from collections.abc import Iterator

from vit_jax.config.architecture import Architecture
from vit_jax.config.sizes import BOTTLENECK


@dataclasses.dataclass(frozen=True)
class Convolution:
    """A square convolution without a bias, padded so that its stride alone changes the size.

    Attributes:
      kernel: length along each axis, an odd number.
      stride: positions from one output to the next along each axis, 1 or 2.
      inputs: channels of the input.
      outputs: channels of the output.
      size: height and width of the input.
    """

    kernel: int
    stride: int
    inputs: int
    outputs: int
    size: tuple[int, int]

    @property
    def output_size(self) -> tuple[int, int]:
        """Height and width of the output, rounded up."""
        height, width = self.size
        return -(-height // self.stride), -(-width // self.stride)

    @property
    def parameters(self) -> int:
        return self.kernel**2 * self.inputs * self.outputs


@dataclasses.dataclass(frozen=True)
class Unit:
    """A bottleneck.

    Attributes:
      main: its 1x1, 3x3 and 1x1 convolutions.
      shortcut: the convolution of the input where its shape changes.
    """

    main: tuple[Convolution, Convolution, Convolution]
    shortcut: Convolution | None

    @property
    def convolutions(self) -> tuple[Convolution, ...]:
        if self.shortcut is None:
            return self.main
        return (*self.main, self.shortcut)


def root(architecture: Architecture) -> Convolution:
    """Return the 7x7 convolution of the image."""
    inputs = architecture.channels
    return Convolution(7, 2, inputs, architecture.root_channels, architecture.image_size)


def residual_units(architecture: Architecture) -> Iterator[Unit]:
    """Yield all units in order; the first of each stage but the first halves height and width."""
    height, width = root(architecture).output_size
    size = ((height + 1) // 2, (width + 1) // 2)  # max-pooling
    inputs = architecture.root_channels
    for stage, num_units in enumerate(architecture.units):
        outputs = architecture.stage_channels(stage)
        for index in range(num_units):
            stride = 1
            if stage > 0 and index == 0:
                stride = 2
            unit = _build_unit(inputs, outputs, stride, size)
            yield unit
            inputs = outputs
            size = unit.main[-1].size


def _build_unit(inputs: int, outputs: int, stride: int, size: tuple[int, int]) -> Unit:
    inner = outputs // BOTTLENECK
    reduce = Convolution(1, 1, inputs, inner, size)
    middle = Convolution(3, stride, inner, inner, size)
    expand = Convolution(1, 1, inner, outputs, middle.output_size)
    shortcut = None
    if inputs != outputs or stride > 1:
        shortcut = Convolution(1, stride, inputs, outputs, size)
    return Unit((reduce, middle, expand), shortcut)
