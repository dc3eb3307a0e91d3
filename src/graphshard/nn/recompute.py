# SPDX-License-Identifier: Apache-2.0
"""Projections: projected rows that are computed again in the backward, instead of kept.

Sequential aggregation rematerializes: it fetches remote rows twice and keeps none. What attention
reads of own rows, ``x W``, is as large as the input, which is kept anyway for the gradient of
``W``; so it is freed, too, for a matrix product in the backward. As in SAR,
https://arxiv.org/abs/2111.06483.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..graph import MessagePassingGraph
from ..graph.frame import version_of
from ..ops import affine, is_plain, linear


class _Projection:
    """``layer(x)``, computed again on demand; the same bits, for nothing in it is random."""

    def __init__(self, x: Tensor, layer: nn.Linear, like: Tensor) -> None:
        # Not the layer, whose weights may be others by then (``torch.func.functional_call``).
        self._weight, self._bias = layer.weight, layer.bias
        self._x = x.detach()
        self._tensors = [x, layer.weight, *([] if layer.bias is None else [layer.bias])]
        self._versions = [version_of(t) for t in self._tensors]
        kind = x.device.type
        self._autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        self._storage, self._numel = like.untyped_storage().data_ptr(), like.numel()
        self.users = 0  # saved by so many operations, each of which asks for it once
        self._rows: Tensor | None = None

    def stands_for(self, tensor: Tensor) -> bool:
        is_same = tensor.untyped_storage().data_ptr() == self._storage
        return is_same and tensor.numel() == self._numel and tensor.is_contiguous()

    def rows(self) -> Tensor:
        """The rows, kept until the last operation that saved them has asked."""
        if [version_of(t) for t in self._tensors] != self._versions:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation: the input or the weight of a layer that is computed again in "
                "the backward; change it after the backward, or construct the graph with "
                "rematerialize=False"
            )
        kind, dtype, enabled = self._autocast
        rows = self._rows
        if rows is None:
            with torch.no_grad(), torch.autocast(kind, dtype, enabled):
                rows = affine([(self._x, self._weight.t())], self._bias)
        self.users -= 1
        self._rows = rows if self.users > 0 else None
        return rows


class Projections:
    """The projected rows of one call of a layer on a graph."""

    def __init__(self, graph: MessagePassingGraph) -> None:
        self._are_recomputed = graph.rematerializes and torch.is_grad_enabled()
        self._projections: list[_Projection] = []

    def project(self, x: Tensor, layer: nn.Linear, heads: tuple[int, ...]) -> Tensor:
        """``layer(x)``, its columns split up: ``[num_nodes, ..., *heads]``.

        Args:
            x: ``[num_nodes, ..., in]``, dropped out already.
            heads: Extents whose product is the width of the layer.
        """
        rows = linear(x, layer)
        if self._are_recomputed and is_plain(layer, nn.Linear) and rows.requires_grad:
            self._projections.append(_Projection(x, layer, rows))
        return rows.unflatten(-1, heads)

    @contextmanager
    def recomputed(self) -> Iterator[None]:
        """Operations inside do not keep the rows for the backward, if the graph rematerializes."""
        if not self._projections:
            yield
            return
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            yield

    def _pack(self, tensor: Tensor) -> Tensor | tuple[_Projection, torch.Size]:
        for projection in self._projections:
            if projection.stands_for(tensor):
                projection.users += 1
                return projection, tensor.shape
        return tensor


def _unpack(saved: Tensor | tuple[_Projection, torch.Size]) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved[0].rows().view(saved[1])
