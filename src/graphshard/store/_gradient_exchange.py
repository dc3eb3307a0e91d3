# SPDX-License-Identifier: Apache-2.0
"""GradientExchange: gradients of an embedding to the trainers that take care of their rows.

A trainer adds up its own gradients of each row. Sums of rows that others take care of go into one
message for each, as they are added up; gradients of its own rows stay where they lie. Meanwhile all
trainers tell each other how many come: a message with room for as many as a step before, which
needs no such exchange, took no less processor time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._kernel import empty
from ..comm.collectives import all_gather, all_to_all
from ..comm.group import group_state
from ..comm.wire import start_exchange
from ..ops import group_equal, sum_groups
from ._job import current_job

_ID_COLUMNS = 2  # of a message's float32 rows: an id of 64 bits, and then a gradient


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
        send = [len(run) for run in runs]
        counts = torch.tensor([[size, ids.numel()] for size in send]).view(-1)
        twos = [2] * state.world_size
        message = empty((sum(send), _ID_COLUMNS + tables[0].shape[1]), torch.float32)

        def fill() -> None:
            words = distinct.view(torch.int32).view(-1, _ID_COLUMNS)
            for rows, run in zip(message.split(send), runs, strict=True):
                if run:
                    rows.view(torch.int32)[:, :_ID_COLUMNS] = words[run.start : run.stop]
                    of_run = starts[run.start : run.stop + 1]
                    sum_groups(rows[:, _ID_COLUMNS:], tables, order, of_run)

        arrived = all_to_all(state, counts, twos, twos, "gradients", fill).view(-1, 2)
        if not bool(arrived[:, 1].any()):
            return None
        receive: list[int] = arrived[:, 0].tolist()
        (rows,) = start_exchange(state, [message], [send], [receive], "gradients").wait()
        mine = order[starts[own.start] : starts[own.stop]]
        return _merged(rows, sum(receive[: state.rank]), (ids, mine, tables))


def _merged(
    arrived: Tensor, place: int, own: tuple[Tensor, Tensor, Sequence[Tensor]]
) -> RowGradients:
    """The gradients of this rank's rows, where they lie.

    Args:
        arrived: Messages, by rank.
        place: How many of their rows come from ranks before this one.
        own: This rank's ids, the places of those whose rows it has, and the gradients.
    """
    ids, mine, tables = own
    count = ids.numel()
    # One row alone counts as contiguous, whatever its stride is; one dimension has none to keep.
    others = arrived.view(torch.int32)[:, :_ID_COLUMNS].reshape(-1).view(torch.int64)
    numbers = torch.arange(count, count + arrived.shape[0])
    numbers = torch.cat([numbers[:place], mine, numbers[place:]])
    by_rank = torch.cat([others[:place], ids.index_select(0, mine), others[place:]])
    distinct, starts, order = group_equal(by_rank)
    by_number = [*tables, arrived[:, _ID_COLUMNS:]]
    order = numbers.index_select(0, order)
    return RowGradients(distinct, starts, order, by_number, (0, count))
