# SPDX-License-Identifier: Apache-2.0
"""What edges contribute, and how the contributions of several shards become one.

*Expressions.* On a graph whose sources arrive shard by shard, a tensor with a row per edge cannot
exist at once. An `Expression` says how its rows are computed; it is evaluated on the edges of one
shard, and the rows are dropped after use. Evaluating twice gives the same numbers: dropout keeps
its seed. The user-facing object is `DeferredEdges`.

*Messages.* A `Message` never has to exist as a tensor with a row per edge: copies and products of a
source row and an edge value go straight into the SpMM kernel.

*Reductions.* Each knows two things. Forward, how to merge a shard into what it has (without
gradients). Backward, how to differentiate one shard: most often by a *partial* result whose sum
over the shards has the gradient of the whole:

=============  ============================================  ====================================
reduction      merge                                         backward
=============  ============================================  ====================================
sum, mean      add; a mean divides at the end                the shard's sum
softmax sum    rescale by exp(old peak - new peak), add      the shard's sum, at the final peak
max, min       keep the better; ties: smaller edge id        by the edges of the argmax
rows           write at the shard's edge ids                 the shard's rows
attention      one walk over the shard's edges               by a kernel, see `AttentionSum`
=============  ============================================  ====================================

Those of softmax and attention are in `graphshard.fullbatch.softmax`. Reductions whose messages can
be cut take remote shards block by block: merge and partial then see a block of the messages.

[Note: where messages are cut]
    Blocks are columns or heads of the source rows. What a message has per edge, such as a weight,
    is computed whole for every block where it has one entry along that dimension; a stored value
    with as many entries is cut with the rows; anything else is not cut.

    =====================  ==============================  ============================
    messages               cut along                       whole in every block
    =====================  ==============================  ============================
    copies of rows         columns or heads                nothing
    rows times weights     where a weight has one entry    weights and what they read
    fused attention        heads; one head: columns        nothing; scores
    =====================  ==============================  ============================

    Dimensions are counted from the right, as rows broadcast: 1 is the last.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .._base.typing import Target
from ..graph.frame import version_of
from ..ops import (
    add_rows,
    empty,
    empty_like,
    gsddmm,
    gspmm,
    gspmm_add,
    gspmm_arg,
    gspmm_arg_backward,
    merge_best,
)
from .column_blocks import WHOLE, ColumnBlock, column_blocks, most_blocks
from .topology import Shard

# -- expressions: values of edges ------------------------------------------------------------------

LeafKey: TypeAlias = tuple[str, int]


class Leaf:
    """A tensor that an evaluation starts from.

    Args:
        target: 'u' rows of the source frame, 'v' rows of the destination frame, 'e' one row per
            local edge, 'c' the same value for every edge.
        tensor: The whole tensor as this rank holds it.

    Attributes:
        key: What tells leaves apart: the same tensor may be read at several ends of an edge.
    """

    __slots__ = ("_version", "key", "target", "tensor")

    def __init__(self, target: str, tensor: Tensor) -> None:
        self.target, self.tensor = target, tensor
        self.key: LeafKey = (target, id(tensor))
        self._version = version_of(tensor)

    def check(self) -> None:
        """Before values are computed from it: that they are those that were asked for.

        Raises:
            RuntimeError: It was changed in place meanwhile.
        """
        if version_of(self.tensor) != self._version:
            raise RuntimeError(
                "values of edges on a sequentially aggregated graph are computed when they are "
                f"used, and a tensor of shape {tuple(self.tensor.shape)} that they are made from "
                "was changed in place before; change a clone() of it, or use "
                "construct_full_graph(..., mode='oneshot')"
            )

    def released(self) -> Leaf:
        """The same leaf without its values: shape, dtype and device alone."""
        empty = self.tensor.detach().new_zeros(()).expand(self.tensor.shape)
        new = Leaf(self.target, empty)
        new.key = self.key
        return new


@dataclass
class ShardEvaluation:
    """One evaluation on one shard: what stands for the leaves, and what is computed already.

    Args:
        values: What the shard sees of each leaf, cut to the block where the leaf is cut.
        block: The columns to compute. See [Note: column blocks].
    """

    shard: Shard
    values: Mapping[LeafKey, Tensor]
    block: ColumnBlock = WHOLE
    memo: dict[Hashable, Any] = field(default_factory=dict)

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
    """A torch function that works on each edge's row by itself. See `DeferredEdges`."""

    def __init__(
        self, function: Callable[..., Tensor], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        self.function = function
        self.args, self.kwargs = tuple(args), dict(kwargs)
        first = next(a for a in self._operands() if isinstance(a, Expression))
        kind = first.device.type
        #: Of the call; what is computed later is computed as it would have been then.
        self.autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
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
        args = [_value(a, evaluation) for a in self.args]
        kwargs = {k: _value(v, evaluation) for k, v in self.kwargs.items()}
        kind, (enabled, dtype) = self.device.type, self.autocast
        if (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) == self.autocast:
            return self.function(*args, **kwargs)
        with torch.autocast(kind, dtype, enabled, cache_enabled=False):
            return self.function(*args, **kwargs)


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
        is_kept = torch.rand(rows.shape, generator=generator, device=rows.device) >= self.p
        return rows * is_kept.to(rows.dtype) / (1.0 - self.p)


class LazySoftmax(_OfOne):
    """Softmax of ``child``, the scores, over the in-edges of each destination.

    It has no value before the scores of all shards are known: a `SoftmaxSum` either carries it
    along as an online softmax, or computes ``peak`` and ``total`` first and calls `resolve`.
    """

    def compute(self, evaluation: ShardEvaluation) -> Tensor:
        raise AssertionError("a softmax over shards was evaluated before it was resolved")

    def resolve(self, peak: Tensor, total: Tensor) -> Expression:
        """The same weights as plain per-edge arithmetic, given each destination's statistics."""
        num_edges = self.shape[0]
        shifted = Apply(torch.sub, (self.child, Endpoint("v", peak, num_edges)), {})
        exponentials = Apply(torch.exp, (shifted,), {})
        return Apply(torch.div, (exponentials, Endpoint("v", total, num_edges)), {})


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
        if id(node) not in done:
            is_changed = any(done.get(id(c), c) is not c for c in node.children())
            done[id(node)] = _rebuild(node, done) if is_changed else node
    return done[id(root)]


def _rebuild(node: Expression, done: Mapping[int, Expression]) -> Expression:
    if isinstance(node, Apply):
        args = [done.get(id(a), a) for a in node.args]
        applied = copy.copy(node)
        applied.args = tuple(args)
        applied.kwargs = {k: done.get(id(v), v) for k, v in node.kwargs.items()}
        return applied
    if isinstance(node, Sddmm):
        return Sddmm(node.op, done.get(id(node.lhs), node.lhs), done.get(id(node.rhs), node.rhs))
    if isinstance(node, _OfOne):
        new = copy.copy(node)
        new.child = done[id(node.child)]
        return new
    raise AssertionError(f"{type(node).__name__} has no children to replace")


# -- messages --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Adjoint:
    """How the gradients of one sum are found: what to differentiate, and what is there already.

    Args:
        output: Made with gradients enabled.
        cotangent: What to start the backward at ``output`` with.
        leaf_grads: Gradients of leaves that came along; those from ``output`` are added to them.
    """

    output: Tensor
    cotangent: Tensor
    leaf_grads: Mapping[LeafKey, Tensor] = field(default_factory=dict)


class Message(ABC):
    """The messages of one relation. All methods see one shard at a time."""

    #: Whether evaluating again needs the random state of the first time.
    is_random = False
    #: Whether the sum is linear in one source leaf: its gradient does not read the rows.
    is_linear = False
    #: The distinct tensors that the messages are made from.
    leaves: list[Leaf]

    def parameters(self) -> list[Tensor]:
        """Leaf tensors that random messages use without being told, known after an evaluation."""
        return []

    @abstractmethod
    def rows(self, evaluation: ShardEvaluation) -> Tensor:
        """Message of each edge of the shard: ``[num_shard_edges, ...]``."""

    def operands(self, evaluation: ShardEvaluation) -> tuple[str, Tensor | None, Tensor | None]:
        """What a kernel computes the messages from: operator, source rows, rows of edges."""
        return "copy_rhs", None, self.rows(evaluation)

    def source_gradient(self, evaluation: ShardEvaluation, grad: Tensor) -> Tensor:
        """Gradient of the source leaf's rows, given that of the sum; if `is_linear`."""
        raise AssertionError(f"{type(self).__name__} has no direct source gradient")

    def release(self, released: Mapping[LeafKey, Leaf]) -> None:
        """Free the values of the source leaf, which no gradient reads."""
        raise AssertionError(f"{type(self).__name__} needs its sources")

    def reduce_sum(self, evaluation: ShardEvaluation) -> Tensor:
        """Sum of the shard's messages at each destination: ``[num_dst, ...]``."""
        op, lhs, rhs = self.operands(evaluation)
        return gspmm(evaluation.shard.adjacency, op, "sum", lhs, rhs)

    def sum_adjoint(self, evaluation: ShardEvaluation, grad: Tensor) -> Adjoint:
        """How to find the gradients of `reduce_sum`, given that of its result."""
        return Adjoint(self.reduce_sum(evaluation), grad)

    def best_adjoint(self, evaluation: ShardEvaluation, grad: Tensor, arg: Tensor) -> Adjoint:
        """How to find the gradients of an extremum over several shards.

        Args:
            grad: ``[num_dst, ...]`` gradient of the extremum.
            arg: As ``grad``: the shard's edge that won, -1 where none of it did.
        """
        rows, adjacency = self.rows(evaluation), evaluation.shard.adjacency
        _, cotangent = gspmm_arg_backward(adjacency, "copy_rhs", grad, arg, None, rows.detach())
        assert cotangent is not None
        return Adjoint(rows, cotangent)

    def best_gradient(self, evaluation: ShardEvaluation, grad: Tensor, arg: Tensor) -> Tensor:
        """As `best_adjoint`, of messages that are linear in one source leaf: its gradient."""
        raise AssertionError(f"{type(self).__name__} has no direct source gradient")


class CopySource(Message):
    """Each edge carries its source's row."""

    is_linear = True

    def __init__(self, source: Tensor) -> None:
        self.source = Leaf("u", source)
        self.leaves = [self.source]

    def rows(self, evaluation: ShardEvaluation) -> Tensor:
        rows = evaluation.leaf(self.source)
        return gsddmm(evaluation.shard.adjacency, "copy_lhs", rows, None, "u")

    def operands(self, evaluation: ShardEvaluation) -> tuple[str, Tensor | None, Tensor | None]:
        return "copy_lhs", evaluation.leaf(self.source), None

    def source_gradient(self, evaluation: ShardEvaluation, grad: Tensor) -> Tensor:
        return gspmm(evaluation.shard.adjacency.reverse(), "copy_lhs", "sum", grad, None)

    def release(self, released: Mapping[LeafKey, Leaf]) -> None:
        self.source = released[self.source.key]
        self.leaves = [self.source]

    def best_gradient(self, evaluation: ShardEvaluation, grad: Tensor, arg: Tensor) -> Tensor:
        adjacency = evaluation.shard.adjacency
        # Not the rows themselves, which may not be here: only how many there are.
        rows = grad.new_zeros(()).expand(adjacency.num_src, *grad.shape[1:])
        gradient, _ = gspmm_arg_backward(adjacency, "copy_lhs", grad, arg, rows)
        assert gradient is not None
        return gradient


class Weighted(Message):
    """Each edge carries ``source row <op> edge value``."""

    def __init__(self, op: str, source: Tensor, value: Expression) -> None:
        self.op, self.source, self.value = op, Leaf("u", source), value
        #: What the edge values are made from.
        self.value_leaves = leaves_of([value])
        self.leaves = distinct([self.source, *self.value_leaves])
        # Where the weights are fixed numbers that are here.
        self.is_linear = op == "mul" and all(
            leaf.target != "u" and not leaf.tensor.requires_grad for leaf in self.value_leaves
        )

    def _operands(self, evaluation: ShardEvaluation) -> tuple[Tensor, Tensor]:
        return evaluation.leaf(self.source), self.value.evaluate(evaluation)

    def rows(self, evaluation: ShardEvaluation) -> Tensor:
        left, right = self._operands(evaluation)
        return gsddmm(evaluation.shard.adjacency, self.op, left, right, "u", "e")

    def release(self, released: Mapping[LeafKey, Leaf]) -> None:
        self.source = released[self.source.key]
        self.leaves = distinct([self.source, *self.value_leaves])

    def with_value(self, value: Expression) -> Weighted:
        """The same with other values of edges."""
        return Weighted(self.op, self.source.tensor, value)

    def source_gradient(self, evaluation: ShardEvaluation, grad: Tensor) -> Tensor:
        value = self.value.evaluate(evaluation)
        return self._onto_sources(evaluation, grad, value, evaluation.leaf(self.source))

    def _onto_sources(
        self, evaluation: ShardEvaluation, grad: Tensor, value: Tensor, rows: Tensor
    ) -> Tensor:
        """``sum_e w_e g_v`` for each source, summed over what its row is repeated along."""
        reverse = evaluation.shard.adjacency.reverse()
        output = gspmm(reverse, "mul", "sum", grad.contiguous(), value)
        count, row = output.shape[0], rows.shape[1:]
        missing = [1] * (output.dim() - rows.dim())
        return output.sum_to_size(count, *missing, *row).reshape(count, *row)

    def operands(self, evaluation: ShardEvaluation) -> tuple[str, Tensor | None, Tensor | None]:
        return self.op, *self._operands(evaluation)

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
        self.value, self.leaves = value, leaves_of([value])

    def with_value(self, value: Expression) -> PerEdge:
        """The same with other values of edges."""
        return PerEdge(value)

    def rows(self, evaluation: ShardEvaluation) -> Tensor:
        return self.value.evaluate(evaluation)


# -- where messages are cut ------------------------------------------------------------------------

HEADS, COLUMNS = 2, 1  # dimensions of messages and values, counted from the right


@dataclass(frozen=True)
class ColumnCut:
    """How the messages of one relation are cut into blocks.

    Args:
        axis: Dimension of the messages, and of their sums.
        leaves: Dimension of each tensor that the messages are made of; None for whole ones.
        most: Most blocks that leave each one wide enough.
    """

    axis: int
    leaves: Mapping[LeafKey, int | None]
    most: int


def find_cut(message: Message) -> ColumnCut | None:
    """The cut that makes most blocks, or None where there is none; the same on every rank."""
    if not isinstance(message, CopySource | Weighted):
        return None
    cuts = [cut for axis in (HEADS, COLUMNS) if (cut := _cut_along(message, axis))]
    return max(cuts, key=lambda cut: cut.most, default=None)


def _cut_along(message: CopySource | Weighted, axis: int) -> ColumnCut | None:
    row = message.source.tensor.shape[1:]
    if len(row) < axis:
        return None
    leaves: dict[LeafKey, int | None] = {leaf.key: None for leaf in message.leaves}
    if isinstance(message, Weighted):
        value = message.value
        if len(value.shape) > axis and value.shape[-axis] != 1:
            if not isinstance(value, EdgeRows) or value.shape[-axis] != row[-axis]:
                return None
            leaves[value.leaf.key] = axis
        elif message.source.key in {leaf.key for leaf in message.value_leaves}:
            return None  # the weights read the rows whole
    leaves[message.source.key] = axis
    most = most_blocks(row[-axis], row.numel())
    return ColumnCut(axis, leaves, most) if most > 1 else None


def find_chunks(
    reductions: Sequence[Reduction], leaves: Sequence[Leaf], longest_message: int
) -> tuple[list[ColumnBlock], list[int | None]]:
    """The blocks of a pass over several reductions, and the dimension of each leaf that they cut.

    If one of them cannot be cut, or two cut a leaf differently, no leaf is cut.
    """
    whole: tuple[list[ColumnBlock], list[int | None]] = [WHOLE], [None] * len(leaves)
    agreed: dict[LeafKey, int | None] = {}
    cuts = [reduction.cut for reduction in reductions]
    for cut in cuts:
        if cut is None or any(agreed.setdefault(k, a) != a for k, a in cut.leaves.items()):
            return whole
    most = min((cut.most for cut in cuts if cut is not None), default=1)
    sources = [leaf.tensor for leaf in leaves if leaf.target == "u"]
    blocks = column_blocks(longest_message, sources, most)
    return blocks, [agreed.get(leaf.key) for leaf in leaves]


# -- reductions ------------------------------------------------------------------------------------

_LOW_PRECISION = (torch.bfloat16, torch.float16)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Sums of 16-bit numbers are kept in float32 until the last shard is in."""
    return torch.float32 if dtype in _LOW_PRECISION else dtype


def is_graph_kept() -> bool:
    """Whether the backward that is running was called with ``retain_graph``."""
    ask = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if ask is None else bool(ask())


class Reduction(ABC):
    """One relation's part of a pass over the shards.

    Args:
        leaves: The distinct tensors that it reads; None for those of the messages.
    """

    #: Whether the backward looks at the values of source rows, so that they must be fetched again.
    needs_sources = True
    #: Whether the backward reads the result.
    can_lose_result = False
    #: Whether blocks of the messages are enough for blocks of the result.
    can_be_cut = True
    #: Names the call site, where what is found about it once may be used again; set by the planner.
    site: Hashable | None = None
    #: Shards that will be merged; set by the pass.
    num_shards = 1
    #: Whether 16-bit sums are kept in float32 until the last shard is in; set by the pass.
    widens = True

    #: Whether evaluating again needs the random state of the first time.
    is_random = False

    def __init__(self, messages: Sequence[Message], leaves: list[Leaf] | None = None) -> None:
        self.messages, self.leaves = messages, leaves or []
        if leaves is None:
            by_key: dict[LeafKey, Leaf] = {}
            for message in messages:
                self.is_random |= message.is_random
                for leaf in message.leaves:
                    by_key[leaf.key] = leaf
            self.leaves = list(by_key.values())

    @property
    def has_lost_result(self) -> bool:
        """Whether the caller has changed the result in place; where `can_lose_result`."""
        return False

    def parameters(self) -> list[Tensor]:
        """Leaf tensors that random messages use without being told, known after the merges."""
        return [p for message in self.messages for p in message.parameters()]

    @cached_property
    def cut(self) -> ColumnCut | None:
        """How a shard may be merged block by block, once the own shard is in; None for whole.

        The message whose sums are the result is the last one.
        """
        return find_cut(self.messages[-1]) if self.can_be_cut else None

    def block_of(self, evaluation: ShardEvaluation, whole: Tensor) -> Tensor:
        """The evaluation's block of the whole result, or of what broadcasts with it, as a view."""
        if evaluation.block.count == 1:
            return whole
        axis = None if self.cut is None else self.cut.axis
        is_broadcast = axis is None or whole.dim() - 1 < axis or whole.shape[-axis] == 1
        return evaluation.block.of(whole, None if is_broadcast else axis)

    def summed_source(self) -> Leaf | None:
        """The source leaf of which sums are enough, made where its rows are; None if rows are not.

        See [Note: fewest rows].
        """
        return None

    def summed_weights(self) -> Tensor | None:
        """By what such rows are multiplied, edge by edge; None for 1."""
        return None

    def begin(self, tensors: Mapping[LeafKey, Tensor]) -> None:  # noqa: B027
        """Start what other ranks must know before the first merge, of whole leaves; collective."""

    def abandon(self) -> None:  # noqa: B027
        """After an error: wait for what is on its way besides rows."""

    @abstractmethod
    def merge(self, evaluation: ShardEvaluation) -> None:
        """Take in what a shard contributes, to the evaluation's block alone."""

    @abstractmethod
    def finish(self) -> tuple[Tensor, ...]: ...

    def partial(self, evaluation: ShardEvaluation) -> tuple[Tensor, ...]:
        """The shard's partial results, differentiable; where `adjoints` starts from them."""
        raise AssertionError(f"{type(self).__name__} has no partial result")

    def recompute(self, evaluation: ShardEvaluation) -> Sequence[Tensor]:
        """The outputs by autograd alone, from all local edges at once; after the pass."""
        return self.partial(evaluation)

    def shard_gradients(
        self, evaluation: ShardEvaluation, grads: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """The part of the outputs' gradients that concerns this shard and block."""
        if evaluation.block.count == 1:
            return grads
        return [self.block_of(evaluation, grad) for grad in grads]

    def adjoints(self, evaluation: ShardEvaluation, grads: Sequence[Tensor]) -> list[Adjoint]:
        """How to find the gradients of `partial`, given those of its results."""
        return [Adjoint(*pair) for pair in zip(self.partial(evaluation), grads, strict=True)]

    def tie(self, outputs: Sequence[Tensor]) -> None:
        """Take note of the outputs, once autograd knows what they come from."""
        return

    def begin_backward(self, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        """Take in the gradients of the whole outputs, once; returns what the shards get."""
        return grads

    def release(self, released: Mapping[LeafKey, Leaf]) -> None:
        """Free what the backward does not need, once the forward is over.

        Args:
            released: All leaves of the pass, without their values.
        """
        self.leaves = []
        if not self.needs_sources:
            for message in self.messages:
                message.release(released)

    def direct_gradients(
        self, evaluation: ShardEvaluation, grads: Sequence[Tensor], keys: Sequence[LeafKey]
    ) -> dict[LeafKey, Tensor | None] | None:
        """Gradients of leaves, found without autograd; None where `adjoints` says how to.

        Args:
            evaluation: The shard and block; without values of sources, unless `needs_sources`.
            grads: Those of the outputs, as `shard_gradients` gives them.
        """
        return None


class Sum(Reduction):
    """Sum of messages at each destination, or their mean.

    Args:
        counts: ``[num_dst]`` messages at each destination over all shards, at least 1, to divide
            by; None for the sum.
    """

    def __init__(self, message: Message, counts: Tensor | None = None) -> None:
        super().__init__([message])
        self.message, self.counts = message, counts
        self.needs_sources = not message.is_linear
        self._sum: Tensor | None = None
        self._dtype = torch.float32

    def summed_source(self) -> Leaf | None:
        message = self.message
        if isinstance(message, Weighted):
            row, weight = message.source.tensor.shape[1:], message.value.shape[1:]
            is_stored = message.is_linear and isinstance(message.value, EdgeRows)
            if not is_stored or torch.broadcast_shapes(row, weight) != row:
                return None
        elif not isinstance(message, CopySource):
            return None
        return message.source if message.source.tensor.is_floating_point() else None

    def summed_weights(self) -> Tensor | None:
        value = getattr(self.message, "value", None)
        return value.leaf.tensor if isinstance(value, EdgeRows) else None

    def merge(self, evaluation: ShardEvaluation) -> None:
        adjacency = evaluation.shard.adjacency
        op, lhs, rhs = self.message.operands(evaluation)
        if self._sum is None:
            # The kernel can divide where it sees all messages.
            reduce = "sum" if self.counts is None or self.num_shards > 1 else "mean"
            part = gspmm(adjacency, op, reduce, lhs, rhs)
            self._dtype = part.dtype
            self._sum = part.to(accumulation_dtype(part.dtype)) if self.widens else part
            return
        total = self._sum
        if evaluation.block.count > 1:
            total = self.block_of(evaluation, total)
        is_lhs_alike = lhs is None or lhs.dtype == total.dtype
        if is_lhs_alike and (rhs is None or rhs.dtype == total.dtype) and total.is_contiguous():
            gspmm_add(total, adjacency, op, lhs, rhs)
            return
        reached = evaluation.shard.reached
        if reached is None:
            total.add_(gspmm(adjacency, op, "sum", lhs, rhs))
        else:
            rows, adjacency = reached
            add_rows(total, rows, gspmm(adjacency, op, "sum", lhs, rhs))

    def finish(self) -> tuple[Tensor, ...]:
        assert self._sum is not None
        total, self._sum = self._sum, None
        if self.counts is not None and self.num_shards > 1:
            total.div_(_as_column(self.counts, total))
        return (total.to(self._dtype),)

    def begin_backward(self, grads: Sequence[Tensor]) -> Sequence[Tensor]:
        if self.counts is None:
            return grads
        return [divided(grads[0], self.counts)]

    def partial(self, evaluation: ShardEvaluation) -> tuple[Tensor, ...]:
        return (self.message.reduce_sum(evaluation),)

    def recompute(self, evaluation: ShardEvaluation) -> Sequence[Tensor]:
        total = self.message.reduce_sum(evaluation)
        return (total if self.counts is None else divided(total, self.counts),)

    def adjoints(self, evaluation: ShardEvaluation, grads: Sequence[Tensor]) -> list[Adjoint]:
        return [self.message.sum_adjoint(evaluation, grads[0])]

    def direct_gradients(
        self, evaluation: ShardEvaluation, grads: Sequence[Tensor], keys: Sequence[LeafKey]
    ) -> dict[LeafKey, Tensor | None] | None:
        if self.needs_sources or not keys:
            return None if self.needs_sources else {}
        (source,) = keys
        return {source: self.message.source_gradient(evaluation, grads[0])}


def _as_column(counts: Tensor, like: Tensor) -> Tensor:
    """To divide ``like`` by; wide, because 16-bit numbers do not count far."""
    return counts.to(accumulation_dtype(like.dtype)).view(-1, *[1] * (like.dim() - 1))


def divided(rows: Tensor, counts: Tensor) -> Tensor:
    """Sums of messages by their numbers, as means in the dtype of the sums."""
    divisor = _as_column(counts, rows)
    if rows.dtype == divisor.dtype and not torch.is_grad_enabled():
        return torch.div(rows, divisor, out=empty_like(rows))
    return (rows / divisor).to(rows.dtype)


class Extremum(Reduction):
    """Largest or smallest message at each destination, entry by entry.

    A tie goes to the smallest local edge id. The in-edges of one node keep their original order
    when a graph is partitioned, so the argmax is the same however many parts there are.
    """

    def __init__(self, message: Message, reduce: str, num_edges: int) -> None:
        super().__init__([message])
        self.message, self.reduce = message, reduce
        self.needs_sources = not isinstance(message, CopySource)
        self._num_edges = num_edges
        self._best: Tensor | None = None
        self._edge: Tensor | None = None  # local edge ids; num_edges where there is none

    def merge(self, evaluation: ShardEvaluation) -> None:
        adjacency, eids = evaluation.shard.adjacency, evaluation.shard.eids
        op, lhs, rhs = self.message.operands(evaluation)
        value, position = gspmm_arg(adjacency, op, self.reduce, lhs, rhs)
        if self._best is None or self._edge is None:
            dtype = position.dtype if eids is None else eids.dtype
            self._best = empty_like(value).zero_()
            self._edge = empty(value.shape, dtype, value.device).fill_(self._num_edges)
        best, edge = (self.block_of(evaluation, whole) for whole in (self._best, self._edge))
        merge_best(best, edge, value, position, eids, self._num_edges, self.reduce)

    def finish(self) -> tuple[Tensor, ...]:
        assert self._best is not None
        best, self._best = self._best, None
        return (best,)

    def _positions(self, evaluation: ShardEvaluation) -> Tensor:
        """Which of the shard's edges is the argmax, -1 where none is."""
        assert self._edge is not None
        edge, shard = self.block_of(evaluation, self._edge), evaluation.shard
        positions = torch.full((self._num_edges + 1,), -1, dtype=shard.adjacency.idtype)
        positions = positions.to(edge.device)
        count = shard.adjacency.num_edges
        ids = slice(count) if shard.eids is None else shard.eids.to(torch.int64)
        positions[ids] = torch.arange(count, dtype=positions.dtype, device=positions.device)
        return positions.index_select(0, edge.reshape(-1)).view(edge.shape)

    def recompute(self, evaluation: ShardEvaluation) -> Sequence[Tensor]:
        """Each entry by the edge that it is from; source rows are not gathered to all edges."""
        assert self._edge is not None
        adjacency, edge = evaluation.shard.adjacency, self._edge
        index = edge.clamp(max=self._num_edges - 1).long()
        if isinstance(self.message, CopySource):
            rows = evaluation.leaf(self.message.source)
            index = adjacency.coo()[0].long()[index] if self._num_edges else index
        else:
            rows = self.message.rows(evaluation)
        if self._num_edges == 0:
            return (rows.sum() * 0 + rows.new_zeros(edge.shape),)
        return (torch.where(edge < self._num_edges, rows.gather(0, index), 0.0),)

    def adjoints(self, evaluation: ShardEvaluation, grads: Sequence[Tensor]) -> list[Adjoint]:
        return [self.message.best_adjoint(evaluation, grads[0], self._positions(evaluation))]

    def direct_gradients(
        self, evaluation: ShardEvaluation, grads: Sequence[Tensor], keys: Sequence[LeafKey]
    ) -> dict[LeafKey, Tensor | None] | None:
        if self.needs_sources:
            return None
        arg = self._positions(evaluation)
        return {key: self.message.best_gradient(evaluation, grads[0], arg) for key in keys}


class EdgeValues(Reduction):
    """The value of every edge, written side by side: `DeferredEdges.materialize`."""

    can_be_cut = False

    def __init__(self, messages: Sequence[Message], num_edges: int) -> None:
        super().__init__(messages)
        self.num_edges = num_edges
        self._rows: list[Tensor] | None = None

    def merge(self, evaluation: ShardEvaluation) -> None:
        parts = [message.rows(evaluation) for message in self.messages]
        if self._rows is None:
            self._rows = [p.new_zeros((self.num_edges, *p.shape[1:])) for p in parts]
        for whole, part in zip(self._rows, parts, strict=True):
            whole.index_copy_(0, evaluation.shard.edge_ids().to(torch.int64), part)

    def finish(self) -> tuple[Tensor, ...]:
        assert self._rows is not None
        rows, self._rows = self._rows, None
        return tuple(rows)

    def partial(self, evaluation: ShardEvaluation) -> tuple[Tensor, ...]:
        return tuple(message.rows(evaluation) for message in self.messages)

    def shard_gradients(self, evaluation: ShardEvaluation, grads: Sequence[Tensor]) -> list[Tensor]:
        return [evaluation.shard.edge_rows(grad) for grad in grads]


class CompanionRows(Reduction):
    """Source rows that travel with a pass for later calls; there is no result."""

    can_be_cut = False
    needs_sources = False

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__([], [Leaf("u", tensor) for tensor in tensors])

    def merge(self, evaluation: ShardEvaluation) -> None:
        return

    def finish(self) -> tuple[Tensor, ...]:
        return ()

    def recompute(self, evaluation: ShardEvaluation) -> Sequence[Tensor]:
        return ()

    def direct_gradients(
        self, evaluation: ShardEvaluation, grads: Sequence[Tensor], keys: Sequence[LeafKey]
    ) -> dict[LeafKey, Tensor | None]:
        return {}
