"""Position embeddings: added to the tokens, or within attention.

Legend: B batch, h w rows and columns of patches, N = h w patches, S sequence length (prefix tokens
and patches), D width, E width of all heads, T heads, h also head dimension, p pairs of values of a
head. With patch dropout S is the number of tokens that are kept; `token_BS` has their indices in
the complete sequence.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from vit_jax.config.architecture import Architecture
from vit_jax.kernels import dispatch

T = TypeVar("T", np.ndarray, Array)
Grid = tuple[int, int]  # rows and columns
Positions = Callable[[], Array]  # a module that returns positions_1SD
BASE = 10_000.0  # ratio of the largest and the smallest frequency
CENTRED_BASE = 100.0  # the same in DINOv3
ROPE_GRID_SIDE = 16  # patches along a side of the grid on which EVA-02 counts


# Positions that are added to the tokens.


class LearnedPositions1D(nnx.Module):
    """One learned row for each token in raster order, those of prefix tokens first.

    With `position_tokens="patches"` prefix tokens have none.
    """

    def __init__(self, a: Architecture, *, rngs: nnx.Rngs):
        self.num_zeros = a.prefix_length if a.position_tokens == "patches" else 0
        num_rows = a.sequence_length - self.num_zeros
        self.table = build_table(a, rngs, 1, num_rows, a.width)

    def __call__(self) -> Array:
        """Return positions_1SD."""
        table = self.table[...]
        if self.num_zeros == 0:
            return table
        return jnp.pad(table, ((0, 0), (self.num_zeros, 0), (0, 0)))


class LearnedPositions2D(nnx.Module):
    """A learned vector of D / 2 for each row and column of patches (ViT, App. D.4)."""

    def __init__(self, a: Architecture, *, rngs: nnx.Rngs):
        num_rows, num_columns = a.grid
        self.row_table = build_table(a, rngs, num_rows, a.width // 2)
        self.column_table = build_table(a, rngs, num_columns, a.width // 2)
        self.class_row = build_table(a, rngs, 1, a.width) if a.num_class_tokens else None

    def __call__(self) -> Array:
        """Return positions_1SD."""
        rows_hD = self.row_table[...]
        columns_wD = self.column_table[...]
        num_rows, half_width = rows_hD.shape
        shape_hwD = (num_rows, len(columns_wD), half_width)

        column_half_hwD = jnp.broadcast_to(columns_wD[None], shape_hwD)
        row_half_hwD = jnp.broadcast_to(rows_hD[:, None], shape_hwD)
        grid_hwD = jnp.concatenate((column_half_hwD, row_half_hwD), axis=-1)
        table_SD = grid_hwD.reshape(-1, 2 * half_width)
        if self.class_row is not None:
            table_SD = jnp.concatenate([self.class_row[...], table_SD])
        return table_SD[None]


class FixedPositions(nnx.Module):
    """Sine-cosine positions, or none: no parameters, and nothing added to a class token.

    `reference_grid` is set for images of another size than the network's, whose patches then have
    the same coordinates.
    """

    def __init__(self, a: Architecture, *, rngs: nnx.Rngs):
        del rngs
        self.reference_grid: Grid | None = None
        self.grid = a.grid
        self.width = a.width
        self.kind = a.position_embedding
        self.prefix_length = a.prefix_length

    def __call__(self) -> Array:
        """Return positions_1SD."""
        table_1SD = build_fixed_positions(
            self.kind,
            self.grid,
            self.width,
            prefix_length=self.prefix_length,
            reference_grid=self.reference_grid,
        )
        return jnp.asarray(table_1SD)


def build_fixed_positions(
    kind: str,
    grid: Grid,
    width: int,
    *,
    prefix_length: int,
    reference_grid: Grid | None = None,
) -> np.ndarray:
    """Return the table of "sincos2d" or "none", float32 (1, S, D).

    It has zeros for the `prefix_length` tokens before the patches; the other arguments are those of
    `compute_sincos2d`.
    """
    if kind == "sincos2d":
        table_ND = compute_sincos2d(grid, width, reference_grid)
    else:
        num_patches = grid[0] * grid[1]
        table_ND = np.zeros((num_patches, width), np.float32)

    table_SD = np.pad(table_ND, ((prefix_length, 0), (0, 0)))
    return table_SD[None]


def compute_sincos2d(grid: Grid, width: int, reference_grid: Grid | None = None) -> np.ndarray:
    """Return sine-cosine positions in MoCo v3's form, float32 (N, D).

    A quarter each of `width`, which 4 divides, is sin(x w), cos(x w), sin(y w), cos(y w);
    frequencies w fall from 1 to 1/10000. The middles of patches are counted on `reference_grid`;
    None: `grid`.
    """
    quarter = width // 4
    exponents = np.arange(quarter) / max(quarter - 1, 1)
    frequencies = BASE**-exponents

    reference_rows, reference_columns = reference_grid or grid
    y_h = locate_patches(grid[0], reference_rows)
    x_w = locate_patches(grid[1], reference_columns)
    y_hw, x_hw = np.meshgrid(y_h, x_w, indexing="ij")

    x_angles = x_hw.reshape(-1, 1) * frequencies
    y_angles = y_hw.reshape(-1, 1) * frequencies
    quarters = [
        np.sin(x_angles),
        np.cos(x_angles),
        np.sin(y_angles),
        np.cos(y_angles),
    ]
    return np.concatenate(quarters, axis=1).astype(np.float32)


def locate_patches(num_patches: int, num_reference: int) -> np.ndarray:
    """Return the middles of patches along a side, counted from 0 in `num_reference` patches."""
    index = np.arange(num_patches)
    if num_patches == num_reference:
        return index
    scaled: np.ndarray = (index + 0.5) * num_reference / num_patches - 0.5
    return scaled


# Positions within attention.


class RelativePositions(nnx.Module):
    """A learned key for each offset of a query from a key (ViT, App. D.4; Shaw et al., 2018).

    A query's product with it is added to the logits of attention. A class token has three keys (as
    query, as key, as both), all heads have the same keys, no offset is clipped, and every block has
    its table: the paper does not say.
    """

    def __init__(self, a: Architecture, num_patches: int, *, rngs: nnx.Rngs):
        self.num_patches = num_patches
        self.has_class_token = a.num_class_tokens > 0
        num_keys = 2 * num_patches - 1
        if self.has_class_token:
            num_keys += 3
        self.table = build_table(a, rngs, num_keys, a.width // a.num_heads)

    def __call__(self) -> Array:
        """Return keys_SSh: of every query, one for each token."""
        index_SS = index_offsets(self.num_patches, has_class_token=self.has_class_token)
        keys = self.table[...]
        return keys[index_SS]


def index_offsets(num_patches: int, *, has_class_token: bool) -> np.ndarray:
    """Return the index of each query's and key's offset in a table of relative positions, (S, S).

    The table has the offsets 1 - N to N - 1 of a query from a key in raster order. With a class
    token, the entries for the token as query, as key, and as both follow.
    """
    order = np.arange(num_patches)
    index_SS: np.ndarray = order[:, None] - order + num_patches - 1
    if has_class_token:
        index_SS = np.pad(index_SS, ((1, 0), (1, 0)))
        index_SS[0, :] = 2 * num_patches - 1
        index_SS[:, 0] = 2 * num_patches
        index_SS[0, 0] += 1
    return index_SS


class RotaryPositions(nnx.Module):
    """Rotary positions (Su et al., 2021) of patches in two dimensions, not of prefix tokens.

    "centred" pairs the values of a head with those half a head away, the other kinds with their
    neighbours.
    """

    def __init__(self, a: Architecture):
        self.kind = a.rope
        self.grid = a.grid
        self.prefix_length = a.prefix_length
        self.has_class_token = a.num_class_tokens > 0
        self.reference_grid = a.rope_grid

    def __call__(self, x_BSE: Array, num_heads: int, token_BS: Array | None = None) -> Array:
        """Return queries or keys, turned in float32 by the position of their patch."""
        batch, length, width = x_BSE.shape
        assert self.kind is not None
        angles_Np = compute_rotary_angles(
            self.kind,
            self.grid,
            width // num_heads,
            has_class_token=self.has_class_token,
            reference_grid=self.reference_grid,
        )
        angles_Sp = np.pad(angles_Np, ((self.prefix_length, 0), (0, 0)))
        pairs = build_pairs(self.kind, width // num_heads)
        cos_Sh = np.cos(angles_Sp)[:, pairs.number_h]
        sin_Sh = np.sin(angles_Sp)[:, pairs.number_h] * pairs.sign_h

        # A pair (left, right) becomes (left cos - right sin, right cos + left sin).
        if dispatch.turns_pairs_by_products(width, x_BSE.dtype):
            x = x_BSE
            partner = swap_by_product(x_BSE, pairs, num_heads)
            cos = jnp.tile(select_tokens(cos_Sh, token_BS), num_heads)
            sin = jnp.tile(select_tokens(sin_Sh, token_BS), num_heads)
        else:
            x = x_BSE.reshape(batch, length, num_heads, -1)
            partner = swap_by_flip(x, self.kind)
            cos = select_tokens(cos_Sh[:, None], token_BS)  # for all heads
            sin = select_tokens(sin_Sh[:, None], token_BS)

        turned = x.astype(jnp.float32) * cos + partner.astype(jnp.float32) * sin
        return turned.reshape(x_BSE.shape).astype(x_BSE.dtype)


class Pairs(NamedTuple):
    """The pairs of a head's values.

    With the pairs (a, b) and (c, d), the values are (a, c, b, d) for "centred", otherwise
    (a, b, c, d).
    """

    number_h: np.ndarray  # pair of each value
    sign_h: np.ndarray  # -1 for the left value of a pair, 1 for the right one


def build_pairs(kind: str | None, head_dim: int) -> Pairs:
    """Return the pairs of a head's values."""
    value_h = np.arange(head_dim)
    if kind == "centred":
        half = head_dim // 2
        number_h = value_h % half
        is_left_h = value_h < half
    else:
        number_h = value_h // 2
        is_left_h = value_h % 2 == 0
    sign_h = np.where(is_left_h, -1, 1).astype(np.float32)
    return Pairs(number_h, sign_h)


