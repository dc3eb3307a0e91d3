# SPDX-License-Identifier: Apache-2.0
"""initialize: how a trainer finds the servers of its job.

``graphshard serve`` starts the server of a host, ``graphshard launch`` those of all hosts. Trainers
on a host get its number, and where to find the rest, in the environment:

=============================  ===================================================================
``GRAPHSHARD_HOST``            number of the host, its line in ip_config; without it a process
                               works on its own (standalone)
``GRAPHSHARD_IP_CONFIG``       file of the hosts, set by ``graphshard launch``; it counts before
                               the one that `initialize` is given
``GRAPHSHARD_TOKEN_FILE``      a file with the token, that no other user may read
``GRAPHSHARD_TOKEN``           the token itself, where there is no file
``GRAPHSHARD_TLS_CERTIFICATE``  certificates to check the servers' with; without it there is no TLS
=============================  ===================================================================
"""

from __future__ import annotations

import os
import socket
import warnings
from pathlib import Path
from typing import Any

from ..comm import barrier as comm_barrier
from ..comm import come_together, rank, world_size
from ._cluster import Cluster, ServedHost
from ._ip_config import read_ip_config
from ._job import Job, current_job, has_job, set_job
from .rpc._client import MessageClient
from .rpc._message import WireMessage
from .token import read_token

HOST = "GRAPHSHARD_HOST"
IP_CONFIG = "GRAPHSHARD_IP_CONFIG"
CERTIFICATE = "GRAPHSHARD_TLS_CERTIFICATE"
_START_SECONDS = 120.0


def initialize(
    ip_config: str | os.PathLike[str] | None = None,
    *,
    num_workers: int = 0,
    max_queue_size: int | None = None,
    net_type: str | None = None,
    num_worker_threads: int = 1,
    use_graphbolt: bool = False,
    timeout: float = 60.0,
) -> None:
    """Connect this trainer to the servers of its job; call it before anything of a `DistGraph`.

    A process without servers (standalone: no ``GRAPHSHARD_HOST`` in the environment) needs no
    connection; `DistGraph` then loads the graph itself, from ``part_config``.

    Args:
        ip_config: File of the hosts, one address a line; see `read_ip_config`. Where
            ``GRAPHSHARD_IP_CONFIG`` is set, as ``graphshard launch`` does, its hosts are taken.
        num_workers: Accepted for DGL's scripts: batches are made ahead by threads.
        max_queue_size: Accepted for DGL's scripts.
        net_type: Accepted for DGL's scripts.
        num_worker_threads: Accepted for DGL's scripts.
        use_graphbolt: Must be false.
        timeout: Longest wait for an answer of a server, in seconds.

    Raises:
        ValueError: The file, the host's number or the token is none; no file, with servers.
        ServerError: A server cannot be reached, or refuses the token.
        RuntimeError: This process is connected already.
    """
    if use_graphbolt:
        raise NotImplementedError("use_graphbolt=True is not offered; leave it out")
    if HOST not in os.environ:
        return
    if has_job():
        raise RuntimeError("this process is connected already; call initialize once")
    ip_config = os.environ.get(IP_CONFIG, ip_config)
    if ip_config is None:
        raise ValueError(
            f"{HOST} is set, so there are servers; pass ip_config, which lists them, or set "
            f"{IP_CONFIG}"
        )
    hosts = read_ip_config(ip_config)
    here = _host_number(len(hosts))
    token, certificate = read_token(), os.environ.get(CERTIFICATE)
    served = []
    for number, host in enumerate(hosts):
        connection = MessageClient(str(host), token, number, timeout, certificate)
        served.append(ServedHost(connection, may_attach=number == here))
    label = f"rank {os.environ.get('RANK', '0')} (process {os.getpid()} of {socket.gethostname()})"
    for each in served:
        each.connection.wait_until_up(_START_SECONDS)
        each.connection.announce(f"trainer {label}"[:200])
    cluster = Cluster(served, here)
    _check_restored(cluster)
    set_job(Job(Path(ip_config).name, cluster))


def _check_restored(cluster: Cluster) -> None:
    """Warn if the hosts' rows are of different checkpoints."""
    asked = [(number, WireMessage("restored")) for number in range(cluster.num_hosts)]
    found = [answer.fields for answer in cluster.ask(asked)]
    if len({str(fields.get("digest")) for fields in found}) > 1:
        steps = [f"host {n}: step {fields.get('step', 'none')}" for n, fields in enumerate(found)]
        warnings.warn(
            f"the servers were started from different checkpoints ({', '.join(steps)}); call "
            "load_checkpoint to have the rows of one",
            RuntimeWarning,
            stacklevel=3,
        )


def _host_number(num_hosts: int) -> int:
    text = os.environ[HOST]
    if not text.isdecimal() or int(text) >= num_hosts:
        raise ValueError(
            f"{HOST} must be the number of a host, in [0, {num_hosts}) (got {text!r}): its line in "
            "ip_config"
        )
    return int(text)


def exit_client() -> None:
    """End the connections of this process."""
    if has_job():
        current_job().close()
        set_job(None)


def get_num_clients() -> int:
    """Number of trainers."""
    return world_size()


def get_rank() -> int:
    """Number of this trainer."""
    return rank()


def client_barrier() -> None:
    """Return once all trainers are here."""
    come_together("barrier", "all trainers come to a barrier; call it on every rank")
    comm_barrier()


def refuse_several_without_servers(what: Any) -> None:
    """Raise where several processes would each have a graph of their own.

    Raises:
        RuntimeError: There are several trainers.
    """
    if world_size() > 1:
        raise RuntimeError(
            f"{what} works standalone, and there are {world_size()} trainers, each of which would "
            f"have rows of its own; start servers with graphshard serve, and set {HOST}"
        )
