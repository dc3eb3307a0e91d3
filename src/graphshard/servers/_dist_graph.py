# SPDX-License-Identifier: Apache-2.0
"""DistGraph: a graph whose parts are on the hosts of a cluster, as one trainer sees it."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._base.typing import CanonicalEType, EdgeIds, EType, Ids, NodeIds
from ..comm import rank
from ..comm.collectives import all_reduce_alike
from ..graph import Graph
from ..graph.structure import Schema, as_integers, is_all
from ..partition import RangePartitionBook
from ..sampling import DrawOptions
from ._cluster import Cluster, LocalHost, RowsRequest
from ._dist_tensor import DistTensor
from ._graph_server import GraphHandlers, load_parts
from ._host_graph import GraphIds, edge_policy, node_policy, pointer_table
from ._host_tables import HostTables
from ._job import Job, client_barrier, current_job, has_job, refuse_several_without_servers, set_job
from ._message_stream import WireMessage
from ._policies import EdgePartitionPolicy, NodePartitionPolicy
from ._served_stores import ServedFeatureStore, ServedGraphStore, check_range, rows_of_host
from ._subgraphs import (
    checked_ntype,
    edges_by_relation,
    graph_of_edges,
    in_subgraph_of,
    local_part,
    sample_etype_neighbors,
)


class DistGraph:
    """A partitioned graph: structure by id, features as `DistTensor`.

    With servers (`initialize` was called where ``GRAPHSHARD_HOST`` is set) their graph; else the
    parts that ``part_config`` names, any number of them, in this process. The code around it is
    the same.

    Methods that take ids, of nodes or edges, raise IndexError if one is out of range, TypeError if
    they are none, and ValueError for a type that there is not.

    Args:
        graph_name: As it was called when it was partitioned.
        gpb: Accepted for DGL's scripts; the servers know it.
        part_config: The JSON of the partition, for a process without servers. It may open several
            graphs; a `DistTensor` is then made for the one that was opened last.

    Raises:
        ValueError: The servers have another graph; or there are none, and no ``part_config``.
        PartitionFormatError: The partition is damaged.
        ServerError: A server is gone.
        RuntimeError: There are several trainers and no servers.

    Example:
        >>> import tempfile
        >>> from graphshard.data import load_dataset
        >>> from graphshard.servers import DistGraph, exit_client
        >>> from graphshard.partition import partition_graph
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
        self._job = _job_with(graph_name, part_config)
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
        self._job.add_policies(self._ids.parts, self._ids.destinations)
        cluster.refresh()
        self._schema = Schema.of_graph(self._ids.book.ntypes, self._ids.book.canonical_etypes)
        job, ids = self._job, self._ids
        self._data: Callable[[str], DistData] = functools.cache(  # features, by policy
            lambda policy: DistData(job, policy, ids.feature_names(policy))
        )
        self.graph_store = ServedGraphStore(cluster, ids, self._data)
        self.feature_store = ServedFeatureStore(cluster, self._data)
        self._local_partition: Graph | None = None

    # ------------------------------------------------------------------ what it is

    @property
    def name(self) -> str:
        """As the graph was called when it was partitioned."""
        return self._ids.name

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

    def to_canonical_etype(self, etype: EType | None) -> CanonicalEType:
        """The triple of a relation given by name or triple.

        Raises:
            ValueError: There is none, or several.
        """
        return self.canonical_etypes[self._schema.relation(etype)]

    def get_ntype_id(self, ntype: str) -> int:
        """Number of a node type."""
        return self.ntypes.index(ntype)

    def get_etype_id(self, etype: EType) -> int:
        """Number of a relation."""
        return self._schema.relation(etype)

    def num_nodes(self, ntype: str | None = None) -> int:
        """Nodes of one type, or of all."""
        ntypes = self.ntypes if ntype is None else [ntype]
        return sum(self._ids.parts[node_policy(t)].num_ids for t in ntypes)

    def num_edges(self, etype: EType | None = None) -> int:
        """Edges of one relation, or of all."""
        etypes = self.canonical_etypes if etype is None else [self.to_canonical_etype(etype)]
        return sum(self._ids.parts[edge_policy(t)].num_ids for t in etypes)

    number_of_nodes = num_nodes
    number_of_edges = num_edges

    def rank(self) -> int:
        """Number of this trainer."""
        return rank()

    def barrier(self) -> None:
        """Return once all trainers are here."""
        client_barrier()

    def most_steps(self, num_steps: int) -> int:
        """The largest of all trainers' numbers of batches. All trainers must call."""
        return int(all_reduce_alike(torch.tensor([num_steps]), "max"))

    def check_draws(self, options: DrawOptions) -> None:
        """Raise ValueError unless there are the weights and edges to draw so; for loaders."""
        self.graph_store.check_draws(self.canonical_etypes, options)

    def is_pinned(self) -> bool:
        """No."""
        return False

    def get_partition_book(self) -> RangePartitionBook:
        """Which part owns which nodes and edges."""
        return self._ids.book

    def get_node_partition_policy(self, ntype: str) -> NodePartitionPolicy:
        """How rows of nodes of a type are spread, for a `DistTensor`."""
        return NodePartitionPolicy(self._ids.book, ntype)

    def get_edge_partition_policy(self, etype: EType) -> EdgePartitionPolicy:
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
        return self._data(node_policy(self.ntypes[0]))

    @property
    def edata(self) -> DistData:
        """Features of edges, where there is one relation."""
        self._only(self.canonical_etypes, "edata", "edges[RELATION].data")
        return self._data(edge_policy(self.canonical_etypes[0]))

    @property
    def nodes(self) -> TypeView:
        """``nodes[TYPE].data``: features of nodes of a type."""
        return TypeView(lambda ntype: self._data(node_policy(checked_ntype(self, ntype))))

    @property
    def edges(self) -> TypeView:
        """``edges[RELATION].data``: features of edges of a relation."""
        return TypeView(lambda e: self._data(edge_policy(self.to_canonical_etype(e))))

    def node_attr_schemes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Row shape and dtype of each node feature, where there is one type."""
        return {name: (t.shape[1:], t.dtype) for name, t in self.ndata.items()}

    def edge_attr_schemes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Row shape and dtype of each edge feature, where there is one relation."""
        return {name: (t.shape[1:], t.dtype) for name, t in self.edata.items()}

    def _only(self, types: Sequence[Any], what: str, instead: str) -> None:
        if len(types) != 1:
            raise ValueError(f"{what} needs one type (the graph has {types}); use {instead}")

    # ------------------------------------------------------------------ structure

    def in_degrees(self, v: Ids | None = None, etype: EType | None = None) -> Any:
        """In-edges of nodes, int64; of all nodes by default. A number for a number."""
        etype = self.to_canonical_etype(etype)
        return self._degrees(v, etype, etype[2], "in")

    def out_degrees(self, u: Ids | None = None, etype: EType | None = None) -> Any:
        """Out-edges of nodes, int64; of all nodes by default. A number for a number.

        Raises:
            ValueError: The parts do not know; see ``num_hops`` of `partition_graph`.
        """
        etype = self.to_canonical_etype(etype)
        self.graph_store.check_out_edges()
        return self._degrees(u, etype, etype[0], "out")

    def _degrees(self, given: Any, etype: CanonicalEType, ntype: str, edge_dir: str) -> Any:
        ids = self._node_ids(given, ntype)
        rows = ids + self._ids.hosts_of(node_policy(ntype), ids)  # one row more on each host
        table = [pointer_table(etype, edge_dir)]
        reads = [RowsRequest(table, rows), RowsRequest(table, rows + 1)]
        begin, end = self._job.cluster.read(reads)
        degrees = (end - begin).to(torch.int64)
        return int(degrees) if isinstance(given, int) else degrees

    def find_edges(self, edges: Ids, etype: EType | None = None) -> tuple[Tensor, Tensor]:
        """Sources and destinations of edges, int64."""
        relation, eids = self._edge_ids(edges, etype)
        return self.graph_store.find_edges(relation, eids)

    def has_edges_between(self, u: Ids, v: Ids, etype: EType | None = None) -> Tensor:
        """Whether there is an edge from each ``u`` to its ``v``: bool, for as many as there are.

        Raises:
            ValueError: There are not as many ``u`` as ``v``.
        """
        etype = self.to_canonical_etype(etype)
        src, dst = self._node_ids(u, etype[0]), self._node_ids(v, etype[2])
        if src.shape != dst.shape:
            raise ValueError(
                f"u and v must be as many as pairs are asked for (got {len(src)} and {len(dst)})"
            )
        return self.graph_store.has_edges_between(etype, src, dst)

    def reverse_edges(self, eids: Ids, etype: EType, reverse_etype: EType) -> Tensor:
        """Ids of the reverses of edges, which lie under the same ids in another relation.

        That is, under the ids that edges had before the graph was partitioned. Partitioning gives
        those of each relation new ids, by which an edge and its reverse cannot be told.

        Raises:
            ValueError: An edge has no reverse there.
        """
        relation, ids = self._edge_ids(eids, etype)
        return self.graph_store.reverse_edges(relation, self.to_canonical_etype(reverse_etype), ids)

    def edge_subgraph(
        self, edges: EdgeIds, relabel_nodes: bool = True, store_ids: bool = True
    ) -> Graph:
        """The graph of some edges, in the order given; of their features none.

        Args:
            relabel_nodes: Whether to keep only the ends of these edges, numbered as they first
                occur (per relation, sources before destinations), with their ids in
                ``ndata[NID]``; if not, all nodes stay.
            store_ids: Whether to store ids, of edges in ``edata[EID]``.
        """
        by_relation = edges_by_relation(self, edges)
        find = self.graph_store.find_edges
        columns = {etype: (*find(etype, eids), eids) for etype, eids in by_relation.items()}
        return graph_of_edges(self, columns, relabel_nodes, store_ids)

    def in_subgraph(
        self, nodes: NodeIds, *, relabel_nodes: bool = False, store_ids: bool = True
    ) -> Graph:
        """The graph of all edges that enter some nodes; of their features none.

        Edges come node by node in the order given, each node's by ascending id.

        Args:
            nodes: Ids, or type to ids. A node that is given twice has its in-edges twice.
            relabel_nodes: See `edge_subgraph`.
        """
        return in_subgraph_of(self, nodes, relabel_nodes, store_ids)

    @property
    def local_partition(self) -> Graph | None:
        """What this process's host has, with local ids and one type, as `load_partition` gives it.

        *Inner* nodes, which the host has, come first, by type and id: as the rows of a
        `DistTensor` that ``DistTensor.local_partition`` gives. After them, by type and id, come
        *halo* nodes of other hosts that an edge leads from. Edges are those that enter inner nodes,
        by relation and id. ``ndata`` has ``_ID`` (homogenised, see `RangePartitionBook`), ``_TYPE``
        (number of the type), ``part_id`` and ``inner_node``; ``edata`` has ``_ID``, ``_TYPE`` and
        ``inner_edge``. Where a host has several parts they are one here, with the edges between
        them. None where this process cannot map its server's memory. It is made when first asked
        for, and takes memory of its own.
        """
        if self._local_partition is None:
            cluster = self._job.cluster
            self._local_partition = local_part(self._ids, cluster.here, rows_of_host(cluster))
        return self._local_partition

    def sample_neighbors(
        self,
        seed_nodes: NodeIds,
        fanout: int | Mapping[EType, int],
        edge_dir: str = "in",
        prob: str | None = None,
        exclude_edges: EdgeIds | None = None,
        replace: bool = False,
        etype_sorted: bool = True,
        output_device: torch.device | str | None = None,
        *,
        seed: int | None = None,
    ) -> Graph:
        """Edges drawn for nodes, as a graph with all nodes; ``edata[EID]`` has their ids.

        Args:
            fanout: Edges of each relation for a node, -1 for all; or relation to that, for all.
            edge_dir: ``"in"`` for edges that enter the nodes, ``"out"`` for those that leave them.
            prob: Name of the edge feature to draw in proportion to.
            etype_sorted: Accepted for DGL's scripts.
            output_device: Where the graph shall be; by default on the CPU.
            seed: Names the draw; by default one from torch's generator.

        Raises:
            ValueError: The weights are missing or no weights; or ``edge_dir="out"``, and the parts
                do not know the edges that leave them; see ``num_hops`` of `partition_graph`.
        """
        given: dict[str, Any] = {"exclude_edges": exclude_edges, "replace": replace, "seed": seed}
        drawn = sample_etype_neighbors(self, seed_nodes, fanout, edge_dir, prob, **given)
        return drawn if output_device is None else drawn.to(output_device)

    def _edge_ids(self, eids: Ids, etype: EType | None) -> tuple[CanonicalEType, Tensor]:
        ((relation, ids),) = edges_by_relation(self, {etype: eids}).items()
        return relation, ids

    def _node_ids(self, ids: Any, ntype: str) -> Tensor:
        count = self.num_nodes(ntype)
        if ids is None or ids is Ellipsis or is_all(ids):
            return torch.arange(count)
        what = f"nodes of type {ntype!r}"
        node_ids = as_integers(ids, what).to("cpu", torch.int64)
        check_range(node_ids, count, what)
        return node_ids


