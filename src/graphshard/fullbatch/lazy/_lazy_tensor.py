# SPDX-License-Identifier: Apache-2.0
"""DeferredEdges: what ``apply_edges`` leaves in ``edata`` on a sequentially aggregated graph.

It stands for a tensor with one row per local edge that is never stored. Functions that treat each
row by itself (activations, arithmetic, dropout, a linear map of the last dimension) return another
deferred value; ``update_all`` evaluates it shard by shard; anything else, and `materialize`, makes
the whole tensor. Layers written for tensors therefore run unchanged, and an attention layer keeps
nothing of size edges x heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ._expressions import (
    NUM_SAMPLE_ROWS,
    Apply,
    Dropout,
    EdgeRows,
    Expression,
    LazySoftmax,
    Leaf,
    Reshape,
)
from ._row_wise import DROPOUTS, LAST_DIM_REDUCTIONS, HasRows, positional, row_wise

_RESHAPES = frozenset({"unsqueeze", "squeeze", "view", "reshape", "flatten", "contiguous"})

Materializer = Callable[[Expression], Tensor]


class DeferredEdges:
    """One value per local edge, computed when and where it is needed.

    It answers a tensor's questions about its shape; functions, methods and operators of tensors go
    to ``__torch_function__``.

    Args:
        expression: How a shard's rows are computed.
        materializer: Makes the whole tensor; collective, like every use of remote rows.
        device: Where the rows are computed.
    """

    def __init__(
        self, expression: Expression, materializer: Materializer, device: torch.device
    ) -> None:
        self.expression = expression
        self.device = device
        self._materializer = materializer
        self._tensor: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        """Of the tensor that it stands for."""
        return self.expression.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.expression.dtype

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
        if self._tensor is None:
            self._tensor = self._materializer(self.expression)
        return self._tensor

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
        operands = [self.expression, expression_of(index), value]
        self.expression, self._tensor = Apply(Tensor.masked_fill, operands, {}), None

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
            *(_materialized(a) for a in args), **{k: _materialized(v) for k, v in kwargs.items()}
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
        shape = None if row is None else torch.Size((self.shape[0], *row))
        return None if shape is None else Reshape(self.expression, shape)

    def _row_of(self, sizes: Sequence[Any]) -> Sequence[int] | None:
        """Shape of a row after ``view(*sizes)``, or None if rows would be split or joined."""
        if len(sizes) == 1 and not isinstance(sizes[0], int):
            sizes = sizes[0]
        if not sizes or sizes[0] not in (self.shape[0], -1):
            return None
        size_of_row = math.prod(self.shape[1:])
        row = list(sizes[1:])
        if row.count(-1) == 1 and sizes[0] != -1:
            known = math.prod(size for size in row if size != -1)
            row[row.index(-1)] = size_of_row // known if known else 0
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


def _materialized(value: Any) -> Any:
    if isinstance(value, DeferredEdges):
        return value.materialize()
    if isinstance(value, list | tuple):
        return type(value)(_materialized(v) for v in value)
    return value


def expression_of(value: Tensor | DeferredEdges) -> Expression:
    """The expression behind a value from ``edata``, whole or deferred."""
    return value.expression if isinstance(value, DeferredEdges) else EdgeRows(value)
