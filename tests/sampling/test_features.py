# SPDX-License-Identifier: Apache-2.0
"""Feature rows equal indexing the whole table, wherever they come from. 1 to 3 gloo ranks.

That ranks are on other hosts is played by giving them other directories to share files in.
"""

from __future__ import annotations

import gc
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_cases import (
    Translation,
    graph_of,
    left_behind,
    manager_of,
    plain_graph,
    typed_graph,
    write_parts,
)
from torch import Tensor

import graphshard
from graphshard import comm
from graphshard.comm import _shared_memory
from graphshard.sampling.feature_store import (
    CollectiveFeatureStore,
    FeatureRequest,
    LocalFeatureStore,
    MappedFeatureStore,
    Ownership,
)
from graphshard.testing import run_ranks

KNOWS = ("a", "knows", "a")


def whole_tables(graph: graphshard.Graph) -> dict[Any, Tensor]:
    """Features of several dtypes and widths for every type and one relation, by original id."""
    generator = torch.Generator().manual_seed(50)
    tables: dict[Any, Tensor] = {}
    for ntype in graph.ntypes:
        count = graph.num_nodes(ntype)
        tables[ntype, "bits"] = torch.rand(count, 3, generator=generator) < 0.5
        tables[ntype, "feat"] = torch.randn(count, 7, generator=generator)
        tables[ntype, "label"] = torch.randint(0, 9, (count,), generator=generator)
        tables[ntype, "half"] = torch.randn(count, 2, 2, generator=generator).bfloat16()
        tables[ntype, "empty"] = torch.zeros(count, 0)
    for etype in graph.canonical_etypes:
        if etype in (KNOWS, ("_N", "_E", "_N")):
            count = graph.num_edges(etype)
            tables[etype, "time"] = torch.rand(count, generator=generator, dtype=torch.float64)
    return tables


def wanted_ids(graph: graphshard.Graph, rank: int, kind: Any) -> Tensor:
    """Original ids, of any owner, with repeats; none on rank 1."""
    generator = torch.Generator().manual_seed(60 + rank)
    count = graph.num_nodes(kind) if isinstance(kind, str) else graph.num_edges(kind)
    return torch.randint(0, count, (0 if rank == 1 else 30,), generator=generator)


def requests_of(tables: dict[Any, Tensor]) -> list[tuple[Any, tuple[str, ...]]]:
    kinds = list(dict.fromkeys(kind for kind, _ in tables))
    all_names = [(kind, tuple(n for k, n in tables if k == kind)) for kind in kinds]
    return [*all_names, (kinds[0], ("label", "bits")), (kinds[0], ())]


def source_of(
    how: str, manager: Any, tables: dict[Any, Tensor], rank: int, folder: str
) -> LocalFeatureStore:
    if how == "collective":
        return CollectiveFeatureStore.of(manager, tables)
    if how == "mapped":
        return MappedFeatureStore(manager, tables)
    # Ranks 0 and 2 share a host, rank 1 has another one.
    place = Path(folder) / f"host{rank % 2}"
    place.mkdir(exist_ok=True)
    return MappedFeatureStore(manager, tables, directory=place)


def fetched_is_indexed(
    rank: int, world_size: int, kind: str, parts: str, how: str, folder: str
) -> list[bool]:
    graph = graph_of(kind)
    manager = manager_of(parts, rank)
    whole = whole_tables(graph)
    own = {}
    for (name, feature), table in whole.items():
        ids = manager.original_ids if isinstance(name, str) else manager.original_edge_ids
        own[name, feature] = table[ids[name]]
    translation = Translation(parts, world_size)
    source = source_of(how, manager, own, rank, folder)
    fits = []
    for turn in range(2):
        ids = {k: wanted_ids(graph, rank, k) for k, _ in requests_of(whole)}
        if turn:  # without repeats
            ids = {k: torch.unique(i) for k, i in ids.items()}
        requests = [
            FeatureRequest(k, names, translation.new(k, ids[k])) for k, names in requests_of(whole)
        ]
        for (k, names), rows in zip(requests_of(whole), source.fetch(requests), strict=True):
            fits.append(tuple(rows) == names)
            fits += [torch.equal(rows[n], whole[k, n][ids[k]]) for n in names]
            fits += [rows[n].dtype == whole[k, n].dtype for n in names]
    fits.append(left_behind(folder) == [])
    source.close()
    return fits


