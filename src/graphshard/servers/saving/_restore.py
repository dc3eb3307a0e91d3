# SPDX-License-Identifier: Apache-2.0
"""restore_tables: what a server puts into its tables when it is started again.

A server does this on its own, before it answers. It takes the rows of its host alone, and checks
all files, so that all servers find the same checkpoint whole.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from ...errors import CheckpointError
from .._host_graph import GraphIds
from .._tables import HostTables, TableInfo
from ..checkpoints import DamagedError
from ._load import find_rows
from ._manifest import (
    STEPS,
    ClusterManifest,
    check_digests,
    check_graph,
    check_table,
    read_cluster_manifest,
    read_row_files,
)
from ._rows import Structure, pieces


@dataclass(frozen=True)
class RestoredTables:
    """What a server has restored.

    Args:
        path: Folder of the checkpoint.
        step: Its number.
        num_tensors: How many tensors.
        digest: Of the manifest.
    """

    path: Path
    step: int
    num_tensors: int
    digest: str


def restore_tables(
    tables: HostTables, ids: GraphIds, checkpoint_dir: str | os.PathLike[str]
) -> RestoredTables | None:
    """Put a host's rows of persistent tensors from the newest checkpoint into its tables.

    Features of the graph that trainers had written to are among them.

    Args:
        tables: Of the host, filled with its parts.
        ids: Of the graph.
        checkpoint_dir: The folder of checkpoints.

    Returns:
        What was restored; None if there is no checkpoint yet.

    Raises:
        CheckpointError: No checkpoint is whole, or it is of another graph.
        OSError: There is no room.
    """
    folder, damage = Path(checkpoint_dir), ""
    for name in STEPS.find(folder):
        path = folder / name
        try:
            manifest = read_cluster_manifest(path)
            check_digests(path, manifest, 0, 1)
            files = read_row_files(path, manifest)
        except DamagedError as error:
            damage = damage or str(error)
            continue
        return _restore(tables, ids, path, manifest, files)
    if damage:
        raise CheckpointError(f"no checkpoint in {folder} is whole: {damage}")
    return None


def _restore(
    tables: HostTables,
    ids: GraphIds,
    path: Path,
    manifest: ClusterManifest,
    files: Sequence[dict[str, Tensor]],
) -> RestoredTables:
    check_graph(manifest, {policy: parts.num_ids for policy, parts in ids.parts.items()}, path)
    known = {info.name: info for info in tables.infos()}
    chosen = [i for i in manifest.tables.values() if i.persistent]
    for info in chosen:
        if info.name in known:
            check_table(info, known[info.name], path)

    def starts_of(policy: str) -> tuple[int, ...]:
        if policy in ids.parts:
            return ids.starts(policy)
        return (0, *[1] * ids.num_hosts)

    def read(name: str, start: int, stop: int) -> Tensor:
        first = known[name].starts[tables.host]
        return tables.rows(name)[start - first : stop - first]

    structure = Structure(known, ids.destinations, read)
    shares, places = {}, {}
    for policy in sorted({info.policy for info in chosen} | set(manifest.policies)):
        starts = starts_of(policy)
        shares[policy] = share = starts[tables.host], starts[tables.host + 1]
        places[policy] = find_rows(files, policy, share, starts, read, structure)
    for info in chosen:
        starts = starts_of(info.policy)
        tables.create(TableInfo(info.name, info.dtype, info.row_shape, starts, info.policy, True))
        tables.mark_written(info.name)
        rows, (start, stop) = tables.rows(info.name), shares[info.policy]
        saved, found = places[info.policy]
        for begin, end in pieces(start, stop, info.dtype, info.row_shape):
            chunk = saved.read(f"row/{info.name}", found[begin - start : end - start])
            rows[begin - start : end - start] = chunk
    return RestoredTables(path, manifest.step, len(chosen), manifest.digest)
