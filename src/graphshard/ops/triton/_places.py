# SPDX-License-Identifier: Apache-2.0
"""Where in the rows of its operands each column of a result comes from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .._broadcast import Shape, copy_loop, row_loop


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
    sides = ((loop.lhs_offsets, loop.lhs_step), (loop.rhs_offsets, loop.rhs_step))
    return RowPlaces(loop.shape, *(_places(*side, loop.inner, device) for side in sides))


def _places(offsets: Tensor, step: int, inner: int, device: torch.device) -> Tensor | None:
    places = (offsets.view(-1, 1) + torch.arange(inner) * step).view(-1)
    is_own = torch.equal(places, torch.arange(places.shape[0]))
    return None if is_own else places.to(torch.int32).to(device)
