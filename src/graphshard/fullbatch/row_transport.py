# SPDX-License-Identifier: Apache-2.0
"""How source rows travel in a pass, shard by shard.

=====================  =======================================  =================================
transport              shards                                   messages
=====================  =======================================  =================================
`PairwiseTransport`    one for each rank                        one per shard, tensor, direction
`CollectiveTransport`  own rows, and all remote rows together   one collective for all of it
=====================  =======================================  =================================

Both start an exchange and hand out a `Pending`. Rows on their way are moved by the backend: gloo
has threads of its own for it, NCCL a stream of the device, so the thread that computes is free.
Where gloo sends what is on a GPU, rows are copied to and from host memory on a stream of their own,
beside the kernels of other shards.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Hashable, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import TypeAlias

import torch
from torch import Tensor

from .._base.typing import CanonicalEType
from ..comm import Pending, SentRows, start_fetch, start_fetch_all, start_return, start_return_all
from ..comm.collectives import Wire, copying_ahead, keyed, row_bytes, rows_are_ready, wire_row_bytes
from ..comm.halo import are_messages
from ..errors import RankError
from ..ops import Adjacency, add_rows
from .column_blocks import ColumnBlock
from .constant_cache import ConstantCache
from .fewest_rows import FewestRows, RowsAndStates, find_rows_and_states
from .reductions import LeafKey, Reduction
from .softmax import AttentionSum, PartialStates
from .topology import Halo, Shard

_CPU = torch.device("cpu")

LEAST_SAVED = 1 << 16
"""Bytes that a rank must save in a pass for states of destinations to travel: a round's worth."""

SourceRows: TypeAlias = dict[LeafKey, Tensor]
"""Rows of each source leaf."""

Visit: TypeAlias = tuple[int, ColumnBlock]
"""A step of a pass, and the columns to take in it."""


