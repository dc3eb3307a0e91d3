# SPDX-License-Identifier: Apache-2.0
"""The store where ranks meet before there is a group: whose it is, and which ranks have come.

A store that rank 0 hosts serves one start of one job, but any process that knows the port can
connect. So rank 0 writes the name of its job, if it has one, and the world size; every process
compares that with its own; and each rank comes once. A second one is refused, and since it is not
known which of the two is wrong, all ranks learn of it: those that wait in the store by what is
written there, those that have left it through the monitor server.

Other stores (torchrun's, the caller's) belong to a job already, and may serve several starts; the
number of the start keeps their keys apart.

`nfs_ip_init` tells all ranks through a shared file where the host of rank 0 is.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import secrets
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.torch_version import TorchVersion

from .._base.files import writing
from ..errors import NOTICE, RankError
from ._monitor_server import send_event
from .address import (
    JOB_VARIABLE,
    either_name,
    from_environment,
    job_id,
    listen_for_others,
    network_name,
    own_address,
)
from .group import DEFAULT_TIMEOUT, first_line, rank_names

_RETRY_SECONDS = 0.05
_POLL_SECONDS = 0.1
_ANSWER_SECONDS = 2.0
_LIBUV_LISTENS = TorchVersion(torch.__version__) >= "2.8"
"""Whether torch's default store takes a socket that listens already; its older one does always."""

_T = TypeVar("_T")


def meet(
    rank: int,
    world_size: int,
    address: str | None,
    port: int,
    timeout: timedelta,
    store: dist.Store | None,
) -> tuple[dist.Store, str | None]:
    """Wait until every rank is here; errors are those of `initialize_comms`.

    Returns:
        A store with a prefix that belongs to this start, and the address of rank 0's host; the
        number at which it listens, if it does.
    """
    is_hosted = False
    if store is None:
        if address is None:
            address = from_environment("master_ip_address", "MASTER_ADDR")
            port = int(os.environ.get("MASTER_PORT", port))
        endpoint = f"{address}:{port}"
        deadline, left = time.monotonic() + timeout.total_seconds(), timeout
        while True:
            store, address, is_hosted = _find_store(rank, world_size, address, port, left)
            try:
                if not is_hosted or _enter(store, rank, world_size, endpoint, timeout):
                    break
            except RankError as error:  # an earlier start's store may end at any moment
                if not isinstance(error.__cause__, dist.DistNetworkError):
                    raise
            # This process has been here before: it is the store of an earlier start, and goes.
            del store
            if time.monotonic() > deadline:
                raise RankError(
                    f"rank {rank}: rank 0 has not ended its start at {endpoint} yet", [0]
                )
            time.sleep(_RETRY_SECONDS)
            left = timedelta(seconds=max(1, round(deadline - time.monotonic())))
    store = _arrive(store, rank, world_size, timeout, is_hosted)
    check_refused(store, rank, timeout)
    return store, address


def answered(call: Callable[[], _T], timeout: timedelta) -> _T:
    """What a store answers, or a RuntimeError at the timeout.

    torch would wait for ever where the process that hosts the store is stopped.
    """
    answers: queue.SimpleQueue[tuple[_T | None, BaseException | None]] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put((call(), None))
        except BaseException as error:
            answers.put((None, error))

    # If there is no answer the thread ends with the process.
    threading.Thread(target=ask, name="graphshard-store", daemon=True).start()
    seconds = timeout.total_seconds()
    try:
        # torch's own error, where it has one, comes at the timeout too and says more.
        answer, error = answers.get(timeout=seconds + _ANSWER_SECONDS)
    except queue.Empty:
        raise RuntimeError(
            f"the store has not answered for {seconds:g} s: the process that hosts it is stopped, "
            "or its host is gone"
        ) from None
    if error is not None:
        raise error
    return cast(_T, answer)


def check_refused(store: dist.Store, rank: int, timeout: timedelta) -> None:
    """Raise if a process was refused at the start to which the store belongs."""
    try:
        is_refused = answered(lambda: store.check(["refused"]), timeout)
    except RuntimeError as error:
        raise RankError(
            f"rank {rank}: initialize_comms failed: {first_line(error)}", [0]
        ) from error
    if is_refused:
        other, text = json.loads(store.get("refused"))
        raise RankError(f"rank {rank}: initialize_comms failed: {text}", [other])


