# SPDX-License-Identifier: Apache-2.0
"""DataLoader over a sharded graph: N ranks compute what one process computes. 1 to 3 gloo ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from dist_loader_cases import (
    CLASSES,
    WIDTH,
    Rows,
    attached,
    by_name,
    grads_of,
    inputs_of,
    labels_of,
    losses_of,
    model_of,
    own,
    run,
)
from sharded_cases import (
    Translation,
    assert_same_blocks,
    edge_features,
    graph_of,
    in_original_ids,
    left_behind,
    manager_of,
    seeds_of,
    write_parts,
)

import graphshard
from graphshard.sampling import (
    DataLoader,
    DistNeighborSampler,
    LaborSampler,
    MiniBatch,
    NeighborSampler,
    global_mean,
)
from graphshard.testing import run_ranks


def own_seeds(graph: graphshard.Graph, rank: int, num_ranks: int) -> Rows:
    """Original ids of a rank's seeds: a third of all; most on rank 0, none on the last of three."""
    found = {}
    for ntype in graph.ntypes:
        ids = torch.arange(0, graph.num_nodes(ntype), 3).flip(0)
        cut = ids.numel() if num_ranks == 1 else 2 * ids.numel() // 3
        found[ntype] = [ids[:cut], ids[cut:], ids[:0]][rank]
    return found


def epoch_against_full_graph(
    rank: int, world_size: int, kind: str, parts: str, options: dict[str, Any]
) -> dict[str, float]:
    """The largest differences between an epoch of sampled steps and one full-graph step."""
    whole = graph_of(kind)
    manager = manager_of(parts, rank)
    translation = Translation(parts, world_size)
    inputs, labels = inputs_of(whole), labels_of(whole)
    sampler = DistNeighborSampler(
        [-1, -1],
        input_node_features=by_name(manager, "x", inputs),
        output_node_features=by_name(manager, "y", labels),
    )
    old_seeds = own_seeds(whole, rank, world_size)
    seeds: Any = {t: translation.new(t, ids) for t, ids in old_seeds.items()}
    total = sum(
        len(ids) for r in range(world_size) for ids in own_seeds(whole, r, world_size).values()
    )
    loader = DataLoader(
        manager, seeds["_N"] if kind == "plain" else seeds, sampler, 3, shuffle=True, **options
    )
    model = model_of(kind, whole.etypes)
    loss = torch.zeros((), dtype=torch.float64)
    taken = 0
    for batch in loader:
        x, y = attached(batch)
        share = global_mean(losses_of(run(model, batch, x), y), batch)
        (share * batch.num_global_seeds / total).backward()
        loss += share.detach() * batch.num_global_seeds / total
        taken += batch.num_seeds
    assert taken == sum(len(ids) for ids in old_seeds.values())
    graphshard.gather_grads(model)
    dist.all_reduce(loss)
    sampled = grads_of(model)
    loader.close()
    model.zero_grad()

    wanted = {
        t: torch.cat([own_seeds(whole, r, world_size)[t] for r in range(world_size)])
        for t in inputs
    }
    outputs = run(model, [whole] * 2, inputs)
    expected = losses_of(
        {t: outputs[t][ids] for t, ids in wanted.items()},
        {t: labels[t][ids] for t, ids in wanted.items()},
    ).mean()
    expected.backward()
    single = grads_of(model)
    model.zero_grad()

    mine = {t: torch.isin(manager.original_ids[t], wanted[t]) for t in inputs}
    outputs = run(model, [manager] * 2, own(manager, inputs))
    parts_of_it = losses_of(
        {t: outputs[t][mine[t]] for t in mine},
        {t: own(manager, labels)[t][mine[t]] for t in mine},
    )
    global_mean(parts_of_it, total).backward()
    graphshard.gather_grads(model)
    return {
        "loss": float((loss - expected.detach()).abs()),
        "one process": max(
            float((a - b).abs().max()) for a, b in zip(sampled, single, strict=True)
        ),
        "full graph": max(
            float((a - b).abs().max()) for a, b in zip(sampled, grads_of(model), strict=True)
        ),
        "size": max(float(g.abs().max()) for g in single),
    }


@pytest.mark.parametrize("kind", ["plain", "typed"])
@pytest.mark.parametrize(
    ("num_ranks", "how", "options"),
    [
        (1, "metis", {}),
        (2, "random", {"transport": "collective", "map_features": False}),
        (3, "empty_part", {"transport": "replicated"}),
        (3, "random", {"transport": "collective", "prefetch": 0}),
    ],
)
def test_with_full_fanout_an_epoch_computes_what_the_full_graph_does(
    tmp_path: Path, kind: str, num_ranks: int, how: str, options: dict[str, Any]
) -> None:
    parts = write_parts(tmp_path, graph_of(kind), num_ranks, how)
    for found in run_ranks(epoch_against_full_graph, num_ranks, kind, parts, options):
        assert found["size"] > 1e-3
        assert max(found["loss"], found["one process"], found["full graph"]) < 1e-10, found


