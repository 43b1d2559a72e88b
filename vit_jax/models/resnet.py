"""ResNets with group norm and standardised convolutions, in the forms of the paper's releases.

Pre-activation (v2) is Big Transfer's network (BiT, bit_jax/models.py). Post-activation (v1) is the
stem of the hybrids (vision_transformer, models_resnet.py); it can stand alone too, since the paper
does not say which of the two its ResNets were.

Legend: B batch, H W height and width, C channels, G groups, D features, I O channels of a kernel's
input and output, K classes.
"""

from collections.abc import Collection

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from vit_jax.arrays import ModelOutput, accept_earlier_name, validate_intermediates
from vit_jax.config.architecture import UNROLLED, Architecture
from vit_jax.config.sizes import BOTTLENECK
from vit_jax.kernels import CONVOLUTION, STATISTICS, dispatch
from vit_jax.kernels.devices import constrain
from vit_jax.kernels.dispatch import Padding
from vit_jax.kernels.group_norm import average_groups
from vit_jax.kernels.unit_parameters import UnitParameters
from vit_jax.models.embedding import LECUN_NORMAL
from vit_jax.models.heads import apply_head, build_head

_save_only = jax.checkpoint_policies.save_only_these_names
_KEEP_CONVOLUTIONS = _save_only(CONVOLUTION, STATISTICS)
REMAT_POLICIES = {
    # Compute norms and standardised kernels again.
    "dots": _KEEP_CONVOLUTIONS,
    # The same; "attention" differs in the transformer of a hybrid alone.
    "attention": _KEEP_CONVOLUTIONS,
    # Keep the input of each unit, and the means of its norms.
    "full": _save_only(STATISTICS),
}


