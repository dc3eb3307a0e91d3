# SPDX-License-Identifier: Apache-2.0
"""LazyColumns: tensors by name, some of which are made when they are first asked for."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Generic, TypeVar

from torch import Tensor

K = TypeVar("K")


class LazyColumns(MutableMapping[K, Tensor], Generic[K]):
    """Tensors by name, in the place of a dict; what was made is the same tensor every time.

    Several threads may read at the same time, as those of a loader beside the training loop.

    Args:
        columns: Those that are there.
        makers: Name to what makes each of the others.
    """

    def __init__(
        self, columns: Mapping[K, Tensor], makers: Mapping[K, Callable[[], Tensor]]
    ) -> None:
        self._columns = dict(columns)
        self._makers = {name: functools.cache(make) for name, make in makers.items()}

    def __getitem__(self, name: K) -> Tensor:
        make = self._makers.get(name)
        if make is None:
            return self._columns[name]
        column = self._columns.setdefault(name, make())  # another thread may have been first
        self._makers.pop(name, None)
        return column

    def __setitem__(self, name: K, column: Tensor) -> None:
        self._columns[name] = column
        self._makers.pop(name, None)

    def __delitem__(self, name: K) -> None:
        if name in self._makers:
            del self._makers[name]
        else:
            del self._columns[name]

    def __or__(self, other: Mapping[K, Tensor]) -> dict[K, Tensor]:
        return {**self, **other}

    def __ror__(self, other: Mapping[K, Tensor]) -> dict[K, Tensor]:
        return {**other, **self}

    def __repr__(self) -> str:
        return f"LazyColumns({', '.join(map(repr, self))})"

    def __iter__(self) -> Iterator[K]:
        yield from {**self._columns, **self._makers}

    def __len__(self) -> int:
        return len({**self._columns, **self._makers})

    def __contains__(self, name: object) -> bool:
        return name in self._columns or name in self._makers

    def with_makers(self, makers: Mapping[K, Callable[[], Tensor]]) -> LazyColumns[K]:
        """The same columns and others, some perhaps in their places."""
        columns = {name: rows for name, rows in self._columns.items() if name not in makers}
        return LazyColumns(columns, {**self._makers, **makers})

    def passing(self, name: K) -> Tensor:
        """One of them, which is not kept if it is made for this call."""
        make = self._makers.get(name)
        return self._columns[name] if make is None else inspect.unwrap(make)()

    def maker(self, name: K) -> Callable[[], Tensor]:
        """What gives one of them, and keeps no other alive."""
        make = self._makers.get(name)
        if make is not None:
            return make
        column = self._columns[name]
        return lambda: column

    def there(self) -> list[Tensor]:
        """The tensors that need not be made any more."""
        return list(self._columns.values())


def tensors_there(columns: Mapping[K, Tensor]) -> list[Tensor]:
    """The tensors of a mapping, but for those that have not been made."""
    return columns.there() if isinstance(columns, LazyColumns) else list(columns.values())


def maker_of(columns: Mapping[K, Tensor], name: K) -> Callable[[], Tensor]:
    """What gives one tensor of a mapping, and keeps no other alive."""
    return (columns if isinstance(columns, LazyColumns) else LazyColumns(columns, {})).maker(name)
