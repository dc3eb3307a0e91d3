# SPDX-License-Identifier: Apache-2.0
"""GraphServer: one host's parts of a graph, in memory that its trainers share."""

from __future__ import annotations

import os
from typing import Any

from ..store import TableServer, WireMessage
from ._host_graph import GraphHandlers, load_parts
from .saving import RestoredTables, restore_tables


class GraphServer:
    """The server of one host. It answers, in threads, until `stop` is called.

    Args:
        number: Of the host.
        num_hosts: Number of hosts; each has one server, and a run of the parts.
        part_config: The JSON of the partition.
        token: What trainers must know; at least 16 characters.
        host: Address to listen on.
        port: 0 for a free one.
        directory: Where shared memory goes; by default ``/dev/shm``.
        restore: A folder of `save_checkpoint`, from whose newest checkpoint persistent tensors are
            taken, and features that were written to; it may have no checkpoint yet.
        **options: ``certificate`` and ``max_message``, as for `graphshard.store.MessageServer`.

    Raises:
        PartitionFormatError: The partition is damaged.
        CheckpointError: What is to be restored is damaged, or of another graph.
        ValueError: There are more hosts than parts, or the token is too short.
        OSError: There is no room, or the address is in use.

    Attributes:
        address: ``host:port``.
        restored: What was restored, a `RestoredTables`; None if nothing was.
    """

    def __init__(
        self,
        number: int,
        num_hosts: int,
        part_config: str | os.PathLike[str],
        token: str,
        host: str = "127.0.0.1",
        port: int = 0,
        directory: str | os.PathLike[str] | None = None,
        *,
        restore: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        if not 0 <= number < num_hosts:
            raise ValueError(f"the number of a host must be in [0, {num_hosts}) (got {number})")
        self._server = TableServer(number, token, host, port, directory, **options)
        try:
            ids = load_parts(self._server.tables, part_config, num_hosts)
            self.restored: RestoredTables | None = None
            if restore is not None:
                self.restored = restore_tables(self._server.tables, ids, restore)
            self._server.handlers |= {"restored": self._on_restored}
            self._server.handlers |= GraphHandlers(self._server.tables, ids).handlers()
            self._server.start()
        except BaseException:
            self._server.stop()
            raise
        self.address = self._server.address

    def _on_restored(self, request: WireMessage) -> WireMessage:
        """From which checkpoint this host's rows are."""
        found = self.restored
        fields = {} if found is None else {"digest": found.digest, "step": found.step}
        return WireMessage("restored", fields)

    def stop(self) -> None:
        """Stop answering, and free the memory."""
        self._server.stop()
