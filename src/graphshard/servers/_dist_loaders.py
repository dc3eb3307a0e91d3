# SPDX-License-Identifier: Apache-2.0
"""Loaders of a `DistGraph` under DGL's names: of nodes, of edges, and of anything by its ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .._base.typing import EdgeIds, EType, NodeIds
from ..sampling.lazy_features import FeatureNames
from ..sampling.loader import EdgeDataLoader, NodeDataLoader, Pipeline, Run, Stage
from ..sampling.sampler import Exclude
from ._dist_graph import DistGraph

_QUEUE_SIZE = 4


class DistNodeDataLoader(NodeDataLoader):
    """A `graphshard.dgl.dataloading.NodeDataLoader` of a `DistGraph`.

    All trainers make it together, each with nodes of its own, and get the same number of batches:
    where one would need fewer than another, its batches are smaller. What is wrong on one trainer
    is an error on all. With ``collective=False`` a trainer makes it alone, as with DGL: ``if
    g.rank() == 0:`` may stand before it, and its batches are those of its own nodes.

    Args:
        nids: Ids of nodes, or type to ids, of this trainer; from `node_split`.
        queue_size: Batches made ahead, ``prefetch`` of other loaders.
        **options: As for `graphshard.dgl.dataloading.DataLoader`.

    Raises:
        TypeError: ``g`` is no `DistGraph`.
        RankError: Another trainer did not come to make its own in time.
    """

    def __init__(
        self,
        g: DistGraph,
        nids: NodeIds,
        graph_sampler: Any,
        device: torch.device | str | None = None,
        *,
        queue_size: int | None = None,
        **options: Any,
    ) -> None:
        _check_graph(g)
        super().__init__(g, nids, graph_sampler, device, **_prefetch(queue_size), **options)


class DistEdgeDataLoader(EdgeDataLoader):
    """A `graphshard.dgl.dataloading.EdgeDataLoader` of a `DistGraph`; see `DistNodeDataLoader`.

    Arguments that are not described here are those of `DistNodeDataLoader` and of
    `graphshard.dgl.dataloading.EdgePredictionSampler`.

    Args:
        eids: Ids of edges, or relation to ids, of this trainer; from `edge_split`.
        reverse_eids: A `DistTensor` will do.
        negative_sampler: Those of ``graphshard.dgl.dataloading.negative_sampler`` draw by edge, so
            that negatives do not depend on hosts and trainers.
    """

    def __init__(
        self,
        g: DistGraph,
        eids: EdgeIds,
        graph_sampler: Any,
        device: torch.device | str | None = None,
        *,
        exclude: Exclude = None,
        reverse_eids: Any = None,
        reverse_etypes: Mapping[EType, EType] | None = None,
        negative_sampler: Callable[..., Any] | None = None,
        prefetch_labels: FeatureNames = None,
        g_sampling: DistGraph | None = None,
        queue_size: int | None = None,
        **options: Any,
    ) -> None:
        _check_graph(g)
        super().__init__(
            g,
            eids,
            graph_sampler,
            device,
            exclude=exclude,
            reverse_eids=reverse_eids,
            reverse_etypes=reverse_etypes,
            negative_sampler=negative_sampler,
            prefetch_labels=prefetch_labels,
            g_sampling=g_sampling,
            **_prefetch(queue_size),
            **options,
        )


class DistDataLoader:
    """Iterates over what a function makes of batches of items, some batches ahead in a thread.

    Batches come in order. What the function raises, the loop raises at that batch. Leaving a loop
    early ends the thread once it has finished the batches it has begun. Each trainer has its own,
    of as many batches as its items make.

    Args:
        dataset: Ids, or anything with a length and items: pairs of a type and an id as well.
        shuffle: Take the items in another order, from torch's generator, every epoch.
        collate_fn: From a list of items, numbers or what else they are, to a batch; by default the
            list is the batch. It is called in the thread, without recording gradients, on the
            caller's GPU; what it puts there is copied on that GPU's default stream.
        drop_last: Leave out a last batch that is not full.
        queue_size: How many batches are made ahead; by default 4, as DGL has it. 0 makes each when
            it is asked for, in the caller's thread.

    Raises:
        TypeError: ``collate_fn`` cannot be called.
        ValueError: ``batch_size`` is not positive, or ``queue_size`` negative.

    Example:
        >>> loader = DistDataLoader(torch.arange(5), 2, collate_fn=sum)
        >>> len(loader), list(loader)
        (3, [1, 5, 4])
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        shuffle: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        queue_size: int | None = None,
    ) -> None:
        if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
            raise ValueError(f"batch_size must be a positive number (got {batch_size!r})")
        if collate_fn is not None and not callable(collate_fn):
            raise TypeError(f"collate_fn must be a function (got {type(collate_fn).__name__})")
        self.dataset, self.batch_size = dataset, batch_size
        self.shuffle, self.drop_last, self.collate_fn = shuffle, drop_last, collate_fn
        self.queue_size = _QUEUE_SIZE if queue_size is None else queue_size
        stage = Stage("collate", self._collated)
        self._pipeline = Pipeline([stage], self.queue_size)

    def __len__(self) -> int:
        """Batches in an epoch."""
        full, rest = divmod(len(self.dataset), self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Run[Any]:
        """One epoch."""
        return self._pipeline.run(self._batches())

    def _batches(self) -> Iterator[list[int]]:
        """Positions of the items of each batch."""
        count = len(self.dataset)
        order = torch.randperm(count) if self.shuffle else torch.arange(count)
        for step in range(len(self)):
            yield order[step * self.batch_size : (step + 1) * self.batch_size].tolist()

    def _collated(self, positions: list[int]) -> Any:
        if isinstance(self.dataset, Tensor):
            items = self.dataset[torch.tensor(positions)].tolist()
        else:
            items = [_plain(self.dataset[position]) for position in positions]
        return items if self.collate_fn is None else self.collate_fn(items)


def _plain(item: Any) -> Any:
    """An item with numbers in the place of tensors that hold one."""
    if isinstance(item, tuple):
        return tuple(_plain(each) for each in item)
    return item.item() if isinstance(item, Tensor) and item.numel() == 1 else item


def _check_graph(g: Any) -> None:
    if not isinstance(g, DistGraph):
        raise TypeError(
            f"g must be a DistGraph (got {type(g).__name__}); use graphshard.dgl.dataloading for "
            "a graph that is whole in this process"
        )


def _prefetch(queue_size: int | None) -> dict[str, Any]:
    return {} if queue_size is None else {"prefetch": queue_size}
