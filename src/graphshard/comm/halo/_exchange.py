# SPDX-License-Identifier: Apache-2.0
"""Exchange of halo rows: to their readers, and back to their owners.

The whole halo (`fetch_halo`, `return_halo`, `start_fetch_all`, `start_return_all`): any number of
requests in one ``all_to_all_single``, also in the backward pass. Those that wait are those that do
not, and a wait.

One remote rank at a time (`start_fetch`, `start_return`), with the next one in flight: in step
``k`` (1 to P - 1) every rank receives from ``rank - k`` and sends to ``rank + k`` (modulo P), so
that no two ranks send to the same one, and P - 1 steps visit every pair once. Each tensor is a
message of its own, out of the memory that it is in and into the memory that it stays in, so nothing
is held twice. A message of no bytes is not sent. A trace counts a call once.

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
import torch.distributed as dist
from torch import Tensor

from ..collectives import Pending, count, from_backend, room_for, to_backend, wait
from ..group import GroupState, operation
from ..transport import SharedBlocks, as_bytes, narrowed, shared_blocks, start_exchange, wire_dtype
from ._plan import ExchangePlan, Requests, check_requests, most_bytes, needs_grad_now


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
        return output.detach()

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
        return tuple(part.detach() for part in rows)

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
        return tuple(part.detach() for part in _sums(plans, _start_return(plans, tensors, wire)))

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


# -- one remote rank at a time ---------------------------------------------------------------------

_NUM_TAGS = 1 << 20


def start_fetch(
    plan: ExchangePlan, step: int, tensors: Sequence[Tensor], wire: torch.dtype | None = None
) -> Pending:
    """Start to fetch the rows of one remote shard; every rank must call, with the same step.

    Args:
        plan: Who reads which rows.
        step: 1 to ``world_size - 1``; rows come from ``(rank - step) % world_size``.
        tensors: Own rows, each ``[num_rows, *]``; dtypes and trailing shapes equal on all ranks.
            They must not change before the `Pending` is waited for.
        wire: In which dtype wider floating-point rows travel; None is their own.

    Returns:
        A `Pending` whose ``wait()`` gives ``[recv_splits[source], *]`` for each tensor.

    Raises:
        ValueError: A step out of range, a wrong number of rows, or (on all ranks) ranks that
            exchange different things.
        RankError: Another rank failed.
    """
    source, target = _pair(plan, step)
    requests, own = [(plan, tensor) for tensor in tensors], [plan.num_rows] * len(tensors)
    check_requests("start_fetch", requests, own, wire=wire)
    rows = [plan.sent[target].of(tensor.detach()) for tensor in tensors]
    num_rows = plan.recv_splits[source]
    return _start_messages(plan.state, "start_fetch", rows, source, num_rows, target, wire)


def start_return(
    plan: ExchangePlan, step: int, grads: Sequence[Tensor], wire: torch.dtype | None = None
) -> Pending:
    """Start to return the gradients of the rows received in a step; every rank must call.

    Args:
        plan: Who reads which rows.
        step: The step of `start_fetch` that fetched the rows.
        grads: Each ``[recv_splits[(rank - step) % world_size], *]``; dtypes and trailing shapes
            equal on all ranks.
        wire: As for `start_fetch`.

    Returns:
        A `Pending` whose ``wait()`` gives, for each tensor, the gradients of
        ``plan.send_rows((rank + step) % world_size)``.

    Raises:
        ValueError: As `start_fetch`.
        RankError: Another rank failed.
    """
    owner, reader = _pair(plan, step)
    requests, fetched = [(plan, grad) for grad in grads], [plan.recv_splits[owner]] * len(grads)
    check_requests("start_return", requests, fetched, wire=wire)
    rows = [grad.detach() for grad in grads]
    num_rows = plan.send_splits[reader]
    return _start_messages(plan.state, "start_return", rows, reader, num_rows, owner, wire)


def _pair(plan: ExchangePlan, step: int) -> tuple[int, int]:
    if not 1 <= step < plan.world_size:
        raise ValueError(
            f"step must be in [1, {plan.world_size}), one for each other rank (got {step})"
        )
    return (plan.rank - step) % plan.world_size, (plan.rank + step) % plan.world_size


def _start_messages(
    state: GroupState,
    name: str,
    parts: list[Tensor],
    source: int,
    num_rows: int,
    target: int,
    wire: torch.dtype | None,
) -> Pending:
    """Send ``parts`` to ``target``; receive ``num_rows`` rows like theirs from ``source``."""
    if not parts:
        return Pending.of([])
    likes = [(part.device, part.dtype) for part in parts]
    parts = [narrowed(part, wire) for part in parts]
    device = state.payload_device(parts[0].device)
    outgoing = to_backend([as_bytes(part) for part in parts], device)
    incoming = [
        room_for((num_rows, *part.shape[1:]), part.dtype, device, part.device) for part in parts
    ]
    del parts
    # Every rank starts the same messages in the same order, so the tags are the same on both
    # ends, and messages of two operations in flight cannot be taken for each other.
    number = state.num_operations
    state.num_operations += len(outgoing)
    to, frm = state.members[target], state.members[source]
    requests: list[tuple[int, dist.P2POp]] = []
    for i, (sent, received) in enumerate(zip(outgoing, incoming, strict=True)):
        tag = (number + i) % _NUM_TAGS
        if received.numel():
            buffer = as_bytes(received)
            requests.append((source, dist.P2POp(dist.irecv, buffer, frm, state.group, tag)))
        if sent.numel():
            requests.append((target, dist.P2POp(dist.isend, sent, to, state.group, tag)))
    num_bytes = sum(sent.numel() for sent in outgoing)
    if num_bytes:
        count("send", num_bytes)
    works: list[tuple[int, dist.Work]] = []
    if requests:
        with operation(state, name, number, sorted({source, target})):
            started = dist.batch_isend_irecv([request for _, request in requests])
        # A backend that joins the requests gives one piece of work for all of them.
        works = [(peer, w) for (peer, _), w in zip(requests, started, strict=False)]
    del requests

    def finish() -> list[Tensor]:
        for peer, work in works:
            with operation(state, name, number, [peer]):
                wait(state, work)
        works.clear()
        outgoing.clear()  # before anything is copied
        arrived = from_backend(incoming, [device for device, _ in likes])
        incoming.clear()
        return [part.to(dtype) for part, (_, dtype) in zip(arrived, likes, strict=True)]

    return Pending(finish)
