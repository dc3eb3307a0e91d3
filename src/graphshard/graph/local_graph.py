# SPDX-License-Identifier: Apache-2.0
"""LocalGraph: a graph whose every edge is in this process; nearly all that `Graph` and `Block` do.

The edges of each relation as an `Adjacency`, the protocol's hooks on them, questions about single
nodes and edges, the numbers of nodes and edges of a batch's graphs, moves between devices and id
types, and how a graph goes to another process. How graphs are made is in ``_graph.py`` and
``_block.py``, how they are made from other graphs in ``transforms.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from .._base.device import device_of
from .._base.typing import (
    CanonicalEType,
    Device,
    EdgeIds,
    EdgesOrPairs,
    EType,
    Ids,
    NodeIds,
    NormBy,
)
from ..errors import GraphTypeError, GraphValueError
from ..function import ReduceFunction
from ..ops import Adjacency, Attention, attend, edge_softmax
from . import transforms
from .frame import Frame, LazyRows, OverlayView, record_once
from .message_passing import (
    ApplyFunction,
    EdgeFunction,
    MessagePassingGraph,
    NodeFunction,
    RelationData,
    checked_functions,
    edge_values,
    frames_of,
    reduce_messages,
    run_apply,
)
from .message_passing import edge_softmax as graph_edge_softmax
from .structure import (
    ALL,
    EID,
    ETYPE,
    NID,
    NTYPE,
    All,
    Schema,
    check_ids,
    id_tensor,
    is_all,
    joined_name,
    paired,
    read_batch_counts,
    row_positions,
)

if TYPE_CHECKING:
    from dgl import DGLGraph
    from networkx import MultiDiGraph

LocalT = TypeVar("LocalT", bound="LocalGraph")

FORMATS = ("coo", "csr", "csc")


@dataclass
class RelationFacts:
    """Answers that cost a pass over a relation, kept once known and shared by all its views.

    Attributes:
        zero_in_degree: Whether some destination has no in-edge.
        pair_order: Keys ``source * num_dst + destination`` in ascending order, and edge ids in
            that order.
    """

    zero_in_degree: bool | None = None
    pair_order: tuple[Tensor, Tensor] | None = None


class LocalGraph(MessagePassingGraph):
    """Base of `Graph` and `Block`: message passing by kernels in this process.

    A graph that was not batched is a batch of itself alone. Features, moves to another device and
    another id type keep the numbers of a batch; what changes the edges keeps them where it says so.

    Attributes:
        relations: One `Adjacency` per relation, in the order of ``canonical_etypes``.
    """

    relations: list[Adjacency]
    _facts: list[RelationFacts]
    _formats: tuple[str, ...] = FORMATS
    _batch_nodes: dict[str, Tensor] | None = None
    _batch_edges: dict[CanonicalEType, Tensor] | None = None

    def _init_local(
        self,
        schema: Schema,
        relations: Sequence[Adjacency],
        src_frames: list[Frame],
        dst_frames: list[Frame],
        edge_frames: list[Frame],
        is_block: bool,
        facts: list[RelationFacts] | None = None,
    ) -> None:
        self.relations = list(relations)
        self._facts = [RelationFacts() for _ in relations] if facts is None else facts
        like = self.relations[0]
        frames = src_frames, dst_frames, edge_frames
        self._init_protocol(schema, *frames, is_block, like.device, like.idtype)

    def _relation_view(self: LocalT, relations: list[int]) -> LocalT:
        """Several relations are joined into one."""
        if len(relations) > 1:
            return flattened(self, relations, type(self))
        (relation,) = relations
        schema = self._schema.single(relation)
        src_frames = [self._src_frames[self._schema.src_of[relation]]]
        dst_frames = src_frames
        if schema.split:
            dst_frames = [self._dst_frames[self._schema.dst_of[relation]]]
        view = object.__new__(type(self))
        frames = src_frames, dst_frames, [self._edge_frames[relation]]
        facts = [self._facts[relation]]
        view._init_local(schema, [self.relations[relation]], *frames, self.is_block, facts)
        return view

    def _become(self: LocalT, new: LocalT) -> None:
        """Take the structure and features of another graph of this class, in place."""
        self._batch_nodes = self._batch_edges = None
        self.__dict__.update(new.__dict__)

    def _scope_state(self) -> dict[str, Any]:
        return dict(self.__dict__)

    # ------------------------------------------------------------------ structure

    @property
    def _etype2canonical(self) -> dict[str, tuple[str, ...]]:
        """Relation name -> relation, or () where several have the name; DGL's scripts read it."""
        names = self._schema.etypes
        return {
            etype[1]: () if names.count(etype[1]) > 1 else etype for etype in self.canonical_etypes
        }

    def adjacency(self, etype: EType | None = None) -> Adjacency:
        """The edges of a relation."""
        return self.relations[self._schema.relation(etype)]

    def _single_adjacency(self) -> Adjacency:
        return self.relations[self._schema.relation(None)]

    def any_zero_in_degree(self, etype: EType | None = None) -> bool:
        for relation in self._asked(etype):
            facts = self._facts[relation]
            if facts.zero_in_degree is None:
                facts.zero_in_degree = bool((self.relations[relation].in_degrees() == 0).any())
            if facts.zero_in_degree:
                return True
        return False

    def has_edges(self, etype: EType | None = None) -> bool:
        return any(self.relations[relation].num_edges > 0 for relation in self._asked(etype))

    def _asked(self, etype: EType | None) -> Sequence[int]:
        if etype is None:
            return range(len(self.relations))
        return (self._schema.relation(etype),)

    # ------------------------------------------------------------------ message passing

    def _relation_data(self, relation: int) -> RelationData:
        schema = self._schema
        return RelationData(
            self.relations[relation],
            schema.canonical_etypes[relation],
            self._src_frames[schema.src_of[relation]],
            self._dst_frames[schema.dst_of[relation]],
            self._edge_frames[relation],
        )

    def _relation_data_at(
        self, relation: int, eids: Tensor, dst_nodes: Tensor | None
    ) -> RelationData:
        """The edges ``eids`` alone; destinations numbered by place in ``dst_nodes``, if given."""
        schema = self._schema
        adj = self.relations[relation]
        src, dst = (ends.index_select(0, eids) for ends in adj.coo())
        dst_frame: Mapping[str, Any] = self._dst_frames[schema.dst_of[relation]]
        local_dst, num_dst = dst, adj.num_dst
        if dst_nodes is not None:
            local_dst = torch.searchsorted(dst_nodes, dst).to(dst.dtype)
            num_dst = int(dst_nodes.shape[0])
            dst_frame = self._dst_frames[schema.dst_of[relation]].rows(dst_nodes)
        return RelationData(
            Adjacency(src, local_dst, adj.num_src, num_dst, check=False),
            schema.canonical_etypes[relation],
            self._src_frames[schema.src_of[relation]],
            dst_frame,
            self._edge_frames[relation].rows(eids),
            dst_nodes,
            (src, dst, eids),
        )

    def _reduce(self, relation: int, message: EdgeFunction, reduce: NodeFunction) -> dict[str, Any]:
        return reduce_messages(self._relation_data(relation), message, reduce)

    def _edge_values(self, relation: int, func: Any) -> dict[str, Any]:
        return edge_values(self._relation_data(relation), func)

    def _edge_values_at(self, relation: int, func: Any, eids: Tensor) -> dict[str, Any]:
        return edge_values(self._relation_data_at(relation, eids, None), func)

    def _edge_softmax(self, relation: int, logits: Any, norm_by: str) -> Any:
        return edge_softmax(self.relations[relation], logits, norm_by)

    def _attend(self, relation: int, attention: Attention) -> Tensor | None:
        return attend(self.relations[relation], attention)

    def _edge_softmax_joint(
        self, relations: list[int], logits: list[Any], norm_by: str
    ) -> list[Any]:
        chosen = [self.relations[relation] for relation in relations]
        ends = [adj.coo()[1 if norm_by == "dst" else 0] for adj in chosen]
        num_nodes = chosen[0].num_dst if norm_by == "dst" else chosen[0].num_src
        keys = torch.cat(ends)
        joint = Adjacency(torch.zeros_like(keys), keys, 1, num_nodes, check=False)
        weights = edge_softmax(joint, torch.cat(logits), "dst")
        return list(torch.split(weights, [adj.num_edges for adj in chosen]))

    def _update_some(
        self,
        caller: str,
        chosen: Any,
        message_func: EdgeFunction,
        reduce_func: NodeFunction,
        apply_node_func: ApplyFunction | None,
        etype: EType | None,
    ) -> None:
        relation = self._schema.relation(etype)
        dst_type = self._schema.dst_of[relation]
        if caller == "pull":
            dst_nodes = torch.unique(self._node_ids(chosen, "dst", dst_type))
            eids = self._in_edge_ids(relation, dst_nodes)
        else:
            if caller == "push":
                chosen = self.out_edges(chosen, "eid", etype)
            eids = self._edge_ids(chosen, relation)
            dst_nodes = torch.unique(self.relations[relation].coo()[1].index_select(0, eids))
        if dst_nodes.shape[0] == 0:
            return
        message, reduce = checked_functions(message_func, reduce_func)
        data = self._relation_data_at(relation, eids, dst_nodes)
        result: dict[str, Any] = {}
        if eids.shape[0] > 0 or isinstance(reduce, ReduceFunction):
            result = reduce_messages(data, message, reduce)
        if apply_node_func is not None:
            overlay = OverlayView(result, data.dst)
            result = run_apply(apply_node_func, overlay, dst_nodes, data.etype[2])
        self._dst_frames[dst_type]._set_all(result, "dst", dst_nodes)

    def _edge_softmax_typed(self, logits: Any, norm_by: NormBy) -> Any:
        """`edge_softmax` of values by relation, for ``ops.edge_softmax`` with a graph."""
        return graph_edge_softmax(self, logits, norm_by=norm_by)

    # ------------------------------------------------------------------ single nodes and edges

    def in_degrees(self, v: Ids | All = ALL, etype: EType | None = None) -> Any:
        relation = self._schema.relation(etype)
        degrees = self.relations[relation].in_degrees()
        if is_all(v):
            return degrees
        return _like(degrees[self._node_ids(v, "dst", self._schema.dst_of[relation]).long()], v)

    def out_degrees(self, u: Ids | All = ALL, etype: EType | None = None) -> Any:
        relation = self._schema.relation(etype)
        degrees = self.relations[relation].out_degrees()
        if is_all(u):
            return degrees
        return _like(degrees[self._node_ids(u, "src", self._schema.src_of[relation]).long()], u)

    def all_edges(
        self, form: str = "uv", order: str | None = "eid", etype: EType | None = None
    ) -> Any:
        adj = self.relations[self._schema.relation(etype)]
        if order not in ("eid", "srcdst", None):
            raise GraphValueError(f"order must be 'eid' or 'srcdst' (got {order!r})")
        src, dst = adj.coo()
        eids = torch.arange(adj.num_edges, dtype=adj.idtype, device=adj.device)
        if order == "srcdst":
            by_dst = torch.sort(dst, stable=True).indices
            eids = by_dst[torch.sort(src[by_dst], stable=True).indices].to(adj.idtype)
            src, dst = src.index_select(0, eids), dst.index_select(0, eids)
        return _in_form(form, src, dst, eids)

    def in_edges(self, v: Ids, form: str = "uv", etype: EType | None = None) -> Any:
        """In-edges of some nodes, node by node in the order given, each by ascending edge id."""
        relation = self._schema.relation(etype)
        nodes = self._node_ids(v, "dst", self._schema.dst_of[relation])
        return self._edges_in_form(relation, self._in_edge_ids(relation, nodes), form)

    def out_edges(self, u: Ids, form: str = "uv", etype: EType | None = None) -> Any:
        """Out-edges of some nodes, node by node in the order given, each by ascending edge id."""
        relation = self._schema.relation(etype)
        nodes = self._node_ids(u, "src", self._schema.src_of[relation])
        eids = _compressed_edges(self.relations[relation].csr(), nodes)
        return self._edges_in_form(relation, eids, form)

    def predecessors(self, v: int, etype: EType | None = None) -> Tensor:
        """Sources of the in-edges of one node, by ascending edge id."""
        return self.in_edges(_one(v, "v"), "uv", etype)[0]

    def successors(self, v: int, etype: EType | None = None) -> Tensor:
        """Destinations of the out-edges of one node, by ascending edge id."""
        return self.out_edges(_one(v, "v"), "uv", etype)[1]

    def find_edges(self, eid: Ids, etype: EType | None = None) -> tuple[Tensor, Tensor]:
        """(sources, destinations) of edges given by id.

        Raises:
            ValueError: an id is out of range.
        """
        relation = self._schema.relation(etype)
        return self._edges_in_form(relation, self._checked_edge_ids(eid, relation), "uv")

    def has_nodes(self, vid: Ids, ntype: str | None = None) -> Any:
        """Whether nodes with these ids exist; a bool for a number, else a bool tensor.

        Raises:
            ValueError: a negative id.
        """
        side, index = self._schema.node_id(ntype)
        num_nodes = self._frames(side)[index].num_rows
        ids = id_tensor(vid, "node ids", self.idtype, self.device)
        if ids.numel() and int(ids.min()) < 0:
            raise GraphValueError(f"node ids must not be negative (got {int(ids.min())})")
        return _like(ids < num_nodes, vid)

    def has_edges_between(self, u: Ids, v: Ids, etype: EType | None = None) -> Any:
        """Whether there is an edge from each ``u`` to its ``v``; one of the two may be one node.

        Returns:
            A bool for two numbers, else a bool tensor.
        """
        relation, src, dst = self._endpoints(u, v, etype)
        _, counts = self._match(relation, src, dst)
        return _like(counts > 0, u, v)

    def edge_ids(self, u: Ids, v: Ids, return_uv: bool = False, etype: EType | None = None) -> Any:
        """Ids of the edges from each ``u`` to its ``v``; one of the two may be one node.

        Args:
            return_uv: Return all parallel edges, as (sources, destinations, ids), rather than the
                one of lowest id for each pair.

        Raises:
            ValueError: some pair is not joined by an edge (unless ``return_uv``).
        """
        relation, src, dst = self._endpoints(u, v, etype)
        first, counts = self._match(relation, src, dst)
        order = self._pair_order(relation)[1]
        if return_uv:
            eids = order[row_positions(first, counts)].to(self.idtype)
            return src.repeat_interleave(counts), dst.repeat_interleave(counts), eids
        absent = counts == 0
        if bool(absent.any()):
            at = int(absent.nonzero()[0])
            raise GraphValueError(
                f"every pair must be joined by an edge (there is none from {int(src[at])} to "
                f"{int(dst[at])}); ask has_edges_between first"
            )
        return _like(order[first].to(self.idtype), u, v)

    @property
    def is_multigraph(self) -> bool:
        """Whether some pair of nodes is joined by several edges of one relation."""
        sorted_keys = (self._pair_order(relation)[0] for relation in range(len(self.relations)))
        return any(bool((keys[1:] == keys[:-1]).any()) for keys in sorted_keys)

    def adj_tensors(self, fmt: str, etype: EType | None = None) -> tuple[Tensor, ...]:
        """The arrays of one sparse format.

        Args:
            fmt: ``"coo"``: (sources, destinations). ``"csr"``: (indptr, destinations, edge ids) by
                source. ``"csc"``: (indptr, sources, edge ids) by destination. Edge ids are empty
                where the graph was made from these arrays without any: position is the id.

        Raises:
            ValueError: unknown format.
        """
        adj = self.relations[self._schema.relation(etype)]
        if fmt == "coo":
            return adj.coo()
        if fmt not in ("csr", "csc"):
            raise GraphValueError(f"fmt must be 'coo', 'csr' or 'csc' (got {fmt!r})")
        indptr, indices, eids = adj.csr() if fmt == "csr" else adj.csc()
        if eids is None:
            count = 0 if adj.is_given_as(fmt) else adj.num_edges
            eids = torch.arange(count, dtype=adj.idtype, device=adj.device)
        return indptr, indices, eids

    # ------------------------------------------------------------------ inside

    def _node_ids(self, ids: Any, side: str, index: int) -> Tensor:
        frame = self._frames(side)[index]
        checked = id_tensor(ids, "node ids", self.idtype, self.device)
        check_ids(checked, frame.num_rows, "a node id", frame.what)
        return checked

    def _edge_ids(self, edges: Any, relation: int) -> Tensor:
        if isinstance(edges, tuple) and len(edges) == 2:
            etype = self._schema.canonical_etypes[relation]
            return self.edge_ids(_listed(edges[0]), _listed(edges[1]), etype=etype)
        return self._checked_edge_ids(edges, relation)

    def _in_edge_ids(self, relation: int, nodes: Tensor) -> Tensor:
        return _compressed_edges(self.relations[relation].csc(), nodes)

    def _edges_in_form(self, relation: int, eids: Tensor, form: str) -> Any:
        src, dst = self.relations[relation].coo()
        return _in_form(form, src.index_select(0, eids), dst.index_select(0, eids), eids)

    def _endpoints(self, u: Ids, v: Ids, etype: EType | None) -> tuple[int, Tensor, Tensor]:
        relation = self._schema.relation(etype)
        src = self._node_ids(u, "src", self._schema.src_of[relation])
        dst = self._node_ids(v, "dst", self._schema.dst_of[relation])
        return relation, *paired(src, dst)

    def _pair_order(self, relation: int) -> tuple[Tensor, Tensor]:
        """See `RelationFacts`."""
        facts = self._facts[relation]
        if facts.pair_order is None:
            adj = self.relations[relation]
            src, dst = adj.coo()
            keys, eids = torch.sort(src.long() * adj.num_dst + dst.long(), stable=True)
            facts.pair_order = keys, eids
        return facts.pair_order

    def _match(self, relation: int, src: Tensor, dst: Tensor) -> tuple[Tensor, Tensor]:
        """Where each pair's edges begin in `_pair_order`, and how many there are."""
        keys = self._pair_order(relation)[0]
        pair_keys = src.long() * self.relations[relation].num_dst + dst.long()
        first = torch.searchsorted(keys, pair_keys)
        return first, torch.searchsorted(keys, pair_keys, right=True) - first

    def filter_nodes(
        self, predicate: Callable[..., Tensor], nodes: Ids | All = ALL, ntype: str | None = None
    ) -> Tensor:
        """Ids of the nodes for which a function is true.

        Args:
            predicate: From `NodeBatch` to ``[batch]`` or ``[batch, 1]`` truth values.

        Returns:
            Ids in the order of ``nodes``.
        """
        with self.local_scope():
            self.apply_nodes(lambda batch: {"_mask": predicate(batch)}, nodes, ntype)
            mask = self.nodes[ntype].data["_mask"].reshape(-1).bool()
        ids = self.nodes(ntype)
        if not is_all(nodes):
            side, index = self._schema.node_id(ntype)
            ids = self._node_ids(nodes, side, index)
        return ids[mask.index_select(0, ids)]

    def filter_edges(
        self,
        predicate: Callable[..., Tensor],
        edges: EdgesOrPairs | All = ALL,
        etype: EType | None = None,
    ) -> Tensor:
        """Ids of the edges for which a function is true; the counterpart of `filter_nodes`.

        Args:
            predicate: From `EdgeBatch` to ``[batch]`` or ``[batch, 1]`` truth values.
            edges: Edge ids, a pair of end points, or all.
        """
        relation = self._schema.relation(etype)
        with self.local_scope():
            self.apply_edges(lambda batch: {"_mask": predicate(batch)}, edges, etype)
            mask = self._edge_frames[relation]["_mask"].reshape(-1).bool()
        ids = torch.arange(mask.shape[0], dtype=self.idtype, device=self.device)
        if not is_all(edges):
            ids = self._edge_ids(edges, relation)
        return ids[mask.index_select(0, ids)]

    def get_ntype_id_from_src(self, ntype: str | None) -> int:
        """Index of a source node type in ``srctypes``."""
        return self._schema.src_id(ntype)

    def get_ntype_id_from_dst(self, ntype: str | None) -> int:
        """Index of a destination node type in ``dsttypes``."""
        return self._schema.dst_id(ntype)

    # ------------------------------------------------------------------ batches of graphs

    @property
    def batch_size(self) -> int:
        """How many graphs this is."""
        return int(self.batch_num_nodes(self.ntypes[0]).shape[0])

    def batch_num_nodes(self, ntype: str | None = None) -> Tensor:
        """Number of nodes of each graph: ``[batch_size]`` int64."""
        side, index = self._schema.node_id(ntype)
        name = (self._schema.dsttypes if side == "dst" else self._schema.srctypes)[index]
        if self._batch_nodes is not None:
            return self._batch_nodes[name].to(self.device)
        count = self._frames(side)[index].num_rows
        return torch.tensor([count], dtype=torch.int64, device=self.device)

    def batch_num_edges(self, etype: EType | None = None) -> Tensor:
        """Number of edges of each graph: ``[batch_size]`` int64."""
        relation = self._schema.relation(etype)
        if self._batch_edges is not None:
            return self._batch_edges[self._schema.canonical_etypes[relation]].to(self.device)
        count = self._edge_frames[relation].num_rows
        return torch.tensor([count], dtype=torch.int64, device=self.device)

    def set_batch_num_nodes(self, val: Any) -> None:
        """Say how many nodes each graph has, after a change that lost it; set the edges as well.

        Args:
            val: ``[batch_size]`` integers, or node type -> such a tensor.

        Raises:
            TypeError: a single tensor for several types.
            ValueError: a type is missing, lengths differ, or a number is negative.
        """
        self._batch_nodes = read_batch_counts(val, self.ntypes, "nodes")

    def set_batch_num_edges(self, val: Any) -> None:
        """Say how many edges each graph has; the counterpart of `set_batch_num_nodes`."""
        if isinstance(val, dict):
            val = {self.to_canonical_etype(etype): counts for etype, counts in val.items()}
        self._batch_edges = read_batch_counts(val, self.canonical_etypes, "edges")

    # ------------------------------------------------------------------ transforms

    # Each is the function of that name, with the graph as its first argument.

    reverse = transforms.reverse
    add_self_loop = transforms.add_self_loop
    remove_self_loop = transforms.remove_self_loop
    to_simple = transforms.to_simple
    subgraph = transforms.node_subgraph
    edge_subgraph = transforms.edge_subgraph
    in_subgraph = transforms.in_subgraph
    out_subgraph = transforms.out_subgraph

    def to_networkx(
        self: Any,
        node_attrs: Sequence[str] | None = None,
        edge_attrs: Sequence[str] | None = None,
    ) -> MultiDiGraph:
        """NetworkX graph of this graph; see `graphshard.graph.to_networkx`."""
        from .convert import to_networkx  # which is built on this class

        return to_networkx(self, node_attrs, edge_attrs)

    def to_dgl(self: Any) -> DGLGraph:
        """DGL's graph of this graph; see `graphshard.graph.to_dgl`."""
        from .convert import to_dgl

        return to_dgl(self)

    # ------------------------------------------------------------------ changes in place

    def add_nodes(
        self: Any, num: int, data: Mapping[str, Tensor] | None = None, ntype: str | None = None
    ) -> None:
        """Add nodes to this graph; see `add_nodes`, which leaves its graph as it is."""
        self._become(transforms.add_nodes(self, num, data, ntype))

    def add_edges(
        self: Any,
        u: Ids,
        v: Ids,
        data: Mapping[str, Tensor] | None = None,
        etype: EType | None = None,
    ) -> None:
        """Add edges to this graph; see `add_edges`, which leaves its graph as it is."""
        self._become(transforms.add_edges(self, u, v, data, etype))

    def remove_nodes(
        self: Any, nids: NodeIds, ntype: str | None = None, store_ids: bool = False
    ) -> None:
        """Take nodes out of this graph; see `remove_nodes`."""
        self._become(transforms.remove_nodes(self, nids, ntype, store_ids))

    def remove_edges(
        self: Any, eids: EdgeIds, etype: EType | None = None, store_ids: bool = False
    ) -> None:
        """Take edges out of this graph; see `remove_edges`."""
        self._become(transforms.remove_edges(self, eids, etype, store_ids))

    # ------------------------------------------------------------------ devices, id types, formats

    def _with_relations(self: LocalT, relations: list[Adjacency]) -> LocalT:
        new = self.local_var()
        new.relations = relations
        new._facts = [RelationFacts(facts.zero_in_degree) for facts in self._facts]
        new.device, new.idtype = relations[0].device, relations[0].idtype
        return new

    def to(self: LocalT, device: Device | None, non_blocking: bool = False) -> LocalT:
        """The same graph with edges and features on ``device``; itself if it is there already.

        Args:
            device: Where to; None leaves the graph where it is.
            non_blocking: As for tensors: copies from page-locked memory to a GPU are only begun,
                and come before whatever is launched later on the current stream. A copy to the CPU
                is always waited for, since nothing would say when its values may be read.

        Raises:
            TypeError: A field is a deferred value, which cannot move.
        """
        if device is None:
            return self
        target = device_of(device)
        if target == self.device:
            return self
        begun = non_blocking and target.type != "cpu"
        return self._copied(lambda array: array.to(target, non_blocking=begun))

    def _copied(self: LocalT, change: Callable[[Any], Any]) -> LocalT:
        """A graph with ``change`` of every array and every field, which may be lazy."""
        new = self._with_relations([adj.map(change) for adj in self.relations])
        new._enter_scope(lambda frame: frame.map(change, new.device))
        return new

    def cpu(self: LocalT) -> LocalT:
        """The same graph on the CPU."""
        return self.to("cpu")

    def astype(self: LocalT, idtype: torch.dtype) -> LocalT:
        """The same graph with ids of ``idtype``; features are left as they are.

        Raises:
            TypeError: not torch.int32 or torch.int64.
            ValueError: a count does not fit in 32 bits.
        """
        relations = [adj.astype(idtype) for adj in self.relations]
        return self if idtype == self.idtype else self._with_relations(relations)

    def formats(self: LocalT, formats: Any = None) -> Any:
        """Which sparse formats exist, or this graph with the named ones alone.

        Args:
            formats: None, or one or several of ``"coo"``, ``"csc"``, ``"csr"``. Those that exist
                are kept; where none does, the first of them, in the order coo, csr, csc, is built.
                A format that is left out is still built when a call needs it, but not counted.

        Returns:
            Without ``formats`` a dictionary of the lists ``"created"`` and ``"not created"``;
            else a graph with its own structure and the same features.

        Raises:
            ValueError: an unknown format.
        """
        if formats is None:
            built = [adj.formats() for adj in self.relations]
            created = [name for name in self._formats if all(each[name] for each in built)]
            missing = [name for name in self._formats if name not in created]
            return {"created": created, "not created": missing}
        asked_formats = {formats} if isinstance(formats, str) else set(formats)
        if not asked_formats or not asked_formats <= set(FORMATS):
            raise GraphValueError(f"formats must be among 'coo', 'csr', 'csc' (got {formats!r})")
        names = tuple(name for name in FORMATS if name in asked_formats)
        new = self._with_relations([adj.restricted(names) for adj in self.relations])
        new._formats = names
        return new

    def create_formats_(self) -> None:
        """Build all sparse formats that the graph may have now, so that no later call has to."""
        for adj in self.relations:
            for name in self._formats:
                getattr(adj, name)()

    # ------------------------------------------------------------------ page-locked memory

    def is_pinned(self) -> bool:
        """Whether the edges are in page-locked memory, from where a GPU reads them fastest."""
        return all(array.is_pinned() for adj in self.relations for array in adj.coo())

    def pin_memory(self: LocalT) -> LocalT:
        """A copy in page-locked memory, from where copies to a GPU run beside other work.

        Fields that have not been gathered yet stay so. ``torch.utils.data.DataLoader`` calls this
        on batches that are graphs, with its ``pin_memory=True``.

        Raises:
            ValueError: the graph is on a GPU.
            RuntimeError: torch has no GPU to lock memory for.
        """
        self._check_on_cpu()
        return self._copied(_pinned)

    def pin_memory_(self: LocalT) -> LocalT:
        """Move edges and features to page-locked memory, in place; for graphs on the CPU.

        Raises:
            ValueError: the graph is on a GPU.
            RuntimeError: torch has no GPU to lock memory for.
        """
        self._check_on_cpu()
        return self._replaced(lambda array: array.pin_memory())

    def _check_on_cpu(self) -> None:
        if self.device.type != "cpu":
            raise GraphValueError(f"only a graph on the CPU can be pinned (it is on {self.device})")

    def unpin_memory_(self: LocalT) -> LocalT:
        """Undo `pin_memory_`, in place; nothing happens to a graph that is not pinned."""
        if self.device.type != "cpu" or not self.is_pinned():
            return self
        return self._replaced(lambda array: array.clone() if array.is_pinned() else array)

    def record_stream(self: LocalT, stream: torch.Stream) -> LocalT:
        """Say that a stream uses the graph, as ``torch.Tensor.record_stream`` does of a tensor.

        The memory of edges and features is then not used for anything else before what has been
        launched on that stream is done, wherever the graph is dropped. Needed for a graph that was
        made on another stream; the loaders do it.

        Raises:
            ValueError: the graph is on the CPU, where there are no streams.
        """
        if self.device.type == "cpu":
            raise GraphValueError("record_stream is for graphs on a GPU (this one is on the CPU)")
        recorded: dict[int, Tensor] = {}
        for adj in self.relations:
            adj.map(lambda array: record_once(array, stream, recorded))
        for frame in (*self._src_frames, *self._dst_frames, *self._edge_frames):
            frame.record_stream(stream, recorded)
        return self

    def _replaced(self: LocalT, change: Callable[[Tensor], Tensor]) -> LocalT:
        self.relations[:] = [adj.map(change) for adj in self.relations]
        frames = {id(f): f for f in (*self._src_frames, *self._dst_frames, *self._edge_frames)}
        for frame in frames.values():
            for name in frame:
                frame[name] = change(frame[name])
        return self

    # Last, because below them ``int`` is no longer the type.

    def int(self: LocalT) -> LocalT:
        """The same graph with int32 ids."""
        return self.astype(torch.int32)

    def long(self: LocalT) -> LocalT:
        """The same graph with int64 ids."""
        return self.astype(torch.int64)


