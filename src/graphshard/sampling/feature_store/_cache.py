# SPDX-License-Identifier: Apache-2.0
"""CachedFeatureStore: a bounded copy of the remote rows that will be read most."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..._base.ranges import RangeMap
from ...comm import all_reduce, share_error
from ...ops import copy_rows
from .._ownership import RowKind
from ._feature_store import FeatureRequest
from ._tables import FillRequest, LocalFeatureStore

_MESSAGE_BYTES = 1 << 26
_SLOT_BYTES = 4


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

    Raises:
        ValueError: A negative budget.
    """

    def __init__(
        self,
        base: LocalFeatureStore,
        ranges: Mapping[RowKind, RangeMap],
        budget_bytes: int,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if budget_bytes < 0:
            raise ValueError(
                f"budget_bytes must be a number of bytes, at least 0 (got {budget_bytes})"
            )
        super().__init__(base.tables)
        self._base, self._ranges, self._group = base, ranges, group
        self.budget_bytes = budget_bytes
        self._content = _CacheContent()

    @property
    def hit_rate(self) -> float:
        """Part of the accesses to remote rows, since `prepare`, that were answered from here."""
        total = self.num_hits + self.num_misses
        return self.num_hits / total if total else 0.0

    @property
    def num_hits(self) -> int:
        """Accesses to remote rows, since `prepare`, that were answered from here."""
        return self._content.num_hits

    @property
    def num_misses(self) -> int:
        """Accesses to remote rows, since `prepare`, that had to be fetched."""
        return self._content.num_misses

    @property
    def num_bytes(self) -> int:
        """Bytes that rows and index take."""
        arrays = [*self._content.slots.values(), *self._content.tables.values()]
        return sum(array.numel() * array.element_size() for array in arrays)

    @property
    def num_rows(self) -> int:
        """Rows that are kept, of all types together."""
        return self._content.num_rows

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
        error = None
        chosen: dict[RowKind, Tensor] = {}
        try:
            chosen = self._choose(counts)
        except ValueError as caught:
            error = caught
        share_error(error, self._group)
        self._content.clear()
        for kind in self._kinds():
            ids = chosen.get(kind, torch.empty(0, dtype=torch.int64))
            for name, table in self._fetched(kind, ids).items():
                self._content.tables[kind, name] = table
            if ids.numel():
                slots = torch.full((self._ranges[kind].num_ids,), -1, dtype=torch.int32)
                slots[ids] = torch.arange(ids.numel(), dtype=torch.int32)
                self._content.slots[kind] = slots
                self._content.num_rows += ids.numel()

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
        num_rounds = int(all_reduce(rounds, "max", group=self._group))
        tables = {}
        for name in self.feature_names(kind):
            tables[name] = self._empty(kind, name, ids.numel())
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
        slots = self._content.slots.get(rows.kind)
        if slots is not None:
            slot = slots.index_select(0, rows.ids)
            hit = (slot >= 0).nonzero().view(-1)
            hits = hit.numel()
            if hits:
                missed = rows.part((slot < 0).nonzero().view(-1))
                places = rows.places_of(hit)
                slot = slot.index_select(0, hit)
                for name, out in rows.outs.items():
                    kept = self._content.tables[rows.kind, name]
                    copy_rows(out, places, kept, slot)
        remote = self._base.is_remote(missed.kind, missed.ids)
        self._content.num_hits += hits
        self._content.num_misses += 0 if remote is None else int(remote.sum())
        return missed

    def is_remote(self, kind: RowKind, ids: Tensor) -> Tensor | None:
        remote = self._base.is_remote(kind, ids)
        slots = self._content.slots.get(kind)
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
        self._content = _CacheContent()
        self._base.close()


class _CacheContent:
    """What a cache holds and has counted; shared by copies of it for several groups."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.slots: dict[RowKind, Tensor] = {}
        self.tables: dict[tuple[RowKind, str], Tensor] = {}
        self.num_rows = self.num_hits = self.num_misses = 0


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
        candidates: By kind.
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
