# SPDX-License-Identifier: Apache-2.0
"""``graphshard trace``: steps of a run on all ranks, as a timeline, and what they send to whom.

A few steps are made as the run makes them. Hooks of the model's modules note when a layer computes
in the forward pass and, by its output's gradient, in the backward pass; the trace of `comm` notes
when a thread waits for other ranks, and what is sent by layer and receiver. The rest of a step is
the optimizer's and, before the model is called, that of inputs.

[Note: whose backward]
    A module's backward pass begins with the gradient of its output, and ends where that of another
    module begins; that of a module inside another one ends with the gradient of its input, and the
    outer one's goes on. What lies between two modules (an activation, dropout) counts for the later
    one of the two in the forward pass.

[Note: clocks]
    Times are those of `time.perf_counter_ns`, which all processes of a host share. Those of other
    hosts are moved by what the clocks differ in after a barrier, so they may be wrong by as much
    as the barrier takes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._base.device import choose_device
from .._base.files import writing
from ..comm import Trace, barrier, rank, shutdown_comms, trace, world_size
from ..comm.collectives import gather_int, gather_texts, shared_errors
from ..comm.group import group_state
from ..comm.transport import ragged_all_to_all_alike
from ..partition.format import read_config
from ._config import FullBatchConfig, SampledConfig, generators_of
from ._reports import check_extras
from ._run import FullBatchRun, SampledRun, TrainingRun
from ._run_folder import read_run_config
from ._step_picture import draw_steps
from ._training_shard import check_num_workers

TRACE, PICTURE = "trace.json", "trace.png"


@dataclasses.dataclass(frozen=True)
class RankSteps:
    """What one rank did in the steps that were traced.

    Attributes:
        host: Name of its host.
        begin, end: Nanoseconds, on the clock of rank 0.
        spans: ``(name, kind, begin, end, thread)`` with thread 0 the one that trains; kinds are
            "forward", "backward", "optimizer", "inputs" and "wait".
        bytes: ``(layer, direction, receiver, number)``: bytes sent, with receiver -1 for what goes
            to all ranks; direction is "forward", "backward" or "" outside of layers.
        operators: Events of torch's profiler in Chrome's format, if they were asked for.
    """

    rank: int
    host: str
    begin: int
    end: int
    spans: list[tuple[str, str, int, int, int]]
    bytes: list[tuple[str, str, int, int]]
    operators: list[dict[str, Any]]

    @classmethod
    def from_json(cls, text: str) -> RankSteps:
        values = json.loads(text)
        for name in ("spans", "bytes"):
            values[name] = [tuple(item) for item in values[name]]
        return cls(**values)

    def seconds(self) -> dict[str, float]:
        """Seconds of the thread that trains: "waiting" for others, and by kind what is not that."""
        spans = [(kind, begin, end) for _, kind, begin, end, thread in self.spans if thread == 0]
        waits = _joined((begin, end) for kind, begin, end in spans if kind == "wait")
        total = {"forward": 0, "backward": 0, "optimizer": 0, "inputs": 0}
        for kind, of_kind in total.items():
            whole = _joined((begin, end) for other, begin, end in spans if other == kind)
            total[kind] = of_kind + sum(e - b for b, e in whole) - _common(whole, waits)
        waiting = sum(end - begin for begin, end in waits)
        other = self.end - self.begin - waiting - sum(total.values())
        return {k: n / 1e9 for k, n in {**total, "other": other, "waiting": waiting}.items()}


def _joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same times without overlaps, in order."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def _common(first: list[tuple[int, int]], second: list[tuple[int, int]]) -> int:
    return sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in first for b in second)


class _StepsMade(Exception):
    """All steps that were asked for have been made: the run ends here, on every rank."""


class _Recorder:
    """Hooks that note what a model and its optimizer do, step by step."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, opened: Trace, warm_up: int
    ) -> None:
        self._trace, self._warm_up = opened, warm_up
        self._stack: list[tuple[str, int]] = []
        self._backward: tuple[str, int] | None = None
        self._seen: set[Any] = set()
        self._of_inputs: list[Any] = []
        self._optimizer_began = time.perf_counter_ns()
        self._is_root_called = False
        self.num_steps = 0
        #: When the newest step ended.
        self.ended = self._optimizer_began
        #: When the steps after the warm-up began, or None.
        self.begin: int | None = None
        self.on_step: Callable[[], None] = lambda: None
        self._hooks = [
            model.register_forward_pre_hook(self._enter_model),
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        ]
        for name, module in layers_of(model):
            self._hooks += [
                module.register_forward_pre_hook(
                    lambda _, inputs, name=name: self._enter(name, inputs)
                ),
                module.register_forward_hook(lambda *args, name=name: self._leave(name, args[-1])),
            ]

    def close(self) -> None:
        for hook in self._hooks + self._of_inputs:
            hook.remove()

    def _enter_model(self, *_: object) -> None:
        if not self._is_root_called:  # the first call of the step
            self._is_root_called = True
            self._trace.add_span("inputs", self.ended, time.perf_counter_ns(), "inputs")

    def _enter(self, name: str, inputs: Any) -> None:
        if self._stack and torch.is_grad_enabled():
            outer = self._stack[-1][0]
            self._of_inputs += [
                tensor.register_hook(lambda _: self._leave_backward(name, outer))
                for tensor in _tensors(inputs)
                if tensor.requires_grad
            ]
        self._stack.append((name, time.perf_counter_ns()))
        self._trace.scope = f"{name}|forward"

    def _leave(self, name: str, output: Any) -> None:
        _, begin = self._stack.pop()
        self._trace.add_span(name, begin, time.perf_counter_ns(), "forward")
        self._trace.scope = f"{self._stack[-1][0]}|forward" if self._stack else ""
        for tensor in _tensors(output):
            # A module around this one may return the same tensor.
            if tensor.grad_fn is not None and tensor.grad_fn not in self._seen:
                self._seen.add(tensor.grad_fn)
                tensor.register_hook(lambda _, name=name: self._begin_backward(name))

    def _begin_backward(self, name: str) -> None:
        if self._backward is None:
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(self._end_backward)
        elif self._backward[0] == name:
            return
        self._end_layer()
        self._backward = name, time.perf_counter_ns()
        self._trace.scope = f"{name}|backward"

    def _leave_backward(self, name: str, outer: str) -> None:
        if self._backward is not None and self._backward[0] == name:
            self._begin_backward(outer)

    def _end_layer(self) -> None:
        if self._backward is not None:
            name, begin = self._backward
            self._trace.add_span(name, begin, time.perf_counter_ns(), "backward")

    def _end_backward(self) -> None:
        self._end_layer()
        self._backward, self._trace.scope = None, ""

    def _before_step(self, *_: object) -> None:
        self._optimizer_began = time.perf_counter_ns()

    def _after_step(self, *_: object) -> None:
        now = time.perf_counter_ns()
        self._trace.add_span("optimizer", self._optimizer_began, now, "optimizer")
        self._seen.clear()
        while self._of_inputs:  # a leaf, such as learned rows, would keep them
            self._of_inputs.pop().remove()
        self._is_root_called = False
        self.ended = now
        self.num_steps += 1
        if self.num_steps != self._warm_up:
            self.on_step()
            return
        assert self._trace.spans is not None
        self._trace.spans.clear()
        self._trace.bytes_to.clear()
        self.on_step()
        self.begin = self.ended = time.perf_counter_ns()


