# SPDX-License-Identifier: Apache-2.0
"""DistEmbedding: learnable rows that are spread over the hosts of a cluster."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ._dist_tensor import DistTensor, InitFunction, RowIndex, row_ids


class DistEmbedding:
    """A float32 row for each node or edge, trained by a sparse optimizer.

    All trainers make it together. A lookup gives rows that autograd knows; gradients stay with
    them until the ``step`` of a `SparseAdagrad`, `SparseAdam` or `SparseSGD`.

    Args:
        num_embeddings: Number of nodes or edges of a type.
        embedding_dim: Columns.
        name: As for `DistTensor`.
        init_func: As for `DistTensor`; None for zeros.
        part_policy: As for `DistTensor`.
        persistent: As for `DistTensor`.

    Raises:
        ValueError: As `DistTensor`.

    Example:
        >>> import tempfile, torch
        >>> from graphshard.data import random_graph
        >>> from graphshard.servers import DistEmbedding, DistGraph, SparseSGD
        >>> from graphshard.servers import exit_client
        >>> from graphshard.partition import partition_graph
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = partition_graph(random_graph(50, 200, seed=0), "g", 2, folder, quiet=True)
        ...     g = DistGraph("g", part_config=f"{folder}/g.json")
        >>> rows = DistEmbedding(g.num_nodes(), 2, "rows")
        >>> optimizer = SparseSGD([rows], lr=0.5)
        >>> rows([3, 3, 8]).sum().backward()
        >>> optimizer.step()
        >>> rows.weight[[3, 8]]
        tensor([[-1.0000, -1.0000],
                [-0.5000, -0.5000]])
        >>> exit_client()
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        name: str | None = None,
        init_func: InitFunction | None = None,
        part_policy: Any = None,
        *,
        persistent: bool = False,
    ) -> None:
        shape = (num_embeddings, embedding_dim)
        self._tensor = DistTensor(shape, torch.float32, name, init_func, part_policy, persistent)
        self._lookups: list[tuple[Tensor, Tensor]] = []

    def __call__(self, ids: RowIndex, device: torch.device | str = "cpu") -> Tensor:
        """Rows ``[n, embedding_dim]``; with gradients enabled a leaf that requires one.

        Raises:
            IndexError: An id is out of range.
        """
        chosen = row_ids(ids, self.num_embeddings, self.name)
        rows = self._tensor[chosen].to(device)
        if torch.is_grad_enabled():
            rows.requires_grad_()
            self._lookups.append((chosen, rows))
        return rows

    @property
    def num_embeddings(self) -> int:
        """Rows."""
        return self._tensor.shape[0]

    @property
    def embedding_dim(self) -> int:
        """Columns."""
        return self._tensor.shape[1]

    @property
    def weight(self) -> DistTensor:
        """All rows."""
        return self._tensor

    @property
    def name(self) -> str:
        """As `DistTensor.name`."""
        return self._tensor.name

    @property
    def part_policy(self) -> str:
        """As `DistTensor.part_policy`."""
        return self._tensor.part_policy

    @property
    def has_gradients(self) -> bool:
        """Whether a lookup since `reset`, be it of no rows, was part of a loss."""
        return any(rows.grad is not None for _, rows in self._lookups)

    def gradients(self) -> tuple[Tensor, list[Tensor]]:
        """Of all lookups since `reset`; those outside of the loss have none.

        Returns:
            Ids, int64 ``[n]``; and their gradients, ``[_, embedding_dim]`` of each lookup, at least
            one, which together have ``n`` rows.
        """
        found = [(ids, rows.grad) for ids, rows in self._lookups if rows.grad is not None]
        if not found:
            return torch.empty(0, dtype=torch.int64), [torch.empty(0, self.embedding_dim)]
        ids = found[0][0] if len(found) == 1 else torch.cat([ids for ids, _ in found])
        return ids.long(), [grad.cpu() for _, grad in found]

    def zero_grad(self) -> None:
        """Forget the gradients of lookups."""
        for _, rows in self._lookups:
            rows.grad = None

    def reset(self) -> None:
        """Forget the lookups."""
        self._lookups.clear()

    def __repr__(self) -> str:
        return f"DistEmbedding({self.num_embeddings}, {self.embedding_dim}, name={self.name!r})"
