"""Positions of any form as the learned table that other formats know.

Legend: h w rows and columns of patches, S sequence length, D width.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from vit_jax.config import Architecture
from vit_jax.models.positions import build_fixed_positions
from vit_jax.weights.load import Weights


def tabulate_positions(weights: Weights, *, allows_patch_table: bool = False) -> Weights:
    """Return the same network with a learned table of positions that has a row for each token.

    Other formats know no other form. With `allows_patch_table` they also know a table with rows for
    patches alone, which is then kept. A network whose only positions are rotary is unchanged.
    """
    a = weights.architecture
    if not a.has_transformer:
        return weights
    if a.position_embedding == "none" and a.rope is not None:
        return weights
    has_table = a.position_embedding == "learned_1d"
    if has_table and (a.position_tokens == "all" or allows_patch_table):
        return weights

    parameters = dict(weights.parameters)
    parameters["positions/table"] = _build_position_table(a, parameters)
    architecture = dataclasses.replace(a, position_embedding="learned_1d", position_tokens="all")
    return weights.replace_network(architecture, parameters)


def _build_position_table(
    a: Architecture,
    parameters: Mapping[str, np.ndarray],
) -> np.ndarray:
    """Return the positions of every token, (1, S, D)."""
    if a.position_embedding == "learned_1d":
        patches_1ND = parameters["positions/table"]
        return np.pad(patches_1ND, ((0, 0), (a.prefix_length, 0), (0, 0)))
    if a.position_embedding == "learned_2d":
        return _join_halves(a, parameters)
    return build_fixed_positions(
        a.position_embedding,
        a.grid,
        a.width,
        prefix_length=a.prefix_length,
    )


def _join_halves(a: Architecture, parameters: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the positions (1, S, D) of `LearnedPositions2D`, whose halves are of width D / 2."""
    shape_hwD = (*a.grid, a.width // 2)
    column_half_hwD = np.broadcast_to(parameters["positions/column_table"], shape_hwD)
    rows_h1D = parameters["positions/row_table"][:, None]
    row_half_hwD = np.broadcast_to(rows_h1D, shape_hwD)
    grid_hwD = np.concatenate([column_half_hwD, row_half_hwD], axis=-1)
    table_SD = grid_hwD.reshape(-1, a.width)
    if a.num_class_tokens:
        table_SD = np.concatenate([parameters["positions/class_row"], table_SD])
    return table_SD[None]
