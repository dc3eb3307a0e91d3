# SPDX-License-Identifier: Apache-2.0
"""launch: servers, addresses and a token for a training script, which torchrun starts per host.

[Note: how a job on hosts ends]
    Servers start on all hosts; once all are up, torchrun does on each. The first process that fails
    (a trainer, a server, torchrun, or the connection to a host) is said at once. After the time
    that `Watch` gives the others all hosts are told to stop, by the end of the stream that their
    agents read. Agents end what they have started; see `_host_agent`. One that does not within
    `_STOP_SECONDS` is not waited for: its connection is closed, and it ends by itself.

    A launcher that was suspended (Ctrl-Z, a laptop that sleeps) finds its agents gone, because they
    heard nothing of it. That is its own fault and not theirs, so it is the first cause then.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

from ..._base.settings import LONGEST_TIMEOUT
from ._children import Child, LineStream, how_ended
from ._host_agent import BEAT_SECONDS, END_SECONDS, ENGINE, MARK, SERVER
from ._hosts import JobHosts
from ._watch import TAIL_LINES, Watch, report_text
from ._worker import ExitCode, stop_on_signals

_SIGNALLED = 128
_RESUMED_SECONDS = 60.0  # in which connections are found to be broken
_STOP_SECONDS = END_SECONDS + 7.0
_MOST_OPEN = 128


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """What a job is.

    Args:
        part_config: The partition's JSON on each host, relative to ``workspace``.
        workspace: Folder on each host in which servers and trainers run.
        num_trainers: Trainers on each host.
        environment: Further variables of servers and trainers.
        server_options: Further arguments of ``graphshard serve``.
        tls: Certificate and key on each host, relative to ``workspace``; trainers check the
            servers with the certificate.
        start_timeout: Seconds until all servers are up.
        timeout: Seconds that trainers have to end after one has.
        log_folder: Folder on this host in which a new one gets a file for what each process prints;
            None for a temporary one, which stays if the job does not end well.
    """

    part_config: str
    workspace: str
    num_trainers: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    server_options: Sequence[str] = ()
    tls: tuple[str, str] | None = None
    start_timeout: float = 600.0
    timeout: float = 1800.0
    log_folder: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.num_trainers < 1:
            raise ValueError(f"num_trainers must be at least 1 (got {self.num_trainers})")
        for name, value in (("start_timeout", self.start_timeout), ("timeout", self.timeout)):
            if not value > 0:
                raise ValueError(f"{name} must be above 0 (got {value})")
            if value > LONGEST_TIMEOUT:
                raise ValueError(
                    f"{name} must be at most {LONGEST_TIMEOUT:,} seconds (got {value})"
                )


def print_line(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def launch(
    hosts: JobHosts,
    script: Sequence[str],
    config: LaunchConfig,
    *,
    on_line: Callable[[str], None] = print_line,
) -> JobOutcome:
    """Run a training script on all hosts, with one graph server on each; wait until it has ended.

    Trainers get torchrun's variables, and those that `graphshard.servers.initialize` reads. The
    token is new for each job. It reaches hosts by standard input, is there in a file that no other
    user may read, and goes with the job.

    Args:
        hosts: From `over_ssh`, `on_this_machine` or `of_slurm_job`.
        script: The command of a trainer, for the shell of each host: a line, or words that are
            passed on as they are. ``python`` is the interpreter that has graphshard.
        on_line: Called with each line that a process prints, after ``[host 1 rank 3]``.

    Returns:
        How the job ended. Also if it failed: ask ``exit_code`` and ``report()``.

    Raises:
        ValueError: The script is empty, or a program that reaches hosts is missing.
        OSError: The folder of logs cannot be made.
        KeyboardInterrupt: Ctrl-C; all hosts have been told to stop.
    """
    line = script_line(script)
    num_hosts = len(hosts.addresses)
    serve = ["{python}", "-m", "graphshard", "serve", config.part_config]
    # Every trainer comes to every server, which would be many lines.
    serve += ["--ip-config", "{ip_config}", "--log-level", "warning", *config.server_options]
    environment = dict(config.environment)
    if config.tls is not None:
        certificate, key = config.tls
        serve += ["--tls-certificate", certificate, "--tls-key", key]
        environment.setdefault("GRAPHSHARD_TLS_CERTIFICATE", certificate)
    job_id = secrets.token_hex(8)
    environment.setdefault("GRAPHSHARD_JOB_ID", job_id)

    def engine(host: int, port: int) -> list[str]:
        return [
            *("{python}", "-c", "{start_torchrun}", "--no-python", "--max-restarts=0"),
            *(f"--nnodes={num_hosts}", f"--nproc-per-node={config.num_trainers}"),
            *("--rdzv-backend=graphshard", f"--rdzv-id={job_id}", f"--rdzv-conf=rank={host}"),
            f"--rdzv-endpoint={hosts.addresses[0].address}:{port}",
            f"--local-addr={hosts.addresses[host].address}",
            *("{python}", "-c", "{start}", "trainer", "{folder}"),
        ]

    commands = JobCommands(
        server=[[*serve, "--host", str(host)] for host in range(num_hosts)],
        up_line=[f"host {host} of {num_hosts} serves" for host in range(num_hosts)],
        engine=engine,
        trainer=line,
        num_trainers=config.num_trainers,
        workspace=config.workspace,
        environment=environment,
    )
    logs = JobLogs(config.log_folder, on_line)
    has_ended_well = False
    try:
        outcome = run_job(
            hosts,
            commands,
            token=secrets.token_hex(),
            on_line=on_line,
            start_timeout=config.start_timeout,
            timeout=config.timeout,
            logs=logs,
        )
        has_ended_well = not outcome.failures
    except KeyboardInterrupt:
        on_line(_where_logs_are(logs.folder))
        raise
    finally:
        logs.close(keep=not has_ended_well)
    return replace(outcome, logs=None if logs.is_removed else logs.folder)


def script_line(script: Sequence[str]) -> str:
    """The command of a trainer, as a line for a shell.

    One word is such a line already, as DGL's launcher takes it; a file of Python needs no
    interpreter before it.
    """
    line = script[0].strip() if len(script) == 1 else shlex.join(script)
    if not line:
        raise ValueError('the command of a trainer is empty; give one, such as "python train.py"')
    return f"python {line}" if line.split()[0].endswith(".py") else line


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
        workspace: The folder there in which all run.
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
        text = report_text((f"{each.who} {each.how}", each.tail) for each in self.failures)
        return text if self.logs is None else f"{text}\n{_where_logs_are(self.logs)}"


def _where_logs_are(folder: Path) -> str:
    return f"what each process printed is in {folder}"


class JobLogs:
    """A new folder with a file for each process: ``host0-server.log``, ``host1-rank3.log``.

    Args:
        parent: Where the folder goes, made if it is not there; None for where temporary files go.
            There it is removed by `close` unless it is to be kept.
        on_error: Told once if a file cannot be written, as where the disk is full; the job goes on.

    Attributes:
        is_removed: Whether it is gone again.
    """

    def __init__(
        self, parent: str | os.PathLike[str] | None, on_error: Callable[[str], None]
    ) -> None:
        if parent is not None:
            os.makedirs(parent, exist_ok=True)
        prefix = f"graphshard-launch-{time.strftime('%Y%m%d-%H%M%S')}-"
        self.folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        self._is_temporary, self._on_error = parent is None, on_error
        self._files: dict[str, TextIO] = {}
        self._is_broken = self.is_removed = False

    def add(self, who: str, line: str) -> None:
        """Keep a line of a process, such as ``"host 1 rank 3"``."""
        if self._is_broken:
            return
        try:
            if who not in self._files:
                if len(self._files) >= _MOST_OPEN:
                    self._close_files()
                first, _, second = who.removeprefix("host ").partition(" ")
                name = "-".join([f"host{first}", *second.replace(" ", "").split()])
                path = self.folder / f"{name}.log"
                self._files[who] = open(path, "a", encoding="utf-8", buffering=1)  # noqa: SIM115
            self._files[who].write(line + "\n")
        except OSError as error:
            self._is_broken = True
            self._on_error(f"logs are no longer written to {self.folder}: {error}")

    def close(self, keep: bool) -> None:
        """Close the files; remove a temporary folder, unless it is to be kept."""
        self._close_files()
        if self._is_temporary and not keep:
            self.is_removed = True
            shutil.rmtree(self.folder, ignore_errors=True)

    def _close_files(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()
        self._files.clear()


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
        token: What trainers must know; it goes to hosts by standard input alone.
        on_line: See `launch`; times are those of `LaunchConfig`.
        silence: Seconds after which a host, or on a host the launcher, is taken for gone.
    """
    run = _RunningJob(hosts, commands, on_line, timeout, silence, logs)
    with stop_on_signals():
        try:
            run.start(token)
            run.watch(start_timeout)
        finally:
            run.stop()
        return JobOutcome(tuple(sorted(run.failures, key=lambda f: f.is_consequence)))


