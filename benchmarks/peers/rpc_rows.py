# SPDX-License-Identifier: Apache-2.0
"""torch RPC: reads of rows of a table in another process; started by two_hosts.sh.

usage: rpc_rows.py ROWS COLUMNS BATCH READS COMPARE FROM TRANSPORT
COMPARE is 1 to compare each read with the right rows, which is not timed, else 0.
FROM is ``far`` for the other host, ``near`` for the same one; TRANSPORT is ``tcp``, or ``any`` for
what RPC chooses. Trainer 0 prints one line of JSON.
"""

import json
import os
import sys
import time

import torch
from torch.distributed import rpc

num_rows, columns, batch, reads, compare = map(int, sys.argv[1:6])
far, is_tcp = sys.argv[6] == "far", sys.argv[7] == "tcp"
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
host, role = int(os.environ["HOST"]), os.environ["ROLE"]
table = torch.empty(0)


def all_rows() -> torch.Tensor:
    """What the table holds."""
    return torch.randn(num_rows, columns, generator=torch.Generator().manual_seed(1))


def rows_of(ids: torch.Tensor) -> torch.Tensor:
    """Rows of this process's table."""
    return table.index_select(0, ids)


def measure() -> dict[str, object]:
    """Seconds of each read."""
    generator = torch.Generator().manual_seed(0)
    seconds, found = [], torch.empty(0)
    right = all_rows() if compare else table
    for _ in range(reads):
        ids = torch.randint(num_rows, (batch,), generator=generator)
        start = time.perf_counter()
        found = rpc.rpc_sync("server", rows_of, (ids,))
        seconds.append(time.perf_counter() - start)
        if compare:
            assert torch.equal(found, right[ids])
    return {"seconds": seconds, "sum": float(found.double().sum())}


if (role, host) == (("trainer", 1) if far else ("server", 0)):
    table = all_rows()
    name, number = "server", 1
elif (role, host) == ("trainer", 0):
    name, number = "trainer", 0
else:
    sys.exit()
options = rpc.TensorPipeRpcBackendOptions(
    num_worker_threads=2,
    init_method=f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}",
    **({"_transports": ["uv"], "_channels": ["basic"]} if is_tcp else {}),
)
rpc.init_rpc(name, rank=number, world_size=2, rpc_backend_options=options)
if number == 0:
    print(json.dumps(measure()), flush=True)
rpc.shutdown()
