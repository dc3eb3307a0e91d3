# SPDX-License-Identifier: Apache-2.0
"""The process from which ranks are forked: it has imported everything, so a rank starts at once.

Not to be imported: `_processes` starts it with ``python -m``. Its arguments are the number of a
Unix socket, a folder for files, and "fork". A message on the socket asks for a rank: three
descriptors (where jobs come from, where answers go, where the output goes) and, as text, the file
for stack dumps. It answers with lines of JSON:

::

    {"ready": true}                     once
    {"started": pid}                    for each message
    {"ended": pid, "code": code}        for each rank that has ended; minus the signal if killed

When the socket ends it ends too, with all ranks and the folder. If the last argument is "once", it
becomes the first rank itself: where forking a process that has loaded torch is not safe.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import shutil
import signal
import socket
import sys

import torch

from ._worker import serve

MAX_MESSAGE = 4096


def main() -> None:
    """Serve until the socket ends."""
    control = socket.socket(fileno=int(sys.argv[1]))
    ranks: set[int] = set()
    folder, once = sys.argv[2], sys.argv[3] == "once"
    # Ctrl-C is for the parent, whose report is wanted, and not one from each rank.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _load()
    # For the garbage collector of a rank this is not garbage, nor worth a walk over all of it.
    gc.collect()
    gc.freeze()
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    _tell(control, {"ready": True})
    while True:
        readable, _, _ = select.select([control.fileno(), woken], [], [])
        if woken in readable:
            os.read(woken, 4096)
            _reap(control, ranks)
        if control.fileno() in readable:
            try:
                data, descriptors, _, _ = socket.recv_fds(control, MAX_MESSAGE, 3)
            except OSError:
                data = b""
            if not data:
                # Ranks end by themselves when their jobs do, but not if they are stopped.
                for rank in ranks:
                    with contextlib.suppress(OSError):
                        os.killpg(rank, signal.SIGKILL)
                shutil.rmtree(folder, ignore_errors=True)
                return
            pid = 0 if once else os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(woken)
                os.close(wake)
                if once:
                    # The socket stays open, so that it ends with this process.
                    _tell(control, {"started": os.getpid()})
                else:
                    os.setsid()  # what a rank starts in turn is ended with it
                    control.close()
                jobs, notify, output = descriptors
                os.dup2(output, 1)
                os.dup2(output, 2)
                serve(jobs, notify, data.decode())
            for descriptor in descriptors:
                os.close(descriptor)
            ranks.add(pid)
            _tell(control, {"started": pid})


def _load() -> None:
    """Import what torch imports late, at the first such call: once here and not in each rank."""
    parameter = torch.zeros(1, requires_grad=True)
    torch.optim.SGD([parameter], lr=0.0)
    torch.testing.assert_close(parameter, parameter)


def _reap(control: socket.socket, ranks: set[int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        ranks.discard(pid)
        _tell(control, {"ended": pid, "code": os.waitstatus_to_exitcode(status)})


def _tell(control: socket.socket, message: dict[str, object]) -> None:
    with contextlib.suppress(OSError):  # the parent is gone: the socket will say so
        control.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main()
