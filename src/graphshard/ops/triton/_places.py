# SPDX-License-Identifier: Apache-2.0
"""Where in the rows of its operands each column of a result comes from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .._broadcast import RowLoop, Shape, copy_loop, row_loop


@dataclass(frozen=True)
class RowPlaces:
    """Of one pair of operands.

    Args:
        shape: Of a row of the result.
        lhs: int32 ``[width]``; None where columns are the operand's own.
    """

    shape: Shape
    lhs: Tensor | None
    rhs: Tensor | None


@lru_cache(maxsize=512)
def row_places_of(lhs: Shape | None, rhs: Shape | None, device: torch.device) -> RowPlaces:
    """For rows of these shapes, which broadcast; None for an operand that is not read."""
    if lhs is None or rhs is None:
        only = rhs if lhs is None else lhs
        assert only is not None
        return RowPlaces(copy_loop(only).shape, None, None)
    loop = row_loop(lhs, rhs)
    return RowPlaces(loop.shape, *(_places(loop, side, device) for side in ("lhs", "rhs")))


def _places(loop: RowLoop, side: str, device: torch.device) -> Tensor | None:
    offsets, step = (loop.lhs_offsets, loop.lhs_step)
    if side == "rhs":
        offsets, step = (loop.rhs_offsets, loop.rhs_step)
    places = (offsets.view(-1, 1) + torch.arange(loop.inner) * step).view(-1)
    if torch.equal(places, torch.arange(places.shape[0])):
        return None
    return places.to(torch.int32).to(device)
