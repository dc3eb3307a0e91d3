# SPDX-License-Identifier: Apache-2.0
"""Rows of other hosts that a process keeps: equal to the table, before and after writes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from clusters import PARTS, POLICY, TOKEN, join, leave
from torch import Tensor

from graphshard.servers import Job, TableServer, WireMessage
from graphshard.servers._cluster import MESSAGE_BYTES, RowsRequest
from graphshard.servers._host_tables import TableInfo
from graphshard.servers._row_cache import CachedRows

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]
NUM_ROWS = PARTS.num_ids
X = TableInfo(f"{POLICY}~x", torch.float32, (6,), PARTS.starts, POLICY, True)


def whole(info: TableInfo, seed: int = 0) -> Tensor:
    """All rows of a table."""
    shape = (info.starts[-1], *info.row_shape)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-100, 100, shape, generator=generator).to(info.dtype)


@contextmanager
def trained(*infos: TableInfo, is_loaded: bool = True) -> Iterator[tuple[Job, list[TableServer]]]:
    """A trainer of host 0 and the servers of all hosts, which have tables from a partition."""
    num_hosts = len(PARTS.starts) - 1
    servers = [TableServer(host, TOKEN) for host in range(num_hosts)]
    try:
        for host, server in enumerate(servers):
            for info in infos:
                server.tables.create(info)
                begin, end = info.starts[host : host + 2]
                server.tables.rows(info.name)[:] = whole(info)[begin:end]
            if is_loaded:
                server.tables.mark_loaded()
            server.start()
        yield join([server.address for server in servers], 0), servers
        leave()
    finally:
        leave()
        for server in servers:
            server.stop()


def rows_read(job: Job, *infos: TableInfo, ids: Tensor) -> list[Tensor]:
    return job.cluster.read([RowsRequest([info.name for info in infos], ids)])


def count_asked(job: Job) -> list[int]:
    """Rows that hosts are asked for from now on, a number for each message."""
    counts: list[int] = []

    def counted(ask: Any, request: WireMessage) -> Any:
        if request.op == "read":
            counts.append(sum(ids.numel() for ids in request.tensors))
        return ask(request)

    for host in job.cluster.hosts:
        host.start, host.begin = partial(counted, host.start), partial(counted, host.begin)
    return counts


def many_ids(seed: int, count: int = 3000) -> Tensor:
    return torch.randint(NUM_ROWS, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_those_of_the_table(dtype: torch.dtype) -> None:
    info = TableInfo(f"{POLICY}~x", dtype, (3,), PARTS.starts, POLICY, True)
    with trained(info) as (job, _):
        for seed in range(6):  # with ids that repeat, of all hosts, of one, of none
            for ids in (many_ids(seed), 1600 + many_ids(seed, 50) % 2000, many_ids(seed, 0)):
                (found,) = rows_read(job, info, ids=ids)
                assert torch.equal(found, whole(info)[ids])


def test_rows_come_once() -> None:
    with trained(X) as (job, _):
        counts = count_asked(job)
        everything = torch.arange(NUM_ROWS)
        rows_read(job, X, ids=everything)
        assert sum(counts) == NUM_ROWS - PARTS.starts[1]
        counts.clear()
        (found,) = rows_read(job, X, ids=everything.flip(0))
        assert counts == [0, 0]  # both hosts that have rows were asked whether they changed
        assert torch.equal(found, whole(X).flip(0))


def test_several_tables_and_some_at_a_time() -> None:
    y = TableInfo(f"{POLICY}~y", torch.int64, (), PARTS.starts, POLICY, True)
    with trained(X, y) as (job, _):
        counts = count_asked(job)
        for seed in range(5):
            ids = many_ids(seed, 500)
            requests = [RowsRequest([X.name, y.name], ids), RowsRequest([y.name], ids + 0)]
            found = job.cluster.start_read(requests).wait()
            for rows, info in zip(found, (X, y, y), strict=True):
                assert torch.equal(rows, whole(info)[ids])
        ever = torch.cat([many_ids(seed, 500) for seed in range(5)]).unique()
        # Of an id that a read has twice both are asked for; only the first read has such.
        assert 2 * int((ever >= PARTS.starts[1]).sum()) <= sum(counts) < 2 * 5 * 500


@pytest.mark.parametrize("writer", ["this trainer", "another one", "one of the owner's host"])
def test_a_write_is_read(writer: str) -> None:
    with trained(X) as (job, servers):
        ids = torch.arange(1400, 4500)
        rows_read(job, X, ids=ids)
        addresses = [server.address for server in servers]
        if writer != "this trainer":
            other = join(addresses, 2 if "owner" in writer else 0)
        else:
            other = job
        expected = whole(X)
        for step in range(3):
            written = torch.arange(2000 + step, 2100)
            rows = torch.full((len(written), 6), float(step))
            other.cluster.write(X.name, written, rows)
            expected[written] = rows
            (found,) = rows_read(job, X, ids=ids)
            assert torch.equal(found, expected[ids])
        if other is not job:
            other.close()


def test_a_write_while_a_read_is_on_its_way() -> None:
    """What was found before the write is not taken after it."""
    with trained(X) as (job, _):
        ids = torch.arange(1500, 4000)
        rows_read(job, X, ids=ids)
        expected = whole(X)
        started = job.cluster.start_read([RowsRequest([X.name], ids)])
        job.cluster.write(X.name, ids[:10], torch.zeros(10, 6))
        (found,) = started.wait()
        expected[ids[:10]] = 0
        again = rows_read(job, X, ids=ids)[0]
        assert torch.equal(found[10:], expected[ids][10:])
        assert torch.equal(again, expected[ids])


def test_what_is_trained_is_never_kept() -> None:
    with trained(X, is_loaded=False) as (job, _):
        counts = count_asked(job)
        ids = torch.arange(1500, 4000)
        for _ in range(3):
            (found,) = rows_read(job, X, ids=ids)
            assert torch.equal(found, whole(X)[ids])
        assert counts == [2500] * 3


@pytest.mark.parametrize("room", [0, 1, 24 * 100, 24 * 2500])
def test_room(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more rows are kept than there is room for, and all reads are right."""
    monkeypatch.setenv("GRAPHSHARD_CACHE_BYTES", str(room))
    with trained(X) as (job, _):
        counts = count_asked(job)
        for ids in (torch.arange(1500, 2000), torch.arange(1500, 4000), torch.arange(1500, 4000)):
            (found,) = rows_read(job, X, ids=ids)
            assert torch.equal(found, whole(X)[ids])
        kept = min(room // 24, 500), min(room // 24, 2500)
        assert counts == [500, 2500 - kept[0], 2500 - kept[1]]


def test_room_that_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHSHARD_CACHE_BYTES", "1GB")
    with pytest.raises(ValueError, match="whole number of bytes"), trained(X):
        pass


def test_rows_of_more_than_a_message() -> None:
    wide = TableInfo(f"{POLICY}~w", torch.float32, (8192,), PARTS.starts, POLICY, True)
    ids = torch.arange(1500, 3900)
    assert len(ids) * wide.row_bytes > MESSAGE_BYTES
    with trained(wide) as (job, _):
        for some in (ids, ids.flip(0), torch.cat([ids, ids[:7] - 1500])):
            (found,) = rows_read(job, wide, ids=some)
            assert torch.equal(found, whole(wide)[some])


def test_kept_rows_beside_a_dict() -> None:
    kept, known = CachedRows([X], 700), {}
    table = whole(X)
    for seed in range(40):
        rows = many_ids(seed, 60) % 900
        slots = kept.find(rows)
        for row, slot in zip(rows.tolist(), slots.tolist(), strict=True):
            assert (slot >= 0) == (row in known)
        kept.add(rows, [table[rows]])
        for row in rows.sort().values.tolist():
            if len(known) < 700:
                known[row] = True
        hits = rows[kept.find(rows) >= 0]
        out = torch.zeros(len(hits), 6)
        kept.copy([out], torch.arange(len(hits)), kept.find(hits))
        assert torch.equal(out, table[hits])


def test_reads_beside_the_first_write() -> None:
    """A read that begins when a write has returned has what was written, in whatever thread."""
    infos = [
        TableInfo(f"{POLICY}~x{i}", torch.float32, (6,), PARTS.starts, POLICY, True)
        for i in range(8)
    ]
    ids = torch.arange(1500, 4000)
    with trained(*infos) as (job, _):
        for info in infos:
            is_written, wrong = threading.Event(), []

            def reads(info: TableInfo = info, is_written=is_written, wrong=wrong) -> None:
                for _ in range(400):
                    must_be_new = is_written.is_set()
                    (found,) = rows_read(job, info, ids=ids)
                    if must_be_new:
                        wrong.append(bool((found != 1000).any()))
                        return

            rows_read(job, info, ids=ids)
            readers = [threading.Thread(target=reads) for _ in range(2)]
            for reader in readers:
                reader.start()
            job.cluster.write(info.name, ids, torch.full((len(ids), 6), 1000.0))
            is_written.set()
            for reader in readers:
                reader.join(30.0)
            assert wrong == [False, False]
