# SPDX-License-Identifier: Apache-2.0
"""Seeds that a batch has several times. Against the whole graph, and DGL; one process and 2 ranks.

That ranks draw what one process draws, with any transport, is in test_structures.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from dist_loader_cases import (
    attached,
    by_name,
    grads_of,
    inputs_of,
    labels_of,
    losses_of,
    model_of,
    run,
)
from loader_cases import BOTH, plain, typed
from sharded_cases import Translation, graph_of, manager_of, write_parts
from torch import Tensor

import graphshard
from graphshard.dgl.dataloading import (
    DataLoader,
    EdgeDataLoader,
    LaborSampler,
    MultiLayerFullNeighborSampler,
    NeighborSampler,
)
from graphshard.graph import EID, NID
from graphshard.sampling import DataLoader as ShardedLoader
from graphshard.sampling import DistNeighborSampler, DrawSeed, global_mean
from graphshard.testing import run_ranks

SEEDS = [7, 3, 7, 7, 0, 19, 3]  # node 19 has no edges
SAMPLERS = {
    "uniform": lambda: NeighborSampler([3, 2]),
    "weighted": lambda: NeighborSampler([3, 2], prob="weight"),
    "replace": lambda: NeighborSampler([4, 4], replace=True),
    "labor": lambda: LaborSampler([3, 2]),
    "out": lambda: NeighborSampler([3, 2], edge_dir="out"),
    "all": lambda: MultiLayerFullNeighborSampler(2),
}


def neighbours_of(block: Any) -> list[Counter[tuple[int, int]]]:
    """For each destination, its edges and where they come from."""
    src, dst = block.edges()
    ids, eids = block.srcdata[NID], block.edata[EID]
    found: list[Counter[tuple[int, int]]] = [Counter() for _ in range(block.num_dst_nodes())]
    for u, v, e in zip(src.tolist(), dst.tolist(), eids.tolist(), strict=True):
        found[v][e, int(ids[u])] += 1
    return found


@pytest.mark.parametrize("name", SAMPLERS)
def test_each_time_has_the_neighbours_that_the_seed_has_alone(name: str) -> None:
    g, sampler, draw = plain(), SAMPLERS[name](), DrawSeed(5, 1, 2)
    inputs, outputs, blocks = sampler.sample(g, torch.tensor(SEEDS), draw_seed=draw)
    assert outputs.tolist() == SEEDS
    assert torch.equal(inputs, blocks[0].srcdata[NID])
    for block in blocks:
        num_dst = block.num_dst_nodes()
        assert torch.equal(block.srcdata[NID][:num_dst], block.dstdata[NID])
        assert torch.equal(block.srcdata["feat"], g.ndata["feat"][block.srcdata[NID]])
        assert torch.equal(block.edata["weight"], g.edata["weight"][block.edata[EID]])
    assert torch.equal(blocks[1].srcdata[NID], blocks[0].dstdata[NID])
    together = neighbours_of(blocks[-1])
    for place, seed in enumerate(SEEDS):
        _, _, alone = sampler.sample(g, torch.tensor([seed]), draw_seed=draw)
        assert neighbours_of(alone[-1]) == [together[place]]
    # The sources besides the seeds come once.
    others = blocks[-1].srcdata[NID][len(SEEDS) :].tolist()
    assert len(set(others)) == len(others)
    assert not set(others) & set(SEEDS)


@pytest.mark.filterwarnings("ignore:Dataloader CPU affinity:Warning")
@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
def test_output_nodes_are_those_of_dgl(idtype: torch.dtype) -> None:
    for size in (3, 7):
        found = []
        for module in BOTH:
            sampler = module.dataloading.NeighborSampler([2, 2])
            loader = module.dataloading.DataLoader(
                plain(module, idtype), torch.tensor(SEEDS, dtype=idtype), sampler, batch_size=size
            )
            found.append(
                [
                    (outputs.tolist(), blocks[-1].num_dst_nodes(), outputs.dtype)
                    for _, outputs, blocks in loader
                ]
            )
        assert found[0] == found[1]


def test_labels_and_rows_align_on_a_typed_graph() -> None:
    g = typed()
    seeds = {"user": torch.tensor([4, 4, 1]), "item": torch.tensor([2, 8, 2, 2])}
    loader = DataLoader(g, seeds, NeighborSampler([2, 2]), batch_size=7, shuffle=True, seed=1)
    ((_, outputs, blocks),) = loader
    assert sorted(outputs["user"].tolist()) == [1, 4, 4]
    assert sorted(outputs["item"].tolist()) == [2, 2, 2, 8]
    for ntype in g.ntypes:
        rows = blocks[-1].dstnodes[ntype].data["feat"]
        assert torch.equal(rows, g.nodes[ntype].data["feat"][outputs[ntype]])


def test_a_model_gives_each_time_its_row() -> None:
    whole = graph_of("plain")
    inputs, model = inputs_of(whole), model_of("plain", whole.etypes)
    seeds = torch.tensor([3, 5, 3, 24, 3])
    ((input_nodes, _, blocks),) = DataLoader(
        whole, seeds, MultiLayerFullNeighborSampler(2), batch_size=5
    )
    rows = run(model, blocks, {"_N": inputs["_N"][input_nodes]})["_N"]
    expected = run(model, [whole] * 2, inputs)["_N"][seeds]
    torch.testing.assert_close(rows, expected)


@pytest.mark.parametrize("exclude", [None, "self", "reverse_id"])
def test_edges_that_a_batch_has_several_times(exclude: str | None) -> None:
    g, seeds = plain(), torch.tensor([3, 3, 90, 5, 3])
    loader = EdgeDataLoader(
        g,
        seeds,
        NeighborSampler([-1, -1]),
        exclude=exclude,
        reverse_eids=torch.arange(120).roll(60) if exclude == "reverse_id" else None,
        batch_size=5,
    )
    ((_, pairs, blocks),) = loader
    assert pairs.edata[EID].tolist() == seeds.tolist()
    src, dst = g.find_edges(seeds)
    assert torch.equal(pairs.ndata[NID][pairs.edges()[0]], src)
    assert torch.equal(pairs.ndata[NID][pairs.edges()[1]], dst)
    assert torch.equal(blocks[-1].dstdata[NID], pairs.ndata[NID])
    drawn = torch.cat([block.edata[EID] for block in blocks])
    assert bool(torch.isin(seeds, drawn).any()) == (exclude is None)


def oversampled(graph: graphshard.Graph, rank: int) -> dict[str, Tensor]:
    """Original ids: many times the same, of any owner, other ones on each rank."""
    return {
        t: torch.tensor([1, 2, 1, 4, 1, 2 + rank, rank, 1]) % graph.num_nodes(t)
        for t in graph.ntypes
    }


def epoch(rank: int, num_ranks: int, kind: str, parts: str, options: dict[str, Any]) -> list[float]:
    """Differences of loss and gradients to one process; and whether ids are those given."""
    whole, manager = graph_of(kind), manager_of(parts, rank)
    translation, model = Translation(parts, num_ranks), model_of(kind, whole.etypes)
    inputs, labels = inputs_of(whole), labels_of(whole)
    sampler = DistNeighborSampler(
        [-1, -1],
        input_node_features=by_name(manager, "x", inputs),
        output_node_features=by_name(manager, "y", labels),
    )
    mine = oversampled(whole, rank)
    seeds: Any = {t: translation.new(t, ids) for t, ids in mine.items()}
    loader = ShardedLoader(
        manager, seeds["_N"] if kind == "plain" else seeds, sampler, 5, shuffle=True, **options
    )
    wanted = {
        t: torch.cat([oversampled(whole, r)[t] for r in range(num_ranks)]) for t in whole.ntypes
    }
    total = sum(len(ids) for ids in wanted.values())
    taken = {t: [] for t in mine}
    for batch in loader:
        x, y = attached(batch)
        for t in taken:
            ids = translation.old(t, batch[-1].dstnodes[t].data[NID])
            assert torch.equal(y[t], labels[t][ids])
            assert torch.equal(x[t], inputs[t][translation.old(t, batch[0].srcnodes[t].data[NID])])
            taken[t] += ids.tolist()
        share = global_mean(losses_of(run(model, batch, x), y), batch)
        (share * batch.num_global_seeds / total).backward()
    loader.close()
    graphshard.gather_grads(model)
    sampled = grads_of(model)
    model.zero_grad()
    outputs = run(model, [whole] * 2, inputs)
    losses_of(
        {t: outputs[t][ids] for t, ids in wanted.items()},
        {t: labels[t][ids] for t, ids in wanted.items()},
    ).mean().backward()
    same = all(sorted(taken[t]) == sorted(ids.tolist()) for t, ids in mine.items())
    pairs = zip(sampled, grads_of(model), strict=True)
    return [max(float((a - b).abs().max()) for a, b in pairs), float(not same)]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("plain", {"transport": "collective"}),
        ("plain", {"transport": "replicated", "cache_bytes": 400}),
        ("typed", {"transport": "collective", "map_features": False}),
    ],
)
def test_ranks_compute_what_one_process_does(
    tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    parts = write_parts(tmp_path, graph_of(kind), 2, "random")
    for difference, others in run_ranks(epoch, 2, kind, parts, options):
        assert difference < 1e-10
        assert not others
