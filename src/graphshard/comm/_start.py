# SPDX-License-Identifier: Apache-2.0
"""initialize_comms, shutdown_comms: from nothing to a monitored process group, and back.

::

    store      torchrun's, or one that rank 0 hosts, or the caller's
      │ 1 every rank writes that it has arrived and waits for the others: which ranks are missing is
      │   known, and whether one came twice or from another job (`rendezvous`)
      │ 2 rank 0 starts the monitor server and writes where it is; every rank connects
      │ 3 the process group is made over the same store
      v
    default process group, with timeout, payload device and monitor in its GroupState

Each start uses keys of its own, so a store can serve several starts.

[Note: the end of a group of gloo]
    A thread of gloo that has done an operation releases its tensors a moment later, for which it
    needs the interpreter's lock. The end of the group waits for its threads. Where the last
    reference to the group is that of a `DistributedDataParallel`, which goes while the lock is
    held, both wait for each other for ever; and where the interpreter has gone meanwhile the
    process aborts. Hence a group is not left before its threads have nothing in hand.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from .._base.kernels import release_memory
from .._base.memory import ask_for_large_pages, leave_out_records_of_collectives
from ..errors import RankError
from ._monitor import FailureMonitor, start_monitor
from .address import (
    GLOO_INTERFACE,
    either_name,
    from_environment,
    is_loopback,
    loopback_interface,
    own_address,
)
from .group import (
    DEFAULT_TIMEOUT,
    HOST_BACKENDS,
    GroupState,
    first_line,
    forget,
    group_state,
    is_initialized,
    operation,
    registered,
)
from .rendezvous import answered, check_refused, meet

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
    _rank: int | None = None,
    _world_size: int | None = None,
    _comm_device: torch.device | str | None = None,
) -> None:
    """Make the default process group; every rank must call.

    Under ``torchrun`` no argument is needed. Elsewhere give rank, world size and the address of
    rank 0's host (`nfs_ip_init` finds it through a shared file).

    Besides the process group there is one more connection from each rank to rank 0, by which
    ranks learn of each other's failures. It uses any free port of the address of rank 0's host, or
    of the loopback interface if all ranks are on one host. Then gloo uses that interface, too,
    unless ``GLOO_SOCKET_IFNAME`` names another one.

    Two jobs need two ports. Ranks that come to another job are turned away: with certainty if
    ``GRAPHSHARD_JOB_ID`` (or torchrun) gives each job a name, else as the second with their number,
    which ends both jobs while ranks may still come.

    A default group that the program has made itself, by ``torch.distributed``, is used as it is,
    if it has this rank and this many.

    Tensors of the CPU lie in large pages, where Linux gives these on request, if none was made
    before: torch's THP_MEM_ALLOC_ENABLE is set, unless the environment has it. Where there is no
    GPU torch keeps no records of collectives, which take memory: TORCH_FR_BUFFER_SIZE is set to 0,
    unless the environment has it.

    Args:
        rank: This process's number; None takes ``RANK`` from the environment.
        world_size: Number of processes; None takes ``WORLD_SIZE``.
        master_ip_address: Address of rank 0's host; None takes ``MASTER_ADDR``, and then the
            port from ``MASTER_PORT``.
        backend: "gloo", "nccl", "mpi", or another backend that torch knows. "auto" is "nccl" if
            the current GPU (``torch.cuda.set_device``) of every rank is its alone, else "gloo";
            every rank must pass it. Where torch does not know "ccl" (Intel's oneCCL, which SAR's
            scripts name) gloo takes its place, with a warning.
        comm_device: Where data is put to be sent: "cpu" with gloo also for CUDA tensors, through
            page-locked memory. None chooses by backend; with "nccl", the current GPU.
        master_port_number: Port on which rank 0 hosts the store, at this address alone.
        timeout: The longest that any wait may take, also this one: seconds or a timedelta.
        store: Use this store in place of one that is made; then no address is needed.
        _rank: ``rank``, as SAR names it.
        _world_size: ``world_size``, as SAR names it.
        _comm_device: ``comm_device``, as SAR names it.

    Raises:
        ValueError: An argument is out of range, or missing also in the environment, or the ranks
            differ in the world size, or the program's own group has another rank or size.
        TypeError: An argument was given under both of its names.
        RuntimeError: This function has made a process group already, the backend is not in this
            torch, the port is in use, or this process came to another job.
        RankError: Some ranks did not arrive in time, or came twice; names them.
    """
    ask_for_large_pages()
    leave_out_records_of_collectives()
    rank = either_name("rank", rank, _rank)
    world_size = either_name("world_size", world_size, _world_size)
    comm_device = either_name("comm_device", comm_device, _comm_device)
    if is_initialized():
        _use_group_of_program(rank, world_size)
        return
    if backend == "ccl" and not hasattr(dist.Backend, "CCL"):
        warnings.warn(
            "backend 'ccl' (Intel's oneCCL) is not in this torch, and 'gloo' takes its place; "
            "name 'gloo', or 'nccl' for CUDA devices",
            RuntimeWarning,
            stacklevel=2,
        )
        backend = "gloo"
    limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=float(timeout))
    if limit <= timedelta(0):
        raise ValueError(f"timeout must be more than 0 s (got {limit.total_seconds()} s)")
    device = None if comm_device is None else torch.device(comm_device)
    check_backend(backend, device)
    if backend == "mpi":
        _start_mpi(rank, world_size, limit, device)
        return
    rank = int(from_environment("rank", "RANK") if rank is None else rank)
    size = from_environment("world_size", "WORLD_SIZE") if world_size is None else world_size
    world_size = int(size)
    if world_size < 1 or not 0 <= rank < world_size:
        raise ValueError(
            f"rank must be in [0, world_size) (got rank {rank}, world_size {world_size})"
        )
    store, address = meet(rank, world_size, master_ip_address, master_port_number, limit, store)
    if backend == "auto":
        backend = choose_backend(store, rank, world_size, limit)
    if backend == "nccl" and (device is None or device.index is None):
        # Not whatever is current when something is sent: each thread has a device of its own.
        device = torch.device("cuda", torch.cuda.current_device())
    monitor, is_local = _start_monitor(store, rank, world_size, address, limit)
    # Loaders make groups of gloo beside one of NCCL.
    chosen = _choose_interface() if is_local and backend in ("gloo", "nccl") else None
    try:
        # Functions of this module have the default group as a default argument, taken when it is
        # imported, which torch's optimizers do. Imported later it would hold the group for ever:
        # its threads would run until the interpreter has gone, and abort the process now and then.
        importlib.import_module("torch.distributed.nn.functional")
        ranks = tuple(range(world_size))
        start = GroupState(None, rank, world_size, ranks, "start", backend, limit, monitor=monitor)
        with operation(start, "initialize_comms", 0) if monitor else contextlib.nullcontext():
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("group", store),
                rank=rank,
                world_size=world_size,
                timeout=limit,
            )
    except BaseException:
        _give_back_interface(chosen)
        if monitor is not None:
            monitor.close()
        raise
    state = group_state()
    state.timeout, state.comm_device, state.monitor = limit, device, monitor
    state.made_here, state.interface = True, chosen


def _use_group_of_program(rank: int | None, world_size: int | None) -> None:
    """Check that the default group, made by ``torch.distributed``, is the one asked for."""
    state = group_state()
    if state.made_here:
        raise RuntimeError(
            "there is a default process group already; call shutdown_comms() before another "
            "initialize_comms(), or use the group as it is"
        )
    for name, given in (("rank", rank), ("world_size", world_size)):
        if given not in (None, getattr(state, name)):
            raise ValueError(
                f"the default process group has {name} {getattr(state, name)} (got {given}); pass "
                "what torch.distributed.init_process_group was given, or let initialize_comms make "
                "it"
            )


def shutdown_comms() -> None:
    """Leave the process group and stop the monitor; nothing happens where there is no group.

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
            failed = each.monitor is not None and each.monitor.has_failure
            unread = each.shared.leave(0.0 if failed else deadline - time.monotonic())
            late |= set() if failed else {each.members[reader] for reader in unread}
    me, seconds = state.members[state.rank], state.timeout.total_seconds()
    monitor, state.monitor = state.monitor, None
    if monitor is not None:
        monitor.close()
    _destroy_groups(states, state.backend in HOST_BACKENDS)
    _give_back_interface(state.interface)
    release_memory()
    if late:
        raise RankError(
            f"rank {me}: shutdown_comms waited {seconds:g} s for ranks {sorted(late)} to take what "
            "they had been sent: they are stopped, or have ended without shutdown_comms()",
            sorted(late),
        )


