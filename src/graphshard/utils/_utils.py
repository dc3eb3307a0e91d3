# SPDX-License-Identifier: Apache-2.0
"""Small helpers of layers: inputs as pairs, checks of shapes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..errors import GraphValueError


def expand_as_pair(input_: Any, g: Any = None) -> tuple[Any, Any]:
    """A layer's input as (source features, destination features).

    Args:
        input_: A pair, which is returned as it is; a tensor; or type -> tensor.
        g: The graph. On a block the destinations are the first rows of the sources.

    Example:
        >>> import torch
        >>> expand_as_pair(torch.ones(2))
        (tensor([1., 1.]), tensor([1., 1.]))
    """
    if isinstance(input_, tuple):
        first, second = input_
        return first, second
    if g is not None and g.is_block:
        if isinstance(input_, Mapping):
            return input_, {
                name: value[: g.num_dst_nodes(name)]
                for name, value in input_.items()
                if name in g.dsttypes
            }
        return input_, input_[: g.num_dst_nodes()]
    return input_, input_


def check_eq_shape(input_: Any) -> None:
    """Raise unless source and destination rows have one shape.

    Args:
        input_: A tensor, or a pair.

    Raises:
        ValueError: the shapes differ.
    """
    source, destination = expand_as_pair(input_)
    if source.shape[1:] != destination.shape[1:]:
        raise GraphValueError(
            f"rows of source and destination features must have one shape (got "
            f"{tuple(source.shape[1:])} and {tuple(destination.shape[1:])})"
        )


def is_sorted_srcdst(src: Tensor, dst: Tensor) -> tuple[bool, bool]:
    """Whether edges are sorted by source; and whether then also by destination within a source.

    Args:
        src: ``[num_edges]`` sources.
        dst: ``[num_edges]`` destinations.
    """
    by_source = bool((src[1:] >= src[:-1]).all())
    same = src[1:] == src[:-1]
    return by_source, by_source and bool((dst[1:] >= dst[:-1])[same].all())
