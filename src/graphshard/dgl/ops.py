# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.ops``: those of `graphshard.ops`, and operators named by what they compute.

A name such as ``u_mul_e_max`` is read as in `graphshard.function`: ``u`` is the source of an edge,
``v`` its destination and ``e`` the edge; a name that ends in a reduction gives a row per
destination, any other a row per edge.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from ..ops import *  # noqa: F403
from ..ops import gsddmm, gspmm
from .graphs._segments import gather_mm as gather_mm
from .graphs._segments import segment_mm as segment_mm
from .graphs._segments import segment_reduce as segment_reduce
from .graphs._segments import segment_softmax as segment_softmax

_Operator = Callable[..., Tensor]


def _named(name: str, per: str, function: _Operator) -> _Operator:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"``{name}`` of a graph of one relation: a row per {per}."
    return function


def _copy(target: str) -> _Operator:
    def copy(g: Any, x: Tensor) -> Tensor:
        return gsddmm(g, "copy_lhs", x, None, target)

    return _named(f"copy_{target}", "edge", copy)


def _per_edge(lhs: str, rhs: str) -> Iterator[_Operator]:
    def operator(op: str) -> _Operator:
        def combine(g: Any, x: Tensor, y: Tensor) -> Tensor:
            return gsddmm(g, op, x, y, lhs, rhs)

        return _named(f"{lhs}_{op}_{rhs}", "edge", combine)

    return map(operator, ("add", "sub", "mul", "div", "dot"))


def _copied(target: str) -> Iterator[_Operator]:
    def operator(reduce: str) -> _Operator:
        def copy(g: Any, x: Tensor) -> Tensor:
            if target == "u":
                return gspmm(g, "copy_lhs", reduce, x, None)
            return gspmm(g, "copy_rhs", reduce, None, x)

        return _named(f"copy_{target}_{reduce}", "destination", copy)

    return map(operator, ("sum", "max", "min", "mean"))


def _combined(op: str) -> Iterator[_Operator]:
    def operator(reduce: str) -> _Operator:
        def combine(g: Any, x: Tensor, y: Tensor) -> Tensor:
            return gspmm(g, op, reduce, x, y)

        return _named(f"u_{op}_e_{reduce}", "destination", combine)

    return map(operator, ("sum", "max", "min", "mean"))


copy_u, copy_v, copy_e = _copy("u"), _copy("v"), _copy("e")
u_add_v, u_sub_v, u_mul_v, u_div_v, u_dot_v = _per_edge("u", "v")
v_add_u, v_sub_u, v_mul_u, v_div_u, v_dot_u = _per_edge("v", "u")
u_add_e, u_sub_e, u_mul_e, u_div_e, u_dot_e = _per_edge("u", "e")
e_add_u, e_sub_u, e_mul_u, e_div_u, e_dot_u = _per_edge("e", "u")
v_add_e, v_sub_e, v_mul_e, v_div_e, v_dot_e = _per_edge("v", "e")
e_add_v, e_sub_v, e_mul_v, e_div_v, e_dot_v = _per_edge("e", "v")
copy_u_sum, copy_u_max, copy_u_min, copy_u_mean = _copied("u")
copy_e_sum, copy_e_max, copy_e_min, copy_e_mean = _copied("e")
u_add_e_sum, u_add_e_max, u_add_e_min, u_add_e_mean = _combined("add")
u_sub_e_sum, u_sub_e_max, u_sub_e_min, u_sub_e_mean = _combined("sub")
u_mul_e_sum, u_mul_e_max, u_mul_e_min, u_mul_e_mean = _combined("mul")
u_div_e_sum, u_div_e_max, u_div_e_min, u_div_e_mean = _combined("div")