class RowTransport(ABC):
    """Exchange of the rows of one halo, shard by shard.

    Args:
        wire: In which dtype wider floating-point rows travel; None is their own.
        keeps_rows: Keep what was fetched for the backward, instead of fetching it again.
        fewest: What travels in place of the rows of the halo; None for these.
    """

    #: Whether rows can be taken a few columns at a time. See [Note: column blocks].
    by_columns = True
    #: Whether gradients can be differentiated, and those of remote rows are found first.
    by_collective = False
    #: Whether remote rows are outputs of a pass too.
    returns_rows = False
    #: Tells edges of one relation apart that are not all of it.
    edges_number: int | None = None
    #: Rows that each step brings; step 0, of the own shard, brings none.
    num_rows: Sequence[int]

    def __init__(
        self,
        halo: Halo,
        wire: Wire = None,
        keeps_rows: bool = False,
        fewest: FewestRows | None = None,
    ) -> None:
        self.halo, self.wire, self.keeps_rows, self.fewest = halo, wire, keeps_rows, fewest
        self.plan = halo.plan if fewest is None else fewest.plan
        self.longest_message = (halo if fewest is None else fewest).longest_message
        #: What rows that are summed where they are are multiplied by, as `FewestRows.sent_weights`.
        self.weights: Tensor | None = None
        #: Shards of one pass, the own one included.
        self.num_steps = halo.plan.world_size
        self._shards: dict[CanonicalEType, tuple[Shard, ...]] = {}
        #: Blocks of passes, and the dimension of each leaf that they cut, by call sites.
        self.chunks: dict[Hashable, tuple[list[ColumnBlock], list[int | None]]] = {}

    def shards(self, etype: CanonicalEType) -> tuple[Shard, ...]:
        """The shards of a relation, in the order in which they are merged."""
        if etype not in self._shards:
            self._shards[etype] = self._find_shards(etype)
        return self._shards[etype]

    @abstractmethod
    def _find_shards(self, etype: CanonicalEType) -> tuple[Shard, ...]: ...

    def bind(self, reduction: Reduction) -> None:  # noqa: B027
        """Let a reduction send what it sends besides rows."""

    def whole_adjacency(self, etype: CanonicalEType) -> Adjacency:
        """All edges of a relation, from extended rows to destinations."""
        return self.halo.adjacency(etype)

    def keyed(self, is_constant: bool = False) -> RowTransport:
        """The same for one pass, which rounds at random in a way of its own; see `keyed`.

        Args:
            is_constant: Whether what travels stays for the run: the mean of many roundings would
                not be exact, so it is not rounded to int8.
        """
        wire = None if is_constant and self.wire == torch.int8 else keyed(self.wire)
        if wire is self.wire:
            return self
        transport = copy.copy(self)
        transport.wire = wire
        return transport

    def weighted(
        self, rows: Tensor, weights: Tensor, constants: ConstantCache
    ) -> RowTransport | None:
        """The same for sums of rows times fixed weights; None where these weigh more.

        Collective: the weights of the edges that other ranks sum are sent to them, anew for each
        pass unless they are constant.

        Args:
            rows: ``[num_owned, ...]``.
            weights: Of the edges of the only relation, by local edge id.
        """
        fewest = self.fewest
        if fewest is None or fewest.partial_edges is None:
            return None
        transport, key = copy.copy(self), ("weights", fewest.plan.serial, self.edges_number)
        if constants.is_constant([weights]):
            transport.weights = constants.get(key, [weights])
        else:
            num_rows, num_edges = fewest.saved
            exchanges = 2 if torch.is_grad_enabled() and rows.requires_grad else 1
            of_row = wire_row_bytes(rows, self.wire)
            if num_rows * of_row * exchanges <= num_edges * row_bytes(weights):
                return None
        if transport.weights is None:
            transport.weights = fewest.sent_weights(weights, self.partial_edges())
            if constants.is_constant([weights]):
                constants.put(key, [weights], transport.weights)
        return transport

    def partial_edges(self) -> Tensor:
        """Ids of the edges that other ranks sum, in their order."""
        assert self.fewest is not None
        assert self.fewest.partial_edges is not None
        return self.fewest.partial_edges

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

    def prefetched(
        self,
        visits: Sequence[Visit],
        depth: int,
        whole: SourceRows,
        axes: Mapping[LeafKey, int | None],
        needs_grad: Mapping[LeafKey, bool],
        fetched_before: SourceRows,
    ) -> Generator[tuple[int, ColumnBlock, SourceRows], None, None]:
        """Each visit with its source rows, those of the next visits being fetched meanwhile.

        Close it after an error, so that no message of this pass meets those of a later one.

        Args:
            visits: The own shard first, then remote ones, each in all its blocks.
            depth: For how many visits rows are fetched ahead.
            whole: Own rows of each source leaf.
            axes: Dimension of each leaf that blocks are cut along; None or absent for whole ones.
            needs_grad: Whether gradients of a leaf's rows will be returned.
            fetched_before: Rows of the only remote shard that are here already.
        """
        cut = [key for key in whole if axes.get(key) is not None]

        def start(visit: Visit) -> tuple[list[LeafKey], Pending]:
            step, block = visit
            # All leaves with the first block of a shard, then those that are cut.
            keys = [key for key in (cut if block.index else whole) if key not in fetched_before]
            parts = [
                whole[key] if block.count == 1 else block.of(whole[key], axes.get(key))
                for key in keys
            ]
            with copying_ahead(device, are_here) if are_here is not None else nullcontext():
                return keys, self.start_fetch(step, parts, [needs_grad[key] for key in keys])

        device = next(iter(whole.values())).device if whole else _CPU
        on_gpu = device.type != "cpu"
        are_here = rows_are_ready(self.plan.state, device) if on_gpu else None
        computed: deque[torch.cuda.Event | None] = deque()
        rows = dict(whole)
        pending: deque[tuple[list[LeafKey], Pending]] = deque()
        started = 1  # the rows of the first visit are here
        try:
            for number, (step, block) in enumerate(visits):
                if number and whole:
                    if not pending:
                        pending.append(start(visits[number]))
                        started = number + 1
                    if len(computed) > 1 and (event := computed.popleft()) is not None:
                        # The host must not run ahead of the device, or the rows of many visits
                        # would be there at once: one is computed, and one comes.
                        event.synchronize()
                    keys, arriving = pending.popleft()
                    if step and block.index == 0:
                        rows |= fetched_before
                    rows |= zip(keys, arriving.wait(), strict=True)
                    del arriving
                while whole and started < len(visits) and started <= number + depth:
                    pending.append(start(visits[started]))
                    started += 1
                yield step, block, rows
                if on_gpu:
                    computed.append(rows_are_ready(self.plan.state, device))
                # Before the next ones are waited for. What is not cut came with the first block
                # of its shard, and stays for the others.
                if number + 1 < len(visits):
                    renewed = cut if visits[number + 1][1].index else whole
                    rows = {key: t for key, t in rows.items() if key not in renewed}
        finally:
            for _, arriving in pending:
                with suppress(RankError):
                    arriving.wait()


