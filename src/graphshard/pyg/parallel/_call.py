# SPDX-License-Identifier: Apache-2.0
"""One call of a parallel model: this rank's rows in place of whole arguments, and back."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..._base.typing import CanonicalEType
from ...comm import anchor
from ...comm.collectives import all_reduce_
from .._edge_index import ShardedEdgeIndex
from .._whole_graph import SplitRows, column_of, is_matrix, names_edges
from ._gradients import JoinedRows, SharedGradients
from ._split_graph import ParallelEdges, ParallelGraph, joined, names_nodes


class ParallelCall:
    """The arguments of one call with this rank's rows in place of whole tensors.

    Args:
        graph: The graph.
        function: What is called; its parameters have names.
        args: Of the call.
        kwargs: Of the call.
        data: The data object that was split, of which the model may read more than it is given;
            None if there is none any more.
    """

    def __init__(
        self, graph: ParallelGraph, function: Any, args: Any, kwargs: dict[str, Any], data: Any
    ) -> None:
        self._graph, self._data = graph, data
        self._sets: list[tuple[CanonicalEType, ParallelEdges]] = []
        self._inputs: list[Tensor] = []
        names = list(inspect.signature(function).parameters)[1:]
        named = [*zip(names, args, strict=False), *kwargs.items()]
        for name, value in named:
            self._find_edges(value, name, None)
        self._find_edges(data, "data", None)
        if not self._sets:
            raise ValueError(
                f"a call on a graph that spans ranks needs edges among its arguments (got "
                f"{', '.join(names) or 'none'}); pass edge_index, or the data object, to the model"
            )
        names += [""] * (len(args) - len(names))
        self.args = [self._argument(value, name) for name, value in zip(names, args, strict=False)]
        self.kwargs = {name: self._argument(value, name) for name, value in kwargs.items()}
        self._own_data: Any = None if data is None else self._of_data(data)

    @contextmanager
    def own_rows_of_data(self) -> Iterator[None]:
        """The data object has this rank's rows for a while, for models that read it themselves."""
        if self._data is None:
            yield
            return
        stores: list[tuple[Any, Any]] = [(s, s.to_dict()) for s in self._data.stores]
        for (store, _), own in zip(stores, self._own_data.stores, strict=True):
            store.update(own.to_dict())
        try:
            yield
        finally:
            for store, whole in stores:
                for name in [name for name in store.keys() if name not in whole]:  # noqa: SIM118
                    del store[name]
                store.update(whole)

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
        if self._is_adjacency(value, name, key):
            etype = self._etype(key, name)
            ends, _ = self._graph.edges_of_matrix(value, name or "an argument", etype)
            self._sets.append((etype, self._graph.edge_set(ends, etype)))
        elif isinstance(value, Tensor):
            if names_nodes(value):
                etype = self._etype(key, name)
                self._sets.append((etype, self._graph.edge_set(value, etype)))
            return
        for item, inner, its_key in self._items(value, name, key):
            self._find_edges(item, inner, its_key)

    def _is_adjacency(self, value: Any, name: str, key: Any) -> bool:
        """Whether a value is a sparse adjacency matrix, and not sparse features."""
        if not is_matrix(value):
            return False
        if key in self._graph.etypes or not isinstance(value, Tensor) or value.dim() < 2:
            return True
        if "adj" in name or "edge" in name:
            return True
        is_feature = key in self._graph.nodes or name.startswith("x") or "feat" in name
        return not is_feature and value.shape[0] == value.shape[1]

    def _etype(self, key: Any, name: str) -> CanonicalEType:
        if isinstance(key, tuple) and key in self._graph.etypes:
            return key
        if len(self._graph.etypes) == 1:
            return self._graph.etypes[0]
        # As edge_label_index, which RandomLinkSplit gives one relation.
        stores = [] if self._data is None or not name else self._data.edge_stores
        having = [store._key for store in stores if name in store]
        if len(having) == 1 and having[0] in self._graph.etypes:
            etype: CanonicalEType = having[0]
            return etype
        raise ValueError(
            f"{name or 'an argument'} names edges of an unknown relation; pass a dictionary with "
            "the relation as key, as data.edge_index_dict is, or set it on its relation of the "
            "data object, under the name that it has in the model"
        )

    def _of(self, value: Any, name: str, key: Any) -> Any:
        if self._is_adjacency(value, name, key):
            etype = self._etype(key, name)
            ends, values = self._graph.edges_of_matrix(value, name, etype)
            edges = self._graph.edge_set(ends, etype)
            if values is not None:
                values = self._graph.chosen(values, edges.rows)
                if values.requires_grad:
                    self._inputs.append(values)
            return edges.index.as_matrix(values, has_loops=edges.has_loops)
        if isinstance(value, Tensor):
            if names_nodes(value):
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

    def _argument(self, value: Any, name: str) -> Any:
        """What takes the place of an argument.

        Raises:
            NotImplementedError: Numbers of nodes that may be more than a mask: an order of nodes,
                which ranks do not have.
        """
        is_index = isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32)
        says_nodes = re.search(r"mask|(^|_)(idx|index|ids?|indices|nodes)$", name) is not None
        if not is_index or value.dim() != 1 or not says_nodes:
            return self._of(value, name, None)
        if self._rows(value, name, None) is not None:
            return self._of(value, name, None)
        nodes = list(self._graph.nodes.values())
        if "mask" not in name or len(nodes) > 1:
            raise NotImplementedError(
                f"{name} of shape {tuple(value.shape)} has numbers of nodes of the whole graph, "
                "of which a rank computes some; index what the model gives, or pass a mask with an "
                "entry for each node"
            )
        mask = torch.zeros(nodes[0].total, dtype=torch.bool, device=value.device)
        mask[value] = True
        return self._graph.chosen(mask, nodes[0])

    def _of_data(self, data: Any) -> Any:
        made, nodes = copy.copy(data), self._graph.nodes
        is_plain = not hasattr(data, "node_types")  # whose only store has no key
        for store in made.stores:
            ntype = next(iter(nodes)) if is_plain else store._key
            for name, value in list(store.items()):
                store[name] = self._of_store(made, store, name, value)
            if ntype in nodes and (is_plain or "num_nodes" in store):
                store.num_nodes = nodes[ntype].own.numel()
        return made

    def _of_store(self, data: Any, store: Any, name: str, value: Any) -> Any:
        """A value of a data object; lists and arrays travel with their nodes or edges, too."""
        is_plain = not hasattr(data, "node_types")
        if isinstance(value, list | tuple | np.ndarray) and not names_edges(name):
            nodes = next(iter(self._graph.nodes.values())) if is_plain else None
            nodes = self._graph.nodes.get(store._key, nodes)
            edges = self._edges_of(None if is_plain else store._key)
            column = column_of(
                data,
                store,
                name,
                value,
                None if nodes is None else nodes.total,
                None if edges is None else edges.total,
            )
            if column is not None:
                rows = nodes if column[0] == "node" else edges
                assert rows is not None
                return column[1].rows(rows.own)
        return self._of(value, name, store._key)

    def _edges_of(self, etype: Any) -> SplitRows | None:
        """Rows of the edges that a call brings of a relation; None is the only one."""
        sets = [edges.rows for key, edges in self._sets if etype in (None, key)]
        return sets[0] if sets else None

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

    def gathered_state(
        self, before: Mapping[tuple[nn.Module, str], Any], gradients: SharedGradients
    ) -> dict[tuple[nn.Module, str], tuple[Tensor, Tensor]]:
        """Whole tensors where the call has set attributes of modules to this rank's rows.

        As VGAE's ``encode`` does, for a loss that is computed after it. Collective.

        Args:
            before: `tensors_of` the model before the call.
            gradients: Of the model's parameters.

        Returns:
            Module and name to the whole tensor, which is set now, and this rank's rows.
        """
        model = gradients.model
        found = [
            (place, value) for place, value in tensors_of(model) if before.get(place) is not value
        ]
        rows = self._fitting([(value, None) for _, value in found])
        made = {}
        for ((module, name), own), split in zip(found, rows, strict=True):
            if split is None:
                if own.requires_grad:
                    raise self._not_rows(own, f"kept in {type(module).__name__}.{name}, ")
                continue
            whole = self._whole(own, split, gradients)
            setattr(module, name, whole)
            made[module, name] = whole, own
        return made

    def gathered(self, out: Any, gradients: SharedGradients) -> Any:
        """What the call gave, with whole tensors in place of this rank's rows; collective."""
        found: list[tuple[Tensor, Any]] = []
        self._find_tensors(out, None, found)
        if not found:
            return out
        whole = []
        for (tensor, _), rows in zip(found, self._fitting(found), strict=True):
            if rows is None:
                raise self._not_rows(tensor, "")
            whole.append(self._whole(tensor, rows, gradients))
        return self._put(out, iter(whole))

    def _fitting(self, found: Sequence[tuple[Tensor, Any]]) -> list[SplitRows | None]:
        """What the rows of each tensor are, on all ranks; collective."""
        if not found:
            return []
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
        return [
            next((rows for rows, good in zip(some, fitting, strict=False) if good), None)
            for some, fitting in zip(choices, fits.bool().tolist(), strict=True)
        ]

    def _not_rows(self, tensor: Tensor, where: str) -> NotImplementedError:
        return NotImplementedError(
            f"a call of a parallel model gave a tensor of shape {tuple(tensor.shape)}, {where}"
            "without a row for each node or edge of this rank, which cannot be put "
            "together; compute pooled results and losses from the rows, outside of the "
            "call, and have the model take tensors from its arguments or from the data "
            "object that parallelize was given, because others are whole within a call"
        )

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


def tensors_of(model: nn.Module) -> Iterator[tuple[tuple[nn.Module, str], Tensor]]:
    """Module and name of the tensors that a model keeps as plain attributes.

    What a layer keeps is its cache, for its next call.
    """
    for module in model.modules():
        if not hasattr(module, "propagate"):
            for name, value in list(vars(module).items()):
                if type(value) is Tensor:
                    yield (module, name), value
