# SPDX-License-Identifier: Apache-2.0
"""inference: every layer in batches equals the layer at once, on one process; 0 to 3 gloo ranks.

Also that memory is bounded by the batch, in a process of its own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphshard
from forked_programs import run_program
from graphshard import function as fn
from graphshard.sampling import inference
from graphshard.testing import RanksFailed, run_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "nn"))
sys.path.insert(0, str(Path(__file__).parents[1] / "fullbatch"))

from nn_layer_cases import IN_FEATS, LayerCase, nn_layer_cases
from shards import PLAIN, features, graph_of, own_edges, own_nodes, write_parts

BATCH_SIZES = (1, 4, 1000)


class One(nn.Module):
    """A model of one layer, whose further inputs are closed over."""

    def __init__(self, case: LayerCase, layer: nn.Module, keywords: dict[str, Any]) -> None:
        super().__init__()
        self.case, self.layer, self.keywords = case, layer, keywords

    def forward(self, blocks: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.case.kind == "plain":
            return {"_N": self.layer(blocks[0], inputs["_N"], **self.keywords)}
        return self.layer(blocks[0], inputs, **self.keywords)


def close(found: Any, wanted: Any) -> bool:
    if isinstance(found, dict):
        return found.keys() == wanted.keys() and all(close(found[k], wanted[k]) for k in wanted)
    return bool(torch.allclose(found, wanted, rtol=0, atol=1e-10))


def in_float64(function: Any) -> Any:
    torch.set_default_dtype(torch.float64)
    try:
        return function()
    finally:
        torch.set_default_dtype(torch.float32)


def all_edges(graph: graphshard.Graph, kind: str) -> Any:
    if kind == "plain":
        return torch.arange(graph.num_edges())
    return {t: torch.arange(graph.num_edges(t)) for t in graph.canonical_etypes}


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in nn_layer_cases()])
def test_every_layer_gives_in_batches_what_it_gives_at_once(
    case: LayerCase, idtype: torch.dtype
) -> None:
    def check() -> None:
        graph = graph_of(case.kind)
        graph = graph.int() if idtype == torch.int32 else graph
        torch.manual_seed(0)
        layer = case.make(graph.canonical_etypes)
        keywords = case.keywords(all_edges(graph, case.kind))
        inputs = features(graph, IN_FEATS, ties="max" in case.name or "pool" in case.name)
        model = One(case, layer, keywords)
        with torch.no_grad():
            wanted = model([graph], inputs)
        for batch_size in BATCH_SIZES:
            assert close(inference(model, graph, inputs, batch_size), wanted), batch_size

    in_float64(check)


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=c.name) for c in nn_layer_cases() if c.attention]
)
def test_attention_weights_come_out_whole(case: LayerCase) -> None:
    def check() -> None:
        graph = graph_of("plain")
        layer = case.make()
        keywords = {**case.keywords(torch.arange(graph.num_edges())), "get_attention": True}
        inputs = features(graph, IN_FEATS, ties=False)["_N"]
        found = inference(lambda blocks, x: layer(blocks[0], x, **keywords), graph, inputs, 4)
        wanted = layer(graph, inputs, **keywords)
        assert all(close(a, b) for a, b in zip(found, wanted, strict=True))

    in_float64(check)


def shard_problems(rank: int, world_size: int, parts: str, kind: str, mode: str) -> list[str]:
    """Names of layers whose rows on this rank differ from those of one process."""

    def check() -> list[str]:
        whole = graph_of(kind)
        data = graphshard.load_dgl_partition_data(parts, rank)
        manager = graphshard.construct_full_graph(data, mode=mode)
        nodes, edges = own_nodes(data), own_edges(data)
        problems = []
        for case in nn_layer_cases(kind):
            torch.manual_seed(0)
            layer = case.make(whole.canonical_etypes)
            inputs = features(whole, IN_FEATS, ties="max" in case.name or "pool" in case.name)
            with torch.no_grad():
                wanted = One(case, layer, case.keywords(all_edges(whole, kind)))([whole], inputs)
            mine = One(case, layer, case.keywords(edges[PLAIN] if kind == "plain" else edges))
            own = {t: x[nodes[t]] for t, x in inputs.items()}
            found = inference(mine, manager, own, 4)
            if not close(found, {t: x[nodes[t]] for t, x in wanted.items()}):
                problems.append(case.name)
        return problems

    return in_float64(check)


@pytest.mark.parametrize(
    ("num_ranks", "how", "mode", "kind"),
    [
        (2, "random", "sequential", "typed"),
        (3, "empty_part", "oneshot", "plain"),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (
                (1, "metis", "sequential", "plain"),
                (1, "metis", "sequential", "typed"),
                (2, "random", "sequential", "plain"),
                (3, "empty_part", "oneshot", "typed"),
            )
        ),
    ],
)
def test_every_layer_on_shards_in_batches(
    tmp_path: Path, num_ranks: int, how: str, kind: str, mode: str
) -> None:
    parts = write_parts(tmp_path, graph_of(kind), num_ranks, how)
    for problems in run_ranks(shard_problems, num_ranks, parts, kind, mode, timeout=100.0):
        assert problems == []


class Documented(nn.Module):
    """The model of the sampling documentation: one graph per layer, by index."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            graphshard.nn.SAGEConv(a, b, aggregator_type="mean")
            for a, b in ((6, 8), (8, 8), (8, 3))
        )
        self.dropout = nn.Dropout(0.5)

    def forward(self, blocks: Any, features: Tensor) -> Tensor:
        for idx, conv in enumerate(self.convs):
            features = conv(blocks[idx], features)
            if idx < len(self.convs) - 1:
                features = self.dropout(F.relu(features, inplace=True))
        return features


