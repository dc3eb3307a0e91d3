# SPDX-License-Identifier: Apache-2.0
"""Small helpers of layers: inputs as pairs, checks of shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import GraphValueError
from ..ops import leading_rows


def expand_as_pair(input_: Any, g: Any = None) -> tuple[Any, Any]:
    """A layer's input as (source features, destination features).

    Args:
        g: The graph. On a block the destinations are the first rows of the sources.
    """
    if isinstance(input_, tuple):
        first, second = input_
        return first, second
    if g is None or not g.is_block:
        return input_, input_
    if not isinstance(input_, Mapping):
        return input_, leading_rows(input_, g.num_dst_nodes())
    names = [name for name in input_ if name in g.dsttypes]
    return input_, {name: leading_rows(input_[name], g.num_dst_nodes(name)) for name in names}


def check_eq_shape(input_: Any) -> None:
    """Raise unless source and destination rows have one shape."""
    source, destination = expand_as_pair(input_)
    if source.shape[1:] != destination.shape[1:]:
        raise GraphValueError(
            f"rows of source and destination features must have one shape (got "
            f"{tuple(source.shape[1:])} and {tuple(destination.shape[1:])})"
        )


def is_sorted_srcdst(
    src: Tensor, dst: Tensor, num_src: int | None = None, num_dst: int | None = None
) -> tuple[bool, bool]:
    """Whether edges are sorted by source; and whether then also by destination within a source."""
    by_source = bool((src[1:] >= src[:-1]).all())
    same = src[1:] == src[:-1]
    return by_source, by_source and bool((dst[1:] >= dst[:-1])[same].all())


def apply_each(data: Any, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Apply a function to every value of a dictionary, or to a value alone."""
    if isinstance(data, Mapping):
        return {key: fn(value, *args, **kwargs) for key, value in data.items()}
    return fn(data, *args, **kwargs)


def recursive_apply(data: Any, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Apply a function to every value in nested dictionaries, lists and tuples."""
    if isinstance(data, Mapping):
        return {key: recursive_apply(value, fn, *args, **kwargs) for key, value in data.items()}
    if isinstance(data, tuple | list):
        applied = [recursive_apply(value, fn, *args, **kwargs) for value in data]
        return tuple(applied) if isinstance(data, tuple) else applied
    return fn(data, *args, **kwargs)


class Filter:
    """Which ids are among given ones."""

    def __init__(self, ids: Tensor) -> None:
        self._ids = ids

    def find_included_indices(self, test: Tensor) -> Tensor:
        """Places in ``test`` whose id is given, ascending."""
        return torch.isin(test, self._ids).nonzero().reshape(-1).to(test.dtype)

    def find_excluded_indices(self, test: Tensor) -> Tensor:
        """Places in ``test`` whose id is not given, ascending."""
        return torch.isin(test, self._ids, invert=True).nonzero().reshape(-1).to(test.dtype)


def shared_tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A new tensor in memory that processes share; its values are arbitrary."""
    return torch.empty(*shape, dtype=dtype).share_memory_()


def gather_pinned_tensor_rows(tensor: Tensor, rows: Tensor) -> Tensor:
    """Rows of a tensor in the host's memory, on the device of their numbers."""
    gathered = tensor.index_select(0, rows.to(tensor.device))
    return gathered.to(rows.device, non_blocking=tensor.is_pinned())


def use_libxsmm(flag: bool) -> None:
    """Accepted so that scripts written for DGL run; the kernels are always the fast ones."""


def is_libxsmm_enabled() -> bool:
    """True: the kernels are always the fast ones."""
    return True
