# SPDX-License-Identifier: Apache-2.0
"""Servers for tests, in threads of the test's process; trainers are processes, or the test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from graphshard._base.ranges import RangeMap
from graphshard.servers import (
    Cluster,
    Job,
    LocalHost,
    MessageClient,
    ServedHost,
    TableServer,
    current_job,
    has_job,
    set_job,
)
from graphshard.servers._host_tables import HostTables

TOKEN = "a token that is for tests alone"
POLICY = "node~_N"
TABLE = {
    "name": "node~_N~x",
    "dtype": "int64",
    "row_shape": [2],
    "starts": [0, 100],
    "policy": POLICY,
    "persistent": True,
}
#: Parts of very different sizes, one of them empty.
PARTS = RangeMap((0, 1500, 1500, 4000, 5000))
NUM_ROWS = PARTS.num_ids


@contextmanager
def served(num_hosts: int) -> Iterator[list[str]]:
    """Addresses of servers, one for each host."""
    servers = [TableServer(host, TOKEN) for host in range(num_hosts)]
    try:
        for server in servers:
            server.start()
        yield [server.address for server in servers]
    finally:
        for server in servers:
            server.stop()


def join(addresses: Sequence[str], here: int, attach: bool = True, timeout: float = 30.0) -> Job:
    """A job on some servers; rows of ``here`` are read in place, if ``attach``."""
    hosts = [
        ServedHost(MessageClient(address, TOKEN, number, timeout), attach and number == here)
        for number, address in enumerate(addresses)
    ]
    return _made(Job("test", Cluster(hosts, here)))


def alone() -> Job:
    """A job without servers."""
    return _made(Job("test", Cluster([LocalHost(HostTables(0, is_shared=False))], 0)))


def leave() -> None:
    """End the connections of this process's job, which there then is none of."""
    if has_job():
        current_job().close()
        set_job(None)


def _made(job: Job) -> Job:
    job.add_policies({POLICY: PARTS})
    set_job(job)
    return job
