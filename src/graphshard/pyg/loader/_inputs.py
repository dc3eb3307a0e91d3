# SPDX-License-Identifier: Apache-2.0
"""What users of the loaders give: seeds, and a graph in parts as PyG's pair of stores.

Seeds are rows, masks, ids and types of nodes; edges; labels. Of a graph in parts they become ids
before partitioning, and PyG's classes get data in the place of the graph that only says which types
there are.

`RemoteFeatureStore` and `RemoteGraphStore` have ids of the graph before it was partitioned. What
PyG's own loaders need of the pair goes over one exchange for a batch; whole tensors and whole edge
lists can be read as well, and are as large as the graph. Both are read-only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch_geometric.data import Data, FeatureStore, GraphStore, HeteroData, TensorAttr
from torch_geometric.data.graph_store import EdgeAttr, EdgeLayout
from torch_geometric.loader.utils import infer_filter_per_worker

from ..._base.typing import INDEX_DTYPES, CanonicalEType
from ...comm.collectives import all_reduce_alike
from ...sampling import DrawOptions, NeighborRequest
from .._edge_index import ShardedEdgeIndex
from ._draws import eids_of
from ._sources import Kind, SamplingSource, source_of

_CHUNK = 1 << 18


class RemoteFeatureStore(FeatureStore):
    """Features of a graph in parts, as PyG's ``FeatureStore``.

    Over a graph that spans ranks every call that reads rows is collective: all ranks make it, with
    any ids. PyG's loaders do so once for each batch, with all node features together. Graphs are
    those that `HopSampler` takes.

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
            index = slice(None)
        if isinstance(index, slice | int):
            return torch.arange(count)[index].view(-1)
        ids = torch.as_tensor(index)
        if ids.dtype == torch.bool:
            ids = ids.nonzero().view(-1)
        return ids

    def _get_tensor(self, attr: TensorAttr) -> Tensor:
        return self._multi_get_tensor([attr])[0]

    def _multi_get_tensor(self, attrs: list[TensorAttr]) -> list[Any]:
        requests: list[tuple[Kind, Sequence[str], Tensor]] = []
        for attr in attrs:
            kind = self._checked(attr)
            ids = self.source.stored(kind, self._ids(kind, attr.index))
            requests.append((kind, [attr.attr_name], ids))
        return [
            rows.cpu().numpy() if isinstance(attr.index, np.ndarray) else rows
            for attr, (rows,) in zip(attrs, self.source.fetch(requests), strict=True)
        ]

    def _get_tensor_size(self, attr: TensorAttr) -> tuple[int, ...] | None:
        kind = self._kind(attr)
        if attr.attr_name not in self.source.columns(kind):
            return None
        none = torch.empty(0, dtype=torch.int64)
        ((rows,),) = self.source.fetch([(kind, [attr.attr_name], none)])
        return (self.source.count(kind), *rows.shape[1:])

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
    graph that spans ranks it is collective. Graphs are those that `HopSampler` takes.

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
            (edges,) = source.graph.sample_neighbors(
                [NeighborRequest(etype, nodes, -1, 0)], DrawOptions()
            )
            near = nodes.repeat_interleave(edges.counts)
            ids = source.original({etype: eids_of(edges)})[etype]
            dst[ids] = source.original({etype[2]: near})[etype[2]]
            src[ids] = source.original({etype[0]: edges.neighbors})[etype[0]]
        return src, dst

    def _put_edge_index(self, edge_index: Any, edge_attr: EdgeAttr) -> NoReturn:
        raise NotImplementedError(
            "edges of a graph in parts are read here; partition a graph that has them"
        )

    def _remove_edge_index(self, edge_attr: EdgeAttr) -> NoReturn:
        raise NotImplementedError("edges of a graph in parts are only read here")


def _placeholder(source: SamplingSource) -> Data | HeteroData:
    """Data that only says which types there are, for PyG's checks of seeds."""
    if not source.is_typed:
        return Data(num_nodes=source.count(source.ntypes[0]))
    data = HeteroData()
    for ntype in source.ntypes:
        data[ntype].num_nodes = source.count(ntype)
    for etype in source.etypes:
        data[etype].edge_index = torch.empty(2, 0, dtype=torch.int64)
    return data


def node_input(
    data: Any, source: SamplingSource, given: Any, options: dict[str, Any]
) -> tuple[Any, Any, Tensor | None]:
    """What PyG's loader takes: data, seeds by their ids before partitioning, and what they were."""
    if isinstance(data, Data | HeteroData) and options.get("filter_per_worker") is None:
        options["filter_per_worker"] = infer_filter_per_worker(data)
    ntype, nodes = None, given
    if source.is_typed:
        _check_type(source, given)
        ntype, nodes = (given, None) if isinstance(given, str) else given
    is_sharded = isinstance(data, Data | HeteroData) and not source.is_whole
    if is_sharded:
        store = data[ntype] if source.is_typed else data
        rows, input_id = _ids(nodes, store.num_nodes, "this rank's rows of the sharded data")
        ids = store.n_id.cpu()[rows]
    elif hasattr(nodes, "part_policy"):  # a DistTensor
        from ...servers import node_split

        kind = str(source.kind(ntype))
        ids = input_id = source.original({kind: node_split(nodes, ntype=kind)})[kind]
    else:
        ids, input_id = _ids(nodes, source.count(source.kind(ntype)), "nodes of the whole graph")
    if ids.numel() == 0:
        options.pop("shuffle", None)  # torch has no order for nothing
    given_id = options.pop("input_id", None)
    input_id = input_id if given_id is None else given_id
    return _placeholder(source), (ntype, ids) if source.is_typed else ids, input_id


