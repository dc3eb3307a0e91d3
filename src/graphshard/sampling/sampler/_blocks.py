# SPDX-License-Identifier: Apache-2.0
"""sample_blocks: from seeds to one block per layer, for any sampler and any graph store.

[Note: keyed draws]
    The neighbours drawn for a node depend on (seed, epoch, step, layer, relation, original node
    id) and on nothing else: not on the rank that asks, the rank that answers, the number of
    ranks, parts or threads, nor on what else is drawn. So every split of the work draws the same
    sample, and a coming epoch's draws can be known in advance by drawing them.

[Note: repeated seeds]
    A batch may have a seed several times, as oversampling of rare classes makes them. Neighbours
    are drawn for distinct seeds, and afterwards each block gets a destination for every occurrence.
    What is drawn for a node depends on its id, not on its place, so all occurrences of a seed have
    the same neighbours, as if they were drawn one by one. The destinations of a block are
    the first of its sources, so occurrences are repeated down to the inputs.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from ..._typing import CanonicalEType
from ...graph import EID, NID, Block
from ...graph.message_passing import frames_of
from ...ops import Adjacency, IdTable
from ..graph_store import DrawOptions, GraphStore, NeighborRequest, SampledNeighbors

_WORD = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class DrawSeed:
    """One mini-batch's draws.

    Args:
        seed: Of the run.
        epoch: Which pass over the seeds.
        step: Which batch of the epoch.
    """

    seed: int
    epoch: int = 0
    step: int = 0

    @classmethod
    def fresh(cls) -> DrawSeed:
        """A seed from torch's default generator, as other random functions of torch use it."""
        return cls(int(torch.randint(2**62, ())))

    def at(self, *, epoch: int | None = None, step: int | None = None) -> DrawSeed:
        """The same run at another place."""
        return replace(
            self,
            epoch=self.epoch if epoch is None else epoch,
            step=self.step if step is None else step,
        )

    def key(self, layer: int, relation: int) -> int:
        """The 64-bit key of the draws of one layer under one relation.

        Args:
            layer: Index of the block that the draws are for.
            relation: Index of the relation in ``canonical_etypes``.
        """
        mixed = 0
        for part in (self.seed, self.epoch, self.step, layer, relation):
            mixed = _mix((mixed + _STEP + (part & _WORD)) & _WORD)
        return mixed


def _mix(word: int) -> int:
    """The finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014): a bijection of words."""
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
    return word ^ (word >> 31)


RelationFanouts: TypeAlias = Mapping[CanonicalEType, int]
"""Relation to neighbours per node; -1 for all."""


