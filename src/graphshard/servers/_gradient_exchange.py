# SPDX-License-Identifier: Apache-2.0
"""GradientExchange: gradients of an embedding to the trainers that take care of their rows.

A trainer adds up its own gradients of each row. Sums of rows that others take care of go to them;
gradients of its own rows, and those that arrive, stay where they lie.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._base.kernels import empty
from ..comm.collectives import all_gather
from ..comm.group import group_state
from ..ops import group_equal, sum_groups
from ._embedding import DistEmbedding
from ._job import current_job
from ._trainer_links import PeerRows


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

    def gather(self, embedding: DistEmbedding) -> RowGradients | None:
        """The gradients, of all trainers, of this one's rows; None if no trainer has any.

        A gradient of no rows is one, too: optimizers of torch count a step with such a gradient.

        Those of each trainer are added up before they are added to others, and trainers' sums in
        the order of ranks, so that it does not matter who takes care of a row.

        Args:
            embedding: With rows of that policy.
        """
        state = group_state()
        has_any, (ids, tables) = embedding.has_gradients, embedding.gradients()
        groups = group_equal(ids)
        distinct, starts, order = groups
        if state.world_size == 1:
            return RowGradients(*groups, tables) if has_any else None
        links = current_job().links()
        ends = torch.searchsorted(distinct, self._bounds).tolist()
        runs = {rank: range(ends[at], ends[at + 1]) for at, rank in enumerate(self._ranks)}

        def sums() -> Iterator[PeerRows]:
            for rank in links.peers:
                run = runs[rank]
                rows = empty((len(run), tables[0].shape[1]), torch.float32)
                sum_groups(rows, tables, order, starts[run.start : run.stop + 1])
                yield PeerRows(int(has_any), [distinct[run.start : run.stop], rows])

        likes = [ids[:0], tables[0][:0]]
        found = links.exchange(sums(), likes, "gradients")
        if not (has_any or any(rows.number for rows in found.values())):
            return None
        own = runs[state.rank]
        mine = order[starts[own.start] : starts[own.stop]]
        return _merged((ids, mine, tables), state.rank, found)


def _merged(
    own: tuple[Tensor, Tensor, Sequence[Tensor]], rank: int, found: Mapping[int, PeerRows]
) -> RowGradients:
    """The gradients of this rank's rows, where they lie.

    Args:
        own: This rank's ids, the places of those whose rows it has, and the gradients.
        rank: This one.
        found: What the others sent: ids and gradients.
    """
    ids, mine, tables = own
    by_rank, numbers, by_number = {rank: ids.index_select(0, mine)}, {rank: mine}, [*tables]
    end = ids.numel()
    for other, rows in found.items():
        by_rank[other], gradients = rows.tensors
        numbers[other] = torch.arange(end, end + gradients.shape[0])
        by_number.append(gradients)
        end += gradients.shape[0]
    ranks = sorted(by_rank)
    distinct, starts, order = group_equal(torch.cat([by_rank[each] for each in ranks]))
    order = torch.cat([numbers[each] for each in ranks]).index_select(0, order)
    return RowGradients(distinct, starts, order, by_number, (0, ids.numel()))
