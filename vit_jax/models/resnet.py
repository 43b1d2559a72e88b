"""ResNets with group norm and standardised convolutions, in the two forms that the paper's releases have.

Pre-activation (v2) is Big Transfer's network (BiT, bit_jax/models.py). Post-activation (v1) is the stem of the
hybrids (vision_transformer, models_resnet.py); it can stand alone too, since the paper does not say which of the
two its ResNets were.

Legend: B batch, H W height and width, C channels, I O channels of a kernel's input and output, K classes.
"""

from collections.abc import Collection

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from vit_jax.arrays import ModelOutput, validate_taps
from vit_jax.config import Architecture
from vit_jax.config.architecture import UNROLLED
from vit_jax.config.sizes import BOTTLENECK, NUM_GROUPS
from vit_jax.kernels import unit_pallas
from vit_jax.kernels.convolution import convolve, convolve_on_cpu
from vit_jax.kernels.devices import named, platform
from vit_jax.kernels.unit_pallas import CONVOLUTION, STATISTICS
from vit_jax.kernels.unit_programs import Form
from vit_jax.models.embedding import LECUN_NORMAL
from vit_jax.models.encoder import standardized
from vit_jax.models.heads import apply_head, build_head

_save_only = jax.checkpoint_policies.save_only_these_names
_KEEP_CONVOLUTIONS = _save_only(CONVOLUTION, STATISTICS)
REMAT_POLICIES = {
    "dots": _KEEP_CONVOLUTIONS,  # norms and standardised kernels come again
    "attention": _KEEP_CONVOLUTIONS,  # of a hybrid's transformer it keeps less
    "full": _save_only(STATISTICS),  # keeps the input of each unit, and the means in its norms
}


