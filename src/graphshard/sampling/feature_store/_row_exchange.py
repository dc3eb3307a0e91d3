# SPDX-License-Identifier: Apache-2.0
"""RowExchange: rows of several tables, asked for by id, written to where they belong.

The message for a rank holds, for each request and table in turn, the rows that it asked for, back
to back. Rows are gathered into the outgoing message and copied out of the incoming one without a
tensor in between, so that a row is read once and written once on either side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from ...comm.collectives import all_to_all
from ...comm.group import GroupState
from ...comm.wire import exchange_rows, row_bytes
from ...ops import copy_rows
from .._ownership import ByOwner
from ._row_buffers import RowBuffers


class RowExchange:
    """Tells owners which rows are wanted; collective to make and to run.

    Args:
        state: The group.
        grouped: For each request, the ids by owner.
        asked_of_me: int64 ``[world_size, num_requests]``, how many rows each rank asks for.
        buffers: Memory for messages.
    """

    def __init__(
        self,
        state: GroupState,
        grouped: Sequence[ByOwner],
        asked_of_me: Tensor,
        buffers: RowBuffers,
    ) -> None:
        self._state, self._buffers = state, buffers
        self._grouped = grouped
        self._counts = asked_of_me.t().tolist()  # by request, by rank
        self._asked = exchange_rows(
            state,
            [ids.remote_rows for ids in grouped],
            [ids.splits for ids in grouped],
            self._counts,
            "ids of feature rows",
        )

    def run(
        self,
        tables: Sequence[Sequence[Tensor]],
        outs: Sequence[Sequence[Tensor]],
        places: Sequence[Tensor | None],
        meanwhile: Callable[[], None],
    ) -> None:
        """Exchange the rows.

        Args:
            tables: For each request, this rank's rows of the tables that it reads.
            outs: For each request, where rows of each table go.
            places: For each request, row of ``outs`` for each id; None for the i-th id's row i.
            meanwhile: What this rank does while rows are on their way.
        """
        outgoing, send_bytes = self._outgoing(tables)
        widths = [[row_bytes(table) for table in per_request] for per_request in tables]
        ranks = range(self._state.world_size)
        recv_bytes = [
            sum(ids.splits[r] * sum(w) for ids, w in zip(self._grouped, widths, strict=True))
            for r in ranks
        ]
        incoming = self._buffers.empty([sum(recv_bytes)], torch.uint8)
        all_to_all(
            self._state,
            outgoing,
            send_bytes,
            recv_bytes,
            "feature rows",
            into=incoming,
            meanwhile=meanwhile,
        )
        offset = 0
        begins = [[0, *accumulate(ids.splits)] for ids in self._grouped]
        for rank in ranks:
            for request, ids in enumerate(self._grouped):
                begin, end = begins[request][rank : rank + 2]
                assert ids.order is not None
                at = ids.order[begin:end]
                place = places[request]
                at = at if place is None else place.index_select(0, at)
                for width, out in zip(widths[request], outs[request], strict=True):
                    stop = offset + (end - begin) * width
                    if end > begin:
                        rows = _as_rows(incoming[offset:stop], out, end - begin)
                        copy_rows(out, at, rows, None)
                    offset = stop

    def _outgoing(self, tables: Sequence[Sequence[Tensor]]) -> tuple[Tensor, list[int]]:
        num_ranks = self._state.world_size
        send_bytes = [
            sum(
                counts[r] * sum(row_bytes(table) for table in per_request)
                for counts, per_request in zip(self._counts, tables, strict=True)
            )
            for r in range(num_ranks)
        ]
        message = self._buffers.empty([sum(send_bytes)], torch.uint8)
        offset = 0
        asked = [rows.split(counts) for rows, counts in zip(self._asked, self._counts, strict=True)]
        for rank in range(num_ranks):
            for by_rank, per_request in zip(asked, tables, strict=True):
                index = by_rank[rank]
                for table in per_request:
                    stop = offset + index.numel() * row_bytes(table)
                    if index.numel():
                        _gather_into(message[offset:stop], table, index)
                    offset = stop
        return message, send_bytes


def _gather_into(stream: Tensor, table: Tensor, index: Tensor) -> None:
    """Write rows of a table to a stretch of bytes."""
    if table.device.type == "cpu" and stream.storage_offset() % table.element_size() == 0:
        out = stream.view(table.dtype).view(index.numel(), *table.shape[1:])
        copy_rows(out, None, table, index)
        return
    rows = table.index_select(0, index.to(table.device)).contiguous()
    stream.copy_(rows.view(-1).view(torch.uint8))


def _as_rows(stream: Tensor, like: Tensor, num_rows: int) -> Tensor:
    """A stretch of bytes as rows like those of another tensor."""
    if stream.storage_offset() % like.element_size():
        stream = stream.clone()
    return stream.view(like.dtype).view(num_rows, *like.shape[1:])
