# SPDX-License-Identifier: Apache-2.0
"""Where neighbours come from: a local graph, the ranks that own them, shared memory, your own.

A `GraphStore` answers one question, "which neighbours did these nodes draw", in the ids of the
graph as it is stored. Whether the answer comes from this process, from the rank that owns each
node, from shared memory or from a server is its own business; [Note: keyed draws] makes the answer
the same. `graph_store_of` is the one store that everything draws from that is made for a graph.

[Note: order of edges]
    Edges that can be drawn from are compressed rows (`EdgeLists`). Within a row they come by
    ascending original id, as in the graph before it was partitioned: draws speak of the i-th edge
    of a row.

[Note: one round for a layer]
    `CollectiveGraphStore` has every rank draw for the nodes that it owns, for the rank that asks::

        sizes      of what follows                           4 (2 + 2 R) bytes to each other rank
        requests   nodes, and edges that must not be drawn   w bytes each
        counts     edges drawn for each node                 1, 2, 4 or 8 bytes each
        answers    neighbours, and edge ids if asked for     w bytes each

    This is done once for a layer, whatever the number of relations R; w is 4 unless some type or
    relation has 2^31 ids or more. Nodes that a rank owns itself do not leave it.
"""

from __future__ import annotations

import contextlib
import copy
import operator
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .._base.file_rows import RowsInFiles
from .._base.memory import available_memory
from .._base.ranges import RangeMap
from .._base.typing import CanonicalEType
from ..comm import agree, share_error
from ..comm.collectives import (
    all_gather,
    all_reduce_,
    all_reduce_alike,
    all_to_all,
    gather_texts,
    shared_errors,
)
from ..comm.group import GroupState, group_state
from ..comm.transport import Hosts, SharedArray, exchange_rows, share_arrays
from ..errors import PartitionFormatError
from ..fullbatch import ExtendedEdges, GraphShardManager, StoredEdges
from ..graph import Frame, Graph
from ..graph.frame import LazyRows, version_of
from ..graph.message_passing import frames_of
from ..ops import Adjacency, draw_neighbors, ungroup
from ..ops.sampling import SourcePiece, SourcePieces
from ..partition.checked_files import TensorFile
from ..plan import budget_of, fits_replicated
from .feature_store import (
    CollectiveFeatureStore,
    FeatureRequest,
    IdsByOwner,
    Ownership,
    exchange_sizes,
    same_ranks,
)

EdgeDir = Literal["in", "out"]

_MEMBERS = "ntypes canonical_etypes idtype device group num_nodes num_edges sample_neighbors on"
ListKey: TypeAlias = tuple[CanonicalEType, EdgeDir]
DrawnEdges: TypeAlias = tuple[Tensor, list[Tensor]]
"""Number of edges by node; and by edge the neighbours, and the edge ids if they are wanted."""

LACKS_OUT_EDGES, LACKS_LABOR_IDS, LACKS_WEIGHTS = 1, 2, 4
S = TypeVar("S", bound="ShardedGraphStore")
SamplingTransport: TypeAlias = Literal["auto", "collective", "replicated"]
_TRANSPORTS = ("auto", "collective", "replicated")
_STORES = "_graph_stores"


@dataclass(frozen=True, kw_only=True)
class DrawOptions:
    """How neighbours are drawn; the same for all requests of a batch.

    Args:
        weights: Name of the edge feature that draws are weighted by; None for uniform draws.
        weights_are_mask: The feature says which edges may be drawn at all.
        labor: Draw as `LaborSampler` does.
        with_eids: Whether edge ids are wanted; without them messages between ranks are half.
    """

    replace: bool = False
    weights: str | None = None
    weights_are_mask: bool = False
    labor: bool = False
    edge_dir: EdgeDir = "in"
    with_eids: bool = True


@dataclass(frozen=True)
class NeighborRequest:
    """Nodes that draw neighbours under one relation.

    Args:
        nodes: Integer ``[n]``, ids of the nodes at its near end: the destinations of in-edges.
        fanout: Neighbours for each, -1 for all.
        key: 64 bits that name the draw, for `graphshard.ops.draw_neighbors`; from `DrawSeed.key`.
    """

    etype: CanonicalEType
    nodes: Tensor
    fanout: int
    key: int


@dataclass(frozen=True)
class SampledNeighbors:
    """What was drawn for one request.

    Args:
        counts: int64 ``[n]``, neighbours drawn for each node.
        neighbors: ``[sum(counts)]``, ids of the nodes at the far end, grouped by node.
        eids: ``[sum(counts)]``, ids of the edges, perhaps gathered only when they are read; None
            where they were not asked for.
    """

    counts: Tensor
    neighbors: Tensor
    eids: Tensor | LazyRows | None = None


class GraphStore(Protocol):
    """Where neighbours come from. Samplers and loaders take one in the place of a graph.

    A class of your own needs these members and no base. Ids are of one integer dtype and count
    from 0 by node type and by relation; a plain graph has one of each. Sampling that repeats for
    any number of ranks and threads is `graphshard.ops.draw_neighbors` with the request's key.

    The loaders call `sample_neighbors` once for each layer of a batch, for all relations together,
    in a thread of their own that is batches ahead of training: it may wait for an answer from
    elsewhere, with all requests on their way at the same time.

    Example:
        >>> import torch, graphshard
        >>> from graphshard.sampling import NeighborSampler, SampledNeighbors
        >>> class Ring:
        ...     ntypes, canonical_etypes = ["node"], [("node", "next", "node")]
        ...     idtype, device, group = torch.int64, torch.device("cpu"), None
        ...     def num_nodes(self, ntype):
        ...         return 100
        ...     def num_edges(self, etype):
        ...         return 100
        ...     def sample_neighbors(self, requests, options, excluded=None):
        ...         ids = requests[0].nodes
        ...         return [SampledNeighbors(torch.ones_like(ids), (ids - 1) % 100, ids)]
        ...     def on(self, group):
        ...         return self
        >>> inputs, outputs, blocks = NeighborSampler([1, 1]).sample(Ring(), torch.tensor([7]))
        >>> inputs
        tensor([7, 6, 5])
    """

    @property
    def ntypes(self) -> Sequence[str]:
        """Node types."""

    @property
    def canonical_etypes(self) -> Sequence[CanonicalEType]:
        """Relations, as (source type, name, destination type)."""

    @property
    def idtype(self) -> torch.dtype:
        """Type of the ids that it takes and gives: int32 or int64."""

    @property
    def device(self) -> torch.device:
        """Where the ids that it takes and gives are."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that iterate together over one loader; None for a process on its own.

        They take the same number of steps. Where `sample_neighbors` is collective, it is among
        them.
        """

    def num_nodes(self, ntype: str) -> int:
        """Nodes of a type in the whole graph."""

    def num_edges(self, etype: CanonicalEType) -> int:
        """Edges of a relation in the whole graph."""

    def sample_neighbors(
        self,
        requests: Sequence[NeighborRequest],
        options: DrawOptions,
        excluded: Mapping[CanonicalEType, Tensor] | None = None,
    ) -> list[SampledNeighbors]:
        """Draw for each request.

        A store that is collective says so; then every rank must pass the same relations, fanouts,
        keys and options in the same order, with any number of nodes.

        Args:
            requests: At most one per relation.
            excluded: Relation to ids of edges that are treated as absent, for this rank.

        Raises:
            ValueError: The weights are missing or no weights.
        """

    def on(self, group: dist.ProcessGroup | None) -> GraphStore:
        """The store for one thread of a loader, over another group of the same ranks.

        A store that is not collective returns itself.
        """


