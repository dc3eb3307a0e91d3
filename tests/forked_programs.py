# SPDX-License-Identifier: Apache-2.0
"""Python programs in processes of their own that start at once, because torch is imported already.

`start_program` does what starting ``python -c program`` does. On Linux the process is forked from
one that has imported torch, and not graphshard; the program runs as ``__main__``. Elsewhere torch
must not be forked, and the program starts with an interpreter of its own.

MALLOC_MMAP_THRESHOLD_ is set as if it had been there from the start. Other options of an
interpreter or of a C library are for `subprocess`, and so is what happens to threads when an
interpreter ends: there a forked process does not fail as one does that was started.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Mapping
from typing import IO, Any

MAX_MESSAGE = 65536  # a program and its arguments, as JSON


class Program:
    """A started program, with what the tests use of `subprocess.Popen`."""

    def __init__(self, commands: int, out: int, errors: int, told: int) -> None:
        self.stdin = os.fdopen(commands, "w")
        self.stdout, self.stderr, self._told = (os.fdopen(fd) for fd in (out, errors, told))
        self.pid = int(self._told.readline())
        self.returncode: int | None = None

    def send_signal(self, number: int) -> None:
        """Like `subprocess.Popen.send_signal`; nothing once it has been waited for."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float = 60.0) -> tuple[str, str]:
        """What it printed until its end; kills it and raises after ``timeout`` seconds."""
        if self.returncode is not None:
            return "", ""
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        texts = ["", ""]

        def read(place: int, file: IO[str]) -> None:
            texts[place] = file.read()

        def end() -> None:
            self.returncode = int(self._told.readline())

        work: list[tuple[Any, tuple[Any, ...]]] = [
            (read, (0, self.stdout)),
            (read, (1, self.stderr)),
            (end, ()),
        ]
        threads = [threading.Thread(target=f, args=args, daemon=True) for f, args in work]
        for thread in threads:
            thread.start()
        threads[2].join(timeout)
        if threads[2].is_alive():
            self.kill()
            raise subprocess.TimeoutExpired("a forked program", timeout, texts[0], texts[1])
        for thread in threads:
            thread.join(10.0)  # a child of the program may hold the pipes
        for file in (self.stdout, self.stderr, self._told):
            file.close()
        return texts[0], texts[1]


class Template:
    """The process that programs are forked from."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=_environment(),
            stdin=subprocess.DEVNULL,
        )
        theirs.close()

    def start(self, program: str, arguments: list[str], env: Mapping[str, str | None]) -> Program:
        read, write = os.pipe()
        pipes = [os.pipe() for _ in range(3)]
        theirs = [read, *(w for _, w in pipes)]
        request = {"program": program, "arguments": arguments, "env": dict(env)}
        socket.send_fds(self._control, [json.dumps(request).encode()], theirs)
        for descriptor in theirs:
            os.close(descriptor)
        return Program(write, *(r for r, _ in pipes))

    def stop(self) -> None:
        self._control.close()
        self._process.wait(60)


_templates: list[Template] = []


def start_program(program: str, *arguments: str, **env: str | None) -> Any:
    """Start a program, with pipes for what it reads and prints.

    Args:
        program: Its text, which may be indented.
        arguments: Its ``sys.argv[1:]``.
        env: Changes of the environment; None removes a variable.
    """
    program = textwrap.dedent(program)
    if sys.platform != "linux":
        return subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            env={k: v for k, v in {**_environment(), **env}.items() if v is not None},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    if not _templates:
        _templates.append(Template())
    return _templates[0].start(program, list(arguments), env)


def run_program(program: str, *arguments: str, timeout: float = 60.0, **env: str | None) -> str:
    """What a program printed that must end well."""
    started = start_program(program, *arguments, **env)
    try:
        out, errors = started.communicate(timeout=timeout)
    finally:
        started.kill()
    assert started.returncode == 0, errors
    return str(out)


def stop() -> None:
    """End the process that programs are forked from."""
    while _templates:
        _templates.pop().stop()


def _environment() -> dict[str, str]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def _serve(control: socket.socket) -> dict[str, Any]:
    """Fork at each message; returns in a program's process alone, with what it is to do."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are not waited for
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, MAX_MESSAGE, 4)
        if not data:
            os._exit(0)
        if os.fork() == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            commands, out, errors, told = descriptors
            pid = os.fork()
            if pid == 0:
                os.dup2(commands, 0)
                os.dup2(out, 1)
                os.dup2(errors, 2)
                for descriptor in descriptors:
                    os.close(descriptor)
                found: dict[str, Any] = json.loads(data)
                return found
            # The keeper: waits for the program, and says how it ended.
            for descriptor in (commands, out, errors):
                os.close(descriptor)
            os.write(told, f"{pid}\n".encode())
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.write(told, f"{code}\n".encode())
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)


if __name__ == "__main__":
    import torch  # noqa: F401

    _request = _serve(socket.socket(fileno=int(sys.argv[1])))
    for _name, _value in _request["env"].items():
        os.environ.pop(_name, None)
        if _value is not None:
            os.environ[_name] = _value
    if _threshold := _request["env"].get("MALLOC_MMAP_THRESHOLD_"):
        ctypes.CDLL(None).mallopt(-3, int(_threshold))  # M_MMAP_THRESHOLD
    sys.argv = ["-c", *_request["arguments"]]
    exec(compile(_request["program"], "program", "exec", dont_inherit=True), globals())  # noqa: S102
