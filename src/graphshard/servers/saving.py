# SPDX-License-Identifier: Apache-2.0
"""save_checkpoint, load_checkpoint: rows of a cluster by original id, and states.

Each trainer writes its rows of all tables, rank 0 the states. To load, each finds the rows of its
share by original id, and writes them to the cluster. Everything is read and checked first, on all
ranks, so that an error leaves the cluster as it was.

A server that is started again restores the rows of its own host on its own, before it answers
(`restore_tables`). It checks all files, so that all servers find the same checkpoint whole.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ..comm import agree, barrier, come_together, rank, world_size
from ..comm.collectives import shared_errors, text_of_rank_0
from ..errors import CheckpointError
from ..partition.checked_files import RowSource
from ._cluster import Cluster, RowsRequest, ServedHost
from ._host_graph import GraphIds, id_table, pointer_table_of
from ._host_tables import HostTables, TableInfo
from ._job import Job, current_job
from ._message_stream import WireMessage
from ._sparse_optimizers import SparseOptimizer
from .checkpoints import (
    CheckpointNames,
    DamagedError,
    Manifest,
    Opened,
    SavedRows,
    check_digests,
    hold_folder,
    list_of_objects,
    open_newest,
    pack,
    pieces,
    policies_in_files,
    read_manifest,
    read_rank_files,
    remove,
    write_checkpoint,
)

STEPS = CheckpointNames("step", least=0)
STATES = ("model", "optimizer", "extra")

Stateful: TypeAlias = Any
"""What has ``state_dict()`` and ``load_state_dict()``, or a dictionary of such; or None."""
Reader: TypeAlias = Callable[[str, int, int], Tensor]
"""Rows ``[start, stop)`` of a table, by its name."""
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
        model: A module, or anything else with ``state_dict()``, or a dictionary of such, as
            ``optimizer`` may be. Those of rank 0 are saved.
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
    state: dict[str, Any] = {}
    rule = "all trainers save a checkpoint together; call it on every rank"
    come_together("save_checkpoint", rule)
    with shared_errors():
        if type(step) is not int or not 0 <= step < 10**12:
            raise ValueError(f"step must be a whole number, 0 or more (got {step!r:.80})")
        if type(keep) is not int or keep < 1:
            raise ValueError(f"keep must be a whole number, at least 1 (got {keep!r:.80})")
        _check_named(sparse_optimizers)
        if rank() == 0:
            states = {"model": state_of(model), "optimizer": state_of(optimizer), "extra": extra}
            state = {name: pack(value, tensors, name) for name, value in states.items()}
    settings = [optimizer.state_dict() for optimizer in sparse_optimizers]
    agree(json.dumps([step, keep, settings], sort_keys=True), "what is saved")
    job.cluster.settle()
    barrier()  # what trainers have written is there
    tables = _tables_to_save(job, sparse_optimizers)
    manifest = Manifest(
        number=step,
        world_size=world_size(),
        values={"sparse_optimizers": settings},
        rows={policy: parts.num_ids for policy, parts in job.policies.items()},
        destinations=dict(job.destinations),
        tables=tables,
        state=state,
    )
    lock = hold_folder(folder, STEPS, lambda: _check_newest(folder, step))
    try:
        own = _rows_of_rank(job, tables)
        final = write_checkpoint(folder, STEPS, manifest, own, tensors)
        if rank() == 0:
            STEPS.remove_old(folder, keep, () if tables else _newest_with_tables(folder))
    finally:
        if lock is not None:
            lock.release()
    return final


def job_with_graph() -> Job:
    """The job of this process, once it knows its graph; else RuntimeError."""
    job = current_job()
    if not job.policies:
        raise RuntimeError("the graph of the cluster is not known yet; make its DistGraph first")
    return job


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
        is_saved: Whether a checkpoint must hold it: it has a name, and is not as the partition of
            the graph has it.
        lacking: Hosts that lack it, because their servers were started again.
    """

    info: TableInfo
    is_saved: bool
    lacking: tuple[int, ...]


def live_tables(job: Job) -> dict[str, LiveTable]:
    """All tables of the cluster, by name."""
    listed: dict[str, dict[int, dict[str, Any]]] = {}  # by name, by host
    for number, answer in enumerate(job.cluster.refresh()):
        for fields in answer.fields["tables"]:
            listed.setdefault(fields["name"], {})[number] = fields
    tables = {}
    for name, by_host in sorted(listed.items()):
        is_own = not (name.startswith("graph~") or is_anonymous(name))
        is_loaded = all(fields["is_loaded"] for fields in by_host.values())
        lacking = tuple(n for n in range(job.cluster.num_hosts) if n not in by_host)
        info = TableInfo.from_json([*by_host.values()][-1])
        tables[name] = LiveTable(info, is_own and not is_loaded, lacking)
    return tables


