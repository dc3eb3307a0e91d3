# SPDX-License-Identifier: Apache-2.0
"""A job that makes and drops tensors for a long time, and ends where it began.

Trainers on the hosts of a cluster make tensors of every kind and drop or delete them, round after
round. After each the kernel says what each process has: memory of its own, shared memory, and open
descriptors. The first rounds, in which connections are made and memory is taken that is used again,
do not count.

``python tests/campaigns/soak_cases.py --seconds 600 --write`` runs the whole campaign.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from campaign_report import write_report

from graphshard._base.ranges import RangeMap
from graphshard.comm import all_reduce, barrier
from graphshard.servers import (
    Cluster,
    DistEmbedding,
    DistTensor,
    Job,
    MessageClient,
    ServedHost,
    SparseAdagrad,
    SparseAdam,
    SparseSGD,
    TableServer,
    set_job,
)
from graphshard.testing import run_ranks

TOKEN = "a token of the soak job alone"
NUM_ROWS = 40_000
WARM_UP_ROUNDS = 6
TABLE_MEGABYTES = NUM_ROWS * 64 * 4 / 2**20
"""Of the largest tensor of a round; a leak of one a round is far above what is allowed."""
ALLOWED_MEGABYTES = {"RssShmem": TABLE_MEGABYTES / 2, "RssAnon": 64.0}
KINDS = (SparseSGD, SparseAdagrad, SparseAdam)


def usage() -> dict[str, float]:
    """Megabytes of memory, and open descriptors, of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    found = {name: int(fields[name].split()[0]) / 1024 for name in ALLOWED_MEGABYTES}
    return {**found, "descriptors": float(len(os.listdir("/proc/self/fd")))}


def one_round(number: int, rank: int) -> None:
    """Tensors of every kind that are made, used, and gone at the end."""
    unnamed = DistTensor((NUM_ROWS, 64), torch.float32)
    unnamed[rank::97] = torch.ones(len(range(rank, NUM_ROWS, 97)), 64)
    mask = DistTensor((NUM_ROWS,), torch.bool, "mask")
    mask[rank] = torch.ones(1, dtype=torch.bool)
    assert (mask | mask).count_nonzero() >= 1
    deleted = DistTensor((NUM_ROWS, 8), torch.float64, f"deleted-{number}", persistent=True)
    deleted[rank] = torch.ones(1, 8, dtype=torch.float64)
    deleted.delete()
    embedding = DistEmbedding(NUM_ROWS, 16, "rows", lambda shape, dtype: torch.ones(shape))
    optimizer = KINDS[number % len(KINDS)]([embedding], 0.1)
    embedding(torch.arange(rank, NUM_ROWS, 11)).sum().backward()
    optimizer.step()


def work(
    rank: int, world_size: int, addresses: list[str], seconds: float, least: int
) -> dict[str, Any]:
    """Rounds for some seconds; what this process had after the warm-up, and at the end."""
    here = rank % len(addresses)
    hosts = [
        ServedHost(MessageClient(address, TOKEN, number), number == here)
        for number, address in enumerate(addresses)
    ]
    for host in hosts:
        host.connection.announce(f"trainer {rank}")
    job = Job("soak", Cluster(hosts, here))
    job.add_policies({"node~_N": RangeMap((0, NUM_ROWS // 3, NUM_ROWS))})
    set_job(job)
    start, number, begin = time.monotonic(), 0, usage()
    while True:
        one_round(number, rank)
        number += 1
        gc.collect()
        barrier()
        job.cluster.settle()
        barrier()
        if number == WARM_UP_ROUNDS:
            begin = usage()
        is_over = time.monotonic() > start + seconds and number >= WARM_UP_ROUNDS + least
        if int(all_reduce(torch.tensor([int(is_over)]), "max")):
            break
    end = usage()
    job.cluster.refresh()
    left = job.cluster.names()
    barrier()
    set_job(None)
    job.close()
    return {"rounds": number, "begin": begin, "end": end, "left": left}


def soak(num_hosts: int, num_trainers: int, seconds: float, least: int) -> list[dict[str, Any]]:
    """Run the job; what each trainer found, and what is left on the servers."""
    servers = [TableServer(host, TOKEN) for host in range(num_hosts)]
    try:
        for server in servers:
            server.start()
        addresses = [server.address for server in servers]
        found = run_ranks(work, num_trainers, addresses, seconds, least, timeout=seconds + 300)
        for result in found:
            result["left"] += [info.name for server in servers for info in server.tables.infos()]
        return found
    finally:
        for server in servers:
            server.stop()


def wrong(result: dict[str, Any], num_hosts: int) -> list[str]:
    """What a trainer has more of than it began with."""
    begin, end = result["begin"], result["end"]
    allowed = {**ALLOWED_MEGABYTES, "descriptors": 8.0 * num_hosts}  # streams made on demand
    found = [
        f"{name}: {begin[name]:.1f} at first and {end[name]:.1f} after {result['rounds']} rounds"
        for name, most in allowed.items()
        if end[name] > begin[name] + most
    ]
    return found + [f"left on servers: {name}" for name in result["left"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--write", action="store_true", help="write a report")
    options = parser.parse_args()
    results = soak(2, 3, options.seconds, 20)
    outcomes: dict[str, Counter[str]] = {}
    notes = []
    for rank, result in enumerate(results):
        problems = wrong(result, 2)
        outcomes[f"trainer {rank}"] = Counter({"ends where it began": int(not problems)})
        both = [f"{k} {result['begin'][k]:.1f} to {result['end'][k]:.1f}" for k in result["end"]]
        notes.append(f"Trainer {rank}, {result['rounds']} rounds: {', '.join(both)}. {problems}")
    print(*notes, sep="\n")
    if options.write:
        title = "A job of 3 trainers on 2 hosts that made and dropped tensors, round after round"
        command = f"python {' '.join(sys.argv)}"
        print(write_report("soak", title, command, outcomes, notes))


if __name__ == "__main__":
    main()
