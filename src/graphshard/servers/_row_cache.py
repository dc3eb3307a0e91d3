# SPDX-License-Identifier: Apache-2.0
"""RowCache: rows of other hosts that this process has read, as long as they are not written to.

[Note: cached rows]
    Batches read the same rows again and again: features of nodes that many others have as a
    neighbour. Rows that a server has from the graph's partition are kept here once they have come.
    They are never taken unasked: each read still asks their host, which says whether its rows of
    the table are those of the partition. A writer says so before the first row changes (see
    `HostTables.mark_written`), and a host answers after it has copied its rows. So a read that
    begins when a write has returned is told, gives up what was kept, and reads anew.
    Nothing is ever kept of a table that was written to, as those that are trained.

    What came first stays: rows that are read often come early. GRAPHSHARD_CACHE_BYTES says how many
    bytes may be kept, 0 for none.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from ..ops import copy_rows
from ._host_tables import TableInfo

CACHE_BYTES = 1 << 28
"""Unless GRAPHSHARD_CACHE_BYTES says otherwise."""


class CachedRows:
    """Some rows of one host, of tables that are read together.

    Args:
        capacity: Most rows; memory is taken as they come.
    """

    def __init__(self, infos: Sequence[TableInfo], capacity: int) -> None:
        self.capacity = capacity
        self.num_bytes = capacity * sum(info.row_bytes for info in infos)
        self._tables = [torch.empty((capacity, *i.row_shape), dtype=i.dtype) for i in infos]
        self._ids = torch.empty(0, dtype=torch.int64)  # ascending
        self._slots = torch.empty(0, dtype=torch.int64)  # where each of them is
        self._lock = threading.Lock()

    def find(self, rows: Tensor) -> Tensor:
        """``[n]``, where each row is kept; -1 if it is not."""
        with self._lock:
            ids, slots = self._ids, self._slots
        if len(ids) == 0:
            return torch.full(rows.shape, -1)
        rows = rows.to(torch.int64)
        at = torch.searchsorted(ids, rows).clamp_(max=len(ids) - 1)
        return torch.where(ids[at] == rows, slots[at], -1)

    def copy(self, outs: Sequence[Tensor], places: Tensor, slots: Tensor) -> None:
        """``out[places] = kept[slots]`` of each table."""
        for out, table in zip(outs, self._tables, strict=True):
            copy_rows(out, places, table, slots)

    def add(self, rows: Tensor, columns: Sequence[Tensor]) -> None:
        """Keep rows that have come, as far as there is room."""
        with self._lock:
            count = len(self._ids)
            if count == self.capacity or rows.numel() == 0:
                return
            # Of a row that is there several times the first; each is as good.
            new, order = torch.sort(rows.to(torch.int64), stable=True)
            is_first = torch.ones_like(new, dtype=torch.bool)
            is_first[1:] = new[1:] != new[:-1]
            before = torch.searchsorted(self._ids, new)
            if count:
                is_first &= self._ids[before.clamp(max=count - 1)] != new
            chosen = is_first.nonzero().view(-1)[: self.capacity - count]
            new, order, before = new[chosen], order[chosen], before[chosen]
            end = count + len(new)
            slots = torch.arange(count, end)
            for table, column in zip(self._tables, columns, strict=True):
                copy_rows(table, slots, column, order)
            # Places among the old and the new ones together.
            at = before + torch.arange(len(new))
            is_old = torch.ones(end, dtype=torch.bool)
            is_old[at] = False
            ids, all_slots = (
                torch.empty(end, dtype=torch.int64),
                torch.empty(end, dtype=torch.int64),
            )
            ids[at], all_slots[at] = new, slots
            ids[is_old], all_slots[is_old] = self._ids, self._slots
            self._ids, self._slots = ids, all_slots


class RowCache:
    """What a process keeps of the tables of other hosts; see [Note: cached rows].

    Raises:
        ValueError: GRAPHSHARD_CACHE_BYTES is not a number.
    """

    def __init__(self) -> None:
        self._room = _bytes_allowed()
        self._kept: dict[tuple[tuple[str, ...], int], CachedRows] = {}
        self._changed: set[tuple[str, int]] = set()
        self._lock = threading.Lock()

    def of(self, names: Sequence[str], host: int) -> CachedRows | None:
        """What there is of some tables of a host that are read together."""
        return self._kept.get((tuple(names), host))

    def add(
        self, infos: Sequence[TableInfo], host: int, rows: Tensor, columns: Sequence[Tensor]
    ) -> None:
        """Keep rows that a host has from the partition.

        Args:
            rows: Integer ``[n]``, on the host.
            columns: Of each table, ``[n, *row_shape]``.
        """
        key = tuple(info.name for info in infos), host
        with self._lock:
            if any((name, host) in self._changed for name in key[0]):
                return
            kept = self._kept.get(key)
            if kept is None:
                row_bytes = max(1, sum(info.row_bytes for info in infos))
                capacity = min(self._room // row_bytes, infos[0].shape_on(host)[0])
                if capacity == 0:
                    return
                kept = self._kept[key] = CachedRows(infos, capacity)
                self._room -= kept.num_bytes
        kept.add(rows, columns)

    def forget(self, name: str, host: int) -> None:
        """Keep nothing of a table, now and later: it was written to, or is another one now."""
        with self._lock:
            self._changed.add((name, host))
            for key in [key for key in self._kept if key[1] == host and name in key[0]]:
                self._room += self._kept.pop(key).num_bytes


def _bytes_allowed() -> int:
    text = os.environ.get("GRAPHSHARD_CACHE_BYTES")
    if text is None:
        return CACHE_BYTES
    if not text.isdecimal():
        raise ValueError(
            f"GRAPHSHARD_CACHE_BYTES must be a whole number of bytes (got {text!r:.80}); 0 keeps "
            "no rows of other hosts"
        )
    return int(text)
