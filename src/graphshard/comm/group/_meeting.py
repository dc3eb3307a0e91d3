# SPDX-License-Identifier: Apache-2.0
"""come_together: all ranks arrive at something that they do together, before anything is sent.

A collective that one rank starts alone meets whatever collective the others start next in that
group: they exchange the wrong data, or wait until the group's timeout. So what a program may well
do on one rank alone (``if rank == 0: evaluate()``) is announced in the store of the process group
first. Who is missing is then known, nothing is sent, and the error can say what to do.
"""

from __future__ import annotations

import contextlib
import time

import torch.distributed as dist

from ._failure import rank_names
from ._state import GroupState, group_state, operation

_POLL_SECONDS = (0.001, 0.1)  # the first time between two looks, and the longest


def come_together(what: str, rule: str, state: GroupState | None = None) -> None:
    """Return once all ranks of the default group are here; every rank must call.

    Args:
        what: What they do together, "DistNodeDataLoader"; equal on all ranks.
        rule: For the error: who must do it, and what to do where one rank does it alone.
        state: The group; the default group by default. Others have no store, and are not checked.

    Raises:
        RankError: A rank did not come within the group's timeout, or failed.
    """
    state = group_state() if state is None else state
    store = default_store() if state.world_size > 1 and state.group is dist.group.WORLD else None
    if store is None:
        return
    number = state.num_meetings[what] = state.num_meetings.get(what, 0) + 1
    base = f"graphshard/meetings/{what}"
    missing = [r for r in range(state.world_size) if r != state.rank]
    seconds, pause = state.timeout.total_seconds(), _POLL_SECONDS[0]
    monitor, start = state.monitor, time.monotonic()
    with operation(state, what, number):
        store.set(f"{base}/{number}/{state.rank}", "")
        while True:
            missing = [r for r in missing if not store.check([f"{base}/{number}/{r}"])]
            if not missing:
                break
            failed = monitor is not None and (monitor.has_failure() or monitor.has_lost(missing))
            if failed or time.monotonic() - start > seconds:
                absent = rank_names([state.members[r] for r in missing])
                raise RuntimeError(f"{absent} did not come: {rule}")
            time.sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS[1])
    # All have come, so all have left the one before.
    with contextlib.suppress(RuntimeError, NotImplementedError):
        store.delete_key(f"{base}/{number - 1}/{state.rank}")


def default_store() -> dist.Store | None:
    """The default group's; None where it has none, as under MPI."""
    try:
        found: dist.Store = dist.distributed_c10d._get_default_store()
    except (AttributeError, RuntimeError, ValueError):
        return None
    return found