def _tables_to_save(job: Job, optimizers: Sequence[SparseOptimizer]) -> dict[str, TableInfo]:
    """The same on all ranks, with ``starts`` of one host. Collective.

    What this process holds, or an optimizer names, must be there: memory that it has mapped can
    still be read and written after the servers have let it go.
    """
    required = {name for name in job.cluster.held() if not is_anonymous(name)}
    required |= {tensor.name for optimizer in optimizers for tensor in optimizer.tensors()}

    with shared_errors():
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
        infos = [replace(t.info, starts=(0, t.info.starts[-1])) for t in tables]
    listed = json.loads(text_of_rank_0(json.dumps([info.as_json() for info in infos])))
    return {fields["name"]: TableInfo.from_json(fields) for fields in listed}


def _newest_with_tables(folder: Path) -> list[str]:
    """The newest checkpoint that holds tensors, if there is one."""
    for name in STEPS.find(folder):
        with contextlib.suppress(DamagedError, CheckpointError):
            if read_manifest(folder / name, STEPS).tables:
                return [name]
    return []


def _check_newest(folder: Path, step: int) -> None:
    """Raise unless a checkpoint comes after those that are there; damaged ones are removed."""
    for name in STEPS.find(folder):
        if (STEPS.number(name) or 0) < step:
            continue
        try:
            check_digests(folder / name, read_manifest(folder / name, STEPS), 0, 1)
        except DamagedError:
            remove(folder / name)
            continue
        raise CheckpointError(
            f"step must be above that of the checkpoints in {folder} (got {step}, there is "
            f"{name}); save to another folder, or remove those that are later"
        )


def _rows_of_rank(job: Job, tables: Mapping[str, TableInfo]) -> dict[str, Tensor | RowSource]:
    """This trainer's share of each table, and of what tells which rows they are. Collective."""
    read = cluster_reader(job.cluster)
    structure = Structure(job.cluster.names(), job.destinations, read)
    with_ids = policies_in_files((info.policy for info in tables.values()), job.destinations)
    policies = sorted({*with_ids, *(info.policy for info in tables.values())})
    shares = {policy: job.share(policy) for policy in policies}
    sources: dict[str, Tensor | RowSource] = {}

    infos = {f"row/{name}": info for name, info in tables.items()}
    infos |= {f"id/{policy}": job.cluster.info(id_table(policy)) for policy in with_ids}
    for key, info in infos.items():
        rows = partial(read, info.name)
        sources[key] = RowStream(info.dtype, info.row_shape, *shares[info.policy], rows)
    for policy in with_ids:
        if policy.startswith("node~"):
            numbers = partial(structure.of, policy, job.starts(policy))
            sources[f"structure/{policy}"] = RowStream(torch.int64, (), *shares[policy], numbers)
    return sources


# ---------------------------------------------------------------------------- loading


@dataclass(frozen=True)
class ClusterCheckpoint:
    """What was loaded.

    Args:
        extra: What was given to `save_checkpoint`.
        tensors: Names of the tensors whose rows were loaded.
    """

    path: Path
    step: int
    extra: Any
    tensors: tuple[str, ...]


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
        model: What was given to `save_checkpoint`; its state is loaded. None leaves it out.
        sparse_optimizers: All that were given to `save_checkpoint`, or none.
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
    path, manifest, states = opened.path, opened.manifest, opened.states
    settings = manifest.values["sparse_optimizers"]
    with shared_errors():
        live = live_tables(job)
    with shared_errors():
        check_graph(manifest, {p: parts.num_ids for p, parts in job.policies.items()}, path)
        _check_optimizers(sparse_optimizers, settings, manifest.tables, path)
        chosen = _check_tables(opened, live, strict)
        check_state(model, states["model"], "model")
        check_state(optimizer, states["optimizer"], "optimizer")
    policies = sorted({info.policy for info in chosen} | set(manifest.policies))
    shares = {policy: job.share(policy) for policy in policies}
    read = cluster_reader(job.cluster)
    structure = Structure(job.cluster.names(), job.destinations, read)
    with shared_errors():
        places = find_rows(opened.files, shares, job.starts, read, structure)
    _make(job, chosen, live)
    with shared_errors():  # this trainer's share of all rows
        for info in chosen:
            for begin, end, rows in _pieces_of(info, shares[info.policy], places[info.policy]):
                job.cluster.write(info.name, torch.arange(begin, end), rows)
    with shared_errors():
        _tell_servers(job, manifest)
    with shared_errors():
        load_state(model, states["model"])
        load_state(optimizer, states["optimizer"])
        for each, saved in zip(sparse_optimizers, settings, strict=False):
            each.load_state_dict(saved)
    names = tuple(info.name for info in chosen)
    return ClusterCheckpoint(path, manifest.number, states["extra"], names)


