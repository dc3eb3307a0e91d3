# SPDX-License-Identifier: Apache-2.0
"""FileFeatureStore: rows of tables that stay in files, for features larger than memory."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._base.file_rows import RowsInFiles
from ..comm.collectives import all_reduce_alike, shared_errors
from ..errors import PartitionFormatError
from ..fullbatch import GraphShardManager
from ..partition.format import PartitionConfig, etype_key, read_config
from ..partition.load import features_in_files
from .feature_store import (
    CachedFeatureStore,
    CollectiveFeatureStore,
    FillRequest,
    LocalFeatureStore,
    MappedFeatureStore,
    Ownership,
    RowKind,
)

TablesInFiles = Mapping[tuple[RowKind, str], Sequence[RowsInFiles | None]]
"""(node type or relation, feature name) to each rank's rows; None where not seen."""


class FileFeatureStore(LocalFeatureStore):
    """Rows of tables that lie in files; they are read when a batch wants them, and not kept.

    Where every rank sees the files of all, each reads for itself, and nothing is sent or copied:
    what the system keeps of a file it keeps once for all processes. Where some do not, a rank's
    rows are read by itself and sent, as by `CollectiveFeatureStore`. See [Note: rows of files] in
    `graphshard._base.file_rows`. Making one is collective.

    Args:
        graph: Whose ids requests have: this rank's part of a sharded graph, or a whole one.
        files: The tables in files, of each rank; on a whole graph there is one.
        tables: Further tables, in memory, of this rank's own rows.
        map_features: Ranks on one host share the memory of ``tables``.
        base: Has further tables, in the place of ``tables``; is not closed with this one.

    Raises:
        TypeError: A table that is not dense rows; on all ranks.
        ValueError: A table of another number of rows than this rank owns; on all ranks.

    Example:
        >>> from pathlib import Path
        >>> from tempfile import mkdtemp
        >>> import graphshard as gs
        >>> from graphshard.sampling import DataLoader, NeighborSampler
        >>> folder = Path(mkdtemp())
        >>> gs.partition_graph(gs.data.load_dataset("cora").graph, "cora", 1, folder, quiet=True)
        >>> data = gs.load_dgl_partition_data(folder / "cora.json", 0, leave_features=True)
        >>> graph = gs.construct_full_graph(data)
        >>> store = FileFeatureStore.of_partition(graph, folder / "cora.json")
        >>> sampler = NeighborSampler([5], prefetch_node_feats=["feat"])
        >>> [batch] = DataLoader(graph, range(4), sampler, 4, feature_store=store)
        >>> batch[0].srcdata["feat"].shape[1]
        1433
    """

    def __init__(
        self,
        graph: Any,
        files: TablesInFiles,
        tables: Mapping[tuple[RowKind, str], Tensor] | None = None,
        *,
        map_features: bool = True,
        base: LocalFeatureStore | None = None,
    ) -> None:
        self._files: dict[tuple[RowKind, str], RowsInFiles] = {}
        self._sent: CollectiveFeatureStore | None = None
        own = dict(tables or {})
        self._owns_base = base is None
        if not isinstance(graph, GraphShardManager) or graph.world_size == 1:
            sees_all = True
            self._base = base or LocalFeatureStore(own)
        else:
            sees = all(rows is not None for of_ranks in files.values() for rows in of_ranks)
            sees_all = bool(all_reduce_alike(torch.tensor([sees]).int(), "min", group=graph.group))
            kind = MappedFeatureStore if map_features else CollectiveFeatureStore.of
            self._base = base or kind(graph, own)
        if sees_all:
            self._files = {key: RowsInFiles.joined(_all(rows)) for key, rows in files.items()}
        else:
            mine = {key: of_ranks[graph.rank] for key, of_ranks in files.items()}
            self._sent = CollectiveFeatureStore.of(graph, mine)
        self._on_disk = {kind for kind, _ in files}
        there = {**self._base.tables, **self._files}
        super().__init__(there if self._sent is None else {**there, **self._sent.tables})

    @classmethod
    def of_partition(
        cls,
        graph: Any,
        data: str | os.PathLike[str],
        *,
        cache_bytes: int = 0,
        dtype: torch.dtype | None = None,
    ) -> LocalFeatureStore:
        """The features named ``feat`` of a partition that graphshard wrote; collective.

        Args:
            graph: This rank's part of it.
            data: The partition's JSON.
            cache_bytes: What rows that are read most may take on this rank. They are known by
                drawing the first epoch once ahead.
            dtype: What rows are converted to; by default they are as they are stored.

        Returns:
            The store, behind a `CachedFeatureStore` if there is a cache.
        """
        group = graph.group if isinstance(graph, GraphShardManager) else None
        number = graph.world_size if isinstance(graph, GraphShardManager) else 1
        own = graph.rank if isinstance(graph, GraphShardManager) else 0
        with shared_errors(group):
            files = tables_in_files(read_config(data), number, own)
            if dtype is not None:
                files = converted(files, dtype)
        return with_cache(cls(graph, files), graph, cache_bytes)

    def fill(self, requests: Sequence[FillRequest]) -> None:
        sent: list[FillRequest] = []
        in_memory: list[FillRequest] = []
        for rows in requests:
            to_send, others = {}, {}
            for name, out in rows.outs.items():
                key = rows.kind, name
                if key in self._files:
                    self._files[key].read(out, rows.places, rows.ids)
                elif self._sent is not None and key in self._sent.tables:
                    to_send[name] = out
                else:
                    others[name] = out
            for outs, of in ((to_send, sent), (others, in_memory)):
                if outs:
                    of.append(replace(rows, outs=outs))
        if self._sent is not None:
            self._sent.fill(sent)
        self._base.fill(in_memory)

    def is_remote(self, kind: RowKind, ids: Tensor) -> Tensor | None:
        """Rows that are read from a file are worth a place in a cache, as those of others are."""
        if kind in self._on_disk:
            return torch.ones_like(ids, dtype=torch.bool)
        return self._base.is_remote(kind, ids)

    def _distinct(self, kind: RowKind, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        distinct, places = torch.unique(ids, return_inverse=True)
        return (ids, None) if distinct.numel() == ids.numel() else (distinct, places)

    def on(self, group: dist.ProcessGroup | None) -> FileFeatureStore:
        new = super().on(group)
        new._base = self._base.on(group)
        new._sent = None if self._sent is None else self._sent.on(group)
        return new

    def close(self) -> None:
        super().close()
        self._files = {}
        if self._sent is not None:
            self._sent.close()
        if self._owns_base:
            self._base.close()


def tables_in_files(config: PartitionConfig, num_ranks: int, own: int) -> TablesInFiles:
    """What this rank sees of the features named ``feat`` in the files of a partition's parts.

    Raises:
        PartitionFormatError: The own part's are not there.
    """
    parts: list[dict[RowKind, RowsInFiles]] = []
    kinds: dict[str, RowKind] = {ntype: ntype for ntype in config.book(own).ntypes}
    kinds |= {etype_key(etype): etype for etype in config.book(own).canonical_etypes}
    for part in range(num_ranks):
        try:
            rows = features_in_files(config, part, "node_feats")
            rows |= features_in_files(config, part, "edge_feats")
        except PartitionFormatError:
            if part == own:
                raise
            rows = {}
        parts.append({kinds[name.rpartition("/")[0]]: of for name, of in rows.items()})
    return {(kind, "feat"): [rows.get(kind) for rows in parts] for kind in parts[own]}


def converted(files: TablesInFiles, dtype: torch.dtype) -> TablesInFiles:
    """The same tables, of another dtype when they are read."""
    return {
        key: [None if rows is None else rows.as_dtype(dtype) for rows in of_ranks]
        for key, of_ranks in files.items()
    }


def with_cache(store: FileFeatureStore, graph: Any, cache_bytes: int) -> LocalFeatureStore:
    """The store behind a cache of its most read rows, if that has bytes; collective."""
    if not cache_bytes:
        return store
    group = graph.group if isinstance(graph, GraphShardManager) else None
    ranges = Ownership.of(graph).ranges
    return CachedFeatureStore(store, ranges, cache_bytes, group, once=True)


def _all(tables: Sequence[RowsInFiles | None]) -> list[RowsInFiles]:
    return [rows for rows in tables if rows is not None]
