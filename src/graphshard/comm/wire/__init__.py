# SPDX-License-Identifier: Apache-2.0
"""How tensors travel: packed into bytes, narrowed, through shared memory on one host."""

from ._casts import WIRE_DTYPES, narrowed, widened, wire_dtype
from ._hosts import Hosts
from ._pack import as_bytes, exchange_rows, joined, pack, parted, row_bytes, unpack
from ._shared_arrays import SharedArray, share_arrays
from ._shared_blocks import SharedBlocks
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
