# SPDX-License-Identifier: Apache-2.0
"""save_checkpoint: each trainer writes its rows of all tables; rank 0 the states, then the JSON."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..._base.files import check_text
from ...comm import agree, barrier, come_together, rank, world_size
from ...errors import CheckpointError
from ...partition.files import RowSource, write_tensors
from .._job import Job, current_job
from .._sparse_optimizers import SparseOptimizer
from .._tables import TableInfo
from ..checkpoints import (
    SHARED,
    DamagedError,
    RunLock,
    check_shared,
    everywhere,
    on_rank_0,
    rank_file,
    records_of,
    remove,
    text_of_rank_0,
    write_whole,
)
from ..rpc._message import WireMessage
from ._manifest import (
    STEPS,
    ClusterManifest,
    check_digests,
    read_cluster_manifest,
    write_cluster_manifest,
)
from ._rows import RowStream, Structure, cluster_reader, id_table, policies_in_files
from ._state import Stateful, pack, state_of

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
