# SPDX-License-Identifier: Apache-2.0
"""A sharded graph under SAR's names: shards, homogenised ids, settings, loaders. 2 ranks, or 4."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_sar_scripts import RELATIONS, random_plain, random_typed
from torch import Tensor

import graphshard.dgl as dgl
import graphshard.sar as sar
from graphshard import function as fn
from graphshard.comm import trace
from graphshard.sampling import global_mean
from graphshard.sampling._dist_loader import SeedOrder
from graphshard.testing import run_ranks


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, run_all: bool) -> dict[int, str]:
    """Number of ranks to a folder with a plain and a typed partition."""
    found = {}
    for num_ranks in (2, 4) if run_all else (2,):
        folder = tmp_path_factory.mktemp(f"graphs{num_ranks}")
        for name, graph in (("plain", random_plain(dgl)), ("typed", random_typed(dgl))):
            dgl.distributed.partition_graph(
                graph, name, num_ranks, folder / name, part_method="random", quiet=True
            )
        found[num_ranks] = str(folder)
    return found


def opened(folder: str, name: str, rank: int) -> Any:
    return sar.load_dgl_partition_data(f"{folder}/{name}/{name}.json", rank, "cpu")


def check_names(graph: Any, data: Any, rank: int, world_size: int) -> None:
    book = data.partition_book
    assert graph.node_ranges == data.node_ranges
    assert graph.tgt_node_range == data.node_ranges[rank]
    assert graph.partition_book is graph._partition_book is book
    assert (graph.src_is_tgt, graph.tgt_in_src) == (True, True)
    assert graph.ntypes_global == graph.ntypes == book.ntypes
    assert graph.etypes_global == graph.etypes
    assert graph.canonical_etypes_global == graph.canonical_etypes
    for ntype in graph.ntypes:
        count = torch.tensor(graph.num_nodes(ntype))
        assert torch.equal(graph.srcnodes(ntype), torch.arange(graph.num_nodes(ntype)))
        assert sar.comm.all_reduce(count) == graph.num_nodes_global(ntype)
    for etype in graph.canonical_etypes:
        count = torch.tensor(graph.num_edges(etype))
        assert sar.comm.all_reduce(count) == graph.number_of_edges_global(etype)
    assert graph.num_nodes() == sum(graph.num_nodes(t) for t in graph.ntypes)
    assert [s.src_range for s in graph.graph_shards] == data.node_ranges
    assert len(graph.graph_shard_managers) == len(graph.etypes)
    assert isinstance(graph.get_full_partition_graph(), sar.core.DistributedBlock)
    assert isinstance(graph.graph_shards[0], sar.core.GraphShard)


def pairs(src: Tensor, dst: Tensor) -> list[tuple[int, int]]:
    return sorted(zip(src.tolist(), dst.tolist(), strict=True))


def check_shards(graph: Any, data: Any, rank: int) -> None:
    """Together the shards have every in-edge once, in homogenised ids."""
    book, expected, found = data.partition_book, [], []
    for number, etype in enumerate(data.canonical_etypes):
        edges = data.edges[etype]
        first = torch.tensor([b[0] for b in book.node_map()[etype[0]]])
        src = edges.src + first[edges.src_part.long()]
        dst = edges.dst + book.node_map()[etype[2]][rank][0]
        expected += [(*pair, number) for pair in pairs(src, dst)]
    for shard in graph.graph_shards:
        src, dst = shard.graph.all_edges()
        src, dst = shard.unique_src_nodes[src], shard.unique_tgt_nodes[dst]
        inside = (src >= shard.src_range[0]) & (src < shard.src_range[1])
        assert bool(inside.all())
        kinds = shard.graph.edata.get(dgl.ETYPE, torch.zeros(len(src), dtype=torch.int64))
        found += list(zip(src.tolist(), dst.tolist(), kinds.tolist(), strict=True))
        whole = graph.homogenised()
        assert torch.equal(
            whole.edata[dgl.EID][shard.edge_ids],
            shard.graph.edata.get(dgl.EID, whole.edata[dgl.EID][shard.edge_ids]),
        )
    assert sorted(found) == sorted(expected)
    sampled = graph.sampling_graph
    assert pairs(*sampled.all_edges()) == sorted((s, d) for s, d, _ in expected)
    assert sampled.num_nodes() == graph.num_nodes_global()


def check_homogenised(graph: Any, data: Any) -> None:
    """A sum over all relations is the sum of theirs."""
    whole = graph.homogenised()
    assert whole is graph.homogenised()
    names = data.node_type_names
    h = torch.arange(whole.num_nodes()).double().view(-1, 1) ** 2
    h = h + data.node_ranges[data.rank][0]
    types = data.node_features[dgl.NTYPE]
    assert torch.equal(
        types,
        torch.arange(len(names)).repeat_interleave(
            torch.tensor([graph.num_nodes(t) for t in names])
        ),
    )
    expected = torch.zeros_like(h)
    for etype in graph.canonical_etypes:
        piece = graph[etype]
        with piece.local_scope():
            piece.srcdata["h"] = h[types == names.index(etype[0])]
            piece.update_all(fn.copy_u("h", "m"), fn.sum("m", "s"))
            expected[types == names.index(etype[2])] += piece.dstdata["s"]
    for mode in ("sequential", "oneshot"):
        view = whole.with_mode(mode)
        with view.local_scope():
            view.srcdata["h"] = h
            view.update_all(fn.copy_u("h", "m"), fn.sum("m", "s"))
            torch.testing.assert_close(view.dstdata["s"], expected)
    if len(graph.etypes) > 1:
        assert torch.equal(
            whole.edata[dgl.ETYPE],
            torch.cat([s.graph.edata[dgl.ETYPE] for s in graph.graph_shards]),
        )
        original = whole.original_edge_ids["_N", "_E", "_N"]
        assert len(torch.unique(original)) == len(original)


def check_flow(data: Any, rank: int) -> None:
    """Message flow graphs for seeds in homogenised ids, and by type."""
    names, start = data.node_type_names, data.node_ranges[rank][0]
    types = data.node_features[dgl.NTYPE]
    seeds = torch.arange(0, len(types), 3).flip(0)
    layers = sar.construct_mfgs(data, seeds + start, 2)
    by_type = {
        t: seeds[types[seeds] == n]
        - int((types < n).sum())
        + data.partition_book.partid2nids(rank, t)[:1].sum()
        for n, t in enumerate(names)
    }
    for one, other in zip(layers, sar.construct_mfgs(data, by_type, 2), strict=True):
        for ntype in names:
            assert torch.equal(one.srcnodes(ntype), other.srcnodes(ntype))
            assert torch.equal(one.dstnodes(ntype), other.dstnodes(ntype))
            assert torch.equal(one.nodes(ntype), torch.unique(one.srcnodes(ntype)))
        assert one.ntypes == list(names)
        assert one.num_nodes() == sum(one.num_nodes(t) for t in one.ntypes) == one.num_src_nodes()
        assert one.num_edges() == sum(one.num_edges(t) for t in one.canonical_etypes)
        assert (one.src_is_tgt, one.tgt_in_src) == (False, True)
    bare = sar.construct_mfgs(data, seeds + start, 1, False)[0]
    expected = [torch.cat([bare.srcnodes(t), bare.dstnodes(t)]).unique().numel() for t in names]
    assert [bare.num_nodes(t) for t in names] == expected
    if len(names) > 1:
        with pytest.raises(NotImplementedError, match="as a message flow graph of several relat"):
            layers[0].homogenised()


def check_scope(graph: Any) -> None:
    """Fields that are set inside, also through a relation, are gone outside."""
    graph.srcdata["1st"] = {t: torch.ones(graph.num_src_nodes(t), 5) for t in graph.srctypes}
    with graph.local_scope():
        graph.edata["2nd"] = {e: torch.ones(graph.num_edges(e), 2) for e in graph.canonical_etypes}
        for etype in graph.canonical_etypes:
            rows = torch.zeros(graph[etype].num_src_nodes(), 3)
            graph[etype].srcdata[f"3rd {etype}"] = rows
            assert graph[etype].srctypes[0] in graph.srcdata[f"3rd {etype}"]
            assert etype in graph.edata["2nd"]
        assert set(graph.srcdata["1st"]) == set(graph.srctypes)
    assert "2nd" not in graph.edata
    assert not [name for name in graph.srcdata if name.startswith("3rd")]
    assert "1st" in graph.srcdata


def check_settings(graph: Any) -> None:
    """What Config says counts when a layer runs, not when the graph was made."""
    graph = graph.with_mode("sequential")
    layer = dgl.nn.GATConv(3, 2, 2, allow_zero_in_degree=True)
    torch.manual_seed(0)
    x = torch.randn(graph.num_nodes(), 3)
    sent, grads = [], []
    layer(graph, x).sum().backward()  # what is exchanged once, has been
    for disabled, depth in ((False, 1), (True, 0), (False, 2)):
        sar.Config.disable_sr, sar.Config.pipeline_depth = disabled, depth
        assert graph.rematerializes is not disabled
        layer.zero_grad()
        with trace() as counted:
            layer(graph, x).sum().backward()
        sent.append(counted.total_bytes)
        grads.append([p.grad.clone() for p in layer.parameters()])
    sar.Config.disable_sr, sar.Config.pipeline_depth = False, 1
    assert sent[1] < sent[0] == sent[2]
    for others in grads[1:]:
        for one, other in zip(grads[0], others, strict=True):
            torch.testing.assert_close(one, other)


def check_empty_rank(graph: Any, rank: int) -> None:
    """A mean over no rows is no number, and its gradients are zeros all the same."""
    layer = dgl.nn.SAGEConv(3, 2, "mean")
    x = torch.ones(graph.num_nodes(), 3)
    rows = torch.arange(5 if rank == 0 else 0)
    labels = torch.zeros(len(rows), dtype=torch.int64)
    loss = F.cross_entropy(layer(graph, x)[rows], labels)
    assert bool(loss.isnan()) is (rank != 0)
    loss.backward()
    sar.gather_grads(layer)
    assert all(bool(p.grad.isfinite().all()) for p in layer.parameters())
    each = F.cross_entropy(layer(graph, x)[rows], labels, reduction="none")
    share = global_mean(each, 5)
    total = sar.comm.all_reduce(share.detach())
    assert total.item() == pytest.approx(float(sar.comm.all_reduce(loss.detach().nan_to_num())))


def check_loader(graph: Any, data: Any, rank: int) -> None:
    """Homogenised seeds; every feature of edges, unless it is not wanted."""
    for etype in graph.canonical_etypes:
        graph.edges[etype].data["w"] = data.partition_book.partid2eids(rank, etype).double()
    start, stop = data.node_ranges[rank]
    for copies in (True, False):
        sampler = sar.DistNeighborSampler([2, 2], None, False, copies)
        loader = sar.DataLoader(
            graph, torch.arange(start, stop), sampler, 7, False, True, seed=3, edge_ids=True
        )
        seen = {t: [] for t in graph.ntypes}
        for blocks in loader:
            for ntype in graph.ntypes:
                seen[ntype].append(blocks[-1].dstnodes[ntype].data[dgl.NID])
            for block in blocks:
                for etype in block.canonical_etypes:
                    edges = block.edges[etype].data
                    assert ("w" in edges) is copies
                    if copies:
                        assert torch.equal(edges["w"], edges[dgl.EID].double())
        for ntype, ids in seen.items():
            own = data.partition_book.partid2nids(rank, ntype)
            assert torch.equal(torch.cat(ids).sort().values, own)
    with pytest.raises(ValueError, match="seed_nodes"):
        sar.DataLoader(graph, torch.tensor([10**6]), sampler, 7)


def everything(rank: int, world_size: int, folder: str) -> None:
    for name in ("plain", "typed"):
        data = opened(folder, name, rank)
        graph = sar.construct_full_graph(data)
        check_names(graph, data, rank, world_size)
        check_shards(graph, data, rank)
        check_homogenised(graph, data)
        check_flow(data, rank)
        check_loader(graph, data, rank)
        if name == "typed":
            check_scope(graph)
        else:
            check_settings(graph)
            check_empty_rank(graph, rank)


def test_names_of_sar(folders: dict[int, str]) -> None:
    for num_ranks, folder in folders.items():
        run_ranks(everything, num_ranks, folder)


def test_suffix_key_lookup(folders: dict[int, str]) -> None:
    data = opened(folders[2], "typed", 0)
    features, names = data.node_features, data.node_type_names
    assert sar.suffix_key_lookup(features, "labels") is features["paper/labels"]
    assert sar.suffix_key_lookup(features, "bels") is features["paper/labels"]
    assert sar.suffix_key_lookup(features, "orig_id", ntype="author") is features["author/orig_id"]
    for wrong in ("s", "orig_id", "nothing"):
        with pytest.raises(KeyError, match=f"need exactly one feature named '{wrong}'"):
            sar.suffix_key_lookup(features, wrong)
    is_paper = features[dgl.NTYPE] == names.index("paper")
    for key in ("features", "labels", "train_mask"):
        rows = sar.suffix_key_lookup(features, key, True, names)
        assert rows.dtype == features[f"paper/{key}"].dtype
        assert torch.equal(rows[is_paper], features[f"paper/{key}"])
        assert not bool(rows[~is_paper].any())
    both = sar.suffix_key_lookup(features, "orig_id", expand_to_all=True, type_list=names)
    assert torch.equal(both, torch.cat([features[f"{t}/orig_id"] for t in names]))
    with pytest.raises(
        ValueError, match=r"needs node_features, and node_type_names as type_list .got None"
    ):
        sar.suffix_key_lookup(features, "labels", expand_to_all=True)
    with pytest.raises(ValueError, match="and features without '_TYPE'"):
        sar.suffix_key_lookup({"paper/x": torch.ones(1)}, "x", True, names)
    differ = {**features, "author/labels": torch.ones(len(is_paper), 2)}
    with pytest.raises(ValueError, match="differs from type to type"):
        sar.suffix_key_lookup(differ, "labels", True, names)


def test_batches_of_neighbouring_ids() -> None:
    ids = torch.tensor([30, 2, 5, 11, 7, 3, 20])
    order = SeedOrder(
        {"_N": ids}, 3, shuffle=True, drop_last=False, seed=0, rank=0, sizes=[7], by_id=True
    )
    seen = set()
    for epoch in range(8):
        places = order.of_epoch(epoch)
        batches = [tuple(order.batch(places, step)["_N"].tolist()) for step in range(3)]
        assert set(batches) == {(2, 3, 5), (7, 11, 20), (30,)}
        assert batches[2] == (30,)
        seen.add(tuple(batches))
    assert len(seen) == 2


def test_logging_setup(tmp_path: Path) -> None:
    before = sar.logger.propagate, sar.logger.level
    for name in ("first", "second"):
        sar.logging_setup(logging.INFO, 0, 2, str(tmp_path / name))
    logging.getLogger("graphshard.part").info("seen")
    logging.getLogger("graphshard.part").debug("not seen")
    assert (tmp_path / "second").read_text() == "1 / 2 - graphshard.part - INFO - seen\n"
    assert (tmp_path / "first").read_text() == ""
    sar.logging_setup("ERROR", rank=1, world_size=2)
    (shown,) = [h for h in sar.logger.handlers if not isinstance(h, logging.NullHandler)]
    assert shown.level == logging.ERROR
    assert not sar.logger.propagate
    sar.logger.removeHandler(shown)
    sar.logger.propagate, sar.logger.level = before


def test_layers_of_dgl_run_once_it_is_patched() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = pytest.importorskip("dgl", reason="DGL has no release for this Python")
    conv = peer.nn.pytorch.conv
    before = {m: m.edge_softmax for m in (conv.gatconv, conv.dotgatconv, conv.agnnconv)}
    try:
        sar.patch_dgl()
        sar.patch_dgl()
        assert conv.gatconv.edge_softmax is sar.patched_edge_softmax
        ours, theirs = random_plain(dgl), random_plain(peer)
        ours, theirs = dgl.add_self_loop(ours), peer.add_self_loop(theirs)
        for make in (
            lambda: conv.GATConv(5, 4, 2),
            conv.AGNNConv,
            lambda: conv.DotGatConv(5, 4, 2),
        ):
            layer, x = make(), ours.ndata["feat"].float()
            torch.testing.assert_close(layer(ours, x), layer(theirs, x))
    finally:
        for module, function in before.items():
            module.edge_softmax = function


def test_relations_are_what_the_cases_say() -> None:
    assert random_typed(dgl).canonical_etypes == list(RELATIONS)
