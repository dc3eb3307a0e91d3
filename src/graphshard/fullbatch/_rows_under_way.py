# SPDX-License-Identifier: Apache-2.0
"""RowsUnderWay: extended source rows of which the own ones are here and the others are coming.

It stands for a tensor of own rows followed by halo rows. Functions that treat each row by itself
are applied to the own rows at once, and to the others when these are asked for; whatever else is
done with it waits for them and works on the whole tensor. So a layer's projection of own rows, and
their sum at the destinations, are computed while the halo is in flight.

Layers that are written for it say so (``takes_rows_under_way = True`` in the class): one that hands
its input to a function which only knows tensors would lose the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ._replay import autocast_state
from ._row_wise import LAST_DIM_REDUCTIONS, collect, positional, row_wise
from ._stand_in import StandIn


class RowsUnderWay(StandIn):
    """Own rows, and how to get the others.

    Args:
        own: ``[num_own, ...]``.
        num_remote: Rows that are coming.
        arrive: Waits for them: ``[num_remote, ...]``. Called once at most.
    """

    what = "rows under way"

    def __init__(self, own: Tensor, num_remote: int, arrive: Callable[[], Tensor]) -> None:
        self.own, self._num_remote = own, num_remote
        self._arrive: Callable[[], Tensor] | None = arrive
        self._remote: Tensor | None = None
        self._whole: Tensor | None = None
        self._grad = torch.is_grad_enabled()  # whoever reads the rows first

    @property
    def remote(self) -> Tensor:
        """The other rows; waits for them."""
        if self._arrive is not None:
            with torch.set_grad_enabled(self._grad):
                self._remote, self._arrive = self._arrive(), None
        assert self._remote is not None
        return self._remote

    def whole(self) -> Tensor:
        """Own rows and then the others, ``[num_own + num_remote, ...]``; waits for them."""
        if self._whole is None:
            with torch.set_grad_enabled(self._grad):
                self._whole = torch.cat([self.own, self.remote])
        return self._whole

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.own.shape[0] + self._num_remote, *self.own.shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        return self.own.dtype

    @property
    def device(self) -> torch.device:
        return self.own.device

    @property
    def requires_grad(self) -> bool:
        return self.own.requires_grad

    def __repr__(self) -> str:
        return f"RowsUnderWay(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        call = _Call(func, *positional(args, kwargs or {}))
        found = call.by_rows()
        return call.on_whole() if found is None else found


class ArrivingInputs(Mapping[str, Tensor]):
    """Extended rows by source type: tensors, for which reading one waits.

    Args:
        rows: By source type.
    """

    def __init__(self, rows: Mapping[str, Tensor | RowsUnderWay]) -> None:
        self._rows = dict(rows)

    def __getitem__(self, ntype: str) -> Tensor:
        rows = self._rows[ntype]
        return rows.whole() if isinstance(rows, RowsUnderWay) else rows

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def under_way(self, ntype: str) -> Tensor | RowsUnderWay:
        """The same without waiting."""
        return self._rows[ntype]


class _Call:
    """A function of torch, or of this package, that was given rows under way."""

    def __init__(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        self._func, self._args, self._kwargs = func, args, kwargs
        self._name = getattr(func, "__name__", "")

    def on_whole(self) -> Any:
        return self._with(RowsUnderWay.whole, lambda tensor: tensor)

    def by_rows(self) -> RowsUnderWay | None:
        """The result on each row by itself; None where rows may be mixed."""
        if self._kwargs.get("inplace") or self._name in LAST_DIM_REDUCTIONS:
            return None
        found: list[StandIn] = []
        collect((self._args, self._kwargs), found, [])
        rows_under_way = [rows for rows in found if isinstance(rows, RowsUnderWay)]
        first = rows_under_way[0]
        num_own, num_rows = len(first.own), len(first)
        if any(len(rows.own) != num_own for rows in rows_under_way):
            return None
        has_rows = row_wise(self._name, self._args, self._kwargs)
        if has_rows is None:
            return None

        def part_of(tensor: Tensor, part: slice) -> Tensor:
            return tensor[part] if has_rows(tensor) else tensor

        own_part, rest = slice(0, num_own), slice(num_own, num_rows)
        autocast = autocast_state(first.device)
        own = self._with(lambda rows: rows.own, lambda tensor: part_of(tensor, own_part))
        assert isinstance(own, Tensor) and len(own) == num_own, self._name

        def arrive() -> Tensor:
            with autocast():
                remote: Tensor = self._with(
                    lambda rows: rows.remote, lambda tensor: part_of(tensor, rest)
                )
            return remote

        return RowsUnderWay(own, num_rows - num_own, arrive)

    def _with(
        self, rows: Callable[[RowsUnderWay], Tensor], tensor: Callable[[Tensor], Tensor]
    ) -> Any:
        args, kwargs = _replaced((list(self._args), self._kwargs), rows, tensor)
        return self._func(*args, **kwargs)


def _replaced(
    value: Any, rows: Callable[[RowsUnderWay], Tensor], tensor: Callable[[Tensor], Tensor]
) -> Any:
    """The same with other tensors."""
    if isinstance(value, RowsUnderWay):
        return rows(value)
    if isinstance(value, Tensor):
        return tensor(value)
    if isinstance(value, list | tuple):
        return type(value)(_replaced(item, rows, tensor) for item in value)
    if isinstance(value, dict):
        return {key: _replaced(item, rows, tensor) for key, item in value.items()}
    return value
