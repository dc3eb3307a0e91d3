# SPDX-License-Identifier: Apache-2.0
"""NeighborSampler: from seeds to one block per layer, from any graph store.

[Note: keyed draws]
    The neighbours drawn for a node depend on (seed, epoch, step, layer, relation, original node
    id) and on nothing else: not on the rank that asks, the rank that answers, the number of
    ranks, parts or threads, nor on what else is drawn. So every split of the work draws the same
    sample, and a coming epoch's draws can be known in advance by drawing them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..._base.typing import CanonicalEType, EType
from ...graph import EID, NID, Block, Graph
from ...graph.message_passing import frames_of
from ...ops import Adjacency, IdTable
from ..graph_store import (
    DrawOptions,
    GraphStore,
    NeighborRequest,
    SampledNeighbors,
    ends,
    graph_store_of,
)
from ..lazy_features import FeatureNames, set_all_lazy
from ._block_sampler import BlockSampler
from ._ids import by_relation, by_type, only_if_plain
from ._repeats import repeat_seeds

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


LayerFanout: TypeAlias = int | Mapping[EType, int]


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
    far = [ends(request.etype, options.edge_dir)[1] for request in requests]
    src_ids: dict[str, Tensor] = {}
    places: dict[int, Tensor] = {}
    for ntype in store.ntypes:
        from_here = [i for i, of_request in enumerate(far) if of_request == ntype]
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


class NeighborSampler(BlockSampler):
    """Draws up to a fixed number of neighbours for every node, layer by layer.

    Source: Hamilton, Ying and Leskovec, "Inductive Representation Learning on Large Graphs",
    NeurIPS 2017, https://arxiv.org/abs/1706.02216.

    Args:
        fanouts: Neighbours per node and relation; ``fanouts[i]`` belongs to ``blocks[i]``, so the
            last one is for the seeds. A number (-1 for all), or relation to number.
        edge_dir: ``"in"`` follows in-edges; ``"out"`` follows out-edges, and the blocks' edges run
            from the neighbours found to the nodes that looked for them.
        prob: Name of an edge feature; neighbours are drawn in proportion to it, and those with 0
            never.
        mask: Name of a bool edge feature; edges where it is false are never drawn.
        replace: Draw with replacement: nodes with any neighbour then have exactly the fanout, or,
            where it is -1, each neighbour once.
        prefetch_node_feats: As for `BlockSampler`.
        prefetch_labels: As for `BlockSampler`.
        prefetch_edge_feats: As for `BlockSampler`.
        output_device: As for `BlockSampler`.
        fused: Accepted for DGL's scripts: drawing and renumbering are always one pass.

    Raises:
        ValueError: No fanouts, a fanout below -1, an unknown direction, or both ``prob`` and
            ``mask``.

    Example:
        >>> from graphshard.data import load_dataset
        >>> cora, sampler = load_dataset("cora").graph, NeighborSampler([10, 5])
        >>> inputs, outputs, blocks = sampler.sample(cora, torch.tensor([3, 8]))
        >>> outputs, len(blocks), blocks[-1].num_dst_nodes()
        (tensor([3, 8]), 2, 2)
    """

    def __init__(
        self,
        fanouts: Sequence[LayerFanout],
        edge_dir: str = "in",
        prob: str | None = None,
        mask: str | None = None,
        replace: bool = False,
        prefetch_node_feats: FeatureNames = None,
        prefetch_labels: FeatureNames = None,
        prefetch_edge_feats: FeatureNames = None,
        output_device: torch.device | str | None = None,
        fused: bool = True,
    ) -> None:
        self.fanouts = list(fanouts)
        _check_fanouts(self.fanouts)
        if edge_dir not in ("in", "out"):
            raise ValueError(f"edge_dir must be 'in' or 'out' (got {edge_dir!r})")
        if prob is not None and mask is not None:
            raise ValueError(
                f"give prob or mask, not both (got {prob!r} and {mask!r}); a weight of 0 masks"
            )
        super().__init__(prefetch_node_feats, prefetch_labels, prefetch_edge_feats, output_device)
        self.num_layers = len(self.fanouts)
        self.edge_dir, self.prob, self.mask, self.replace = edge_dir, prob, mask, replace

    @property
    def options(self) -> DrawOptions:
        """How neighbours are drawn."""
        return DrawOptions(
            replace=self.replace,
            weights=self.prob if self.mask is None else self.mask,
            weights_are_mask=self.mask is not None,
            edge_dir=self.edge_dir,  # type: ignore[arg-type]
        )

    def fanouts_for(self, structure: GraphStore) -> list[Mapping[CanonicalEType, int]]:
        """Fanout of every relation, per block.

        Raises:
            ValueError: The fanouts do not fit the graph's relations.
        """
        return [_per_relation(layer, structure.canonical_etypes) for layer in self.fanouts]

    def draw_seed_for(self, draw_seed: DrawSeed) -> DrawSeed:
        """Which draw a batch takes; samplers that couple batches change it."""
        return draw_seed

    def draw(
        self,
        structure: GraphStore,
        seeds: Mapping[str, Tensor],
        draw_seed: DrawSeed,
        *,
        excluded: Mapping[CanonicalEType, Tensor] | None = None,
        tables: IdTables | None = None,
        with_eids: bool = True,
    ) -> list[Block]:
        """The blocks of one batch, without features.

        Each block's destination nodes come first among its source nodes of the same type, in the
        same order; the other sources follow in order of first appearance. ``srcdata[NID]``,
        ``dstdata[NID]`` and, if asked for, ``edata[EID]`` hold ids of the store. Where the graph
        spans ranks, collective.

        Args:
            structure: Where neighbours come from.
            seeds: Node type to ids; a type may be absent, ids may be none, and one may be there
                several times: see `_repeats`.
            draw_seed: Which draw this is.
            excluded: Relation to ids of edges that are treated as absent.
            tables: Scratch space; by default this thread's.
            with_eids: Whether edge ids are wanted.
        """
        options = replace(self.options, with_eids=with_eids)
        fanouts, draw_seed = self.fanouts_for(structure), self.draw_seed_for(draw_seed)
        tables = IdTables.of(structure) if tables is None else tables
        none = torch.empty(0, dtype=structure.idtype, device=structure.device)
        given = {t: seeds.get(t, none).to(structure.idtype) for t in structure.ntypes}
        distinct = {t: tables.renumber(t, ids[:0], ids) for t, ids in given.items()}
        frontier = {t: ids for t, (ids, _) in distinct.items()}
        blocks: list[Block] = []
        for layer in reversed(range(self.num_layers)):
            requests = [
                NeighborRequest(
                    etype,
                    frontier[ends(etype, options.edge_dir)[0]],
                    fanouts[layer][etype],
                    draw_seed.key(layer, relation),
                )
                for relation, etype in enumerate(structure.canonical_etypes)
            ]
            drawn = structure.sample_neighbors(requests, options, excluded)
            block, frontier = _block(structure, requests, drawn, options, frontier, tables)
            blocks.insert(0, block)
        if any(len(ids) < len(given[t]) for t, (ids, _) in distinct.items()):
            return repeat_seeds(blocks, {t: places for t, (_, places) in distinct.items()})
        return blocks

    def sample_blocks(
        self,
        g: Any,
        seed_nodes: Any,
        exclude_eids: Any = None,
        draw_seed: DrawSeed | None = None,
    ) -> tuple[Any, Any, list[Block]]:
        """As `BlockSampler.sample`, which calls it; every feature is attached, named or not."""
        store = graph_store_of(g)
        blocks = self.draw(
            store,
            by_type(store, seed_nodes, "indices"),
            DrawSeed.fresh() if draw_seed is None else draw_seed,
            excluded=by_relation(store, exclude_eids, "exclude_eids"),
        )
        if isinstance(g, Graph):
            set_all_lazy(g, blocks)
        inputs = {t: blocks[0].srcnodes[t].data[NID] for t in store.ntypes}
        given = seed_nodes if isinstance(seed_nodes, Mapping) else store.ntypes
        outputs = {t: blocks[-1].dstnodes[t].data[NID] for t in given}
        if not isinstance(seed_nodes, Mapping):
            outputs = only_if_plain(outputs)
        return only_if_plain(inputs), outputs, blocks


MultiLayerNeighborSampler = NeighborSampler


def _check_fanouts(fanouts: Sequence[LayerFanout]) -> None:
    if not fanouts:
        raise ValueError("fanouts must hold one entry per layer (got none)")
    for layer, fanout in enumerate(fanouts):
        numbers = list(fanout.values()) if isinstance(fanout, Mapping) else [fanout]
        for number in numbers:
            if not isinstance(number, int) or isinstance(number, bool) or number < -1:
                raise ValueError(
                    f"a fanout must be an integer of at least -1, which means all neighbours (got "
                    f"{number!r} for layer {layer})"
                )


def _per_relation(
    fanout: LayerFanout, etypes: Sequence[CanonicalEType]
) -> Mapping[CanonicalEType, int]:
    if not isinstance(fanout, Mapping):
        return dict.fromkeys(etypes, fanout)
    found: dict[CanonicalEType, int] = {}
    for name, number in fanout.items():
        matching = [t for t in etypes if name in (t, t[1])]
        if len(matching) != 1:
            raise ValueError(
                f"a fanout must name one relation (got {name!r}, which {len(matching)} of "
                f"{list(etypes)} match); use (source type, name, destination type)"
            )
        found[matching[0]] = number
    missing = [t for t in etypes if t not in found]
    if missing:
        raise ValueError(
            f"a dictionary of fanouts must name every relation (missing {missing}); give 0 for "
            "those that shall not be followed"
        )
    return found
