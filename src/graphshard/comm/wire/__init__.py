# SPDX-License-Identifier: Apache-2.0
"""How tensors travel: packed into bytes, narrowed, through shared memory on one host."""

from ._casts import (
    WIRE_DTYPES,
    narrowed,
    widened,
    wire_dtype,
)
from ._pack import (
    as_bytes,
    exchange_rows,
    joined,
    pack,
    parted,
    row_bytes,
    unpack,
)
from ._shared_blocks import (
    SharedBlocks,
)
from ._shared_memory import (
    Allocate,
    Letter,
    SharedAllToAll,
    allocator,
    is_message_shared,
    shared_blocks,
    start_exchange,
    told,
)

__all__ = [
    "WIRE_DTYPES",
    "Allocate",
    "Letter",
    "SharedAllToAll",
    "SharedBlocks",
    "allocator",
    "as_bytes",
    "exchange_rows",
    "is_message_shared",
    "joined",
    "narrowed",
    "pack",
    "parted",
    "row_bytes",
    "shared_blocks",
    "start_exchange",
    "told",
    "unpack",
    "widened",
    "wire_dtype",
]
