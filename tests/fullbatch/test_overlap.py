# SPDX-License-Identifier: Apache-2.0
"""What is computed while rows travel, and what one-shot mode promises all the same.

Order of events, depth of prefetching, fields that are read more than once, gradients of gradients,
constants, errors in the middle. Uses 1, 2, 3 and 5 gloo ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shards import PLAIN, features, graph_of, own_edges, own_nodes, write_parts
from torch import Tensor, nn

import graphshard
from graphshard import comm
from graphshard import function as fn
from graphshard.fullbatch.reductions import EdgeValues, Extremum, Reduction, Sum
from graphshard.fullbatch.row_transport import CollectiveTransport, PairwiseTransport, RowTransport
from graphshard.fullbatch.softmax import AttentionSum
from graphshard.nn import GATConv, GATv2Conv, GraphConv, SAGEConv
from graphshard.ops._affine import _Affine, _StartAffine
from graphshard.testing import run_ranks

WIDTH = 6


class _Watched:
    """A `Pending` that says when it is first waited for."""

    def __init__(self, pending: Any, name: str, events: list[str]) -> None:
        self._pending, self._name, self._events = pending, name, events
        self._is_here = False

    def wait(self) -> list[Tensor]:
        if not self._is_here:
            self._events.append(f"wait {self._name}")
        self._is_here = True
        rows: list[Tensor] = self._pending.wait()
        return rows


def record(monkeypatch: pytest.MonkeyPatch, kind: type[RowTransport]) -> list[str]:
    """Events of passes from now on: what is started, computed and waited for."""
    events: list[str] = []

    def watched(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def start(self: RowTransport, step: int, tensors: Sequence[Tensor], *rest: Any) -> Any:
            events.append(f"start {name} {step}")
            return _Watched(method(self, step, tensors, *rest), f"{name} {step}", events)

        return start

    def computed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def compute(self: Reduction, evaluation: Any, *rest: Any) -> Any:
            events.append(f"{name} {evaluation.shard.step}")
            return method(self, evaluation, *rest)

        return compute

    monkeypatch.setattr(kind, "start_fetch", watched("fetch", kind.start_fetch))
    monkeypatch.setattr(kind, "start_return", watched("return", kind.start_return))
    for reduction in (Sum, AttentionSum, Extremum, EdgeValues):
        monkeypatch.setattr(reduction, "merge", computed("merge", reduction.merge))
        gradients = computed("gradient", reduction.direct_gradients)
        monkeypatch.setattr(reduction, "direct_gradients", gradients)
    return events


class ByEdges(nn.Module):
    """A value per edge, and a field that waits for the same exchange."""

    def forward(self, graph: Any, h: Tensor) -> Tensor:
        with graph.local_scope():
            graph.srcdata["h"], graph.srcdata["s"] = h, h[:, :1].sin()
            graph.dstdata["h"] = h.cos()
            graph.apply_edges(fn.u_mul_v("h", "h", "e"))
            graph.update_all(fn.u_sub_v("s", "h", "m"), fn.min("m", "least"))
            graph.update_all(fn.copy_e("e", "m"), fn.sum("m", "total"))
            found: Tensor = graph.dstdata["least"] + graph.dstdata["total"]
            return found


OVERLAPPED: dict[str, Callable[[], nn.Module]] = {
    "sage": lambda: SAGEConv(WIDTH, 4, "mean"),
    "pool": lambda: SAGEConv(WIDTH, 4, "pool"),
    "gat": lambda: GATConv(WIDTH, 4, 2, allow_zero_in_degree=True),
    "edges": ByEdges,
}


def events_of(
    rank: int, world_size: int, parts: str, layer: str, mode: str, prefetch: int
) -> list[list[str]]:
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph = graphshard.construct_full_graph(data, mode=mode, prefetch=prefetch)
    torch.manual_seed(0)
    conv = OVERLAPPED[layer]()
    h = torch.randn(graph.num_nodes(), WIDTH, requires_grad=True)
    conv(graph, h).sum().backward()  # what is made or checked on first use
    with pytest.MonkeyPatch.context() as patch:
        events = record(patch, CollectiveTransport if mode == "oneshot" else PairwiseTransport)
        loss = conv(graph, h).sum()
        forward = list(events)
        events.clear()
        loss.backward()
    return [forward, events]


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("layer", OVERLAPPED)
def test_one_shot_computes_own_rows_while_others_travel(
    tmp_path: Path, layer: str, num_ranks: int
) -> None:
    parts = write_parts(tmp_path, graph_of("plain"), num_ranks, "random")
    for forward, backward in run_ranks(events_of, num_ranks, parts, layer, "oneshot", 1):
        assert forward == ["start fetch 1", "merge 0", "wait fetch 1", "merge 1"]
        assert backward == ["gradient 1", "start return 1", "gradient 0", "wait return 1"]
    for forward, backward in run_ranks(events_of, num_ranks, parts, layer, "oneshot", 0):
        assert forward == ["merge 0", "start fetch 1", "wait fetch 1", "merge 1"]
        assert backward == ["gradient 1", "start return 1", "wait return 1", "gradient 0"]


def dense_events(rank: int, world_size: int, parts: str, layer: str) -> list[list[str]]:
    """Events of a layer and its dense products, which are as those of large rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("graphshard.ops._affine.LARGE_BYTES", 0)
        data = graphshard.load_dgl_partition_data(parts, rank)
        graph = graphshard.construct_full_graph(data, mode="oneshot")
        conv = DENSE[layer]()
        h = torch.randn(graph.num_nodes(), WIDTH, requires_grad=True)
        conv(graph, h).sum().backward()
        events = record(patch, CollectiveTransport)
        for name, function in (("early", _StartAffine), ("late", _Affine)):
            for step in ("forward", "backward"):
                method = getattr(function, step)

                def noted(*args: Any, event: str = f"{name} {step}", run: Any = method) -> Any:
                    events.append(event)
                    return run(*args)

                patch.setattr(function, step, staticmethod(noted))
        loss = conv(graph, h).sum()
        forward = list(events)
        events.clear()
        loss.backward()
        backward = list(events)
        # Rows' gradients are not asked for: what is on its way is waited for all the same.
        events.clear()
        loss = conv(graph, h).sum()
        torch.autograd.grad(loss, list(conv.parameters()))
        assert events.count("wait return 1") == events.count("start return 1")
        # An error of the user between start and wait, on all ranks: the next pass is as ever.
        expected = torch.autograd.grad(conv(graph, h).sum(), h)[0]
        matrix = next(p for p in conv.parameters() if p.dim() == 2)
        handle = matrix.register_hook(_fail)
        for _ in range(3):
            with pytest.raises(ZeroDivisionError):
                conv(graph, h).sum().backward()
        handle.remove()
        assert torch.equal(torch.autograd.grad(conv(graph, h).sum(), h)[0], expected)
        return [forward, backward]


