# SPDX-License-Identifier: Apache-2.0
"""How rows of a type are spread: over parts (`PartitionPolicy`) and trainers (`node_split`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._base.typing import CanonicalEType, EType
from ..comm import rank as comm_rank
from ..comm import world_size
from ..partition import RangePartitionBook
from ._dist_tensor import DistTensor
from ._host_graph import edge_policy, node_policy
from ._ip_config import even_share
from ._job import current_job


class HeteroDataName(str):
    """What a tensor with a row for each node of a type, or each edge of a relation, is called.

    Raises:
        ValueError: A relation that is no triple.
    """

    _is_node: bool
    _entity_type: str | CanonicalEType
    _data_name: str

    def __new__(cls, is_node: bool, entity_type: Any, data_name: str) -> HeteroDataName:
        if not is_node and not (isinstance(entity_type, tuple) and len(entity_type) == 3):
            raise ValueError(
                f"a relation must be a (source, relation, destination) triple (got {entity_type!r})"
            )
        policy = node_policy(entity_type) if is_node else edge_policy(entity_type)
        new = super().__new__(cls, f"{policy}~{data_name}")
        new._is_node, new._entity_type, new._data_name = is_node, entity_type, data_name
        return new

    @property
    def policy_str(self) -> str:
        """How the rows are spread, as `PartitionPolicy` names it."""
        return self.removesuffix(f"~{self._data_name}")

    def is_node(self) -> bool:
        """Whether rows are those of nodes."""
        return self._is_node

    def is_edge(self) -> bool:
        """Whether rows are those of edges."""
        return not self._is_node

    def get_type(self) -> str | CanonicalEType:
        """Node type, or relation."""
        return self._entity_type

    def get_name(self) -> str:
        """Name of the tensor."""
        return self._data_name


class PartitionPolicy:
    """How rows of one kind are spread.

    Args:
        policy_str: ``node~TYPE`` or ``edge~SRC:REL:DST``.

    Raises:
        ValueError: There is no such kind.
    """

    def __init__(self, policy_str: str, partition_book: RangePartitionBook) -> None:
        types: dict[str, Any] = {node_policy(t): t for t in partition_book.ntypes}
        types |= {edge_policy(t): t for t in partition_book.canonical_etypes}
        if policy_str not in types:
            raise ValueError(f"unknown policy {policy_str!r:.200}; there are {', '.join(types)}")
        self.policy_str, self.partition_book = policy_str, partition_book
        self._type: Any = types[policy_str]

    @property
    def is_node(self) -> bool:
        """Whether rows are those of nodes."""
        return isinstance(self._type, str)

    @property
    def type_name(self) -> str | CanonicalEType:
        """Node type, or relation."""
        return self._type

    @property
    def part_id(self) -> int:
        """The part of this process."""
        return self.partition_book.partid

    def get_data_name(self, name: str) -> HeteroDataName:
        """What a tensor of that name is called in the cluster."""
        return HeteroDataName(self.is_node, self._type, name)

    def to_partid(self, id_tensor: Tensor) -> Tensor:
        """Part of each row."""
        book = self.partition_book
        part_of = book.nid2partid if self.is_node else book.eid2partid
        return part_of(id_tensor, self._type)

    def to_local(self, id_tensor: Tensor) -> Tensor:
        """Rows among those of this process's part."""
        book = self.partition_book
        local_of = book.nid2localnid if self.is_node else book.eid2localeid
        return local_of(id_tensor, self.part_id, self._type)

    def get_part_size(self) -> int:
        """Rows of this process's part."""
        book = self.partition_book
        ids_of = book.partid2nids if self.is_node else book.partid2eids
        return len(ids_of(self.part_id, self._type))

    def get_size(self) -> int:
        """Rows of all parts."""
        book = self.partition_book
        return book.num_nodes(self._type) if self.is_node else book.num_edges(self._type)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.policy_str!r})"


class NodePartitionPolicy(PartitionPolicy):
    """How rows of nodes of a type are spread."""

    def __init__(self, partition_book: RangePartitionBook, ntype: str = "_N") -> None:
        super().__init__(node_policy(ntype), partition_book)


class EdgePartitionPolicy(PartitionPolicy):
    """How rows of edges of a relation are spread."""

    def __init__(
        self, partition_book: RangePartitionBook, etype: CanonicalEType = ("_N", "_E", "_N")
    ) -> None:
        super().__init__(edge_policy(etype), partition_book)


# ---------------------------------------------------------------------------- shares of trainers

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
    return _split(nodes, policy, rank, force_even, node_trainer_ids)


def edge_split(
    edges: DistTensor | Tensor,
    partition_book: RangePartitionBook | None = None,
    etype: EType = "_E",
    rank: int | None = None,
    force_even: bool = True,
    edge_trainer_ids: DistTensor | Tensor | None = None,
) -> Tensor:
    """`node_split` for edges.

    Args:
        edges: Mask, one entry for each edge of the relation.
        edge_trainer_ids: The trainer of each edge, by number; then that decides.
    """
    if isinstance(edges, DistTensor):
        policy = edges.part_policy
    elif partition_book is None:
        raise ValueError("partition_book must be given with a tensor; g.get_partition_book()")
    elif etype == "_E":
        policy = edge_policy(partition_book.canonical_etypes[0])
    else:
        policy = edge_policy(partition_book.to_canonical_etype(etype))
    return _split(edges, policy, rank, force_even, edge_trainer_ids)


def _split(
    mask: DistTensor | Tensor,
    policy: str,
    rank: int | None,
    force_even: bool,
    trainer_ids: DistTensor | Tensor | None,
) -> Tensor:
    number = comm_rank() if rank is None else rank
    if number < 0 or (number >= world_size() and trainer_ids is None):
        raise ValueError(
            f"rank must be the number of a trainer, in [0, {world_size()}) (got {rank})"
        )
    job = current_job()
    num_rows = job.starts(policy)[-1]
    if len(mask) != num_rows:
        raise ValueError(f"a mask of {policy!r} must have {num_rows} entries (got {len(mask)})")
    if trainer_ids is None and not force_even:
        return _chosen(mask, *job.share(policy, number))
    chosen = _chosen(mask, 0, num_rows)
    if trainer_ids is not None:
        return chosen[trainer_ids[chosen].view(-1) == number]
    return chosen[slice(*even_share(number, world_size(), chosen.numel()))].clone()


def _chosen(mask: DistTensor | Tensor, start: int, stop: int) -> Tensor:
    """Ids of ``[start, stop)`` that a mask has, read a stretch at a time."""
    ids = [torch.empty(0, dtype=torch.int64)]
    for begin in range(start, stop, _ROWS_AT_A_TIME):
        rows = torch.as_tensor(mask[begin : min(stop, begin + _ROWS_AT_A_TIME)])
        ids.append(rows.view(rows.shape[0], -1)[:, 0].nonzero().view(-1) + begin)
    return torch.cat(ids)
