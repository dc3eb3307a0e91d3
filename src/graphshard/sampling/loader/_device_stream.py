# SPDX-License-Identifier: Apache-2.0
"""DeviceStream: batches that threads put on a GPU beside the training loop, and how they arrive.

::

    stages' threads, side stream    rows ──> page-locked memory ──> copy of batch s+1 ──> event
                                                                                            │
    caller's thread and stream      work of step s ────────────────────────── waits for ────┴──> s+1

[Note: streams]
    Threads work on a stream of their own, so that copies run beside the kernels of a step. It
    begins each pass after what the caller has launched by then, such as features that it put on
    the device. A batch is passed on at once, while its copies may not be done, with an event that
    comes after them: the caller's stream waits for the event, not the caller. Tensors were made on
    the side stream and are used on the caller's, so they are recorded there: else their memory
    would be used again for the next batch as soon as the loop drops them, while kernels still read
    it. Page-locked memory is torch's own, which keeps it from other uses until the copies from it
    are done.

    A training loop only launches work, so it may be many steps ahead of the device, and what it has
    dropped is not free before the device gets there. So the caller is held back until the device
    has reached the step before the last; which also gives the times that `Arrivals` adds up.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_STREAMED = ("cuda",)
"""Types of devices that have streams."""

_STEPS_AHEAD = 2
"""How many steps the caller may have launched that the device has not reached."""


@dataclass(frozen=True)
class SentBatch:
    """A batch whose copies may not be done.

    Args:
        value: The batch.
        event: Comes after the copies.
    """

    value: Any
    event: torch.cuda.Event


@dataclass(frozen=True)
class DeviceStream:
    """A stream on which threads put batches on a device.

    Args:
        device: The device.
        stream: One of its streams.
    """

    device: torch.device
    stream: torch.cuda.Stream

    @classmethod
    def of(cls, device: torch.device, own: bool = True) -> DeviceStream | None:
        """A stream of a device; None where it has none, as the CPU.

        Args:
            device: The device.
            own: A new one, not the device's default stream.
        """
        if device.type not in _STREAMED:
            return None
        if own:
            return cls(device, torch.cuda.Stream(device))
        return cls(device, torch.cuda.default_stream(device))

    def current(self) -> AbstractContextManager[Any]:
        """Makes it the current stream of this thread."""
        return torch.cuda.stream(self.stream)

    def follow_caller(self) -> None:
        """Let what comes on this stream wait for what this thread has launched on its own."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))

    def sent(self, value: Any) -> SentBatch:
        """A batch, with an event after all that has been launched for it."""
        event = torch.cuda.Event()
        event.record(self.stream)
        return SentBatch(value, event)


class Arrivals:
    """How the batches of one pass arrive in the caller's thread, see [Note: streams].

    Args:
        stream: Where they were made.
    """

    def __init__(self, stream: DeviceStream) -> None:
        self._device = stream.device
        self._asked: torch.cuda.Event | None = None
        self._waits: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._seconds = 0.0

    def ask(self) -> None:
        """The caller wants the next batch: all work of the steps before has been launched."""
        self._asked = self._mark()

    def receive(self, value: Any) -> Any:
        """Let the caller's stream wait for a batch, and use it."""
        if isinstance(value, SentBatch):
            current = torch.cuda.current_stream(self._device)
            current.wait_event(value.event)
            value = value.value
            record_stream(value, current)
        if self._asked is not None:
            self._waits.append((self._asked, self._mark()))
        while len(self._waits) > _STEPS_AHEAD:
            self._waits[0][1].synchronize()
            self._add()
        return value

    @property
    def seconds_waited(self) -> float:
        """How long the device has had nothing to do but wait for batches, as far as it has got."""
        while self._waits and self._waits[0][1].query():
            self._add()
        return self._seconds

    def _add(self) -> None:
        asked, arrived = self._waits.popleft()
        self._seconds += asked.elapsed_time(arrived) / 1e3

    def _mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def moved(value: Any, device: torch.device, pin: bool = False) -> Any:
    """A batch with every tensor and graph in it on a device; what cannot move stays as it is.

    Args:
        value: Tensors, graphs and other things with a method ``to``, in tuples, lists and
            dictionaries.
        device: Where to.
        pin: Take what is on the CPU through page-locked memory, so that a copy to a GPU is only
            begun; where there is no GPU to copy to, nothing is pinned.
    """
    pin = pin and device.type in _STREAMED
    return _mapped(value, lambda each: _moved(each, device, pin))


def record_stream(value: Any, stream: torch.cuda.Stream) -> None:
    """Say that a stream uses every tensor and graph of a batch that is on a device."""

    def record(each: Any) -> Any:
        at = getattr(each, "device", None)
        is_there = not isinstance(at, torch.device) or at.type != "cpu"
        if hasattr(each, "record_stream") and is_there:
            each.record_stream(stream)
        return each

    _mapped(value, record)


def _moved(value: Any, device: torch.device, pin: bool) -> Any:
    if not hasattr(value, "to"):
        return value
    if not pin or not hasattr(value, "pin_memory") or not hasattr(value, "record_stream"):
        return value.to(device)
    if _is_on_cpu(value):
        value = (value.contiguous() if isinstance(value, Tensor) else value).pin_memory()
    return value.to(device, non_blocking=True)


def _is_on_cpu(value: Any) -> bool:
    """Whether a tensor or a graph, of PyG too, is there."""
    if hasattr(value, "device"):
        return bool(value.device == torch.device("cpu"))
    return not getattr(value, "is_cuda", False)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_mapped(each, change) for each in value))
    if isinstance(value, list | tuple):
        if hasattr(value, "record_stream"):  # a batch of ours
            return change(value)
        return type(value)(_mapped(each, change) for each in value)
    if isinstance(value, Mapping):
        return {key: _mapped(each, change) for key, each in value.items()}
    return change(value)
