# SPDX-License-Identifier: Apache-2.0
"""Gradients of whole tensors out of those of their rows on each shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, zeros_like

from ..comm import Pending, start_return
from ._columns import ColumnBlock
from ._expressions import Leaf, LeafKey
from ._reductions import accumulation_dtype
from ._topology import Halo, Shard


@dataclass
class ShardGradients:
    """Gradients of one reduction with respect to what one shard saw; None where unused."""

    leaves: dict[LeafKey, Tensor | None]
    parameters: list[Tensor | None]


class GradientSums:
    """Gradients of whole leaves, added up shard by shard; those of remote rows travel home."""

    def __init__(
        self, halo: Halo, wanted: Sequence[Leaf], tensors: Mapping[LeafKey, Tensor]
    ) -> None:
        self.halo = halo
        self.sources = [leaf for leaf in wanted if leaf.target == "u"]
        self._dtypes = {leaf.key: tensors[leaf.key].dtype for leaf in wanted}
        self._sums = {
            leaf.key: zeros_like(
                tensors[leaf.key],
                dtype=accumulation_dtype(tensors[leaf.key].dtype),
            )
            for leaf in wanted
        }
        self._under_way: tuple[int, ColumnBlock, Pending] | None = None

    def add(
        self,
        shard: Shard,
        found: ShardGradients,
        sources: dict[LeafKey, Tensor | None],
    ) -> None:
        for key, grad in found.leaves.items():
            if grad is None:
                continue
            if key[0] == "u":
                before = sources[key]
                sources[key] = grad if before is None else before + grad
            elif key[0] == "e" and shard.eids is not None:
                self._sums[key].index_add_(0, shard.eids, grad.to(self._sums[key].dtype))
            else:
                self._sums[key] += grad

    def send_home(
        self, step: int, sources: Mapping[LeafKey, Tensor | None], block: ColumnBlock
    ) -> None:
        """Add the own shard's source gradients, or start those of a remote shard on their way.

        Args:
            step: The step that the gradients are of.
            sources: One per source leaf; None for zeros.
            block: The columns that they are of.
        """
        if not self.sources:
            return
        if step == 0:
            for leaf in self.sources:
                grad = sources[leaf.key]
                if grad is not None:
                    self._sums[leaf.key] += grad
            return
        outgoing = []
        for leaf in self.sources:
            grad = sources[leaf.key]
            if grad is None:
                empty = block.of(leaf.tensor[:0])
                grad = empty.new_zeros((self.halo.num_rows(step), *empty.shape[1:]))
            outgoing.append(grad.to(self._dtypes[leaf.key]))
        self.finish()
        self._under_way = (step, block, start_return(self.halo.plan, step, outgoing))

    def finish(self) -> None:
        """Receive the gradients that other ranks computed for rows of this one."""
        if self._under_way is None:
            return
        step, block, pending = self._under_way
        self._under_way = None
        plan = self.halo.plan
        rows = plan.send_rows((plan.rank + step) % plan.world_size)
        for leaf, grad in zip(self.sources, pending.wait(), strict=True):
            total = block.of(self._sums[leaf.key])
            total.index_add_(0, rows, grad.to(total.dtype))

    def result(self, leaf: Leaf) -> Tensor:
        return self._sums[leaf.key].to(self._dtypes[leaf.key])
