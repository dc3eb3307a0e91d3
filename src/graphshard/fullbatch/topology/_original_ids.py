# SPDX-License-Identifier: Apache-2.0
"""OriginalIds: what is the same however a graph is partitioned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from ..._typing import CanonicalEType
from ...ops import Attention, edge_keys


@dataclass(frozen=True)
class OriginalIds:
    """What this rank's nodes and edges were called before the graph was partitioned.

    Args:
        nodes: Node type to int64 ``[num_src_nodes]``, one per row of the source frame.
        edges: Relation to int64 ``[num_edges]``, one per row of the edge frame.
    """

    nodes: Mapping[str, Tensor]
    edges: Mapping[CanonicalEType, Tensor]
    _keys: dict[CanonicalEType, Tensor] = field(default_factory=dict, init=False, repr=False)

    def keyed(self, etype: CanonicalEType, attention: Attention) -> Attention:
        """The attention, its dropout mask going by original edge ids.

        So the mask of an edge does not depend on the partition, if all ranks have one seed.
        """
        if attention.mask is None or attention.mask.keys is not None:
            return attention
        if etype not in self._keys:
            self._keys[etype] = edge_keys(self.edges[etype])
        return replace(attention, mask=replace(attention.mask, keys=self._keys[etype]))
