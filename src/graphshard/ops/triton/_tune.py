# SPDX-License-Identifier: Apache-2.0
"""Which of a few configurations of a kernel is fastest on this device, measured once and kept.

[Note: bits do not depend on the choice]
    Only configurations that add the same numbers in the same order may stand in one list, and
    kernels are compiled without fused multiply-adds, which a compiler takes in one loop and not in
    another. Otherwise a run would not repeat the bits of the one before, in which another
    configuration was a microsecond faster. While it measures, `run_tuned` looks whether that is so,
    and leaves out a configuration whose result differs from that of the first.

In Triton's interpreter, while a CUDA graph is recorded, for small operands, and with
``GRAPHSHARD_AUTOTUNE=0`` nothing is measured: the first configuration that fits the device runs.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from triton.runtime import errors
from triton.runtime.errors import OutOfResources

from ._launch import INTERPRETED

LEAST_WORK = 1 << 22
"""Numbers that a call reads, at least, before its configuration is worth a measurement."""

CALLS = 3
"""Of each configuration, to take its time."""

Configuration = Mapping[str, int]
"""Keyword arguments of a launch."""

_DO_NOT_FIT = (OutOfResources, getattr(errors, "PTXASError", OutOfResources))  # from 3.3 on
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_chosen: dict[Hashable, Configuration] = {}
_lock = threading.Lock()


def run_tuned(
    key: tuple[Hashable, ...],
    configurations: Sequence[Configuration],
    run: Callable[[Configuration], None],
    written: Sequence[Tensor],
    work: int,
    updated: bool = False,
) -> None:
    """Run a kernel, in the configuration that was fastest for such operands.

    Args:
        key: What the time depends on: kernel, options, width, dtype, device.
        configurations: To choose from, the best guess first. See [Note: bits do not depend on the
            choice].
        work: How many numbers it reads, roughly.
        updated: Whether results are read, too; then they are put back before each launch.

    Raises:
        OutOfResources: No configuration fits the device.
    """
    fastest = _chosen.get(key)
    if fastest is not None:
        run(fastest)
    elif len(configurations) > 1 and work >= LEAST_WORK and _may_measure(written[0].device):
        with _lock:
            _measure(key, configurations, run, written, updated)
    else:
        _run_first(configurations, run)


def _may_measure(device: torch.device) -> bool:
    if INTERPRETED or os.environ.get("GRAPHSHARD_AUTOTUNE", "1") == "0":
        return False
    return device.type == "cuda" and not torch.cuda.is_current_stream_capturing()


def _run_first(
    configurations: Sequence[Configuration], run: Callable[[Configuration], None]
) -> Configuration:
    """Run in the first configuration that fits the device. One that does not writes nothing."""
    for configuration in configurations[:-1]:
        try:
            run(configuration)
        except _DO_NOT_FIT:
            continue
        return configuration
    run(configurations[-1])
    return configurations[-1]


def _measure(
    key: Hashable,
    configurations: Sequence[Configuration],
    run: Callable[[Configuration], None],
    written: Sequence[Tensor],
    updated: bool,
) -> None:
    """Take the time of each, keep the fastest, and leave its results."""
    before: list[Tensor] = []
    times: list[tuple[float, int]] = []

    def put_back() -> None:
        for tensor, old in zip(written, before, strict=False):
            tensor.copy_(old)

    try:
        if updated:
            before = [tensor.clone() for tensor in written]
        expected: list[Tensor] | None = None
        for number, configuration in enumerate(configurations):
            put_back()
            try:
                run(configuration)
            except _DO_NOT_FIT:
                continue
            if expected is None:
                expected = [tensor.clone() for tensor in written]
            elif not all(map(_same_bits, written, expected)):
                continue
            times.append((seconds(partial(run, configuration), written[0].device), number))
        del expected
    except torch.OutOfMemoryError:  # no memory for copies of the results: no measurement
        times = times[:1]
    put_back()
    if times:
        _chosen[key] = configurations[min(times)[1]]
        run(_chosen[key])
    else:
        _chosen[key] = _run_first(configurations, run)


def seconds(call: Callable[[], None], device: torch.device) -> float:
    """Of one call on a GPU, when it comes again and again."""
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(CALLS):
            call()
        end.record()
        end.synchronize()
    return begin.elapsed_time(end) / 1e3 / CALLS


def _same_bits(first: Tensor, second: Tensor) -> bool:
    bits = _BITS[first.element_size()]
    return torch.equal(first.contiguous().view(bits), second.contiguous().view(bits))
