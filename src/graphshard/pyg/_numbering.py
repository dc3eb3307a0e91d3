# SPDX-License-Identifier: Apache-2.0
"""Numbers of nodes in the whole graph, and the rows that stand for them on a rank.

[Note: rows and numbers]
    What PyG calls a node index has two meanings on a graph that spans ranks. As a *number* it is
    data: compared, computed with, or looked up in a table with a row for each node of the whole
    graph. Then it is the node's number in the whole graph, the same on every rank. As a *row* it
    names a place in a tensor of this rank's nodes. Which one is meant is told by the tensor that is
    indexed: as many rows as this rank has nodes are rows of this rank, any other count is a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm import all_reduce, fetch_halo
from ..comm.collectives import all_gather
from ..comm.group import group_state

if TYPE_CHECKING:
    from ..fullbatch.topology import Halo
    from ._source_halo import SourceHalo


class NodeNumbering:
    """Numbers of one type's nodes, and how many of them each rank has; collective to make.

    Args:
        num_owned: Nodes of this rank.
        ids: int64 ``[num_owned]``: their numbers in the whole graph; None if nothing says.
        group: The ranks.
    """

    def __init__(
        self, num_owned: int, ids: Tensor | None, group: dist.ProcessGroup | None = None
    ) -> None:
        mine = torch.tensor([num_owned, int(ids is not None)])
        shares = torch.stack(all_gather(group_state(group), mine, "pyg.shard")).tolist()
        self.num_owned = num_owned
        self.counts = tuple(count for count, _ in shares)
        self.ids = ids if all(known for _, known in shares) else None

    @property
    def num_whole(self) -> int:
        """Nodes of all ranks."""
        return sum(self.counts)

    def extended_ids(self, halo: Halo) -> Tensor | None:
        """The numbers of extended rows; collective.

        Args:
            halo: Of these nodes.
        """
        if self.ids is None:
            return None
        if halo.plan.world_size == 1:
            return self.ids
        return torch.cat([self.ids, fetch_halo([(halo.plan, self.ids)])[0]])


class EdgeEnd:
    """Sources or destinations of a relation's edges: rows of this rank, and their numbers.

    Args:
        halo: The relation.
        numbering: The nodes.
        is_source: Whether it is the end whose rows may be on other ranks.
        ids: The number of each row, extended rows where it is the source; None if nothing says.
        largest: The largest number that any edge has at this end, on any rank; -1 without edges.
    """

    def __init__(
        self,
        halo: SourceHalo,
        numbering: NodeNumbering,
        is_source: bool,
        ids: Tensor | None,
        largest: int,
    ) -> None:
        self.halo, self.numbering, self.is_source = halo, numbering, is_source
        self._ids, self.largest = ids, largest
        self.node_type = halo.etype[0 if is_source else 2]
        self.num_rows = numbering.num_owned
        self.world_size, self.group = halo.world_size, halo.structure.group
        # A table that the edges can index may then have as many rows as a rank has nodes.
        self.is_ambiguous = self.world_size > 1 and max(numbering.counts) > largest
        self._leaves_ranks_empty = self.world_size > 1 and min(numbering.counts) == 0

    @property
    def name(self) -> str:
        return "sources" if self.is_source else "destinations"

    @property
    def has_remote_rows(self) -> bool:
        return self.is_source and self.world_size > 1

    @property
    def own_ids(self) -> Tensor:
        """The numbers of this rank's nodes."""
        return self._known(self.numbering.ids)

    def numbers(self, rows: Tensor) -> Tensor:
        """The numbers in the whole graph of some rows."""
        ids = self._known(self._ids)
        return ids[rows]

    @property
    def is_numbered(self) -> bool:
        return self._ids is not None

    def _known(self, ids: Tensor | None) -> Tensor:
        if ids is None:
            raise NotImplementedError(
                f"a layer reads the numbers of nodes of type {self.node_type!r} in the whole "
                "graph, which this partition folder does not have (orig_id of its nodes); shard "
                "the whole data object, or partition it again"
            )
        return ids

    def owns(self, size: int, least: int = 1) -> bool:
        """Whether a tensor with so many rows has this rank's rows, and not those of a table.

        The same on all ranks, as far as all pass rows or all pass one table. Collective where a
        rank has nearly all nodes, because the size alone does not tell there.

        Args:
            size: The rows.
            least: The fewest rows that a table may have.
        """
        is_own = size == self.num_rows
        if self.is_ambiguous or (least == 0 and self._leaves_ranks_empty):
            is_own = bool(all_reduce(torch.tensor([int(is_own)]), "min", group=self.group))
        return is_own

    def check_table(self, shape: torch.Size, dim: int) -> None:
        """Raise if a tensor has neither this rank's rows nor one for each number of the edges."""
        if shape[dim] <= self.largest:
            raise ValueError(
                f"a tensor indexed by {self.name} needs a row for each of this rank's "
                f"{self.num_rows} nodes of type {self.node_type!r}, or for each node of the whole "
                f"graph ({self.largest + 1} at least), in dimension {dim} (got shape "
                f"{tuple(shape)})"
            )

    def located(
        self, tensor: Tensor, dim: int, rows: Tensor, complete: bool
    ) -> tuple[Tensor, Tensor]:
        """A tensor that is indexed here, and where: own and fetched rows, or numbers of a table.

        Args:
            tensor: What is indexed.
            dim: In which dimension.
            rows: The index, as rows.
            complete: Whether it has all edges of the relation.
        """
        if self.owns(tensor.shape[dim]):
            if self.has_remote_rows:
                at_front = self.halo.extended(tensor.movedim(dim, 0) if dim else tensor)[0]
                tensor = at_front.movedim(0, dim) if dim else at_front
            return tensor, rows
        numbers = self.numbers(rows)
        if complete or (numbers.numel() and int(numbers.max()) >= tensor.shape[dim]):
            self.check_table(tensor.shape, dim)  # of some edges all numbers may be small
        return tensor, numbers

    def assembled(self, own: Tensor, dim: int, out: Tensor) -> Tensor:
        """A table whose rows every rank has for its own nodes; collective, differentiable.

        Args:
            own: This rank's rows.
            dim: The dimension of the rows.
            out: The table before; its rows beyond the whole graph's nodes stay.
        """
        size, whole = out.shape[dim], self.numbering.num_whole
        fits = (self.own_ids < size).nonzero().view(-1)
        dtype = torch.uint8 if own.dtype == torch.bool else own.dtype
        blank = torch.zeros(out.shape, dtype=dtype, device=own.device)
        rows = own.to(dtype).index_select(dim, fits)
        table = blank.index_copy(dim, self.own_ids[fits], rows)
        table = all_reduce(table, group=self.group).to(own.dtype)
        if size > whole:
            rest = out.narrow(dim, whole, size - whole)
            table = torch.cat([table.narrow(dim, 0, whole), rest], dim)
        return table


