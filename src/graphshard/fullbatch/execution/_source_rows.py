# SPDX-License-Identifier: Apache-2.0
"""Source rows of remote shards: how a pass gets them and returns their gradients, and their cache.

All that sequential and one-shot mode do differently is in the transport:

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

Rows that are here already are in a `HaloRowCache`, so that what several calls read is fetched once:
those of constant tensors, and those of source fields in a ``local_scope``. How long which are kept
says [Note: what is kept between calls].

[Note: fields travel together]
    A layer often reads several source fields one after the other: GAT reads ``el`` for the scores
    and ``ft`` for the sum. The first read sends along every source field that was set since the
    innermost ``local_scope`` began, so a layer costs one exchange forward and one backward. Fields
    set through ``dstdata`` do not travel, nor do fields from outside the scope until they are read.
"""

from __future__ import annotations

import contextlib
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..._base.typing import CanonicalEType
from ...comm import (
    Pending,
    SentRows,
    fetch_halo,
    start_fetch,
    start_fetch_all,
    start_return,
    start_return_all,
)
from ...comm.collectives import copying_ahead, rows_are_ready
from ...errors import RankError
from ...graph.frame import Frame, version_of
from ...ops import add_rows
from ..lazy import LeafKey
from ..topology import ColumnBlock, Halo, Shard, ShardStructure

SourceRows: TypeAlias = dict[LeafKey, Tensor]
"""Rows of each source leaf."""

_CPU = torch.device("cpu")

Visit: TypeAlias = tuple[int, ColumnBlock]
"""A step of a pass, and the columns to take in it."""


