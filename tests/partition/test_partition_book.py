# SPDX-License-Identifier: Apache-2.0
"""Partition books by themselves; the answers are compared with DGL's elsewhere. No processes."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from graphshard.partition import PartitionBook, RangePartitionBook, load_partition_book

TYPED: dict[str, Any] = {
    "part_id": 1,
    "num_parts": 3,
    "node_map": {"u": [[0, 4], [6, 6], [9, 10]], "v": [[4, 6], [6, 9], [10, 10]]},
    "edge_map": {
        ("u", "to", "v"): torch.tensor([[0, 1], [3, 3], [5, 9]]),
        ("v", "to", "u"): np.array([[1, 3], [3, 5], [9, 9]]),
    },
    "ntypes": {"u": 0, "v": 1},
    "etypes": {("u", "to", "v"): 0, ("v", "to", "u"): 1},
}


@pytest.fixture
def book() -> RangePartitionBook:
    return RangePartitionBook(**TYPED)


def test_the_short_name_is_the_same_class() -> None:
    assert PartitionBook is RangePartitionBook


def test_every_id_maps_there_and_back(book: RangePartitionBook) -> None:
    nodes, edges = torch.arange(book.num_nodes()), torch.arange(book.num_edges())
    types, ids = book.map_to_per_ntype(nodes)
    assert types.tolist() == [0, 0, 0, 0, 1, 1, 1, 1, 1, 0]
    assert ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 4]
    for number, ntype in enumerate(book.ntypes):
        assert torch.equal(
            book.map_to_homo_nid(ids[types == number], ntype), nodes[types == number]
        )
        assert torch.equal(
            book.nid2partid(ids[types == number], ntype), book.nid2partid(nodes)[types == number]
        )
    types, ids = book.map_to_per_etype(edges)
    for number, etype in enumerate(book.canonical_etypes):
        assert torch.equal(
            book.map_to_homo_eid(ids[types == number], etype), edges[types == number]
        )
        assert torch.equal(
            book.eid2partid(ids[types == number], etype), book.eid2partid(edges)[types == number]
        )


def test_every_part_is_answered_for_not_the_own_one_only(book: RangePartitionBook) -> None:
    for part in range(3):
        for ntype in (None, "_N", "u", "v"):
            mine = book.partid2nids(part, ntype)
            assert book.nid2localnid(mine, part, ntype).tolist() == list(range(len(mine)))
        for etype in (None, "_E", ("u", "to", "v"), ("v", "to", "u")):
            mine = book.partid2eids(part, etype)
            assert book.eid2localeid(mine, part, etype).tolist() == list(range(len(mine)))


def test_ids_may_be_lists_numbers_arrays_of_any_width(book: RangePartitionBook) -> None:
    expected = [0, 1, 2]
    for ids in (
        [0, 6, 9],
        (0, 6, 9),
        np.array([0, 6, 9]),
        torch.tensor([0, 6, 9]),
        torch.tensor([0, 6, 9], dtype=torch.int32),
        torch.tensor([0, 6, 9], dtype=torch.uint8),
    ):
        owners = book.nid2partid(ids)
        assert owners.tolist() == expected
        assert owners.dtype == torch.int64
    assert book.nid2partid(6).item() == 1
    assert book.nid2partid([]).tolist() == []
    assert book.nid2partid([[0, 6], [9, 5]]).tolist() == [[0, 1], [2, 0]]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda b: b.nid2partid([0, 10]), IndexError, r"node id must be in \[0, 10\) \(got 10\)"),
        (lambda b: b.nid2partid([-1]), IndexError, r"\(got -1\)"),
        (lambda b: b.nid2partid([5], "u"), IndexError, r"node id must be in \[0, 5\) \(got 5\)"),
        (lambda b: b.eid2partid([9]), IndexError, r"edge id must be in \[0, 9\)"),
        (lambda b: b.map_to_per_ntype([10]), IndexError, "node id"),
        (lambda b: b.map_to_per_etype([-2]), IndexError, "edge id"),
        (lambda b: b.map_to_homo_nid([5], "u"), IndexError, "node id"),
        (lambda b: b.map_to_homo_eid([5], ("u", "to", "v")), IndexError, "edge id"),
        (lambda b: b.nid2localnid([0], 2), ValueError, r"belong to part 2, which owns \[9, 10\)"),
        (lambda b: b.eid2localeid([0], 2), ValueError, "eid2partid first"),
        (lambda b: b.nid2partid(torch.tensor([0.5])), TypeError, "must be integers"),
        (lambda b: b.nid2partid(torch.tensor([True])), TypeError, "turn a mask into ids"),
        (lambda b: b.nid2partid([0], "w"), ValueError, r"node type 'w' does not exist; have"),
        (lambda b: b.partid2nids(3), ValueError, r"part must be in \[0, 3\) \(got 3\)"),
        (lambda b: b.partid2eids(-1), ValueError, r"part must be in \[0, 3\)"),
        (lambda b: b.to_canonical_etype("to"), ValueError, "'to' is ambiguous; pass one of"),
        (lambda b: b.to_canonical_etype("from"), ValueError, "'from' does not exist"),
        (lambda b: b.to_canonical_etype(("u", "to", "u")), ValueError, "does not exist"),
    ],
)
def test_wrong_questions(
    call: Any, error: type[Exception], message: str, book: RangePartitionBook
) -> None:
    with pytest.raises(error, match=message):
        call(book)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_parts": 0}, "num_parts must be at least 1"),
        ({"part_id": 3}, r"part must be in \[0, 3\) \(got 3\)"),
        ({"part_id": -1}, r"\(got -1\)"),
        ({"ntypes": {"u": 0, "v": 2}}, "numbered from 0 without gaps"),
        ({"ntypes": {"u": 0}}, "one entry per node type"),
        ({"etypes": {"to": 0}, "edge_map": {"to": [[0, 0]] * 3}}, "triples"),
        ({"node_map": {"u": [[0, 4]], "v": [[4, 6]]}}, "for each of the 3 parts"),
        (
            {"node_map": {"u": [[0, 4], [6, 6], [9, 10]], "v": [[4, 6], [6, 8], [10, 10]]}},
            r"type 'u' in part 2 must begin at 8 \(got \[9, 10\)\)",
        ),
        (
            {"node_map": {"u": [[0, 4], [6, 6], [9, 10]], "v": [[4, 3], [6, 8], [10, 10]]}},
            r"must begin at 4 \(got \[4, 3\)\)",
        ),
    ],
)
def test_wrong_maps(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RangePartitionBook(**{**deepcopy(TYPED), **change})


def test_maps_come_back_as_they_were_given(book: RangePartitionBook) -> None:
    assert book.node_map() == TYPED["node_map"]
    assert book.edge_map()["v", "to", "u"] == [[1, 3], [3, 5], [9, 9]]
    assert "num_parts=3" in repr(book)


def test_a_graph_without_anything() -> None:
    triple = ("_N", "_E", "_N")
    book = RangePartitionBook(
        0, 2, {"_N": [[0, 0]] * 2}, {triple: [[0, 0]] * 2}, {"_N": 0}, {triple: 0}
    )
    assert book.is_homogeneous
    assert book.num_nodes() == book.num_edges("_E") == 0
    types, ids = book.map_to_per_ntype(torch.zeros(0, dtype=torch.int64))
    assert (types.tolist(), ids.tolist()) == ([], [])


@pytest.mark.parametrize("as_dict", [False, True])
def test_an_old_json_of_dgl_that_lists_ends_alone(as_dict: bool, tmp_path: Path) -> None:
    content: dict[str, Any] = {
        "graph_name": "old",
        "num_nodes": 10,
        "num_edges": 30,
        "num_parts": 2,
        "node_map": [4, 10],
        "edge_map": [11, 30],
    }
    if as_dict:
        content["node_map"] = {"_N": [4, 10]}
        content["edge_map"] = {"_N:_E:_N": [11, 30]}
    (tmp_path / "old.json").write_text(json.dumps(content))
    book, name, ntypes, etypes = load_partition_book(tmp_path / "old.json", 1)
    assert (name, ntypes, etypes) == ("old", {"_N": 0}, {("_N", "_E", "_N"): 0})
    assert book.partid2nids(1).tolist() == [4, 5, 6, 7, 8, 9]
    assert book.eid2partid([10, 11]).tolist() == [0, 1]
