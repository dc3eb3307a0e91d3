# SPDX-License-Identifier: Apache-2.0
"""Built-in message and reduce functions, as data.

A built-in function is a small frozen record of *what* to compute: the operator and the names of
the fields it reads and writes. The graph decides *how*: one process runs it as a fused kernel, a
sharded graph exchanges rows first. A name is read as ``<left>_<operator>_<right>``; ``u`` is the
source node of an edge, ``v`` its destination and ``e`` the edge itself, so ``u_mul_e("h", "w",
"m")`` is the message ``m = source.h * edge.w``.

    >>> from graphshard import function as fn
    >>> fn.u_mul_e("h", "w", "m").name
    'u_mul_e'

Any other callable is a user-defined function. Function objects of DGL itself are understood too,
by their attributes: nothing here imports DGL.
"""

from __future__ import annotations

import builtins
from dataclasses import dataclass
from typing import Any, Protocol

from .errors import GraphTypeError

MESSAGE_OPS = ("add", "sub", "mul", "div", "dot")
REDUCE_OPS = ("sum", "mean", "max", "min")

_TARGETS = ("u", "v", "e")


@dataclass(frozen=True)
class MessageFunction:
    """What a message is made of.

    Attributes:
        op: ``"copy_lhs"``, or one of ``add sub mul div dot``.
        lhs_target: Where the left operand lives: ``"u"``, ``"v"`` or ``"e"``.
        rhs_target: The same for the right operand; None for a copy.
        lhs_field: Name of the left operand's field.
        rhs_field: Name of the right operand's field; None for a copy.
        out_field: Name that the message gets.
    """

    op: str
    lhs_target: str
    rhs_target: str | None
    lhs_field: str
    rhs_field: str | None
    out_field: str

    @property
    def name(self) -> str:
        """The name under which this module offers the function, for example ``u_mul_e``."""
        if self.rhs_target is None:
            return f"copy_{self.lhs_target}"
        return f"{self.lhs_target}_{self.op}_{self.rhs_target}"


@dataclass(frozen=True)
class ReduceFunction:
    """How the messages that meet at a node become one value.

    Attributes:
        op: ``"sum"``, ``"mean"``, ``"max"`` or ``"min"``; a node without messages gets 0.
        msg_field: Name of the message to reduce.
        out_field: Name of the node field to write.
    """

    op: str
    msg_field: str
    out_field: str

    @property
    def name(self) -> str:
        """The operator's name, for example ``sum``."""
        return self.op


def copy_u(u: str, out: str) -> MessageFunction:
    """The message is field ``u`` of the source node."""
    return MessageFunction("copy_lhs", "u", None, u, None, out)


def copy_e(e: str, out: str) -> MessageFunction:
    """The message is field ``e`` of the edge."""
    return MessageFunction("copy_lhs", "e", None, e, None, out)


class BinaryBuilder(Protocol):
    """What ``u_add_v`` and its siblings look like."""

    def __call__(self, lhs_field: str, rhs_field: str, out: str) -> MessageFunction:
        """Name the left operand's field, the right operand's, and the message."""


class ReduceBuilder(Protocol):
    """What ``sum`` and its siblings look like."""

    def __call__(self, msg: str, out: str) -> ReduceFunction:
        """Name the message to reduce and the node field to write."""


def _binary(lhs: str, rhs: str) -> list[BinaryBuilder]:
    """One for each of `MESSAGE_OPS`."""

    def builder(op: str) -> BinaryBuilder:
        def build(lhs_field: str, rhs_field: str, out: str) -> MessageFunction:
            return MessageFunction(op, lhs, rhs, lhs_field, rhs_field, out)

        build.__name__ = build.__qualname__ = f"{lhs}_{op}_{rhs}"
        meaning = "dot product over the last dimension" if op == "dot" else f"elementwise {op}"
        build.__doc__ = f"The message is the {meaning} of a field of {lhs} and a field of {rhs}."
        return build

    return [builder(op) for op in MESSAGE_OPS]


def _reducer(op: str) -> ReduceBuilder:
    def build(msg: str, out: str) -> ReduceFunction:
        return ReduceFunction(op, msg, out)

    build.__name__ = build.__qualname__ = op
    build.__doc__ = f"The node's value is the {op} of its messages; 0 where there are none."
    return build


u_add_v, u_sub_v, u_mul_v, u_div_v, u_dot_v = _binary("u", "v")
u_add_e, u_sub_e, u_mul_e, u_div_e, u_dot_e = _binary("u", "e")
v_add_u, v_sub_u, v_mul_u, v_div_u, v_dot_u = _binary("v", "u")
v_add_e, v_sub_e, v_mul_e, v_div_e, v_dot_e = _binary("v", "e")
e_add_u, e_sub_u, e_mul_u, e_div_u, e_dot_u = _binary("e", "u")
e_add_v, e_sub_v, e_mul_v, e_div_v, e_dot_v = _binary("e", "v")

sum, mean, max, min = map(_reducer, REDUCE_OPS)


def as_message(func: Any) -> MessageFunction | None:
    """Read a message function.

    Returns:
        The built-in function, or None when ``func`` is a user-defined callable.

    Raises:
        TypeError: ``func`` is neither.
    """
    if isinstance(func, MessageFunction):
        return func
    if not isinstance(func, ReduceFunction):
        if callable(func):
            return None
        read = _read_foreign_message(func)
        if read is not None:
            return read
    raise GraphTypeError(
        f"a message function must be a built-in of graphshard.function or a callable that takes "
        f"a batch of edges (got {func!r}); for example copy_u('h', 'm')"
    )


def as_reduce(func: Any) -> ReduceFunction | None:
    """Read a reduce function; the counterpart of `as_message`.

    Returns:
        The built-in function, or None when ``func`` is a user-defined callable.

    Raises:
        TypeError: ``func`` is neither.
    """
    if isinstance(func, ReduceFunction):
        return func
    if not isinstance(func, MessageFunction):
        if callable(func):
            return None
        fields = [getattr(func, name, None) for name in ("name", "msg_field", "out_field")]
        if builtins.all(isinstance(field, str) for field in fields) and fields[0] in REDUCE_OPS:
            return ReduceFunction(str(fields[0]), str(fields[1]), str(fields[2]))
    raise GraphTypeError(
        f"a reduce function must be a built-in of graphshard.function ({', '.join(REDUCE_OPS)}) "
        f"or a callable that takes a batch of nodes (got {func!r}); for example sum('m', 'h')"
    )


def _read_foreign_message(func: Any) -> MessageFunction | None:
    """Recognise a DGL message function by its attributes; targets are coded 0 u, 1 v, 2 e."""
    try:
        if hasattr(func, "binary_op"):
            if func.binary_op not in MESSAGE_OPS:
                return None
            lhs, rhs = _TARGETS[func.lhs], _TARGETS[func.rhs]
            return MessageFunction(
                func.binary_op, lhs, rhs, func.lhs_field, func.rhs_field, func.out_field
            )
        if hasattr(func, "in_field"):
            target = _TARGETS[func.target]
            return MessageFunction("copy_lhs", target, None, func.in_field, None, func.out_field)
    except (AttributeError, IndexError, TypeError):
        return None
    return None
