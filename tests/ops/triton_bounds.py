# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter, which reads and writes wherever a kernel says, with a look at each address.

On a GPU an address outside the operands is an error at best, and other people's numbers otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from triton.runtime import interpreter


class _Memory:
    """What the kernel in hand may touch."""

    def __init__(self) -> None:
        self.begins = self.ends = np.zeros(0, np.uint64)

    def enter(self, operands: list[Tensor]) -> None:
        spans = sorted((t.data_ptr(), t.data_ptr() + _bytes(t)) for t in operands)
        self.begins = np.array([begin for begin, _ in spans], np.uint64)
        self.ends = np.maximum.accumulate(np.array([end for _, end in spans], np.uint64))

    def check(self, addresses: Any, mask: Any, action: str) -> None:
        wanted = np.asarray(addresses)[np.asarray(mask, bool)].astype(np.uint64)
        place = np.searchsorted(self.begins, wanted, side="right").astype(np.int64) - 1
        inside = (place >= 0) & (wanted < self.ends[place])
        if not inside.all():
            raise IndexError(f"a kernel {action} outside its operands")


def _bytes(t: Tensor) -> int:
    if t.numel() == 0:
        return 0
    steps = zip(t.shape, t.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * t.element_size()


def _unwritten(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*args: Any, **kwargs: Any) -> Tensor:
        empty = make(*args, **kwargs)
        return empty.fill_(math.nan if empty.is_floating_point() else -77)

    return made


@contextmanager
def bounds_checked() -> Iterator[None]:
    """Kernels raise at the first address that belongs to none of their operands.

    What they leave unwritten of a new result is NaN.
    """
    memory = _Memory()
    begin = interpreter.GridExecutor._init_args_hst
    real = interpreter._interpreter

    def enter(self: Any, *given: Any) -> Any:
        found = begin(self, *given)
        memory.enter([argument for argument in found[0] if isinstance(argument, Tensor)])
        return found

    class Checked:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def load(self, addresses: Any, mask: Any, *rest: Any) -> Any:
            memory.check(addresses, mask, "reads")
            return real.load(addresses, mask, *rest)

        def store(self, addresses: Any, values: Any, mask: Any) -> Any:
            memory.check(addresses, mask, "writes")
            return real.store(addresses, values, mask)

    with (
        mock.patch.object(Tensor, "new_empty", _unwritten(Tensor.new_empty)),
        mock.patch.object(torch, "empty_like", _unwritten(torch.empty_like)),
        mock.patch.object(interpreter.GridExecutor, "_init_args_hst", enter),
        mock.patch.object(interpreter, "_interpreter", Checked()),
    ):
        yield
