# SPDX-License-Identifier: Apache-2.0
"""Per-edge values as expressions, evaluated one shard at a time.

On a graph whose sources arrive shard by shard, a tensor with a row per edge cannot exist at once.
An `Expression` says how its rows are computed; it is evaluated on the edges of one shard, and the
rows are dropped after use. Evaluating twice gives the same numbers: dropout keeps its seed. The
user-facing object is `DeferredEdges`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..._base.typing import Target
from ...ops import gsddmm
from ..topology import WHOLE, ColumnBlock, Shard

LeafKey: TypeAlias = tuple[str, int]


@dataclass(frozen=True, eq=False)
class Leaf:
    """A tensor that an evaluation starts from.

    Args:
        target: 'u' rows of the source frame, 'v' rows of the destination frame, 'e' one row per
            local edge, 'c' the same value for every edge.
        tensor: The whole tensor as this rank holds it.
        identity: The ``id`` of the tensor before its values were freed; None: it has them.
    """

    target: str
    tensor: Tensor
    identity: int | None = None

    @property
    def key(self) -> LeafKey:
        """What tells leaves apart: the same tensor may be read at several ends of an edge."""
        return self.target, id(self.tensor) if self.identity is None else self.identity

    def released(self) -> Leaf:
        """The same leaf without its values: shape, dtype and device alone."""
        empty = self.tensor.detach().new_zeros(()).expand(self.tensor.shape)
        return Leaf(self.target, empty, self.key[1])


Substitution: TypeAlias = Mapping[LeafKey, Tensor]
"""Leaf key to the rows of that leaf that one shard sees."""


@dataclass
class ShardEvaluation:
    """One evaluation on one shard: what stands for the leaves, and what is computed already.

    Args:
        shard: The edges.
        values: What they see of each leaf, cut to the block where the leaf is cut.
        block: The columns to compute. See [Note: column blocks].
    """

    shard: Shard
    values: Substitution
    block: ColumnBlock = WHOLE
    memo: dict[Any, Any] = field(default_factory=dict)

    def leaf(self, leaf: Leaf) -> Tensor:
        return self.values[leaf.key]


NUM_SAMPLE_ROWS = 2


class Expression:
    """Base: ``shape`` is that of the whole local tensor, ``[num_edges, ...]``.

    [Note: sample rows] What a function does to a row's shape and dtype is found by calling it on
    two rows of zeros. Meta tensors would answer too, but the first use of one imports torch's
    reference operators and sympy: a second, and 70 MB for the rest of the run.
    """

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def children(self) -> Sequence[Expression]:
        return ()

    def leaves(self) -> Sequence[Leaf]:
        """Leaves that this node itself reads."""
        return ()

    def compute(self, evaluation: ShardEvaluation) -> Tensor:
        raise NotImplementedError

    def evaluate(self, evaluation: ShardEvaluation) -> Tensor:
        """Rows of this expression on the shard's edges: ``[num_shard_edges, ...]``."""
        key = id(self)
        if key not in evaluation.memo:
            evaluation.memo[key] = self.compute(evaluation)
        return evaluation.memo[key]

    def sample(self) -> Tensor:
        """Two rows like this expression's. See [Note: sample rows]."""
        shape = (NUM_SAMPLE_ROWS, *self.shape[1:])
        return torch.zeros(shape, dtype=self.dtype, device=self.device)

    def like(self, other: Expression) -> None:
        """Take over shape, dtype and device."""
        self.shape, self.dtype, self.device = other.shape, other.dtype, other.device


def walk(root: Expression) -> Iterator[Expression]:
    """Every node below and including ``root``, each once, children first."""
    seen: set[int] = set()
    stack: list[tuple[Expression, bool]] = [(root, False)]
    while stack:
        node, ready = stack.pop()
        if ready:
            yield node
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            stack.extend((child, False) for child in node.children())


def leaves_of(roots: Sequence[Expression]) -> list[Leaf]:
    """The distinct leaves that ``roots`` read, in a fixed order."""
    return distinct([leaf for root in roots for node in walk(root) for leaf in node.leaves()])


def distinct(leaves: Sequence[Leaf]) -> list[Leaf]:
    """Each leaf once, in their order."""
    return list({leaf.key: leaf for leaf in leaves}.values())


