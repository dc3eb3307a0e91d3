# SPDX-License-Identifier: Apache-2.0
"""Numbers that say where nodes are in a graph: positional encodings, distances, labels.

Dense linear algebra and shortest paths are SciPy's, so these are for graphs of up to some thousand
nodes. Signs of eigenvectors are drawn from torch's random numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import GraphValueError
from ...graph import Graph
from ...graph.convert import require, to_scipy
from ._matrices import adj_external
from ._products import check_one_relation

__all__ = [
    "double_radius_node_labeling", "lap_pe", "laplacian_lambda_max", "laplacian_pe",
    "random_walk_pe", "shortest_dist", "svd_pe",
]  # fmt: skip


def random_walk_pe(g: Graph, k: int, eweight_name: str | None = None) -> Tensor:
    """Probabilities that a random walk is back where it began after 1, 2, ..., ``k`` steps.

    From "Graph Neural Networks with Learnable Structural and Positional Representations"
    (https://arxiv.org/abs/2110.07875): float32 ``[num_nodes, k]``.
    """
    check_one_relation(g, "random_walk_pe")
    steps = to_scipy(g, eweight_name, fmt="csr").toarray()
    steps = steps / (steps.sum(1, keepdims=True) + 1e-30)
    power, returns = steps, [steps.diagonal()]
    for _ in range(k - 1):
        power = power @ steps
        returns.append(power.diagonal())
    return torch.from_numpy(np.stack(returns, -1)).float()


def lap_pe(g: Graph, k: int, padding: bool = False, return_eigval: bool = False) -> Any:
    """Eigenvectors of the normalized Laplacian with the smallest eigenvalues but one.

    From "A Generalization of Transformer Networks to Graphs" (https://arxiv.org/abs/2012.09699).
    Each vector's sign is drawn at random.

    Args:
        padding: Whether to fill up with zeros where there are fewer than ``k``; else ``k`` must be
            below the number of nodes.

    Returns:
        float32 ``[num_nodes, k]``; with ``return_eigval`` a pair of it and ``[k]``.

    Raises:
        ValueError: too few nodes without ``padding``.
    """
    check_one_relation(g, "lap_pe")
    count = g.num_nodes()
    if not padding and count <= k:
        raise GraphValueError(
            f"k must be below the number of nodes, {count} (got {k}); or pass padding=True"
        )
    sparse = require("scipy.sparse", "scipy", "lap_pe")
    values, vectors = np.linalg.eig(_laplacian(g, sparse, transpose=False).toarray())
    # the eigenvalue 0 comes first, and its vector says nothing
    chosen = np.argsort(values.real, kind="stable")[1 : min(count - 1, k) + 1]
    encoding = torch.from_numpy(vectors[:, chosen].real.copy()).float()
    encoding = encoding * (2.0 * (torch.rand(encoding.shape[1]) > 0.5) - 1.0)
    eigenvalues = torch.from_numpy(values[chosen].real.copy()).float()
    lacking = (0, k - encoding.shape[1])
    encoding = torch.nn.functional.pad(encoding, lacking)
    eigenvalues = torch.nn.functional.pad(eigenvalues, lacking, value=float("nan"))
    return (encoding, eigenvalues) if return_eigval else encoding


laplacian_pe = lap_pe


def svd_pe(g: Graph, k: int, padding: bool = False, random_flip: bool = True) -> Tensor:
    """Left and right singular vectors of the adjacency matrix, scaled by root singular values.

    From "Global Self-Attention as a Replacement for Graph Convolution"
    (https://arxiv.org/abs/2108.03348): float32 ``[num_nodes, 2 * k]``.
    """
    check_one_relation(g, "svd_pe")
    count = g.num_nodes()
    if not padding and count < k:
        raise GraphValueError(
            f"k must be at most the number of nodes, {count} (got {k}); or pass padding=True"
        )
    linalg = require("scipy.linalg", "scipy", "svd_pe")
    left, sizes, right = linalg.svd(adj_external(g, scipy_fmt="coo").toarray())
    m = min(count, k)
    root = np.sqrt(sizes[:m])
    rows = np.concatenate([left[:, :m] * root, right.T[:, :m] * root], 1)
    encoding = torch.from_numpy(rows).float()
    if random_flip:
        encoding = encoding * (2.0 * (torch.rand(count, 1) > 0.5) - 1.0)
    return torch.nn.functional.pad(encoding, (0, 2 * (k - m)))


def laplacian_lambda_max(g: Graph) -> list[float]:
    """Largest eigenvalue of the normalized Laplacian, for each graph of a batch."""
    from ._batch import unbatch

    check_one_relation(g, "laplacian_lambda_max")
    sparse = require("scipy.sparse", "scipy", "laplacian_lambda_max")
    matrices = (_laplacian(part, sparse, transpose=True).toarray() for part in unbatch(g))
    spectra = map(np.linalg.eigvals, matrices)
    return [float(values[np.abs(values).argmax()].real) for values in spectra]


def _laplacian(g: Graph, sparse: Any, transpose: bool) -> Any:
    """I - D^-1/2 A D^-1/2 with in-degrees, those of 0 taken as 1."""
    degrees = g.in_degrees().cpu().numpy().clip(1).astype(float)
    scale = sparse.diags(degrees**-0.5)
    adjacency = adj_external(g, transpose=transpose, scipy_fmt="csr")
    return sparse.eye(g.num_nodes()) - scale @ adjacency @ scale


def double_radius_node_labeling(g: Graph, src: int, dst: int) -> Tensor:
    """Labels of nodes by their distances to two nodes; distances pass through neither.

    From "Link Prediction Based on Graph Neural Networks" (https://arxiv.org/abs/1802.09691):
    ``1 + min(a, b) + (d // 2) * (d // 2 + d % 2 - 1)`` with ``d = a + b`` for a node at distance
    ``a`` of one and ``b`` of the other; 1 for the two, 0 for nodes that do not reach both. int64
    ``[num_nodes]``.
    """
    check_one_relation(g, "double_radius_node_labeling")
    csgraph = require("scipy.sparse.csgraph", "scipy", "double_radius_node_labeling")
    adjacency = adj_external(g, scipy_fmt="csr")
    low, high = sorted((int(src), int(dst)))

    def distances(of: int, without: int) -> Any:
        rest = np.delete(np.arange(adjacency.shape[0]), without)
        index = of - (without < of)
        lengths = csgraph.shortest_path(
            adjacency[rest][:, rest], directed=False, unweighted=True, indices=index
        )
        return np.insert(lengths, without, 0)

    a, b = distances(low, high), distances(high, low)
    total = a + b
    with np.errstate(invalid="ignore"):
        labels = 1 + np.minimum(a, b) + total // 2 * (total // 2 + total % 2 - 1)
    labels[[low, high]] = 1
    labels[~np.isfinite(labels)] = 0
    return torch.from_numpy(labels).long()


def shortest_dist(g: Graph, root: int | None = None, return_paths: bool = False) -> Any:
    """Number of edges on a shortest path from one node, or from every node, to every node.

    Returns:
        int64 ``[num_nodes]`` (a row per first node, ``[num_nodes, num_nodes]``, without ``root``),
        -1 where there is no path. With ``return_paths`` a pair of it and the paths' edge ids,
        ``[..., longest path]``, filled up with -1.
    """
    check_one_relation(g, "shortest_dist")
    csgraph = require("scipy.sparse.csgraph", "scipy", "shortest_dist")
    adjacency = adj_external(g, scipy_fmt="csr")
    roots = list(range(g.num_nodes())) if root is None else [int(root)]
    dist, before = csgraph.dijkstra(
        adjacency, directed=True, indices=roots, return_predecessors=True, unweighted=True
    )
    reached = np.isfinite(dist)
    lengths = torch.from_numpy(np.where(reached, dist, -1)).long()
    answer = (lengths if root is None else lengths[0]).to(g.device)
    if not return_paths:
        return answer
    longest = int(lengths.max()) if lengths.numel() else 0
    paths = torch.full((len(roots), g.num_nodes(), longest), -1, dtype=torch.int64)
    row, node = (lengths > 0).nonzero(as_tuple=True)
    step, here = lengths[row, node] - 1, node
    while len(row):  # all paths at once, from their last edges on
        previous = torch.from_numpy(before)[row, here].long()
        edges = g.edge_ids(previous.tolist(), here.tolist())
        paths[row, node, step] = edges.cpu().long()
        goes_on = step > 0
        row, node, step, here = (x[goes_on] for x in (row, node, step - 1, previous))
    return answer, (paths if root is None else paths[0]).to(g.device)