class StandardizedConv(nnx.Module):
    """A convolution without bias, whose kernel is standardised in every output channel at each use.

    The two releases guard the division differently (BiT adds to the variance, ViT's hybrids to its
    root), so the architecture says which. BiT pads as much before the map as after it, the hybrids
    as little as they need.
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
        shape_HWIO = (size, size, inputs, outputs)
        kernel_HWIO = LECUN_NORMAL(rngs.params(), shape_HWIO, jnp.float32)
        self.kernel = nnx.Param(kernel_HWIO)

        border = size // 2
        self.padding: Padding = ((border, border), (border, border))
        if a.residual_unit == "postactivation":
            self.padding = "SAME"
        self.stride = stride
        self.epsilon = a.standardization_epsilon
        self.epsilon_added_to = a.standardization_epsilon_added_to
        self.dtype = jnp.dtype(a.compute_dtype)

    def __call__(self, x_BHWC: Array) -> Array:
        """Return (B, H / stride, W / stride, O), rounded up."""
        kernel_HWIO = self.standardize_kernel()
        kernel_HWIO = kernel_HWIO.astype(self.dtype)
        x_BHWC = x_BHWC.astype(self.dtype)
        y_BHWO = dispatch.convolve(x_BHWC, kernel_HWIO, self.stride, self.padding)
        return checkpoint_name(y_BHWO, CONVOLUTION)

    def standardize_kernel(self) -> Array:
        """Return the kernel (H, W, I, O) in float32."""
        return standardize(self.kernel[...], self.epsilon, self.epsilon_added_to)


def standardize(
    kernel_HWIO: Array,
    epsilon: float,
    epsilon_added_to: str,
) -> Array:
    """Subtract the mean of every output channel and divide by its standard deviation, in float32.

    `epsilon`, which guards the division, is added to the "variance", before the root, or to the
    "std", after it.
    """
    kernel = dispatch.merge_inputs(kernel_HWIO)
    axes = tuple(range(kernel.ndim - 1))
    kernel = kernel.astype(jnp.float32)
    mean = kernel.mean(axis=axes, keepdims=True)
    centred = kernel - mean
    squares = jnp.square(centred)
    variance = squares.mean(axis=axes, keepdims=True)

    if epsilon_added_to == "variance":
        standardized = centred * jax.lax.rsqrt(variance + epsilon)
    else:
        standardized = centred / (jnp.sqrt(variance) + epsilon)
    return standardized.reshape(kernel_HWIO.shape)


class GroupNorm(nnx.Module):
    """Normalises over H, W and the channels of a group.

    Sums over a map are by channel; they are added to sums of groups afterwards. In bfloat16 the
    squares are not centred: on TPUs these sums need no separate pass where a convolution writes the
    map. In float32 uncentred squares would lose small differences on a large mean, which bfloat16
    cannot hold at all.
    """

    def __init__(
        self,
        channels: int,
        a: Architecture,
        *,
        initial_scale: float = 1.0,
    ):
        self.scale = nnx.Param(jnp.full(channels, initial_scale))
        self.bias = nnx.Param(jnp.zeros(channels))
        self.epsilon = a.group_norm_epsilon
        self.dtype = jnp.dtype(a.compute_dtype)

    def __call__(self, x_BHWC: Array) -> Array:
        """Return a map of the shape of `x_BHWC` in the compute dtype."""
        normalize = dispatch.choose_group_norm(x_BHWC.dtype)
        if normalize is not None:
            normed_BHWC = normalize(x_BHWC, self.scale[...], self.bias[...], self.epsilon)
            return normed_BHWC.astype(self.dtype)

        is_exact = x_BHWC.dtype == jnp.float32
        x_BHWC = x_BHWC.astype(jnp.float32)
        mean_B11C = average_groups(x_BHWC)

        if is_exact:
            squares_BHWC = jnp.square(x_BHWC - mean_B11C)
            variance_B11C = average_groups(squares_BHWC)
        else:
            squares_BHWC = jnp.square(x_BHWC)
            mean_of_squares_B11C = average_groups(squares_BHWC)
            variance_B11C = mean_of_squares_B11C - jnp.square(mean_B11C)
            variance_B11C = jnp.maximum(variance_B11C, 0.0)  # rounding can make it negative

        inverse_B11C = jax.lax.rsqrt(variance_B11C + self.epsilon)
        scale_B11C = inverse_B11C * self.scale[...]
        normed_BHWC = (x_BHWC - mean_B11C) * scale_B11C
        normed_BHWC = normed_BHWC + self.bias[...]
        return normed_BHWC.astype(self.dtype)


def build_norm_after(channels: int, a: Architecture) -> GroupNorm | None:
    """Return the norm that follows a convolution; None in the pre-activation form."""
    if a.residual_unit == "preactivation":
        return None
    return GroupNorm(channels, a)


class Shortcut(nnx.Module):
    """The shortcut of a unit that changes shape: a 1x1 convolution.

    The post-activation form norms its output.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        stride: int,
        a: Architecture,
        *,
        rngs: nnx.Rngs,
    ):
        self.conv = StandardizedConv(
            1,
            inputs,
            outputs,
            a,
            stride=stride,
            rngs=rngs,
        )
        self.norm = build_norm_after(outputs, a)

    def __call__(self, x_BHWC: Array) -> Array:
        """Return (B, H / stride, W / stride, O), rounded up."""
        x_BHWC = self.conv(x_BHWC)
        if self.norm is None:
            return x_BHWC
        return self.norm(x_BHWC)


def build_shortcut(
    inputs: int,
    outputs: int,
    stride: int,
    a: Architecture,
    *,
    rngs: nnx.Rngs,
) -> Shortcut | None:
    """Return the shortcut of a unit; None where the unit keeps the shape."""
    if inputs == outputs and stride == 1:
        return None
    return Shortcut(inputs, outputs, stride, a, rngs=rngs)


