# SPDX-License-Identifier: Apache-2.0
"""SampledInputs: what a model is given for the blocks of one batch.

Features, labels and relation numbers come with the blocks. Rows of embeddings, which are learnt and
belong to the ranks that own the nodes, are fetched here, by a collective of the training loop.

[Note: degrees of samples]
    A graph convolution divides a message by the roots of two degrees, and on a block it knows only
    those in the block. There, an edge from ``j`` to ``i`` gets the weight that makes its message,
    times ``d_i / k_i`` for ``k_i`` neighbours drawn of ``d_i``, what it is on the whole graph. So
    the sum that a node receives is right on average, and with all neighbours drawn it is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._ranges import RangeMap
from ..fullbatch import PartitionData
from ..graph import NID, Block
from ..ops import Adjacency
from ._learner import ROWS, SELF_ROWS, Learner
from ._one_hot import NODE, PAIR
from ._owned_rows import OwnedRows, fetch_owned_rows
from ._shard import TrainingShard

FEATURES, LABELS = "feat", "label"
"""Names of features and labels on blocks."""

IN_DEGREE, OUT_DEGREE = "in_degree", "out_degree"


@dataclass(frozen=True)
class ModelInput:
    """One batch, as a model takes it.

    Args:
        graphs: One for each layer.
        features: What the model takes as features.
        learnt: Fetched rows that need a gradient. Every rank's loss must be made to depend on them.
    """

    graphs: list[Block]
    features: Any
    learnt: list[Tensor]


class SampledInputs:
    """Makes a `ModelInput` of blocks. Every call is collective, as is making one.

    Args:
        shard: This rank's part.
        learner: Whose model and embeddings they are for.
        model: Name of the model.
    """

    def __init__(self, shard: TrainingShard, learner: Learner, model: str) -> None:
        self._shard, self._learner = shard, learner
        data = shard.data
        self._ranges = {t: data.node_map(t) for t in data.node_type_names}
        # Rows of other types reach no loss, and get no gradient.
        self._matters = {ROWS, SELF_ROWS, *_types_before(shard, len(learner.graphs))}
        #: The graph to sample, with what a loader shall attach to blocks.
        self.graph = learner.graph.local_var()
        for ntype, rows in shard.features.items():
            self.graph.nodes[ntype].data[FEATURES] = rows
        self.graph.nodes[shard.target].data[LABELS] = shard.label
        self._reads_degrees = model == "gcn"
        if self._reads_degrees:
            self.graph.ndata[IN_DEGREE] = self.graph.in_degrees().to(torch.int32)
            self.graph.ndata[OUT_DEGREE] = self.graph.out_degrees().to(torch.int32)
        self.edge_features: tuple[str, ...] = ()
        if model == "rgcn" and shard.relation is not None:
            self.edge_features = ("etype",)
        if learner.pairs is not None:
            self._pair_ranges = learner.pairs.node_map(PAIR)
            self.graph.edata[PAIR] = _pair_ids(learner.pairs)
            self.edge_features += (PAIR,)

    @property
    def node_features(self) -> dict[str, tuple[str, ...]]:
        """Node type to the features that the first block needs."""
        names: dict[str, tuple[str, ...]] = dict.fromkeys(self._shard.features, (FEATURES,))
        if self._reads_degrees:
            target = self._shard.target
            names[target] = (*names.get(target, ()), IN_DEGREE, OUT_DEGREE)
        return names

    @property
    def labels(self) -> dict[str, tuple[str, ...]]:
        """Node type to the features that the last block needs."""
        return {self._shard.target: (LABELS,)}

    def __call__(self, blocks: Sequence[Block]) -> ModelInput:
        graphs = list(blocks)
        if self.edge_features:
            for block in graphs:
                block.edata["norm"] = self._norm(block, block.edata["etype"])
        if self._reads_degrees:
            self._set_weights(graphs)
        pairs = None
        if PAIR in self.edge_features:
            pairs, graphs[0] = _block_of_pairs(graphs[0])
        rows, learnt = self._embeddings(graphs[0], pairs)
        if SELF_ROWS in rows:
            return ModelInput(graphs, (rows[ROWS], rows[SELF_ROWS]), learnt)
        shard = self._shard
        for ntype in shard.features:
            rows[ntype] = blocks[0].srcnodes[ntype].data[FEATURES]
        return ModelInput(graphs, rows if shard.is_typed else rows[shard.target], learnt)

    def _set_weights(self, graphs: list[Block]) -> None:
        """Put ``weight`` on edges. See [Note: degrees of samples]."""
        dtype = next(self._learner.model.parameters()).dtype
        dtype = torch.promote_types(dtype, torch.float32)
        for block in graphs:
            # The sources of a later block are the first ones of the first.
            degrees = {
                name: graphs[0].srcdata[name][: block.num_src_nodes()].to(dtype)
                for name in (IN_DEGREE, OUT_DEGREE)
            }
            drawn = block.in_degrees().clamp(min=1).to(dtype)
            into = degrees[IN_DEGREE][: block.num_dst_nodes()] / drawn
            out_of = block.out_degrees().to(dtype) / degrees[OUT_DEGREE].clamp(min=1)
            src, dst = block.adjacency().coo()
            weight = (into.index_select(0, dst) * out_of.index_select(0, src)).sqrt()
            block.edata["weight"] = weight.to(next(self._learner.model.parameters()).dtype)

    def _norm(self, block: Block, etype: Tensor) -> Tensor:
        """1 over the number of edges of the same relation into the same node: ``[num_edges, 1]``.

        Of those that were drawn, so that a sum is a mean over them.
        """
        assert self._shard.relation is not None
        dtype = self._shard.relation[1].dtype
        code = block.adjacency().coo()[1].long() * self._shard.num_relations + etype
        _, place, count = torch.unique(code, return_inverse=True, return_counts=True)
        return count.to(torch.float64).reciprocal()[place].to(dtype).unsqueeze(1)

    def _embeddings(
        self, first: Block, pairs: Tensor | None
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Rows of each table that the first layer reads."""
        tables: Mapping[str, Tensor] = self._learner.embeddings()
        wanted = {
            name: self._wanted(name, table, first, pairs)
            for name, table in tables.items()
            if name in self._matters
        }
        fetched = fetch_owned_rows(list(wanted.values())) if wanted else []
        rows = dict(zip(wanted, fetched, strict=True))
        for name, table in tables.items():
            if name not in self._matters:
                rows[name] = table.new_zeros((first.num_src_nodes(name), table.shape[1]))
        return rows, fetched

    def _wanted(self, name: str, table: Tensor, first: Block, pairs: Tensor | None) -> OwnedRows:
        target = self._shard.target
        if name == SELF_ROWS:
            return OwnedRows(table, self._ranges[target], first.dstdata[NID])
        if name == ROWS and pairs is not None:
            return OwnedRows(table, self._pair_ranges, pairs)
        ntype = target if name == ROWS else name
        return OwnedRows(table, self._ranges[ntype], first.srcnodes[ntype].data[NID])


