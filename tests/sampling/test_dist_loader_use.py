# SPDX-License-Identifier: Apache-2.0
"""How a DataLoader over a sharded graph is used, and misused; its loss. 1 or 2 gloo ranks."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from dist_loader_cases import (
    CLASSES,
    WIDTH,
    by_name,
    grads_of,
    inputs_of,
    labels_of,
)
from sharded_cases import graph_of, left_behind, manager_of, write_parts
from torch import nn

import graphshard
from graphshard.nn import SAGEConv
from graphshard.sampling import (
    DataLoader,
    DistNeighborSampler,
    LoaderStats,
    MiniBatch,
    NeighborSampler,
    global_mean,
)
from graphshard.testing import RanksFailed, run_ranks


def test_global_mean() -> None:
    values = torch.tensor([1.0, 2.0, 6.0], requires_grad=True)
    batch = MiniBatch([], num_seeds=3, num_global_seeds=12)
    mean = global_mean(values, batch)
    assert mean.item() == 0.75
    assert global_mean(values, batch, averaged_over=4).item() == 3.0
    assert global_mean(values, 9).item() == 1.0
    rows = torch.ones(3, 5) * values[:, None]
    assert global_mean(rows, batch).item() == 0.75
    assert global_mean(values[:0], MiniBatch([], num_global_seeds=4)).item() == 0.0
    assert global_mean(values[:0], 0).item() == 0.0


@pytest.mark.parametrize("shape", [(), (2,), (4, 1)])
def test_global_mean_wants_a_value_per_seed(shape: tuple[int, ...]) -> None:
    batch = MiniBatch([], num_seeds=3, num_global_seeds=12)
    with pytest.raises(ValueError, match=r"one row for each of the 3 seeds.*reduction='none'"):
        global_mean(torch.zeros(shape), batch)


def under_ddp(rank: int, world_size: int, parts: str) -> dict[str, Any]:
    whole = graph_of("plain")
    manager = manager_of(parts, rank)
    sampler = DistNeighborSampler(
        [-1],
        input_node_features=by_name(manager, "x", inputs_of(whole)),
        output_node_features=by_name(manager, "y", labels_of(whole)),
    )
    seeds = manager.ndata["_ID"][: 0 if rank == 1 else 7]
    torch.manual_seed(0)
    plain = SAGEConv(WIDTH, CLASSES, "mean").double()
    wrapped = nn.parallel.DistributedDataParallel(SAGEConv(WIDTH, CLASSES, "mean").double())
    wrapped.module.load_state_dict(plain.state_dict())
    for batch in DataLoader(manager, seeds, sampler, 3):
        for model, averaged in ((plain, 1), (wrapped, world_size)):
            out = model(batch[0], batch[0].srcdata["x"])
            losses = nn.functional.cross_entropy(out, batch[-1].dstdata["y"], reduction="none")
            global_mean(losses, batch, averaged_over=averaged).backward()
    graphshard.gather_grads(plain)
    pairs = zip(grads_of(plain), grads_of(wrapped), strict=True)
    return {"steps": len(batch), "difference": max(float((a - b).abs().max()) for a, b in pairs)}


def test_works_under_distributed_data_parallel(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, graph_of("plain"), 2, "metis")
    for found in run_ranks(under_ddp, 2, parts):
        assert found["difference"] < 1e-12


def passes(rank: int, world_size: int, parts: str) -> dict[str, Any]:
    manager = manager_of(parts, rank)
    seeds = manager.ndata["_ID"]
    loader = DataLoader(manager, seeds, NeighborSampler([2, 2]), 2, seed=0, transport="collective")
    texts = []
    for _ in range(3):  # leave early, again and again
        for number, _ in enumerate(loader):
            if number == 1:
                break
    threads = [t.name for t in threading.enumerate()]
    first = iter(loader)
    next(first)
    second = iter(loader)
    next(second)
    try:
        next(first)
    except RuntimeError as error:
        texts.append(str(error))
    second.close()
    for _ in DataLoader(manager, seeds, NeighborSampler([2]), 2, seed=0):  # nothing else holds it
        break
    complete = len(list(loader)) == len(loader)
    loader.close()
    loader.close()
    try:
        iter(loader)
    except RuntimeError as error:
        texts.append(str(error))
    return {"threads": threads, "texts": texts, "complete": complete, "left": left_behind()}


def test_leaving_early_beginning_anew_and_closing(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, graph_of("plain"), 2, "metis")
    for found in run_ranks(passes, 2, parts):
        assert not [name for name in found["threads"] if "sampling" in name]
        assert found["complete"]
        assert "another pass over this DataLoader has begun" in found["texts"][0]
        assert "this DataLoader is closed; make another one" in found["texts"][1]
        assert found["left"] == []


MISTAKES: dict[str, tuple[str, dict[str, Any]]] = {
    "seeds": (
        "ValueError: rank 1: seed_nodes of type '_N' must be in [0, 25) (got 25)",
        {"seeds": [25]},
    ),
    "mask": (
        "TypeError: rank 1: seed_nodes of type '_N' must be ids (got a bool mask)",
        {"seeds": [True]},
    ),
    "rows": (
        "ValueError: rank 1: input_node_features['x'] must have a row for each of the",
        {"rows": 1},
    ),
    "batch_size": (
        "ValueError: rank 1: batch_size must be an integer of at least 1 (got 0)",
        {"batch_size": 0},
    ),
    "prefetch": (
        "ValueError: rank 1: prefetch must be an integer of at least 0 (got -1)",
        {"prefetch": -1},
    ),
    "other": (
        "the arguments of DataLoader must be the same on all ranks, but rank 1 differs",
        {"batch_size": 7},
    ),
    "fanouts": ("the arguments of DataLoader must be the same on all ranks", {"fanouts": [3]}),
    "transport": (
        "transport must be one of auto, collective, replicated (got 'fast')",
        {"transport": "fast"},
    ),
    "sampler": (
        "TypeError: rank 1: sampler must be a DistNeighborSampler or another",
        {"sampler": 3},
    ),
}


def mistaken(rank: int, world_size: int, parts: str, wrong: dict[str, Any]) -> None:
    manager = manager_of(parts, rank)
    wrong = wrong if rank == 1 or "transport" in wrong else {}
    options = {k: v for k, v in wrong.items() if k in ("batch_size", "prefetch", "transport")}
    rows = torch.zeros(wrong.get("rows", manager.num_nodes()), 2)
    sampler = DistNeighborSampler(wrong.get("fanouts", [2]), input_node_features={"x": rows})
    seeds = torch.tensor(wrong["seeds"]) if "seeds" in wrong else torch.arange(3)
    DataLoader(manager, seeds, wrong.get("sampler", sampler), **{"batch_size": 2, **options})


@pytest.mark.parametrize("name", list(MISTAKES))
def test_a_mistake_on_one_rank_is_an_error_on_all(tmp_path: Path, name: str) -> None:
    text, wrong = MISTAKES[name]
    parts = write_parts(tmp_path, graph_of("plain"), 2, "metis")
    with pytest.raises(RanksFailed) as caught:
        run_ranks(mistaken, 2, parts, wrong)
    assert sorted(caught.value.errors) == [0, 1]
    for report in caught.value.errors.values():
        assert text in report


def out_of_step(rank: int, world_size: int, parts: str, how: str) -> list[str]:
    manager = manager_of(parts, rank)
    loader = DataLoader(
        manager, manager.ndata["_ID"], NeighborSampler([2]), 2, seed=0, transport="collective"
    )
    if how == "epoch":
        loader.set_epoch(rank)
    else:
        run = iter(loader)
        for _ in range(len(loader) - (1 if rank == 0 else 3) if how == "left" else 1):
            next(run)
        run.close()
    if how == "closed" and rank == 1:
        loader.close()
    texts = []
    for _ in range(2):
        try:
            iter(loader)
        except (ValueError, RuntimeError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


def test_ranks_that_are_not_in_step_are_told_so(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, graph_of("plain"), 2, "metis")
    for texts in run_ranks(out_of_step, 2, parts, "epoch"):
        assert "ValueError: where a DataLoader stands at the start of a pass" in texts[0]
        assert "rank 0 has 'epoch 0, operations [0]', rank 1 has 'epoch 1" in texts[0]
    for texts in run_ranks(out_of_step, 2, parts, "closed"):
        assert texts[0].startswith("RuntimeError: rank 1: this DataLoader is closed")


@pytest.mark.parametrize(
    ("error", "text", "arguments"),
    [
        (
            TypeError,
            "graph must be a GraphShardManager, a Graph or a GraphStore",
            {"graph": "cora"},
        ),
        (TypeError, r"sampler must be .*dataloading.DataLoader takes any", {"sampler": None}),
        (ValueError, r"seed must be a 64-bit integer", {"seed": 2**63}),
        (ValueError, r"cache_bytes must be an integer of at least 0", {"cache_bytes": -1}),
        (ValueError, r"names the node type 'z'", {"x": {"z": torch.zeros(25)}}),
        (TypeError, r"must be a tensor \(got list\)", {"x": [1, 2]}),
        (
            ValueError,
            r"requires a gradient.*pass .detach",
            {"x": torch.zeros(25, requires_grad=True)},
        ),
        (TypeError, r"must be dense", {"x": torch.zeros(25, 2).to_sparse()}),
        (ValueError, r"a dictionary of fanouts must name every relation", {"fanouts": [{}]}),
    ],
)
def test_mistakes_in_one_process(
    error: type[Exception], text: str, arguments: dict[str, Any]
) -> None:
    graph = graph_of("plain")
    features = {"x": arguments.pop("x")} if "x" in arguments else {}
    sampler = DistNeighborSampler(arguments.pop("fanouts", [2]), input_node_features=features)
    given = {"graph": graph, "sampler": sampler, **arguments}
    with pytest.raises(error, match=text):
        DataLoader(seed_nodes=torch.arange(3), batch_size=2, **given)


def test_features_of_a_typed_graph_are_given_by_type() -> None:
    sampler = DistNeighborSampler([2], output_node_features={"y": torch.zeros(17)})
    with pytest.raises(TypeError, match=r"output_node_features\['y'\] must be a dictionary"):
        DataLoader(graph_of("typed"), {"a": torch.arange(2)}, sampler, 2)


def test_stats_begin_anew_with_each_pass() -> None:
    graph = graph_of("plain")
    loader = DataLoader(graph, torch.arange(25), NeighborSampler([-1]), 5)
    assert loader.stats() == LoaderStats()
    for _ in range(2):
        list(loader)
        assert loader.stats().num_edges == graph.num_edges()
        assert loader.stats().num_steps == 5
        assert loader.stats().wait_seconds > 0


@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_are_moved_to_the_output_device(prefetch: int) -> None:
    graph = graph_of("plain")
    sampler = DistNeighborSampler(
        [2, 2], input_node_features={"x": torch.ones(25, 3)}, output_device="meta"
    )
    for batch in DataLoader(graph, torch.arange(25), sampler, 5, prefetch=prefetch):
        assert {block.device.type for block in batch} == {"meta"}
        assert batch[0].srcdata["x"].device.type == "meta"
        assert batch.num_global_seeds == 5
