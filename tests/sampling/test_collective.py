# SPDX-License-Identifier: Apache-2.0
"""CollectiveGraphStore: traffic of a draw, groups, weights that change, errors. 2 and 3 ranks."""

from __future__ import annotations

import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_cases import (
    DRAW_SEED,
    SAMPLERS,
    Translation,
    edge_features,
    excluded_of,
    graph_of,
    manager_of,
    plain_graph,
    sample,
    seeds_of,
    typed_graph,
    write_parts,
)

import graphshard
from graphshard import comm
from graphshard.partition import partition_graph
from graphshard.sampling import NeighborSampler
from graphshard.sampling.graph_store import (
    CollectiveGraphStore,
    DrawOptions,
    NeighborRequest,
    graph_store_of,
)
from graphshard.testing import run_ranks

FANOUTS = {"knows": -1, "likes": 0, "back": 2, "sells": 300, "owns": 1, "_E": 3}


def traced_draw(rank: int, world_size: int, kind: str, parts: str, how: dict) -> dict[str, Any]:
    """One draw of rows of all owners: what was asked, what came, what was sent."""
    graph = graph_of(kind)
    manager = manager_of(parts, rank, graph)
    structure = CollectiveGraphStore.of(manager)
    options = DrawOptions(**{k: v for k, v in how.items() if k != "excluded"})
    translation = Translation(parts, world_size)
    excluded = {}
    if how.get("excluded"):
        excluded = {e: translation.new(e, i) for e, i in excluded_of(graph, rank).items()}
    requests = [
        NeighborRequest(
            etype,
            translation.new(etype[2], seeds_of(graph, rank)[etype[2]]),
            FANOUTS[etype[1]],
            DRAW_SEED.key(0, i),
        )
        for i, etype in enumerate(structure.canonical_etypes)
    ]
    structure.sample_neighbors(
        requests, options, excluded
    )  # what first use exchanges does not count
    with comm.trace() as counted:
        drawn = structure.sample_neighbors(requests, options, excluded)
    ranges = structure.ownership.ranges
    return {
        "calls": counted.calls,
        "bytes": counted.total_bytes,
        "requests": [
            {
                "owner": ranges[r.etype[2]].part_of(r.nodes),
                "counts": d.counts,
                "excluded": ranges[r.etype].part_of(excluded.get(r.etype, r.nodes[:0])),
                "fanout": r.fanout,
            }
            for r, d in zip(requests, drawn, strict=True)
        ],
    }


@pytest.mark.parametrize(
    ("how", "per_edge"),
    [
        ({"with_eids": False}, 4),
        ({"with_eids": True}, 8),
        ({"with_eids": True, "excluded": True}, 8),
    ],
    ids=["plain", "eids", "excluded"],
)
@pytest.mark.parametrize("kind", ["plain", "typed"])
def test_a_draw_sends_what_the_formula_says(
    tmp_path: Path, kind: str, how: dict, per_edge: int
) -> None:
    num_ranks = 3
    parts = write_parts(tmp_path, graph_of(kind), num_ranks, "random")
    found = run_ranks(traced_draw, num_ranks, kind, parts, how)
    num_relations = len(found[0]["requests"])
    for rank in range(num_ranks):
        sent = 4 * (2 + 2 * num_relations) * (num_ranks - 1)
        for request in found[rank]["requests"]:
            if request["fanout"]:
                sent += 4 * int((request["owner"] != rank).sum())
                sent += 4 * int((request["excluded"] != rank).sum())
        for other in set(range(num_ranks)) - {rank}:
            for request in found[other]["requests"]:
                if request["fanout"]:
                    asked = request["owner"] == rank
                    # No node has more than 255 edges, so one byte holds any count.
                    sent += int(asked.sum()) + per_edge * int(request["counts"][asked].sum())
        assert found[rank]["bytes"] == sent, rank
        assert found[rank]["calls"] == {"all_to_all": 4}


