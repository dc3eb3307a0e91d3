# SPDX-License-Identifier: Apache-2.0
"""FewestRows, RowsAndStates: what travels of a halo where messages are summed.

[Note: fewest rows]
    An edge from a node ``u`` of rank ``p`` to a node ``v`` of rank ``q`` can be served in two ways
    where messages are summed: ``p`` sends the row of ``u``, which serves all edges from ``u`` to
    ``q``; or ``p`` adds up what ``v`` gets from ``p``, and sends the partial sum, which serves all
    edges from ``p`` to ``v``. A smallest set of rows and sums that serves all edges of the pair is
    a minimum vertex cover of the bipartite graph of its edges. So what travels is a sparse matrix
    (`FewestRows`) times own rows; with rows alone it is a selection. Backward it is transposed: a
    row's gradient comes back as the sum over the edges that it served, and that of a partial sum is
    the gradient of ``v``. Receivers find the cover and tell owners once, what each sum is made of
    is in the order of local edges, and so are runs repeatable. Weights that are fixed go to where
    they are multiplied before each pass, or once where they are constant.

    Some layers send gradients of their results instead, see `nn.symmetric_sums`.

    For attention the cover is the same, and what travels beside rows is the state of ``v``, see
    [Note: states of destinations] in `softmax`; in one-shot mode, where it is fewer bytes.

    Rows travel, in place of that, where they are fetched once (constant features), where other
    calls or kinds of messages read them, too (max, min, functions of the user), and where 5 % of
    them at most would be saved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from .._base.typing import CanonicalEType
from ..comm import ExchangePlan
from ..comm.collectives import all_reduce_alike
from ..comm.transport import ragged_all_to_all_alike
from ..ops import Adjacency, add_rows, gspmm
from ..partition.vertex_cover import minimum_vertex_cover
from .topology import Halo, LocalEdges, Shard, narrow, needed_rows, remote_sources, sorted_adjacency

# -- fewest rows for sums --------------------------------------------------------------------------

_WORTHWHILE = 0.95
"""The most rows, of those that are read, that partial sums are made for."""


class FewestRows:
    """What travels of a halo where all its relations are summed: rows, and partial sums.

    See [Note: fewest rows].

    Args:
        plan: Of what is sent, which its sender makes.
        longest_message: Most rows that any rank sends to any other; the same on all ranks.
        sent: From own rows to what is sent, in the order of the plan.
        is_partial: bool, of each edge of ``sent``: whether it goes into a partial sum.
        partial_edges: Local ids of the edges that other ranks sum, in the order of their ``sent``;
            None for several relations.
        partial_splits: How many of those each rank sums; and how many this one sums for each.
        received: The edges of each relation from what is received.
        saved: Rows fewer than are read, and edges that are summed where their sources are, of all
            ranks together.
    """

    def __init__(
        self,
        halo: Halo,
        plan: ExchangePlan,
        longest_message: int,
        sent: Adjacency,
        is_partial: Tensor,
        partial_edges: Tensor | None,
        partial_splits: tuple[list[int], list[int]],
        received: Mapping[CanonicalEType, _Received],
        saved: tuple[int, int],
    ) -> None:
        self.halo, self.plan, self.longest_message = halo, plan, longest_message
        self.is_partial, self.partial_edges = is_partial, partial_edges
        self.partial_splits, self.saved = partial_splits, saved
        self._received = received
        #: For each reader, first and last, after all of them: own rows to what is sent.
        self._sent: dict[int | None, Adjacency] = {None: sent}
        self._returned: dict[int | None, tuple[Tensor, Adjacency] | None] = {}
        self._shards: dict[CanonicalEType, tuple[Shard, ...]] = {}
        self._halves: dict[CanonicalEType, tuple[Shard, ...]] = {}

    def _sent_to(self, reader: int | None) -> Adjacency:
        if reader not in self._sent:
            first, last = self._bounds(reader)
            indptr, indices, _ = self._sent[None].csc()
            start, stop = int(indptr[first]), int(indptr[last])
            ends, sources = indptr[first : last + 1] - start, indices[start:stop]
            sizes = self.halo.num_owned, last - first
            self._sent[reader] = Adjacency.from_csc(ends, sources, None, *sizes, check=False)
        return self._sent[reader]

    def _bounds(self, reader: int | None) -> tuple[int, int]:
        splits = self.plan.send_splits
        if reader is None:
            return 0, sum(splits)
        return sum(splits[:reader]), sum(splits[: reader + 1])

    def _weights_for(self, reader: int | None, weights: Tensor | None) -> Tensor | None:
        if weights is None or reader is None:
            return weights
        first, last = self._bounds(reader)
        indptr, _, _ = self._sent[None].csc()
        return weights[int(indptr[first]) : int(indptr[last])]

    def made(self, own: Tensor, reader: int | None = None, weights: Tensor | None = None) -> Tensor:
        """What is sent to a rank, or to all, of own rows; ``weights`` as `sent_weights` gives."""
        weights = self._weights_for(reader, weights)
        op = "copy_lhs" if weights is None else "mul"
        return gspmm(self._sent_to(reader), op, "sum", own, weights).to(own.dtype)

    def add_returned(
        self,
        total: Tensor,
        arrived: Tensor,
        reader: int | None = None,
        weights: Tensor | None = None,
    ) -> None:
        """Add the gradients of own rows, in place, given those of what was sent: its adjoint."""
        if reader not in self._returned:
            shard = Shard(0, self._sent_to(reader).reverse(), None)
            self._returned[reader] = shard.reached
        weights = self._weights_for(reader, weights)
        op = "copy_lhs" if weights is None else "mul"
        reached = self._returned[reader]
        dtype = torch.float32 if total.dtype.itemsize == 2 else total.dtype
        arrived = arrived.to(dtype)
        if reached is None:
            total += gspmm(self._sent_to(reader).reverse(), op, "sum", arrived, weights)
            return
        rows, adjacency = reached
        sums = gspmm(adjacency, op, "sum", arrived, weights)
        if total.dtype == dtype:
            add_rows(total, rows, sums)
        else:  # rounded once
            total[rows.long()] = sums.add_(total[rows.long()]).to(total.dtype)

    def sent_weights(self, weights: Tensor, partial_edges: Tensor) -> Tensor:
        """The weight of each edge of what is sent, from those of local edges; collective.

        Args:
            weights: ``[num_edges, ...]`` of the only relation.
            partial_edges: Ids of those that other ranks sum, in the order of `partial_edges`.
        """
        theirs, mine = self.partial_splits
        given = weights.detach().index_select(0, partial_edges)
        arrived = ragged_all_to_all_alike(given, theirs, mine, self.plan.group)
        full = arrived.new_ones((self.is_partial.numel(), *arrived.shape[1:]))
        full[self.is_partial] = arrived
        return full

    def shards(self, etype: CanonicalEType) -> tuple[Shard, ...]:
        """As `Halo.shards`, of what is received instead of halo rows."""
        if etype not in self._shards:
            rank, world_size = self.plan.rank, self.plan.world_size
            remote = [
                self._make_shard(etype, step, *self.plan.halo_range((rank - step) % world_size))
                for step in range(1, world_size)
            ]
            self._shards[etype] = self.halo.own_shard(etype), *remote
            for reader in range(world_size):  # here, and not on the stream of a copy
                self._sent_to(reader)
        return self._shards[etype]

    def halves(self, etype: CanonicalEType) -> tuple[Shard, ...]:
        """As `Halo.halves`."""
        if etype not in self._halves:
            remote = self._make_shard(etype, 1, 0, self.plan.num_halo)
            self._halves[etype] = self.halo.own_shard(etype), remote
        return self._halves[etype]

    def _make_shard(self, etype: CanonicalEType, step: int, start: int, stop: int) -> Shard:
        edges, num_dst = self._received[etype], self.halo.edges[etype].num_dst

        def of_shard(rows: Tensor) -> Tensor:
            return ((rows >= start) & (rows < stop)).nonzero().view(-1)

        rows, sums = of_shard(edges.rows), of_shard(edges.sums)
        src = torch.cat([edges.rows[rows].long(), edges.sums[sums].long()]) - start
        dst = torch.cat([edges.dst_of_rows[rows].long(), edges.dst_of_sums[sums].long()])
        bound = max(stop - start, num_dst)
        adjacency = sorted_adjacency(narrow(src, bound), narrow(dst, bound), stop - start, num_dst)
        eids = edges.eids
        return Shard(step, adjacency, lambda: eids[of_shard(edges.rows)], sums.numel())


@dataclass(frozen=True)
class _Received:
    """Edges of one relation from what is received: those of rows, and one from each partial sum.

    Args:
        eids: Local ids of the edges of rows, ascending.
        rows: Of each of them its place in what is received; likewise ``sums``.
    """

    eids: Tensor
    rows: Tensor
    dst_of_rows: Tensor
    sums: Tensor
    dst_of_sums: Tensor

    def to(self, device: torch.device) -> _Received:
        """The same on a device, in int32 where that holds them."""
        parts = [getattr(self, name.name) for name in fields(self)]
        bounds = [int(part.max()) + 1 if part.numel() else 0 for part in parts]
        return _Received(*[narrow(p, n).to(device) for p, n in zip(parts, bounds, strict=True)])


@dataclass(frozen=True)
class _Cover:
    """The rows and partial sums that serve the cut edges of all relations of a halo.

    A partial sum is of one owner of sources, relation and destination; they are in this order.

    Args:
        rows: The halo row of each cut edge, relation after relation; ``sums`` its partial sum.
        owner_of_row: Of each halo row; likewise ``owner_of_sum``.
        ends_of_sums: The destination of each sum, those of all relations counted on.
        sends_row: Of each halo row whether it is sent; likewise ``sends_sum``.
    """

    rows: Tensor
    sums: Tensor
    owner_of_row: Tensor
    owner_of_sum: Tensor
    ends_of_sums: Tensor
    sends_row: Tensor
    sends_sum: Tensor

    @cached_property
    def summed(self) -> Tensor:
        """The cut edges that are served by partial sums, ascending."""
        return (~self.sends_row[self.rows]).nonzero().view(-1)

    @cached_property
    def owners(self) -> Tensor:
        """Who sends each row and then each sum that is sent."""
        return torch.cat([self.owner_of_row[self.sends_row], self.owner_of_sum[self.sends_sum]])

    @cached_property
    def places(self) -> tuple[Tensor, Tensor]:
        """Of each halo row, and each sum, its place in what is received; -1 if it is not sent.

        By owner, rows before sums.
        """
        num_rows = int(self.sends_row.sum())
        kinds = 2 * self.owners
        kinds[num_rows:] += 1
        places = torch.empty_like(kinds)
        places[torch.argsort(kinds, stable=True)] = torch.arange(kinds.numel())
        of_rows = torch.full(self.sends_row.shape, -1)
        of_rows[self.sends_row] = places[:num_rows]
        of_sums = torch.full(self.sends_sum.shape, -1)
        of_sums[self.sends_sum] = places[num_rows:]
        return of_rows, of_sums


def _find_cover(
    edges: Sequence[LocalEdges], needed: Sequence[Tensor], rank: int
) -> tuple[_Cover, list[tuple[Tensor, Tensor, Tensor]]]:
    """A minimum vertex cover for each pair of ranks; rows alone where that saves little.

    Args:
        edges: Those of each relation.
        needed: `needed_rows` of them.

    Returns:
        Also the edges between ranks of each relation: local ids, halo rows and destinations.
    """
    owners = [owner for owner in range(len(needed)) if owner != rank]
    cut, ends, start = [], [], 0
    for of_relation in edges:
        eids = (of_relation.src_part != rank).nonzero().view(-1)
        halo_rows, _ = remote_sources(of_relation, eids, owners, needed)
        dst = of_relation.dst[eids].to("cpu", torch.int64)
        cut.append((eids.cpu(), halo_rows.cpu(), dst))
        ends.append(dst + start)
        start += of_relation.num_dst
    rows = torch.cat([halo_rows for _, halo_rows, _ in cut])
    splits = torch.tensor([0 if r == rank else part.numel() for r, part in enumerate(needed)])
    owner_of_row = torch.repeat_interleave(torch.arange(splits.numel()), splits)
    num_ends = max(start, 1)
    keys, sums = torch.unique(torch.cat(ends) + owner_of_row[rows] * num_ends, return_inverse=True)
    owner_of_sum = keys // num_ends
    sizes = owner_of_row.numel(), keys.numel()
    sends_row, sends_sum = minimum_vertex_cover(rows, sums, *sizes)
    counts = torch.bincount(owner_of_row[sends_row], minlength=splits.numel())
    counts += torch.bincount(owner_of_sum[sends_sum], minlength=splits.numel())
    saves = counts <= _WORTHWHILE * splits
    sends_row |= ~saves[owner_of_row]
    sends_sum &= saves[owner_of_sum]
    keys %= num_ends
    return _Cover(rows, sums, owner_of_row, owner_of_sum, keys, sends_row, sends_sum), cut


def count_fewest_rows(edges: Sequence[LocalEdges], rank: int, world_size: int) -> Tensor:
    """Remote rows that a rank reads, and rows and partial sums that serve it where it sums.

    Args:
        edges: Of the relations that are summed together, all of one source type.

    Returns:
        ``[7, world_size]``: the number from each owner of remote rows, of rows and partial sums,
        of partial sums alone, and of those of 2, 3, 4 and more rows.
    """
    needed = needed_rows(edges, rank, world_size)
    cover, _ = _find_cover(edges, needed, rank)
    lengths = torch.bincount(cover.sums[cover.summed], minlength=cover.owner_of_sum.numel())
    sums = [cover.sends_sum]
    sums += [cover.sends_sum & (lengths.clamp(max=5) == length) for length in range(2, 6)]
    kinds = cover.owner_of_row, cover.owners, *(cover.owner_of_sum[chosen] for chosen in sums)
    return torch.stack([torch.bincount(owners, minlength=world_size) for owners in kinds])


def saves_rows(num_read: int, num_sent: int) -> bool:
    """Whether partial sums are made: ``num_sent`` rows and sums in place of ``num_read`` rows."""
    return num_read > 0 and num_sent <= _WORTHWHILE * num_read


def find_fewest_rows(halo: Halo) -> FewestRows | None:
    """What serves the cut edges of each pair of ranks with fewest rows. Collective.

    Returns:
        None on all ranks if hardly any rows are saved. See [Note: fewest rows].
    """
    plan, group, device = halo.plan, halo.plan.group, halo.plan.send_index.device
    cover, cut = _find_cover(list(halo.edges.values()), halo.needed, plan.rank)
    starts = [0, *accumulate(edges.num_dst for edges in halo.edges.values())]
    totals = torch.tensor([halo.num_halo, cover.owners.numel(), cover.summed.numel()])
    num_read, num_sent, num_summed = all_reduce_alike(totals, group=group).tolist()
    if not saves_rows(num_read, num_sent):
        return None
    received, first = {}, 0
    for etype, edges, ends in zip(halo.edges, cut, pairwise(starts), strict=True):
        last = first + edges[0].numel()
        received[etype] = _received(cover, edges, slice(first, last), ends).to(device)
        first = last
    # What each owner makes of its rows, and of how many edges: rows first, then sums.
    place_of_row, place_of_sum = cover.places
    chosen = cover.sends_row.nonzero().view(-1)
    places = torch.cat([place_of_row[chosen], place_of_sum[cover.sums[cover.summed]]])
    order = torch.argsort(places, stable=True)
    row_at_owner = torch.cat(halo.needed).cpu()
    halo.forget_needed()
    sources = torch.cat([chosen, cover.rows[cover.summed]])[order]
    is_partial = order >= chosen.numel()
    entries = torch.stack([row_at_owner[sources], is_partial.long()], 1)
    lengths = torch.bincount(places, minlength=cover.owners.numel())
    count = partial(torch.bincount, minlength=plan.world_size)
    recv, owners = count(cover.owners), cover.owner_of_row[sources]
    sizes = torch.stack([recv, count(owners), count(owners[is_partial])], 1)
    ones = [1] * plan.world_size
    asked = ragged_all_to_all_alike(sizes, ones, ones, group)
    splits = list(zip(sizes.t().tolist(), asked.t().tolist(), strict=True))
    lengths = ragged_all_to_all_alike(lengths, *splits[0], group)
    entries = ragged_all_to_all_alike(entries, *splits[1], group)
    indptr = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    sizes_here = halo.num_owned, lengths.numel()
    bound = max(*sizes_here, len(entries))
    indptr, indices = narrow(indptr, bound), narrow(entries[:, 0], bound)
    sent = Adjacency.from_csc(indptr, indices, None, *sizes_here, check=False).to(device)
    send = splits[0][1]
    most = torch.tensor([cover.owners.numel(), max(send)])
    most_rows, longest = all_reduce_alike(most, "max", group=group).tolist()
    partial_edges = None
    if len(cut) == 1:
        eids, _, _ = cut[0]
        partial_edges = eids[cover.summed[order[is_partial] - chosen.numel()]].to(device)
    return FewestRows(
        halo,
        ExchangePlan.of_made_rows(send, splits[0][0], most_rows, group),
        longest,
        sent,
        entries[:, 1].bool().to(device),
        partial_edges,
        splits[2],
        received,
        (num_read - num_sent, num_summed),
    )


def _received(
    cover: _Cover, edges: Sequence[Tensor], edges_in_cover: slice, ends: tuple[int, int]
) -> _Received:
    """The edges of a relation from what is received.

    Args:
        edges: Those between ranks: local ids, halo rows and destinations.
        edges_in_cover: Which of those of the cover they are.
        ends: The bounds of its destinations among those of the cover.
    """
    eids, halo_rows, dst = edges
    place_of_row, place_of_sum = cover.places
    by_row = cover.sends_row[cover.rows[edges_in_cover]]
    start, stop = ends
    is_here = (cover.ends_of_sums >= start) & (cover.ends_of_sums < stop) & cover.sends_sum
    return _Received(
        eids[by_row],
        place_of_row[halo_rows[by_row]],
        dst[by_row],
        place_of_sum[is_here],
        cover.ends_of_sums[is_here] - start,
    )


# -- fewest rows for attention ---------------------------------------------------------------------


@dataclass(eq=False)
class RowsAndStates:
    """What travels of a halo of one relation for attention: rows, and states of destinations.

    See [Note: fewest rows].

    Args:
        halo: All rows that the relation reads.
        rows: Who sends which rows to whom.
        states: Whose destinations each rank makes states of: it fetches what scores read of them,
            and returns the states.
        sources: Own rows that states are made of, ascending.
        edges: From these to the destinations of ``states``.
        partial_edges: Local ids of the edges that other ranks make states of, by rank; and how many
            each makes states of, and this one for each. `edges` come in the order of theirs.
        eids: Local ids of the edges that rows serve, ascending; with the places of the rows in what
            is received, and destinations.
        totals: Rows that are read, rows that are sent, and states, of all ranks together.
    """

    halo: Halo
    rows: ExchangePlan
    states: ExchangePlan
    sources: Tensor
    edges: Adjacency
    partial_edges: Tensor
    partial_splits: tuple[list[int], list[int]]
    eids: Tensor
    places: Tensor
    dst: Tensor
    totals: tuple[int, int, int]
    _keys: tuple[Tensor, Tensor] | None = None

    def keys_of_edges(self, keys: Tensor, partial_edges: Tensor) -> Tensor:
        """The keys of `edges`, of those of local edges; collective where these are new.

        Args:
            partial_edges: Where the keys of `partial_edges` are.
        """
        if self._keys is None or self._keys[0] is not keys:
            group = self.states.group
            given = keys.index_select(0, partial_edges)
            self._keys = keys, ragged_all_to_all_alike(given, *self.partial_splits, group)
        return self._keys[1]

    @cached_property
    def halves(self) -> tuple[Shard, ...]:
        """The own shard, and the edges that rows of other ranks serve."""
        ((etype, edges),) = self.halo.edges.items()
        num_rows = self.rows.num_halo
        bound = max(num_rows, edges.num_dst)
        ends = narrow(self.places, bound), narrow(self.dst, bound)
        adjacency = sorted_adjacency(*ends, num_rows, edges.num_dst)
        return self.halo.own_shard(etype), Shard(1, adjacency, lambda: self.eids)

    @cached_property
    def received(self) -> Adjacency:
        """From the states that come, in their order, to the destinations that they are of."""
        rows = self.states.send_index
        bound = max(rows.numel(), self.states.num_rows)
        numbers = torch.arange(rows.numel(), device=rows.device)
        ends = narrow(numbers, bound), narrow(rows, bound)
        return Adjacency(*ends, rows.numel(), self.states.num_rows, check=False)


def find_rows_and_states(halo: Halo) -> RowsAndStates | None:
    """What serves the cut edges of each pair of ranks with fewest rows and states. Collective.

    Returns:
        None on all ranks if that are hardly fewer than rows alone. See [Note: fewest rows].
    """
    plan, group, device = halo.plan, halo.plan.group, halo.plan.send_index.device
    ((_, edges),) = halo.edges.items()
    cover, ((eids, halo_rows, dst),) = _find_cover([edges], halo.needed, plan.rank)
    counts = halo.num_halo, int(cover.sends_row.sum()), int(cover.sends_sum.sum())
    num_read, num_rows, num_states = all_reduce_alike(torch.tensor(counts), group=group).tolist()
    if not saves_rows(num_read, num_rows + num_states):
        return None
    needed = torch.cat(halo.needed).cpu()
    halo.forget_needed()
    sent = cover.sends_row.split(plan.recv_splits)
    asked = [rows[s] for rows, s in zip(needed.split(plan.recv_splits), sent, strict=True)]
    rows_plan = ExchangePlan.build(asked, halo.num_owned, group=group, device=device)
    by_row = cover.sends_row[halo_rows]
    place_of_row = cover.sends_row.cumsum(0) - 1
    # The other edges go to the owners of their sources, in local order.
    summed = cover.summed
    owners = cover.owner_of_row[halo_rows[summed]]
    summed = summed[torch.argsort(owners, stable=True)]
    entries = torch.stack([needed[halo_rows[summed]], dst[summed]], 1)
    splits = torch.bincount(owners, minlength=plan.world_size).tolist()
    ones = [1] * plan.world_size
    splits_here = ragged_all_to_all_alike(torch.tensor(splits), ones, ones, group).tolist()
    entries = ragged_all_to_all_alike(entries, splits, splits_here, group)
    read, ends, first = [], [], 0
    for part in entries[:, 1].split(splits_here):
        rows, at = torch.unique(part, return_inverse=True)
        read.append(rows)
        ends.append(at + first)
        first += rows.numel()
    states_plan = ExchangePlan.build(read, edges.num_dst, group=group, device=device)
    sources, src = torch.unique(entries[:, 0], return_inverse=True)
    bound = max(sources.numel(), first, len(entries))
    served = narrow(src, bound), narrow(torch.cat(ends), bound)
    return RowsAndStates(
        halo,
        rows_plan,
        states_plan,
        narrow(sources, halo.num_owned).to(device),
        sorted_adjacency(*served, sources.numel(), first).to(device),
        eids[summed].to(device),
        (splits, splits_here),
        narrow(eids[by_row], edges.num_edges).to(device),
        narrow(place_of_row[halo_rows[by_row]], rows_plan.num_halo).to(device),
        narrow(dst[by_row], edges.num_dst).to(device),
        (num_read, num_rows, num_states),
    )
