# SPDX-License-Identifier: Apache-2.0
"""Built-in functions as data, and reading DGL's. No process group, no graph."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from graph_oracle import dgl_fn, fn

BINARY = [
    f"{lhs}_{op}_{rhs}"
    for lhs in "uve"
    for rhs in "uve"
    for op in ("add", "sub", "mul", "div", "dot")
    if lhs != rhs
]


@pytest.mark.parametrize("name", BINARY)
def test_binary_functions_say_what_their_name_says(name: str) -> None:
    lhs, op, rhs = name.split("_")
    builder = getattr(fn, name)
    assert builder.__name__ == name
    assert op in builder.__doc__
    made = builder("a", "b", "c")
    assert made == fn.MessageFunction(op, lhs, rhs, "a", "b", "c")
    assert made == builder(lhs_field="a", rhs_field="b", out="c")
    assert made.name == name
    assert fn.as_message(made) is made


@pytest.mark.parametrize("name", BINARY)
def test_dgl_binary_functions_are_read(name: str) -> None:
    assert fn.as_message(getattr(dgl_fn, name)("a", "b", "c")) == getattr(fn, name)("a", "b", "c")


def test_copies() -> None:
    assert fn.copy_u("h", "m") == fn.MessageFunction("copy_lhs", "u", None, "h", None, "m")
    assert fn.copy_e("w", "m") == fn.MessageFunction("copy_lhs", "e", None, "w", None, "m")
    assert fn.copy_u(u="h", out="m").name == "copy_u"
    assert fn.copy_e(e="w", out="m").name == "copy_e"
    assert fn.as_message(dgl_fn.copy_u("h", "m")) == fn.copy_u("h", "m")
    assert fn.as_message(dgl_fn.copy_e("w", "m")) == fn.copy_e("w", "m")


@pytest.mark.parametrize("name", ["sum", "mean", "max", "min"])
def test_reducers(name: str) -> None:
    builder = getattr(fn, name)
    made = builder("m", "h")
    assert builder.__name__ == name
    assert made == builder(msg="m", out="h") == fn.ReduceFunction(name, "m", "h")
    assert made.name == made.op == name
    assert fn.as_reduce(made) is made
    assert fn.as_reduce(getattr(dgl_fn, name)("m", "h")) == made


def test_functions_are_values() -> None:
    made = fn.copy_u("h", "m")
    assert {made: 1}[fn.copy_u("h", "m")] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.op = "copy_rhs"  # type: ignore[misc]


def test_callables_are_user_defined() -> None:
    assert fn.as_message(lambda edges: {}) is None
    assert fn.as_reduce(lambda nodes: {}) is None

    class Model:
        op = "sum"
        name = "sum"

        def __call__(self, batch: Any) -> dict[str, Any]:
            return {}

    assert fn.as_message(Model()) is None
    assert fn.as_reduce(Model()) is None


class Lookalike:
    """Attributes like those of a function of a future DGL, with an operator that is unknown."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def __repr__(self) -> str:
        return "Lookalike"


@pytest.mark.parametrize(
    "func",
    [
        None,
        "copy_u",
        3,
        Lookalike(binary_op="pow", lhs=0, rhs=1, lhs_field="a", rhs_field="b", out_field="c"),
        Lookalike(binary_op="add", lhs=9, rhs=1, lhs_field="a", rhs_field="b", out_field="c"),
        Lookalike(in_field="a", target=0),
        Lookalike(name="prod", msg_field="m", out_field="h"),
    ],
    ids=repr,
)
def test_what_is_neither_is_an_error(func: Any) -> None:
    with pytest.raises(TypeError, match=r"message function must be a built-in .* for example copy"):
        fn.as_message(func)
    with pytest.raises(TypeError, match=r"reduce function must be a built-in .* for example sum"):
        fn.as_reduce(func)


def test_the_two_kinds_are_not_mixed_up() -> None:
    with pytest.raises(TypeError, match="message function must be"):
        fn.as_message(fn.sum("m", "h"))
    with pytest.raises(TypeError, match="message function must be"):
        fn.as_message(dgl_fn.sum("m", "h"))
    with pytest.raises(TypeError, match="reduce function must be"):
        fn.as_reduce(fn.copy_u("h", "m"))
    with pytest.raises(TypeError, match="reduce function must be"):
        fn.as_reduce(dgl_fn.copy_u("h", "m"))