def content(batch: MiniBatch, translation: Translation | None) -> dict[str, Any]:
    """All there is to know about a batch, in original ids."""
    x, y = attached(batch)
    return {
        "blocks": [in_original_ids(block, translation, False) for block in batch],
        "x": x,
        "y": y,
        "weights": [batch.epoch, batch.step, batch.num_seeds, batch.num_global_seeds],
    }


VARIANTS: dict[str, dict[str, Any]] = {
    "now": {"prefetch": 0, "transport": "collective", "map_features": False},
    "one ahead": {"prefetch": 1, "transport": "collective", "map_features": False},
    "three ahead": {"prefetch": 3, "transport": "collective"},
    "replicated": {"transport": "replicated"},
    "replicated now": {"transport": "replicated", "prefetch": 0},
    "cached": {"cache_bytes": 10**6, "map_features": False, "transport": "collective"},
    "cached, now": {
        "cache_bytes": 220,
        "map_features": False,
        "prefetch": 0,
        "transport": "collective",
    },
}


def two_epochs(rank: int, world_size: int, kind: str, parts: str, variant: str) -> dict[str, Any]:
    whole = graph_of(kind)
    manager = manager_of(parts, rank, whole)
    translation = Translation(parts, world_size)
    sampler = DistNeighborSampler(
        [3, 2],
        prob="w",
        copy_edata=False,
        input_node_features=by_name(manager, "x", inputs_of(whole)),
        output_node_features=by_name(manager, "y", labels_of(whole)),
    )
    seeds = {t: translation.new(t, ids) for t, ids in seeds_of(whole, rank).items()}
    with DataLoader(
        manager, seeds, sampler, 2, shuffle=True, seed=5, edge_ids=True, **VARIANTS[variant]
    ) as loader:
        assert loader.epoch == 0
        batches = [content(batch, translation) for _ in range(2) for batch in loader]
        assert loader.epoch == 2
        stats = loader.stats()
        hit_rate = loader.cache_hit_rate
    return {"batches": batches, "stats": vars(stats), "rate": hit_rate, "left": left_behind()}


def alone(kind: str, rank: int) -> list[dict[str, Any]]:
    """What the same seeds give on a graph that is whole in this process; they are in one batch."""
    whole = graph_of(kind)
    for etype in whole.canonical_etypes:
        whole.edges[etype].data["w"] = edge_features(whole, etype)["w"]
    sampler = DistNeighborSampler(
        [3, 2],
        prob="w",
        copy_edata=False,
        input_node_features={"x": inputs_of(whole)},
        output_node_features={"y": labels_of(whole)},
    )
    loader = DataLoader(
        whole, seeds_of(whole, rank), sampler, 2, shuffle=True, seed=5, edge_ids=True
    )
    return [content(batch, None) for _ in range(2) for batch in loader]


@pytest.mark.parametrize("kind", ["plain", "typed"])
def test_batches_are_the_same_in_every_way(tmp_path: Path, kind: str) -> None:
    parts = write_parts(tmp_path, graph_of(kind), 2, "random")
    variants = {name: run_ranks(two_epochs, 2, kind, parts, name) for name in VARIANTS}
    process = alone(kind, 0)  # the order of rank 0 is that of a process alone
    for name, found in variants.items():
        for rank in range(2):
            assert found[rank]["left"] == []
            batches, wanted = found[rank]["batches"], variants["now"][rank]["batches"]
            if rank == 0:
                assert len(batches) == len(process)
            for number, batch in enumerate(batches):
                what = f"{name}, rank {rank}, batch {number}"
                others = [wanted[number], process[number]] if rank == 0 else [wanted[number]]
                for other in others:
                    assert_same_blocks(batch["blocks"], other["blocks"], what)
                    for side in ("x", "y"):
                        for ntype, rows in batch[side].items():
                            assert torch.equal(rows, other[side][ntype]), what
                assert batch["weights"] == wanted[number]["weights"]
            stats = found[rank]["stats"]
            assert stats["num_steps"] == len(batches) // 2
            assert stats["num_edges"] == variants["now"][rank]["stats"]["num_edges"] > 0
            assert (stats["sampling_bytes"] == 0) == name.startswith("replicated")
            mapped = name.startswith(("replicated", "three"))
            assert (stats["feature_bytes"] == 0) == mapped
    for rank in range(2):
        assert variants["cached"][rank]["rate"] == 1.0
        assert 0 < variants["cached, now"][rank]["rate"] < 1
        assert variants["now"][rank]["rate"] == 0
        epochs = [b["weights"][0] for b in variants["now"][rank]["batches"]]
        assert epochs == sorted(epochs)
        assert set(epochs) == {0, 1}


def test_a_batch_without_seeds_is_a_legal_batch() -> None:
    graph = graph_of("typed")
    sampler = DistNeighborSampler(
        [2, 2],
        input_node_features={"x": inputs_of(graph)},
        output_node_features={"y": labels_of(graph)},
    )
    loader = DataLoader(graph, {"a": torch.arange(3)}, sampler, 2)
    loader._seeds.num_steps = 3
    batch = list(loader)[-1]
    assert (batch.num_seeds, batch[0].num_edges()) == (0, 0)
    x, y = attached(batch)
    assert {t: tuple(rows.shape) for t, rows in x.items()} == dict.fromkeys(x, (0, WIDTH))
    model = model_of("typed", graph.etypes)
    share = global_mean(losses_of(run(model, batch, x), y), batch)
    share.backward()
    assert share.item() == 0
    assert all(float(g.abs().sum()) == 0 for g in grads_of(model))


