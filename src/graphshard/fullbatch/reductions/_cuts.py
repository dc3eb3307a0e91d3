# SPDX-License-Identifier: Apache-2.0
"""find_cut: along which dimension messages can be computed block by block.

Blocks are columns or heads of the source rows. What a message has per edge, such as a weight, is
computed whole for every block where it has one entry along that dimension; a stored value with as
many entries is cut with the rows; anything else is not cut.

=====================  ==============================  ============================
messages               cut along                       whole in every block
=====================  ==============================  ============================
copies of rows         columns or heads                nothing
rows times weights     where a weight has one entry    weights and what they read
fused attention        heads; one head: columns        nothing; scores
=====================  ==============================  ============================

Dimensions are counted from the right, as rows broadcast: 1 is the last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..lazy import CopySource, EdgeRows, LeafKey, Message, Weighted
from ..topology import most_blocks

_HEADS, _COLUMNS = 2, 1


@dataclass(frozen=True)
class ColumnCut:
    """How the messages of one relation are cut into blocks.

    Args:
        axis: Dimension of the messages, and of their sums.
        leaves: Dimension of each tensor that the messages are made of; None for whole ones.
        most: Most blocks that leave each one wide enough.
    """

    axis: int
    leaves: Mapping[LeafKey, int | None]
    most: int


def find_cut(message: Message) -> ColumnCut | None:
    """The cut that makes most blocks, or None where there is none; the same on every rank."""
    if not isinstance(message, CopySource | Weighted):
        return None
    found = [cut for axis in (_HEADS, _COLUMNS) if (cut := _cut_along(message, axis))]
    return max(found, key=lambda cut: cut.most, default=None)


def _cut_along(message: CopySource | Weighted, axis: int) -> ColumnCut | None:
    row = message.source.tensor.shape[1:]
    if len(row) < axis:
        return None
    leaves: dict[LeafKey, int | None] = {leaf.key: None for leaf in message.leaves()}
    if isinstance(message, Weighted):
        value = message.value
        if len(value.shape) > axis and value.shape[-axis] != 1:
            if not isinstance(value, EdgeRows) or value.shape[-axis] != row[-axis]:
                return None
            leaves[value.leaf.key] = axis
        elif message.source.key in {leaf.key for leaf in message.value_leaves()}:
            return None  # the weights read the rows whole
    leaves[message.source.key] = axis
    most = most_blocks(row[-axis], row.numel())
    return ColumnCut(axis, leaves, most) if most > 1 else None