class IdTables:
    """Scratch space for renumbering, one table per node type; for one thread at a time.

    Args:
        store: Whose ids are renumbered.
    """

    def __init__(self, store: GraphStore) -> None:
        self._tables = {t: IdTable(store.num_nodes(t)) for t in store.ntypes}

    @classmethod
    def of(cls, store: GraphStore) -> IdTables:
        """This thread's tables for a store, which are kept with it."""
        if not hasattr(store, "__dict__"):  # a user's own, with slots
            return cls(store)
        kept = vars(store).setdefault("_scratch", threading.local())
        if not hasattr(kept, "tables"):
            kept.tables = cls(store)
        tables: IdTables = kept.tables
        return tables

    def renumber(self, ntype: str, first: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
        """Distinct ids, ``first`` ahead, and the place of each of ``others`` among them."""
        return self._tables[ntype].renumber(first, others)


def sample_blocks(
    store: GraphStore,
    fanouts: Sequence[RelationFanouts],
    options: DrawOptions,
    seeds: Mapping[str, Tensor],
    draw_seed: DrawSeed,
    *,
    excluded: Mapping[CanonicalEType, Tensor] | None = None,
    tables: IdTables | None = None,
) -> list[Block]:
    """Draw neighbours layer by layer, from the outputs to the inputs.

    Each block's destination nodes come first among its source nodes of the same type, in the same
    order; the other sources follow in order of first appearance. ``srcdata[NID]``,
    ``dstdata[NID]`` and, if asked for, ``edata[EID]`` hold ids of the store. Where the graph
    spans ranks, collective.

    Args:
        store: Where neighbours come from.
        fanouts: Per block, the fanout of every relation.
        options: How to draw.
        seeds: Node type to ids; a type may be absent, ids may be none, and one may be there several
            times: see [Note: repeated seeds].
        draw_seed: Which draw this is.
        excluded: Relation to ids of edges that are treated as absent.
        tables: Scratch space; by default this thread's.

    Returns:
        ``blocks[0]`` takes the input features; the destinations of ``blocks[-1]`` are the seeds.
    """
    tables = IdTables.of(store) if tables is None else tables
    none = torch.empty(0, dtype=store.idtype, device=store.device)
    given = {t: seeds.get(t, none).to(store.idtype) for t in store.ntypes}
    distinct = {t: tables.renumber(t, ids[:0], ids) for t, ids in given.items()}
    frontier = {t: ids for t, (ids, _) in distinct.items()}
    blocks: list[Block] = []
    for layer in reversed(range(len(fanouts))):
        requests = [
            NeighborRequest(
                etype,
                frontier[_near(etype, options)],
                fanouts[layer][etype],
                draw_seed.key(layer, relation),
            )
            for relation, etype in enumerate(store.canonical_etypes)
        ]
        drawn = store.sample_neighbors(requests, options, excluded)
        block, frontier = _block(store, requests, drawn, options, frontier, tables)
        blocks.append(block)
    if any(len(ids) < len(given[t]) for t, (ids, _) in distinct.items()):
        return repeat_seeds(blocks[::-1], {t: places for t, (_, places) in distinct.items()})
    return blocks[::-1]


def _near(etype: CanonicalEType, options: DrawOptions) -> str:
    """The node type that draws: messages flow towards it."""
    return etype[2] if options.edge_dir == "in" else etype[0]


def _block(
    store: GraphStore,
    requests: Sequence[NeighborRequest],
    drawn: Sequence[SampledNeighbors],
    options: DrawOptions,
    frontier: Mapping[str, Tensor],
    tables: IdTables,
) -> tuple[Block, dict[str, Tensor]]:
    """The block of one layer, and the ids of its sources by type."""
    # What follows in-edges keeps their direction; messages along out-edges flow back.
    turned = options.edge_dir == "out"
    far = {i: r.etype[2] if turned else r.etype[0] for i, r in enumerate(requests)}
    src_ids: dict[str, Tensor] = {}
    places: dict[int, Tensor] = {}
    for ntype in store.ntypes:
        from_here = [i for i in far if far[i] == ntype]
        found = [drawn[i].neighbors for i in from_here]
        others = found[0] if len(found) == 1 else torch.cat([frontier[ntype][:0], *found])
        src_ids[ntype], local = tables.renumber(ntype, frontier[ntype], others)
        sizes = [drawn[i].neighbors.numel() for i in from_here]
        places.update(zip(from_here, local.split(sizes), strict=True))
    relations: dict[CanonicalEType, Adjacency] = {}
    for i, request in enumerate(requests):
        source, name, target = request.etype
        etype = (target, name, source) if turned else request.etype
        relations[etype] = Adjacency.from_csc(
            _pointer(drawn[i].counts, store.idtype),
            places[i],
            None,
            src_ids[etype[0]].numel(),
            frontier[etype[2]].numel(),
            check=False,
        )
    block = Block(
        {t: ids.numel() for t, ids in src_ids.items()},
        {t: ids.numel() for t, ids in frontier.items()},
        relations,
    )
    src_frames, dst_frames, edge_frames = frames_of(block)
    for place, ntype in enumerate(store.ntypes):
        src_frames[place][NID] = src_ids[ntype]
        dst_frames[place][NID] = frontier[ntype]
    for frame, one in zip(edge_frames, drawn, strict=True):
        if one.eids is not None:
            frame[EID] = one.eids
    return block, src_ids


def _pointer(counts: Tensor, idtype: torch.dtype) -> Tensor:
    pointer = torch.zeros(counts.numel() + 1, dtype=idtype, device=counts.device)
    torch.cumsum(counts, 0, dtype=idtype, out=pointer[1:])
    return pointer


def repeat_seeds(blocks: Sequence[Block], places: Mapping[str, Tensor]) -> list[Block]:
    """Blocks of the seeds as they were given, from those of distinct seeds.

    Args:
        blocks: Of distinct seeds, from the inputs to the outputs, with ids.
        places: Node type to the row of each given seed among the distinct ones.

    Returns:
        Blocks whose last has a destination for each given seed, in their order.
    """
    dst_rows = {ntype: rows.long() for ntype, rows in places.items()}
    found = []
    for block in reversed(blocks):
        src_rows = {t: torch.cat([rows, _others(block, t, rows)]) for t, rows in dst_rows.items()}
        found.append(_repeated(block, src_rows, dst_rows))
        dst_rows = src_rows
    return found[::-1]


def _others(block: Block, ntype: str, like: Tensor) -> Tensor:
    """The sources after the destinations."""
    first, last = block.num_dst_nodes(ntype), block.num_src_nodes(ntype)
    return torch.arange(first, last, dtype=like.dtype, device=like.device)


def _repeated(
    block: Block, src_rows: Mapping[str, Tensor], dst_rows: Mapping[str, Tensor]
) -> Block:
    """A block whose sources and destinations are rows of another's, with the edges into each."""
    first = {t: _first_places(rows, block.num_src_nodes(t)) for t, rows in src_rows.items()}
    relations, edges = {}, {}
    for etype, adjacency in zip(block.canonical_etypes, block.relations, strict=True):
        indptr, src, eids = adjacency.csc()
        rows = dst_rows[etype[2]]
        counts = indptr.diff()[rows]
        pointer = torch.zeros(len(rows) + 1, dtype=indptr.dtype, device=indptr.device)
        torch.cumsum(counts, 0, dtype=indptr.dtype, out=pointer[1:])
        shift = (indptr[:-1][rows] - pointer[:-1]).repeat_interleave(counts)
        at = shift.long() + torch.arange(len(shift), device=shift.device)
        relations[etype] = Adjacency.from_csc(
            pointer,
            first[etype[0]][src[at].long()].to(src.dtype),
            None,
            len(src_rows[etype[0]]),
            len(rows),
            check=False,
        )
        edges[etype] = at if eids is None else eids[at].long()
    new = Block(
        {ntype: len(rows) for ntype, rows in src_rows.items()},
        {ntype: len(rows) for ntype, rows in dst_rows.items()},
        relations,
    )
    for ntype in src_rows:
        new.srcnodes[ntype].data[NID] = block.srcnodes[ntype].data[NID][src_rows[ntype]]
        new.dstnodes[ntype].data[NID] = block.dstnodes[ntype].data[NID][dst_rows[ntype]]
    for etype, at in edges.items():
        data = block.edges[etype].data
        if EID in data:
            new.edges[etype].data[EID] = data[EID][at]
    return new


def _first_places(rows: Tensor, num_rows: int) -> Tensor:
    """For each of ``num_rows`` rows, where it is first in ``rows``."""
    places = torch.arange(len(rows), device=rows.device)
    none = torch.full((num_rows,), len(rows), device=rows.device)
    return none.scatter_reduce(0, rows, places, "amin")
