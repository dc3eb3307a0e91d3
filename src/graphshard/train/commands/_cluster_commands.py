# SPDX-License-Identifier: Apache-2.0
"""``graphshard copy``, ``serve`` and ``launch``: a cluster's parts, servers and trainers.

DGL's names of the options of ``copy`` and ``launch``, with underscores, are taken too.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer

from ..._base.settings import Unset
from ..launch import ExitCode
from ._options import PartitionPath, options_of, partition_json

if TYPE_CHECKING:
    from ..launch import HostCopy, JobHosts

_VARIABLE = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_IGNORED = "Accepted for DGL's command lines."

IpConfig = Annotated[Path, "The hosts, one 'address [port]' a line."]
SshPort = Annotated[int | None, "Port of sshd.", Unset("as ssh has it")]
SshUsername = Annotated[str | None, "Name of the user there.", Unset("as ssh has it")]
SshCommand = Annotated[str, "The ssh program, with options."]
_File = TypeVar("_File", str, Path)
IgnoredNumber = Annotated[int, typer.Option(help=_IGNORED, hidden=True)]


@options_of()
def copy(
    *,
    ip_config: IpConfig,
    part_config: Annotated[Path, "The partition's JSON, here."],
    workspace: Annotated[str, "Folder on each host; '~/' is the user's own."],
    rel_data_path: Annotated[
        str | None,
        "Folder of the partition in the workspace.",
        Unset("that of a relative --part-config"),
    ] = None,
    script_folder: Annotated[
        Path | None, "A folder that goes to the workspace, too.", Unset("none")
    ] = None,
    ssh_port: SshPort = None,
    ssh_username: SshUsername = None,
    ssh_command: SshCommand = "ssh",
    timeout: Annotated[float, "Longest time for one file, seconds."] = 3600.0,
) -> None:
    """Copy to each host its parts of a partition, the JSON and ip_config, over ssh.

    Files that are there with the same SHA-256 digest are not sent again.
    """
    from ...servers import read_ip_config
    from ..launch import RemoteShell, copy_partition

    copies = copy_partition(
        partition_json(part_config),
        read_ip_config(ip_config),
        RemoteShell(command=ssh_command, port=ssh_port, username=ssh_username),
        workspace,
        data_path=rel_data_path,
        script_folder=script_folder,
        ip_config=ip_config,
        timeout=timeout,
        on_host=_show,
    )
    if any(copy.error is not None for copy in copies):
        raise typer.Exit(ExitCode.FAILED)


def _show(done: HostCopy) -> None:
    typer.echo(f"error: {done}" if done.error else str(done), err=done.error is not None)


@options_of()
def serve(
    partition: PartitionPath,
    *,
    ip_config: IpConfig,
    host: Annotated[
        int, typer.Option(help="Which of them this is: its line, counted from 0.", min=0)
    ],
    listen: Annotated[
        str | None, "Address to listen on.", Unset("that of its line in --ip-config")
    ] = None,
    tls_certificate: Annotated[
        Path | None, "Certificate chain, PEM, for TLS.", Unset("no TLS")
    ] = None,
    tls_key: Annotated[Path | None, "Its key, PEM.", Unset("no TLS")] = None,
    restore: Annotated[
        Path | None,
        typer.Option(
            help="Folder of checkpoints to take persistent tensors from; it may be empty.",
            show_default="none",
            metavar="DIR",
        ),
    ] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        "What is logged on standard error: info has trainers that come and leave, warning those "
        "that are gone or refused, error faults of the server.",
    ] = "info",
) -> None:
    """Serve one host's parts of a graph to trainers, until the command is ended.

    The token is read from the file that GRAPHSHARD_TOKEN_FILE names, or from GRAPHSHARD_TOKEN.
    """
    from ..._base.files import remove_abandoned
    from ...servers import GraphServer, read_ip_config
    from ...servers.rpc import read_token

    with ExitStack() as stack:
        stack.enter_context(_logging(log_level))
        # An agent of graphshard launch that was killed has left its folder, with the token.
        stack.callback(remove_abandoned)
        hosts = read_ip_config(ip_config)
        if host >= len(hosts):
            raise ValueError(
                f"--host must be a line of {ip_config}, below {len(hosts)} (got {host})"
            )
        own = hosts[host]
        server = GraphServer(
            host,
            len(hosts),
            partition_json(partition),
            read_token(),
            own.address if listen is None else listen,
            own.port,
            certificate=_both_or_none(tls_certificate, tls_key),
            restore=restore,
        )
        stack.callback(server.stop)
        if restore is not None:
            what = f"found no checkpoint in {restore}"
            if (from_step := server.restored) is not None:
                what = f"restored {from_step.num_tensors} tensors of step {from_step.step}"
                what += f" from {from_step.path}"
            print(f"host {host} of {len(hosts)} {what}", flush=True)
        print(f"host {host} of {len(hosts)} serves {partition} on {server.address}", flush=True)
        threading.Event().wait()  # until a signal ends it


@contextmanager
def _logging(level: str) -> Iterator[None]:
    """What graphshard logs goes to standard error, with times."""
    log = logging.getLogger("graphshard")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    before, log.propagate = (log.level, log.propagate), False
    log.addHandler(handler)
    log.setLevel(level.upper())
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]


@options_of()
def launch(
    script: Annotated[
        list[str],
        typer.Argument(
            help="The command of a trainer, such as 'python train.py': a line for the shell of a "
            "host, where 'python' is the interpreter that has graphshard.",
            metavar="COMMAND",
        ),
    ],
    *,
    part_config: Annotated[str, "The partition's JSON on each host, in WORKSPACE."],
    ip_config: Annotated[
        Path | None,
        "The hosts, one 'address [port]' a line: a file here, or in WORKSPACE.",
        Unset("none: give this, --local or --slurm"),
    ] = None,
    local: Annotated[
        int | None, "Instead: so many hosts on this machine, without ssh.", Unset("none")
    ] = None,
    slurm: Annotated[bool, "Instead: the nodes of this Slurm allocation."] = False,
    workspace: Annotated[str | None, "Folder on each host.", Unset("the path of this folder")] = (
        None
    ),
    num_trainers: Annotated[
        int, typer.Option("--num-trainers", "--num-clients", help="Trainers on each host.")
    ] = 1,
    num_omp_threads: Annotated[
        int | None, "Threads of each process.", Unset("a trainer's share of the cores")
    ] = None,
    extra_envs: Annotated[
        list[str] | None, "NAME=VALUE for servers and trainers; repeatable.", Unset("none")
    ] = None,
    python: Annotated[
        str | None,
        "Interpreter on the hosts that has graphshard.",
        Unset("the path of this one"),
    ] = None,
    server_options: Annotated[
        str | None, "Further options of graphshard serve.", Unset("none")
    ] = None,
    tls_certificate: Annotated[
        str | None, "Certificate chain on each host, PEM, for TLS.", Unset("no TLS")
    ] = None,
    tls_key: Annotated[str | None, "Its key, PEM.", Unset("no TLS")] = None,
    start_timeout: Annotated[float, "Until servers are up, seconds."] = 600.0,
    timeout: Annotated[float, "For trainers to end after one has, seconds."] = 1800.0,
    log_dir: Annotated[
        Path | None,
        "Folder here for a file of what each process prints.",
        Unset("a temporary one, which stays if the job fails"),
    ] = None,
    ssh_port: SshPort = None,
    ssh_username: SshUsername = None,
    ssh_command: SshCommand = "ssh",
    num_samplers: IgnoredNumber = 0,
    num_servers: IgnoredNumber = 1,
    num_server_threads: IgnoredNumber = 1,
    graph_format: Annotated[str, typer.Option(help=_IGNORED, hidden=True)] = "csc",
) -> None:
    """Run a training script on all hosts: a graph server on each, and torchrun.

    The token is made here, new for each job, and reaches hosts by the standard input of ssh.
    """
    from ...partition.format import read_config
    from ...servers import parts_of_host, read_ip_config
    from ..launch import LaunchConfig, RemoteShell, of_slurm_job, on_this_machine, over_ssh
    from ..launch import launch as launch_job

    if ip_config is None:
        for name, given in (
            ("--ssh-port", ssh_port is not None),
            ("--ssh-username", ssh_username is not None),
            ("--ssh-command", ssh_command != "ssh"),
        ):
            if given:
                raise ValueError(f"{name} is for hosts of --ip-config, over ssh; leave it out")
    if local is not None and python is not None:
        raise ValueError(
            f"--python is for other hosts, and --local runs this interpreter (got {python}); run "
            "graphshard of that interpreter"
        )
    if num_omp_threads is not None and num_omp_threads < 1:
        raise ValueError(f"--num-omp-threads must be at least 1 (got {num_omp_threads})")
    for name, value, default in (
        ("--num-samplers", num_samplers, 0),
        ("--num-servers", num_servers, 1),
        ("--num-server-threads", num_server_threads, 1),
        ("--graph-format", graph_format, "csc"),
    ):
        if value != default:
            warnings.warn(
                f"{name} {value} has no effect: one server serves all parts of its host, and "
                "samples are drawn by trainers; leave it out",
                stacklevel=2,
            )
    python = sys.executable if python is None else python
    workspace = str(Path.cwd()) if workspace is None else workspace
    if (ip_config is not None) + (local is not None) + slurm != 1:
        raise ValueError("give one of --ip-config (hosts over ssh), --local N and --slurm")
    tls = _both_or_none(tls_certificate, tls_key)
    hosts: JobHosts
    if local is not None:
        hosts = on_this_machine(local)
    elif slurm:
        hosts = of_slurm_job(python)
    else:
        assert ip_config is not None
        shell = RemoteShell(command=ssh_command, port=ssh_port, username=ssh_username)
        hosts = over_ssh(read_ip_config(_file_of_hosts(ip_config, workspace)), shell, python)
    words = list(script)
    variables = [word for text in extra_envs or () for word in shlex.split(text)]
    while len(words) > 1 and _VARIABLE.fullmatch(words[0]):  # DGL's --extra_envs takes several
        variables.append(words.pop(0))
    environment = dict(_variable(word) for word in variables)
    if num_omp_threads is not None:
        environment["OMP_NUM_THREADS"] = str(num_omp_threads)
    config = LaunchConfig(
        part_config=part_config,
        workspace=workspace,
        num_trainers=num_trainers,
        environment=environment,
        server_options=shlex.split(server_options or ""),
        tls=tls,
        start_timeout=start_timeout,
        timeout=timeout,
        log_folder=log_dir,
    )
    if local is not None:
        path = os.path.join(os.path.expanduser(workspace), part_config)
        parts_of_host(0, local, read_config(path).num_parts)  # wrong here is wrong on each host
    outcome = launch_job(hosts, words, config)
    if outcome.failures:
        sys.stderr.write(outcome.report() + "\n")
        raise typer.Exit(outcome.exit_code)


def _both_or_none(certificate: _File | None, key: _File | None) -> tuple[_File, _File] | None:
    if (certificate is None) != (key is None):
        raise ValueError("--tls-certificate and --tls-key go together; give both")
    return None if certificate is None or key is None else (certificate, key)


def _file_of_hosts(ip_config: Path, workspace: str) -> Path:
    """The file of the hosts: from here, or as DGL's launcher has it from the workspace."""
    inside = Path(os.path.expanduser(workspace)) / ip_config
    return inside if not ip_config.exists() and inside.exists() else ip_config


def _variable(word: str) -> tuple[str, str]:
    if not _VARIABLE.fullmatch(word):
        raise ValueError(f"--extra-envs takes NAME=VALUE (got {word!r})")
    name, _, value = word.partition("=")
    return name, value