class Unit(nnx.Module):
    """A bottleneck: 1x1, 3x3 (with the stride) and 1x1 convolution beside a shortcut.

    The pre-activation form norms the input of each convolution and adds at the end. The
    post-activation form norms the output of each convolution, and the sum goes through a ReLU.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        stride: int,
        a: Architecture,
        *,
        rngs: nnx.Rngs,
    ):
        self.is_preactivated = a.residual_unit == "preactivation"
        inner = outputs // BOTTLENECK
        self.conv1 = StandardizedConv(1, inputs, inner, a, rngs=rngs)
        self.conv2 = StandardizedConv(
            3,
            inner,
            inner,
            a,
            stride=stride,
            rngs=rngs,
        )
        self.conv3 = StandardizedConv(1, inner, outputs, a, rngs=rngs)
        if self.is_preactivated:
            self.norm1 = GroupNorm(inputs, a)
            self.norm2 = GroupNorm(inner, a)
            self.norm3 = GroupNorm(inner, a)
        else:  # the last scale is 0, so that a unit begins as the identity
            self.norm1 = GroupNorm(inner, a)
            self.norm2 = GroupNorm(inner, a)
            self.norm3 = GroupNorm(outputs, a, initial_scale=0.0)
        self.shortcut = build_shortcut(inputs, outputs, stride, a, rngs=rngs)

    def __call__(self, x_BHWC: Array) -> Array:
        """Return (B, H / stride, W / stride, O), rounded up."""
        inner, outputs = self.conv3.kernel.shape[2:]
        has_kernel = dispatch.has_unit_kernel(
            x_BHWC.shape[1:],
            inner,
            outputs,
            self.conv2.stride,
            self.norm1.dtype,
        )
        if has_kernel:
            return self.compute_by_kernel(x_BHWC)
        if self.is_preactivated:
            return self._compute_preactivated(x_BHWC)
        return self._compute_postactivated(x_BHWC)

    def _compute_preactivated(self, x_BHWC: Array) -> Array:
        """Return the sum of the shortcut and the convolutions, each with a norm before it."""
        y_BHWC = nnx.relu(self.norm1(x_BHWC))
        residual_BHWC = x_BHWC
        if self.shortcut is not None:
            residual_BHWC = self.shortcut(y_BHWC)

        y_BHWC = self.conv1(y_BHWC)
        y_BHWC = nnx.relu(self.norm2(y_BHWC))
        y_BHWC = self.conv2(y_BHWC)
        y_BHWC = nnx.relu(self.norm3(y_BHWC))
        y_BHWC = self.conv3(y_BHWC)
        return residual_BHWC + y_BHWC

    def _compute_postactivated(self, x_BHWC: Array) -> Array:
        """Return the ReLU of the sum of shortcut and convolutions, each with a norm after it."""
        residual_BHWC = x_BHWC
        if self.shortcut is not None:
            residual_BHWC = self.shortcut(x_BHWC)

        y_BHWC = nnx.relu(self.norm1(self.conv1(x_BHWC)))
        y_BHWC = nnx.relu(self.norm2(self.conv2(y_BHWC)))
        y_BHWC = self.norm3(self.conv3(y_BHWC))
        return nnx.relu(residual_BHWC + y_BHWC)

    def compute_by_kernel(self, x_BHWC: Array) -> Array:
        """Return the output by the kernel for TPUs, which is interpreted elsewhere.

        With a stride, maps have even lines and columns.
        """
        stride = self.conv2.stride
        first_offset = -1  # the window is centred at the position of the output
        if stride == 2 and self.conv2.padding == "SAME":
            first_offset = 0

        return dispatch.compute_unit(
            x_BHWC.astype(self.norm1.dtype),
            self._collect_parameters(),
            stride=stride,
            first_offset=first_offset,
            epsilon=self.norm1.epsilon,
            is_preactivated=self.is_preactivated,
        )

    def _collect_parameters(self) -> UnitParameters:
        """Return the parameters in the form of the kernel, with standardised kernels."""
        if self.is_preactivated:
            outer_norms = [self.norm1]
            inner_norms = [self.norm2, self.norm3]
        else:
            outer_norms = [self.norm3]
            inner_norms = [self.norm1, self.norm2]
        if self.shortcut is not None and self.shortcut.norm is not None:
            outer_norms.append(self.shortcut.norm)
        outer_norms_2N = stack_norms(outer_norms)
        inner_norms_4C = stack_norms(inner_norms)

        conv1_HWIO = self.conv1.standardize_kernel()
        conv2_HWIO = self.conv2.standardize_kernel()
        conv3_HWIO = self.conv3.standardize_kernel()
        shortcut_IO = None
        if self.shortcut is not None:
            shortcut_HWIO = self.shortcut.conv.standardize_kernel()
            shortcut_IO = shortcut_HWIO[0, 0]

        return UnitParameters(
            outer_norms_2N=outer_norms_2N,
            inner_norms_4C=inner_norms_4C,
            conv1_IC=conv1_HWIO[0, 0],
            conv2_HWIO=conv2_HWIO,
            conv3_CE=conv3_HWIO[0, 0],
            shortcut_IE=shortcut_IO,
        )


def stack_norms(norms: Collection[GroupNorm]) -> Array:
    """Return the scale and the bias of each norm in turn, (2 * norms, C)."""
    rows = []
    for norm in norms:
        rows.append(norm.scale[...])
        rows.append(norm.bias[...])
    return jnp.stack(rows)


class Stage(nnx.Module):
    """The first unit, which changes shape, and the others, which a scan runs one after the other.

    `rest` holds the others as one unit, whose parameters have a leading axis of units.
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        stride: int,
        num_units: int,
        a: Architecture,
        key: Array,
    ):
        first_key, rest_key = jax.random.split(key)
        first_rngs = nnx.Rngs(first_key)
        self.first = Unit(inputs, outputs, stride, a, rngs=first_rngs)

        def build_unit(key: Array) -> Unit:
            return Unit(outputs, outputs, 1, a, rngs=nnx.Rngs(key))

        rest_keys = jax.random.split(rest_key, num_units - 1)
        self.rest = jax.vmap(build_unit)(rest_keys) if num_units > 1 else None
        self.remat = a.remat
        self.scan_unroll = a.scan_unroll

    def __call__(self, x_BHWC: Array) -> Array:
        """Return the map after the last unit."""

        def run_unit(x_BHWC: Array, unit: Unit) -> tuple[Array, None]:
            y_BHWC = unit(x_BHWC)
            return constrain(y_BHWC, "map_BHWC"), None

        if self.remat != "none":
            policy = REMAT_POLICIES[self.remat]
            run_unit = jax.checkpoint(run_unit, policy=policy, prevent_cse=False)

        x_BHWC, _ = run_unit(x_BHWC, self.first)
        if self.rest is None:
            return x_BHWC

        keeps_activations = self.remat in UNROLLED
        unroll = self.scan_unroll or dispatch.unrolls_units(keeps_activations)
        x_BHWC, _ = jax.lax.scan(run_unit, x_BHWC, self.rest, unroll=unroll)
        return x_BHWC


