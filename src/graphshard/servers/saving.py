# SPDX-License-Identifier: Apache-2.0
"""Rows of tables in checkpoints: written by the trainers that have them, found by original id.

======================  ===========================================================================
tensor in a file        holds
======================  ===========================================================================
``row/TABLE``           rows of a table
``id/POLICY``           the original ids of rows of that policy, in the same order
``structure/POLICY``    of nodes: a number made of their in-degrees, which another graph has not
======================  ===========================================================================


States of models and optimizers as JSON and named tensors, and back; and whether they fit.

Values that JSON has stand for themselves; others are objects with one key: ``{"tensor": name}``,
``{"dict": [[key, value], ...]}``, ``{"tuple": [...]}``, ``{"float": "inf"}``.


ClusterManifest: what the JSON of a cluster's checkpoint says, and a check of all of it.

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


save_checkpoint: each trainer writes its rows of all tables; rank 0 the states, then the JSON.

load_checkpoint: each trainer finds the rows of its share by original id, and writes them.

Everything is read and checked first, on all ranks, so that an error leaves the cluster as it was.


restore_tables: what a server puts into its tables when it is started again.

A server does this on its own, before it answers. It takes the rows of its host alone, and checks
all files, so that all servers find the same checkpoint whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from .._base.files import check_text
from ..comm import agree, all_reduce, barrier, come_together, rank, world_size
from ..comm.collectives import text_of_rank_0
from ..errors import CheckpointError
from ..partition.files import FileRecord, RowSource, digest_of, write_tensors
from ._cluster import Cluster, RowsRequest, ServedHost
from ._host_graph import GraphIds, node_policy, pointer_table_of
from ._host_tables import HostTables, TableInfo
from ._job import Job, current_job
from ._message_stream import WireMessage
from ._sparse_optimizers import SparseOptimizer
from .checkpoints import (
    SHARED,
    CheckpointNames,
    DamagedError,
    RunLock,
    check_positive,
    check_record,
    check_shared,
    everywhere,
    json_object,
    on_rank_0,
    rank_file,
    read_checked,
    read_sealed,
    records_of,
    remove,
    write_sealed,
    write_whole,
)

PIECE_BYTES = 1 << 24
"""Rows are read, compared and written about so many bytes at a time."""
_IDS_AT_ONCE = 1 << 20

Reader: TypeAlias = Callable[[str, int, int], Tensor]
"""Rows ``[start, stop)`` of a table, by its name."""


@dataclass(frozen=True)
class RowStream:
    """Rows that are read while they are written to a file. A `partition.files.RowSource`.

    Args:
        dtype: Of the rows.
        row_shape: Of one.
        start: The first row.
        stop: One past the last.
        read: Gives rows ``[start, stop)``.
    """

    dtype: torch.dtype
    row_shape: tuple[int, ...]
    start: int
    stop: int
    read: Callable[[int, int], Tensor]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.stop - self.start, *self.row_shape))

    def slices(self) -> Iterator[Tensor]:
        for begin, end in pieces(self.start, self.stop, self.dtype, self.row_shape):
            yield self.read(begin, end)


def pieces(
    start: int, stop: int, dtype: torch.dtype, row_shape: Sequence[int]
) -> Iterator[tuple[int, int]]:
    """``[start, stop)`` in pieces of a few megabytes."""
    most = max(1, PIECE_BYTES // max(1, math.prod(row_shape) * dtype.itemsize))
    for begin in range(start, stop, most):
        yield begin, min(stop, begin + most)


def cluster_reader(cluster: Cluster) -> Reader:
    """Reads rows of any host; those of this one are not copied."""

    def read(name: str, start: int, stop: int) -> Tensor:
        starts, here = cluster.info(name).starts, cluster.here
        rows = cluster.hosts[here].rows(name)
        if rows is not None and starts[here] <= start <= stop <= starts[here + 1]:
            return rows[start - starts[here] : stop - starts[here]]
        return cluster.read([RowsRequest([name], torch.arange(start, stop))])[0]

    return read


def id_table(policy: str) -> str:
    """The table of original ids."""
    return f"{policy}~orig_id"


def policies_in_files(policies: Iterable[str], destinations: Mapping[str, str]) -> list[str]:
    """Policies whose ids are in a checkpoint: those given, and of edges their destinations'."""
    found = set(policies)
    found |= {destinations[policy] for policy in found if policy.startswith("edge~")}
    return sorted(p for p in found if p.startswith(("node~", "edge~")))


