# SPDX-License-Identifier: Apache-2.0
"""Pipeline: a chain of stages over one batch value, each in a thread of its own.

::

    items ──> stage 0 ──> stage 1 ──> ... ──> the caller's loop
      ^                                            │
      └────────── permits: what may start ─────────┘

[Note: permits]
    A stage works on batch ``s`` only once the caller has asked for batch ``s - prefetch``. So at
    most ``prefetch`` finished batches wait; and, which matters more, what has been permitted
    depends on nothing but how many batches the caller has asked for. Where stages communicate and
    all ranks leave their loops at the same batch, the threads of all ranks have permission for the
    same batches. They finish those, and stop: none waits for a collective that another rank will
    not make.

[Note: stopping]
    Everything travels in band: permits are the items themselves, put into the first queue, and the
    last permit is a mark that each stage passes on before it ends. A stage that fails passes its
    error on in the place of the batch, which the caller raises when it gets there, and starts
    nothing any more. Dropping the iterator (a loop that ends, ``break``, an exception) puts
    the mark and waits for the threads, but not long: a thread may have to wait for other ranks
    that are late, and it does so on its own. Only `Run.cancel`, and the end of the interpreter,
    cut such waits short; a thread of Python must not be inside a collective then.

[Note: streams]
    A `DeviceStream` puts batches on a GPU beside the training loop::

        threads, side stream       rows ──> page-locked memory ──> copy of batch s+1 ──> event
                                                                                           │
        caller's thread and stream work of step s ────────────────────────── waits for ────┴──> s+1

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

import atexit
import copy
import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from .._base.kernels import limit_threads
from ..graph.local_graph import LocalGraph, moved_together

_STREAMED = ("cuda",)
"""Types of devices that have streams."""

_ALIGNMENT = 16
"""Arrays that are sent together begin at multiples of so many numbers."""

_STEPS_AHEAD = 2
"""How many steps the caller may have launched that the device has not reached."""


T = TypeVar("T")
_DROP_SECONDS = 3.0
_EXIT_SECONDS = 10.0
_PREFIX = "graphshard-"
_END = object()
"""The last thing in every queue."""

_crews: set[Crew] = set()


@dataclass(frozen=True)
class SentBatch:
    """A batch whose copies may not be done; the event comes after them."""

    value: Any
    event: torch.cuda.Event


@dataclass(frozen=True)
class DeviceStream:
    """A stream on which threads put batches on a device."""

    device: torch.device
    stream: torch.cuda.Stream

    @classmethod
    def of(cls, device: torch.device, own: bool = True) -> DeviceStream | None:
        """A new stream of a device, or its default one if not ``own``; None on the CPU."""
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
    """How the batches of one pass arrive in the caller's thread, see [Note: streams]."""

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


def group_by_source(blocks: Sequence[Any], device: torch.device) -> None:
    """Group edges of blocks that go to a GPU by source too, as the backward there asks for.

    This thread does so beside the step before; the training thread would launch some twenty kernels
    for it and wait for their result. The first block, the largest, is left as it is: inputs of a
    model seldom have gradients.
    """
    if device.type in _STREAMED:
        for block in blocks[1:]:
            for adj in block.relations:
                adj.csr()


def moved(value: Any, device: torch.device, pin: bool = False) -> Any:
    """A batch with every tensor and graph in it on a device; what cannot move stays as it is.

    Args:
        value: Tensors, graphs and other things with a method ``to``, in tuples, lists and
            dictionaries.
        pin: Take what is on the CPU through page-locked memory, so that a copy to a GPU is only
            begun; where there is no GPU to copy to, nothing is pinned.
    """
    if not pin or device.type not in _STREAMED:
        return mapped(value, lambda each: _moved(each, device, False))
    graphs: dict[int, LocalGraph] = {}

    def note(each: Any) -> Any:
        if isinstance(each, list):  # a batch of ours, of blocks
            mapped(list(each), note)
        elif isinstance(each, LocalGraph) and each.device.type == "cpu":
            graphs[id(each)] = each
        return each

    mapped(value, note)
    send = functools.partial(_sent_together, device=device)
    there = dict(zip(graphs, moved_together(list(graphs.values()), device, send), strict=True))

    def place(each: Any) -> Any:
        if isinstance(each, list):
            batch = copy.copy(each)
            batch[:] = mapped(list(each), place)
            return batch
        return there[id(each)] if id(each) in there else _moved(each, device, True)

    return mapped(value, place)


