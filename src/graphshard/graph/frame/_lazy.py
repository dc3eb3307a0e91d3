# SPDX-License-Identifier: Apache-2.0
"""LazyRows: a column that is gathered from a larger one when it is first read.

A sampled block has every feature of the graph that it was drawn from, but a model reads few of
them. Such a column costs nothing until it is read, and is gathered once.
"""

from __future__ import annotations

import torch
from torch import Tensor


class LazyRows:
    """Rows of a tensor, not gathered yet.

    What is gathered is what the tensor holds when the column is first read: a change in place that
    comes before is seen, one that comes later is not. From a tensor that needs a gradient rows are
    gathered at every read, as the reader may record operations or not.

    Args:
        source: ``[num_rows, ...]``; kept, not copied.
        index: ``[k]`` row numbers, int32 or int64, on the same device; they may be lazy too.
        device: Where the rows shall be; by default where ``source`` is.
    """

    __slots__ = ("_index", "_rows", "_source", "device", "dtype", "shape")

    def __init__(
        self, source: Tensor, index: Tensor | LazyRows, device: torch.device | None = None
    ) -> None:
        self._source = source
        self._index = index
        self._rows: Tensor | None = None
        num_rows: int = index.shape[0]
        self.shape: torch.Size = torch.Size((num_rows, *source.shape[1:]))
        self.dtype = source.dtype
        self.device = source.device if device is None else device

    def gather(self) -> Tensor:
        """The rows; the same tensor every time."""
        if self._rows is not None:
            return self._rows
        index = self._index.gather() if isinstance(self._index, LazyRows) else self._index
        rows = self._source.index_select(0, index).to(self.device)
        if not self._source.requires_grad:
            self._rows = rows
        return rows

    def to(self, device: torch.device, non_blocking: bool = False) -> Tensor | LazyRows:
        """The rows on another device: copied if they have been gathered, else still lazy."""
        if self._rows is not None:
            return self._rows.to(device, non_blocking=non_blocking)
        return LazyRows(self._source, self._index, device)

    def __repr__(self) -> str:
        return f"LazyRows(shape={tuple(self.shape)}, dtype={self.dtype})"
