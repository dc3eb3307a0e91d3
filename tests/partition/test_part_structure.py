# SPDX-License-Identifier: Apache-2.0
"""What the file of a part's structure holds, some of it at a time; copies looked at by part.

No process.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from partition_cases import plain, typed
from test_partition_writer import rewrite

from graphshard.graph import graph
from graphshard.ops import Adjacency
from graphshard.partition import RangePartitionBook, _verify, partition_graph, structure
from graphshard.partition import verify_partition as verify
from graphshard.partition.checked_files import write_tensors
from graphshard.partition.format import read_config
from graphshard.partition.load import load_structure
from graphshard.partition.structure import PartStructure, original_ids, read_structure, stored_dtype

pytestmark = pytest.mark.usefixtures("no_syncing")


def ids(high: int, count: int) -> torch.Tensor:
    return torch.randint(high, (count,), generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("num_edges", [0, 3, 900])
def test_what_is_written_in_pieces_is_read(
    num_edges: int, is_sorted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any order, steps of any width, ids beyond 32 bits; in pieces of 7, and in one."""
    far = 2**40
    sizes = [[20], [far]], [[num_edges], [far]]
    book = RangePartitionBook.of_sizes(0, ["_N"], [("_N", "_E", "_N")], *sizes)
    halo = (ids(far - 1, 30) + 20).unique()
    outer = (ids(far - 1, num_edges // 2) + num_edges).unique()
    src, dst = (ids(50, num_edges + len(outer) + n)[n:] for n in (0, 1))
    if is_sorted:
        dst = dst.sort().values
    else:
        halo, outer = halo.flip(0), outer.flip(0)
    num_nodes = 20 + len(halo)
    made = PartStructure(book, Adjacency(src, dst, num_nodes, num_nodes), halo, outer, torch.int64)
    records = []
    for piece in (1 << 20, 7):
        monkeypatch.setattr(structure, "_PIECE", piece)
        columns = made.pieces(by_destination=is_sorted).columns()
        assert ("indptr" in columns) == (is_sorted and num_edges == 900)
        records.append(write_tensors(tmp_path / str(piece), columns))
        whole = {
            name: column
            if isinstance(column, torch.Tensor)
            else torch.cat([torch.zeros(0, dtype=column.dtype), *column.slices()])
            for name, column in columns.items()
        }
        assert whole["src"].dtype == torch.int32
        back = read_structure(whole, book, torch.int64)
        assert torch.equal(back.halo, halo)
        assert torch.equal(back.outer, outer)
        loaded = back.graph()
        assert loaded.idtype == torch.int64
        assert torch.equal(loaded.edges()[0], src)
        assert torch.equal(loaded.edges()[1], dst)
        assert torch.equal(loaded.edata["_ID"][num_edges:], outer)
        assert loaded.ndata["part_id"].tolist() == [0] * 20 + [1] * len(halo)
    assert records[0] == records[1]


def test_original_ids_have_32_bits_without_a_sign() -> None:
    wanted = torch.tensor([0, 2**31 - 1, 2**31, 2**32 - 1])
    stored = wanted.to(stored_dtype(2**32))
    assert stored.dtype == torch.int32
    assert torch.equal(original_ids(stored, 2**32), wanted)
    assert stored_dtype(2**32 + 1) == torch.int64
    assert torch.equal(original_ids(wanted, 2**40), wanted)


@pytest.mark.parametrize("num_hops", [1, 2])
def test_copies_are_compared_in_memory_for_two_parts(
    num_hops: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With as many parts together as are small, and one after another."""
    held: list[int] = []
    alive = 0

    class Counted(_verify._HomogenisedEnds):  # those that are kept while others are loaded
        def __init__(self, structure: PartStructure) -> None:
            nonlocal alive
            super().__init__(structure)
            alive += 1
            held.append(alive)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    monkeypatch.setattr(_verify, "_HomogenisedEnds", Counted)
    parts: Any = {t: torch.arange(typed().num_nodes(t)) % 5 for t in typed().ntypes}
    for name, g, given in (("typed", typed(), parts), ("plain", plain(), torch.arange(50) % 5)):
        partition_graph(
            g, "g", 5, tmp_path / name, num_hops, part_method=given, reorder=False, quiet=True
        )
        for at_once in (1 << 22, 1):
            monkeypatch.setattr(_verify, "_EDGES_AT_ONCE", at_once)
            held.clear()
            assert verify(tmp_path / name / "g.json") == []
            assert max(held) <= (5 if at_once > 1 else 2)
    changed = load_structure(read_config(tmp_path / "plain" / "g.json"), 3)
    src, _ = changed.adjacency.coo()
    place = next(
        p
        for p in range(changed.num_inner_edges, len(src) - 1)
        if src[p] != src[p + 1] and src[p] < 10 and src[p + 1] < 10
    )

    def exchange(tensors: dict[str, torch.Tensor]) -> None:
        tensors["src"][place : place + 2] = tensors["src"][place : place + 2].flip(0)

    rewrite(tmp_path / "plain", 3, "part_graph", exchange)
    for at_once in (1 << 22, 1):
        monkeypatch.setattr(_verify, "_EDGES_AT_ONCE", at_once)
        (problem,) = verify(tmp_path / "plain" / "g.json")
        assert problem == "part 3: an outer edge joins other nodes than at its owner"


def test_an_edge_that_leaves_and_is_not_there_is_told(tmp_path: Path) -> None:
    g = graph(([0, 1, 2, 2], [2, 2, 0, 1]), num_nodes=3)
    partition_graph(g, "g", 2, tmp_path, part_method=[0, 0, 1], quiet=True)

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in ("src", "dst/gaps", "outer/gaps"):
            tensors[name] = tensors[name][:-1].clone()

    rewrite(tmp_path, 0, "part_graph", drop)
    problems = verify(tmp_path / "g.json")
    assert "part 0: an edge that leaves it is missing" in problems or any(
        "outer edges, but it has" in problem for problem in problems
    )
