# SPDX-License-Identifier: Apache-2.0
"""How tensors travel: packed into bytes, rounded to a narrower dtype, through shared memory."""

from ._exchange import exchange_rows, shared_blocks, start_exchange
from ._hosts import Hosts
from ._pack import WIRE_DTYPES, as_bytes, joined, narrowed, parted, row_bytes, wire_dtype
from ._shared_arrays import SharedArray, share_arrays
from ._shared_blocks import SharedBlocks
