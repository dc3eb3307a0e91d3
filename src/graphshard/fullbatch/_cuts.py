# SPDX-License-Identifier: Apache-2.0
"""find_cut: along which dimension messages can be computed block by block.

Block ``b`` of the messages must follow from block ``b`` of the tensors that they are made of, and
from tensors that every block reads whole. So the search starts at a dimension of the messages and
goes down: a function of single entries hands the dimension to its operands; a reduction of other
dimensions hands it on, too; an operand that has one entry there (it is broadcast) is computed
whole for every block; anything else cannot be cut.

=====================  ==============================  ============================
messages               cut along                       whole in every block
=====================  ==============================  ============================
copies of rows         columns                         nothing
GAT, several heads     heads of rows and scores        nothing
GAT, one head; AGNN    columns of rows                 scores and what they read
=====================  ==============================  ============================

Dimensions are counted from the right, as rows broadcast: 1 is the last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ._columns import most_blocks
from ._expressions import (
    Apply,
    Dropout,
    EdgeRows,
    Endpoint,
    Expression,
    Leaf,
    LeafKey,
    Reshape,
    Sddmm,
    Shifted,
    leaves_of,
)
from ._messages import CopySource, Message, PerEdge, Weighted
from ._row_wise import ELEMENTWISE, LAST_DIM_REDUCTIONS


@dataclass(frozen=True)
class Cut:
    """How the messages of one relation are cut into blocks.

    Args:
        axis: Dimension of the messages, and of their sums.
        leaves: Dimension of each tensor that the messages are made of; None for whole ones.
        nodes: Dimension of each expression, by ``id``; those that are not here are whole.
        most: Most blocks that leave each one wide enough.
    """

    axis: int
    leaves: Mapping[LeafKey, int | None]
    nodes: Mapping[int, int]
    most: int


def find_cut(message: Message) -> Cut | None:
    """The cut that makes most blocks, or None where there is none; the same on every rank."""
    row = _row_of(message)
    found = [cut for axis in range(len(row), 0, -1) if (cut := _cut_along(message, row, axis))]
    return max(found, key=lambda cut: cut.most, default=None)


def _row_of(message: Message) -> Sequence[int]:
    """Shape of one message; empty for messages that cannot be cut."""
    if isinstance(message, CopySource):
        return message.source.tensor.shape[1:]
    if isinstance(message, Weighted):
        return torch.broadcast_shapes(message.source.tensor.shape[1:], message.value.shape[1:])
    return message.value.shape[1:] if isinstance(message, PerEdge) else ()


def _cut_along(message: Message, row: Sequence[int], axis: int) -> Cut | None:
    if row[-axis] < 2:
        return None
    search = _Search(row[-axis])
    cuts = True
    if isinstance(message, CopySource | Weighted):
        cuts = search.leaf(message.source, axis)
    if isinstance(message, Weighted | PerEdge):
        cuts = cuts and search.node(message.value, axis)
    sources = [
        leaf.tensor
        for leaf in message.leaves()
        if leaf.target == "u" and search.leaves.get(leaf.key) is not None
    ]
    most = most_blocks(row[-axis], sum(math.prod(t.shape[1:]) for t in sources))
    return Cut(axis, search.leaves, search.nodes, most) if cuts and most > 1 else None


class _Search:
    """One attempt; each method says whether its part can be cut, and notes how."""

    def __init__(self, extent: int) -> None:
        self.extent = extent
        self.leaves: dict[LeafKey, int | None] = {}
        self.nodes: dict[int, int] = {}

    def leaf(self, leaf: Leaf, axis: int) -> bool:
        row = leaf.tensor.shape if leaf.target == "c" else leaf.tensor.shape[1:]
        if _is_broadcast(row, axis):
            return self._note(leaf, None)
        return row[-axis] == self.extent and self._note(leaf, axis)

    def _note(self, leaf: Leaf, axis: int | None) -> bool:
        """Whether all who read the leaf agree on how."""
        return self.leaves.setdefault(leaf.key, axis) == axis

    def node(self, node: Expression, axis: int) -> bool:
        if _is_broadcast(node.shape[1:], axis):
            return all(self._note(leaf, None) for leaf in leaves_of([node]))
        if node.shape[-axis] != self.extent or self.nodes.setdefault(id(node), axis) != axis:
            return False
        if isinstance(node, Endpoint | EdgeRows):
            return self.leaf(node.leaf, axis)
        if isinstance(node, Sddmm):  # a dot product keeps its last dimension, with one entry
            return self.node(node.lhs, axis) and self.node(node.rhs, axis)
        if isinstance(node, Dropout):
            return self.node(node.child, axis)
        if isinstance(node, Shifted):
            return self.node(node.scores, axis)
        if isinstance(node, Reshape):
            before = _before_reshape(node, axis)
            return before is not None and self.node(node.child, before)
        return isinstance(node, Apply) and self._apply(node, axis)

    def _apply(self, node: Apply, axis: int) -> bool:
        name = getattr(node.function, "__name__", "")
        if name in LAST_DIM_REDUCTIONS:
            before = _before_reduction(node, axis)
            child = node.args[0]
            return before is not None and not node.leaves() and self.node(child, before)
        if name not in ELEMENTWISE:
            return False
        return all(
            len(child.shape) == len(node.shape) and self.node(child, axis)
            for child in node.children()
        ) and all(self.leaf(leaf, axis) for leaf in node.leaves())


def _is_broadcast(row: Sequence[int], axis: int) -> bool:
    return len(row) < axis or row[-axis] == 1


def _before_reshape(node: Reshape, axis: int) -> int | None:
    """Which dimension of the child a dimension of a reshaped row is, if it is one."""
    place = len(node.shape) - axis
    outer, extent = math.prod(node.shape[1:place]), node.shape[place]
    before = node.child.shape
    for dim in range(1, len(before)):
        if before[dim] == extent and math.prod(before[1:dim]) == outer:
            return len(before) - dim
    return None


def _before_reduction(node: Apply, axis: int) -> int | None:
    """Which dimension of the child a dimension of a reduced row is; None for a reduced one."""
    (child,) = node.children()
    num_dims = len(child.shape)
    dims = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    if dims is None or child is not node.args[0]:
        return None
    reduced = {dim % num_dims for dim in ([dims] if isinstance(dims, int) else dims)}
    kept = list(range(num_dims))
    if len(node.shape) < num_dims:
        kept = [dim for dim in kept if dim not in reduced]
    dim = kept[-axis]
    return None if dim in reduced else num_dims - dim
