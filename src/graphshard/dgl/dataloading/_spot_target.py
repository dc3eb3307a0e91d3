# SPDX-License-Identifier: Apache-2.0
"""SpotTarget: which of a batch's edges to keep out of the blocks, by the degrees of their ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._base.typing import EType
from ...sampling.sampler import find_exclude_eids


@dataclass(repr=False, eq=False)
class SpotTarget:
    """For ``exclude`` of an edge sampler: excludes edges that have an end of low degree.

    At a node of few edges the edge that is to be predicted tells much; where there are many it
    tells little, and leaving it out costs a batch with many edges its structure.

    Source: Zhu et al., "SpotTarget: Rethinking the Effect of Target Edges for Link Prediction in
    Graph Neural Networks", https://arxiv.org/abs/2306.00899.
    """

    g: Any
    exclude: Any
    degree_threshold: int = 10
    reverse_eids: Tensor | Mapping[EType, Tensor] | None = None
    reverse_etypes: Mapping[EType, EType] | None = None

    def __call__(self, seed_edges: Tensor) -> Any:
        """Ids of the edges to exclude for a batch of edges."""
        src, dst = self.g.find_edges(seed_edges)
        degrees = torch.minimum(self.g.in_degrees(src), self.g.in_degrees(dst))
        chosen = seed_edges[degrees < self.degree_threshold]
        given = self.exclude, self.reverse_eids, self.reverse_etypes
        return find_exclude_eids(self.g, chosen, *given)
