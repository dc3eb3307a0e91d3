# SPDX-License-Identifier: Apache-2.0
"""Job: the cluster that this process works on, and how rows of each kind are spread over it.

`initialize` is how a trainer finds the servers of its job.

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .._base.ranges import RangeMap
from ..comm import barrier, come_together, rank, world_size
from ..comm.collectives import all_gather, broadcast_, shared_errors
from ..comm.group import group_state
from ._cluster import Cluster, ServedHost
from ._ip_config import even_share, read_ip_config, starts_of_hosts
from ._message_stream import WireMessage
from ._trainer_links import TrainerLinks
from .rpc import MessageClient, read_token

SINGLE = "single"
"""The policy of tensors of one row for the whole cluster; the first host has it."""


@dataclass
class Job:
    """What this process knows of its job.

    Args:
        policies: How rows are spread, by ``node~TYPE`` or ``edge~SRC:REL:DST``: the ids of parts.
        destinations: Policy of the edges of each relation to that of the nodes they enter.
        num_anonymous: Tensors without a name that were made.
        run_id: Of this run of trainers, which those tensors are called by; 0 before the first one.
    """

    name: str
    cluster: Cluster
    policies: dict[str, RangeMap] = field(default_factory=dict)
    destinations: dict[str, str] = field(default_factory=dict)
    num_anonymous: int = 0
    run_id: int = 0
    _links: TrainerLinks | None = field(default=None, init=False, repr=False)

    def links(self) -> TrainerLinks:
        """Streams to the other trainers, of which there are some. Collective at first."""
        state = group_state()
        if self._links is None or self._links.state is not state:
            self._close_links()
            self._links = TrainerLinks(state, self.cluster.server_address())
        return self._links

    def close(self) -> None:
        """End the connections."""
        self._close_links()
        self.cluster.close()

    def _close_links(self) -> None:
        links, self._links = self._links, None
        if links is not None:
            links.close()

    def add_policies(
        self, policies: Mapping[str, RangeMap], destinations: Mapping[str, str] | None = None
    ) -> None:
        """Learn how rows of some kinds are spread.

        Args:
            destinations: Kind of the rows of edges to that of the nodes they enter.

        Raises:
            ValueError: Another graph of the job has a kind of that name and another size.
        """
        for policy, parts in policies.items():
            if self.policies.setdefault(policy, parts) != parts:
                raise ValueError(
                    f"{policy!r} is spread as {self.policies[policy].starts} in one graph of this "
                    f"job and as {parts.starts} in another; give their types different names"
                )
        for policy, nodes in (destinations or {}).items():
            if self.destinations.setdefault(policy, nodes) != nodes:
                raise ValueError(
                    f"{policy!r} is of edges into {self.destinations[policy]!r} in one graph of "
                    f"this job and into {nodes!r} in another; give their types different names"
                )

    def starts(self, policy: str) -> tuple[int, ...]:
        """First id of each host, and the number of ids."""
        if policy == SINGLE:
            return (0, *[1] * self.cluster.num_hosts)
        if policy not in self.policies:
            raise ValueError(
                f"unknown policy {policy!r}; there are {', '.join(sorted(self.policies)) or 'none'}"
            )
        return starts_of_hosts(self.policies[policy].starts, self.cluster.num_hosts)

    def policy_of_size(self, num_rows: int) -> str:
        """The only policy with so many rows; ValueError if there is none, or several."""
        policies = [policy for policy, parts in self.policies.items() if parts.num_ids == num_rows]
        if len(policies) != 1:
            sizes = {policy: parts.num_ids for policy, parts in self.policies.items()}
            raise ValueError(
                f"part_policy must be given: {len(policies)} kinds of rows have {num_rows} "
                f"(there are {sizes}); take one from DistGraph.get_node_partition_policy or "
                "get_edge_partition_policy"
            )
        return policies[0]

    def share(self, policy: str, number: int | None = None) -> tuple[int, int]:
        """Ids ``[start, stop)`` that a trainer works on where all trainers share the work.

        Trainers of a host share its rows; hosts without trainers are taken by others in turn, so
        the shares of all trainers cover all rows once. Collective.

        Args:
            number: Which trainer; None is this process.
        """
        state = group_state()
        trainer = state.rank if number is None else number
        come_together(
            "the trainers' shares of rows",
            "where trainers take rows of their own hosts, all of them ask for their shares; do so "
            "on every rank, or take an even split (force_even=True), which is local",
        )
        here, starts = self.cluster.here, self.starts(policy)
        gathered = all_gather(state, torch.tensor([here]), "hosts of trainers")
        hosts = [int(host) for host in gathered]
        if len(set(hosts)) < self.cluster.num_hosts:  # rows are then everybody's
            return even_share(trainer, state.world_size, starts[-1])
        there = hosts[trainer]
        before, size = hosts[:trainer].count(there), starts[there + 1] - starts[there]
        start, stop = even_share(before, hosts.count(there), size)
        return starts[there] + start, starts[there] + stop


_jobs: list[Job] = []


def set_job(job: Job | None) -> None:
    """Make ``job`` the one that `current_job` gives; None for none."""
    _jobs[:] = [] if job is None else [job]


def has_job() -> bool:
    """Whether there is one."""
    return bool(_jobs)


def current_job() -> Job:
    """The job of this process.

    Raises:
        RuntimeError: There is none yet.
    """
    if not _jobs:
        raise RuntimeError(
            "there is no cluster yet; call graphshard.servers.initialize(ip_config) in a "
            "launched script, or make a DistGraph with part_config"
        )
    return _jobs[0]


def on_rank_0(action: Callable[[], object]) -> None:
    """Do something on rank 0; what it raises, all ranks raise. Collective."""
    with shared_errors():
        if rank() == 0:
            action()


def from_rank_0(number: int) -> int:
    """A number of rank 0, on all ranks. Collective."""
    payload = torch.tensor([number], dtype=torch.int64)
    return int(broadcast_(group_state(), payload, 0)[0])


# ---------------------------------------------------------------------------- how a trainer joins

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
    refuse_graphbolt(use_graphbolt)
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


def refuse_graphbolt(use_graphbolt: bool) -> None:
    """Raise NotImplementedError if DGL's other sampling is asked for."""
    if use_graphbolt:
        raise NotImplementedError("use_graphbolt=True is not offered; leave it out")


def _check_restored(cluster: Cluster) -> None:
    """Warn if the hosts' rows are of different checkpoints."""
    restored = [answer.fields for answer in cluster.ask_all(WireMessage("restored"))]
    if len({str(fields.get("digest")) for fields in restored}) > 1:
        steps = [
            f"host {n}: step {fields.get('step', 'none')}" for n, fields in enumerate(restored)
        ]
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
    barrier()


def refuse_several_without_servers(what: str) -> None:
    """Raise RuntimeError where there are several trainers: each would have rows of its own."""
    if world_size() > 1:
        raise RuntimeError(
            f"{what} works standalone, and there are {world_size()} trainers, each of which would "
            f"have rows of its own; start servers with graphshard serve, and set {HOST}"
        )