class PieceEnd(EdgeEnd):
    """One end of some edges, which are computed at a time.

    Args:
        end: That end of all edges.
        rows: The rows of it that stand for those of the piece.
        given: Tensors with a row for each of the piece.
    """

    def __init__(self, end: EdgeEnd, rows: Tensor, given: Sequence[Tensor] = ()) -> None:
        self._end, self._rows, self._given = end, rows, given
        self.halo, self.numbering, self.is_source = end.halo, end.numbering, end.is_source
        self.node_type, self.num_rows = end.node_type, rows.numel()
        self.world_size, self.group, self.largest = end.world_size, end.group, end.largest
        self.is_ambiguous = self._leaves_ranks_empty = False

    @property
    def has_remote_rows(self) -> bool:
        return False

    @property
    def is_numbered(self) -> bool:
        return self._end.is_numbered

    def numbers(self, rows: Tensor) -> Tensor:
        """The numbers in the whole graph of some rows."""
        return self._end.numbers(self._rows[rows])

    def located(
        self, tensor: Tensor, dim: int, rows: Tensor, complete: bool
    ) -> tuple[Tensor, Tensor]:
        """As of all edges; a tensor may have the rows of all destinations of this rank, too."""
        if any(tensor is given for given in self._given):
            return tensor, rows
        if not self.is_source and tensor.shape[dim] == self.num_rows:
            return tensor, rows
        if not self._end.has_remote_rows:
            return self._end.located(tensor, dim, self._rows[rows], complete)
        if tensor.shape[dim] == self._end.num_rows:
            raise NotImplementedError(
                "messages that index a tensor of nodes with the sources of edges need rows of "
                "other ranks, and sequential mode computes some edges at a time; pass the tensor "
                "to propagate and take it as an argument that ends in _j, or shard with "
                "mode='oneshot'"
            )
        numbers = self.numbers(rows)
        if numbers.numel() and int(numbers.max()) >= tensor.shape[dim]:
            self.check_table(tensor.shape, dim)
        return tensor, numbers

    def refuse(self, name: str) -> NotImplementedError:
        """The error for what needs all edges of all ranks at once."""
        return NotImplementedError(
            f"{name} of nodes within messages is of all edges, and sequential mode computes some "
            "at a time; shard with mode='oneshot'"
        )
