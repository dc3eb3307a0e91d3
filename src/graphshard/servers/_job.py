# SPDX-License-Identifier: Apache-2.0
"""Job: the cluster that this process works on, and how rows of each kind are spread over it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .._base.ranges import RangeMap
from ..comm import agree, barrier, come_together, share_error
from ..comm.collectives import all_gather, broadcast_
from ..comm.group import group_state
from ._cluster import Cluster
from ._ip_config import starts_of_hosts
from ._trainer_links import TrainerLinks

SINGLE = "single"
"""The policy of tensors of one row for the whole cluster; the first host has it."""


@dataclass
class Job:
    """What this process knows of its job.

    Args:
        name: Of the job.
        cluster: Its hosts.
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
            policies: The parts of each kind.
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
        """The only policy with so many rows.

        Raises:
            ValueError: There is none, or several.
        """
        found = [policy for policy, parts in self.policies.items() if parts.num_ids == num_rows]
        if len(found) != 1:
            sizes = {policy: parts.num_ids for policy, parts in self.policies.items()}
            raise ValueError(
                f"part_policy must be given: {len(found)} kinds of rows have {num_rows} "
                f"(there are {sizes}); take one from DistGraph.get_node_partition_policy or "
                "get_edge_partition_policy"
            )
        return found[0]

    def share(self, policy: str) -> tuple[int, int]:
        """Ids ``[start, stop)`` that this process works on where all trainers share the work.

        Trainers of a host share its rows; hosts without trainers are taken by others in turn, so
        the shares of all trainers cover all rows once. Collective.
        """
        state, num_hosts = group_state(), self.cluster.num_hosts
        come_together(
            "the trainers' shares of rows",
            "where trainers take rows of their own hosts, all of them ask for their shares; do so "
            "on every rank, or take an even split (force_even=True), which is local",
        )
        here = torch.tensor([self.cluster.here])
        of_ranks = [int(host) for host in all_gather(state, here, "hosts of trainers")]
        trainers = {
            host: [r for r, h in enumerate(of_ranks) if h == host] for host in range(num_hosts)
        }
        starts = self.starts(policy)
        if not all(trainers.values()):  # rows are then everybody's
            total = starts[-1]
            return (
                state.rank * total // state.world_size,
                (state.rank + 1) * total // state.world_size,
            )
        mine = trainers[self.cluster.here]
        begin, size = starts[self.cluster.here], starts[self.cluster.here + 1]
        size -= begin
        place = mine.index(state.rank)
        return begin + place * size // len(mine), begin + (place + 1) * size // len(mine)


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


def on_rank_0(what: Callable[[], object]) -> None:
    """Do something on rank 0; what it raises, all ranks raise. Collective."""
    _on_some(group_state().rank == 0, what)


def on_other_ranks(what: Callable[[], object]) -> None:
    """Do something on all ranks but 0; what one raises, all ranks raise. Collective."""
    _on_some(group_state().rank != 0, what)


def _on_some(takes_part: bool, what: Callable[[], object]) -> None:
    error: Exception | None = None
    if takes_part:
        try:
            what()
        except Exception as caught:
            error = caught
    share_error(error)


def from_rank_0(number: int) -> int:
    """A number of rank 0, on all ranks. Collective."""
    payload = torch.tensor([number], dtype=torch.int64)
    found: Tensor = broadcast_(group_state(), payload, 0)
    return int(found[0])


def agree_on(value: str, what: str) -> None:
    """Raise on all ranks unless they mean the same. Collective."""
    agree(value, what)


def wait_for_trainers() -> None:
    """Return once all trainers are here. Collective."""
    barrier()
