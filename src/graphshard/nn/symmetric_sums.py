# SPDX-License-Identifier: Apache-2.0
r"""Layers that sum rows of neighbours on a symmetric graph whose rows travel between hosts.

The gradient of a sum over the in-edges of each node is a sum over the out-edges of each node. Where
every edge has its reverse, both are the same sum: so what a forward pass can do, a backward pass
can, with the gradients of destinations for rows. It sends these in place of gradients of sources,
which are as many, but sums, and those are hardly ever zero. Gradients of a layer's result are: half
of them behind a ReLU, three quarters behind a dropout as well, and all those of nodes without a
label in the last layer; and zeros are not sent, see `graphshard.comm`.

.. math:: y = \sigma(D A E x W + x V + b) \qquad
          \partial x = (E A D \, \partial y) W^T + \partial y V^T

A is the adjacency matrix, E and D scale rows before and after the sum. A layer whose result is as
wide as its input sums before it multiplies, since inputs have zeros, too; in the backward it sums
before it multiplies again. Products of gradients that are here are found while others travel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .. import function as fn
from ..graph import MessagePassingGraph
from ..graph.message_passing import AggregationStep, Steps, SumOverEdges
from ..ops import is_plain, multiply, multiply_transposed


@dataclass(frozen=True)
class SymmetricSum:
    """What a layer does with its input, and how it sums gradients.

    Args:
        matrix: ``[in, out]``, of what is summed.
        own: ``[in, out]``, of the rows of the node itself; None for none.
        bias: ``[out]``.
        sums_first: Whether rows are summed before they are multiplied.
        summed: Sums rows over the edges of this rank's nodes; collective.
    """

    matrix: Tensor
    own: Tensor | None
    bias: Tensor | None
    sums_first: bool
    summed: SumOverEdges

    @classmethod
    def of(
        cls,
        graph: MessagePassingGraph,
        x: Any,
        matrix: Tensor | nn.Linear,
        own: nn.Linear | None = None,
        bias: Tensor | None = None,
    ) -> SymmetricSum | None:
        """None where gradients of sources travel: the graph sends these, or they are fewer bytes.

        Collective the first time for a graph.

        Args:
            x: Input of the layer.
            matrix: As a layer without bias, or ``[in, out]``.
        """
        if type(x) is not Tensor or x.dim() != 2 or not x.is_floating_point():
            return None
        if torch.is_autocast_enabled(x.device.type):
            return None
        if isinstance(matrix, nn.Module):
            if not is_plain(matrix, nn.Linear) or matrix.bias is not None:
                return None
            matrix = matrix.weight.t()
        of_own = None
        if own is not None:
            if not is_plain(own, nn.Linear) or (bias is not None and own.bias is not None):
                return None
            of_own, bias = own.weight.t(), own.bias if bias is None else bias
        others = [t for t in (matrix, of_own, bias) if t is not None]
        if any(t.dtype != x.dtype or t.device != x.device for t in others):
            return None
        fits = all(t.shape == (x.shape[1], matrix.shape[1]) for t in others if t.dim() == 2)
        if not fits or matrix.shape[1] > x.shape[1]:
            return None
        is_wanted = x.requires_grad and torch.is_grad_enabled()
        summed = graph.sums_of_gradients(x.detach()[:, : matrix.shape[1]], is_wanted=is_wanted)
        if summed is None:
            return None
        return cls(matrix, of_own, bias, matrix.shape[1] == x.shape[1], summed)

    def steps(
        self,
        graph: MessagePassingGraph,
        x: Tensor,
        before: Tensor | None,
        after: Tensor | None,
        reduce: Literal["sum", "mean"],
        relu: bool,
    ) -> Steps[Tensor]:
        """The result of the layer.

        Args:
            x: ``[num_nodes, in]``.
            before: ``[num_nodes, 1]``, by which rows are multiplied before they are summed.
            after: ``[num_nodes, 1]``, by which sums are multiplied; of a mean what it is of a sum.
            relu: Whether the result is one of a ReLU.
        """
        matrix, rows = self.matrix.detach(), x.detach()
        own = None if self.own is None else self.own.detach()
        partial = _Later(lambda: None if own is None else multiply([(rows, own)], self.bias))
        sent = rows if self.sums_first else multiply([(rows, matrix)])
        with graph.local_scope():
            graph.srcdata["h"] = _scaled(sent, before)
            reduction = getattr(fn, reduce)("m", "sum")
            yield AggregationStep(graph, fn.copy_u("h", "m"), reduction, partial.find)
            total = graph.dstdata["sum"]
        if after is not None and reduce == "sum":
            total = _scaled(total, after)
        first = partial.find()
        if self.sums_first:
            bias = None if self.bias is None else self.bias.detach()
            result = multiply([(total, matrix)], bias if first is None else first, relu, first)
        else:
            addend = self.bias if first is None else first
            result = total if addend is None else total + addend.detach()
            result = result.relu() if relu else result
        keeps = total if self.sums_first else None
        scales = before, after
        flat = x, self.matrix, self.own, self.bias
        found: Tensor = _Result.apply(self.summed, scales, relu, [keeps, result], *flat)
        return found


class _Later:
    """A result that is found once, when it is first asked for."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self._compute, self._is_found = compute, False
        self._result: Any = None

    def find(self) -> Any:
        if not self._is_found:
            self._result, self._is_found = self._compute(), True
        return self._result


