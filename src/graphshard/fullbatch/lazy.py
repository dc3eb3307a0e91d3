# SPDX-License-Identifier: Apache-2.0
"""What is computed later: values of edges, and functions of the user.

`DeferredEdges` is what ``apply_edges`` leaves in ``edata`` on a sequentially aggregated graph. It
stands for a tensor with one row per local edge that is never stored. Functions that treat each row
by itself (activations, arithmetic, dropout, a linear map of the last dimension) return another
deferred value; ``update_all`` evaluates it shard by shard; anything else, and `materialize`, makes
the whole tensor. Layers written for tensors therefore run unchanged, and an attention layer keeps
nothing of size edges x heads.

[Note: which operands have rows]
    That a value has one row per edge is known by its type: it is a lazy tensor. What a plain tensor
    means beside it follows from the place that it has in the function, never from a size that
    happens to agree:

    ======================  =====================================================================
    function                a plain tensor has a row for each row of the lazy tensor if
    ======================  =====================================================================
    of single entries       it is broadcast along no row: as many dimensions, and not 1 in the
                            first
    ``matmul``              likewise, where both have batch dimensions (3 or more)
    ``linear``              never: it is a weight or a bias
    ``type_as``, ``to``     never: it only has a dtype and a device
    ======================  =====================================================================

A message function of the user is run one shard at a time, and again in the backward. Two things are
found without being told. *Fields*: the function is run once on a few local edges and what it reads
is recorded; those fields, and no others, are fetched. *Parameters*: every leaf that the messages'
autograd graph ends in, besides the fields, gets its gradient from the backward pass.

[Note: captured tensors]
    A message function may use tensors that are no fields: parameters of a layer, or anything its
    closure holds. A leaf tensor (a parameter) is found by walking the autograd graph down to its
    AccumulateGrad node. A tensor that was itself computed *before* the function ran has its
    history behind it, and the pass could not send a gradient into that history; it is recognised
    by nodes older than the call and refused, so that no gradient is lost silently. Autocast keeps
    the parameters that it has cast, which would be such tensors from the second shard on; while the
    function runs it keeps none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .._base.typing import CanonicalEType
from ..graph import EdgeBatch
from ..ops import Adjacency, gsddmm
from .reductions import (
    NUM_SAMPLE_ROWS,
    Apply,
    Dropout,
    EdgeRows,
    Expression,
    LazySoftmax,
    Leaf,
    Message,
    Reshape,
    ShardEvaluation,
    distinct,
    leaves_of,
)
from .topology import Shard

# -- values of edges -------------------------------------------------------------------------------

_RESHAPES = frozenset({"unsqueeze", "squeeze", "view", "reshape", "flatten", "contiguous"})

Materializer = Callable[[Expression], Tensor]


class DeferredEdges:
    """One value per local edge, computed when and where it is needed.

    It answers a tensor's questions about its shape; functions, methods and operators of tensors go
    to ``__torch_function__``.

    What is made while autograd is off has no gradient, whenever it is computed.

    Args:
        expression: How a shard's rows are computed.
        materializer: Makes the whole tensor; collective, like every use of remote rows.
    """

    def __init__(
        self, expression: Expression, materializer: Materializer, device: torch.device
    ) -> None:
        self._expression = expression
        self.device = device
        self._materializer = materializer
        self._tensor: Tensor | None = None
        self._has_gradient = torch.is_grad_enabled()
        self._without_gradient: Expression | None = None

    @property
    def expression(self) -> Expression:
        """How a shard's rows are computed."""
        if self._has_gradient or not torch.is_grad_enabled():
            return self._expression
        if self._without_gradient is None:
            self._without_gradient = Apply(Tensor.detach, (self._expression,), {})
        return self._without_gradient

    @property
    def shape(self) -> torch.Size:
        """Of the tensor that it stands for."""
        return self._expression.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._expression.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    def __len__(self) -> int:
        return self.shape[0]

    def __getattr__(self, name: str) -> Any:
        method = getattr(Tensor, name, None)
        if name.startswith("__") or not callable(method):
            raise AttributeError(f"deferred edge values have no attribute '{name}'")

        def call(*args: Any, **kwargs: Any) -> Any:
            return type(self).__torch_function__(method, (), (self, *args), kwargs)

        return call

    def __repr__(self) -> str:
        return f"DeferredEdges(shape={tuple(self.shape)}, dtype={self.dtype})"

    def materialize(self) -> Tensor:
        """The whole tensor, ``[num_edges, ...]``, differentiable. Every rank must call it."""
        if self._tensor is not None:
            return self._tensor
        with torch.set_grad_enabled(self._has_gradient and torch.is_grad_enabled()):
            tensor = self._materializer(self._expression)
        if torch.is_grad_enabled() or not self._has_gradient:
            self._tensor = tensor
        return tensor

    def __setitem__(self, index: Any, value: Any) -> None:
        """``edge_values[mask] = number``, for a mask with a truth value for each of them."""
        is_mask = isinstance(index, Tensor | DeferredEdges) and index.dtype == torch.bool
        is_number = not isinstance(value, Tensor | DeferredEdges) or value.dim() == 0
        if not (is_mask and index.shape == self.shape and is_number):
            raise NotImplementedError(
                "edge values on a sequentially aggregated graph are not stored, so only "
                "values[mask] = number changes them, with a mask of one truth value for each "
                "of their numbers; use torch.where, or construct_full_graph(..., mode='oneshot')"
            )
        operands = [self._expression, expression_of(index), value]
        self.change(Apply(Tensor.masked_fill, operands, {}))

    def change(self, expression: Expression) -> None:
        """Be other values from now on, as a tensor that is changed in place."""
        self._expression = expression
        self._without_gradient = self._tensor = None

    def softmax_over_in_edges(self) -> DeferredEdges:
        return self._wrap(LazySoftmax(self.expression))

    def _wrap(self, expression: Expression) -> DeferredEdges:
        return DeferredEdges(expression, self._materializer, self.device)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        args, kwargs = positional(args, kwargs or {})
        name = getattr(func, "__name__", "")
        first = next((a for a in (*args, *kwargs.values()) if isinstance(a, DeferredEdges)), None)
        if first is not None:
            result = first._record(name, func, args, kwargs)
            if result is not None:
                return first._wrap(result)
        return func(
            *(materialized(a) for a in args), **{k: materialized(v) for k, v in kwargs.items()}
        )

    def _record(
        self, name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Expression | None:
        """The expression for this call, or None when only the whole tensor will do."""
        if kwargs.get("inplace"):
            kwargs["inplace"] = False
        elif name.endswith("_") and not name.endswith("__") and isinstance(args[0], DeferredEdges):
            raise NotImplementedError(
                f"'{name}' changes a tensor in place, but edge values on a sequentially aggregated "
                f"graph are not stored; use '{name[:-1]}', or construct_full_graph(..., "
                "mode='oneshot')"
            )
        if name in DROPOUTS and isinstance(args[0], DeferredEdges):
            return self._dropout(args, kwargs)
        if name in _RESHAPES:
            return self._reshape(name, func, args, kwargs)
        if name in LAST_DIM_REDUCTIONS and not self._keeps_edges(args, kwargs):
            return None
        has_rows = row_wise(name, args, kwargs)
        if has_rows is None:
            return None
        operands = [_operand(a, has_rows) for a in args]
        return Apply(func, operands, {k: _operand(v, has_rows) for k, v in kwargs.items()})

    def _dropout(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Expression:
        p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        training = args[2] if len(args) > 2 else kwargs.get("training", True)
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"dropout probability must be in [0, 1] (got {p})")
        return Dropout(self.expression, p) if training and p > 0.0 else self.expression

    def _reshape(
        self, name: str, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Expression | None:
        if not isinstance(args[0], DeferredEdges):
            return None
        if name in ("view", "reshape"):
            row = self._row_of(args[1:] or tuple(kwargs.values()))
        else:
            sample = func(self.expression.sample(), *args[1:], **kwargs)
            row = sample.shape[1:] if sample.shape[:1] == (NUM_SAMPLE_ROWS,) else None
        if row is None:
            return None
        return Reshape(self.expression, torch.Size((self.shape[0], *row)))

    def _row_of(self, sizes: Sequence[Any]) -> Sequence[int] | None:
        """Shape of a row after ``view(*sizes)``, or None if rows would be split or joined."""
        if len(sizes) == 1 and not isinstance(sizes[0], int):
            sizes = sizes[0]
        if not sizes or sizes[0] not in (self.shape[0], -1):
            return None
        size_of_row = math.prod(self.shape[1:])
        row = list(sizes[1:])
        if row.count(-1) == 1 and sizes[0] != -1:
            given = math.prod(size for size in row if size != -1)
            row[row.index(-1)] = size_of_row // given if given else 0
        return row if math.prod(row) == size_of_row else None

    def _keeps_edges(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
        if dims is None or not isinstance(args[0], DeferredEdges):
            return False
        dims = (dims,) if isinstance(dims, int) else tuple(dims)
        return all(d % self.ndim != 0 for d in dims)


def _operator(name: str) -> Callable[..., Any]:
    method = getattr(Tensor, name)

    def call(self: DeferredEdges, *args: Any) -> Any:
        return type(self).__torch_function__(method, (), (self, *args), {})

    call.__name__ = name
    return call


for _name in """__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__
    __neg__ __pow__ __rpow__ __matmul__ __abs__ __getitem__ __eq__ __ne__ __lt__ __le__ __gt__
    __ge__""".split():
    setattr(DeferredEdges, _name, _operator(_name))
DeferredEdges.__hash__ = object.__hash__  # type: ignore[method-assign]


def _operand(operand: Any, has_rows: HasRows) -> Any:
    if isinstance(operand, DeferredEdges):
        return operand.expression
    if not isinstance(operand, Tensor):
        return operand
    return EdgeRows(operand) if has_rows(operand) else Leaf("c", operand)


def materialized(value: Any) -> Any:
    """The same with whole tensors in place of deferred values; every rank must call it."""
    if isinstance(value, DeferredEdges):
        return value.materialize()
    if isinstance(value, list | tuple):
        return type(value)(materialized(v) for v in value)
    return value


def expression_of(value: Tensor | DeferredEdges) -> Expression:
    """The expression behind a value from ``edata``, whole or deferred."""
    return value.expression if isinstance(value, DeferredEdges) else EdgeRows(value)


# -- which functions treat each row by itself ------------------------------------------------------

ELEMENTWISE = frozenset(
    """abs add celu clamp clamp_max clamp_min cos detach div double elu exp expm1 float gelu
    hardtanh half bfloat16 leaky_relu log log1p logsigmoid maximum minimum mul
    multiply neg negative pow reciprocal relu relu6 rsqrt rsub selu sigmoid silu sin softplus
    softsign sqrt square sub subtract tanh to true_divide type_as where
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__
    __neg__ __pow__ __rpow__ __abs__""".split()
)
LAST_DIM_REDUCTIONS = frozenset({"sum", "mean", "amax", "amin", "softmax", "log_softmax"})
DROPOUTS = frozenset({"dropout", "feature_dropout"})
_MATRIX_PRODUCTS = frozenset({"matmul", "__matmul__"})
#: Their other operands have no rows, whatever their shape.
_OF_FIRST = frozenset({"type_as", "to", "contiguous"}) | DROPOUTS | LAST_DIM_REDUCTIONS

HasRows: TypeAlias = Callable[[Tensor], bool]
"""Whether a plain tensor among the operands has a row for each row of the lazy tensors."""


def positional(
    args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments, the first of them by position."""
    kwargs = dict(kwargs)
    if not args:
        for name in ("input", "self"):
            if name in kwargs:
                return (kwargs.pop(name),), kwargs
    return tuple(args), kwargs


def row_wise(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> HasRows | None:
    """Which operands have rows; None where the function may mix rows, or is not known.

    Args:
        args: Its positional arguments; see `positional`.

    Raises:
        ValueError: A plain tensor has neither one row nor as many as the lazy tensors.
    """
    operands = list(_flat((args, kwargs)))
    lazy = [operand for operand in operands if is_lazy(operand)]
    tensors = [operand for operand in operands if isinstance(operand, Tensor)]
    if len({len(rows) for rows in lazy}) != 1 or kwargs.get("out") is not None:
        return None
    first: Any = args[0] if args else None
    if name in _OF_FIRST or name == "linear":
        if not is_lazy(first) or len(lazy) > 1:
            return None
        return None if name == "linear" and first.ndim < 2 else _no_rows
    if name in _MATRIX_PRODUCTS:
        return _matrix_product(lazy, tensors, first)
    return _broadcast(lazy, tensors) if name in ELEMENTWISE else None


def is_lazy(value: object) -> bool:
    """Whether a value stands for rows that are computed later."""
    return not isinstance(value, Tensor) and hasattr(type(value), "__torch_function__")


def _flat(value: Any) -> Iterator[Any]:
    """What is in the arguments of a function, at any depth."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _no_rows(tensor: Tensor) -> bool:
    return False


def _broadcast(lazy: Sequence[Any], tensors: Sequence[Tensor]) -> HasRows | None:
    """Dimensions are aligned from the right, so rows meet rows if there are as many of them."""
    num_dims, num_rows = lazy[0].ndim, len(lazy[0])
    if any(rows.ndim != num_dims for rows in lazy) or any(t.dim() > num_dims for t in tensors):
        return None
    for tensor in tensors:
        if tensor.dim() == num_dims and tensor.shape[0] not in (1, num_rows):
            if num_rows == 1:
                return None  # torch repeats the single row
            raise ValueError(
                "a tensor that is combined with deferred edge values of shape "
                f"{tuple(lazy[0].shape)} needs as many rows, or one (got shape "
                f"{tuple(tensor.shape)}); rows are those of this rank"
            )
    return lambda tensor: tensor.dim() == num_dims and tensor.shape[0] != 1


def _matrix_product(lazy: Sequence[Any], tensors: Sequence[Tensor], left: Any) -> HasRows | None:
    """Rows stay apart as those of the left matrix, or as a batch dimension."""
    if all(rows.ndim >= 3 for rows in lazy):
        return _broadcast(lazy, tensors)
    is_left_matrix = is_lazy(left) and len(lazy) == 1 and left.ndim == 2
    return _no_rows if is_left_matrix and all(t.dim() <= 2 for t in tensors) else None


# -- message functions of the user -----------------------------------------------------------------

_NUM_PROBE_EDGES = 8


def message_has_parameters(param_foo: Callable[[Any], Sequence[Tensor]]) -> Callable[..., Any]:
    """Accepted for scripts written for SAR; parameters of message functions are found anyway.

    Args:
        param_foo: From the layer to the parameters that its message function uses.

    Returns:
        A decorator that leaves the message function as it is.
    """
    if not callable(param_foo):
        raise TypeError(
            "message_has_parameters takes a function from the layer to its parameters (got "
            f"{type(param_foo).__name__}); for example lambda self: tuple(self.fc.parameters())"
        )
    return lambda function: function


class FieldsOnRead(Mapping[str, Any]):
    """Fields that are computed, or fetched, when they are first read."""

    def __init__(self, names: Collection[str], read: Callable[[str], Any]) -> None:
        self._names, self._read = names, read
        self._values: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            self._values[name] = self._read(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class UserFunction:
    """A message function together with the fields it may read.

    Args:
        function: From `EdgeBatch` to a dictionary of messages.
        edge: Fields of the edge frame; deferred values are allowed.
    """

    def __init__(
        self,
        function: Callable[[EdgeBatch], Any],
        etype: CanonicalEType,
        source: Mapping[str, Any],
        destination: Mapping[str, Any],
        edge: Mapping[str, Any],
    ) -> None:
        self.function, self.etype = function, etype
        frames = {"u": source, "v": destination, "e": edge}
        self._frames: dict[str, dict[str, Leaf | Expression]] = {
            target: {
                name: value.expression if isinstance(value, DeferredEdges) else Leaf(target, value)
                for name, value in frame.items()
            }
            for target, frame in frames.items()
        }
        self.fields: dict[tuple[str, str], Leaf | Expression] = {}
        self.captured: dict[int, Tensor] = {}
        self._captured_in: dict[int, set[int]] = {}  # by the step of a shard
        self._wants_grad = torch.is_grad_enabled()

    def discover(self, own: Shard) -> dict[str, Tensor]:
        """Run once on a few edges of the own shard; returns those messages, to learn shapes."""
        probe = _head(own)
        leaves = _leaves([what for frame in self._frames.values() for what in frame.values()])
        values = {leaf.key: leaf.tensor.detach() for leaf in leaves}
        values |= {k: probe.edge_rows(rows) for k, rows in values.items() if k[0] == "e"}
        state = torch.get_rng_state()
        with torch.no_grad():
            messages = self._call(ShardEvaluation(probe, values), recording=True)
        torch.set_rng_state(state)
        # One order on all ranks, whatever order the function asked in.
        self.fields = dict(sorted(self.fields.items()))
        return messages

    def messages(self, evaluation: ShardEvaluation) -> dict[str, Tensor]:
        """Messages of the shard's edges, with gradients if the caller's mode has them."""
        if not self._wants_grad:
            return self._call(evaluation, recording=False)
        step = evaluation.shard.step
        if torch.is_grad_enabled():
            messages, captured = self._with_captured(evaluation)
            if {id(tensor) for tensor in captured} != self._captured_in.get(step):
                raise RuntimeError(
                    f"message function {_name_of(self.function)} is run again in the backward, and "
                    "used other parameters there than in the forward (as those that "
                    "torch.func.functional_call gives for one call are); let it use the same, or "
                    "use construct_full_graph(..., mode='oneshot')"
                )
            return messages
        # Forward merge: run with gradients once, only to find what else the messages depend on.
        values = {
            key: value.detach().requires_grad_(value.is_floating_point())
            for key, value in evaluation.values.items()
        }
        with torch.enable_grad():
            messages, captured = self._with_captured(ShardEvaluation(evaluation.shard, values))
        self._captured_in[step] = {id(tensor) for tensor in captured}
        self.captured |= {id(tensor): tensor for tensor in captured}
        return {name: value.detach() for name, value in messages.items()}

    def _with_captured(
        self, evaluation: ShardEvaluation
    ) -> tuple[dict[str, Tensor], Sequence[Tensor]]:
        """The messages, and what they depend on that is no field."""
        first_node = _next_sequence_number()
        messages = self._call(evaluation, recording=False)
        fields = {id(value) for value in evaluation.values.values()}
        return messages, _captured_leaves(messages.values(), fields, first_node, self.function)

    def _call(self, evaluation: ShardEvaluation, recording: bool) -> dict[str, Tensor]:
        src, dst = evaluation.shard.adjacency.coo()

        def reader(target: str) -> FieldsOnRead:
            frame = self._frames[target]

            def read(name: str) -> Any:
                what = self._field(target, name, recording)
                if isinstance(what, Expression):
                    return what.evaluate(evaluation)
                rows = evaluation.leaf(what)
                if target == "e":
                    return rows
                # Its gradient is a sum in the order of edges, which repeats on a GPU as well.
                return gsddmm(evaluation.shard.adjacency, "copy_lhs", rows, None, target)

            return FieldsOnRead(frame, read)

        batch = EdgeBatch(
            reader("u"),
            reader("v"),
            reader("e"),
            lambda: (src, dst, evaluation.shard.edge_ids()),
            src.shape[0],
            self.etype,
        )
        with _each_cast_anew(src.device.type):
            result = self.function(batch)
        if not isinstance(result, Mapping):
            raise TypeError(
                "a message function must return a dictionary from field name to tensor (got "
                f"{type(result).__name__}); for example return {{'m': edges.src['h']}}"
            )
        return dict(result)

    def _field(self, target: str, name: str, recording: bool) -> Leaf | Expression:
        key = target, name
        if key not in self.fields:
            frame = self._frames[target]
            if name not in frame:
                raise KeyError(f"no field {name!r}; there are {sorted(frame)}")
            if not recording and target == "u":
                raise RuntimeError(
                    f"the message function read source field {name!r} on a later shard only, so it "
                    "was not fetched; read every field on every call, or use "
                    "construct_full_graph(..., mode='oneshot')"
                )
            self.fields[key] = frame[name]
        return self.fields[key]


class UserMessage(Message):
    """One of the messages that a user-defined function returns."""

    is_random = True

    def __init__(self, function: UserFunction, field: str) -> None:
        self.function, self.field = function, field
        self.leaves = _leaves(list(function.fields.values()))

    def parameters(self) -> list[Tensor]:
        return list(self.function.captured.values())

    def rows(self, evaluation: ShardEvaluation) -> Tensor:
        memo, key = evaluation.memo, id(self.function)
        if key not in memo:  # one call per evaluation, however many of its messages are read
            memo[key] = self.function.messages(evaluation)
        messages = memo[key]
        if self.field not in messages:
            raise KeyError(
                f"the reduce function reads message {self.field!r}, but the message function "
                f"returned {sorted(messages)}"
            )
        return messages[self.field]


def _leaves(read: Sequence[Leaf | Expression]) -> list[Leaf]:
    """The distinct leaves of some fields."""
    leaves_by_field = ([what] if isinstance(what, Leaf) else leaves_of([what]) for what in read)
    return distinct([leaf for leaves in leaves_by_field for leaf in leaves])


def _head(shard: Shard) -> Shard:
    src, dst = shard.adjacency.coo()
    count = min(_NUM_PROBE_EDGES, src.shape[0])
    adjacency = Adjacency(
        src[:count], dst[:count], shard.adjacency.num_src, shard.adjacency.num_dst, check=False
    )
    return Shard(0, adjacency, lambda: shard.edge_ids()[:count])


def _each_cast_anew(kind: str) -> AbstractContextManager[Any]:
    """Autocast on a type of device, if it is on, without what it keeps of parameters."""
    if not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=False)


def _next_sequence_number() -> int:
    """A number below those of all autograd nodes that this thread makes from now on."""
    node = torch.zeros((), requires_grad=True).clone().grad_fn
    assert node is not None
    return int(node._sequence_nr())


def _name_of(function: Callable[..., Any]) -> str:
    return repr(getattr(function, "__qualname__", function))


def _captured_leaves(
    outputs: Any, fields: set[int], first_node: int, function: Callable[..., Any]
) -> list[Tensor]:
    """Leaf tensors behind ``outputs`` that are no fields, which are given by ``id``.

    See [Note: captured tensors].
    """
    captured: dict[int, Tensor] = {}
    stack = []
    for tensor in outputs:
        if tensor.grad_fn is not None:
            stack.append(tensor.grad_fn)
        elif tensor.requires_grad and id(tensor) not in fields:
            captured[id(tensor)] = tensor
    seen = set(stack)
    while stack:
        node = stack.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            if id(variable) not in fields:
                captured[id(variable)] = variable
            continue
        if node._sequence_nr() < first_node:
            raise RuntimeError(
                f"message function {_name_of(function)} uses a tensor "
                f"that was computed before it ran and needs a gradient ({node.name()}); put the "
                "tensor into srcdata, dstdata or edata, compute it inside the function, detach it, "
                "or use construct_full_graph(..., mode='oneshot')"
            )
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return list(captured.values())
