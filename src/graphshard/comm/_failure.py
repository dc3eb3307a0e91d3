# SPDX-License-Identifier: Apache-2.0
"""rank_error: turn what a backend says about a broken wait into a `RankError`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..errors import RankError
from ._group import GroupState


def rank_error(
    state: GroupState,
    name: str,
    peers: Sequence[int],
    error: BaseException,
    waited: float,
) -> RankError:
    """Build the error for an operation that failed or timed out.

    Args:
        state: The group.
        name: The operation.
        peers: Global ranks that it waited for.
        error: What the backend raised.
        waited: Seconds between the start of the operation and its failure.
    """
    me = state.members[state.rank]
    awaited = f"rank {peers[0]}" if len(peers) == 1 else f"ranks {list(peers)}"
    reason = first_line(error)
    head = f"rank {me}: {name} with {awaited} failed after {waited:.1f} s"
    if state.watch is not None:
        timed_out = waited >= state.timeout.total_seconds() - 0.2
        verdict = state.watch.diagnose(name, peers, timed_out)
        if verdict is not None:
            return RankError(f"{head}: {verdict.text} (the backend said: {reason})", verdict.ranks)
    return RankError(f"{head}: {reason}", peers if len(peers) == 1 else ())


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type where it has none.

    Without the source position that backends put before it and the advice that they put after it.
    """
    text = str(error).strip()
    if not text:
        return type(error).__name__
    line = re.sub(r"^\[\S+:\d+\] ", "", text.splitlines()[0])
    return line.split(". This is typically caused")[0]
