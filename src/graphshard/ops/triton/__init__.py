# SPDX-License-Identifier: Apache-2.0
"""Operators on GPUs, as Triton kernels; in the place of `reference` there.

Triton comes with torch's CUDA wheels, and compiles for the device that is there. With
``TRITON_INTERPRET=1`` the kernels run in its interpreter, on any device: that is how they are
tested without one.
"""

from .attention import take
from .attention_gradients import gradients
from .rows import add_rows
from .sddmm import edge_softmax, edge_softmax_backward, sddmm
from .spmm import spmm

__all__ = [
    "add_rows",
    "edge_softmax",
    "edge_softmax_backward",
    "gradients",
    "sddmm",
    "spmm",
    "take",
]
