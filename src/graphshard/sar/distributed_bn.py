# SPDX-License-Identifier: Apache-2.0
"""The names of ``sar.distributed_bn``: the layer, and the two means that SAR computes it from."""

from __future__ import annotations

import torch
from torch import Tensor

from ..comm import all_reduce
from ..comm.collectives import all_reduce_alike
from ..nn import DistributedBN1D as DistributedBN1D


def mean_op(x: Tensor) -> Tensor:
    """Mean over the rows of all ranks; differentiable. Every rank must call.

    Args:
        x: ``[rows, features]``; a rank may have none.
    """
    count = torch.tensor([x.shape[0]], dtype=torch.int64)
    return all_reduce(x.sum(0), "sum") / all_reduce_alike(count, "sum").to(x.device)


def var_op(x: Tensor) -> Tensor:
    """Mean of the squares, from which SAR subtracts the square of the mean; else as `mean_op`."""
    return mean_op(x**2)
