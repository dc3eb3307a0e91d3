# SPDX-License-Identifier: Apache-2.0
"""SourceHalo: how the edges of one relation reach the source rows of other ranks.

Sources are numbered as extended rows (see [Note: extended rows] in `graphshard.fullbatch`): a
rank's own nodes first, the halo after them. Destinations are own nodes. So in a relation within one
node type row ``v`` is the same node on both ends, and self loops, in-degrees and whatever else a
layer finds from local numbers are right.

[Note: rows and numbers]
    What PyG calls a node index has two meanings on a graph that spans ranks. As a *number* it is
    data: compared, computed with, or looked up in a table with a row for each node of the whole
    graph. Then it is the node's number in the whole graph, the same on every rank. As a *row* it
    names a place in a tensor of this rank's nodes. Which one is meant is told by the tensor that is
    indexed: as many rows as this rank has nodes are rows of this rank, any other count is a table.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._base.typing import CanonicalEType
from ..comm import fetch_halo, return_halo
from ..comm.collectives import Wire, all_gather, all_reduce_alike
from ..comm.group import group_state
from ..comm.transport import ragged_all_to_all_alike
from ..fullbatch import AggregationMode
from ..fullbatch.column_blocks import WHOLE
from ..fullbatch.halo_rows import HaloRowCache
from ..fullbatch.row_transport import PairwiseTransport
from ..fullbatch.topology import LocalEdges, ShardStructure
from ..graph.frame import version_of
from ..ops import Adjacency

if TYPE_CHECKING:
    from ..fullbatch.constant_cache import ConstantCache
    from ..fullbatch.topology import Halo


_KEPT_EDGE_SETS, _KEPT_TIMES_EDGES = 256, 4
_edge_set_numbers = itertools.count()


class NodeNumbering:
    """Numbers of one type's nodes, and how many of them each rank has; collective to make.

    Args:
        num_owned: Nodes of this rank.
        ids: int64 ``[num_owned]``: their numbers in the whole graph; None if nothing says.
    """

    def __init__(
        self, num_owned: int, ids: Tensor | None, group: dist.ProcessGroup | None = None
    ) -> None:
        mine = torch.tensor([num_owned, int(ids is not None)])
        shares = torch.stack(all_gather(group_state(group), mine, "pyg.shard")).tolist()
        self.num_owned = num_owned
        self.counts = tuple(count for count, _ in shares)
        self.num_whole = sum(self.counts)
        self.ids = ids if all(has_ids for _, has_ids in shares) else None

    def extended_ids(self, halo: Halo) -> Tensor | None:
        """The numbers of extended rows; collective."""
        if self.ids is None or halo.plan.world_size == 1:
            return self.ids
        return torch.cat([self.ids, fetch_halo([(halo.plan, self.ids)])[0]])


class EdgeEnd:
    """Sources or destinations of a relation's edges: rows of this rank, and their numbers.

    Args:
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
        self._ids, self.is_numbered, self.largest = ids, ids is not None, largest
        self.node_type = halo.etype[0 if is_source else 2]
        self.num_rows = numbering.num_owned
        self.world_size, self.group = halo.world_size, halo.structure.group
        self.has_remote_rows = is_source and self.world_size > 1
        # A table that the edges can index may then have as many rows as a rank has nodes.
        self.is_ambiguous = self.world_size > 1 and max(numbering.counts) > largest
        self._leaves_ranks_empty = self.world_size > 1 and min(numbering.counts) == 0

    @property
    def own_ids(self) -> Tensor:
        """The numbers of this rank's nodes."""
        return self._required(self.numbering.ids)

    def numbers(self, rows: Tensor) -> Tensor:
        """The numbers in the whole graph of some rows."""
        return self._required(self._ids)[rows]

    def _required(self, ids: Tensor | None) -> Tensor:
        if ids is None:
            raise NotImplementedError(
                f"a layer reads the numbers of nodes of type {self.node_type!r} in the whole "
                "graph, which this partition folder does not have (orig_id of its nodes); shard "
                "the whole data object, or partition it again"
            )
        return ids

    def owns(self, size: int, least: int = 1) -> bool:
        """Whether a tensor with so many rows has this rank's rows, and not those of a table.

        The same on all ranks, if all pass rows of their own, or all pass one table. Collective
        where a rank has nearly all nodes, because the size alone does not tell there. A table has
        ``least`` rows or more.
        """
        is_own = size == self.num_rows
        if self.is_ambiguous or (least == 0 and self._leaves_ranks_empty):
            is_own = bool(all_reduce_alike(torch.tensor([int(is_own)]), "min", group=self.group))
        return is_own

    def check_table(self, shape: torch.Size, dim: int) -> None:
        """Raise if a tensor has neither this rank's rows nor one for each number of the edges."""
        if shape[dim] <= self.largest:
            name = "sources" if self.is_source else "destinations"
            raise ValueError(
                f"a tensor indexed by {name} needs a row for each of this rank's "
                f"{self.num_rows} nodes of type {self.node_type!r}, or for each node of the whole "
                f"graph ({self.largest + 1} at least), in dimension {dim} (got shape "
                f"{tuple(shape)})"
            )

    def located(
        self, tensor: Tensor, dim: int, rows: Tensor, complete: bool
    ) -> tuple[Tensor, Tensor]:
        """A tensor that is indexed here, and where: own and fetched rows, or numbers of a table.

        ``complete`` says that the index has all edges of the relation.
        """
        if self.owns(tensor.shape[dim]):
            if self.has_remote_rows:
                at_front = self.halo.extended(tensor.movedim(dim, 0) if dim else tensor)[0]
                tensor = at_front.movedim(0, dim) if dim else at_front
            return tensor, rows
        return tensor, self._table_rows(tensor, dim, rows, complete)

    def _table_rows(self, table: Tensor, dim: int, rows: Tensor, complete: bool) -> Tensor:
        """Numbers that index a table, which has a row for each."""
        numbers = self.numbers(rows)
        if complete or (numbers.numel() and int(numbers.max()) >= table.shape[dim]):
            self.check_table(table.shape, dim)  # of some edges all numbers may be small
        return numbers

    def assembled(self, own: Tensor, dim: int, out: Tensor) -> Tensor:
        """A table whose rows every rank has for its own nodes; collective, differentiable.

        Rows that ``out``, the table before, has beyond the whole graph's nodes stay.
        """
        size, whole = out.shape[dim], self.numbering.num_whole
        fits = (self.own_ids < size).nonzero().view(-1)
        dtype = torch.uint8 if own.dtype == torch.bool else own.dtype
        blank = torch.zeros(out.shape, dtype=dtype, device=own.device)
        rows = own.to(dtype).index_select(dim, fits)
        table = blank.index_copy(dim, self.own_ids[fits], rows)
        table = all_reduce_alike(table, group=self.group).to(own.dtype)
        if size > whole:
            rest = out.narrow(dim, whole, size - whole)
            table = torch.cat([table.narrow(dim, 0, whole), rest], dim)
        return table


