# SPDX-License-Identifier: Apache-2.0
"""`gspmm` and `gsddmm` under the names of what they compute: ``copy_u_sum``, ``u_mul_e_max``.

A name is read as in `graphshard.function`: ``u`` is the source of an edge, ``v`` its destination
and ``e`` the edge; a name that ends in a reduction gives a row per destination, any other a row
per edge.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .spmm import gsddmm, gspmm

_OPERATORS = ("add", "sub", "mul", "div")
_REDUCES = ("sum", "max", "min", "mean")
_PAIRS = ("u_v", "v_u", "u_e", "e_u", "v_e", "e_v")


def _aggregation(op: str, reduce: str) -> Callable[..., Tensor]:
    if op == "copy_u":

        def copy_source(g: Any, x: Tensor) -> Tensor:
            return gspmm(g, "copy_lhs", reduce, x, None)

        return copy_source
    if op == "copy_e":

        def copy_edge(g: Any, x: Tensor) -> Tensor:
            return gspmm(g, "copy_rhs", reduce, None, x)

        return copy_edge

    def combine(g: Any, x: Tensor, y: Tensor) -> Tensor:
        return gspmm(g, op, reduce, x, y)

    return combine


def _per_edge(op: str, lhs: str, rhs: str) -> Callable[..., Tensor]:
    def combine(g: Any, x: Tensor, y: Tensor) -> Tensor:
        return gsddmm(g, op, x, y, lhs, rhs)

    return combine


def _copy(target: str) -> Callable[..., Tensor]:
    def copy(g: Any, x: Tensor) -> Tensor:
        return gsddmm(g, "copy_lhs", x, None, target)

    return copy


def _all() -> dict[str, Callable[..., Tensor]]:
    made: dict[str, Callable[..., Tensor]] = {}
    for reduce in _REDUCES:
        for what in ("copy_u", "copy_e"):
            made[f"{what}_{reduce}"] = _aggregation(what, reduce)
        for op in _OPERATORS:
            made[f"u_{op}_e_{reduce}"] = _aggregation(op, reduce)
    for pair in _PAIRS:
        lhs, rhs = pair.split("_")
        for op in (*_OPERATORS, "dot"):
            made[f"{lhs}_{op}_{rhs}"] = _per_edge(op, lhs, rhs)
    for target in "uve":
        made[f"copy_{target}"] = _copy(target)
    for name, function in made.items():
        function.__name__ = function.__qualname__ = name
        per = "destination" if name.endswith(_REDUCES) else "edge"
        function.__doc__ = f"``{name}`` of a graph of one relation: a row per {per}."
    return made


NAMED = _all()
"""Name -> operator."""