def _fail(grad: Tensor) -> Tensor:
    raise ZeroDivisionError


DENSE: dict[str, Callable[[], nn.Module]] = {
    "sage": lambda: SAGEConv(WIDTH, 9, "mean", activation=torch.relu),
    "sage-narrow": lambda: SAGEConv(WIDTH, 4, "mean"),
    "gcn": lambda: GraphConv(WIDTH, 9, norm="right", allow_zero_in_degree=True),
}


@pytest.mark.compiled
@pytest.mark.parametrize("layer", DENSE)
def test_dense_products_of_own_rows_run_while_others_travel(tmp_path: Path, layer: str) -> None:
    parts = write_parts(tmp_path, graph_of("plain"), 2, "random")
    is_narrow = layer == "sage-narrow"
    before = ["late"] * is_narrow  # the product that makes the rows that travel
    for forward, backward in run_ranks(dense_events, 2, parts, layer):
        assert forward == [
            *(f"{event} forward" for event in before),
            *("start fetch 1", "merge 0", "early forward", "wait fetch 1", "merge 1"),
            "late forward",
        ]
        assert backward == [
            *("late backward", "gradient 1", "start return 1", "gradient 0", "early backward"),
            "wait return 1",
            *(f"{event} backward" for event in before),
        ]


@pytest.mark.parametrize("prefetch", [0, 1, 2, 9])
def test_sequential_has_as_many_shards_in_flight_as_it_may(tmp_path: Path, prefetch: int) -> None:
    parts = write_parts(tmp_path, graph_of("plain"), 5, "random")
    for found in run_ranks(events_of, 5, parts, "gat", "sequential", prefetch):
        for events, work in zip(found, ("merge", "gradient"), strict=True):
            assert [e for e in events if e.startswith(work)] == [f"{work} {s}" for s in range(5)]
            for name in ("fetch", "return"):
                in_flight, most = 0, {True: 0, False: 0}
                for event in events:
                    in_flight += event.startswith(f"start {name}")
                    in_flight -= event.startswith(f"wait {name}")
                    is_work = event.startswith(work)
                    most[is_work] = max(most[is_work], in_flight)
                if name in " ".join(events):
                    assert most[True] == min(prefetch, 4 if name == "fetch" else 3)
                    assert most[False] <= max(prefetch, 1)
                assert in_flight == 0


