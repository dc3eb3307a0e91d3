# SPDX-License-Identifier: Apache-2.0
"""What looks at the addresses of kernels in Triton's interpreter sees those that are wrong."""

from __future__ import annotations

import importlib

import pytest
import torch
from ops_cases import interpreted_triton

triton = interpreted_triton()
bounds_checked = importlib.import_module("triton_bounds").bounds_checked
tl = triton.language


@triton.jit
def _copy(out, x, count, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    value = tl.load(x + place, mask=place < count, other=0)
    tl.store(out + place, value, mask=place < count + 1)


@pytest.mark.parametrize(
    ("x", "out", "action"), [(3, 4, ""), (2, 4, "reads"), (3, 3, "writes"), (0, 9, "reads")]
)
def test_addresses_outside_the_operands_are_found(x: int, out: int, action: str) -> None:
    memory = torch.arange(20.0)  # where a wrong address reads or writes a neighbour's numbers
    operands = memory[10 : 10 + out], memory[:x]
    with bounds_checked():
        if not action:
            _copy[(1,)](*operands, 3, COUNT=8)
            assert memory[10:14].tolist() == [0, 1, 2, 0]
            return
        with pytest.raises(Exception, match=f"a kernel {action} outside its operands"):
            _copy[(1,)](*operands, 3, COUNT=8)
