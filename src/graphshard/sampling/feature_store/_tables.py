# SPDX-License-Identifier: Apache-2.0
"""Feature stores over tensors: whole in this process, spread over ranks, or shared on a host.

Stores can be laid over one another (a cache over an exchange), so underneath `fetch` each of them
writes rows to given places of a given tensor, and nothing is copied twice.

[Note: messages of rows]
    The message for a rank holds, for each request and table in turn, the rows that it asked for,
    back to back. Rows are gathered into the outgoing message and copied out of the incoming one
    without a tensor in between, so that a row is read once and written once on either side.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...comm import agree, share_error
from ...comm.collectives import all_to_all
from ...comm.group import GroupState, group_state
from ...comm.transport import Hosts, SharedArray, exchange_rows, row_bytes, share_arrays
from ...fullbatch import GraphShardManager
from ...ops import IdTable, copy_rows, empty
from .._ownership import IdsByOwner, Ownership, RowKind, exchange_sizes, same_ranks
from ._feature_store import FeatureRequest

Tables: TypeAlias = Mapping[tuple[RowKind, str], Tensor]
"""(node type or relation, feature name) to rows."""

R = TypeVar("R", bound="LocalFeatureStore")


@dataclass(frozen=True)
class FillRequest:
    """Rows that are wanted, and where they go.

    Args:
        kind: What the ids count.
        ids: int64 ``[n]``.
        outs: By feature name, tensors to write to.
        places: Row of ``outs`` for each id; None for row i for the i-th id.
    """

    kind: RowKind
    ids: Tensor
    outs: Mapping[str, Tensor]
    places: Tensor | None

    def part(self, chosen: Tensor) -> FillRequest:
        """The ids at some positions."""
        return FillRequest(
            self.kind, self.ids.index_select(0, chosen), self.outs, self.places_of(chosen)
        )

    def places_of(self, chosen: Tensor) -> Tensor:
        """Where the rows at some positions go."""
        return chosen if self.places is None else self.places.index_select(0, chosen)


class LocalFeatureStore:
    """Rows of tables that are whole in this process; base of the stores that fetch some of them.

    Args:
        tables: (node type or relation, name) to ``[num_ids, *]``.

    Attributes:
        pin_memory: Gather rows of tables on the CPU into page-locked memory, for a GPU.
    """

    pin_memory = False

    def __init__(self, tables: Tables) -> None:
        self.tables = dict(tables)
        self._is_closed = False

    def fill(self, requests: Sequence[FillRequest]) -> None:
        """Write rows to their places; ids of one request are distinct. Collective as `fetch`."""
        for rows in requests:
            self._copy(rows, rows.places, rows.ids)

    def _copy(self, rows: FillRequest, places: Tensor | None, table_rows: Tensor) -> None:
        """Write rows of this process's tables to their places."""
        for name, out in rows.outs.items():
            copy_rows(out, places, self.tables[rows.kind, name], table_rows)

    def is_remote(self, kind: RowKind, ids: Tensor) -> Tensor | None:
        """Whether a row comes from elsewhere, bool ``[n]``; None for none of them."""
        return None

    def on(self: R, group: dist.ProcessGroup | None) -> R:
        """The same store, communicating over another group of the same ranks."""
        return copy.copy(self)

    def close(self) -> None:
        """Free what the store holds; nothing can be fetched afterwards."""
        self._is_closed, self.tables = True, {}

    def fetch(self, requests: Sequence[FeatureRequest]) -> list[dict[str, Tensor]]:
        """The rows of each request; see `FeatureStore.fetch`.

        Raises:
            KeyError: There is no such feature.
            RuntimeError: The store is closed.
        """
        if self._is_closed:
            raise RuntimeError("this feature store is closed; make another one")
        wanted, expand = [], []
        for request in requests:
            self._check_names(request)
            ids = request.ids.to("cpu", torch.int64)
            distinct, local = ids, None
            if not request.distinct:
                distinct, local = self._distinct(request.kind, ids)
            pin = self.pin_memory
            outs = {n: self._empty(request.kind, n, distinct.numel(), pin) for n in request.names}
            wanted.append(FillRequest(request.kind, distinct, outs, None))
            expand.append(local)
        self.fill(wanted)
        return [
            dict(rows.outs)
            if local is None
            else {n: out.index_select(0, local.to(out.device)) for n, out in rows.outs.items()}
            for rows, local in zip(wanted, expand, strict=True)
        ]

    def _empty(self, kind: RowKind, name: str, num_rows: int, pin: bool = False) -> Tensor:
        """Memory for rows of a table."""
        like = self.tables[kind, name]
        if pin and like.device.type == "cpu":
            shape = (num_rows, *like.shape[1:])
            return torch.empty(shape, dtype=like.dtype, device=like.device, pin_memory=True)
        return empty((num_rows, *like.shape[1:]), like.dtype, like.device)

    def _check_names(self, request: FeatureRequest) -> None:
        for name in request.names:
            if (request.kind, name) not in self.tables:
                known = sorted(self.feature_names(request.kind))
                raise KeyError(f"no feature {name!r} of {request.kind!r}; there are {known}")

    def _distinct(self, kind: RowKind, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Distinct ids and where each of ``ids`` is among them; None where they were distinct."""
        return ids, None

    def feature_names(self, kind: RowKind) -> Collection[str]:
        """Features of nodes of a type, or of edges of a relation."""
        return tuple(name for k, name in self.tables if k == kind)

    def row_bytes(self, kind: RowKind) -> int:
        """Bytes in one row of all features of a kind."""
        return sum(row_bytes(like) for (k, _), like in self.tables.items() if k == kind)


class CollectiveFeatureStore(LocalFeatureStore):
    """Rows of tables that are spread over ranks, each row with the rank that owns the id.

    A fetch is three exchanges for all requests together: sizes, distinct ids of rows of other
    ranks, and the rows. This rank's own rows are read directly. With P ranks and R requests this
    rank sends in one fetch ``4 (2 + R) (P - 1)`` bytes, 4 bytes for each id that it asks of others
    (8 where a type or relation has 2^31 ids or more), and the rows that others ask of it.

    Args:
        ownership: Who owns what; collective.
        tables: (node type or relation, name) to this rank's own rows ``[num_owned, *]``. All ranks
            pass the same keys, dtypes and row shapes.
        state: The ranks.

    Raises:
        TypeError: Not a dense tensor; on all ranks.
        ValueError: An unknown type, another number of rows, a tensor that requires a gradient, or
            ranks that differ; on all ranks.
    """

    def __init__(self, ownership: Ownership, tables: Tables, state: GroupState) -> None:
        check_tables(ownership, tables, state)
        super().__init__(tables)
        self.ownership, self._state = ownership, state
        self._id_tables: dict[RowKind, IdTable] = {}

    @classmethod
    def of(cls, manager: GraphShardManager, tables: Tables) -> CollectiveFeatureStore:
        """Of a sharded graph; collective."""
        return cls(Ownership.of(manager), tables, group_state(manager.group))

    def fill(self, requests: Sequence[FillRequest]) -> None:
        if not requests:
            return
        state = self._state
        grouped = [self.ownership.by_owner(rows.kind, rows.ids) for rows in requests]
        if state.world_size == 1:
            self._fill_own(requests, grouped)
            return
        splits = [ids.splits for ids in grouped]
        sizes, _ = exchange_sizes(
            state,
            "what rows are fetched",
            "; ".join(f"{rows.kind}: {list(rows.outs)}" for rows in requests),
            None,
            torch.tensor(splits, dtype=torch.int64).t(),
        )
        asked_of_me = sizes.t().tolist()  # by request, by rank
        asked = exchange_rows(
            state,
            [ids.remote_rows for ids in grouped],
            splits,
            asked_of_me,
            "ids of feature rows",
        )
        widths = [sum(map(row_bytes, rows.outs.values())) for rows in requests]
        send_bytes = _bytes_by_rank(asked_of_me, widths)
        outgoing = empty([sum(send_bytes)], torch.uint8)
        by_rank = [rows.split(sizes) for rows, sizes in zip(asked, asked_of_me, strict=True)]
        for rank, number, name, stream in _stretches(outgoing, requests, asked_of_me):
            table = self.tables[requests[number].kind, name]
            _gather_into(stream, table, by_rank[number][rank])
        incoming = all_to_all(
            state,
            outgoing,
            send_bytes,
            _bytes_by_rank(splits, widths),
            "feature rows",
            meanwhile=lambda: self._fill_own(requests, grouped),
        )
        places = [
            rows.places_of(ids.remote_places).split(ids.splits)
            for rows, ids in zip(requests, grouped, strict=True)
        ]
        for rank, number, name, stream in _stretches(incoming, requests, splits):
            _scatter_from(stream, requests[number].outs[name], places[number][rank])

    def _fill_own(self, requests: Sequence[FillRequest], grouped: Sequence[IdsByOwner]) -> None:
        """Write the rows that this rank has itself."""
        for rows, ids in zip(requests, grouped, strict=True):
            own = ids.own_places
            self._copy(rows, rows.places if own is None else rows.places_of(own), ids.own_rows)

    def is_remote(self, kind: RowKind, ids: Tensor) -> Tensor | None:
        if self._state.world_size == 1:
            return None
        first = self.ownership.first(kind)
        return (ids < first) | (ids >= first + self.ownership.num_owned(kind))

    def on(self, group: dist.ProcessGroup | None) -> CollectiveFeatureStore:
        new = copy.copy(self)
        new._state = same_ranks(self._state, group)
        new._id_tables = {}  # scratch space is for one thread
        return new

    def close(self) -> None:
        super().close()
        self._id_tables = {}

    def _distinct(self, kind: RowKind, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        if kind not in self._id_tables:
            self._id_tables[kind] = IdTable(self.ownership.ranges[kind].num_ids)
        distinct, local = self._id_tables[kind].renumber(ids[:0], ids)
        if distinct.numel() == ids.numel():
            return ids, None
        return distinct, local


class MappedFeatureStore(LocalFeatureStore):
    """Rows of tables that are spread over ranks, those of ranks on this host read directly.

    Each rank copies its rows, once, into memory that all ranks of its host map; it has no name in
    any file system, and goes when the last of them ends. Rows of ranks on other hosts come as from
    `CollectiveFeatureStore`. Where all ranks are on one host, nothing is ever sent.

    Args:
        manager: The graph that ids belong to; collective.
        tables: As for `CollectiveFeatureStore`. The rows are copied: later changes to a table are
            not seen.
        directory: Where the file is while it has a name; by default in shared memory, or where
            temporary files go if that is too small.

    Raises:
        OSError: Some host has no room; on all ranks.
        TypeError: As for `CollectiveFeatureStore`.
        ValueError: As for `CollectiveFeatureStore`.
    """

    def __init__(
        self,
        manager: GraphShardManager,
        tables: Tables,
        *,
        directory: str | os.PathLike[str] | None = None,
    ) -> None:
        ownership, state = Ownership.of(manager), group_state(manager.group)
        check_tables(ownership, tables, state)
        hosts = Hosts.find(state, directory)
        arrays = [
            SharedArray(table, ownership.ranges[kind].starts) for (kind, _), table in tables.items()
        ]
        shared = share_arrays(state, hosts, arrays, whole=False, directory=directory)
        super().__init__(dict(zip(tables, shared, strict=True)))
        self._ownership, self._state = ownership, state
        self._far = None
        if len(hosts.leaders) > 1:
            # It reads its own rows from the shared memory too, so the caller's may go.
            own = {
                (kind, name): table[ownership.first(kind) :][: ownership.num_owned(kind)]
                for (kind, name), table in self.tables.items()
            }
            self._far = CollectiveFeatureStore(ownership, own, state)
        is_far = [leader != hosts.leader[state.rank] for leader in hosts.leader]
        self._is_far = torch.tensor(is_far)

    def fill(self, requests: Sequence[FillRequest]) -> None:
        if self._far is None:
            super().fill(requests)
            return
        is_far = [self._is_far_row(rows.kind, rows.ids) for rows in requests]
        both = list(zip(requests, is_far, strict=True))
        super().fill([rows.part((~far).nonzero().view(-1)) for rows, far in both])
        self._far.fill([rows.part(far.nonzero().view(-1)) for rows, far in both])

    def is_remote(self, kind: RowKind, ids: Tensor) -> Tensor | None:
        return None if self._far is None else self._is_far_row(kind, ids)

    def _is_far_row(self, kind: RowKind, ids: Tensor) -> Tensor:
        return self._is_far[self._ownership.ranges[kind].part_of(ids)]

    def on(self, group: dist.ProcessGroup | None) -> MappedFeatureStore:
        new = copy.copy(self)
        if self._far is None:
            same_ranks(self._state, group)
        else:
            new._far = self._far.on(group)
        return new

    def close(self) -> None:
        super().close()
        if self._far is not None:
            self._far.close()


def _bytes_by_rank(splits: Sequence[Sequence[int]], widths: Sequence[int]) -> list[int]:
    """Bytes for each rank: of each request so many rows, of so many bytes."""
    return [
        sum(n * width for n, width in zip(of_rank, widths, strict=True))
        for of_rank in zip(*splits, strict=True)
    ]


def _stretches(
    message: Tensor, requests: Sequence[FillRequest], splits: Sequence[Sequence[int]]
) -> Iterator[tuple[int, int, str, Tensor]]:
    """Rank, number of the request, feature and bytes of all that is in a message of rows.

    Args:
        message: See [Note: messages of rows].
        requests: What the rows are.
        splits: Rows of each request, for or from each rank.
    """
    offset = 0
    for rank, sizes in enumerate(zip(*splits, strict=True)):
        for number, (rows, size) in enumerate(zip(requests, sizes, strict=True)):
            for name, out in rows.outs.items():
                stop = offset + size * row_bytes(out)
                if stop > offset:
                    yield rank, number, name, message[offset:stop]
                offset = stop


def _gather_into(stream: Tensor, table: Tensor, index: Tensor) -> None:
    """Write rows of a table to a stretch of bytes."""
    if table.device.type == "cpu" and stream.storage_offset() % table.element_size() == 0:
        out = stream.view(table.dtype).view(index.numel(), *table.shape[1:])
        copy_rows(out, None, table, index)
        return
    rows = table.index_select(0, index.to(table.device)).contiguous()
    stream.copy_(rows.view(-1).view(torch.uint8))


def _scatter_from(stream: Tensor, out: Tensor, places: Tensor) -> None:
    """Write the rows in a stretch of bytes to their places."""
    if stream.storage_offset() % out.element_size():
        stream = stream.clone()
    copy_rows(out, places, stream.view(out.dtype).view(places.numel(), *out.shape[1:]), None)


def check_tables(ownership: Ownership, tables: Tables, state: GroupState) -> None:
    """Raise on all ranks if the tables of any rank break a rule or differ in kind; collective."""
    error = None
    try:
        for (kind, name), table in tables.items():
            _check_table(ownership, kind, name, table)
    except (TypeError, ValueError) as caught:
        error = caught
    share_error(error, state.group)
    agree(
        "; ".join(
            f"{kind}/{name} {str(table.dtype).removeprefix('torch.')}{tuple(table.shape[1:])}"
            for (kind, name), table in tables.items()
        ),
        "what features there are, and in which order,",
        state.group,
    )


def _check_table(ownership: Ownership, kind: RowKind, name: str, table: Tensor) -> None:
    label = f"feature {name!r} of {kind!r}"
    if kind not in ownership.ranges:
        raise ValueError(f"{label}: the graph has {list(ownership.ranges)}")
    if isinstance(table, Tensor) and table.is_complex():
        raise TypeError(f"{label} must be real (got {table.dtype}); use torch.view_as_real")
    check_rows(table, ownership.num_owned(kind), "that this rank owns", label)


def check_rows(rows: Any, num_rows: int, of: str, label: str) -> None:
    """Raise unless feature rows are a dense tensor with a row for each of ``num_rows`` ids.

    Args:
        rows: What a user gave.
        num_rows: Rows that there must be.
        of: What an error calls those that have a row.
        label: What an error calls the rows.
    """
    if not isinstance(rows, Tensor):
        raise TypeError(
            f"{label} must be a tensor (got {type(rows).__name__}); use torch.as_tensor"
        )
    if rows.layout != torch.strided:
        raise TypeError(f"{label} must be dense (got {rows.layout}); use .to_dense()")
    if rows.dim() == 0 or rows.shape[0] != num_rows:
        raise ValueError(
            f"{label} must have a row for each of the {num_rows} {of} (got shape "
            f"{tuple(rows.shape)})"
        )
    if rows.requires_grad:
        raise ValueError(
            f"{label} requires a gradient, which fetched rows do not carry; pass .detach()"
        )
