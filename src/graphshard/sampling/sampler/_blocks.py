# SPDX-License-Identifier: Apache-2.0
"""sample_blocks: from seeds to one block per layer, for any sampler and any structure."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..._typing import CanonicalEType
from ...graph import EID, NID, Block
from ...ops import Adjacency, IdTable
from ..graph_store import Drawn, DrawOptions, HopRequest, Structure
from ._keys import DrawSeed
from ._repeats import repeat_seeds

Fanout = Mapping[CanonicalEType, int]
"""Relation to neighbours per node; -1 for all."""


class IdTables:
    """Scratch space for renumbering, one table per node type; for one thread at a time.

    Args:
        structure: Whose ids are renumbered.
    """

    def __init__(self, structure: Structure) -> None:
        self._tables = {t: IdTable(structure.num_nodes(t)) for t in structure.ntypes}

    @classmethod
    def of(cls, structure: Structure) -> IdTables:
        """This thread's tables for a structure, which are kept with it."""
        kept = vars(structure).setdefault("_scratch", threading.local())
        if not hasattr(kept, "tables"):
            kept.tables = cls(structure)
        tables: IdTables = kept.tables
        return tables

    def renumber(self, ntype: str, first: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
        """Distinct ids, ``first`` ahead, and the place of each of ``others`` among them."""
        return self._tables[ntype].renumber(first, others)


def sample_blocks(
    structure: Structure,
    fanouts: Sequence[Fanout],
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
    ``dstdata[NID]`` and, if asked for, ``edata[EID]`` hold ids of the structure. Where the graph
    spans ranks, collective.

    Args:
        structure: Where neighbours come from.
        fanouts: Per block, the fanout of every relation.
        options: How to draw.
        seeds: Node type to ids; a type may be absent, ids may be none, and one may be there several
            times: see `_repeats`.
        draw_seed: Which draw this is.
        excluded: Relation to ids of edges that are treated as absent.
        tables: Scratch space; by default this thread's.

    Returns:
        ``blocks[0]`` takes the input features; the destinations of ``blocks[-1]`` are the seeds.
    """
    tables = IdTables.of(structure) if tables is None else tables
    none = torch.empty(0, dtype=structure.idtype, device=structure.device)
    given = {t: seeds.get(t, none).to(structure.idtype) for t in structure.ntypes}
    distinct = {t: tables.renumber(t, ids[:0], ids) for t, ids in given.items()}
    frontier = {t: ids for t, (ids, _) in distinct.items()}
    blocks: list[Block] = []
    for layer in reversed(range(len(fanouts))):
        requests = [
            HopRequest(
                etype,
                frontier[_near(etype, options)],
                fanouts[layer][etype],
                draw_seed.key(layer, relation),
            )
            for relation, etype in enumerate(structure.canonical_etypes)
        ]
        drawn = structure.draw(requests, options, excluded)
        block = _block(structure, requests, drawn, options, frontier, tables)
        frontier = {t: block.srcnodes[t].data[NID] for t in structure.ntypes}
        blocks.append(block)
    if any(len(ids) < len(given[t]) for t, (ids, _) in distinct.items()):
        return repeat_seeds(blocks[::-1], {t: places for t, (_, places) in distinct.items()})
    return blocks[::-1]


def _near(etype: CanonicalEType, options: DrawOptions) -> str:
    """The node type that draws: messages flow towards it."""
    return etype[2] if options.edge_dir == "in" else etype[0]


def _block(
    structure: Structure,
    requests: Sequence[HopRequest],
    drawn: Sequence[Drawn],
    options: DrawOptions,
    frontier: Mapping[str, Tensor],
    tables: IdTables,
) -> Block:
    # What follows in-edges keeps their direction; messages along out-edges flow back.
    turned = options.edge_dir == "out"
    far = {i: r.etype[2] if turned else r.etype[0] for i, r in enumerate(requests)}
    src_ids: dict[str, Tensor] = {}
    places: dict[int, Tensor] = {}
    for ntype in structure.ntypes:
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
            _pointer(drawn[i].counts, structure.idtype),
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
    for ntype in structure.ntypes:
        block.srcnodes[ntype].data[NID] = src_ids[ntype]
        block.dstnodes[ntype].data[NID] = frontier[ntype]
    for etype, one in zip(relations, drawn, strict=True):
        eids = one.lazy_eids if one.eids is None else one.eids
        if eids is not None:
            block.edges[etype].data[EID] = eids
    return block


def _pointer(counts: Tensor, idtype: torch.dtype) -> Tensor:
    pointer = torch.zeros(counts.numel() + 1, dtype=idtype, device=counts.device)
    torch.cumsum(counts, 0, dtype=idtype, out=pointer[1:])
    return pointer
