"""The kernel of the first layer for images with other channels than those of the weights."""

import numpy as np

FIRST_KERNELS = ("stem/root/conv/kernel", "body/root/conv/kernel", "embedding/kernel")
"""Names of the kernel that sees the image: of a hybrid, a ResNet and a ViT; the first that exists."""


def adapt_channels(kernel_hwCD: np.ndarray, channels: int, method: str) -> np.ndarray:
    """Return the kernel for another number of channels, in float32.

    Args:
      kernel_hwCD: kernel for C channels.
      channels: number N of channels of the result.
      method: "cyclic" sums the kernels of all channels for N=1, else it repeats them in turn and
        multiplies by C / N, so that a grey image gives the same sums (as timm's in_chans); "zero"
        keeps the kernels of the first channels, and adds kernels of zeros.
    """
    stored = kernel_hwCD.shape[-2]
    if method == "zero":
        kept_hwCD = kernel_hwCD[..., :channels, :]
        num_new = max(channels - stored, 0)
        return np.pad(kept_hwCD, ((0, 0), (0, 0), (0, num_new), (0, 0)))
    if channels == 1:
        return kernel_hwCD.sum(axis=-2, keepdims=True)
    cycle = np.arange(channels) % stored
    repeated_hwND = kernel_hwCD[..., cycle, :]
    return (repeated_hwND * (stored / channels)).astype(np.float32)


def describe_adaptation(stored: int, channels: int, method: str, option: str) -> str:
    """Return the note on a first kernel for other channels than the weights have.

    Args:
      stored: number of channels of the weights.
      channels: number of channels of the images.
      method: the same as for `adapt_channels`.
      option: name of the option that chooses the method.
    """
    if method == "zero":
        change = f"the first {min(stored, channels)} kernels are kept, others are zero"
    elif channels == 1:
        change = "the kernels are summed, as timm"
    else:
        change = f"the kernels are repeated in turn, times {stored}/{channels}, as timm"
    return (
        f"The first layer takes {channels} channel(s), the weights {stored}: {change} "
        f"({option}={method})."
    )
