# SPDX-License-Identifier: Apache-2.0
"""Row sources: where the feature rows of a batch come from.

Every source answers `RowSource.fetch` with the rows as they would be indexed from the whole
table. Sources can be laid over one another (a cache over an exchange), so underneath each of them
writes rows to given places of a given tensor, and nothing is copied twice.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ...comm import agree, share_error
from ...comm.group import GroupState, group_state
from ...comm.wire import row_bytes
from ...fullbatch import GraphShardManager
from ...ops import IdTable, copy_rows
from .._announce import announce
from .._ownership import ByOwner, Kind, Ownership
from ._row_buffers import RowBuffers
from ._row_exchange import RowExchange

Tables = Mapping[tuple[Kind, str], Tensor]
"""(node type or relation, feature name) to rows."""

R = TypeVar("R", bound="Rows")


@dataclass(frozen=True)
class RowRequest:
    """Rows that are wanted.

    Args:
        ntype: Node type; or a relation, for features of edges.
        names: Which features.
        ids: Integer ``[n]``, global ids of the type, in any order; repeats are legal.
        distinct: Says that there are no repeats, which then need not be looked for.
    """

    ntype: Kind
    names: tuple[str, ...]
    ids: Tensor
    distinct: bool = False


class RowSource(Protocol):
    """Gives feature rows by global id."""

    def fetch(self, requests: Sequence[RowRequest]) -> list[dict[str, Tensor]]:
        """The rows of each request by name, ``[n, *]`` in the order of its ids.

        Where rows are spread over ranks this is collective: every rank must ask for the same
        types and names in the same order, of any number of ids.
        """

    def on(self, group: dist.ProcessGroup | None) -> RowSource:
        """The same source, communicating over another group of the same ranks."""

    def close(self) -> None:
        """Let go of memory; nothing can be fetched afterwards."""


@dataclass(frozen=True)
class Wanted:
    """Rows that are wanted, and where they go.

    Args:
        kind: What the ids count.
        ids: int64 ``[n]``.
        outs: By feature name, tensors to write to.
        places: Row of ``outs`` for each id; None for row i for the i-th id.
    """

    kind: Kind
    ids: Tensor
    outs: Mapping[str, Tensor]
    places: Tensor | None

    def part(self, chosen: Tensor) -> Wanted:
        """The ids at some positions."""
        places = chosen if self.places is None else self.places.index_select(0, chosen)
        return Wanted(self.kind, self.ids.index_select(0, chosen), self.outs, places)


class Rows(ABC):
    """Base of the row sources of this package.

    Args:
        likes: For each table a tensor of its dtype, row shape and device.
    """

    def __init__(self, likes: Tables) -> None:
        self.likes = dict(likes)
        self._buffers = RowBuffers()
        self._is_closed = False

    @abstractmethod
    def fill(self, wanted: Sequence[Wanted]) -> None:
        """Write rows to their places; ids of one request are distinct. Collective as `fetch`."""

    @abstractmethod
    def is_remote(self, kind: Kind, ids: Tensor) -> Tensor | None:
        """Whether a row comes from elsewhere, bool ``[n]``; None for none of them."""

    @abstractmethod
    def on(self: R, group: dist.ProcessGroup | None) -> R:
        """The same source, communicating over another group of the same ranks."""

    def close(self) -> None:
        """Let go of memory; nothing can be fetched afterwards."""
        self._is_closed = True
        self._buffers.clear()

    def fetch(self, requests: Sequence[RowRequest]) -> list[dict[str, Tensor]]:
        """The rows of each request; see `RowSource.fetch`.

        Raises:
            KeyError: There is no such feature.
            RuntimeError: The source is closed.
        """
        if self._is_closed:
            raise RuntimeError("this row source is closed; make another one")
        wanted, expand = [], []
        for request in requests:
            self._check_names(request)
            ids = request.ids.to("cpu", torch.int64)
            distinct, local = ids, None
            if not request.distinct:
                distinct, local = self._distinct(request.ntype, ids)
            outs = {n: self._empty(request.ntype, n, distinct.numel()) for n in request.names}
            wanted.append(Wanted(request.ntype, distinct, outs, None))
            expand.append(local)
        self.fill(wanted)
        return [
            dict(rows.outs)
            if local is None
            else {n: out.index_select(0, local.to(out.device)) for n, out in rows.outs.items()}
            for rows, local in zip(wanted, expand, strict=True)
        ]

    def _empty(self, kind: Kind, name: str, num_rows: int) -> Tensor:
        """Memory for rows of a table."""
        like = self.likes[kind, name]
        shape = (num_rows, *like.shape[1:])
        if like.device.type == "cpu":
            return self._buffers.empty(shape, like.dtype)
        return torch.empty(shape, dtype=like.dtype, device=like.device)

    def _check_names(self, request: RowRequest) -> None:
        for name in request.names:
            if (request.ntype, name) not in self.likes:
                known = sorted(n for kind, n in self.likes if kind == request.ntype)
                raise KeyError(f"no feature {name!r} of {request.ntype!r}; there are {known}")

    def _distinct(self, kind: Kind, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Distinct ids and where each of ``ids`` is among them; None where they were distinct."""
        return ids, None

    def names_of(self, kind: Kind) -> tuple[str, ...]:
        """Features of nodes of a type, or of edges of a relation."""
        return tuple(name for k, name in self.likes if k == kind)

    def row_bytes(self, kind: Kind) -> int:
        """Bytes in one row of all features of a kind."""
        return sum(row_bytes(like) for (k, _), like in self.likes.items() if k == kind)