def layers_of(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that a user would call layers, by name, outer ones first.

    They have parameters and are neither the model itself nor one of torch's own.
    """
    for name, module in model.named_modules():
        is_of_torch = type(module).__module__.startswith("torch.nn.")
        if name and not is_of_torch and next(module.parameters(), None) is not None:
            yield name, module


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def trace_steps(run: TrainingRun, steps: int, warm_up: int, operators: bool) -> list[RankSteps]:
    """Make ``warm_up`` steps and then ``steps`` that are traced; collective.

    The run is of no use afterwards.

    Returns:
        What each rank did, on rank 0; nothing on others.
    """
    learner = run._learner
    profiler = None
    with trace(timeline=True) as opened:
        recorder = _Recorder(learner.model, learner.optimizer, opened, warm_up)

        def on_step() -> None:
            nonlocal profiler
            if recorder.num_steps == warm_up and operators:
                profiler = _start_profiler(learner.device)
            if recorder.num_steps == warm_up + steps:
                raise _StepsMade

        recorder.on_step = on_step
        try:
            run.train()
            raise AssertionError(f"the run has fewer than {warm_up + steps} steps")
        except _StepsMade:
            end = recorder.ended  # and not now, when loaders have been closed
        finally:
            recorder.close()
            events = [] if profiler is None else _stopped(profiler)
    threads = {threading.get_ident(): 0}
    assert opened.spans is not None and recorder.begin is not None
    offset = _clock_offset()
    mine = RankSteps(
        rank=rank(),
        host=socket.gethostname(),
        begin=recorder.begin - offset,
        end=end - offset,
        spans=[
            (
                span.name,
                span.kind,
                span.begin - offset,
                span.end - offset,
                threads.setdefault(span.thread, len(threads)),
            )
            for span in sorted(opened.spans, key=lambda span: span.begin)
        ],
        bytes=[
            (*_layer(scope), -1 if to is None else to, number)
            for (scope, to), number in opened.bytes_to.items()
        ],
        operators=[{**event, "ts": event["ts"] - offset / 1e3} for event in events],
    )
    return _on_rank_0(mine)


def _on_rank_0(mine: RankSteps) -> list[RankSteps]:
    """What all ranks have, on rank 0, and nothing on others; collective."""
    text = bytearray(json.dumps(dataclasses.asdict(mine)).encode())
    sizes = gather_int(len(text))
    send = [len(text), *[0] * (world_size() - 1)]
    receive = sizes if rank() == 0 else [0] * world_size()
    arrived = ragged_all_to_all_alike(torch.frombuffer(text, dtype=torch.uint8), send, receive)
    if rank() != 0:
        return []
    return [RankSteps.from_json(bytes(part.numpy()).decode()) for part in arrived.split(sizes)]


def _layer(scope: str) -> tuple[str, str]:
    layer, _, direction = scope.partition("|")
    return layer, direction


def _clock_offset() -> int:
    """What to subtract from this rank's times for those of rank 0; collective."""
    if world_size() == 1:
        return 0
    barrier()
    now = time.perf_counter_ns()
    boot = Path("/proc/sys/kernel/random/boot_id")
    host = boot.read_text().strip() if boot.exists() else socket.gethostname()
    first_host, first_now = json.loads(gather_texts(group_state(), json.dumps([host, now]))[0])
    return 0 if host == first_host else now - int(first_now)


_MARK = "graphshard trace"


def _start_profiler(device: torch.device) -> tuple[Any, int, int]:
    """A profiler of torch that runs, and when one of the events named `_MARK` was: which and when.

    It is the one of ten that took least: between the times of another the process may have slept.
    """
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=kinds)
    profiler.start()
    marks = []
    for number in range(10):
        before = time.perf_counter_ns()
        with torch.profiler.record_function(_MARK):
            pass
        marks.append((time.perf_counter_ns() - before, number, before))
    _, number, before = min(marks)
    return profiler, number, before


