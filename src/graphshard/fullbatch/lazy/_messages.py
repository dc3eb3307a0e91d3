# SPDX-License-Identifier: Apache-2.0
"""What one shard's edges contribute: the message of each edge, and its reduction by destination.

A message never has to exist as a tensor with a row per edge: copies and products of a source row
and an edge value go straight into the SpMM kernel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...ops import Adjacency, gsddmm, gspmm, gspmm_add, gspmm_arg, gspmm_arg_backward
from ._expressions import Expression, Leaf, LeafKey, ShardEvaluation, distinct, leaves_of


@dataclass(frozen=True)
class Adjoint:
    """How the gradients of one sum are found: what to differentiate, and what is known already.

    Args:
        output: Made with gradients enabled.
        cotangent: What to start the backward at ``output`` with.
        known: Gradients of leaves that came along; those from ``output`` are added to them.
    """

    output: Tensor
    cotangent: Tensor
    known: Mapping[LeafKey, Tensor] = field(default_factory=dict)


class Message(ABC):
    """The messages of one relation. All methods see one shard at a time."""

    #: Whether evaluating again needs the random state of the first time.
    is_random = False

    def parameters(self) -> list[Tensor]:
        """Leaf tensors that the messages use without being told, known after an evaluation."""
        return []

    @abstractmethod
    def leaves(self) -> list[Leaf]:
        """The distinct tensors that the messages are made from."""

    @abstractmethod
    def rows(self, evaluation: ShardEvaluation) -> Tensor:
        """Message of each edge of the shard: ``[num_shard_edges, ...]``."""

    @property
    def is_linear(self) -> bool:
        """Whether gradients of the sum are those of one source leaf, and need not read it."""
        return False

    def source_gradient(self, evaluation: ShardEvaluation, grad: Tensor) -> Tensor:
        """Gradient of that leaf's rows, given the gradient of the sum; if `is_linear`."""
        raise AssertionError(f"{type(self).__name__} has no direct source gradient")

    def released(self) -> Message:
        """The same message without the values of that leaf; if `is_linear`."""
        raise AssertionError(f"{type(self).__name__} needs its sources")

    def reduce_sum(
        self, evaluation: ShardEvaluation, over: Adjacency | None = None, mean: bool = False
    ) -> Tensor:
        """Sum of the shard's messages at each destination: ``[num_dst, ...]``.

        Args:
            evaluation: The shard.
            over: The shard's edges into some destinations alone; all of them by default.
            mean: Divide by the number of the shard's messages.
        """
        adjacency = evaluation.shard.adjacency if over is None else over
        return gspmm(adjacency, *self._operator(evaluation, "mean" if mean else "sum"))

    def _operator(
        self, evaluation: ShardEvaluation, reduce: str
    ) -> tuple[str, str, Tensor | None, Tensor | None]:
        return "copy_rhs", reduce, None, self.rows(evaluation)

    def add_sum(self, evaluation: ShardEvaluation, total: Tensor) -> bool:
        """Add `reduce_sum` to ``total`` in place, if a kernel can; returns whether it did."""
        op, _, lhs, rhs = self._operator(evaluation, "sum")
        given = [t for t in (lhs, rhs) if t is not None]
        if not total.is_contiguous() or any(t.dtype != total.dtype for t in given):
            return False
        gspmm_add(total, evaluation.shard.adjacency, op, lhs, rhs)
        return True

    def sum_adjoint(self, evaluation: ShardEvaluation, grad: Tensor) -> Adjoint:
        """How to find the gradients of `reduce_sum`, given that of its result."""
        return Adjoint(self.reduce_sum(evaluation), grad)

    def reduce_arg(self, evaluation: ShardEvaluation, reduce: str) -> tuple[Tensor, Tensor]:
        """Extremum at each destination, and the position of the edge that won, -1 for none."""
        adjacency = evaluation.shard.adjacency
        return gspmm_arg(adjacency, "copy_rhs", reduce, None, self.rows(evaluation))

    def best_adjoint(self, evaluation: ShardEvaluation, grad: Tensor, arg: Tensor) -> Adjoint:
        """How to find the gradients of an extremum over several shards.

        Args:
            evaluation: The shard.
            grad: ``[num_dst, ...]`` gradient of the extremum.
            arg: As ``grad``: the shard's edge that won, -1 where none of it did.
        """
        rows, adjacency = self.rows(evaluation), evaluation.shard.adjacency
        _, cotangent = gspmm_arg_backward(adjacency, "copy_rhs", grad, arg, None, rows.detach())
        assert cotangent is not None
        return Adjoint(rows, cotangent)

    def best_gradient(self, evaluation: ShardEvaluation, grad: Tensor, arg: Tensor) -> Tensor:
        """Likewise for messages that `is_linear` in one source leaf: its gradient."""
        raise AssertionError(f"{type(self).__name__} has no direct source gradient")


