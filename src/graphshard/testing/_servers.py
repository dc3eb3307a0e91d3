# SPDX-License-Identifier: Apache-2.0
"""LocalServers: the graph servers of one or several hosts, in threads of this process."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from types import TracebackType

from .._base.files import TemporaryFolder
from ..servers import GraphServer


class LocalServers:
    """Graph servers on this machine for trainers that `run_ranks` starts, as on a cluster.

    Each server has the parts of one host, is in threads of this process, and listens on 127.0.0.1.
    They are up when this returns, and end with `stop` or at the end of a ``with`` block::

        with LocalServers("parts/cora.json", num_hosts=2) as servers:
            run_ranks(train, 2, servers=servers)

    Args:
        part_config: The JSON of the partition.
        num_hosts: Number of hosts; at most the number of parts.

    Raises:
        PartitionFormatError: The partition is damaged.
        ValueError: There are more hosts than parts.
    """

    def __init__(self, part_config: str | os.PathLike[str], num_hosts: int = 1) -> None:
        if num_hosts < 1:
            raise ValueError(f"num_hosts must be at least 1 (got {num_hosts})")
        self._token = secrets.token_hex()
        self._servers: list[GraphServer] = []
        self._folder = TemporaryFolder()
        try:
            for host in range(num_hosts):
                self._servers.append(GraphServer(host, num_hosts, part_config, self._token))
        except BaseException:
            self.stop()
            raise
        lines = [server.address.replace(":", " ") for server in self._servers]
        self._ip_config = Path(self._folder.path) / "ip_config.txt"
        self._ip_config.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def environment(self, rank: int, world_size: int) -> dict[str, str]:
        """The variables by which a trainer finds the servers, and which host is its own."""
        return {
            "GRAPHSHARD_HOST": str(rank * len(self._servers) // world_size),
            "GRAPHSHARD_IP_CONFIG": str(self._ip_config),
            "GRAPHSHARD_TOKEN": self._token,
        }

    def stop(self) -> None:
        """Stop answering, and free the memory."""
        while self._servers:
            self._servers.pop().stop()
        self._folder.cleanup()

    def __enter__(self) -> LocalServers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
