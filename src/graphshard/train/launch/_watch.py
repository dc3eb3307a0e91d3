# SPDX-License-Identifier: Apache-2.0
"""Watch: the children of a launcher, from start to end, and when it is time to end them.

A child is a worker of this machine (`launch_workers`), or the agent of a host, which tells how the
ranks there have ended (`launch`); the rules are the same.

[Note: how a job ends]
    A process that fails says why by what it prints and by its `ExitCode`. The others may learn of
    it through their process group, and each then fails with a `RankError` that names it, and with
    exit code 3. They need the failed one to finish, so they have `GRACE_SECONDS` to say what they
    know, whatever the timeout, and are then ended. After a rank has ended with 0 the others have
    the timeout to do so, too. Reported first is the first cause: what failed first among those that
    blame no other. See [Note: how soon a job ends] in comm/group.py.

    Children have sessions of their own, so Ctrl-C reaches the launcher alone, which ends them and
    what they have started. If the launcher is killed, workers are ended by the kernel (on Linux) or
    by a thread in each; an agent hears nothing any more, and ends what it has started and itself.

[Note: why not torch.distributed.elastic]
    Its launcher API keeps none of the above, as of torch 2.13. A failure ends all others at the
    next poll: where rank 0 blames rank 1 and ends before it, the reason that rank 1 had is lost.
    One that is stopped has 30 s, a constant, and while no worker has failed it waits without end
    for one that hangs. What a worker that ended by itself has started is left. Where hosts have
    torchrun all the same, `_host_agent` watches it.
"""

from __future__ import annotations

import math
import selectors
import time
from collections.abc import Callable, Iterable, Sequence

from ...errors import NOTICE
from ._children import Child, LineStream, end_children, read_streams

TAIL_LINES = 60
"""The last lines of a process that are kept for the report of its failure."""
GRACE_SECONDS = 2.0


class Watch:
    """Children, what they print, and the ranks that have not ended.

    Args:
        timeout: Seconds that ranks have to end after one has ended with 0.
        on_line: Called with a line about ranks that have used half of it.

    Attributes:
        waits_for: Ranks that have not ended, and what else must have before the job has.
        deadline: When the children are to be ended at the latest.
    """

    def __init__(self, ranks: Iterable[int], timeout: float, on_line: Callable[[str], None]):
        self.waits_for: set[int | str] = set(ranks)
        self.deadline = math.inf
        self.streams: list[LineStream] = []
        self._timeout, self._on_line, self._notice = timeout, on_line, math.inf
        self._children: list[Child] = []
        self._has_failed = False
        self._selector = selectors.DefaultSelector()

    def add(self, child: Child, streams: Sequence[LineStream]) -> None:
        """Watch a child and take what it says."""
        self._children.append(child)
        for stream in streams:
            self.streams.append(stream)
            self._selector.register(stream.file, selectors.EVENT_READ, stream)

    def note_end(self, rank: int) -> None:
        """A rank has ended with 0."""
        self.waits_for.discard(rank)
        now = time.monotonic()
        self.deadline = min(self.deadline, now + self._timeout)
        self._notice = min(self._notice, now + self._timeout / 2)

    def note_failure(self) -> None:
        """Something has failed: all is to end."""
        self._has_failed = True
        self.deadline = min(self.deadline, time.monotonic() + GRACE_SECONDS)
        self._notice = math.inf

    def run(self, turn: Callable[[], None], on_end: Callable[[Child, int], None]) -> None:
        """Read what children say, with a ``turn`` between, until all is over or time is up.

        ``on_end`` is called with each child that has ended, and with how.
        """
        running = list(self._children)
        while running and (self.waits_for or self._has_failed):
            turn()
            for child in list(running):
                if (code := child.code()) is not None:
                    running.remove(child)
                    on_end(child, code)
            now = time.monotonic()
            if now > self.deadline and running:
                return
            if now > self._notice and running:
                self._notice = math.inf
                self._on_line(self._notice_text())
            read_streams(self._selector)

    def _notice_text(self) -> str:
        late = sorted(rank for rank in self.waits_for if isinstance(rank, int))
        others = sorted(name for name in self.waits_for if isinstance(name, str))
        whom = f"ranks {late}" if late else " and ".join(others)
        seconds = f"{self._timeout / 2:g} s of {self._timeout:g} s"
        return f"{NOTICE}waited {seconds} for {whom} to end as the others have"

    def listen(self, seconds: float) -> None:
        """Take what is said within some time; a child of what has ended may hold a pipe open."""
        stop = time.monotonic() + seconds
        while self._selector.get_map() and time.monotonic() < stop:
            read_streams(self._selector)

    def wait(self, seconds: float) -> None:
        """Read what children say until all have ended, or some time is over."""
        stop = time.monotonic() + seconds
        while time.monotonic() < stop and any(child.code() is None for child in self._children):
            read_streams(self._selector)

    def close(self) -> None:
        """End what still runs, and what the others have started."""
        try:
            end_children(self._children)
        finally:
            for stream in self.streams:
                stream.file.close()
            self._selector.close()


def report_text(failures: Iterable[tuple[str, Sequence[str]]]) -> str:
    """What went wrong, the first cause first: of each what failed, and how, and what it printed."""
    (first, tail), *others = failures
    lines = [f"error: {first}", *(f"  | {line}" for line in tail)]
    for what, printed in others:
        lines.append(f"then {what}: {printed[-1] if printed else 'it said nothing'}")
    return "\n".join(lines)
