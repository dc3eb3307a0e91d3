# SPDX-License-Identifier: Apache-2.0
"""LocalGraph: the protocol's hooks for graphs whose every edge is in this process.

What `Graph` and `Block` share: the edges of each relation as an `Adjacency`, message passing on
them, questions about single nodes and edges, and moves between devices and id types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._base.typing import CanonicalEType
from ...errors import GraphValueError
from ...function import ReduceFunction
from ...ops import Adjacency, Attention, attend, edge_softmax
from ..frame import Frame, OverlayView
from ..structure import Schema
from ._batched import BatchableGraph
from ._flatten import LocalT, flattened
from ._protocol import ApplyFunction, checked_functions
from ._queries import RelationFacts
from ._relation import RelationData, edge_values, reduce_messages
from ._udf import run_apply


class LocalGraph(BatchableGraph):
    """Base of `Graph` and `Block`: message passing by kernels in this process."""

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
        self._init_protocol(
            schema,
            src_frames,
            dst_frames,
            edge_frames,
            is_block,
            self.relations[0].device,
            self.relations[0].idtype,
        )

    def _sliced(self, relations: list[int], kind: type[LocalT]) -> LocalT:
        """A view of one relation, or several joined into one, as a graph of class ``kind``."""
        if len(relations) > 1:
            return flattened(self, relations, kind)
        (relation,) = relations
        schema = self._schema.single(relation)
        src_frames = [self._src_frames[self._schema.src_of[relation]]]
        dst_frames = src_frames
        if schema.split:
            dst_frames = [self._dst_frames[self._schema.dst_of[relation]]]
        view = object.__new__(kind)
        view._init_local(
            schema,
            [self.relations[relation]],
            src_frames,
            dst_frames,
            [self._edge_frames[relation]],
            self.is_block,
            facts=[self._facts[relation]],
        )
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

    def adjacency(self, etype: Any = None) -> Adjacency:
        """The edges of a relation."""
        return self.relations[self._schema.relation(etype)]

    def _single_adjacency(self) -> Adjacency:
        return self.relations[self._schema.relation(None)]

    def any_zero_in_degree(self, etype: Any = None) -> bool:
        return any(self._has_zero_in_degree(relation) for relation in self._asked(etype))

    def _has_zero_in_degree(self, relation: int) -> bool:
        facts = self._facts[relation]
        if facts.zero_in_degree is None:
            facts.zero_in_degree = bool((self.relations[relation].in_degrees() == 0).any())
        return facts.zero_in_degree

    def has_edges(self, etype: Any = None) -> bool:
        return any(self.relations[relation].num_edges > 0 for relation in self._asked(etype))

    def _asked(self, etype: Any) -> Sequence[int]:
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

    def _reduce(self, relation: int, message_func: Any, reduce_func: Any) -> dict[str, Any]:
        return reduce_messages(self._relation_data(relation), message_func, reduce_func)

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
        message_func: Any,
        reduce_func: Any,
        apply_node_func: ApplyFunction | None,
        etype: Any,
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
