# SPDX-License-Identifier: Apache-2.0
"""HaloRowCache: halo rows that are here, so that what several calls read is fetched once.

Rows of tensors that never change are kept for the run, see `ConstantCache`. Rows of a source field
are kept until the innermost ``local_scope`` ends.

[Note: fields travel together]
    A layer often reads several source fields one after the other: GAT reads ``el`` for the scores
    and ``ft`` for the sum. The first read sends along every source field that was set since the
    innermost ``local_scope`` began, so a layer costs one exchange forward and one backward. Fields
    set through ``dstdata`` do not travel, nor do fields from outside the scope until they are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..._typing import version_of
from ...comm import fetch_halo
from ...graph import Frame
from ..topology import Halo, ShardStructure


@dataclass
class _HaloRows:
    """Halo rows of a field, at the version that they are of."""

    tensor: Tensor
    version: int
    remote: Tensor
    extended: Tensor | None = None


class HaloRowCache:
    """Halo rows of constant tensors and of source fields.

    Args:
        structure: The rank's rows and edges.
        wire: In which dtype wider rows travel; None is their own.
    """

    def __init__(self, structure: ShardStructure, wire: torch.dtype | None) -> None:
        self._constants, self._wire = structure.constants, wire
        self._fields: dict[tuple[int, int], _HaloRows] = {}

    # ------------------------------------------------------------------ constants

    def known(self, halo: Halo, own: Tensor) -> Tensor | None:
        """Halo rows of a tensor that needs no gradient, if they were fetched before."""
        if not self._constants.is_constant([own]):
            return None
        return self._constants.get(("halo", id(halo)), [own])

    def keep(self, halo: Halo, own: Tensor, rows: Tensor) -> None:
        """Keep halo rows of a tensor that needs no gradient."""
        if self._constants.is_constant([own]):
            self._constants.put(("halo", id(halo)), [own], rows)

    def fetch(self, requests: Sequence[tuple[Halo, Tensor]]) -> list[Tensor]:
        """Halo rows ``[num_halo, ...]`` of each tensor, in one exchange; collective."""
        found = [self.known(halo, own) for halo, own in requests]
        missing = [i for i, rows in enumerate(found) if rows is None]
        pairs = [(requests[i][0].plan, requests[i][1]) for i in missing]
        for i, rows in zip(missing, fetch_halo(pairs, self._wire), strict=True):
            found[i] = rows
            self.keep(*requests[i], rows)
        return [rows for rows in found if rows is not None]

    def extended(self, requests: Sequence[tuple[Halo, Tensor]]) -> list[Tensor]:
        """Own and then halo rows, ``[num_extended, ...]``; with one rank the own tensor itself."""
        if all(halo.plan.world_size == 1 for halo, _ in requests):
            return [own for _, own in requests]
        rows = self.fetch(requests)
        return [torch.cat([own, part]) for (_, own), part in zip(requests, rows, strict=True)]

    # ------------------------------------------------------------------ fields

    def fields(self, halo: Halo, frame: Frame, frames: Sequence[Frame]) -> Mapping[str, Any]:
        """A source frame as one relation's edges see it: extended rows, fetched when read.

        Args:
            halo: The rows to fetch.
            frame: The source frame.
            frames: All source frames in use; rows of what is in none of them are dropped.
        """
        return _ExtendedFields(self, halo, frame, frames)

    def has(self, halo: Halo, tensor: Tensor) -> bool:
        """Whether the tensor's halo rows are here."""
        return self._find(halo, tensor) is not None

    def companions(self, halo: Halo, frame: Frame, name: str) -> list[Tensor]:
        """What else a read of field ``name`` fetches. See [Note: fields travel together]."""
        wanted = frame[name]
        others = [frame[n] for n in frame.scope_fields() if frame.view_of(n) != "dst"]
        distinct = {id(tensor): tensor for tensor in others if tensor is not wanted}
        return [tensor for tensor in distinct.values() if not self.has(halo, tensor)]

    def put(
        self, halo: Halo, rows: Sequence[tuple[Tensor, Tensor]], frames: Sequence[Frame]
    ) -> None:
        """Keep halo rows of fields, as (field, rows) each."""
        in_use = {id(value) for frame in frames for value in frame.values()}
        self._fields = {k: e for k, e in self._fields.items() if id(e.tensor) in in_use}
        for tensor, remote in rows:
            self._fields[id(halo), id(tensor)] = _HaloRows(tensor, version_of(tensor), remote)

    def clear(self) -> None:
        """Drop the rows of fields."""
        self._fields.clear()

    def _find(self, halo: Halo, tensor: Tensor) -> _HaloRows | None:
        entry = self._fields.get((id(halo), id(tensor)))
        if entry is None or entry.tensor is not tensor or entry.version != version_of(tensor):
            return None
        # Rows fetched without a gradient do not serve a pass that needs one.
        stale = tensor.requires_grad and torch.is_grad_enabled() and not entry.remote.requires_grad
        return None if stale else entry

    def _extended_field(
        self, halo: Halo, frame: Frame, name: str, frames: Sequence[Frame]
    ) -> Tensor:
        wanted = frame[name]
        entry = self._find(halo, wanted)
        if entry is None:
            distinct = [wanted, *self.companions(halo, frame, name)]
            fetched = self.fetch([(halo, tensor) for tensor in distinct])
            self.put(halo, list(zip(distinct, fetched, strict=True)), frames)
            entry = self._find(halo, wanted)
            assert entry is not None
        if entry.extended is None:
            alone = halo.plan.world_size == 1
            entry.extended = wanted if alone else torch.cat([wanted, entry.remote])
        return entry.extended


class _ExtendedFields(Mapping[str, Any]):
    def __init__(
        self, cache: HaloRowCache, halo: Halo, frame: Frame, frames: Sequence[Frame]
    ) -> None:
        self._cache, self._halo, self._frame, self._frames = cache, halo, frame, frames

    def __getitem__(self, name: str) -> Tensor:
        return self._cache._extended_field(self._halo, self._frame, name, self._frames)

    def __iter__(self) -> Iterator[str]:
        return iter(self._frame)

    def __len__(self) -> int:
        return len(self._frame)