def edge_frame(etype: CanonicalEType, adj: Adjacency) -> Frame:
    """An empty frame for the edges of a relation."""
    return Frame(adj.num_edges, adj.device, f"edges of relation {etype}", "edge")


def check_relations(
    num_src_nodes: Mapping[str, int],
    num_dst_nodes: Mapping[str, int],
    relations: Mapping[CanonicalEType, Adjacency],
) -> None:
    """Raise ValueError unless the relations fit the node counts and each other."""
    if not relations:
        raise GraphValueError(
            "a graph needs at least one relation (got none); it may have no edges"
        )
    for etype, adj in relations.items():
        src, _, dst = etype
        if src not in num_src_nodes or dst not in num_dst_nodes:
            raise GraphValueError(
                f"relation {etype} names a node type whose number of nodes is missing"
            )
        if (adj.num_src, adj.num_dst) != (num_src_nodes[src], num_dst_nodes[dst]):
            raise GraphValueError(
                f"the edges of relation {etype} must be between {num_src_nodes[src]} and "
                f"{num_dst_nodes[dst]} nodes (got {adj.num_src} and {adj.num_dst})"
            )
    if len({(adj.idtype, adj.device) for adj in relations.values()}) > 1:
        kinds = {etype: (adj.idtype, str(adj.device)) for etype, adj in relations.items()}
        raise GraphValueError(f"all relations must have one idtype and one device (got {kinds})")