class _OfOne(Expression):
    """An expression of one other."""

    def __init__(self, child: Expression) -> None:
        self.child = child
        self.like(child)

    def children(self) -> Sequence[Expression]:
        return (self.child,)

    def with_child(self, child: Expression) -> Expression:
        """The same of another expression."""
        new = copy.copy(self)
        new.child = child
        return new


class EdgeRows(Expression):
    """Rows of a tensor that has one row per local edge."""

    def __init__(self, tensor: Tensor) -> None:
        self.leaf = Leaf("e", tensor)
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device

    def leaves(self) -> Sequence[Leaf]:
        return (self.leaf,)

    def compute(self, evaluation: ShardEvaluation) -> Tensor:
        return evaluation.leaf(self.leaf)


class Endpoint(Expression):
    """The source ('u') or destination ('v') row of each edge."""

    def __init__(self, target: Target, tensor: Tensor, num_edges: int) -> None:
        self.leaf = Leaf(target, tensor)
        self.shape = torch.Size((num_edges, *tensor.shape[1:]))
        self.dtype, self.device = tensor.dtype, tensor.device

    def leaves(self) -> Sequence[Leaf]:
        return (self.leaf,)

    def compute(self, evaluation: ShardEvaluation) -> Tensor:
        rows, target = evaluation.leaf(self.leaf), self.leaf.target
        return gsddmm(evaluation.shard.adjacency, "copy_lhs", rows, None, target)


class Sddmm(Expression):
    """A built-in message of two operands, by kernel: no operand is gathered to the edges."""

    def __init__(self, op: str, lhs: Endpoint | Expression, rhs: Endpoint | Expression) -> None:
        self.op, self.lhs, self.rhs = op, lhs, rhs
        row = torch.broadcast_shapes(lhs.shape[1:], rhs.shape[1:])
        if op == "dot":
            row = torch.Size((*row[:-1], 1))
        self.shape = torch.Size((lhs.shape[0], *row))
        self.dtype, self.device = lhs.dtype, lhs.device

    def children(self) -> Sequence[Expression]:
        return [x for x in (self.lhs, self.rhs) if not isinstance(x, Endpoint)]

    def leaves(self) -> Sequence[Leaf]:
        return [x.leaf for x in (self.lhs, self.rhs) if isinstance(x, Endpoint)]

    def compute(self, evaluation: ShardEvaluation) -> Tensor:
        left, left_target = _operand(self.lhs, evaluation)
        right, right_target = _operand(self.rhs, evaluation)
        return gsddmm(evaluation.shard.adjacency, self.op, left, right, left_target, right_target)


def _operand(operand: Expression, evaluation: ShardEvaluation) -> tuple[Tensor, Target]:
    if isinstance(operand, Endpoint):
        return evaluation.leaf(operand.leaf), operand.leaf.target  # type: ignore[return-value]
    return operand.evaluate(evaluation), "e"


