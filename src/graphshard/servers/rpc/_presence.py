# SPDX-License-Identifier: Apache-2.0
"""PresentClients: how a server learns that a client is there, has left, or is gone.

A client keeps one stream for this alone and says on it, every few seconds, that it is there. It is
gone when that stream ends without a word. The kernel ends it when the process has ended, however it
ended, and about a minute after the last sign of a host that lost power or cannot be reached.

Silence alone means nothing: a process that is stopped, or that computes for minutes in a function
that holds the interpreter, goes on with what it has. It is logged, and nothing is released.

What a client had is released when it is gone. If it speaks again, as after its network was away, it
gets a `GoneClientError` for whatever it asks, because its tensors may be deleted by then.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...errors import MessageError
from ._message import WireMessage

BEAT_SECONDS = 5.0
SILENT_SECONDS = 60.0
HERE, LEAVE = "here", "leave"
_MAX_LABEL = 200

_log = logging.getLogger("graphshard.server")


class GoneClientError(Exception):
    """A client asks for something after what it had was released."""


@dataclass
class _Client:
    label: str
    heard: float
    stream: object
    is_silent: bool = False


class PresentClients:
    """The clients of a server.

    Args:
        on_gone: Called with the id of a client that has left or is gone; to release what it had.
        silent_seconds: After how long without a word it is logged that a client is silent.
    """

    def __init__(
        self, on_gone: Callable[[str], object], silent_seconds: float = SILENT_SECONDS
    ) -> None:
        self._on_gone, self._silent_seconds = on_gone, silent_seconds
        self._clients: dict[str, _Client] = {}
        self._gone: dict[str, str] = {}  # and why; ids are random and never used again
        self._lock, self._stopped = threading.Lock(), threading.Event()
        self._watch = threading.Thread(target=self._run, name="graphshard-presence", daemon=True)
        self._watch.start()

    def labels(self) -> list[str]:
        """Who is there."""
        with self._lock:
            return sorted(client.label for client in self._clients.values())

    def here(self, client: str, label: Any, stream: object) -> WireMessage:
        """A client says that it is there, on a stream that nothing else is said on.

        Raises:
            MessageError: It does not say who it is.
        """
        is_label = isinstance(label, str) and 0 < len(label) <= _MAX_LABEL and label.isprintable()
        if not client or not is_label:
            raise MessageError("a client that announces itself has an id and a label")
        with self._lock:
            known = self._clients.get(client)
            self._clients[client] = _Client(label, time.monotonic(), stream)
        if known is not None and known.is_silent:
            _log.info("%s is heard again", label)
        if known is None:
            _log.info("%s has come", label)
        return WireMessage("ok")

    def check(self, client: str) -> None:
        """Raise if a client is gone, and release what it was given since.

        Raises:
            GoneClientError: It is gone; says why.
        """
        why = self._gone.get(client)
        if why is not None:
            self._on_gone(client)
            raise GoneClientError(why)

    def leave(self, client: str) -> WireMessage:
        """A client says that it leaves."""
        self._remove(client, None)
        return WireMessage("ok")

    def ended(self, client: str, stream: object) -> None:
        """A stream has ended; if it was the one of a client's presence, the client is gone."""
        with self._lock:
            known = self._clients.get(client)
            if known is None or known.stream is not stream:
                return
        self._remove(client, "its connection ended without a word")

    def stop(self) -> None:
        """Look no longer."""
        self._stopped.set()

    def _remove(self, client: str, why: str | None) -> None:
        with self._lock:
            known = self._clients.pop(client, None)
            if known is None or self._stopped.is_set():
                return
            if why is not None:
                self._gone[client] = (
                    f"has released what {known.label} held, because {why}; its tensors may be gone "
                    "or changed by others: start the job again from its last checkpoint"
                )
        if why is None:
            _log.info("%s has left", known.label)
        else:
            _log.warning("%s is gone: %s", known.label, why)
        self._on_gone(client)

    def _run(self) -> None:
        while not self._stopped.wait(min(BEAT_SECONDS, self._silent_seconds / 4)):
            late = time.monotonic() - self._silent_seconds
            with self._lock:
                clients = self._clients.values()
                silent = [c for c in clients if c.heard < late and not c.is_silent]
                for client in silent:
                    client.is_silent = True
            for client in silent:
                _log.warning(
                    "nothing was heard of %s for %g s; what it holds stays while its connection "
                    "lasts",
                    client.label,
                    self._silent_seconds,
                )
