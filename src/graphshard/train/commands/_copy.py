# SPDX-License-Identifier: Apache-2.0
"""``graphshard copy``; DGL's names of the options, with underscores, are taken too."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...servers import read_ip_config
from ..launch import ExitCode, HostCopy, RemoteShell, copy_partition
from ._paths import partition_json

IpConfig = typer.Option(
    "--ip-config", "--ip_config", help="The hosts, one 'address [port]' a line."
)
SshPort = typer.Option(
    "--ssh-port", "--ssh_port", help="Port of sshd.", show_default="as ssh has it"
)
SshUsername = typer.Option(
    "--ssh-username", "--ssh_username", help="Name of the user there.", show_default="as ssh has it"
)
SshCommand = typer.Option("--ssh-command", help="The ssh program, with options.")


def copy(
    *,
    ip_config: Annotated[Path, IpConfig],
    part_config: Annotated[
        Path, typer.Option("--part-config", "--part_config", help="The partition's JSON, here.")
    ],
    workspace: Annotated[str, typer.Option(help="Folder on each host; '~/' is the user's own.")],
    rel_data_path: Annotated[
        str | None,
        typer.Option(
            "--rel-data-path",
            "--rel_data_path",
            help="Folder of the partition in the workspace.",
            show_default="that of a relative --part-config",
        ),
    ] = None,
    script_folder: Annotated[
        Path | None,
        typer.Option(
            "--script-folder",
            "--script_folder",
            help="A folder that goes to the workspace, too.",
            show_default="none",
        ),
    ] = None,
    ssh_port: Annotated[int | None, SshPort] = None,
    ssh_username: Annotated[str | None, SshUsername] = None,
    ssh_command: Annotated[str, SshCommand] = "ssh",
    timeout: Annotated[float, typer.Option(help="Longest time for one file, seconds.")] = 3600.0,
) -> None:
    """Copy to each host its parts of a partition, the JSON and ip_config, over ssh.

    Files that are there with the same SHA-256 digest are not sent again.
    """
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