def _job_with(graph_name: str, part_config: str | os.PathLike[str] | None) -> Job:
    """The job of the servers; or, where there are none, one with the parts of a graph.

    A process without servers may open several graphs, one after another: each has a job of its own,
    and the last one is the current job, in which tensors are made.
    """
    path = None if part_config is None else os.path.realpath(part_config)
    if has_job():
        job = current_job()
        is_alone = isinstance(job.cluster.hosts[0], LocalHost)
        if not is_alone or path is None or job.name == path:
            return job
    if path is None:
        raise ValueError(
            "there are no servers, so part_config must be given: the JSON that partition_graph "
            "wrote; or start servers, and call initialize first"
        )
    refuse_several_without_servers(f"DistGraph({graph_name!r})")
    tables = HostTables(0, is_shared=False)
    host = LocalHost(tables, GraphHandlers(tables, load_parts(tables, path, 1)).handlers())
    job = Job(path, Cluster([host], 0))
    host.start(WireMessage("graph", {"name": graph_name}))  # raises unless it is called so
    set_job(job)
    return job


class DistData(MutableMapping[str, DistTensor]):
    """Features of one type by name. Setting one gives a tensor another name here, and no more."""

    def __init__(self, job: Job, policy: str, features: Collection[str]) -> None:
        self._job, self._policy, self._features = job, policy, set(features)
        self._own: dict[str, DistTensor] = {}
        self._stored: dict[str, DistTensor] = {}

    def __getitem__(self, name: str) -> DistTensor:
        if name in self._own:
            return self._own[name]
        if name not in self._stored:
            if name not in self._features:
                raise KeyError(f"no feature {name!r}; there are {sorted(self)}")
            self._stored[name] = DistTensor.existing(self._job, f"{self._policy}~{name}")
        return self._stored[name]

    def __setitem__(self, name: str, value: DistTensor) -> None:
        if not isinstance(value, DistTensor) or value.part_policy != self._policy:
            raise TypeError(
                f"a feature must be a DistTensor of {self._policy!r} (got {value!r:.200}); "
                "make one with part_policy, and write rows to it"
            )
        self._own[name] = value

    def __delitem__(self, name: str) -> None:
        del self._own[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._features | set(self._own)))

    def __len__(self) -> int:
        return len(list(iter(self)))


@dataclass(frozen=True)
class TypeView:
    """``view[TYPE].data``."""

    find: Callable[[Any], DistData]

    def __getitem__(self, key: str | CanonicalEType) -> TypeData:
        return TypeData(self.find(key))


@dataclass(frozen=True)
class TypeData:
    """What ``nodes[TYPE]`` gives."""

    data: DistData
