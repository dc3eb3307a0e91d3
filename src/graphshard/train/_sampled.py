# SPDX-License-Identifier: Apache-2.0
"""train_sampled: training of a node classifier on sampled blocks, on one rank of many.

Every rank calls it with the same configuration. In each step a rank draws blocks for a batch of its
own training nodes; the loss of the step is the mean over the batches of all ranks together, and so
are its gradients, however many nodes each of them had. Evaluation is exact, on the whole graph. A
run depends on its configuration and the partition alone: samples are keyed by epoch and step, and
dropout by epoch and rank, so that a resumed run ends where an undisturbed one would.

Features, labels and relation numbers come with the blocks; they are drawn and gathered on the CPU,
also for a model on a GPU, to which the loader moves them. Rows of embeddings, which are learnt and
belong to the ranks that own the nodes, are fetched by a collective of the training loop.

[Note: degrees of samples]
    A graph convolution divides a message by the roots of two degrees, and on a block it knows only
    those in the block. There, an edge from ``j`` to ``i`` gets the weight that makes its message,
    times ``d_i / k_i`` for ``k_i`` neighbours drawn of ``d_i``, what it is on the whole graph. So
    the sum that a node receives is right on average, and with all neighbours drawn it is exact.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._base.ranges import RangeMap
from ..comm import anchor, ragged_all_to_all, rank, world_size
from ..comm.collectives import gather_int, reduce_floats, reduce_ints
from ..fullbatch import PartitionData
from ..graph import NID, Block
from ..ops import Adjacency
from ..sampling import DataLoader, LaborSampler, MiniBatch, NeighborSampler
from ._config import ResolvedSampledConfig, SampledConfig, generators_of
from ._embeddings import NODE, PAIR, OwnedRows, fetch_owned_rows
from ._learner import ROWS, SELF_ROWS, Learner, dropout_seed, model_features, summed_loss
from ._result import SamplingReport, TrainResult
from ._run import Progress, TrainingRun
from ._shard import TrainingShard, relation_norm

_REPORT_SECONDS = 0.5

FEATURES, LABELS = "feat", "label"
"""Names of features and labels on blocks."""

IN_DEGREE, OUT_DEGREE = "in_degree", "out_degree"


class SampledRun(TrainingRun):
    """A sampled run that has been set up and not yet started; see `TrainingRun`. Collective.

    Args:
        config: The run; the same on every rank.
        shard: A part that `load_shard` has read before, to save reading it again.
        progress: Called after every epoch, and now and then during a long one, on every rank.
    """

    config: ResolvedSampledConfig

    def _set_up(self) -> None:
        shard, config = self._shard, self.config
        self._inputs = SampledInputs(shard, self._learner, config.model)
        for module in self._learner.model.modules():
            allow = getattr(module, "set_allow_zero_in_degree", None)
            if callable(allow):  # the graph was looked at; that nothing was drawn is no mistake
                allow(True)
        first = shard.data.node_map(shard.target).starts[shard.data.rank]
        seeds = shared_evenly(shard.rows["train"] + first)
        most = reduce_ints([seeds.numel()], "max")[0]
        self._loader = DataLoader(
            self._inputs.graph,
            {shard.target: seeds},
            self._sampler(),
            config.batch_size or most,
            shuffle=True,
            seed=config.seed,
            prefetch=config.prefetch,
            transport=config.transport,
            map_features=config.map_features,
            cache_bytes=config.cache_bytes,
        )
        self._seconds_waiting: list[float] = []
        self._seconds = 0.0
        self._num_edges = 0

    def _sampler(self) -> NeighborSampler:
        config, inputs = self.config, self._inputs
        features: dict[str, Any] = {
            "prefetch_node_feats": inputs.node_features,
            "prefetch_labels": {self._shard.target: (LABELS,)},
            "prefetch_edge_feats": inputs.edge_features,
            "output_device": self._learner.device,
        }
        if config.sampler == "labor":
            return LaborSampler(config.fanouts, **features)
        return NeighborSampler(config.fanouts, replace=config.replace, **features)

    def _train_epoch(self, epoch: int) -> float:
        torch.manual_seed(dropout_seed(self.config.seed, rank(), epoch))
        start = last_report = time.perf_counter()
        self._loader.set_epoch(epoch)
        self._seconds_waiting.append(0.0)
        total, num_nodes = 0.0, 0
        for step, blocks in enumerate(self._batches()):
            self._num_edges += sum(block.num_edges() for block in blocks)
            loss, count = self._step(blocks, f"epoch {epoch + 1}, step {step + 1}")
            total, num_nodes = total + loss, num_nodes + count
            if time.perf_counter() - last_report > _REPORT_SECONDS and step + 1 < len(self._loader):
                last_report = time.perf_counter()
                mean = total / num_nodes if num_nodes else None
                self._report(step=step + 1, steps=len(self._loader), loss=mean)
        self._seconds += time.perf_counter() - start
        return total / self._shard.num_nodes["train"]

    def _batches(self) -> Iterator[MiniBatch]:
        """The batches of an epoch; the time that each takes to come is noted."""
        batches = iter(self._loader)
        while True:
            start = time.perf_counter()
            blocks = next(batches, None)
            self._seconds_waiting[-1] += time.perf_counter() - start
            if blocks is None:
                return
            yield blocks

    def _step(self, blocks: MiniBatch, when: str) -> tuple[float, int]:
        """One step; returns this rank's summed loss before it, and over how many nodes."""
        learner = self._learner
        learner.model.train()
        graphs, features, learnt = self._inputs(blocks)
        scores: Tensor = learner.model(graphs, features)
        labels = blocks[-1].dstnodes[self._shard.target].data[LABELS]
        num_seeds = max(1, blocks.num_global_seeds)
        loss = anchor(summed_loss(scores, labels) / num_seeds, *learnt)
        return learner.descend(loss, when) * num_seeds, blocks.num_seeds

    def _sampling(self) -> SamplingReport:
        num_epochs = max(1, len(self._seconds_waiting))
        waiting, seconds = reduce_floats(
            [sum(self._seconds_waiting) / num_epochs, self._seconds], "max"
        )
        num_edges = reduce_ints([self._num_edges])[0]
        hit_rate = None
        if self.config.cache_bytes:
            hit_rate = reduce_floats([self._loader.cache_hit_rate])[0] / world_size()
        return SamplingReport(
            steps_per_epoch=len(self._loader),
            seconds_waiting=waiting,
            edges_per_second=num_edges / seconds if seconds else 0.0,
            cache_hit_rate=hit_rate,
        )

    def _close(self) -> None:
        self._loader.close()