def _open(folder: Path, step: int | None) -> Opened:
    """The newest checkpoint that is whole for all ranks, or that of a step. Collective."""
    opened = open_newest(folder, STEPS, number=step, check=_check_manifest)
    if opened is None:
        of = "" if step is None else f" of step {step}"
        raise CheckpointError(
            f"there is no checkpoint{of} in {folder} (there are: "
            f"{', '.join(STEPS.find(folder)) or 'none'}); give the checkpoint_dir that was given "
            "to save_checkpoint"
        )
    return opened


def _check_manifest(folder: Path, manifest: Manifest) -> None:
    if set(manifest.state) != set(STATES):
        raise ValueError(f"state must hold {', '.join(STATES)}")
    list_of_objects(manifest.values, "sparse_optimizers")


def check_graph(manifest: Manifest, rows: Mapping[str, int], folder: Path) -> None:
    """Raise CheckpointError unless a checkpoint is of a graph with so many rows of each policy."""
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
    """Raise CheckpointError unless rows of a checkpoint fit the table of their name."""
    there, mine = (
        (info.dtype, (info.starts[-1], *info.row_shape), info.policy) for info in (saved, here)
    )
    if there != mine:
        raise CheckpointError(
            f"{saved.name!r} is {there[0]} of shape {there[1]}, {there[2]} in {folder} and "
            f"{mine[0]} of shape {mine[1]}, {mine[2]} here; make it as it was saved, or delete it"
        )


def _check_tables(opened: Opened, live: Mapping[str, LiveTable], strict: bool) -> list[TableInfo]:
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
    optimizers: Sequence[SparseOptimizer],
    settings: Sequence[Mapping[str, Any]],
    tables: Collection[str],
    path: Path,
) -> None:
    if optimizers and len(optimizers) != len(settings):
        raise CheckpointError(
            f"{path} has {len(settings)} sparse_optimizers (got {len(optimizers)}); pass as many, "
            "or none"
        )
    for optimizer, saved in zip(optimizers, settings, strict=False):
        optimizer.check_state_dict(saved)
        for tensor in optimizer.tensors():
            if tensor.name not in tables:
                raise CheckpointError(f"{path} lacks the tensor {tensor.name!r}")


def find_rows(
    files: Sequence[Mapping[str, Tensor]],
    shares: Mapping[str, tuple[int, int]],
    starts_of: Callable[[str], tuple[int, ...]],
    read: Reader,
    structure: Structure,
) -> dict[str, tuple[SavedRows, Tensor]]:
    """By policy its rows in the files, and where those of a share ``(start, stop)`` are there.

    CheckpointError if the checkpoint is of another graph.
    """
    rows: dict[str, tuple[SavedRows, Tensor]] = {}
    for policy, share in shares.items():
        saved = SavedRows(files, policy)
        positions = torch.arange(*share)  # rows without ids are in order
        if policy.startswith(("node~", "edge~")):
            positions = saved.find(read(id_table(policy), *share))
        rows[policy] = saved, positions
        for begin, end in pieces(*share, torch.int64, ()) if policy.startswith("node~") else ():
            here = structure.of(policy, starts_of(policy), begin, end)
            chosen = positions[begin - share[0] : end - share[0]]
            if not torch.equal(saved.read(f"structure/{policy}", chosen), here):
                raise CheckpointError(
                    f"the checkpoint is of another graph: nodes of {policy} have other in-edges "
                    "there; give the checkpoint_dir of this graph"
                )
    return rows


def _pieces_of(
    info: TableInfo, share: tuple[int, int], saved: tuple[SavedRows, Tensor]
) -> Iterator[tuple[int, int, Tensor]]:
    """A share of a table as ``(begin, end, rows)``, from what `find_rows` gave for its policy."""
    (start, stop), (rows, positions) = share, saved
    for begin, end in pieces(start, stop, info.dtype, info.row_shape):
        yield begin, end, rows.read(f"row/{info.name}", positions[begin - start : end - start])


def _make(job: Job, chosen: Sequence[TableInfo], live: Mapping[str, LiveTable]) -> None:
    """Make what hosts lack; nothing stays if there is no room for all. Collective."""
    made: list[tuple[int, str]] = []
    try:
        with shared_errors():
            for info in chosen if rank() == 0 else ():
                table, starts = live.get(info.name), job.starts(info.policy)
                lacking = range(job.cluster.num_hosts) if table is None else table.lacking
                new = replace(info, starts=starts, persistent=True)
                made.extend((number, info.name) for number in lacking)
                job.cluster.ask([(n, WireMessage("create", new.as_json())) for n in lacking])
        with shared_errors():
            job.cluster.refresh()
    except Exception:
        job.cluster.ask([(n, WireMessage("delete", {"name": name})) for n, name in made])
        raise


