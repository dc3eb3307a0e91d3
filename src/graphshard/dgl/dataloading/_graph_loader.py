# SPDX-License-Identifier: Apache-2.0
"""GraphDataLoader: batches of graphs, out of data sets whose items are graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from ...errors import GraphTypeError, GraphValueError
from ...graph import Graph
from ..graphs._batch import batch


class GraphCollator:
    """Makes a batch of items: graphs are batched, numbers and tensors stacked, by their places."""

    def collate(self, items: Sequence[Any]) -> Any:
        """The batch of some items.

        Args:
            items: Graphs, tensors, arrays, numbers or strings, or tuples, lists or dictionaries of
                those, all built alike.
        """
        first = items[0]
        if isinstance(first, Graph):
            return batch(items)
        is_array = isinstance(first, np.ndarray) and first.dtype.kind not in "SUO"
        if is_array or isinstance(first, Tensor):
            return torch.stack([torch.as_tensor(item) for item in items])
        if isinstance(first, float):
            return torch.tensor(items, dtype=torch.float64)
        if isinstance(first, int | np.number | np.bool_):
            return torch.as_tensor(np.asarray(items))
        if isinstance(first, str | bytes):
            return items
        if isinstance(first, Mapping):
            return {key: self.collate([item[key] for item in items]) for key in first}
        if isinstance(first, tuple) and hasattr(first, "_fields"):
            return type(first)(*(self.collate(part) for part in zip(*items, strict=True)))
        if isinstance(first, Sequence):
            if any(len(item) != len(first) for item in items):
                raise GraphValueError("each item of a batch must have as many parts as the others")
            return [self.collate(part) for part in zip(*items, strict=True)]
        raise GraphTypeError(
            "items of a batch must be graphs, tensors, arrays, numbers, strings, or tuples, lists "
            f"or dictionaries of those (got {type(first).__name__}); give a collate_fn"
        )


class GraphDataLoader(torch.utils.data.DataLoader[Any]):
    """torch's loader over a data set of graphs, each batch of which is one batched graph.

    Args:
        use_ddp: Share the items among the ranks of the default process group; some come twice
            where they do not divide, as with torch's `DistributedSampler`.

    Example:
        >>> from graphshard.dgl.data import MiniGCDataset
        >>> loader = GraphDataLoader(MiniGCDataset(4, 10, 20, seed=0), batch_size=2)
        >>> [(graphs.batch_size, labels) for graphs, labels in loader]
        [(2, tensor([7, 7])), (2, tensor([7, 7]))]
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        use_ddp: bool = False,
        ddp_seed: int = 0,
        **kwargs: Any,
    ) -> None:
        self.use_ddp = use_ddp
        if use_ddp:
            shuffle, drop_last = kwargs.pop("shuffle", False), kwargs.pop("drop_last", False)
            self.dist_sampler: DistributedSampler[Any] = DistributedSampler(
                dataset, shuffle=bool(shuffle), seed=ddp_seed, drop_last=drop_last
            )
            kwargs["sampler"] = self.dist_sampler
        if collate_fn is None and kwargs.get("batch_size", 1) is not None:
            collate_fn = GraphCollator().collate
        super().__init__(dataset, collate_fn=collate_fn, **kwargs)

    def set_epoch(self, epoch: int) -> None:
        """Which epoch's order is next, where ``use_ddp`` is set."""
        if not self.use_ddp:
            raise GraphValueError("set_epoch is for loaders with use_ddp=True")
        self.dist_sampler.set_epoch(epoch)