class Structure:
    """What tells a node of one graph from that of another: its in-degrees.

    Args:
        tables: Names of all tables.
        destinations: Policy of the edges of each relation to that of the nodes they enter.
        read: Gives rows of tables.
    """

    def __init__(
        self, tables: Iterable[str], destinations: Mapping[str, str], read: Reader
    ) -> None:
        self._read = read
        self._pointers: dict[str, list[str]] = {}
        there = set(tables)
        for edges, nodes in sorted(destinations.items()):
            name = pointer_table_of(edges)
            if name in there:
                self._pointers.setdefault(nodes, []).append(name)

    def of(self, policy: str, starts: Sequence[int], begin: int, end: int) -> Tensor:
        """int64 ``[end - begin]``, one for each of these nodes.

        Args:
            policy: Of the nodes.
            starts: First node of each host, and their number.
            begin: The first node.
            end: One past the last.
        """
        found = torch.zeros(end - begin, dtype=torch.int64)
        for name in self._pointers.get(policy, []):
            salt = hashlib.blake2b(name.encode(), digest_size=7).digest()
            for host in range(len(starts) - 1):
                low, high = max(begin, starts[host]), min(end, starts[host + 1])
                if low < high:  # each host has one pointer more than nodes
                    pointer = self._read(name, low + host, high + host + 1).to(torch.int64)
                    degrees = pointer[1:] - pointer[:-1]
                    found[low - begin : high - begin] += degrees * int.from_bytes(salt, "little")
        return found


class SavedRows:
    """Rows of one policy in the files of a checkpoint, by original id.

    Args:
        files: Tensors of each file.
        policy: Of the rows.
        has_ids: Whether rows have original ids; else they are in order.
    """

    def __init__(
        self, files: Sequence[Mapping[str, Tensor]], policy: str, has_ids: bool = True
    ) -> None:
        self._files, self._policy, self._has_ids = files, policy, has_ids

    def find(self, original: Tensor) -> Tensor:
        """Places of rows among those of all files: int64 ``[n]``.

        Args:
            original: Their ids, int64 ``[n]``.

        Raises:
            CheckpointError: Some are not there.
        """
        if not self._has_ids:
            return original
        ascending, order = torch.sort(original)
        places = torch.full_like(original, -1)
        first = 0
        for file in self._files:
            ids = file[f"id/{self._policy}"]
            for begin in range(0, len(ids) if len(original) else 0, _IDS_AT_ONCE):
                chunk = ids[begin : begin + _IDS_AT_ONCE]
                slot = torch.searchsorted(ascending, chunk).clamp_(max=len(original) - 1)
                hits = (ascending[slot] == chunk).nonzero().view(-1)
                places[order[slot[hits]]] = first + begin + hits
            first += len(ids)
        missing = (places < 0).nonzero().view(-1)
        if missing.numel():
            raise CheckpointError(
                f"{missing.numel()} rows of {self._policy} are not in the checkpoint, such as that "
                f"of original id {int(original[missing[0]])}; it is of another graph"
            )
        return places

    def read(self, key: str, places: Tensor) -> Tensor:
        """Rows of one tensor of the files, from what `find` gave.

        Args:
            key: Its name in the files.
            places: int64 ``[n]``.
        """
        first, found, out = 0, 0, None
        for file in self._files:
            rows = file[key]
            inside = (places >= first) & (places < first + len(rows))
            count = int(inside.sum())
            if count == len(places):
                return _chosen(rows, places - first)
            if count:
                if out is None:
                    out = torch.empty((len(places), *rows.shape[1:]), dtype=rows.dtype)
                out[inside] = _chosen(rows, places[inside] - first)
                found += count
            first += len(rows)
        assert out is not None and found == len(places)
        return out


def _chosen(rows: Tensor, places: Tensor) -> Tensor:
    """``rows[places]``, not copied where they follow each other."""
    count = len(places)
    if count and int(places[-1]) - int(places[0]) == count - 1:
        begin = int(places[0])
        if torch.equal(places, torch.arange(begin, begin + count)):
            return rows[begin : begin + count]
    return rows.index_select(0, places)


# ---------------------------------------------------------------------------- saving._state

Stateful: TypeAlias = Any
"""What has ``state_dict()`` and ``load_state_dict()``, or a dictionary of such; or None."""

_PLAIN = (str, int, float, bool, type(None))


