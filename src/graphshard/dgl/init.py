# SPDX-License-Identifier: Apache-2.0
"""Initial values of features where a caller gives values for some rows only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["base_initializer", "zero_initializer"]


def zero_initializer(
    shape: tuple[int, ...], dtype: torch.dtype, ctx: torch.device, id_range: Any
) -> Tensor:
    """Zeros; what ``set_n_initializer`` and ``set_e_initializer`` take, and the default."""
    return torch.zeros(shape, dtype=dtype, device=ctx)


base_initializer = zero_initializer
