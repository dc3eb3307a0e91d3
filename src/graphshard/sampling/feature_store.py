# SPDX-License-Identifier: Apache-2.0
"""Where feature rows come from: tensors here, the ranks that own them, shared memory, a cache.

A `FeatureStore` answers one question, "the rows of these ids". Stores can be laid over one another
(a cache over an exchange), so underneath `fetch` each of those here writes rows to given places of
a given tensor, and nothing is copied twice.

Whatever is asked of other ranks, rows here and neighbours in `graph_store`, begins alike: ids are
grouped by the rank that owns them (`Ownership`), and each rank tells each other one how many follow
(`exchange_sizes`).

[Note: messages of rows]
    The message for a rank holds, for each request and table in turn, the rows that it asked for,
    back to back. Rows are gathered into the outgoing message and copied out of the incoming one
    without a tensor in between, so that a row is read once and written once on either side.
"""

from __future__ import annotations

import copy
import os
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .._base.file_rows import RowsInFiles
from .._base.ranges import RangeMap
from .._base.typing import CanonicalEType
from ..comm import agree
from ..comm.collectives import all_gather, all_reduce_alike, all_to_all, shared_errors, verify
from ..comm.group import GroupState, group_state
from ..comm.transport import Hosts, SharedArray, exchange_rows, row_bytes, share_arrays
from ..fullbatch import GraphShardManager
from ..ops import IdTable, copy_rows, empty, group_by_range

RowKind: TypeAlias = str | CanonicalEType
"""What rows stand for: nodes of a type, or edges of a relation."""

_INT32_MAX = 2**31 - 1

_FAILED = 1
_HEAD = 2
_MOST_SIGNATURES = 2**31

FeatureTables: TypeAlias = Mapping[tuple[RowKind, str], Tensor | RowsInFiles]
"""(node type or relation, feature name) to rows, in memory or in files."""

R = TypeVar("R", bound="LocalFeatureStore")
_MESSAGE_BYTES = 1 << 26
_SLOT_BYTES = 4


@dataclass(frozen=True)
class Ownership:
    """Who owns what of a sharded graph."""

    rank: int
    world_size: int
    ranges: Mapping[RowKind, RangeMap]

    @classmethod
    def of(cls, manager: GraphShardManager) -> Ownership:
        """Of a full graph; collective: every rank says how many nodes and edges it owns."""
        with shared_errors(manager.group):
            if manager.is_block:
                raise ValueError(
                    "neighbours and features come from a whole graph (got a message flow graph); "
                    "make it with construct_full_graph"
                )
        sizes: dict[RowKind, int] = {t: manager.num_nodes(t) for t in manager.ntypes}
        sizes.update((t, manager.num_edges(t)) for t in manager.canonical_etypes)
        state = group_state(manager.group)
        gathered = all_gather(state, torch.tensor(list(sizes.values()), dtype=torch.int64))
        per_kind = torch.stack(gathered, 1).tolist()
        ranges = {
            kind: RangeMap.from_sizes(owned) for kind, owned in zip(sizes, per_kind, strict=True)
        }
        return cls(state.rank, state.world_size, ranges)

    @cached_property
    def wire_dtype(self) -> torch.dtype:
        """What ids travel as: int32 if no type and no relation has 2^31 or more."""
        fits = all(r.num_ids <= _INT32_MAX for r in self.ranges.values())
        return torch.int32 if fits else torch.int64

    def first(self, kind: RowKind) -> int:
        """The smallest id that this rank owns, if it owns any."""
        return self.ranges[kind].starts[self.rank]

    def num_owned(self, kind: RowKind) -> int:
        return self.ranges[kind].size(self.rank)

    def by_owner(self, kind: RowKind, ids: Tensor) -> IdsByOwner:
        """Group ids, on the CPU, by the rank that owns them: this rank's own ones last."""
        if self.world_size == 1:
            return IdsByOwner(None, ids, [0], 0)
        order, rows, splits = group_by_range(
            ids, self.ranges[kind].starts, self.rank, self.wire_dtype, check=False
        )
        splits[self.rank] = 0
        return IdsByOwner(order, rows, splits, sum(splits))


