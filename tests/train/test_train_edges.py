# SPDX-License-Identifier: Apache-2.0
"""Self loops and reverses that a run adds, beside sets of edges in Python. Up to 3 gloo ranks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from train_cases import NUM_NODES, config_of, plain_graph, train_on_rank, typed_graph

import graphshard
from graphshard.fullbatch import load_dgl_partition_data
from graphshard.partition import partition_graph
from graphshard.testing import run_ranks
from graphshard.train._graph_edges import with_both_directions, with_self_loops


def directed_graph() -> graphshard.Graph:
    """Self loops of some nodes, parallel edges, reverses of some edges."""
    draw = torch.Generator().manual_seed(1)
    src, dst = (torch.randint(0, 25, (70,), generator=draw) for _ in range(2))
    src, dst = torch.cat([src, src[:5], dst[:9]]), torch.cat([dst, dst[:5], src[:9]])
    graph = graphshard.graph((src, dst), num_nodes=NUM_NODES)
    count = graph.num_edges()
    graph.edata["weight"] = torch.rand(count, generator=draw, dtype=torch.float64)
    graph.edata["feat"] = torch.rand(count, 2, generator=draw, dtype=torch.float64)
    graph.edata["is_old"] = torch.rand(count, generator=draw) < 0.5
    graph.edata["label"] = torch.arange(count)
    return graph


def rows_of(graph: graphshard.Graph, etype: Any = None) -> list[tuple[Any, ...]]:
    """(source, destination, weight, features, whether old, label) of each edge."""
    src, dst = graph.edges(etype=etype)
    data = graph.edges[etype or graph.canonical_etypes[0]].data
    columns = [data[name].tolist() for name in ("weight", "feat", "is_old", "label")]
    return list(zip(src.tolist(), dst.tolist(), *columns, strict=True))


def added_on_rank(rank: int, world_size: int, path: str, loops: bool, both: bool) -> dict[str, Any]:
    """Edges of this rank's part, by relation, with ids from before the partition."""
    data = load_dgl_partition_data(path, rank)
    count = 0
    if both:
        data, counts = with_both_directions(data)
        count += sum(counts.values())
    if loops:
        data, number = with_self_loops(data)
        count += number
    ids = {t: load_ids(path, world_size, t) for t in data.node_type_names}
    found: dict[str, Any] = {"count": count}
    for etype in data.canonical_etypes:
        edges, starts = data.edges[etype], data.node_map(etype[0]).starts
        src = torch.tensor(starts)[edges.src_part.long()] + edges.src
        dst = data.node_map(etype[2]).starts[rank] + edges.dst
        key = ":".join(etype)
        assert data.partition_book.partid2eids(rank, etype).numel() == src.numel()
        found[key] = {
            "src": ids[etype[0]][src],
            "dst": ids[etype[2]][dst],
            **{
                name.rsplit("/", 1)[1]: rows
                for name, rows in data.edge_features.items()
                if name.startswith(f"{key}/")
            },
        }
    return found


def load_ids(path: str, num_parts: int, ntype: str) -> torch.Tensor:
    parts = [load_dgl_partition_data(path, part) for part in range(num_parts)]
    return torch.cat([part.node_features[f"{ntype}/orig_id"] for part in parts])


def found_rows(ranks: list[dict[str, Any]], key: str) -> list[tuple[Any, ...]]:
    names = ("src", "dst", "weight", "feat", "is_old", "label")
    return [
        row
        for rank in ranks
        for row in zip(*(rank[key][name].tolist() for name in names), strict=True)
    ]


def counted(rows: list[tuple[Any, ...]]) -> Counter[str]:
    return Counter(map(repr, rows))


@pytest.mark.parametrize("world_size", [1, 3])
def test_plain_graphs_get_loops_and_reverses(world_size: int, tmp_path: Path) -> None:
    graph = directed_graph()
    partition_graph(graph, "g", world_size, str(tmp_path), part_method="random", quiet=True)
    path = str(tmp_path / "g.json")
    before = rows_of(graph)
    pairs = {row[:2] for row in before}
    reverses = [
        (dst, src, weight, feat, is_old, -1)
        for src, dst, weight, feat, is_old, _ in before
        if src != dst and (dst, src) not in pairs
    ]
    ranks = run_ranks(added_on_rank, world_size, path, False, True)
    assert [rank["count"] for rank in ranks] == [len(reverses)] * world_size
    assert counted(found_rows(ranks, "_N:_E:_N")) == counted(before + reverses)
    both = run_ranks(added_on_rank, world_size, path, True, True)
    ids = torch.cat([rank["_N:_E:_N"]["orig_id"] for rank in both])
    assert ids.unique().numel() == ids.numel()

    ranks = run_ranks(added_on_rank, world_size, path, True, False)
    lacking = [n for n in range(NUM_NODES) if (n, n) not in pairs]
    new = [row for row in found_rows(ranks, "_N:_E:_N") if row[5] == -1]
    assert sorted(row[0] for row in new) == lacking == sorted(row[1] for row in new)
    assert ranks[0]["count"] == len(lacking)
    for node, _, weight, feat, is_old, _ in new:
        into = torch.tensor([row[3] for row in before if row[1] == node], dtype=torch.float64)
        mean = into.view(-1, 2).mean(0) if len(into) else torch.zeros(2)
        assert weight == 1.0
        assert not is_old
        torch.testing.assert_close(torch.tensor(feat), mean, check_dtype=False)

    twice = graphshard.to_bidirected(graphshard.add_self_loop(graphshard.remove_self_loop(graph)))
    partition_graph(twice, "g", world_size, str(tmp_path / "2"), part_method="random", quiet=True)
    path = str(tmp_path / "2" / "g.json")
    assert run_ranks(added_on_rank, world_size, path, True, True)[0]["count"] == 0


