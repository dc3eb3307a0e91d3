# SPDX-License-Identifier: Apache-2.0
"""Compiles what operators launch, for a GPU that need not be there; a program of its own.

The interpreter runs what the compiler refuses, such as a variable that changes its type in a loop.
Operators are called with tensors of the CPU; in place of each launch its kernel is compiled for the
types, the constants and the alignment of the arguments that came.
usage: compile_triton.py DTYPE [all]
"""

import dataclasses
import inspect
import itertools
import re
import sys
from typing import Any

import torch
import triton
from attention_cases import AttentionCase, inputs_of, random_adjacency
from triton.backends import compiler
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from graphshard import ops
from graphshard.ops import Adjacency
from graphshard.ops._dispatch import force_triton

TARGETS = [GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32)]
DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}
DTYPES["fp16"] = torch.float16
NAMES = {dtype: f"*{name}" for name, dtype in DTYPES.items()}
NAMES |= {torch.int32: "*i32", torch.int64: "*i64"}

assembly: dict[Any, str] = {}
"""What was compiled: by kernel, types and constants."""


def compile_launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    """In place of `JITFunction.run`."""
    names = self.arg_names
    options = {name: kwargs.pop(name) for name in list(kwargs) if name not in names}
    given = inspect.signature(self.fn).bind(*args, **kwargs).arguments
    signature, constants, aligned = {}, {}, []
    for index, (name, parameter) in enumerate(zip(names, self.params, strict=True)):
        value = given[name]
        # Triton takes an argument of 1 for a constant, too.
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[name], place = NAMES[value.dtype], value.data_ptr()
        else:
            assert isinstance(value, int)
            signature[name], place = "i32" if abs(value) < 2**31 else "i64", value
        if place % 16 == 0:
            aligned.append(index)
    key = (self.fn.__name__, *signature.items(), *((n, str(v)) for n, v in constants.items()))
    if key in assembly:
        return
    values = {(names.index(name),): value for name, value in constants.items()}
    if "constexprs" in inspect.signature(ASTSource).parameters:
        attributes = {(index,): [["tt.divisibility", 16]] for index in aligned}
        source = ASTSource(self, signature, constexprs=values, attrs=attributes)
    else:  # Triton 3.2
        kinds = {name: kind for name, kind in signature.items() if name not in constants}
        hints = compiler.AttrsDescriptor.from_hints(dict.fromkeys(aligned, 16))
        source = ASTSource(self, kinds, constants, hints)
    for target in targets:
        asm = triton.compile(source, target=target, options=options).asm
        assert "cubin" in asm
    assembly[key] = str(asm["ptx"])


def compiled(name: str, **options: Any) -> list[str]:
    """The assembly of a kernel, wherever some arguments were these."""
    wanted = {(name, str(value)) for name, value in options.items()}
    return [code for key, code in assembly.items() if key[0] == name and wanted <= {*key[1:]}]


def graph(hub: int, *, is_sorted: bool) -> Adjacency:
    """Whose longest rows are cut if there is a hub; with positions for ids if sorted."""
    adj = random_adjacency(64, 48, 400, torch.int32, hub=hub)
    if not is_sorted:
        return adj
    indptr, indices, _ = adj.csc()
    return Adjacency.from_csc(indptr, indices, None, adj.num_src, adj.num_dst)


def sums(dtype: torch.dtype, is_sample: bool) -> None:
    cut, whole = graph(300, is_sorted=False), graph(0, is_sorted=True)
    kinds = [("copy_lhs", "sum"), ("mul", "mean"), ("div", "max")]
    for adj, (op, reduce) in itertools.product((whole, cut), kinds):
        if is_sample and (adj is cut) == (op == "copy_lhs"):
            continue
        lhs = torch.randn(adj.num_src, 4, 16).to(dtype).requires_grad_()
        rhs = torch.ones(adj.num_edges, 1 if op == "div" else 4, 1).to(dtype)
        out = ops.gspmm(adj, op, reduce, lhs, None if op == "copy_lhs" else rhs)
        if not is_sample or reduce == "max":
            out.sum().backward()
    narrow = torch.randn(whole.num_src, 16).to(dtype)
    ops.gspmm(whole, "copy_lhs", "sum", narrow)
    if dtype == torch.float32:
        codes = compiled("_reduce", OP="copy_lhs", SPLIT=False, REDUCE="sum")
        assert codes
        for code in codes:
            assert re.search(r"ld\.global[.\w:]*\.v4", code), "16 bytes a lane, of narrow rows too"
            assert "fma" not in code
    assert compiled("_merge")


def rows_added(dtype: torch.dtype) -> None:
    places = torch.arange(48)
    for out in {dtype, torch.promote_types(dtype, torch.float32)}:
        ops.add_rows(torch.zeros(64, 70, dtype=out), places, torch.ones(48, 70, dtype=dtype))
    assert compiled("_add_rows")


def values_per_edge(dtype: torch.dtype) -> None:
    adj = graph(0, is_sorted=False)
    lhs, rhs = (torch.randn(n, 4, 16).to(dtype) for n in (adj.num_src, adj.num_dst))
    ops.gsddmm(adj, "sub", lhs, rhs[:, :, :1])
    ops.gsddmm(adj, "dot", lhs, rhs)
    assert compiled("_per_edge")
    assert compiled("_dot")


def attention(dtype: torch.dtype, is_sample: bool) -> None:
    rich = AttentionCase("", heads=4, dim=16, edge=True, factor=1, dropout=0.3, keyed=True)
    cases = [(rich, graph(300, is_sorted=False))]
    if not is_sample:
        cases.append((AttentionCase("", heads=4, dim=16), graph(0, is_sorted=True)))
        cases.append((AttentionCase("", heads=1, dim=70, factor=1), graph(300, is_sorted=True)))
    for (kind, adj), score in itertools.product(cases, ("additive", "joint", "dot")):
        a = dataclasses.replace(kind, score=score).make(adj, dtype)
        out = ops.attend(adj, a)
        # What is not wanted has no place to be written to.
        wanted = [a.values] if is_sample and score == "joint" else inputs_of(a)
        torch.autograd.grad(out.float().sum(), wanted)
    for name in ("_attend", "_merge_states", "_gradient", "_sum_parts"):
        assert compiled(name)


triton.runtime.jit.JITFunction.run = compile_launch
given, *more = sys.argv[1:]
targets = TARGETS[: 1 + len(more)]
with force_triton():
    sums(DTYPES[given], is_sample=not more)
    rows_added(DTYPES[given])
    values_per_edge(DTYPES[given])
    attention(DTYPES[given], is_sample=not more)
