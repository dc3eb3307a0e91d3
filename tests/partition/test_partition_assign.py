# SPDX-License-Identifier: Apache-2.0
"""Assignment of nodes to parts: balance under many constraints at once. No process group."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from partition_cases import random_ids, typed
from torch import Tensor

from graphshard.errors import MetisError
from graphshard.graph import Graph, graph, heterograph
from graphshard.partition import BalanceWarning
from graphshard.partition._graph_source import GraphSource
from graphshard.partition._metis import UndirectedGraph
from graphshard.partition.assign import (
    Constraint,
    assign_nodes,
    build_constraints,
    excess,
    fill_empty_parts,
    metis_assignment,
    part_loads,
    random_assignment,
    repair_balance,
)


def assign(g: Graph, num_parts: int, method: Any = "metis", **arguments: Any) -> Any:
    source = GraphSource(g)
    asked = {name: arguments.pop(name, None) for name in ("balance_ntypes", "balance_split")}
    constraints = build_constraints(
        source,
        asked["balance_ntypes"],
        arguments.pop("balance_edges", False),
        asked["balance_split"],
    )
    return assign_nodes(source, num_parts, method, constraints, **arguments).parts


def ratio(parts: Any, weights: Any, num_parts: int) -> float:
    loads = np.bincount(np.asarray(parts), np.asarray(weights), minlength=num_parts)
    return float(loads.max() / loads.mean())


def skewed(num_nodes: int, num_edges: int, seed: int = 0) -> Graph:
    """In-degrees from zero to thousands."""
    generator = np.random.default_rng(seed)
    src = generator.integers(0, num_nodes, num_edges)
    dst = (num_nodes * generator.random(num_edges) ** 3).astype(np.int64)
    g = graph((torch.from_numpy(src), torch.from_numpy(dst)), num_nodes=num_nodes)
    split = torch.from_numpy(generator.random(num_nodes))
    g.ndata["train_mask"] = split < 0.1
    g.ndata["val_mask"] = ((split >= 0.1) & (split < 0.15)).to(torch.uint8)
    g.ndata["test_mask"] = split >= 0.8
    return g


@pytest.mark.parametrize("method", ["metis", "random"])
def test_five_constraints_at_once_on_a_large_graph(method: str) -> None:
    g = skewed(20_000, 120_000)
    parts = assign(g, 4, method, balance_edges=True, balance_split=True)
    assert ratio(parts, np.ones(20_000), 4) <= 1.05
    assert ratio(parts, g.in_degrees(), 4) <= 1.05
    for name in ("train_mask", "val_mask", "test_mask"):
        assert ratio(parts, g.ndata[name].long(), 4) <= 1.05


def test_tolerance_is_what_it_says() -> None:
    g = skewed(4_000, 20_000)
    tight = assign(g, 4, balance_edges=True, tolerance=1.01)
    assert ratio(tight, np.ones(4_000), 4) <= 1.01
    assert ratio(tight, g.in_degrees(), 4) <= 1.01


def test_plain_graphs_balance_nodes_as_well_as_edges() -> None:
    g = skewed(3_000, 20_000)
    names = [item.name for item in build_constraints(GraphSource(g), None, True, None)]
    assert names == ["nodes", "in-edges"]


def test_classes_of_a_tensor() -> None:
    g = skewed(3_000, 15_000)
    classes = random_ids(4, 3_000, 1) * 7 - 3  # any whole numbers
    parts = assign(g, 3, balance_ntypes=classes, balance_edges=True)
    for label in classes.unique():
        assert ratio(parts, classes == label, 3) <= 1.05
        assert ratio(parts, (classes == label) * g.in_degrees(), 3) <= 1.05


@pytest.mark.parametrize("method", ["metis", "random"])
def test_types_are_balanced_without_being_asked(method: str) -> None:
    g = heterograph(
        {
            ("a", "r", "b"): (random_ids(900, 4000, 0), random_ids(600, 4000, 1)),
            ("b", "s", "a"): (random_ids(600, 4000, 2), random_ids(900, 4000, 3)),
            ("c", "t", "a"): (random_ids(50, 200, 4), random_ids(900, 200, 5)),
        },
        {"a": 900, "b": 600, "c": 50},
    )
    parts = assign(g, 4, method)
    for start, stop in ((0, 900), (900, 1500), (1500, 1550)):
        counts = np.bincount(parts[start:stop], minlength=4)
        assert counts.max() <= max(1.05 * counts.mean(), counts.mean() + 1)


def test_a_type_with_two_nodes_works_under_metis() -> None:
    """DGL's own test expects an error here."""
    g = typed()
    parts = assign(g, 4)
    assert np.bincount(parts[75:], minlength=4).max() == 1


def test_classes_of_a_dict_leave_other_types_whole() -> None:
    g = typed()
    labels = torch.arange(45) % 2
    asked = build_constraints(GraphSource(g), {"paper": labels}, False, None)
    assert [item.name for item in asked] == [
        "nodes of 'author'",
        "nodes of 'paper', class 0",
        "nodes of 'paper', class 1",
        "nodes of 'venue'",
    ]
    assert asked[1].weights.nonzero()[0].tolist() == (30 + torch.arange(0, 45, 2)).tolist()
    parts = assign(g, 2, balance_ntypes={"paper": labels})
    assert np.bincount(parts[30:75][labels == 1]).max() <= 12