def _stopped(started: tuple[Any, int, int]) -> list[dict[str, Any]]:
    """The events of a profiler, in microseconds of this process's clock."""
    profiler, number, marked = started
    profiler.stop()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "operators.json")
        profiler.export_chrome_trace(path)
        with open(path, encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
    complete = [event for event in events if event.get("ph") == "X"]
    mark = sorted(event["ts"] for event in complete if event["name"] == _MARK)[number]
    kept = ("name", "cat", "ph", "ts", "dur", "tid")
    return [
        {
            **{key: event[key] for key in kept if key in event},
            "ts": event["ts"] - mark + marked / 1e3,
        }
        for event in complete
        if event["name"] != _MARK and event.get("cat") != "Trace"
    ]


def chrome_trace(ranks: Iterable[RankSteps]) -> dict[str, Any]:
    """What Perfetto (ui.perfetto.dev) and Chrome (chrome://tracing) show: a process for each rank.

    Operators of torch's profiler are in threads of their own, beside those of layers and waits.
    """
    ranks = list(ranks)
    start = min(each.begin for each in ranks)
    events: list[dict[str, Any]] = []

    def named(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}

    for each in ranks:
        events.append(named("process_name", each.rank, 0, f"rank {each.rank} ({each.host})"))
        for thread in sorted({0, *(span[-1] for span in each.spans)}):
            name = "training" if thread == 0 else f"thread {thread}"
            events.append(named("thread_name", each.rank, thread, name))
        events += [
            {
                "ph": "X",
                "name": f"wait: {name}" if kind == "wait" else name,
                "cat": kind,
                "pid": each.rank,
                "tid": thread,
                "ts": (begin - start) / 1e3,
                "dur": (end - begin) / 1e3,
            }
            for name, kind, begin, end, thread in each.spans
        ]
        threads: dict[Any, int] = {}
        for event in each.operators:
            tid = threads.setdefault(event.get("tid"), 1000 + len(threads))
            events.append({**event, "pid": each.rank, "tid": tid, "ts": event["ts"] - start / 1e3})
        events += [named("thread_name", each.rank, t, "operators") for t in threads.values()]
    return {"displayTimeUnit": "ms", "traceEvents": events}


# -- by command ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TraceRequest:
    """What ``graphshard trace`` was asked for; all ranks must have the same.

    Args:
        run: Folder of the run.
        out: Folder for `TRACE` and `PICTURE`.
        steps: Steps that are traced.
        warm_up: Steps before them.
        operators: Whether operators and kernels are in the trace, by torch's profiler.
        plot: Whether to draw the picture.

    Raises:
        ValueError: A number is out of range.
        ImportError: matplotlib is missing, and ``plot`` needs it; names the extra.
    """

    run: str
    out: str
    steps: int = 1
    warm_up: int = 2
    operators: bool = False
    plot: bool = True

    def __post_init__(self) -> None:
        for name in ("steps", "warm_up"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1 (got {getattr(self, name)})")
        check_extras(plot=self.plot, tensorboard=None)

    def to_json(self) -> str:
        """All fields, and the mode by which a worker knows what they are."""
        return json.dumps({"mode": "trace", **dataclasses.asdict(self)}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> TraceRequest:
        """Inverse of `to_json`."""
        values = json.loads(text)
        del values["mode"]
        return cls(**values)

    def config(self) -> FullBatchConfig | SampledConfig:
        """The run's configuration, with nothing that it writes, and epochs enough."""
        config = read_run_config(self.run)
        epochs = max(config.epochs or 1, self.steps + self.warm_up)
        return dataclasses.replace(
            config,
            epochs=epochs,
            eval_every=epochs,
            patience=0,
            run=None,
            plot=False,
            tensorboard=None,
            checkpoint_dir=None,
            save_every=0,
            resume=False,
        )


def launch_trace(
    request: TraceRequest, num_workers: int, *, on_stderr: Callable[[str], None] | None = None
) -> list[dict[str, float]]:
    """Trace local workers that are started, watched and ended here; `RankSteps.seconds` by rank.

    Raises:
        ValueError: Run and partition do not fit each other.
        RankError: A worker failed.
    """
    from .launch import launch_workers

    config = request.config()
    check_num_workers(config, read_config(config.data).num_parts, num_workers)
    choose_device(config.device)
    seconds: list[dict[str, float]] = []
    outcome = launch_workers(
        [sys.executable, "-m", "graphshard.train.launch", request.to_json()],
        num_workers,
        timeout=config.timeout,
        on_event=lambda event: seconds.extend(event.get("seconds", ())),
        on_stderr=on_stderr,
    )
    outcome.check()
    return seconds


def trace_work(
    request: TraceRequest, on_seconds: Callable[[list[dict[str, float]]], None] | None = None
) -> Callable[[], None]:
    """Set up this process, one rank of a launcher's or torchrun's, and return its work.

    Args:
        on_seconds: Called on rank 0 with `RankSteps.seconds` by rank; by default the launcher is
            told.
    """
    from .launch import join_ranks, send_event

    config = request.config()
    config.resolved()
    join_ranks(config.device, config.timeout)
    run = SampledRun(config) if isinstance(config, SampledConfig) else FullBatchRun(config)

    def work() -> None:
        with torch.random.fork_rng(devices=generators_of(config.device)):
            ranks = trace_steps(run, request.steps, request.warm_up, request.operators)
        with shared_errors():
            if rank() == 0:
                write_trace(ranks, request, config)
        if rank() == 0:
            seconds = [each.seconds() for each in ranks]
            (on_seconds or (lambda values: send_event({"seconds": values})))(seconds)
        barrier()
        shutdown_comms()

    return work


def write_trace(
    ranks: list[RankSteps], request: TraceRequest, config: FullBatchConfig | SampledConfig
) -> None:
    """Write `TRACE`, and `PICTURE` if that was asked for; each is there whole or not at all."""
    folder = Path(request.out)
    folder.mkdir(parents=True, exist_ok=True)
    with _replacing(folder / TRACE) as path:
        path.write_text(json.dumps(chrome_trace(ranks)), encoding="utf-8")
    if request.plot:
        what = "step" if request.steps == 1 else f"{request.steps} steps"
        how = "sampled" if isinstance(config, SampledConfig) else "full batch"
        title = f"{config.model}, {how}, {len(ranks)} rank(s): {what}"
        with _replacing(folder / PICTURE) as path:
            draw_steps(ranks, path, title)


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    partial = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        with writing(path):
            yield partial
            os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
