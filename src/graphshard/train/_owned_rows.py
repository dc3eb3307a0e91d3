# SPDX-License-Identifier: Apache-2.0
"""fetch_owned_rows: learnable rows of any rank, by global id, with gradients to their owners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._ranges import RangeMap
from ..comm import ExchangePlan, fetch_halo, rank, world_size


class OwnedRows(NamedTuple):
    """Rows that are wanted.

    Args:
        table: ``[num_owned, width]``, the rows that this rank owns.
        ranges: Ids that each rank owns.
        ids: Integer ``[n]``, which rows; of any rank, in any order.
    """

    table: Tensor
    ranges: RangeMap
    ids: Tensor


def fetch_owned_rows(requests: Sequence[OwnedRows]) -> list[Tensor]:
    """The rows of each request, ``[n, width]``; every rank must call, with as many requests.

    One exchange brings the rows of all requests, and one takes the gradients home, where those of
    a row are summed. A rank whose loss may not depend on them must `graphshard.comm.anchor` it.
    """
    if world_size() == 1:
        return [wanted.table.index_select(0, wanted.ids.long()) for wanted in requests]
    plans, orders, owned = [], [], []
    for table, ranges, ids in requests:
        owner = ranges.part_of(ids)
        rows = ranges.local_of(ids, owner)
        needed = [rows[owner == part] for part in range(world_size())]
        owned.append(needed[rank()].long())
        needed[rank()] = rows[:0]
        plans.append(ExchangePlan.build(needed, table.shape[0], device=table.device))
        owner = owner.masked_fill(owner == rank(), -1)  # own rows go first
        orders.append(torch.argsort(owner, stable=True))
    fetched = fetch_halo([(p, wanted.table) for p, wanted in zip(plans, requests, strict=True)])
    found = []
    for wanted, own, halo, order in zip(requests, owned, fetched, orders, strict=True):
        place = torch.empty_like(order)
        place[order] = torch.arange(order.numel(), device=order.device)
        rows = torch.cat([wanted.table.index_select(0, own), halo])
        found.append(rows.index_select(0, place))
    return found
