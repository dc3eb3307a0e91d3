# SPDX-License-Identifier: Apache-2.0
"""Gradients of an embedding: those of equal ids added up, and an optimizer's step with the sums.

`group_equal` finds equal ids, `sum_groups` writes the sums of their rows, `update_rows` changes
rows of a table and of the optimizer's state by such sums, each read and written once. Rows lie in
several tables, as gradients of several lookups do, and are not moved together first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from .._base.kernels import kernels_for, num_threads
from . import _check

RuleName = Literal["sgd", "adagrad", "adam"]


@dataclass(frozen=True)
class UpdateRule:
    """How rows ``w`` change by a gradient ``g``.

    ::

        sgd      w -= rate g
        adagrad  s += g^2;  w -= rate g / (sqrt(s) + eps)
        adam     m += (1 - betas[0]) (g - m);  v = betas[1] v + (1 - betas[1]) g^2
                 w -= rate m / (sqrt(v) + eps)

    Args:
        rate: Learning rate, with what else the step is multiplied by.
        eps: Added to the root.
        betas: Decay of the moments.
    """

    name: RuleName
    rate: float
    eps: float = 0.0
    betas: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        _check.check_choice("name", self.name, get_args(RuleName))
        _check.check_number("rate", self.rate)
        _check.check_number("eps", self.eps)
        for beta in self.betas:
            _check.check_number("betas", beta)

    @property
    def num_tables(self) -> int:
        """Tables that are changed: ``w``, and ``s``, or ``m`` and ``v``."""
        return 1 + get_args(RuleName).index(self.name)


def group_equal(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find equal ids.

    Args:
        ids: int32 or int64 ``[n]``, on the CPU.

    Returns:
        The distinct ids ``[m]``, ascending; where the places of each begin in the third result, and
        the end of the last, int64 ``[m + 1]``; and the places, int64 ``[n]``, those of equal ids
        ascending.

    Raises:
        TypeError: Ids have another dtype.

    Example:
        >>> import torch
        >>> group_equal(torch.tensor([7, 4, 7]))
        (tensor([4, 7]), tensor([0, 1, 3]), tensor([1, 0, 2]))
    """
    _check.check_index_array("ids", ids)
    kernels = kernels_for(ids.device)
    if kernels is None:
        ascending, order = torch.sort(ids, stable=True)
        is_first = _is_first(ascending)
        starts = torch.cat([is_first.nonzero().view(-1), torch.tensor([ids.numel()])])
        return ascending[is_first], starts, order
    count = ids.numel()
    distinct, order = torch.empty(count, dtype=ids.dtype), torch.empty(count, dtype=torch.int64)
    starts = torch.empty(count + 1, dtype=torch.int64)
    num_groups = kernels.group_equal(ids.contiguous(), distinct, starts, order)
    return distinct[:num_groups], starts[: num_groups + 1], order


def sum_groups(out: Tensor, tables: Sequence[Tensor], order: Tensor, starts: Tensor) -> None:
    """``out[i]`` becomes the sum of rows ``order[starts[i] : starts[i + 1]]``, added in order.

    Args:
        out: float32 ``[m, dim]``, on the CPU, written to.
        tables: float32 ``[_, dim]`` each, at least one; their rows are numbered through.
        order: int64 ``[n]``, numbers of rows.
        starts: int64 ``[m + 1]``, ascending, in [0, n].

    Raises:
        IndexError: A row or start is out of range; nothing is written.
        TypeError: An argument has another dtype.
        ValueError: An argument has another shape or device.
    """
    tables, order, starts = _checked(tables, order, starts)
    shape = (starts.shape[0] - 1, tables[0].shape[1])
    out = _check.check_result("out", out, shape, torch.float32, tables[0].device).detach()
    _check.check_written("out", out)
    if out.numel() == 0:
        return
    tables = [_check.apart(table, out) for table in tables]
    is_plain = _check.is_plain(out) and out.stride(1) == 1
    kernels = kernels_for(out.device) if is_plain else None
    if kernels is None:
        out.copy_(_sums(tables, order, starts, (0, 0)))
        return
    kernels.sum_groups(out, tables, order.contiguous(), starts.contiguous(), num_threads())


