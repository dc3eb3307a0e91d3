# SPDX-License-Identifier: Apache-2.0
"""What attention layers have in common on the way to the kernel that does it in one go."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from ..ops import EdgeMask, is_plain, random_seed


def attention_mask(dropout: nn.Module) -> EdgeMask | None:
    """The mask that a dropout module would draw now; None where it would drop nothing.

    Raises:
        Unfused: The module is not plain dropout.
    """
    if is_plain(dropout, nn.Identity):
        return None
    if not isinstance(dropout, nn.Dropout) or not is_plain(dropout, nn.Dropout):
        raise Unfused
    if not dropout.training or dropout.p == 0.0:
        return None
    return EdgeMask(dropout.p, random_seed())


def slope_of(activation: nn.Module) -> float:
    """The slope below zero of a leaky ReLU.

    Raises:
        Unfused: It is another activation.
    """
    if not isinstance(activation, nn.LeakyReLU) or not is_plain(activation, nn.LeakyReLU):
        raise Unfused
    return activation.negative_slope


def vector_of(parameter: Tensor, row: tuple[int, ...]) -> Tensor:
    """A parameter ``[1, num_heads, dim]`` for heads flattened with what stands before them.

    Args:
        parameter: One vector per head.
        row: Dimensions between nodes and the columns of a head, the heads last.

    Returns:
        ``[prod(row), dim]``.
    """
    dim = parameter.shape[-1]
    return parameter[0].expand(*row, dim).reshape(-1, dim)


def attention_factor(edge_weight: Any, row: tuple[int, ...]) -> Tensor | None:
    """Edge weights that multiply attention, as ``[num_edges, 1]`` or ``[num_edges, heads]``.

    Args:
        edge_weight: As broadcast against ``[num_edges, *row, 1]``, or None.
        row: Dimensions between nodes and the columns of a head; flattened they are the heads.

    Raises:
        Unfused: It is no tensor, or varies over columns.
    """
    if edge_weight is None:
        return None
    if not isinstance(edge_weight, Tensor) or not edge_weight.is_floating_point():
        raise Unfused
    if math.prod(edge_weight.shape[1:]) == 1:
        return edge_weight.reshape(-1, 1)
    if edge_weight.dim() != len(row) + 2 or edge_weight.shape[-1] != 1:
        raise Unfused
    expanded = edge_weight.expand(-1, *row, 1)
    return expanded.reshape(edge_weight.shape[0], math.prod(row))


class Unfused(Exception):
    """A layer has to go by edges: something in it has no place in the kernel."""
