# SPDX-License-Identifier: Apache-2.0
"""Operations in which every rank of a group takes part, and checks that all ranks mean the same."""

from ._agree import agree, gather_texts, share_error, verify
from ._everywhere import gather_int, raise_everywhere, reduce_floats, reduce_ints, text_of_rank_0
from ._operations import (
    Pending,
    Trace,
    all_gather,
    all_reduce,
    all_reduce_,
    all_to_all,
    barrier,
    broadcast_,
    count,
    finish_collective,
    is_in_vain,
    run_collective,
    start_all_to_all,
    start_collective,
    trace,
    wait,
    wait_collective,
    wait_for_all,
)
from ._staging import copying_ahead, from_backend, room_for, rows_are_ready, to_backend
from ._thread_groups import Lanes, ThreadGroups