LARGE_FANOUTS = ((255, False, 1), (300, False, 2), (-1, False, 2), (600, True, 2))
"""(fanout, replace, bytes of a count)."""


def draws_of_a_hub(rank: int, world_size: int, parts: str) -> list[list[int]]:
    """Edges drawn and bytes sent, where rank 0 asks for a node of rank 1 that has 300 edges."""
    structure = CollectiveGraphStore.of(manager_of(parts, rank))
    rows = torch.tensor([7] if rank == 0 else [], dtype=torch.int64)
    found = []
    for fanout, replace, _ in LARGE_FANOUTS:
        request = NeighborRequest(structure.canonical_etypes[0], rows, fanout, 1)
        with comm.trace() as counted:
            (drawn,) = structure.sample_neighbors(
                [request], DrawOptions(with_eids=False, replace=replace)
            )
        found.append([int(drawn.counts.sum()), counted.total_bytes])
    return found


def test_a_count_takes_no_more_bytes_than_it_needs(tmp_path: Path) -> None:
    graph = graphshard.graph((torch.arange(300) % 7, torch.full((300,), 7)), num_nodes=8)
    hub_alone = torch.tensor([0] * 7 + [1])
    partition_graph(graph, "g", 2, str(tmp_path), part_method=hub_alone, quiet=True)
    asked, answered = run_ranks(draws_of_a_hub, 2, str(tmp_path / "g.json"))
    announced = 4 * (2 + 2)
    for number, (fanout, _, width) in enumerate(LARGE_FANOUTS):
        num_drawn = 300 if fanout == -1 else fanout
        assert asked[number] == [num_drawn, announced + 4]
        assert answered[number] == [0, announced + width + 4 * num_drawn]


