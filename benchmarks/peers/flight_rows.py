# SPDX-License-Identifier: Apache-2.0
"""Arrow Flight: reads of rows of a table on the other host; started by two_hosts.sh.

usage: flight_rows.py ROWS COLUMNS BATCH READS
One stream is kept open, as graphshard's is; what arrives is a tensor over Arrow's buffer, not
copied. Trainer 0 prints one line of JSON.
"""

import json
import os
import sys
import threading
import time
import warnings
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.flight as flight
import torch

num_rows, columns, batch, reads = map(int, sys.argv[1:5])
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
host, role = int(os.environ["HOST"]), os.environ["ROLE"]
DONE = Path(os.environ["FOLDER"]) / "done"
warnings.filterwarnings("ignore", "The given NumPy array is not writable")
SCHEMA = pa.schema([pa.field("bytes", pa.uint8(), nullable=False)])


def as_batch(tensor: torch.Tensor) -> pa.RecordBatch:
    """A tensor's memory as a column."""
    data = pa.py_buffer(tensor.view(-1).view(torch.uint8).numpy())
    column = pa.Array.from_buffers(pa.uint8(), data.size, [None, data])
    return pa.RecordBatch.from_arrays([column], schema=SCHEMA)


def as_tensor(found: pa.RecordBatch, dtype: torch.dtype) -> torch.Tensor:
    """A column as a tensor over the same memory."""
    return torch.from_numpy(np.frombuffer(found.column(0).buffers()[1], np.uint8)).view(dtype)


class Rows(flight.FlightServerBase):
    """Answers ids with rows."""

    def do_exchange(self, context, descriptor, reader, writer) -> None:  # type: ignore[no-untyped-def]
        """One stream: ids, rows, ids, rows, ..."""
        writer.begin(SCHEMA)
        for chunk in reader:
            ids = as_tensor(chunk.data, torch.int64)
            writer.write_batch(as_batch(table.index_select(0, ids)))


def measure() -> dict[str, object]:
    """Seconds of each read."""
    client = flight.FlightClient("grpc://10.77.0.2:30051")
    deadline = time.monotonic() + 60
    while True:
        try:
            client.wait_for_available(timeout=5)
            break
        except flight.FlightError:
            assert time.monotonic() < deadline
    writer, reader = client.do_exchange(flight.FlightDescriptor.for_command(b"rows"))
    writer.begin(SCHEMA)
    generator = torch.Generator().manual_seed(0)
    seconds, found = [], torch.empty(0)
    for _ in range(reads):
        ids = torch.randint(num_rows, (batch,), generator=generator)
        start = time.perf_counter()
        writer.write_batch(as_batch(ids))
        found = as_tensor(reader.read_chunk().data, torch.float32)
        seconds.append(time.perf_counter() - start)
    total = float(found.double().sum())
    writer.close()
    return {"seconds": seconds, "sum": total}


if (role, host) == ("server", 1):
    table = torch.randn(num_rows, columns, generator=torch.Generator().manual_seed(1))
    server = Rows("grpc://0.0.0.0:30051")
    threading.Event().wait()
elif (role, host) == ("trainer", 0):
    try:
        print(json.dumps(measure()), flush=True)
    finally:
        DONE.touch()
elif (role, host) == ("trainer", 1):  # its end would end the server
    while not DONE.exists():
        time.sleep(0.1)
