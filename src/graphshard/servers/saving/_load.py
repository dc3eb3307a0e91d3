# SPDX-License-Identifier: Apache-2.0
"""load_checkpoint: each trainer finds the rows of its share by original id, and writes them.

Everything is read and checked first, on all ranks, so that an error leaves the cluster as it was.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...comm import agree, all_reduce, barrier, come_together, rank, world_size
from ...errors import CheckpointError
from .._cluster import ServedHost
from .._job import Job
from .._sparse_optimizers import SparseOptimizer
from .._tables import TableInfo
from ..checkpoints import SHARED, DamagedError, everywhere, read_checked, text_of_rank_0
from ..rpc._message import WireMessage
from ._manifest import (
    STEPS,
    ClusterManifest,
    check_digests,
    check_graph,
    check_table,
    read_cluster_manifest,
    read_row_files,
)
from ._rows import Reader, SavedRows, Structure, cluster_reader, id_table, pieces
from ._save import LiveTable, job_with_graph, live_tables
from ._state import Stateful, check_state, load_state, unpack


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
