# SPDX-License-Identifier: Apache-2.0
"""HaloUnderWay: `fetch_halo` in two halves, so that own rows are worked on between them.

The backward does the same in reverse. Autograd takes the newest node that is ready: gradients of
the rows that arrived are sent when they are known, by `_Arrive`, and what is done with own rows in
the forward, between the two halves, comes next. Only then is the node of the first half left,
`_Start`, which waits for what others send and adds it up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._pending import Pending
from ._exchange import Request, _Return
from ._overlapped import start_fetch_all, start_return_all
from ._signature import needs_grad_now


class HaloUnderWay:
    """The halo rows of each tensor, once they are waited for; every rank must make one.

    Like `fetch_halo`, differentiable to any order, with the same duties for the backward pass. The
    tensors must not change before `wait`, which every rank must call.

    Args:
        requests: As for `fetch_halo`.
        wire: As for `fetch_halo`.

    Raises:
        ValueError: As `fetch_halo`.
        RankError: Another rank failed.
    """

    def __init__(self, requests: Sequence[Request], wire: torch.dtype | None = None) -> None:
        tensors = [tensor for _, tensor in requests]
        self.needs = [needs_grad_now(tensor) for tensor in tensors]
        chosen = [i for i, needs in enumerate(self.needs) if needs]
        self.plans = [requests[i][0] for i in chosen]
        self.wire = wire
        self.returning: Pending | None = None
        self.grads: Sequence[Tensor] = ()
        self._rows: list[Tensor] | None = None
        pairs = [(plan, tensor.detach()) for plan, tensor in requests]
        self._pending = start_fetch_all(pairs, wire, self.needs)
        self._ticket = _Start.apply(self, *(tensors[i] for i in chosen)) if chosen else None

    def wait(self) -> list[Tensor]:
        """For each request ``[plan.num_halo, *]``: others' rows, grouped by owner.

        Raises:
            RankError: Another rank failed, or did not answer in time.
        """
        if self._rows is None:
            rows = list(self._pending.wait())
            if self._ticket is not None:
                chosen = [i for i, needs in enumerate(self.needs) if needs]
                with torch.enable_grad():  # whoever asks first
                    arrived = _Arrive.apply(self, self._ticket, *(rows[i] for i in chosen))
                for i, part in zip(chosen, arrived, strict=True):
                    rows[i] = part
            self._rows, self._ticket = rows, None
        return self._rows


class _Start(torch.autograd.Function):
    """Forward: a ticket for the rows under way. Backward: own rows' gradients, from all readers."""

    @staticmethod
    def forward(ctx: Any, halo: HaloUnderWay, *tensors: Tensor) -> Tensor:
        ctx.halo = halo
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        halo: HaloUnderWay = ctx.halo
        returning, halo.returning = halo.returning, None
        if returning is None:  # somebody will differentiate the gradient
            grads, halo.grads = halo.grads, ()
            return None, *_Return.apply(halo.plans, halo.wire, *grads)
        sums = []
        for plan, arrived in zip(halo.plans, returning.wait(), strict=True):
            total = arrived.new_zeros((plan.num_rows, *arrived.shape[1:]))
            plan.add_returned(total, arrived)
            sums.append(total)
        return None, *sums


class _Arrive(torch.autograd.Function):
    """Forward: the rows, as they came. Backward: their gradients leave."""

    @staticmethod
    def forward(ctx: Any, halo: HaloUnderWay, ticket: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.halo = halo
        return tuple(part.view_as(part) for part in rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        halo: HaloUnderWay = ctx.halo
        if torch.is_grad_enabled():
            halo.grads = grads
        else:
            pairs = [(plan, g.contiguous()) for plan, g in zip(halo.plans, grads, strict=True)]
            halo.returning = start_return_all(pairs, halo.wire)
        like = grads[0]
        return None, like.new_empty(0), *[None] * len(grads)
