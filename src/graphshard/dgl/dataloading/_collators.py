# SPDX-License-Identifier: Apache-2.0
"""NodeCollator, EdgeCollator: from items of a data set to batches, for loaders that have none.

They are DGL's, for ``torch.utils.data.DataLoader`` and for `DistDataLoader`; the loaders of this
package take a sampler itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._base.typing import EType
from ...sampling.graph_store import graph_store_of
from ...sampling.sampler import EdgePredictionSampler, Exclude


class ItemCollator:
    """Base of both."""

    def __init__(self, g: Any, ids: Any, kinds: Sequence[Any]) -> None:
        if not isinstance(ids, Mapping) and len(kinds) != 1:
            raise TypeError(
                f"ids must be a dictionary from type to ids because the graph has {list(kinds)} "
                f"(got {type(ids).__name__})"
            )
        self.g = g
        self._dataset: Any = TypedItems(ids) if isinstance(ids, Mapping) else torch.as_tensor(ids)

    @property
    def dataset(self) -> Any:
        """The ids that a loader takes items from, or pairs of a type and an id."""
        return self._dataset

    @staticmethod
    def ids_of(items: Any) -> Any:
        """Items of a batch as a sampler takes them: ids, or type to ids."""
        if isinstance(items, Tensor | Mapping):
            return items
        if len(items) == 0 or not isinstance(items[0], tuple):
            return torch.tensor([int(item) for item in items], dtype=torch.int64)
        by_type: dict[Any, list[int]] = {}
        for kind, item in items:
            by_type.setdefault(kind, []).append(int(item))
        return {kind: torch.tensor(ids) for kind, ids in by_type.items()}


class TypedItems:
    """Ids of several types as a list of pairs, one type after another."""

    def __init__(self, ids: Mapping[Any, Any]) -> None:
        self._ids = {kind: torch.as_tensor(some) for kind, some in ids.items()}

    def __len__(self) -> int:
        return sum(len(ids) for ids in self._ids.values())

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"an item must be in [0, {len(self)}) (got {index})")
        for kind, ids in self._ids.items():
            if index < len(ids):
                return kind, int(ids[index])
            index -= len(ids)
        raise AssertionError


class NodeCollator(ItemCollator):
    """Makes batches of nodes."""

    def __init__(self, g: Any, nids: Any, graph_sampler: Any) -> None:
        super().__init__(g, nids, g.ntypes)
        self.nids, self.graph_sampler = nids, graph_sampler

    def collate(self, items: Any) -> Any:
        """The batch of some items: ``(input_nodes, output_nodes, blocks)``."""
        return self.graph_sampler.sample(self.g, self.ids_of(items))


class EdgeCollator(ItemCollator):
    """Makes batches of edges."""

    def __init__(
        self,
        g: Any,
        eids: Any,
        graph_sampler: Any,
        g_sampling: Any = None,
        exclude: Exclude = None,
        reverse_eids: Tensor | Mapping[EType, Tensor] | None = None,
        reverse_etypes: Mapping[EType, EType] | None = None,
        negative_sampler: Any = None,
    ) -> None:
        super().__init__(g, eids, graph_store_of(g).canonical_etypes)
        self.eids = eids
        options = exclude, reverse_eids, reverse_etypes, negative_sampler
        self.graph_sampler = EdgePredictionSampler(graph_sampler, *options, g_sampling=g_sampling)

    def collate(self, items: Any) -> Any:
        """The batch of some items: ``(input_nodes, pair_graph, [negative_pair_graph,] blocks)``."""
        return self.graph_sampler.sample(self.g, self.ids_of(items))
