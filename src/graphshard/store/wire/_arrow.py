# SPDX-License-Identifier: Apache-2.0
"""pyarrow, imported when a message is sent: importing graphshard loads none of it."""

from __future__ import annotations

from functools import cache
from typing import Any

COMMAND = b"graphshard 1"


@cache
def arrow() -> Any:
    """The package ``pyarrow``."""
    import pyarrow

    return pyarrow


@cache
def arrow_flight() -> Any:
    """The package ``pyarrow.flight``."""
    import pyarrow.flight

    return pyarrow.flight


@cache
def stream_schema() -> Any:
    """Of a stream: a column of bytes, the payload; headers are metadata of its batches."""
    return arrow().schema([arrow().field("bytes", arrow().uint8(), nullable=False)])


def batch_of(payload: Any) -> Any:
    """A payload, a buffer, as Flight takes it."""
    column = arrow().Array.from_buffers(arrow().uint8(), payload.size, [None, payload])
    return arrow().RecordBatch.from_arrays([column], schema=stream_schema())
