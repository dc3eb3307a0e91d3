# SPDX-License-Identifier: Apache-2.0
"""The graph as a partitioner sees it: one set of nodes, undirected, no loops, no parallel edges."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse
import torch
from torch import Tensor

from ..errors import MetisError

IndexArray = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class UndirectedGraph:
    """Neighbours of each node, ascending, in compressed rows.

    Args:
        indptr: ``[num_nodes + 1]``.
        indices: ``[2 * num_edges]``, each edge once from either end.
        counts: As ``indices``: how many directed edges, in both directions, became this one.
            None where nobody asked.
    """

    indptr: IndexArray
    indices: IndexArray
    counts: IndexArray | None = None

    @property
    def num_nodes(self) -> int:
        return len(self.indptr) - 1

    @property
    def num_edges(self) -> int:
        return len(self.indices) // 2

    def __post_init__(self) -> None:
        """Check everything that METIS would not survive."""
        indptr, indices = self.indptr, self.indices
        if indptr.shape[0] == 0 or indptr[0] != 0 or indptr[-1] != indices.shape[0]:
            raise ValueError("indptr must begin with 0 and end with the length of indices")
        if bool((indptr[1:] < indptr[:-1]).any()):
            raise ValueError("indptr must ascend")
        if self.counts is not None and self.counts.shape != indices.shape:
            raise ValueError("counts must have one entry per entry of indices")
        if indices.shape[0] == 0:
            return
        if indices.min() < 0 or indices.max() >= self.num_nodes:
            raise ValueError(f"indices must be in [0, {self.num_nodes})")
        matrix = self.matrix()
        if matrix.diagonal().any():
            raise ValueError("the graph must have no self loops; remove them first")
        # With random a and b, the sum of a[u] * b[v] over all entries equals that of b[u] * a[v],
        # modulo 2**64, if every edge is there in both directions, and hardly ever otherwise.
        generator = np.random.default_rng(0)
        a, b = generator.integers(0, 2**64, (2, self.num_nodes), dtype=np.uint64)
        if np.dot(a, matrix @ b) != np.dot(b, matrix @ a):
            raise ValueError("every edge must be there in both directions; symmetrise first")

    def matrix(self) -> scipy.sparse.csr_array:
        """As a sparse matrix of ones that shares the index arrays."""
        return scipy.sparse.csr_array(
            (np.ones(self.indices.shape[0], dtype=np.uint8), self.indices, self.indptr),
            shape=(self.num_nodes, self.num_nodes),
        )

    @classmethod
    def from_edges(
        cls,
        edges: Iterable[tuple[Tensor, Tensor]],
        num_nodes: int,
        *,
        count: bool = False,
    ) -> UndirectedGraph:
        """Forget directions, loops and repetitions.

        Args:
            edges: (source, destination) of each relation, in homogenised ids.
            num_nodes: Number of nodes.
            count: Remember how often each edge was there.

        Raises:
            MetisError: The nodes do not fit 32-bit integers, which METIS needs.
        """
        if num_nodes >= 2**31 - 1:
            raise MetisError(
                f"METIS and the node order use 32-bit ids: the graph must have fewer than 2**31 "
                f"nodes (got {num_nodes}); bring an assignment as part_method, and reorder=False"
            )
        sources: list[npt.NDArray[np.int32]] = []
        targets: list[npt.NDArray[np.int32]] = []
        for src, dst in edges:
            proper = src != dst
            sources.append(src[proper].to(torch.int32).cpu().numpy())
            targets.append(dst[proper].to(torch.int32).cpu().numpy())
        rows = np.concatenate([*sources, *targets, np.zeros(0, np.int32)])
        columns = np.concatenate([*targets, *sources, np.zeros(0, np.int32)])
        del sources, targets
        values = np.ones(rows.shape[0], dtype=np.int32 if count else np.int8)
        matrix = scipy.sparse.coo_array((values, (rows, columns)), shape=(num_nodes, num_nodes))
        del rows, columns
        compressed = matrix.tocsr()  # adds up parallel edges and sorts each row
        return cls(compressed.indptr, compressed.indices, compressed.data if count else None)