class PairwiseTransport(RowTransport):
    """One remote rank at a time: the memory of a shard, whatever the halo."""

    def __init__(
        self,
        halo: Halo,
        wire: Wire = None,
        keeps_rows: bool = False,
        fewest: FewestRows | None = None,
    ) -> None:
        super().__init__(halo, wire, keeps_rows, fewest)
        plan, rank, num_ranks = self.plan, self.plan.rank, self.plan.world_size
        steps = range(num_ranks)
        self.num_rows = [plan.recv_splits[(rank - step) % num_ranks] for step in steps]
        self._readers = [(rank + step) % num_ranks for step in steps]
        self._sent = [plan.sent[reader] for reader in self._readers]

    def _find_shards(self, etype: CanonicalEType) -> tuple[Shard, ...]:
        return (self.halo if self.fewest is None else self.fewest).shards(etype)

    def start_fetch(
        self, step: int, tensors: Sequence[Tensor], needs_grad: Sequence[bool]
    ) -> Pending:
        if self.fewest is not None:
            reader, weights = self._readers[step], self.weights
            tensors = [self.fewest.made(tensor, reader, weights) for tensor in tensors]
        return start_fetch(self.plan, step, tensors, self.wire)

    def start_return(self, step: int, grads: Sequence[Tensor]) -> Pending:
        return start_return(self.plan, step, grads, self.wire)

    def add_returned(self, step: int, total: Tensor, arrived: Tensor) -> None:
        if self.fewest is not None:
            self.fewest.add_returned(total, arrived, self._readers[step], self.weights)
            return
        _add_at(total, self._sent[step], arrived)


class CollectiveTransport(RowTransport):
    """The whole halo in one collective: one step after the own shard, however many ranks."""

    by_columns = False  # blocks would be a collective each
    by_collective = True

    def __init__(self, halo: Halo, wire: Wire = None, fewest: FewestRows | None = None) -> None:
        super().__init__(halo, wire, keeps_rows=True, fewest=fewest)
        self.num_steps = min(self.num_steps, 2)
        self.num_rows = [0, self.plan.num_halo]
        self.returns_rows = fewest is None

    def _find_shards(self, etype: CanonicalEType) -> tuple[Shard, ...]:
        return (self.halo if self.fewest is None else self.fewest).halves(etype)

    def start_fetch(
        self, step: int, tensors: Sequence[Tensor], needs_grad: Sequence[bool]
    ) -> Pending:
        if self.fewest is not None:
            tensors = [self.fewest.made(tensor, None, self.weights) for tensor in tensors]
        return start_fetch_all([(self.plan, t) for t in tensors], self.wire, needs_grad)

    def start_return(self, step: int, grads: Sequence[Tensor]) -> Pending:
        return start_return_all([(self.plan, grad) for grad in grads], self.wire)

    def add_returned(self, step: int, total: Tensor, arrived: Tensor) -> None:
        if self.fewest is not None:
            self.fewest.add_returned(total, arrived, None, self.weights)
            return
        num_readers = sum(count > 0 for count in self.plan.send_splits)
        if total.dtype.itemsize == 2 and num_readers > 1:  # rounded once for all of them
            self.plan.add_returned(total, arrived)
            return
        parts = arrived.split(self.plan.send_splits)
        for sent, part in zip(self.plan.sent, parts, strict=True):
            _add_at(total, sent, part)


class StatesTransport(CollectiveTransport):
    """Rows of an attention beside states of destinations, see [Note: fewest rows]."""

    def __init__(self, split: RowsAndStates, wire: Wire = None) -> None:
        super().__init__(split.halo, wire)
        self.split, self.plan = split, split.rows
        self.num_rows, self.returns_rows = [0, split.rows.num_halo], False

    def _find_shards(self, etype: CanonicalEType) -> tuple[Shard, ...]:
        return self.split.halves

    def bind(self, reduction: Reduction) -> None:
        assert isinstance(reduction, AttentionSum)
        reduction.states = PartialStates(self.split, self.wire, self.partial_edges())

    def partial_edges(self) -> Tensor:
        return self.split.partial_edges


def split_of_attention(
    halo: Halo, reduction: Reduction, wire: Wire, constants: ConstantCache
) -> RowsAndStates | None:
    """What travels of a pass in one-shot mode beside rows; None where these travel alone.

    Collective the first time for a halo. See [Note: fewest rows].
    """
    if not isinstance(reduction, AttentionSum) or halo.plan.world_size == 1:
        return None
    if reduction.reads_edges:
        return None
    sources = [leaf.tensor for leaf in reduction.leaves if leaf.target == "u"]
    if any(constants.is_constant([tensor]) for tensor in sources):
        return None
    if not are_messages([(halo.plan, tensor) for tensor in sources], wire):
        return None
    of_row, of_state = reduction.bytes_each(wire)
    if halo.plan.most_rows * of_row < LEAST_SAVED:  # less is read, and can be saved
        return None
    split = halo.made_once(find_rows_and_states)
    if split is None:
        return None
    num_read, num_rows, num_states = split.totals
    saved = (num_read - num_rows) * of_row - num_states * of_state
    return split if saved >= LEAST_SAVED * halo.plan.world_size else None


def _add_at(total: Tensor, sent: SentRows, rows: Tensor) -> None:
    """Add ``rows`` where those that were sent lie, in place; a rank reads no row twice."""
    if not sent.runs:
        add_rows(total, sent.index_on(total.device), rows)
        return
    first = 0
    for start, stop in sent.runs:
        total[start:stop].add_(rows.narrow(0, first, stop - start))
        first += stop - start
