# SPDX-License-Identifier: Apache-2.0
"""DistGraph: a graph whose parts are on the hosts of a cluster, as one trainer sees it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._typing import CanonicalEType
from ..comm import all_reduce, barrier, rank
from ..graph import EID, Graph, heterograph
from ..graph.structure import Schema
from ..partition import RangePartitionBook
from ..sampling import DrawOptions, DrawSeed, NeighborRequest
from ..store import (
    Cluster,
    DistTensor,
    HostTables,
    Job,
    LocalHost,
    RowsRequest,
    WireMessage,
    current_job,
    has_job,
    set_job,
)
from ._host_graph import (
    GraphHandlers,
    GraphIds,
    edge_policy,
    load_parts,
    node_policy,
    out_degree_table,
    pointer_table,
)
from ._initialize import refuse_several_without_servers
from ._policies import EdgePartitionPolicy, NodePartitionPolicy
from ._stores import ServedFeatureStore, ServedGraphStore


class DistGraph:
    """A partitioned graph: structure by id, features as `DistTensor`.

    With servers (`initialize` was called where ``GRAPHSHARD_HOST`` is set) their graph; else the
    parts that ``part_config`` names, any number of them, in this process. The code around it is
    the same.

    Args:
        graph_name: As it was called when it was partitioned.
        gpb: Accepted for DGL's scripts; the servers know it.
        part_config: The JSON of the partition, for a process without servers.

    Raises:
        ValueError: The servers have another graph; or there are none, and no ``part_config``.
        PartitionFormatError: The partition is damaged.
        ServerError: A server is gone.
        RuntimeError: There are several trainers and no servers.

    Example:
        >>> import tempfile
        >>> from graphshard.data import load_dataset
        >>> from graphshard.distributed import DistGraph, exit_client, partition_graph
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = partition_graph(load_dataset("cora").graph, "cora", 2, folder, quiet=True)
        ...     g = DistGraph("cora", part_config=f"{folder}/cora.json")
        >>> g.num_nodes(), g.ndata["feat"][0:2].shape
        (2708, torch.Size([2, 1433]))
        >>> exit_client()
    """

    def __init__(
        self,
        graph_name: str,
        gpb: Any = None,
        part_config: str | os.PathLike[str] | None = None,
    ) -> None:
        if not has_job():
            self._start_alone(graph_name, part_config)
        self._job = current_job()
        cluster = self._job.cluster
        (answer,) = cluster.ask([(0, WireMessage("graph", {"name": graph_name}))])
        num_parts = int(answer.fields["num_parts"])
        part = cluster.here * num_parts // cluster.num_hosts
        self._ids = GraphIds.from_json(answer.fields, part)
        if self._ids.num_hosts != cluster.num_hosts:
            raise ValueError(
                f"the servers share {graph_name!r} among {self._ids.num_hosts} hosts (ip_config "
                f"lists {cluster.num_hosts}); give servers and trainers the same file"
            )
        self._job.add_policies(self._ids.parts)
        cluster.refresh()
        self._schema = Schema.of_graph(self._ids.book.ntypes, self._ids.book.canonical_etypes)
        self.graph_store = ServedGraphStore(cluster, self._ids)
        self.feature_store = ServedFeatureStore(cluster, self._ids)
        self._data: dict[str, DistData] = {}

    @staticmethod
    def _start_alone(graph_name: str, part_config: str | os.PathLike[str] | None) -> None:
        if part_config is None:
            raise ValueError(
                "there are no servers, so part_config must be given: the JSON that partition_graph "
                "wrote; or start servers, and call initialize first"
            )
        refuse_several_without_servers(f"DistGraph({graph_name!r})")
        tables = HostTables(0, is_shared=False)
        handlers = GraphHandlers(tables, load_parts(tables, part_config, 1)).handlers()
        host = LocalHost(tables)
        host.add_handlers(handlers)
        set_job(Job(graph_name, Cluster([host], 0)))

    # ------------------------------------------------------------------ what it is

    @property
    def ntypes(self) -> list[str]:
        """Node types."""
        return self._ids.book.ntypes

    @property
    def etypes(self) -> list[str]:
        """Relation names."""
        return self._ids.book.etypes

    @property
    def canonical_etypes(self) -> list[CanonicalEType]:
        """Relations as (source type, name, destination type)."""
        return self._ids.book.canonical_etypes

    @property
    def idtype(self) -> torch.dtype:
        """Of ids: int64."""
        return torch.int64

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    @property
    def is_homogeneous(self) -> bool:
        """Whether there is one node type and one relation."""
        return self._ids.book.is_homogeneous

    def to_canonical_etype(self, etype: Any) -> CanonicalEType:
        """The triple of a relation given by name or triple.

        Raises:
            ValueError: There is none, or several.
        """
        return self.canonical_etypes[self._schema.relation(etype)]

    def get_ntype_id(self, ntype: str) -> int:
        """Number of a node type."""
        return self.ntypes.index(ntype)

    def get_etype_id(self, etype: Any) -> int:
        """Number of a relation."""
        return self._schema.relation(etype)

    def num_nodes(self, ntype: str | None = None) -> int:
        """Nodes of one type, or of all."""
        wanted = self.ntypes if ntype is None else [ntype]
        return sum(self._ids.parts[node_policy(t)].num_ids for t in wanted)

    def num_edges(self, etype: Any = None) -> int:
        """Edges of one relation, or of all."""
        wanted = self.canonical_etypes if etype is None else [self.to_canonical_etype(etype)]
        return sum(self._ids.parts[edge_policy(t)].num_ids for t in wanted)

    number_of_nodes = num_nodes
    number_of_edges = num_edges

    def rank(self) -> int:
        """Number of this trainer."""
        return rank()

    def barrier(self) -> None:
        """Return once all trainers are here."""
        barrier()

    def most_steps(self, num_steps: int) -> int:
        """The largest of all trainers' numbers of batches. All trainers must call."""
        return int(all_reduce(torch.tensor([num_steps]), "max"))

    def is_pinned(self) -> bool:
        """No."""
        return False

    def get_partition_book(self) -> RangePartitionBook:
        """Which part owns which nodes and edges."""
        return self._ids.book

    def get_node_partition_policy(self, ntype: str) -> NodePartitionPolicy:
        """How rows of nodes of a type are spread, for a `DistTensor`."""
        return NodePartitionPolicy(self._ids.book, ntype)

    def get_edge_partition_policy(self, etype: Any) -> EdgePartitionPolicy:
        """How rows of edges of a relation are spread, for a `DistTensor`."""
        return EdgePartitionPolicy(self._ids.book, self.to_canonical_etype(etype))

    def __repr__(self) -> str:
        return (
            f"DistGraph({self._ids.name!r}, num_nodes={self.num_nodes()}, "
            f"num_edges={self.num_edges()}, parts={self._ids.book.num_partitions()}, "
            f"hosts={self._job.cluster.num_hosts})"
        )

    # ------------------------------------------------------------------ features

    @property
    def ndata(self) -> DistData:
        """Features of nodes, where there is one type."""
        self._only(self.ntypes, "ndata", "nodes[TYPE].data")
        return self._data_of(node_policy(self.ntypes[0]))

    @property
    def edata(self) -> DistData:
        """Features of edges, where there is one relation."""
        self._only(self.canonical_etypes, "edata", "edges[RELATION].data")
        return self._data_of(edge_policy(self.canonical_etypes[0]))

    @property
    def nodes(self) -> TypeView:
        """``nodes[TYPE].data``: features of nodes of a type."""
        return TypeView(lambda ntype: self._data_of(node_policy(self._ntype(ntype))))

    @property
    def edges(self) -> TypeView:
        """``edges[RELATION].data``: features of edges of a relation."""
        return TypeView(lambda e: self._data_of(edge_policy(self.to_canonical_etype(e))))

    def node_attr_schemes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Row shape and dtype of each node feature, where there is one type."""
        return {name: (t.shape[1:], t.dtype) for name, t in self.ndata.items()}

    def edge_attr_schemes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Row shape and dtype of each edge feature, where there is one relation."""
        return {name: (t.shape[1:], t.dtype) for name, t in self.edata.items()}

    def _only(self, types: Sequence[Any], what: str, instead: str) -> None:
        if len(types) != 1:
            raise ValueError(f"{what} needs one type (the graph has {types}); use {instead}")

    def _ntype(self, ntype: str) -> str:
        if ntype not in self.ntypes:
            raise ValueError(f"no node type {ntype!r}; the graph has {self.ntypes}")
        return ntype

    def _data_of(self, policy: str) -> DistData:
        if policy not in self._data:
            self._data[policy] = DistData(self._job, policy, self._ids.feature_names(policy))
        return self._data[policy]

    # ------------------------------------------------------------------ structure

    def in_degrees(self, v: Any = None, etype: Any = None) -> Tensor:
        """In-edges of nodes, int64; of all nodes by default.

        Raises:
            IndexError: An id is out of range.
        """
        etype = self.to_canonical_etype(etype)
        ids = self._node_ids(v, etype[2])
        starts = torch.tensor(self._ids.starts(node_policy(etype[2]))[1:])
        rows = ids + torch.searchsorted(starts, ids, right=True)  # one row more on each host
        table = [pointer_table(etype)]
        begin, end = self._job.cluster.start_read(
            [RowsRequest(table, rows), RowsRequest(table, rows + 1)]
        ).wait()
        return (end - begin).to(torch.int64)

    def out_degrees(self, u: Any = None, etype: Any = None) -> Tensor:
        """Out-edges of nodes, int64; of all nodes by default.

        Raises:
            IndexError: An id is out of range.
            ValueError: The parts do not know; see ``num_hops`` of `partition_graph`.
        """
        etype = self.to_canonical_etype(etype)
        name = out_degree_table(etype)
        if name not in self._job.cluster.names():
            raise ValueError(
                "out-degrees need a partition with num_hops of at least 1; partition again"
            )
        request = RowsRequest([name], self._node_ids(u, etype[0]))
        return self._job.cluster.start_read([request]).wait()[0]

    def find_edges(self, edges: Any, etype: Any = None) -> tuple[Tensor, Tensor]:
        """Sources and destinations of edges.

        Raises:
            IndexError: An id is out of range.
        """
        etype = self.to_canonical_etype(etype)
        cluster, starts = self._job.cluster, self._ids.starts(edge_policy(etype))
        ids = torch.as_tensor(edges, dtype=torch.int64).view(-1)
        if ids.numel() and not (0 <= int(ids.min()) <= int(ids.max()) < starts[-1]):
            bad = ids[(ids < 0) | (ids >= starts[-1])]
            raise IndexError(f"edges of {etype} must be in [0, {starts[-1]}) (got {int(bad[0])})")
        host = torch.searchsorted(torch.tensor(starts[1:]), ids, right=True)
        src, dst = torch.empty_like(ids), torch.empty_like(ids)
        places = [(host == number).nonzero().view(-1) for number in range(cluster.num_hosts)]
        asked = [
            (number, WireMessage("ends", {"etype": list(etype)}, [ids[at] - starts[number]]))
            for number, at in enumerate(places)
            if at.numel()
        ]
        for (number, _), answer in zip(asked, cluster.ask(asked), strict=True):
            src[places[number]] = answer.tensors[0].to(torch.int64)
            dst[places[number]] = answer.tensors[1].to(torch.int64)
        return src, dst

    def sample_neighbors(
        self,
        nodes: Any,
        fanout: Any,
        edge_dir: str = "in",
        prob: str | None = None,
        *,
        exclude_edges: Any = None,
        replace: bool = False,
        seed: int | None = None,
    ) -> Graph:
        """Edges drawn for nodes, as a graph with all nodes; ``edata[EID]`` has their ids.

        Args:
            nodes: Ids, or type to ids.
            fanout: Edges of each relation for a node, -1 for all; or relation to that.
            edge_dir: ``"in"``.
            prob: Name of the edge feature to draw in proportion to.
            exclude_edges: Ids of edges that are not drawn, or relation to ids.
            replace: Draw with replacement.
            seed: Names the draw; by default one from torch's generator.

        Raises:
            IndexError: An id is out of range.
            NotImplementedError: ``edge_dir="out"``.
            ValueError: The weights are missing or no weights.
        """
        options = DrawOptions(replace=replace, weights=prob, edge_dir=edge_dir)  # type: ignore[arg-type]
        given = nodes if isinstance(nodes, Mapping) else {self._only_ntype(): nodes}
        draw_seed = DrawSeed.fresh() if seed is None else DrawSeed(seed)
        near = {t: torch.as_tensor(i, dtype=torch.int64).view(-1) for t, i in given.items()}
        for ntype in near:
            self._ntype(ntype)
        requests = [
            NeighborRequest(etype, near[etype[2]], self._fanout(fanout, etype), draw_seed.key(0, r))
            for r, etype in enumerate(self.canonical_etypes)
            if etype[2] in near
        ]
        drawn = self.graph_store.sample_neighbors(
            requests, options, self._by_relation(exclude_edges)
        )
        edges, eids = {}, {}
        for request, one in zip(requests, drawn, strict=True):
            dst = request.nodes.repeat_interleave(one.counts)
            edges[request.etype] = one.neighbors, dst
            eids[request.etype] = one.eids
        none = torch.empty(0, dtype=torch.int64)
        for etype in self.canonical_etypes:
            edges.setdefault(etype, (none, none))
            eids.setdefault(etype, none)
        graph: Graph = heterograph(edges, {t: self.num_nodes(t) for t in self.ntypes})
        for etype, ids in eids.items():
            graph.edges[etype].data[EID] = ids
        return graph

    def _fanout(self, fanout: Any, etype: CanonicalEType) -> int:
        if not isinstance(fanout, Mapping):
            return int(fanout)
        by_triple = {self.to_canonical_etype(key): int(value) for key, value in fanout.items()}
        return by_triple.get(etype, 0)

    def _by_relation(self, edges: Any) -> dict[CanonicalEType, Tensor] | None:
        if edges is None:
            return None
        given = edges if isinstance(edges, Mapping) else {None: edges}
        return {self.to_canonical_etype(t): torch.as_tensor(i).view(-1) for t, i in given.items()}

    def _only_ntype(self) -> str:
        self._only(self.ntypes, "ids without a type", "a dictionary from type to ids")
        return self.ntypes[0]

    def _node_ids(self, ids: Any, ntype: str) -> Tensor:
        count = self.num_nodes(ntype)
        if ids is None or ids is Ellipsis or (isinstance(ids, str) and ids == "__ALL__"):
            return torch.arange(count)
        found = torch.as_tensor(ids, dtype=torch.int64).view(-1)
        if found.numel() and not (0 <= int(found.min()) <= int(found.max()) < count):
            bad = found[(found < 0) | (found >= count)]
            raise IndexError(f"nodes of type {ntype!r} must be in [0, {count}) (got {int(bad[0])})")
        return found