def documented_model(rank: int, world_size: int, parts: str, mode: str) -> dict[str, bool]:
    """The unchanged model on the sharded graph, on MFGs, on blocks, and by inference."""

    def check() -> dict[str, bool]:
        whole = graph_of("plain")
        torch.manual_seed(0)
        model = Documented().eval()
        inputs = features(whole, 6, ties=False)["_N"]
        data = graphshard.load_dgl_partition_data(parts, rank)
        nodes = own_nodes(data)["_N"]
        manager = graphshard.construct_full_graph(data, mode=mode)
        start = data.node_map().starts[rank]
        seeds = (nodes % 3 == 0).nonzero().view(-1)
        mfgs = graphshard.construct_mfgs(data, seeds + start, 3, mode=mode)
        with torch.no_grad():
            wanted = model([whole] * 3, inputs)
            on_shards = model([manager] * 3, inputs[nodes])
            on_mfgs = model(mfgs, inputs[nodes][mfgs[0].input_nodes])
        return {
            "shards": close(on_shards, wanted[nodes]),
            "mfgs": close(on_mfgs, wanted[nodes[seeds]]),
            "inference": close(inference(model, manager, inputs[nodes], 3), wanted[nodes]),
        }

    return in_float64(check)


@pytest.mark.parametrize("mode", ["sequential", "oneshot"])
@pytest.mark.parametrize(("num_ranks", "how"), [(1, "metis"), (2, "random"), (3, "empty_part")])
def test_the_unchanged_model_runs_everywhere(
    tmp_path: Path, num_ranks: int, how: str, mode: str
) -> None:
    parts = write_parts(tmp_path, graph_of("plain"), num_ranks, how)
    for found in run_ranks(documented_model, num_ranks, parts, mode):
        assert all(found.values()), found