@dataclass(frozen=True)
class IdsByOwner:
    """Ids grouped by owner: first those of others, in rank order, then this rank's own.

    Args:
        order: int64 ``[n]``, the place that each grouped id had; None where nothing moved.
        rows: ``[n]``, row of each grouped id among those of its owner.
        splits: Number of ids of each rank; 0 in the own slot.
        num_remote: Their sum: so many ids of others come first.
    """

    order: Tensor | None
    rows: Tensor
    splits: list[int]
    num_remote: int


def exchange_sizes(
    state: GroupState,
    what: str,
    signature: str,
    error: Exception | None,
    sizes: list[list[int]],
    lacking: int = 0,
) -> tuple[list[list[int]], int]:
    """Exchange the sizes of what follows; every rank must call.

    It carries besides what would else cost a collective of its own: that a rank's check has
    failed, that ranks ask for different things, and that some rank lacks something which only all
    ranks together can make. A rank sends ``4 (2 + k)`` bytes to each other one.

    Args:
        what: What the round is, for errors: "what neighbours are drawn".
        signature: What must be equal on all ranks.
        sizes: k times a number below 2^31 for each rank.
        lacking: Bits that say what this rank lacks.

    Returns:
        k times what each rank has for this one; and the bits that any rank has set, this one
        included.

    Raises:
        Exception: On every rank, what a rank's check found; see `graphshard.comm.share_error`.
        ValueError: On every rank, if the signatures differ.
    """
    if state.world_size == 1:
        if error is not None:
            raise error
        return sizes, lacking
    check = zlib.crc32(signature.encode(errors="surrogatepass")) % _MOST_SIGNATURES
    words = torch.empty((state.world_size, _HEAD + len(sizes)), dtype=torch.int32)
    words[:, 0] = lacking * 2 + (_FAILED if error is not None else 0)
    words[:, 1] = check
    words[:, _HEAD:] = torch.tensor(sizes).t()
    splits = [words.shape[1]] * state.world_size
    arrived = all_to_all(state, words.view(-1), splits, splits, what).view_as(words)
    flags = 0
    for word in arrived[:, 0].tolist():
        flags |= word
    if flags & _FAILED or bool((arrived[:, 1] != check).any()):
        verify(state, signature, what, error)
    return arrived[:, _HEAD:].t().tolist(), flags // 2


def same_ranks(state: GroupState, group: dist.ProcessGroup | None) -> GroupState:
    """The state of a group; ValueError unless it has the ranks of another one, in their order."""
    new = group_state(group)
    if new.members != state.members:
        raise ValueError(
            f"the group must have the ranks {list(state.members)} in this order (got "
            f"{list(new.members)}); make it with torch.distributed.new_group of all of them"
        )
    return new


@dataclass(frozen=True)
class FeatureRequest:
    """Rows that are wanted.

    Args:
        kind: Node type; or a relation, for features of edges.
        ids: Integer ``[n]``, ids of the kind as the graph store gives them, in any order; repeats
            are legal.
        distinct: Says that there are no repeats, which then need not be looked for.
    """

    kind: RowKind
    names: tuple[str, ...]
    ids: Tensor
    distinct: bool = field(default=False, kw_only=True)


