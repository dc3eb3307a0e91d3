# SPDX-License-Identifier: Apache-2.0
"""Transport: how a pass gets the rows of remote shards, and sends their gradients home.

===========  =======================================  ============================================
transport    shards                                   messages
===========  =======================================  ============================================
`ByRank`     one for each rank                        one per shard, tensor and direction
`Whole`      own rows, and all remote rows together   one collective for all of it
===========  =======================================  ============================================

Both return at once and hand out a `Pending`. What is on its way is moved by the backend: gloo has
threads of its own for it, NCCL a stream of the device, so the thread that computes is free.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from .._typing import CanonicalEType
from ..comm import (
    Pending,
    SentRows,
    start_fetch,
    start_fetch_all,
    start_return,
    start_return_all,
)
from ..ops import add_rows
from ._topology import Halo, Shard


class Transport(ABC):
    """Rows of one halo, under way.

    Args:
        halo: The source rows.
        wire: In which dtype wider floating-point rows travel; None is their own.
    """

    #: Whether rows can be taken a few columns at a time. See [Note: column blocks].
    by_columns = True

    def __init__(self, halo: Halo, wire: torch.dtype | None = None) -> None:
        self.halo, self.plan, self.wire = halo, halo.plan, wire

    @property
    @abstractmethod
    def num_steps(self) -> int:
        """Shards of one pass, the own one included."""

    @abstractmethod
    def shards(self, etype: CanonicalEType) -> tuple[Shard, ...]:
        """The shards of a relation, in the order in which they are merged."""

    @abstractmethod
    def num_rows(self, step: int) -> int:
        """Source rows of a remote shard."""

    @abstractmethod
    def start_fetch(
        self, step: int, tensors: Sequence[Tensor], needs_grad: Sequence[bool]
    ) -> Pending:
        """Rows of a remote shard, out of whole tensors; collective."""

    @abstractmethod
    def start_return(self, step: int, grads: Sequence[Tensor]) -> Pending:
        """Gradients of the rows of a remote shard, to their owners; collective."""

    @abstractmethod
    def add_returned(self, step: int, total: Tensor, arrived: Tensor) -> None:
        """Add what `start_return` brought to ``total``, which has all own rows, in place."""


class ByRank(Transport):
    """One remote rank at a time: the memory of a shard, whatever the halo."""

    @property
    def num_steps(self) -> int:
        return self.plan.world_size

    def shards(self, etype: CanonicalEType) -> tuple[Shard, ...]:
        return self.halo.shards(etype)

    def num_rows(self, step: int) -> int:
        start, stop = self.plan.halo_range((self.plan.rank - step) % self.plan.world_size)
        return stop - start

    def start_fetch(
        self, step: int, tensors: Sequence[Tensor], needs_grad: Sequence[bool]
    ) -> Pending:
        return start_fetch(self.plan, step, tensors, self.wire)

    def start_return(self, step: int, grads: Sequence[Tensor]) -> Pending:
        return start_return(self.plan, step, grads, self.wire)

    def add_returned(self, step: int, total: Tensor, arrived: Tensor) -> None:
        reader = (self.plan.rank + step) % self.plan.world_size
        _add_at(total, self.plan.sent[reader], arrived)


class Whole(Transport):
    """The whole halo in one collective: one step after the own shard, however many ranks."""

    by_columns = False  # blocks would be a collective each

    @property
    def num_steps(self) -> int:
        return min(self.plan.world_size, 2)

    def shards(self, etype: CanonicalEType) -> tuple[Shard, ...]:
        return self.halo.halves(etype)

    def num_rows(self, step: int) -> int:
        return self.plan.num_halo

    def start_fetch(
        self, step: int, tensors: Sequence[Tensor], needs_grad: Sequence[bool]
    ) -> Pending:
        return start_fetch_all([(self.plan, t) for t in tensors], self.wire, needs_grad)

    def start_return(self, step: int, grads: Sequence[Tensor]) -> Pending:
        return start_return_all([(self.plan, grad) for grad in grads], self.wire)

    def add_returned(self, step: int, total: Tensor, arrived: Tensor) -> None:
        num_readers = sum(count > 0 for count in self.plan.send_splits)
        if total.dtype.itemsize == 2 and num_readers > 1:  # rounded once for all of them
            self.plan.add_returned(total, arrived)
            return
        parts = arrived.split(self.plan.send_splits)
        for sent, part in zip(self.plan.sent, parts, strict=True):
            _add_at(total, sent, part)


def _add_at(total: Tensor, sent: SentRows, rows: Tensor) -> None:
    """Add ``rows`` where those that were sent lie, in place; a rank reads no row twice."""
    if not sent.runs:
        add_rows(total, sent.index_on(total.device), rows)
        return
    lengths = [stop - start for start, stop in sent.runs]
    for (start, stop), some in zip(sent.runs, rows.split(lengths), strict=True):
        total[start:stop].add_(some)