def is_graph_store(value: object) -> bool:
    """Whether a value is a `GraphStore`; TypeError if it has some of the members alone."""
    if not callable(getattr(value, "sample_neighbors", None)):
        return False
    missing = [name for name in _MEMBERS.split() if not hasattr(value, name)]
    if missing:
        raise TypeError(
            f"a GraphStore must have the members {', '.join(_MEMBERS.split())} "
            f"({type(value).__name__} lacks {', '.join(missing)}); see "
            "graphshard.sampling.GraphStore"
        )
    return True


def ends(etype: CanonicalEType, edge_dir: EdgeDir) -> tuple[str, str]:
    """Types of the nodes that draw, and of their neighbours."""
    return (etype[2], etype[0]) if edge_dir == "in" else (etype[0], etype[2])


def check_drawn(
    store: GraphStore,
    requests: Sequence[NeighborRequest],
    drawn: Sequence[SampledNeighbors],
    edge_dir: EdgeDir,
) -> None:
    """Raise ValueError unless a store of a user's own has answered as `GraphStore` says.

    Else blocks would have edges that no kernel may read.
    """
    if isinstance(store, LocalGraphStore | ShardedGraphStore):
        return
    method = f"{type(store).__name__}.sample_neighbors"
    if len(drawn) != len(requests):
        raise ValueError(
            f"{method} must give a SampledNeighbors for each of {len(requests)} requests (got "
            f"{len(drawn)})"
        )
    for request, of_request in zip(requests, drawn, strict=True):
        counts, neighbors, etype = of_request.counts, of_request.neighbors, request.etype
        bound, num_nodes = store.num_nodes(ends(etype, edge_dir)[1]), request.nodes.numel()
        if counts.shape != (num_nodes,) or bool((counts < 0).any()):
            raise ValueError(
                f"{method} must count the neighbours of each of {num_nodes} nodes for {etype} (got "
                f"counts of shape {tuple(counts.shape)}, the least of them "
                f"{int(counts.min()) if counts.numel() else 0})"
            )
        if neighbors.dtype != store.idtype or neighbors.shape != (int(counts.sum()),):
            raise ValueError(
                f"{method} must give {int(counts.sum())} neighbours of {store.idtype} for {etype}, "
                f"as its counts say (got {neighbors.dtype} of shape {tuple(neighbors.shape)})"
            )
        bad = neighbors[(neighbors < 0) | (neighbors >= bound)]
        if bad.numel():
            raise ValueError(
                f"{method} must give neighbours in [0, {bound}) for {etype} (got {int(bad[0])})"
            )


