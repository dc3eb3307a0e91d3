# SPDX-License-Identifier: Apache-2.0
"""Results of a call put together, and the gradients of the parameters that the call used."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from ...comm import gather_grads
from ...comm.group import GroupState
from .._whole_graph import SplitRows
from ._split_graph import joined


class JoinedRows(torch.autograd.Function):
    """All rows, of which each rank has some.

    The gradient of the rows is multiplied by the number of ranks on its way into the call, because
    the gradients of parameters are averaged after it: then what the ranks computed in the call is
    summed, and what all of them computed alike outside of it counts once.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, rows: SplitRows, gradients: SharedGradients) -> Tensor:
        ctx.rows, ctx.gradients = rows, gradients
        return joined(own, rows, gradients.state)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.gradients.average_after_backward()
        own = ctx.rows.own.to(grad.device)
        return grad[own] * ctx.gradients.state.world_size, None, None


class SharedGradients:
    """Averages the gradients of a model's parameters over the ranks when a backward is done.

    Args:
        model: The model.
        state: The ranks.
    """

    def __init__(self, model: nn.Module, state: GroupState) -> None:
        self._model, self.state, self._waits = weakref.ref(model), state, False

    def of(self, model: nn.Module) -> bool:
        """Whether it is this model's, and not that of a model it was copied from."""
        return self._model() is model

    @property
    def model(self) -> nn.Module:
        """The model."""
        model = self._model()
        assert model is not None
        return model

    @property
    def is_lazy(self) -> bool:
        """Whether a parameter has no shape yet."""
        return any(nn.parameter.is_lazy(p) for p in self.model.parameters())

    def average_after_backward(self) -> None:
        """Average at the end of the backward that is running, once."""
        if self.state.world_size > 1 and not self._waits:
            self._waits = True
            torch.autograd.Variable._execution_engine.queue_callback(self._average)

    def _average(self) -> None:
        self._waits = False
        model = self._model()
        if model is None:
            return
        gather_grads(model, self.state.group)
        for parameter in model.parameters():
            if parameter.grad is not None and parameter.requires_grad:
                parameter.grad.div_(self.state.world_size)