@pytest.mark.parametrize(
    ("num_ranks", "partition", "how"),
    [
        (1, "metis", "collective"),
        (1, "metis", "mapped"),
        (3, "random", "collective"),
        (3, "empty_part", "mapped"),
        (3, "random", "hosts"),
        (3, "empty_part", "hosts"),
    ],
)
@pytest.mark.parametrize("kind", ["plain", "typed"])
def test_rows_are_those_of_the_whole_table(
    tmp_path: Path, kind: str, num_ranks: int, partition: str, how: str
) -> None:
    parts = write_parts(tmp_path, graph_of(kind), num_ranks, partition)
    folder = str(tmp_path)
    for fits in run_ranks(fetched_is_indexed, num_ranks, kind, parts, how, folder):
        assert all(fits)
        assert len(fits) > 10
    assert left_behind(tmp_path / "host0", tmp_path / "host1") == []


def test_local_rows() -> None:
    graph = typed_graph()
    tables = whole_tables(graph)
    source = LocalFeatureStore(tables)
    ids = torch.tensor([3, 0, 3], dtype=torch.int32)
    (rows,) = source.fetch([FeatureRequest("a", ("feat", "half"), ids)])
    assert torch.equal(rows["feat"], tables["a", "feat"][ids.long()])
    assert torch.equal(rows["half"], tables["a", "half"][ids.long()])
    other = source.on(None)
    source.close()
    assert other.fetch([FeatureRequest("b", ("label",), ids)])[0]["label"].shape == (3,)
    with pytest.raises(RuntimeError, match="this feature store is closed"):
        source.fetch([])
    with pytest.raises(KeyError, match=r"no feature 'x' of 'b'; there are \['bits', 'empty'"):
        other.fetch([FeatureRequest("b", ("x",), ids)])


def traced_fetch(rank: int, world_size: int, parts: str, how: str, folder: str) -> dict[str, Any]:
    manager = manager_of(parts, rank)
    ids = manager.original_ids["_N"]
    tables = {("_N", "feat"): torch.randn(ids.numel(), 7), ("_N", "label"): ids}
    source = source_of(how, manager, tables, rank, folder)
    inputs = torch.tensor([24, 3, 17, 24, 0, 5]) if rank == 0 else torch.arange(rank, 20)
    requests = [
        FeatureRequest("_N", ("feat",), inputs),
        FeatureRequest("_N", ("label",), inputs[:2]),
    ]
    with comm.trace() as counted:
        source.fetch(requests)
    ranges = Ownership.of(manager).ranges["_N"]
    return {
        "calls": counted.calls,
        "bytes": counted.total_bytes,
        "owners": [ranges.part_of(torch.unique(r.ids)) for r in requests],
    }


@pytest.mark.parametrize("how", ["collective", "hosts"])
def test_a_fetch_sends_what_the_formula_says(tmp_path: Path, how: str) -> None:
    num_ranks = 3
    parts = write_parts(tmp_path, plain_graph(), num_ranks, "random")
    found = run_ranks(traced_fetch, num_ranks, parts, how, str(tmp_path))

    def is_asked(asker: int, owner: int) -> bool:
        return asker != owner and (how == "collective" or asker % 2 != owner % 2)

    for rank, result in enumerate(found):
        sent = 4 * (2 + 2) * (num_ranks - 1)
        for other in range(num_ranks):
            for request, row_bytes in enumerate((7 * 4, 8)):
                asked_by_me = result["owners"][request] == other
                asked_of_me = found[other]["owners"][request] == rank
                sent += 4 * int(asked_by_me.sum()) * is_asked(rank, other)
                sent += row_bytes * int(asked_of_me.sum()) * is_asked(other, rank)
        assert result["bytes"] == sent
        assert result["calls"] == {"all_to_all": 3}


def test_ranks_of_one_host_send_nothing(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, plain_graph(), 3, "random")
    for result in run_ranks(traced_fetch, 3, parts, "mapped", str(tmp_path)):
        assert (result["calls"], result["bytes"]) == ({}, 0)


