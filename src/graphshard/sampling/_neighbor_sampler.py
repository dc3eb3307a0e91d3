# SPDX-License-Identifier: Apache-2.0
"""NeighborSampler and its kinds: from seeds to one block per layer, from any graph store.

`Sampler` and `BlockSampler` are what loaders ask of a sampler, ours or a user's own. Ids as users
give them, plain or by type, become ids by type here (`by_type`, `by_relation`), and are checked.

[Note: keyed draws]
    The neighbours drawn for a node depend on (seed, epoch, step, layer, relation, original node
    id) and on nothing else: not on the rank that asks, the rank that answers, the number of
    ranks, parts or threads, nor on what else is drawn. So every split of the work draws the same
    sample, and a coming epoch's draws can be known in advance by drawing them.

[Note: repeated seeds]
    A batch may have a seed several times, as oversampling of rare classes makes them. Neighbours
    are drawn for distinct seeds, and afterwards each block gets a destination for every occurrence.
    What is drawn for a node depends on its id, not on its place, so all occurrences of a seed have
    the same neighbours, as if they were drawn one by one. The destinations of a block are the first
    of its sources, so occurrences are repeated down to the inputs.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .._base.typing import INDEX_DTYPES, CanonicalEType, EdgeIds, EType, NodeIds
from ..graph import EID, NID, Block, Graph
from ..graph.message_passing import frames_of
from ..graph.structure import places_of, row_positions
from ..ops import Adjacency, IdTable
from .graph_store import (
    DrawOptions,
    GraphStore,
    NeighborRequest,
    SampledNeighbors,
    ShardedGraphStore,
    check_drawn,
    ends,
    graph_store_of,
)
from .lazy_features import FeatureNames, check_named, names_for, read_named, set_all_lazy, set_lazy

_WORD = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
LayerFanout: TypeAlias = int | Mapping[EType, int]
GivenFeatures: TypeAlias = Mapping[str, Tensor | Mapping[str, Tensor]]
"""Feature name to rows, or to node type to rows."""


def per_kind(value: Any, kinds: Sequence[Any], what: str, shape: str) -> Mapping[Any, Any]:
    """A dictionary by node type or by relation, which a user must give where there are several."""
    if isinstance(value, Mapping):
        return value
    if len(kinds) != 1:
        have = "types" if kinds and isinstance(kinds[0], str) else "relations"
        raise TypeError(
            f"{what} must be a dictionary from {shape} because the graph has the {have} "
            f"{list(kinds)} (got {type(value).__name__})"
        )
    return {kinds[0]: value}


def by_type(store: GraphStore, ids: NodeIds, what: str) -> dict[str, Tensor]:
    """Node ids as node type to tensor.

    Args:
        ids: A tensor, or anything a tensor can be made of, or node type to that.

    Raises:
        TypeError: Ids without a type on a graph of several, or ids that are no integers.
        ValueError: An unknown type, or an id that is out of range.
    """
    ids = per_kind(ids, store.ntypes, what, "node type to ids")
    unknown = [t for t in ids if t not in store.ntypes]
    if unknown:
        raise ValueError(
            f"{what} names unknown node types {unknown}; the graph has {list(store.ntypes)}"
        )
    return {
        ntype: checked_ids(values, store.num_nodes(ntype), f"{what} of type {ntype!r}", store)
        for ntype, values in ids.items()
    }


def by_relation(
    store: GraphStore, ids: EdgeIds | None, what: str, *, leave_out: bool = False
) -> dict[CanonicalEType, Tensor] | None:
    """Edge ids as relation to tensor; None stays None. As `by_type`, and `checked_ids`."""
    if ids is None:
        return None
    by_etype = {}
    for name, values in per_kind(ids, store.canonical_etypes, what, "relation to ids").items():
        etype = relation_named(store, name)
        bound, of = store.num_edges(etype), f"{what} of {etype}"
        by_etype[etype] = checked_ids(values, bound, of, store, leave_out=leave_out)
    return by_etype


def relation_named(store: GraphStore, name: Any) -> CanonicalEType:
    """The one relation that a name or a triple stands for."""
    matching = [t for t in store.canonical_etypes if name in (t, t[1])]
    if len(matching) != 1:
        raise ValueError(
            f"{name!r} must name one relation ({len(matching)} match); the graph has "
            f"{list(store.canonical_etypes)}"
        )
    return matching[0]


def checked_ids(
    values: Any, bound: int, what: str, store: GraphStore, *, leave_out: bool = False
) -> Tensor:
    """Ids as a one-dimensional tensor of the store's idtype.

    Args:
        leave_out: Whether ids that are too great are left out and no mistake.

    Raises:
        TypeError: They are no integers.
        ValueError: Another shape, or an id is out of range.
    """
    ids = torch.as_tensor(values)
    if ids.numel() == 0:
        return torch.empty(0, dtype=store.idtype, device=store.device)
    if ids.dtype == torch.bool:
        raise TypeError(f"{what} must be ids (got a bool mask); use mask.nonzero().view(-1)")
    if ids.dtype not in INDEX_DTYPES:
        raise TypeError(f"{what} must be int32 or int64 (got {ids.dtype})")
    if ids.dim() != 1:
        raise ValueError(f"{what} must have one dimension (got shape {tuple(ids.shape)})")
    if leave_out:
        ids = ids[ids < bound]
    bad = (ids < 0) | (ids >= bound)
    if bool(bad.any()):
        raise ValueError(f"{what} must be in [0, {bound}) (got {int(ids[bad][0])})")
    return ids.to(device=store.device, dtype=store.idtype)


def only_if_plain(by_name: Mapping[Any, Any]) -> Any:
    """The only value where there is one type, else the dictionary."""
    return next(iter(by_name.values())) if len(by_name) == 1 else dict(by_name)


def refuse_unnamed(function: str, unnamed: tuple[object, ...], *names: str) -> None:
    """Raise a TypeError that names the arguments which must not go by position, if some do."""
    if unnamed:
        raise TypeError(
            f"{function} takes {', '.join(names)} and what follows by name alone, because SAR, DGL "
            f"and torch have them in different orders (got {', '.join(map(_short, unnamed))} by "
            f"position); write {names[0]}=..."
        )


def _short(value: object) -> str:
    is_plain = value is None or isinstance(value, bool | int | float | str)
    return repr(value) if is_plain else type(value).__name__


class Sampler:
    """Base of everything that turns the indices of a batch into what a training step sees.

    A loader calls `sample` for each batch. Subclasses may return anything; one that has a parameter
    ``draw_seed`` is told which draw to make, see `DrawSeed`.
    """

    def sample(self, g: Any, indices: Any) -> Any:
        """What a loader yields for ``indices`` of ``g``; a subclass says what."""
        raise NotImplementedError(f"{type(self).__name__} must define sample(self, g, indices)")


class BlockSampler(Sampler):
    """Base of samplers that make one block per layer.

    A subclass says in `sample_blocks` how. The features that were named are attached to what it
    returns; see [Note: lazy features].

    Args:
        prefetch_node_feats: Names of node features that a loader puts into ``blocks[0].srcdata``;
            on a typed graph also node type to names.
        prefetch_labels: Names of node features that it puts into ``blocks[-1].dstdata``.
        prefetch_edge_feats: Names of edge features that it puts into every block's ``edata``.
        output_device: Where a loader puts the blocks; by default where the graph is.
    """

    def __init__(
        self,
        prefetch_node_feats: FeatureNames = None,
        prefetch_labels: FeatureNames = None,
        prefetch_edge_feats: FeatureNames = None,
        output_device: torch.device | str | None = None,
    ) -> None:
        self.prefetch_node_feats = prefetch_node_feats or ()
        self.prefetch_labels = prefetch_labels or ()
        self.prefetch_edge_feats = prefetch_edge_feats or ()
        self.output_device = output_device

    def sample_blocks(
        self, g: Any, seed_nodes: NodeIds, exclude_eids: EdgeIds | None = None
    ) -> tuple[Any, Any, list[Block]]:
        """Blocks for seed nodes; an override may take ``draw_seed`` (a `DrawSeed` or None) too.

        Returns:
            ``(input_nodes, output_nodes, blocks)``.
        """
        raise NotImplementedError(
            f"{type(self).__name__} must define sample_blocks(self, g, seed_nodes, "
            "exclude_eids=None), or sample"
        )

    def sample(
        self,
        g: Any,
        seed_nodes: NodeIds,
        exclude_eids: EdgeIds | None = None,
        draw_seed: DrawSeed | None = None,
    ) -> tuple[Any, Any, list[Block]]:
        """Blocks for seed nodes of a graph, or of the graph that a manager is a part of.

        Args:
            g: A `Graph`, or a `GraphShardManager` (then collective, and without features).
            seed_nodes: Ids, or node type to ids; the last block has a destination for each, in
                their order, also for one that is there several times.
            exclude_eids: Ids of edges that must not be drawn, or relation to ids.
            draw_seed: Which draw to make; by default one from torch's generator.

        Returns:
            ``(input_nodes, output_nodes, blocks)``; nodes by type where there are several types.

        Raises:
            ValueError: Seeds that are out of range, fanouts or weights that do not
                fit the graph, or features that it does not have.
        """
        keyed = {"draw_seed": draw_seed} if _is_keyed(type(self).sample_blocks) else {}
        result = self.sample_blocks(g, seed_nodes, exclude_eids=exclude_eids, **keyed)
        if isinstance(g, Graph):
            self._attach_named(g, result[2])
        return result

    def assign_lazy_features(self, result: Any) -> Any:
        """``result`` as it is: DGL's samplers call this to attach features, which `sample` does."""
        return result

    def prefetch(self, batch: Any) -> None:
        """Gather the features that were named, for a batch that `sample` returned.

        A loader does so ahead of the training loop, in its own thread.
        """
        blocks = batch[-1]
        read_named(blocks[0].srcnodes, blocks[0].srctypes, self.prefetch_node_feats)
        read_named(blocks[-1].dstnodes, blocks[-1].dsttypes, self.prefetch_labels)
        for block in blocks:
            read_named(block.edges, block.canonical_etypes, self.prefetch_edge_feats)

    def _attach_named(self, g: Graph, blocks: list[Block]) -> None:
        node_feats, labels = self.prefetch_node_feats, self.prefetch_labels
        check_named(lambda t: g.nodes[t].data, g.ntypes, node_feats, "prefetch_node_feats")
        check_named(lambda t: g.nodes[t].data, g.ntypes, labels, "prefetch_labels")
        edge_feats = self.prefetch_edge_feats
        check_named(
            lambda t: g.edges[t].data, g.canonical_etypes, edge_feats, "prefetch_edge_feats"
        )
        for ntype in g.ntypes:
            data = g.nodes[ntype].data
            if ntype in blocks[0].srctypes:
                set_lazy(data, blocks[0].srcnodes[ntype].data, NID, names_for(node_feats, ntype))
            if ntype in blocks[-1].dsttypes:
                set_lazy(data, blocks[-1].dstnodes[ntype].data, NID, names_for(labels, ntype))
        for etype in g.canonical_etypes:
            for block in blocks:
                if etype in block.canonical_etypes:
                    data, names = g.edges[etype].data, names_for(edge_feats, etype)
                    set_lazy(data, block.edges[etype].data, EID, names)


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function can be called with an argument of that name."""
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a function that is not written in Python
        return False
    return name in parameters or any(p.kind == p.VAR_KEYWORD for p in parameters.values())


@functools.lru_cache(maxsize=64)
def _is_keyed(sample_blocks: Callable[..., Any]) -> bool:
    """Whether a method ``sample_blocks`` of some class takes the draw; asked for every batch."""
    return takes(sample_blocks, "draw_seed")


@dataclass(frozen=True)
class DrawSeed:
    """One mini-batch's draws."""

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
        word = 0
        for part in (self.seed, self.epoch, self.step, layer, relation):
            word = (word + _STEP + (part & _WORD)) & _WORD
            # The finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014): a bijection of words
            word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
            word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _WORD
            word ^= word >> 31
        return word


