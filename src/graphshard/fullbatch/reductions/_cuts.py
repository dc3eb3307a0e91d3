# SPDX-License-Identifier: Apache-2.0
"""find_cut, find_chunks: along which dimension a pass can go block by block, and in which blocks.

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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..lazy import CopySource, EdgeRows, Leaf, LeafKey, Message, Weighted
from ..topology import WHOLE, ColumnBlock, column_blocks, most_blocks

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


class _Cuttable(Protocol):
    @property
    def cut(self) -> ColumnCut | None: ...


def find_chunks(
    reductions: Sequence[_Cuttable], leaves: Sequence[Leaf], longest_message: int
) -> tuple[list[ColumnBlock], list[int | None]]:
    """The blocks of a pass over several reductions, and the dimension of each leaf that they cut.

    Args:
        reductions: Those of the pass; if one cannot be cut, or two cut a leaf differently, no leaf
            is cut.
        leaves: The distinct leaves of all.
        longest_message: Most rows that any rank sends to any other.
    """
    whole: tuple[list[ColumnBlock], list[int | None]] = [WHOLE], [None] * len(leaves)
    agreed: dict[LeafKey, int | None] = {}
    cuts = [reduction.cut for reduction in reductions]
    for cut in cuts:
        if cut is None or any(agreed.setdefault(k, a) != a for k, a in cut.leaves.items()):
            return whole
    most = min((cut.most for cut in cuts if cut is not None), default=1)
    sources = [leaf.tensor for leaf in leaves if leaf.target == "u"]
    blocks = column_blocks(longest_message, sources, most)
    return blocks, [agreed.get(leaf.key) for leaf in leaves]