class CopySource(Message):
    """Each edge carries its source's row."""

    def __init__(self, source: Tensor | Leaf) -> None:
        self.source = source if isinstance(source, Leaf) else Leaf("u", source)

    def leaves(self) -> list[Leaf]:
        return [self.source]

    def rows(self, evaluation: ShardEvaluation) -> Tensor:
        rows = evaluation.leaf(self.source)
        return gsddmm(evaluation.shard.adjacency, "copy_lhs", rows, None, "u")

    @property
    def is_linear(self) -> bool:
        return True

    def released(self) -> Message:
        return CopySource(self.source.released())

    def source_gradient(self, evaluation: ShardEvaluation, grad: Tensor) -> Tensor:
        return gspmm(evaluation.shard.adjacency.reverse(), "copy_lhs", "sum", grad, None)

    def _operator(
        self, evaluation: ShardEvaluation, reduce: str
    ) -> tuple[str, str, Tensor | None, Tensor | None]:
        return "copy_lhs", reduce, evaluation.leaf(self.source), None

    def reduce_arg(self, evaluation: ShardEvaluation, reduce: str) -> tuple[Tensor, Tensor]:
        rows = evaluation.leaf(self.source)
        return gspmm_arg(evaluation.shard.adjacency, "copy_lhs", reduce, rows, None)

    def best_gradient(self, evaluation: ShardEvaluation, grad: Tensor, arg: Tensor) -> Tensor:
        adjacency = evaluation.shard.adjacency
        # Not the rows themselves, which may not be here: only how many there are.
        rows = grad.new_zeros(()).expand(adjacency.num_src, *grad.shape[1:])
        found, _ = gspmm_arg_backward(adjacency, "copy_lhs", grad, arg, rows)
        assert found is not None
        return found


class Weighted(Message):
    """Each edge carries ``source row <op> edge value``."""

    def __init__(self, op: str, source: Tensor | Leaf, value: Expression) -> None:
        self.op, self.value = op, value
        self.source = source if isinstance(source, Leaf) else Leaf("u", source)

    def leaves(self) -> list[Leaf]:
        return distinct([self.source, *self.value_leaves()])

    def value_leaves(self) -> list[Leaf]:
        """What the edge values are made from."""
        return leaves_of([self.value])

    def _operands(self, evaluation: ShardEvaluation) -> tuple[Tensor, Tensor]:
        return evaluation.leaf(self.source), self.value.evaluate(evaluation)

    def rows(self, evaluation: ShardEvaluation) -> Tensor:
        left, right = self._operands(evaluation)
        return gsddmm(evaluation.shard.adjacency, self.op, left, right, "u", "e")

    @property
    def is_linear(self) -> bool:
        """Whether the weights are fixed numbers that are here."""
        leaves = self.value_leaves()
        fixed = all(leaf.target != "u" and not leaf.tensor.requires_grad for leaf in leaves)
        return self.op == "mul" and fixed

    def released(self) -> Message:
        return Weighted(self.op, self.source.released(), self.value)

    def source_gradient(self, evaluation: ShardEvaluation, grad: Tensor) -> Tensor:
        value = self.value.evaluate(evaluation)
        return self._onto_sources(evaluation, grad, value, evaluation.leaf(self.source))

    def _onto_sources(
        self, evaluation: ShardEvaluation, grad: Tensor, value: Tensor, rows: Tensor
    ) -> Tensor:
        """``sum_e w_e g_v`` for each source, summed over what its row is repeated along."""
        reverse = evaluation.shard.adjacency.reverse()
        output = gspmm(reverse, "mul", "sum", grad.contiguous(), value)
        return output.sum_to_size(output.shape[0], *_padded(rows.shape[1:], output)).reshape(
            output.shape[0], *rows.shape[1:]
        )

    def _operator(
        self, evaluation: ShardEvaluation, reduce: str
    ) -> tuple[str, str, Tensor | None, Tensor | None]:
        return self.op, reduce, *self._operands(evaluation)

    def reduce_arg(self, evaluation: ShardEvaluation, reduce: str) -> tuple[Tensor, Tensor]:
        return gspmm_arg(evaluation.shard.adjacency, self.op, reduce, *self._operands(evaluation))

    def best_adjoint(self, evaluation: ShardEvaluation, grad: Tensor, arg: Tensor) -> Adjoint:
        rows, value = self._operands(evaluation)
        by_rows, by_value = gspmm_arg_backward(
            evaluation.shard.adjacency,
            self.op,
            grad,
            arg,
            rows.detach(),
            value.detach(),
            (True, value.requires_grad),
        )
        assert by_rows is not None
        cotangent = torch.zeros_like(value) if by_value is None else by_value
        return Adjoint(value, cotangent, {self.source.key: by_rows})

    def sum_adjoint(self, evaluation: ShardEvaluation, grad: Tensor) -> Adjoint:
        """For a product, without computing the sum again.

        ``sum_v g_v . sum_e w_e x_u`` is also ``sum_u x_u . y_u`` with ``y_u = sum_e w_e g_v``, a
        sum over the edges reversed. So ``y`` is the gradient of the source rows ``x``, and those
        of the weights are found by differentiating ``y`` with ``x`` as cotangent.
        """
        if self.op != "mul":
            return super().sum_adjoint(evaluation, grad)
        rows, value = self._operands(evaluation)
        output = self._onto_sources(evaluation, grad, value, rows)
        return Adjoint(output, rows.detach(), {self.source.key: output.detach()})


class PerEdge(Message):
    """Each edge carries the value of an expression."""

    def __init__(self, value: Expression) -> None:
        self.value = value

    def leaves(self) -> list[Leaf]:
        return leaves_of([self.value])

    def rows(self, evaluation: ShardEvaluation) -> Tensor:
        return self.value.evaluate(evaluation)


def _padded(row: torch.Size, like: Tensor) -> list[int]:
    """A row's shape with extents of 1 in front, to have as many as ``like``'s rows."""
    return [1] * (like.dim() - 1 - len(row)) + list(row)
