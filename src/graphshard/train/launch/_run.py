# SPDX-License-Identifier: Apache-2.0
"""run_job: servers and trainers on all hosts, from start to end, seen from the launcher.

[Note: how a job ends]
    Servers start on all hosts; once all are up, torchrun does on each. The first process that fails
    (a trainer, a server, torchrun, or the connection to a host) is said at once. The others have
    `_GRACE_SECONDS` to say what they know, then all hosts are told to stop, by the end of the
    stream that their agents read. A trainer that blames another one (exit code 3) is not the first
    cause where one that does not has failed within that time. After a trainer has ended with 0
    the others have the timeout to do so, too.

    Agents end what they have started; see `_host_agent`. One that does not within `_STOP_SECONDS`
    is not waited for: its connection is closed, and it ends by itself.

    A launcher that was suspended (Ctrl-Z, a laptop that sleeps) finds its agents gone, because they
    heard nothing of it. That is its own fault and not theirs, so it is the first cause then.
"""

from __future__ import annotations

import contextlib
import json
import math
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..._children import Child, LineStream, end_children, how_ended, read_streams
from ..._host_agent import BEAT_SECONDS, END_SECONDS, MARK
from ._hosts import JobHosts
from ._launcher import stop_on_signals
from ._logs import JobLogs
from ._worker import ExitCode

_TAIL_LINES = 60
_GRACE_SECONDS = 2.0
_SIGNALLED = 128
_RESUMED_SECONDS = 60.0  # in which connections are found to be broken
_STOP_SECONDS = END_SECONDS + 7.0
_SERVER, _ENGINE = "server", "engine"


@dataclass(frozen=True, kw_only=True)
class JobCommands:
    """What runs on the hosts of a job; words in braces are filled in there.

    ``{python}`` is the interpreter, ``{ip_config}`` the file of the hosts, ``{folder}`` where the
    agent keeps its files, ``{start}`` the program that starts an agent, ``{start_torchrun}`` the
    one that is torchrun.

    Args:
        server: For each host; its server is up once it has printed a line that begins with
            ``up_line``.
        up_line: For each host.
        engine: The command that starts the trainers of a host, by its number and the port on host
            0 where they meet.
        trainer: What each of them is, a line for the user's shell on the host.
        num_trainers: On each host.
        workspace: The folder there in which all run.
        environment: Further variables.
    """

    server: Sequence[Sequence[str]]
    up_line: Sequence[str]
    engine: Callable[[int, int], list[str]]
    trainer: str
    num_trainers: int
    workspace: str
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class JobFailure:
    """A process that failed.

    Args:
        who: Such as ``"host 1 rank 3"``.
        how: Such as ``"ended with exit code 1"``.
        code: Its exit code; negative: the signal that ended it.
        tail: The last lines of what it printed.
    """

    who: str
    how: str
    code: int
    tail: tuple[str, ...]

    @property
    def is_consequence(self) -> bool:
        """Whether it says itself that another one has failed, or was ended because one had."""
        return self.code in (ExitCode.OTHER_RANK, -signal.SIGTERM, _SIGNALLED + signal.SIGTERM)


@dataclass(frozen=True)
class JobOutcome:
    """How a job ended.

    Args:
        failures: The first cause first; none if all went well.
        logs: The folder of what each process printed; None if it was not kept.
    """

    failures: tuple[JobFailure, ...] = ()
    logs: Path | None = None

    @property
    def exit_code(self) -> int:
        """0, or that of the first cause; 1 where a signal ended it."""
        if not self.failures:
            return 0
        return self.failures[0].code if self.failures[0].code > 0 else 1

    def report(self) -> str:
        """What went wrong, the first cause first, with the last lines that it printed."""
        if not self.failures:
            return ""
        first, *others = self.failures
        lines = [f"error: {first.who} {first.how}", *(f"  | {line}" for line in first.tail)]
        for other in others:
            said = other.tail[-1] if other.tail else "it said nothing"
            lines.append(f"then {other.who} {other.how}: {said}")
        if self.logs is not None:
            lines.append(f"what each process printed is in {self.logs}")
        return "\n".join(lines)


def run_job(
    hosts: JobHosts,
    commands: JobCommands,
    *,
    token: str,
    on_line: Callable[[str], None],
    start_timeout: float = 600.0,
    timeout: float = 1800.0,
    silence: float = 120.0,
    logs: JobLogs | None = None,
) -> JobOutcome:
    """Run a job until all trainers have ended, or one process has failed.

    Args:
        hosts: Where.
        commands: What.
        token: What trainers must know; it goes to hosts by standard input alone.
        on_line: Called with each line that a process prints, after ``[host 1 rank 3]``.
        start_timeout: Seconds until all servers are up.
        timeout: Seconds that trainers have to end after one has ended with 0.
        silence: Seconds after which a host, or on a host the launcher, is taken for gone.
        logs: Where to keep what each process prints.

    Raises:
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP; all hosts have been told to stop.
    """
    run = _RunningJob(hosts, commands, on_line, silence, logs)
    with stop_on_signals():
        try:
            run.start(token)
            run.watch(start_timeout, timeout)
        finally:
            run.stop()
        return JobOutcome(tuple(sorted(run.failures, key=lambda f: f.is_consequence)))


