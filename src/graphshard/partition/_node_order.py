# SPDX-License-Identifier: Apache-2.0
"""Order of the nodes inside a part, so that neighbours lie near each other in memory.

A part is cut by METIS into clusters of about 4000 nodes, whose rows of features fit the cache next
to a core; METIS numbers clusters that it split late, and so are near each other, alike. They need
be neither equal nor the best, so METIS gets by with a third of its usual time. Inside a cluster,
nodes are in the order of a walk over the part: breadth first, component by component, from a node
of least degree (the first half of Cuthill and McKee, "Reducing the bandwidth of sparse symmetric
matrices", 1969), neighbours in their original order. A part of a few clusters' size, and any part
where METIS is missing or refuses, is in the order of the walk alone. Both are linear in the edges
of the part, whatever the degrees; benchmarks/locality.py compares them with others. METIS runs in
the caller's thread; what comes before and after it is done for other parts meanwhile.

Nodes that other parts read come after the others, so that their rows are sent as they lie; see
the note below. Inside either group everything is as above.

Graphs often come in a good order already (a crawl, a mesh); a part keeps its order unless the new
one shortens its edges, measured as the mean logarithm of the distance between the two ends.

[Note: nodes that other parts read]
A part sends each of its readers the rows of some nodes, at every layer. Rows that lie one after
the other go as they are; others have to be gathered. So the nodes that no other part reads come
first, and the others by the set of their readers. Sets are taken in the order of the reflected
binary Gray code (F. Gray, "Pulse Code Communication", US patent 2,632,058, 1953), in which one
reader comes or goes at a time: with 2 or 3 parts the rows of each reader are one run, with 4 they
are at most two; and in general those of the readers with the highest digits, which are the ones
that read most, are 1, 1, 2, 4, 8, ... runs at most.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..errors import MetisError
from ._metis import IntArray, UndirectedGraph, metis_partition

if TYPE_CHECKING:
    import scipy.sparse

CLUSTER_NODES = 4000
"""Nodes per cluster: with 128 columns of float32 their rows take 2 MB."""

_CLUSTER_TOLERANCE = 1.3

Order = npt.NDArray[np.int64]


def order_nodes(
    parts: IntArray, type_offsets: list[int], num_parts: int, undirected: UndirectedGraph
) -> Order:
    """All nodes, by part, type, and place: an order of the homogenised ids.

    Args:
        parts: ``[num_nodes]``, part of each node, in homogenised order.
        type_offsets: First homogenised id of each type, and the number of nodes at the end.
        undirected: The graph to go by.

    Returns:
        int64 ``[num_nodes]``: the old homogenised id of each new one.
    """
    by_part = np.argsort(parts, kind="stable").astype(np.int64, copy=False)
    ends = np.cumsum(np.bincount(parts, minlength=num_parts))
    blocks = np.split(by_part, ends[:-1])
    matrix = undirected.matrix()

    def place(
        part: int, inside: scipy.sparse.csr_array, walk: Order, clusters: Order | None
    ) -> None:
        blocks[part][:] = _place(inside, walk, clusters, type_offsets, blocks[part])

    with ThreadPoolExecutor(max_workers=1) as helper:
        coming = helper.submit(_prepare, matrix, blocks[0])
        placing = []
        for part in range(num_parts):
            inside, walk = coming.result()
            if part + 1 < num_parts:
                coming = helper.submit(_prepare, matrix, blocks[part + 1])
            clusters = _find_clusters(inside)
            placing.append(helper.submit(place, part, inside, walk, clusters))
        for placed in placing:
            placed.result()
    return by_part


def _prepare(
    matrix: scipy.sparse.csr_array, members: Order
) -> tuple[scipy.sparse.csr_array, Order]:
    """The graph inside a part, and the walk over it."""
    inside = matrix[members][:, members]
    return inside, breadth_first_order(inside)


def _place(
    inside: scipy.sparse.csr_array,
    walk: Order,
    clusters: Order | None,
    type_offsets: list[int],
    members: Order,
) -> Order:
    """``members`` by type, then cluster, then walk; or as they are, where that is no worse."""
    places = _by_cluster(walk, clusters)
    types = np.searchsorted(type_offsets, members, side="right")
    order: Order = members[places[np.argsort(types[places], kind="stable")]]
    better = mean_log_gap(inside, order, members) < mean_log_gap(inside, members, members)
    return order if better else members.copy()


def clustered_order(graph: scipy.sparse.csr_array, walk: Order | None = None) -> Order:
    """Clusters of an undirected graph without loops one after another, each in walking order.

    Args:
        walk: `breadth_first_order` of the graph, where it is known.
    """
    walk = breadth_first_order(graph) if walk is None else walk
    return _by_cluster(walk, _find_clusters(graph))


def _by_cluster(walk: Order, clusters: Order | None) -> Order:
    return walk if clusters is None else walk[np.argsort(clusters[walk], kind="stable")]


def _find_clusters(graph: scipy.sparse.csr_array) -> Order | None:
    """The cluster of each node; None if all are one."""
    num_clusters = graph.shape[0] // CLUSTER_NODES
    if num_clusters < 2 or graph.nnz == 0:
        return None
    try:
        return metis_partition(
            UndirectedGraph(graph.indptr, graph.indices, check=False),
            num_clusters,
            tolerances=[_CLUSTER_TOLERANCE],
            num_iterations=1,
            num_trials=1,
        )
    except MetisError:  # an order is no reason to fail
        return None


def breadth_first_order(graph: scipy.sparse.csr_array) -> Order:
    """A walk over all nodes of an undirected graph, the components by their first node.

    Isolated nodes, and ties of any kind, keep their order.
    """
    num_nodes = graph.shape[0]
    if not 0 < graph.nnz < 2**31 - num_nodes:  # csgraph counts edges in 32 bits
        return np.arange(num_nodes, dtype=np.int64)
    graph = _with_int32(graph)
    degrees = np.diff(graph.indptr)
    linked = np.flatnonzero(degrees)
    # Mostly there is but one component besides isolated nodes: no need to look for components.
    walk = _walk_from(graph, int(linked[degrees[linked].argmin()]))
    if walk.shape[0] < linked.shape[0]:
        return _walk_over_components(graph, degrees)
    isolated = np.flatnonzero(degrees == 0)
    return np.concatenate([isolated[: linked[0]], walk, isolated[linked[0] :]])


def _walk_from(graph: scipy.sparse.csr_array, start: int) -> Order:
    from scipy.sparse import csgraph

    walk: Order = csgraph.breadth_first_order(graph, start, return_predecessors=False)
    return walk.astype(np.int64)


def _walk_over_components(graph: scipy.sparse.csr_array, degrees: IntArray) -> Order:
    import scipy.sparse
    from scipy.sparse import csgraph

    num_nodes = graph.shape[0]
    num_components, component = csgraph.connected_components(graph, directed=False)
    # The first node of least degree in each component, in the order of the components' labels.
    by_component = np.lexsort((np.arange(num_nodes), degrees, component))
    starts = by_component[np.searchsorted(component[by_component], np.arange(num_components))]
    # One walk from an extra node that leads to all the starts; then component after component.
    root = scipy.sparse.csr_array(
        (np.ones(num_components, np.uint8), starts, np.array([0, num_components])),
        shape=(1, num_nodes),
    )
    column = scipy.sparse.csr_array((num_nodes + 1, 1), dtype=np.uint8)
    rooted = scipy.sparse.hstack([scipy.sparse.vstack([graph, root]), column], format="csr")
    walk = _walk_from(_with_int32(rooted), num_nodes)[1:]
    first = np.full(num_components, num_nodes, dtype=np.int64)
    np.minimum.at(first, component, np.arange(num_nodes))
    return walk[np.argsort(first[component[walk]], kind="stable")]


def _with_int32(graph: scipy.sparse.csr_array) -> scipy.sparse.csr_array:
    import scipy.sparse

    indices, indptr = (ids.astype(np.int32, copy=False) for ids in (graph.indices, graph.indptr))
    return scipy.sparse.csr_array((graph.data, indices, indptr), shape=graph.shape)


def mean_log_gap(graph: scipy.sparse.csr_array, order: Order, members: Order) -> float:
    """Mean of log2(distance) over the edges, if ``members`` are laid out in ``order``."""
    if graph.nnz == 0:
        return 0.0
    position = np.empty(members.shape[0], dtype=np.int32)
    position[np.searchsorted(members, order)] = np.arange(order.shape[0], dtype=np.int32)
    rows = np.repeat(position, np.diff(graph.indptr))
    gaps = np.abs(rows - position[graph.indices])
    return float(np.log2(gaps.astype(np.float32)).mean(dtype=np.float64))


NUM_DIGITS = 8
"""Readers of a part that count; more sets than ``2**8`` would leave little of the order inside."""


def _gray_places() -> npt.NDArray[np.uint8]:
    """Place of each set of readers in the Gray code: the sum of all its right shifts."""
    places = np.arange(1 << NUM_DIGITS, dtype=np.uint8)
    for shift in (1, 2, 4):
        places ^= places >> shift
    return places


GRAY_PLACES = _gray_places()
