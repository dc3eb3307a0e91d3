# SPDX-License-Identifier: Apache-2.0
"""Message passing against DGL: every built-in pair, user functions, typed graphs. One process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graph_oracle import (
    assert_same_data,
    assert_same_features,
    dgl_fn,
    dgl_quiet,
    fn,
    gs,
    plain_pair,
    rand,
    typed_pair,
)

REDUCES = ["sum", "mean", "max", "min"]
PAIRS = ["u_v", "u_e", "v_u", "v_e", "e_u", "e_v"]
BINARY = [
    f"{pair[0]}_{op}_{pair[2]}" for pair in PAIRS for op in ("add", "sub", "mul", "div", "dot")
]
FIELD = {"u": "h", "v": "h", "e": "w"}


def message(module: Any, name: str, out: str = "m") -> Any:
    if name.startswith("copy"):
        return getattr(module, name)(FIELD[name[-1]], out)
    return getattr(module, name)(FIELD[name[0]], FIELD[name[-1]], out)


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("name", ["copy_u", "copy_e", *BINARY])
def test_builtin_pairs_equal_dgl_with_gradients(name: str, reduce: str) -> None:
    ours, theirs = plain_pair()
    grads = []
    for g, module in ((ours, fn), (theirs, dgl_fn)):
        h = g.ndata["h"].clone().requires_grad_()
        w = g.edata["w"].clone().requires_grad_()
        g.ndata["h"], g.edata["w"] = h, w
        g.update_all(message(module, name), getattr(module, reduce)("m", "o"))
        out = g.ndata["o"]
        (out * rand(*out.shape, seed=5)).sum().backward()
        grads.append([None if x.grad is None else x.grad for x in (h, w)])
    torch.testing.assert_close(ours.ndata["o"], theirs.ndata["o"])
    for mine, expected in zip(*grads, strict=True):
        # DGL has no gradient, where we may have one of zeros, for an operand that is not read.
        if mine is None or expected is None:
            assert mine is None or not mine.any()
            assert expected is None or not expected.any()
        else:
            torch.testing.assert_close(mine, expected)


def test_broadcasting_of_edge_weights() -> None:
    ours, theirs = plain_pair()
    for g, module in ((ours, fn), (theirs, dgl_fn)):
        g.ndata["x"] = rand(7, 2, 3, seed=1)
        g.edata["a"] = rand(10, 2, 1, seed=2)
        g.update_all(module.u_mul_e("x", "a", "m"), module.sum("m", "o"))
        g.update_all(module.u_add_e("h", "s", "m"), module.max("m", "q"))
        g.apply_edges(module.u_add_v("x", "x", "z"))
        g.apply_edges(module.e_sub_u("a", "x", "y"))
    assert_same_features(ours, theirs)


@pytest.mark.parametrize("name", ["copy_u", "copy_e", *BINARY])
def test_apply_edges_equals_dgl(name: str) -> None:
    ours, theirs = plain_pair()
    ours.apply_edges(message(fn, name))
    theirs.apply_edges(message(dgl_fn, name))
    assert_same_features(ours, theirs)


@pytest.mark.parametrize("reduce", REDUCES)
def test_real_dgl_functions_are_understood(reduce: str) -> None:
    ours, theirs = plain_pair()
    for name in ("copy_u", "copy_e", "u_sub_v", "e_div_u"):
        for g in (ours, theirs):
            g.update_all(message(dgl_fn, name), getattr(dgl_fn, reduce)("m", name))
            g.apply_edges(message(dgl_fn, name, "z_" + name))
    assert_same_features(ours, theirs)


def message_udf(edges: Any) -> dict[str, Any]:
    src, dst, eid = edges.edges()
    assert len(edges) == edges.batch_size() == src.shape[0]
    weight = (src + 2 * dst + 3 * eid).to(torch.float64).unsqueeze(1)
    return {"m": edges.src["h"] * edges.data["w"] + edges.dst["h"] + weight}


def message_without_ids(edges: Any) -> dict[str, Any]:
    # DGL's edges.edges() looks up the wrong graph when only some edges send.
    return {"m": edges.src["h"] * edges.data["w"] + edges.dst["h"]}


def reduce_udf(nodes: Any) -> dict[str, Any]:
    # The weights make the order of the mailbox count.
    box = nodes.mailbox["m"]
    order = torch.arange(1, box.shape[1] + 1, dtype=box.dtype).view(1, -1, 1)
    assert box.shape[0] == nodes.batch_size() == len(nodes)
    return {"o": (box * order).sum(1) + nodes.data["h"], "n": nodes.nodes()}


def apply_udf(nodes: Any) -> dict[str, Any]:
    return {"o": nodes.data["o"] * 2 + nodes.data["h"], "p": nodes.data["h"]}


@pytest.mark.parametrize("graph_name", ["mixed", "one_loop", "star"])
@pytest.mark.parametrize("kinds", ["uu", "ub", "bu", "bb"])
@pytest.mark.parametrize("with_apply", [False, True])
def test_user_functions_equal_dgl(graph_name: str, kinds: str, with_apply: bool) -> None:
    idtype = torch.int32 if with_apply else torch.int64
    ours, theirs = plain_pair(graph_name, idtype)
    for g, module in ((ours, fn), (theirs, dgl_fn)):
        mfunc = message_udf if kinds[0] == "u" else module.u_mul_e("h", "w", "m")
        rfunc = reduce_udf if kinds[1] == "u" else module.mean("m", "o")
        g.update_all(mfunc, rfunc, apply_udf if with_apply else None)
    assert_same_features(ours, theirs)


def test_user_functions_without_any_edge() -> None:
    ours, _ = plain_pair("no_edges")
    ours.update_all(message_udf, reduce_udf)
    assert torch.equal(ours.ndata["o"], torch.zeros(3, 3, dtype=torch.float64))
    assert torch.equal(ours.ndata["n"], torch.zeros(3, dtype=torch.int64))
    ours.update_all(message_udf, fn.mean("m", "q"))
    assert torch.equal(ours.ndata["q"], torch.zeros(3, 3, dtype=torch.float64))


def test_a_recurrent_reduce_function_without_any_edge() -> None:
    g, _ = plain_pair("no_edges")
    lstm = torch.nn.LSTM(3, 4, batch_first=True, dtype=torch.float64)
    g.update_all(fn.copy_u("h", "m"), lambda nodes: {"o": lstm(nodes.mailbox["m"])[1][0][0]})
    assert torch.equal(g.ndata["o"], torch.zeros(3, 4, dtype=torch.float64))


def test_user_reduce_leaves_zeros_at_nodes_without_messages() -> None:
    ours, theirs = plain_pair()
    for g in (ours, theirs):
        g.ndata["o"] = torch.full((7, 3), 9.0, dtype=torch.float64)
        g.update_all(message_udf, lambda nodes: {"o": nodes.mailbox["m"].sum(1)})
    assert_same_features(ours, theirs)
    assert not ours.ndata["o"][5:].any()


def test_gradients_through_user_functions() -> None:
    grads = []
    for g in plain_pair():
        h = g.ndata["h"].clone().requires_grad_()
        g.ndata["h"] = h
        g.update_all(message_udf, reduce_udf)
        (g.ndata["o"] ** 2).sum().backward()
        grads.append(h.grad)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("reduce", REDUCES)
@pytest.mark.parametrize("name", ["copy_u", "u_mul_e", "e_sub_u", "e_div_u", "u_div_v", "v_dot_e"])
def test_gradcheck_through_update_all(name: str, reduce: str) -> None:
    g, _ = plain_pair(dim=2)

    def run(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        with g.local_scope():
            g.ndata["h"], g.edata["w"] = h, w
            g.update_all(message(fn, name), getattr(fn, reduce)("m", "o"))
            return g.ndata["o"]

    h = g.ndata["h"].requires_grad_()
    w = g.edata["w"].requires_grad_()
    assert torch.autograd.gradcheck(run, (h, w))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_are_kept(dtype: torch.dtype) -> None:
    g, _ = plain_pair()
    expected = g.clone()
    expected.update_all(fn.u_mul_e("h", "w", "m"), fn.mean("m", "o"))
    g.ndata["h"], g.edata["w"] = g.ndata["h"].to(dtype), g.edata["w"].to(dtype)
    g.update_all(fn.u_mul_e("h", "w", "m"), fn.mean("m", "o"))
    assert g.ndata["o"].dtype == dtype
    torch.testing.assert_close(g.ndata["o"].double(), expected.ndata["o"], atol=0.05, rtol=0.05)


def test_zero_feature_columns() -> None:
    g, _ = plain_pair()
    g.ndata["h"] = torch.zeros(7, 0)
    for reduce in REDUCES:
        g.update_all(fn.copy_u("h", "m"), getattr(fn, reduce)("m", "o"))
        assert g.ndata["o"].shape == (7, 0)


def test_apply_nodes_and_partial_results() -> None:
    ours, theirs = plain_pair()
    for g in (ours, theirs):
        g.apply_nodes(lambda nodes: {"a": nodes.data["h"] * 2})
        g.apply_nodes(lambda nodes: {"a": nodes.data["h"] * 3, "b": nodes.nodes()}, v=[4, 1])
        g.apply_nodes(lambda nodes: {"c": nodes.data["h"][:, 0]}, v=torch.tensor([2]))
    assert_same_features(ours, theirs)


@pytest.mark.parametrize("edges", [[7, 1, 4], ([2, 3], [1, 2]), torch.tensor([0]), 3])
@pytest.mark.parametrize("kind", ["builtin", "user"])
def test_apply_edges_on_some_edges(edges: Any, kind: str) -> None:
    ours, theirs = plain_pair()
    for g, module in ((ours, fn), (theirs, dgl_fn)):
        func = module.u_sub_v("h", "h", "m") if kind == "builtin" else message_udf
        g.apply_edges(func, edges=edges)
        g.edata["m"] = g.edata["m"] + 1
        g.apply_edges(func, edges=edges)
    assert_same_features(ours, theirs)


def test_partial_results_keep_gradients_and_other_holders() -> None:
    g, _ = plain_pair()
    h = g.ndata["h"].clone().requires_grad_()
    g.ndata["h"] = h
    g.edata["m"] = before = torch.ones(10, 3, dtype=torch.float64)
    g.apply_edges(fn.copy_u("h", "m"), edges=[0, 2])
    assert torch.equal(before, torch.ones_like(before))
    g.edata["m"].sum().backward()
    assert h.grad is not None
    assert h.grad[:, 0].tolist() == [1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_ids_that_user_functions_are_told_when_some_edges_send() -> None:
    g, _ = plain_pair()
    told = []

    def message_func(edges: Any) -> dict[str, Any]:
        told.extend(edges.edges())
        return {"m": edges.src["h"]}

    def apply_func(nodes: Any) -> dict[str, Any]:
        told.append(nodes.nodes())
        return {"o": nodes.data["o"]}

    g.pull([2, 0], message_func, fn.sum("m", "o"), apply_func)
    assert [ids.tolist() for ids in told] == [
        [2, 2, 4, 1, 3, 0],
        [0, 0, 0, 2, 2, 2],
        [0, 1, 6, 3, 4, 8],
        [0, 2],
    ]


@pytest.mark.parametrize("kinds", ["bb", "uu", "bu"])
def test_send_and_recv_pull_push(kinds: str) -> None:
    ours, theirs = plain_pair()
    for g, module in ((ours, fn), (theirs, dgl_fn)):
        mfunc = message_without_ids if kinds[0] == "u" else module.u_mul_e("h", "w", "m")
        rfunc = reduce_udf if kinds[1] == "u" else module.mean("m", "o")
        g.send_and_recv([9, 0, 3], mfunc, rfunc)
        g.ndata["first"] = g.ndata.pop("o")
        g.send_and_recv(([2, 4], [1, 4]), mfunc, rfunc, apply_udf)
        g.ndata["second"] = g.ndata.pop("o")
        g.pull([2, 0], mfunc, rfunc)
        g.ndata["third"] = g.ndata.pop("o")
        g.pull(4, mfunc, rfunc, apply_udf)
        g.push([4, 2], mfunc, rfunc)
        g.push(torch.tensor([3]), mfunc, rfunc, apply_udf)
    assert_same_features(ours, theirs)


def test_pull_of_nodes_without_in_edges_gives_zero() -> None:
    ours, _ = plain_pair()
    ours.ndata["o"] = torch.ones(7, 3, dtype=torch.float64)
    ours.pull([5, 0], fn.copy_u("h", "m"), fn.max("m", "o"))
    assert torch.equal(ours.ndata["o"][5], torch.zeros(3, dtype=torch.float64))
    assert torch.equal(ours.ndata["o"][6], torch.ones(3, dtype=torch.float64))
    ours.pull([0, 0, 0], fn.copy_u("h", "m"), fn.sum("m", "once"))
    torch.testing.assert_close(
        ours.ndata["once"][0], ours.ndata["h"][ours.in_edges(0)[0]].sum(0), msg="asked for thrice"
    )
    ours.pull([], fn.copy_u("h", "m"), fn.max("m", "none"))
    ours.send_and_recv([], fn.copy_u("h", "m"), fn.max("m", "none"))
    assert "none" not in ours.ndata


# ---------------------------------------------------------------------------------- typed graphs


@pytest.mark.parametrize("etype", ["follows", "plays", ("game", "liked", "user")])
@pytest.mark.parametrize("reduce", REDUCES)
def test_one_relation_of_a_typed_graph(etype: Any, reduce: str) -> None:
    ours, theirs = typed_pair()
    for g, module in ((ours, fn), (theirs, dgl_fn)):
        for name in ("copy_u", "u_mul_e", "u_sub_v", "e_add_v"):
            rfunc = getattr(module, reduce)("m", name)
            g.update_all(message(module, name), rfunc, etype=etype)
            g.apply_edges(message(module, name, "z_" + name), etype=etype)
        g[etype].update_all(message(module, "copy_u"), getattr(module, reduce)("m", "sliced"))
        g.update_all(message_udf, reduce_udf, apply_udf, etype=etype)
        g.pull([0, 1], message_without_ids, reduce_udf, etype=etype)
    assert_same_features(ours, theirs)


@pytest.mark.parametrize("reduce", ["sum", "max", "min"])
def test_update_all_over_all_relations(reduce: str) -> None:
    ours, theirs = typed_pair()
    for g, module in ((ours, fn), (theirs, dgl_fn)):
        for name in ("copy_u", "copy_e", "u_mul_e"):
            g.update_all(message(module, name), getattr(module, reduce)("m", name))
        g.apply_edges(module.u_add_v("h", "h", "z"))
        g.apply_edges(module.copy_u("h", "y"))
    assert_same_features(ours, theirs)


def test_update_all_over_all_relations_limits() -> None:
    ours, _ = typed_pair()
    with pytest.raises(NotImplementedError, match=r"mean of means .* multi_update_all"):
        ours.update_all(fn.copy_u("h", "m"), fn.mean("m", "o"))
    with pytest.raises(NotImplementedError, match="built-in functions only"):
        ours.update_all(message_udf, fn.sum("m", "o"))
    with pytest.raises(NotImplementedError, match="give etype"):
        ours.apply_edges(message_udf)


def full_relations() -> dict[Any, Any]:
    """Every destination has an in-edge in every relation, where DGL and we agree on everything."""
    return {
        ("a", "r", "b"): ([0, 1, 2, 0], [0, 1, 2, 2]),
        ("a", "s", "b"): ([2, 1, 0, 1, 1], [0, 1, 2, 0, 0]),
        ("b", "t", "b"): ([0, 1, 2], [1, 2, 0]),
        ("b", "x", "a"): ([0, 1, 2], [0, 1, 2]),
    }


@pytest.mark.parametrize("cross", ["sum", "mean", "max", "min", "stack", "callable"])
@pytest.mark.parametrize("reduce", [*REDUCES, "user"])
def test_cross_reducers_equal_dgl(cross: str, reduce: str) -> None:
    ours, theirs = typed_pair(full_relations(), {"a": 3, "b": 3})
    reducer: Any = cross
    if cross == "callable":

        def reducer(values: list[torch.Tensor]) -> torch.Tensor:
            return torch.stack(values, -1)

    for g, module in ((ours, fn), (theirs, dgl_fn)):
        rfunc = reduce_udf if reduce == "user" else getattr(module, reduce)("m", "o")
        if reduce == "user" and cross == "mean":
            continue  # of integers
        g.multi_update_all(
            {
                "t": (module.copy_u("h", "m"), rfunc),
                ("a", "s", "b"): (module.u_mul_e("h", "w", "m"), rfunc, apply_udf),
                "r": (message_udf, rfunc),
                "x": (module.copy_u("h", "m"), rfunc),
            },
            reducer,
            (lambda nodes: {"o": nodes.data["o"] + 1}) if cross == "sum" else None,
        )
    assert_same_features(ours, theirs)


@pytest.mark.parametrize("cross", ["sum", "mean", "stack"])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_cross_reducers_with_nodes_that_miss_a_relation(cross: str, reduce: str) -> None:
    ours, theirs = typed_pair()
    for g, module in ((ours, fn), (theirs, dgl_fn)):
        functions = (module.copy_u("h", "m"), getattr(module, reduce)("m", "o"))
        g.multi_update_all(dict.fromkeys(["liked", "follows", "plays", "rates"], functions), cross)
    assert_same_features(ours, theirs)


@pytest.mark.parametrize("cross", ["max", "min"])
def test_extremes_of_extremes_pass_over_missing_relations(cross: str) -> None:
    ours, theirs = typed_pair()
    for g, module in ((ours, fn), (theirs, dgl_fn)):
        functions = (module.copy_u("h", "m"), getattr(module, cross)("m", "o"))
        g.multi_update_all(dict.fromkeys(["liked", "follows", "plays", "rates"], functions), cross)
    assert_same_features(ours, theirs)


def test_sum_of_maxima_counts_a_missing_relation_as_zero() -> None:
    # DGL gives 0 for such a node whatever its other relations say.
    g = gs.heterograph({("a", "r", "b"): ([0], [0]), ("a", "s", "b"): ([1], [1])}, {"a": 2, "b": 3})
    g.nodes["a"].data["h"] = torch.tensor([[-2.0], [5.0]])
    functions = (fn.copy_u("h", "m"), fn.max("m", "o"))
    g.multi_update_all({"r": functions, "s": functions}, "sum")
    assert g.nodes["b"].data["o"].flatten().tolist() == [-2.0, 5.0, 0.0]


def test_multi_update_all_hands_all_relations_over_at_once() -> None:
    ours, _ = typed_pair()
    seen = []
    original = ours._reduce_many
    ours._reduce_many = lambda calls: seen.append([c[0] for c in calls]) or original(calls)  # type: ignore[method-assign]
    functions = (fn.copy_u("h", "m"), fn.sum("m", "o"))
    ours.multi_update_all({"plays": functions, "follows": functions}, "sum")
    ours.update_all(*functions)
    assert seen == [[ours.get_etype_id("plays"), ours.get_etype_id("follows")], [0, 1, 2, 3]]


def test_mistakes_in_functions() -> None:
    g, _ = plain_pair()
    with pytest.raises(ValueError, match=r"copy_u\(..., 'm'\) with sum\('x', 'o'\).*use one name"):
        g.update_all(fn.copy_u("h", "m"), fn.sum("x", "o"))
    with pytest.raises(TypeError, match=r"message function must be a built-in .*got 'copy_u'"):
        g.update_all("copy_u", fn.sum("m", "o"))
    with pytest.raises(TypeError, match="message function must be"):
        g.update_all(fn.sum("m", "o"), fn.sum("m", "o"))
    with pytest.raises(TypeError, match="reduce function must be"):
        g.update_all(fn.copy_u("h", "m"), fn.copy_u("m", "o"))
    with pytest.raises(KeyError, match="no field 'nope' on nodes of type '_N'"):
        g.update_all(fn.copy_u("nope", "m"), fn.sum("m", "o"))
    with pytest.raises(KeyError, match=r"no message 'm' to reduce.*\['other'\]"):
        g.update_all(lambda edges: {"other": edges.src["h"]}, fn.sum("m", "o"))
    with pytest.raises(TypeError, match="must return a dictionary"):
        g.update_all(lambda edges: edges.src["h"], fn.sum("m", "o"))
    with pytest.raises(TypeError, match=r"reduce function must return a dictionary.*NoneType"):
        g.update_all(fn.copy_u("h", "m"), lambda nodes: None)
    with pytest.raises(ValueError, match="reduce over dimension 1"):
        g.update_all(fn.copy_u("h", "m"), lambda nodes: {"o": nodes.mailbox["m"].sum(0)})
    with pytest.raises(ValueError, match="same fields for every group"):
        g.update_all(
            fn.copy_u("h", "m"),
            lambda nodes: {f"o{nodes.mailbox['m'].shape[1]}": nodes.mailbox["m"].sum(1)},
        )
    with pytest.raises(KeyError, match="no message 'x' in the mailbox"):
        g.update_all(fn.copy_u("h", "m"), lambda nodes: {"o": nodes.mailbox["x"].sum(1)})
    with pytest.raises(RuntimeError, match="no mailbox in a function that is applied"):
        g.apply_nodes(lambda nodes: {"o": nodes.mailbox["m"]})
    with pytest.raises(ValueError, match=r"cross_reducer must be .*got 'prod'"):
        g.multi_update_all({"_E": (fn.copy_u("h", "m"), fn.sum("m", "o"))}, "prod")
    with pytest.raises(ValueError, match=r"needs \(message_func, reduce_func\).*got 1"):
        g.multi_update_all({"_E": fn.copy_u("h", "m")}, "sum")


def test_a_failed_update_changes_nothing() -> None:
    g, _ = plain_pair()
    before = dict(g.ndata)
    with pytest.raises(ZeroDivisionError):
        g.update_all(fn.copy_u("h", "m"), fn.sum("m", "o"), lambda nodes: 1 / 0)  # type: ignore[arg-type, return-value]
    assert_same_data(dict(g.ndata), before)


def test_dgl_quiet_lets_dgl_meet_no_edges() -> None:
    # Where DGL does something sensible without edges, so do we.
    ours, theirs = plain_pair("no_edges")
    with dgl_quiet():
        theirs.update_all(lambda edges: {"m": edges.src["h"]}, dgl_fn.sum("m", "o"))
    ours.update_all(lambda edges: {"m": edges.src["h"]}, fn.sum("m", "o"))
    assert_same_features(ours, theirs)