class DistData(MutableMapping[str, DistTensor]):
    """Features of one type by name. Setting one gives a tensor another name here, and no more.

    Args:
        job: Whose.
        policy: How the rows are spread.
        features: What the graph was partitioned with.
    """

    def __init__(self, job: Job, policy: str, features: Collection[str]) -> None:
        self._job, self._prefix, self._features = job, f"{policy}~", set(features)
        self._own: dict[str, DistTensor] = {}
        self._stored: dict[str, DistTensor] = {}

    def __getitem__(self, name: str) -> DistTensor:
        if name in self._own:
            return self._own[name]
        if name not in self._stored:
            if name not in self._features:
                raise KeyError(f"no feature {name!r}; there are {sorted(self)}")
            self._stored[name] = DistTensor.existing(self._job, self._prefix + name)
        return self._stored[name]

    def __setitem__(self, name: str, value: DistTensor) -> None:
        if not isinstance(value, DistTensor) or not value.name.startswith(self._prefix):
            raise TypeError(
                f"a feature must be a DistTensor of {self._prefix[:-1]!r} (got {value!r:.200}); "
                "make one with part_policy, and write rows to it"
            )
        self._own[name] = value

    def __delitem__(self, name: str) -> None:
        del self._own[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._features | set(self._own)))

    def __len__(self) -> int:
        return len(list(iter(self)))


class TypeView:
    """``view[TYPE].data``.

    Args:
        find: From a type to its features.
    """

    def __init__(self, find: Callable[[Any], DistData]) -> None:
        self._find = find

    def __getitem__(self, key: Any) -> TypeData:
        return TypeData(self._find(key))


class TypeData:
    """What ``nodes[TYPE]`` gives.

    Args:
        data: Features by name.
    """

    def __init__(self, data: DistData) -> None:
        self.data = data
