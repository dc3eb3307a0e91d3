# SPDX-License-Identifier: Apache-2.0
"""Communication between ranks: groups, exchange plans, checks, synchronisation, counting.

Knows rows, ids and process groups, never a graph. Everything that waits has a timeout, and
failures of other ranks arrive as `graphshard.errors.RankError`.
"""

from ._address import nfs_ip_init
from ._agree import agree, share_error
from ._arriving import HaloUnderWay
from ._exchange import anchor, fetch_halo, return_halo
from ._group import is_initialized, rank, world_size
from ._lanes import Lanes
from ._overlapped import start_fetch_all, start_return_all
from ._pairwise import start_fetch, start_return
from ._pending import Pending
from ._plan import ExchangePlan
from ._ragged import ragged_all_to_all
from ._reduce import all_reduce, barrier
from ._sent_rows import SentRows
from ._start import guard, initialize_comms, report_failure, shutdown_comms
from ._sync import gather_grads, sync_params
from ._trace import Trace, trace

__all__ = [
    "ExchangePlan",
    "HaloUnderWay",
    "Lanes",
    "Pending",
    "SentRows",
    "Trace",
    "agree",
    "all_reduce",
    "anchor",
    "barrier",
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
