# SPDX-License-Identifier: Apache-2.0
"""operation: what a backend says about a broken wait becomes a `RankError`.

[Note: how soon a job ends]
With the timeout that the group was made with: from the moment when a rank dies, fails, or lets
another one wait in vain, until every other process of the job is gone, it takes no longer than
timeout + `MARGIN_SECONDS`. Nearly always it takes less: the end of a process is known at once.

::

    at most   timeout            a rank waits for one that is silent: stopped, hung, cut off
              _ANSWER_SECONDS    ... asks all ranks where they are                  (_monitor.py)
              _EVENT_SECONDS      ... tells them what it has found, and fails        (_monitor.py)
              _GRACE_SECONDS     the launcher gives the rest time to fail, too      (train/launch)
              _TERMINATE_SECONDS ... and those that it ends time to do so politely  (train/launch)

After a rank has ended in good order the launcher gives the others the timeout to do so, too.
torchrun, in place of the launcher, gives a process that it ends half a minute. After half of a wait
a rank says for whom it waits (see `FailureMonitor`).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ...errors import RankError
from ._state import GroupState

MARGIN_SECONDS = 10.0
"""What may pass beyond the timeout until a failed job has ended; see the note."""

NOTICE = "graphshard: "
"""How a line begins that says for whom a wait has lasted half of its time."""


@contextmanager
def operation(
    state: GroupState, name: str, number: int, peers: Sequence[int] | None = None
) -> Iterator[None]:
    """Run one step of communication; a failure inside becomes a `RankError`.

    Args:
        state: The group.
        name: What the user would call the operation; for messages.
        number: The operation's number in the group.
        peers: Ranks in the group that it waits for; None means all of them.

    Raises:
        RankError: Anything in the block raised a RuntimeError other than out of memory.
        RuntimeError: The group has been shut down.
    """
    if state.closed:
        raise RuntimeError(
            f"{name} needs the process group '{state.name}', which has been shut down; make what "
            "uses it again after initialize_comms"
        )
    others = [
        state.members[peer]
        for peer in (range(state.world_size) if peers is None else peers)
        if peer != state.rank
    ]
    monitor = state.monitor
    if monitor is not None:
        monitor.enter(state.name, name, number, others, state.timeout.total_seconds())
    start = time.monotonic()
    try:
        if monitor is not None and monitor.has_failure():
            raise RuntimeError("not started")
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if state.shared is not None:
            state.shared.fail()
        raise _rank_error(state, name, others, error, time.monotonic() - start) from error
    finally:
        if monitor is not None:
            monitor.leave()


def _rank_error(
    state: GroupState, name: str, peers: Sequence[int], error: BaseException, waited: float
) -> RankError:
    """The error of an operation that waited for global ranks, some seconds, and then failed."""
    me = state.members[state.rank]
    awaited = f"rank {peers[0]}" if len(peers) == 1 else f"ranks {list(peers)}"
    reason = first_line(error)
    head = f"rank {me}: {name} with {awaited} failed after {waited:.1f} s"
    if state.monitor is not None:
        timed_out = waited >= state.timeout.total_seconds() - 0.2
        verdict = state.monitor.diagnose(name, peers, timed_out)
        if verdict is not None:
            return RankError(f"{head}: {verdict.text} (the backend said: {reason})", verdict.ranks)
    return RankError(f"{head}: {reason}", peers if len(peers) == 1 else ())


def first_line(error: BaseException) -> str:
    """The first line of an error, without the position before it and the advice after it."""
    text = str(error).strip()
    if not text:
        return type(error).__name__
    line = re.sub(r"^\[\S+:\d+\] ", "", text.splitlines()[0])
    return line.split(". This is typically caused")[0]
