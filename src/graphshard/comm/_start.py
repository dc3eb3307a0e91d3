# SPDX-License-Identifier: Apache-2.0
"""initialize_comms, shutdown_comms: from nothing to a process group that is watched, and back.

::

    store      torchrun's, or one that rank 0 hosts, or the caller's
      │ 1 every rank writes that it has arrived and waits for the others: who is missing is known
      │ 2 rank 0 starts the hub and writes where it is; everyone connects (the watch)
      │ 3 the process group is made over the same store
      v
    default process group, with timeout, payload device and watch in its GroupState

Each start uses keys of its own, so a store can serve several starts.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from .._memory import release_memory
from ..errors import RankError
from ._address import own_address
from ._failure import first_line
from ._group import (
    DEFAULT_TIMEOUT,
    GroupState,
    forget,
    forget_watches,
    group_state,
    is_initialized,
    registered,
)
from ._hub import Hub
from ._watch import Watch

DEFAULT_PORT = 1234

_MAX_TEXT = 1000


def initialize_comms(
    rank: int | None = None,
    world_size: int | None = None,
    master_ip_address: str | None = None,
    backend: str = "gloo",
    comm_device: torch.device | str | None = None,
    master_port_number: int = DEFAULT_PORT,
    timeout: timedelta | float = DEFAULT_TIMEOUT,
    *,
    store: dist.Store | None = None,
) -> None:
    """Make the default process group; every rank must call.

    Under ``torchrun`` no argument is needed. Elsewhere give rank, world size and the address of
    rank 0's host (`nfs_ip_init` finds it through a shared file).

    Besides the process group there is one more connection from each rank to rank 0, by which
    ranks learn of each other's failures. It uses any free port, on the loopback interface if
    all ranks are on one host, else on the interfaces of rank 0's host.

    Args:
        rank: This process's number; None takes ``RANK`` from the environment.
        world_size: Number of processes; None takes ``WORLD_SIZE``.
        master_ip_address: Address of rank 0's host; None takes ``MASTER_ADDR``, and then the
            port from ``MASTER_PORT``.
        backend: "gloo", "nccl", "mpi", or another backend that torch knows.
        comm_device: Where data is put to be sent: "cpu" with gloo also for CUDA tensors. None
            chooses by backend.
        master_port_number: Port on which rank 0 hosts the store.
        timeout: The longest that any wait may take, also this one: seconds or a timedelta.
        store: Use this store in place of one that is made; then no address is needed.

    Raises:
        ValueError: An argument is out of range, or missing also in the environment.
        RuntimeError: There is a process group already, or the backend is not in this torch.
        RankError: Some ranks did not arrive in time; names them.
    """
    if is_initialized():
        raise RuntimeError(
            "there is a default process group already; call shutdown_comms() before another "
            "initialize_comms(), or use the group as it is"
        )
    limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=float(timeout))
    if limit <= timedelta(0):
        raise ValueError(f"timeout must be more than 0 s (got {limit.total_seconds()} s)")
    device = None if comm_device is None else torch.device(comm_device)
    _check_backend(backend, device)
    if backend == "mpi":
        _start_mpi(rank, world_size, limit, device)
        return
    rank = _from_environment("rank", "RANK", rank)
    world_size = _from_environment("world_size", "WORLD_SIZE", world_size)
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(
            f"rank must be in [0, world_size) (got rank {rank}, world_size {world_size})"
        )
    address = master_ip_address
    if store is None:
        store, address = _make_store(rank, world_size, address, master_port_number, limit)
    store = _arrive(store, rank, world_size, limit)
    watch = _start_watch(store, rank, world_size, address, limit)
    try:
        with _start_errors(rank, world_size, watch, limit):
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("group", store),
                rank=rank,
                world_size=world_size,
                timeout=limit,
            )
    except BaseException:
        if watch is not None:
            watch.close()
        raise
    _keep(limit, device, watch)


def shutdown_comms() -> None:
    """Leave the process group and stop the watch; nothing happens where there is no group.

    Memory that was kept for messages and results goes back to the system.

    Raises:
        RankError: A rank did not take in time what it had been sent. The group is gone all the
            same.
    """
    if not is_initialized():
        return
    state = group_state()
    states = registered()
    late: set[int] = set()
    deadline = time.monotonic() + state.timeout.total_seconds()
    for each in states:
        if each.shared is not None:
            failed = each.watch is not None and each.watch.given_up()
            unread = each.shared.leave(0.0 if failed else deadline - time.monotonic())
            late |= set() if failed else {each.members[reader] for reader in unread}
    me, seconds = state.members[state.rank], state.timeout.total_seconds()
    watch, state.watch = state.watch, None
    if watch is not None:
        watch.close()
    dist.destroy_process_group()  # and with it all others
    for each in states:
        forget(each)
    release_memory()
    if late:
        raise RankError(
            f"rank {me}: shutdown_comms waited {seconds:g} s for ranks {sorted(late)} to take what "
            "they had been sent: they are stopped, or have ended without shutdown_comms()",
            sorted(late),
        )


@contextmanager
def guard() -> Iterator[None]:
    """Run a rank's program; if it raises, tell the other ranks why before the error goes on.

    Without it they learn that the rank is gone, but not the reason.

    Example:
        >>> with guard():
        ...     result = 1 + 1
    """
    try:
        yield
    except SystemExit as error:
        if error.code not in (None, 0):
            report_failure(error)
        raise
    except BaseException as error:
        report_failure(error)
        raise


def report_failure(error: BaseException) -> None:
    """Tell the other ranks that this one fails, and why.

    What they wait for ends with a `RankError` that shows this error. A `RankError` itself is not
    reported: its cause lies with another rank, and is known.
    """
    if isinstance(error, RankError) or not is_initialized():
        return
    watch = group_state().watch
    if watch is not None:
        text = str(error).strip()[:_MAX_TEXT]
        watch.report(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def _keep(timeout: timedelta, device: torch.device | None, watch: Watch | None) -> None:
    state: GroupState = group_state()
    state.timeout, state.comm_device, state.watch = timeout, device, watch


def _check_backend(backend: str, device: torch.device | None) -> None:
    if backend == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
        raise RuntimeError(
            "backend 'nccl' needs a CUDA device and a torch built with NCCL; use backend='gloo', "
            "which also moves CUDA tensors, through host memory"
        )
    if backend == "mpi" and not dist.is_mpi_available():
        raise RuntimeError(
            "backend 'mpi' needs a torch that was built from source with MPI, and this one was "
            "not; use backend='gloo', or 'nccl' for CUDA tensors"
        )
    if device is not None and backend == "nccl" and device.type != "cuda":
        raise ValueError(f"comm_device must be a CUDA device with 'nccl' (got {device})")
    if device is not None and backend in ("gloo", "mpi") and device.type != "cpu":
        raise ValueError(f"comm_device must be 'cpu' with {backend!r} (got {device})")


def _start_mpi(
    rank: int | None, world_size: int | None, timeout: timedelta, device: torch.device | None
) -> None:
    """MPI starts its ranks itself and numbers them; there is no store, so there is no watch."""
    dist.init_process_group("mpi", timeout=timeout)
    for name, given, actual in (
        ("rank", rank, dist.get_rank()),
        ("world_size", world_size, dist.get_world_size()),
    ):
        if given is not None and given != actual:
            raise ValueError(f"{name} must be MPI's own, {actual}, or None (got {given})")
    _keep(timeout, device, None)


def _from_environment(name: str, variable: str, value: int | None) -> int:
    if value is not None:
        return int(value)
    text = os.environ.get(variable)
    if text is None:
        raise ValueError(
            f"{name} was not given and the environment has no {variable}; pass {name}=, or start "
            "the program with torchrun"
        )
    return int(text)


def _make_store(
    rank: int, world_size: int, address: str | None, port: int, timeout: timedelta
) -> tuple[dist.Store, str]:
    """The store of the launcher, or one that rank 0 hosts; and the address of rank 0's host."""
    if address is None:
        address = os.environ.get("MASTER_ADDR")
        if address is None:
            raise ValueError(
                "master_ip_address was not given and the environment has no MASTER_ADDR; pass "
                "master_ip_address=, or start the program with torchrun"
            )
        port = int(os.environ.get("MASTER_PORT", port))
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    hosting = rank == 0 and not agent
    try:
        store: dist.Store = dist.TCPStore(
            address, port, world_size, hosting, timeout=timeout, wait_for_workers=False
        )
    except (RuntimeError, OSError) as error:
        if hosting:
            raise RuntimeError(
                f"rank 0 cannot listen on {address}:{port}: {first_line(error)}; pass another "
                "master_port_number on all ranks"
            ) from error
        raise RankError(
            f"rank {rank}: initialize_comms cannot reach the store at {address}:{port} within "
            f"{timeout.total_seconds():g} s: is rank 0 running there? ({first_line(error)})",
            () if agent else (0,),
        ) from error
    # After a restart by torchrun the store still holds what the ranks wrote before it.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if agent else "0"
    return dist.PrefixStore(f"attempt{attempt}", store), address