def record_stream(value: Any, stream: torch.cuda.Stream) -> None:
    """Say that a stream uses every tensor and graph of a batch that is on a device."""

    def record(each: Any) -> Any:
        at = getattr(each, "device", None)
        is_there = not isinstance(at, torch.device) or at.type != "cpu"
        if hasattr(each, "record_stream") and is_there:
            each.record_stream(stream)
        return each

    mapped(value, record)


def _sent_together(arrays: list[Tensor], device: torch.device) -> list[Tensor]:
    """Arrays on a GPU, by one copy through page-locked memory for all of a type.

    A graph has some ten arrays, mostly small. To lock memory for each, to copy it, and to have
    torch remember which stream uses it takes the host longer than the device takes for all.
    """
    sent: list[Tensor] = [torch.empty(0)] * len(arrays)
    for dtype in {array.dtype for array in arrays}:
        places = [place for place, array in enumerate(arrays) if array.dtype == dtype]
        pieces: list[Tensor] = []
        for place in places:
            array = arrays[place]
            flat = array if array.dim() == 1 else array.reshape(-1)
            # Each begins where a kernel may load 16 bytes at once.
            pieces += flat, _padding(dtype, -flat.shape[0] % _ALIGNMENT)
        sizes = [piece.shape[0] for piece in pieces]
        host = torch.empty(sum(sizes), dtype=dtype, pin_memory=True)
        torch.cat(pieces, out=host)
        pieces_there = host.to(device, non_blocking=True).split(sizes)[::2]
        for place, piece in zip(places, pieces_there, strict=True):
            array = arrays[place]
            sent[place] = piece if array.dim() == 1 else piece.view(array.shape)
    return sent


@functools.cache
def _padding(dtype: torch.dtype, count: int) -> Tensor:
    return torch.zeros(count, dtype=dtype)


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


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """A value with each leaf of its tuples, lists and dictionaries changed."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(each, change) for each in value))
    if isinstance(value, list | tuple):
        if hasattr(value, "record_stream"):  # a batch of ours
            return change(value)
        return type(value)(mapped(each, change) for each in value)
    if isinstance(value, Mapping):
        return {key: mapped(each, change) for key, each in value.items()}
    return change(value)


@dataclass(frozen=True)
class Stage:
    """One step of the work on a batch.

    Args:
        run: From the value of a batch to its next value; called from one thread at a time, in the
            order of the batches, without recording gradients. With several workers, from several
            threads at a time.
        workers: Threads of the stage, each with a batch of its own. What they make is passed on
            in the order of the batches.
    """

    name: str
    run: Callable[[Any], Any]
    workers: int = 1

    def made(self, value: Any) -> Any:
        """What it makes of a batch.

        Raises:
            RuntimeError: It raised StopIteration, which a loop would take for the end of its
                batches. Generators say so, too (PEP 479).
        """
        try:
            return self.run(value)
        except StopIteration as error:
            raise RuntimeError(
                f"the stage {self.name!r} of a loader raised StopIteration, which is no end of an "
                "epoch; see where a sampler or a function of yours calls next(), and give it a "
                "default"
            ) from error


@dataclass(frozen=True)
class _Failure:
    """What takes the place of a batch that a stage failed on."""

    error: BaseException


@dataclass(frozen=True)
class _Promise:
    """What takes the place of a batch that a worker has just begun, and brings it."""

    queue: SimpleQueue[Any] = field(default_factory=SimpleQueue)


class Pipeline:
    """A chain of stages, to be run over any number of series of batches.

    Args:
        prefetch: How many finished batches may wait for the caller. 0 runs all stages in the
            caller's thread, when it asks for a batch; no thread is started.
        cancelled: Set by `Run.cancel`, for what stages wait for; shared by all runs.
        stream: On which the threads put batches on a device; None where there is no device. What is
            made in the caller's thread is made on the caller's stream.

    Raises:
        ValueError: ``prefetch`` is negative.

    Example:
        >>> pipeline = Pipeline([Stage("square", lambda x: x * x)], prefetch=2)
        >>> list(pipeline.run(range(4)))
        [0, 1, 4, 9]
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        prefetch: int = 2,
        cancelled: threading.Event | None = None,
        stream: DeviceStream | None = None,
    ) -> None:
        if not isinstance(prefetch, int) or isinstance(prefetch, bool) or prefetch < 0:
            raise ValueError(f"prefetch must be a number of batches, 0 or more (got {prefetch!r})")
        self.stages = tuple(stages)
        self.prefetch = prefetch
        self.stream = stream
        self.cancelled = threading.Event() if cancelled is None else cancelled

    def run(self, items: Iterable[Any]) -> Run[Any]:
        """Start on batches from their first values, iterated over in the caller's thread."""
        return Run(self, iter(items))


