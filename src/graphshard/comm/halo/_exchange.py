# SPDX-License-Identifier: Apache-2.0
"""fetch_halo and its adjoint return_halo: the whole halo in one flat collective.

Both take any number of requests and issue exactly one ``all_to_all_single`` for all of them, also
in the backward pass. They are each other's adjoint, so each is the other's backward, to any order.

What comes back to a row from several ranks is summed in the order of the ranks, whatever the order
of arrival and the device: a run repeats bit for bit. bfloat16 and float16 are summed in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from ..wire import exchange_rows, narrowed, shared_blocks, widened, wire_dtype
from ._plan import ExchangePlan, most_bytes
from ._signature import check_requests, needs_grad_now

Request = tuple[ExchangePlan, Tensor]


def fetch_halo(requests: Sequence[Request], wire: torch.dtype | None = None) -> list[Tensor]:
    """Fetch the halo rows of each tensor from their owners; every rank must call.

    Every rank must pass as many requests, on the same plans in the same order, with equal
    dtypes, trailing shapes and ``requires_grad``.

    The backward pass is one collective too, which every rank must reach: on a rank whose loss
    does not depend on any fetched row, autograd would leave it out and the others would wait.
    `anchor` makes a loss depend on fetched rows without changing it. A request whose tensor needs
    no gradient takes no part in the backward pass.

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
    if not requests:
        return []
    plans = [plan for plan, _ in requests]
    tensors = [tensor for _, tensor in requests]
    rows = [plan.num_rows for plan in plans]
    needs = [needs_grad_now(tensor) for tensor in tensors]
    check_requests("fetch_halo", plans, tensors, rows, needs, wire)
    return list(_Fetch.apply(plans, wire, *tensors))


def return_halo(
    requests: Sequence[Request], reduce: Literal["sum", "max", "min"] = "sum"
) -> list[Tensor]:
    """Send halo rows home to their owners, which combine them; every rank must call.

    No gradient flows through this function.

    Args:
        requests: Pairs of a plan and a tensor ``[plan.num_halo, *]``, one row per halo row.
        reduce: How an owner combines what several ranks (or one, for a row that it asked for
            twice) return to one row.

    Returns:
        For each request ``[plan.num_rows, *]``. A row that nobody read is 0 for "sum", and
        the dtype's lowest (highest) value, an infinity where it has one, for "max" ("min").

    Raises:
        ValueError: Wrong number of rows, or (on all ranks) ranks that return different things.
        TypeError: A complex or sparse tensor, or a sum of bool.
        RankError: Another rank failed, or did not answer in time.
    """
    if reduce not in ("sum", "max", "min"):
        raise ValueError(f"reduce must be 'sum', 'max' or 'min' (got {reduce!r})")
    if not requests:
        return []
    if reduce == "sum" and any(
        getattr(tensor, "dtype", None) == torch.bool for _, tensor in requests
    ):
        raise TypeError("return_halo cannot sum bool; use reduce='max' (any) or 'min' (all)")
    plans = [plan for plan, _ in requests]
    tensors = [tensor for _, tensor in requests]
    check_requests(f"return_halo({reduce})", plans, tensors, [plan.num_halo for plan in plans])
    return _return(plans, tensors, reduce, None)


def anchor(output: Tensor, *tensors: Tensor) -> Tensor:
    """The output, unchanged, made to depend on tensors that it may not have used.

    The tensors receive no gradient from here, but autograd now visits what produced them. Use it
    on the loss of a rank that may have no seeds, so that it takes part in the collectives of the
    backward pass.
    """
    anchored: Tensor = _Anchor.apply(output, *tensors)
    return anchored


