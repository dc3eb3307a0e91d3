# SPDX-License-Identifier: Apache-2.0
"""Evaluations of graphs whose rows do not fit memory: layer by layer, batch by batch.

Each layer gives the rows of all nodes before the next one begins. It computes them for some nodes
at a time, from blocks with all of their in-edges that a loader makes, and what it gives goes to a
file of this rank, which the next layer's loader reads: ids ascend, so that both go through files
from front to back. Sums over in-edges are those of whole graphs, and products of matrices have
other heights, so that numbers may differ from those of whole graphs in their last digits.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._base.file_rows import FilePiece, RowsFile, RowsInFiles
from ..comm import barrier, rank, world_size
from ..comm.address import machine_name
from ..comm.collectives import gather_texts, shared_errors
from ..comm.group import group_state
from ..comm.transport import named_file
from ..graph import NID, Block
from ..sampling import DataLoader, FileFeatureStore, NeighborSampler
from ..sampling.feature_store import LocalFeatureStore
from ._config import ResolvedSampledConfig
from ._learner import Learner
from ._models import NodeClassifier
from ._sampled_inputs import IN_DEGREE, OUT_DEGREE, SampledInputs
from ._training_shard import TrainingShard

HIDDEN = "rows of the layer before"
_ALIGNMENT = 64


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
        assert isinstance(learner.network, NodeClassifier)
        self._shard, self._learner, self._inputs = shard, learner, inputs
        self._network, self._config, self._store = learner.network, config, store
        self._num_batches = num_batches

    def __call__(self) -> Any:
        targets = self._shard.targets
        last = [targets] if isinstance(targets, str) else list(targets)
        count = len(self._network.layers)
        rows: _RowsOfLayer | None = None
        for index in range(count):
            ntypes = last if index == count - 1 else list(self._shard.data.node_type_names)
            rows = self._layer(index, ntypes, rows)
        assert rows is not None
        given = {t: rows.own(t).to(self._learner.device) for t in last}
        return given[targets] if self._shard.edges is None and isinstance(targets, str) else given

    def _layer(
        self, index: int, ntypes: Sequence[str], before: _RowsOfLayer | None
    ) -> _RowsOfLayer:
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
        made = _RowsOfLayer(shard, ntypes, _folders(config))
        is_last = index == len(network.layers) - 1
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
                with self._learner.autocast():
                    rows = network.layer_rows(index, graphs[0], rows)
                    rows = network.last_rows(rows) if is_last else rows
                made.write(blocks[-1], rows if isinstance(rows, Mapping) else {ntypes[0]: rows})
                made.is_mapping = isinstance(rows, Mapping)
        return made

    def _given(self, blocks: Sequence[Block], before: _RowsOfLayer | None) -> tuple[list, Any]:
        """Graph and rows that a layer takes."""
        if before is None:
            graphs, features, _ = self._inputs(blocks)
            with self._learner.autocast():
                return graphs, self._network.first_rows(features)
        graphs = self._inputs.weighted(blocks)
        sources = graphs[0].srcnodes
        rows = {ntype: sources[ntype].data[HIDDEN] for ntype in before.ntypes}
        return graphs, rows if before.is_mapping else rows[self._shard.target]


def _folders(config: ResolvedSampledConfig) -> list[Path]:
    """Where files may be, the best place first; temporary files are in memory on some machines."""
    folders = [] if config.run is None else [Path(config.run)]
    return [*folders, Path(config.data).parent, Path(tempfile.gettempdir())]


class _RowsOfLayer:
    """Rows of this rank's nodes in a file that has no name, and those of others of this machine.

    Making one is collective, and so is `tables`.

    Attributes:
        is_mapping: Whether the layer gave rows by node type.
    """

    def __init__(
        self, shard: TrainingShard, ntypes: Collection[str], folders: Sequence[Path]
    ) -> None:
        self.ntypes, self.is_mapping = tuple(ntypes), False
        self._sizes = {t: shard.data.node_map(t).starts for t in ntypes}
        self._kinds: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
        self._files: list[RowsFile | None] = []
        self._descriptor = -1
        with contextlib.ExitStack() as stack:
            with shared_errors():
                path, descriptor = stack.enter_context(_writable(folders))
                self._descriptor, self._path = os.dup(descriptor), path
            texts = [f"{machine_name()} {path}"]
            if world_size() > 1:
                texts = gather_texts(group_state(), texts[0])
            for text in texts:
                machine, _, name = text.partition(" ")
                is_here = machine == machine_name() and os.path.exists(name)
                self._files.append(RowsFile(Path(name)) if is_here else None)
            if world_size() > 1:
                barrier()  # before the file loses its name

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def write(self, block: Block, rows: Mapping[str, Tensor]) -> None:
        """Write the rows of a block's destinations, whose ids follow one another."""
        for ntype in self.ntypes:
            of_type = rows[ntype].detach().cpu().contiguous()
            self._kinds[ntype] = of_type.dtype, tuple(of_type.shape[1:])
        for ntype in self.ntypes:
            of_type = rows[ntype].detach().cpu().contiguous()
            if not of_type.numel():
                continue
            first = int(block.dstnodes[ntype].data[NID][0]) - self._sizes[ntype][rank()]
            size = of_type[0].numel() * of_type.element_size()
            data = of_type.view(-1).view(torch.uint8).numpy().data
            at = self._offset(rank(), ntype) + first * size
            while data:
                try:
                    written = os.pwrite(self._descriptor, data, at)
                except OSError as error:
                    raise OSError(
                        f"what a layer gives must be written to {self._path.parent} (got: "
                        f"{error.strerror}); make room there, or give run, a folder with more"
                    ) from None
                data, at = data[written:], at + written

    def tables(self) -> dict[tuple[Any, str], list[RowsInFiles | None]]:
        """The rows of each type and rank, where they are seen from here."""
        if world_size() > 1:
            barrier()  # until all have written
        return {
            (ntype, HIDDEN): [self._rows(number, ntype) for number in range(world_size())]
            for ntype in self.ntypes
        }

    def own(self, ntype: str) -> Tensor:
        """This rank's rows, mapped: not to be written to."""
        rows = self._rows(rank(), ntype)
        assert rows is not None
        return rows.mapped(is_private=False)

    def _count(self, number: int, ntype: str) -> int:
        starts = self._sizes[ntype]
        return starts[number + 1] - starts[number]

    def _offset(self, number: int, ntype: str) -> int:
        """Where the rows of a type begin in the file of a rank."""
        offset = 0
        for other in self.ntypes[: self.ntypes.index(ntype)]:
            dtype, shape = self._kinds[other]
            size = self._count(number, other) * math.prod(shape) * dtype.itemsize
            offset += -(-size // _ALIGNMENT) * _ALIGNMENT
        return offset

    def _rows(self, number: int, ntype: str) -> RowsInFiles | None:
        file = self._files[number]
        if file is None:
            return None
        dtype, shape = self._kinds[ntype]
        piece = FilePiece(file, self._offset(number, ntype), self._count(number, ntype))
        return RowsInFiles((piece,), dtype, shape, dtype)


@contextlib.contextmanager
def _writable(folders: Sequence[Path]) -> Iterator[tuple[Path, int]]:
    """A new file in the first folder that takes one."""
    for folder in folders[:-1]:
        if os.access(folder, os.W_OK):
            with named_file(folder) as made:
                yield made
            return
    with named_file(folders[-1]) as made:
        yield made
