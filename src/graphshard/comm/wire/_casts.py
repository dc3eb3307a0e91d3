# SPDX-License-Identifier: Apache-2.0
"""Narrow rows: floating-point rows may travel in fewer bits than they are computed in.

The owner rounds the rows that it sends, the reader widens them on arrival; so do gradients on the
way home. What is not floating point, or no wider than the wire, travels as it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

WIRE_DTYPES = (torch.bfloat16, torch.float16)
"""What rows may be narrowed to."""


def wire_dtype(dtype: torch.dtype, wire: torch.dtype | None) -> torch.dtype:
    """The dtype in which rows of ``dtype`` travel; ``wire`` None is as they are."""
    if wire is None or not dtype.is_floating_point or dtype.itemsize <= wire.itemsize:
        return dtype
    return wire


def narrowed(tensor: Tensor, wire: torch.dtype | None) -> Tensor:
    """Rows as they travel; the same tensor where nothing changes."""
    return tensor.to(wire_dtype(tensor.dtype, wire))


def widened(parts: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    """Rows that have arrived, each in the dtype that it is computed in."""
    return [part.to(dtype) for part, dtype in zip(parts, dtypes, strict=True)]