class EdgeNetwork(nn.Module):
    """User-defined message, reduce and apply functions, and edge values made on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(13, 5)

    def message(self, edges: Any) -> dict[str, Tensor]:
        rows = torch.cat([edges.src["h"], edges.dst["h"], edges.data["gate"]], 1)
        return {"m": torch.tanh(self.linear(rows)), "n": edges.src["h"][:, :1]}

    def reduce(self, nodes: Any) -> dict[str, Tensor]:
        box = nodes.mailbox["m"]
        return {"out": box.sort(dim=1).values[:, 0] + nodes.mailbox["n"].sum(1)}

    def gate(self, edges: Any) -> dict[str, Tensor]:
        return {"gate": (edges.src["h"] * edges.dst["h"]).sum(1)}

    def shift(self, nodes: Any) -> dict[str, Tensor]:
        return {"out": nodes.data["out"] + 1}

    def forward(self, blocks: Any, h: Tensor) -> Tensor:
        graph = blocks[0]
        with graph.local_scope():
            graph.srcdata["h"] = h
            graph.apply_edges(self.gate)
            graph.edata["gate"] = graph.edata["gate"].unsqueeze(-1).mul_(0.5).sigmoid()
            is_whole = isinstance(graph.edata["gate"], Tensor)
            assert is_whole == (type(graph) is graphshard.Graph)
            graph.update_all(self.message, self.reduce, self.shift)
            graph.update_all(fn.e_mul_u("gate", "h", "m"), fn.mean("m", "mean"))
            return torch.cat([graph.dstdata["out"], graph.dstdata["mean"], graph.dstdata["h"]], 1)


@pytest.mark.parametrize("batch_size", BATCH_SIZES)
def test_user_defined_functions_see_every_edge_once(batch_size: int) -> None:
    def check() -> None:
        graph = graph_of("plain")
        inputs = features(graph, 6, ties=False)["_N"]
        model = EdgeNetwork()
        with torch.no_grad():
            wanted = model([graph], inputs)
        assert close(inference(model, graph, inputs, batch_size), wanted)

    in_float64(check)


def user_functions_on_shards(rank: int, world_size: int, parts: str) -> bool:
    def check() -> bool:
        graph = graph_of("plain")
        inputs = features(graph, 6, ties=False)["_N"]
        torch.manual_seed(0)
        model = EdgeNetwork()
        graphshard.sync_params(model)
        data = graphshard.load_dgl_partition_data(parts, rank)
        nodes = own_nodes(data)["_N"]
        manager = graphshard.construct_full_graph(data, mode="sequential")
        with torch.no_grad():
            wanted = model([graph], inputs)
        # A user-defined reduction, which sequential aggregation alone would refuse.
        return close(inference(model, manager, inputs[nodes], 3), wanted[nodes])

    return in_float64(check)


def test_user_defined_functions_on_shards(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, graph_of("plain"), 2, "random")
    assert all(run_ranks(user_functions_on_shards, 2, parts))


def test_user_functions_are_told_the_ids_of_the_graph() -> None:
    graph = graph_of("plain")
    seen: list[Tensor] = []

    def message(edges: Any) -> dict[str, Tensor]:
        seen.append(torch.stack(edges.edges()))
        return {"m": edges.src["h"]}

    def model(blocks: Any, h: Tensor) -> Tensor:
        blocks[0].srcdata["h"] = h
        blocks[0].update_all(message, fn.sum("m", "h"))
        return blocks[0].dstdata["h"]

    inference(model, graph, torch.ones(25, 1), 3)
    src, dst, eids = torch.cat(seen, 1)
    assert torch.equal(eids.sort().values, torch.arange(graph.num_edges()))
    assert torch.equal(src, graph.edges()[0][eids])
    assert torch.equal(dst, graph.edges()[1][eids])
    assert "h" not in graph.ndata  # nothing is left on the graph


def joint_softmax(blocks: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Attention over the edges of all relations into a type together, and a sliced graph."""
    graph = blocks[0]
    with graph.local_scope():
        for ntype, rows in inputs.items():
            graph.nodes[ntype].data["h"] = rows
        graph.apply_edges(fn.u_dot_v("h", "h", "e"))
        logits = {t: graph.edges[t].data["e"] for t in graph.canonical_etypes}
        weights = graphshard.edge_softmax(graph, logits)
        for etype, values in weights.items():
            graph.edges[etype].data["w"] = values
        functions = {t: (fn.u_mul_e("h", "w", "m"), fn.sum("m", "o")) for t in logits}
        graph.multi_update_all(functions, "sum")
        out = {t: graph.nodes[t].data["o"] for t in ("a", "b")}
        sliced = graph["a", :, "b"]
        with sliced.local_scope():
            sliced.update_all(fn.copy_u("h", "m"), fn.max("m", "top"))
            out["sliced"] = sliced.dstdata["top"]
        return out


@pytest.mark.parametrize("batch_size", BATCH_SIZES)
def test_softmax_over_several_relations_together(batch_size: int) -> None:
    def check() -> None:
        graph = graph_of("typed")
        inputs = features(graph, 6, ties=False)
        assert close(
            inference(joint_softmax, graph, inputs, batch_size), joint_softmax([graph], inputs)
        )

    in_float64(check)


def by_source(blocks: Any, h: Tensor) -> Tensor:
    graph = blocks[0]
    with graph.local_scope():
        graph.srcdata["h"] = h
        graph.apply_edges(fn.u_dot_v("h", "h", "e"))
        graph.edata["w"] = graphshard.edge_softmax(graph, graph.edata["e"], norm_by="src")
        graph.update_all(fn.u_mul_e("h", "w", "m"), fn.sum("m", "o"))
        graph.pull([3, 4], fn.copy_u("o", "m"), fn.sum("m", "o"))
        return graph.dstdata["o"]


