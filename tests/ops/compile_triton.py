# SPDX-License-Identifier: Apache-2.0
"""Compiles every Triton kernel for a GPU that need not be there; a program of test_triton.py.

The interpreter runs what the compiler refuses, such as a variable that changes its type in a loop.
usage: compile_triton.py DTYPE [all]
"""

import importlib
import inspect
import itertools
import re
import sys
from typing import Any

import triton
import triton.language as tl
from triton.backends import compiler
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

AMPERE, HOPPER = GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32)
LISTS = ("rows", "begins", "ends", "slots", "long_rows", "first_slots", "part_args")
IDS = ("indptr", "indices", "others", "eids", "keys", "arg", "only", "lhs_columns", "rhs_columns")
WIDE = (
    *("peak", "total", "sums", "delta", "part_peak", "part_total", "part_sums", "vector", "factor"),
    *("values_out", "key_out", "vector_out", "edge_out", "factor_out", "values_parts", "key_parts"),
)
AT_ONCE = 8
ROWS = ("out", "parts", "lhs", "rhs", "values", "src", "dst", "edges", "grad")


def kernel(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"graphshard.ops.triton.{module}"), name)


def compiled(
    function: Any, dtype: str, constants: dict[str, Any], num_warps: int = 4, **types: str
) -> str:
    """The assembly of a kernel, whose tables begin aligned and whose widths divide by 16."""
    wide = "*fp64" if dtype == "fp64" else "*fp32"
    types = {
        **dict.fromkeys(ROWS, f"*{dtype}"),
        **dict.fromkeys(WIDE, wide),
        **dict.fromkeys(LISTS, "*i64"),
        **dict.fromkeys(IDS, "*i32"),
        **dict.fromkeys(("threshold", "edge_seed", "head_seed"), "i64"),
        **dict.fromkeys(constants, "constexpr"),
        **types,
    }
    names = function.arg_names
    signature = {name: types.get(name, "i32") for name in names}
    values = {(names.index(name),): value for name, value in constants.items()}
    aligned = [i for i, name in enumerate(names) if name not in constants]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    if "constexprs" in inspect.signature(ASTSource).parameters:
        source = ASTSource(function, signature, constexprs=values, attrs=attributes)
    else:  # Triton 3.2
        kinds = {name: kind for name, kind in signature.items() if name not in constants}
        hints = compiler.AttrsDescriptor.from_hints(dict.fromkeys(aligned, 16))
        source = ASTSource(function, kinds, constants, hints)
    options = {"num_warps": num_warps, "enable_fp_fusion": False}
    for target in targets:
        asm = triton.compile(source, target=target, options=options).asm
        assert "cubin" in asm
    return str(asm["ptx"])


def sums(dtype: str, wide: Any, is_sample: bool) -> None:
    for split, (op, reduce) in itertools.product(
        (False, True), (("copy_lhs", "sum"), ("mul", "mean"), ("div", "max"))
    ):
        if is_sample and split == (op == "copy_lhs"):
            continue
        options = {"REDUCE": reduce, "SUM": wide, "BLOCK": 16}
        tables = {"HAS_EIDS": split, "LHS_TABLE": split, "RHS_TABLE": True, "SPLIT": split}
        tables |= {"HAS_ONLY": split and op == "mul", "RHS_ONE": op == "div"}
        options_of_rows = {"OP": op, "ROWS": 8, "UNROLL": 4, **tables, **options}
        code = compiled(kernel("spmm", "_reduce"), dtype, options_of_rows, num_warps=1)
        if dtype == "fp32" and op == "copy_lhs" and not split:
            assert re.search(r"ld\.global[.\w:]*\.v4", code), "16 bytes a lane, of narrow rows too"
            assert "fma" not in code
        compiled(kernel("spmm", "_merge"), dtype, {**options, "AT_ONCE": AT_ONCE})


def rows_added(dtype: str, wide: Any) -> None:
    options = {"SUM": wide, "ROWS": 4, "BLOCK": 128}
    for out in {f"*{dtype}", "*fp64" if dtype == "fp64" else "*fp32"}:
        compiled(kernel("rows", "_add_rows"), dtype, options, out=out, places="*i64")


def values_per_edge(dtype: str, wide: Any) -> None:
    ends = {"src": "*i32", "dst": "*i32"}
    options = {"LHS": "u", "RHS": "v", "SUM": wide, "EDGES": 16, "BLOCK": 64}
    tables = {"OP": "sub", "LHS_TABLE": False, "RHS_TABLE": True}
    compiled(kernel("sddmm", "_per_edge"), dtype, options | tables, **ends)
    offsets = {"lhs_offsets": "*i64", "rhs_offsets": "*i64"}
    compiled(kernel("sddmm", "_dot"), dtype, options, **ends, **offsets)


def attention(dtype: str, wide: Any, kinds: tuple[bool, ...]) -> None:
    for score, rich in itertools.product(("additive", "joint", "dot"), kinds):
        of_scores = {"src": "*fp64" if dtype == "fp64" else "*fp32"} if score == "additive" else {}
        types = {name: of_scores.get("src", f"*{dtype}") for name in ("src", "dst", "edges")}
        has = ("HAS_EIDS", "HAS_EDGE", "HAS_MASK", "HAS_KEYS", "HAS_FACTOR", "SPLIT")
        numbers = {"SLOPE": 0.2, "SCALE": 0.7, "KEPT": 1.25, "EDGES": 8, "DIM": 16}
        options = {"SCORE": score, "SUM": wide, **numbers, **dict.fromkeys(has, rich)}
        options["SCORE_DIM"] = 1 if score == "additive" else 16
        options |= {"HEADS": 4, "heads": 4, "dim": 16, **kernel("attention", "AHEAD")[0]}
        options["score_dim"] = options["SCORE_DIM"]
        compiled(kernel("attention", "_attend"), dtype, options, **types)
        # Of a sample, the gradients of the ends of an edge are those of one score each.
        of_sources = {"additive": (False,), "dot": (True,)} if len(kinds) == 1 else {}
        for by_source in of_sources.get(score, (False, True)):
            wanted = {
                "BY_SOURCE": by_source,
                "WANT_VALUES": by_source,
                "WANT_KEY": True,
                "WANT_VECTOR": not by_source and score == "joint",
                "WANT_EDGE": not by_source and rich,
                "WANT_FACTOR": not by_source and rich,
            }
            compiled(kernel("attention_gradients", "_gradient"), dtype, options | wanted, **types)
    compiled(kernel("attention", "_merge_states"), dtype, {"SUM": wide, "DIM": 64, "AT_ONCE": AT_ONCE})
    options = {"SUM": wide, "BLOCK": 64, "AT_ONCE": AT_ONCE}
    partial = "*fp64" if dtype == "fp64" else "*fp32"
    compiled(
        kernel("attention_gradients", "_sum_parts"), dtype, options, out=partial, parts=partial
    )


given, *more = sys.argv[1:]
targets = [AMPERE, HOPPER][: 1 + len(more)]
of_sums = tl.float64 if given == "fp64" else tl.float32
sums(given, of_sums, is_sample=not more)
rows_added(given, of_sums)
values_per_edge(given, of_sums)
attention(given, of_sums, (False, True) if more else (True,))