@pytest.mark.parametrize("world_size", [1, 2])
def test_typed_graphs_get_relations_back(world_size: int, tmp_path: Path) -> None:
    graph = typed_graph()
    graph.edges["at"].data["weight"] = torch.arange(20.0)
    partition_graph(graph, "g", world_size, str(tmp_path), part_method="random", quiet=True)
    ranks = run_ranks(added_on_rank, world_size, str(tmp_path / "g.json"), False, True)
    relations = {key for key in ranks[0] if key != "count"}
    assert relations == {
        *(":".join(etype) for etype in graph.canonical_etypes),
        "paper:rev_cites:paper",
        "place:rev_at:paper",
    }
    for name, key in (("cites", "paper:rev_cites:paper"), ("at", "place:rev_at:paper")):
        src, dst = graph.edges(etype=name)
        ends = [torch.cat([rank[key][end] for rank in ranks]) for end in ("src", "dst")]
        pairs = Counter(zip(ends[0].tolist(), ends[1].tolist(), strict=True))
        assert pairs == Counter(zip(dst.tolist(), src.tolist(), strict=True))
    weights = torch.cat([rank["place:rev_at:paper"]["weight"] for rank in ranks])
    assert torch.equal(weights.sort().values, torch.arange(20.0))


def test_a_run_says_what_it_adds_and_adds_what_its_model_wants(tmp_path: Path) -> None:
    graph = directed_graph()
    for name, rows in plain_graph().ndata.items():
        graph.ndata[name] = rows
    partition_graph(graph, "g", 1, str(tmp_path), part_method="random", quiet=True)
    path = str(tmp_path / "g.json")
    for model, both, loops in (("gcn", None, None), ("sage", None, None), ("gat", False, False)):
        notes: list[str] = []
        config = config_of(path, model=model, both_directions=both, self_loops=loops, epochs=1)
        if model == "gat":
            with pytest.raises(ValueError, match="needs every node to have an in-edge"):
                graphshard.train.FullBatchRun(config)
            continue
        run = graphshard.train.FullBatchRun(
            config, progress=lambda report, notes=notes: notes.append(str(report.note))
        )
        assert "edges go one way: added the reverse of" in notes[0]
        assert (len(notes) > 1 and "a self loop, as gcn wants" in notes[1]) == (model == "gcn")
        run.train()
    with pytest.raises(Exception, match="both_directions is for graphs whose edges carry no"):
        partition_graph(plain_graph(), "e", 1, str(tmp_path), part_method="random", quiet=True)
        config = config_of(str(tmp_path / "e.json"), model="rgcn", both_directions=True)
        graphshard.train.FullBatchRun(config)


def test_a_run_on_samples_sees_the_added_edges_too(tmp_path: Path) -> None:
    """All neighbours drawn in one batch make the full-batch step."""
    from train_cases import as_values, sampled_config_of, train_sampled_on_rank

    graph = directed_graph()
    for name, rows in plain_graph().ndata.items():
        graph.ndata[name] = rows
    del graph.edata["weight"]
    partition_graph(graph, "g", 2, str(tmp_path), part_method="random", quiet=True)
    path = str(tmp_path / "g.json")
    more = {"both_directions": True, "self_loops": True, "dropout": 0.0, "epochs": 2}
    full = run_ranks(train_on_rank, 2, as_values(config_of(path, model="sage", **more)))
    config = sampled_config_of(path, model="sage", fanouts=(-1, -1), **more)
    sampled = run_ranks(train_sampled_on_rank, 2, as_values(config))
    torch.testing.assert_close(
        sampled[0]["result"]["losses"], full[0]["result"]["losses"], rtol=0, atol=1e-10
    )