def _find_store(
    rank: int, world_size: int, address: str, port: int, timeout: timedelta
) -> tuple[dist.Store, str, bool]:
    """The store of the launcher, or one that rank 0 hosts; its address, and whether it does."""
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if not agent and rank == 0:
        return *host_store(address, port, world_size, timeout), True
    try:
        # torch's "env://" would do no more; it has no name for the attempt, and no end of waiting.
        store = answered(
            lambda: dist.TCPStore(
                address, port, world_size, False, timeout=timeout, wait_for_workers=False
            ),
            timeout,
        )
    except (RuntimeError, OSError) as error:
        raise RankError(
            f"rank {rank}: initialize_comms cannot reach the store at {address}:{port} within "
            f"{timeout.total_seconds():g} s: is rank 0 running there? ({first_line(error)})",
            () if agent else (0,),
        ) from error
    if not agent:
        return store, address, True
    # After a restart by torchrun the store still holds what the ranks wrote before it.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"attempt{attempt}", store), address, False


def host_store(
    address: str, port: int, world_size: int, timeout: timedelta
) -> tuple[dist.TCPStore, str]:
    """A store at the given address alone, and its number; RuntimeError if the port is in use."""
    try:
        listener, number = listen_for_others([address], port)
        store = dist.TCPStore(
            address,
            listener.getsockname()[1],
            world_size,
            True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            use_libuv=_LIBUV_LISTENS,
        )
    except (RuntimeError, OSError) as error:
        raise RuntimeError(
            f"rank 0 cannot listen on {address}:{port}: {first_line(error)}; pass another "
            "master_port_number on all ranks"
        ) from error
    return store, number


def _enter(
    store: dist.Store, rank: int, world_size: int, endpoint: str, timeout: timedelta
) -> bool:
    """Come to the store of a rank 0, if it is of this job; False if this process came before."""
    job: dict[str, Any] = {"id": job_id(), "world_size": world_size}
    me = f"{network_name()} {os.getpid()} "
    mine = me + secrets.token_hex(8)
    try:
        if rank == 0:
            store.set("job", json.dumps(job))  # it has just made the store
            host_job = job
        else:
            store.wait(["job"], timeout)
            host_job = json.loads(answered(lambda: store.get("job"), timeout))
        is_other = None not in (job["id"], host_job["id"]) and job["id"] != host_job["id"]
        is_same = host_job["world_size"] == world_size
        holder = mine
        if is_same and not is_other:
            came = answered(lambda: store.compare_set(f"came/{rank}", "", mine), timeout)
            holder = came.decode()
    except RuntimeError as error:
        raise RankError(
            f"rank {rank}: initialize_comms found a store at {endpoint}, but no rank 0 of "
            f"graphshard within {timeout.total_seconds():g} s ({first_line(error)})",
            [0],
        ) from error
    if is_other:
        raise RuntimeError(
            f"rank {rank} came to another job: {endpoint} is used by one with {JOB_VARIABLE} "
            f"'{host_job['id']}', and this process has '{job['id']}'; give each job its own "
            "master_port_number"
        )
    if not is_same:
        text = (
            f"world_size must be the same on all ranks (got {world_size} on rank {rank}, "
            f"{host_job['world_size']} on rank 0); if they are of two jobs, give each its own "
            "master_port_number"
        )
        _refuse(store, rank, host_job["world_size"], text)
        raise ValueError(text)
    if holder != mine and not holder.startswith(me):
        text = (
            f"a second process came to {endpoint} as rank {rank}: two jobs use one "
            "master_port_number, or two processes have one rank; give each its own"
        )
        _refuse(store, rank, world_size, text)
        raise RuntimeError(text)
    return holder == mine


def _refuse(store: dist.Store, rank: int, world_size: int, text: str) -> None:
    """Tell all who are here why a process was turned away that came as this rank."""
    with contextlib.suppress(RuntimeError):  # rank 0 may leave meanwhile
        start = dist.PrefixStore(_prefix(1), store)
        start.set("refused", json.dumps([rank, text]))
        for other in range(world_size):  # who waits for this one looks about
            key = f"arrived/{other}"
            if start.compare_set(key, "", "refused") == b"refused":
                start.set(key, "refused")  # only this wakes them in the store of torch before 2.8
        if start.check(["monitor"]):
            monitor = json.loads(start.get("monitor"))
            event = {"kind": "raised", "ranks": [rank], "text": f"RuntimeError: {text}"}
            send_event((monitor["host"], monitor["port"]), monitor["token"], rank, event)


def _prefix(start: int) -> str:
    return f"graphshard/{start}"


def _arrive(
    store: dist.Store, rank: int, world_size: int, timeout: timedelta, is_hosted: bool
) -> dist.Store:
    arrivals = [f"arrived/{r}" for r in range(world_size)]
    half = timeout / 2
    try:
        base = store
        start = 1
        if not is_hosted:
            start = answered(lambda: base.add(f"graphshard/starts/{rank}", 1), timeout)
        store = dist.PrefixStore(_prefix(start), store)
        store.set(arrivals[rank], network_name())
        begun = time.monotonic()
        try:
            store.wait(arrivals, half)
        except RuntimeError:
            if time.monotonic() - begun < half.total_seconds() - 0.1:  # the store is broken
                raise
            _tell_missing(store, rank, world_size, timeout)
            store.wait(arrivals, half)
        return store
    except RuntimeError as error:
        absent = [0]
        with contextlib.suppress(RuntimeError):
            absent = _absent(store, world_size, timedelta(seconds=_ANSWER_SECONDS))
        raise RankError(
            f"rank {rank}: initialize_comms waited {timeout.total_seconds():g} s for "
            f"{rank_names(absent)} of {world_size}: not started, or started with another address, "
            f"port or world_size ({first_line(error).partition(', keys:')[0]})",
            absent,
        ) from error


