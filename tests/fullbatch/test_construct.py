# SPDX-License-Identifier: Apache-2.0
"""Making sharded graphs: what they say of themselves, choice of mode, wrong input. 1 to 3 ranks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from shards import PLAIN, graph_of, own_edges, own_nodes, write_parts
from torch import Tensor

import graphshard
from graphshard import function as fn
from graphshard.fullbatch import AggregationMode
from graphshard.partition import partition_graph
from graphshard.testing import RanksFailed, run_ranks


def describe(rank: int, world_size: int, parts: str) -> dict[str, Any]:
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph = graphshard.construct_full_graph(data)
    return {
        "nodes": own_nodes(data)["_N"],
        "edges": own_edges(data)[PLAIN],
        "in": graph.in_degrees(),
        "out": graph.out_degrees(),
        "zero": graph.any_zero_in_degree(),
        "has_edges": graph.has_edges(),
        "num_nodes": graph.num_nodes(),
        "num_edges": graph.num_edges(),
        "global": graph.global_num_edges(),
        "nid": graph.ndata[graphshard.NID],
        "eid": graph.edata[graphshard.EID],
        "repr": repr(graph),
        "ranges": [list(r) for r in data.node_ranges],
    }


@pytest.mark.parametrize(("num_ranks", "how"), [(1, "metis"), (3, "random"), (3, "empty_part")])
def test_degrees_counts_and_ids_are_those_of_the_whole_graph(
    tmp_path: Path, num_ranks: int, how: str
) -> None:
    whole = graph_of("plain")
    parts = write_parts(tmp_path, whole, num_ranks, how)
    found = run_ranks(describe, num_ranks, parts)
    for part in found:
        assert torch.equal(part["in"], whole.in_degrees()[part["nodes"]])
        assert torch.equal(part["out"], whole.out_degrees()[part["nodes"]])
        assert part["zero"] is True
        assert part["has_edges"] is True
        assert part["num_nodes"] == part["nodes"].numel()
        assert part["num_edges"] == part["edges"].numel()
        assert part["global"] == whole.num_edges()
        assert "mode='oneshot'" in part["repr"]
    nodes = torch.cat([part["nodes"] for part in found])
    assert torch.equal(nodes.sort().values, torch.arange(whole.num_nodes()))
    ids = torch.cat([part["nid"] for part in found])
    assert torch.equal(ids, torch.arange(whole.num_nodes()))
    eids = torch.cat([part["eid"] for part in found])
    assert torch.equal(eids, torch.arange(whole.num_edges()))
    assert found[0]["ranges"][-1][1] == whole.num_nodes()


def typed_slices(rank: int, world_size: int, parts: str, mode: str) -> dict[str, Tensor]:
    """Sum of sources under each relation, through slices of every form."""
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph = graphshard.construct_full_graph(data, mode=mode)
    nodes = own_nodes(data)
    for ntype in graph.ntypes:
        graph.nodes[ntype].data["h"] = nodes[ntype].double().unsqueeze(1) + 1
    sums = {}
    for etype in graph.canonical_etypes:
        for key in (etype, etype[1]):
            piece = graph[key]
            with piece.local_scope():
                piece.update_all(fn.copy_u("h", "m"), fn.sum("m", "s"))
                sums[f"{etype[1]} by {type(key).__name__}"] = piece.dstdata["s"]
        sums[f"{etype[1]} nodes"] = nodes[etype[2]]
        sums[f"{etype[1]} in"] = graph.in_degrees(etype=etype)
        sums[f"{etype[1]} out"] = graph.out_degrees(etype=etype)
        sums[f"{etype[1]} sources"] = nodes[etype[0]]
    graph.multi_update_all(
        {etype: (fn.copy_u("h", "m"), fn.max("m", "all")) for etype in graph.canonical_etypes},
        "max",
    )
    sums["cross"] = graph.nodes["a"].data["all"]
    sums["cross nodes"] = nodes["a"]
    return sums


@pytest.mark.parametrize("mode", ["oneshot", "sequential"])
def test_slices_and_typed_updates(tmp_path: Path, mode: str) -> None:
    whole = graph_of("typed")
    parts = write_parts(tmp_path, whole, 3, "random")
    for ntype in whole.ntypes:
        whole.nodes[ntype].data["h"] = torch.arange(whole.num_nodes(ntype)).double().view(-1, 1) + 1
    whole.multi_update_all(
        {etype: (fn.copy_u("h", "m"), fn.max("m", "all")) for etype in whole.canonical_etypes},
        "max",
    )
    for sums in run_ranks(typed_slices, 3, parts, mode):
        for etype in whole.canonical_etypes:
            name = etype[1]
            src, dst = whole.edges(etype=etype)
            expected = torch.zeros(whole.num_nodes(etype[2]), 1, dtype=torch.float64)
            expected.index_add_(0, dst, src.double().view(-1, 1) + 1)
            for key in ("tuple", "str"):
                assert torch.equal(sums[f"{name} by {key}"], expected[sums[f"{name} nodes"]])
            degrees = whole.in_degrees(etype=etype)
            assert torch.equal(sums[f"{name} in"], degrees[sums[f"{name} nodes"]])
            degrees = whole.out_degrees(etype=etype)
            assert torch.equal(sums[f"{name} out"], degrees[sums[f"{name} sources"]])
        assert torch.equal(sums["cross"], whole.nodes["a"].data["all"][sums["cross nodes"]])


def sliced(rank: int, world_size: int, parts: str, mode: str) -> tuple[Any, ...]:
    """Two relations of three, by a slice; each type is a source or a destination alone."""
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph = graphshard.construct_full_graph(data, mode=mode)
    nodes = own_nodes(data)
    for ntype in ("shop", "user"):
        graph.nodes[ntype].data["h"] = nodes[ntype].double().unsqueeze(1) + 1
    piece = graph["user", :, "item"]
    piece.multi_update_all(
        {etype: (fn.copy_u("h", "m"), fn.sum("m", "s")) for etype in piece.canonical_etypes}, "sum"
    )
    return piece.srctypes, piece.dsttypes, piece.etypes, nodes["item"], piece.dstdata["s"]


@pytest.mark.parametrize("mode", ["oneshot", "sequential"])
def test_a_slice_of_several_relations_between_separate_sides(tmp_path: Path, mode: str) -> None:
    ends = {
        ("shop", "sells", "item"): (torch.randint(5, (40,)), torch.randint(9, (40,))),
        ("user", "buys", "item"): (torch.randint(7, (30,)), torch.randint(9, (30,))),
        ("user", "sees", "item"): (torch.randint(7, (50,)), torch.randint(9, (50,))),
    }
    whole = graphshard.heterograph(ends, {"shop": 5, "user": 7, "item": 9})
    parts = write_parts(tmp_path, whole, 3, "random")
    expected = torch.zeros(9, 1, dtype=torch.float64)
    for name in ("buys", "sees"):
        src, dst = ends["user", name, "item"]
        expected.index_add_(0, dst, src.double().unsqueeze(1) + 1)
    for srctypes, dsttypes, etypes, items, sums in run_ranks(sliced, 3, parts, mode):
        assert (srctypes, dsttypes, etypes) == (["user"], ["item"], ["buys", "sees"])
        assert torch.equal(sums, expected[items])


def chosen_mode(rank: int, world_size: int, parts: str, budget: int) -> str:
    data = graphshard.load_dgl_partition_data(parts, rank)
    return graphshard.construct_full_graph(data, memory_budget=budget + rank).mode


def test_auto_mode_is_the_same_on_all_ranks(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, graph_of("plain"), 3, "one_node_per_part")
    assert run_ranks(chosen_mode, 3, parts, 0) == ["sequential"] * 3
    assert run_ranks(chosen_mode, 3, parts, 10**9) == ["oneshot"] * 3
    # Rank 0 reads two remote rows and ranks 1 and 2 many more: one rank over budget decides.
    halo = run_ranks(halo_rows, 3, parts)
    assert max(halo) > min(halo)
    between = min(halo) * 256 * 4 * 3
    assert run_ranks(chosen_mode, 3, parts, between) == ["sequential"] * 3


def halo_rows(rank: int, world_size: int, parts: str) -> int:
    data = graphshard.load_dgl_partition_data(parts, rank)
    return graphshard.construct_full_graph(data).halo_rows()


def test_policy_rejects_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match=r"mode must be one of sequential, oneshot, auto \(got 'o"):
        AggregationMode(mode="once")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"memory_budget must be .* \(got -1\)"):
        AggregationMode(memory_budget=-1)
    with pytest.raises(ValueError, match=r"row_width must be at least 1 \(got 0\)"):
        AggregationMode(row_width=0)


def wrong_part(rank: int, world_size: int, parts: str, part: int) -> None:
    graphshard.comm.barrier()  # one that fails while another still starts is another story
    data = graphshard.load_dgl_partition_data(parts, part if part >= 0 else rank)
    graphshard.construct_full_graph(data)


def test_parts_and_ranks_must_match_on_every_rank(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, graph_of("plain"), 3, "random")
    with pytest.raises(RanksFailed) as caught:
        run_ranks(wrong_part, 2, parts, -1)
    assert set(caught.value.errors) == {0, 1}
    assert all(
        "a graph of 3 parts needs 3 ranks (got 2)" in t for t in caught.value.errors.values()
    )
    with pytest.raises(RanksFailed) as caught:  # a rank beyond the parts cannot load one
        run_ranks(wrong_part, 5, parts, -1)
    assert set(caught.value.errors) == {0, 1, 2, 3, 4}
    assert all(
        "a graph of 3 parts needs 3 ranks (got 5)" in t for t in caught.value.errors.values()
    )
    with pytest.raises(RanksFailed) as caught:
        run_ranks(wrong_part, 3, parts, 1)  # rank 1 is right, 0 and 2 are wrong
    assert set(caught.value.errors) == {0, 1, 2}
    assert all("part r belongs to rank r" in t for t in caught.value.errors.values())


def low_precision(rank: int, world_size: int, parts: str, dtype: torch.dtype) -> list[Tensor]:
    data = graphshard.load_dgl_partition_data(parts, rank)
    nodes = own_nodes(data)["_N"]
    torch.manual_seed(0)
    layer = graphshard.nn.GATConv(6, 4, 2, allow_zero_in_degree=True).to(dtype)
    whole = torch.randn(25, 6).to(dtype)
    found = []
    for mode in ("oneshot", "sequential"):
        h = whole[nodes].clone().requires_grad_()
        out = layer(graphshard.construct_full_graph(data, mode=mode), h)
        out.float().square().sum().backward()
        assert h.grad is not None
        found += [out.detach(), h.grad]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_modes_agree_in_low_precision(tmp_path: Path, dtype: torch.dtype) -> None:
    parts = write_parts(tmp_path, graph_of("plain"), 3, "random")
    close = 1e-5 if dtype == torch.float32 else 0.06
    for out, grad, out2, grad2 in run_ranks(low_precision, 3, parts, dtype):
        assert out.dtype == out2.dtype == dtype
        torch.testing.assert_close(out.float(), out2.float(), atol=close, rtol=close)
        torch.testing.assert_close(grad.float(), grad2.float(), atol=close * 2, rtol=close * 2)


def same_bits_twice(rank: int, world_size: int, parts: str, mode: str) -> list[Tensor]:
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph = graphshard.construct_full_graph(data, mode=mode)
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        layer = graphshard.nn.GATConv(6, 4, 2, attn_drop=0.4, allow_zero_in_degree=True)
        h = torch.randn(data.num_owned(), 6, requires_grad=True)
        out = layer(graph, h)
        out.square().sum().backward()
        found += [out.detach(), h.grad, *(p.grad for p in layer.parameters())]
    return found


@pytest.mark.parametrize("mode", ["oneshot", "sequential"])
def test_a_run_repeats_bit_for_bit(tmp_path: Path, mode: str) -> None:
    parts = write_parts(tmp_path, graph_of("plain"), 3, "random")
    for found in run_ranks(same_bits_twice, 3, parts, mode):
        half = len(found) // 2
        assert all(torch.equal(a, b) for a, b in zip(found[:half], found[half:], strict=True))


def use_partition_graph(rank: int, world_size: int, parts: str) -> list[str]:
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph = graphshard.construct_full_graph(data, mode="sequential")
    graph.ndata["h"] = torch.ones(data.num_owned(), 1)
    whole = graph.get_full_partition_graph(delete_shard_data=False)
    whole.update_all(fn.copy_u("h", "m"), fn.sum("m", "s"))
    same = torch.equal(whole.ndata["s"].view(-1), graph.in_degrees().float())
    return [graph.mode, whole.mode, str(same)]


def test_full_partition_graph_is_the_one_shot_graph(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, graph_of("plain"), 2, "random")
    assert run_ranks(use_partition_graph, 2, parts) == [["sequential", "oneshot", "True"]] * 2


def second_derivative(rank: int, world_size: int, parts: str) -> str:
    data = graphshard.load_dgl_partition_data(parts, rank)
    graph = graphshard.construct_full_graph(data, mode="sequential")
    layer = graphshard.nn.GATConv(6, 4, 2, allow_zero_in_degree=True)
    h = torch.randn(data.num_owned(), 6, requires_grad=True)
    (grad,) = torch.autograd.grad(layer(graph, h).square().sum(), h, create_graph=True)
    try:
        grad.square().sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_second_derivatives_are_refused_not_wrong(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, graph_of("plain"), 1, "random")
    assert "once_differentiable" in run_ranks(second_derivative, 1, parts)[0]


@pytest.mark.parametrize("mode", ["oneshot", "sequential", "auto"])
def test_one_part_needs_no_process_group(tmp_path: Path, mode: Any) -> None:
    whole = graph_of("plain")
    parts = write_parts(tmp_path, whole, 1, "metis")
    data = graphshard.load_dgl_partition_data(parts, 0)
    torch.manual_seed(0)
    layer = graphshard.nn.SAGEConv(6, 4, "mean")
    h = torch.randn(25, 6)
    graphshard.sync_params(layer)
    found = layer(graphshard.construct_full_graph(data, mode=mode), h[own_nodes(data)["_N"]])
    torch.testing.assert_close(found, layer(whole, h)[own_nodes(data)["_N"]])


def test_one_of_several_processes_needs_a_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = write_parts(tmp_path, graph_of("plain"), 1, "metis")
    data = graphshard.load_dgl_partition_data(parts, 0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"one of 2; call graphshard.initialize_comms\(\) first"):
        graphshard.construct_full_graph(data)


def test_a_sharded_graph_stays_on_its_device(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, graph_of("plain"), 1, "metis")
    graph = graphshard.construct_full_graph(graphshard.load_dgl_partition_data(parts, 0))
    assert graph.to("cpu") is graph
    with pytest.raises(NotImplementedError, match=r"load_dgl_partition_data\(json, rank, device="):
        graph.to("meta")


def other_builds(rank: int, world_size: int, parts: list[str | None], how: str) -> str:
    """What a rank is told whose part is of the given partition; "" of none, made by hand."""
    data = graphshard.load_dgl_partition_data(parts[rank] or str(parts[-1]), rank)
    if parts[rank] is None:
        data = dataclasses.replace(data, build=None)
    try:
        if how == "full graph":
            graphshard.construct_full_graph(data)
        else:
            graphshard.construct_mfgs(data, torch.empty(0, dtype=torch.int64), 2)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("how", ["full graph", "blocks"])
def test_ranks_with_parts_of_different_partitions_are_told(how: str, tmp_path: Path) -> None:
    """Two partitions of one graph, of equal part sizes: nothing else would tell them apart."""
    graph = graphshard.add_self_loop(graphshard.graph((torch.arange(30), torch.arange(30))))
    paths, builds = [], []
    for seed in range(2):
        folder = tmp_path / str(seed)
        partition_graph(graph, "g", 3, folder, part_method="random", seed=seed, quiet=True)
        paths.append(str(folder / "g.json"))
        builds.append(json.loads((folder / "g.json").read_text())["build"])
    assert builds[0] != builds[1]
    one, two = paths
    assert run_ranks(other_builds, 3, [one, one, one], how) == [""] * 3
    (text,) = set(run_ranks(other_builds, 3, [one, two, one], how))
    assert "must be the same on all ranks, but rank 1 differs from rank 0" in text
    assert f"ranks [0, 2] have '{builds[0]}', rank 1 has '{builds[1]}'" in text
    assert text.endswith("copy one partition's folder to every host and load it everywhere")
    (text,) = set(run_ranks(other_builds, 3, [None, one, one], how))
    assert f"rank 0 has 'no build', ranks [1, 2] have '{builds[0]}'" in text
    assert run_ranks(other_builds, 3, [None, None, None, one], how) == [""] * 3
