# SPDX-License-Identifier: Apache-2.0
"""The names of ``dgl.ops``: those of `graphshard.ops`, and operators named by what they compute.

A name such as ``u_mul_e_max`` is read as in `graphshard.function`: ``u`` is the source of an edge,
``v`` its destination and ``e`` the edge; a name that ends in a reduction gives a row per
destination, any other a row per edge.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..ops import *  # noqa: F403
from ..ops import gsddmm, gspmm
from .graphs._segments import gather_mm as gather_mm
from .graphs._segments import segment_mm as segment_mm
from .graphs._segments import segment_reduce as segment_reduce
from .graphs._segments import segment_softmax as segment_softmax


def _named(name: str, per: str, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"``{name}`` of a graph of one relation: a row per {per}."
    return function


def _copy(target: str) -> Callable[..., Tensor]:
    def copy(g: Any, x: Tensor) -> Tensor:
        return gsddmm(g, "copy_lhs", x, None, target)

    return _named(f"copy_{target}", "edge", copy)


def _per_edge(lhs: str, op: str, rhs: str) -> Callable[..., Tensor]:
    def combine(g: Any, x: Tensor, y: Tensor) -> Tensor:
        return gsddmm(g, op, x, y, lhs, rhs)

    return _named(f"{lhs}_{op}_{rhs}", "edge", combine)


def _copied(target: str, reduce: str) -> Callable[..., Tensor]:
    def copy(g: Any, x: Tensor) -> Tensor:
        if target == "u":
            return gspmm(g, "copy_lhs", reduce, x, None)
        return gspmm(g, "copy_rhs", reduce, None, x)

    return _named(f"copy_{target}_{reduce}", "destination", copy)


def _combined(op: str, reduce: str) -> Callable[..., Tensor]:
    def combine(g: Any, x: Tensor, y: Tensor) -> Tensor:
        return gspmm(g, op, reduce, x, y)

    return _named(f"u_{op}_e_{reduce}", "destination", combine)


copy_u = _copy("u")
copy_v = _copy("v")
copy_e = _copy("e")
u_add_v = _per_edge("u", "add", "v")
u_sub_v = _per_edge("u", "sub", "v")
u_mul_v = _per_edge("u", "mul", "v")
u_div_v = _per_edge("u", "div", "v")
u_dot_v = _per_edge("u", "dot", "v")
v_add_u = _per_edge("v", "add", "u")
v_sub_u = _per_edge("v", "sub", "u")
v_mul_u = _per_edge("v", "mul", "u")
v_div_u = _per_edge("v", "div", "u")
v_dot_u = _per_edge("v", "dot", "u")
u_add_e = _per_edge("u", "add", "e")
u_sub_e = _per_edge("u", "sub", "e")
u_mul_e = _per_edge("u", "mul", "e")
u_div_e = _per_edge("u", "div", "e")
u_dot_e = _per_edge("u", "dot", "e")
e_add_u = _per_edge("e", "add", "u")
e_sub_u = _per_edge("e", "sub", "u")
e_mul_u = _per_edge("e", "mul", "u")
e_div_u = _per_edge("e", "div", "u")
e_dot_u = _per_edge("e", "dot", "u")
v_add_e = _per_edge("v", "add", "e")
v_sub_e = _per_edge("v", "sub", "e")
v_mul_e = _per_edge("v", "mul", "e")
v_div_e = _per_edge("v", "div", "e")
v_dot_e = _per_edge("v", "dot", "e")
e_add_v = _per_edge("e", "add", "v")
e_sub_v = _per_edge("e", "sub", "v")
e_mul_v = _per_edge("e", "mul", "v")
e_div_v = _per_edge("e", "div", "v")
e_dot_v = _per_edge("e", "dot", "v")
copy_u_sum = _copied("u", "sum")
copy_u_max = _copied("u", "max")
copy_u_min = _copied("u", "min")
copy_u_mean = _copied("u", "mean")
copy_e_sum = _copied("e", "sum")
copy_e_max = _copied("e", "max")
copy_e_min = _copied("e", "min")
copy_e_mean = _copied("e", "mean")
u_add_e_sum = _combined("add", "sum")
u_add_e_max = _combined("add", "max")
u_add_e_min = _combined("add", "min")
u_add_e_mean = _combined("add", "mean")
u_sub_e_sum = _combined("sub", "sum")
u_sub_e_max = _combined("sub", "max")
u_sub_e_min = _combined("sub", "min")
u_sub_e_mean = _combined("sub", "mean")
u_mul_e_sum = _combined("mul", "sum")
u_mul_e_max = _combined("mul", "max")
u_mul_e_min = _combined("mul", "min")
u_mul_e_mean = _combined("mul", "mean")
u_div_e_sum = _combined("div", "sum")
u_div_e_max = _combined("div", "max")
u_div_e_min = _combined("div", "min")
u_div_e_mean = _combined("div", "mean")