class _Fetch(torch.autograd.Function):
    """Forward: rows to their readers. Backward: gradients of those rows, home and summed."""

    @staticmethod
    def forward(
        ctx: Any, plans: list[ExchangePlan], wire: torch.dtype | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        out = _fetch(plans, tensors, wire)
        # What needs a gradient is settled here and not from ``needs_input_grad`` in the backward
        # pass, which depends on the inputs that the user asks gradients for.
        ctx.needs = [tensor.requires_grad for tensor in tensors]
        ctx.plans, ctx.wire = plans, wire
        ctx.likes = [(part.shape, part.dtype, part.device) for part in out]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *(part for part, needs in zip(out, ctx.needs, strict=True) if not needs)
        )
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        chosen = [number for number, needs in enumerate(ctx.needs) if needs]
        full = []
        for number in chosen:
            grad = grads[number]
            shape, dtype, device = ctx.likes[number]
            full.append(torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad)
        back = _Return.apply([ctx.plans[number] for number in chosen], ctx.wire, *full)
        out: list[Tensor | None] = [None] * len(grads)
        for number, part in zip(chosen, back, strict=True):
            out[number] = part
        return None, None, *out


class _Return(torch.autograd.Function):
    """Forward: halo rows home, summed. Backward: the fetch of their gradients."""

    @staticmethod
    def forward(
        ctx: Any, plans: list[ExchangePlan], wire: torch.dtype | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.plans, ctx.wire = plans, wire
        return tuple(_return(plans, tensors, "sum", wire))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *_Fetch.apply(ctx.plans, ctx.wire, *grads)


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, *tensors: Tensor) -> Tensor:
        ctx.num_tensors = len(tensors)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, *([None] * ctx.num_tensors)


def _fetch(
    plans: Sequence[ExchangePlan], tensors: Sequence[Tensor], wire: torch.dtype | None
) -> list[Tensor]:
    state = plans[0].state
    if state.world_size == 1:
        return [tensor.new_empty((0, *tensor.shape[1:])) for tensor in tensors]
    blocks = shared_blocks(state, most_bytes(plans, tensors, wire))
    # Several are joined, and what is narrowed is copied, into what is sent.
    as_is = len(tensors) == 1 and wire_dtype(tensors[0].dtype, wire) == tensors[0].dtype
    allocate = blocks.empty if blocks is not None and as_is else None
    rows = [
        narrowed(plan.all_sent.of(tensor.detach(), allocate), wire)
        for plan, tensor in zip(plans, tensors, strict=True)
    ]
    arrived = exchange_rows(
        state,
        rows,
        [plan.send_splits for plan in plans],
        [plan.recv_splits for plan in plans],
        "fetch_halo",
        blocks=blocks,
    )
    return widened(arrived, [tensor.dtype for tensor in tensors])


def _return(
    plans: Sequence[ExchangePlan],
    tensors: Sequence[Tensor],
    reduce: str,
    wire: torch.dtype | None,
) -> list[Tensor]:
    state = plans[0].state
    if state.world_size == 1:
        arrived = [tensor.detach() for tensor in tensors]
    else:
        blocks = shared_blocks(state, most_bytes(plans, tensors, wire))
        arrived = exchange_rows(
            state,
            [narrowed(tensor.detach(), wire) for tensor in tensors],
            [plan.recv_splits for plan in plans],
            [plan.send_splits for plan in plans],
            "return_halo",
            blocks=blocks,
        )
        arrived = widened(arrived, [tensor.dtype for tensor in tensors])
    combine = _sum_rows if reduce == "sum" else _extreme_rows
    return [combine(plan, part, reduce) for plan, part in zip(plans, arrived, strict=True)]


def _sum_rows(plan: ExchangePlan, arrived: Tensor, reduce: str) -> Tensor:
    """Sum ``arrived[i]`` into row ``send_index[i]``, by ascending ``i`` within a row."""
    shape = (plan.num_rows, *arrived.shape[1:])
    if arrived.numel() == 0:
        return arrived.new_zeros(shape)
    if arrived.dtype in (torch.float32, torch.float64):
        order, starts = plan.sum_order(arrived.device)
        # A bag per row: each is summed by one thread in the order of its positions.
        summed = functional.embedding_bag(
            order,
            arrived.reshape(arrived.shape[0], -1),
            starts,
            mode="sum",
            include_last_offset=True,
        )
        return summed.view(shape)
    if arrived.dtype in (torch.bfloat16, torch.float16):
        return _sum_rows(plan, arrived.float(), reduce).to(arrived.dtype)
    # Sums of integers do not depend on the order.
    return arrived.new_zeros(shape).index_add_(0, plan.index_on(arrived.device), arrived)


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
