# SPDX-License-Identifier: Apache-2.0
"""MappedFeatureStore: ranks on one host read each other's rows from memory that they share."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...comm.group import group_state
from ...fullbatch import GraphShardManager
from ...ops import copy_rows
from .._ownership import Ownership, RowKind, owners, same_ranks
from ._hosts import Hosts
from ._shared_memory import SharedArray, share_arrays
from ._tables import CollectiveFeatureStore, FillRequest, Tables, TableStore, check_tables


class MappedFeatureStore(TableStore):
    """Rows of tables that are spread over ranks, those of ranks on this host read directly.

    Each rank copies its rows, once, into memory that all ranks of its host map; it has no name in
    any file system, and goes when the last of them ends. Rows of ranks on other hosts come as from
    `CollectiveFeatureStore`. Where all ranks are on one host, nothing is ever sent.

    Args:
        manager: The graph that ids belong to; collective.
        tables: As for `CollectiveFeatureStore`. The rows are copied: later changes to a table are
            not seen.
        group: Who takes part; by default the ranks that share the graph.
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
        group: dist.ProcessGroup | None = None,
        *,
        directory: str | os.PathLike[str] | None = None,
    ) -> None:
        group = manager.group if group is None else group
        ownership, state = Ownership.of(manager, group), group_state(group)
        check_tables(ownership, tables, state)
        super().__init__({key: table[:0].cpu() for key, table in tables.items()})
        self.ownership = ownership
        self.hosts = Hosts.find(state, directory)
        arrays = [
            SharedArray.like(table, ownership.ranges[kind].starts)
            for (kind, _), table in tables.items()
        ]
        shared = share_arrays(state, self.hosts, arrays, whole=False, directory=directory)
        self._tables = dict(zip(tables, shared, strict=True))
        self._state = state
        self._far = None
        if len(self.hosts.leaders) > 1:
            # It reads its own rows from the shared memory too, so the caller's may go.
            own = {
                (kind, name): table[ownership.first(kind) :][: ownership.num_owned(kind)]
                for (kind, name), table in self._tables.items()
            }
            self._far = CollectiveFeatureStore(ownership, own, state)
        is_far = [leader != self.hosts.leader[state.rank] for leader in self.hosts.leader]
        self._is_far = torch.tensor(is_far)

    def fill(self, requests: Sequence[FillRequest]) -> None:
        far: list[FillRequest] = []
        for rows in requests:
            near = rows
            remote = self.is_remote(rows.kind, rows.ids)
            if remote is not None:
                far.append(rows.part(remote.nonzero().view(-1)))
                near = rows.part((~remote).nonzero().view(-1))
            for name, out in rows.outs.items():
                copy_rows(out, near.places, self._tables[rows.kind, name], near.ids)
        if self._far is not None:
            self._far.fill(far)

    def is_remote(self, kind: RowKind, ids: Tensor) -> Tensor | None:
        if self._far is None:
            return None
        return self._is_far[owners(self.ownership.ranges[kind], ids).long()]

    def on(self, group: dist.ProcessGroup | None) -> MappedFeatureStore:
        new = copy.copy(self)
        if self._far is None:
            same_ranks(self._state, group)
        else:
            new._far = self._far.on(group)
        return new

    def close(self) -> None:
        super().close()
        self._tables = {}
        if self._far is not None:
            self._far.close()