class IdTables:
    """Scratch space for renumbering, one table per node type; for one thread at a time."""

    def __init__(self, store: GraphStore) -> None:
        self._tables = {t: IdTable(store.num_nodes(t)) for t in store.ntypes}

    @classmethod
    def of(cls, store: GraphStore) -> IdTables:
        """This thread's tables for a store, which are kept with it."""
        if not hasattr(store, "__dict__"):  # a user's own, with slots
            return cls(store)
        scratch = vars(store).setdefault("_scratch", threading.local())
        if not hasattr(scratch, "tables"):
            scratch.tables = cls(store)
        return scratch.tables

    def renumber(self, ntype: str, first: Tensor, others: Tensor) -> tuple[Tensor, Tensor]:
        """Distinct ids, ``first`` ahead, and the place of each of ``others`` among them."""
        return self._tables[ntype].renumber(first, others, check=False)


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
        neighbors = [drawn[i].neighbors for i in from_here]
        first = frontier[ntype]
        others = neighbors[0] if len(neighbors) == 1 else torch.cat([first[:0], *neighbors])
        src_ids[ntype], local = tables.renumber(ntype, first, others)
        sizes = [ids.numel() for ids in neighbors]
        of_requests = [local] if len(neighbors) == 1 else local.split(sizes)
        places.update(zip(from_here, of_requests, strict=True))
    relations: dict[CanonicalEType, Adjacency] = {}
    for i, request in enumerate(requests):
        source, name, target = request.etype
        etype = (target, name, source) if turned else request.etype
        counts = drawn[i].counts
        pointer = torch.zeros(counts.numel() + 1, dtype=store.idtype, device=counts.device)
        torch.cumsum(counts, 0, dtype=store.idtype, out=pointer[1:])
        num_src, num_dst = src_ids[etype[0]].numel(), frontier[etype[2]].numel()
        relations[etype] = Adjacency.from_csc(
            pointer, places[i], None, num_src, num_dst, check=False
        )
    block = Block(
        {t: ids.numel() for t, ids in src_ids.items()},
        {t: ids.numel() for t, ids in frontier.items()},
        relations,
    )
    src_frames, dst_frames, edge_frames = frames_of(block)
    for number, ntype in enumerate(store.ntypes):
        src_frames[number][NID] = src_ids[ntype]
        dst_frames[number][NID] = frontier[ntype]
    for frame, of_request in zip(edge_frames, drawn, strict=True):
        if of_request.eids is not None:
            frame[EID] = of_request.eids
    return block, src_ids


