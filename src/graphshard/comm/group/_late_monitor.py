# SPDX-License-Identifier: Apache-2.0
"""join_late: a failure monitor for a default group that the program made by torch.distributed.

`initialize_comms` starts the monitors before the group, where all ranks wait for each other anyway.
Here no rank may wait for another: a rank may never use this package again, or at all. So each rank
does what it can at its first operations, through the store of the group, and leaves the rest for
the next one:

1. every rank writes on which network it is;
2. rank 0, once it knows the network of all, starts the server where they can reach it and as few
   others as possible, and writes where that is;
3. every rank connects, once it reads that.

Operations are collective, so after three of them all have done so. Until then, and where the group
has no store, errors carry what the backend said.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading

import torch.distributed as dist

from ._address import is_loopback, listen_for_others, own_address
from ._machine import network_name
from ._meeting import default_store
from ._monitor import FailureMonitor
from ._monitor_server import MonitorServer
from ._state import GroupState, close_in_children

_MOST_LOOKS = 100
_KEY = "graphshard/monitor"
_one_at_a_time = threading.Lock()


def join_late(state: GroupState) -> None:
    """Go on towards a monitor for the default group, without waiting."""
    if not _one_at_a_time.acquire(blocking=False):  # threads of loaders come here, too
        return
    try:
        if state.monitor is None:
            _look(state)
    finally:
        _one_at_a_time.release()


def _look(state: GroupState) -> None:
    store = default_store()
    if store is None:
        state.looks_for_monitor = _MOST_LOOKS
        return
    state.looks_for_monitor += 1
    if state.looks_for_monitor >= _MOST_LOOKS:  # others do without this package
        return
    try:
        _go_on(state, store)
    except (RuntimeError, OSError, ValueError):  # then there is none: nothing depends on it
        state.looks_for_monitor = _MOST_LOOKS


def wants_monitor(state: GroupState) -> bool:
    """Whether `join_late` may still find one."""
    return (
        state.world_size > 1
        and not state.made_here
        and state.looks_for_monitor < _MOST_LOOKS
        and state.group is dist.group.WORLD
        and state.process == os.getpid()
    )


def _go_on(state: GroupState, store: dist.Store) -> None:
    if state.looks_for_monitor == 1:
        store.set(f"{_KEY}/network/{state.rank}", network_name())
    server = None
    if state.rank == 0:
        networks = [f"{_KEY}/network/{r}" for r in range(state.world_size)]
        if not store.check(networks):
            return
        is_local = len({store.get(key) for key in networks}) == 1
        host = "127.0.0.1" if is_local else own_address()
        if not is_local and is_loopback(host):
            state.looks_for_monitor = _MOST_LOOKS
            return
        listener, host = listen_for_others([host], 0)
        token, size = secrets.token_hex(16), state.world_size
        close_in_children()
        server = MonitorServer(listener, token, size)
        found = {"host": host, "port": server.address[1], "token": token}
        store.set(_KEY, json.dumps(found))
    elif not store.check([_KEY]):
        return
    found = json.loads(store.get(_KEY))
    close_in_children()
    try:
        place = found["host"], found["port"]
        state.monitor = FailureMonitor(place, found["token"], state.rank, state.world_size, server)
    except OSError:
        if server is not None:
            with contextlib.suppress(OSError):
                server.close()
        raise