def _types_before(shard: TrainingShard, num_layers: int) -> set[str]:
    """Node types whose rows may reach the target type in so many layers."""
    found = {shard.target}
    for _ in range(num_layers):
        found |= {source for source, _, target in shard.data.canonical_etypes if target in found}
    return found


def _pair_ids(pairs: PartitionData) -> Tensor:
    """``[num_edges]`` global id of the pair that each edge reads."""
    (edges,) = pairs.edges.values()
    ranges: RangeMap = pairs.node_map(PAIR)
    starts = torch.tensor(ranges.starts[:-1], dtype=torch.int64)
    return starts[edges.src_part.long()] + edges.src


def _block_of_pairs(block: Block) -> tuple[Tensor, Block]:
    """Distinct pairs, and the block with them as sources; see [Note: pairs] in `_one_hot`."""
    pairs, place = torch.unique(block.edata[PAIR], return_inverse=True)
    dst = block.adjacency().coo()[1]
    num_dst = block.num_dst_nodes()
    adjacency = Adjacency(place.to(dst.dtype), dst, pairs.numel(), num_dst, check=False)
    changed = Block({PAIR: pairs.numel()}, {NODE: num_dst}, {(PAIR, "read_by", NODE): adjacency})
    for name in ("etype", "norm"):
        changed.edata[name] = block.edata[name]
    changed.dstdata[NID] = block.dstdata[NID]
    return pairs, changed