def _arrive(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> dist.Store:
    """Wait until every rank is here; the store with a prefix that belongs to this start."""
    missing = list(range(world_size))
    try:
        start = store.add(f"graphshard/starts/{rank}", 1)
        store = dist.PrefixStore(f"graphshard/{start}", store)
        store.set(f"arrived/{rank}", _host())
        deadline = time.monotonic() + timeout.total_seconds()
        while missing:
            left = max(0.05, deadline - time.monotonic())
            store.wait([f"arrived/{missing[0]}"], timedelta(seconds=left))
            missing.pop(0)
        return store
    except RuntimeError as error:
        absent = [0]
        with contextlib.suppress(RuntimeError):
            absent = [r for r in missing if not store.check([f"arrived/{r}"])]
        names = f"rank {absent[0]}" if len(absent) == 1 else f"ranks {absent}"
        raise RankError(
            f"rank {rank}: initialize_comms waited {timeout.total_seconds():g} s for {names} of "
            f"{world_size}: not started, or started with another address, port or world_size "
            f"({first_line(error)})",
            absent,
        ) from error


def _start_watch(
    store: dist.Store, rank: int, world_size: int, address: str | None, timeout: timedelta
) -> Watch | None:
    if world_size == 1:
        return None
    _close_watches_in_children()
    hub = None
    if rank == 0:
        hosts = {store.get(f"arrived/{r}") for r in range(world_size)}
        local = len(hosts) == 1
        token = secrets.token_hex(16)
        hub = Hub(local, token, world_size)
        known = ["127.0.0.1"] if local else [address, own_address()]
        store.set(
            "watch",
            json.dumps({"hosts": [h for h in known if h], "port": hub.port, "token": token}),
        )
        addresses = [("127.0.0.1", hub.port)]
    try:
        if hub is None:
            store.wait(["watch"], timeout)
            found = json.loads(store.get("watch"))
            token = found["token"]
            addresses = [(host, found["port"]) for host in found["hosts"]]
        return Watch(addresses, token, rank, world_size, hub)
    except (RuntimeError, OSError) as error:
        if hub is not None:
            hub.close()
        raise RankError(
            f"rank {rank}: initialize_comms lost rank 0, which had arrived: {first_line(error)}",
            [0],
        ) from error


@contextmanager
def _start_errors(
    rank: int, world_size: int, watch: Watch | None, timeout: timedelta
) -> Iterator[None]:
    """Explain a failure while the backend connects the ranks."""
    start = time.monotonic()
    name = "initialize_comms"
    others = [r for r in range(world_size) if r != rank]
    if watch is not None:
        watch.enter("start", name, 0, others)
    try:
        yield
    except RuntimeError as error:
        waited = time.monotonic() - start
        if watch is None:
            raise
        verdict = watch.diagnose(name, others, waited >= timeout.total_seconds() - 0.2)
        if verdict is None:
            raise
        raise RankError(
            f"rank {rank}: {name} failed after {waited:.1f} s: {verdict.text} (the backend said: "
            f"{first_line(error)})",
            verdict.ranks,
        ) from error
    finally:
        if watch is not None:
            watch.leave()


@functools.cache
def _close_watches_in_children() -> None:
    """From now on, close the watch's connections in forked children, once per process."""
    os.register_at_fork(after_in_child=forget_watches)


def _host() -> str:
    """Equal on two ranks only if they can reach each other on the loopback interface."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/net"))
    return " ".join(parts)
