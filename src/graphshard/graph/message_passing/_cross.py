# SPDX-License-Identifier: Apache-2.0
"""Cross reducers: one value per node out of the results of several relations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import GraphValueError

Part = tuple[int, str | None, dict[str, Any]]
"""(relation, built-in reduce operator or None, the relation's result)."""


def cross_reduce(
    parts: Sequence[Part],
    reducer: str | Callable[[list[Tensor]], Tensor],
    in_degrees: Callable[[int], Tensor],
) -> dict[str, Any]:
    """Combine the results of relations that end at one node type.

    A relation that does not hold a field takes no part in it. A relation in which a node has no
    in-edge gave it 0; where maxima (or minima) are compared with maxima or minima that 0 is not a
    message, and is passed over.

    Args:
        parts: One per relation, in the order given by the caller.
        reducer: ``"sum"``, ``"mean"``, ``"max"``, ``"min"``, ``"stack"``, or a callable.
        in_degrees: In-degrees of a relation's destinations.

    Raises:
        ValueError: unknown reducer.
    """
    if not callable(reducer) and reducer not in ("sum", "mean", "max", "min", "stack"):
        raise GraphValueError(
            f"cross_reducer must be 'sum', 'mean', 'max', 'min', 'stack' or a callable (got "
            f"{reducer!r})"
        )
    if len(parts) == 1 and reducer != "stack":
        return parts[0][2]
    if reducer == "stack":
        parts = sorted(parts, key=lambda part: part[0])
    combined: dict[str, Any] = {}
    for name in dict.fromkeys(name for _, _, result in parts for name in result):
        having = [part for part in parts if name in part[2]]
        values = [result[name] for _, _, result in having]
        if callable(reducer):
            combined[name] = reducer(values)
        elif reducer == "stack":
            combined[name] = torch.stack(values, 1)
        elif len(values) == 1:
            combined[name] = values[0]
        elif reducer in ("max", "min"):
            combined[name] = _extreme(having, values, reducer, in_degrees)
        else:
            total = values[0]
            for value in values[1:]:
                total = total + value
            combined[name] = total / len(values) if reducer == "mean" else total
    return combined


def _extreme(
    parts: Sequence[Part],
    values: list[Tensor],
    reducer: str,
    in_degrees: Callable[[int], Tensor],
) -> Tensor:
    """Maximum or minimum over relations; where no relation holds a message the result is 0."""
    missing: list[Tensor | None] = []
    for (relation, op, _), value in zip(parts, values, strict=True):
        if op in ("max", "min"):
            empty = in_degrees(relation) == 0
            missing.append(empty.view(-1, *[1] * (value.dim() - 1)))
        else:
            missing.append(None)
    worst = _limit(values[0].dtype, lowest=reducer == "max")
    filled = [
        value if mask is None else value.masked_fill(mask, worst)
        for value, mask in zip(values, missing, strict=True)
    ]
    stacked = torch.stack(filled, 0)
    best = (stacked.max(0) if reducer == "max" else stacked.min(0)).values
    masks = [mask for mask in missing if mask is not None]
    if len(masks) < len(values):
        return best
    nowhere = masks[0]
    for mask in masks[1:]:
        nowhere = nowhere & mask
    return best.masked_fill(nowhere, 0)


def _limit(dtype: torch.dtype, lowest: bool) -> float | int:
    if dtype.is_floating_point:
        return float("-inf") if lowest else float("inf")
    info = torch.iinfo(dtype)
    return int(info.min if lowest else info.max)