class FeatureStore(Protocol):
    """Where feature rows come from. Loaders take one as ``feature_store``.

    A class of your own needs these members and no base. Which features a loader asks for is what
    the sampler names: ``prefetch_node_feats``, ``prefetch_labels``, ``prefetch_edge_feats``.

    The loaders call `fetch` once for each batch, for all of its features together, in a thread of
    their own that is batches ahead of training: it may wait for an answer from elsewhere, with all
    requests on their way at the same time.

    Example:
        >>> import torch
        >>> from graphshard.data import load_dataset
        >>> from graphshard.sampling import DataLoader, NeighborSampler
        >>> class Degrees:
        ...     def __init__(self, graph):
        ...         self.column = graph.in_degrees().float().view(-1, 1)
        ...     def feature_names(self, kind):
        ...         return ["degree"]
        ...     def fetch(self, requests):
        ...         return [{"degree": self.column[request.ids]} for request in requests]
        ...     def on(self, group):
        ...         return self
        ...     def close(self):
        ...         pass
        >>> graph = load_dataset("cora").graph
        >>> sampler = NeighborSampler([5], prefetch_node_feats=["degree"])
        >>> loader = DataLoader(graph, range(4), sampler, 4, feature_store=Degrees(graph))
        >>> [batch] = loader
        >>> batch[0].srcdata["degree"][:4].view(-1)
        tensor([3., 3., 5., 1.])
    """

    def feature_names(self, kind: RowKind) -> Collection[str]:
        """Features of nodes of a type, or of edges of a relation; none where it has none."""

    def fetch(self, requests: Sequence[FeatureRequest]) -> list[dict[str, Tensor]]:
        """The rows of each request by name, ``[n, *]`` in the order of its ids.

        A store that is collective says so; then every rank must ask for the same kinds and names
        in the same order, of any number of ids.
        """

    def on(self, group: dist.ProcessGroup | None) -> FeatureStore:
        """The store for one thread of a loader, over another group of the same ranks.

        A store that is not collective returns itself.
        """

    def close(self) -> None:
        """Free what the store holds; nothing can be fetched afterwards.

        A loader closes what it has made, and never a store that it was given.
        """