class NeighborSampler(BlockSampler):
    """Draws up to a fixed number of neighbours for every node, layer by layer.

    Source: Hamilton, Ying and Leskovec, "Inductive Representation Learning on Large Graphs",
    NeurIPS 2017, https://arxiv.org/abs/1706.02216.

    Arguments that are not described here are those of `BlockSampler`.

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
        etypes = structure.canonical_etypes
        return [
            dict.fromkeys(etypes, fanout)
            if isinstance(fanout, int)
            else _per_relation(fanout, etypes)
            for fanout in self.fanouts
        ]

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
            seeds: Node type to ids; a type may be absent, ids may be none, and one may be there
                several times: see [Note: repeated seeds].
            excluded: Relation to ids of edges that are treated as absent.
        """
        options = replace(self.options, with_eids=with_eids)
        fanouts, draw_seed = self.fanouts_for(structure), self.draw_seed_for(draw_seed)
        tables = IdTables.of(structure) if tables is None else tables
        frontier: dict[str, Tensor] = {}
        places: dict[str, Tensor] = {}
        repeats, none = False, torch.empty(0, dtype=structure.idtype, device=structure.device)
        for ntype in structure.ntypes:
            ids = seeds.get(ntype, none).to(structure.idtype)
            frontier[ntype], places[ntype] = tables.renumber(ntype, ids[:0], ids)
            repeats |= len(frontier[ntype]) < len(ids)
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
            check_drawn(structure, requests, drawn, options.edge_dir)
            block, frontier = _block(structure, requests, drawn, options, frontier, tables)
            blocks.insert(0, block)
        return repeat_seeds(blocks, places) if repeats else blocks

    def sample_blocks(
        self,
        g: Any,
        seed_nodes: NodeIds,
        exclude_eids: EdgeIds | None = None,
        draw_seed: DrawSeed | None = None,
    ) -> tuple[Any, Any, list[Block]]:
        """As `BlockSampler.sample`, which calls it; every feature is attached, named or not."""
        store = graph_store_of(g)
        if isinstance(store, ShardedGraphStore) and self.options.weights is not None:
            store.look_at_weights()
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
    fanout: Mapping[EType, int], etypes: Sequence[CanonicalEType]
) -> Mapping[CanonicalEType, int]:
    by_etype: dict[CanonicalEType, int] = {}
    for name, number in fanout.items():
        matching = [t for t in etypes if name in (t, t[1])]
        if len(matching) != 1:
            raise ValueError(
                f"a fanout must name one relation (got {name!r}, which {len(matching)} of "
                f"{list(etypes)} match); use (source type, name, destination type)"
            )
        by_etype[matching[0]] = number
    missing = [t for t in etypes if t not in by_etype]
    if missing:
        raise ValueError(
            f"a dictionary of fanouts must name every relation (missing {missing}); give 0 for "
            "those that shall not be followed"
        )
    return by_etype