@dataclass(frozen=True, eq=False)
class EdgeLists:
    """The edges at one end of some nodes, under one relation, as compressed rows.

    Args:
        indptr: ``[num_rows + 1]``.
        neighbors: ``[num_edges]``, id of the node at the far end; in pieces where files have it.
        eids: ``[num_edges]``, edge ids; None where they ascend by 1 from ``first_eid``.
        max_degree: Most edges of any row, on any rank, where that is needed.
    """

    indptr: Tensor
    neighbors: Tensor | SourcePieces
    eids: Tensor | None
    first_eid: int = 0
    max_degree: int = 0

    def draw(
        self,
        request: NeighborRequest,
        rows: Tensor,
        original_ids: Tensor,
        options: DrawOptions,
        *,
        weights: Tensor | None,
        labor_ids: Tensor | None,
        excluded: Tensor | None,
        weights_by_eid: bool = False,
        check: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw for some rows; arguments by position, and what is returned, as `draw_neighbors`.

        ``excluded`` are ids of edges that are treated as absent; others than those here are legal.
        With ``weights_by_eid`` weights are by edge id, from 0, and are read where they lie.
        """
        return draw_neighbors(
            self.indptr,
            rows,
            request.fanout,
            request.key,
            original_ids,
            indices=self.neighbors,
            replace=options.replace,
            prob=weights,
            prob_ids=self.eids if weights_by_eid and weights is not None else None,
            labor_ids=labor_ids,
            excluded=None if excluded is None else self._positions_of(excluded),
            check=check,
        )

    def eids_at(self, positions: Tensor) -> Tensor:
        """Ids of the edges at some positions."""
        if self.eids is None:
            return positions.to(self.neighbors.dtype) + self.first_eid
        return self.eids.index_select(0, positions)

    def positions_of(self, eids: Tensor) -> Tensor:
        """Position of each of some edges, all of which are here."""
        if self.eids is None:
            return eids.to(torch.int64) - self.first_eid
        ascending, position = self._sorted_eids
        return position[torch.searchsorted(ascending, eids.to(ascending.dtype))]

    def _positions_of(self, eids: Tensor) -> Tensor:
        """Ascending int64 positions of those of some edges that are here."""
        eids = torch.unique(eids.to(torch.int64))
        if self.eids is None:
            here = (eids >= self.first_eid) & (eids < self.first_eid + self.neighbors.numel())
            return eids[here] - self.first_eid
        if self.eids.numel() == 0:
            return eids[:0]
        ascending, position = self._sorted_eids
        slots = torch.searchsorted(ascending, eids.to(ascending.dtype))
        slots.clamp_(max=ascending.numel() - 1)
        return position[slots[ascending[slots] == eids]].sort().values

    @cached_property
    def _sorted_eids(self) -> tuple[Tensor, Tensor]:
        assert self.eids is not None
        ascending, position = torch.sort(self.eids)
        return ascending, position


@dataclass(frozen=True, eq=False)
class WeightFeature:
    """An edge feature that serves as weights, and the state that it had when it was checked.

    Args:
        version: torch's count of its changes.
        checked: ``[num_edges]`` by edge, a copy as `draw_neighbors` takes weights.
        placed: By direction, the same by position in the `EdgeLists` that are drawn from; filled
            in when first needed.
    """

    values: Tensor
    version: int
    checked: Tensor
    placed: dict[EdgeDir, Tensor] = field(default_factory=dict)


class CheckedWeights:
    """Weights of edges as other ranks draw by them, checked when they are first used.

    They are copies, so a change must be noticed: one that torch counts when they are next used,
    every other one by `forget_changed`.
    """

    def __init__(self) -> None:
        self._features: dict[tuple[CanonicalEType, str | None, bool], WeightFeature] = {}

    def copy(self) -> CheckedWeights:
        """The same, for another thread."""
        new = CheckedWeights()
        new._features = {k: replace(f, placed=dict(f.placed)) for k, f in self._features.items()}
        return new

    def find(
        self, data: Mapping[str, Any], etype: CanonicalEType, options: DrawOptions
    ) -> WeightFeature:
        """The weights of a relation; the same object until the feature is set or changed."""
        name = options.weights
        assert name is not None
        values = weights_named(data, etype, name)
        feature = self._features.get((etype, name, options.weights_are_mask))
        if feature is None or feature.values is not values or feature.version != version_of(values):
            checked = checked_weights(values.detach(), options, etype)
            feature = WeightFeature(values, version_of(values), checked.clone())
            self._features[etype, name, options.weights_are_mask] = feature
        return feature

    def any_changed(self) -> bool:
        """Whether weights are no longer what was copied; reads all of them."""
        for (_, name, is_mask), feature in self._features.items():
            options = DrawOptions(weights=name, weights_are_mask=is_mask)
            now = as_weights(feature.values.detach(), options)
            is_new = (
                feature.version != version_of(feature.values) or now.dtype != feature.checked.dtype
            )
            if is_new or not torch.equal(now, feature.checked):
                return True
        return False

    def forget(self) -> None:
        """Check and copy all anew when they are next used."""
        self._features.clear()

    def latest(self, etype: CanonicalEType, options: DrawOptions) -> WeightFeature:
        """What `find` gave last."""
        return self._features[etype, options.weights, options.weights_are_mask]

    def placed(self) -> list[Tensor]:
        """All weights by position."""
        return [placed for feature in self._features.values() for placed in feature.placed.values()]

    def dtype(self, etype: CanonicalEType, options: DrawOptions) -> torch.dtype | None:
        """Of the weights; None where there are none."""
        feature = self._features.get((etype, options.weights, options.weights_are_mask))
        return None if feature is None else feature.checked.dtype


def weights_named(data: Mapping[str, Any], etype: CanonicalEType, name: str) -> Tensor:
    """An edge feature of a relation; ValueError where it has none of that name."""
    if name not in data:
        raise ValueError(
            f"sampling by {name!r} needs an edge feature of that name on relation {etype} (it "
            f"has {sorted(data)}); set g.edges[etype].data[{name!r}] to one number per edge"
        )
    values: Tensor = data[name]
    return values


def checked_weights(
    values: Tensor, options: DrawOptions, etype: CanonicalEType, eids: Tensor | None = None
) -> Tensor:
    """Weights as `draw_neighbors` takes them: ``[num_edges]``, none negative; of a mask uint8.

    Args:
        eids: Ids of the edges, for the error; None where they are all, in order.

    Raises:
        ValueError: Another shape or type, a negative weight, or one that is not finite.
    """
    name = options.weights
    if values.dim() != 1 and values.shape[1:] != (1,):
        raise ValueError(
            f"edge feature {name!r} of {etype} must have one number per edge to sample by (got "
            f"shape {tuple(values.shape)})"
        )
    if options.weights_are_mask and values.dtype not in (torch.bool, torch.uint8):
        raise ValueError(
            f"edge feature {name!r} of {etype} must be bool to serve as a mask (got "
            f"{values.dtype}); pass it as prob to sample in proportion to it"
        )
    if values.is_complex():
        raise ValueError(
            f"edge feature {name!r} of {etype} must be real to sample by (got {values.dtype})"
        )
    values = as_weights(values, options)
    if values.dtype == torch.uint8:
        return values
    bad = ~(values >= 0) | torch.isinf(values)
    if bool(bad.any()):
        first = int(bad.nonzero()[0])
        raise ValueError(
            f"edge feature {name!r} of {etype} must hold finite weights of 0 or more to sample by "
            f"(got {float(values[first])} at edge {first if eids is None else int(eids[first])})"
        )
    return values


def as_weights(values: Tensor, options: DrawOptions) -> Tensor:
    """Weights as `draw_neighbors` takes them, unchecked: the memory of the feature if it can be."""
    if options.weights_are_mask:
        values = values.view(torch.uint8) if values.dtype == torch.bool else values
    elif values.dtype not in (torch.float32, torch.float64):
        values = values.to(torch.float32)
    return values.contiguous().view(-1)


@dataclass(frozen=True, eq=False)
class _OutEdgeRoute:
    """How values of in-edges reach the owners of the sources, in the order of the out-edges."""

    order: Tensor  # own in-edges grouped by the owner of the source
    send_splits: list[int]
    recv_splits: list[int]
    arrangement: Tensor  # what arrived, in the order of the out-edges

    def carry(self, state: GroupState, values: Tensor) -> Tensor:
        sent = values.index_select(0, self.order)
        arrived = exchange_rows(
            state, [sent], [self.send_splits], [self.recv_splits], "values of out-edges"
        )[0]
        return arrived.index_select(0, self.arrangement)


class OwnEdges:
    """Edges of the nodes that this rank owns; collective to make.

    In-edges are stored with their destination already. What only several ranks together can say
    (which out-edges a node has, how edges of other ranks are weighted, what a remote source was
    called before partitioning) is exchanged once, when first used.

    Attributes:
        original_ids: Node type to what rows of ``lists`` were called before partitioning.
        lists: The edges that are here, by relation and direction; ids are global.
        labor_ids: int64 ``[num_edges]``, the original id of each neighbour, where it is known.
        weights: Of the edges that are here.
    """

    def __init__(self, manager: GraphShardManager) -> None:
        self.ownership, self.state = Ownership.of(manager), group_state(manager.group)
        self.original_ids = {t: ids.cpu() for t, ids in manager.original_ids.items()}
        self.weights = CheckedWeights()
        self.labor_ids: dict[ListKey, Tensor] = {}
        self.lists: dict[ListKey, EdgeLists] = {}
        self._original_edge_ids = manager._original.edges  # made when they are asked for
        self._frames: dict[CanonicalEType, Frame] = dict(
            zip(manager.canonical_etypes, frames_of(manager)[2], strict=True)
        )
        self._edges = {t: manager._structure.edges[t] for t in manager.canonical_etypes}
        self._routes: dict[CanonicalEType, _OutEdgeRoute] = {}
        in_edges = {etype: self._in_csc(etype) for etype in self._edges}
        degrees = [_largest(csc[0].diff()) for csc in in_edges.values()]
        most_anywhere = torch.tensor(degrees, dtype=torch.int64)
        all_reduce_(self.state, most_anywhere, dist.ReduceOp.MAX)
        for (etype, csc), most in zip(in_edges.items(), most_anywhere.tolist(), strict=True):
            first = self.ownership.first(etype)
            eids = None if csc[2] is None else csc[2] + first
            self.lists[etype, "in"] = EdgeLists(csc[0], csc[1], eids, first, most)

    def on(self, state: GroupState) -> OwnEdges:
        """The same edges, exchanging what it still lacks over another group."""
        new = copy.copy(self)
        new.state, new.weights, new._routes = state, self.weights.copy(), dict(self._routes)
        new.lists, new.labor_ids = dict(self.lists), dict(self.labor_ids)
        return new

    def _in_csc(self, etype: CanonicalEType) -> tuple[Tensor, Tensor | SourcePieces, Tensor | None]:
        edges = self._edges[etype]
        dtype = self.ownership.wire_dtype
        ranges = self.ownership.ranges[etype[0]]
        if isinstance(edges, ExtendedEdges):
            return edges.lists(torch.tensor(ranges.starts[:-1], dtype=dtype))
        if isinstance(edges, StoredEdges):
            piece = edges.piece(ranges.starts[self.ownership.rank])
            return edges.indptr.to(dtype), SourcePieces([piece], dtype), None
        starts = torch.tensor(ranges.starts, dtype=dtype)
        src = edges.src.cpu().to(dtype) + starts[edges.src_part.cpu().long()]
        adjacency = Adjacency(
            src, edges.dst.cpu().to(dtype), ranges.num_ids, edges.num_dst, check=False
        )
        return adjacency.csc()

    def stored(self, key: ListKey) -> StoredEdges | None:
        """The edges of some list where a file has them that other ranks may read."""
        edges = self._edges[key[0]]
        if not isinstance(edges, StoredEdges) or isinstance(edges, ExtendedEdges):
            return None
        if key[1] != "in":
            return None
        return edges if edges.sources.dtype == edges.nodes.column.dtype else None

    def draw(
        self, request: NeighborRequest, rows: Tensor, options: DrawOptions, excluded: Tensor | None
    ) -> DrawnEdges:
        """Draw for some rows of ``lists``; see `EdgeLists.draw`. Nothing may be lacking."""
        key = request.etype, options.edge_dir
        lists, weights = self.lists[key], None
        if excluded is not None and excluded.numel() == 0:
            excluded = None
        if options.weights is not None:
            weights = self.weights.latest(request.etype, options).placed[options.edge_dir]
        counts, positions, picked = lists.draw(
            request,
            rows,
            self.original_ids[ends(*key)[0]].index_select(0, rows),
            options,
            weights=weights,
            labor_ids=self.labor_ids[key] if options.labor else None,
            excluded=excluded,
            check=False,
        )
        return counts, [picked, lists.eids_at(positions)] if options.with_eids else [picked]

    def lacking(
        self, etypes: Sequence[CanonicalEType], options: DrawOptions
    ) -> tuple[int, ValueError | None]:
        """Bits for what must be exchanged before draws; what is wrong with this rank's weights."""
        bits = 0
        try:
            for etype in etypes:
                key = (etype, options.edge_dir)
                if key not in self.lists:
                    bits |= LACKS_OUT_EDGES
                if options.labor and key not in self.labor_ids:
                    bits |= LACKS_LABOR_IDS
                if options.weights is not None:
                    feature = self.weights.find(self._frames[etype], etype, options)
                    if options.edge_dir not in feature.placed:
                        bits |= LACKS_WEIGHTS
        except ValueError as error:
            return LACKS_WEIGHTS, error
        return bits, None

    def prepare(self, etypes: Sequence[CanonicalEType], options: DrawOptions, lacking: int) -> None:
        """Make what some rank lacks; where that takes an exchange, every rank must call."""
        for etype in etypes:
            key = (etype, options.edge_dir)
            if lacking & LACKS_OUT_EDGES:
                self._make_out_lists(etype)
            if lacking & LACKS_LABOR_IDS:
                self.labor_ids[key] = self._original_neighbors(key)
            if lacking & LACKS_WEIGHTS:
                placed = self.placed_weights(etype, options, self.lists[key].eids)
                self.weights.latest(etype, options).placed[options.edge_dir] = placed

    def placed_weights(
        self, etype: CanonicalEType, options: DrawOptions, eids: Tensor | None
    ) -> Tensor:
        """Weights of this rank's edges by position; along out-edges, every rank must call.

        ``eids`` are their ids by position; None where they ascend by 1.
        """
        checked = self.weights.latest(etype, options).checked.cpu()
        if options.edge_dir == "out":
            return self._routes[etype].carry(self.state, checked)
        return checked if eids is None else checked[eids.long() - self.ownership.first(etype)]

    def _make_out_lists(self, etype: CanonicalEType) -> None:
        edges = self._edges[etype]
        dtype = self.ownership.wire_dtype
        owner = edges.src_part.cpu().long()
        order = torch.argsort(owner, stable=True)
        num_ranks = self.state.world_size
        counts = torch.bincount(owner, minlength=num_ranks)
        ones = [1] * num_ranks
        what = f"out-edges of {etype}"
        recv_splits = all_to_all(self.state, counts, ones, ones, what).tolist()
        send_splits = counts.tolist()
        eids = torch.arange(edges.num_edges, dtype=dtype) + self.ownership.first(etype)
        columns = [
            edges.src.cpu().to(dtype),
            edges.dst.cpu().to(dtype) + self.ownership.first(etype[2]),
            eids,
            self._original_edge_ids[etype].cpu(),
        ]
        row, neighbor, eid, original = exchange_rows(
            self.state,
            [column.index_select(0, order) for column in columns],
            [send_splits] * len(columns),
            [recv_splits] * len(columns),
            what,
        )
        arrangement = torch.argsort(original)
        arrangement = arrangement[torch.argsort(row[arrangement], stable=True)]
        self._routes[etype] = _OutEdgeRoute(order, send_splits, recv_splits, arrangement)
        num_rows = self.ownership.num_owned(etype[0])
        degrees = torch.bincount(row, minlength=num_rows)
        indptr = torch.zeros(num_rows + 1, dtype=dtype)
        torch.cumsum(degrees, 0, dtype=dtype, out=indptr[1:])
        most = all_reduce_(self.state, torch.tensor([_largest(degrees)]), dist.ReduceOp.MAX)
        self.lists[etype, "out"] = EdgeLists(
            indptr, neighbor[arrangement], eid[arrangement], 0, int(most)
        )

    def _original_neighbors(self, key: ListKey) -> Tensor:
        far = ends(*key)[1]
        distinct, at = torch.unique(self.lists[key].neighbors[:], return_inverse=True)
        store = CollectiveFeatureStore(
            self.ownership, {(far, "original"): self.original_ids[far]}, self.state
        )
        request = FeatureRequest(far, ("original",), distinct.to(torch.int64), distinct=True)
        return store.fetch([request])[0]["original"][at]


def _largest(numbers: Tensor) -> int:
    return int(numbers.max()) if numbers.numel() else 0


class LocalGraphStore:
    """A graph that is whole in this process; its node ids are taken as the original ones."""

    group = None

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.ntypes: Sequence[str] = graph.ntypes
        self.canonical_etypes: Sequence[CanonicalEType] = graph.canonical_etypes
        self.idtype, self.device = graph.idtype, graph.device
        self.num_nodes, self.num_edges = graph.num_nodes, graph.num_edges
        self._relations = tuple(graph.relations)
        self._lists: dict[ListKey, EdgeLists] = {}
        #: By relation and how they are used, the weights that were checked last, and their version.
        self._checked: dict[tuple[CanonicalEType, str, bool], tuple[weakref.ref[Tensor], int]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalGraphStore:
        return LocalGraphStore(copy.deepcopy(self.graph, memo))

    @property
    def is_current(self) -> bool:
        """Whether the graph still has the edges that it had; it can be changed in place."""
        now = self.graph.relations
        return len(now) == len(self._relations) and all(map(operator.is_, now, self._relations))

    def on(self, group: object) -> LocalGraphStore:
        return self

    def sample_neighbors(
        self,
        requests: Sequence[NeighborRequest],
        options: DrawOptions,
        excluded: Mapping[CanonicalEType, Tensor] | None = None,
    ) -> list[SampledNeighbors]:
        return [self.draw(request, options, (excluded or {})) for request in requests]

    def draw(
        self,
        request: NeighborRequest,
        options: DrawOptions,
        excluded: Mapping[CanonicalEType, Tensor],
        weights: Tensor | None = None,
    ) -> SampledNeighbors:
        """Draw for one request; ``weights`` by edge id go before the feature that options name."""
        lists = self.edge_lists(request.etype, options.edge_dir)
        counts, positions, picked = lists.draw(
            request,
            request.nodes,
            request.nodes.to(torch.int64),
            options,
            weights=self.weights(request.etype, options) if weights is None else weights,
            weights_by_eid=True,
            labor_ids=lists.neighbors[:] if options.labor else None,
            excluded=excluded.get(request.etype),
        )
        if not options.with_eids:
            return SampledNeighbors(counts, picked, None)
        eids: Tensor | LazyRows = positions.to(picked.dtype)
        if lists.eids is not None:
            eids = LazyRows(lists.eids, positions)  # gathered where a model reads them
        return SampledNeighbors(counts, picked, eids)

    def edge_lists(self, etype: CanonicalEType, edge_dir: EdgeDir) -> EdgeLists:
        """The edges of a relation as compressed rows."""
        key = etype, edge_dir
        if key not in self._lists:
            edges: Adjacency = self.graph.relations[self.graph.canonical_etypes.index(etype)]
            self._lists[key] = EdgeLists(*(edges.csc() if edge_dir == "in" else edges.csr()))
        return self._lists[key]

    def weights(self, etype: CanonicalEType, options: DrawOptions) -> Tensor | None:
        """The weights that options name, by edge id, as they are now; None where they name none.

        They are the memory of the feature, unless its type or strides need a copy. What is new, or
        changed as torch counts it, is checked.
        """
        if options.weights is None:
            return None
        values = weights_named(self.graph.edges[etype].data, etype, options.weights)
        key = etype, options.weights, options.weights_are_mask
        checked, version = self._checked.get(key, (lambda: None, 0))
        if checked() is values and version == version_of(values):
            return as_weights(values.detach(), options)
        weights = checked_weights(values.detach(), options, etype)
        self._checked[key] = weakref.ref(values), version_of(values)
        return weights


class ShardedGraphStore:
    """What stores of a graph have in common of which each rank owns a part."""

    device = torch.device("cpu")  # wherever features are

    def __init__(self, edges: OwnEdges, idtype: torch.dtype) -> None:
        self._edges, self._state = edges, edges.state
        self.ownership, self.idtype = edges.ownership, idtype
        kinds = list(edges.ownership.ranges)
        self.ntypes = [kind for kind in kinds if isinstance(kind, str)]
        self.canonical_etypes = [kind for kind in kinds if not isinstance(kind, str)]

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self._state.group

    def num_nodes(self, ntype: str) -> int:
        return self.ownership.ranges[ntype].num_ids

    def num_edges(self, etype: CanonicalEType) -> int:
        return self.ownership.ranges[etype].num_ids

    def on(self: S, group: dist.ProcessGroup | None) -> S:
        """The same store; what it exchanges goes over another group of the same ranks."""
        new = copy.copy(self)
        new._state = same_ranks(self._state, group)
        new._edges = self._edges.on(new._state)
        return new

    def look_at_weights(self) -> None:
        """Notice weights that were written to in a way that torch does not count.

        What other ranks draw by is a copy. Every rank must call between draws: a pass of a loader
        begins with it, and so does what draws a batch by itself. It reads the weights that have
        been drawn by, and exchanges one number, and the weights anew where any changed.
        """
        changed = torch.tensor([int(self._edges.weights.any_changed())])
        if int(all_reduce_(self._state, changed, dist.ReduceOp.MAX)):
            self._edges.weights.forget()


class CollectiveGraphStore(ShardedGraphStore):
    """A graph whose nodes draw where they are owned; made by `of`.

    `sample_neighbors` sends, from a rank to all others together, with P ranks and R relations,
    ``4 (2 + 2 R) (P - 1) + w (nodes asked of others + edge ids excluded elsewhere) +
    c (nodes that others asked of it) + w (1 or, with edge ids, 2) (edges drawn for others)`` bytes.
    Here w is 4 (8 if a type or relation has 2^31 ids or more), and c the bytes of the smallest
    integer (1, 2, 4) that holds as many edges as can be drawn for a node.
    """

    @classmethod
    def of(cls, manager: GraphShardManager) -> CollectiveGraphStore:
        """The store of a sharded graph; every rank must call."""
        return cls(OwnEdges(manager), manager.idtype)

    def sample_neighbors(
        self,
        requests: Sequence[NeighborRequest],
        options: DrawOptions,
        excluded: Mapping[CanonicalEType, Tensor] | None = None,
    ) -> list[SampledNeighbors]:
        """Draw for each request; every rank must call. See `GraphStore.sample_neighbors`.

        Edges are excluded for the rank that says so, not for the others.

        Raises:
            ValueError: On all ranks: weights that are missing or no weights on some rank, or
                ranks that draw differently.
        """
        if not requests:
            return []
        state, edges, ownership, num = self._state, self._edges, self.ownership, len(requests)
        etypes = [request.etype for request in requests]
        lacking, error = edges.lacking(etypes, options)
        nothing = torch.empty(0, dtype=ownership.wire_dtype)
        signature, nodes, absent = [], [], []
        for request in requests:
            etype, ids, dtype = request.etype, request.nodes, None
            if options.weights is not None:
                dtype = edges.weights.dtype(etype, options)
            signature.append(
                f"{etype} fanout {request.fanout} key {request.key:#x} weights {dtype}"
            )
            # Where nothing is drawn, nothing need be asked.
            ids = ids if request.fanout else ids[:0]
            nodes.append(ownership.by_owner(ends(etype, options.edge_dir)[0], ids))
            eids = excluded.get(etype) if excluded else None
            if eids is None or eids.numel() == 0 or request.fanout == 0:
                absent.append(IdsByOwner(None, nothing, [0] * state.world_size, 0))
            else:
                absent.append(self._excluded_by_owner(etype, eids, options))
        asks = [*nodes, *absent]
        splits = [ids.splits for ids in asks]
        asked, lacking = exchange_sizes(  # by what is asked, by rank
            state,
            "what neighbours are drawn",
            f"{options}: {'; '.join(signature)}",
            error,
            splits,
            lacking,
        )
        if lacking:
            edges.prepare(etypes, options, lacking)
        own: list[DrawnEdges] = []
        answers: list[DrawnEdges] = []

        def draw_own() -> None:
            for request, rows, eids in zip(requests, nodes, absent, strict=True):
                own_rows, own_eids = rows.rows[rows.num_remote :], eids.rows[eids.num_remote :]
                own.append(edges.draw(request, own_rows, options, own_eids))

        if state.world_size == 1:
            draw_own()
        else:
            of_others = exchange_rows(
                state,
                [ids.rows[: ids.num_remote] for ids in asks],
                splits,
                asked,
                "rows to draw for",
                meanwhile=draw_own,
            )
            answers = self._answers(requests, options, of_others, asked, splits[:num])

        drawn = []
        for number, request in enumerate(requests):
            counts, columns = own[number]
            if answers:
                counts = torch.cat([answers[number][0], counts])
                both = zip(answers[number][1], columns, strict=True)
                columns = [torch.cat(pair) for pair in both]
            order = nodes[number].order
            if request.fanout == 0:
                counts = torch.zeros(request.nodes.numel(), dtype=torch.int64)
            elif order is not None:  # from the order of owners into the order of the nodes
                by_owner = counts
                for i, column in enumerate(columns):
                    counts, columns[i] = ungroup(order, by_owner, column, self.idtype, check=False)
            drawn.append(SampledNeighbors(counts, *[c.to(self.idtype) for c in columns]))
        return drawn

    def _excluded_by_owner(
        self, etype: CanonicalEType, eids: Tensor, options: DrawOptions
    ) -> IdsByOwner:
        """Edges that are not to be drawn; ``rows`` are their ids."""
        ownership, ranks = self.ownership, self._state.world_size
        eids = eids.to("cpu", torch.int64)
        if options.edge_dir == "out":
            # Who owns the source of an edge is not to be seen from its id.
            splits = [eids.numel()] * ranks
            splits[self._state.rank] = 0
            repeated = eids.to(ownership.wire_dtype).repeat(ranks)
            return IdsByOwner(None, repeated, splits, sum(splits))
        by_owner = ownership.by_owner(etype, eids)
        if by_owner.order is not None:
            eids = eids.index_select(0, by_owner.order)
        return replace(by_owner, rows=eids.to(ownership.wire_dtype))

    def _answers(
        self,
        requests: Sequence[NeighborRequest],
        options: DrawOptions,
        groups: Sequence[Tensor],
        asked: Sequence[Sequence[int]],
        num_nodes: Sequence[Sequence[int]],
    ) -> list[DrawnEdges]:
        """Draw for others, and send it; what others drew for this rank, by rank.

        Args:
            requests: Of this rank; those of others have the same relations and fanouts.
            groups: For each request the rows that others ask for, by rank; then for each request
                the edges that must not be drawn for them.
            asked: How many of each are of which rank.
            num_nodes: For each request, nodes that this rank asks of each other one.
        """
        edges, num, width = self._edges, len(requests), 2 if options.with_eids else 1
        counts_out, columns_out, sums_out = [], [], []
        for number, request in enumerate(requests):
            rows, eids = groups[number], groups[num + number]
            if eids.numel() == 0:
                counts, columns = edges.draw(request, rows, options, None)
            else:  # each rank leaves out edges of its own
                parts = zip(rows.split(asked[number]), eids.split(asked[num + number]), strict=True)
                by_rank = [edges.draw(request, r, options, e) for r, e in parts]
                counts = torch.cat([part[0] for part in by_rank])
                columns = [torch.cat([part[1][i] for part in by_rank]) for i in range(width)]
            counts_out.append(counts.to(self._count_dtype(request, options)))
            columns_out += columns
            sums_out += [_sums(counts, asked[number])] * width
        counts_in = exchange_rows(
            self._state, counts_out, asked[:num], num_nodes, "numbers of neighbours"
        )
        sums_in = []
        for counts, splits in zip(counts_in, num_nodes, strict=True):
            sums_in += [_sums(counts, splits)] * width
        columns_in = exchange_rows(self._state, columns_out, sums_out, sums_in, "neighbours")
        return [
            (counts.to(torch.int64), columns_in[number * width : (number + 1) * width])
            for number, counts in enumerate(counts_in)
        ]

    def _count_dtype(self, request: NeighborRequest, options: DrawOptions) -> torch.dtype:
        """The smallest integer that holds a count; the same on all ranks."""
        most = self._edges.lists[request.etype, options.edge_dir].max_degree
        if options.replace:
            most = request.fanout
        elif request.fanout >= 0 and not options.labor:
            most = min(most, request.fanout)
        for dtype in (torch.uint8, torch.int16, torch.int32):
            if most <= torch.iinfo(dtype).max:
                return dtype
        return torch.int64


def _sums(counts: Tensor, splits: Sequence[int]) -> list[int]:
    """Sum of each group of counts."""
    sums = []
    for group in counts.split(list(splits)):
        sums.append(int(group.sum(dtype=torch.int64)))
    return sums


class ReplicatedGraphStore(ShardedGraphStore):
    """A graph that each host holds whole, in memory that its ranks share; made by `of`.

    The parts follow one another as one compressed structure over global ids, so a draw is what
    it is on a graph in one process. In-edges are there from the start. What else a draw may need
    (out-edges, weights by position, original ids of neighbours for LABOR) is put beside them by the
    first draw that needs it, which is therefore collective; so is the first draw after edge weights
    were set anew, which every rank must then do.

    Neighbours along in-edges are read where the files of the parts have them, if every rank sees
    those files: the pages are the system's, and all processes of a host have them once.

    What the ranks know of their own edges is replaced, as soon as it is shared, by what the host
    has of all edges.
    """

    def __init__(
        self,
        edges: OwnEdges,
        hosts: Hosts,
        directory: str | os.PathLike[str] | None,
        idtype: torch.dtype,
    ) -> None:
        super().__init__(edges, idtype)
        self._hosts, self._directory = hosts, directory
        ranges, own_ids = self.ownership.ranges, edges.original_ids
        ids = [SharedArray(own_ids[t], ranges[t].starts) for t in self.ntypes]
        edges.original_ids = dict(zip(self.ntypes, self._share(ids), strict=True))
        self._share_lists(list(edges.lists))

    @classmethod
    def of(
        cls, manager: GraphShardManager, *, directory: str | os.PathLike[str] | None = None
    ) -> ReplicatedGraphStore:
        """The store of a sharded graph; every rank must call.

        Args:
            directory: Where shared files have a name for a moment; by default in shared memory, or
                where temporary files go if that is too small.

        Raises:
            ValueError: The graph is a message flow graph.
            OSError: Some host has no room for it; on all ranks.
        """
        edges = OwnEdges(manager)
        return cls(edges, Hosts.find(edges.state, directory), directory, manager.idtype)

    @property
    def num_bytes(self) -> int:
        """Bytes that one host holds, pages of files included."""
        edges = self._edges
        arrays = [*edges.original_ids.values(), *edges.labor_ids.values(), *edges.weights.placed()]
        halos: dict[int, Tensor] = {}  # which relations have in common
        for lists in edges.lists.values():
            columns = [lists.indptr, lists.neighbors, lists.eids]
            if isinstance(lists.neighbors, SourcePieces):
                columns += [piece.sources for piece in lists.neighbors.pieces]
                halos |= {piece.others.data_ptr(): piece.others for piece in lists.neighbors.pieces}
            arrays += [column for column in columns if isinstance(column, Tensor)]
        return sum(map(_num_bytes, [*arrays, *halos.values()]))

    def sample_neighbors(
        self,
        requests: Sequence[NeighborRequest],
        options: DrawOptions,
        excluded: Mapping[CanonicalEType, Tensor] | None = None,
    ) -> list[SampledNeighbors]:
        """As `GraphStore.sample_neighbors`; sends, and raises on all ranks, on first use alone."""
        self._prepare([request.etype for request in requests], options)
        absent, answers = excluded or {}, []
        for request in requests:
            eids = absent.get(request.etype)
            counts, columns = self._edges.draw(request, request.nodes, options, eids)
            answers.append(SampledNeighbors(counts, *[c.to(self.idtype) for c in columns]))
        return answers

    def _prepare(self, etypes: Sequence[CanonicalEType], options: DrawOptions) -> None:
        """Put what some draw needs for the first time where all ranks of a host read it."""
        edges, edge_dir = self._edges, options.edge_dir
        lacking, error = edges.lacking(etypes, options)
        if not lacking:
            return
        share_error(error, self.group)
        dtypes = [edges.weights.dtype(etype, options) for etype in etypes]
        agree(f"{options} {dtypes}", "what sampling needs first", self.group)
        keys: list[ListKey] = [(etype, edge_dir) for etype in etypes]
        if lacking & LACKS_OUT_EDGES:
            edges.prepare(etypes, options, LACKS_OUT_EDGES)
            self._share_lists(keys)
        own = {key: slice(*self._edge_starts(key)[edges.state.rank :][:2]) for key in keys}
        if lacking & LACKS_LABOR_IDS:
            ids = [
                edges.original_ids[ends(*key)[1]].index_select(0, edges.lists[key].neighbors[at])
                for key, at in own.items()
            ]
            edges.labor_ids.update(zip(keys, self._share_columns(keys, ids), strict=True))
        if lacking & LACKS_WEIGHTS:
            weights = []
            for key, at in own.items():
                eids = edges.lists[key].eids
                own_eids = None if eids is None else eids[at]
                weights.append(edges.placed_weights(key[0], options, own_eids))
            for etype, placed in zip(etypes, self._share_columns(keys, weights), strict=True):
                edges.weights.latest(etype, options).placed[edge_dir] = placed

    def _share(self, arrays: Sequence[SharedArray]) -> list[Tensor]:
        return share_arrays(self._state, self._hosts, arrays, whole=True, directory=self._directory)

    def _share_columns(self, keys: Sequence[ListKey], own: Sequence[Tensor]) -> list[Tensor]:
        """Columns of all edges by position, from those of this rank's edges."""
        starts = map(self._edge_starts, keys)
        return self._share([SharedArray(c, s) for c, s in zip(own, starts, strict=True)])

    def _edge_starts(self, key: ListKey) -> list[int]:
        """First position of each rank's edges, and the number of edges."""
        near = self.ownership.ranges[ends(*key)[0]]
        return self._edges.lists[key].indptr[list(near.starts)].tolist()

    def _share_lists(self, keys: Sequence[ListKey]) -> None:
        """Replace lists of this rank's edges by those of all."""
        rank, wire = self._state.rank, self.ownership.wire_dtype
        own = [self._edges.lists[key] for key in keys]
        sizes = torch.tensor([(e.neighbors.numel(), e.eids is not None) for e in own])
        by_rank = torch.stack(all_gather(self._state, sizes.view(-1, 2).to(torch.int64)))
        has_eids = by_rank[:, :, 1].any(0).tolist()
        pieces = self._pieces_in_files(keys)
        arrays = []
        for number, (key, lists) in enumerate(zip(keys, own, strict=True)):
            begin = RangeMap.from_sizes(by_rank[:, number, 0].tolist()).starts
            near = self.ownership.ranges[ends(*key)[0]]
            # The pointer has one entry more than there are rows: rank 0 writes the leading 0.
            pointer = lists.indptr if rank == 0 else lists.indptr[1:]
            pointer_starts = [0, *(start + 1 for start in near.starts[1:])]
            arrays.append(SharedArray((pointer + begin[rank]).to(wire), pointer_starts))
            if key not in pieces:
                arrays.append(SharedArray(lists.neighbors[:], begin))
            if has_eids[number]:
                all_eids = lists.eids
                if all_eids is None:
                    all_eids = lists.eids_at(torch.arange(lists.neighbors.numel()))
                arrays.append(SharedArray(all_eids, begin))
        shared = iter(self._share(arrays))
        for key, lists, with_eids in zip(keys, own, has_eids, strict=True):
            indptr = next(shared)
            neighbors = pieces[key] if key in pieces else next(shared)
            eids = next(shared) if with_eids else None
            self._edges.lists[key] = EdgeLists(indptr, neighbors, eids, 0, lists.max_degree)

    def _pieces_in_files(self, keys: Sequence[ListKey]) -> dict[ListKey, SourcePieces]:
        """The neighbours in those lists that all ranks can read from the files of all parts."""
        stored = [self._edges.stored(key) for key in keys]
        here = torch.tensor([edges is not None for edges in stored], dtype=torch.int64)
        all_reduce_(self._state, here, dist.ReduceOp.MIN)
        chosen = {
            key: edges
            for key, edges, is_here in zip(keys, stored, here.tolist(), strict=True)
            if is_here and edges is not None
        }
        if not chosen or self._state.world_size == 1:
            return {}
        nodes = next(iter(chosen.values())).nodes
        column = nodes.column
        texts = gather_texts(self._state, f"{column.digest} {column.path}")
        files = [_sources_in(*text.split(" ", 1)) for text in texts]
        seen = torch.tensor([int(None not in files)])
        all_reduce_(self._state, seen, dist.ReduceOp.MIN)
        if not int(seen):
            return {}
        sizes = all_gather(self._state, torch.tensor([nodes.num_inner, nodes.halo_ids.numel()]))
        inner, num_halo = torch.stack(sizes, 1).tolist()
        (shared,) = self._share([SharedArray(nodes.halo_ids, RangeMap.from_sizes(num_halo).starts)])
        halo_ids = shared.split(num_halo)
        numbers = [(edges.first_edge, edges.num_edges, edges.first) for edges in chosen.values()]
        by_rank = torch.stack(all_gather(self._state, torch.tensor(numbers)), 1).tolist()
        made = {}
        for (key, edges), of_key in zip(chosen.items(), by_rank, strict=True):
            starts = self.ownership.ranges[key[0][0]].starts
            pieces = []
            for rank, (file, (first_edge, count, first)) in enumerate(
                zip(files, of_key, strict=True)
            ):
                sources = edges.sources
                if rank != self._state.rank and file is not None:
                    sources = file.some(first_edge, count).mapped(is_private=False)
                shift = starts[rank] - first
                pieces.append(SourcePiece(sources, inner[rank], shift, halo_ids[rank]))
            made[key] = SourcePieces(pieces, self.ownership.wire_dtype)
        return made


def _sources_in(digest: str, path: str) -> RowsInFiles | None:
    """The sources of a part's edges, in a file of that digest; None where none is seen here."""
    with contextlib.suppress(PartitionFormatError):
        file = TensorFile.open(Path(path))
        if file.blake2b == digest:
            return file.rows()["src"]
    return None


@dataclass
class _StoresOf:
    """Stores of one graph, kept with it: each may be as large as the graph."""

    graph: weakref.ref[Any]
    stores: dict[Any, GraphStore] = field(default_factory=dict)

    def __deepcopy__(self, memo: Any) -> None:
        return None  # the copied graph has stores of its own


def graph_store_of(
    graph: Any, transport: SamplingTransport = "collective", memory_budget: int | None = None
) -> GraphStore:
    """The store to draw from: the same one for the same arguments, made when first asked for.

    Args:
        graph: A `Graph`; a `GraphShardManager` (then collective, and the other arguments are those
            of `choose_graph_store`); a `GraphStore` itself; or what has one, as ``graph_store``.

    Raises:
        TypeError: Something else.
        ValueError: As for `choose_graph_store`.
    """
    if not isinstance(graph, Graph | GraphShardManager):
        graph = getattr(graph, "graph_store", graph)
        if is_graph_store(graph):
            return graph
        raise TypeError(
            "graph must be a GraphShardManager, a Graph or a GraphStore (got "
            f"{type(graph).__name__})"
        )
    of_graph = vars(graph).get(_STORES)
    if not isinstance(of_graph, _StoresOf) or of_graph.graph() is not graph:  # copied from another
        of_graph = vars(graph)[_STORES] = _StoresOf(weakref.ref(graph))
    stores = of_graph.stores
    if isinstance(graph, Graph):
        local = stores.get("local")
        if not isinstance(local, LocalGraphStore) or not local.is_current:
            local = stores["local"] = LocalGraphStore(graph)
        return local
    if graph.world_size == 1:
        transport = "collective"  # which is to say: from its own memory
    if transport not in stores and (transport, memory_budget) not in stores:
        chosen = choose_graph_store(graph, transport, memory_budget)
        kind = "replicated" if isinstance(chosen, ReplicatedGraphStore) else "collective"
        stores[transport, memory_budget] = stores.setdefault(kind, chosen)
    return stores.get(transport) or stores[transport, memory_budget]


def choose_graph_store(
    manager: GraphShardManager,
    transport: SamplingTransport = "auto",
    memory_budget: int | None = None,
) -> CollectiveGraphStore | ReplicatedGraphStore:
    """A store that neighbours are drawn from; every rank must call and gets the same kind.

    Args:
        transport: ``"collective"``: every rank holds its own part, and draws travel.
            ``"replicated"``: every host holds the whole graph once, and draws send nothing.
            ``"auto"``: replicated if that fits the budget.
        memory_budget: For ``"auto"``: bytes that the whole graph may take on a host; of ranks that
            differ the smallest counts. None: a quarter of what is free on the fullest host.

    Raises:
        ValueError: An unknown transport, a negative budget, or a message flow graph; on all ranks.
    """
    with shared_errors(manager.group):
        if transport not in _TRANSPORTS:
            raise ValueError(
                f"transport must be one of {', '.join(_TRANSPORTS)} (got {transport!r})"
            )
        if memory_budget is not None and memory_budget < 0:
            raise ValueError(
                f"memory_budget must be a number of bytes, at least 0 (got {memory_budget})"
            )
    if transport == "auto":
        budget = budget_of(available_memory()) if memory_budget is None else memory_budget
        smallest = int(all_reduce_alike(torch.tensor(budget), "min", group=manager.group))
        fits = fits_replicated(replicated_bytes(manager), smallest)
        transport = "replicated" if fits else "collective"
    if transport == "replicated":
        return ReplicatedGraphStore.of(manager)
    return CollectiveGraphStore.of(manager)


def _num_bytes(array: Tensor) -> int:
    return array.numel() * array.element_size()


def replicated_bytes(manager: GraphShardManager) -> int:
    """Bytes of the whole graph's in-edges and original ids; the same on all ranks. Collective."""
    ownership = Ownership.of(manager)
    width = ownership.wire_dtype.itemsize
    # Where edges are not sorted by destination, their ids are kept as well.
    edges = [manager._structure.edges[etype] for etype in manager.canonical_etypes]
    unordered = torch.tensor([int(not of.by_destination) for of in edges])
    unordered = all_reduce_alike(unordered, "max", group=manager.group)
    size = sum(8 * ownership.ranges[ntype].num_ids for ntype in manager.ntypes)
    halos = [of.nodes.halo_ids for of in edges if type(of) is StoredEdges][:1]
    size += int(all_reduce_alike(torch.tensor(sum(map(_num_bytes, halos))), group=manager.group))
    for etype, has_eids in zip(manager.canonical_etypes, unordered.tolist(), strict=True):
        size += width * (ownership.ranges[etype[2]].num_ids + 1)
        size += width * (1 + has_eids) * ownership.ranges[etype].num_ids
    return size
