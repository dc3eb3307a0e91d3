# SPDX-License-Identifier: Apache-2.0
"""trace: count the collectives that graphshard issues and the bytes they send.

Every communication function of this package reports here as it starts, once, with the kind of the
operation and the number of payload bytes that leave for other ranks. With no trace open a report
is a loop over an empty tuple.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypeAlias

TraceKind: TypeAlias = Literal[
    "all_to_all", "send", "all_reduce", "broadcast", "all_gather", "agree", "barrier"
]
"""What is counted; ``agree`` is every check that ranks make among themselves."""


class Trace:
    """What this rank has sent while the trace was open.

    Attributes:
        calls: Number of operations by kind; a kind that did not occur is absent.
        bytes_sent: Payload bytes sent to other ranks, by kind. What a rank keeps for itself is
            not counted. An ``all_to_all`` or ``send`` counts what it sends, an ``all_gather`` and
            (on the sending rank) a ``broadcast`` count the payload once for each other rank, and
            an ``all_reduce`` counts its payload once, whatever algorithm the backend runs.
    """

    def __init__(self, thread: int | None = None) -> None:
        self.calls: dict[str, int] = {}
        self.bytes_sent: dict[str, int] = {}
        self._thread = thread
        self._lock = threading.Lock()

    @property
    def total_calls(self) -> int:
        return sum(self.calls.values())

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes_sent.values())

    def _add(self, kind: TraceKind, num_bytes: int) -> None:
        if self._thread is not None and self._thread != threading.get_ident():
            return
        with self._lock:
            self.calls[kind] = self.calls.get(kind, 0) + 1
            self.bytes_sent[kind] = self.bytes_sent.get(kind, 0) + num_bytes

    def __repr__(self) -> str:
        return f"Trace(calls={self.calls}, bytes_sent={self.bytes_sent})"


# [Note: traces are process wide] The backward pass may run in autograd's own threads, so neither
# a thread-local nor a context variable would see it. The tuple is replaced, never changed.
_open: tuple[Trace, ...] = ()
_open_lock = threading.Lock()


@contextmanager
def trace(only_this_thread: bool = False) -> Iterator[Trace]:
    """Count the communication of this process while the block runs; traces may be nested.

    Args:
        only_this_thread: Leave out what other threads send. The backward pass may run in others.

    Example:
        >>> with trace() as counted:
        ...     pass
        >>> counted.total_calls, counted.total_bytes
        (0, 0)
    """
    global _open
    counted = Trace(threading.get_ident() if only_this_thread else None)
    with _open_lock:
        _open = (*_open, counted)
    try:
        yield counted
    finally:
        with _open_lock:
            _open = tuple(other for other in _open if other is not counted)


def count(kind: TraceKind, num_bytes: int) -> None:
    """Report one operation to every open trace."""
    for counted in _open:
        counted._add(kind, num_bytes)