def _absent(store: dist.Store, world_size: int, timeout: timedelta) -> list[int]:
    """Ranks that have not arrived."""
    return answered(
        lambda: [r for r in range(world_size) if not store.check([f"arrived/{r}"])], timeout
    )


def _tell_missing(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
    """Say on standard error, on the lowest rank that is here, who is not, after half of a wait."""
    missing = _absent(store, world_size, timeout)
    if missing and rank == min(set(range(world_size)) - set(missing)):
        seconds = timeout.total_seconds()
        sys.stderr.write(
            f"{NOTICE}rank {rank} has waited {seconds / 2:g} s of {seconds:g} s in "
            f"initialize_comms: ranks {missing} are not there yet\n"
        )
        sys.stderr.flush()


# -- where rank 0 is, by a file --------------------------------------------------------------------


def nfs_ip_init(
    rank: int | None = None,
    ip_file: str | Path | None = None,
    timeout: timedelta | float = DEFAULT_TIMEOUT,
    *,
    _rank: int | None = None,
) -> str:
    """The address of rank 0's host, by way of a file; pass it to `initialize_comms`.

    Rank 0 writes the file, whole at once and over any old one, and removes it when its process
    ends; the others wait for it. They ignore a file that another job left behind, if the
    environment names the jobs (``GRAPHSHARD_JOB_ID``), and one that is older than ``timeout`` by
    the clock of the file system. So ranks must start within ``timeout`` of each other. A job
    without a name that starts within ``timeout`` of one that was killed, with rank 0 on another
    host, needs another file (or ``ip_file`` deleted first).

    Args:
        rank: This process's number.
        ip_file: A path that is the same file for all ranks; its folder must exist.
        timeout: The longest to wait for rank 0, in seconds or as a timedelta.
        _rank: ``rank``, as SAR names it.

    Raises:
        TypeError: No rank, two of them, or no file.
        RankError: Rank 0 wrote no file in time.
        FileNotFoundError: The folder of ``ip_file`` does not exist.
    """
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    rank = either_name("rank", rank, _rank)
    if rank is None or ip_file is None:
        raise TypeError(
            f"nfs_ip_init needs the rank and the file (got rank {rank}, ip_file {ip_file})"
        )
    if rank < 0:
        raise ValueError(f"rank must not be negative (got {rank})")
    path = Path(ip_file)
    job = job_id()
    if not path.parent.is_dir():
        raise FileNotFoundError(
            f"the folder of ip_file must exist, on a file system that all ranks share (got {path})"
        )
    if rank == 0:
        address = own_address()
        _write(path, address if job is None else f"{address} {job}")
        atexit.register(_remove, path.absolute(), _identity(path), os.getpid())
        return address
    deadline = time.monotonic() + seconds
    oldest = _time_there(path.parent) - seconds
    while True:
        with contextlib.suppress(OSError):
            if path.stat().st_mtime >= oldest:
                address, _, other = path.read_text(encoding="utf-8").partition(" ")
                if job is None or other in ("", job):
                    return address.strip()
        if time.monotonic() >= deadline:
            state = "is of an earlier run" if path.exists() else "does not exist"
            raise RankError(
                f"rank {rank}: rank 0 did not write its address to {path} within {seconds:g} s "
                f"(the file {state}); is rank 0 running, and is it the same file there?",
                [0],
            )
        time.sleep(_POLL_SECONDS)
        # A network file system shows a new file once its folder has been read again.
        with contextlib.suppress(OSError):
            os.listdir(path.parent)


def _write(path: Path, text: str) -> None:
    descriptor, partial = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file, writing(path):
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(partial, 0o644)
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def _remove(path: Path, identity: tuple[int, int], process: int) -> None:
    """Remove the file, if it still is the one that this process wrote."""
    with contextlib.suppress(OSError):
        if os.getpid() == process and _identity(path) == identity:
            path.unlink()


def _identity(path: Path) -> tuple[int, int]:
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


def _time_there(folder: Path) -> float:
    """The time by the clock that dates files in the folder, which may be another host's."""
    with tempfile.NamedTemporaryFile(prefix=".clock.", dir=folder) as file:
        file.write(b".")
        file.flush()
        return os.stat(file.name).st_mtime
