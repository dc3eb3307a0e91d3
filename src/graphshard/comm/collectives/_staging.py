# SPDX-License-Identifier: Apache-2.0
"""Copies between where tensors live and where the backend of a group can send them.

A GPU's rows reach gloo through host memory, and CPU tensors reach NCCL through the device. What
comes from or goes to a GPU is copied through page-locked memory, at the speed of the bus, on a
stream of its own: rows that arrive are copied while kernels of the shard before still run. torch
keeps freed page-locked blocks and uses them again, once the copies that read them are over.

[Note: order of copies]
    Out: the copy stream waits for what the caller's stream has been given so far, or, inside
    `copying_ahead`, up to an event; the host waits for the copy before the backend reads the
    buffer. In: the caller's stream waits for the copy, the host does not. What is allocated on one
    stream and read on another is marked (``record_stream``), so that its memory is not used again
    too early.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..._base.kernels import empty
from ..group import GroupState


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of a GPU on which rows are copied to and from the host."""
    return torch.cuda.Stream(device)


def to_backend(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Contiguous tensors on the device that the backend sends from, complete.

    Tensors that are there already are returned as they are.
    """
    if device.type != "cpu" or not any(tensor.is_cuda for tensor in tensors):
        return [tensor.to(device) for tensor in tensors]
    found, copied = [], {}
    for tensor in tensors:
        if not tensor.is_cuda:
            found.append(tensor.to(device))
            continue
        stream = _copy_stream(tensor.device)
        if tensor.device not in copied:
            stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            found.append(buffer.copy_(tensor, non_blocking=True))
            copied[tensor.device] = stream.record_event()
    for event in copied.values():
        event.synchronize()
    return found


def room_for(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, here: torch.device
) -> Tensor:
    """Memory on ``device`` for what the backend receives, and `from_backend` takes to ``here``."""
    if device.type == "cpu" and here.type == "cuda":
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
    return empty(shape, dtype, device)


def from_backend(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> list[Tensor]:
    """Tensors that have been received, each where it is wanted; from `room_for` without a wait."""
    found = []
    for tensor, device in zip(tensors, devices, strict=True):
        if device.type != "cuda" or tensor.is_cuda:
            found.append(tensor.to(device))
            continue
        stream, reader = _copy_stream(device), torch.cuda.current_stream(device)
        with torch.cuda.stream(stream):
            arrived = tensor.to(device, non_blocking=True)
        arrived.record_stream(reader)
        reader.wait_stream(stream)
        found.append(arrived)
    return found


@contextlib.contextmanager
def copying_ahead(device: torch.device, after: torch.cuda.Event | None) -> Iterator[None]:
    """Rows that are sent meanwhile are gathered and copied as soon as an event has passed.

    Without it they would wait for all kernels that have been started, such as those of the shard
    that is being computed. They must be staged, so that the host waits until they have been read.

    Args:
        device: Where the rows are.
        after: What `rows_are_ready` gave when the rows were there; None changes nothing.
    """
    if after is None:
        yield
        return
    stream = _copy_stream(device)
    stream.wait_event(after)
    with torch.cuda.stream(stream):
        yield


def rows_are_ready(state: GroupState, device: torch.device) -> torch.cuda.Event | None:
    """An event after all that a GPU has been given so far, for `copying_ahead`.

    None where rows of ``device`` are sent from where they are: the backend's stream is ordered
    after the caller's.
    """
    if device.type != "cuda" or state.world_size == 1:
        return None
    if state.payload_device(device).type != "cpu":
        return None
    return torch.cuda.current_stream(device).record_event()
