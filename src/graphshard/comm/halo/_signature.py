# SPDX-License-Identifier: Apache-2.0
"""check_requests: do all ranks exchange the same kinds of rows? Asked once, then remembered.

[Note: once] Asking at each call would double the number of collectives. The shapes and dtypes that
a model exchanges are few and repeat at every step, so each new combination is checked when it is
first used and costs nothing afterwards. What this cannot catch is a rank that turns to a new
combination alone, while the others go on with one that all have used: they do not stop to ask.
Such a run ends at the timeout, with an error that shows which operation each rank was in.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..collectives import verify
from ..group import GroupState
from ._plan import ExchangePlan

Requests = Sequence[tuple[ExchangePlan, Tensor]]


def check_requests(
    name: str,
    requests: Requests,
    num_rows: Sequence[int],
    needs_grad: Sequence[bool] = (),
    wire: torch.dtype | None = None,
) -> tuple[list[ExchangePlan], list[Tensor]]:
    """Check requests of the function ``name`` here, and with the other ranks where they are new.

    Args:
        name: The function that the user called.
        requests: Pairs of a plan and a tensor.
        num_rows: Rows that each tensor must have.
        needs_grad: Which tensors will get a gradient; empty where it does not matter.
        wire: In which dtype wider rows travel; None is their own.

    Returns:
        The plans, and the tensors.
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
        short = _short(dtype)
        lines.append(
            f"plan {serial} {short}[rows{''.join(f', {n}' for n in shape)}]"
            f"{' with gradient' if grad else ''}"
        )
    narrow = "" if wire is None else f", as {_short(wire)}"
    return f"{name}: " + "; ".join(lines) + narrow


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
