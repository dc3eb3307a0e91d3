# SPDX-License-Identifier: Apache-2.0
"""Evaluations of graphs whose rows do not fit memory: layer by layer, batch by batch.

Each layer gives the rows of all nodes before the next one begins. It computes them for some nodes
at a time, from blocks with all of their in-edges that a loader makes, and what it gives goes to a
file of this rank, which the next layer's loader reads: ids ascend, so that both go through files
from front to back. Sums over in-edges are those of whole graphs, and products of matrices have
other heights, so that numbers may differ from those of whole graphs in their last digits.

[Note: narrow rows first]
    A block reads the rows of its sources, and blocks share sources, so that a row is read several
    times. Wide features are therefore read once before, in the order of their file, and made what
    the first layer reads: what an encoder or a matrix of a node type gives, or where the layer
    itself begins with products, these. Which products those are is found by calling the layer on a
    block without nodes. Where that makes rows no narrower, blocks read the features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._base.file_rows import BLOCK_BYTES
from ..comm import rank
from ..graph import NID, Block
from ..ops import Adjacency, ProductRows, place_of
from ..sampling import DataLoader, FileFeatureStore, NeighborSampler
from ..sampling.feature_store import LocalFeatureStore
from ._config import ResolvedSampledConfig
from ._learner import Learner, model_features
from ._models import GAT, GCN, SAGE, NodeClassifier
from ._own_model import LayeredNetwork, check_rows
from ._row_files import HIDDEN, RowsOfLayer, row_folders
from ._sampled_inputs import IN_DEGREE, OUT_DEGREE, SampledInputs
from ._training_shard import TrainingShard


class LayerwiseRows:
    """Gives the rows of a learner's network, as `Learner.node_rows` does; calls are collective.

    Args:
        store: Where the loader of training gets features from; stays open.
        num_batches: Batches of training that are one here.
    """

    def __init__(
        self,
        shard: TrainingShard,
        learner: Learner,
        inputs: SampledInputs,
        config: ResolvedSampledConfig,
        store: LocalFeatureStore,
        num_batches: int,
    ) -> None:
        assert isinstance(learner.network, LayeredNetwork)
        self._shard, self._learner, self._inputs = shard, learner, inputs
        self._network: LayeredNetwork = learner.network
        self._config, self._store, self._num_layers = config, store, len(learner.graphs)
        self._num_batches = num_batches
        #: What the first layer multiplies its input with, where its products are read.
        self._products: _Products | None = None

    def __call__(self) -> Any:
        rows = self._rows_before(self._num_layers)
        targets = self._shard.targets
        last = [targets] if isinstance(targets, str) else list(targets)
        given = {t: rows.own(t).to(self._learner.device) for t in last}
        return given[targets] if self._shard.edges is None and isinstance(targets, str) else given

    def scores_and_inputs(self) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """Scores of this rank's nodes of the target type, and what the last layer takes of some.

        Of a network of several layers.
        """
        network = self._network
        assert isinstance(network, NodeClassifier)
        index, target = self._num_layers - 1, self._shard.target
        device = self._learner.device
        before = self._rows_before(index)
        rows = before.own(target)

        def inputs(some: Tensor) -> Tensor:
            of_some = rows[some.to(rows.device)].to(device)
            given = network.input_rows(index, {target: of_some} if before.is_mapping else of_some)
            chosen: Tensor = given[target] if before.is_mapping else given
            return chosen

        return self._layer(index, [target], before).own(target).to(device), inputs

    def _rows_before(self, count: int) -> RowsOfLayer:
        """What so many layers give."""
        targets = self._shard.targets
        last = [targets] if isinstance(targets, str) else list(targets)
        rows = self._narrow_rows()
        for index in range(count):
            is_last = index == self._num_layers - 1
            ntypes = last if is_last else list(self._shard.data.node_type_names)
            rows = self._layer(index, ntypes, rows)
        assert rows is not None
        return rows

    # ------------------------------------------------------------------ narrow rows

    def _narrow_rows(self) -> RowsOfLayer | None:
        """What the first layer reads, if features are wider; see [Note: narrow rows first]."""
        shard, network = self._shard, self._network
        self._products = None
        if not any(f"{t}/feat" in shard.data.in_files for t in shard.features):
            return None
        shapes = self._rows_of({t: slice(0, 0) for t in shard.data.node_type_names})
        given = shapes if isinstance(shapes, Mapping) else {shard.target: shapes}
        if not isinstance(shapes, Mapping) and isinstance(network, GCN | SAGE | GAT):
            products = _Products(shapes)
            with self._learner.autocast():
                network.layer_rows(0, self._empty_block(), products)
            if products.width < shapes.shape[1]:
                self._products = products
                given = {shard.target: self._read(shapes)}
        saved = {t: w - given[t].shape[1:].numel() for t, w in shard.feature_widths.items()}
        if sum(shard.num_all[t] * columns for t, columns in saved.items()) <= 0:
            self._products = None
            return None
        made = RowsOfLayer(shard, list(given), row_folders(self._config))
        made.is_mapping = isinstance(shapes, Mapping)
        made.set_kinds({t: (rows.dtype, tuple(rows.shape[1:])) for t, rows in given.items()})
        for ntype in given:
            width = max(shard.feature_widths.get(ntype, 1), given[ntype].shape[1:].numel())
            count = max(1, BLOCK_BYTES // (width * given[ntype].element_size()))
            for first in range(0, shard.data.num_owned(ntype), count):
                places = dict.fromkeys(shard.data.node_type_names, slice(0, 0))
                places[ntype] = slice(first, min(first + count, shard.data.num_owned(ntype)))
                rows = self._rows_of(places)
                made.write(ntype, first, rows[ntype] if made.is_mapping else self._read(rows))
        return made

    def _read(self, rows: Tensor) -> Tensor:
        """What blocks read of rows that go into the first layer."""
        if self._products is None:
            return rows
        with self._learner.autocast():
            return self._products.of(rows)

    def _rows_of(self, places: Mapping[str, slice]) -> Any:
        """What goes into the network's first layer, of some of this rank's nodes of each type."""
        shard, learner = self._shard, self._learner
        dtype, device = self._config.torch_dtype, learner.device
        features = {}
        for ntype, rows in shard.features.items():
            stored = shard.data.in_files.get(f"{ntype}/feat")
            if stored is None:
                features[ntype] = rows[places[ntype]].to(device, dtype)
                continue
            numbers = torch.arange(places[ntype].start, places[ntype].stop)
            block = torch.empty((numbers.numel(), *stored.row_shape), dtype=dtype)
            stored.as_dtype(dtype).read(block, None, numbers)
            features[ntype] = block.to(device)
        numbers_of = {t: n[places[t]].to(device) for t, n in shard.categories.items()}
        sparse = {
            t: type(of)(of.columns[places[t]], of.values[places[t]]).to(device)
            for t, of in shard.sparse.items()
        }
        rows_of = learner.input_rows(features, numbers_of, sparse)
        rows_of |= {t: table[places[t]] for t, table in learner.embeddings().items()}
        with learner.autocast():
            return self._network.first_rows(model_features(shard, rows_of))

    def _empty_block(self) -> Block:
        """A block of the only relation without nodes or edges."""
        (etype,) = self._shard.data.canonical_etypes
        none = torch.empty(0, dtype=torch.int64)
        adjacency = Adjacency(none, none, 0, 0, check=False)
        block = Block({etype[0]: 0}, {etype[2]: 0}, {etype: adjacency}).to(self._learner.device)
        dtype, width = self._config.torch_dtype, self._shard.edge_feature_widths.get(etype, 0)
        block.edata["weight"] = torch.empty(0, dtype=dtype, device=self._learner.device)
        block.edata["feat"] = torch.empty(0, width, dtype=dtype, device=self._learner.device)
        return block

    # ------------------------------------------------------------------ layers

    def _layer(self, index: int, ntypes: Sequence[str], before: RowsOfLayer | None) -> RowsOfLayer:
        """The rows that a layer gives, of those of the layer before."""
        shard, config, network = self._shard, self._config, self._network
        names, store = self._inputs.node_features, self._store
        if before is not None:
            degrees = (IN_DEGREE, OUT_DEGREE)
            kept = {t: tuple(n for n in of if n in degrees) for t, of in names.items()}
            names = {t: (*kept.get(t, ()), HIDDEN) for t in before.ntypes}
            store = FileFeatureStore(self._inputs.graph, before.tables(), base=store)
        starts = {t: shard.data.node_map(t).starts[rank()] for t in ntypes}
        seeds = {t: torch.arange(shard.data.num_owned(t)) + starts[t] for t in ntypes}
        sampler = NeighborSampler(
            [-1],
            prefetch_node_feats=names,
            prefetch_edge_feats=self._inputs.edge_features,
            output_device=self._learner.device,
        )
        made = RowsOfLayer(shard, ntypes, row_folders(config))
        is_last = index == self._num_layers - 1
        products = self._products if index == 0 else None
        with DataLoader(
            self._inputs.graph,
            seeds,
            sampler,
            max(1, self._num_batches * config.batch_size or sum(map(len, seeds.values()))),
            seed=0,
            prefetch=config.prefetch,
            transport=config.transport,
            feature_store=store,
        ) as loader:
            for blocks in loader:
                graphs, rows = self._given(blocks, before)
                if products is not None:
                    rows = products.known(rows)
                with self._learner.autocast():
                    rows = network.layer_rows(index, graphs[0], rows)
                    rows = network.last_rows(rows) if is_last else rows
                if is_last and ":" in config.model:
                    target = tuple(ntypes) if shard.edges is not None else shard.targets
                    check_rows(config.model, rows, graphs, target, shard.out_width(config))
                made.is_mapping = isinstance(rows, Mapping)
                of_types = rows if isinstance(rows, Mapping) else {ntypes[0]: rows}
                made.set_kinds(
                    {t: (of_types[t].dtype, tuple(of_types[t].shape[1:])) for t in ntypes}
                )
                for ntype in ntypes:
                    ids = blocks[-1].dstnodes[ntype].data[NID]  # which follow one another
                    if ids.numel():
                        made.write(ntype, int(ids[0]) - starts[ntype], of_types[ntype])
        return made

    def _given(self, blocks: Sequence[Block], before: RowsOfLayer | None) -> tuple[list, Any]:
        """Graph and rows that a layer takes."""
        if before is None:
            graphs, features, _ = self._inputs(blocks)
            with self._learner.autocast():
                return graphs, self._network.first_rows(features)
        graphs = self._inputs.weighted(blocks)
        sources = graphs[0].srcnodes
        rows = {ntype: sources[ntype].data[HIDDEN] for ntype in before.ntypes}
        return graphs, rows if before.is_mapping else rows[self._shard.target]


class _Products(ProductRows):
    """Notes which products are asked of rows, makes them of some rows, and answers with them.

    Args:
        like: ``[0, width]``, rows as those that will be multiplied.
        known: ``[num_rows, ...]`` the products of some rows, side by side.
        factors: ``[num_rows, 1]`` of these rows.
        noted: The matrices, where another one noted them.
    """

    def __init__(
        self,
        like: Tensor,
        known: Tensor | None = None,
        factors: Tensor | None = None,
        noted: list[Tensor] | None = None,
    ) -> None:
        super().__init__(
            len(like if known is None else known), like.shape[1], like.dtype, like.device
        )
        self._like, self._known, self._factors = like, known, factors
        self._noted = [] if noted is None else noted

    @property
    def width(self) -> int:
        """Columns of all products."""
        return sum(matrix.shape[1] for matrix in self._noted)

    def of(self, rows: Tensor) -> Tensor:
        """The products of some rows, side by side."""
        return torch.cat([rows @ matrix.to(rows.dtype) for matrix in self._noted], dim=1)

    def known(self, products: Tensor) -> _Products:
        """What stands for rows of which these are the products."""
        return _Products(self._like, products, None, self._noted)

    def product(self, matrix: Tensor) -> Tensor:
        if self._known is None:
            if all(place_of(other) != place_of(matrix) for other in self._noted):
                self._noted.append(matrix)
            return self._like.new_zeros(0, matrix.shape[1])
        start = 0
        for other in self._noted:
            if place_of(other) == place_of(matrix):
                break
            start += other.shape[1]
        else:
            raise AssertionError("a layer asks for other products on each block")
        rows = self._known[:, start : start + matrix.shape[1]]
        return rows.contiguous() if self._factors is None else rows * self._factors

    def scaled(self, factors: Tensor) -> _Products:
        factors = factors if self._factors is None else self._factors * factors
        return _Products(self._like, self._known, factors, self._noted)

    def first(self, count: int) -> _Products:
        known = None if self._known is None else self._known[:count]
        factors = None if self._factors is None else self._factors[:count]
        return _Products(self._like, known, factors, self._noted)