def train_sampled(
    config: SampledConfig,
    *,
    shard: TrainingShard | None = None,
    progress: Progress | None = None,
) -> TrainResult:
    """Train a node classifier on sampled blocks; every rank calls this with the same configuration.

    Rank ``r`` reads part ``r`` of ``config.data`` and trains on the training nodes that it owns.
    With a partition of one part no process group is needed. The caller's random number generator
    is left as it was.

    Args:
        config: The run.
        shard: This rank's part, if `load_shard` has read it before.
        progress: Called after every epoch, and now and then during a long one, on every rank.

    Raises:
        ValueError: Configuration and graph do not fit each other; raised on every rank.
        PartitionFormatError: The partition is missing or damaged; raised on every rank.
        CheckpointError: The checkpoint to resume from belongs to another run; on every rank.
        RankError: Another rank failed, or did not answer in time.

    Example:
        >>> config = SampledConfig(data="cora/cora.json", model="sage", fanouts=(10, 10))
        >>> train_sampled(config).best.accuracy["test"]  # doctest: +SKIP
        0.814
    """
    with torch.random.fork_rng(devices=generators_of(config.device)):
        return SampledRun(config, shard=shard, progress=progress).train()


def shared_evenly(ids: Tensor) -> Tensor:
    """Global ids of this rank's share of all ids; every rank must call.

    Labelled nodes are rarely spread evenly over parts. If each rank trained on its own, those with
    few would be idle in the last steps of an epoch, and how many steps there are would depend on
    the partition. A rank may train on any node, so ids move from ranks with many to the others.

    Args:
        ids: int64 ``[n]``, of any length on each rank.

    Returns:
        ``[m]``, this rank's own ids ahead; m differs by at most 1 between ranks.
    """
    sizes = gather_int(ids.numel())
    if len(sizes) == 1:
        return ids
    fewest, num_larger = divmod(sum(sizes), len(sizes))
    # Those that have most get the larger shares, so that fewest ids move.
    by_size = sorted(range(len(sizes)), key=lambda r: -sizes[r])
    shares = [fewest] * len(sizes)
    for r in by_size[:num_larger]:
        shares[r] += 1
    moves = _moves([n - share for n, share in zip(sizes, shares, strict=True)])
    me = rank()
    kept = ids[: min(sizes[me], shares[me])]
    send = [moves.get((me, r), 0) for r in range(world_size())]
    recv = [moves.get((r, me), 0) for r in range(world_size())]
    return torch.cat([kept, ragged_all_to_all(ids[kept.numel() :], send, recv)])


def _moves(surplus: list[int]) -> dict[tuple[int, int], int]:
    """Rank that sends and rank that receives to the number, from each rank's surplus or lack."""
    found = {}
    takers = [(r, -n) for r, n in enumerate(surplus) if n < 0]
    for giver, number in enumerate(surplus):
        while number > 0:
            taker, lacking = takers.pop()
            moved = min(number, lacking)
            found[giver, taker] = moved
            number -= moved
            if lacking > moved:
                takers.append((taker, lacking - moved))
    return found


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

    def __call__(self, blocks: Sequence[Block]) -> tuple[list[Block], Any, list[Tensor]]:
        """A graph for each layer, the features, and the fetched rows that need a gradient.

        Every rank's loss must be made to depend on those.
        """
        graphs = list(blocks)
        if self.edge_features:
            assert self._shard.relation is not None
            for block in graphs:
                # Of the edges that were drawn, so that a sum is a mean over them.
                dst = block.adjacency().coo()[1].long()
                norm = relation_norm(dst, block.edata["etype"], self._shard.num_relations)
                block.edata["norm"] = norm.to(self._shard.relation[1].dtype)
        if self._reads_degrees:
            self._set_weights(graphs)
        pairs = None
        if PAIR in self.edge_features:
            pairs, graphs[0] = _block_of_pairs(graphs[0])
        rows, learnt = self._embeddings(graphs[0], pairs)
        for ntype in self._shard.features:
            rows[ntype] = blocks[0].srcnodes[ntype].data[FEATURES]
        return graphs, model_features(self._shard, rows), learnt

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
