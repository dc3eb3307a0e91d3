# SPDX-License-Identifier: Apache-2.0
"""What ``graphshard launch`` runs on each host: it starts the processes there and ends them.

The launcher reaches it by its standard streams alone, through ssh, srun or a pipe::

    launcher -> agent    a line of JSON: the job, with the token; then {"engine": [...]} once all
                         servers are up; then "beat" now and then. The end of the stream, or
                         silence, ends everything.
    agent -> launcher    lines that begin with MARK, of JSON: {"up": port}, {"said": who, "line":
                         text}, {"ended": who, "code": code} with "how" where that says more,
                         {"beat": 1}. Others are not its own.

So no process is left when the launcher is killed or the network is gone, nor any file: what a
process that was killed could not remove, its agent does. ``who`` is "server", "engine" (torchrun),
or the number of a trainer on its host. `START` starts the agent without loading torch: the file
imports the standard library alone, and the packages around it are entered without running theirs
(``__init__``).

[Note: the command of a trainer]
    It is a line for the user's shell on the host, where ``python`` is the interpreter that has
    graphshard. torchrun never sees it: of words that follow a script it takes ``--log`` and others
    for abbreviations of its own options. It starts a watcher for each trainer, which reads the line
    from the agent's folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import re
import selectors
import shlex
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from ..._base.files import TemporaryFolder, remove_abandoned
from ._children import (
    Child,
    LineStream,
    end_children,
    num_cores,
    read_streams,
    signal_with_parent,
)

_ENTER = (
    "import importlib, importlib.util, os, sys, types; "
    "spec = importlib.util.find_spec('graphshard') "
    "or sys.exit('graphshard is not installed for ' + sys.executable); "
    "folders = spec.submodule_search_locations; "
    "names = ['graphshard', 'graphshard.train', 'graphshard.train.launch']; "
    "packages = [types.ModuleType(name) for name in names]; "
    "[setattr(package, '__path__', [os.path.join(folder, *package.__name__.split('.')[1:]) "
    "for folder in folders]) for package in packages]; "
    "sys.modules.update(zip(names, packages)); "
    "module = importlib.import_module('graphshard.train.launch.{module}'); "
    "sys.exit(module.main(sys.argv[1:]))"
)
START = _ENTER.format(module="_host_agent")
"""A program for ``python -c``."""
_START_TORCHRUN = _ENTER.format(module="_torchrun")

TORCHRUN_VARIABLE = "GRAPHSHARD_TORCHRUN_PID"
"""Has the number of the process that starts watchers of trainers."""

MARK = "\x1e"
_TRAINER = "\x1etrainer "
BEAT_SECONDS = 5.0
END_SECONDS = 8.0
"""What processes have to end after SIGTERM, before SIGKILL."""

_LOST = "was ended, because the process that watches it was killed"
_PASSED_ON = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_SIOCGIFADDR = 0x8915
_LOOPBACK = ("lo", "lo0")
_VERSIONS = re.compile(r"\bpython3\.\d+\b")
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGALRM)
_FIRST_SECONDS = 60
_SHELLS = ("sh", "bash", "dash", "zsh", "ksh", "mksh", "ash")
SERVER, ENGINE = "server", "engine"


def main(arguments: Sequence[str]) -> int:
    """Be the agent of a host, or, with ``trainer FOLDER``, watch one trainer."""
    if arguments:
        return _watch_trainer(Path(arguments[1]))
    for number in _STOP_SIGNALS:
        signal.signal(number, _stop)
    silence = _FIRST_SECONDS
    signal.alarm(silence)
    try:
        job = json.loads(_first_line())
        silence = job["silence"]
        with TemporaryFolder() as folder:
            agent = _Agent(job, folder)
            try:
                agent.start(SERVER, job["server"])
                agent.watch()
            finally:
                signal.alarm(0)
                try:
                    agent.end()
                finally:  # what is left to do takes a moment
                    for number in _STOP_SIGNALS:
                        signal.signal(number, signal.SIG_IGN)
    except KeyboardInterrupt as error:
        if str(error) == signal.SIGALRM.name:
            with contextlib.suppress(OSError):
                os.write(1, f"nothing was heard of the launcher for {silence} s\n".encode())
        return 130
    except BrokenPipeError:
        return 130
    except OSError as error:  # such as no workspace
        sys.stderr.write(f"error: {error}\n")
        return 2
    finally:
        remove_abandoned()  # such as the tables of a server that was killed
    return 0


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def _first_line() -> bytes:
    """The job; read byte by byte, so that what follows stays in the stream."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            raise KeyboardInterrupt("the launcher has ended")
        line += byte
    return line