def _tell_servers(job: Job, manifest: Manifest) -> None:
    """Of which checkpoint their rows are now."""
    if rank() == 0:
        message = WireMessage("loaded", {"digest": manifest.digest, "step": manifest.number})
        hosts = enumerate(job.cluster.hosts)
        job.cluster.ask([(n, message) for n, host in hosts if isinstance(host, ServedHost)])


# ---------------------------------------------------------------------------- servers


@dataclass(frozen=True)
class RestoredTables:
    """What a server has restored."""

    path: Path
    step: int
    num_tensors: int
    digest: str


def restore_tables(
    tables: HostTables, ids: GraphIds, checkpoint_dir: str | os.PathLike[str]
) -> RestoredTables | None:
    """Put a host's rows of persistent tensors from the newest checkpoint into its tables.

    Features of the graph that trainers had written to are among them.

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
            manifest = read_manifest(path, STEPS, _check_manifest)
            files = read_rank_files(path, manifest)
            check_digests(path, manifest, 0, 1)
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
    manifest: Manifest,
    files: Sequence[dict[str, Tensor]],
) -> RestoredTables:
    check_graph(manifest, {policy: parts.num_ids for policy, parts in ids.parts.items()}, path)
    tables_here = {info.name: info for info in tables.infos()}
    chosen = [i for i in manifest.tables.values() if i.persistent]
    for info in chosen:
        if info.name in tables_here:
            check_table(info, tables_here[info.name], path)

    def starts_of(policy: str) -> tuple[int, ...]:
        if policy in ids.parts:
            return ids.starts(policy)
        return (0, *[1] * ids.num_hosts)

    def read(name: str, start: int, stop: int) -> Tensor:
        first = tables_here[name].starts[tables.host]
        return tables.rows(name)[start - first : stop - first]

    structure = Structure(tables_here, ids.destinations, read)
    policies = sorted({info.policy for info in chosen} | set(manifest.policies))
    shares = {p: (starts_of(p)[tables.host], starts_of(p)[tables.host + 1]) for p in policies}
    places = find_rows(files, shares, starts_of, read, structure)
    for info in chosen:
        starts, share = starts_of(info.policy), shares[info.policy]
        tables.create(replace(info, starts=starts, persistent=True))
        tables.mark_written(info.name)
        own = tables.rows(info.name)
        for begin, end, rows in _pieces_of(info, share, places[info.policy]):
            own[begin - share[0] : end - share[0]] = rows
    return RestoredTables(path, manifest.number, len(chosen), manifest.digest)


# ---------------------------------------------------------------------------- rows


@dataclass(frozen=True)
class RowStream:
    """Rows that are read while they are written to a file: a `RowSource`."""

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


def cluster_reader(cluster: Cluster) -> Reader:
    """Reads rows of any host; those of this one are not copied."""

    def read(name: str, start: int, stop: int) -> Tensor:
        starts, here = cluster.info(name).starts, cluster.here
        rows = cluster.hosts[here].rows(name)
        if rows is not None and starts[here] <= start <= stop <= starts[here + 1]:
            return rows[start - starts[here] : stop - starts[here]]
        return cluster.read([RowsRequest([name], torch.arange(start, stop))])[0]

    return read


class Structure:
    """What tells a node of one graph from that of another: its in-degrees."""

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
        """int64 ``[end - begin]``, one for each of these nodes."""
        numbers = torch.zeros(end - begin, dtype=torch.int64)
        for name in self._pointers.get(policy, []):
            salt = hashlib.blake2b(name.encode(), digest_size=7).digest()
            for host in range(len(starts) - 1):
                low, high = max(begin, starts[host]), min(end, starts[host + 1])
                if low < high:  # each host has one pointer more than nodes
                    pointer = self._read(name, low + host, high + host + 1).to(torch.int64)
                    degrees = pointer[1:] - pointer[:-1]
                    numbers[low - begin : high - begin] += degrees * int.from_bytes(salt, "little")
        return numbers


# ---------------------------------------------------------------------------- states


def state_of(target: Stateful) -> Any:
    """The states of one or several models or optimizers."""
    if isinstance(target, Mapping):
        return {str(key): state_of(each) for key, each in target.items()}
    return None if target is None else _inner(target).state_dict()


def check_state(target: Stateful, state: Any, name: str) -> None:
    """Raise ValueError unless `load_state` works; changes nothing."""
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
        mine, theirs = (
            tuple(entry.shape) if isinstance(entry, Tensor) else type(entry).__name__
            for entry in (value, state[key])
        )
        if mine != theirs and (isinstance(mine, tuple) or isinstance(theirs, tuple)):
            raise ValueError(f"{key!r} of {name} is {mine}, and that of its state {theirs}")


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