def results(rank: int, world_size: int, parts: str, mode: str, prefetch: int) -> list[Tensor]:
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph = graphshard.construct_full_graph(data, mode=mode, prefetch=prefetch)
    torch.manual_seed(0)
    found = []
    for conv in (
        SAGEConv(WIDTH, 8, "mean"),
        GATConv(WIDTH, 4, 2, attn_drop=0.3, allow_zero_in_degree=True),
    ):
        torch.manual_seed(rank)
        h = torch.randn(graph.num_nodes(), WIDTH, requires_grad=True)
        out = conv(graph, h)
        out.square().sum().backward()
        found += [out.detach(), h.grad]
    return found


@pytest.mark.parametrize("mode", ["oneshot", "sequential"])
def test_depth_changes_no_bit(tmp_path: Path, mode: str) -> None:
    parts = write_parts(tmp_path, graph_of("plain"), 3, "random")
    expected = run_ranks(results, 3, parts, mode, 1)
    for prefetch in (0, 3):
        for one, other in zip(expected, run_ranks(results, 3, parts, mode, prefetch), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def different_modes(rank: int, world_size: int, parts: str) -> str:
    data = graphshard.load_dgl_partition_data(parts, rank)
    try:
        graphshard.construct_full_graph(data, mode="sequential", prefetch=rank)
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_must_agree_on_the_mode(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, graph_of("plain"), 2, "random")
    for text in run_ranks(different_modes, 2, parts):
        assert text.startswith("how remote rows are fetched must be the same on all ranks")
        assert "prefetch=1" in text


def many_readers(graph: Any, h: Tensor, weight: Tensor) -> Tensor:
    """One field, read by sums, by a maximum and by a function of the user."""
    with graph.local_scope():
        graph.srcdata["h"] = h
        graph.edata["w"] = weight
        graph.update_all(fn.copy_u("h", "m"), fn.mean("m", "a"))
        graph.update_all(fn.u_mul_e("h", "w", "m"), fn.sum("m", "b"))
        graph.update_all(fn.copy_u("h", "m"), fn.max("m", "c"))
        graph.update_all(lambda edges: {"m": edges.src["h"].sin()}, fn.sum("m", "d"))
        return torch.cat([graph.dstdata[name] for name in "abcd"], 1)


def edge_weight(eids: Tensor) -> Tensor:
    return (eids.double() * 0.37).cos().view(-1, 1)


def read_often(rank: int, world_size: int, parts: str) -> tuple[float, dict[str, int]]:
    whole = graph_of("plain")
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph = graphshard.construct_full_graph(data, mode="oneshot")
    nodes, edges = own_nodes(data)["_N"], own_edges(data)[PLAIN]
    everything = features(whole, WIDTH, ties=False)["_N"]
    all_rows, mine = everything.clone().requires_grad_(), everything[nodes].requires_grad_()
    expected = many_readers(whole, all_rows, edge_weight(torch.arange(whole.num_edges())))
    expected.square().sum().backward()
    many_readers(graph, mine, edge_weight(edges)).square().sum().backward()
    mine.grad = None
    with comm.trace() as trace:
        out = many_readers(graph, mine, edge_weight(edges))
        out.square().sum().backward()
    assert all_rows.grad is not None
    assert mine.grad is not None
    gaps = [(out - expected[nodes]).detach().abs(), (mine.grad - all_rows.grad[nodes]).abs()]
    return max(float(gap.max()) if gap.numel() else 0.0 for gap in gaps), dict(trace.calls)


@pytest.mark.parametrize(("num_ranks", "how"), [(2, "random"), (3, "empty_part"), (5, "metis")])
def test_a_field_that_is_read_often_travels_once(tmp_path: Path, num_ranks: int, how: str) -> None:
    parts = write_parts(tmp_path, graph_of("plain"), num_ranks, how)
    for gap, calls in run_ranks(read_often, num_ranks, parts):
        assert gap < 1e-10
        assert calls == {"all_to_all": 2}


class Weighted(nn.Module):
    """A convolution whose edge weights are learned."""

    def __init__(self, eids: Tensor) -> None:
        super().__init__()
        self.conv = GraphConv(WIDTH, 5, norm="right", allow_zero_in_degree=True)
        self.weight = edge_weight(eids).requires_grad_()

    def forward(self, graph: Any, h: Tensor) -> Tensor:
        out: Tensor = self.conv(graph, h, edge_weight=self.weight.squeeze(1))
        return out


DIFFERENTIABLE: dict[str, Callable[[Tensor], nn.Module]] = {
    "sage-wide": lambda eids: SAGEConv(WIDTH, 9, "mean"),
    "sage-narrow": lambda eids: SAGEConv(WIDTH, 3, "mean"),
    "weighted": Weighted,
    "gat": lambda eids: GATConv(WIDTH, 3, 2, allow_zero_in_degree=True),
    "gatv2": lambda eids: GATv2Conv(WIDTH, 3, 2, allow_zero_in_degree=True),
    "pool": lambda eids: SAGEConv(WIDTH, 3, "pool"),
    "edges": lambda eids: ByEdges(),
}


def second_order(layer: nn.Module, graph: Any, h: Tensor) -> list[Tensor]:
    """First gradient, and the gradient of its squared norm."""
    loss = layer(graph, h).sin().sum()
    (grad,) = torch.autograd.grad(loss, h, create_graph=True)
    (again,) = torch.autograd.grad(grad.square().sum(), h, allow_unused=True)
    return [grad.detach(), torch.zeros_like(h) if again is None else again]


def second_order_gap(rank: int, world_size: int, parts: str, name: str) -> float:
    torch.set_default_dtype(torch.float64)
    try:
        whole = graph_of("plain")
        data = graphshard.load_dgl_partition_data(parts, rank)
        graph = graphshard.construct_full_graph(data, mode="oneshot")
        nodes = own_nodes(data)["_N"]
        everything = features(whole, WIDTH, ties=False)["_N"]
        gaps = [torch.zeros(1)]
        found = []
        for where, rows, eids in (
            (whole, everything, torch.arange(whole.num_edges())),
            (graph, everything[nodes], own_edges(data)[PLAIN]),
        ):
            torch.manual_seed(0)
            layer = DIFFERENTIABLE[name](eids)
            found.append(second_order(layer, where, rows.clone().requires_grad_()))
        gaps += [(b - a[nodes]).abs().max().view(1) for a, b in zip(*found, strict=True) if len(b)]
        return float(torch.cat(gaps).max())
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_one_shot_has_gradients_of_gradients(tmp_path: Path, num_ranks: int, name: str) -> None:
    parts = write_parts(tmp_path, graph_of("plain"), num_ranks, "random")
    for gap in run_ranks(second_order_gap, num_ranks, parts, name):
        assert gap < 1e-10


def constants(rank: int, world_size: int, parts: str) -> list[int]:
    """Merges of shards per epoch, on features that never change and then do."""
    data = graphshard.load_dgl_partition_data(parts, rank)
    h = torch.ones(data.num_owned(), WIDTH)
    data = replace(data, node_features={**data.node_features, "_N/h": h})
    graph = graphshard.construct_full_graph(data, mode="oneshot")
    conv = SAGEConv(WIDTH, 9, "mean")
    counts = []
    with pytest.MonkeyPatch.context() as patch:
        events = record(patch, CollectiveTransport)
        for epoch in range(4):
            if epoch == 2:
                h.mul_(2.0)
            conv(graph, h).sum().backward()
            counts.append(len(events))
            events.clear()
    return counts


def test_the_aggregate_of_constants_is_computed_once(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, graph_of("plain"), 2, "random")
    for counts in run_ranks(constants, 2, parts):
        assert counts == [4, 0, 4, 0]


def freed(rank: int, world_size: int, parts: str) -> bool:
    """Whether a sum lets go of the rows that it added up, which its backward does not read."""
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph = graphshard.construct_full_graph(data, mode="oneshot")
    x = torch.randn(graph.num_nodes(), WIDTH, requires_grad=True)
    h = x * 2.0
    with graph.local_scope():
        graph.srcdata["h"] = h
        graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "s"))
        total = graph.dstdata["s"]
    alive = weakref.ref(h)
    del h
    is_freed = alive() is None
    total.sum().backward()
    assert x.grad is not None
    degrees = graph.out_degrees().float().view(-1, 1).expand_as(x)
    torch.testing.assert_close(x.grad, 2.0 * degrees)
    return is_freed


