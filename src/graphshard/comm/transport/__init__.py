# SPDX-License-Identifier: Apache-2.0
"""How tensors travel: packed into bytes, rounded to a narrower dtype, through shared memory."""

from ._exchange import (
    WIRE_DTYPES,
    as_bytes,
    exchange_rows,
    joined,
    narrowed,
    parted,
    row_bytes,
    shared_blocks,
    start_exchange,
    wire_dtype,
)
from ._hosts import Hosts
from ._shared_arrays import SharedArray, share_arrays
from ._shared_blocks import SharedBlocks