class LocalRows(Rows):
    """Rows of tables that are whole in this process.

    Args:
        tables: (node type or relation, name) to ``[num_ids, *]``.
    """

    def __init__(self, tables: Tables) -> None:
        super().__init__({key: table[:0] for key, table in tables.items()})
        self._tables = dict(tables)

    def fill(self, wanted: Sequence[Wanted]) -> None:
        for rows in wanted:
            for name, out in rows.outs.items():
                copy_rows(out, rows.places, self._tables[rows.kind, name], rows.ids)

    def is_remote(self, kind: Kind, ids: Tensor) -> Tensor | None:
        return None

    def on(self, group: dist.ProcessGroup | None) -> LocalRows:
        return copy.copy(self)

    def close(self) -> None:
        super().close()
        self._tables = {}


class CollectiveRows(Rows):
    """Rows of tables that are spread over ranks, each row with the rank that owns the id.

    A fetch is three exchanges for all requests together: sizes, distinct ids of rows of other
    ranks, and the rows. This rank's own rows are read directly. With P ranks and R requests this
    rank sends in one fetch ``4 (2 + R) (P - 1)`` bytes, 4 bytes for each id that it asks of others
    (8 where a type or relation has 2^31 ids or more), and the rows that others ask of it.

    Args:
        manager: The graph that ids belong to; collective.
        tables: (node type or relation, name) to this rank's own rows ``[num_owned, *]``. All ranks
            pass the same keys, dtypes and row shapes.
        group: Who takes part; by default the ranks that share the graph.

    Raises:
        TypeError: Not a dense tensor; on all ranks.
        ValueError: An unknown type, another number of rows, a tensor that requires a gradient, or
            ranks that differ; on all ranks.
    """

    def __init__(
        self,
        manager: GraphShardManager,
        tables: Tables,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        group = manager.group if group is None else group
        self._set(Ownership.of(manager, group), tables, group_state(group))

    @classmethod
    def over(cls, ownership: Ownership, tables: Tables, state: GroupState) -> CollectiveRows:
        """The same, where who owns what is known already; collective."""
        new = cls.__new__(cls)
        new._set(ownership, tables, state)
        return new

    def _set(self, ownership: Ownership, tables: Tables, state: GroupState) -> None:
        self.ownership = ownership
        self.state = state
        check_tables(ownership, tables, state)
        super().__init__({key: table[:0] for key, table in tables.items()})
        self._tables = dict(tables)
        self._id_tables: dict[Kind, IdTable] = {}

    def fill(self, wanted: Sequence[Wanted]) -> None:
        if not wanted:
            return
        grouped = [self.ownership.by_owner(rows.kind, rows.ids) for rows in wanted]
        if self.state.world_size == 1:
            self._fill_own(wanted, grouped)
            return
        splits = torch.tensor([ids.splits for ids in grouped], dtype=torch.int64)
        asked_of_me, _ = announce(
            self.state, "what rows are fetched", self._signature(wanted), None, splits.t()
        )
        exchange = RowExchange(self.state, grouped, asked_of_me, self._buffers)
        exchange.run(
            [[self._tables[rows.kind, name] for name in rows.outs] for rows in wanted],
            [list(rows.outs.values()) for rows in wanted],
            [rows.places for rows in wanted],
            lambda: self._fill_own(wanted, grouped),
        )

    def _fill_own(self, wanted: Sequence[Wanted], grouped: Sequence[ByOwner]) -> None:
        """Write the rows that this rank has itself."""
        for rows, ids in zip(wanted, grouped, strict=True):
            _, own = ids.places()
            index, places = ids.own_rows, own
            if rows.places is not None:
                places = rows.places if own is None else rows.places.index_select(0, own)
            for name, out in rows.outs.items():
                copy_rows(out, places, self._tables[rows.kind, name], index)

    def _signature(self, wanted: Sequence[Wanted]) -> str:
        return "; ".join(f"{rows.kind}: {list(rows.outs)}" for rows in wanted)

    def is_remote(self, kind: Kind, ids: Tensor) -> Tensor | None:
        if self.state.world_size == 1:
            return None
        first = self.ownership.first(kind)
        return (ids < first) | (ids >= first + self.ownership.num_owned(kind))

    def on(self, group: dist.ProcessGroup | None) -> CollectiveRows:
        new = copy.copy(self)
        new.state = same_ranks(self.state, group)
        new._id_tables = {}  # scratch space is for one thread
        return new

    def close(self) -> None:
        super().close()
        self._tables, self._id_tables = {}, {}

    def _distinct(self, kind: Kind, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        if kind not in self._id_tables:
            self._id_tables[kind] = IdTable(self.ownership.ranges[kind].num_ids)
        distinct, local = self._id_tables[kind].renumber(ids[:0], ids)
        if distinct.numel() == ids.numel():
            return ids, None
        return distinct, local


def same_ranks(state: GroupState, group: dist.ProcessGroup | None) -> GroupState:
    """The state of a group that must have the ranks of another one, in the same order.

    Raises:
        ValueError: It has not.
    """
    new = group_state(group)
    if new.members != state.members:
        raise ValueError(
            f"the group must have the ranks {list(state.members)} in this order (got "
            f"{list(new.members)}); make it with torch.distributed.new_group of all of them"
        )
    return new


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


def _check_table(ownership: Ownership, kind: Kind, name: str, table: Tensor) -> None:
    label = f"feature {name!r} of {kind!r}"
    if kind not in ownership.ranges:
        raise ValueError(f"{label}: the graph has {list(ownership.ranges)}")
    if not isinstance(table, Tensor):
        raise TypeError(
            f"{label} must be a tensor (got {type(table).__name__}); use torch.as_tensor"
        )
    if table.layout != torch.strided or table.is_complex():
        raise TypeError(
            f"{label} must be dense and real (got {table.layout}, {table.dtype}); use .to_dense(), "
            "or torch.view_as_real"
        )
    num_owned = ownership.num_owned(kind)
    if table.dim() == 0 or table.shape[0] != num_owned:
        raise ValueError(
            f"{label} must have a row for each of the {num_owned} that this rank owns (got shape "
            f"{tuple(table.shape)})"
        )
    if table.requires_grad:
        raise ValueError(
            f"{label} requires a gradient, which fetched rows do not carry; pass .detach()"
        )
