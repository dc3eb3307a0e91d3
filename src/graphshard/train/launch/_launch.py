# SPDX-License-Identifier: Apache-2.0
"""launch: servers, addresses and a token for a training script, which torchrun starts per host."""

from __future__ import annotations

import os
import secrets
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..._base.typing import LONGEST_TIMEOUT
from ._hosts import JobHosts
from ._logs import JobLogs
from ._run import JobCommands, JobOutcome, print_line, run_job


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
        for name in ("start_timeout", "timeout"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0 (got {getattr(self, name)})")
            if getattr(self, name) > LONGEST_TIMEOUT:
                raise ValueError(
                    f"{name} must be at most {LONGEST_TIMEOUT:,} seconds (got "
                    f"{getattr(self, name)})"
                )


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
        config: The rest.
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
        on_line(f"what each process printed is in {logs.folder}")
        raise
    finally:
        logs.close(keep=not has_ended_well)
    return replace(outcome, logs=None if logs.is_removed else logs.folder)


def script_line(script: Sequence[str]) -> str:
    """The command of a trainer, as a line for a shell.

    One word is such a line already, as DGL's launcher takes it; a file of Python needs no
    interpreter before it.

    Raises:
        ValueError: There is none.
    """
    line = script[0].strip() if len(script) == 1 else shlex.join(script)
    if not line:
        raise ValueError('the command of a trainer is empty; give one, such as "python train.py"')
    return f"python {line}" if line.split()[0].endswith(".py") else line