def test_softmax_over_out_edges_and_messages_to_some_nodes() -> None:
    def check() -> None:
        graph = graph_of("plain")
        inputs = features(graph, 6, ties=False)["_N"]
        assert close(inference(by_source, graph, inputs, 4), by_source([graph], inputs))

    in_float64(check)


@pytest.mark.parametrize("num_nodes", [0, 1, 5])
def test_graphs_without_edges_or_nodes(num_nodes: int) -> None:
    graph = graphshard.graph(([], []), num_nodes=num_nodes)
    model = Documented()
    found = inference(model, graph, torch.ones(num_nodes, 6), 2)
    assert found.shape == (num_nodes, 3)
    gat = graphshard.nn.GATConv(6, 3, 2, allow_zero_in_degree=True)
    found = inference(lambda blocks, x: gat(blocks[0], x), graph, torch.ones(num_nodes, 6), 2)
    assert found.shape == (num_nodes, 2, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    graph = graph_of("plain")
    model = Documented().eval().to(dtype)
    inputs = features(graph, 6, ties=False)["_N"].to(dtype)
    with torch.no_grad():
        wanted = model([graph] * 3, inputs)
    found = inference(model, graph, inputs, 4)
    assert found.dtype == dtype
    assert torch.allclose(
        found.float(), wanted.float(), atol=1e-5 if dtype == torch.float32 else 0.1
    )


def test_the_models_mode_is_put_back_and_nothing_needs_a_gradient() -> None:
    graph = graph_of("plain")
    model = Documented()
    model.convs[1].eval()
    modes = [module.training for module in model.modules()]
    found = inference(model, graph, torch.ones(25, 6), 4)
    assert [module.training for module in model.modules()] == modes
    assert not found.requires_grad
    assert torch.equal(found, inference(model, graph, torch.ones(25, 6), 4))  # no dropout

    def failing(blocks: Any, h: Tensor) -> Tensor:
        raise KeyError("no")

    model.forward = failing  # type: ignore[method-assign]
    with pytest.raises(KeyError):
        inference(model, graph, torch.ones(25, 6), 4)
    assert [module.training for module in model.modules()] == modes
    assert torch.is_grad_enabled()


def test_a_model_gets_as_many_graphs_as_it_asks_for() -> None:
    graph = graph_of("plain")
    x = torch.ones(25, 6)
    convs = [graphshard.nn.GraphConv(6, 6, allow_zero_in_degree=True) for _ in range(3)]

    def zipped(blocks: Any, h: Tensor) -> Tensor:
        for conv, block in zip(convs, blocks, strict=False):
            h = conv(block, h)
        return h

    def sliced(blocks: Any, h: Tensor) -> Tensor:
        for conv, block in zip(convs, [blocks[-1], *blocks[1:3]], strict=True):
            h = conv(block, h)
        return h

    def counted(blocks: Any, h: Tensor) -> Tensor:
        return zipped(blocks[: len(blocks)], h)

    def endless(blocks: Any, h: Tensor) -> Tensor:
        return h if list(blocks) else h + 1

    wanted = zipped([graph] * 3, x)
    assert torch.allclose(inference(zipped, graph, x, 4), wanted, atol=1e-6)
    assert torch.allclose(inference(sliced, graph, x, 4), wanted, atol=1e-6)
    assert torch.allclose(inference(counted, graph, x, 4, num_layers=3), wanted, atol=1e-6)
    with pytest.raises(TypeError, match="give inference\\(..., num_layers=...\\)"):
        inference(counted, graph, x, 4)
    with pytest.raises(RuntimeError, match="gone through 1000 graphs"):
        inference(endless, graph, x, 4)


def test_wrong_arguments() -> None:
    graph = graph_of("plain")
    model, x = Documented(), torch.ones(25, 6)
    with pytest.raises(ValueError, match=r"batch_size must be at least 1 \(got 0\)"):
        inference(model, graph, x, 0)
    with pytest.raises(ValueError, match=r"num_layers must be at least 1 \(got 0\)"):
        inference(model, graph, x, 4, num_layers=0)
    with pytest.raises(TypeError, match="a Graph or a GraphShardManager \\(got Block\\)"):
        inference(model, graphshard.to_block(graph), x, 4)


def test_edge_values_that_cannot_be_changed_in_place_say_so() -> None:
    def model(blocks: Any, h: Tensor) -> Tensor:
        blocks[0].srcdata["h"] = h
        blocks[0].apply_edges(fn.u_add_v("h", "h", "e"))
        return blocks[0].edata["e"].cumsum_(0)

    with pytest.raises(NotImplementedError, match="'cumsum_' cannot change edge values in place"):
        inference(model, graph_of("plain"), torch.ones(25, 6), 4)


def one_wrong_batch_size(rank: int, world_size: int, parts: str) -> None:
    data = graphshard.load_dgl_partition_data(parts, rank)
    manager = graphshard.construct_full_graph(data)
    inference(Documented(), manager, torch.ones(manager.num_nodes(), 6), rank)


def test_a_wrong_argument_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, graph_of("plain"), 2, "random")
    with pytest.raises(RanksFailed) as caught:
        run_ranks(one_wrong_batch_size, 2, parts)
    assert set(caught.value.errors) == {0, 1}
    for text in caught.value.errors.values():
        assert "batch_size must be at least 1 (got 0)" in text


