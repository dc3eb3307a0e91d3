# SPDX-License-Identifier: Apache-2.0
"""SampledInputs: what a network is given of sampled blocks, learnt rows of other ranks included.

[Note: degrees of samples]
    A graph convolution divides a message by the roots of two degrees, and on a block it knows only
    those in the block. There, an edge from ``j`` to ``i`` gets the weight that makes its message,
    times ``d_i / k_i`` for ``k_i`` neighbours drawn of ``d_i``, what it is on the whole graph. So
    the sum that a node receives is right on average, and with all neighbours drawn it is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._base.ranges import RangeMap
from ..comm import ExchangePlan, fetch_halo, rank, world_size
from ..comm.collectives import shared_errors
from ..fullbatch import PartitionData
from ..graph import NID, Block
from ..ops import Adjacency
from ..partition.format import etype_key, read_config
from ..sampling import FileFeatureStore
from ..sampling.file_store import converted, tables_in_files
from ._categories import SparseFeatures
from ._config import ResolvedSampledConfig
from ._embeddings import NODE, PAIR
from ._learner import ROWS, SELF_ROWS, Learner, model_features
from ._models import ModelFeatures
from ._training_shard import TrainingShard, relation_norm

FEATURES, LABELS, CATEGORIES = "feat", "label", "categories"
COLUMNS, VALUES = "feat_columns", "feat_values"
"""Names of features, labels and categories on blocks, and of features that are sparse."""

IN_DEGREE, OUT_DEGREE = "in_degree", "out_degree"


class SampledInputs:
    """Makes the input of the learner's model of blocks. Every call is collective, as is making one.

    ``model`` is the model's name.
    """

    def __init__(self, shard: TrainingShard, learner: Learner, model: str) -> None:
        self._shard, self._learner = shard, learner
        data = shard.data
        self._ranges = {t: data.node_map(t) for t in data.node_type_names}
        # Rows of other types reach no loss, and get no gradient.
        self._matters = {ROWS, SELF_ROWS, *_types_before(shard, len(learner.graphs))}
        #: The graph to sample, with what a loader shall attach to blocks.
        self.graph = learner.host_graph().local_var()
        for ntype, rows in shard.features.items():
            self.graph.nodes[ntype].data[FEATURES] = rows
        if shard.edges is None:
            self.graph.nodes[shard.target].data[LABELS] = shard.label
        self._reads_degrees = model == "gcn" and not shard.is_typed
        if self._reads_degrees:
            self.graph.ndata[IN_DEGREE] = self.graph.in_degrees().to(torch.int32)
            self.graph.ndata[OUT_DEGREE] = self.graph.out_degrees().to(torch.int32)
        for ntype, numbers in shard.categories.items():
            self.graph.nodes[ntype].data[CATEGORIES] = numbers
        for ntype, sparse in shard.sparse.items():
            self.graph.nodes[ntype].data[COLUMNS] = sparse.columns
            self.graph.nodes[ntype].data[VALUES] = sparse.values
        #: Relation to the names of what blocks shall have on edges.
        self.edge_features: dict[Any, tuple[str, ...]] = {
            etype: tuple(name for name in rows if name != "norm")
            for etype, rows in shard.edge_rows(model).items()
        }
        self._with_categories = [
            e for e, names in self.edge_features.items() if CATEGORIES in names
        ]
        self._reads_relations = model == "rgcn" and shard.relation is not None
        if learner.pairs is not None:
            self._pair_ranges = learner.pairs.node_map(PAIR)
            self.graph.edata[PAIR] = _pair_ids(learner.pairs)
            (etype,) = shard.data.canonical_etypes
            self.edge_features[etype] = (*self.edge_features.get(etype, ()), PAIR)

    def tables(self) -> dict[tuple[Any, str], Tensor]:
        """(node type or relation, name) to this rank's rows of all that blocks have."""
        names: dict[Any, tuple[str, ...]] = {**self.node_features, **self.edge_features}
        if self._shard.edges is None:
            target = self._shard.target
            names[target] = (*names.get(target, ()), LABELS)
        nodes, edges = self.graph.nodes, self.graph.edges
        data = {kind: (nodes if isinstance(kind, str) else edges)[kind].data for kind in names}
        return {(kind, name): data[kind][name] for kind, some in names.items() for name in some}

    def store_in_files(self, config: ResolvedSampledConfig) -> FileFeatureStore:
        """Where rows come from: features that stay in files, and all else; collective."""
        data = self._shard.data
        with shared_errors():
            seen = tables_in_files(read_config(config.data), world_size(), rank())
        seen = converted(seen, config.torch_dtype)
        tables = self.tables()
        files = {
            (kind, name): of_ranks
            for (kind, name), of_ranks in seen.items()
            if (kind, name) in tables
            and f"{kind if isinstance(kind, str) else etype_key(kind)}/{name}" in data.in_files
        }
        own = {key: rows for key, rows in tables.items() if key not in files}
        return FileFeatureStore(self.graph, files, own, map_features=config.map_features)

    @property
    def node_features(self) -> dict[str, tuple[str, ...]]:
        """Node type to the features that the first block needs."""
        names: dict[str, tuple[str, ...]] = dict.fromkeys(self._shard.features, (FEATURES,))
        for ntype in self._shard.categories:
            names[ntype] = (*names.get(ntype, ()), CATEGORIES)
        for ntype in self._shard.sparse:
            names[ntype] = (*names.get(ntype, ()), COLUMNS, VALUES)
        if self._reads_degrees:
            target = self._shard.target
            names[target] = (*names.get(target, ()), IN_DEGREE, OUT_DEGREE)
        return names

    def __call__(self, blocks: Sequence[Block]) -> tuple[list[Block], ModelFeatures, list[Tensor]]:
        """A graph for each layer, the features, and the fetched rows that need a gradient.

        Every rank's loss must be made to depend on those.
        """
        graphs = self.weighted(blocks)
        pairs = None
        if self._learner.pairs is not None:
            pairs, graphs[0] = _block_of_pairs(graphs[0])
        rows, learnt = self._embeddings(graphs[0], pairs)
        sources = blocks[0].srcnodes
        features = {ntype: sources[ntype].data[FEATURES] for ntype in self._shard.features}
        numbers = {ntype: sources[ntype].data[CATEGORIES] for ntype in self._shard.categories}
        sparse = {
            ntype: SparseFeatures(sources[ntype].data[COLUMNS], sources[ntype].data[VALUES])
            for ntype in self._shard.sparse
        }
        rows |= self._learner.input_rows(features, numbers, sparse)
        return graphs, model_features(self._shard, rows), learnt

    def weighted(self, blocks: Sequence[Block]) -> list[Block]:
        """The blocks, with what layers read of edges."""
        graphs = list(blocks)
        if self._reads_relations:
            assert self._shard.relation is not None
            for block in graphs:
                # Of the edges that were drawn, so that a sum is a mean over them.
                dst = block.adjacency().coo()[1].long()
                norm = relation_norm(
                    dst,
                    block.edata["etype"],
                    self._shard.num_relations,
                    self._shard.links is not None,
                )
                block.edata["norm"] = norm.to(self._shard.relation[1].dtype)
        if self._reads_degrees:
            self._set_weights(graphs)
        for graph in graphs if self._with_categories else ():
            columns = {etype: graph.edges[etype].data for etype in self._with_categories}
            self._learner.set_edge_features(
                [graph],
                {etype: data["feat"] for etype, data in columns.items() if "feat" in data},
                {etype: data[CATEGORIES] for etype, data in columns.items()},
            )
        return graphs

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
            weight = weight.to(next(self._learner.model.parameters()).dtype)
            if "weight" in block.edata:
                weight = weight * block.edata["weight"]
            block.edata["weight"] = weight

    def _embeddings(
        self, first: Block, pairs: Tensor | None
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Rows of each table that the first layer reads."""
        tables: Mapping[str, Tensor] = self._learner.embeddings()
        requests = {
            name: self._request(name, table, first, pairs)
            for name, table in tables.items()
            if name in self._matters
        }
        fetched = fetch_owned_rows(list(requests.values())) if requests else []
        rows = dict(zip(requests, fetched, strict=True))
        for name, table in tables.items():
            if name not in self._matters:
                rows[name] = table.new_zeros((first.num_src_nodes(name), table.shape[1]))
        return rows, fetched

    def _request(self, name: str, table: Tensor, first: Block, pairs: Tensor | None) -> OwnedRows:
        target = self._shard.target
        if name == SELF_ROWS:
            return OwnedRows(table, self._ranges[target], first.dstdata[NID])
        if name == ROWS and pairs is not None:
            return OwnedRows(table, self._pair_ranges, pairs)
        ntype = target if name == ROWS else name
        return OwnedRows(table, self._ranges[ntype], first.srcnodes[ntype].data[NID])


def _types_before(shard: TrainingShard, num_layers: int) -> set[str]:
    """Node types whose rows may reach the target type in so many layers."""
    reached = {shard.targets} if isinstance(shard.targets, str) else {*shard.targets}
    for _ in range(num_layers):
        reached |= {src for src, _, dst in shard.data.canonical_etypes if dst in reached}
    return reached


def _pair_ids(pairs: PartitionData) -> Tensor:
    """``[num_edges]`` global id of the pair that each edge reads."""
    (edges,) = pairs.edges.values()
    ranges: RangeMap = pairs.node_map(PAIR)
    starts = torch.tensor(ranges.starts[:-1], dtype=torch.int64)
    return starts[edges.src_part.long()] + edges.src


def _block_of_pairs(block: Block) -> tuple[Tensor, Block]:
    """Distinct pairs, and the block with them as sources; see [Note: pairs] in `_embeddings`."""
    pairs, sources = torch.unique(block.edata[PAIR], return_inverse=True)
    dst = block.adjacency().coo()[1]
    num_dst = block.num_dst_nodes()
    adjacency = Adjacency(sources.to(dst.dtype), dst, pairs.numel(), num_dst, check=False)
    changed = Block({PAIR: pairs.numel()}, {NODE: num_dst}, {(PAIR, "read_by", NODE): adjacency})
    for name in ("etype", "norm"):
        changed.edata[name] = block.edata[name]
    changed.dstdata[NID] = block.dstdata[NID]
    return pairs, changed


class OwnedRows(NamedTuple):
    """Rows that are wanted."""

    table: Tensor  # [num_owned, width], the rows that this rank owns
    ranges: RangeMap  # ids that each rank owns
    ids: Tensor  # [n], which rows; of any rank, in any order


def fetch_owned_rows(requests: Sequence[OwnedRows]) -> list[Tensor]:
    """The rows of each request, ``[n, width]``; every rank must call, with as many requests.

    One exchange brings the rows of all requests, and one returns the gradients, where those of a
    row are summed. A rank whose loss may not depend on them must `graphshard.comm.anchor` it.
    """
    if world_size() == 1:
        return [rows.table.index_select(0, rows.ids.long()) for rows in requests]
    plans, orders, owned = [], [], []
    for table, ranges, ids in requests:
        owner = ranges.part_of(ids)
        rows = ranges.local_of(ids, owner)
        needed = [rows[owner == part] for part in range(world_size())]
        owned.append(needed[rank()].long())
        needed[rank()] = rows[:0]
        plans.append(ExchangePlan.build(needed, table.shape[0], device=table.device))
        owner = owner.masked_fill(owner == rank(), -1)  # own rows go first
        orders.append(torch.argsort(owner, stable=True))
    tables = [request.table for request in requests]
    fetched = fetch_halo(list(zip(plans, tables, strict=True)))
    by_request = []
    for table, own, halo, order in zip(tables, owned, fetched, orders, strict=True):
        position = torch.empty_like(order)
        position[order] = torch.arange(order.numel(), device=order.device)
        rows = torch.cat([table.index_select(0, own), halo])
        by_request.append(rows.index_select(0, position))
    return by_request