@dataclass(eq=False)
class Deliveries:
    """What the caller of a run has got; ``arrivals`` where it comes from a device's stream."""

    num_batches: int = 0
    seconds_waited: float = 0.0
    arrivals: Arrivals | None = None


class Run(Iterator[T], Generic[T]):
    """What the caller iterates over; see [Note: stopping] for how it ends.

    Attributes:
        crew: The threads; None where there are none. They outlive the run if they must.
        delivered: What the caller has got; may be kept when the run is gone.
    """

    def __init__(self, pipeline: Pipeline, items: Iterator[Any]) -> None:
        stream = pipeline.stream
        self.delivered = Deliveries(arrivals=None if stream is None else Arrivals(stream))
        self._prefetch = pipeline.prefetch
        self._items: Iterator[Any] | None = items
        self._num_permitted = 0
        self._is_over = False
        self._stages = pipeline.stages
        self.crew: Crew | None = None
        if pipeline.prefetch and pipeline.stages:
            self.crew = Crew.start(pipeline.stages, pipeline.cancelled, stream)

    def __iter__(self) -> Run[T]:
        return self

    def __next__(self) -> T:
        if self._is_over:
            raise StopIteration
        try:
            if self.delivered.arrivals is not None:
                self.delivered.arrivals.ask()
            value = self._next()
        except BaseException:
            # Also Ctrl-C: then there is no time to wait for threads.
            self._leave(0.0)
            raise
        if value is _END:
            self.close()
            raise StopIteration
        if isinstance(value, _Failure):
            error = value.error
            self.close()
            try:
                raise error
            finally:
                del error, value  # the traceback refers to this frame
        self.delivered.num_batches += 1
        arrivals = self.delivered.arrivals
        return value if arrivals is None else arrivals.receive(value)

    def _next(self) -> Any:
        if self.crew is None:
            item = self._item()
            start = time.monotonic()
            with torch.no_grad():
                for stage in () if item is _END or isinstance(item, _Failure) else self._stages:
                    item = stage.made(item)
            self.delivered.seconds_waited += time.monotonic() - start
            return item
        last = self.delivered.num_batches + self._prefetch
        while self._items is not None and self._num_permitted <= last:
            self.crew.incoming.put(self._item())
            self._num_permitted += 1
        start = time.monotonic()
        value = _awaited(self.crew.outgoing.get())  # signals are handled meanwhile
        self.delivered.seconds_waited += time.monotonic() - start
        return value

    def _item(self) -> Any:
        """The first value of the next batch, or what there is in place of it."""
        if self._items is None:
            return _END
        try:
            return next(self._items)
        except Exception as error:
            self._items = None
            return _END if isinstance(error, StopIteration) else _Failure(error)

    def close(self, seconds: float = _DROP_SECONDS) -> bool:
        """Let the threads finish what has been permitted, and end; whether they have ended."""
        self._leave(seconds)
        return self.crew is None or self.crew.join(0.0)

    def cancel(self) -> bool:
        """Make the threads end, whatever they are doing; see `close` for the result."""
        self._leave(0.0)
        return self.crew is None or self.crew.cancel()

    def _leave(self, seconds: float) -> None:
        if not self._is_over:
            self._is_over = True
            self._items = None
            if self.crew is not None:
                self.crew.incoming.put(_END)
        if self.crew is not None:
            self.crew.join(seconds)

    def __del__(self) -> None:
        if hasattr(self, "crew"):
            self._leave(_DROP_SECONDS)


