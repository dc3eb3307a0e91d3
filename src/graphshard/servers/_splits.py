# SPDX-License-Identifier: Apache-2.0
"""node_split, edge_split: which of the nodes or edges of a set each trainer takes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..comm import rank as comm_rank
from ..comm import world_size
from ..partition import RangePartitionBook
from ._dist_tensor import DistTensor
from ._host_graph import edge_policy, node_policy
from ._job import current_job

_ROWS_AT_A_TIME = 1 << 22


def node_split(
    nodes: DistTensor | Tensor,
    partition_book: RangePartitionBook | None = None,
    ntype: str = "_N",
    rank: int | None = None,
    force_even: bool = True,
    node_trainer_ids: DistTensor | Tensor | None = None,
) -> Tensor:
    """This trainer's share of a set of nodes. Shares of all trainers hold each node once.

    Args:
        nodes: Mask, one entry for each node of the type.
        partition_book: Of the graph; needed where ``nodes`` is no `DistTensor`.
        ntype: The type.
        rank: Whose share; by default this trainer's.
        force_even: Share evenly: sizes differ by one at most, and neighbours in id, which are
            mostly on one host, stay together. Else a trainer takes nodes of its own host.
        node_trainer_ids: The trainer of each node, by number; then that decides.

    Returns:
        int64, ascending.

    Raises:
        ValueError: The mask has another length, or the rank is none.
    """
    policy = nodes.part_policy if isinstance(nodes, DistTensor) else node_policy(ntype)
    return _split(nodes, policy, partition_book, rank, force_even, node_trainer_ids)


def edge_split(
    edges: DistTensor | Tensor,
    partition_book: RangePartitionBook | None = None,
    etype: Any = "_E",
    rank: int | None = None,
    force_even: bool = True,
    edge_trainer_ids: DistTensor | Tensor | None = None,
) -> Tensor:
    """`node_split` for edges.

    Args:
        edges: Mask, one entry for each edge of the relation.
        partition_book: Of the graph; needed where ``edges`` is no `DistTensor`.
        etype: The relation.
        rank: As for `node_split`.
        force_even: As for `node_split`.
        edge_trainer_ids: The trainer of each edge, by number; then that decides.
    """
    if isinstance(edges, DistTensor):
        policy = edges.part_policy
    else:
        book = _book(partition_book)
        triple = book.canonical_etypes[0] if etype == "_E" else book.to_canonical_etype(etype)
        policy = edge_policy(triple)
    return _split(edges, policy, partition_book, rank, force_even, edge_trainer_ids)


def _book(partition_book: RangePartitionBook | None) -> RangePartitionBook:
    if partition_book is None:
        raise ValueError("partition_book must be given with a tensor; g.get_partition_book()")
    return partition_book


def _split(
    mask: DistTensor | Tensor,
    policy: str,
    book: RangePartitionBook | None,
    rank: int | None,
    force_even: bool,
    trainer_ids: DistTensor | Tensor | None,
) -> Tensor:
    number, num_trainers = comm_rank() if rank is None else rank, world_size()
    if not 0 <= number < max(num_trainers, number + 1 if rank is not None else 1):
        raise ValueError(f"rank must be a trainer's number (got {rank})")
    job = current_job()
    num_rows = job.starts(policy)[-1]
    if len(mask) != num_rows:
        raise ValueError(f"a mask of {policy!r} must have {num_rows} entries (got {len(mask)})")
    if trainer_ids is not None:
        chosen = _chosen(mask, 0, num_rows)
        return chosen[_rows(trainer_ids, chosen).view(-1) == number]
    if not force_even:
        start, stop = job.share(policy)
        return _chosen(mask, start, stop)
    chosen = _chosen(mask, 0, num_rows)
    count = chosen.numel()
    return chosen[number * count // num_trainers : (number + 1) * count // num_trainers].clone()


def _chosen(mask: DistTensor | Tensor, start: int, stop: int) -> Tensor:
    """Ids of ``[start, stop)`` that a mask has, read a stretch at a time."""
    found = [torch.empty(0, dtype=torch.int64)]
    for begin in range(start, stop, _ROWS_AT_A_TIME):
        rows = torch.as_tensor(mask[begin : min(stop, begin + _ROWS_AT_A_TIME)])
        found.append(rows.view(rows.shape[0], -1)[:, 0].nonzero().view(-1) + begin)
    return torch.cat(found)


def _rows(values: DistTensor | Tensor, ids: Tensor) -> Tensor:
    found: Tensor = values[ids]
    return found