class RowTransport(ABC):
    """Exchange of the rows of one halo, shard by shard.

    Args:
        halo: The source rows.
        wire: In which dtype wider floating-point rows travel; None is their own.
        keeps_rows: Keep what was fetched for the backward, instead of fetching it again.
    """

    #: Whether rows can be taken a few columns at a time. See [Note: column blocks].
    by_columns = True
    #: Whether remote rows are outputs of a pass too, and gradients can be differentiated.
    returns_rows = False

    def __init__(
        self, halo: Halo, wire: torch.dtype | None = None, keeps_rows: bool = False
    ) -> None:
        self.halo, self.plan, self.wire, self.keeps_rows = halo, halo.plan, wire, keeps_rows
        self._shards: dict[CanonicalEType, tuple[Shard, ...]] = {}
        #: Blocks of passes, and the dimension of each leaf that they cut, by call sites.
        self.chunks: dict[Hashable, tuple[list[ColumnBlock], list[int | None]]] = {}

    @property
    @abstractmethod
    def num_steps(self) -> int:
        """Shards of one pass, the own one included."""

    def shards(self, etype: CanonicalEType) -> tuple[Shard, ...]:
        """The shards of a relation, in the order in which they are merged."""
        if etype not in self._shards:
            self._shards[etype] = self._find_shards(etype)
        return self._shards[etype]

    @abstractmethod
    def _find_shards(self, etype: CanonicalEType) -> tuple[Shard, ...]: ...

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

    def fetch(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """All remote rows of some tensors, differentiable to any order; collective."""
        return fetch_halo([(self.plan, tensor) for tensor in tensors], self.wire)

    def prefetched(
        self,
        visits: Sequence[Visit],
        depth: int,
        whole: SourceRows,
        axes: Mapping[LeafKey, int | None],
        needs_grad: Mapping[LeafKey, bool],
        known: SourceRows,
    ) -> Generator[tuple[int, ColumnBlock, SourceRows], None, None]:
        """Each visit with its source rows, those of the next visits being fetched meanwhile.

        Close it after an error, so that no message of this pass meets those of a later one.

        Args:
            visits: The own shard first, then remote ones, each in all its blocks.
            depth: For how many visits rows are fetched ahead.
            whole: Own rows of each source leaf.
            axes: Dimension of each leaf that blocks are cut along; None or absent for whole ones.
            needs_grad: Whether gradients of a leaf's rows will be returned.
            known: Rows of the only remote shard that are here already.
        """

        def renewed(block: ColumnBlock) -> list[LeafKey]:
            """Source leaves that change with a visit: all with a first block, then those cut."""
            return [key for key in whole if block.index == 0 or axes.get(key) is not None]

        def start(visit: Visit) -> tuple[list[LeafKey], Pending]:
            step, block = visit
            keys = [key for key in renewed(block) if key not in known]
            parts = [
                whole[key] if block.count == 1 else block.of(whole[key], axes.get(key))
                for key in keys
            ]
            with copying_ahead(device, are_here):
                return keys, self.start_fetch(step, parts, [needs_grad[key] for key in keys])

        device = next((tensor.device for tensor in whole.values()), _CPU)
        are_here = rows_are_ready(self.plan.state, device)
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
                        rows |= known
                    rows |= zip(keys, arriving.wait(), strict=True)
                    del arriving
                while whole and started < len(visits) and started <= number + depth:
                    pending.append(start(visits[started]))
                    started += 1
                yield step, block, rows
                computed.append(rows_are_ready(self.plan.state, device))
                # Before the next ones are waited for. What is not cut came with the first block
                # of its shard, and stays for the others.
                if number + 1 < len(visits):
                    replaced = renewed(visits[number + 1][1])
                    rows = {key: t for key, t in rows.items() if key not in replaced}
        finally:
            for _, arriving in pending:
                with contextlib.suppress(RankError):
                    arriving.wait()


class PairwiseTransport(RowTransport):
    """One remote rank at a time: the memory of a shard, whatever the halo."""

    @property
    def num_steps(self) -> int:
        return self.plan.world_size

    def _find_shards(self, etype: CanonicalEType) -> tuple[Shard, ...]:
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


class CollectiveTransport(RowTransport):
    """The whole halo in one collective: one step after the own shard, however many ranks.

    Args:
        halo: The source rows.
        wire: In which dtype wider floating-point rows travel; None is their own.
    """

    by_columns = False  # blocks would be a collective each
    returns_rows = True

    def __init__(self, halo: Halo, wire: torch.dtype | None = None) -> None:
        super().__init__(halo, wire, keeps_rows=True)

    @property
    def num_steps(self) -> int:
        return min(self.plan.world_size, 2)

    def _find_shards(self, etype: CanonicalEType) -> tuple[Shard, ...]:
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


@dataclass
class _HaloRows:
    """Halo rows of a field, at the version that they are of.

    See [Note: what is kept between calls].
    """

    tensor: Tensor
    version: int
    remote: Tensor
    extended: Tensor | None = None


class HaloRowCache:
    """Halo rows of constant tensors and of source fields.

    Args:
        structure: The rank's rows and edges.
        wire: In which dtype wider rows travel; None is their own.
    """

    def __init__(self, structure: ShardStructure, wire: torch.dtype | None) -> None:
        self._constants, self._wire = structure.constants, wire
        self._fields: dict[tuple[int, int], _HaloRows] = {}
        self._num_scopes = 0

    # ------------------------------------------------------------------ constants

    def known(self, halo: Halo, own: Tensor) -> Tensor | None:
        """Halo rows of a tensor that needs no gradient, if they were fetched before."""
        if not self._constants.is_constant([own]):
            return None
        return self._constants.get(("halo", id(halo)), [own])

    def keep(self, halo: Halo, own: Tensor, rows: Tensor) -> None:
        """Keep halo rows of a tensor that needs no gradient."""
        if self._constants.is_constant([own]):
            self._constants.put(("halo", id(halo)), [own], rows)

    def fetch(self, requests: Sequence[tuple[Halo, Tensor]]) -> list[Tensor]:
        """Halo rows ``[num_halo, ...]`` of each tensor, in one exchange; collective."""
        found = [self.known(halo, own) for halo, own in requests]
        missing = [i for i, rows in enumerate(found) if rows is None]
        pairs = [(requests[i][0].plan, requests[i][1]) for i in missing]
        for i, rows in zip(missing, fetch_halo(pairs, self._wire), strict=True):
            found[i] = rows
            self.keep(*requests[i], rows)
        return [rows for rows in found if rows is not None]

    def extended(self, requests: Sequence[tuple[Halo, Tensor]]) -> list[Tensor]:
        """Own and then halo rows, ``[num_extended, ...]``; with one rank the own tensor itself."""
        if all(halo.plan.world_size == 1 for halo, _ in requests):
            return [own for _, own in requests]
        rows = self.fetch(requests)
        return [torch.cat([own, part]) for (_, own), part in zip(requests, rows, strict=True)]

    # ------------------------------------------------------------------ fields

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Inside, rows of fields are kept; on leaving, also an inner scope, they are dropped."""
        self._num_scopes += 1
        try:
            yield
        finally:
            self._num_scopes -= 1
            self._fields.clear()

    @property
    def is_in_scope(self) -> bool:
        """Whether rows of fields are kept for later calls."""
        return self._num_scopes > 0

    def fields(self, halo: Halo, frame: Frame, frames: Sequence[Frame]) -> Mapping[str, Any]:
        """A source frame as one relation's edges see it: extended rows, fetched when read.

        Args:
            halo: The rows to fetch.
            frame: The source frame.
            frames: All source frames in use; rows of what is in none of them are dropped.
        """
        return _ExtendedFields(self, halo, frame, frames)

    def has(self, halo: Halo, tensor: Tensor) -> bool:
        """Whether the tensor's halo rows are here."""
        return self._find(halo, tensor) is not None

    def companions(self, halo: Halo, frame: Frame, name: str) -> list[Tensor]:
        """What else a read of field ``name`` fetches. See [Note: fields travel together]."""
        if not self.is_in_scope:
            return []
        wanted = frame[name]
        others = [frame[n] for n in frame.scope_fields() if frame.view_of(n) != "dst"]
        distinct = {id(tensor): tensor for tensor in others if tensor is not wanted}
        return [tensor for tensor in distinct.values() if not self.has(halo, tensor)]

    def put(
        self, halo: Halo, rows: Sequence[tuple[Tensor, Tensor]], frames: Sequence[Frame]
    ) -> None:
        """Keep halo rows of fields, as (field, rows) each, if a scope bounds how long."""
        if not self.is_in_scope:
            return
        in_use = {id(value) for frame in frames for value in frame.values()}
        self._fields = {k: e for k, e in self._fields.items() if id(e.tensor) in in_use}
        for tensor, remote in rows:
            entry = _HaloRows(tensor, version_of(tensor), remote)
            self._fields[id(halo), id(tensor)] = entry
            if remote.grad_fn is not None:
                remote.grad_fn.register_prehook(self._forgetting((id(halo), id(tensor)), entry))

    def _forgetting(self, key: tuple[int, int], entry: _HaloRows) -> Callable[[Any], None]:
        """A hook that drops an entry: a backward frees the graph that its rows hang on."""
        cache, dropped = weakref.ref(self), weakref.ref(entry)  # the graph holds the hook

        def forget(_: Any) -> None:
            fields = {} if (here := cache()) is None else here._fields
            if key in fields and fields[key] is dropped():
                del fields[key]

        return forget

    def _find(self, halo: Halo, tensor: Tensor) -> _HaloRows | None:
        entry = self._fields.get((id(halo), id(tensor)))
        if entry is None or entry.tensor is not tensor or entry.version != version_of(tensor):
            return None
        # Rows fetched without a gradient do not serve a pass that needs one.
        stale = tensor.requires_grad and torch.is_grad_enabled() and not entry.remote.requires_grad
        return None if stale else entry

    def _extended_field(
        self, halo: Halo, frame: Frame, name: str, frames: Sequence[Frame]
    ) -> Tensor:
        wanted = frame[name]
        entry = self._find(halo, wanted)
        if entry is None:
            distinct = [wanted, *self.companions(halo, frame, name)]
            fetched = self.fetch([(halo, tensor) for tensor in distinct])
            self.put(halo, list(zip(distinct, fetched, strict=True)), frames)
            entry = self._find(halo, wanted)
            if entry is None:
                entry = _HaloRows(wanted, version_of(wanted), fetched[0])
        if entry.extended is None:
            alone = halo.plan.world_size == 1
            entry.extended = wanted if alone else torch.cat([wanted, entry.remote])
        return entry.extended


class _ExtendedFields(Mapping[str, Any]):
    def __init__(
        self, cache: HaloRowCache, halo: Halo, frame: Frame, frames: Sequence[Frame]
    ) -> None:
        self._cache, self._halo, self._frame, self._frames = cache, halo, frame, frames
        self._extended: dict[str, Tensor] = {}  # of one call

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._extended:
            rows = self._cache._extended_field(self._halo, self._frame, name, self._frames)
            self._extended[name] = rows
        return self._extended[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._frame)

    def __len__(self) -> int:
        return len(self._frame)