class _Agent:
    """The processes of one host.

    Args:
        job: What the launcher says; see `graphshard.train.launch`.
        folder: For the token, the list of hosts, and what trainers print.
    """

    def __init__(self, job: Mapping[str, Any], folder: Path) -> None:
        self.job, self.folder = job, folder
        self.children: dict[str, Child] = {}
        self.streams: list[LineStream] = []
        self.selector = selectors.DefaultSelector()
        self.is_up = False
        self.trainers: dict[str, int] = {}  # process groups of those that have not ended
        self.ended: set[str] = set()
        self.ends: list[tuple[str, int]] = []  # of trainers, to be told
        self._write("token", job["token"] + "\n")
        self._write("ip_config", job["ip_config"])
        self._write("trainer", job["trainer"])
        self._write_interpreters()
        self.workspace = os.path.expanduser(job["workspace"])
        self.environment = self._environment()
        self._add(LineStream(open(0, "rb", buffering=0, closefd=False), self._hear))  # noqa: SIM115

    def _write(self, name: str, text: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with open(os.open(self.folder / name, flags, 0o600), "w", encoding="utf-8") as file:
            file.write(text)

    def _write_interpreters(self) -> None:
        """Programs that trainers find as ``python``: this interpreter, also one of a venv."""
        (self.folder / "bin").mkdir(mode=0o700)
        program = f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n'
        # Whatever version a command names, it means the one that can run it.
        for name in {"python", "python3", *_VERSIONS.findall(self.job["trainer"])}:
            self._write(f"bin/{name}", program)
            (self.folder / "bin" / name).chmod(0o700)

    def _environment(self) -> dict[str, str]:
        """Variables of the host's processes; those that the user gives come last."""
        threads = max(1, num_cores() // self.job["num_local"])
        variables = {
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": str(threads),
            "THP_MEM_ALLOC_ENABLE": "1",  # large pages for torch's tensors; see _base/memory.py
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5",
            **os.environ,
            "GRAPHSHARD_HOST": str(self.job["host"]),
            "GRAPHSHARD_IP_CONFIG": str(self.folder / "ip_config"),
            "GRAPHSHARD_TOKEN_FILE": str(self.folder / "token"),
        }
        interface = _interface(self.job["address"])
        if interface is not None:
            # Without it gloo looks up the host's name, which need not lead anywhere.
            variables.setdefault("GLOO_SOCKET_IFNAME", interface)
            if interface in _LOOPBACK:  # which NCCL takes only if it is told to
                variables.setdefault("NCCL_SOCKET_IFNAME", interface)
        variables.pop("GRAPHSHARD_TOKEN", None)
        return {**variables, **self.job["environment"]}

    # ------------------------------------------------------------------ processes

    def _start_engine(self, command: Sequence[str]) -> None:
        for number in range(self.job["num_trainers"]):
            path = self.folder / f"trainer{number}"
            os.mkfifo(path, 0o600)
            # For writing, too: it then has no end until this process closes it.
            pipe = open(os.open(path, os.O_RDWR), "rb", buffering=0)  # noqa: SIM115
            who = str(number)
            self._add(LineStream(pipe, lambda line, who=who: self._said(who, line)))  # type: ignore[misc]
        self.start(ENGINE, command)

    def start(self, who: str, command: Sequence[str]) -> None:
        words = {"{python}": sys.executable, "{folder}": str(self.folder), "{start}": START}
        words["{ip_config}"] = str(self.folder / "ip_config")
        words["{start_torchrun}"] = _START_TORCHRUN
        process = subprocess.Popen(
            [words.get(word, word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=self.workspace,
            env=self.environment,
            start_new_session=True,
            preexec_fn=functools.partial(_end_with, os.getpid(), signal.SIGTERM),
        )
        self.children[who] = Child(process)
        assert process.stdout is not None
        self._add(LineStream(process.stdout, lambda line: self._said(who, line)))

    def _add(self, stream: LineStream) -> None:
        self.streams.append(stream)
        self.selector.register(stream.file, selectors.EVENT_READ, stream)

    def watch(self) -> None:
        """Pass on what there is to say, until the launcher ends it or is silent."""
        beat = 0.0
        signal.alarm(self.job["silence"])
        launcher = self.streams[0]
        while launcher.file in self.selector.get_map():
            if time.monotonic() > beat:
                beat = time.monotonic() + BEAT_SECONDS
                self._tell({"beat": 1})
            read_streams(self.selector)
            # Watchers end with torchrun, so it is looked at after them, and named before them.
            lost = [who for who in self.trainers if _is_free(self.folder / f"watcher{who}")]
            running = self.children.keys() - self.ended
            codes = {who: self.children[who].code() for who in sorted(running)}
            ended = [who for who, code in codes.items() if code is not None]
            if lost and not ended:  # torchrun ends the others then
                self._tell_lost(lost)
            self._tell_ends()
            for who in ended:
                self.ended.add(who)
                self._read_rest()
                self._tell_ends()
                self._tell({"ended": who, "code": codes[who]})
            if lost and ended:
                self._tell_lost(lost)
                self._tell_ends()

    def _tell_ends(self) -> None:
        """Tell how trainers ended whose watchers have said so."""
        while self.ends:
            who, code = self.ends.pop(0)
            self._tell({"ended": who, "code": code})

    def _tell_lost(self, lost: Sequence[str]) -> None:
        """Tell of trainers whose watchers were killed, and so could not tell how they ended."""
        self._read_rest()
        for who in lost:
            if who in self.trainers:  # it has not said meanwhile that it ended
                self._kill_group(self.trainers.pop(who))
                self._tell({"ended": who, "code": -signal.SIGKILL, "how": _LOST})

    def _read_rest(self) -> None:
        """Take the last lines of what has ended; a child of it may hold the pipe open."""
        for _ in range(100):
            if not self.selector.get_map() or not self.selector.select(0):
                return
            read_streams(self.selector)

    def end(self) -> None:
        """End what runs; trainers before the server that they read from."""
        engine, server = self.children.get(ENGINE), self.children.get(SERVER)
        try:
            if engine is not None:
                end_children([engine], END_SECONDS)
        finally:
            end_children([] if server is None else [server])
            with contextlib.suppress(BrokenPipeError):
                self._read_rest()
            for group in self.trainers.values():  # what trainers have started that were killed
                self._kill_group(group)
        with contextlib.suppress(KeyError):
            self.selector.unregister(self.streams[0].file)
        with contextlib.suppress(OSError):  # the launcher is gone
            self._read_rest()
            for stream in self.streams[1:]:
                stream.finish()
            self._tell_ends()
            for who, child in self.children.items():
                if who not in self.ended and (code := child.process.poll()) is not None:
                    self._tell({"ended": who, "code": code})

    def _kill_group(self, group: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)

    # ------------------------------------------------------------------ messages

    def _hear(self, line: str) -> None:
        signal.alarm(self.job["silence"])
        if line != "beat":
            self._start_engine(json.loads(line)["engine"])

    def _said(self, who: str, line: str) -> None:
        line, news, text = line.partition(_TRAINER)  # what _watch_trainer writes
        if news:
            if line:
                self._tell({"said": who, "line": line})
            what, number = text.split()
            if what == "started":
                self.trainers[who] = int(number)
            else:
                self.trainers.pop(who, None)
                self.ends.append((who, int(number)))
            return
        self._tell({"said": who, "line": line})
        if who == SERVER and not self.is_up and line.startswith(self.job["up_line"]):
            self.is_up = True
            self._tell({"up": _free_port(self.job["address"])})

    def _tell(self, message: Mapping[str, Any]) -> None:
        data = memoryview(f"{MARK}{json.dumps(message)}\n".encode())
        while data:
            data = data[os.write(1, data) :]


def _watch_trainer(folder: Path) -> int:
    """Run a trainer under torchrun; what it prints, and how it ends, go to the agent."""
    _end_with(int(os.environ[TORCHRUN_VARIABLE]), signal.SIGKILL)
    number = os.environ["LOCAL_RANK"]
    pipe = os.open(folder / f"trainer{number}", os.O_WRONLY)
    # The kernel frees it however this process ends.
    fcntl.flock(os.open(folder / f"watcher{number}", os.O_CREAT | os.O_RDWR, 0o600), fcntl.LOCK_EX)
    # A signal that comes while the trainer starts is kept until it can be passed on: it would end
    # this process, and leave what the trainer has started by then.
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    shell = _shell()
    try:
        process = subprocess.Popen(
            [shell, "-c", (folder / "trainer").read_text(encoding="utf-8")],
            stdout=pipe,
            stderr=pipe,
            env={**os.environ, "PATH": _path(folder / "bin")},
            start_new_session=True,
            preexec_fn=functools.partial(_begin_trainer, os.getpid()),
        )
    except OSError as error:
        os.write(pipe, f"error: {shell} cannot be started ({error.strerror})\n".encode())
        os.write(pipe, f"{_TRAINER}ended 127\n".encode())
        return 127
    trainer = Child(process)
    os.write(pipe, f"{_TRAINER}started {process.pid}\n".encode())

    def stop(number: int, frame: FrameType | None) -> None:
        trainer.signal(number)
        signal.alarm(_patience())

    for each in _PASSED_ON:
        signal.signal(each, stop)
    # Before torchrun kills this process: what the shell has started would outlive it.
    signal.signal(signal.SIGALRM, lambda *_: trainer.signal(signal.SIGKILL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    if hasattr(os, "waitid"):
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        trainer.signal(signal.SIGKILL)  # what it has started, and left
    code = process.wait()
    os.write(pipe, f"{_TRAINER}ended {code}\n".encode())
    return code if code >= 0 else 128 - code


def _shell() -> str:
    """The user's own, if a line of the usual shells means the same to it."""
    shell = os.environ.get("SHELL", "")
    is_usual = os.path.basename(shell) in _SHELLS and os.access(shell, os.X_OK)
    return shell if is_usual else "/bin/sh"


def _path(programs: Path) -> str:
    """Where a trainer's shell finds programs, ``python`` first."""
    folders = [str(programs), os.environ.get("PATH", os.defpath)]
    if not os.access(programs / "python", os.X_OK):  # temporary files may not be run
        folders[0] = os.path.dirname(sys.executable)
    return os.pathsep.join(folders)


def _patience() -> int:
    """Seconds that a trainer has to end; torchrun, which reads the same variable, waits longer."""
    with contextlib.suppress(ValueError):
        return max(1, int(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")) - 1)
    return 1


def _is_free(path: Path) -> bool:
    """Whether no process holds the lock on a file that one has made."""
    with contextlib.suppress(OSError), open(path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return True
    return False


def _begin_trainer(watcher: int) -> None:
    _end_with(watcher, signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)


def _end_with(parent: int, number: int) -> None:
    """Have this process signalled when the one that started it is gone, however it ended."""
    signal_with_parent(number)
    if os.getppid() != parent:  # it had ended before the kernel was asked
        os._exit(130)


def _interface(address: str) -> str | None:
    """The interface that has an address; None where that cannot be found out."""
    with contextlib.suppress(OSError, struct.error), socket.socket() as probe:
        number = socket.gethostbyname(address)
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == number:
                    return name
    return None


def _free_port(address: str) -> int:
    """A port of this host that is free now, for torchrun."""
    for bound in (address, ""):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind((bound, 0))
            return int(probe.getsockname()[1])
    raise OSError(f"no free port on {address}")
