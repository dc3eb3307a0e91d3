# SPDX-License-Identifier: Apache-2.0
"""RemoteFeatureStore, RemoteGraphStore: a graph in parts as PyG's pair of stores.

Ids are those of the graph before it was partitioned. What PyG's own loaders need of the pair goes
over one exchange for a batch; whole tensors and whole edge lists can be read as well, and are as
large as the graph. Both are read-only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import FeatureStore, GraphStore, TensorAttr
from torch_geometric.data.graph_store import EdgeAttr, EdgeLayout

from ..._base.typing import CanonicalEType
from ...sampling import DrawOptions, NeighborRequest
from ._graphs import source_of
from ._hops import eids_of
from ._sources import Kind, SamplingSource

_CHUNK = 1 << 18


class RemoteFeatureStore(FeatureStore):
    """Features of a graph in parts, as PyG's ``FeatureStore``.

    Over a graph that spans ranks every call that reads rows is collective: all ranks make it, with
    any ids. PyG's loaders do so once for each batch, with all node features together.

    Args:
        graph: As for `HopSampler`.

    Raises:
        TypeError: ``graph`` is nothing to sample from.
    """

    source: SamplingSource

    def __init__(self, graph: Any) -> None:
        super().__init__()
        self.source = source_of(graph)

    def _kind(self, attr: TensorAttr) -> Kind:
        group = attr.group_name if attr.is_set("group_name") else None
        kinds: list[Kind] = [*self.source.ntypes, *self.source.etypes]
        if not self.source.is_typed:  # its edges have no name, so their columns go by theirs
            kinds = [k for k in kinds if attr.attr_name in self.source.columns(k)] or kinds
            return kinds[0]
        kind = self.source.kind(group)
        if kind not in kinds:
            raise KeyError(f"no node type or relation {group!r}; there are {kinds}")
        return kind

    def _checked(self, attr: TensorAttr) -> Kind:
        kind = self._kind(attr)
        if attr.attr_name not in self.source.columns(kind):
            raise KeyError(
                f"no feature {attr.attr_name!r} of {kind!r}; there are {self.source.columns(kind)}"
            )
        return kind

    def _ids(self, kind: Kind, index: Any) -> Tensor:
        """Ids before partitioning; all of them for None."""
        count = self.source.count(kind)
        if index is None:
            return torch.arange(count)
        if isinstance(index, slice):
            return torch.arange(count)[index]
        if isinstance(index, int):
            return torch.arange(count)[index].view(1)
        ids = torch.as_tensor(index)
        if ids.dtype == torch.bool:
            ids = ids.nonzero().view(-1)
        return ids

    def _get_tensor(self, attr: TensorAttr) -> Tensor:
        return self._multi_get_tensor([attr])[0]

    def _multi_get_tensor(self, attrs: list[TensorAttr]) -> list[Tensor]:
        wanted: list[tuple[Kind, Sequence[str], Tensor]] = []
        for attr in attrs:
            kind = self._checked(attr)
            ids = self.source.stored(kind, self._ids(kind, attr.index))
            wanted.append((kind, [attr.attr_name], ids))
        rows = [columns[0] for columns in self.source.fetch(wanted)]
        as_arrays: list[Any] = [
            row.cpu().numpy() if isinstance(attr.index, np.ndarray) else row
            for attr, row in zip(attrs, rows, strict=True)
        ]
        return as_arrays

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...] | None:
        kind = self._kind(attr)
        if attr.attr_name not in self.source.columns(kind):
            return None
        none = torch.empty(0, dtype=torch.int64)
        row = self.source.fetch([(kind, [attr.attr_name], none)])[0][0]
        count = self.source.count(kind)
        return (count, *row.shape[1:])

    def get_all_tensor_attrs(self) -> list[TensorAttr]:
        """All node features; PyG's loaders ask for them by the nodes of a batch."""
        return [
            TensorAttr(ntype if self.source.is_typed else None, name)
            for ntype in self.source.ntypes
            for name in self.source.columns(ntype)
        ]

    def _put_tensor(self, tensor: Any, attr: TensorAttr) -> NoReturn:
        raise NotImplementedError(
            "features of a graph in parts are read here; set them on the sharded data, or write to "
            "a DistTensor, and make the store again"
        )

    def _remove_tensor(self, attr: TensorAttr) -> NoReturn:
        raise NotImplementedError("features of a graph in parts are only read here")

    def __len__(self) -> int:
        return len(self.get_all_tensor_attrs())


class RemoteGraphStore(GraphStore):
    """Edges of a graph in parts, as PyG's ``GraphStore``.

    `HopSampler` does not read them through this store; it draws where the edges are. Reading an
    ``edge_index`` brings all edges of a relation here, in their order before partitioning. Over a
    graph that spans ranks it is collective.

    Args:
        graph: As for `HopSampler`.

    Raises:
        TypeError: ``graph`` is nothing to sample from.
    """

    source: SamplingSource

    def __init__(self, graph: Any) -> None:
        super().__init__()
        self.source = source_of(graph)

    def get_all_edge_attrs(self) -> list[EdgeAttr]:
        """One for each relation, in coordinates."""
        source = self.source
        return [
            EdgeAttr(
                etype if source.is_typed else None,
                EdgeLayout.COO,
                False,
                (source.count(etype[0]), source.count(etype[2])),
            )
            for etype in source.etypes
        ]

    def _get_edge_index(self, edge_attr: EdgeAttr) -> tuple[Tensor, Tensor] | None:
        etype = edge_attr.edge_type
        etype = self.source.etypes[0] if etype is None else tuple(etype)
        if edge_attr.layout != EdgeLayout.COO or etype not in self.source.etypes:
            return None
        return self.ends(etype)

    def ends(self, etype: CanonicalEType) -> tuple[Tensor, Tensor]:
        """Sources and destinations of all edges of a relation, by ids before partitioning."""
        source = self.source
        num_nodes, num_edges = source.count(etype[2]), source.count(etype)
        src = torch.empty(num_edges, dtype=torch.int64)
        dst = torch.empty(num_edges, dtype=torch.int64)
        for begin in range(0, num_nodes, _CHUNK):
            nodes = torch.arange(begin, min(begin + _CHUNK, num_nodes))
            (found,) = source.graph.sample_neighbors(
                [NeighborRequest(etype, nodes, -1, 0)], DrawOptions()
            )
            near = nodes.repeat_interleave(found.counts)
            ids = source.original({etype: eids_of(found)})[etype]
            dst[ids] = source.original({etype[2]: near})[etype[2]]
            src[ids] = source.original({etype[0]: found.neighbors})[etype[0]]
        return src, dst

    def _put_edge_index(self, edge_index: Any, edge_attr: EdgeAttr) -> NoReturn:
        raise NotImplementedError(
            "edges of a graph in parts are read here; partition a graph that has them"
        )

    def _remove_edge_index(self, edge_attr: EdgeAttr) -> NoReturn:
        raise NotImplementedError("edges of a graph in parts are only read here")
