# SPDX-License-Identifier: Apache-2.0
"""HaloRowCache: remote rows that several calls read are fetched once.

[Note: fields travel together]
    A layer often reads several source fields one after the other: GAT reads ``el`` for the scores
    and ``ft`` for the sum. The first read sends along every source field that was set since the
    innermost ``local_scope`` began, so a layer costs one exchange forward and one backward. Fields
    set through ``dstdata`` do not travel, nor do fields from outside the scope until they are read,
    nor those whose rows are here for other relations than the read one's: of the keys and values
    that HGT has for each relation, what one relation read is of no use to the next.

[Note: inputs travel]
    An attention layer sends what its projection makes of each row, and gets a gradient back. What
    the model reads first needs no gradient. So its rows travel as they are, nothing returns, and
    each rank projects the remote rows that it reads, once more than their owner; constant features
    do not travel at all after the first epoch. It is done between hosts, in one-shot mode, where
    the bytes that it saves take longer than the products: at 32 GFLOP/s and 1 Gbit/s a rank does
    256 operations while a byte is sent. So constant rows have 512 columns at most. `localize` makes
    the rows; the layer then works on a local graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..comm import HaloFetch, Pending
from ..comm.collectives import Wire, keyed, wire_row_bytes
from ..comm.halo import are_messages
from ..graph.frame import Frame, version_of
from .lazy import FieldsOnRead
from .topology import Halo, ShardStructure

OPERATIONS_A_BYTE = 256
"""That a rank does while a byte is sent. See [Note: inputs travel]."""


@dataclass
class _HaloRows:
    """Halo rows of a field, at the version that they are of.

    See [Note: what is kept between calls].
    """

    tensor: Tensor
    version: int
    remote: Tensor
    extended: Tensor | None = None


class HaloRowCache:
    """Halo rows of constant tensors and of source fields; ``wire`` as in `RowTransport`."""

    def __init__(self, structure: ShardStructure, wire: Wire) -> None:
        self._constants, self._wire = structure.constants, wire
        self._fields: dict[tuple[int, int], _HaloRows] = {}
        # Fields of which partial sums have come, and the call sites; those that did not suffice.
        self._summed: dict[tuple[int, int], tuple[Tensor, int, Hashable]] = {}
        self._read_again: set[tuple[int, Hashable]] = set()
        #: Scopes that are open; without one, rows of fields are not kept for later calls.
        self.num_scopes = 0

    # ------------------------------------------------------------------ constants

    def constant_rows(self, halo: Halo, own: Tensor) -> Tensor | None:
        """Halo rows of a tensor that needs no gradient, if they were fetched before."""
        if not self._constants.is_constant([own]):
            return None
        return self._constants.get(("halo", id(halo)), [own])

    def keep_constant(self, halo: Halo, own: Tensor, rows: Tensor) -> None:
        """Keep halo rows of a tensor that needs no gradient, if it is constant."""
        if self._constants.is_constant([own]):
            self._constants.put(("halo", id(halo)), [own], rows)

    def fetch(self, requests: Sequence[tuple[Halo, Tensor]]) -> list[Tensor]:
        """Halo rows ``[num_halo, ...]`` of each tensor, in one exchange; collective."""
        return self.start_fetch(requests).wait()

    def start_fetch(self, requests: Sequence[tuple[Halo, Tensor]]) -> Pending:
        """The same, to be waited for."""
        rows = [self.constant_rows(halo, own) for halo, own in requests]
        missing = [i for i, part in enumerate(rows) if part is None]
        pairs = [(requests[i][0].plan, requests[i][1]) for i in missing]
        wire = keyed(self._wire)
        if self._wire == torch.int8 and self._constants.is_constant([own for _, own in pairs]):
            wire = None  # it stays for the run, and so would what it is rounded by

        def join(fetched: list[Tensor]) -> list[Tensor]:
            for i, part in zip(missing, fetched, strict=True):
                rows[i] = part
                self.keep_constant(*requests[i], part)
            return [part for part in rows if part is not None]

        return HaloFetch(pairs, wire).then(join)

    def are_less(self, requests: Sequence[tuple[Halo, Tensor]], width: int) -> bool:
        """Whether it is less to send rows, and multiply them, than their products.

        The same on every rank. See [Note: inputs travel].
        """
        tensors = [own for _, own in requests]
        if not tensors or any(own.requires_grad for own in tensors):
            return False
        saved, operations, ways = 0, 0, 2 if torch.is_grad_enabled() else 1
        for own in tensors:
            device = own.device.type
            is_cast = own.dtype != torch.float64 and torch.is_autocast_enabled(device)
            dtype = torch.get_autocast_dtype(device) if is_cast else own.dtype
            like = own.new_empty((0, *own.shape[1:-1], width), dtype=dtype)
            saved += ways * wire_row_bytes(like, self._wire)
            operations += ways * 2 * own.shape[1:].numel() * width
            if not self._constants.is_constant([own]):
                saved -= wire_row_bytes(own, self._wire)
        if operations > saved * OPERATIONS_A_BYTE:
            return False
        return are_messages([(halo.plan, own) for halo, own in requests], self._wire)

    def extended(self, requests: Sequence[tuple[Halo, Tensor]]) -> list[Tensor]:
        """Own and then halo rows, ``[num_extended, ...]``; with one rank the own tensor itself."""
        if all(halo.plan.world_size == 1 for halo, _ in requests):
            return [own for _, own in requests]
        rows = self.fetch(requests)
        return [torch.cat([own, part]) for (_, own), part in zip(requests, rows, strict=True)]

    # ------------------------------------------------------------------ fields

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Inside, rows of fields are kept; on leaving, also an inner scope, they are dropped."""
        self.num_scopes += 1
        try:
            yield
        finally:
            self.num_scopes -= 1
            self._fields.clear()
            self._summed.clear()

    def fields(self, halo: Halo, frame: Frame, frames: Sequence[Frame]) -> Mapping[str, Any]:
        """A source frame as one relation's edges see it: extended rows, fetched when read.

        Args:
            frames: All source frames in use; rows of what is in none of them are dropped.
        """
        return FieldsOnRead(frame, lambda name: self._extended_field(halo, frame, name, frames))

    def companions(self, halo: Halo, frame: Frame, name: str) -> list[Tensor]:
        """What else a read of field ``name`` fetches. See [Note: fields travel together]."""
        if not self.num_scopes:
            return []
        read = frame[name]
        others = [frame[n] for n in frame.scope_fields() if frame.view_of(n) != "dst"]
        distinct = {id(tensor): tensor for tensor in others if tensor is not read}
        halos: dict[int, set[int]] = {}
        for of_halo, of_tensor in self._fields:
            halos.setdefault(of_tensor, set()).add(of_halo)
        of_read = halos.get(id(read), set())
        return [
            tensor
            for key, tensor in distinct.items()
            if self.find(halo, tensor) is None and halos.get(key, set()) <= of_read
        ]

    def put(
        self, halo: Halo, rows: Sequence[tuple[Tensor, Tensor]], frames: Sequence[Frame]
    ) -> None:
        """Keep halo rows of fields, as (field, rows) each, if a scope bounds how long."""
        if not self.num_scopes:
            return
        in_use = {id(value) for frame in frames for value in frame.values()}
        self._fields = {k: e for k, e in self._fields.items() if id(e.tensor) in in_use}
        for tensor, remote in rows:
            entry = _HaloRows(tensor, version_of(tensor), remote)
            self._fields[id(halo), id(tensor)] = entry
            if remote.grad_fn is not None:
                remote.grad_fn.register_prehook(self._forgetting((id(halo), id(tensor)), entry))

    def _forgetting(self, key: tuple[int, int], entry: _HaloRows) -> Callable[[Any], None]:
        """A hook that drops an entry: a backward frees the graph that its rows hang on."""
        cache, dropped = weakref.ref(self), weakref.ref(entry)  # the graph holds the hook

        def forget(_: Any) -> None:
            fields = {} if (here := cache()) is None else here._fields
            if key in fields and fields[key] is dropped():
                del fields[key]

        return forget

    def note_summed(self, halo: Halo, tensor: Tensor, site: Hashable) -> None:
        """Note that partial sums of a field have come, and not its rows."""
        if self.num_scopes:
            self._summed[id(halo), id(tensor)] = tensor, version_of(tensor), site

    def is_read_again(self, halo: Halo, tensor: Tensor, site: Hashable) -> bool:
        """Whether rows of a field should come, as other calls of its scope read them, too.

        A call site knows that from the second time on.
        """
        self._note_read(halo, tensor)
        return (id(halo), id(tensor)) in self._summed or (id(halo), site) in self._read_again

    def _note_read(self, halo: Halo, tensor: Tensor) -> None:
        summed = self._summed.get((id(halo), id(tensor)))
        if summed is not None and summed[0] is tensor and summed[1] == version_of(tensor):
            self._read_again.add((id(halo), summed[2]))

    def find(self, halo: Halo, tensor: Tensor) -> _HaloRows | None:
        """The tensor's halo rows, if they are here."""
        self._note_read(halo, tensor)
        entry = self._fields.get((id(halo), id(tensor)))
        if entry is None or entry.tensor is not tensor or entry.version != version_of(tensor):
            return None
        return entry if _serves(entry.remote, [tensor]) else None

    def _extended_field(
        self, halo: Halo, frame: Frame, name: str, frames: Sequence[Frame]
    ) -> Tensor:
        own = frame[name]
        entry = self.find(halo, own)
        if entry is None:
            distinct = [own, *self.companions(halo, frame, name)]
            fetched = self.fetch([(halo, tensor) for tensor in distinct])
            self.put(halo, list(zip(distinct, fetched, strict=True)), frames)
            entry = self.find(halo, own) or _HaloRows(own, version_of(own), fetched[0])
        if entry.extended is None or not _serves(entry.extended, [own, entry.remote]):
            alone = halo.plan.world_size == 1
            entry.extended = own if alone else torch.cat([own, entry.remote])
        return entry.extended


def _serves(rows: Tensor, made_of: Sequence[Tensor]) -> bool:
    """Whether rows that an earlier call has made are what this one would make.

    Those that were made while autograd was off are not, where there is a gradient now.
    """
    if rows.is_inference() and not torch.is_inference_mode_enabled():
        return False
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in made_of)
    return rows.requires_grad or not needs_grad