@atexit.register
def _end_with_the_interpreter() -> None:
    """End the threads of groups that the program has not shut down, before the interpreter is gone.

    They may have to release a tensor that Python code has seen, which aborts the process where the
    interpreter has gone. To the other ranks this is the end of the process, as it is without this.
    A program that has failed is left as it is: its groups may wait for ranks that do not come.
    """
    if getattr(sys, "last_type", None) is not None:
        return
    if not is_initialized():  # the program has destroyed a group that it made itself
        left = [each for each in registered() if each.process == os.getpid()]
        for monitor in {each.monitor for each in left}:
            if monitor is not None:
                monitor.close()
        for each in left:
            forget(each)
        if left:
            wait_until_idle()
        return
    state = group_state()
    if state.process != os.getpid() or state.backend not in HOST_BACKENDS:
        return
    states = registered()
    if state.monitor is not None:
        state.monitor.drop()
    _destroy_groups(states, True)


def _destroy_groups(states: Sequence[GroupState], on_host: bool) -> None:
    """End the default group, and with it all others; and their threads, if it is on the host."""
    dist.destroy_process_group()
    for each in states:
        forget(each)
    if on_host:
        wait_until_idle()


@contextlib.contextmanager
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
    monitor = group_state().monitor
    if monitor is not None:
        text = str(error).strip()[:_MAX_TEXT]
        monitor.report(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def _choose_interface() -> str | None:
    """Let gloo listen where only this host can reach it, if the user has not said where.

    It reads the environment whenever a group is made. Else it takes the interface to which the
    host's name leads, if that leads anywhere. `_give_back_interface` takes what this returns.
    """
    name = loopback_interface()
    if name is None or GLOO_INTERFACE in os.environ:
        return None
    os.environ[GLOO_INTERFACE] = name
    return name


def _give_back_interface(name: str | None) -> None:
    if name is not None and os.environ.get(GLOO_INTERFACE) == name:
        del os.environ[GLOO_INTERFACE]


def _start_mpi(
    rank: int | None, world_size: int | None, timeout: timedelta, device: torch.device | None
) -> None:
    """MPI starts its ranks itself and numbers them; there is no store, so there is no monitor."""
    dist.init_process_group("mpi", timeout=timeout)
    state = group_state()
    for name, given in (("rank", rank), ("world_size", world_size)):
        if given not in (None, getattr(state, name)):
            raise ValueError(
                f"{name} must be MPI's own, {getattr(state, name)}, or None (got {given})"
            )
    state.timeout, state.comm_device, state.made_here = timeout, device, True


def _start_monitor(
    store: dist.Store, rank: int, world_size: int, address: str | None, timeout: timedelta
) -> tuple[FailureMonitor | None, bool]:
    """This rank's monitor, unless it is alone; and whether all ranks are on one host."""
    if world_size == 1:
        return None, True
    addresses: list[str] = []
    is_local = False
    try:
        if rank == 0:
            is_local = len({store.get(f"arrived/{r}") for r in range(world_size)}) == 1
            addresses = ["127.0.0.1"] if is_local else _addresses_for_ranks(address)
        else:
            store.wait(["monitor"], timeout)
        monitor, is_local = start_monitor(
            store, "monitor", rank, world_size, addresses, is_local, timeout.total_seconds()
        )
    except (RuntimeError, OSError) as error:
        if rank == 0:
            raise
        raise RankError(
            f"rank {rank}: initialize_comms lost rank 0, which had arrived: {first_line(error)}",
            [0],
        ) from error
    try:
        if rank == 0:  # who was turned away before there was a server could not tell it
            check_refused(store, rank, timeout)
    except RankError as error:
        monitor.report(str(error))
        monitor.close()
        raise
    return monitor, is_local


def _addresses_for_ranks(address: str | None) -> list[str]:
    """Where rank 0 listens for ranks of other hosts, and as few others as possible."""
    own = own_address()
    if address is None:
        return [own]
    return [address] if is_loopback(own) else [address, own]


# -- backends --------------------------------------------------------------------------------------


def check_backend(backend: str, device: torch.device | None) -> None:
    """Raise RuntimeError unless this torch has the backend and a device for it.

    And ValueError if payloads of ``device`` are not for it.
    """
    if backend == "nccl" and not _has_nccl():
        raise RuntimeError(
            "backend 'nccl' needs a CUDA device and a torch built with NCCL; use backend='gloo', "
            "which also moves CUDA tensors, through host memory"
        )
    if backend == "mpi" and not dist.is_mpi_available():
        raise RuntimeError(
            "backend 'mpi' needs a torch that was built from source with MPI, and this one was "
            "not; use backend='gloo', or 'nccl' for CUDA tensors"
        )
    if backend == "auto" and device is not None:
        raise ValueError(
            f"comm_device is for a backend that is named (got {device} with 'auto'); leave it out, "
            "or name 'gloo' or 'nccl'"
        )
    if device is not None and backend == "nccl" and device.type != "cuda":
        raise ValueError(f"comm_device must be a CUDA device with 'nccl' (got {device})")
    if device is not None and backend in ("gloo", "mpi") and device.type != "cpu":
        raise ValueError(f"comm_device must be 'cpu' with {backend!r} (got {device})")


def choose_backend(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """NCCL if every rank has a GPU to itself, else gloo; the same on every rank, which must call.

    NCCL refuses two ranks on one GPU. A rank's GPU is its current one.

    Raises:
        RankError: Another rank did not say in time which GPU it has.
    """
    if world_size == 1:
        return "gloo"
    store.set(f"gpu/{rank}", _current_gpu())
    keys = [f"gpu/{other}" for other in range(world_size)]
    try:
        answered(lambda: store.wait(keys, timeout), timeout)
        gpus = [store.get(key).decode() for key in keys]
    except RuntimeError as error:
        raise RankError(
            f"rank {rank}: initialize_comms could not choose a backend, because some rank did not "
            f"say which GPU it has: {first_line(error)}; give every rank the same backend"
        ) from error
    return "nccl" if all(gpus) and len(set(gpus)) == world_size else "gloo"


def _current_gpu() -> str:
    """A name of this process's current GPU that no other has; empty where NCCL cannot be used."""
    if not _has_nccl():
        return ""
    device = torch.cuda.current_device()
    return str(torch.cuda.get_device_properties(device).uuid)


def _has_nccl() -> bool:
    return dist.is_nccl_available() and torch.cuda.is_available()


# -- threads of gloo -------------------------------------------------------------------------------

_TASKS = Path("/proc/self/task")
_GLOO_THREADS_ARE_NAMED = TorchVersion(torch.__version__) >= "2.11"
_GLOO_THREAD = "pt_gloo_runloop"
_IDLE_CHECK_SECONDS = 0.01
_IDLE_SECONDS = 5.0
_IDLE_PAUSE_SECONDS = 0.05


def wait_until_idle() -> None:
    """Wait until no thread of any gloo group runs, or is about to.

    One that waits for the lock wakes up every few milliseconds, and one that was only interrupted
    counts as running: so a thread is idle that sleeps and has not woken up from one check to the
    next. Systems other than Linux do not tell, and torch before 2.11 does not name its threads;
    there this is a pause.
    """
    if not _TASKS.is_dir() or not _GLOO_THREADS_ARE_NAMED:
        time.sleep(_IDLE_PAUSE_SECONDS)
        return
    deadline = time.monotonic() + _IDLE_SECONDS
    before: dict[str, tuple[str, str]] = {}
    while time.monotonic() < deadline:
        now = _gloo_threads()
        if not now or (now == before and all(state == "S" for state, _ in now.values())):
            return
        before = now
        time.sleep(_IDLE_CHECK_SECONDS)


def _gloo_threads() -> dict[str, tuple[str, str]]:
    """Of each thread of gloo its state and how often it has gone to sleep, by number."""
    threads = {}
    for task in _TASKS.iterdir():
        with contextlib.suppress(OSError):  # it has ended
            if (task / "comm").read_text().strip() == _GLOO_THREAD:
                lines = (task / "status").read_text().splitlines()
                status = dict(line.split(":", 1) for line in lines if ":" in line)
                state = status["State"].split()[0]
                threads[task.name] = (state, status["voluntary_ctxt_switches"].strip())
    return threads
