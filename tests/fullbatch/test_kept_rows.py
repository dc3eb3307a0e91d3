# SPDX-License-Identifier: Apache-2.0
"""What is kept between calls, and what is not: nothing of the user's that can change unseen.

The oracle is plain torch on the whole graph, a dense matrix per relation. Uses 1, 2 and 3 gloo
ranks; one start for many checks.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from shards import PLAIN, own_edges, own_nodes, plain_graph, typed_graph, write_parts
from torch import Tensor

import graphshard
from graphshard import comm
from graphshard import function as fn
from graphshard.testing import run_ranks

WIDTH = 5
MODES = ("sequential", "oneshot")
WAYS = [(1, "random"), (2, "random"), (3, "empty_part")]


def rows_of(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, WIDTH, generator=generator, dtype=torch.float64)


def edge_weights(eids: Tensor) -> Tensor:
    return (eids.double() * 0.37).cos().view(-1, 1)


def aggregates(graph: Any, h: Tensor, weight: Tensor) -> Tensor:
    """One field read by built-in functions, edge values and a function of the user."""
    graph.srcdata["h"], graph.dstdata["d"] = h, h
    graph.edata["w"] = weight
    graph.update_all(fn.copy_u("h", "m"), fn.mean("m", "a"))
    graph.update_all(fn.u_mul_e("h", "w", "m"), fn.sum("m", "b"))
    graph.apply_edges(fn.u_dot_v("h", "d", "s"))
    graph.update_all(fn.copy_e("s", "m"), fn.sum("m", "c"))
    graph.update_all(lambda edges: {"m": edges.src["h"].sin() * edges.data["w"]}, fn.sum("m", "e"))
    return torch.cat([graph.dstdata[name] for name in "abce"], 1)


def expected_aggregates(whole: graphshard.Graph, h: Tensor) -> Tensor:
    """The same by index arithmetic of torch."""
    src, dst = (ends.long() for ends in whole.edges())
    weight = edge_weights(torch.arange(src.numel()))

    def total(messages: Tensor) -> Tensor:
        return messages.new_zeros(h.shape[0], messages.shape[1]).index_add(0, dst, messages)

    degrees = total(torch.ones_like(weight)).clamp(min=1)
    dots = (h[src] * h[dst]).sum(1, keepdim=True)
    parts = [total(h[src]) / degrees, total(h[src] * weight), total(dots)]
    return torch.cat([*parts, total(h[src].sin() * weight)], 1)


def gap(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max()) if found.numel() else 0.0


def loss_of(out: Tensor) -> Tensor:
    return out.sin().sum()


def train(step: str, run: Callable[[Tensor], Tensor], rows: Tensor, rescale: bool) -> list[Tensor]:
    """Three steps of two accumulated backward passes each; what each aggregate was."""
    leaf, seen = torch.nn.Parameter(rows.clone()), []
    optimizer = torch.optim.SGD([leaf], lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        for scale in (1.0, 0.5):
            out = run(leaf)
            seen.append(out.detach().clone())
            (loss_of(out) * scale).backward()
        assert leaf.grad is not None
        seen.append(leaf.grad.clone())
        if step == "optimizer":
            optimizer.step()
        else:
            leaf.data.sub_(leaf.grad, alpha=0.01)
        if rescale:
            leaf.data.mul_(1.5)
    return seen


def train_gap(rank: int, world_size: int, parts: str) -> float:
    whole, data = plain_graph(), graphshard.load_dgl_partition_data(parts, rank)
    nodes, weight = own_nodes(data)["_N"], edge_weights(own_edges(data)[PLAIN])
    rows, gaps = rows_of(whole.num_nodes()), [0.0]
    for step, rescale in (("optimizer", False), ("optimizer", True), ("data", False)):
        expected = train(step, lambda h: expected_aggregates(whole, h), rows, rescale)
        for mode in MODES:
            for is_scoped in (False, True):
                graph = graphshard.construct_full_graph(data, mode=mode)
                scope = graph.local_scope() if is_scoped else contextlib.nullcontext()
                with scope:
                    found = train(
                        step,
                        lambda h, graph=graph: aggregates(graph, h, weight),
                        rows[nodes],
                        rescale,
                    )
                gaps += [gap(a, b[nodes]) for a, b in zip(found, expected, strict=True)]
    return max(gaps)


@pytest.mark.parametrize(("num_ranks", "how"), WAYS)
def test_accumulated_gradients_and_steps_are_one_process(
    tmp_path: Path, num_ranks: int, how: str
) -> None:
    """Also all of training inside one scope: what a backward went through is fetched again."""
    parts = write_parts(tmp_path, plain_graph(), num_ranks, how)
    assert max(run_ranks(train_gap, num_ranks, parts)) < 1e-9


def rewritten_gap(rank: int, world_size: int, parts: str) -> float:
    """No-grad fields and edge values of the user, written to where torch does not count it."""
    whole, data = plain_graph(), graphshard.load_dgl_partition_data(parts, rank)
    nodes, eids = own_nodes(data)["_N"], own_edges(data)[PLAIN]
    gaps = [0.0]
    for mode in MODES:
        graph = graphshard.construct_full_graph(data, mode=mode)
        everything, own = rows_of(whole.num_nodes()), rows_of(whole.num_nodes())[nodes]
        all_weights, weight = edge_weights(torch.arange(whole.num_edges())), edge_weights(eids)
        src, dst = (ends.long() for ends in whole.edges())
        for change in range(4):
            graph.ndata["h"], graph.edata["w"] = own, weight
            graph.update_all(fn.u_mul_e("h", "w", "m"), fn.sum("m", "o"))
            graph.update_all(fn.copy_u("h", "m"), fn.max("m", "x"))
            sums = torch.zeros_like(everything).index_add(0, dst, everything[src] * all_weights)
            index = dst.view(-1, 1).expand(-1, WIDTH)
            largest = torch.zeros_like(everything).scatter_reduce(
                0, index, everything[src], "amax", include_self=False
            )
            gaps.append(gap(graph.ndata["o"], sums[nodes]))
            gaps.append(gap(graph.ndata["x"], largest[nodes]))
            if change == 0:
                own.data.mul_(2.0), everything.mul_(2.0)
            elif change == 1:
                own.numpy()[:] += 1.0
                everything += 1.0
            elif change == 2:
                weight.data.neg_(), all_weights.neg_()
    return max(gaps)


@pytest.mark.parametrize(("num_ranks", "how"), WAYS)
def test_writes_through_data_and_numpy_are_seen(tmp_path: Path, num_ranks: int, how: str) -> None:
    parts = write_parts(tmp_path, plain_graph(), num_ranks, how)
    assert max(run_ranks(rewritten_gap, num_ranks, parts)) < 1e-10


def typed_gap(rank: int, world_size: int, parts: str) -> float:
    """Two backward passes through all relations, and a write between later ones."""
    whole, data = typed_graph(), graphshard.load_dgl_partition_data(parts, rank)
    nodes, gaps = own_nodes(data), [0.0]
    calls = {etype: (fn.copy_u("h", "m"), fn.sum("m", "o")) for etype in whole.canonical_etypes}
    everything = {t: rows_of(whole.num_nodes(t), n) for n, t in enumerate(whole.ntypes)}

    def run(graph: Any, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        for ntype, rows in leaves.items():
            graph.nodes[ntype].data["h"] = rows
        graph.multi_update_all(calls, "sum")
        return {t: graph.nodes[t].data["o"] for t in ("a", "b")}

    def expected(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
        totals = {t: torch.zeros_like(leaves[t]) for t in ("a", "b")}
        for etype in whole.canonical_etypes:
            src, dst = (ends.long() for ends in whole.edges(etype=etype))
            totals[etype[2]] = totals[etype[2]].index_add(0, dst, leaves[etype[0]][src])
        return totals

    for mode in MODES:
        graph = graphshard.construct_full_graph(data, mode=mode)
        mine = {t: rows[nodes[t]].requires_grad_() for t, rows in everything.items()}
        all_rows = {t: rows.clone().requires_grad_() for t, rows in everything.items()}
        for _ in range(3):
            found, outs = run(graph, mine), expected(all_rows)
            gaps += [gap(found[t].detach(), outs[t][nodes[t]].detach()) for t in outs]
            sum(loss_of(out) for out in found.values()).backward()  # type: ignore[union-attr]
            sum(loss_of(out) for out in outs.values()).backward()  # type: ignore[union-attr]
            for ntype, rows in mine.items():
                other = all_rows[ntype].grad
                assert rows.grad is not None
                assert other is not None
                gaps.append(gap(rows.grad, other[nodes[ntype]]))
                rows.data.mul_(0.5)
                all_rows[ntype].data.mul_(0.5)
    return max(gaps)


@pytest.mark.parametrize(("num_ranks", "how"), WAYS)
def test_typed_graphs_keep_nothing_either(tmp_path: Path, num_ranks: int, how: str) -> None:
    parts = write_parts(tmp_path, typed_graph(), num_ranks, how)
    assert max(run_ranks(typed_gap, num_ranks, parts)) < 1e-9


def constants(rank: int, world_size: int, parts: str) -> tuple[list[int], float]:
    """Bytes sent by each epoch over features of the partition, whose results are written to."""
    whole, data = plain_graph(), graphshard.load_dgl_partition_data(parts, rank)
    nodes, everything = own_nodes(data)["_N"], rows_of(whole.num_nodes())
    data = replace(data, node_features={**data.node_features, "_N/x": everything[nodes]})
    src, dst = (ends.long() for ends in whole.edges())
    expected = torch.zeros_like(everything).index_add(0, dst, everything[src])[nodes]
    sent, gaps = [], [0.0]
    for mode in MODES:
        graph = graphshard.construct_full_graph(data, mode=mode)
        for other in (graph, graph.add_self_loop()):
            extra = everything[nodes] if other is not graph else 0.0
            for epoch in range(4):
                with comm.trace() as trace, other.local_scope():
                    other.srcdata["x"] = data.node_features["_N/x"]
                    other.update_all(fn.copy_u("x", "m"), fn.sum("m", "o"))
                    out = other.dstdata["o"]
                gaps.append(gap(out, expected + extra))
                sent.append(trace.total_bytes)
                if epoch == 1:
                    out.data.mul_(7.0)
                elif epoch == 2:
                    out.numpy()[:] = 0.0
    return sent, max(gaps)


def test_features_of_the_partition_travel_once(tmp_path: Path) -> None:
    """And what a caller does to the sum of them stays with the caller."""
    parts = write_parts(tmp_path, plain_graph(), 2, "random")
    for sent, largest in run_ranks(constants, 2, parts):
        assert largest < 1e-10
        for first in range(0, len(sent), 4):
            assert sent[first] > 0
            assert sent[first + 1 : first + 4] == [0, 0, 0]


def mfg_bytes(rank: int, world_size: int, parts: str, mode: str) -> list[int]:
    data = graphshard.load_dgl_partition_data(parts, rank)
    seeds = data.node_map().ids_of(rank)[::2]
    (graph,) = graphshard.construct_mfgs(data, seeds, 1, mode=mode)
    rows, sent = rows_of(data.num_owned())[graph.input_nodes], []
    for epoch in range(4):
        if epoch == 2:
            assert graph.mark_constant(rows) is rows
        with comm.trace() as trace:
            graph.srcdata["h"] = rows
            graph.update_all(fn.copy_u("h", "m"), fn.mean("m", "o"))
        sent.append(trace.total_bytes)
    return sent


@pytest.mark.parametrize("mode", MODES)
def test_rows_that_are_marked_travel_once(tmp_path: Path, mode: str) -> None:
    parts = write_parts(tmp_path, plain_graph(), 2, "random")
    for first, second, third, last in run_ranks(mfg_bytes, 2, parts, mode):
        assert first >= second > 0  # first of all ranks say what they read
        assert third >= second  # rows that will stay, in place of partial sums
        assert last == 0


def live_bytes() -> int:
    """Of all tensors that Python can reach."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if isinstance(t, Tensor)]
    return sum({t.untyped_storage().data_ptr(): t.nbytes for t in tensors}.values())


