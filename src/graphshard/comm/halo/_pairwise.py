# SPDX-License-Identifier: Apache-2.0
"""start_fetch, start_return: one remote shard at a time, with the next one in flight.

In step ``k`` (1 to P - 1) every rank receives from ``rank - k`` and sends to ``rank + k`` (modulo
P), so that no two ranks send to the same one, and P - 1 steps visit every pair once. All tensors
of a call start at once, each as a message of its own, out of the memory that it is in and into the
memory that it stays in: nothing is packed, so nothing is held twice. A message of no bytes is not
sent. Messages are bytes, so dtypes that a backend refuses travel too. A trace counts a call once,
with the bytes of all its messages.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..._memory import empty
from .._pending import Pending
from .._trace import count
from ..collectives import wait
from ..group import GroupState, operation
from ..wire import as_bytes, narrowed
from ._plan import ExchangePlan
from ._signature import check_requests

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
    if not tensors:
        return Pending.of([])
    requests, own = [(plan, tensor) for tensor in tensors], [plan.num_rows] * len(tensors)
    check_requests("start_fetch", requests, own, wire=wire)
    rows = [plan.sent[target].of(tensor.detach()) for tensor in tensors]
    return _start(plan.state, "start_fetch", rows, source, plan.recv_splits[source], target, wire)


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
    if not grads:
        return Pending.of([])
    requests, fetched = [(plan, grad) for grad in grads], [plan.recv_splits[owner]] * len(grads)
    check_requests("start_return", requests, fetched, wire=wire)
    rows = [grad.detach() for grad in grads]
    return _start(plan.state, "start_return", rows, reader, plan.send_splits[reader], owner, wire)


def _pair(plan: ExchangePlan, step: int) -> tuple[int, int]:
    if not 1 <= step < plan.world_size:
        raise ValueError(
            f"step must be in [1, {plan.world_size}), one for each other rank (got {step})"
        )
    return (plan.rank - step) % plan.world_size, (plan.rank + step) % plan.world_size


def _start(
    state: GroupState,
    name: str,
    parts: list[Tensor],
    source: int,
    num_rows: int,
    target: int,
    wire: torch.dtype | None,
) -> Pending:
    """Send ``parts`` to ``target``; receive ``num_rows`` rows like theirs from ``source``."""
    likes = [(part.device, part.dtype) for part in parts]
    parts = [narrowed(part, wire) for part in parts]
    device = state.payload_device(parts[0].device)
    outgoing = [as_bytes(part).to(device) for part in parts]
    incoming = [empty((num_rows, *part.shape[1:]), part.dtype, device) for part in parts]
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
        return [
            part.to(device).to(dtype) for part, (device, dtype) in zip(incoming, likes, strict=True)
        ]

    return Pending(finish)
