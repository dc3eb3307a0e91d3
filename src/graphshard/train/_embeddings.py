# SPDX-License-Identifier: Apache-2.0
"""Rows that are learnt in place of features: their first values, their layer.

`NodeEmbeddings` are rows of nodes without features. In an R-GCN the rows of its first layer's
matrices are such rows, too: `OneHotRelGraphConv`. A rank holds the rows of its own nodes, and no
other rank has a copy, so they take no part in `sync_params` and `gather_grads`: the exchange of the
first layer, or a fetch for the blocks of a sampled run, brings the gradient of a row to its owner.

[Note: pairs]
    The product of a one-hot row with a matrix is a row of the matrix. Without bases there is a
    matrix for each relation, and row ``j`` of relation ``t`` is used only if ``j`` has an out-edge
    of that relation, which is so for a small part of all pairs (AIFB: one in 13). So the table
    holds those pairs alone, and the layer runs on a graph whose sources are the pairs and whose
    edges are the edges of the graph: what travels between ranks is a row for each pair that is
    read, as narrow as the layer's output.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .. import function as fn
from .._base.typing import CanonicalEType
from ..comm import ExchangePlan
from ..comm.collectives import gather_int
from ..comm.transport import ragged_all_to_all_alike
from ..fullbatch import PartitionData, RelationEdges
from ..graph import MessagePassingGraph
from ..ops import leading_rows
from ..ops.counter_random import GAMMA, mix, unit
from ..partition import RangePartitionBook


@dataclass(frozen=True)
class Table:
    """This rank's rows of one table of embeddings."""

    ids: Tensor  # [num_owned], ids that do not depend on the partition
    height: int  # rows of the matrix that the table stands for, on all ranks; sets the scale
    width: int