def _in_form(form: str, src: Tensor, dst: Tensor, eids: Tensor) -> Any:
    if form == "uv":
        return src, dst
    if form == "eid":
        return eids
    if form == "all":
        return src, dst, eids
    raise GraphValueError(f"form must be 'uv', 'eid' or 'all' (got {form!r})")


def _compressed_edges(compressed: tuple[Tensor, Tensor, Tensor | None], nodes: Tensor) -> Tensor:
    """Ids of the edges in the rows ``nodes`` of a compressed format."""
    indptr, _, eids = compressed
    first = indptr.index_select(0, nodes)
    counts = indptr[1:].index_select(0, nodes) - first
    positions = row_positions(first, counts).to(indptr.dtype)
    return positions if eids is None else eids.index_select(0, positions)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) or (
        getattr(value, "ndim", None) == 0 and not isinstance(value, Tensor)
    )


def _like(answer: Tensor, *asked: Any) -> Any:
    """A Python number where every question was one."""
    return answer.item() if all(map(_is_number, asked)) else answer


def _listed(ids: Any) -> Any:
    return [ids] if _is_number(ids) else ids


def _one(node: Any, name: str) -> Any:
    if not _is_number(node) and getattr(node, "numel", lambda: 0)() != 1:
        raise GraphTypeError(f"{name} must be one node id (got {node!r})")
    return node


