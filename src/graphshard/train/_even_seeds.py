# SPDX-License-Identifier: Apache-2.0
"""shared_evenly: as many seeds for every rank, and steps that mean the same for any number of them.

Labelled nodes are rarely spread evenly over parts. If each rank trained on those of its own part,
the ranks with few of them would be idle for the last steps of an epoch, and those steps would be
small ones; how many there are would depend on the partition. A rank may train on any node, so what
some have too many of goes to those that have too few.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm import ragged_all_to_all, rank, world_size
from ._counts import per_rank


def shared_evenly(ids: Tensor) -> Tensor:
    """Global ids of this rank's share of all ids; every rank must call.

    Args:
        ids: int64 ``[n]``, of any length on each rank.

    Returns:
        ``[m]``, this rank's own ids ahead; m differs by at most 1 between ranks.
    """
    sizes = per_rank(ids.numel())
    if len(sizes) == 1:
        return ids
    fewest, num_larger = divmod(sum(sizes), len(sizes))
    # Those that have most get the larger shares, so that fewest ids move.
    by_size = sorted(range(len(sizes)), key=lambda r: -sizes[r])
    shares = [fewest] * len(sizes)
    for r in by_size[:num_larger]:
        shares[r] += 1
    moves = _moves([n - share for n, share in zip(sizes, shares, strict=True)])
    me = rank()
    kept = ids[: min(sizes[me], shares[me])]
    send = [moves.get((me, r), 0) for r in range(world_size())]
    recv = [moves.get((r, me), 0) for r in range(world_size())]
    return torch.cat([kept, ragged_all_to_all(ids[kept.numel() :], send, recv)])


def _moves(surplus: list[int]) -> dict[tuple[int, int], int]:
    """Who gives how many to whom, from what each has too many (or, negative, too few) of."""
    found = {}
    takers = [(r, -n) for r, n in enumerate(surplus) if n < 0]
    for giver, number in enumerate(surplus):
        while number > 0:
            taker, lacking = takers.pop()
            moved = min(number, lacking)
            found[giver, taker] = moved
            number -= moved
            if lacking > moved:
                takers.append((taker, lacking - moved))
    return found
