# SPDX-License-Identifier: Apache-2.0
"""Halo rows that are here: fetched once for all that read them, while what they are of is the same.

[Note: fields travel together]
    A layer often reads several source fields one after the other: GAT reads ``el`` for the scores
    and ``ft`` for the sum. The first read sends along every source field that was set since the
    innermost ``local_scope`` began, so a layer costs one exchange forward and one backward.
    Fields set through ``dstdata`` stay at home, and so do fields from outside the scope until
    they are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...comm import fetch_halo
from ...graph import Frame
from ..topology import ConstantCache, Halo, ShardStructure


def remote_rows(
    constants: ConstantCache,
    requests: Sequence[tuple[Halo, Tensor]],
    wire: torch.dtype | None = None,
) -> list[Tensor]:
    """Halo rows of all requests in one exchange; collective.

    Args:
        constants: Keeps the halo rows of tensors that need no gradient.
        requests: A halo and own rows ``[num_owned, ...]`` each.
        wire: In which dtype wider rows travel; None is their own.

    Returns:
        ``[num_halo, ...]`` for each request.
    """
    remote = [known_rows(constants, halo, own) for halo, own in requests]
    missing = [i for i, rows in enumerate(remote) if rows is None]
    fetched = fetch_halo([(requests[i][0].plan, requests[i][1]) for i in missing], wire)
    for i, rows in zip(missing, fetched, strict=True):
        remote[i] = rows
        keep_rows(constants, *requests[i], rows)
    return [rows for rows in remote if rows is not None]


def known_rows(constants: ConstantCache, halo: Halo, own: Tensor) -> Tensor | None:
    """Halo rows of a tensor that needs no gradient, if they have come before."""
    if not constants.is_constant([own]):
        return None
    return constants.get(("halo", id(halo)), [own])


def keep_rows(constants: ConstantCache, halo: Halo, own: Tensor, rows: Tensor) -> None:
    """Keep halo rows of a tensor that needs no gradient."""
    if constants.is_constant([own]):
        constants.put(("halo", id(halo)), [own], rows)


def extended(halo: Halo, own: Tensor, remote: Tensor) -> Tensor:
    """Own rows and then halo rows, ``[num_extended, ...]``; with one rank the own tensor itself."""
    return own if halo.plan.world_size == 1 else torch.cat([own, remote])


@dataclass
class _HaloRows:
    """A field whose halo rows are here, at the version that they are of."""

    tensor: Tensor
    version: int
    remote: Tensor
    extended: Tensor | None = None


class FetchedFields:
    """Extended rows of source fields, kept while the fields are those of the frames."""

    def __init__(self, structure: ShardStructure, wire: torch.dtype | None) -> None:
        self._structure, self._wire = structure, wire
        self._entries: dict[tuple[int, int], _HaloRows] = {}

    def extended(self, halo: Halo, frame: Frame, name: str, frames: Sequence[Frame]) -> Tensor:
        """Rows of field ``name`` for own and halo rows: ``[num_extended, ...]``.

        Args:
            halo: The rows to fetch.
            frame: The source frame that has the field.
            name: The field.
            frames: All source frames in use; what is no longer in any of them is forgotten.
        """
        wanted = frame[name]
        found = self._find(halo, wanted)
        if found is not None:
            return self._extended(halo, found)
        self._forget_unused(frames)
        distinct = [wanted, *self.companions(halo, frame, name)]
        fetched = remote_rows(self._structure.constants, [(halo, t) for t in distinct], self._wire)
        for tensor, rows in zip(distinct, fetched, strict=True):
            self._put(halo, tensor, rows)
        found = self._find(halo, wanted)
        assert found is not None
        return self._extended(halo, found)

    def has(self, halo: Halo, tensor: Tensor) -> bool:
        """Whether the tensor's halo rows are here."""
        return self._find(halo, tensor) is not None

    def companions(self, halo: Halo, frame: Frame, name: str) -> list[Tensor]:
        """What else a read of field ``name`` fetches. See [Note: fields travel together]."""
        others = {
            id(frame[other]): frame[other]
            for other in frame.scope_fields()
            if frame.view_of(other) != "dst" and frame[other] is not frame[name]
        }
        return [tensor for tensor in others.values() if not self.has(halo, tensor)]

    def put(self, halo: Halo, tensor: Tensor, remote: Tensor, frames: Sequence[Frame]) -> None:
        """Keep halo rows that came otherwise."""
        self._forget_unused(frames)
        self._put(halo, tensor, remote)

    def _put(self, halo: Halo, tensor: Tensor, remote: Tensor) -> None:
        self._entries[id(halo), id(tensor)] = _HaloRows(tensor, _version(tensor), remote)

    def _extended(self, halo: Halo, entry: _HaloRows) -> Tensor:
        if entry.extended is None:
            entry.extended = extended(halo, entry.tensor, entry.remote)
        return entry.extended

    def _find(self, halo: Halo, tensor: Tensor) -> _HaloRows | None:
        entry = self._entries.get((id(halo), id(tensor)))
        if entry is None or entry.tensor is not tensor or entry.version != _version(tensor):
            return None
        # Rows fetched without a gradient do not serve a pass that needs one.
        stale = tensor.requires_grad and torch.is_grad_enabled() and not entry.remote.requires_grad
        return None if stale else entry

    def _forget_unused(self, frames: Sequence[Frame]) -> None:
        in_use = {id(value) for frame in frames for value in frame.values()}
        self._entries = {k: e for k, e in self._entries.items() if id(e.tensor) in in_use}

    def clear(self) -> None:
        self._entries.clear()


class ExtendedFields(Mapping[str, Any]):
    """A source frame as one relation's edges see it: extended rows, fetched when read."""

    def __init__(
        self, fetched: FetchedFields, halo: Halo, frame: Frame, frames: Sequence[Frame]
    ) -> None:
        self._fetched, self._halo, self._frame, self._frames = fetched, halo, frame, frames

    def __getitem__(self, name: str) -> Tensor:
        return self._fetched.extended(self._halo, self._frame, name, self._frames)

    def __iter__(self) -> Iterator[str]:
        return iter(self._frame)

    def __len__(self) -> int:
        return len(self._frame)


def _version(tensor: Tensor) -> int:
    """How often a tensor was changed in place; inference tensors do not say."""
    return 0 if tensor.is_inference() else tensor._version
