# SPDX-License-Identifier: Apache-2.0
"""sync_params, gather_grads: keep the replicas of a model equal.

They do by hand, at the two moments where it matters, what DistributedDataParallel does through
hooks: start from rank 0's values, and sum the gradients before each optimizer step. Nothing is
wrapped, so they work beside anything, also where a rank's loss does not reach every parameter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from .collectives import all_reduce_, broadcast_, verify
from .group import GroupState, group_state
from .transport import joined, parted

_NO_GRAD, _HAS_GRAD, _SPARSE = 0, 1, 2


def sync_params(model: torch.nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Give every rank rank 0's parameters and buffers, in one broadcast; every rank must call.

    Args:
        model: The same module on every rank, up to its values.
        group: Who takes part; its first member's values are taken. None is the default group.

    Raises:
        ValueError: On every rank, if names, shapes or dtypes differ between ranks, or if a lazy
            parameter has no shape yet.
        RankError: Another rank failed, or did not answer in time.
    """
    state = group_state(group)
    named = [*model.named_parameters(), *model.named_buffers()]
    _verify_model(state, named, "sync_params")
    tensors = [tensor.detach() for _, tensor in named]
    if state.world_size == 1 or not tensors:
        return
    device = tensors[0].device
    rows, one_row_each = [t.contiguous().view(1, -1) for t in tensors], [[1]] * len(tensors)
    stream = joined([[row] for row in rows], device)
    if sum(tensor.numel() > 0 for tensor in tensors) == 1:  # it may be the parameter's own memory
        stream = stream.clone()
    broadcast_(state, stream, 0, "sync_params")
    if state.rank == 0:
        return
    received = parted(stream, rows, one_row_each)
    with torch.no_grad():
        for tensor, value in zip(tensors, received, strict=True):
            tensor.copy_(value.view(tensor.shape))


def gather_grads(model: torch.nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Replace every gradient by its sum over the ranks; every rank must call.

    One flat ``all_reduce`` for each dtype, after one of a byte per parameter in which the ranks
    agree on what there is to sum. A parameter with a gradient on some ranks only ends with one on
    all of them; one with none anywhere keeps none. bfloat16 and float16 are summed in float32.

    Args:
        model: The same module on every rank, up to its values.
        group: Who takes part; None is the default group.

    Raises:
        NotImplementedError: On every rank, if any rank has a sparse gradient.
        ValueError: On every rank, if names, shapes or dtypes differ between ranks.
        RankError: Another rank failed, or did not answer in time.
    """
    state = group_state(group)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if state.world_size == 1:
        return
    _verify_model(state, named, "gather_grads")
    if not named:
        return
    parameters = [parameter for _, parameter in named]
    flags = torch.tensor([_flag(p) for p in parameters], dtype=torch.uint8)
    all_reduce_(state, flags, dist.ReduceOp.MAX, "gather_grads", "agree")
    states = flags.tolist()
    if _SPARSE in states:
        raise NotImplementedError(
            f"gather_grads sums dense gradients only, and {named[states.index(_SPARSE)][0]} has a "
            "sparse one on some rank; make the embedding with sparse=False"
        )
    chosen = [p for p, flag in zip(parameters, states, strict=True) if flag == _HAS_GRAD]
    for dtype in dict.fromkeys(p.dtype for p in chosen):
        _sum_bucket(state, [p for p in chosen if p.dtype == dtype], dtype)


def _flag(parameter: Tensor) -> int:
    if parameter.grad is None:
        return _NO_GRAD
    return _HAS_GRAD if parameter.grad.layout == torch.strided else _SPARSE


def _sum_bucket(state: GroupState, parameters: Sequence[Tensor], dtype: torch.dtype) -> None:
    """Sum the gradients of parameters of one dtype, in one collective."""
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    device = parameters[0].device
    flat = torch.cat(
        [
            torch.zeros(p.numel(), dtype=wide, device=device)
            if p.grad is None
            else p.grad.detach().reshape(-1).to(device, wide)
            for p in parameters
        ]
    )
    payload = torch.view_as_real(flat) if flat.is_complex() else flat
    all_reduce_(state, payload, name="gather_grads")
    totals = flat.split([p.numel() for p in parameters])
    for p, total in zip(parameters, totals, strict=True):
        if p.grad is None:
            p.grad = torch.empty_like(p, requires_grad=False)
        with torch.no_grad():
            p.grad.copy_(total.view(p.shape))


def _verify_model(state: GroupState, named: Sequence[tuple[str, Tensor]], function: str) -> None:
    """Once for each list of names, shapes and dtypes: is it the same on all ranks?"""
    error = next(
        (
            ValueError(f"{function}: {name} has no shape yet; run the model once on a batch first")
            for name, tensor in named
            if isinstance(tensor, UninitializedParameter | UninitializedBuffer)
        ),
        None,
    )
    signature = (
        function,
        *((name, str(t.dtype), () if error else tuple(t.shape)) for name, t in named),
    )
    if signature not in state.checked:
        described = (
            f"{name} {str(dtype).removeprefix('torch.')}{list(shape)}"
            for name, dtype, shape in signature[1:]
        )
        verify(state, "; ".join(described), f"the model passed to {function}", error)
        state.checked.add(signature)
