# SPDX-License-Identifier: Apache-2.0
"""One call of a parallel model: this rank's rows in place of whole arguments, and back."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..._typing import CanonicalEType
from ...comm import anchor
from ...comm.collectives import all_reduce_
from .._edge_index import ShardedEdgeIndex
from .._whole_graph import SplitRows
from ._gradients import JoinedRows, SharedGradients
from ._split_graph import ParallelEdges, ParallelGraph, joined


class ParallelCall:
    """The arguments of one call with this rank's rows in place of whole tensors.

    Args:
        graph: The graph.
        function: What is called; its parameters have names.
        args: Of the call.
        kwargs: Of the call.
    """

    def __init__(
        self, graph: ParallelGraph, function: Any, args: Any, kwargs: dict[str, Any]
    ) -> None:
        self._graph = graph
        self._sets: list[tuple[CanonicalEType, ParallelEdges]] = []
        self._inputs: list[Tensor] = []
        names = list(inspect.signature(function).parameters)[1:]
        named = [*zip(names, args, strict=False), *kwargs.items()]
        for name, value in named:
            self._find_edges(value, name, None)
        if not self._sets:
            raise ValueError(
                f"a call on a graph that spans ranks needs edges among its arguments (got "
                f"{', '.join(names) or 'none'}); pass edge_index, or the data object, to the model"
            )
        names += [""] * (len(args) - len(names))
        self.args = [self._of(value, name, None) for name, value in zip(names, args, strict=False)]
        self.kwargs = {name: self._of(value, name, None) for name, value in kwargs.items()}

    def _items(self, value: Any, name: str, key: Any) -> list[tuple[Any, str, Any]]:
        """What a container has: values, their names, their types of nodes or edges."""
        if isinstance(value, tuple | list):
            return [(item, name, key) for item in value]
        if isinstance(value, Mapping):
            graph = self._graph
            return [
                (item, name if known else str(k), k if known else key)
                for k, item in value.items()
                for known in [k in graph.nodes or k in graph.etypes]
            ]
        if hasattr(value, "stores") and hasattr(value, "to_dict"):
            return [(item, k, store._key) for store in value.stores for k, item in store.items()]
        return []

    def _find_edges(self, value: Any, name: str, key: Any) -> None:
        if isinstance(value, ShardedEdgeIndex):
            raise ValueError(
                "a parallel model takes the whole graph, and shards it; pass the edge_index of the "
                "data object that parallelize was given"
            )
        if isinstance(value, Tensor):
            if value.layout != torch.strided:
                raise ValueError(
                    f"{name or 'an argument'} is a sparse matrix; turn it into an edge_index with "
                    "torch_geometric.utils.to_edge_index"
                )
            if _names_edges(value):
                etype = self._etype(key, name)
                self._sets.append((etype, self._graph.edge_set(value, etype)))
            return
        if type(value).__name__ == "SparseTensor":
            raise ValueError(f"{name or 'an argument'} is a SparseTensor; pass edge_index")
        for item, inner, its_key in self._items(value, name, key):
            self._find_edges(item, inner, its_key)

    def _etype(self, key: Any, name: str) -> CanonicalEType:
        if isinstance(key, tuple) and key in self._graph.etypes:
            return key
        if len(self._graph.etypes) == 1:
            return self._graph.etypes[0]
        raise ValueError(
            f"{name or 'an argument'} names edges of an unknown relation; pass a dictionary with "
            "the relation as key, as data.edge_index_dict is"
        )

    def _of(self, value: Any, name: str, key: Any) -> Any:
        if isinstance(value, Tensor):
            if _names_edges(value):
                return self._graph.edge_set(value, self._etype(key, name)).index
            rows = self._rows(value, name, key)
            if rows is None:
                return value
            found = self._graph.chosen(value, rows)
            if found.requires_grad:
                self._inputs.append(found)
            return found
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self._of(item, name, key) for item in value))
        if isinstance(value, tuple | list):
            return type(value)(self._of(item, name, key) for item in value)
        if isinstance(value, Mapping):
            items = zip(value, self._items(value, name, key), strict=True)
            return {k: self._of(*item) for k, item in items}
        if hasattr(value, "stores") and hasattr(value, "to_dict"):
            return self._of_data(value)
        return value

    def _of_data(self, data: Any) -> Any:
        made, nodes = copy.copy(data), self._graph.nodes
        is_plain = not hasattr(data, "node_types")  # whose only store has no key
        for store in made.stores:
            ntype = next(iter(nodes)) if is_plain else store._key
            for name, value in list(store.items()):
                store[name] = self._of(value, name, store._key)
            if ntype in nodes and (is_plain or "num_nodes" in store):
                store.num_nodes = nodes[ntype].own.numel()
        return made

    def _rows(self, value: Tensor, name: str, key: Any) -> SplitRows | None:
        """How the rows of an argument are split; None for what has no row per node or edge."""
        count = value.shape[0] if value.dim() else -1
        nodes = self._graph.nodes
        if key in nodes:
            return nodes[key] if nodes[key].total == count else None
        sets = [split.rows for etype, split in self._sets if key in (None, etype)]
        of_edges = next((rows for rows in sets if rows.total == count), None)
        if key is not None or (of_edges is not None and "edge" in name):
            return of_edges
        of_nodes = [rows for rows in nodes.values() if rows.total == count]
        if len(of_nodes) > 1:
            raise ValueError(
                f"{name or 'an argument'} of shape {tuple(value.shape)} has as many rows as two "
                "node types; pass a dictionary with the node type as key"
            )
        return of_nodes[0] if of_nodes else of_edges

    # ------------------------------------------------------------------ results

    def gathered(self, out: Any, gradients: SharedGradients) -> Any:
        """What the call gave, with whole tensors in place of this rank's rows; collective."""
        found: list[tuple[Tensor, Any]] = []
        self._find_tensors(out, None, found)
        if not found:
            return out
        choices = [self._choices(key) for _, key in found]
        fits = torch.tensor(
            [
                [tensor.dim() > 0 and tensor.shape[0] == rows.own.numel() for rows in some]
                + [False] * (max(map(len, choices)) - len(some))
                for (tensor, _), some in zip(found, choices, strict=True)
            ],
            dtype=torch.uint8,
        )
        all_reduce_(self._graph.state, fits, dist.ReduceOp.MIN, "parallelize", "agree")
        whole = []
        for (tensor, _), some, fitting in zip(found, choices, fits.bool().tolist(), strict=True):
            rows = next((rows for rows, good in zip(some, fitting, strict=False) if good), None)
            if rows is None:
                raise NotImplementedError(
                    f"a call of a parallel model gave a tensor of shape {tuple(tensor.shape)} "
                    "without a row for each node or edge of this rank, which cannot be put "
                    "together; compute pooled results and losses from the rows, outside of the call"
                )
            whole.append(self._whole(tensor, rows, gradients))
        return self._put(out, iter(whole))

    def _choices(self, key: Any) -> list[SplitRows]:
        nodes = self._graph.nodes
        sets = [split.rows for etype, split in self._sets if key in (None, etype)]
        return [nodes[key]] if key in nodes else [*([] if key else nodes.values()), *sets]

    def _whole(self, own: Tensor, rows: SplitRows, gradients: SharedGradients) -> Tensor:
        if not own.requires_grad:
            return joined(own, rows, self._graph.state)
        # A rank without nodes may not have used an input; its gradient is put together by all.
        own = anchor(own, *self._inputs) if self._inputs else own
        found: Tensor = JoinedRows.apply(own, rows, gradients)
        return found

    def _find_tensors(self, value: Any, key: Any, found: list[tuple[Tensor, Any]]) -> None:
        if isinstance(value, Tensor):
            found.append((value, key))
        for item, _, its_key in self._items(value, "", key):
            self._find_tensors(item, its_key, found)

    def _put(self, value: Any, whole: Iterator[Tensor]) -> Any:
        if isinstance(value, Tensor):
            return next(whole)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(self._put(item, whole) for item in value))
        if isinstance(value, tuple | list):
            return type(value)(self._put(item, whole) for item in value)
        if isinstance(value, Mapping):
            return {k: self._put(item, whole) for k, item in value.items()}
        return value


def _names_edges(value: Tensor) -> bool:
    return value.dim() == 2 and value.shape[0] == 2 and value.dtype in (torch.int64, torch.int32)
