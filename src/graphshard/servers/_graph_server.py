# SPDX-License-Identifier: Apache-2.0
"""GraphServer: one host's parts of a graph, in memory that its trainers share."""

from __future__ import annotations

import os
from typing import Any

from ..errors import MessageError
from ._host_graph import GraphHandlers, load_parts
from ._table_server import TableServer
from .rpc._message import WireMessage
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
        **options: ``certificate`` and ``max_message``, as for `graphshard.servers.MessageServer`.

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
            self._origin: dict[str, Any] = {}
            self.restored: RestoredTables | None = None
            if restore is not None:
                self.restored = restore_tables(self._server.tables, ids, restore)
                if self.restored is not None:
                    found = self.restored
                    self._origin = {"digest": found.digest, "step": found.step}
            self._server.handlers |= {"restored": self._on_restored, "loaded": self._on_loaded}
            self._server.handlers |= GraphHandlers(self._server.tables, ids).handlers()
            self._server.start()
        except BaseException:
            self._server.stop()
            raise
        self.address = self._server.address

    def _on_restored(self, request: WireMessage) -> WireMessage:
        """From which checkpoint this host's rows are."""
        return WireMessage("restored", self._origin)

    def _on_loaded(self, request: WireMessage) -> WireMessage:
        """Trainers have loaded a checkpoint on all hosts."""
        digest, step = request.fields.get("digest"), request.fields.get("step")
        if not isinstance(digest, str) or len(digest) > 64 or type(step) is not int:
            raise MessageError("loaded takes the digest and the step of a checkpoint")
        self._origin = {"digest": digest, "step": step}
        return WireMessage("loaded")

    def stop(self) -> None:
        """Stop answering, and free the memory."""
        self._server.stop()