def test_a_sum_keeps_no_rows(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, graph_of("plain"), 2, "random")
    assert run_ranks(freed, 2, parts) == [True, True]


def one_worker(rank: int, world_size: int, parts: str) -> bool:
    """With nobody to read from, the rows are not copied."""
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph = graphshard.construct_full_graph(data, mode="oneshot")
    h = torch.randn(graph.num_nodes(), WIDTH)
    _, rows = graph.localize({"_N": h})
    return rows["_N"] is h


def test_one_worker_copies_nothing(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, graph_of("plain"), 1, "random")
    assert run_ranks(one_worker, 1, parts) == [True]


class Broken(Exception):
    pass


def fails_in_the_middle(
    rank: int, world_size: int, parts: str, mode: str, where: str, prefetch: int
) -> list[bool]:
    """Whether results are right after an error while rows were in flight."""
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph = graphshard.construct_full_graph(data, mode=mode, prefetch=prefetch)
    torch.manual_seed(0)
    layer = GATConv(WIDTH, 4, 2, allow_zero_in_degree=True)
    torch.manual_seed(rank)
    h = torch.randn(graph.num_nodes(), WIDTH, requires_grad=True)

    def run() -> list[Tensor]:
        out = layer(graph, h)
        (grad,) = torch.autograd.grad(out.square().sum(), h)
        return [out.detach(), grad]

    expected = run()

    def fail(*_: Any) -> Any:
        raise Broken

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AttentionSum, "merge" if where == "forward" else "direct_gradients", fail)
        with pytest.raises(Broken):
            run()
    if where == "backward":  # with gradients on their way, too
        seen = []
        direct = AttentionSum.direct_gradients

        def fail_second(*arguments: Any) -> Any:
            seen.append(1)
            return direct(*arguments) if len(seen) == 1 else fail()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(AttentionSum, "direct_gradients", fail_second)
            with pytest.raises(Broken):
                run()
    dist.barrier()
    return [torch.equal(a, b) for a, b in zip(expected, run(), strict=True)]


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    ("mode", "prefetch"), [("oneshot", 1), ("sequential", 1), ("sequential", 2)]
)
def test_an_error_in_the_middle_leaves_no_message_behind(
    tmp_path: Path, mode: str, prefetch: int, where: str
) -> None:
    parts = write_parts(tmp_path, graph_of("plain"), 3, "random")
    for same in run_ranks(fails_in_the_middle, 3, parts, mode, where, prefetch):
        assert same == [True, True]
