# SPDX-License-Identifier: Apache-2.0
"""CachedFeatureStore: what is kept and fetched, to the row and to the byte. 0 to 3 gloo ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_cases import manager_of, plain_graph, typed_graph, write_parts
from torch import Tensor

from graphshard import comm
from graphshard.sampling import feature_store
from graphshard.sampling.feature_store import (
    CachedFeatureStore,
    CollectiveFeatureStore,
    FeatureRequest,
    LocalFeatureStore,
    MappedFeatureStore,
    Ownership,
    most_wanted,
)
from graphshard.testing import run_ranks

ROW_BYTES = 5 * 4 + 8


def tables_of(manager: Any) -> dict[Any, Tensor]:
    """``feat`` and ``id`` of every node, told by its global id."""
    tables: dict[Any, Tensor] = {}
    for ntype in manager.ntypes:
        ids = manager.nodes[ntype].data["_ID"]
        tables[ntype, "feat"] = ids.float().view(-1, 1) * torch.ones(5)
        tables[ntype, "id"] = ids
    return tables


def is_right(rows: dict[str, Tensor], ids: Tensor) -> bool:
    feat = ids.float().view(-1, 1) * torch.ones(5)
    return all(torch.equal(rows[k], v) for k, v in (("feat", feat), ("id", ids)) if k in rows)


def cached(rank: int, world_size: int, parts: str, num_rows: int, how: str, folder: str) -> Any:
    """An epoch of three batches, counted, cached and fetched."""
    manager = manager_of(parts, rank)
    ownership = Ownership.of(manager)
    if how == "collective":
        base: Any = CollectiveFeatureStore.of(manager, tables_of(manager))
    else:
        place = Path(folder) / (f"host{rank % 2}" if how == "hosts" else "host")
        place.mkdir(exist_ok=True)
        base = MappedFeatureStore(manager, tables_of(manager), directory=place)
    cache = CachedFeatureStore(
        base, ownership.ranges, 4 * 25 + num_rows * ROW_BYTES + ROW_BYTES - 1
    )
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randint(0, 25, (12,), generator=generator) for _ in range(3)]
    batches = [torch.unique(batch) for batch in batches]
    # Messages of the preparation are small enough to take several rounds.
    plain, feature_store._MESSAGE_BYTES = feature_store._MESSAGE_BYTES, 2 * ROW_BYTES
    try:
        ids, counts = torch.unique(torch.cat(batches), return_counts=True)
        cache.prepare({"_N": (ids, counts)})
    finally:
        feature_store._MESSAGE_BYTES = plain
    remote = base.is_remote("_N", ids)
    if remote is None:
        remote = torch.zeros(ids.numel(), dtype=torch.bool)
    best = sorted(zip((-counts[remote]).tolist(), ids[remote].tolist(), strict=True))[:num_rows]
    kept = sorted(i for _, i in best)
    hits = sum(-count for count, _ in best)
    total = int(counts[remote].sum())
    bytes_sent = []
    right = True
    for batch in batches:
        with comm.trace() as counted:
            requests = [
                FeatureRequest("_N", ("feat",), batch),
                FeatureRequest("_N", ("id",), batch[:0]),
            ]
            rows, _ = cache.fetch(requests)
        right &= is_right(rows, batch)
        bytes_sent.append(counted.total_bytes)
    asked = [[i for i in batch.tolist() if i not in kept] for batch in batches]
    return {
        "right": right,
        "kept": kept,
        "remote": ids[remote].tolist(),
        "rows": cache.content.num_rows,
        "bytes": cache.num_bytes,
        "counters": [cache.content.num_hits, cache.content.num_misses, cache.hit_rate],
        "expected": [hits, total - hits, hits / total if total else 0.0],
        "sent": bytes_sent,
        "asked": asked,
        "starts": list(ownership.ranges["_N"].starts),
    }


@pytest.mark.parametrize("num_rows", [0, 1, 4, 100])
def test_the_hottest_remote_rows_are_kept_and_only_misses_fetched(
    tmp_path: Path, num_rows: int
) -> None:
    parts = write_parts(tmp_path, plain_graph(), 3, "random")
    found = run_ranks(cached, 3, parts, num_rows, "collective", "")
    starts = found[0]["starts"]
    for rank, result in enumerate(found):
        assert result["right"]
        assert result["rows"] == len(result["kept"])
        assert result["bytes"] == bool(result["kept"]) * 4 * 25 + len(result["kept"]) * ROW_BYTES
        assert result["counters"] == result["expected"]
        for batch, sent in enumerate(result["sent"]):
            wanted = 4 * (2 + 2) * 2
            for other, asker in enumerate(found):
                asked = asker["asked"][batch]
                if other == rank:
                    wanted += 4 * sum(not starts[rank] <= i < starts[rank + 1] for i in asked)
                else:
                    wanted += 20 * sum(starts[rank] <= i < starts[rank + 1] for i in asked)
            assert sent == wanted
    if num_rows == 100:
        assert all(result["counters"][2] == 1.0 for result in found)


@pytest.mark.parametrize("how", ["mapped", "hosts"])
def test_rows_of_the_same_host_are_not_cached(tmp_path: Path, how: str) -> None:
    parts = write_parts(tmp_path, plain_graph(), 3, "random")
    for rank, result in enumerate(run_ranks(cached, 3, parts, 4, how, str(tmp_path))):
        assert result["right"]
        assert result["counters"] == result["expected"]
        assert result["rows"] == (4 if how == "hosts" else 0)
        starts = result["starts"]
        for kept in result["kept"]:
            (owner,) = (r for r in range(3) if starts[r] <= kept < starts[r + 1])
            assert owner % 2 != rank % 2


def copies(rank: int, world_size: int, parts: str) -> list[Any]:
    manager = manager_of(parts, rank)
    base = CollectiveFeatureStore.of(manager, tables_of(manager))
    cache = CachedFeatureStore(base, Ownership.of(manager).ranges, 10**6)
    copy = cache.on(dist.new_group(list(range(world_size))))
    ids = torch.arange(3, 14)
    twice = torch.cat([ids, ids])
    requests = [FeatureRequest("a", ("id", "feat"), twice), FeatureRequest("c", ("id",), ids[:2])]
    right = is_right(copy.fetch(requests)[0], twice)
    cache.prepare({"a": (ids, torch.ones(11)), "c": (ids[:2], torch.zeros(2))})
    right &= is_right(copy.fetch(requests)[0], twice)
    counters = [copy.content is cache.content, cache.content.num_hits > 0]
    still_remote = copy.is_remote("a", ids)
    assert still_remote is not None
    cache.close()
    right &= is_right(copy.fetch(requests)[0], twice)
    with pytest.raises(RuntimeError, match="closed"):
        cache.fetch(requests)
    return [right, *counters, int(still_remote.sum())]


def test_copies_share_what_is_kept(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, typed_graph(), 2, "random")
    assert run_ranks(copies, 2, parts) == [[True, True, True, 0]] * 2


def wrong_type(rank: int, world_size: int, parts: str) -> str:
    manager = manager_of(parts, rank)
    base = CollectiveFeatureStore.of(manager, tables_of(manager))
    cache = CachedFeatureStore(base, Ownership.of(manager).ranges, 1000)
    one = torch.ones(1).long()
    try:
        cache.prepare({"paper" if rank else "_N": (one, one)})
    except ValueError as caught:
        return str(caught)
    return "no error"


def test_an_unknown_type_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    parts = write_parts(tmp_path, plain_graph(), 2, "random")
    for error in run_ranks(wrong_type, 2, parts):
        assert re.search(r"rank 1: accesses are counted for \['paper'\], .*\['_N'\]", error), error


def test_a_cache_of_local_rows_keeps_nothing() -> None:
    cache = CachedFeatureStore(LocalFeatureStore({("_N", "id"): torch.arange(9)}), {}, 10**6)
    ids = torch.arange(9)
    cache.prepare({"_N": (ids, torch.ones(9))})
    assert cache.fetch([FeatureRequest("_N", ("id",), ids)])[0]["id"].tolist() == list(range(9))
    assert (cache.content.num_rows, cache.num_bytes, cache.hit_rate) == (0, 0, 0.0)
    with pytest.raises(ValueError, match=r"budget_bytes must be .* at least 0 \(got -1\)"):
        CachedFeatureStore(LocalFeatureStore({}), {}, -1)


@pytest.mark.parametrize("budget", [0, 39, 40, 41, 47, 48, 60, 63, 100, 10**6])
def test_the_best_rows_of_two_types(budget: int) -> None:
    """Rows of 8 and of 3 bytes beside indices of 40 and 7; the counts decide, then type and id."""
    candidates = {
        "a": feature_store._CacheCandidates(
            torch.tensor([5, 2, 9]), torch.tensor([3, 1, 3]), 8, 40
        ),
        "b": feature_store._CacheCandidates(torch.tensor([4, 1]), torch.tensor([2, 4]), 3, 7),
    }
    order = [("b", 1), ("a", 5), ("a", 9), ("b", 4), ("a", 2)]
    if budget <= 47:  # the indices do not fit side by side: "a" has more accesses
        order = [("a", 5), ("a", 9), ("a", 2)]
    if budget <= 40:
        order = []
    room = budget - (47 if budget > 47 else 40)
    if budget <= 7:
        order = []
    wanted: dict[str, list[int]] = {"a": [], "b": []}
    for kind, number in order:
        room -= 8 if kind == "a" else 3
        if room < 0:
            break
        wanted[kind].append(number)
    got = most_wanted(candidates, budget)
    assert {k: sorted(got[k].tolist()) if k in got else [] for k in wanted} == {
        k: sorted(v) for k, v in wanted.items()
    }