class _Result(torch.autograd.Function):
    """Ties the result of a layer, already computed, to what it was computed from."""

    @staticmethod
    def forward(
        ctx: Any,
        summed: SumOverEdges,
        scales: tuple[Tensor | None, Tensor | None],
        relu: bool,
        computed: list[Tensor | None],
        x: Tensor,
        matrix: Tensor,
        own: Tensor | None,
        bias: Tensor | None,
    ) -> Tensor:
        total, result = computed
        assert result is not None
        result = result.detach()  # a view could not be changed in place
        ctx.save_for_backward(x, matrix, own, bias, total, result if relu else None, *scales)
        ctx.summed = summed
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, matrix, own, bias, total, result, before, after = ctx.saved_tensors
        wanted = ctx.needs_input_grad[4:]
        if torch.is_grad_enabled():
            inputs = [x, matrix, own, bias]
            again = _again(ctx.summed, before, after, *inputs)
            again = again if result is None else again * (result > 0)
            targets = [t for t, want in zip(inputs, wanted, strict=True) if want]
            found = iter(torch.autograd.grad(again, targets, grad, create_graph=True))
            return (*[None] * 4, *[next(found) if want else None for want in wanted])
        if result is not None:
            grad = torch.ops.aten.threshold_backward(grad, result, 0)
        of_x, of_matrix, of_own, of_bias = wanted

        def others() -> list[Tensor | None]:
            """Gradients for which no row has to arrive."""
            return [
                multiply([(grad, own.t())]) if of_x and own is not None else None,
                multiply_transposed(total, grad) if of_matrix and total is not None else None,
                multiply_transposed(x, grad) if of_own else None,
                grad.sum(0) if of_bias else None,
            ]

        meanwhile = _Later(others)
        back = _scaled(ctx.summed(_scaled(grad, after), meanwhile.find), before)
        x_grad, matrix_grad, own_grad, bias_grad = meanwhile.find()
        if of_x:
            x_grad = multiply([(back, matrix.t())], x_grad, out=x_grad)
        if of_matrix and total is None:
            matrix_grad = multiply_transposed(x, back)
        return (*[None] * 4, x_grad, matrix_grad, own_grad, bias_grad)


def _scaled(rows: Tensor, scale: Tensor | None) -> Tensor:
    """Rows times numbers, of which some may be wider; in the dtype of the rows."""
    return rows if scale is None else (rows * scale).to(rows.dtype)


def _again(
    summed: SumOverEdges,
    before: Tensor | None,
    after: Tensor | None,
    x: Tensor,
    matrix: Tensor,
    own: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """The result without its ReLU, so that autograd can differentiate it twice."""
    result = _scaled(summed(_scaled(x, before), lambda: None), after) @ matrix
    result = result if own is None else result + x @ own
    return result if bias is None else result + bias