def _check_type(source: SamplingSource, given: Any) -> None:
    is_pair = isinstance(given, tuple | list) and len(given) == 2
    named = given if isinstance(given, str) else given[0] if is_pair else None
    if not isinstance(named, str) or named not in source.ntypes:
        shown = type(given).__name__ if named is None else repr(named)
        raise ValueError(
            f"input_nodes must name a node type of {source.ntypes}, alone or as (type, nodes), "
            f"because the graph has types (got {shown})"
        )


def _ids(given: Any, count: int, nodes: str) -> tuple[Tensor, Tensor | None]:
    """Ids below ``count``; and the same where a mask gave them, as PyG's ``input_id``."""
    if given is None:
        return torch.arange(count), None
    ids = torch.as_tensor(given).cpu()
    if ids.dtype == torch.bool:
        if ids.shape != (count,):
            raise ValueError(
                f"a mask of input_nodes has an entry for each of the {count} {nodes} (got shape "
                f"{tuple(ids.shape)}); take it from the same data"
            )
        ids = ids.nonzero().view(-1)
        return ids, ids
    if ids.numel() == 0:
        return torch.empty(0, dtype=torch.int64), None
    if ids.dtype not in INDEX_DTYPES or ids.dim() != 1:
        raise TypeError(
            f"input_nodes must be a mask or a list of ids (got {ids.dtype} of shape "
            f"{tuple(ids.shape)})"
        )
    if not 0 <= int(ids.min()) <= int(ids.max()) < count:
        raise ValueError(
            f"input_nodes must be {nodes}, in [0, {count}) (got {int(ids.min())} to "
            f"{int(ids.max())}); to start from other ids of a sharded graph, set a mask on the "
            "data before it is sharded, and pass the sharded mask"
        )
    return ids.to(torch.int64), None


def named_ends(data: Any, source: SamplingSource, given: Any) -> tuple[Any, Any]:
    """The relation of edges to start from, None of a plain graph; and their ends, as given."""
    etype, ends = None, given
    if source.is_typed:
        if not isinstance(given, tuple | list) or len(given) not in (2, 3):
            raise ValueError(
                "edge_label_index must name a relation, alone or as (relation, ends), because the "
                f"graph has types (got {type(given).__name__})"
            )
        named, ends = (given, None) if isinstance(given[0], str) else given
        etype = tuple(named)
        if etype not in source.etypes:
            raise ValueError(f"edge_label_index names {etype} (the graph has {source.etypes})")
    if ends is None and isinstance(data, Data | HeteroData):
        ends = data.edge_index if etype is None else data[etype].edge_index
    if ends is None or isinstance(ends, ShardedEdgeIndex):
        return etype, ends
    ends = torch.as_tensor(ends)
    if ends.dtype not in INDEX_DTYPES:
        raise TypeError(f"edge_label_index must hold ids of nodes (got {ends.dtype})")
    if ends.dim() != 2 or ends.shape[0] != 2:
        raise ValueError(f"edge_label_index must be of shape [2, n] (got {tuple(ends.shape)})")
    return etype, ends


def original_ends(data: Any, source: SamplingSource, etype: Any, ends: Any) -> Tensor:
    """Ends of edges by ids before partitioning; collective where the source is."""
    relation = source.etypes[0] if etype is None else etype
    if ends is None:
        return torch.stack(RemoteGraphStore(source).ends(relation))
    if source.is_collective:
        is_sharded = torch.tensor([int(isinstance(ends, ShardedEdgeIndex))])
        both = all_reduce_alike(torch.cat([is_sharded, -is_sharded]), "max", group=source.group)
        if int(both[0]) != -int(both[1]):
            raise ValueError(
                "edge_label_index is columns of the sharded edge_index on some ranks, and ids on "
                "others; pass the same kind on all"
            )
    if isinstance(ends, ShardedEdgeIndex):
        sources, targets = (data, data) if etype is None else (data[etype[0]], data[etype[2]])
        return torch.stack([sources.n_id[ends[0]], targets.n_id[ends.local()[1]]]).cpu()
    return ends.as_subclass(Tensor).cpu().to(torch.int64)


def link_input(
    source: SamplingSource, etype: Any, ends: Tensor, label: Any, options: dict[str, Any]
) -> tuple[Any, Any]:
    """What PyG's loader takes: data, and the ends of edges with their relation."""
    relation = source.etypes[0] if etype is None else etype
    for kind, ids in zip((relation[0], relation[2]), ends, strict=True):
        source.check(kind, ids)
    if label is not None and label.shape[:1] != ends.shape[1:]:
        raise ValueError(
            f"edge_label must have an entry for each of the {ends.shape[1]} edges (got shape "
            f"{tuple(label.shape)})"
        )
    if ends.shape[1] == 0:
        options.pop("shuffle", None)  # torch has no order for nothing
    return _placeholder(source), ends if etype is None else (etype, ends)


def labels_on_all_ranks(source: SamplingSource, labels: Tensor) -> Tensor:
    """Labels of which PyG makes room for 0, the negatives, alike on all ranks."""
    if not source.is_collective:
        return labels
    least = labels.min() if labels.numel() else torch.tensor(torch.iinfo(torch.int32).max)
    smallest = all_reduce_alike(least.view(1).double(), "min", group=source.group)
    is_shifted_here = labels.numel() > 0 and float(labels.min()) == 0
    return labels + 1 if float(smallest) == 0 and not is_shifted_here else labels