def update_rows(
    rule: UpdateRule,
    changed: Sequence[Tensor],
    rows: Tensor,
    tables: Sequence[Tensor],
    order: Tensor,
    starts: Tensor,
    inner: tuple[int, int] = (0, 0),
) -> None:
    """Change rows of some tables by gradients, those of a row added up in order.

    Args:
        changed: float32 ``[k, dim]``, on the CPU, as many as the rule has; changed in place.
        rows: int32 or int64 ``[m]``, ascending, each once, in [0, k).
        order: int64 ``[n]``, numbers of gradients.
        starts: int64 ``[m + 1]``: the gradients of ``rows[i]`` are
            ``order[starts[i] : starts[i + 1]]``.
        inner: Gradients with numbers in this range, which are next to each other, are added up
            before they are added to others.

    Raises:
        IndexError: A row, start or number is out of range; nothing is changed.
        TypeError: An argument has another dtype.
        ValueError: An argument has another shape or device.
    """
    if not isinstance(rule, UpdateRule):
        raise TypeError(f"rule must be an UpdateRule (got {type(rule).__name__})")
    if not isinstance(changed, list | tuple) or len(changed) != rule.num_tables:
        raise ValueError(f"{rule.name} changes a list of {rule.num_tables} (got {changed!r:.200})")
    for number in inner:
        _check.check_count("inner", number)
    first_inner, last_inner = inner
    tables, order, starts = _checked(tables, order, starts)
    _check.check_index_array("rows", rows)
    if rows.shape[0] != starts.shape[0] - 1:
        raise ValueError(
            f"starts must have one entry more than rows (got {starts.shape[0]} and {rows.shape[0]})"
        )
    changed = [_check.check_tensor("each of changed", table).detach() for table in changed]
    shape = (changed[0].shape[0] if changed[0].dim() else 0, tables[0].shape[1])
    for table in changed:
        _check.check_result("each of changed", table, shape, torch.float32, tables[0].device)
        _check.check_written("each of changed", table)
    if rows.numel() == 0 or shape[1] == 0:
        return
    tables = [_check.apart(table, *changed) for table in tables]
    is_plain = all(table.is_contiguous() and _check.is_plain(table) for table in changed)
    kernels = kernels_for(changed[0].device) if is_plain else None
    if kernels is None:
        if bool((rows[1:] <= rows[:-1]).any()):
            raise IndexError("rows must ascend, each once")
        _check.check_places("rows", rows, shape[0])
        _update(rule, changed, rows.resolve_neg().long(), _sums(tables, order, starts, inner))
        return
    first, second = rule.betas
    numbers = [rule.rate, rule.eps, 1 - first, second, 1 - second]
    number = get_args(RuleName).index(rule.name)
    groups = tables, order.contiguous(), starts.contiguous(), first_inner, last_inner
    kernels.update_rows(number, numbers, changed, rows.contiguous(), *groups, num_threads())


def _checked(
    tables: Sequence[Tensor], order: Tensor, starts: Tensor
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Groups of rows, as the kernels and torch's indexing take them."""
    if not isinstance(tables, list | tuple) or not tables:
        raise ValueError(f"tables must be a list of one or more (got {tables!r:.200})")
    checked_tables = [_check.check_tensor("each of tables", table).detach() for table in tables]
    for table in checked_tables:
        if table.dim() != 2 or table.shape[1] != checked_tables[0].shape[1]:
            raise ValueError(
                "tables must have two dimensions, and as many columns as the first (got "
                f"{tuple(table.shape)} and {tuple(checked_tables[0].shape)})"
            )
        if table.dtype != torch.float32 or table.device.type != "cpu":
            raise TypeError(
                f"tables must be torch.float32 on the CPU (got {table.dtype} on {table.device})"
            )
    for name, array in (("order", order), ("starts", starts)):
        _check.check_index_array(name, array)
        if array.dtype != torch.int64:
            raise TypeError(f"{name} must be torch.int64 (got {array.dtype})")
    if starts.numel() == 0:
        raise ValueError("starts must have an entry more than there are groups (got none)")
    checked_tables = [
        table if table.stride(1) == 1 else table.contiguous() for table in checked_tables
    ]
    return checked_tables, order.resolve_neg(), starts.resolve_neg()


def _is_first(ascending: Tensor) -> Tensor:
    """Which entries differ from the one before."""
    is_first = torch.ones_like(ascending, dtype=torch.bool)
    torch.ne(ascending[1:], ascending[:-1], out=is_first[1:])
    return is_first


def _sums(
    tables: Sequence[Tensor], order: Tensor, starts: Tensor, inner: tuple[int, int]
) -> Tensor:
    """The sum of each group, in plain torch."""
    counts = starts.diff()
    if bool((counts < 0).any()) or int(starts[0]) < 0 or int(starts[-1]) > order.numel():
        raise IndexError("starts must ascend, within order")
    numbers = order[int(starts[0]) : int(starts[-1])]
    rows = torch.cat(list(tables))
    _check.check_places("order", numbers, rows.shape[0])
    group = torch.arange(counts.numel()).repeat_interleave(counts)
    is_inner = (numbers >= inner[0]) & (numbers < inner[1])
    begins = _is_first(group)
    begins[1:] |= ~(is_inner[1:] & is_inner[:-1])
    of_parts = _added(rows[numbers], begins.cumsum(0) - 1, int(begins.sum()))
    return _added(of_parts, group[begins], counts.numel())


def _added(rows: Tensor, group: Tensor, count: int) -> Tensor:
    """Rows of each group, which are next to each other, added up in order."""
    is_first = _is_first(group)
    total = rows.new_zeros(count, rows.shape[1])
    total[group[is_first]] = rows[is_first]
    return total.index_add_(0, group[~is_first], rows[~is_first])


def _update(rule: UpdateRule, changed: Sequence[Tensor], rows: Tensor, grad: Tensor) -> None:
    """One step, in plain torch."""
    weight, *state = (table[rows] for table in changed)
    if rule.name == "sgd":
        weight.add_(grad, alpha=-rule.rate)
    elif rule.name == "adagrad":
        state[0].addcmul_(grad, grad)
        weight.addcdiv_(grad, state[0].sqrt().add_(rule.eps), value=-rule.rate)
    else:
        first, second = rule.betas
        state[0].lerp_(grad, 1 - first)
        state[1].mul_(second).addcmul_(grad, grad, value=1 - second)
        weight.addcdiv_(state[0], state[1].sqrt().add_(rule.eps), value=-rule.rate)
    for table, value in zip(changed, (weight, *state), strict=True):
        table[rows] = value
