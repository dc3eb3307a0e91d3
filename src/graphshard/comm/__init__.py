# SPDX-License-Identifier: Apache-2.0
"""Communication between ranks: groups, exchange plans, checks, synchronisation, counting.

Knows rows, ids and process groups, never a graph. Everything that waits has a timeout, and
failures of other ranks arrive as `graphshard.errors.RankError`.
"""

from ._start import guard, initialize_comms, report_failure, shutdown_comms
from ._sync import gather_grads, sync_params
from .collectives import (
    Lanes,
    Pending,
    ThreadGroups,
    agree,
    all_reduce,
    barrier,
    share_error,
)
from .group import Trace, come_together, is_initialized, rank, trace, world_size
from .halo import (
    ExchangePlan,
    HaloFetch,
    HaloUnderWay,
    SentRows,
    anchor,
    fetch_halo,
    return_halo,
    start_fetch,
    start_fetch_all,
    start_return,
    start_return_all,
)
from .rendezvous import nfs_ip_init
from .transport import ragged_all_to_all

__all__ = [
    "ExchangePlan",
    "HaloFetch",
    "HaloUnderWay",
    "Lanes",
    "Pending",
    "SentRows",
    "ThreadGroups",
    "Trace",
    "agree",
    "all_reduce",
    "anchor",
    "barrier",
    "come_together",
    "fetch_halo",
    "gather_grads",
    "guard",
    "initialize_comms",
    "is_initialized",
    "nfs_ip_init",
    "ragged_all_to_all",
    "rank",
    "report_failure",
    "return_halo",
    "share_error",
    "shutdown_comms",
    "start_fetch",
    "start_fetch_all",
    "start_return",
    "start_return_all",
    "sync_params",
    "trace",
    "world_size",
]
