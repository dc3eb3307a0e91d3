# SPDX-License-Identifier: Apache-2.0
"""Graph diffusion: dense sums over walks of all lengths, made sparse again.

From "Diffusion Improves Graph Learning" (https://arxiv.org/abs/1911.05485). Cost is that of dense
matrices of ``num_nodes ** 2``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...graph import Graph
from ._base import BaseTransform, with_edges
from ._features import dense_weights


class GDC(BaseTransform):
    """Generalized diffusion: ``sum over k of coefs[k] * A ** k``.

    Args:
        coefs: The coefficients.
        eweight_name: Edge feature with the weights A, 1 where there is none; of the result too.
        eps: Least weight that stays; None for what leaves ``avg_degree`` edges per node.
        avg_degree: Edges per node, without ``eps``.
    """

    def __init__(
        self,
        coefs: Sequence[float],
        eweight_name: str = "w",
        eps: float | None = None,
        avg_degree: int = 5,
    ) -> None:
        self.coefs = coefs
        self.eweight_name = eweight_name
        self.eps = eps
        self.avg_degree = avg_degree

    def __call__(self, g: Graph) -> Graph:
        weights = self._diffused(dense_weights(g, self.eweight_name))
        dst, src = (weights >= self._least(weights)).nonzero(as_tuple=True)
        ends = src.to(g.idtype), dst.to(g.idtype)
        new = with_edges(g, {g.canonical_etypes[0]: ends}, copy_edata=False)
        new.edata[self.eweight_name] = weights[dst, src]
        return new

    def _diffused(self, adjacency: Tensor) -> Tensor:
        power = torch.eye(adjacency.shape[0], dtype=adjacency.dtype, device=adjacency.device)
        total = self.coefs[0] * power
        for coefficient in self.coefs[1:]:
            power = power @ adjacency
            total = total + coefficient * power
        return total

    def _least(self, weights: Tensor) -> float:
        if self.eps is not None:
            return self.eps
        num_nodes = weights.shape[0]
        if self.avg_degree > num_nodes:
            return float("-inf")
        ordered = weights.flatten().sort(descending=True).values
        return float(ordered[self.avg_degree * num_nodes - 1])


class PPR(GDC):
    """Diffusion by personalized PageRank: ``alpha * (I - (1 - alpha) A) ** -1``.

    Args:
        alpha: Probability to begin anew at each step.
        eweight_name: As for `GDC`.
        eps: As for `GDC`.
        avg_degree: As for `GDC`.
    """

    def __init__(
        self,
        alpha: float = 0.15,
        eweight_name: str = "w",
        eps: float | None = None,
        avg_degree: int = 5,
    ) -> None:
        super().__init__((), eweight_name, eps, avg_degree)
        self.alpha = alpha

    def _diffused(self, adjacency: Tensor) -> Tensor:
        own = torch.eye(adjacency.shape[0], dtype=adjacency.dtype, device=adjacency.device)
        return self.alpha * torch.linalg.inv(own - (1 - self.alpha) * adjacency)


class HeatKernel(GDC):
    """Diffusion by the heat kernel: ``exp(t (A - I))``.

    Args:
        t: Diffusion time.
        eweight_name: As for `GDC`.
        eps: As for `GDC`.
        avg_degree: As for `GDC`.
    """

    def __init__(
        self,
        t: float = 2.0,
        eweight_name: str = "w",
        eps: float | None = None,
        avg_degree: int = 5,
    ) -> None:
        super().__init__((), eweight_name, eps, avg_degree)
        self.t = t

    def _diffused(self, adjacency: Tensor) -> Tensor:
        own = torch.eye(adjacency.shape[0], dtype=adjacency.dtype, device=adjacency.device)
        return torch.linalg.matrix_exp(self.t * (adjacency - own))
