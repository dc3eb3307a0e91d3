# SPDX-License-Identifier: Apache-2.0
"""Exchange of the rows that ranks read of each other: a plan made once, one payload per call."""

from ._exchange import (
    HaloFetch,
    HaloUnderWay,
    anchor,
    fetch_halo,
    return_halo,
    start_fetch,
    start_fetch_all,
    start_return,
    start_return_all,
)
from ._plan import ExchangePlan, SentRows