def repeat_seeds(blocks: Sequence[Block], places: Mapping[str, Tensor]) -> list[Block]:
    """Blocks of the seeds as they were given, from those of distinct seeds.

    Args:
        places: Node type to the row of each given seed among the distinct ones.
    """
    dst_rows = {ntype: rows.long() for ntype, rows in places.items()}
    repeated = []
    for block in reversed(blocks):
        src_rows = {}
        for ntype, rows in dst_rows.items():  # sources after the destinations are there once
            num_dst, num_src = block.num_dst_nodes(ntype), block.num_src_nodes(ntype)
            others = torch.arange(num_dst, num_src, dtype=rows.dtype, device=rows.device)
            src_rows[ntype] = torch.cat([rows, others])
        repeated.append(_repeated(block, src_rows, dst_rows))
        dst_rows = src_rows
    return repeated[::-1]


def _repeated(
    block: Block, src_rows: Mapping[str, Tensor], dst_rows: Mapping[str, Tensor]
) -> Block:
    """A block whose sources and destinations are rows of another's, with the edges into each."""
    first = {t: places_of(rows, block.num_src_nodes(t)) for t, rows in src_rows.items()}
    relations, edges = {}, {}
    for etype, adjacency in zip(block.canonical_etypes, block.relations, strict=True):
        indptr, src, eids = adjacency.csc()
        rows = dst_rows[etype[2]]
        counts = indptr.diff()[rows]
        pointer = torch.zeros(len(rows) + 1, dtype=indptr.dtype, device=indptr.device)
        torch.cumsum(counts, 0, dtype=indptr.dtype, out=pointer[1:])
        at = row_positions(indptr[:-1][rows], counts)
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