def _pinned(column: Any) -> Any:
    return column.contiguous().pin_memory() if isinstance(column, Tensor) else column.pin_memory()


def moved_together(
    graphs: Sequence[LocalGraph],
    device: torch.device,
    move: Callable[[list[Tensor]], list[Tensor]],
) -> list[LocalGraph]:
    """Graphs on another device, all of whose arrays are moved by one call.

    Fields that have not been gathered yet stay so; a GPU gathers those of tables that it can read.

    Args:
        move: From arrays, no two of them the same, to the same arrays on ``device``.
    """
    arrays: dict[int, Tensor] = {}

    def note(array: Any) -> Any:
        held = array if isinstance(array, Tensor) else array.gathered
        if held is not None:
            arrays[id(held)] = held
        return array

    for g in graphs:
        g._copied(note)
    there = dict(zip(arrays, move(list(arrays.values())), strict=True))

    def place(array: Any) -> Any:
        held = array if isinstance(array, Tensor) else array.gathered
        return array.read_there(device, there) if held is None else there[id(held)]

    return [g._copied(place) for g in graphs]


def flattened(g: LocalGraph, relations: Sequence[int], kind: type[LocalT]) -> LocalT:
    """Join several relations into one.

    Args:
        relations: Indices of the relations, ascending.

    Returns:
        A graph of one relation, with copies of the fields that all joined types have in common.
        Types are named by their parts, sorted and joined by ``+``.
    """
    schema = g._schema
    src_ids = sorted({schema.src_of[r] for r in relations})
    dst_ids = sorted({schema.dst_of[r] for r in relations})
    shared = not schema.split and src_ids == dst_ids
    src_start, num_src = _starts(g._src_frames, src_ids)
    dst_start, num_dst = _starts(g._dst_frames, dst_ids)
    sources, destinations = [], []
    for relation in relations:
        ends = g.relations[relation].coo()
        sources.append(ends[0] + src_start[schema.src_of[relation]])
        destinations.append(ends[1] + dst_start[schema.dst_of[relation]])
    adj = Adjacency(torch.cat(sources), torch.cat(destinations), num_src, num_dst, check=False)
    src_name = joined_name(schema.srctypes[i] for i in src_ids)
    dst_name = joined_name(schema.dsttypes[i] for i in dst_ids)
    etype = (src_name, joined_name(schema.etypes[r] for r in relations), dst_name)

    src = [_joined(g._src_frames, src_ids, f"nodes of type {src_name!r}", NTYPE, NID, g)]
    dst = src
    if not shared:
        dst = [_joined(g._dst_frames, dst_ids, f"nodes of type {dst_name!r}", NTYPE, NID, g)]
    edge = [_joined(g._edge_frames, relations, f"edges of relation {etype}", ETYPE, EID, g)]
    new = object.__new__(kind)
    new._init_local(Schema.of_relation(etype, not shared), [adj], src, dst, edge, g.is_block)
    return new