class NodeEmbeddings(nn.Module):
    """Learnable rows of this rank's nodes, by node type.

    The first value of a row depends on the seed, the node type and the node's original id, and
    neither on the number of ranks nor on the partition.

    Args:
        tables: What to hold, by name; usually the node type.
        seed: Decides the first values, which are Xavier uniform.
    """

    def __init__(self, tables: Mapping[str, Table], seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.names = tuple(tables)
        # A list, because node types may have names that an attribute cannot have.
        self.rows = nn.ParameterList()
        for number, (name, table) in enumerate(tables.items()):
            # A buffer, so that a checkpoint says whose rows it holds.
            self.register_buffer(f"ids_{number}", table.ids.clone())
            bound = math.sqrt(6 / (table.height + table.width))
            drawn = uniform_rows(seed, name, table.ids, table.width)
            self.rows.append(nn.Parameter(((2 * drawn - 1) * bound).to(dtype)))

    def forward(self) -> dict[str, Tensor]:
        """Name to rows ``[num_owned, width]``."""
        return dict(zip(self.names, self.rows, strict=True))


def uniform_rows(seed: int, stream: str, ids: Tensor, width: int) -> Tensor:
    """Numbers in [0, 1), float64 ``[num_ids, width]``; row ``i`` depends on ``ids[i]`` alone.

    Each number is the hash of its place: SplitMix64's finaliser over (seed and stream, id, column).
    The stream keeps the numbers of different uses apart.
    """
    digest = hashlib.blake2b(f"{seed}/{stream}".encode(), digest_size=8).digest()
    key = int.from_bytes(digest, "little", signed=True)
    rows = mix(mix(ids.cpu().long() + key) ^ key)
    return unit(mix(rows.unsqueeze(1) + torch.arange(1, width + 1) * GAMMA))


PAIR, NODE = "pair", "node"
"""Node types of the graph of pairs. Not the default name, which in a book means all types."""


class OneHotRelGraphConv(nn.Module):
    r"""RelGraphConv for one-hot input, whose matrices come in as rows.

    With ``num_bases``, the rows :math:`V_{bj}` of all bases lie side by side in the row of node
    :math:`j`, and those of the self loop, :math:`V_{0i}`, are given apart:

    .. math::
        h'_i = b + \sum_{(j, t) \in N(i)} e_{ji} \sum_{b=1}^{B} a_{tb} V_{bj} + V_{0i}

    Without, each relation has a matrix, and the row of a source is that of the pair :math:`(j, t)`:

    .. math::
        h'_i = b + \sum_{(j, t) \in N(i)} e_{ji} V_{(j, t)} + V_{0i}

    Args:
        num_bases: Matrices that the relations share; 0: each relation has its own.

    Shape:
        ``rows`` ``([num_src, in_width], [num_dst, out_feat])``; ``etypes`` ``[num_edges]``,
        integers, read only with bases; ``norm`` ``[num_edges, 1]``; output ``[num_dst, out_feat]``.
    """

    def __init__(self, out_feat: int, num_rels: int, num_bases: int = 0) -> None:
        super().__init__()
        self.num_bases = num_bases
        self.out_feat = out_feat
        self.in_width = max(num_bases, 1) * out_feat
        if num_bases:
            self.coeff = nn.Parameter(torch.empty(num_rels, num_bases))
            nn.init.xavier_uniform_(self.coeff, gain=nn.init.calculate_gain("relu"))
        self.h_bias = nn.Parameter(torch.zeros(out_feat))

    def forward(
        self,
        graph: MessagePassingGraph,
        rows: tuple[Tensor, Tensor],
        etypes: Tensor,
        norm: Tensor | None = None,
    ) -> Tensor:
        """Apply the layer; see the class for shapes."""
        source, own = rows
        with graph.local_scope():
            if self.num_bases:
                weight = self.coeff.index_select(0, etypes)
                if norm is not None:
                    weight = weight * norm
                graph.srcdata["h"] = source.unflatten(1, (self.num_bases, self.out_feat))
                graph.edata["weight"] = weight.unsqueeze(-1)
            else:
                graph.srcdata["h"] = source
                if norm is not None:
                    graph.edata["weight"] = norm
            weighted = self.num_bases or norm is not None
            message = fn.u_mul_e("h", "weight", "m") if weighted else fn.copy_u("h", "m")
            graph.update_all(message, fn.sum("m", "out"))
            sums: Tensor = graph.dstdata["out"]
        if self.num_bases:
            sums = sums.sum(1)
        return sums + leading_rows(own, graph.num_dst_nodes()) + self.h_bias


def pair_data(data: PartitionData, etype: Tensor, num_rels: int) -> tuple[PartitionData, Tensor]:
    """The graph of pairs of a graph whose edges carry a relation number; collective.

    Args:
        data: A part of a graph with one node type and one relation.
        etype: Relation number of each edge ``[num_edges]``.
        num_rels: Number of relations, the same on all ranks.

    Returns:
        A part of a graph in which sources are of node type `PAIR`, with the edges in the same
        order; and ``[num_pairs]``, ascending: node row times ``num_rels`` plus relation.
    """
    (relation,) = data.canonical_etypes
    edges = data.edges[relation]
    code = edges.src * num_rels + etype
    here = edges.src_part == data.rank
    pairs = torch.unique(code[here])
    src = torch.empty_like(code)
    if data.num_parts > 1:
        needed = [
            torch.unique(code[(edges.src_part == part) & ~here]) for part in range(data.num_parts)
        ]
        plan = ExchangePlan.build(needed, data.num_owned() * num_rels, device=data.device)
        pairs = torch.unique(torch.cat([pairs, plan.send_index]))
        asked = torch.searchsorted(pairs, plan.send_index)
        rows = ragged_all_to_all_alike(asked, plan.send_splits, plan.recv_splits)
        for part in range(data.num_parts):
            start, stop = plan.halo_range(part) if part != data.rank else (0, 0)
            of_part = edges.src_part == part
            if stop > start:
                src[of_part] = rows[start + torch.searchsorted(needed[part], code[of_part])]
    src[here] = torch.searchsorted(pairs, code[here])
    changed: CanonicalEType = (PAIR, "read_by", NODE)
    counts = enumerate(gather_int(pairs.numel()))
    node_sizes = [(data.node_map().size(part), count) for part, count in counts]
    edge_sizes = [(data.partition_book.partid2eids(p).numel(),) for p in range(data.num_parts)]
    book = RangePartitionBook.of_sizes(data.rank, (NODE, PAIR), (changed,), node_sizes, edge_sizes)
    changed_data = replace(
        data,
        partition_book=book,
        node_type_names=(NODE, PAIR),
        canonical_etypes=(changed,),
        node_features={},
        edge_features={},
        edges={changed: RelationEdges(edges.src_part, src, edges.dst)},
    )
    return changed_data, pairs
