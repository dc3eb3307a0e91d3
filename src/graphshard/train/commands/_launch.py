# SPDX-License-Identifier: Apache-2.0
"""``graphshard launch``; DGL's names of the options, with underscores, are taken too."""

from __future__ import annotations

import os
import re
import shlex
import sys
import warnings
from pathlib import Path
from typing import Annotated

import typer

from ...partition.format import read_config
from ...servers import parts_of_host, read_ip_config
from ..launch import JobHosts, LaunchConfig, RemoteShell, of_slurm_job, on_this_machine, over_ssh
from ..launch import launch as launch_job
from ._copy import SshCommand, SshPort, SshUsername

_VARIABLE = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_IGNORED = "Accepted for DGL's command lines."


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
    part_config: Annotated[
        str,
        typer.Option(
            "--part-config",
            "--part_config",
            help="The partition's JSON on each host, in WORKSPACE.",
        ),
    ],
    ip_config: Annotated[
        Path | None,
        typer.Option(
            "--ip-config",
            "--ip_config",
            help="The hosts, one 'address [port]' a line: a file here, or in WORKSPACE.",
            show_default="none: give this, --local or --slurm",
        ),
    ] = None,
    local: Annotated[
        int | None,
        typer.Option(
            help="Instead: so many hosts on this machine, without ssh.", show_default="none"
        ),
    ] = None,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Instead: the nodes of this Slurm allocation.")
    ] = False,
    workspace: Annotated[
        str | None,
        typer.Option(help="Folder on each host.", show_default="the path of this folder"),
    ] = None,
    num_trainers: Annotated[
        int,
        typer.Option(
            "--num-trainers",
            "--num_trainers",
            "--num-clients",
            "--num_clients",
            help="Trainers on each host.",
        ),
    ] = 1,
    num_omp_threads: Annotated[
        int | None,
        typer.Option(
            "--num-omp-threads",
            "--num_omp_threads",
            help="Threads of each process.",
            show_default="a trainer's share of the cores",
        ),
    ] = None,
    extra_envs: Annotated[
        list[str] | None,
        typer.Option(
            "--extra-envs",
            "--extra_envs",
            help="NAME=VALUE for servers and trainers; repeatable.",
            show_default="none",
        ),
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(
            help="Interpreter on the hosts that has graphshard.",
            show_default="the path of this one",
        ),
    ] = None,
    server_options: Annotated[
        str,
        typer.Option(
            "--server-options", help="Further options of graphshard serve.", show_default="none"
        ),
    ] = "",
    certificate: Annotated[
        str | None,
        typer.Option(
            "--tls-certificate",
            help="Certificate chain on each host, PEM, for TLS.",
            show_default="no TLS",
        ),
    ] = None,
    key: Annotated[
        str | None, typer.Option("--tls-key", help="Its key, PEM.", show_default="no TLS")
    ] = None,
    start_timeout: Annotated[float, typer.Option(help="Until servers are up, seconds.")] = 600.0,
    timeout: Annotated[
        float, typer.Option(help="For trainers to end after one has, seconds.")
    ] = 1800.0,
    log_dir: Annotated[
        Path | None,
        typer.Option(
            "--log-dir",
            help="Folder here for a file of what each process prints.",
            show_default="a temporary one, which stays if the job fails",
        ),
    ] = None,
    ssh_port: Annotated[int | None, SshPort] = None,
    ssh_username: Annotated[str | None, SshUsername] = None,
    ssh_command: Annotated[str, SshCommand] = "ssh",
    num_samplers: Annotated[
        int, typer.Option("--num-samplers", "--num_samplers", help=_IGNORED, hidden=True)
    ] = 0,
    num_servers: Annotated[
        int, typer.Option("--num-servers", "--num_servers", help=_IGNORED, hidden=True)
    ] = 1,
    num_server_threads: Annotated[
        int,
        typer.Option("--num-server-threads", "--num_server_threads", help=_IGNORED, hidden=True),
    ] = 1,
    graph_format: Annotated[
        str, typer.Option("--graph-format", "--graph_format", help=_IGNORED, hidden=True)
    ] = "csc",
) -> None:
    """Run a training script on all hosts: a graph server on each, and torchrun.

    The token is made here, new for each job, and reaches hosts by the standard input of ssh.
    """
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
    if (certificate is None) != (key is None):
        raise ValueError("--tls-certificate and --tls-key go together; give both")
    hosts: JobHosts
    if local is not None:
        hosts = on_this_machine(local)
    elif slurm:
        hosts = of_slurm_job(python)
    else:
        assert ip_config is not None
        shell = RemoteShell(command=ssh_command, port=ssh_port, username=ssh_username)
        hosts = over_ssh(read_ip_config(_found(ip_config, workspace)), shell, python)
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
        server_options=shlex.split(server_options),
        tls=None if certificate is None or key is None else (certificate, key),
        start_timeout=start_timeout,
        timeout=timeout,
        log_folder=log_dir,
    )
    if local is not None:
        found = os.path.join(os.path.expanduser(workspace), part_config)
        parts_of_host(0, local, read_config(found).num_parts)  # wrong here is wrong on each host
    outcome = launch_job(hosts, words, config)
    if outcome.failures:
        sys.stderr.write(outcome.report() + "\n")
        raise typer.Exit(outcome.exit_code)


def _found(ip_config: Path, workspace: str) -> Path:
    """The file of the hosts: from here, or as DGL's launcher has it from the workspace."""
    inside = Path(os.path.expanduser(workspace)) / ip_config
    return inside if not ip_config.exists() and inside.exists() else ip_config


def _variable(word: str) -> tuple[str, str]:
    if not _VARIABLE.fullmatch(word):
        raise ValueError(f"--extra-envs takes NAME=VALUE (got {word!r})")
    name, _, value = word.partition("=")
    return name, value