def named_features(rank: int, world_size: int, parts: str) -> list[bool]:
    whole = graph_of("typed")
    manager = manager_of(parts, rank, whole)
    translation = Translation(parts, world_size)
    for ntype, rows in own(manager, inputs_of(whole)).items():
        manager.nodes[ntype].data["x"] = rows
    manager.nodes["a"].data["y"] = own(manager, labels_of(whole))["a"]
    sampler = LaborSampler(
        [3, 2],
        prefetch_node_feats={"a": ["x"], "b": ["x"]},
        prefetch_labels=["y", "x"],
        prefetch_edge_feats={("a", "likes", "b"): ["w"]},
    )
    seeds = {"a": manager.nodes["a"].data["_ID"][:4]}
    checks = []
    for batch in DataLoader(manager, seeds, sampler, 2, seed=1):
        first, last = batch[0], batch[-1]
        nodes = translation.old("b", first.srcnodes["b"].data["_ID"])
        checks.append(torch.equal(first.srcnodes["b"].data["x"], inputs_of(whole)["b"][nodes]))
        checks.append("x" not in first.srcnodes["c"].data)
        nodes = translation.old("a", last.dstnodes["a"].data["_ID"])
        checks.append(torch.equal(last.dstnodes["a"].data["y"], nodes % CLASSES))
        checks.append(torch.equal(last.dstnodes["a"].data["x"], inputs_of(whole)["a"][nodes]))
        weights = edge_features(whole, ("a", "likes", "b"))["w"]
        for block in batch:
            eids = translation.old(("a", "likes", "b"), block.edges["likes"].data["_ID"])
            checks.append(torch.equal(block.edges["likes"].data["w"], weights[eids]))
    return checks


def test_any_sampler_may_name_features_of_the_graph(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, graph_of("typed"), 2, "random")
    for checks in run_ranks(named_features, 2, parts):
        assert checks
        assert all(checks)


def test_two_features_of_one_name() -> None:
    graph = graph_of("plain")
    count = graph.num_nodes()
    same, other = torch.arange(count), torch.arange(count) + 100
    for out in (same, other):
        sampler = DistNeighborSampler(
            [2], input_node_features={"f": same}, output_node_features={"f": out}
        )
        for batch in DataLoader(graph, torch.arange(count), sampler, 5):
            assert torch.equal(batch[0].srcdata["f"], same[batch[0].srcdata["_ID"]])
            assert torch.equal(batch[-1].dstdata["f"], out[batch[-1].dstdata["_ID"]])


def shared_seed(rank: int, world_size: int, parts: str) -> dict[str, Any]:
    torch.manual_seed(100 + rank)
    manager = manager_of(parts, rank)
    seeds = manager.ndata["_ID"]
    sampler = NeighborSampler([2])
    loader = DataLoader(manager, seeds, sampler, 4, shuffle=True)
    after = torch.get_rng_state()
    torch.manual_seed(100 + rank)
    if rank == 0:
        torch.randint(2**62, ())
    other = DataLoader(manager, seeds, sampler, 4, shuffle=True, seed=loader.seed)
    return {
        "seed": loader.seed,
        "drawn": torch.equal(after, torch.get_rng_state()),
        "steps": [len(loader), len(list(loader)), len(other)],
        "same": [
            torch.equal(a[0].srcdata["_ID"], b[0].srcdata["_ID"])
            for a, b in zip(loader, other, strict=True)
        ],
    }


def test_rank_0s_generator_gives_the_seed(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, graph_of("plain"), 2, "metis")
    zero, one = run_ranks(shared_seed, 2, parts)
    torch.manual_seed(100)
    assert zero["seed"] == one["seed"] == int(torch.randint(2**62, ()))
    for found in (zero, one):
        assert found["drawn"]
        assert len(set(found["steps"])) == 1
        assert not all(found["same"])  # epoch 1 of one, epoch 0 of the other


def test_epochs_differ_and_can_be_chosen() -> None:
    graph = graph_of("plain")
    loader = DataLoader(graph, torch.arange(25), NeighborSampler([2, 2]), 10, shuffle=True, seed=3)

    def epoch() -> list[list[int]]:
        return [batch[0].srcdata["_ID"].tolist() for batch in loader]

    zero, one = epoch(), epoch()
    assert zero != one
    assert loader.epoch == 2
    loader.set_epoch(0)
    assert [epoch(), epoch()] == [zero, one]
    assert len(loader) == 3
    dropping = DataLoader(graph, torch.arange(25), NeighborSampler([2]), 10, drop_last=True)
    assert [batch.num_seeds for batch in dropping] == [10, 10]
    assert list(DataLoader(graph, torch.arange(0), NeighborSampler([2]), 10)) == []
