# SPDX-License-Identifier: Apache-2.0
"""ClusterManifest: what the JSON of a cluster's checkpoint says, and a check of all of it.

::

    {
     "format": "graphshard-cluster-checkpoint",
     "format_version": 1,
     "step": 20,                  the number in the folder's name
     "world_size": 2,             trainers that wrote it
     "rows": {"node~_N": 2708, "edge~_N:_E:_N": 10556},     of the graph
     "destinations": {"edge~_N:_E:_N": "node~_N"},          of its edges; old ones lack it
     "tables": [...],             name, dtype, row_shape, policy and whether it is persistent
     "state": {"model": ..., "optimizer": ..., "extra": ...},    see ``_state.py``
     "sparse_optimizers": [...],  kind and settings of each
     "files": {...},
     "blake2b": "..."
    }
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...partition.files import FileRecord, digest_of
from .._host_graph import node_policy
from .._tables import TableInfo
from ..checkpoints import (
    SHARED,
    CheckpointNames,
    DamagedError,
    check_positive,
    check_record,
    json_object,
    rank_file,
    read_checked,
    read_sealed,
    write_sealed,
)
from ._rows import id_table, policies_in_files

FORMAT = "graphshard-cluster-checkpoint"
FORMAT_VERSION = 1
STEPS = CheckpointNames("step", least=0)

STATES = ("model", "optimizer", "extra")


@dataclass(frozen=True)
class ClusterManifest:
    """What a manifest says.

    Args:
        step: Number of the checkpoint.
        world_size: Number of trainers that wrote it.
        rows: Number of rows of each policy of the graph.
        destinations: Policy of the edges of each relation to that of the nodes they enter.
        tables: By name; ``starts`` are 0 and the number of rows.
        state: Packed states by name.
        sparse_optimizers: Settings of each.
        files: Of the folder.
        digest: Of the manifest.
    """

    step: int
    world_size: int
    rows: dict[str, int]
    destinations: dict[str, str]
    tables: dict[str, TableInfo]
    state: dict[str, Any]
    sparse_optimizers: list[dict[str, Any]]
    files: dict[str, FileRecord]
    digest: str = ""

    @property
    def policies(self) -> list[str]:
        """Policies whose original ids are in the files."""
        return policies_in_files((info.policy for info in self.tables.values()), self.destinations)


def write_cluster_manifest(folder: Path, manifest: ClusterManifest) -> None:
    """Write the JSON of a checkpoint."""
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "step": manifest.step,
        "world_size": manifest.world_size,
        "rows": manifest.rows,
        "destinations": manifest.destinations,
        "tables": [info.as_json() for info in manifest.tables.values()],
        "state": manifest.state,
        "sparse_optimizers": manifest.sparse_optimizers,
    }
    write_sealed(folder, content, manifest.files)


def read_cluster_manifest(folder: Path) -> ClusterManifest:
    """Read and check the JSON of a checkpoint.

    Raises:
        DamagedError: It is missing, is not what was written, or does not belong to this folder.
        CheckpointError: It is of another format version.
    """
    content, digest = read_sealed(folder, FORMAT, FORMAT_VERSION)
    try:
        return _checked(folder, content, digest)
    except ValueError as error:
        raise DamagedError(f"the manifest of {folder} is damaged ({error})") from None


def _checked(folder: Path, content: Mapping[str, Any], digest: str) -> ClusterManifest:
    step = check_positive(content, "step", 0)
    if folder.name != STEPS.name(step):
        raise ValueError(f"it is of step {step}, and its folder is {folder.name}")
    world_size, files = check_positive(content, "world_size"), json_object(content, "files")
    names = {SHARED, *map(rank_file, range(min(world_size, len(files))))}
    if set(files) != names or len(files) != world_size + 1:
        raise ValueError(f"files must be {SHARED} and one of each of {world_size} ranks")
    rows = json_object(content, "rows")
    for policy in rows:
        check_positive(rows, policy, 0)
    destinations = _destinations(content, rows)
    tables = {}
    for entry in _list_of_objects(content, "tables"):
        info = TableInfo.from_json(entry)
        known = rows.get(info.policy)
        if len(info.starts) != 2 or known not in (None, info.starts[-1]) or info.name in tables:
            raise ValueError(f"the table {info.name!r} does not fit the rows of its policy")
        if info.policy.startswith("edge~") and info.policy not in destinations:
            raise ValueError(f"the table {info.name!r} is of edges without destinations")
        tables[info.name] = info
    state = json_object(content, "state")
    if set(state) != set(STATES):
        raise ValueError(f"state must hold {', '.join(STATES)}")
    return ClusterManifest(
        step=step,
        world_size=world_size,
        rows=rows,
        destinations=destinations,
        tables=tables,
        state=state,
        sparse_optimizers=_list_of_objects(content, "sparse_optimizers"),
        files={name: check_record(name, value) for name, value in files.items()},
        digest=digest,
    )


def _destinations(content: Mapping[str, Any], rows: Mapping[str, int]) -> dict[str, str]:
    if "destinations" not in content:  # written when no type had a colon in its name
        return {p: node_policy(p.rpartition(":")[2]) for p in rows if p.startswith("edge~")}
    found = json_object(content, "destinations")
    for policy, nodes in found.items():
        if policy not in rows or nodes not in rows:
            raise ValueError(f"destinations name {policy!r:.80} or {nodes!r:.80}, and rows do not")
    return found


def _list_of_objects(content: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    value = content.get(key)
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise ValueError(f"{key} must be a list of JSON objects (got {value!r:.80})")
    return value


def check_digests(folder: Path, manifest: ClusterManifest, first: int, step: int) -> None:
    """Read every byte of some files, and compare their digests.

    Args:
        folder: Of the checkpoint.
        manifest: Its manifest.
        first: The first file, by name.
        step: Every so many of them.

    Raises:
        DamagedError: A file is not the one that the manifest speaks of.
    """
    for name in sorted(manifest.files)[first::step]:
        try:
            found = digest_of(folder / name)
        except (OSError, ValueError) as error:
            raise DamagedError(f"{folder / name} is missing or damaged ({error})") from None
        if found != manifest.files[name].blake2b:
            raise DamagedError(
                f"{folder / name} is damaged: its digest is not that of the manifest"
            )


def read_row_files(folder: Path, manifest: ClusterManifest) -> list[dict[str, Tensor]]:
    """The mapped tensors of each trainer's file, checked against what the manifest says of them.

    Raises:
        DamagedError: A file is damaged, or has other tensors.
    """
    files = []
    for rank in range(manifest.world_size):
        name = rank_file(rank)
        files.append(read_checked(folder / name, manifest.files[name], whole=False))
    for key, info in _expected(manifest).items():
        total = 0
        for rank, file in enumerate(files):
            rows = file.get(key)
            if rows is None or rows.dtype != info.dtype or tuple(rows.shape[1:]) != info.row_shape:
                raise DamagedError(f"{folder / rank_file(rank)} has no rows {key!r}, or others")
            total += len(rows)
        if total != info.starts[-1]:
            raise DamagedError(f"{folder} has {total} rows {key!r} and not {info.starts[-1]}")
    return files


def _expected(manifest: ClusterManifest) -> dict[str, TableInfo]:
    found = {f"row/{name}": info for name, info in manifest.tables.items()}
    for policy in manifest.policies:
        starts = (0, manifest.rows.get(policy, 0))
        ids = TableInfo(id_table(policy), torch.int64, (), starts, policy)
        found[f"id/{policy}"] = ids
        if policy.startswith("node~"):
            found[f"structure/{policy}"] = ids
    return found


def check_graph(manifest: ClusterManifest, rows: Mapping[str, int], folder: Path) -> None:
    """Raise unless a checkpoint is of a graph with so many rows of each policy.

    Raises:
        CheckpointError: It is of another graph.
    """
    different = [
        f"{policy} has {manifest.rows.get(policy, 'no')} rows there, {rows.get(policy, 'no')} here"
        for policy in sorted({*manifest.rows, *rows})
        if manifest.rows.get(policy) != rows.get(policy)
    ]
    if different:
        raise CheckpointError(
            f"{folder} is of another graph: {'; '.join(different)}; give the checkpoint_dir "
            "of this graph"
        )


def check_table(saved: TableInfo, here: TableInfo, folder: Path) -> None:
    """Raise unless rows of a checkpoint fit the table of their name.

    Raises:
        CheckpointError: They have another shape, dtype or policy.
    """
    one, other = (
        (info.dtype, (info.starts[-1], *info.row_shape), info.policy) for info in (saved, here)
    )
    if one != other:
        raise CheckpointError(
            f"{saved.name!r} is {one[0]} of shape {one[1]}, {one[2]} in {folder} and {other[0]} of "
            f"shape {other[1]}, {other[2]} here; make it as it was saved, or delete it"
        )