class Root(nnx.Module):
    """A 7x7 convolution and a maximum, each halving the image.

    BiT pads with zeros before the maximum and has no norm; its values may be negative, so padding
    with nothing would change the border.
    """

    def __init__(
        self,
        a: Architecture,
        *,
        rngs: nnx.Rngs,
    ):
        self.conv = StandardizedConv(
            7,
            a.channels,
            a.root_channels,
            a,
            stride=2,
            rngs=rngs,
        )
        self.norm = build_norm_after(a.root_channels, a)

    def __call__(self, image_BHWC: Array) -> Array:
        """Return (B, H / 4, W / 4, C), rounded up."""
        x_BHWC = self.conv(image_BHWC)
        if self.norm is None:
            return max_pool_among_zeros(x_BHWC)

        x_BHWC = nnx.relu(self.norm(x_BHWC))
        return dispatch.max_pool(x_BHWC, "SAME")


def max_pool_among_zeros(x_BHWC: Array) -> Array:
    """Return the result of `dispatch.max_pool` for a map with zeros around it.

    No padded map is written: where a window reaches over the border, a negative maximum becomes
    zero.
    """
    border = ((1, 1), (1, 1))
    pooled_BHWC = dispatch.max_pool(x_BHWC, border)

    _, height, width, _ = x_BHWC.shape
    _, pooled_height, pooled_width, _ = pooled_BHWC.shape
    sees_zeros_H = _reaches_border(height, pooled_height)
    sees_zeros_W = _reaches_border(width, pooled_width)
    sees_zeros_HW = sees_zeros_H[:, None] | sees_zeros_W

    is_negative_BHWC = pooled_BHWC < 0
    is_zero_BHWC = sees_zeros_HW[..., None] & is_negative_BHWC
    return jnp.where(is_zero_BHWC, 0, pooled_BHWC)