@dataclass(eq=False)
class Crew:
    """The threads of one run. They refer to this, never to the run, so that it can be dropped.

    Attributes:
        stream: On which they work, where batches go to a device.
        gpu: The number of the caller's GPU, on which they begin; None if it has not used one.
        failure: What a thread failed on, whether or not the caller has got that far. In words: the
            error itself would keep alive everything that its traceback refers to.
    """

    cancelled: threading.Event
    stream: DeviceStream | None = None
    gpu: int | None = None
    incoming: SimpleQueue[Any] = field(default_factory=SimpleQueue)
    outgoing: SimpleQueue[Any] = field(default_factory=SimpleQueue)
    threads: list[threading.Thread] = field(default_factory=list)
    failure: str | None = None

    @classmethod
    def start(
        cls,
        stages: Sequence[Stage],
        cancelled: threading.Event,
        stream: DeviceStream | None = None,
    ) -> Crew:
        # A thread begins on the first GPU, whichever its process uses.
        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        crew = cls(cancelled, stream, gpu)
        if stream is not None:
            stream.follow_caller()
        source = crew.incoming
        for number, stage in enumerate(stages):
            last = number == len(stages) - 1
            target: SimpleQueue[Any] = crew.outgoing if last else SimpleQueue()
            desk = _Desk(stage, source, target, crew, stream if last else None)
            for _ in range(stage.workers):
                # The interpreter does not wait for daemons by itself; `_stop_all` does, in its way.
                thread = threading.Thread(
                    target=_work, args=(desk,), name=f"{_PREFIX}{stage.name}", daemon=True
                )
                crew.threads.append(thread)
            source = target
        _register()
        _crews.difference_update([crew for crew in _crews if crew.has_ended])
        _crews.add(crew)
        for thread in crew.threads:
            thread.start()
        return crew

    @property
    def has_ended(self) -> bool:
        return not any(thread.is_alive() for thread in self.threads)

    def join(self, seconds: float) -> bool:
        """Wait for the threads to end; whether they have."""
        deadline = time.monotonic() + seconds
        for thread in self.threads:
            if thread is not threading.current_thread():  # where the last reference was dropped
                thread.join(max(0.0, deadline - time.monotonic()))
        return self.has_ended

    def cancel(self, seconds: float = _EXIT_SECONDS) -> bool:
        """Make the threads end, whatever they wait for; whether they have ended in time."""
        if self.join(0.0):
            return True
        self.cancelled.set()
        self.incoming.put(_END)
        return self.join(seconds)


@dataclass(eq=False)
class _Desk:
    """What the threads of a stage share.

    Args:
        sender: Of what the last stage makes, where it goes to a device.
        failure: The error of the earliest batch that has one; nothing later is started.
        lock: Held by the thread that takes a batch, also while there is none.
        failing: Held by the thread that reports an error.
    """

    stage: Stage
    source: SimpleQueue[Any]
    target: SimpleQueue[Any]
    crew: Crew
    sender: DeviceStream | None = None
    failure: _Failure | None = None
    failed_at: int = 0
    num_taken: int = 0
    num_ended: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    failing: threading.Lock = field(default_factory=threading.Lock)

    def take(self) -> tuple[Any, int, SimpleQueue[Any]]:
        """The next batch, its number, and where what becomes of it is put."""
        with self.lock:
            value, target = self.source.get(), self.target
            if value is _END:
                self.source.put(_END)  # for the next one
            elif self.stage.workers > 1:
                promise = _Promise()
                self.target.put(promise)
                target = promise.queue
            self.num_taken += 1
            number = self.num_taken
        return _awaited(value), number, target

    def run(self, value: Any, number: int) -> Any:
        """What the stage makes of a batch, or the error in its place."""
        if self.failure is not None and self.failed_at < number:
            return self.failure
        if isinstance(value, _Failure):
            return value
        try:
            made = self.stage.made(value)
            return made if self.sender is None else self.sender.sent(made)
        except BaseException as error:
            failure = _Failure(error)
            with self.failing:
                self.crew.failure = self.crew.failure or f"{type(error).__name__}: {error}"
                if self.failure is None or number < self.failed_at:
                    self.failure, self.failed_at = failure, number
            return failure


def _awaited(value: Any) -> Any:
    return value.queue.get() if isinstance(value, _Promise) else value


def _work(desk: _Desk) -> None:
    """A stage's thread."""
    crew, num_workers = desk.crew, desk.stage.workers
    torch.set_grad_enabled(False)  # for this thread, as all that follows
    if crew.gpu is not None:
        torch.cuda.set_device(crew.gpu)
    if num_workers > 1:
        limit_threads(max(1, torch.get_num_threads() // num_workers))
    with nullcontext() if crew.stream is None else crew.stream.current():
        while True:
            value, number, target = desk.take()
            if value is _END:
                break
            if not crew.cancelled.is_set():
                value = desk.run(value, number)
            elif target is desk.target:
                continue
            target.put(value)
            del value  # the batch is the caller's
    with desk.lock:
        desk.num_ended += 1
        is_last = desk.num_ended == num_workers
    if is_last:
        desk.failure = None  # its traceback refers to a frame
        desk.target.put(_END)


@functools.cache
def _register() -> None:
    atexit.register(_stop_all)


def _stop_all() -> None:
    """At the end of the interpreter, which no thread may meet inside a library."""
    for crew in list(_crews):
        crew.cancel()
    _crews.clear()
