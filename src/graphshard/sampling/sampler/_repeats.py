# SPDX-License-Identifier: Apache-2.0
"""Seeds that a batch has several times, as oversampling of rare classes makes them.

Neighbours are drawn for distinct seeds, and afterwards each block gets a destination for every
occurrence. What is drawn for a node depends on its id, not on its place, so all occurrences of a
seed have the same neighbours, as if they were drawn one by one. The destinations of a block are the
first of its sources, so occurrences are repeated down to the inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...graph import EID, NID, Block
from ...ops import Adjacency


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
        src_rows = {}
        for ntype, rows in dst_rows.items():  # sources after the destinations are there once
            num_dst, num_src = block.num_dst_nodes(ntype), block.num_src_nodes(ntype)
            others = torch.arange(num_dst, num_src, dtype=rows.dtype, device=rows.device)
            src_rows[ntype] = torch.cat([rows, others])
        found.append(_repeated(block, src_rows, dst_rows))
        dst_rows = src_rows
    return found[::-1]


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