@dataclass(eq=False)
class _HostAgent(Child):
    """The agent of a host, as the launcher sees it: what reaches it, and what it has said."""

    number: int
    address: str
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
        self.tails.setdefault(who, deque(maxlen=TAIL_LINES)).append(line)
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
        timeout: float,
        silence: float,
        logs: JobLogs | None,
    ) -> None:
        self.hosts, self.commands = hosts, commands
        self.on_line, self.timeout, self.silence, self.logs = on_line, timeout, silence, logs
        self.last_turn, self.resumed, self.suspended = _seconds(), -math.inf, 0.0
        self.beat = 0.0
        self.agents: list[_HostAgent] = []
        self.failures: list[JobFailure] = []
        self.is_training = self.is_stopping = False
        num_hosts = len(hosts.addresses)
        self.children = Watch(range(num_hosts * commands.num_trainers), timeout, on_line)
        self.children.waits_for.update(f"host {host} torchrun" for host in range(num_hosts))

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
            self.children.add(agent, agent.streams())
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
            is_shown = not self._is_echo(agent, who) and not (who == SERVER and self.is_stopping)
            agent.say(self._name(agent, who), message["line"], is_shown)
        elif "up" in message:
            agent.port = int(message["up"])
        elif "ended" in message:
            who, code = message["ended"], int(message["code"])
            agent.ended[who] = code
            first = agent.number * self.commands.num_trainers
            if who == ENGINE:
                ranks = range(first, first + self.commands.num_trainers)
                self.children.waits_for -= {f"host {agent.number} torchrun", *ranks}
            elif who.isdecimal() and code == 0:
                self.children.note_end(first + int(who))
            is_failure = (code or who == SERVER) and not self._is_echo(agent, who)
            if is_failure and not self.is_stopping:
                how = message.get("how", f"ended with {how_ended(code)}")
                if who.isdecimal() and code - _SIGNALLED in signal.valid_signals():
                    how += f", as a shell says for {how_ended(_SIGNALLED - code)}"
                self._fail(agent, self._name(agent, who), code, how)

    def _is_echo(self, agent: _HostAgent, who: str) -> bool:
        """Whether this is torchrun, after a trainer of its own has failed."""
        return who == ENGINE and any(code for w, code in agent.ended.items() if w.isdecimal())

    def _name(self, agent: _HostAgent, who: str) -> str:
        if who.isdecimal():
            return f"rank {agent.number * self.commands.num_trainers + int(who)}"
        return "torchrun" if who == ENGINE else who

    def _fail(self, agent: _HostAgent, who: str, code: int, how: str) -> None:
        self._check_suspended()
        name = f"host {agent.number} {who}".rstrip()
        tail = tuple(agent.tails.get(who, ()))
        if not self.failures:
            self.on_line(f"[{name}] {how}; all hosts are told to stop")
        self.failures.append(JobFailure(who=name, how=how, code=code, tail=tail))
        self.children.note_failure()

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

    def watch(self, start_timeout: float) -> None:
        """Return once all trainers have ended, or the others have had their time after one has."""
        self.children.deadline = time.monotonic() + start_timeout
        self.children.run(self._look, self._agent_ended)
        if self.children.waits_for and not self.failures:
            self._too_late(self.timeout if self.is_training else start_timeout)

    def _look(self) -> None:
        """Say that this process is there; start trainers; see which hosts are silent."""
        self._turn()
        now = time.monotonic()
        if now > self.beat:
            self.beat = now + BEAT_SECONDS
            for agent in self.agents:
                agent.send("beat")
        for agent in self.agents:
            if not agent.is_lost and now - agent.heard > self.silence and agent.code() is None:
                agent.is_lost = True
                how = f"({agent.address}) has said nothing for {self.silence:g} s"
                self._fail(agent, "", 1, how)
        if self.is_training or self.failures or any(agent.port is None for agent in self.agents):
            return
        self.is_training, self.children.deadline = True, math.inf
        port = self.agents[0].port
        assert port is not None
        for agent in self.agents:
            agent.send(json.dumps({"engine": self.commands.engine(agent.number, port)}))

    def _agent_ended(self, agent: Child, code: int) -> None:
        assert isinstance(agent, _HostAgent)
        if agent.is_lost:
            return
        agent.is_lost = True
        self.children.listen(0.2)
        how = f"({agent.address}) is gone: {self.hosts.by} ended with {how_ended(code)}"
        self._fail(agent, "", code or 1, how)

    def _too_late(self, seconds: float) -> None:
        """Name those that have not started, or not ended, in time."""
        for agent in self.agents:
            if not self.is_training and agent.port is None:
                self._fail(agent, SERVER, 1, f"was not up within {seconds:g} s")
            numbers = map(str, range(self.commands.num_trainers if self.is_training else 0))
            late = [number for number in numbers if number not in agent.ended]
            if self.is_training and not late and ENGINE not in agent.ended:
                late = [ENGINE]
            for who in late:
                how = f"did not end within {seconds:g} s after the first trainer had"
                self._fail(agent, self._name(agent, who), 1, how)

    # ------------------------------------------------------------------ stop

    def stop(self) -> None:
        """Tell all hosts to stop, and wait until they have; not longer than it should take."""
        self.is_stopping = True
        try:
            for agent in self.agents:
                agent.close_input()
            self.children.wait(_STOP_SECONDS)
            for agent in self.agents:
                if agent.code() is None:
                    self.on_line(f"[host {agent.number}] did not stop within {_STOP_SECONDS:g} s")
            self.children.listen(0.2)
        finally:
            self.children.close()
            for stream in self.children.streams:
                stream.finish()


def _seconds() -> float:
    """A clock that runs on while this machine sleeps, where the system has one."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