def pack(value: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """A value as JSON has it.

    Args:
        value: Plain values and tensors, in dictionaries, lists and tuples.
        tensors: Where tensors go.
        name: Of the value, for errors and for names of tensors.

    Raises:
        TypeError: Something else is in it.
    """
    if isinstance(value, Tensor):
        key = name
        while key in tensors:
            key += "'"
        tensors[key] = value.detach()
        return {"tensor": key}
    if isinstance(value, Mapping):
        pairs = []
        for key, item in value.items():
            if not isinstance(key, _PLAIN):
                raise TypeError(
                    f"keys of {name} must be text or numbers (got {type(key).__name__})"
                )
            pairs.append([_plain(key), pack(item, tensors, f"{name}/{key}")])
        return {"dict": pairs}
    if isinstance(value, list | tuple):
        items = [pack(item, tensors, f"{name}/{n}") for n, item in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if type(value) in _PLAIN:
        return _plain(value)
    raise TypeError(
        f"{name} must be made of tensors and of values that JSON has (got {type(value).__name__}); "
        "save something else in its place"
    )


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return value


def unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that was packed; tensors are copies.

    Raises:
        ValueError: It is nothing that `pack` makes.
    """
    if isinstance(packed, list):
        return [unpack(item, tensors) for item in packed]
    if isinstance(packed, _PLAIN):
        return packed
    if isinstance(packed, dict) and len(packed) == 1:
        ((kind, content),) = packed.items()
        if kind == "tensor" and isinstance(content, str) and content in tensors:
            return tensors[content].clone()
        if kind == "tuple" and isinstance(content, list):
            return tuple(unpack(item, tensors) for item in content)
        if kind == "float" and content in ("inf", "-inf", "nan"):
            return float(content)
        if kind == "dict" and isinstance(content, list):
            return dict(_pair(pair, tensors) for pair in content)
    raise ValueError(f"the state holds {packed!r:.80}, which is no value")


def _pair(pair: Any, tensors: Mapping[str, Tensor]) -> tuple[Any, Any]:
    if not isinstance(pair, list) or len(pair) != 2:
        raise ValueError(f"the state holds {pair!r:.80}, which is no key and value")
    key = unpack(pair[0], tensors)
    if not isinstance(key, _PLAIN):
        raise ValueError(f"the state holds the key {key!r:.80}")
    return key, unpack(pair[1], tensors)


def state_of(target: Stateful) -> Any:
    """The states of one or several models or optimizers."""
    if isinstance(target, Mapping):
        return {str(key): state_of(each) for key, each in target.items()}
    return None if target is None else _inner(target).state_dict()


def check_state(target: Stateful, state: Any, name: str) -> None:
    """Raise ValueError unless `load_state` works; changes nothing.

    Args:
        target: What the state is for.
        state: As `state_of` gave it.
        name: For errors.
    """
    if target is None:
        return
    if not isinstance(state, Mapping):
        raise ValueError(f"the checkpoint has no state of {name}; leave {name} out")
    if isinstance(target, Mapping):
        _check_same(name, {str(key) for key in target}, set(state))
        for key, each in target.items():
            check_state(each, state[str(key)], f"{name}[{key!r}]")
        return
    inner = _inner(target)
    if isinstance(inner, torch.optim.Optimizer):
        mine, theirs = inner.state_dict()["param_groups"], state.get("param_groups", [])
        counts = [[len(group["params"]) for group in groups] for groups in (mine, theirs)]
        if counts[0] != counts[1]:
            raise ValueError(
                f"{name} has groups of {counts[0]} parameters, and its state those of {counts[1]}; "
                "make it with the same parameters"
            )
        return
    own = inner.state_dict()
    if not isinstance(inner, torch.nn.Module):
        return
    _check_same(name, set(own), set(state))
    for key, value in own.items():
        other = state[key]
        if isinstance(value, Tensor) != isinstance(other, Tensor) or (
            isinstance(value, Tensor) and value.shape != other.shape
        ):
            found = tuple(other.shape) if isinstance(other, Tensor) else type(other).__name__
            expected = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{key!r} of {name} is {expected}, and that of its state {found}")


def _check_same(name: str, mine: set[str], theirs: set[str]) -> None:
    if mine != theirs:
        raise ValueError(
            f"{name} and its state must have the same entries; only {name} has "
            f"{sorted(mine - theirs)}, only its state has {sorted(theirs - mine)}"
        )


def load_state(target: Stateful, state: Any) -> None:
    """Put a state that was checked into its models or optimizers."""
    if isinstance(target, Mapping):
        for key, each in target.items():
            load_state(each, state[str(key)])
    elif target is not None:
        _inner(target).load_state_dict(state)


def _inner(target: Any) -> Any:
    """A model without what trains it on several ranks, whose names are those on one."""
    return target.module if isinstance(target, DistributedDataParallel) else target


# ---------------------------------------------------------------------------- saving._manifest

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
    for number in range(manifest.world_size):
        name = rank_file(number)
        files.append(read_checked(folder / name, manifest.files[name], whole=False))
    for key, info in _expected(manifest).items():
        total = 0
        for number, file in enumerate(files):
            rows = file.get(key)
            if rows is None or rows.dtype != info.dtype or tuple(rows.shape[1:]) != info.row_shape:
                raise DamagedError(f"{folder / rank_file(number)} has no rows {key!r}, or others")
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


# ---------------------------------------------------------------------------- saving._save

_ANONYMOUS = re.compile(r"(^|\.)anonymous-[0-9a-f]+-[0-9]+($|\.)")


def save_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    step: int,
    *,
    model: Stateful = None,
    optimizer: Stateful = None,
    sparse_optimizers: Sequence[SparseOptimizer] = (),
    extra: Any = None,
    keep: int = 2,
) -> Path:
    """Save what is in the cluster, with models and optimizers. All trainers must call.

    Of the cluster: all tensors and embeddings with a name, what sparse optimizers keep beside
    them, and those features of the graph that were written to. Each trainer writes its share of
    the rows, a few megabytes at a time, with their original ids, so that a checkpoint can be loaded
    by other trainers, on other hosts, and on another partition of the graph.

    A checkpoint is there when it is whole: if the job is killed, the one before stays. Nothing is
    saved, and none is removed, where the servers lack a tensor that a trainer holds or that
    ``sparse_optimizers`` use.

    Args:
        checkpoint_dir: A folder that all hosts share, for checkpoints of this job; it is made.
        step: Number of the checkpoint, above those that are in the folder.
        model: A module, or anything else with ``state_dict()``, or a dictionary of such. That of
            rank 0 is saved.
        optimizer: As ``model``.
        sparse_optimizers: Whose settings are saved. Their embeddings must have names.
        extra: Plain values and tensors, in dictionaries, lists and tuples; that of rank 0.
        keep: How many of the newest checkpoints stay in the folder; and, where these hold no
            tensors, the newest that does.

    Returns:
        The folder of the checkpoint.

    Raises:
        CheckpointError: ``checkpoint_dir`` is not shared, in use by another job, or has a
            checkpoint of this step or a later one.
        OSError: A trainer cannot write, such as on a full disk.
        RankError: A trainer failed, or did not answer in time.
        RuntimeError: There is no `DistGraph` yet; or the servers lack rows or tensors, as after a
            server was started again.
        ServerError: A server is gone, or has given this trainer up.
        TypeError: A state holds what JSON and safetensors do not have.
        ValueError: An embedding of ``sparse_optimizers`` has no name, or ``step`` or ``keep`` is
            out of range.

    Example:
        >>> import tempfile, torch
        >>> from graphshard.data import load_dataset
        >>> from graphshard.servers import *
        >>> folder = tempfile.TemporaryDirectory()
        >>> _ = partition_graph(load_dataset("cora").graph, "cora", 2, folder.name, quiet=True)
        >>> g = DistGraph("cora", part_config=f"{folder.name}/cora.json")
        >>> rank = DistTensor((g.num_nodes(),), torch.float32, "rank")
        >>> rank[:] = torch.ones(g.num_nodes())
        >>> save_checkpoint(f"{folder.name}/run", 7, extra={"done": True}).name
        'step-00000007'
        >>> rank[:] = torch.zeros(g.num_nodes())
        >>> load_checkpoint(f"{folder.name}/run").extra, rank.count_nonzero()
        ({'done': True}, 2708)
        >>> exit_client()
        >>> folder.cleanup()
    """
    job, folder = job_with_graph(), Path(checkpoint_dir)
    tensors: dict[str, Tensor] = {}

    def check() -> dict[str, Any]:
        if type(step) is not int or not 0 <= step < 10**12:
            raise ValueError(f"step must be a whole number, 0 or more (got {step!r:.80})")
        if type(keep) is not int or keep < 1:
            raise ValueError(f"keep must be a whole number, at least 1 (got {keep!r:.80})")
        _check_named(sparse_optimizers)
        if rank() != 0:
            return {}
        states = {"model": state_of(model), "optimizer": state_of(optimizer), "extra": extra}
        return {name: pack(value, tensors, name) for name, value in states.items()}

    rule = "all trainers save a checkpoint together; call it on every rank"
    come_together("save_checkpoint", rule)
    state = everywhere(check)
    settings = [optimizer.state_dict() for optimizer in sparse_optimizers]
    agree(json.dumps([step, keep, settings], sort_keys=True), "what is saved")
    job.cluster.settle()
    barrier()  # what trainers have written is there
    tables = _tables_to_save(job, sparse_optimizers)
    lock = _prepare(folder, step)
    try:
        final = folder / STEPS.name(step)

        def write_manifest(partial: Path) -> None:
            manifest = ClusterManifest(
                step=step,
                world_size=world_size(),
                rows={policy: parts.num_ids for policy, parts in job.policies.items()},
                destinations=dict(job.destinations),
                tables=tables,
                state=state,
                sparse_optimizers=settings,
                files=records_of(partial / n for n in (SHARED, *map(rank_file, _ranks()))),
            )
            write_cluster_manifest(partial, manifest)

        sources = _rows_of_rank(job, tables)

        def write_own(partial: Path) -> None:
            write_tensors(partial / rank_file(rank()), sources)
            if rank() == 0:
                write_tensors(partial / SHARED, tensors)

        write_whole(final, write_own, write_manifest)
        if rank() == 0:
            STEPS.remove_old(folder, keep, () if tables else _newest_with_tables(folder))
    finally:
        if lock is not None:
            lock.release()
    return final


def job_with_graph() -> Job:
    """The job of this process, once it knows its graph.

    Raises:
        RuntimeError: It does not.
    """
    job = current_job()
    if not job.policies:
        raise RuntimeError("the graph of the cluster is not known yet; make its DistGraph first")
    return job


def _ranks() -> range:
    return range(world_size())


def _check_named(optimizers: Sequence[SparseOptimizer]) -> None:
    for optimizer in optimizers:
        if not isinstance(optimizer, SparseOptimizer):
            raise TypeError(
                "sparse_optimizers must be SparseAdagrad, SparseAdam or SparseSGD (got "
                f"{type(optimizer).__name__}); pass optimizers of torch as optimizer"
            )
        for tensor in optimizer.tensors():
            if is_anonymous(tensor.name):
                raise ValueError(
                    f"an embedding without a name cannot be saved (got {tensor.name!r}); pass name "
                    "to DistEmbedding"
                )


def is_anonymous(table: str) -> bool:
    """Whether a table cannot be asked for by name."""
    return _ANONYMOUS.search(table.rsplit("~", 1)[-1]) is not None


@dataclass(frozen=True)
class LiveTable:
    """A table that the servers have now.

    Args:
        info: Of the table.
        is_saved: Whether a checkpoint must hold it: it has a name, and is not as the partition of
            the graph has it.
        lacking: Hosts that lack it, because their servers were started again.
    """

    info: TableInfo
    is_saved: bool
    lacking: tuple[int, ...]


def live_tables(job: Job) -> dict[str, LiveTable]:
    """All tables of the cluster, by name."""
    cluster = job.cluster
    cluster.refresh()
    answers = cluster.ask([(number, WireMessage("tables")) for number in range(cluster.num_hosts)])
    infos: dict[str, TableInfo] = {}
    written: set[str] = set()
    hosts: dict[str, set[int]] = {}
    for number, answer in enumerate(answers):
        for fields in answer.fields["tables"]:
            info = TableInfo.from_json(fields)
            infos[info.name] = info
            hosts.setdefault(info.name, set()).add(number)
            if not fields["is_loaded"]:
                written.add(info.name)
    found = {}
    for name, info in sorted(infos.items()):
        is_own = not (name.startswith("graph~") or is_anonymous(name))
        lacking = tuple(n for n in range(cluster.num_hosts) if n not in hosts[name])
        found[name] = LiveTable(info, is_own and name in written, lacking)
    return found


def _tables_to_save(job: Job, optimizers: Sequence[SparseOptimizer]) -> dict[str, TableInfo]:
    """The same on all ranks, with ``starts`` of one host. Collective.

    What this process holds, or an optimizer names, must be there: memory that it has mapped can
    still be read and written after the servers have let it go.
    """
    required = {name for name in job.cluster.held() if not is_anonymous(name)}
    required |= {tensor.name for optimizer in optimizers for tensor in optimizer.tensors()}

    def find() -> str:
        live = live_tables(job)
        lost = sorted(required - live.keys())
        if lost:
            raise RuntimeError(
                f"no server has the tensors {lost} any more, which rank {rank()} uses, so nothing "
                "is saved, and checkpoints that are there stay; if servers were started again, "
                "call load_checkpoint or start the job again, and if the tensors were deleted, "
                "drop what uses them"
            )
        tables = [table for table in live.values() if table.is_saved]
        for table in tables:
            if table.lacking:
                raise RuntimeError(
                    f"hosts {list(table.lacking)} have no rows of {table.info.name!r}: their "
                    "servers were started again; call load_checkpoint first"
                )
        infos = [table.info for table in tables]
        listed = [
            TableInfo(i.name, i.dtype, i.row_shape, (0, i.starts[-1]), i.policy, i.persistent)
            for i in infos
        ]
        return json.dumps([info.as_json() for info in listed])

    listed = json.loads(text_of_rank_0(everywhere(find)))
    return {fields["name"]: TableInfo.from_json(fields) for fields in listed}


def _newest_with_tables(folder: Path) -> list[str]:
    """The newest checkpoint that holds tensors, if there is one."""
    for name in STEPS.find(folder):
        with contextlib.suppress(DamagedError, CheckpointError):
            if read_cluster_manifest(folder / name).tables:
                return [name]
    return []


def _prepare(folder: Path, step: int) -> RunLock | None:
    """Make and hold the folder, and check that all ranks share it; the lock is rank 0's."""
    held: list[RunLock] = []

    def prepare() -> None:
        check_text(str(folder), "checkpoint_dir")
        folder.mkdir(parents=True, exist_ok=True)
        held.append(RunLock(folder))
        STEPS.remove_partial(folder)
        for name in STEPS.find(folder):
            if (STEPS.number(name) or 0) >= step and not _removed_as_damaged(folder / name):
                raise CheckpointError(
                    f"step must be above that of the checkpoints in {folder} (got {step}, there is "
                    f"{name}); save to another folder, or remove those that are later"
                )

    try:
        on_rank_0(prepare)
        check_shared(folder)
    except BaseException:
        for lock in held:
            lock.release()
        raise
    return held[0] if held else None


def _removed_as_damaged(folder: Path) -> bool:
    """Whether a checkpoint was damaged, and is gone."""
    try:
        check_digests(folder, read_cluster_manifest(folder), 0, 1)
        return False
    except DamagedError:
        remove(folder)
        return True


def _rows_of_rank(job: Job, tables: Mapping[str, TableInfo]) -> dict[str, Tensor | RowSource]:
    """This trainer's share of each table, and of what tells which rows they are. Collective."""
    read = cluster_reader(job.cluster)
    structure = Structure(job.cluster.names(), job.destinations, read)
    with_ids = policies_in_files((info.policy for info in tables.values()), job.destinations)
    policies = sorted({*with_ids, *(info.policy for info in tables.values())})
    shares = {policy: job.share(policy) for policy in policies}
    sources: dict[str, Tensor | RowSource] = {}

    def add(key: str, info: TableInfo, name: str) -> None:
        sources[key] = RowStream(
            info.dtype, info.row_shape, *shares[info.policy], lambda a, b: read(name, a, b)
        )

    def add_structure(policy: str) -> None:
        starts = job.starts(policy)
        sources[f"structure/{policy}"] = RowStream(
            torch.int64, (), *shares[policy], lambda a, b: structure.of(policy, starts, a, b)
        )

    for name, info in tables.items():
        add(f"row/{name}", info, name)
    for policy in with_ids:
        add(f"id/{policy}", job.cluster.info(id_table(policy)), id_table(policy))
        if policy.startswith("node~"):
            add_structure(policy)
    return sources


# ---------------------------------------------------------------------------- saving._load


@dataclass(frozen=True)
class ClusterCheckpoint:
    """What was loaded.

    Args:
        path: Folder of the checkpoint.
        step: Its number.
        extra: What was given to `save_checkpoint`.
        tensors: Names of the tensors whose rows were loaded.
    """

    path: Path
    step: int
    extra: Any
    tensors: tuple[str, ...]


@dataclass(frozen=True)
class _Opened:
    """A checkpoint that is whole."""

    path: Path
    manifest: ClusterManifest
    files: list[dict[str, Tensor]]
    shared: dict[str, Tensor]


def load_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    *,
    step: int | None = None,
    model: Stateful = None,
    optimizer: Stateful = None,
    sparse_optimizers: Sequence[SparseOptimizer] = (),
    strict: bool = True,
) -> ClusterCheckpoint:
    """Load what `save_checkpoint` has saved. All trainers must call.

    The number of trainers, hosts and parts may be another: rows go by the original ids of nodes and
    edges. Persistent tensors that the cluster does not have are made, for attachment by name. All
    is checked before the first row is written.

    Args:
        checkpoint_dir: The folder of checkpoints, that all hosts share.
        step: Which of them; None for the newest that is whole.
        model: As it was given to `save_checkpoint`; its state is loaded. None leaves it out.
        optimizer: As ``model``.
        sparse_optimizers: As they were given to `save_checkpoint`, or none.
        strict: Whether cluster and checkpoint must have the same tensors with names. False leaves
            alone what one of them lacks.

    Returns:
        Which checkpoint it was, and its ``extra``.

    Raises:
        CheckpointError: There is none, or none that is whole; it is of another graph or of another
            format version; or a tensor is missing, or has another shape or dtype. On all ranks.
        RankError: A trainer failed, or did not answer in time.
        RuntimeError: There is no `DistGraph` yet.
        ServerError: A server is gone.
        ValueError: The state of ``model`` or an optimizer is of another one.

    Example:
        See `save_checkpoint`.
    """
    job, folder = job_with_graph(), Path(checkpoint_dir)
    rule = "all trainers load a checkpoint together; call it on every rank"
    come_together("load_checkpoint", rule)
    agree(repr((step, len(sparse_optimizers), strict)), "what is loaded")
    job.cluster.settle()
    barrier()
    opened = _open(folder, step)
    path, manifest = opened.path, opened.manifest
    live = everywhere(lambda: live_tables(job))

    def check() -> tuple[dict[str, Any], list[TableInfo]]:
        check_graph(manifest, {p: parts.num_ids for p, parts in job.policies.items()}, path)
        _check_optimizers(sparse_optimizers, manifest, path)
        chosen = _check_tables(opened, live, strict)
        try:
            states = {k: unpack(packed, opened.shared) for k, packed in manifest.state.items()}
        except ValueError as error:
            raise CheckpointError(f"{path} is damaged ({error})") from None
        check_state(model, states["model"], "model")
        check_state(optimizer, states["optimizer"], "optimizer")
        return states, chosen

    states, chosen = everywhere(check)
    policies = sorted({info.policy for info in chosen} | set(manifest.policies))
    shares = {policy: job.share(policy) for policy in policies}
    places = everywhere(lambda: _places(job, opened, shares))
    _make(job, chosen, live)
    everywhere(lambda: _write(job, opened, chosen, shares, places))
    everywhere(lambda: _tell_servers(job, manifest))

    def load_states() -> None:
        load_state(model, states["model"])
        load_state(optimizer, states["optimizer"])
        for each, saved in zip(sparse_optimizers, manifest.sparse_optimizers, strict=False):
            each.load_state_dict(saved)

    everywhere(load_states)
    names = tuple(info.name for info in chosen)
    return ClusterCheckpoint(path, manifest.step, states["extra"], names)


# ---------------------------------------------------------------------------- finding one


def _open(folder: Path, step: int | None) -> _Opened:
    """The newest checkpoint that is whole for all ranks, or that of a step."""

    def find() -> str:
        if rank() != 0:
            return ""
        found = STEPS.find(folder)
        wanted = found if step is None else [name for name in found if STEPS.number(name) == step]
        if not wanted:
            what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            raise CheckpointError(
                f"there is {what} in {folder} (there are: {', '.join(found) or 'none'}); give the "
                "checkpoint_dir that was given to save_checkpoint"
            )
        return "\n".join(wanted)

    names = text_of_rank_0(everywhere(find)).splitlines()
    for name in names:
        opened, damage = _try(folder / name)
        if opened is not None:
            return opened
        if len(names) > 1:
            warnings.warn(f"{damage}; trying the one before", RuntimeWarning, stacklevel=3)
    raise CheckpointError(f"no checkpoint in {folder} is whole: {damage}")


def _try(path: Path) -> tuple[_Opened | None, str]:
    """The checkpoint, or what of it is damaged, the same on all ranks. Collective."""

    def read() -> tuple[_Opened | None, str]:
        try:
            manifest = read_cluster_manifest(path)
            check_digests(path, manifest, rank(), world_size())
            shared = read_checked(path / SHARED, manifest.files[SHARED], whole=False)
            return _Opened(path, manifest, read_row_files(path, manifest), shared), ""
        except DamagedError as error:
            return None, str(error)

    opened, damage = everywhere(read)
    failed = torch.tensor([rank() if opened is None else world_size()])
    first = int(-all_reduce(-failed, "max"))
    if first < world_size():
        return None, damage or f"{path} is damaged, or not there, for rank {first}"
    assert opened is not None
    agree(opened.manifest.digest, f"the manifest of {path}")
    return opened, ""


# ---------------------------------------------------------------------------- checks


def _check_tables(opened: _Opened, live: Mapping[str, LiveTable], strict: bool) -> list[TableInfo]:
    """What is to be loaded, in the order of names."""
    saved, path = opened.manifest.tables, opened.path
    lacking = sorted(name for name, t in live.items() if t.is_saved and name not in saved)
    if strict and lacking:
        raise CheckpointError(
            f"{path} lacks the tensors {lacking}, which are in the cluster; delete them, load "
            "another checkpoint, or pass strict=False to leave them as they are"
        )
    chosen = []
    for name, info in saved.items():
        if name in live:
            check_table(info, live[name].info, path)
        elif not info.persistent:
            if strict:
                raise CheckpointError(
                    f"{path} holds the tensor {name!r}, which is not in the cluster; make it first "
                    "(DistTensor, DistEmbedding or a sparse optimizer), or pass strict=False to "
                    "leave it out"
                )
            continue
        chosen.append(info)
    return chosen


def _check_optimizers(
    optimizers: Sequence[SparseOptimizer], manifest: ClusterManifest, path: Path
) -> None:
    if optimizers and len(optimizers) != len(manifest.sparse_optimizers):
        raise CheckpointError(
            f"{path} has {len(manifest.sparse_optimizers)} sparse_optimizers (got "
            f"{len(optimizers)}); pass as many, or none"
        )
    for optimizer, saved in zip(optimizers, manifest.sparse_optimizers, strict=False):
        optimizer.check_state_dict(saved)
        for tensor in optimizer.tensors():
            if tensor.name not in manifest.tables:
                raise CheckpointError(f"{path} lacks the tensor {tensor.name!r}")


# ---------------------------------------------------------------------------- rows


def _places(
    job: Job, opened: _Opened, shares: Mapping[str, tuple[int, int]]
) -> dict[str, tuple[SavedRows, Tensor]]:
    """Where the rows of this trainer's share are in the files, by policy."""
    read = cluster_reader(job.cluster)
    structure = Structure(job.cluster.names(), job.destinations, read)
    return {
        policy: find_rows(opened.files, policy, shares[policy], job.starts(policy), read, structure)
        for policy in sorted(shares)
    }


def find_rows(
    files: Sequence[Mapping[str, Tensor]],
    policy: str,
    share: tuple[int, int],
    starts: Sequence[int],
    read: Reader,
    structure: Structure,
) -> tuple[SavedRows, Tensor]:
    """Rows of a policy in the files, and the places of ``[start, stop)`` among them.

    Raises:
        CheckpointError: The checkpoint is of another graph.
    """
    has_ids = policy.startswith(("node~", "edge~"))
    saved = SavedRows(files, policy, has_ids)
    if not has_ids:
        return saved, torch.arange(*share)
    places = saved.find(read(id_table(policy), *share))
    if policy.startswith("node~"):
        for begin, end in pieces(*share, torch.int64, ()):
            here = structure.of(policy, starts, begin, end)
            chosen = places[begin - share[0] : end - share[0]]
            if not torch.equal(saved.read(f"structure/{policy}", chosen), here):
                raise CheckpointError(
                    f"the checkpoint is of another graph: nodes of {policy} have other in-edges "
                    "there; give the checkpoint_dir of this graph"
                )
    return saved, places


def _make(job: Job, chosen: Sequence[TableInfo], live: Mapping[str, LiveTable]) -> None:
    """Make what hosts lack; nothing stays if there is no room for all. Collective."""
    made: list[tuple[int, str]] = []

    def make() -> None:
        for info in chosen if rank() == 0 else ():
            known, starts = live.get(info.name), job.starts(info.policy)
            lacking = range(job.cluster.num_hosts) if known is None else known.lacking
            new = TableInfo(info.name, info.dtype, info.row_shape, starts, info.policy, True)
            made.extend((number, info.name) for number in lacking)
            job.cluster.ask([(n, WireMessage("create", new.as_json())) for n in lacking])

    try:
        everywhere(make)
        everywhere(job.cluster.refresh)
    except Exception:
        job.cluster.ask([(n, WireMessage("delete", {"name": name})) for n, name in made])
        raise


def _write(
    job: Job,
    opened: _Opened,
    chosen: Sequence[TableInfo],
    shares: Mapping[str, tuple[int, int]],
    places: Mapping[str, tuple[SavedRows, Tensor]],
) -> None:
    """Put this trainer's share of all rows into the cluster."""
    for info in chosen:
        start, stop = shares[info.policy]
        saved, found = places[info.policy]
        for begin, end in pieces(start, stop, info.dtype, info.row_shape):
            rows = saved.read(f"row/{info.name}", found[begin - start : end - start])
            job.cluster.write(info.name, torch.arange(begin, end), rows)


def _tell_servers(job: Job, manifest: ClusterManifest) -> None:
    """Of which checkpoint their rows are now."""
    if rank() == 0:
        message = WireMessage("loaded", {"digest": manifest.digest, "step": manifest.step})
        hosts = enumerate(job.cluster.hosts)
        job.cluster.ask([(n, message) for n, host in hosts if isinstance(host, ServedHost)])


# ---------------------------------------------------------------------------- saving._restore


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
