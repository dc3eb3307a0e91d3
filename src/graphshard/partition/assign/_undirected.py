# SPDX-License-Identifier: Apache-2.0
"""The graph as a partitioner sees it: one set of nodes, undirected, no loops, no parallel edges."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import InitVar, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...errors import MetisError
from ...ops import Adjacency

if TYPE_CHECKING:
    import scipy.sparse

# Edges whose numbers fit the cache next to a core.
_SLICE = 1 << 15

IndexArray = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class UndirectedGraph:
    """Neighbours of each node, ascending, in compressed rows.

    Args:
        indptr: ``[num_nodes + 1]``.
        indices: ``[2 * num_edges]``, each edge once from either end.
        counts: As ``indices``: how many directed edges, in both directions, became this one.
            None where that was not counted.
        check: Look at every number; pass False only for arrays that are known to be right.

    Raises:
        ValueError: The arrays are not those of such a graph.
    """

    indptr: IndexArray
    indices: IndexArray
    counts: IndexArray | None = None
    check: InitVar[bool] = True

    @property
    def num_nodes(self) -> int:
        return len(self.indptr) - 1

    @property
    def num_edges(self) -> int:
        return len(self.indices) // 2

    def __post_init__(self, check: bool) -> None:
        """Check everything that METIS would not survive."""
        if not check:
            return
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
        import scipy.sparse

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
        import scipy.sparse

        if num_nodes >= 2**31 - 1:
            raise MetisError(
                f"METIS and the node order use 32-bit ids: the graph must have fewer than 2**31 "
                f"nodes (got {num_nodes}); bring an assignment as part_method, and reorder=False"
            )
        both = [_proper(src, dst) for src, dst in edges]
        src, dst = (
            ends[0] if len(ends) == 1 else torch.cat([torch.zeros(0, dtype=torch.int32), *ends])
            for ends in ([src for src, _ in both], [dst for _, dst in both])
        )
        del both
        dtype = torch.int32 if src.shape[0] < 2**31 else torch.int64
        src, dst = src.to(dtype), dst.to(dtype)
        indptr, indices, eids = Adjacency(src, dst, num_nodes, num_nodes, check=False).csr()
        ones = np.ones(dst.shape[0], dtype=np.int32 if count else np.int8)
        out = scipy.sparse.csr_array(
            (ones, indices.numpy(), indptr.numpy()), shape=(num_nodes, num_nodes)
        )
        whole = eids is None and out.has_canonical_format and _is_symmetric(src, dst, num_nodes)
        del src, dst, ones, indptr, indices, eids
        if whole:
            return cls(out.indptr, out.indices, 2 * out.data if count else None, check=False)
        # Turning a matrix round takes linear time and leaves its rows ascending.
        into = out.T.tocsr()
        if not out.has_canonical_format:
            into.sum_duplicates()
            out = into.T.tocsr()
        if not count:
            out.data[:], into.data[:] = 1, 1  # a sum of 256 would be none at all
        if np.array_equal(out.indptr, into.indptr) and np.array_equal(out.indices, into.indices):
            out.data += into.data
        else:
            out = out + into
        return cls(out.indptr, out.indices, out.data if count else None, check=False)


def _proper(src: Tensor, dst: Tensor) -> tuple[Tensor, Tensor]:
    """Ends of the edges that are no loops, as 32-bit numbers."""
    src, dst = src.to(torch.int32).cpu(), dst.to(torch.int32).cpu()
    loops = src == dst
    return (src[~loops], dst[~loops]) if bool(loops.any()) else (src, dst)


def _is_symmetric(src: Tensor, dst: Tensor, num_nodes: int) -> bool:
    """Whether every edge is there in both directions, where none is there twice.

    By the sums that `UndirectedGraph` checks, in half of the time that turning the matrix takes.
    """
    generator = np.random.default_rng(0)
    a, b = torch.from_numpy(generator.integers(-(2**63), 2**63, (2, num_nodes)))

    def difference(some: tuple[Tensor, Tensor]) -> int:
        src, dst = some
        there = a.index_select(0, src).dot(b.index_select(0, dst))
        back = b.index_select(0, src).dot(a.index_select(0, dst))
        return int(there) - int(back)

    with ThreadPoolExecutor(max_workers=2) as pool:
        total = sum(pool.map(difference, zip(src.split(_SLICE), dst.split(_SLICE), strict=True)))
    return total % 2**64 == 0
