# SPDX-License-Identifier: Apache-2.0
"""Remote rows in bfloat16: how far off, what is left alone, how many bytes. 2 and 3 gloo ranks.

The oracle is dense algebra in float64 on a thousand nodes of Cora. bfloat16 has 8 significant bits,
so that rounding changes a number by at most ``U = 2**-8`` of it. The bounds carry this through a
network: every remote row that is read, and every gradient returned to its owner, is off by that
much at most.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from shards import own_nodes, write_parts
from torch import Tensor
from torch.nn import functional

import graphshard
from graphshard import comm
from graphshard import function as fn
from graphshard.nn import GATConv, SAGEConv
from graphshard.testing import run_ranks

U = 2.0**-8
WIDTHS = (24, 20, 28, 7)
MODES = ("oneshot", "sequential")
SLACK = 1.0 + 1e-9  # for the rounding of the bounds themselves


def cora() -> graphshard.Graph:
    """The edges among a thousand nodes: the first, and those that are nearest to it."""
    graph = graphshard.data.load_dataset("cora").graph
    src, dst = (ids.long() for ids in graph.edges())
    near = torch.zeros(graph.num_nodes(), dtype=torch.int64)
    near[0] = 1
    while int((near > 0).sum()) < 1000:
        near = near.index_add(0, dst, (near[src] > 0).long())
    nodes = near.argsort(descending=True, stable=True)[:1000]
    place = torch.full_like(near, -1)
    place[nodes] = torch.arange(1000)
    src, dst = place[src], place[dst]
    kept = (src >= 0) & (dst >= 0)
    return graphshard.graph((src[kept], dst[kept]), num_nodes=1000)


def construct(parts: str, rank: int, mode: Any, dtype: torch.dtype | None) -> Any:
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph = graphshard.construct_full_graph(data, mode=mode, halo_dtype=dtype)
    return graph, own_nodes(data)["_N"]


def owners(nodes: Tensor, count: int) -> Tensor:
    """Which rank has each node."""
    owner = torch.zeros(count, dtype=torch.int64)
    owner[nodes] = torch.distributed.get_rank()
    torch.distributed.all_reduce(owner)
    return owner


def counts(graph: graphshard.Graph) -> Tensor:
    """``[num_dst, num_src]`` edges, float64."""
    src, dst = graph.edges()
    size = graph.num_nodes()
    found = torch.zeros(size, size, dtype=torch.float64)
    return found.index_put_((dst.long(), src.long()), torch.ones(1).double(), accumulate=True)


def inputs(size: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, WIDTHS[0], generator=generator, dtype=torch.float64)


def sage_layers() -> list[SAGEConv]:
    torch.manual_seed(0)
    pairs = zip(WIDTHS, WIDTHS[1:], strict=False)
    return [SAGEConv(a, b, "mean").double() for a, b in pairs]


def check_sage(rank: int, world_size: int, parts: str, mode: str) -> float:
    """Outputs of three layers with ReLU, entry by entry; returns how large the bound is."""
    whole = cora()
    graph, nodes = construct(parts, rank, mode, torch.bfloat16)
    owner = owners(nodes, whole.num_nodes())
    edges = counts(whole)
    mean = edges / edges.sum(1, keepdim=True).clamp(min=1)
    remote = mean * (owner.view(-1, 1) != owner)
    expected, error = inputs(whole.num_nodes()), torch.zeros(())
    found = expected[nodes]
    for number, layer in enumerate(sage_layers()):
        neigh, own = layer.fc_neigh.weight.detach().T, layer.fc_self.weight.detach().T
        is_last = number == len(WIDTHS) - 2
        sent = expected
        if neigh.shape[0] > neigh.shape[1]:  # the product travels
            sent, neigh = expected @ neigh, torch.eye(neigh.shape[1]).double()
            off = error @ layer.fc_neigh.weight.detach().T.abs() if number else error
        else:
            off = error
        off = off + torch.zeros_like(sent)
        arrived = mean @ off + U * remote @ (sent.abs() + off)
        error = arrived @ neigh.abs() + (error @ own.abs() if number else 0.0)
        expected = mean @ sent @ neigh + expected @ own + layer.fc_self.bias.detach()
        found = layer(graph, found)
        if not is_last:
            expected, found = expected.relu(), found.relu()
    gap = (found - expected[nodes]).abs().detach()
    assert bool((gap <= error[nodes] * SLACK + 1e-12).all())
    assert float(gap.norm() / expected[nodes].norm()) > U / 100  # something was rounded
    return float(error[nodes].norm() / expected[nodes].norm())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_sage_is_within_the_bound(tmp_path: Path, num_ranks: int, mode: str) -> None:
    parts = write_parts(tmp_path, cora(), num_ranks, "metis")
    for bound in run_ranks(check_sage, num_ranks, parts, mode):
        assert bound < 30 * U  # it says something


def check_gradient(rank: int, world_size: int, parts: str, mode: str) -> None:
    """Gradients of inputs through three layers without activation, which no value changes."""
    whole = cora()
    graph, nodes = construct(parts, rank, mode, torch.bfloat16)
    owner = owners(nodes, whole.num_nodes())
    edges = counts(whole)
    mean = edges / edges.sum(1, keepdim=True).clamp(min=1)
    remote = mean * (owner.view(-1, 1) != owner)
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(whole.num_nodes(), WIDTHS[-1], generator=generator, dtype=torch.float64)
    grad, error = weights, torch.zeros_like(weights)
    for layer in reversed(sage_layers()):
        neigh, own = layer.fc_neigh.weight.detach(), layer.fc_self.weight.detach()
        if neigh.shape[1] > neigh.shape[0]:  # gradients of the product travel
            inner, outer = torch.eye(neigh.shape[0]).double(), neigh
        else:
            inner, outer = neigh, torch.eye(neigh.shape[1]).double()
        back, off = grad @ inner, error @ inner.abs()
        returned = mean.T @ off
        for reader in range(world_size):  # one sum per rank travels, and is rounded
            part = mean * (owner == reader).view(-1, 1) * (owner.view(-1, 1) != owner)
            returned += U * ((part.T @ back).abs() + part.T @ off)
        error = returned @ outer.abs() + error @ own.abs()
        grad = mean.T @ back @ outer + grad @ own
    assert bool((remote > 0).any())
    h = inputs(whole.num_nodes())[nodes].requires_grad_()
    out = h
    for layer in sage_layers():
        out = layer(graph, out)
    (out * weights[nodes]).sum().backward()
    assert h.grad is not None
    gap = (h.grad - grad[nodes]).abs()
    assert bool((gap <= error[nodes] * SLACK + 1e-12).all())
    assert float(gap.norm() / grad[nodes].norm()) > U / 100


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_gradients_are_within_the_bound(tmp_path: Path, num_ranks: int, mode: str) -> None:
    parts = write_parts(tmp_path, cora(), num_ranks, "metis")
    run_ranks(check_gradient, num_ranks, parts, mode)


def check_gat(rank: int, world_size: int, parts: str, mode: str) -> None:
    """One layer.

    A score that is off by ``t`` changes a weight by ``exp(2 t) - 1`` of it at most, because it
    appears above and below the line.
    """
    whole = cora()
    graph, nodes = construct(parts, rank, mode, torch.bfloat16)
    torch.manual_seed(0)
    layer = GATConv(WIDTHS[0], 6, 4, allow_zero_in_degree=True).double()
    x = inputs(whole.num_nodes())
    edges = counts(whole)
    with torch.no_grad():
        rows = layer.fc(x).unflatten(1, (4, 6))
        left, right = (rows * layer.attn_l).sum(-1), (rows * layer.attn_r).sum(-1)
        gap = (layer(graph, x[nodes]) - layer.bias.view(4, 6)).reshape(len(nodes), 4, 6)
    for head in range(4):
        scores = functional.leaky_relu(left[:, head] + right[:, head].view(-1, 1), 0.2)
        weights = edges * (scores - scores.amax(1, keepdim=True)).exp()
        weights /= weights.sum(1, keepdim=True).clamp(min=1e-300)
        off = U * left[:, head].abs().max()
        share = U + torch.expm1(2 * off) * (1 + U)
        bound = share * weights @ rows[:, head].abs()
        error = (gap[:, head] - (weights @ rows[:, head])[nodes]).abs()
        assert bool((error <= bound[nodes] * SLACK + 1e-12).all())
        assert float(error.max()) > 1e-5


@pytest.mark.parametrize("mode", MODES)
def test_gat_is_within_the_bound(tmp_path: Path, mode: str) -> None:
    parts = write_parts(tmp_path, cora(), 2, "metis")
    run_ranks(check_gat, 2, parts, mode)


def epoch(graph: Any, layers: list[torch.nn.Module], h: Tensor) -> tuple[Tensor, Tensor]:
    leaf = h.clone().requires_grad_()
    out = leaf
    for layer in layers:
        out = layer(graph, out).flatten(1)
    out.square().sum().backward()
    assert leaf.grad is not None
    return out.detach(), leaf.grad


def compare(rank: int, world_size: int, parts: str, mode: str, kind: str) -> dict[str, Any]:
    """One layer, exact and narrow: bytes of a later epoch, and rows that no remote row reaches."""
    made = {
        "sage": lambda: SAGEConv(WIDTHS[0], 32, "mean"),
        "gat": lambda: GATConv(WIDTHS[0], 8, 4, allow_zero_in_degree=True),
    }
    torch.manual_seed(0)
    layers = [made[kind]()]
    found = []
    for dtype in (None, torch.bfloat16):
        graph, nodes = construct(parts, rank, mode, dtype)
        h = inputs(graph.original_ids["_N"].max().item() + 3000)[nodes].float()
        epoch(graph, layers, h)
        with comm.trace() as trace:
            out, grad = epoch(graph, layers, h)
        found.append((out, grad, trace.total_bytes))
    whole = cora()
    src, dst = (ids.long() for ids in whole.edges())
    owner = owners(nodes, whole.num_nodes())
    crosses = owner[src] != owner[dst]
    reads, is_read = (torch.zeros(whole.num_nodes(), dtype=torch.bool) for _ in range(2))
    reads[dst[crosses]] = True
    is_read[src[crosses]] = True
    (out, grad, exact_bytes), (narrow_out, narrow_grad, narrow_bytes) = found
    alone = ~reads[nodes]
    # A gradient is exact where nothing was returned, and the outputs that it starts from are.
    reaches = torch.zeros(whole.num_nodes(), dtype=torch.bool)
    reaches[src[reads[dst]]] = True
    untouched = ~(is_read | reads | reaches)[nodes]
    return {
        "bytes": (exact_bytes, narrow_bytes),
        "changed": not torch.equal(out, narrow_out),
        "out": torch.equal(out[alone], narrow_out[alone]) and bool(alone.any()),
        "grad": torch.equal(grad[untouched], narrow_grad[untouched]) and bool(untouched.any()),
    }


@pytest.mark.parametrize("kind", ["sage", "gat"])
@pytest.mark.parametrize("mode", MODES)
def test_half_the_bytes_and_own_rows_are_left_alone(tmp_path: Path, mode: str, kind: str) -> None:
    parts = write_parts(tmp_path, cora(), 2, "metis")
    for found in run_ranks(compare, 2, parts, mode, kind):
        exact, narrow = found["bytes"]
        assert 2 * narrow == exact
        assert found["changed"]
        assert found["out"]
        assert found["grad"]


def mfgs(rank: int, world_size: int, parts: str, mode: str) -> tuple[float, float, dict[str, int]]:
    """Blocks of the seeds, narrow and exact; and what constants cost in a later epoch."""
    data = graphshard.load_dgl_partition_data(parts, rank)
    seeds = data.node_map().ids_of(rank)[::7]
    torch.manual_seed(0)
    layers = [SAGEConv(8, 16, "mean"), SAGEConv(16, 4, "mean")]
    generator = torch.Generator().manual_seed(rank)
    h = torch.randn(data.num_owned(), 8, generator=generator)
    found, calls = [], {}
    for dtype in (None, torch.bfloat16):
        graphs = graphshard.construct_mfgs(data, seeds, 2, mode=mode, halo_dtype=dtype)
        rows = h[graphs[0].input_nodes]
        for _ in range(2):
            with comm.trace() as trace:
                out = rows
                for layer, graph in zip(layers, graphs, strict=True):
                    out = layer(graph, out)
                out.sum().backward()
            calls = trace.bytes_sent
        found.append((out.detach(), sum(calls.values())))
    (exact, exact_bytes), (narrow, narrow_bytes) = found
    return float((narrow - exact).norm() / exact.norm()), narrow_bytes / exact_bytes, calls


@pytest.mark.parametrize("mode", MODES)
def test_mfgs_send_narrow_rows(tmp_path: Path, mode: str) -> None:
    parts = write_parts(tmp_path, cora(), 2, "metis")
    for error, share, _ in run_ranks(mfgs, 2, parts, mode):
        assert 0.0 < error < 2 * U
        assert share == 0.5


def test_only_floats_that_a_backend_knows() -> None:
    with pytest.raises(
        ValueError, match=r"halo_dtype must be None or one of torch.bfloat16, torch"
    ):
        graphshard.fullbatch.AggregationMode(halo_dtype=torch.float32)
    with pytest.raises(ValueError, match=r"prefetch must be at least 0 \(got -1\)"):
        graphshard.fullbatch.AggregationMode(prefetch=-1)


def check_int8(rank: int, world_size: int, parts: str) -> None:
    """A sum, its gradient and an attention, with rows as int8: within a scale for each edge."""
    whole = cora()
    x = inputs(whole.num_nodes())
    edges = counts(whole)
    for mode in MODES:
        for sums in (True, False):
            data = graphshard.load_dgl_partition_data(parts, rank)
            graph = graphshard.construct_full_graph(
                data, mode=mode, halo_dtype=torch.int8, partial_sums=sums
            )
            nodes, found = own_nodes(data)["_N"], []
            for seed in (0, 0, 1):
                torch.manual_seed(seed)
                own = x[nodes].requires_grad_()
                with graph.local_scope():
                    graph.srcdata["h"] = own
                    graph.update_all(fn.copy_u("h", "m"), fn.sum("m", "o"))
                    out = graph.dstdata["o"]
                out.sum().backward()
                found.append(out.detach())
            assert torch.equal(found[0], found[1])
            assert not torch.equal(found[0], found[2])
            # Partial sums are larger than rows, but there are fewer.
            bound = edges @ (x.abs().amax(1, keepdim=True) / 127).expand_as(x)
            gap = (found[0] - (edges @ x)[nodes]).abs()
            assert bool((gap <= bound[nodes] * SLACK + 1e-5).all())
            expected = edges.sum(0)[nodes].view(-1, 1).expand_as(own)
            torch.testing.assert_close(own.grad, expected, rtol=1 / 127, atol=1e-6)


def test_rows_as_int8_are_within_their_scales(tmp_path: Path) -> None:
    run_ranks(check_int8, 2, write_parts(tmp_path, cora(), 2, "metis"))