def swap_by_flip(x_BSTh: Array, kind: str | None) -> Array:
    """Return the values whose pairs have changed sides.

    XLA for GPUs joins the flip with other operations in one kernel at the speed of memory. Stacking
    the turned sides takes a kernel nearly twice as long.
    """
    if kind == "centred":
        pair_shape = (2, -1)
        pair_axis = 3
    else:
        pair_shape = (-1, 2)
        pair_axis = 4
    pairs = x_BSTh.reshape(*x_BSTh.shape[:3], *pair_shape)
    return jnp.flip(pairs, pair_axis).reshape(x_BSTh.shape)


def swap_by_product(x_BSE: Array, pairs: Pairs, num_heads: int) -> Array:
    """Return `swap_by_flip` of all heads without an axis for the pairs; exact in bfloat16."""
    is_pair_hh = pairs.number_h[:, None] == pairs.number_h
    differ_hh = pairs.sign_h[:, None] != pairs.sign_h
    swap_hh = is_pair_hh & differ_hh
    swap_EE = np.kron(np.eye(num_heads), swap_hh)
    return x_BSE @ jnp.asarray(swap_EE, x_BSE.dtype)


def compute_rotary_angles(
    kind: str,
    grid: Grid,
    head_dim: int,
    *,
    has_class_token: bool,
    reference_grid: Grid | None = None,
) -> np.ndarray:
    """Return the angles that turn the pairs of a head's values, float32 (N, h / 2).

    The first half is one coordinate times frequencies that fall geometrically from 1, the second
    half the other.

    Args:
      kind: "centred" has coordinates from -1 to 1, rows first, and frequencies 2 pi / 100**k
        (DINOv3); "grid" scales rows and columns to 16, rows first (EVA-02); "index" counts columns
        first, from 1 if there is a class token (Perception Encoder); both with 1 / 10000**k.
      grid: rows and columns of patches.
      head_dim: divisible by 4.
      has_class_token: the class token itself is not turned.
      reference_grid: rows and columns that "index" is scaled to; None: `grid`.
    """
    exponents = np.arange(head_dim // 4) * 4 / head_dim
    if kind == "centred":
        frequencies = 2 * np.pi * CENTRED_BASE**-exponents
    else:
        frequencies = BASE**-exponents

    first_index = int(has_class_token)
    sides = []
    for length, reference_length in zip(grid, reference_grid or grid, strict=True):
        index = np.arange(length, dtype=np.float64)
        if kind == "centred":
            side = 2 * (index + 0.5) / length - 1
        elif kind == "grid":
            side = index * ROPE_GRID_SIDE / length
        else:
            side = (index + first_index) * (reference_length / length)
        sides.append(side)
    row_hw, column_hw = np.meshgrid(*sides, indexing="ij")

    coordinates = [row_hw.ravel(), column_hw.ravel()]
    if kind == "index":
        coordinates.reverse()
    halves = [np.outer(coordinate_N, frequencies) for coordinate_N in coordinates]
    angles_Np = np.concatenate(halves, axis=1)
    return angles_Np.astype(np.float32)


# Building and adding.

POSITIONS: dict[str, Callable[..., Positions]] = {
    "learned_1d": LearnedPositions1D,
    "learned_2d": LearnedPositions2D,
    "sincos2d": FixedPositions,
    "none": FixedPositions,
    "relative": FixedPositions,  # adds nothing
}


def build_table(a: Architecture, rngs: nnx.Rngs, *shape: int) -> nnx.Param:
    """Return learned positions, with the standard deviation of an architecture."""
    table = a.position_stddev * jax.random.normal(rngs.params(), shape)
    return nnx.Param(table)


def build_positions(a: Architecture, *, rngs: nnx.Rngs) -> Positions:
    """Return the position embedding, which is built in or a user's.

    A user's class has the constructor and call of `LearnedPositions1D`.
    """
    kind = a.position_embedding
    if kind in POSITIONS:
        return POSITIONS[kind](a, rngs=rngs)

    from vit_jax.imports.references import resolve

    positions: Positions = resolve(kind, "config.model.position_embedding")(a, rngs=rngs)
    return positions


def find_kept_tokens(kept_BM: Array | None, prefix_length: int) -> Array | None:
    """Return the indices of prefix tokens and kept patches in the complete sequence, (B, S).

    None stands for all patches, and for all tokens.
    """
    if kept_BM is None:
        return None
    patch_BM = kept_BM + prefix_length
    shape_BP = (len(kept_BM), prefix_length)
    prefix_BP = jnp.broadcast_to(jnp.arange(prefix_length, dtype=kept_BM.dtype), shape_BP)
    return jnp.concatenate([prefix_BP, patch_BM], axis=1)


def select_tokens(table_SX: T, token_BS: Array | None) -> T | Array:
    """Return the rows of a table for the tokens of each image, (B, S, X); None: the table."""
    if token_BS is None:
        return table_SX
    return jnp.asarray(table_SX)[token_BS]


def add_positions(
    tokens_BSD: Array,
    positions: Positions | None,
    token_BS: Array | None = None,
) -> Array:
    """Add positions to tokens; without a module return the tokens.

    Raises:
      ValueError: the position embedding returns another shape.
    """
    if positions is None:
        return tokens_BSD

    positions_1SD = positions()
    if token_BS is not None:
        positions_BSD = select_tokens(positions_1SD[0], token_BS)
        return tokens_BSD + positions_BSD.astype(tokens_BSD.dtype)

    expected = (1, *tokens_BSD.shape[1:])
    if positions_1SD.shape != expected:
        name = type(positions).__name__
        raise ValueError(f"{name} returns positions {positions_1SD.shape} for {expected}.")
    return tokens_BSD + positions_1SD.astype(tokens_BSD.dtype)
