# SPDX-License-Identifier: Apache-2.0
"""Of which graphs a batched graph is made: how many nodes and edges each of them has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...errors import GraphTypeError, GraphValueError

Key = TypeVar("Key")


def read_batch_counts(given: Any, names: Sequence[Key], what: str) -> dict[Key, Tensor]:
    """Counts per graph from a user's hands.

    Args:
        given: A tensor, where there is one type; or type -> tensor, for every type.
        names: The types.
        what: What is counted ("nodes"), for error texts.

    Returns:
        Type -> ``[batch_size]`` int64.

    Raises:
        TypeError: a single tensor for several types, or no tensor.
        ValueError: a type is missing, lengths differ, or a count is negative.
    """
    if not isinstance(given, Mapping):
        if len(names) != 1:
            raise GraphTypeError(
                f"numbers of {what} must be a dictionary from type to tensor because there are "
                f"several types {list(names)} (got {type(given).__name__})"
            )
        given = {names[0]: given}
    missing = [name for name in names if name not in given]
    if missing:
        raise GraphValueError(f"numbers of {what} must be given for every type (missing {missing})")
    counts = {}
    for name in names:
        value = torch.as_tensor(given[name])
        if value.dim() != 1 or (value.numel() and int(value.min()) < 0):
            raise GraphValueError(
                f"numbers of {what} per graph must be one row of numbers from 0 (got {value} for "
                f"{name!r})"
            )
        counts[name] = value.long()
    if len({count.shape for count in counts.values()}) > 1:
        lengths = {name: count.shape[0] for name, count in counts.items()}
        raise GraphValueError(f"every type must have as many graphs as the others (got {lengths})")
    return counts


def kept_counts(counts: Tensor, kept: Tensor) -> Tensor:
    """Counts per graph after some rows are dropped.

    Args:
        counts: ``[batch_size]`` rows of each graph, one after another.
        kept: ``[num_rows]`` bool, which of them stay.
    """
    ends = torch.cat([kept.new_zeros(1, dtype=torch.int64), kept.long().cumsum(0)])
    stops = counts.to(kept.device).cumsum(0)
    return ends[stops] - ends[stops - counts.to(kept.device)]
