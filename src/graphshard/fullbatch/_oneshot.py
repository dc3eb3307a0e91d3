# SPDX-License-Identifier: Apache-2.0
"""One-shot aggregation: fetch the whole halo of a layer in one exchange, then work locally.

[Note: fields travel together]
    A layer often reads several source fields one after the other: GAT reads ``el`` for the scores
    and ``ft`` for the sum. The first read sends along every source field that was set since the
    innermost ``local_scope`` began, so a layer costs one exchange forward and one backward.
    Fields set through ``dstdata`` stay at home, and so do fields from outside the scope until
    they are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._typing import CanonicalEType
from ..comm import fetch_halo
from ..graph import Frame
from ..graph._relation import RelationData, edge_values, reduce_messages
from ..ops import Attention, attend
from ._constants import ConstantCache
from ._softmax_of_rows import softmax_over_in_edges, softmax_over_out_edges
from ._structure import ShardStructure
from ._topology import Halo


def extended_rows(
    constants: ConstantCache, requests: Sequence[tuple[Halo, Tensor]]
) -> list[Tensor]:
    """Own rows followed by halo rows, of all requests in one exchange; collective.

    Args:
        constants: Keeps the halo rows of tensors that need no gradient.
        requests: A halo and own rows ``[num_owned, ...]`` each.

    Returns:
        ``[num_extended, ...]`` for each request.
    """
    remote: list[Tensor | None] = [
        constants.get(("halo", id(halo)), [own]) if constants.is_constant([own]) else None
        for halo, own in requests
    ]
    missing = [i for i, rows in enumerate(remote) if rows is None]
    fetched = fetch_halo([(requests[i][0].plan, requests[i][1]) for i in missing])
    for i, rows in zip(missing, fetched, strict=True):
        halo, own = requests[i]
        remote[i] = rows
        if constants.is_constant([own]):
            constants.put(("halo", id(halo)), [own], rows)
    return [
        torch.cat([own, rows])
        for (_, own), rows in zip(requests, remote, strict=True)
        if rows is not None
    ]


class FetchedFields:
    """Extended rows of source fields, kept while the fields are those of the frames."""

    def __init__(self, structure: ShardStructure) -> None:
        self._structure = structure
        self._entries: dict[tuple[int, int], tuple[Tensor, int, Tensor]] = {}

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
            return found
        self._forget_unused(frames)
        companions = [
            frame[other]
            for other in frame.scope_fields()
            if other != name and frame.view_of(other) != "dst"
        ]
        tensors = [wanted, *(t for t in companions if self._find(halo, t) is None)]
        distinct = list({id(t): t for t in tensors}.values())
        fetched = extended_rows(self._structure.constants, [(halo, t) for t in distinct])
        for tensor, rows in zip(distinct, fetched, strict=True):
            self._entries[id(halo), id(tensor)] = (tensor, tensor._version, rows)
        found = self._find(halo, wanted)
        assert found is not None
        return found

    def _find(self, halo: Halo, tensor: Tensor) -> Tensor | None:
        entry = self._entries.get((id(halo), id(tensor)))
        if entry is None or entry[0] is not tensor or entry[1] != tensor._version:
            return None
        # Rows fetched without a gradient do not serve a pass that needs one.
        stale = tensor.requires_grad and torch.is_grad_enabled() and not entry[2].requires_grad
        return None if stale else entry[2]

    def _forget_unused(self, frames: Sequence[Frame]) -> None:
        in_use = {id(value) for frame in frames for value in frame.values()}
        self._entries = {k: e for k, e in self._entries.items() if id(e[0]) in in_use}

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


class OneShot:
    """Message passing over extended rows; any reduction works, for all in-edges are here.

    Args:
        structure: The rank's rows and edges.
    """

    def __init__(self, structure: ShardStructure) -> None:
        self.structure = structure
        self.fetched = FetchedFields(structure)

    def data(
        self, etype: CanonicalEType, src: Frame, dst: Frame, edge: Frame, frames: Sequence[Frame]
    ) -> RelationData:
        halo = self.structure.halo([etype])
        source = ExtendedFields(self.fetched, halo, src, frames)
        return RelationData(halo.adjacency(etype), etype, source, dst, edge)

    def reduce(self, data: RelationData, message: Any, reduce: Any) -> dict[str, Any]:
        return reduce_messages(data, message, reduce)

    def edge_values(self, data: RelationData, func: Any) -> dict[str, Any]:
        return edge_values(data, func)

    def attend(self, etype: CanonicalEType, attention: Attention) -> Tensor:
        """Fused attention; what it reads of sources comes in one exchange."""
        halo = self.structure.halo([etype])
        own = [attention.values]
        if attention.src is not None and attention.src is not attention.values:
            own.append(attention.src)
        rows = extended_rows(self.structure.constants, [(halo, t) for t in own])
        src = None if attention.src is None else rows[-1]
        return attend(halo.adjacency(etype), replace(attention, values=rows[0], src=src))

    def edge_softmax(
        self, etypes: Sequence[CanonicalEType], logits: Sequence[Tensor], norm_by: str
    ) -> list[Tensor]:
        """Weights of the edges of some relations that share an end type, normalised together."""
        if norm_by == "src":
            return softmax_over_out_edges(self.structure, etypes, logits)
        return softmax_over_in_edges(self.structure, etypes, logits)
