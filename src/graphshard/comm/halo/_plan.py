# SPDX-License-Identifier: Apache-2.0
"""ExchangePlan: who reads which rows of whom. Made once for a static graph, used at every step.

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
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from ..._base.device import device_of
from ..._base.kernels import empty
from ..collectives import verify
from ..group import GroupState, group_state
from ..transport import exchange_rows, row_bytes, wire_dtype

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
        places = [0, *breaks.tolist(), len(self)]
        firsts = self._index[places[:-1]].tolist()
        return [
            (first, first + stop - start)
            for first, (start, stop) in zip(firsts, pairwise(places), strict=True)
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
        """``tensor[index]``: a view where that is one piece of memory and no other is asked for.

        Args:
            tensor: ``[num_rows, *]``.
            allocate: Makes the memory for a copy; None leaves it to us.
        """
        if self.is_slice and allocate is None:
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
        checked: Signatures of exchanges that all ranks have found to be the same everywhere.
    """

    state: GroupState = field(repr=False)
    num_rows: int
    send_index: Tensor
    send_splits: list[int]
    recv_splits: list[int]
    serial: int
    most_rows: int = 0
    checked: set[tuple[object, ...]] = field(default_factory=set, repr=False)
    _sums: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

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
            num_rows: Rows that this rank owns.
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
        if error is None:
            wanted = [rows.detach().to("cpu", torch.int64) for rows in needed]
        else:
            wanted = [torch.empty(0, dtype=torch.int64)] * state.world_size
        recv_splits = [rows.numel() for rows in wanted]
        ones = [1] * state.world_size
        # Each owner learns how many rows a rank wants of it, and how many of all.
        counts = torch.tensor([[n, sum(recv_splits)] for n in recv_splits], dtype=torch.int64)
        counts = exchange_rows(state, [counts], [ones], [ones], "ExchangePlan.build")[0]
        send_splits = counts[:, 0]
        send_index = exchange_rows(
            state, [torch.cat(wanted)], [recv_splits], [send_splits.tolist()], "ExchangePlan.build"
        )[0]
        if error is None:
            error = _check_asked(send_index, send_splits.tolist(), num_rows, state)
        verify(state, b"", "", error)
        serial = state.num_plans
        state.num_plans += 1
        return cls(
            state=state,
            num_rows=num_rows,
            send_index=send_index.to(device),
            send_splits=send_splits.tolist(),
            recv_splits=recv_splits,
            serial=serial,
            most_rows=int(counts[:, 1].max()),
        )

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
            arrived: As for `sum_returned`.
        """
        if arrived.numel():
            wide = torch.float64 if total.dtype == torch.float64 else torch.float32
            summed = self.sum_returned(arrived.to(wide))
            total.copy_(summed.add_(total))


def most_bytes(
    plans: Sequence[ExchangePlan], tensors: Sequence[Tensor], wire: torch.dtype | None = None
) -> int:
    """The most bytes that any rank receives when it fetches such rows; equal on all ranks."""
    return sum(
        plan.most_rows
        * (row_bytes(tensor) // tensor.element_size())
        * wire_dtype(tensor.dtype, wire).itemsize
        for plan, tensor in zip(plans, tensors, strict=True)
    )


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
    ends = list(accumulate(splits))
    asker = next(r for r, end in enumerate(ends) if position < end)
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
    wire: torch.dtype | None = None,
) -> tuple[list[ExchangePlan], list[Tensor]]:
    """Check requests of the function ``name`` here, and with the other ranks where they are new.

    Returns the plans, and the tensors. ``num_rows`` are the rows that each tensor must have, and
    ``needs_grad`` says which will get a gradient; it is empty where that does not matter.
    """
    if not requests:
        return [], []
    plans, tensors = [plan for plan, _ in requests], [tensor for _, tensor in requests]
    state = plans[0].state
    error = _check(name, requests, num_rows, state)
    kinds = [(getattr(t, "dtype", None), tuple(getattr(t, "shape", (0,))[1:])) for t in tensors]
    needs = needs_grad or [False] * len(plans)
    signature: tuple[object, ...] = (
        name,
        wire,
        *((plan.serial, *kind, need) for plan, kind, need in zip(plans, kinds, needs, strict=True)),
    )
    checked = plans[0].checked  # not the group's: plans may be many, and end
    if signature not in checked:
        verify(state, _describe(signature), f"what {name} exchanges", error)
        checked.add(signature)
    if error is not None:
        raise error
    return plans, tensors


def needs_grad_now(tensor: Tensor) -> bool:
    """Whether autograd records what is done with the tensor."""
    return torch.is_grad_enabled() and bool(getattr(tensor, "requires_grad", False))


def _check(
    name: str, requests: Requests, num_rows: Sequence[int], state: GroupState
) -> Exception | None:
    for number, ((plan, tensor), rows) in enumerate(zip(requests, num_rows, strict=True)):
        if plan.state is not state:
            return ValueError(
                f"{name}: the plans of one call must be of one group (request {number} is of "
                "another); call once for each group"
            )
        if not isinstance(tensor, Tensor):
            return TypeError(
                f"{name}: request {number} must hold a tensor (got {type(tensor).__name__})"
            )
        if tensor.dim() == 0 or tensor.shape[0] != rows:
            return ValueError(
                f"{name}: the tensor of request {number} must have {rows} rows "
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
