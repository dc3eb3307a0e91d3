# SPDX-License-Identifier: Apache-2.0
"""Which functions of torch treat each row by itself, and which of their operands have rows.

That a value has one row per edge is known by its type: it is a lazy tensor. What a plain tensor
means beside it follows from the place that it has in the function, never from a size that happens
to agree:

==========================  =====================================================================
function                    a plain tensor has a row for each row of the lazy tensor if
==========================  =====================================================================
of single entries           it is broadcast along no row: as many dimensions, and not 1 in the first
``matmul``                  likewise, where both have batch dimensions (3 or more)
``linear``                  never: it is a weight or a bias
``type_as``, ``to``         never: it only has a dtype and a device
==========================  =====================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

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
        name: Of the function.
        args: Its positional arguments; see `positional`.
        kwargs: Its other arguments.

    Raises:
        ValueError: A plain tensor has neither one row nor as many as the lazy tensors.
    """
    lazy: list[Any] = []
    tensors: list[Tensor] = []
    _collect((args, kwargs), lazy, tensors)
    if not lazy or kwargs.get("out") is not None:
        return None
    if len({len(rows) for rows in lazy}) > 1:
        return None
    first: Any = args[0] if args else None
    if name in _OF_FIRST or name == "linear":
        if not is_lazy(first) or len(lazy) > 1:
            return None
        return None if name == "linear" and first.ndim < 2 else _no_rows
    if name in _MATRIX_PRODUCTS:
        return _matrix_product(lazy, tensors, first)
    return _broadcast(lazy, tensors) if name in ELEMENTWISE else None


def is_lazy(value: Any) -> bool:
    """Whether a value stands for rows that are computed later."""
    return not isinstance(value, Tensor) and hasattr(type(value), "__torch_function__")


def _collect(value: Any, lazy: list[Any], tensors: list[Tensor]) -> None:
    """Find lazy tensors and plain ones in the arguments of a function."""
    if isinstance(value, Tensor):
        tensors.append(value)
    elif is_lazy(value):
        lazy.append(value)
    elif isinstance(value, list | tuple):
        for item in value:
            _collect(item, lazy, tensors)
    elif isinstance(value, dict):
        _collect(list(value.values()), lazy, tensors)


def _no_rows(tensor: Tensor) -> bool:
    return False


def _broadcast(lazy: Sequence[Any], tensors: Sequence[Tensor]) -> HasRows | None:
    """Dimensions are aligned from the right, so rows meet rows if there are as many of them."""
    num_dims, num_rows = lazy[0].ndim, len(lazy[0])
    if any(rows.ndim != num_dims for rows in lazy):
        return None
    if any(tensor.dim() > num_dims for tensor in tensors):
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
