# SPDX-License-Identifier: Apache-2.0
"""run_ranks: run a function on N local ranks, with a deadline, and say first what failed first.

Ranks are processes that are started once and kept between calls; a call on ``P`` ranks uses the
first ``P`` of them, with a process group of its own over a file (no ports). After a failure the
ranks that took part are replaced. Functions travel as ``module:qualname``, those of a notebook's
cells as source, values as JSON and safetensors. `LocalServers` are graph servers for such ranks.
"""

from __future__ import annotations

import inspect
import os
import re
import secrets
import selectors
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .._base.files import TemporaryFolder
from ..servers import GraphServer
from ._cells import is_from_a_cell, write_module_of_cells
from ._processes import RankProcess, pool, rank_environment
from ._values import load_value, save_value

_GRACE_SECONDS = 10.0
_STACK_SECONDS = 0.3
_STREAM_SECONDS = 0.1


class RanksFailed(AssertionError):
    """A call of `run_ranks` failed; the message is the report.

    Attributes:
        results: What the ranks that finished returned, by rank.
        errors: What happened on each other rank, by rank.
    """

    def __init__(self, report: str, results: dict[int, Any], errors: dict[int, str]) -> None:
        super().__init__(report)
        self.results = results
        self.errors = errors


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: object,
    timeout: float = 60.0,
    group: bool = True,
    servers: LocalServers | None = None,
    stream: bool = False,
) -> list[Any]:
    """Call ``fn(rank, world_size, *args)`` on every one of ``world_size`` local ranks.

    Each rank has one torch thread, all seeds 0, the warning filters, environment, working directory
    and import path of the caller, and a gloo process group as the default group.

    In a notebook ``fn`` may stand in a cell. It reaches the ranks by its source, with what it uses:
    functions and classes of other cells, imports, plain values and tensors. A rank's error comes
    into the cell, and stopping the cell stops the ranks.

    Args:
        fn: A function of a module or of a cell (not a lambda or a nested function).
        args: None, bool, int, float, str, torch.dtype, tensors; lists, tuples, dicts of them.
        timeout: Seconds that the call may take once the ranks have started.
        group: Whether to make the process group. Without it ``fn`` makes its own, or none.
        servers: Graph servers to which `graphshard.servers.initialize` connects on each rank,
            which is a trainer on one of their hosts; trainers are spread evenly over them.
        stream: Print each line of a rank at once, after ``[rank 1]``; otherwise what a rank printed
            comes when all have finished, rank by rank.

    Returns:
        What the ranks returned, by rank; the same kinds of values as ``args``.

    Raises:
        RanksFailed: A rank raised, died, or was late. The report has the rank that failed first
            first, then where each other rank stood, and the errors that followed from it last.
        TypeError: ``fn`` cannot be found by name, or an argument does not travel.
        RuntimeError: A rank imports the file of ``fn``, which makes this call when it is imported.
    """
    if pool.importing is not None:
        raise RuntimeError(
            f"run_ranks was called while a rank imports {pool.importing}, where its function is; "
            'put what the file does when it is run under if __name__ == "__main__":'
        )
    if world_size < 1:
        raise ValueError(f"world_size must be at least 1 (got {world_size})")
    address = None if is_from_a_cell(fn) else _address(fn)
    with (
        pool.lock,
        pool.take(world_size) as workers,
        tempfile.TemporaryDirectory(prefix="job-", dir=pool.folder) as folder,
    ):
        box = Path(folder)
        save_value(box / "args", args)
        if address is None:
            write_module_of_cells(fn, box / "notebook.py")
            # A name of its own, because ranks keep modules that they have imported.
            address = box.name.replace("-", "_"), fn.__name__, str(box / "notebook.py")
        module, qualname, file = address
        job = {
            "box": folder,
            "world_size": world_size,
            "module": module,
            "qualname": qualname,
            "file": file,
            "group": group,
            "timeout": timeout,
            "path": sys.path,
            "directory": os.getcwd(),
            "filters": _warning_filters(),
            "stream": stream,
        }
        try:
            for rank, worker in enumerate(workers):
                trainer = {} if servers is None else servers.environment(rank, world_size)
                environment = rank_environment() | trainer
                worker.send({**job, "rank": rank, "environment": environment})
            late = _wait(workers, box, timeout, _Printer(workers) if stream else None)
            call = f"{qualname} on {world_size} ranks"
            return _collect(workers, box, late, call, timeout, is_printed=stream)
        except BaseException:
            # Also on Ctrl-C: ranks that may be in the middle of a job are not used again.
            for worker in workers:
                worker.kill()
            raise


def stop_ranks() -> None:
    """End the ranks that are kept alive; the next call of `run_ranks` starts new ones."""
    pool.stop()


class _Printer:
    """Prints the lines of ranks as they come."""

    def __init__(self, workers: list[RankProcess]) -> None:
        self.printed = dict.fromkeys(range(len(workers)), 0)
        self.workers = workers

    def print_new(self, is_end: bool = False) -> None:
        """Print what is new: whole lines, at the end also one that is not."""
        for rank, worker in enumerate(self.workers):
            text = worker.printed()[self.printed[rank] :]
            if not is_end:
                text = text[: text.rfind("\n") + 1]
            self.printed[rank] += len(text)
            for line in text.splitlines():
                print(f"[rank {rank}] {line}", flush=True)  # noqa: T201 - the rank's own output


