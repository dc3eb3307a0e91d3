# SPDX-License-Identifier: Apache-2.0
"""TableServer: the tables of a host, and what answers requests for them."""

from __future__ import annotations

import os
from typing import Any

from ._tables import HostTables
from .rpc import Handler, MessageServer, WireMessage


class TableServer:
    """The server of one host. It answers once it is started, when its tables are filled.

    Args:
        number: Of the host.
        token: What clients must know.
        host: Address to listen on.
        port: 0 for a free one.
        directory: Where shared memory goes; see `HostTables`.
        **options: As for `MessageServer`.

    Attributes:
        tables: Its rows.
        handlers: What answers requests, by op; more may be added before it starts.
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
        self.handlers: dict[str, Handler] = self.tables.handlers() | {"ping": _on_ping}
        self._options = {
            "token": token,
            "host": host,
            "port": port,
            "on_client_gone": self.tables.release_all,
            **options,
        }
        self._server: MessageServer | None = None

    def start(self) -> None:
        """Listen, and answer in threads.

        Raises:
            ValueError: The token is too short.
            OSError: The address is in use, or none of this machine.
        """
        self._server = MessageServer(self.handlers, **self._options)

    @property
    def address(self) -> str:
        """``host:port``, once it has started."""
        assert self._server is not None
        return f"{self._server.host}:{self._server.port}"

    def num_clients(self) -> int:
        """How many clients have announced themselves and are there."""
        return 0 if self._server is None else len(self._server.clients.labels())

    def stop(self) -> None:
        """Stop answering, and free the tables."""
        if self._server is not None:
            self._server.stop()
        self.tables.close()


def _on_ping(request: WireMessage) -> WireMessage:
    return WireMessage("ok")
