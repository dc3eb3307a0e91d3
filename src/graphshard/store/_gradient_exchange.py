# SPDX-License-Identifier: Apache-2.0
"""GradientExchange: gradients of an embedding to the trainers that take care of their rows.

::

    message to each other trainer    [1 + room, 2 + dim] float32
      row 0        how many gradients this trainer has for that one, and 1 + the most that it has
                   for any other, or 0 if it has none at all, not even of its own rows
      other rows   an id, in 64 bits; the sum of this trainer's gradients of that id

All trainers have room for the same number of gradients, a few more than what any had for another
one a step before. Where that is too little, all of them learn it from row 0, and what is left goes
in a second message. So a step most often takes one exchange, and always ends in the same sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._kernel import empty
from ..comm.collectives import all_gather
from ..comm.group import GroupState, group_state
from ..comm.wire import start_exchange
from ..ops import group_equal, sum_groups
from ._job import current_job

_ID_COLUMNS = 2
_SPARE = 16  # of so many gradients' room, one more


@dataclass(frozen=True)
class RowGradients:
    """Gradients of distinct ids, ascending, as `update_rows` takes them."""

    ids: Tensor
    starts: Tensor
    order: Tensor
    tables: Sequence[Tensor]
    inner: tuple[int, int] = (0, 0)


def shares_of_trainers(policy: str) -> list[tuple[int, int, int]]:
    """(first id, last id + 1, rank) of all trainers, ascending; see `Job.share`. Collective."""
    mine = torch.tensor(current_job().share(policy))
    gathered = all_gather(group_state(), mine, "rows of trainers")
    return sorted((int(share[0]), int(share[1]), rank) for rank, share in enumerate(gathered))


class GradientExchange:
    """For the rows of one policy. All trainers make one together, and call it together.

    Args:
        policy: How rows are spread.
    """

    def __init__(self, policy: str) -> None:
        shares = shares_of_trainers(policy)
        self._bounds = torch.tensor([0, *(stop for _, stop, _ in shares)])
        self._ranks = [rank for _, _, rank in shares]
        self._room = 0

    def gather(self, ids: Tensor, tables: Sequence[Tensor]) -> RowGradients | None:
        """The gradients, of all trainers, of this one's rows; None if no trainer has any.

        Those of each trainer are added up before they are added to others, and trainers' sums in
        the order of ranks, so that it does not matter who takes care of a row.

        Args:
            ids: int64 ``[n]``.
            tables: float32 ``[_, dim]`` each, their gradients, ``n`` rows in all.
        """
        state = group_state()
        groups = group_equal(ids)
        distinct, starts, order = groups
        if state.world_size == 1:
            return RowGradients(*groups, tables) if ids.numel() else None
        ends = torch.searchsorted(distinct, self._bounds).tolist()
        runs = [range(0)] * state.world_size
        for place, rank in enumerate(self._ranks):
            runs[rank] = range(ends[place], ends[place + 1])
        own, runs[state.rank] = runs[state.rank], range(0)
        most, room = max(map(len, runs)), self._room
        word = 1 + most if ids.numel() else 0
        sizes = [0 if rank == state.rank else 1 + room for rank in range(state.world_size)]
        message = self._message(groups, tables, [run[:room] for run in runs], sizes, 1)
        heads = [[len(run), word] for rank, run in enumerate(runs) if rank != state.rank]
        message.view(torch.int32)[:: 1 + room, :_ID_COLUMNS] = torch.tensor(
            heads, dtype=torch.int32
        )
        arrived = [_exchange(state, message, sizes, sizes)]
        heads = arrived[0].view(torch.int32)[:: 1 + room, :_ID_COLUMNS].tolist()
        word = max(word, *(other for _, other in heads))
        if word == 0:
            return None
        self._room = word + word // _SPARE
        counts = [count for count, _ in heads]
        counts.insert(state.rank, 0)
        if word - 1 > room:
            rest = [run[room:] for run in runs]
            sizes = [len(run) for run in rest]
            message = self._message(groups, tables, rest, sizes, 0)
            left = [max(0, count - room) for count in counts]
            arrived.append(_exchange(state, message, sizes, left))
        mine = order[starts[own.start] : starts[own.stop]]
        return _merged(state, (ids, mine, tables), arrived, counts, room)

    def _message(
        self,
        groups: tuple[Tensor, Tensor, Tensor],
        tables: Sequence[Tensor],
        runs: Sequence[range],
        sizes: Sequence[int],
        first: int,
    ) -> Tensor:
        """Ids and sums of a run of groups for each rank, in rows ``first`` and on of its part."""
        distinct, starts, order = groups
        message = empty((sum(sizes), _ID_COLUMNS + tables[0].shape[1]), torch.float32)
        words = distinct.view(torch.int32).view(-1, _ID_COLUMNS)
        begin = 0
        for run, size in zip(runs, sizes, strict=True):
            end = begin + first + len(run)
            if run:
                rows = message[begin + first : end]
                rows.view(torch.int32)[:, :_ID_COLUMNS] = words[run.start : run.stop]
                of_run = starts[run.start : run.stop + 1]
                sum_groups(rows[:, _ID_COLUMNS:], tables, order, of_run)
            begin += size
            message[end:begin] = 0
        return message


def _exchange(
    state: GroupState, message: Tensor, send: Sequence[int], receive: Sequence[int]
) -> Tensor:
    (rows,) = start_exchange(state, [message], [send], [receive], "gradients").wait()
    return rows


def _merged(
    state: GroupState,
    own: tuple[Tensor, Tensor, Sequence[Tensor]],
    arrived: Sequence[Tensor],
    counts: Sequence[int],
    room: int,
) -> RowGradients:
    """The gradients of this rank's rows, where they lie.

    Args:
        state: The group.
        own: This rank's ids, the places of those whose rows it has, and the gradients.
        arrived: Messages with row 0, and what was left.
        counts: Gradients from each rank.
        room: As messages had.
    """
    ids, mine, tables = own
    count = ids.numel()
    ends = torch.tensor([count, *(len(rows) for rows in arrived)]).cumsum(0).tolist()
    numbers = [torch.arange(*of) for of in zip(ends[:-1], ends[1:], strict=True)]
    of_ids = [_ids(rows) for rows in arrived]
    pieces: list[tuple[Tensor, Tensor]] = []
    begin, rest = 0, 0
    for rank, size in enumerate(counts):
        if rank == state.rank:
            pieces.append((ids[mine], mine))
            continue
        found = slice(begin + 1, begin + 1 + min(size, room))
        pieces.append((of_ids[0][found], numbers[0][found]))
        begin += 1 + room
        if size > room:
            found = slice(rest, rest + size - room)
            pieces.append((of_ids[1][found], numbers[1][found]))
            rest = found.stop
    all_ids, all_numbers = (torch.cat(parts) for parts in zip(*pieces, strict=True))
    distinct, starts, order = group_equal(all_ids)
    grads = [rows[:, _ID_COLUMNS:] for rows in arrived]
    order = all_numbers.index_select(0, order)
    return RowGradients(distinct, starts, order, [*tables, *grads], (0, count))


def _ids(message: Tensor) -> Tensor:
    words = message.view(torch.int32)[:, :_ID_COLUMNS].contiguous()
    return words.view(torch.int64).view(-1)
