# SPDX-License-Identifier: Apache-2.0
"""Gradients of whole tensors out of those of their rows on each shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..comm import Pending, start_return
from ..ops import add_rows, empty
from ._columns import ColumnBlock
from ._expressions import Leaf, LeafKey
from ._reductions import accumulation_dtype
from ._topology import Halo, Shard


@dataclass
class ShardGradients:
    """Gradients of one reduction with respect to what one shard saw; None where unused.

    Args:
        leaves: Leaf to its gradient.
        parameters: Gradients of parameters that the messages use.
        is_fresh: Whether each gradient of a leaf is a tensor of its own, which may be changed.
    """

    leaves: dict[LeafKey, Tensor | None]
    parameters: list[Tensor | None]
    is_fresh: bool


class GradientSums:
    """Gradients of whole leaves, added up shard by shard; those of remote rows travel home.

    Args:
        halo: The source rows.
        wanted: Leaves whose gradients are wanted.
        tensors: All leaves, whole.
        axes: Dimension of each leaf that blocks are cut along; None or absent where every block
            sees the whole leaf.
    """

    def __init__(
        self,
        halo: Halo,
        wanted: Sequence[Leaf],
        tensors: Mapping[LeafKey, Tensor],
        axes: Mapping[LeafKey, int | None],
    ) -> None:
        self.halo, self._axes = halo, axes
        self.sources = [leaf for leaf in wanted if leaf.target == "u"]
        self._tensors = {leaf.key: tensors[leaf.key] for leaf in wanted}
        self._sums: dict[LeafKey, Tensor] = {}
        self._from_shard: dict[LeafKey, Tensor] = {}
        self._fresh: set[LeafKey] = set()  # of those from the shard
        self._under_way: tuple[int, ColumnBlock, list[LeafKey], Pending] | None = None

    def add(self, shard: Shard, found: ShardGradients, block: ColumnBlock) -> None:
        """Take in what one reduction found on one block of a shard."""
        for key, grad in found.leaves.items():
            if grad is None:
                continue
            if key[0] == "u":
                before = self._from_shard.get(key)
                self._from_shard[key] = grad if before is None else before + grad
                if before is not None or found.is_fresh:
                    self._fresh.add(key)
                continue
            if key[0] == "e" and shard.eids is not None:
                total = block.of(self._sum(key), self._axes.get(key))
                total.index_add_(0, shard.eids, grad.to(total.dtype))
            else:
                self._add_whole(key, grad, block, found.is_fresh)

    def send_home(self, step: int, block: ColumnBlock) -> None:
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
                self._add_whole(key, grad, block, key in self._fresh)
            self._fresh.clear()
            return
        self._fresh.clear()
        keys, outgoing = [], []
        for leaf in self.sources:
            axis = self._axes.get(leaf.key)
            if axis is None and not block.is_last:
                continue
            found = self._from_shard.pop(leaf.key) if leaf.key in self._from_shard else None
            if found is None:
                empty = block.of(leaf.tensor[:0], axis)
                found = empty.new_zeros((self.halo.num_rows(step), *empty.shape[1:]))
            keys.append(leaf.key)
            outgoing.append(found.to(self._tensors[leaf.key].dtype))
            del found
        self.finish()
        self._under_way = (step, block, keys, start_return(self.halo.plan, step, outgoing))

    def finish(self) -> None:
        """Receive the gradients that other ranks computed for rows of this one."""
        if self._under_way is None:
            return
        step, block, keys, pending = self._under_way
        self._under_way = None
        plan = self.halo.plan
        rows = plan.send_rows((plan.rank + step) % plan.world_size)
        for key, grad in zip(keys, pending.wait(), strict=True):
            total = block.of(self._sum(key), self._axes.get(key))
            add_rows(total, rows, grad)

    def result(self, leaf: Leaf) -> Tensor:
        return self._sum(leaf.key).to(self._tensors[leaf.key].dtype)

    def _sum(self, key: LeafKey) -> Tensor:
        if key not in self._sums:
            tensor = self._tensors[key]
            dtype = accumulation_dtype(tensor.dtype)
            self._sums[key] = empty(tensor.shape, dtype, tensor.device).zero_()
        return self._sums[key]

    def _add_whole(self, key: LeafKey, grad: Tensor, block: ColumnBlock, is_fresh: bool) -> None:
        """Add to all rows of a leaf."""
        if key in self._sums or block.count > 1:
            total = block.of(self._sum(key), self._axes.get(key))
            total += grad
            return
        dtype = accumulation_dtype(grad.dtype)
        if is_fresh and grad.dtype == dtype and grad.is_contiguous():
            self._sums[key] = grad
        else:  # a copy: autograd may have given the same tensor to two leaves
            self._sums[key] = empty(grad.shape, dtype, grad.device).copy_(grad)