def _wait(
    workers: list[RankProcess], box: Path, timeout: float, printer: _Printer | None
) -> dict[int, str]:
    """Wait until all have finished or waiting makes no sense; the stacks of the late, by rank."""
    deadline = time.monotonic() + timeout
    waiting = dict(enumerate(workers))
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.notify, selectors.EVENT_READ, worker)
        for template in {worker.template for worker in workers}:
            selector.register(template.control, selectors.EVENT_READ, None)
        while waiting and (left := deadline - time.monotonic()) > 0:
            ready = selector.select(left if printer is None else min(left, _STREAM_SECONDS))
            if printer is not None:
                printer.print_new()
            for key, _ in ready:
                worker = key.data
                # An answer, or the end of the pipe: nothing more will come from this rank.
                if worker is not None:
                    worker.usable = b"done" in os.read(worker.notify, 4096)
                    selector.unregister(worker.notify)
                for rank in [r for r, w in waiting.items() if w is worker or not w.alive()]:
                    del waiting[rank]
                    if not _succeeded(box, rank):
                        # The others find out by themselves, or are stuck.
                        deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
            for template in {w.template for w in waiting.values()}:
                if template.ended:
                    waiting.clear()
    if printer is not None:
        printer.print_new(is_end=True)
    for worker in waiting.values():
        worker.signal(signal.SIGUSR1)
    if waiting:
        time.sleep(_STACK_SECONDS)
    late = {r: w.stacks.read_text() + _tail(w.printed()) for r, w in waiting.items()}
    for worker in waiting.values():
        worker.kill()
    return late


def _succeeded(box: Path, rank: int) -> bool:
    outcome = box / f"outcome{rank}"
    return outcome.with_suffix(".json").exists() and bool(load_value(outcome)["ok"])


def _collect(
    workers: list[RankProcess],
    box: Path,
    late: dict[int, str],
    call: str,
    timeout: float,
    is_printed: bool,
) -> list[Any]:
    """The results, or the report of what went wrong."""
    results: dict[int, Any] = {}
    failures: list[tuple[int, float, int, str]] = []
    for rank, worker in enumerate(workers):
        outcome = box / f"outcome{rank}"
        if rank in late and not _succeeded(box, rank):
            failures.append((2, 0.0, rank, f"rank {rank} was still running:\n{late[rank]}"))
        elif outcome.with_suffix(".json").exists():
            verdict = load_value(outcome)
            if verdict["ok"]:
                results[rank] = load_value(box / f"result{rank}")
                if rank not in late and not is_printed:
                    print(worker.printed(), end="")  # noqa: T201 - the rank's own output
                continue
            order = 3 if verdict["secondary"] else 0
            label = "failed because another rank did" if verdict["secondary"] else "raised"
            text = f"rank {rank} {label}:\n{verdict['text']}{_tail(worker.printed())}"
            failures.append((order, verdict["time"], rank, text))
        else:
            how = _ending(worker)
            text = f"rank {rank} ended with {how} and no result\n{_tail(worker.printed())}"
            failures.append((1, 0.0, rank, text))
    if not failures:
        return [results[rank] for rank in range(len(workers))]
    failures.sort()
    reason = f"took longer than {timeout:g} s" if all(f[0] == 2 for f in failures) else "failed"
    fine = [f"rank {rank} finished" for rank in results]
    report = "\n".join([f"{call} {reason}", "", *(text for *_, text in failures), *fine])
    raise RanksFailed(report, results, {rank: text for *_, rank, text in failures})


def _ending(worker: RankProcess) -> str:
    deadline = time.monotonic() + 1.0
    while worker.alive() and time.monotonic() < deadline:
        time.sleep(0.01)
    code = worker.code
    if code is None:
        return "its pipe closed"
    return signal.Signals(-code).name if code < 0 else f"code {code}"


def _tail(printed: str) -> str:
    lines = [f"  | {line}" for line in printed.strip().splitlines()[-30:]]
    return "\n".join(["  it printed:", *lines, ""]) if lines else ""


def _address(fn: Callable[..., Any]) -> tuple[str, str, str]:
    """(module, qualified name, file) of a function."""
    module = getattr(fn, "__module__", None)
    qualname = getattr(fn, "__qualname__", "<")
    source = inspect.getsourcefile(fn) if module and inspect.isfunction(fn) else None
    if module is None or source is None or "<" in qualname:
        raise TypeError(
            "fn must be a function that stands in a module, so that other processes can import "
            f"it by name; move it to the top level of its file (got {fn!r})"
        )
    return module, qualname, os.path.abspath(source)


def _warning_filters() -> list[list[Any]]:
    """The caller's warning filters in a form that travels."""
    filters = []
    for action, message, category, module, line in warnings.filters:
        assert isinstance(category, type)
        kind = f"{category.__module__}:{category.__qualname__}"
        filters.append([action, _pattern(message), kind, _pattern(module), line])
    return filters


def _pattern(expression: str | re.Pattern[str] | None) -> str:
    return expression.pattern if isinstance(expression, re.Pattern) else expression or ""


class LocalServers:
    """Graph servers on this machine for trainers that `run_ranks` starts, as on a cluster.

    Each server has the parts of one host, is in threads of this process, and listens on 127.0.0.1.
    They are up when this returns, and end with `stop` or at the end of a ``with`` block::

        with LocalServers("parts/cora.json", num_hosts=2) as servers:
            run_ranks(train, 2, servers=servers)

    Args:
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

    def __exit__(self, *error: object) -> None:
        self.stop()