def _reaches_border(size: int, num_windows: int) -> np.ndarray:
    """Return which windows of 3 positions, two apart, reach over an end of a side of this size."""
    window = np.arange(num_windows)
    is_first = window == 0
    is_over_the_end = 2 * window + 1 == size
    reaches_border: np.ndarray = is_first | is_over_the_end
    return reaches_border


class ResNetBody(nnx.Module):
    """Root and stages: from an image to a map of features."""

    def __init__(
        self,
        a: Architecture,
        key: Array,
    ):
        self.num_stages = len(a.units)
        root_key, *stage_keys = jax.random.split(key, self.num_stages + 1)
        self.root = Root(a, rngs=nnx.Rngs(root_key))

        inputs = a.root_channels
        for index, num_units in enumerate(a.units):
            outputs = a.stage_channels(index)
            stride = 1 if index == 0 else 2
            stage = Stage(
                inputs,
                outputs,
                stride,
                num_units,
                a,
                stage_keys[index],
            )
            setattr(self, f"stage{index + 1}", stage)
            inputs = outputs

    @jax.named_scope("resnet")
    def __call__(
        self,
        image_BHWC: Array,
        intermediates: Collection[str] = (),
    ) -> tuple[Array, tuple[Array, ...] | None]:
        """Return map_BHWC of the architecture's `map_size` and `map_channels`.

        Second are the maps after each stage if `intermediates` has "stages", otherwise None.
        """
        map_BHWC = self.root(image_BHWC)
        map_BHWC = constrain(map_BHWC, "map_BHWC")

        stages_BHWC = []
        for number in range(1, self.num_stages + 1):
            stage = getattr(self, f"stage{number}")
            map_BHWC = stage(map_BHWC)
            stages_BHWC.append(map_BHWC)

        if "stages" in intermediates:
            return map_BHWC, tuple(stages_BHWC)
        return map_BHWC, None


class ResNet(nnx.Module):
    """Root, stages, the mean over positions and a head; a pytree as `VisionTransformer`."""

    def __init__(
        self,
        a: Architecture,
        key: Array,
    ):
        body_key, head_key = jax.random.split(key)
        self.body = ResNetBody(a, body_key)
        self.norm = GroupNorm(a.width, a) if a.residual_unit == "preactivation" else None
        self.head = build_head(a, rngs=nnx.Rngs(head_key))
        self.num_classes = a.num_classes

    @accept_earlier_name
    def __call__(
        self,
        image_BHWC: Array,
        *,
        dropout_key: Array | None = None,
        intermediates: Collection[str] = (),
    ) -> ModelOutput:
        """Classify images.

        Args:
          image_BHWC: float, in [-1, 1].
          dropout_key: ignored; a ResNet drops nothing.
          intermediates: names of activations to return: "stages"; see `ModelOutput`.
        """
        validate_intermediates(intermediates, ("stages",))
        map_BHWC, stages_BHWC = self.body(image_BHWC, intermediates)
        if self.norm is not None:
            map_BHWC = nnx.relu(self.norm(map_BHWC))

        exact_BHWC = map_BHWC.astype(jnp.float32)
        pooled_BD = exact_BHWC.mean(axis=(1, 2))
        pooled_BD = pooled_BD.astype(map_BHWC.dtype)
        logits_BK, features_BD = apply_head(self.head, pooled_BD, self.num_classes)

        batch, _, _, width = map_BHWC.shape
        tokens_BND = map_BHWC.reshape(batch, -1, width)
        return ModelOutput(
            logits_BK=logits_BK,
            features_BD=features_BD,
            pooled_BD=pooled_BD,
            tokens_BND=tokens_BND,
            stages_BHWC=stages_BHWC,
        )
