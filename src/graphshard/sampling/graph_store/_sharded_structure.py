# SPDX-License-Identifier: Apache-2.0
"""ShardedStructure: what structures over several ranks have in common."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..._typing import CanonicalEType
from ...comm.group import GroupState
from .._ownership import Ownership
from ._own_edges import OwnEdges


class ShardedStructure:
    """A graph of which each rank owns a part, as samplers see it.

    Args:
        edges: Edges of this rank's nodes.
        idtype: Type of the ids that it takes and gives.
    """

    def __init__(self, edges: OwnEdges, idtype: torch.dtype) -> None:
        self._edges = edges
        self._idtype = idtype
        ranges = edges.ownership.ranges
        self._ntypes = [kind for kind in ranges if isinstance(kind, str)]
        self._etypes = [kind for kind in ranges if not isinstance(kind, str)]

    @property
    def ownership(self) -> Ownership:
        """Who owns what."""
        return self._edges.ownership

    @property
    def ntypes(self) -> Sequence[str]:
        return self._ntypes

    @property
    def canonical_etypes(self) -> Sequence[CanonicalEType]:
        return self._etypes

    @property
    def idtype(self) -> torch.dtype:
        return self._idtype

    @property
    def device(self) -> torch.device:
        """The CPU, wherever features are."""
        return torch.device("cpu")

    def num_nodes(self, ntype: str) -> int:
        return self.ownership.ranges[ntype].num_ids

    def num_edges(self, etype: CanonicalEType) -> int:
        return self.ownership.ranges[etype].num_ids

    @property
    def _state(self) -> GroupState:
        return self._edges.state

    def _as_ids(self, ids: Tensor | None) -> Tensor | None:
        return None if ids is None else ids.to(self._idtype)
