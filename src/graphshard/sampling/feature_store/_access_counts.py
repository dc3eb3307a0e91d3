# SPDX-License-Identifier: Apache-2.0
"""AccessCounts: how often each feature row will be read in an epoch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._ownership import Kind
from ._features import RowRequest

_LEAST_PENDING = 1 << 20


class AccessCounts:
    """Adds up accesses, in memory that grows with the number of distinct rows."""

    def __init__(self) -> None:
        self._pending: dict[Kind, list[Tensor]] = {}
        self._totals: dict[Kind, tuple[Tensor, Tensor]] = {}

    def add(self, requests: Sequence[RowRequest]) -> None:
        """Count what one batch reads."""
        for request in requests:
            pending = self._pending.setdefault(request.ntype, [])
            pending.append(request.ids.to("cpu", torch.int64))
            known = self._totals.get(request.ntype)
            least = _LEAST_PENDING if known is None else max(_LEAST_PENDING, known[0].numel())
            if sum(ids.numel() for ids in pending) >= least:
                self._merge(request.ntype)

    def totals(self) -> dict[Kind, tuple[Tensor, Tensor]]:
        """Node type or relation to distinct ids, and how often each is read; int64 both."""
        for kind in list(self._pending):
            self._merge(kind)
        return dict(self._totals)

    def _merge(self, kind: Kind) -> None:
        ids, counts = torch.unique(torch.cat(self._pending.pop(kind)), return_counts=True)
        if kind in self._totals:
            old_ids, old_counts = self._totals[kind]
            ids, place = torch.unique(torch.cat([old_ids, ids]), return_inverse=True)
            both = torch.cat([old_counts, counts])
            counts = torch.zeros_like(ids).index_add_(0, place, both)
        self._totals[kind] = ids, counts
