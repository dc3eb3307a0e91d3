# SPDX-License-Identifier: Apache-2.0
"""Where numbers stopped being finite."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no tensor has an infinity or a NaN; of tensors on one device, in one transfer."""
    bounds = [torch.stack(t.detach().aminmax()) for t in tensors if t.numel()]
    return not bounds or bool(torch.stack(bounds).isfinite().all())


def describe_not_finite(groups: Mapping[str, Mapping[str, Tensor]]) -> tuple[str, int]:
    """What is to be said of the first group that has such a number, and how early that group is.

    Args:
        groups: What the tensors are, "parameters", to the tensors by name; causes first.

    Returns:
        The sentence, and the number of groups from this one on: 0 where all are finite.
    """
    for order, (kind, tensors) in enumerate(groups.items()):
        for name, tensor in tensors.items():
            count = int((~tensor.detach().isfinite()).sum())
            if count:
                return (
                    f"{kind} '{name}' hold {count} of {tensor.numel()} values that are not finite",
                    len(groups) - order,
                )
    largest = max(
        (float(t.detach().abs().max()) for t in groups["parameters"].values() if t.numel()),
        default=0.0,
    )
    return (
        f"features and parameters are finite (the largest parameter is {largest:.3g}), and what "
        "the network makes of them is not",
        0,
    )