def test_in_degrees_count_every_relation() -> None:
    g = typed()
    asked = build_constraints(GraphSource(g), None, True, None)
    by_name = {item.name: item.weights for item in asked}
    papers = sum(g.in_degrees(etype=etype) for etype in g.canonical_etypes if etype[2] == "paper")
    assert by_name["in-edges of 'paper'"][30:75].tolist() == papers.tolist()
    assert by_name["in-edges of 'paper'"].sum() == papers.sum()


def test_masks_of_several_types_and_other_names() -> None:
    g = typed()
    g.nodes["paper"].data["mine"] = torch.arange(45) < 10
    g.nodes["author"].data["mine"] = torch.arange(30) < 10
    g.nodes["author"].data["train"] = torch.randn(30)  # no mask, so not taken for one
    g.nodes["author"].data["val"] = torch.arange(30) % 2
    names = [item.name for item in build_constraints(GraphSource(g), None, False, ["mine"])]
    assert names[3:] == ["mine of 'author'", "mine of 'paper'"]
    names = [item.name for item in build_constraints(GraphSource(g), None, False, True)]
    assert names[3:] == ["val of 'author'"]
    names = [item.name for item in build_constraints(GraphSource(g), None, False, "mine")]
    assert len(names) == 5


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"balance_ntypes": torch.zeros(77)}, TypeError, "must be a dict from node type"),
        ({"balance_ntypes": {"cat": [1]}}, ValueError, r"does not have \(got \['cat'\]"),
        ({"balance_ntypes": {"paper": torch.zeros(45)}}, ValueError, "got torch.float32"),
        ({"balance_ntypes": {"paper": [1, 2]}}, ValueError, r"of shape \(2,\)"),
        ({"balance_split": True}, ValueError, "needs masks among the node features"),
        ({"balance_split": ["gold"]}, ValueError, r"that no node type has \(got \['gold'\]\)"),
        ({"balance_split": ["feat"]}, ValueError, "'feat' of type 'paper' with dtype"),
        ({"balance_split": ["seven"]}, ValueError, "needs masks, one boolean per node"),
    ],
)
def test_wrong_constraints_are_told(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    g = typed()
    g.nodes["paper"].data["feat"] = torch.randn(45)
    g.nodes["paper"].data["seven"] = torch.full((45,), 7)
    with pytest.raises(error, match=message):
        assign(g, 2, **arguments)


def test_own_assignment_tensor_list_and_dict() -> None:
    g = graph(([0, 1], [1, 2]), num_nodes=3)
    for own in (torch.tensor([2, 0, 2]), [2, 0, 2], np.array([2, 0, 2]), {"_N": [2, 0, 2]}):
        assert assign(g, 4, own).tolist() == [2, 0, 2]
    h = typed()
    own = {"paper": torch.ones(45).int(), "author": torch.zeros(30).long(), "venue": [0, 2]}
    assert assign(h, 3, own).tolist() == [0] * 30 + [1] * 45 + [0, 2]
    assert assign(graph(([], []), num_nodes=0), 2, []).tolist() == []


@pytest.mark.parametrize(
    ("own", "error", "message"),
    [
        (torch.zeros(77).long(), TypeError, "a dict from node type to parts"),
        ({"paper": [0] * 45}, ValueError, r"parts of every node type \(got \['paper'\]"),
        (
            {"paper": [0] * 44, "author": [0] * 30, "venue": [0] * 2},
            ValueError,
            r"type 'paper' must be one whole number per node, shape \(45,\)",
        ),
        (
            {"paper": torch.zeros(45), "author": [0] * 30, "venue": [0] * 2},
            ValueError,
            "got torch.float32",
        ),
        (
            {"paper": [0] * 45, "author": [0] * 29 + [3], "venue": [0] * 2},
            ValueError,
            r"parts in \[0, 3\) \(got 3 for node 29\)",
        ),
        (
            {"paper": [0] * 45, "author": [0] * 29 + [-1], "venue": [0] * 2},
            ValueError,
            "got -1 for node 29",
        ),
        ("spectral", ValueError, "must be 'metis', 'multilevel', 'random' or an assignment"),
    ],
)
def test_wrong_assignments_are_told(own: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        assign(typed(), 3, own)


def test_trainers_need_a_method() -> None:
    g = graph(([0, 1], [1, 2]), num_nodes=3)
    with pytest.raises(NotImplementedError, match="'trainer_id' as a node feature"):
        assign(g, 2, [0, 1, 1], num_trainers_per_machine=2)


@pytest.mark.parametrize("method", ["metis", "random"])
def test_trainers_divide_parts(method: str) -> None:
    g = skewed(900, 5_000)
    source = GraphSource(g)
    made = assign_nodes(
        source,
        3,
        method,
        build_constraints(source, None, True, None),
        num_trainers_per_machine=2,
    )
    assert made.trainers is not None
    assert np.array_equal(made.parts, made.trainers // 2)
    assert ratio(made.trainers, np.ones(900), 6) <= 1.05
    assert ratio(made.trainers, g.in_degrees(), 6) <= 1.05


def test_random_assignment_is_random_and_seeded() -> None:
    first, again, other = (random_assignment([], 1000, 4, seed=seed) for seed in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    assert np.bincount(first).tolist() == [250] * 4


@pytest.mark.parametrize("edges", [0, 12])
def test_weights_that_cannot_be_balanced_are_told(edges: int) -> None:
    """Three heavy nodes for two parts."""
    g = UndirectedGraph.from_edges([(torch.arange(edges), torch.arange(edges) + 1)], 13)
    iron = Constraint("iron", np.array([100] * 3 + [1] * 10))
    with pytest.warns(BalanceWarning) as caught:
        parts = metis_assignment(g, 2, [iron], tolerance=1.05)
    largest = int(np.bincount(parts, iron.weights).max())
    message = str(caught[0].message)
    assert 200 <= largest <= 201
    assert f"iron: largest part {largest}, mean 155.0, ratio {largest / 155:.3f}" in message
    assert "2 parts" in message
    assert "tolerance of 1.05" in message
    assert "raise tolerance" in message


def test_a_hub_sets_its_own_limit() -> None:
    leaves = torch.arange(1, 400)
    g = graph((leaves, torch.zeros_like(leaves)), num_nodes=400)
    parts = assign(g, 4, balance_edges=True)  # no warning: the hub has to be somewhere
    assert np.bincount(parts).max() <= 105


def test_empty_parts_are_filled_while_there_are_nodes() -> None:
    g = UndirectedGraph.from_edges([(torch.tensor([0, 1, 2]), torch.tensor([1, 2, 0]))], 6)
    filled = fill_empty_parts(g, np.array([0, 0, 0, 0, 2, 2]), 3)
    assert filled.tolist() == [0, 0, 0, 1, 2, 2]  # the triangle stays together
    alone = fill_empty_parts(g, np.zeros(6, dtype=np.int64), 8)
    assert np.bincount(alone, minlength=8).max() == 1


def test_more_parts_than_nodes_under_metis() -> None:
    g = graph(([0, 1], [1, 2]), num_nodes=3)
    assert sorted(assign(g, 5).tolist()) == [0, 1, 2]


@pytest.mark.parametrize("seed", range(4))
def test_repair_reaches_every_limit_that_swaps_can_reach(seed: int) -> None:
    """Start from everything in one part, with overlapping sets to balance."""
    generator = np.random.default_rng(seed)
    src, dst = torch.from_numpy(generator.integers(0, 400, (2, 1500)))
    g = UndirectedGraph.from_edges([(src, dst)], 400)
    weights = np.stack(
        [
            np.ones(400),
            generator.random(400) < 0.3,
            generator.random(400) < 0.3,
            generator.integers(0, 9, 400),
        ],
        axis=1,
    ).astype(np.int64)
    limits = np.array([Constraint("", column).limit(5, 1.02) for column in weights.T])
    start = np.where(generator.random(400) < 0.7, 0, generator.integers(0, 5, 400))
    parts = repair_balance(g, start, weights, limits, 5)
    loads = part_loads(parts, weights, 5)
    assert (loads <= limits).all()
    assert excess(loads, limits) == 0


def test_repair_moves_the_nodes_that_cost_least() -> None:
    """Two cliques in one part, one of them with a friend in the other part."""
    cliques = [torch.combinations(torch.arange(4)), torch.combinations(torch.arange(4, 8))]
    edges = torch.cat([*cliques, torch.tensor([[4, 8], [5, 8], [6, 8], [7, 8]])])
    g = UndirectedGraph.from_edges([(edges[:, 0], edges[:, 1])], 9)
    parts = repair_balance(
        g, np.array([0] * 8 + [1]), np.ones((9, 1), dtype=np.int64), np.array([5.0]), 2
    )
    assert (parts[:4] == 0).all()
    assert np.bincount(parts).tolist() == [5, 4]


def test_repair_leaves_the_input_alone() -> None:
    parts = np.zeros(4, dtype=np.int64)
    g = UndirectedGraph.from_edges([], 4)
    repair_balance(g, parts, np.ones((4, 1), dtype=np.int64), np.array([2.0]), 2)
    assert parts.tolist() == [0] * 4


def test_metis_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from graphshard.partition import _metis

    monkeypatch.setattr(_metis, "load_metis", lambda: None)
    monkeypatch.setitem(__import__("sys").modules, "pymetis", None)
    with pytest.raises(MetisError, match="needs the package cmeel-metis"):
        assign(skewed(50, 200), 2)


def test_source_reads_ids_of_either_width() -> None:
    g = skewed(50, 200)
    wide, narrow = GraphSource(g), GraphSource(g.int())
    for first, second in zip(wide.homogenised_edges(), narrow.homogenised_edges(), strict=True):
        assert all(isinstance(ids, Tensor) for ids in (*first, *second))
        assert torch.equal(first[0], second[0])
        assert torch.equal(first[1], second[1])
