# SPDX-License-Identifier: Apache-2.0
"""Gradients of whole tensors out of those of their rows on each shard."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...comm import Pending
from ...errors import RankError
from ...ops import empty
from ..lazy import Leaf, LeafKey
from ..reductions import accumulation_dtype
from ..topology import ColumnBlock, Shard
from ._source_rows import RowTransport


@dataclass
class ShardGradients:
    """Gradients of one reduction with respect to what one shard saw; None where unused.

    Args:
        leaves: By leaf.
        parameters: In the order of the pass.
        are_new: Whether the tensors are not shared, so that they may be written to.
    """

    leaves: dict[LeafKey, Tensor | None]
    parameters: list[Tensor | None]
    are_new: bool = False


class GradientSums:
    """Gradients of whole leaves, added up shard by shard; remote rows' are sent to their owners.

    Args:
        transport: How they travel.
        wanted: Leaves whose gradients are wanted.
        tensors: All leaves, whole; without values where no gradient needs them.
        axes: Dimension of each leaf that blocks are cut along; None or absent where every block
            sees the whole leaf.
        depth: Most shards whose gradients travel at once.
    """

    def __init__(
        self,
        transport: RowTransport,
        wanted: Sequence[Leaf],
        tensors: Mapping[LeafKey, Tensor],
        axes: Mapping[LeafKey, int | None],
        depth: int,
    ) -> None:
        self._transport, self._axes = transport, axes
        self._depth = depth
        self.sources = [leaf for leaf in wanted if leaf.target == "u"]
        self._tensors = {leaf.key: tensors[leaf.key] for leaf in wanted}
        self._sums: dict[LeafKey, Tensor] = {}
        self._from_shard: dict[LeafKey, Tensor] = {}
        self._new_rows: set[LeafKey] = set()
        self._pending: deque[tuple[int, ColumnBlock, list[LeafKey], Pending]] = deque()

    def add(self, shard: Shard, found: ShardGradients, block: ColumnBlock) -> None:
        """Take in what one reduction found on one block of a shard."""
        for key, grad in found.leaves.items():
            if grad is None:
                continue
            if key[0] == "u":
                self.add_to_rows(key, grad, found.are_new)
            elif key[0] == "e" and shard.eids is not None:
                total = block.of(self._sum(key), self._axes.get(key))
                total.index_add_(0, shard.eids.to(torch.int64), grad.to(total.dtype))
            else:
                self._add_whole(key, grad, block, found.are_new)

    def add_to_rows(self, key: LeafKey, grad: Tensor | None, is_new: bool = False) -> None:
        """Take in a gradient of the source rows of the shard that is worked on, if it is wanted."""
        if grad is None or key not in self._tensors:
            return
        before = self._from_shard.get(key)
        self._from_shard[key] = grad if before is None else before + grad
        if is_new or before is not None:
            self._new_rows.add(key)

    def send(self, step: int, block: ColumnBlock) -> None:
        """Add the own shard's source gradients, or start those of a remote shard on their way.

        Those of a leaf that is cut go block by block, the others with the last block.

        Args:
            step: The step that the gradients are of.
            block: The columns that were done last.
        """
        if not self.sources:
            return
        if step == 0:
            while self._from_shard:
                key, grad = self._from_shard.popitem()
                self._add_whole(key, grad, block, key in self._new_rows)
            self._new_rows.clear()
            return
        self._new_rows.clear()
        keys, outgoing = [], []
        for leaf in self.sources:
            axis = self._axes.get(leaf.key)
            if axis is None and not block.is_last:
                continue
            tensor = self._tensors[leaf.key]
            found = self._from_shard.pop(leaf.key) if leaf.key in self._from_shard else None
            if found is None:
                empty = block.of(tensor[:0], axis)
                found = empty.new_zeros((self._transport.num_rows(step), *empty.shape[1:]))
            keys.append(leaf.key)
            outgoing.append(found.to(tensor.dtype))
            del found
        while self._pending and len(self._pending) >= self._depth:
            self._receive()
        pending = self._transport.start_return(step, outgoing)
        self._pending.append((step, block, keys, pending))
        if self._depth == 0:
            pending.wait()  # and added when it would be otherwise: the same sums to the bit

    def finish(self) -> None:
        """Receive all gradients that other ranks computed for rows of this one."""
        while self._pending:
            self._receive()

    def abandon(self) -> None:
        """After an error: no message of this pass may meet those of a later one."""
        while self._pending:
            with contextlib.suppress(RankError):
                self._pending.popleft()[-1].wait()

    def _receive(self) -> None:
        step, block, keys, pending = self._pending.popleft()
        for key, grad in zip(keys, pending.wait(), strict=True):
            total = block.of(self._sum(key), self._axes.get(key))
            self._transport.add_returned(step, total, grad)

    def result(self, leaf: Leaf) -> Tensor:
        return self._sum(leaf.key).to(self._tensors[leaf.key].dtype)

    def _dtype(self, key: LeafKey) -> torch.dtype:
        dtype = self._tensors[key].dtype
        return accumulation_dtype(dtype) if self._transport.by_columns or key[0] != "u" else dtype

    def _sum(self, key: LeafKey) -> Tensor:
        if key not in self._sums:
            tensor = self._tensors[key]
            self._sums[key] = empty(tensor.shape, self._dtype(key), tensor.device).zero_()
        return self._sums[key]

    def _add_whole(self, key: LeafKey, grad: Tensor, block: ColumnBlock, is_new: bool) -> None:
        """Add to all rows of a leaf."""
        if key in self._sums or block.count > 1:
            total = block.of(self._sum(key), self._axes.get(key))
            total += grad
            return
        # A copy, unless it is new: autograd may have given the same tensor to two leaves.
        dtype = self._dtype(key)
        if is_new and grad.dtype == dtype and grad.is_contiguous():
            self._sums[key] = grad
        else:
            self._sums[key] = empty(grad.shape, dtype, grad.device).copy_(grad)