@dataclass(eq=False)
class _HostAgent(Child):
    """The agent of a host, as the launcher sees it: what reaches it, and what it has said."""

    number: int
    place: str
    on_message: Callable[[_HostAgent, dict[str, Any]], None]
    on_line: Callable[[str, str, bool], None]
    heard: float = field(default_factory=time.monotonic)
    port: int | None = None
    ended: dict[str, int] = field(default_factory=dict)
    tails: dict[str, deque[str]] = field(default_factory=dict)
    is_lost: bool = False

    def streams(self) -> list[LineStream]:
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        return [
            LineStream(self.process.stdout, self._take),
            LineStream(self.process.stderr, lambda line: self.say("", line.rstrip("\r"))),
        ]

    def say(self, who: str, line: str, is_shown: bool = True) -> None:
        """Keep and show a line of one of its processes, or of what reaches it."""
        self.tails.setdefault(who, deque(maxlen=_TAIL_LINES)).append(line)
        self.on_line(f"host {self.number} {who}".rstrip(), line, is_shown)

    def _take(self, line: str) -> None:
        self.heard = time.monotonic()
        if not line.startswith(MARK):
            self.say("", line)
            return
        self.on_message(self, json.loads(line.removeprefix(MARK)))

    def send(self, line: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it is gone: `code` tells
            self.process.stdin.write(line.encode() + b"\n")
            self.process.stdin.flush()

    def close_input(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()


class _RunningJob:
    """The state of a job: which processes have ended, and how."""

    def __init__(
        self,
        hosts: JobHosts,
        commands: JobCommands,
        on_line: Callable[[str], None],
        silence: float,
        logs: JobLogs | None,
    ) -> None:
        self.hosts, self.commands = hosts, commands
        self.on_line, self.silence, self.logs = on_line, silence, logs
        self.last_turn, self.resumed, self.suspended = _seconds(), -math.inf, 0.0
        self.agents: list[_HostAgent] = []
        self.streams: list[LineStream] = []
        self.failures: list[JobFailure] = []
        self.is_stopping = False
        self.selector = selectors.DefaultSelector()

    # ------------------------------------------------------------------ start

    def start(self, token: str) -> None:
        for number, command in enumerate(self.hosts.commands):
            host = self.hosts.addresses[number]
            try:
                process = subprocess.Popen(
                    list(command),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                )
            except FileNotFoundError:
                raise ValueError(
                    f"{command[0]} was not found; install it, or choose another way to the hosts"
                ) from None
            agent = _HostAgent(process, number, host.address, self._message, self._line)
            self.agents.append(agent)
            for stream in agent.streams():
                self.streams.append(stream)
                self.selector.register(stream.file, selectors.EVENT_READ, stream)
            job = {
                "host": number,
                "address": host.address,
                "ip_config": self.hosts.ip_config,
                "token": token,
                "workspace": self.commands.workspace,
                "server": list(self.commands.server[number]),
                "trainer": self.commands.trainer,
                "up_line": self.commands.up_line[number],
                "num_trainers": self.commands.num_trainers,
                "num_local": self.commands.num_trainers * self.hosts.num_on_machine,
                "environment": dict(self.commands.environment),
                "silence": math.ceil(self.silence),
            }
            agent.send(json.dumps(job))

    def _line(self, who: str, line: str, is_shown: bool) -> None:
        if self.logs is not None:
            self.logs.add(who, line)
        if is_shown:
            self.on_line(f"[{who}] {line}")

    # ------------------------------------------------------------------ what agents say

    def _message(self, agent: _HostAgent, message: dict[str, Any]) -> None:
        if "said" in message:
            who = message["said"]
            # What torchrun says about a trainer that has failed is known by then, and long; a
            # server that is ended says that it was.
            is_known = self._is_echo(agent, who) or (who == _SERVER and self.is_stopping)
            agent.say(self._name(agent, who), message["line"], not is_known)
        elif "up" in message:
            agent.port = int(message["up"])
        elif "ended" in message:
            who, code = message["ended"], int(message["code"])
            agent.ended[who] = code
            is_failure = (code or who == _SERVER) and not self._is_echo(agent, who)
            if is_failure and not self.is_stopping:
                how = message.get("how", f"ended with {how_ended(code)}")
                if who.isdecimal() and code - _SIGNALLED in signal.valid_signals():
                    how += f", as a shell says for {how_ended(_SIGNALLED - code)}"
                self._fail(agent, self._name(agent, who), code, how)

    def _is_echo(self, agent: _HostAgent, who: str) -> bool:
        """Whether this is torchrun, after a trainer of its own has failed."""
        return who == _ENGINE and any(code for w, code in agent.ended.items() if w.isdecimal())

    def _name(self, agent: _HostAgent, who: str) -> str:
        if who.isdecimal():
            return f"rank {agent.number * self.commands.num_trainers + int(who)}"
        return "torchrun" if who == _ENGINE else who

    def _fail(self, agent: _HostAgent, who: str, code: int, how: str) -> None:
        self._check_suspended()
        name = f"host {agent.number} {who}".rstrip()
        tail = tuple(agent.tails.get(who, ()))
        if not self.failures:
            self.on_line(f"[{name}] {how}; all hosts are told to stop")
        self.failures.append(JobFailure(who=name, how=how, code=code, tail=tail))

    def _check_suspended(self) -> None:
        """Take this process for the first cause of what fails if it was not there for long."""
        self._turn()
        if self.failures or _seconds() - self.resumed > _RESUMED_SECONDS:
            return
        who = "the launcher"
        how = (
            f"was suspended for {self.suspended:.0f} s; hosts end what they run after "
            f"{self.silence:g} s in which they hear nothing of it"
        )
        self.on_line(f"{who} {how}")
        self.failures.append(JobFailure(who=who, how=how, code=1, tail=()))

    def _turn(self) -> None:
        """Notice how long this process was not there."""
        now = _seconds()
        if now - self.last_turn > self.silence - BEAT_SECONDS:  # since the last beat, so long
            self.resumed, self.suspended = now, now - self.last_turn
        self.last_turn = now

    # ------------------------------------------------------------------ watch

    def watch(self, start_timeout: float, timeout: float) -> None:
        """Return once all trainers have ended, or the others have had their time after one has."""
        started = time.monotonic()
        deadline, beat = started + start_timeout, started
        is_training = False
        while not self._have_trained():
            self._turn()
            read_streams(self.selector)
            now = time.monotonic()
            if now > beat:
                beat = now + BEAT_SECONDS
                for agent in self.agents:
                    agent.send("beat")
            for agent in self.agents:
                self._check(agent, now)
            if self.failures:
                self._listen(_GRACE_SECONDS)
                return
            if not is_training and all(agent.port is not None for agent in self.agents):
                is_training, deadline = True, math.inf
                assert self.agents[0].port is not None
                for agent in self.agents:
                    engine = self.commands.engine(agent.number, self.agents[0].port)
                    agent.send(json.dumps({"engine": engine}))
            if deadline == math.inf and self._ended_trainers():
                deadline = now + timeout
            if now > deadline:
                self._too_late(is_training, timeout if is_training else start_timeout)
                return

    def _ended_trainers(self) -> list[str]:
        return [who for agent in self.agents for who in agent.ended if who.isdecimal()]

    def _have_trained(self) -> bool:
        return all(_ENGINE in agent.ended for agent in self.agents) and not self.failures

    def _check(self, agent: _HostAgent, now: float) -> None:
        """See whether an agent is still there."""
        code = agent.code()
        if agent.is_lost or (code is None and now - agent.heard < self.silence):
            return
        agent.is_lost = True
        if code is None:
            how = f"({agent.place}) has said nothing for {self.silence:g} s"
        else:
            self._listen(0.2)
            how = f"({agent.place}) is gone: {self.hosts.by} ended with {how_ended(code)}"
        if not self.is_stopping:
            self._fail(agent, "", code or 1, how)

    def _too_late(self, is_training: bool, seconds: float) -> None:
        """Name those that have not started, or not ended, in time."""
        for agent in self.agents:
            if not is_training and agent.port is None:
                self._fail(agent, _SERVER, 1, f"was not up within {seconds:g} s")
            numbers = map(str, range(self.commands.num_trainers if is_training else 0))
            late = [number for number in numbers if number not in agent.ended]
            if is_training and not late and _ENGINE not in agent.ended:
                late = [_ENGINE]
            for who in late:
                how = f"did not end within {seconds:g} s after the first trainer had"
                self._fail(agent, self._name(agent, who), 1, how)

    def _listen(self, seconds: float) -> None:
        stop = time.monotonic() + seconds
        while time.monotonic() < stop and self.selector.get_map():
            read_streams(self.selector)
            if all(agent.code() is not None for agent in self.agents):
                stop = min(stop, time.monotonic() + 0.1)

    # ------------------------------------------------------------------ stop

    def stop(self) -> None:
        """Tell all hosts to stop, and wait until they have; not longer than it should take."""
        self.is_stopping = True
        try:
            for agent in self.agents:
                agent.close_input()
            stop = time.monotonic() + _STOP_SECONDS
            while time.monotonic() < stop and any(a.code() is None for a in self.agents):
                read_streams(self.selector)
            late = [agent for agent in self.agents if agent.code() is None]
            for agent in late:
                self.on_line(f"[host {agent.number}] did not stop within {_STOP_SECONDS:g} s")
            self._listen(0.2)
        finally:
            end_children(self.agents)
            for stream in self.streams:
                stream.finish()
                stream.file.close()
            self.selector.close()


def _seconds() -> float:
    """A clock that runs on while this machine sleeps, where the system has one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def print_line(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
