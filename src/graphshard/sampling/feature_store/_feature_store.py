# SPDX-License-Identifier: Apache-2.0
"""FeatureStore: where the feature rows of a batch come from."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from .._ownership import RowKind


@dataclass(frozen=True)
class FeatureRequest:
    """Rows that are wanted.

    Args:
        kind: Node type; or a relation, for features of edges.
        names: Which features.
        ids: Integer ``[n]``, ids of the kind as the graph store gives them, in any order; repeats
            are legal.
        distinct: Says that there are no repeats, which then need not be looked for.
    """

    kind: RowKind
    names: tuple[str, ...]
    ids: Tensor
    distinct: bool = field(default=False, kw_only=True)


class FeatureStore(Protocol):
    """Where feature rows come from. Loaders take one as ``feature_store``.

    A class of your own needs these members and no base. Which features a loader asks for is what
    the sampler names: ``prefetch_node_feats``, ``prefetch_labels``, ``prefetch_edge_feats``.

    The loaders call `fetch` once for each batch, for all of its features together, in a thread of
    their own that is batches ahead of training: it may wait for an answer from elsewhere, with all
    requests on their way at the same time.

    Example:
        >>> import torch
        >>> from graphshard.data import load_dataset
        >>> from graphshard.sampling import DataLoader, NeighborSampler
        >>> class Degrees:
        ...     def __init__(self, graph):
        ...         self.column = graph.in_degrees().float().view(-1, 1)
        ...     def feature_names(self, kind):
        ...         return ["degree"]
        ...     def fetch(self, requests):
        ...         return [{"degree": self.column[request.ids]} for request in requests]
        ...     def on(self, group):
        ...         return self
        ...     def close(self):
        ...         pass
        >>> graph = load_dataset("cora").graph
        >>> sampler = NeighborSampler([5], prefetch_node_feats=["degree"])
        >>> loader = DataLoader(graph, range(4), sampler, 4, feature_store=Degrees(graph))
        >>> [batch] = loader
        >>> batch[0].srcdata["degree"][:4].view(-1)
        tensor([3., 3., 5., 1.])
    """

    def feature_names(self, kind: RowKind) -> Collection[str]:
        """Features of nodes of a type, or of edges of a relation; none where it has none."""

    def fetch(self, requests: Sequence[FeatureRequest]) -> list[dict[str, Tensor]]:
        """The rows of each request by name, ``[n, *]`` in the order of its ids.

        A store that is collective says so; then every rank must ask for the same kinds and names
        in the same order, of any number of ids.
        """

    def on(self, group: dist.ProcessGroup | None) -> FeatureStore:
        """The store for one thread of a loader, over another group of the same ranks.

        A store that is not collective returns itself.
        """

    def close(self) -> None:
        """Free what the store holds; nothing can be fetched afterwards.

        A loader closes what it has made, and never a store that it was given.
        """
