# SPDX-License-Identifier: Apache-2.0
"""How soon a job ends after a failure, and what is said of it.

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
from collections.abc import Sequence

MARGIN_SECONDS = 10.0
"""What may pass beyond the timeout until a failed job has ended; see the note."""

NOTICE = "graphshard: "
"""How a line begins that says for whom a wait has lasted half of its time."""


def rank_names(ranks: Sequence[int]) -> str:
    """Ranks, for a message."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"


def first_line(error: BaseException) -> str:
    """The first line of an error, without the position before it and the advice after it."""
    text = str(error).strip()
    if not text:
        return type(error).__name__
    line = re.sub(r"^\[\S+:\d+\] ", "", text.splitlines()[0])
    return line.split(". This is typically caused")[0]