def in_threads(rank: int, world_size: int, parts: str) -> bool:
    """Two copies draw at the same time, each over a group of its own."""
    graph = typed_graph()
    first = CollectiveGraphStore.of(manager_of(parts, rank, graph))
    groups = [dist.new_group(list(range(world_size))) for _ in range(2)]
    copies = [first.on(group) for group in groups]
    translation = Translation(parts, world_size)
    names = ["out labor", "labor", "out weighted", "uniform"]
    wanted = {name: sample(name, first, graph, rank, translation) for name in names}
    found: list[dict] = [{}, {}]

    def draw(number: int) -> None:
        for name in names if number else reversed(names):
            found[number][name] = sample(name, copies[number], graph, rank, translation)

    threads = [threading.Thread(target=draw, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return all(
        torch.equal(one[key], other[key])
        for copy in found
        for name in names
        for one, other in zip(copy[name], wanted[name], strict=True)
        for key in one
    )


def test_copies_over_other_groups_draw_side_by_side(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, typed_graph(), 2, "random")
    assert run_ranks(in_threads, 2, parts) == [True, True]


def change_weights(rank: int, world_size: int, parts: str, edge_dir: str) -> list[bool]:
    """Weights that allow one half of the edges, then, set anew on rank 1 alone, the other half."""
    manager = manager_of(parts, rank)
    structure = graph_store_of(manager)
    assert graph_store_of(manager) is structure
    translation = Translation(parts, world_size)
    (etype,) = manager.canonical_etypes
    own = manager.original_edge_ids[etype]
    rows = torch.arange(structure.num_nodes("_N"))
    data = manager.edges[etype].data
    fits = []
    for turn in range(3):
        if turn == 0:
            data["w"] = (own % 2 == 0).float()
        elif rank == 1 and turn == 1:
            data["w"] = (own % 2 == 1).float()
        elif rank == 1:
            data["w"].copy_(own % 2 == 0)
        request = NeighborRequest(etype, rows, -1, 1)
        (drawn,) = structure.sample_neighbors(
            [request], DrawOptions(weights="w", edge_dir=edge_dir)
        )
        assert drawn.eids is not None
        allowed = torch.zeros(structure.num_edges(etype), dtype=torch.bool)
        for part in range(world_size):
            start, stop = structure.ownership.ranges[etype].starts[part : part + 2]
            ids = torch.arange(start, stop)
            odd = int(part == 1 and turn == 1)
            allowed[ids] = translation.old(etype, ids) % 2 == odd
        fits.append(torch.equal(drawn.eids.sort().values, allowed.nonzero().view(-1)))
    return fits


@pytest.mark.parametrize("edge_dir", ["in", "out"])
def test_weights_may_change_on_one_rank(tmp_path: Path, edge_dir: str) -> None:
    parts = write_parts(tmp_path, plain_graph(), 2, "random")
    assert run_ranks(change_weights, 2, parts, edge_dir) == [[True] * 3] * 2


def error_of(rank: int, world_size: int, parts: str, case: str) -> str:
    manager = manager_of(parts, rank, plain_graph())
    data = manager.edges["_E"].data
    sampler = NeighborSampler([2], prob="w")
    ids = torch.arange(3)
    if case == "missing" and rank == 1:
        del data["w"]
    elif case == "negative" and rank == 1:
        data["w"] = data["w"] - 2
    elif case == "dtype" and rank == 1:
        data["w"] = data["w"].double()
    elif case == "fanout" and rank == 1:
        sampler = NeighborSampler([3], prob="w")
    try:
        if case == "mfg":
            manager = graphshard.construct_mfgs(
                graphshard.load_dgl_partition_data(parts, rank), torch.empty(0).long(), 1
            )[0]
        structure = CollectiveGraphStore.of(manager)
        sampler.sample(structure, ids, draw_seed=DRAW_SEED)
    except ValueError as caught:
        return str(caught)
    return "no error"


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("missing", r"rank 1: sampling by 'w' needs an edge feature .* \(it has \['_ID', 'm'\]\)"),
        ("negative", r"rank 1: .*must hold finite weights of 0 or more .*\(got -\d"),
        ("dtype", r"what neighbours are drawn must be the same on all ranks.*torch.float64"),
        ("fanout", r"what neighbours are drawn must be the same on all ranks.*fanout 3"),
        ("mfg", r"rank 0: neighbours and features come from a whole graph.*construct_full_graph"),
    ],
)
def test_what_is_wrong_on_one_rank_is_an_error_on_all(tmp_path: Path, case: str, text: str) -> None:
    parts = write_parts(tmp_path, plain_graph(), 2, "random")
    for error in run_ranks(error_of, 2, parts, case):
        assert re.search(text, error, re.DOTALL), error


def wrong_group(rank: int, world_size: int, parts: str) -> str:
    groups = [dist.new_group([r]) for r in range(world_size)]
    structure = CollectiveGraphStore.of(manager_of(parts, rank))
    with pytest.raises(ValueError) as caught:
        structure.on(groups[rank])
    return str(caught.value)


def test_a_group_of_other_ranks_is_refused(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, plain_graph(), 2, "random")
    errors = run_ranks(wrong_group, 2, parts)
    assert errors[1].startswith("the group must have the ranks [0, 1] in this order (got [1])")


def test_excluded_edges_are_not_drawn_and_others_are() -> None:
    """Guards the cases themselves: exclusion, weights and masks must make a difference."""
    graph = plain_graph()
    for name, values in edge_features(graph, graph.canonical_etypes[0]).items():
        graph.edata[name] = values
    structure = graph_store_of(graph)
    by_name = {name: sample(name, structure, graph, 0) for name in SAMPLERS}
    absent = excluded_of(graph, 0)[graph.canonical_etypes[0]]
    for name in ("excluded", "out excluded"):
        for block in by_name[name]:
            assert not torch.isin(block["e _N _E _N"], absent).any()
    drawn = [tuple(blocks[-1]["u _N _E _N"].tolist()) for blocks in by_name.values()]
    assert len(set(drawn)) > len(drawn) // 2
    assert "e _N _E _N" not in by_name["without eids"][0]