PEAK = """
    import sys
    import tempfile
    import torch
    import graphshard
    from graphshard.nn import GATConv, RelGraphConv, SAGEConv
    from graphshard.sampling import inference
    from graphshard._base.memory import PeakMemory

    nodes, edges, width = 2_000, 600_000, 8
    graph = graphshard.data.random_graph(nodes, edges, seed=0)
    graph.adjacency().csc()
    x = torch.randn(nodes, width)
    etypes = torch.arange(edges) % 3
    layers = {
        "gat": GATConv(width, 4, 8, allow_zero_in_degree=True),
        "gat by edges": GATConv(width, 4, 8, allow_zero_in_degree=True),
        "sage": SAGEConv(width, 16, "pool"),
        "rgcn": RelGraphConv(width, 16, 3),
    }
    if sys.argv[3] == "shards":
        with tempfile.TemporaryDirectory() as folder:
            graphshard.partition.partition_graph(graph, "g", 1, folder, quiet=True)
            data = graphshard.load_dgl_partition_data(folder + "/g.json", 0)
        graph = graphshard.construct_full_graph(data, mode="sequential")
        del data
        graph.has_edges(), graph.in_degrees()
    layer = layers[sys.argv[1]]
    extra = (etypes,) if sys.argv[1] == "rgcn" else ()
    if sys.argv[1] == "gat by edges":  # as it goes with any dropout that is not torch's
        layer.attn_drop = torch.nn.Sequential()
    model = lambda blocks, h: layer(blocks[0], h, *extra)
    if sys.argv[2] == "at once":
        run = lambda: model([graph], x)
    else:
        run = lambda: inference(model, graph, x, 20)
    with torch.no_grad():
        layer(graphshard.data.random_graph(10, 20, seed=0), torch.randn(10, width), *(
            (etypes[:20],) if extra else ()))
        memory = PeakMemory()
        run()
    print(memory.above_start())
"""


def peak(layer: str, how: str, graph: str) -> int:
    return int(run_program(PEAK, layer, how, graph, MALLOC_MMAP_THRESHOLD_=str(1 << 16)))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems only know the peak of a life")
@pytest.mark.parametrize(
    ("layer", "graph"),
    [
        pytest.param("gat by edges", "whole", marks=pytest.mark.exhaustive),
        ("rgcn", "whole"),
        pytest.param("gat by edges", "shards", marks=pytest.mark.exhaustive),
    ],
)
def test_memory_does_not_grow_with_the_edges(layer: str, graph: str) -> None:
    """GAT: three tensors of edges x heads, 19 MB each; R-GCN: rows of 16 per edge, 38 MB."""
    assert peak(layer, "at once", graph) > 30 * 2**20
    # A sharded graph tells each batch's sources by rows of its own, which are kept: 2.4 MB.
    assert peak(layer, "batched", graph) < (12 if graph == "whole" else 20) * 2**20


@pytest.mark.compiled
@pytest.mark.skipif(sys.platform != "linux", reason="other systems only know the peak of a life")
@pytest.mark.parametrize("graph", ["whole", "shards"])
@pytest.mark.parametrize("how", ["at once", "batched"])
def test_fused_attention_needs_no_batches(how: str, graph: str) -> None:
    assert peak("gat", how, graph) < (12 if graph == "whole" else 20) * 2**20