class PieceEnd(EdgeEnd):
    """One end of some edges, which are computed at a time.

    Args:
        end: The same end of all edges.
        rows: Those of its rows that the piece has.
        given: Tensors with a row for each of the piece.
    """

    def __init__(self, end: EdgeEnd, rows: Tensor, given: Sequence[Tensor] = ()) -> None:
        self._end, self._rows, self._given = end, rows, given
        self.halo, self.numbering, self.is_source = end.halo, end.numbering, end.is_source
        self.node_type, self.num_rows = end.node_type, rows.numel()
        self.world_size, self.group, self.largest = end.world_size, end.group, end.largest
        self.is_ambiguous = self._leaves_ranks_empty = self.has_remote_rows = False
        self.is_numbered = end.is_numbered

    def numbers(self, rows: Tensor) -> Tensor:
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
        return tensor, self._table_rows(tensor, dim, rows, complete=False)

    def refuse(self, name: str) -> NotImplementedError:
        """The error for what needs all edges of all ranks at once."""
        return NotImplementedError(
            f"{name} of nodes within messages is of all edges, and sequential mode computes some "
            "at a time; shard with mode='oneshot'"
        )


class SourceHalo:
    """The source rows of one relation, own and remote, and the rank's edges between them.

    Args:
        structure: Rows, edges and halos of this rank.
        mode: How remote rows are fetched; ``"auto"`` is resolved already.
        cache: Halo rows of tensors that never change, shared by the relations of a graph.
        extended_ids: Numbers of the extended rows, where another relation has fetched them.
    """

    def __init__(
        self,
        structure: ShardStructure,
        etype: CanonicalEType,
        mode: AggregationMode,
        cache: HaloRowCache,
        sources: NodeNumbering,
        destinations: NodeNumbering,
        extended_ids: Tensor | None = None,
    ) -> None:
        halo = structure.union_halo(etype[0])
        assert halo is not None
        self.structure, self.etype, self.mode, self.halo = structure, etype, mode, halo
        self.world_size = structure.world_size
        self.num_owned, self.num_extended = halo.num_owned, halo.num_extended
        #: ``[num_owned]`` the numbers of this rank's sources in the whole graph, if known.
        self.own_ids = sources.ids
        #: Whether sources and destinations are the same nodes.
        self.is_square = sources is destinations
        self._cache = cache
        edges = structure.edges[etype]
        self.num_dst = edges.num_dst
        self.edge_index = torch.stack([halo.extended_src(etype).long(), edges.dst.long()])
        if extended_ids is None:
            extended_ids = sources.extended_ids(halo)
        self.sources, self.destinations = self._ends(sources, destinations, extended_ids)
        #: This rank's rows of a tensor with a row for each edge of a whole graph, where calls
        #: bring such tensors (`graphshard.pyg.parallelize`).
        self.own_edges: Callable[[Tensor], Tensor] | None = None
        #: Whether these are the edges of another relation, turned round.
        self.is_turned = False
        self._reversed: SourceHalo | None = None
        self._with_loops: dict[int, SourceHalo] = {}
        self._fetched: list[tuple[Tensor, int, bool, Tensor]] = []
        self._edge_sets: list[EdgeSet] = []

    def _ends(
        self, sources: NodeNumbering, destinations: NodeNumbering, extended_ids: Tensor | None
    ) -> tuple[EdgeEnd, EdgeEnd]:
        """What the numbers at both ends mean; collective."""
        ids = extended_ids, destinations.ids
        largest = torch.full((2,), -1, dtype=torch.int64)
        for end, (numbers, rows) in enumerate(zip(ids, self.edge_index, strict=True)):
            if numbers is not None and rows.numel():
                largest[end] = numbers[rows].max()
        first, second = all_reduce_alike(largest, "max", group=self.structure.group).tolist()
        return (
            EdgeEnd(self, sources, True, ids[0], first),
            EdgeEnd(self, destinations, False, ids[1], second),
        )

    # ------------------------------------------------------------------ rows

    def own_rows(self, rows: Any) -> Any:
        """This rank's rows of what has a row for each source of the whole graph; else itself.

        Such is a learned row per node, which every rank has whole.
        """
        num_whole = self.sources.numbering.num_whole
        fits = isinstance(rows, Tensor) and rows.dim() > 1 and rows.shape[0] == num_whole
        if not fits or self.own_ids is None or num_whole == self.num_owned:
            return rows
        return rows.index_select(0, self.own_ids)

    def extended(self, *rows: Tensor) -> list[Tensor]:
        """Own and then halo rows of each tensor; collective, one exchange for all of them.

        What one layer asks for twice is fetched once; see `forget`. Each is ``[num_owned, ...]``.
        """
        for own in rows:
            if own.layout != torch.strided:
                raise NotImplementedError(
                    f"rows of a sparse tensor cannot be read at the sources of edges (got shape "
                    f"{tuple(own.shape)}, {own.layout}); pass x.to_dense(), or have a Linear first"
                )
        if self.world_size == 1:
            return list(rows)
        extended = [self._fetched_rows(own) for own in rows]
        missing = [i for i, tensor in enumerate(extended) if tensor is None]
        if missing:
            requests = [(self.halo, rows[i]) for i in missing]
            for i, tensor in zip(missing, self._cache.extended(requests), strict=True):
                extended[i] = tensor
                self._fetched.append(
                    (rows[i], version_of(rows[i]), torch.is_grad_enabled(), tensor)
                )
        return [tensor for tensor in extended if tensor is not None]

    def is_here(self, own: Tensor) -> bool:
        """Whether a tensor's halo rows have come since `forget`."""
        return self._fetched_rows(own) is not None

    def _fetched_rows(self, own: Tensor) -> Tensor | None:
        for tensor, version, with_grad, extended in self._fetched:
            serves = with_grad or not (own.requires_grad and torch.is_grad_enabled())
            if tensor is own and version == version_of(own) and serves:
                return extended
        return None

    @property
    def fetched(self) -> list[Tensor]:
        """The extended rows that `extended` has given since `forget`."""
        return [extended for halo in self._family() for _, _, _, extended in halo._fetched]

    def forget(self) -> None:
        """Drop the rows that were fetched; a layer that is done calls it."""
        for halo in self._family():
            halo._fetched.clear()

    def _family(self) -> Iterator[SourceHalo]:
        """This relation, and what a layer has made of it: turned round, with self loops."""
        yield self
        for halo in self._with_loops.values():
            yield from halo._family()
        if self._reversed is not None:
            yield self._reversed
            for halo in self._reversed._with_loops.values():
                yield from halo._family()

    def fetched_again(self, rows: Sequence[Tensor], wire: Wire = None) -> list[Tensor]:
        """As `extended`, of detached rows, and nothing is kept; collective.

        Rows come from one rank after the other, as many ahead as the mode's ``prefetch`` says, so
        that they are in memory once.
        """
        detached = [own.detach() for own in rows]
        if self.world_size == 1:
            return detached
        whole = [own.new_empty((self.num_extended, *own.shape[1:])) for own in detached]
        for own, extended in zip(detached, whole, strict=True):
            extended[: self.num_owned] = own
        transport = PairwiseTransport(self.halo, wire)
        fields = {("u", number): own for number, own in enumerate(detached)}
        fixed = dict.fromkeys(fields, False)
        visits = [(step, WHOLE) for step in range(transport.num_steps)]
        depth = self.mode.fetched_ahead
        with closing(transport.prefetched(visits, depth, fields, {}, fixed, {})) as arriving:
            for step, _, parts in arriving:
                if step:
                    owner = (self.halo.plan.rank - step) % self.world_size
                    start, stop = (self.num_owned + end for end in self.halo.plan.halo_range(owner))
                    for extended, part in zip(whole, parts.values(), strict=True):
                        extended[start:stop] = part
                del parts
        return whole

    def returned(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Sum of gradients of extended rows ``[num_extended, ...]``, per own row; collective."""
        own = [grad[: self.num_owned] for grad in grads]
        if self.world_size == 1:
            return own
        remote = [(self.halo.plan, grad[self.num_owned :].contiguous()) for grad in grads]
        return [a + b for a, b in zip(own, return_halo(remote), strict=True)]

    def summed_at_sources(self, extended: Tensor) -> Tensor:
        """Sum of extended rows ``[num_extended, ...]``, per own row; differentiable, collective."""
        if self.world_size == 1:
            return extended
        own, remote = extended[: self.num_owned], extended[self.num_owned :]
        return own + _SumAtSources.apply(remote, self)

    # ------------------------------------------------------------------ edges

    def edge_set(self, edge_index: Tensor) -> EdgeSet:
        """The sorted formats of these edges, made once for edges that come again and again.

        A layer that adds self loops makes an equal new tensor at every step. Comparing it with
        those of earlier calls costs a look at each id, sorting it costs many.
        """
        for number, edges in enumerate(self._edge_sets):
            if edges.holds(edge_index):
                self._edge_sets.insert(0, self._edge_sets.pop(number))
                return edges
        # As RGCNConv has one for each relation: many sets, but few times all edges.
        room = _KEPT_TIMES_EDGES * max(self.edge_index.shape[1], edge_index.shape[1])
        recent = [EdgeSet(edge_index, self.num_extended, self.num_dst)]
        for edges in self._edge_sets[: _KEPT_EDGE_SETS - 1]:
            room -= edges.edge_index.shape[1]
            if room < 0:
                break
            recent.append(edges)
        self._edge_sets = recent
        return recent[0]

    def largest_in_degree(self, edges: EdgeSet) -> int:
        """In-edges of the destination of all ranks that has the most; collective."""
        indptr, _, _ = edges.adjacency.csc()
        largest = indptr.diff().max() if self.num_dst else indptr.new_zeros(())
        return int(all_reduce_alike(largest.long(), "max", group=self.structure.group))

    def reversed(self) -> SourceHalo:
        """The same relation with its edges turned round; collective the first time.

        Edges live with their destination, so those that now end on another rank move to it.
        """
        if self._reversed is None:
            edges, plan = self.structure.edges[self.etype], self.halo.plan
            group = self.structure.group
            ends_of_edges = torch.stack([edges.src.long(), edges.dst.long()], 1)
            pairs, _, (_, incoming) = _to_ranks(
                ends_of_edges, edges.src_part.long(), plan.world_size, group
            )
            ranks = torch.arange(plan.world_size, device=pairs.device)
            part = torch.repeat_interleave(ranks, incoming)
            order = torch.argsort(pairs[:, 0], stable=True)
            turned = LocalEdges(part[order], pairs[order, 1], pairs[order, 0], self.num_owned)
            source, relation, target = self.etype
            self._reversed = self._with_edges(
                (target, f"rev_{relation}", source), turned, self.structure.constants
            )
            self._reversed._reversed = self
            self._reversed.is_turned = True
        return self._reversed

    def _with_edges(
        self, etype: CanonicalEType, edges: LocalEdges, constants: ConstantCache | None = None
    ) -> SourceHalo:
        """Other edges between the same nodes, or from destinations to sources; collective."""
        numberings = {
            self.etype[0]: self.sources.numbering,
            self.etype[2]: self.destinations.numbering,
        }
        ends = numberings[etype[0]], numberings[etype[2]]
        structure = ShardStructure(
            {etype: edges},
            {etype[0]: ends[0].num_owned},
            {etype[2]: ends[1].num_owned},
            self.structure.device,
            self.structure.group,
            constants,
        )
        cache = HaloRowCache(structure, self.mode.halo_dtype)
        return SourceHalo(structure, etype, self.mode, cache, *ends)

    def with_self_loops(self, limit: int) -> SourceHalo:
        """The relation, and after its edges one from source to destination of each number.

        Of a relation between two types: what its loops read may be on other ranks, and in no halo.
        Collective the first time. ``limit`` is the end of the numbers, which both types have.
        """
        if limit not in self._with_loops:
            numbers = self.destinations.own_ids
            dst = (numbers < limit).nonzero().view(-1)
            part, src = self._find_sources(numbers[dst], limit)
            edges = self.structure.edges[self.etype]
            joined = LocalEdges(
                torch.cat([edges.src_part.long(), part]),
                torch.cat([edges.src.long(), src]),
                torch.cat([edges.dst.long(), dst]),
                edges.num_dst,
            )
            self._with_loops[limit] = self._with_edges(self.etype, joined)
        return self._with_loops[limit]

    def _find_sources(self, numbers: Tensor, limit: int) -> tuple[Tensor, Tensor]:
        """The rank that owns each of some sources, and the row there; collective.

        No rank has those of all numbers: the owner of number ``n`` writes it down at rank
        ``n % world_size``, where others ask for it.
        """
        own, size, group = self.sources.own_ids, self.world_size, self.structure.group
        device = own.device
        rows = (own < limit).nonzero().view(-1)
        written = torch.stack([own[rows], torch.full_like(rows, self.halo.plan.rank), rows], 1)
        notes, _, _ = _to_ranks(written, own[rows] % size, size, group)
        asked, order, counts = _to_ranks(numbers.view(-1, 1), numbers % size, size, group)
        book = torch.full((limit // size + 1, 2), -1, dtype=torch.int64, device=device)
        book[notes[:, 0] // size] = notes[:, 1:]
        answers = book[asked.view(-1) // size]
        if size > 1:
            sent, received = counts
            answers = ragged_all_to_all_alike(answers, received.tolist(), sent.tolist(), group)
        owners = torch.empty_like(answers)
        owners[order] = answers
        return owners[:, 0], owners[:, 1]


def _to_ranks(
    rows: Tensor, ranks: Tensor, world_size: int, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
    """Send each row to a rank: the rows that came, the order of those sent, and both counts."""
    order = torch.argsort(ranks, stable=True)
    counts = torch.bincount(ranks, minlength=world_size)
    if world_size == 1:
        return rows[order], order, (counts, counts)
    ones = [1] * world_size
    incoming = ragged_all_to_all_alike(counts, ones, ones, group)
    arrived = ragged_all_to_all_alike(rows[order], counts.tolist(), incoming.tolist(), group)
    return arrived, order, (counts, incoming)


class _SumAtSources(torch.autograd.Function):
    """Halo rows, summed at their owners: the adjoint of a fetch."""

    @staticmethod
    def forward(ctx, remote: Tensor, halo: SourceHalo) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.halo = halo
        return return_halo([(halo.halo.plan, remote.contiguous())])[0].detach()

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[no-untyped-def]
        return fetch_halo([(ctx.halo.halo.plan, grad.contiguous())])[0], None


class EdgeSet:
    """Edges of a relation, perhaps with self loops added or some left out, and their order.

    ``edge_index`` is int64 ``[2, num_edges]``, extended source rows and destination rows.
    """

    def __init__(self, edge_index: Tensor, num_src: int, num_dst: int) -> None:
        self.edge_index = edge_index
        small = max(num_src, num_dst, edge_index.shape[1]) < 2**31
        src, dst = edge_index.to(torch.int32) if small else edge_index
        self.adjacency = Adjacency(src, dst, num_src, num_dst, check=False)
        self.pieces: Any = None  # made by what computes in pieces
        self.transport: Any = None  # made by what computes shard by shard
        self.sums: Any = None  # likewise, of partial sums
        self.states: Any = None  # likewise, of states of destinations
        self.number = next(_edge_set_numbers)  # of no other edge set in this process

    @cached_property
    def places(self) -> Tensor:
        """int32 ``[num_edges]``, the places of the edges in the set: keys for dropout."""
        num_edges, device = self.edge_index.shape[1], self.edge_index.device
        return torch.arange(num_edges, dtype=torch.int32, device=device)

    @cached_property
    def counts(self) -> Tensor:
        """``[num_dst]`` in-edges of each destination, 1 at least: what a mean divides by."""
        indptr, _, _ = self.adjacency.csc()
        return indptr.diff().clamp(min=1)

    def holds(self, edge_index: Tensor) -> bool:
        """Whether these are its edges, in its order."""
        own = self.edge_index
        return own is edge_index or (own.shape == edge_index.shape and torch.equal(own, edge_index))