def _starts(frames: Sequence[Frame], ids: Sequence[int]) -> tuple[dict[int, int], int]:
    """Where the rows of each frame start if they come one after the other, and how many rows."""
    *starts, total = accumulate((frames[i].num_rows for i in ids), initial=0)
    return dict(zip(ids, starts, strict=True)), total


def _joined(
    frames: Sequence[Frame],
    ids: Sequence[int],
    what: str,
    type_field: str,
    id_field: str,
    g: LocalGraph,
) -> Frame:
    """Frames end to end: the fields that all of them have, and where each row came from."""
    chosen = [frames[i] for i in ids]
    joined = Frame(sum(frame.num_rows for frame in chosen), g.device, what, chosen[0].default_view)
    filled = [frame for frame in chosen if frame.num_rows > 0] or chosen[:1]
    for name in filled[0]:
        if not all(name in frame for frame in filled):
            continue
        values: list[Any] = [frame[name] for frame in filled]
        kinds = {(tuple(value.shape[1:]), value.dtype) for value in values}
        if len(kinds) > 1:
            raise GraphValueError(
                f"field {name!r} must have one row shape and dtype on {what} to be joined (got "
                f"{sorted(map(str, kinds))}); rename or delete it on some"
            )
        joined[name] = torch.cat(values)
    like: Any = {"dtype": g.idtype, "device": g.device}
    counts = [frame.num_rows for frame in chosen]
    joined[type_field] = torch.cat(
        [torch.full((n,), i, **like) for i, n in zip(ids, counts, strict=True)]
    )
    joined[id_field] = torch.cat([torch.arange(n, **like) for n in counts])
    return joined


def parts_to_send(graph: LocalGraph) -> tuple[Any, tuple[type[LocalGraph]], dict[str, Any]]:
    """What ``torch.multiprocessing`` sends of a graph.

    A graph goes through queues and pipes, and as an argument of ``spawn``, in parts: its types and
    numbers as they are, its tensors in shared memory, where torch puts every tensor that a process
    sends. So sender and receiver share edges and features, and nothing is copied. This takes the
    pickler of ``multiprocessing`` alone, which has a table of its own: pickling to a file goes on
    to be refused.
    """
    for frames in frames_of(graph):
        for frame in frames:
            for name in frame:
                if isinstance(frame.unread(name), LazyRows):
                    frame[name] = frame[name]  # the rows alone, not the column they come from
    return object.__new__, (type(graph),), dict(graph.__dict__)
