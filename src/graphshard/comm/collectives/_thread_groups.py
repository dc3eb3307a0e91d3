# SPDX-License-Identifier: Apache-2.0
"""ThreadGroups: process groups for threads, so that each communicates beside the main thread.

Collectives of one group must start in the same order on every rank, and threads keep no order
among themselves. So every thread that communicates gets a group of its own over the same ranks:
gloo, in host memory, monitored as its base group is.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..group import THREAD_GROUP, GroupState, forget, group_state, register
from ._agree import agree


class ThreadGroups:
    """One group per purpose, over the ranks of a base group. Making them is collective.

    Args:
        purposes: What each is for; for messages, and equal on all ranks.
        group: The base group; None is the default group. Where it has one rank there is nothing
            to send, and every one is the base group itself.

    Raises:
        NotImplementedError: On every rank, if the base group was started by MPI.
    """

    def __init__(self, purposes: Sequence[str], group: dist.ProcessGroup | None = None) -> None:
        self.cancelled = threading.Event()
        self._closes = True
        self._states: dict[str, GroupState] = {}
        self._base = group
        base = group_state(group)
        if base.world_size == 1:
            return
        if base.backend == "mpi":
            raise NotImplementedError(
                "threads of a loader communicate in gloo groups of their own, which a program "
                "that MPI started cannot make; pass prefetch=0"
            )
        # The name of a group over some of the ranks would be given again, while the store still
        # holds addresses under it. So those are kept until the process has ended.
        self._closes = base.group is dist.group.WORLD
        for purpose in purposes:
            self._states[purpose] = _open(base, purpose, self.cancelled)

    def group(self, purpose: str) -> dist.ProcessGroup | None:
        """The group for a purpose, for one thread at a time."""
        state = self._states.get(purpose)
        return self._base if state is None else state.group

    @property
    def num_operations(self) -> tuple[int, ...]:
        """Operations started so far in each; equal on all ranks that are in step."""
        return tuple(state.num_operations for state in self._states.values())

    @property
    def are_broken(self) -> bool:
        """Whether an operation was left unfinished, so that ranks are not in step any more."""
        return any(state.in_flight for state in self._states.values())

    def cancel(self) -> None:
        """End what threads wait for in the groups, within a moment; they are of no use then."""
        self.cancelled.set()

    def close(self) -> None:
        """Give the groups back. No thread may use them any more; not collective."""
        self.cancel()
        states, self._states = self._states, {}
        for state in states.values() if self._closes else ():
            if state.closed:  # together with the default group
                continue
            with contextlib.suppress(ValueError, AssertionError):  # gone with the default group
                dist.destroy_process_group(state.group)
            forget(state)


Lanes = ThreadGroups
"""The former name of `ThreadGroups`."""


def _open(base: GroupState, purpose: str, cancelled: threading.Event) -> GroupState:
    if base.group is dist.group.WORLD:
        group = dist.new_group(backend="gloo", timeout=base.timeout)
    else:
        # torch names such a group by its ranks and by the number of groups that the process has.
        known = str(len(dist.distributed_c10d._world.pg_names))
        agree(known, "the number of process groups that a process is a member of", base.group)
        group = dist.new_group(
            list(base.members), timeout=base.timeout, backend="gloo", use_local_synchronization=True
        )
    assert isinstance(group, dist.ProcessGroup)
    state = GroupState(
        group=group,
        rank=base.rank,
        world_size=base.world_size,
        members=base.members,
        name=f"{THREAD_GROUP}{group.group_name} for {purpose}",
        backend="gloo",
        timeout=base.timeout,
        comm_device=torch.device("cpu"),
        monitor=base.monitor,
        cancelled=cancelled,
    )
    register(state)
    return state