class Apply(Expression):
    """A torch function that works on each edge's row by itself. See `_row_wise`."""

    def __init__(
        self, function: Callable[..., Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self.function = function
        self.args, self.kwargs = tuple(args), dict(kwargs)
        first = next(a for a in self._operands() if isinstance(a, Expression))
        with torch.no_grad():
            result = function(
                *(_sample(a) for a in self.args), **{k: _sample(v) for k, v in self.kwargs.items()}
            )
        assert len(result) == NUM_SAMPLE_ROWS, getattr(function, "__name__", function)
        self.shape = torch.Size((first.shape[0], *result.shape[1:]))
        self.dtype, self.device = result.dtype, result.device

    def _operands(self) -> list[Any]:
        return [*self.args, *self.kwargs.values()]

    def children(self) -> Sequence[Expression]:
        return [a for a in self._operands() if isinstance(a, Expression)]

    def leaves(self) -> Sequence[Leaf]:
        return [a for a in self._operands() if isinstance(a, Leaf)]

    def compute(self, evaluation: ShardEvaluation) -> Tensor:
        return self.function(
            *(_value(a, evaluation) for a in self.args),
            **{k: _value(v, evaluation) for k, v in self.kwargs.items()},
        )


def _sample(operand: Any) -> Any:
    if isinstance(operand, Expression):
        return operand.sample()
    return operand.tensor if isinstance(operand, Leaf) else operand


def _value(operand: Any, evaluation: ShardEvaluation) -> Any:
    if isinstance(operand, Expression):
        return operand.evaluate(evaluation)
    return evaluation.leaf(operand) if isinstance(operand, Leaf) else operand


class Reshape(_OfOne):
    """Another shape for each edge's row; the row count stays."""

    def __init__(self, child: Expression, shape: torch.Size) -> None:
        super().__init__(child)
        self.shape = shape

    def compute(self, evaluation: ShardEvaluation) -> Tensor:
        rows = self.child.evaluate(evaluation)
        return rows.reshape(rows.shape[0], *self.shape[1:])


class Dropout(_OfOne):
    """Dropout with a seed of its own, so that evaluating again drops the same entries."""

    def __init__(self, child: Expression, p: float) -> None:
        super().__init__(child)
        self.p, self.seed = p, int(torch.randint(2**31, ()))

    def compute(self, evaluation: ShardEvaluation) -> Tensor:
        rows = self.child.evaluate(evaluation)
        if self.p >= 1.0:
            return rows * 0.0
        generator = torch.Generator(device=rows.device)
        generator.manual_seed(self.seed * 65_537 + evaluation.shard.step)
        kept = torch.rand(rows.shape, generator=generator, device=rows.device) >= self.p
        return rows * kept.to(rows.dtype) / (1.0 - self.p)


class LazySoftmax(_OfOne):
    """Softmax of ``child``, the scores, over the in-edges of each destination.

    It has no value before the scores of all shards are known: `_reductions` either carries it
    along as an online softmax, or computes ``peak`` and ``total`` first and calls `resolve`.
    """

    def compute(self, evaluation: ShardEvaluation) -> Tensor:
        raise AssertionError("a softmax over shards was evaluated before it was resolved")

    def resolve(self, peak: Tensor, total: Tensor) -> Expression:
        """The same weights as plain per-edge arithmetic, given each destination's statistics."""
        num_edges = self.shape[0]
        shifted = Apply(torch.sub, (self.child, Endpoint("v", peak, num_edges)), {})
        return Apply(
            torch.div,
            (Apply(torch.exp, (shifted,), {}), Endpoint("v", total, num_edges)),
            {},
        )


class ShiftedSoftmax(_OfOne):
    """exp(score - peak of its destination): a softmax before it is divided by its total.

    Attributes:
        peak: ``[num_dst, ...]``, for the whole of the scores; set before the first evaluation.
    """

    def __init__(self, softmax: LazySoftmax) -> None:
        super().__init__(softmax.child)
        self.peak: Tensor | None = None

    def compute(self, evaluation: ShardEvaluation) -> Tensor:
        assert self.peak is not None
        scores = self.child.evaluate(evaluation)
        return gsddmm(evaluation.shard.adjacency, "sub", scores, self.peak, "e", "v").exp()


def substitute(root: Expression, replacements: Mapping[int, Expression]) -> Expression:
    """``root`` with some nodes, given by ``id``, replaced; shared nodes stay shared."""
    done: dict[int, Expression] = dict(replacements)
    for node in walk(root):
        if id(node) in done:
            continue
        if not any(done.get(id(c), c) is not c for c in node.children()):
            done[id(node)] = node
            continue
        done[id(node)] = _rebuild(node, done)
    return done[id(root)]


def _rebuild(node: Expression, done: Mapping[int, Expression]) -> Expression:
    if isinstance(node, Apply):
        return Apply(
            node.function,
            [done.get(id(a), a) if isinstance(a, Expression) else a for a in node.args],
            {
                k: done.get(id(v), v) if isinstance(v, Expression) else v
                for k, v in node.kwargs.items()
            },
        )
    if isinstance(node, Sddmm):
        return Sddmm(node.op, done.get(id(node.lhs), node.lhs), done.get(id(node.rhs), node.rhs))
    if isinstance(node, _OfOne):
        return node.with_child(done[id(node.child)])
    raise AssertionError(f"{type(node).__name__} has no children to replace")
