# SPDX-License-Identifier: Apache-2.0
"""GraphMethods: functions on graphs that are methods of graphs as well, under the names of DGL.

There is one implementation of each, the function; the method is the same function with the graph
as its first argument. Functions are found when a method is first asked for, since they are built
on the classes that have the methods.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from .message_passing import LocalGraph
from .structure import ALL, is_all

MethodsT = TypeVar("MethodsT", bound="GraphMethods")


class FunctionMethod:
    """A method that is a function of another module, with the graph as its first argument.

    Args:
        module: The module, relative to this package.
        name: The function's name.
    """

    def __init__(self, module: str, name: str) -> None:
        self._module = module
        self._name = name

    def __get__(self, graph: Any, owner: type | None = None) -> Callable[..., Any]:
        function = getattr(importlib.import_module(self._module, __package__), self._name)
        assert callable(function)
        return function if graph is None else functools.partial(function, graph)


class GraphMethods(LocalGraph):
    """Layer of `Graph` and `Block`: transforms, subgraphs, matrices, and changes in place."""

    reverse = FunctionMethod(".transforms", "reverse")
    add_self_loop = FunctionMethod(".transforms", "add_self_loop")
    remove_self_loop = FunctionMethod(".transforms", "remove_self_loop")
    to_simple = FunctionMethod(".transforms", "to_simple")
    subgraph = FunctionMethod(".transforms", "node_subgraph")
    edge_subgraph = FunctionMethod(".transforms", "edge_subgraph")
    in_subgraph = FunctionMethod(".transforms", "in_subgraph")
    out_subgraph = FunctionMethod(".transforms", "out_subgraph")
    to_networkx = FunctionMethod(".convert", "to_networkx")
    _edge_softmax_typed = FunctionMethod(".message_passing", "edge_softmax")
    to_dgl = FunctionMethod(".convert", "to_dgl")

    # ------------------------------------------------------------------ changes in place

    def add_nodes(self, num: int, data: Any = None, ntype: str | None = None) -> None:
        """Add nodes to this graph; see `add_nodes`, which leaves its graph as it is."""
        self._change("add_nodes", num, data, ntype)

    def add_edges(self, u: Any, v: Any, data: Any = None, etype: Any = None) -> None:
        """Add edges to this graph; see `add_edges`, which leaves its graph as it is."""
        self._change("add_edges", u, v, data, etype)

    def remove_nodes(self, nids: Any, ntype: str | None = None, store_ids: bool = False) -> None:
        """Take nodes out of this graph; see `remove_nodes`."""
        self._change("remove_nodes", nids, ntype, store_ids)

    def remove_edges(self, eids: Any, etype: Any = None, store_ids: bool = False) -> None:
        """Take edges out of this graph; see `remove_edges`."""
        self._change("remove_edges", eids, etype, store_ids)

    def _change(self, name: str, *args: Any) -> None:
        function = FunctionMethod(".transforms", name).__get__(self)
        self._become(function(*args))

    # ------------------------------------------------------------------ questions

    def filter_nodes(
        self, predicate: Callable[..., Tensor], nodes: Any = ALL, ntype: str | None = None
    ) -> Tensor:
        """Ids of the nodes for which a function is true.

        Args:
            predicate: From `NodeBatch` to ``[batch]`` or ``[batch, 1]`` truth values.
            nodes: The nodes to ask about.
            ntype: Their type, where there are several.

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
        self, predicate: Callable[..., Tensor], edges: Any = ALL, etype: Any = None
    ) -> Tensor:
        """Ids of the edges for which a function is true; the counterpart of `filter_nodes`.

        Args:
            predicate: From `EdgeBatch` to ``[batch]`` or ``[batch, 1]`` truth values.
            edges: Edge ids, a pair of end points, or all.
            etype: The relation, where there are several.
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