@dataclass(frozen=True)
class FillRequest:
    """Rows that are wanted, and where they go.

    Args:
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
    """Rows of tables that are whole in this process; base of the stores that fetch some of them."""

    pin_memory = False  # gather rows of tables on the CPU into page-locked memory, for a GPU

    def __init__(self, tables: FeatureTables) -> None:
        self.tables = {key: _plain(rows) for key, rows in tables.items()}
        self._is_closed = False

    def fill(self, requests: Sequence[FillRequest]) -> None:
        """Write rows to their places; ids of one request are distinct. Collective as `fetch`."""
        for rows in requests:
            for name, out in rows.outs.items():
                _read_rows(out, rows.places, self.tables[rows.kind, name], rows.ids)

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
        fills: list[FillRequest] = []
        places: list[Tensor | None] = []
        for request in requests:
            ids = request.ids.to("cpu", torch.int64)
            local = None
            if not request.distinct:
                ids, local = self._distinct(request.kind, ids)
            outs = {}
            for name in request.names:
                if (request.kind, name) not in self.tables:
                    present = sorted(self.feature_names(request.kind))
                    raise KeyError(f"no feature {name!r} of {request.kind!r}; there are {present}")
                outs[name] = self._empty(request.kind, name, ids.numel(), self.pin_memory)
            fills.append(FillRequest(request.kind, ids, outs, None))
            places.append(local)
        self.fill(fills)
        answers = []
        for rows, local in zip(fills, places, strict=True):
            answer = dict(rows.outs)
            if local is not None:
                for name, out in answer.items():
                    answer[name] = out.index_select(0, local.to(out.device))
            answers.append(answer)
        return answers

    def _empty(self, kind: RowKind, name: str, num_rows: int, pin: bool = False) -> Tensor:
        """Memory for rows of a table."""
        like = self.tables[kind, name]
        if pin and like.device.type == "cpu":
            shape = (num_rows, *like.shape[1:])
            return torch.empty(shape, dtype=like.dtype, device=like.device, pin_memory=True)
        return empty((num_rows, *like.shape[1:]), like.dtype, like.device)

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
        tables: (node type or relation, name) to this rank's own rows ``[num_owned, *]``. All ranks
            pass the same keys, dtypes and row shapes.

    Raises:
        TypeError: Not a dense tensor; on all ranks.
        ValueError: An unknown type, another number of rows, a tensor that requires a gradient, or
            ranks that differ; on all ranks.
    """

    def __init__(self, ownership: Ownership, tables: FeatureTables, state: GroupState) -> None:
        check_tables(ownership, tables, state)
        super().__init__(tables)
        self.ownership, self._state = ownership, state
        self._id_tables: dict[RowKind, IdTable] = {}

    @classmethod
    def of(cls, manager: GraphShardManager, tables: FeatureTables) -> CollectiveFeatureStore:
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
        signature = "; ".join(f"{rows.kind}: {list(rows.outs)}" for rows in requests)
        asked_of_me, _ = exchange_sizes(state, "what rows are fetched", signature, None, splits)
        asked = exchange_rows(
            state,
            [ids.rows[: ids.num_remote] for ids in grouped],
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
        places = []
        for rows, ids in zip(requests, grouped, strict=True):
            assert ids.order is not None  # ids of others have moved
            places.append(rows.places_of(ids.order[: ids.num_remote]).split(ids.splits))
        for rank, number, name, stream in _stretches(incoming, requests, splits):
            _scatter_from(stream, requests[number].outs[name], places[number][rank])

    def _fill_own(self, requests: Sequence[FillRequest], grouped: Sequence[IdsByOwner]) -> None:
        """Write the rows that this rank has itself."""
        for rows, ids in zip(requests, grouped, strict=True):
            own_rows, places = ids.rows[ids.num_remote :], rows.places
            if ids.order is not None:
                places = rows.places_of(ids.order[ids.num_remote :])
            for name, out in rows.outs.items():
                _read_rows(out, places, self.tables[rows.kind, name], own_rows)

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
        distinct, local = self._id_tables[kind].renumber(ids[:0], ids, check=False)
        if distinct.numel() == ids.numel():
            return ids, None
        return distinct, local


class MappedFeatureStore(LocalFeatureStore):
    """Rows of tables that are spread over ranks, those of ranks on this host read directly.

    Each rank copies its rows, once, into memory that all ranks of its host map; it has no name in
    any file system, and goes when the last of them ends. Rows of ranks on other hosts come as from
    `CollectiveFeatureStore`. Where all ranks are on one host, nothing is ever sent.

    Args:
        tables: As for `CollectiveFeatureStore`, in memory. The rows are copied: later changes to a
            table are not seen.
        directory: Where the file is while it has a name; by default in shared memory, or where
            temporary files go if that is too small.

    Raises:
        OSError: Some host has no room; on all ranks. Besides what `CollectiveFeatureStore` raises.
    """

    def __init__(
        self,
        manager: GraphShardManager,
        tables: Mapping[tuple[RowKind, str], Tensor],
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

    def holds(self, tables: Mapping[tuple[RowKind, str], Tensor]) -> bool:
        """Whether this rank's rows are, to the bit, what these tables have now."""
        for (kind, name), table in tables.items():
            own = self.tables[kind, name][self._ownership.first(kind) :][: len(table)]
            if not torch.equal(_bytes_of(own), _bytes_of(table)):
                return False
        return True

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


def _bytes_of(table: Tensor) -> Tensor:
    return table.contiguous().view(-1).view(torch.uint8)


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

    ``splits`` are the rows of each request, for or from each rank.
    """
    offset = 0
    for rank, sizes in enumerate(zip(*splits, strict=True)):
        for number, (rows, size) in enumerate(zip(requests, sizes, strict=True)):
            for name, out in rows.outs.items():
                stop = offset + size * row_bytes(out)
                if stop > offset:
                    yield rank, number, name, message[offset:stop]
                offset = stop


def _plain(rows: Tensor | RowsInFiles) -> Any:
    """Rows as kernels read them: a view may hold the negative of its numbers."""
    return rows if isinstance(rows, RowsInFiles) else rows.resolve_conj().resolve_neg()


def _read_rows(
    out: Tensor, places: Tensor | None, table: Tensor | RowsInFiles, rows: Tensor
) -> None:
    """Write rows of a table to their places."""
    if isinstance(table, RowsInFiles):
        table.read(out, places, rows)
    else:
        copy_rows(out, places, table, rows, check=False)


def _gather_into(stream: Tensor, table: Tensor | RowsInFiles, index: Tensor) -> None:
    """Write rows of a table to a stretch of bytes."""
    if isinstance(table, RowsInFiles):
        aligned = stream.storage_offset() % table.element_size() == 0
        into = stream if aligned else torch.empty_like(stream)
        table.read(into.view(table.dtype).view(index.numel(), *table.shape[1:]), None, index)
        if not aligned:
            stream.copy_(into)
        return
    if table.device.type == "cpu" and stream.storage_offset() % table.element_size() == 0:
        out = stream.view(table.dtype).view(index.numel(), *table.shape[1:])
        copy_rows(out, None, table, index, check=False)
        return
    rows = table.index_select(0, index.to(table.device)).contiguous()
    stream.copy_(rows.view(-1).view(torch.uint8))


def _scatter_from(stream: Tensor, out: Tensor, places: Tensor) -> None:
    """Write the rows in a stretch of bytes to their places."""
    if stream.storage_offset() % out.element_size():
        stream = stream.clone()
    rows = stream.view(out.dtype).view(places.numel(), *out.shape[1:])
    copy_rows(out, places, rows, None, check=False)


def check_tables(ownership: Ownership, tables: FeatureTables, state: GroupState) -> None:
    """Raise on all ranks if the tables of any rank break a rule or differ in kind; collective."""
    with shared_errors(state.group):
        for (kind, name), table in tables.items():
            _check_table(ownership, kind, name, table)
    agree(
        "; ".join(
            f"{kind}/{name} {str(table.dtype).removeprefix('torch.')}{tuple(table.shape[1:])}"
            for (kind, name), table in tables.items()
        ),
        "what features there are, and in which order,",
        state.group,
    )


def _check_table(
    ownership: Ownership, kind: RowKind, name: str, table: Tensor | RowsInFiles
) -> None:
    label = f"feature {name!r} of {kind!r}"
    if kind not in ownership.ranges:
        raise ValueError(f"{label}: the graph has {list(ownership.ranges)}")
    if isinstance(table, Tensor) and table.is_complex():
        raise TypeError(f"{label} must be real (got {table.dtype}); use torch.view_as_real")
    if isinstance(table, RowsInFiles):
        if table.shape[0] != ownership.num_owned(kind):
            raise ValueError(
                f"{label} must have a row for each of the {ownership.num_owned(kind)} that this "
                f"rank owns (got {table.shape[0]} in files)"
            )
        return
    check_rows(table, ownership.num_owned(kind), "that this rank owns", label)


def check_rows(rows: Any, num_rows: int, of: str, label: str) -> None:
    """Raise unless feature rows are a dense tensor with a row for each of ``num_rows`` ids."""
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


class CachedFeatureStore(LocalFeatureStore):
    """Rows of another source, of which hot remote rows are kept here.

    What to keep is not guessed: draws are deterministic, so the accesses of a coming epoch can be
    counted by drawing it, and the budget goes to the rows with the highest counts. A row saves its
    bytes at every access and costs them once, so the count alone decides, whatever the row's size.

    Args:
        base: Where rows come from; closed together with the cache.
        ranges: Per node type and relation, the ids of each rank, as `Ownership` has them.
        budget_bytes: What the rows and the index (4 bytes for each id of a type of which rows are
            kept) may take on this rank; ranks may differ.
        group: Who takes part in `prepare`; the default group where it is None.
        once: Keep what is chosen before the first epoch: those after it read much the same rows,
            and need not be drawn ahead.

    Raises:
        ValueError: A negative budget.
    """

    def __init__(
        self,
        base: LocalFeatureStore,
        ranges: Mapping[RowKind, RangeMap],
        budget_bytes: int,
        group: dist.ProcessGroup | None = None,
        *,
        once: bool = False,
    ) -> None:
        if budget_bytes < 0:
            raise ValueError(
                f"budget_bytes must be a number of bytes, at least 0 (got {budget_bytes})"
            )
        super().__init__(base.tables)
        self._base, self._ranges, self._group = base, ranges, group
        self.budget_bytes = budget_bytes
        self.content = CacheContent()
        self._once = once

    @property
    def is_settled(self) -> bool:
        """Whether what is kept stays as it is."""
        return self._once and self.content.is_prepared

    @property
    def hit_rate(self) -> float:
        """Part of the accesses to remote rows, since `prepare`, that were answered from here."""
        hits, misses = self.content.num_hits, self.content.num_misses
        return hits / (hits + misses) if hits + misses else 0.0

    @property
    def num_bytes(self) -> int:
        """Bytes that rows and index take."""
        arrays = [*self.content.slots.values(), *self.content.tables.values()]
        return sum(array.numel() * array.element_size() for array in arrays)

    def count(
        self, batches: Iterable[Sequence[FeatureRequest]]
    ) -> dict[RowKind, tuple[Tensor, Tensor]]:
        """How often batches read each row, for `prepare`.

        Takes 4 bytes for each id of a type while it counts, as much as the index.
        """
        counts: dict[RowKind, Tensor] = {}
        for request in (request for requests in batches for request in requests):
            ids, kind = request.ids.cpu().long(), request.kind
            if kind not in counts:
                counts[kind] = torch.zeros(self._ranges[kind].num_ids, dtype=torch.int32)
            counts[kind].index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
        read = {kind: of_kind.nonzero().view(-1) for kind, of_kind in counts.items()}
        return {kind: (ids, counts[kind][ids]) for kind, ids in read.items()}

    def prepare(self, counts: Mapping[RowKind, tuple[Tensor, Tensor]]) -> None:
        """Keep the remote rows with the highest counts; every rank must call, between fetches.

        Args:
            counts: Node type or relation to ``(ids, num_accesses)``: distinct ids ``[n]``, and how
                often each will be fetched. Types may be absent; what is never fetched is not kept.

        Raises:
            ValueError: An unknown type; on all ranks.
        """
        with shared_errors(self._group):
            chosen = self._choose(counts)
        self.content.clear()
        self.content.is_prepared = True
        for kind in self._kinds():
            ids = chosen.get(kind, torch.empty(0, dtype=torch.int64))
            for name, table in self._fetched(kind, ids).items():
                self.content.tables[kind, name] = table
            if ids.numel():
                slots = torch.full((self._ranges[kind].num_ids,), -1, dtype=torch.int32)
                slots[ids] = torch.arange(ids.numel(), dtype=torch.int32)
                self.content.slots[kind] = slots
                self.content.num_rows += ids.numel()

    def _kinds(self) -> list[RowKind]:
        return list(dict.fromkeys(kind for kind, _ in self.tables))

    def _choose(self, counts: Mapping[RowKind, tuple[Tensor, Tensor]]) -> dict[RowKind, Tensor]:
        """Ids to keep, by kind."""
        unknown = [kind for kind in counts if kind not in self._kinds()]
        if unknown:
            raise ValueError(
                f"accesses are counted for {unknown}, which have no features; there are "
                f"{self._kinds()}"
            )
        candidates = {}
        for kind, (ids, num_accesses) in counts.items():
            ids, num_accesses = ids.to("cpu", torch.int64), num_accesses.cpu()
            remote = self._base.is_remote(kind, ids)
            if remote is not None:
                remote &= num_accesses > 0
                candidates[kind] = _CacheCandidates(
                    ids[remote],
                    num_accesses[remote],
                    self.row_bytes(kind),
                    _SLOT_BYTES * self._ranges[kind].num_ids,
                )
        return most_wanted(candidates, self.budget_bytes)

    def _fetched(self, kind: RowKind, ids: Tensor) -> dict[str, Tensor]:
        """Rows of all features of a kind, in messages of bounded size; collective."""
        per_round = max(1, _MESSAGE_BYTES // max(1, self.row_bytes(kind)))
        rounds = torch.tensor([-(-ids.numel() // per_round)])
        num_rounds = int(all_reduce_alike(rounds, "max", group=self._group))
        tables = {name: self._empty(kind, name, ids.numel()) for name in self.feature_names(kind)}
        for number in range(num_rounds):
            rows = slice(number * per_round, (number + 1) * per_round)
            outs = {name: table[rows] for name, table in tables.items()}
            self._base.fill([FillRequest(kind, ids[rows], outs, None)])
        return tables

    def fill(self, requests: Sequence[FillRequest]) -> None:
        self._base.fill([self._fill_kept(rows) for rows in requests])

    def _fill_kept(self, rows: FillRequest) -> FillRequest:
        """Write the rows that are kept; what remains to be fetched."""
        hits = 0
        missed = rows
        slots = self.content.slots.get(rows.kind)
        if slots is not None:
            slot = slots.index_select(0, rows.ids)
            hit = (slot >= 0).nonzero().view(-1)
            hits = hit.numel()
            if hits:
                missed = rows.part((slot < 0).nonzero().view(-1))
                places = rows.places_of(hit)
                slot = slot.index_select(0, hit)
                for name, out in rows.outs.items():
                    table = self.content.tables[rows.kind, name]
                    copy_rows(out, places, table, slot, check=False)
        remote = self._base.is_remote(missed.kind, missed.ids)
        self.content.num_hits += hits
        self.content.num_misses += 0 if remote is None else int(remote.sum())
        return missed

    def is_remote(self, kind: RowKind, ids: Tensor) -> Tensor | None:
        remote = self._base.is_remote(kind, ids)
        slots = self.content.slots.get(kind)
        if remote is None or slots is None:
            return remote
        return remote & (slots.index_select(0, ids) < 0)

    def _distinct(self, kind: RowKind, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        return self._base._distinct(kind, ids)

    def on(self, group: dist.ProcessGroup | None) -> CachedFeatureStore:
        """The same cache, communicating over another group; what is kept is shared."""
        new = copy.copy(self)
        new._base, new._group = self._base.on(group), group
        return new

    def close(self) -> None:
        super().close()
        self.content = CacheContent()
        self._base.close()


class CacheContent:
    """What a cache holds, and accesses to remote rows that it answered (hits) or not (misses).

    Shared by copies of the cache for several groups.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.slots: dict[RowKind, Tensor] = {}
        self.tables: dict[tuple[RowKind, str], Tensor] = {}
        self.num_rows = self.num_hits = self.num_misses = 0
        self.is_prepared = False


class _CacheCandidates(NamedTuple):
    """Rows of one kind that may be kept."""

    ids: Tensor
    num_accesses: Tensor
    row_bytes: int
    index_bytes: int


def most_wanted(
    candidates: Mapping[RowKind, _CacheCandidates], budget: int
) -> dict[RowKind, Tensor]:
    """The rows with the highest counts that fit a budget; of equal ones the first kind and ids.

    A kind whose index does not fit beside the others' is left out, the least accessed first.

    Args:
        budget: Bytes for rows and for the index of each kind of which rows are kept.
    """
    used = {kind: c for kind, c in candidates.items() if c.ids.numel()}
    while used and sum(c.index_bytes for c in used.values()) >= budget:
        del used[min(used, key=lambda kind: int(used[kind].num_accesses.sum()))]
    if not used:
        return {}
    room = budget - sum(c.index_bytes for c in used.values())
    order = {kind: torch.argsort(c.ids) for kind, c in used.items()}
    ids = torch.cat([c.ids[order[kind]] for kind, c in used.items()])
    counts = torch.cat([c.num_accesses[order[kind]] for kind, c in used.items()])
    number = torch.cat([torch.full((c.ids.numel(),), i) for i, c in enumerate(used.values())])
    cost = torch.tensor([c.row_bytes for c in used.values()])[number]
    best = torch.argsort(counts, descending=True, stable=True)
    best = best[cost[best].cumsum(0) <= room]
    return {kind: ids[best[number[best] == i]] for i, kind in enumerate(used)}
