# SPDX-License-Identifier: Apache-2.0
"""``graphshard serve``."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from ..._base.files import remove_abandoned
from ...servers import GraphServer, read_ip_config
from ...servers.rpc import read_token
from ._paths import partition_json


def serve(
    partition: Annotated[Path, typer.Argument(help="The partition's JSON.", metavar="PARTS.json")],
    ip_config: Annotated[
        Path, typer.Option("--ip-config", help="The hosts, one 'address [port]' a line.")
    ],
    host: Annotated[
        int, typer.Option("--host", help="Which of them this is: its line, counted from 0.", min=0)
    ],
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen", help="Address to listen on.", show_default="that of its line in --ip-config"
        ),
    ] = None,
    certificate: Annotated[
        Path | None,
        typer.Option(
            "--tls-certificate", help="Certificate chain, PEM, for TLS.", show_default="no TLS"
        ),
    ] = None,
    key: Annotated[
        Path | None, typer.Option("--tls-key", help="Its key, PEM.", show_default="no TLS")
    ] = None,
    restore: Annotated[
        Path | None,
        typer.Option(
            "--restore",
            help="Folder of checkpoints to take persistent tensors from; it may be empty.",
            show_default="none",
            metavar="DIR",
        ),
    ] = None,
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        typer.Option(
            "--log-level",
            help="What is logged on standard error: info has trainers that come and leave, "
            "warning those that are gone or refused, error faults of the server.",
        ),
    ] = "info",
) -> None:
    """Serve one host's parts of a graph to trainers, until the command is ended.

    The token is read from the file that GRAPHSHARD_TOKEN_FILE names, or from GRAPHSHARD_TOKEN.
    """
    with _logging(log_level):
        try:
            _serve(partition, ip_config, host, listen, certificate, key, restore)
        finally:
            # An agent of graphshard launch that was killed has left its folder, with the token.
            remove_abandoned()


def _serve(
    partition: Path,
    ip_config: Path,
    host: int,
    listen: str | None,
    certificate: Path | None,
    key: Path | None,
    restore: Path | None,
) -> None:
    hosts = read_ip_config(ip_config)
    if host >= len(hosts):
        raise ValueError(f"--host must be a line of {ip_config}, below {len(hosts)} (got {host})")
    if (certificate is None) != (key is None):
        raise ValueError("--tls-certificate and --tls-key go together; give both")
    tls = None if certificate is None or key is None else (certificate, key)
    own = hosts[host]
    server = GraphServer(
        host,
        len(hosts),
        partition_json(partition),
        read_token(),
        own.address if listen is None else listen,
        own.port,
        certificate=tls,
        restore=restore,
    )
    if restore is not None:
        found = server.restored
        what = f"found no checkpoint in {restore}"
        if found is not None:
            what = f"restored {found.num_tensors} tensors of step {found.step} from {found.path}"
        print(f"host {host} of {len(hosts)} {what}", flush=True)
    print(f"host {host} of {len(hosts)} serves {partition} on {server.address}", flush=True)
    try:
        threading.Event().wait()  # until a signal ends it
    finally:
        server.stop()


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
