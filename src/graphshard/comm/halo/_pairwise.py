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
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ..._memory import empty
from .._pending import Arrived, Pending
from .._trace import count
from ..collectives import operation, wait
from ..group import GroupState
from ..wire import (
    Letter,
    SharedBlocks,
    as_bytes,
    is_message_shared,
    narrowed,
    row_bytes,
    shared_blocks,
    told,
    wire_dtype,
)
from ._plan import ExchangePlan, most_bytes
from ._sent_rows import SentRows
from ._signature import check_requests

_NUM_TAGS = 1 << 20


@dataclass(eq=False)
class Messages:
    """One message per tensor and direction, under way; see `Pending`."""

    _state: GroupState
    _name: str
    _number: int
    _works: list[tuple[int, dist.Work]]
    _outgoing: list[Tensor]
    _incoming: list[Tensor | Letter]
    _likes: list[tuple[torch.device, torch.dtype]]
    _done: list[Tensor] | None = None

    def wait(self) -> list[Tensor]:
        """What was received, one tensor per tensor sent."""
        if self._done is None:
            for peer, work in self._works:
                with operation(self._state, self._name, self._number, [peer]):
                    wait(self._state, work)
            self._works, self._outgoing = [], []  # what was sent goes first
            here = [
                part.rows(self._state, self._name, self._number)
                if isinstance(part, Letter)
                else part
                for part in self._incoming
            ]
            self._done = [
                part.to(device).to(dtype)
                for part, (device, dtype) in zip(here, self._likes, strict=True)
            ]
            self._incoming = []
        return self._done


def start_fetch(
    plan: ExchangePlan,
    step: int,
    tensors: Sequence[Tensor],
    wire: torch.dtype | None = None,
    share: bool = True,
) -> Pending:
    """Start to fetch the rows of one remote shard; every rank must call, with the same step.

    Args:
        plan: Who reads which rows.
        step: 1 to ``world_size - 1``; rows come from ``(rank - step) % world_size``.
        tensors: Own rows, each ``[num_rows, *]``; dtypes and trailing shapes equal on all ranks.
            They must not change before the `Pending` is waited for.
        wire: In which dtype wider floating-point rows travel; None is their own.
        share: Whether large messages may go through shared memory; the same on all ranks.

    Returns:
        A `Pending` whose ``wait()`` gives ``[recv_splits[source], *]`` for each tensor.

    Raises:
        ValueError: A step out of range, a wrong number of rows, or (on all ranks) ranks that
            exchange different things.
        RankError: Another rank failed.
    """
    source, target = _pair(plan, step)
    if not tensors:
        return Arrived([])
    plans = [plan] * len(tensors)
    own = [plan.num_rows] * len(tensors)
    state = check_requests("start_fetch", plans, tensors, own, wire=wire)
    blocks = shared_blocks(state, most_bytes(plans, tensors, wire)) if share else None
    rows = [_rows(blocks, t.detach(), plan.sent[target], wire) for t in tensors]
    num_rows = plan.recv_splits[source]
    return _start(state, blocks, "start_fetch", rows, source, num_rows, target, wire)


def start_return(
    plan: ExchangePlan,
    step: int,
    grads: Sequence[Tensor],
    wire: torch.dtype | None = None,
    share: bool = True,
) -> Pending:
    """Start to send home the gradients of the rows received in a step; every rank must call.

    Args:
        plan: Who reads which rows.
        step: The step of `start_fetch` that fetched the rows.
        grads: Each ``[recv_splits[(rank - step) % world_size], *]``; dtypes and trailing shapes
            equal on all ranks.
        wire: As for `start_fetch`.
        share: As for `start_fetch`.

    Returns:
        A `Pending` whose ``wait()`` gives, for each tensor, the gradients of
        ``plan.send_rows((rank + step) % world_size)``.

    Raises:
        ValueError: As `start_fetch`.
        RankError: Another rank failed.
    """
    owner, reader = _pair(plan, step)
    if not grads:
        return Arrived([])
    plans = [plan] * len(grads)
    fetched = [plan.recv_splits[owner]] * len(grads)
    state = check_requests("start_return", plans, grads, fetched, wire=wire)
    parts = [grad.detach() for grad in grads]
    blocks = shared_blocks(state, most_bytes(plans, grads, wire)) if share else None
    num_rows = plan.send_splits[reader]
    return _start(state, blocks, "start_return", parts, reader, num_rows, owner, wire)


def _pair(plan: ExchangePlan, step: int) -> tuple[int, int]:
    if not 1 <= step < plan.world_size:
        raise ValueError(
            f"step must be in [1, {plan.world_size}), one for each other rank (got {step})"
        )
    return (plan.rank - step) % plan.world_size, (plan.rank + step) % plan.world_size


def _rows(
    blocks: SharedBlocks | None, tensor: Tensor, sent: SentRows, wire: torch.dtype | None
) -> Tensor:
    """The rows that are sent, where the reader can see them if they go as they are."""
    as_is = wire_dtype(tensor.dtype, wire) == tensor.dtype
    is_shared = as_is and is_message_shared(blocks, len(sent) * row_bytes(tensor))
    return sent.of(tensor, blocks.empty if blocks is not None and is_shared else None)


def _start(
    state: GroupState,
    blocks: SharedBlocks | None,
    name: str,
    parts: list[Tensor],
    source: int,
    num_rows: int,
    target: int,
    wire: torch.dtype | None,
) -> Messages:
    """Send ``parts`` to ``target``; receive ``num_rows`` rows like theirs from ``source``."""
    likes = [(part.device, part.dtype) for part in parts]
    parts = [narrowed(part, wire) for part in parts]
    device = state.payload_device(parts[0].device)
    outgoing = [as_bytes(part).to(device) for part in parts]
    num_bytes = sum(sent.numel() for sent in outgoing)
    incoming: list[Tensor | Letter] = []
    for i, part in enumerate(parts):
        shape, size = (num_rows, *part.shape[1:]), num_rows * row_bytes(part)
        # Both ends know how long a message is.
        if blocks is not None and is_message_shared(blocks, outgoing[i].numel()):
            outgoing[i] = told(blocks.publish(outgoing[i], [target]))
        if blocks is not None and is_message_shared(blocks, size):
            incoming.append(Letter(blocks, [source], [size], shape, part.dtype))
        else:
            incoming.append(empty(shape, part.dtype, device))
    del parts
    # Every rank starts the same messages in the same order, so the tags are the same on both
    # ends, and messages of two operations in flight cannot be taken for each other.
    number = state.num_operations
    state.num_operations += len(outgoing)
    to, frm = state.members[target], state.members[source]
    requests: list[tuple[int, dist.P2POp]] = []
    for i, (sent, received) in enumerate(zip(outgoing, incoming, strict=True)):
        tag = (number + i) % _NUM_TAGS
        buffer = received.where if isinstance(received, Letter) else as_bytes(received)
        if buffer.numel():
            requests.append((source, dist.P2POp(dist.irecv, buffer, frm, state.group, tag)))
        if sent.numel():
            requests.append((target, dist.P2POp(dist.isend, sent, to, state.group, tag)))
    if num_bytes:
        count("send", num_bytes)
    works: list[tuple[int, dist.Work]] = []
    if requests:
        with operation(state, name, number, sorted({source, target})):
            started = dist.batch_isend_irecv([request for _, request in requests])
        # A backend that joins the requests gives one piece of work for all of them.
        works = [(peer, w) for (peer, _), w in zip(requests, started, strict=False)]
    return Messages(state, name, number, works, outgoing, incoming, likes)
