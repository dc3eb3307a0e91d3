# SPDX-License-Identifier: Apache-2.0
"""Exchange of the whole halo in one collective: rows to their readers, and back to their owners.

All functions take any number of requests and issue one ``all_to_all_single`` for all of them, also
in the backward pass. Those that wait are those that do not, and a wait.

[Note: gradients of an exchange]
    `HaloFetch` is two nodes of the autograd graph: `_BeginFetch` takes own rows and gives an empty
    ticket, `_EndFetch` takes the ticket and gives the rows that came. Autograd runs the newest node
    that is ready, so in the backward pass gradients of remote rows are sent as soon as they are
    known, by `_EndFetch`; then comes what the forward pass did with own rows between the two; and
    last `_BeginFetch` waits for what the readers return, and sums it.

    `_SumReturned` is the adjoint of a fetch as a node of its own, for gradients of gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from .._pending import Pending
from ..wire import SharedBlocks, narrowed, shared_blocks, start_exchange, wire_dtype
from ._plan import ExchangePlan, most_bytes
from ._signature import Requests, check_requests, needs_grad_now


def start_fetch_all(
    requests: Requests, wire: torch.dtype | None = None, needs_grad: Sequence[bool] = ()
) -> Pending:
    """Start to fetch the halo rows of each tensor; every rank must call, and must wait.

    It sends what `fetch_halo` sends, but returns at once, so that the caller can compute on its own
    rows until it waits. It records no gradient.

    Args:
        requests: As for `fetch_halo`. The tensors must not change before the rows are waited for.
        wire: In which dtype wider floating-point rows travel; None is their own.
        needs_grad: Which requests will have gradients to return, equal on all ranks; for the
            check alone. None of them by default.

    Returns:
        A `Pending` whose ``wait()`` gives ``[plan.num_halo, *]`` for each request.

    Raises:
        ValueError: As `fetch_halo`.
        RankError: Another rank failed.
    """
    rows = [plan.num_rows for plan, _ in requests]
    plans, tensors = check_requests("fetch_halo", requests, rows, needs_grad, wire)
    return _start_fetch(plans, tensors, wire)


def start_return_all(requests: Requests, wire: torch.dtype | None = None) -> Pending:
    """Start to return halo rows to their owners; every rank must call, and must wait.

    Args:
        requests: Pairs of a plan and a tensor ``[plan.num_halo, *]``.
        wire: As for `start_fetch_all`.

    Returns:
        A `Pending` whose ``wait()`` gives ``[sum(plan.send_splits), *]`` for each request: what
        came for the rows ``plan.send_index``, in that order. `ExchangePlan.add_returned` adds it.

    Raises:
        ValueError: As `return_halo`.
        RankError: Another rank failed.
    """
    rows = [plan.num_halo for plan, _ in requests]
    plans, tensors = check_requests("return_halo(sum)", requests, rows, wire=wire)
    return _start_return(plans, tensors, wire)


def return_halo(requests: Requests, reduce: Literal["sum", "max", "min"] = "sum") -> list[Tensor]:
    """Return halo rows to their owners, which combine them; every rank must call.

    No gradient flows through this function.

    Args:
        requests: Pairs of a plan and a tensor ``[plan.num_halo, *]``, one row per halo row.
        reduce: How an owner combines what several ranks (or one, for a row that it asked for
            twice) return to one row.

    Returns:
        For each request ``[plan.num_rows, *]``. A row that no rank read is 0 for "sum", and
        the dtype's lowest (highest) value, an infinity where it has one, for "max" ("min").

    Raises:
        ValueError: Wrong number of rows, or (on all ranks) ranks that return different things.
        TypeError: A complex or sparse tensor, or a sum of bool.
        RankError: Another rank failed, or did not answer in time.
    """
    if reduce not in ("sum", "max", "min"):
        raise ValueError(f"reduce must be 'sum', 'max' or 'min' (got {reduce!r})")
    if reduce == "sum" and any(getattr(t, "dtype", None) == torch.bool for _, t in requests):
        raise TypeError("return_halo cannot sum bool; use reduce='max' (any) or 'min' (all)")
    rows = [plan.num_halo for plan, _ in requests]
    plans, tensors = check_requests(f"return_halo({reduce})", requests, rows)
    returned = _start_return(plans, tensors, None).wait()
    return [
        plan.sum_returned(part) if reduce == "sum" else _extreme_rows(plan, part, reduce)
        for plan, part in zip(plans, returned, strict=True)
    ]


def fetch_halo(requests: Requests, wire: torch.dtype | None = None) -> list[Tensor]:
    """Fetch the halo rows of each tensor from their owners; every rank must call.

    Every rank must pass as many requests, on the same plans in the same order, with equal
    dtypes, trailing shapes and ``requires_grad``.

    The backward pass is one collective too, which every rank must reach: on a rank whose loss
    does not depend on any fetched row, autograd would leave it out and the others would wait.
    `anchor` makes a loss depend on fetched rows without changing it. A request whose tensor needs
    no gradient takes no part in the backward pass. Gradients are differentiable, to any order.

    Args:
        requests: Pairs of a plan and a tensor ``[plan.num_rows, *]`` of own rows.
        wire: In which dtype wider floating-point rows travel, and their gradients: bfloat16 or
            float16, which round them; None is their own. Equal on all ranks.

    Returns:
        For each request ``[plan.num_halo, *]``: others' rows, grouped by owner.

    Raises:
        ValueError: Wrong number of rows, or (on all ranks) ranks that ask for different things.
        TypeError: A complex or sparse tensor.
        RankError: Another rank failed, or did not answer in time.
    """
    return HaloFetch(requests, wire).wait()


class HaloFetch(Pending):
    """`fetch_halo` in two halves, so that own rows are worked on between them.

    Every rank must make one and must wait. The duties for the backward pass are those of
    `fetch_halo`; there too, own rows are worked on while gradients travel. The tensors must not
    change before ``wait()``, which gives ``[plan.num_halo, *]`` for each request.

    Args:
        requests: As for `fetch_halo`.
        wire: As for `fetch_halo`.

    Raises:
        ValueError: As `fetch_halo`.
        RankError: Another rank failed.
    """

    def __init__(self, requests: Requests, wire: torch.dtype | None = None) -> None:
        needs = [needs_grad_now(tensor) for _, tensor in requests]
        rows = [plan.num_rows for plan, _ in requests]
        plans, tensors = check_requests("fetch_halo", requests, rows, needs, wire)
        super().__init__(_start_recorded(plans, tensors, wire).wait)


HaloUnderWay = HaloFetch
"""The former name of `HaloFetch`."""


def anchor(output: Tensor, *tensors: Tensor) -> Tensor:
    """The output, unchanged, made to depend on tensors that it may not have used.

    The tensors receive no gradient from here, but autograd now visits what produced them. Use it
    on the loss of a rank that may have no seeds, so that it takes part in the collectives of the
    backward pass.
    """
    anchored: Tensor = _Anchor.apply(output, *tensors)
    return anchored


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, *tensors: Tensor) -> Tensor:
        ctx.num_tensors = len(tensors)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, *([None] * ctx.num_tensors)


# -- gradients -------------------------------------------------------------------------------------


def _start_recorded(
    plans: Sequence[ExchangePlan], tensors: Sequence[Tensor], wire: torch.dtype | None
) -> Pending:
    """`_start_fetch`, recorded by autograd. See [Note: gradients of an exchange]."""
    pending = _start_fetch(plans, tensors, wire)
    chosen = [i for i, tensor in enumerate(tensors) if needs_grad_now(tensor)]
    if not chosen:
        return pending
    way_back = _WayBack([plans[i] for i in chosen], wire)
    ticket = _BeginFetch.apply(way_back, *(tensors[i] for i in chosen))

    def finish(received: list[Tensor]) -> list[Tensor]:
        rows = list(received)
        with torch.enable_grad():  # whatever the mode of the first caller that waits
            recorded = _EndFetch.apply(way_back, ticket, *(rows[i] for i in chosen))
        for i, part in zip(chosen, recorded, strict=True):
            rows[i] = part
        return rows

    return pending.then(finish)


class _WayBack:
    """What the two halves of a fetch share in the backward pass."""

    def __init__(self, plans: Sequence[ExchangePlan], wire: torch.dtype | None) -> None:
        self.plans, self.wire = plans, wire
        self.returning: Pending | None = None
        self.grads: Sequence[Tensor] = ()  # in place of it where they will be differentiated


class _BeginFetch(torch.autograd.Function):
    """Forward: a ticket for the rows. Backward: gradients of own rows, from all readers."""

    @staticmethod
    def forward(ctx: Any, way_back: _WayBack, *tensors: Tensor) -> Tensor:
        ctx.way_back = way_back
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        way_back: _WayBack = ctx.way_back
        returning, way_back.returning = way_back.returning, None
        if returning is None:
            grads, way_back.grads = way_back.grads, ()
            return None, *_SumReturned.apply(way_back.plans, way_back.wire, *grads)
        return None, *_sums(way_back.plans, returning)


class _EndFetch(torch.autograd.Function):
    """Forward: the rows, as they came. Backward: their gradients are sent."""

    @staticmethod
    def forward(ctx: Any, way_back: _WayBack, ticket: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
        ctx.way_back = way_back
        return tuple(part.view_as(part) for part in rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        way_back: _WayBack = ctx.way_back
        if torch.is_grad_enabled():
            way_back.grads = grads
        else:
            way_back.returning = _start_return(way_back.plans, grads, way_back.wire)
        return None, grads[0].new_empty(0), *[None] * len(grads)


class _SumReturned(torch.autograd.Function):
    """Forward: halo rows to their owners, summed. Backward: the fetch of their gradients."""

    @staticmethod
    def forward(
        ctx: Any, plans: Sequence[ExchangePlan], wire: torch.dtype | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.plans, ctx.wire = plans, wire
        return tuple(_sums(plans, _start_return(plans, tensors, wire)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *_start_recorded(ctx.plans, grads, ctx.wire).wait()


def _sums(plans: Sequence[ExchangePlan], returning: Pending) -> list[Tensor]:
    return [plan.sum_returned(rows) for plan, rows in zip(plans, returning.wait(), strict=True)]


# -- exchanges of what has been checked ------------------------------------------------------------


def _start_fetch(
    plans: Sequence[ExchangePlan], tensors: Sequence[Tensor], wire: torch.dtype | None
) -> Pending:
    tensors = [tensor.detach() for tensor in tensors]
    if not plans or plans[0].world_size == 1:
        return Pending.of([tensor.new_empty((0, *tensor.shape[1:])) for tensor in tensors])
    blocks = shared_blocks(plans[0].state, most_bytes(plans, tensors, wire))
    pairs = list(zip(plans, tensors, strict=True))
    rows: list[Tensor | Sequence[Tensor]]
    if blocks is None and len(pairs) > 1:
        rows = [[narrowed(sent.of(tensor), wire) for sent in plan.sent] for plan, tensor in pairs]
    else:
        rows = [_sent(plan, tensor, wire, blocks) for plan, tensor in pairs]
    send, recv = [p.send_splits for p in plans], [p.recv_splits for p in plans]
    pending = start_exchange(plans[0].state, rows, send, recv, "fetch_halo", blocks)
    return _widened(pending, tensors)


def _start_return(
    plans: Sequence[ExchangePlan], tensors: Sequence[Tensor], wire: torch.dtype | None
) -> Pending:
    tensors = [tensor.detach() for tensor in tensors]
    if not plans or plans[0].world_size == 1:
        return Pending.of(tensors)
    blocks = shared_blocks(plans[0].state, most_bytes(plans, tensors, wire))
    rows = [narrowed(tensor, wire) for tensor in tensors]
    send, recv = [p.recv_splits for p in plans], [p.send_splits for p in plans]
    pending = start_exchange(plans[0].state, rows, send, recv, "return_halo", blocks)
    return _widened(pending, tensors)


def _widened(pending: Pending, likes: Sequence[Tensor]) -> Pending:
    dtypes = [like.dtype for like in likes]
    return pending.then(
        lambda received: [part.to(dtype) for part, dtype in zip(received, dtypes, strict=True)]
    )


def _sent(
    plan: ExchangePlan, tensor: Tensor, wire: torch.dtype | None, blocks: SharedBlocks | None
) -> Tensor:
    """The rows that others read, by reader; gathered into shared memory if they are not rounded."""
    as_is = wire_dtype(tensor.dtype, wire) == tensor.dtype
    allocate = blocks.empty if blocks is not None and as_is else None
    return narrowed(plan.all_sent.of(tensor, allocate), wire)


def _extreme_rows(plan: ExchangePlan, arrived: Tensor, reduce: str) -> Tensor:
    dtype = arrived.dtype
    if dtype == torch.bool:
        return _extreme_rows(plan, arrived.to(torch.uint8), reduce).clamp_(max=1).bool()
    if dtype.is_floating_point:
        empty = float("-inf") if reduce == "max" else float("inf")
    else:
        limits = torch.iinfo(dtype)
        empty = limits.min if reduce == "max" else limits.max
    out = torch.full((plan.num_rows, *arrived.shape[1:]), empty, dtype=dtype, device=arrived.device)
    if arrived.numel() == 0:
        return out
    index = plan.index_on(arrived.device)
    index = index.view(-1, *[1] * (arrived.dim() - 1)).expand_as(arrived)
    return out.scatter_reduce_(0, index, arrived, "amax" if reduce == "max" else "amin")