class MultiLayerFullNeighborSampler(NeighborSampler):
    """Takes every neighbour, layer by layer.

    Args:
        **kwargs: As for `NeighborSampler`, besides ``fanouts`` and ``replace``.
    """

    def __init__(self, num_layers: int, **kwargs: Any) -> None:
        if num_layers < 1:
            raise ValueError(f"num_layers must be at least 1 (got {num_layers})")
        super().__init__([-1] * num_layers, **kwargs)


class LaborSampler(NeighborSampler):
    """Layer-neighbour sampling: the variance of neighbour sampling with fewer distinct inputs.

    One random number per source node is shared by all nodes that might draw it, so that their
    samples overlap. An edge is drawn with probability ``fanout / degree`` (or in proportion to
    ``prob``), so the number drawn for a node varies around the fanout.

    Source: Balin and Catalyurek, "Layer-Neighbor Sampling: Defusing Neighborhood Explosion in
    GNNs", NeurIPS 2023, https://arxiv.org/abs/2210.13339; its variant LABOR-0.

    Arguments that are not described here are those of `NeighborSampler` and `BlockSampler`.

    Args:
        fanouts: As for `NeighborSampler`; mean numbers of neighbours.
        importance_sampling: 0; the paper's iterated variants are not offered.
        layer_dependency: Use the same random numbers in all layers, for still fewer inputs.
        batch_dependency: Use the same random numbers for this many batches in a row.

    Raises:
        ValueError: As for `NeighborSampler`, or ``batch_dependency`` below 1.
        NotImplementedError: ``importance_sampling`` other than 0.
    """

    def __init__(
        self,
        fanouts: Sequence[LayerFanout],
        edge_dir: str = "in",
        prob: str | None = None,
        importance_sampling: int = 0,
        layer_dependency: bool = False,
        batch_dependency: int = 1,
        prefetch_node_feats: FeatureNames = None,
        prefetch_labels: FeatureNames = None,
        prefetch_edge_feats: FeatureNames = None,
        output_device: torch.device | str | None = None,
    ) -> None:
        if importance_sampling != 0:
            raise NotImplementedError(
                f"importance_sampling must be 0, the variant LABOR-0 (got {importance_sampling}); "
                "layer_dependency=True also lowers the number of inputs"
            )
        if batch_dependency < 1:
            raise ValueError(f"batch_dependency must be at least 1 (got {batch_dependency})")
        super().__init__(
            fanouts,
            edge_dir,
            prob,
            prefetch_node_feats=prefetch_node_feats,
            prefetch_labels=prefetch_labels,
            prefetch_edge_feats=prefetch_edge_feats,
            output_device=output_device,
        )
        self.layer_dependency, self.batch_dependency = layer_dependency, batch_dependency

    @property
    def options(self) -> DrawOptions:
        return replace(super().options, labor=True)

    def draw_seed_for(self, draw_seed: DrawSeed) -> DrawSeed:
        draw_seed = draw_seed.at(step=draw_seed.step // self.batch_dependency)
        return _SameForAllLayers(**vars(draw_seed)) if self.layer_dependency else draw_seed


class _SameForAllLayers(DrawSeed):
    """A `DrawSeed` whose keys, as LABOR shares them, depend neither on layer nor on relation."""

    def key(self, layer: int, relation: int) -> int:
        return super().key(0, 0)


class DistNeighborSampler(NeighborSampler):
    """Draws neighbours for a `DataLoader` over a sharded graph, as SAR names it.

    Arguments that are not described here are those of `NeighborSampler`.

    Args:
        copy_edata: The blocks have every feature that the graph's ``edata`` has when the loader is
            made, besides its ids.
        input_node_features: Name to the rows of this rank's nodes, ``[num_owned, *]``; on a typed
            graph name to node type to rows. They come as ``blocks[0].srcdata[name]``.
        output_node_features: The same; they come as ``blocks[-1].dstdata[name]``.
        use_hybrid_partitioning: Every host has the structure of the whole graph, so drawing needs
            no communication: ``transport="replicated"`` of a `DataLoader`, which by itself chooses
            so where the structure fits.
        batch_comm_overlap: Accepted for SAR's scripts: a `DataLoader` fetches features while it
            draws, and while the caller computes.

    Raises:
        TypeError: ``copy_edata`` is no bool.
        ValueError: As for `NeighborSampler`.

    Example:
        >>> labels = torch.tensor([0, 1, 1])
        >>> DistNeighborSampler([10, 5], output_node_features={"labels": labels}).num_layers
        2
    """

    def __init__(
        self,
        fanouts: Sequence[LayerFanout],
        prob: str | None = None,
        replace: bool = False,
        copy_edata: bool = True,
        input_node_features: GivenFeatures | None = None,
        output_node_features: GivenFeatures | None = None,
        output_device: torch.device | str | None = None,
        use_hybrid_partitioning: bool = False,
        batch_comm_overlap: bool = False,
        *,
        edge_dir: str = "in",
        mask: str | None = None,
    ) -> None:
        if not isinstance(copy_edata, bool):
            raise TypeError(
                "the fourth argument of DistNeighborSampler is copy_edata, True or False (got "
                f"{copy_edata!r}); name input_node_features=..."
            )
        super().__init__(fanouts, edge_dir, prob, mask, replace, output_device=output_device)
        self.input_node_features = dict(input_node_features or {})
        self.output_node_features = dict(output_node_features or {})
        self.copy_edata = copy_edata
        self.use_hybrid_partitioning = use_hybrid_partitioning