def lifetimes(rank: int, world_size: int, parts: str, how: str, folder: str) -> list[Any]:
    """Copies over other groups, in threads; the end of the original, and of the copies.

    The rank may have files of earlier tests mapped, which count neither before nor after.
    """
    gc.collect()
    others = _maps()
    manager = manager_of(parts, rank)
    ids = manager.original_ids["_N"]
    source = source_of(how, manager, {("_N", "id"): ids}, rank, folder)
    del ids
    groups = [dist.new_group(list(range(world_size))) for _ in range(2)]
    copies = [source.on(group) for group in groups]
    source.close()
    wanted = torch.arange(25)
    found: list[Tensor] = [wanted] * 2

    def fetch(number: int) -> None:
        for _ in range(5):
            found[number] = copies[number].fetch([FeatureRequest("_N", ("id",), wanted)])[0]["id"]

    running = set(threading.enumerate())
    threads = [threading.Thread(target=fetch, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    before = len(_maps() - others)
    while copies:
        copies.pop().close()
    del source
    expected = Translation(parts, world_size).old("_N", wanted)
    right = all(torch.equal(rows, expected) for rows in found)
    right &= set(threading.enumerate()) == running
    return [right, before, len(_maps() - others), left_behind(folder)]


def _maps() -> set[str]:
    """Shared files that this process maps."""
    return set(re.findall(r"graphshard-[0-9a-f]{32}", Path("/proc/self/maps").read_text()))


@pytest.mark.parametrize("how", ["collective", "mapped", "hosts"])
def test_copies_live_on_and_nothing_is_left_when_they_end(tmp_path: Path, how: str) -> None:
    parts = write_parts(tmp_path, plain_graph(), 2, "random")
    before = 0 if how == "collective" else 1
    for result in run_ranks(lifetimes, 2, parts, how, str(tmp_path)):
        assert result == [True, before, 0, []]
    assert left_behind(tmp_path / "host0", tmp_path / "host1") == []


def error_of(rank: int, world_size: int, parts: str, case: str, how: str) -> str:
    manager = manager_of(parts, rank)
    table = torch.zeros(manager.num_nodes(), 2)
    tables: dict[Any, Any] = {("_N", "x"): table}
    if rank == 1:
        tables[("_N", "x")] = {
            "rows": torch.zeros(manager.num_nodes() + 1, 2),
            "grad": table.clone().requires_grad_(),
            "sparse": table.to_sparse(),
            "list": [1.0],
            "width": torch.zeros(manager.num_nodes(), 3),
        }.get(case, table)
    if case == "kind" and rank == 1:
        tables = {("paper", "x"): table}
    if case == "mfg":
        manager = graphshard.construct_mfgs(
            graphshard.load_dgl_partition_data(parts, rank), torch.empty(0).long(), 1
        )[0]
    try:
        (CollectiveFeatureStore.of if how == "collective" else MappedFeatureStore)(manager, tables)
    except (TypeError, ValueError) as caught:
        return f"{type(caught).__name__}: {caught}"
    return "no error"


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("rows", r"ValueError: rank 1: feature 'x' of '_N' must have a row for each of the \d+"),
        ("grad", r"ValueError: rank 1: .*requires a gradient.*\.detach"),
        ("sparse", r"TypeError: rank 1: .*must be dense \(got torch.sparse_coo"),
        ("list", r"TypeError: rank 1: feature 'x' of '_N' must be a tensor \(got list\)"),
        ("kind", r"ValueError: rank 1: feature 'x' of 'paper': the graph has \['_N', "),
        ("width", r"ValueError: what features there are.*float32\(2,\)'.*float32\(3,\)'"),
        ("mfg", r"ValueError: rank 0: neighbours and features come from a whole graph"),
    ],
)
@pytest.mark.parametrize("how", ["collective", "mapped"])
def test_a_bad_table_on_one_rank_is_an_error_on_all(
    tmp_path: Path, how: str, case: str, text: str
) -> None:
    parts = write_parts(tmp_path, plain_graph(), 2, "random")
    for error in run_ranks(error_of, 2, parts, case, how):
        assert re.search(text, error, re.DOTALL), error


def no_room(rank: int, world_size: int, parts: str, folder: str) -> str:
    manager = manager_of(parts, rank)
    if rank == 0:  # it makes the file

        def full(descriptor: int, stretches: Any) -> None:
            raise OSError(28, "No space left on device")

        plain, _shared_memory._allocate = _shared_memory._allocate, full
    try:
        MappedFeatureStore(manager, {("_N", "id"): manager.original_ids["_N"]}, directory=folder)
    except OSError as caught:
        return str(caught)
    finally:
        if rank == 0:
            _shared_memory._allocate = plain
    return "no error"


def test_a_full_disk_is_an_error_on_all_ranks_and_leaves_no_file(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, plain_graph(), 2, "random")
    for error in run_ranks(no_room, 2, parts, str(tmp_path)):
        assert re.search(r"rank 0: .*No space left", error), error
    assert left_behind(tmp_path) == []
