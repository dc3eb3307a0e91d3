# SPDX-License-Identifier: Apache-2.0
"""What one shard's edges contribute: the message of each edge, and its reduction by destination.

A message never has to exist as a tensor with a row per edge: copies and products of a source row
and an edge value go straight into the SpMM kernel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..ops import gsddmm, gspmm, gspmm_add, gspmm_arg
from ._expressions import Evaluation, Expression, Leaf, LeafKey, leaves_of


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
    def rows(self, evaluation: Evaluation) -> Tensor:
        """Message of each edge of the shard: ``[num_shard_edges, ...]``."""

    def reduce_sum(self, evaluation: Evaluation) -> Tensor:
        """Sum of the shard's messages at each destination: ``[num_dst, ...]``."""
        return gspmm(evaluation.shard.adjacency, "copy_rhs", "sum", None, self.rows(evaluation))

    def add_sum(self, evaluation: Evaluation, total: Tensor) -> None:
        """Add `reduce_sum` to ``total``, in place; no gradient."""
        total.add_(self.reduce_sum(evaluation))

    def sum_adjoint(self, evaluation: Evaluation, grad: Tensor) -> Adjoint:
        """How to find the gradients of `reduce_sum`, given that of its result."""
        return Adjoint(self.reduce_sum(evaluation), grad)

    def reduce_arg(self, evaluation: Evaluation, reduce: str) -> tuple[Tensor, Tensor]:
        """Extremum at each destination, and the position of the edge that won, -1 for none."""
        adjacency = evaluation.shard.adjacency
        return gspmm_arg(adjacency, "copy_rhs", reduce, None, self.rows(evaluation))

    def winners(self, evaluation: Evaluation, position: Tensor) -> Tensor:
        """Entries of `rows` at an edge position per destination and column; differentiable."""
        rows = self.rows(evaluation)
        return rows.expand(rows.shape[0], *position.shape[1:]).gather(0, position)


class CopySource(Message):
    """Each edge carries its source's row."""

    def __init__(self, tensor: Tensor) -> None:
        self.source = Leaf("u", tensor)

    def leaves(self) -> list[Leaf]:
        return [self.source]

    def rows(self, evaluation: Evaluation) -> Tensor:
        src, _ = evaluation.shard.adjacency.coo()
        return evaluation.leaf(self.source).index_select(0, src)

    def reduce_sum(self, evaluation: Evaluation) -> Tensor:
        rows = evaluation.leaf(self.source)
        return gspmm(evaluation.shard.adjacency, "copy_lhs", "sum", rows, None)

    def add_sum(self, evaluation: Evaluation, total: Tensor) -> None:
        rows = evaluation.leaf(self.source)
        if rows.dtype != total.dtype:
            super().add_sum(evaluation, total)
        else:
            gspmm_add(total, evaluation.shard.adjacency, "copy_lhs", rows, None)

    def reduce_arg(self, evaluation: Evaluation, reduce: str) -> tuple[Tensor, Tensor]:
        rows = evaluation.leaf(self.source)
        return gspmm_arg(evaluation.shard.adjacency, "copy_lhs", reduce, rows, None)


class Weighted(Message):
    """Each edge carries ``source row <op> edge value``."""

    def __init__(self, op: str, tensor: Tensor, value: Expression) -> None:
        self.op, self.source, self.value = op, Leaf("u", tensor), value

    def leaves(self) -> list[Leaf]:
        found = {leaf.key: leaf for leaf in [self.source, *leaves_of([self.value])]}
        return list(found.values())

    def _operands(self, evaluation: Evaluation) -> tuple[Tensor, Tensor]:
        return evaluation.leaf(self.source), self.value.evaluate(evaluation)

    def rows(self, evaluation: Evaluation) -> Tensor:
        left, right = self._operands(evaluation)
        return gsddmm(evaluation.shard.adjacency, self.op, left, right, "u", "e")

    def reduce_sum(self, evaluation: Evaluation) -> Tensor:
        return gspmm(evaluation.shard.adjacency, self.op, "sum", *self._operands(evaluation))

    def add_sum(self, evaluation: Evaluation, total: Tensor) -> None:
        operands = self._operands(evaluation)
        if any(t.dtype != total.dtype for t in operands):
            super().add_sum(evaluation, total)
        else:
            gspmm_add(total, evaluation.shard.adjacency, self.op, *operands)

    def reduce_arg(self, evaluation: Evaluation, reduce: str) -> tuple[Tensor, Tensor]:
        return gspmm_arg(evaluation.shard.adjacency, self.op, reduce, *self._operands(evaluation))

    def sum_adjoint(self, evaluation: Evaluation, grad: Tensor) -> Adjoint:
        """For a product, without computing the sum again.

        ``sum_v g_v . sum_e w_e x_u`` is also ``sum_u x_u . y_u`` with ``y_u = sum_e w_e g_v``, a
        sum over the edges reversed. So ``y`` is the gradient of the source rows ``x``, and those
        of the weights are found by differentiating ``y`` with ``x`` as cotangent.
        """
        rows, value = self._operands(evaluation)
        if self.op != "mul" or rows.shape[1:] != grad.shape[1:]:
            return super().sum_adjoint(evaluation, grad)
        reverse = evaluation.shard.adjacency.reverse()
        output = gspmm(reverse, "mul", "sum", grad.contiguous(), value)
        return Adjoint(output, rows.detach(), {self.source.key: output.detach()})


class PerEdge(Message):
    """Each edge carries the value of an expression."""

    def __init__(self, value: Expression) -> None:
        self.value = value

    def leaves(self) -> list[Leaf]:
        return leaves_of([self.value])

    def rows(self, evaluation: Evaluation) -> Tensor:
        return self.value.evaluate(evaluation)


def distinct_leaves(messages: Sequence[Message]) -> list[Leaf]:
    """Leaves of several messages, each once, in a fixed order."""
    found: dict[tuple[str, int], Leaf] = {}
    for message in messages:
        for leaf in message.leaves():
            found.setdefault(leaf.key, leaf)
    return list(found.values())
