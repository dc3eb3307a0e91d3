# SPDX-License-Identifier: Apache-2.0
"""torchrun, as ``graphshard launch`` starts it on each host: its store listens at one address.

torchrun's own rendezvous of hosts that are known beforehand ("static") has the store of host 0
listen on every address of that host, and asks for no token. Here it listens at the address by which
the job knows the host, which with ``--local`` is 127.0.0.1. All ranks' process groups use that
store, so nothing else of torch's listens elsewhere.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.run import main as torchrun

from ...comm.rendezvous import host_store
from ._host_agent import TORCHRUN_VARIABLE

BACKEND = "graphshard"
_TIMEOUT_SECONDS = 600


def main(arguments: Sequence[str]) -> None:
    """Run torchrun; ``--rdzv-backend graphshard --rdzv-conf rank=N`` is what is new."""
    os.environ[TORCHRUN_VARIABLE] = str(os.getpid())
    rendezvous_handler_registry.register(BACKEND, _handler)
    torchrun(list(arguments))


class _Rendezvous(StaticTCPRendezvous):
    def get_backend(self) -> str:
        return BACKEND

    def next_rendezvous(self) -> RendezvousInfo:
        if self.rank == 0 and self._store is None:
            self._store, _ = host_store(
                self.master_addr, self.master_port, self.world_size, self.timeout
            )
        return super().next_rendezvous()


def _handler(parameters: RendezvousParameters) -> RendezvousHandler:
    address, port = parse_rendezvous_endpoint(parameters.endpoint, -1)
    return _Rendezvous(
        address,
        port,
        int(parameters.config["rank"]),
        parameters.max_nodes,
        parameters.run_id,
        _TIMEOUT_SECONDS,
    )
