# SPDX-License-Identifier: Apache-2.0
"""Exchange of halo rows: to their readers, and back to their owners.

`ExchangePlan` says who reads which rows of whom. It is made once for a static graph, and used at
every step.

::

    rank r, its own rows                     its halo: copies of others' rows
    ┌───────────────┐  send_index (by       ┌─────────┬─────────┬─────────┐
    │ num_rows rows │  destination rank) -> │ rank 0's│ rank 1's│ ...     │  num_halo rows,
    └───────────────┘                       └─────────┴─────────┴─────────┘  grouped by owner

The index lists travel once, when the plan is built. From then on both ends know what a message
holds, so a gather is one flat payload with no header.

Partitioning puts the nodes that others read side by side, so the rows that one rank reads of
another (`SentRows`) are most often one run of rows, or few: a run is sent as it lies, without a
copy, few are copied one after the other, and what is scattered is gathered.

The whole halo (`fetch_halo`, `return_halo`, `start_fetch_all`, `start_return_all`): any number of
requests in one ``all_to_all_single``, also in the backward pass. The first two wait, the others
return at once.

One remote rank at a time (`start_fetch`, `start_return`), with the next one in flight: in step
``k`` (1 to P - 1) every rank receives from ``rank - k`` and sends to ``rank + k`` (modulo P), so
that no two ranks send to the same one, and P - 1 steps visit every pair once. Each tensor is a
message of its own, out of the memory that it is in and into the memory that it stays in, so nothing
is held twice. A message of no bytes is not sent. A trace counts a call once.

A trace counts the bytes of rows as they are, also where zeros are left out (`without_zeros`).

[Note: gradients of an exchange]
    `HaloFetch` is two nodes of the autograd graph: `_BeginFetch` takes own rows and gives an empty
    ticket, `_EndFetch` takes the ticket and gives the rows that came. Autograd runs the newest node
    that is ready, so in the backward pass gradients of remote rows are sent as soon as they are
    known, by `_EndFetch`; then comes what the forward pass did with own rows between the two; and
    last `_BeginFetch` waits for what the readers return, and sums it.

    `_SumReturned` is the adjoint of a fetch as a node of its own, for gradients of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from .._base.device import device_of
from .._base.kernels import empty
from ._shared_memory import SharedBlocks
from .collectives import (
    LONG_BYTES,
    NUM_TAGS,
    Int8Wire,
    Pending,
    Wire,
    as_bytes,
    from_backend,
    is_rounded,
    narrowed,
    room_for,
    to_backend,
    verify,
    wait,
    widened,
    wire_row_bytes,
)
from .group import GroupState, count, group_state, operation
from .nonzero_words import put_zeros, without_zeros, word_bytes
from .transport import exchange_rows, shared_blocks, start_exchange

Allocate = Callable[[Sequence[int], torch.dtype, torch.device | str], Tensor]

LONG_RUN = 1024
"""Rows of a run, on average, from which on copying runs is faster than gathering rows."""


class SentRows:
    """Rows of a tensor by number, in a fixed order.

    Args:
        index: int64 ``[n]``, on the CPU.
    """

    def __init__(self, index: Tensor) -> None:
        self._index = index
        self._indices = {index.device: index}

    def __len__(self) -> int:
        return self._index.numel()

    @cached_property
    def runs(self) -> list[tuple[int, int]]:
        """First row and end of each run; empty where there are too many for their length."""
        if len(self) == 0:
            return []
        breaks = (self._index.diff() != 1).nonzero().view(-1) + 1
        if breaks.numel() and len(self) < LONG_RUN * (breaks.numel() + 1):
            return []
        bounds = [0, *breaks.tolist(), len(self)]
        firsts = self._index[bounds[:-1]].tolist()
        return [
            (first, first + stop - start)
            for first, (start, stop) in zip(firsts, pairwise(bounds), strict=True)
        ]

    @property
    def is_slice(self) -> bool:
        """Whether they lie one after the other."""
        return len(self.runs) == 1

    def index_on(self, device: torch.device) -> Tensor:
        """Their numbers on a device; the copy is kept."""
        if device not in self._indices:
            self._indices[device] = self._index.to(device)
        return self._indices[device]

    def of(self, tensor: Tensor, allocate: Allocate | None = None) -> Tensor:
        """``tensor[index]``: a view where that is one piece of memory.

        With ``allocate`` it is always a copy, in memory that this makes.
        """
        if allocate is None and len(self.runs) == 1:
            rows = tensor[slice(*self.runs[0])]
            if rows.is_contiguous():
                return rows
        shape = (len(self), *tensor.shape[1:])
        out = (allocate or empty)(shape, tensor.dtype, tensor.device)
        self.copy_to(out, tensor)
        return out

    def copy_to(self, out: Tensor, tensor: Tensor) -> None:
        """Write ``tensor[index]`` to ``out``, which has its shape and dtype."""
        if self.is_slice:
            out.copy_(tensor[slice(*self.runs[0])])
        elif self.runs:
            torch.cat([tensor[start:stop] for start, stop in self.runs], out=out)
        else:
            torch.index_select(tensor, 0, self.index_on(tensor.device), out=out)


@dataclass(frozen=True, eq=False)
class ExchangePlan:
    """One rank's side of a repeated exchange of rows.

    Attributes:
        state: The ranks that take part. The plan does not keep the group itself, whose threads
            would live as long as the graph that the plan belongs to.
        num_rows: Rows that this rank owns.
        num_halo: Rows of others that this rank reads.
        send_index: int64 ``[sum(send_splits)]``: own rows, grouped by the rank that reads them,
            in the order in which that rank asked for them.
        send_splits: Rows that each rank reads from here; 0 in the own slot.
        recv_splits: Rows that this rank reads from each; 0 in the own slot.
        serial: The plan's number in its group, equal on all ranks.
        most_rows: The most rows that any rank reads; equal on all ranks.
        is_made: Whether rows are made for their reader, and sent once, as they lie: the tensor of a
            pairwise step then holds those of its reader alone.
        checked: Signatures of exchanges that all ranks have found to be the same everywhere.
    """

    state: GroupState = field(repr=False)
    num_rows: int
    send_index: Tensor
    send_splits: list[int]
    recv_splits: list[int]
    serial: int
    most_rows: int = 0
    is_made: bool = False
    checked: set[tuple[object, ...]] = field(default_factory=set, repr=False)
    _sums: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)
    _numbers: list[Tensor] = field(default_factory=list, repr=False)

    @classmethod
    def build(
        cls,
        needed: Sequence[Tensor],
        num_rows: int,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
    ) -> ExchangePlan:
        """Tell every owner which of its rows are wanted here; every rank must call.

        Args:
            needed: One integer tensor ``[n_r]`` per rank: numbers of rows wanted from rank
                ``r``, counted from 0 at rank ``r``. Order and repeats are kept. ``needed[own]``
                must be empty.
            group: The ranks that take part; None is the default group.
            device: Where ``send_index`` is kept; None is the CPU. Copies for other devices are
                made when a tensor on one is exchanged.

        Raises:
            ValueError: On every rank, if any rank's argument breaks a rule or asks for a row
                that its owner does not have.
            TypeError: On every rank, if any rank's row numbers are not integers.
        """
        state = group_state(group)
        device = device_of("cpu" if device is None else device)
        error = _check_needed(needed, num_rows, state)
        rows_here = [torch.empty(0, dtype=torch.int64)] * state.world_size
        if error is None:
            rows_here = [rows.detach().to("cpu", torch.int64) for rows in needed]
        recv_splits = [rows.numel() for rows in rows_here]
        ones = [1] * state.world_size
        # Each owner learns how many rows a rank wants of it, and how many of all.
        counts = torch.tensor([[n, sum(recv_splits)] for n in recv_splits], dtype=torch.int64)
        (counts,) = exchange_rows(state, [counts], [ones], [ones], "ExchangePlan.build")
        send_splits = counts[:, 0].tolist()
        (send_index,) = exchange_rows(
            state, [torch.cat(rows_here)], [recv_splits], [send_splits], "ExchangePlan.build"
        )
        error = error or _check_asked(send_index, send_splits, num_rows, state)
        verify(state, b"", "", error)
        serial = state.num_plans
        state.num_plans += 1
        return cls(
            state=state,
            num_rows=num_rows,
            send_index=send_index.to(device),
            send_splits=send_splits,
            recv_splits=recv_splits,
            serial=serial,
            most_rows=int(counts[:, 1].max()),
        )

    @classmethod
    def of_made_rows(
        cls,
        send_splits: list[int],
        recv_splits: list[int],
        most_rows: int,
        group: dist.ProcessGroup | None = None,
    ) -> ExchangePlan:
        """A plan of rows that are made for one reader each; every rank must call. Sends nothing.

        Args:
            send_splits: Rows made for each rank, in this order; 0 in the own slot.
            recv_splits: Rows that each rank makes for this one; 0 in the own slot.
            most_rows: The most rows that any rank reads; equal on all ranks.
        """
        state = group_state(group)
        serial = state.num_plans
        state.num_plans += 1
        count = sum(send_splits)
        index = torch.arange(count)
        return cls(state, count, index, send_splits, recv_splits, serial, most_rows, True)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The ranks that take part; None for a process that is alone, or after the group's end."""
        return self.state.group

    @property
    def rank(self) -> int:
        """This process in the group."""
        return self.state.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.state.world_size

    @property
    def num_halo(self) -> int:
        return self._halo_starts[-1]

    @cached_property
    def _halo_starts(self) -> list[int]:
        return [0, *accumulate(self.recv_splits)]

    def halo_range(self, peer: int) -> tuple[int, int]:
        """(start, stop) of the halo rows that ``peer`` owns."""
        return self._halo_starts[peer], self._halo_starts[peer + 1]

    @cached_property
    def sent(self) -> list[SentRows]:
        """The own rows that each rank reads, in its order."""
        return [SentRows(rows) for rows in self.send_index.cpu().split(self.send_splits)]

    def send_rows(self, peer: int) -> Tensor:
        """int64 numbers of the own rows that ``peer`` reads, in its order."""
        return self.send_index.split(self.send_splits)[peer]

    @cached_property
    def all_sent(self) -> SentRows:
        """The own rows that others read, grouped by reader."""
        readers = [rows for rows in self.sent if len(rows)]
        return readers[0] if len(readers) == 1 else SentRows(self.send_index.cpu())

    def number_rows(self, numbers: Tensor) -> None:
        """Say by what rows are rounded at random, see `Int8Wire`; every rank must call.

        Args:
            numbers: int64 ``[num_rows]``, of own rows; those of the whole graph, so that rounding
                does not depend on who has a row.
        """
        (remote,) = fetch_halo([(self, numbers)])
        self._numbers[:] = numbers.cpu()[self.send_index.cpu()], remote.cpu()

    def sent_numbers(self, reader: int | None = None) -> Tensor:
        """By what rows for one reader, or all, are rounded; without `number_rows` their places."""
        numbers = self._numbers[0] if self._numbers else self.send_index
        return numbers if reader is None else numbers.split(self.send_splits)[reader]

    def halo_numbers(self, owner: int | None = None) -> Tensor | None:
        """Likewise of gradients of the rows of one owner, or all."""
        numbers = self._numbers[1] if self._numbers else None
        if numbers is None or owner is None:
            return numbers
        start, stop = self.halo_range(owner)
        return numbers[start:stop]

    def bytes_per_gather(self, row_bytes: int) -> int:
        """Bytes that this rank sends in one gather of rows of ``row_bytes`` bytes."""
        return sum(self.send_splits) * row_bytes

    def index_on(self, device: torch.device) -> Tensor:
        """``send_index`` on a device; the copy is kept."""
        return self.all_sent.index_on(device)

    def sum_order(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """How to sum what comes back to one's own rows, in a fixed order.

        Returns:
            ``order``: positions in ``send_index`` sorted by row, stable (so by reading rank), and
            ``starts`` ``[num_rows + 1]``: where each row's positions begin in ``order``.
        """
        if device not in self._sums:
            index = self.send_index.cpu()
            order = torch.argsort(index, stable=True)
            starts = torch.zeros(self.num_rows + 1, dtype=torch.int64)
            torch.cumsum(torch.bincount(index, minlength=self.num_rows), 0, out=starts[1:])
            self._sums[device] = (order.to(device), starts.to(device))
        return self._sums[device]

    def sum_returned(self, returned: Tensor) -> Tensor:
        """Sum what came back for rows of this rank, by ascending rank within a row.

        The order does not depend on that of arrival, nor on the device, so a run repeats bit for
        bit. bfloat16 and float16 are summed in float32.

        Args:
            returned: ``[sum(send_splits), *]``, a row for each entry of ``send_index``.

        Returns:
            ``[num_rows, *]``; 0 where no rank reads a row.
        """
        shape = (self.num_rows, *returned.shape[1:])
        if returned.numel() == 0:
            return returned.new_zeros(shape)
        if returned.dtype in (torch.bfloat16, torch.float16):
            return self.sum_returned(returned.float()).to(returned.dtype)
        if not returned.dtype.is_floating_point:  # such sums do not depend on the order
            index = self.index_on(returned.device)
            return returned.new_zeros(shape).index_add_(0, index, returned)
        order, starts = self.sum_order(returned.device)
        # A bag per row: each is summed by one thread in the order of its positions.
        rows = returned.reshape(returned.shape[0], -1)
        summed = functional.embedding_bag(order, rows, starts, mode="sum", include_last_offset=True)
        return summed.view(shape)

    def add_returned(self, total: Tensor, arrived: Tensor) -> None:
        """Add `sum_returned`, in place; to a total of 16 bits it is added in float32.

        Args:
            total: ``[num_rows, *]``, floating point.
        """
        if arrived.numel():
            wide = torch.float64 if total.dtype == torch.float64 else torch.float32
            summed = self.sum_returned(arrived.to(wide))
            total.copy_(summed.add_(total))


def most_bytes(plans: Sequence[ExchangePlan], tensors: Sequence[Tensor], wire: Wire = None) -> int:
    """The most bytes that any rank receives when it fetches such rows; equal on all ranks."""
    pairs = zip(plans, tensors, strict=True)
    return sum(plan.most_rows * wire_row_bytes(tensor, wire) for plan, tensor in pairs)


def _check_needed(needed: Sequence[Tensor], num_rows: int, state: GroupState) -> Exception | None:
    if num_rows < 0:
        return ValueError(f"num_rows must not be negative (got {num_rows})")
    if len(needed) != state.world_size:
        return ValueError(
            f"needed must hold one tensor per rank: {state.world_size} (got {len(needed)})"
        )
    for owner, rows in enumerate(needed):
        if not isinstance(rows, Tensor):
            return TypeError(f"needed[{owner}] must be a tensor (got {type(rows).__name__})")
        if rows.dim() != 1:
            return ValueError(
                f"needed[{owner}] must have one dimension (got shape {tuple(rows.shape)})"
            )
        if rows.dtype.is_floating_point or rows.dtype.is_complex or rows.dtype == torch.bool:
            return TypeError(f"needed[{owner}] must hold integers (got {rows.dtype})")
    if needed[state.rank].numel():
        return ValueError(
            f"needed[{state.rank}] must be empty on rank {state.rank}, which owns those rows "
            f"(got {needed[state.rank].numel()} row numbers)"
        )
    return None


def _check_asked(
    asked: Tensor, splits: list[int], num_rows: int, state: GroupState
) -> Exception | None:
    bad = (asked < 0) | (asked >= num_rows)
    if not bool(bad.any()):
        return None
    position = int(bad.nonzero()[0])
    asker = next(r for r, end in enumerate(accumulate(splits)) if position < end)
    return ValueError(
        f"needed[{state.rank}] of rank {state.members[asker]} must hold row numbers in "
        f"[0, {num_rows}), the rows of rank {state.members[state.rank]} "
        f"(got {int(asked[position])})"
    )


# -- requests -------------------------------------------------------------------------------------

# [Note: checked once] To ask at each call whether all ranks exchange the same kinds of rows would
# double the number of collectives. The shapes and dtypes that a model exchanges are few and repeat
# at every step, so each new combination is checked when it is first used. What this cannot catch is
# a rank that turns to a new combination alone, while the others go on with one that all have used.
# Such a run ends at the timeout, with an error that shows which operation each rank was in.

Requests = Sequence[tuple[ExchangePlan, Tensor]]


def check_requests(
    name: str,
    requests: Requests,
    num_rows: Sequence[int],
    needs_grad: Sequence[bool] = (),
    wire: Wire = None,
) -> tuple[list[ExchangePlan], list[Tensor]]:
    """Check requests of the function ``name`` here, and with the other ranks where they are new.

    Returns the plans, and the tensors. ``num_rows`` are the rows that each tensor must have, and
    ``needs_grad`` says which will get a gradient; it is empty where that does not matter.
    """
    plans: list[ExchangePlan] = []
    tensors: list[Tensor] = []
    error: Exception | None = None
    signature: tuple[object, ...] = (name, torch.int8 if isinstance(wire, Int8Wire) else wire)
    for number, (plan, tensor) in enumerate(requests):
        plans.append(plan)
        tensors.append(tensor)
        error = error or _fault(name, number, tensor, num_rows[number], plan, plans[0])
        kind = getattr(tensor, "dtype", None), tuple(getattr(tensor, "shape", (0,))[1:])
        signature += ((plan.serial, *kind, bool(needs_grad) and needs_grad[number]),)
    if not plans:
        return plans, tensors
    checked = plans[0].checked  # not the group's: plans may be many, and end
    if signature not in checked:
        verify(plans[0].state, _describe(signature), f"what {name} exchanges", error)
        checked.add(signature)
    if error is not None:
        raise error
    return plans, tensors


def needs_grad_now(tensor: Tensor) -> bool:
    """Whether autograd records what is done with the tensor."""
    return torch.is_grad_enabled() and bool(getattr(tensor, "requires_grad", False))


def _fault(
    name: str, number: int, tensor: Tensor, num_rows: int, plan: ExchangePlan, first: ExchangePlan
) -> Exception | None:
    """What is wrong with a request, if anything; ``first`` is the plan of the first one."""
    if plan.state is not first.state:
        return ValueError(
            f"{name}: the plans of one call must be of one group (request {number} is of "
            "another); call once for each group"
        )
    if not isinstance(tensor, Tensor):
        return TypeError(
            f"{name}: request {number} must hold a tensor (got {type(tensor).__name__})"
        )
    if tensor.dim() == 0 or tensor.shape[0] != num_rows:
        return ValueError(
            f"{name}: the tensor of request {number} must have {num_rows} rows "
            f"(got shape {tuple(tensor.shape)})"
        )
    if tensor.is_sparse or tensor.is_complex():
        return TypeError(
            f"{name}: the tensor of request {number} must be dense and real (got "
            f"{tensor.layout}, {tensor.dtype}); exchange its parts"
        )
    return None


def _describe(signature: tuple[object, ...]) -> str:
    name, wire, *requests = signature
    lines = []
    for request in requests:
        assert isinstance(request, tuple)
        serial, dtype, shape, grad = request
        rows = "".join(f", {n}" for n in shape)
        lines.append(f"plan {serial} {dtype}[rows{rows}]{' with gradient' if grad else ''}")
    narrow = "" if wire is None else f", as {wire}"
    return f"{name}: {'; '.join(lines)}{narrow}".replace("torch.", "")


# -- exchanges -------------------------------------------------------------------------------------


def start_fetch_all(
    requests: Requests, wire: Wire = None, needs_grad: Sequence[bool] = ()
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
    """
    rows = [plan.num_rows for plan, _ in requests]
    plans, tensors = check_requests("fetch_halo", requests, rows, needs_grad, wire)
    return _start_fetch(plans, tensors, wire)


def start_return_all(requests: Requests, wire: Wire = None) -> Pending:
    """Start to return halo rows to their owners; every rank must call, and must wait.

    Args:
        requests: Pairs of a plan and a tensor ``[plan.num_halo, *]``.

    Returns:
        A `Pending` whose ``wait()`` gives ``[sum(plan.send_splits), *]`` for each request: what
        came for the rows ``plan.send_index``, in that order. `ExchangePlan.add_returned` adds it.
    """
    rows = [plan.num_halo for plan, _ in requests]
    plans, tensors = check_requests("return_halo(sum)", requests, rows, wire=wire)
    return _start_return(plans, tensors, wire)


def are_messages(requests: Requests, wire: Wire = None) -> bool:
    """Whether such a fetch is sent by gloo, not through memory that the ranks share.

    Equal on all ranks; each must call, with as many requests of equal dtypes and trailing shapes.
    """
    plans, tensors = [plan for plan, _ in requests], [tensor for _, tensor in requests]
    state = plans[0].state
    if state.world_size == 1 or state.backend != "gloo":
        return False
    return shared_blocks(state, most_bytes(plans, tensors, wire)) is None


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


def fetch_halo(requests: Requests, wire: Wire = None) -> list[Tensor]:
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
            float16, which round them, or an `Int8Wire`; None is their own. Equal on all ranks, but
            for the key.

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
    """

    def __init__(self, requests: Requests, wire: Wire = None) -> None:
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
    return _Anchor.apply(output, *tensors)


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
    plans: Sequence[ExchangePlan], tensors: Sequence[Tensor], wire: Wire
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

    def __init__(self, plans: Sequence[ExchangePlan], wire: Wire) -> None:
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
        ctx: Any, plans: Sequence[ExchangePlan], wire: Wire, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.plans, ctx.wire = plans, wire
        return tuple(part.detach() for part in _sums(plans, _start_return(plans, tensors, wire)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *_start_recorded(ctx.plans, grads, ctx.wire).wait()


def _sums(plans: Sequence[ExchangePlan], returning: Pending) -> list[Tensor]:
    return [plan.sum_returned(rows) for plan, rows in zip(plans, returning.wait(), strict=True)]


# -- exchanges of what has been checked ------------------------------------------------------------


def _start_fetch(plans: Sequence[ExchangePlan], tensors: Sequence[Tensor], wire: Wire) -> Pending:
    tensors = [tensor.detach() for tensor in tensors]
    if not plans or plans[0].world_size == 1:
        return Pending.of([tensor.new_empty((0, *tensor.shape[1:])) for tensor in tensors])
    blocks = shared_blocks(plans[0].state, most_bytes(plans, tensors, wire))
    pairs = list(zip(plans, tensors, strict=True))
    rows: list[Tensor | Sequence[Tensor]]
    if blocks is None and len(pairs) > 1:
        rows = [
            [
                narrowed(sent.of(tensor), wire, plan.sent_numbers(reader))
                for reader, sent in enumerate(plan.sent)
            ]
            for plan, tensor in pairs
        ]
    else:
        rows = [_sent(plan, tensor, wire, blocks) for plan, tensor in pairs]
    send, recv = [p.send_splits for p in plans], [p.recv_splits for p in plans]
    pending = start_exchange(plans[0].state, rows, send, recv, "fetch_halo", blocks)
    return _widened(pending, tensors, wire)


def _start_return(plans: Sequence[ExchangePlan], tensors: Sequence[Tensor], wire: Wire) -> Pending:
    tensors = [tensor.detach() for tensor in tensors]
    if not plans or plans[0].world_size == 1:
        return Pending.of(tensors)
    blocks = shared_blocks(plans[0].state, most_bytes(plans, tensors, wire))
    back = _way_back(wire)
    rows = [
        narrowed(tensor, back, plan.halo_numbers())
        for plan, tensor in zip(plans, tensors, strict=True)
    ]
    send, recv = [p.recv_splits for p in plans], [p.send_splits for p in plans]
    pending = start_exchange(plans[0].state, rows, send, recv, "return_halo", blocks)
    return _widened(pending, tensors, wire)


def _widened(pending: Pending, tensors: Sequence[Tensor], wire: Wire) -> Pending:
    if wire is None:
        return pending
    likes = [_like(tensor) for tensor in tensors]
    return pending.then(
        lambda received: [widened(*pair, wire) for pair in zip(received, likes, strict=True)]
    )


def _like(tensor: Tensor) -> Tensor:
    """Dtype and trailing shape, without the memory."""
    return tensor.new_empty((0, *tensor.shape[1:]))


def _way_back(wire: Wire) -> Wire:
    """How gradients of rows travel: rounded another way than the rows."""
    return Int8Wire(wire.key + 1) if isinstance(wire, Int8Wire) else wire


def _sent(plan: ExchangePlan, tensor: Tensor, wire: Wire, blocks: SharedBlocks | None) -> Tensor:
    """The rows that others read, by reader; gathered into shared memory if they are not rounded."""
    as_is = not is_rounded(tensor, wire)
    allocate = blocks.empty if blocks is not None and as_is else None
    return narrowed(plan.all_sent.of(tensor, allocate), wire, plan.sent_numbers())


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


def start_fetch(
    plan: ExchangePlan, step: int, tensors: Sequence[Tensor], wire: Wire = None
) -> Pending:
    """Start to fetch the rows of one remote shard; every rank must call, with the same step.

    Args:
        step: 1 to ``world_size - 1``; rows come from ``(rank - step) % world_size``.
        tensors: Own rows, each ``[num_rows, *]``, or of a plan of made rows those for rank ``rank +
            step``; dtypes and trailing shapes equal on all ranks. They must not change before the
            `Pending` is waited for.
        wire: In which dtype wider floating-point rows travel; None is their own.

    Returns:
        A `Pending` whose ``wait()`` gives ``[recv_splits[source], *]`` for each tensor.

    Raises:
        ValueError: A step out of range, a wrong number of rows, or (on all ranks) ranks that
            exchange different things.
        RankError: Another rank failed.
    """
    source, target = _pair(plan, step)
    requests = list(zip([plan] * len(tensors), tensors, strict=True))
    given = plan.send_splits[target] if plan.is_made else plan.num_rows
    check_requests("start_fetch", requests, [given] * len(tensors), wire=wire)
    rows = [tensor.detach() for tensor in tensors]
    if not plan.is_made:
        rows = [plan.sent[target].of(tensor) for tensor in rows]
    num_rows = plan.recv_splits[source]
    numbers = plan.sent_numbers(target)
    return _start_messages(plan.state, "start_fetch", rows, source, num_rows, target, wire, numbers)


def start_return(
    plan: ExchangePlan, step: int, grads: Sequence[Tensor], wire: Wire = None
) -> Pending:
    """Start to return the gradients of the rows received in a step; every rank must call.

    Args:
        step: The step of `start_fetch` that fetched the rows.
        grads: Each ``[recv_splits[(rank - step) % world_size], *]``; dtypes and trailing shapes
            equal on all ranks.

    Returns:
        A `Pending` whose ``wait()`` gives, for each tensor, the gradients of
        ``plan.send_rows((rank + step) % world_size)``.
    """
    owner, reader = _pair(plan, step)
    requests = list(zip([plan] * len(grads), grads, strict=True))
    check_requests("start_return", requests, [plan.recv_splits[owner]] * len(grads), wire=wire)
    num_rows = plan.send_splits[reader]
    numbers, wire = plan.halo_numbers(owner), _way_back(wire)
    return _start_messages(
        plan.state, "start_return", grads, reader, num_rows, owner, wire, numbers
    )


def _pair(plan: ExchangePlan, step: int) -> tuple[int, int]:
    """The rank whose rows come in a step, and the one that reads rows of this one."""
    rank, num_ranks = plan.state.rank, plan.state.world_size
    if not 1 <= step < num_ranks:
        raise ValueError(f"step must be in [1, {num_ranks}), one for each other rank (got {step})")
    return (rank - step) % num_ranks, (rank + step) % num_ranks


def _start_messages(
    state: GroupState,
    name: str,
    parts: Sequence[Tensor],
    source: int,
    num_rows: int,
    target: int,
    wire: Wire,
    numbers: Tensor | None,
) -> Pending:
    """Send ``parts`` to ``target``; receive ``num_rows`` rows like theirs from ``source``."""
    if not parts:
        return Pending.of([])
    device = state.payload_device(parts[0].device)
    outgoing: list[Tensor] = []
    incoming: list[Tensor] = []
    devices: list[torch.device] = []
    likes: list[Tensor] = []
    for part in parts:
        devices.append(part.device)
        likes.append(_like(part))
        part = narrowed(part, wire, numbers)
        outgoing.append(as_bytes(part))
        shape = (num_rows, *part.shape[1:])
        incoming.append(room_for(shape, part.dtype, device, part.device))
    outgoing = to_backend(outgoing, device)
    del parts, part
    num_bytes = sum(sent.numel() for sent in outgoing)
    of_word = [word_bytes(received) for received in incoming]
    buffers = [as_bytes(received) for received in incoming]
    # One more message says how many bytes of the long ones were sent without their zeros, or 0.
    sizes, long = _leave_out_zeros(state, outgoing, of_word), _long_messages(state, buffers)
    sizes_received = torch.zeros(len(long), dtype=torch.int64)
    outgoing.append(as_bytes(sizes))
    buffers.append(as_bytes(sizes_received))
    # Every rank starts the same messages in the same order, so the tags are the same on both
    # ends, and messages of two operations in flight cannot be taken for each other.
    number = state.num_operations
    state.num_operations += len(outgoing)
    to, frm = state.members[target], state.members[source]
    messages: list[dist.P2POp] = []
    peers: list[int] = []
    tags = [(number + i) % NUM_TAGS for i in range(len(outgoing))]
    # Receives first, so that gloo moves both directions at once.
    for buffer, tag in zip(buffers, tags, strict=True):
        if buffer.numel():
            messages.append(dist.P2POp(dist.irecv, buffer, frm, state.group, tag))
            peers.append(source)
    for sent, tag in zip(outgoing, tags, strict=True):
        if sent.numel():
            messages.append(dist.P2POp(dist.isend, sent, to, state.group, tag))
            peers.append(target)
    if num_bytes:
        count("send", num_bytes, {to: num_bytes})
    works: list[tuple[int, dist.Work]] = []
    if messages:
        with operation(state, name, number, sorted({source, target})):
            started = dist.batch_isend_irecv(messages)
        # A backend that joins the messages gives one piece of work for all of them.
        works = list(zip(peers, started, strict=False))
    del messages

    def finish() -> list[Tensor]:
        for peer, work in works:
            with operation(state, name, number, [peer]):
                wait(state, work)
        works.clear()
        outgoing.clear()  # before anything is copied
        for i, size in zip(long, sizes_received.tolist(), strict=True):
            if size:
                put_zeros(buffers[i], size, of_word[i])
        buffers.clear()
        arrived = from_backend(incoming, devices)
        incoming.clear()
        return [widened(*pair, wire) for pair in zip(arrived, likes, strict=True)]

    return Pending(finish)


def _long_messages(state: GroupState, messages: Sequence[Tensor]) -> list[int]:
    """Which of some messages of bytes may be sent without their zeros."""
    if state.backend != "gloo":
        return []
    return [i for i, message in enumerate(messages) if message.numel() >= LONG_BYTES]


def _leave_out_zeros(state: GroupState, messages: list[Tensor], of_word: Sequence[int]) -> Tensor:
    """Take messages without their zeros where these are many; how long they are, 0 as they were."""
    sizes = []
    for i in _long_messages(state, messages):
        packed = without_zeros(messages[i], of_word[i])
        sizes.append(0 if packed is None else packed.numel())
        messages[i] = messages[i] if packed is None else packed
    return torch.tensor(sizes, dtype=torch.int64)
