# SPDX-License-Identifier: Apache-2.0
"""BatchableGraph: of which graphs a local graph is made, where it is several in one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._base.typing import CanonicalEType
from ..structure import read_batch_counts
from ._moves import MovableGraph


class BatchableGraph(MovableGraph):
    """Layer of `LocalGraph`: numbers of nodes and edges of each graph of a batch.

    A graph that was not batched is a batch of itself alone. Features, moves to another device and
    another id type keep these numbers; what changes the edges keeps them where it says so.
    """

    _batch_nodes: dict[str, Tensor] | None = None
    _batch_edges: dict[CanonicalEType, Tensor] | None = None

    @property
    def batch_size(self) -> int:
        """How many graphs this is."""
        return int(self.batch_num_nodes(self.ntypes[0]).shape[0])

    def batch_num_nodes(self, ntype: str | None = None) -> Tensor:
        """Number of nodes of each graph: ``[batch_size]`` int64.

        Args:
            ntype: The node type, where there are several.

        Raises:
            ValueError: the type is unknown, or must be given.
        """
        side, index = self._schema.node_id(ntype)
        name = (self._schema.dsttypes if side == "dst" else self._schema.srctypes)[index]
        if self._batch_nodes is not None:
            return self._batch_nodes[name].to(self.device)
        count = self._frames(side)[index].num_rows
        return torch.tensor([count], dtype=torch.int64, device=self.device)

    def batch_num_edges(self, etype: Any = None) -> Tensor:
        """Number of edges of each graph: ``[batch_size]`` int64.

        Args:
            etype: The relation, where there are several.

        Raises:
            ValueError: the relation is unknown, or must be given.
        """
        relation = self._schema.relation(etype)
        if self._batch_edges is not None:
            return self._batch_edges[self._schema.canonical_etypes[relation]].to(self.device)
        count = self._edge_frames[relation].num_rows
        return torch.tensor([count], dtype=torch.int64, device=self.device)

    def set_batch_num_nodes(self, val: Any) -> None:
        """Say how many nodes each graph has, after a change that lost it; set the edges as well.

        Args:
            val: ``[batch_size]`` integers, or node type -> such a tensor.

        Raises:
            TypeError: a single tensor for several types.
            ValueError: a type is missing, lengths differ, or a number is negative.
        """
        self._batch_nodes = read_batch_counts(val, self.ntypes, "nodes")

    def set_batch_num_edges(self, val: Any) -> None:
        """Say how many edges each graph has; the counterpart of `set_batch_num_nodes`."""
        if isinstance(val, dict):
            val = {self.to_canonical_etype(etype): counts for etype, counts in val.items()}
        self._batch_edges = read_batch_counts(val, self.canonical_etypes, "edges")