def memory(rank: int, world_size: int, parts: str) -> list[bool]:
    """Whether fields go when frames let go of them, and steps leave nothing behind."""
    data = graphshard.load_dgl_partition_data(parts, rank)
    found = []
    for mode in MODES:
        graph = graphshard.construct_full_graph(data, mode=mode)
        leaf = rows_of(data.num_owned()).requires_grad_()
        sizes = []
        for _ in range(10):
            h = leaf * 2.0
            graph.srcdata["h"] = h
            graph.update_all(lambda edges: {"m": edges.src["h"].sin()}, fn.sum("m", "o"))
            graph.update_all(fn.copy_u("h", "m"), fn.mean("m", "a"))
            loss_of(graph.dstdata["o"] + graph.dstdata["a"]).backward()
            is_alive = weakref.ref(h)
            del graph.srcdata["h"], graph.dstdata["o"], graph.dstdata["a"], h
            found.append(is_alive() is None)
            sizes.append(live_bytes())
        found.append(sizes[-1] - sizes[1] < 4 * leaf.nbytes)  # of 8 steps
    return found


def test_dropped_fields_are_freed(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, plain_graph(), 2, "random")
    for found in run_ranks(memory, 2, parts):
        assert found == [True] * 22


def mixed_gap(rank: int, world_size: int, parts: str) -> float:
    """Rows that were put together while autograd was off, and then read by a call that has it."""
    data = graphshard.load_dgl_partition_data(parts, rank)
    mine, worst = own_nodes(data)["_N"], 0.0
    whole, rows = plain_graph(), rows_of(plain_graph().num_nodes())
    src, dst = (ids.long() for ids in whole.edges())
    h = rows.clone().requires_grad_()
    (expected,) = torch.autograd.grad(((h[src] * h[dst]) ** 2).sum(), h)
    for mode in MODES:
        graph = graphshard.construct_full_graph(data, mode=mode)
        for off in (torch.no_grad, torch.inference_mode):
            for fetched_before in (True, False):
                own = rows[mine].requires_grad_()
                with graph.local_scope():
                    graph.ndata["h"] = own
                    if fetched_before:
                        graph.update_all(fn.copy_u("h", "m"), fn.max("m", "y"))
                    with off():
                        graph.apply_edges(lambda edges: {"s": edges.src["h"] * 2})
                    graph.apply_edges(lambda edges: {"t": edges.src["h"] * edges.dst["h"]})
                    (grad,) = torch.autograd.grad((graph.edata["t"] ** 2).sum(), own)
                worst = max(worst, gap(grad, expected[mine]))
    return worst


def test_rows_that_were_read_without_gradients(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, plain_graph(), 2, "random")
    assert max(run_ranks(mixed_gap, 2, parts)) < 1e-12
