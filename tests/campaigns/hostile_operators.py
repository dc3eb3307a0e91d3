# SPDX-License-Identifier: Apache-2.0
"""For each public operator, a call as it should be, whose arguments are then made hostile."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from graphshard import ops

Call = tuple[Callable[..., Any], dict[str, Any]]
Recipe = Callable[[random.Random], Call]

#: Public, and nothing that can be called with arrays: classes that a type checker reads, functions
#: without arguments, and modules.
NOT_CALLED = {
    "BlockwiseRows", "HasAdjacency", "ProductRows", "UpdateRule", "extension_available",
    "is_hooked", "is_plain", "is_relu", "place_of", "random_seed", "reference", "release_memory",
}  # fmt: skip
VALUES = (torch.float32, torch.float64, torch.bfloat16)


def draws(rng: random.Random, dtype: torch.dtype, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    return torch.randint(-8, 9, shape, generator=generator).to(dtype) / 4


def ids(rng: random.Random, count: int, below: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor([rng.randrange(below) for _ in range(count)], dtype=dtype)


def edges(rng: random.Random) -> dict[str, Any]:
    num_src, num_dst = rng.randint(1, 7), rng.randint(1, 7)
    count, dtype = rng.choice((0, 1, 5, 14, 90)), rng.choice((torch.int32, torch.int64))
    return {
        "src": ids(rng, count, num_src, dtype),
        "dst": ids(rng, count, num_dst, dtype),
        "num_src": num_src,
        "num_dst": num_dst,
    }


def graph(rng: random.Random) -> ops.Adjacency:
    given = edges(rng)
    if rng.random() < 0.3:  # sorted: position is the id
        given["dst"] = given["dst"].sort().values
    adj = ops.Adjacency(**given)
    if rng.random() < 0.5:
        adj.csc()
    return adj.reverse() if rng.random() < 0.3 else adj


def operands(rng: random.Random, adj: ops.Adjacency) -> dict[str, Any]:
    dtype = rng.choice(VALUES)
    left, right = rng.choice(
        (((), ()), ((3,), (3,)), ((5,), (1,)), ((2, 3), (2, 1)), ((8,), (8,)), ((64,), (64,)))
    )
    return {
        "lhs": draws(rng, dtype, adj.num_src, *left),
        "rhs": draws(rng, dtype, adj.num_edges, *right) + 0.125,
    }


def row_of(given: dict[str, Any], op: str) -> tuple[int, ...]:
    if op.startswith("copy"):
        return tuple(given[op[5:]].shape[1:])
    return tuple(torch.broadcast_shapes(given["lhs"].shape[1:], given["rhs"].shape[1:]))


def leaf(value: Any) -> Any:
    is_value = isinstance(value, Tensor) and value.dtype.is_floating_point
    return value.detach().requires_grad_() if is_value else value


def gradients(result: Tensor, grad: Any, *inputs: Any) -> tuple[Any, ...]:
    tracked = [t for t in inputs if isinstance(t, Tensor) and t.requires_grad]
    if not tracked or not result.requires_grad:
        return (result,)
    return (result, *torch.autograd.grad(result, tracked, grad, allow_unused=True))


def gspmm(rng: random.Random) -> Call:
    adj = graph(rng)
    op, reduce = rng.choice(ops.spmm.SPMM_OPS), rng.choice(ops.spmm.REDUCES)
    given = operands(rng, adj)

    def run(adj: Any, op: Any, reduce: Any, lhs: Any, rhs: Any, grad: Any) -> Any:
        lhs, rhs = leaf(lhs), leaf(rhs)
        return gradients(ops.gspmm(adj, op, reduce, lhs, rhs), grad, lhs, rhs)

    grad = draws(rng, given["lhs"].dtype, adj.num_dst, *row_of(given, op))
    return run, {"adj": adj, "op": op, "reduce": reduce, **given, "grad": grad}


def gspmm_add(rng: random.Random) -> Call:
    adj, op = graph(rng), rng.choice(ops.spmm.SPMM_OPS)
    given = operands(rng, adj)
    out = draws(rng, given["lhs"].dtype, adj.num_dst, *row_of(given, op))
    return ops.gspmm_add, {"out": out, "adj": adj, "op": op, **given}


def gspmm_arg(rng: random.Random) -> Call:
    adj = graph(rng)
    given = {"op": rng.choice(ops.spmm.SPMM_OPS), "reduce": rng.choice(("max", "min"))}
    return ops.gspmm_arg, {"adj": adj, **given, **operands(rng, adj)}


def gspmm_arg_backward(rng: random.Random) -> Call:
    _, given = gspmm_arg(rng)
    out, arg = ops.gspmm_arg(**given)
    del given["reduce"]
    wanted = (rng.random() < 0.8, rng.random() < 0.8)
    return ops.gspmm_arg_backward, {**given, "grad": out, "arg": arg, "wanted": wanted}


def gsddmm(rng: random.Random) -> Call:
    adj, op, dtype = graph(rng), rng.choice(ops.spmm.SDDMM_OPS), rng.choice(VALUES)
    counts = {"u": adj.num_src, "v": adj.num_dst, "e": adj.num_edges}
    targets = {"lhs_target": rng.choice("uve"), "rhs_target": rng.choice("uve")}
    row = rng.choice(((), (1,), (4,), (8,), (2, 3), (70,)))
    sides = {
        name: draws(rng, dtype, counts[targets[f"{name}_target"]], *row) + 0.125
        for name in ("lhs", "rhs")
    }

    def run(lhs: Any, rhs: Any, grad: Any, **others: Any) -> Any:
        lhs, rhs = leaf(lhs), leaf(rhs)
        return gradients(ops.gsddmm(lhs=lhs, rhs=rhs, **others), grad, lhs, rhs)

    grad = draws(rng, dtype, adj.num_edges, *((*row[:-1], 1) if op == "dot" and row else row))
    return run, {"adj": adj, "op": op, **sides, **targets, "grad": grad}


def edge_softmax(rng: random.Random) -> Call:
    adj, row = graph(rng), rng.choice(((), (1,), (4,), (3, 2)))
    logits = draws(rng, rng.choice(VALUES), adj.num_edges, *row)

    def run(adj: Any, logits: Any, norm_by: Any, grad: Any) -> Any:
        logits = leaf(logits)
        return gradients(ops.edge_softmax(adj, logits, norm_by), grad, logits)

    grad = draws(rng, logits.dtype, *logits.shape)
    return run, {"adj": adj, "logits": logits, "norm_by": rng.choice(("dst", "src")), "grad": grad}


def attend(rng: random.Random) -> Call:
    adj, score, dtype = graph(rng), rng.choice(ops._attention_rule.SCORES), rng.choice(VALUES)
    heads, dim = rng.choice((1, 2, 4)), rng.choice((1, 3, 16))
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    row = () if score == "additive" else (dim,)
    given: dict[str, Any] = {
        "values": draws(rng, dtype, adj.num_src, heads, dim),
        "dst": draws(rng, dtype, adj.num_dst, heads, *row),
        "edge": None,
        "factor": None,
    }
    if score != "joint":
        given["src"] = draws(rng, dtype, adj.num_src, heads, *row)
    else:
        given["vector"] = draws(rng, wide, heads, dim)
    if rng.random() < 0.5:
        given["edge"] = draws(rng, wide, adj.num_edges, heads, *(row if score == "joint" else ()))
    if rng.random() < 0.4:
        given["factor"] = draws(rng, wide, adj.num_edges, rng.choice((1, heads)))
    given["scale" if score == "dot" else "slope"] = 0.25
    mask = {"probability": 0.5, "seed": 5, "keys": None}
    if rng.random() < 0.5:
        mask["keys"] = ops.edge_keys(torch.arange(adj.num_edges))
    bias = draws(rng, wide, heads, dim) if rng.random() < 0.5 else None

    is_masked = rng.random() < 0.4

    def run(adj: Any, bias: Any, relu: Any, grad: Any, **given: Any) -> Any:
        mask = {name: given.pop(name) for name in ("probability", "seed", "keys")}
        inputs = {n: leaf(v) for n, v in given.items() if n not in ("slope", "scale")}
        scalars = {n: v for n, v in given.items() if n in ("slope", "scale")}
        dropout = ops.EdgeMask(**mask) if is_masked else None
        rule = getattr(ops.Attention, score)(**inputs, **scalars, mask=dropout)
        out = ops.attend(adj, rule.finished(bias, relu))
        return gradients(out, grad, *inputs.values())

    options = {"bias": bias, "relu": rng.random() < 0.5, **mask}
    grad = draws(rng, dtype, adj.num_dst, heads, dim)
    return run, {"adj": adj, **given, **options, "grad": grad}


def attention(rng: random.Random) -> Call:
    """The description itself, with what its classmethods never make."""
    _, given = attend(rng)
    names = ("values", "src", "dst", "edge", "vector", "factor", "bias")
    parts = {name: given.get(name) for name in names}
    score = "dot" if parts["dst"].dim() == 3 else "additive"
    if parts["src"] is None:
        score = "joint"

    def run(adj: Any, **parts: Any) -> Any:
        return ops.attend(adj, ops.Attention(**parts))

    return run, {"adj": given["adj"], "score": score, **parts, "relu": given["relu"]}


def edge_mask(rng: random.Random) -> Call:
    def run(edges: Any, num_heads: Any, **mask: Any) -> Any:
        return ops.EdgeMask(**mask).multipliers(edges, num_heads)

    given = {"probability": 0.5, "seed": 7, "first_head": 0}
    return run, {**given, "edges": ids(rng, 5, 9, torch.int64), "num_heads": 2}


def edge_keys(rng: random.Random) -> Call:
    return ops.edge_keys, {"ids": ids(rng, 5, 2**40, torch.int64)}


def head_products(rng: random.Random) -> Call:
    dtype, heads, dim = rng.choice(VALUES), rng.choice((1, 2)), rng.choice((1, 5))
    rows = draws(rng, dtype, 6, heads, dim)
    first, second = (draws(rng, dtype, heads, dim) for _ in range(2))

    def run(rows: Any, first: Any, second: Any, grad: Any) -> Any:
        rows, first, second = leaf(rows), leaf(first), leaf(second)
        out, one, two = ops.head_products(rows, first, second)
        return (out, *gradients(one + two, grad, rows, first, second))

    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    grad = draws(rng, wide, 6, heads)
    return run, {"rows": rows, "first": first, "second": second, "grad": grad}


def affine(rng: random.Random) -> Call:
    dtype = rng.choice((torch.float32, torch.float64))
    large = rng.random() < 0.1
    num_rows = 2**15 if large else 5

    def run(x: Any, w: Any, y: Any, z: Any, **others: Any) -> Any:
        return ops.affine([(x, w), (y, z)], **others)

    return run, {
        "x": draws(rng, dtype, num_rows, 3),
        "w": draws(rng, dtype, 3, 32),
        "y": draws(rng, dtype, num_rows, 2),
        "z": draws(rng, dtype, 2, 32),
        "bias": draws(rng, dtype, 32) if rng.random() < 0.5 else None,
        "plus": draws(rng, dtype, num_rows, 32) if rng.random() < 0.5 else None,
        "relu": rng.random() < 0.5,
    }


def linear(rng: random.Random) -> Call:
    layer = torch.nn.Linear(3, 4)
    torch.nn.init.constant_(layer.weight, 0.5)
    torch.nn.init.constant_(layer.bias, 0.25)
    return ops.linear, {"x": draws(rng, torch.float32, 5, 3), "layer": layer}


def add_rows(rng: random.Random) -> Call:
    out = draws(rng, rng.choice(VALUES), 9, 6)
    if rng.random() < 0.4:
        out = out[:, 1:4]
    places = torch.randperm(9, generator=torch.Generator().manual_seed(rng.getrandbits(32)))[:5]
    rows = draws(rng, out.dtype, 5, out.shape[1])
    places = places.to(rng.choice((torch.int32, torch.int64)))
    return ops.add_rows, {"out": out, "places": places, "rows": rows}


def copy_rows(rng: random.Random) -> Call:
    dtype = rng.choice((*VALUES, torch.int64, torch.bool, torch.complex64))
    out, table = draws(rng, torch.float32, 9, 4).to(dtype), draws(rng, torch.float32, 7, 4)
    places = torch.randperm(9, generator=torch.Generator().manual_seed(rng.getrandbits(32)))[:5]
    rows = ids(rng, 5, 7, rng.choice((torch.int32, torch.int64)))
    given = {"out": out, "places": places, "table": table.to(dtype), "rows": rows}
    if rng.random() < 0.4:
        given[rng.choice(("places", "rows"))] = None
    return ops.copy_rows, given


def merge_best(rng: random.Random) -> Call:
    dtype, idtype = rng.choice(VALUES), rng.choice((torch.int32, torch.int64))
    wide = rng.choice((torch.int32, torch.int64))
    known = ids(rng, 6, 40, wide) if rng.random() < 0.7 else None
    return ops.merge_best, {
        "best": draws(rng, dtype, 4, 3),
        "edge": ids(rng, 12, 99, wide).view(4, 3),
        "value": draws(rng, dtype, 4, 3),
        "arg": ids(rng, 12, 7, idtype).view(4, 3) - 1,
        "ids": known,
        "none": 99,
        "op": rng.choice(("max", "min")),
    }


def group_by_range(rng: random.Random) -> Call:
    starts = [0, 4, 4, 9, 12]
    dtype = rng.choice((torch.int32, torch.int64))
    return ops.group_by_range, {
        "ids": ids(rng, 8, 12, rng.choice((torch.int32, torch.int64))),
        "starts": starts,
        "last": rng.randrange(4),
        "dtype": dtype,
    }


def ungroup(rng: random.Random) -> Call:
    counts = ids(rng, 5, 4, torch.int64)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(rng.getrandbits(32)))
    values = ids(rng, int(counts.sum()), 99, rng.choice((torch.int32, torch.int64)))
    dtype = rng.choice((torch.int32, torch.int64))
    return ops.ungroup, {"order": order, "counts": counts, "values": values, "dtype": dtype}


def group_equal(rng: random.Random) -> Call:
    return ops.group_equal, {"ids": ids(rng, 9, 5, rng.choice((torch.int32, torch.int64)))}


def groups(rng: random.Random, width: int) -> dict[str, Any]:
    """Three groups of rows of two tables."""
    return {
        "tables": [draws(rng, torch.float32, n, width) for n in (4, 3)],
        "order": ids(rng, 6, 7, torch.int64),
        "starts": torch.tensor([0, rng.randrange(3), 4, 6]),
    }


def sum_groups(rng: random.Random) -> Call:
    width = rng.choice((1, 3, 16))
    return ops.sum_groups, {"out": draws(rng, torch.float32, 3, width), **groups(rng, width)}


def update_rows(rng: random.Random) -> Call:
    rule, width = (
        ops.UpdateRule(rng.choice(("sgd", "adagrad", "adam")), 0.1),
        rng.choice((1, 3, 16)),
    )
    return ops.update_rows, {
        "rule": rule,
        "changed": [draws(rng, torch.float32, 5, width) for _ in range(rule.num_tables)],
        "rows": torch.tensor([0, 2, 4], dtype=rng.choice((torch.int32, torch.int64))),
        **groups(rng, width),
        "inner": (rng.randrange(4), rng.randrange(8)),
    }


def draw_neighbors(rng: random.Random) -> Call:
    dtype = rng.choice((torch.int32, torch.int64))
    degrees = [rng.choice((0, 1, 3, 9, 80)) for _ in range(5)]
    indptr = torch.tensor([0, *degrees]).cumsum(0).to(dtype)
    count = sum(degrees)
    given: dict[str, Any] = {
        "indptr": indptr,
        "rows": ids(rng, 4, 5, torch.int64),
        "fanout": rng.choice((-1, 0, 2, 10)),
        "key": rng.getrandbits(64),
        "row_ids": ids(rng, 4, 99, torch.int64),
        "indices": ids(rng, count, 50, dtype),
        "replace": rng.random() < 0.3,
        "prob": draws(rng, torch.float32, count).abs() if rng.random() < 0.4 else None,
        "prob_ids": None,
        "labor_ids": None,
        "excluded": None,
        "eids": ids(rng, count, 999, dtype) if rng.random() < 0.4 else None,
    }
    if given["prob"] is not None and count and rng.random() < 0.4:
        given["prob_ids"] = ids(rng, count, count, dtype)
    if not given["replace"] and rng.random() < 0.4:
        given["labor_ids"] = given["indices"].clone()
    if rng.random() < 0.4:
        mask = torch.tensor([rng.random() < 0.2 for _ in range(count)], dtype=torch.bool)
        given["excluded"] = mask if rng.random() < 0.5 else mask.nonzero().view(-1)
    return ops.draw_neighbors, given


def id_table(rng: random.Random) -> Call:
    def run(num_ids: Any, first: Any, others: Any) -> Any:
        table = ops.IdTable(num_ids)
        return (*table.renumber(first, others), *table.renumber(others.unique(), first))

    dtype = rng.choice((torch.int32, torch.int64))
    first = torch.randperm(20, generator=torch.Generator().manual_seed(rng.getrandbits(32)))[:5]
    num_ids = rng.choice((20, 2**26))
    others = ids(rng, 30, 20, dtype)
    return run, {"num_ids": num_ids, "first": first.to(dtype), "others": others}


def adjacency(rng: random.Random) -> Call:
    def run(**given: Any) -> Any:
        return _every_format(ops.Adjacency(**given))

    return run, edges(rng)


def from_csc(rng: random.Random) -> Call:
    def run(**given: Any) -> Any:
        return _every_format(ops.Adjacency.from_csc(**given))

    adj = ops.Adjacency(**edges(rng))
    indptr, indices, eids = adj.csc()
    return run, {
        "indptr": indptr,
        "indices": indices,
        "eids": eids,
        "num_src": adj.num_src,
        "num_dst": adj.num_dst,
    }


def _every_format(adj: ops.Adjacency) -> Any:
    if max(adj.num_src, adj.num_dst) > 2**20:  # the arrays would be as long
        return adj.coo()
    wide = ops.gspmm(adj, "copy_lhs", "sum", torch.ones(adj.num_src, 3))
    return (*adj.coo(), *adj.csc()[:2], *adj.csr()[:2], adj.in_degrees(), adj.out_degrees(), wide)


def as_adjacency(rng: random.Random) -> Call:
    return ops.as_adjacency, {"graph": graph(rng)}


def empty(rng: random.Random) -> Call:
    def run(shape: Any, dtype: Any) -> Any:
        return torch.tensor(ops.empty(shape, dtype).shape)

    return run, {"shape": [rng.choice((3, 2**11)), 2**11, 4], "dtype": rng.choice(VALUES)}


def empty_like(rng: random.Random) -> Call:
    def run(tensor: Any) -> Any:
        return torch.tensor(ops.empty_like(tensor).shape)

    return run, {"tensor": draws(rng, torch.float32, 4, 3)}


#: By public name; a second one of a name says what it is about.
RECIPES: dict[str, Recipe] = {
    "Adjacency": adjacency,
    "Adjacency, from_csc": from_csc,
    "Attention": attention,
    "EdgeMask": edge_mask,
    "IdTable": id_table,
    "add_rows": add_rows,
    "affine": affine,
    "as_adjacency": as_adjacency,
    "attend": attend,
    "copy_rows": copy_rows,
    "draw_neighbors": draw_neighbors,
    "edge_keys": edge_keys,
    "edge_softmax": edge_softmax,
    "empty": empty,
    "empty_like": empty_like,
    "group_by_range": group_by_range,
    "group_equal": group_equal,
    "gsddmm": gsddmm,
    "gspmm": gspmm,
    "gspmm_add": gspmm_add,
    "gspmm_arg": gspmm_arg,
    "gspmm_arg_backward": gspmm_arg_backward,
    "head_products": head_products,
    "linear": linear,
    "merge_best": merge_best,
    "sum_groups": sum_groups,
    "ungroup": ungroup,
    "update_rows": update_rows,
}
