# SPDX-License-Identifier: Apache-2.0
"""LazyRows: a column that is gathered from a larger one when it is first read.

A sampled block has every feature of the graph that it was drawn from, but a model reads few of
them. Such a column costs nothing until it is read, and is gathered once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LazyRows:
    """Rows of a tensor, not gathered yet.

    Rows that go from the CPU to a GPU pass through page-locked memory; the copy is ordered by the
    stream that is current where the column is read.

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
        source, device = self._source, self.device
        if device.type == "cuda" and source.device.type == "cpu" and not source.requires_grad:
            # Torch uses page-locked memory again only once the copies from it are done.
            rows = torch.empty(self.shape, dtype=self.dtype, device="cpu", pin_memory=True)
            torch.index_select(source, 0, index, out=rows)
            rows = rows.to(device, non_blocking=True)
        else:
            rows = source.index_select(0, index).to(device)
        if not source.requires_grad:
            self._rows = rows
        return rows

    def to(self, device: torch.device, non_blocking: bool = False) -> Tensor | LazyRows:
        """The rows on another device: copied if they have been gathered, else still lazy."""
        if self._rows is not None:
            return self._rows.to(device, non_blocking=non_blocking)
        return LazyRows(self._source, self._index, device)

    def pin_memory(self) -> Tensor | LazyRows:
        """The rows in page-locked memory if they have been gathered, else as they are, lazy."""
        return self if self._rows is None else self._rows.contiguous().pin_memory()

    def record_stream(self, stream: Any) -> None:
        """Say that a stream of a GPU uses what has been gathered, or what is left to gather by."""
        if self._rows is not None:
            self._rows.record_stream(stream)
        elif self._source.device.type != "cpu":
            self._index.record_stream(stream)

    def __repr__(self) -> str:
        return f"LazyRows(shape={tuple(self.shape)}, dtype={self.dtype})"
