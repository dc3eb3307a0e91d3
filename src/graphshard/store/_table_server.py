# SPDX-License-Identifier: Apache-2.0
"""TableServer: the tables of a host, and what answers requests for them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ._tables import HostTables
from .wire import Handler, MessageServer, WireMessage


class TableServer:
    """The server of one host.

    Args:
        number: Of the host.
        token: What clients must know.
        host: Address to listen on.
        port: 0 for a free one.
        directory: Where shared memory goes; see `HostTables`.
        options: As for `MessageServer`.
    """

    def __init__(
        self,
        number: int,
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        directory: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        self.tables = HostTables(number, is_shared=True, directory=directory)
        answers = self.tables.handlers() | {"ping": _on_ping}
        try:
            self._server = MessageServer(answers, token, host, port, **options)
        except BaseException:
            self.tables.close()
            raise
        self.address = f"{host}:{self._server.port}"

    def add_handlers(self, handlers: Mapping[str, Handler]) -> None:
        """More requests that it answers, by op; before it starts."""
        self._server.add_handlers(handlers)

    def start(self) -> None:
        """Answer in a thread."""
        self._server.start()

    def serve(self) -> None:
        """Answer in this thread, until `stop`."""
        self._server.serve()

    def stop(self) -> None:
        """Stop answering, and free the tables."""
        self._server.stop()
        self.tables.close()


def _on_ping(request: WireMessage) -> WireMessage:
    return WireMessage("ok")