class StandardizedConv(nnx.Module):
    """A convolution without bias whose kernel has mean 0 and variance 1 in every output channel, at every use.

    The two releases guard the division differently (BiT adds to the variance, ViT's hybrids to its root), so the
    architecture says which. BiT pads as much before the map as after it, the hybrids as little as they need.
    """

    def __init__(
        self,
        size: int,
        inputs: int,
        outputs: int,
        a: Architecture,
        *,
        stride: int = 1,
        rngs: nnx.Rngs,
    ):
        self.kernel = nnx.Param(
            LECUN_NORMAL(rngs.params(), (size, size, inputs, outputs), jnp.float32)
        )
        border = (size // 2, size // 2)
        self.stride = stride
        self.padding = "SAME" if a.residual_unit == "postactivation" else (border, border)
        self.epsilon = a.standardization_epsilon
        self.epsilon_added_to = a.standardization_epsilon_added_to
        self.dtype = jnp.dtype(a.compute_dtype)

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        """Return (B, H / stride, W / stride, O), rounded up."""
        kernel = self.standardized_kernel().astype(self.dtype)
        compute = convolve_on_cpu if platform() == "cpu" else convolve
        return checkpoint_name(
            compute(x_BHWC.astype(self.dtype), kernel, self.stride, self.padding), CONVOLUTION
        )

    def standardized_kernel(self) -> jax.Array:
        """Return the kernel (H, W, I, O) in float32."""
        return standardize(self.kernel[...], self.epsilon, self.epsilon_added_to)


def standardize(kernel_HWIO: jax.Array, epsilon: float, epsilon_added_to: str) -> jax.Array:
    """Subtract the mean of every output channel and divide by its standard deviation, in float32.

    `epsilon`, which guards the division, is added to the "variance", before the root, or to the "std", after it.
    """
    if epsilon_added_to == "variance":
        return standardized(kernel_HWIO, (0, 1, 2), epsilon)
    centred = kernel_HWIO - kernel_HWIO.mean(axis=(0, 1, 2), keepdims=True)
    return centred / (jnp.sqrt(jnp.square(centred).mean(axis=(0, 1, 2), keepdims=True)) + epsilon)


class GroupNorm(nnx.Module):
    """Normalises over H, W and the channels of a group.

    What is summed over a map are channels, of which groups are made afterwards, and in bfloat16 squares that are not
    centred: on TPUs such sums cost no pass of their own where a convolution writes the map. In float32 they would lose
    small differences on a large mean, which bfloat16 does not hold in the first place.
    """

    def __init__(self, channels: int, a: Architecture, *, initial_scale: float = 1.0):
        self.scale = nnx.Param(jnp.full((channels,), initial_scale))
        self.bias = nnx.Param(jnp.zeros((channels,)))
        self.epsilon = a.group_norm_epsilon
        self.dtype = jnp.dtype(a.compute_dtype)

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        is_exact = x_BHWC.dtype == jnp.float32
        x_BHWC = x_BHWC.astype(jnp.float32)
        mean_B11C = _group_means(x_BHWC)
        if is_exact:
            variance_B11C = _group_means(jnp.square(x_BHWC - mean_B11C))
        else:
            variance_B11C = jnp.maximum(
                _group_means(jnp.square(x_BHWC)) - jnp.square(mean_B11C), 0.0
            )
        scale_B11C = jax.lax.rsqrt(variance_B11C + self.epsilon) * self.scale[...]
        return ((x_BHWC - mean_B11C) * scale_B11C + self.bias[...]).astype(self.dtype)


def _group_means(x_BHWC: jax.Array) -> jax.Array:
    """Return for each channel the mean of its group (B, 1, 1, C)."""
    channels = x_BHWC.shape[-1]
    means_BC = x_BHWC.mean(axis=(1, 2))
    means_BG = means_BC.reshape(-1, NUM_GROUPS, channels // NUM_GROUPS).mean(axis=2)
    return checkpoint_name(
        jnp.repeat(means_BG, channels // NUM_GROUPS, axis=1)[:, None, None], STATISTICS
    )


class Shortcut(nnx.Module):
    """The shortcut of a unit that changes channels or stride: a 1x1 convolution, normed in the post-activation form."""

    def __init__(self, inputs: int, outputs: int, stride: int, a: Architecture, *, rngs: nnx.Rngs):
        self.conv = StandardizedConv(1, inputs, outputs, a, stride=stride, rngs=rngs)
        self.norm = GroupNorm(outputs, a) if a.residual_unit == "postactivation" else None

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        x_BHWC = self.conv(x_BHWC)
        return x_BHWC if self.norm is None else self.norm(x_BHWC)


class Unit(nnx.Module):
    """A bottleneck: 1x1, 3x3 (with the stride) and 1x1 convolution beside a shortcut.

    Pre-activation norms what enters each convolution and adds at the end; post-activation norms what leaves it, and
    the sum goes through a ReLU.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, a: Architecture, *, rngs: nnx.Rngs):
        inner = outputs // BOTTLENECK
        self.is_preactivated = a.residual_unit == "preactivation"
        self.conv1 = StandardizedConv(1, inputs, inner, a, rngs=rngs)
        self.conv2 = StandardizedConv(3, inner, inner, a, stride=stride, rngs=rngs)
        self.conv3 = StandardizedConv(1, inner, outputs, a, rngs=rngs)
        if self.is_preactivated:
            self.norm1 = GroupNorm(inputs, a)
            self.norm2 = GroupNorm(inner, a)
            self.norm3 = GroupNorm(inner, a)
        else:  # the last scale is 0, so that a unit begins as the identity
            self.norm1 = GroupNorm(inner, a)
            self.norm2 = GroupNorm(inner, a)
            self.norm3 = GroupNorm(outputs, a, initial_scale=0.0)
        changes = inputs != outputs or stride != 1
        self.shortcut = Shortcut(inputs, outputs, stride, a, rngs=rngs) if changes else None

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        if self._has_kernel(x_BHWC):
            return self.by_kernel(x_BHWC)
        return self._preactivated(x_BHWC) if self.is_preactivated else self._postactivated(x_BHWC)

    def _has_kernel(self, x_BHWC: jax.Array) -> bool:
        inner, outputs = self.conv3.kernel.shape[2:]
        return unit_pallas.can_compute(
            x_BHWC.shape[1:], inner, outputs, self.conv2.stride, self.norm1.dtype
        )

    def by_kernel(self, x_BHWC: jax.Array) -> jax.Array:
        """Return the output of a unit; a strided one has even lines and columns. Off TPUs the kernel is interpreted."""
        outer = [self.norm3]
        inner = [self.norm1, self.norm2]
        if self.is_preactivated:
            outer = [self.norm1]
            inner = [self.norm2, self.norm3]
        elif self.shortcut is not None and self.shortcut.norm is not None:
            outer.append(self.shortcut.norm)
        outer_norms_2N, inner_norms_4C = (
            jnp.stack([x for norm in norms for x in (norm.scale[...], norm.bias[...])])
            for norms in (outer, inner)
        )
        conv1, conv2, conv3 = (
            conv.standardized_kernel() for conv in (self.conv1, self.conv2, self.conv3)
        )
        shortcut = None if self.shortcut is None else self.shortcut.conv.standardized_kernel()[0, 0]
        kernels = conv1[0, 0], conv2, conv3[0, 0], shortcut
        parameters = unit_pallas.Parameters(outer_norms_2N, inner_norms_4C, *kernels)
        batch, height, width, _ = x_BHWC.shape
        stride = self.conv2.stride
        first_tap = (
            0 if stride == 2 and self.conv2.padding == "SAME" else -1
        )  # all other paddings are symmetric
        form = Form(
            width,
            stride,
            first_tap,
            self.norm1.epsilon,
            self.is_preactivated,
            interpret=platform() != "tpu",
        )
        x_BRI = x_BHWC.astype(self.norm1.dtype).reshape(batch, height * width, -1)
        out_BRE = unit_pallas.bottleneck(x_BRI, parameters, form)
        return out_BRE.reshape(batch, height // stride, width // stride, -1)

    def _preactivated(self, x_BHWC: jax.Array) -> jax.Array:
        y_BHWC = nnx.relu(self.norm1(x_BHWC))
        residual_BHWC = x_BHWC if self.shortcut is None else self.shortcut(y_BHWC)
        y_BHWC = self.conv1(y_BHWC)
        y_BHWC = self.conv2(nnx.relu(self.norm2(y_BHWC)))
        return residual_BHWC + self.conv3(nnx.relu(self.norm3(y_BHWC)))

    def _postactivated(self, x_BHWC: jax.Array) -> jax.Array:
        residual_BHWC = x_BHWC if self.shortcut is None else self.shortcut(x_BHWC)
        y_BHWC = nnx.relu(self.norm1(self.conv1(x_BHWC)))
        y_BHWC = nnx.relu(self.norm2(self.conv2(y_BHWC)))
        return nnx.relu(residual_BHWC + self.norm3(self.conv3(y_BHWC)))


class Stage(nnx.Module):
    """The first unit, which changes shape, and the others, which are alike: stacked into one and run by a scan."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        stride: int,
        num_units: int,
        a: Architecture,
        key: jax.Array,
    ):
        first_key, rest_key = jax.random.split(key)
        self.first = Unit(inputs, outputs, stride, a, rngs=nnx.Rngs(first_key))
        rest_keys = jax.random.split(rest_key, num_units - 1)
        build_rest = jax.vmap(lambda key: Unit(outputs, outputs, 1, a, rngs=nnx.Rngs(key)))
        self.rest = build_rest(rest_keys) if num_units > 1 else None
        self.remat = a.remat
        self.scan_unroll = a.scan_unroll

    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        def run_unit(x_BHWC: jax.Array, unit: Unit) -> tuple[jax.Array, None]:
            return named(unit(x_BHWC), "map_BHWC"), None

        if self.remat != "none":
            run_unit = jax.checkpoint(
                run_unit, policy=REMAT_POLICIES[self.remat], prevent_cse=False
            )
        x_BHWC, _ = run_unit(x_BHWC, self.first)
        if self.rest is not None:
            # A loop copies what is kept for the backward pass: a seventh more time on a CPU, a quarter more on a TPU.
            is_unrolled = platform() == "cpu" or (platform() == "tpu" and self.remat in UNROLLED)
            unroll = self.scan_unroll or is_unrolled
            x_BHWC, _ = jax.lax.scan(run_unit, x_BHWC, self.rest, unroll=unroll)
        return x_BHWC


class Root(nnx.Module):
    """A 7x7 convolution and a maximum, each halving the image.

    BiT pads with zeros before the maximum and has no norm; its values may be negative, so padding with nothing
    would change the border.
    """

    def __init__(self, a: Architecture, *, rngs: nnx.Rngs):
        self.conv = StandardizedConv(7, 3, a.root_channels, a, stride=2, rngs=rngs)
        self.norm = GroupNorm(a.root_channels, a) if a.residual_unit == "postactivation" else None

    def __call__(self, image_BHWC: jax.Array) -> jax.Array:
        """Return (B, H / 4, W / 4, C), rounded up."""
        x_BHWC = self.conv(image_BHWC)
        if self.norm is None:
            return max_pool_among_zeros(x_BHWC)
        return nnx.max_pool(nnx.relu(self.norm(x_BHWC)), (3, 3), strides=(2, 2), padding="SAME")


def max_pool_among_zeros(x_BHWC: jax.Array) -> jax.Array:
    """The maximum of 3x3 places, every second one, of the map with zeros around it; no such map is written."""
    inside_BHWC = nnx.max_pool(x_BHWC, (3, 3), strides=(2, 2), padding=((1, 1), (1, 1)))
    at_border_H, at_border_W = (
        (place == 0) | (2 * place + 1 == size)
        for size, place in zip(
            x_BHWC.shape[1:3], map(np.arange, inside_BHWC.shape[1:3]), strict=True
        )
    )
    sees_zeros_HW1 = (at_border_H[:, None] | at_border_W)[..., None]
    return jnp.where(sees_zeros_HW1 & (inside_BHWC < 0), 0, inside_BHWC)


class ResNetBody(nnx.Module):
    """Root and stages: from an image to a map of features."""

    def __init__(self, a: Architecture, key: jax.Array):
        root_key, *stage_keys = jax.random.split(key, len(a.units) + 1)
        self.root = Root(a, rngs=nnx.Rngs(root_key))
        self.num_stages = len(a.units)
        inputs = a.root_channels
        for stage, (num_units, stage_key) in enumerate(zip(a.units, stage_keys, strict=True)):
            outputs = a.stage_channels(stage)
            stride = 1 if stage == 0 else 2
            setattr(
                self, f"stage{stage + 1}", Stage(inputs, outputs, stride, num_units, a, stage_key)
            )
            inputs = outputs

    @jax.named_scope("resnet")
    def __call__(
        self, image_BHWC: jax.Array, taps: Collection[str] = ()
    ) -> tuple[jax.Array, tuple[jax.Array, ...] | None]:
        """Return map_BHWC of the architecture's `map_size` and `map_channels`, and with the tap "stages" each map."""
        maps = [named(self.root(image_BHWC), "map_BHWC")]
        for stage in range(1, self.num_stages + 1):
            maps.append(getattr(self, f"stage{stage}")(maps[-1]))
        return maps[-1], tuple(maps[1:]) if "stages" in taps else None


class ResNet(nnx.Module):
    """Root, stages, the average over positions and a head. A plain pytree, as `VisionTransformer`."""

    def __init__(self, a: Architecture, key: jax.Array):
        body_key, head_key = jax.random.split(key)
        self.body = ResNetBody(a, body_key)
        self.norm = GroupNorm(a.width, a) if a.residual_unit == "preactivation" else None
        self.head = build_head(a, rngs=nnx.Rngs(head_key))
        self.num_classes = a.num_classes

    def __call__(
        self,
        image_BHWC: jax.Array,
        *,
        dropout_key: jax.Array | None = None,
        taps: Collection[str] = (),
    ) -> ModelOutput:
        """Classify images.

        Args:
          image_BHWC: float, in [-1, 1].
          dropout_key: ignored; a ResNet drops nothing.
          taps: inner results to return: "stages"; see `ModelOutput`.
        """
        validate_taps(taps, ("stages",))
        map_BHWC, stages_BHWC = self.body(image_BHWC, taps)
        if self.norm is not None:
            map_BHWC = nnx.relu(self.norm(map_BHWC))
        pooled_BD = map_BHWC.astype(jnp.float32).mean(axis=(1, 2)).astype(map_BHWC.dtype)
        logits_BK, features_BD = apply_head(self.head, pooled_BD, self.num_classes)
        tokens_BND = map_BHWC.reshape(map_BHWC.shape[0], -1, map_BHWC.shape[-1])
        return ModelOutput(
            logits_BK=logits_BK,
            features_BD=features_BD,
            pooled_BD=pooled_BD,
            tokens_BND=tokens_BND,
            stages_BHWC=stages_BHWC,
        )
