# SPDX-License-Identifier: Apache-2.0
"""``graphshard verify``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...data.task import read_task
from ...errors import PartitionFormatError
from ...partition import verify_partition
from ...partition.format import read_content
from ._paths import partition_json


def verify(
    partition: Annotated[Path, typer.Argument(help="The partition's JSON.", metavar="PARTS.json")],
    checksums: Annotated[
        bool,
        typer.Option(
            "--checksums/--no-checksums", help="Compute checksums, which reads every byte."
        ),
    ] = True,
) -> None:
    """Check a partition from end to end; exit code 1 if anything is wrong with it."""
    path = partition_json(partition)
    read_content(path)  # a wrong path is wrong input, not a damaged partition
    problems = verify_partition(path, checksums=checksums)
    try:
        read_task(path)  # the description of the task, which verify_partition knows nothing of
    except PartitionFormatError as error:
        if str(error) not in problems:  # that of the partition, told already
            problems.append(str(error))
    for problem in problems:
        print(problem)
    if problems:
        print(f"{path}: {len(problems)} problem(s)")
        raise typer.Exit(1)
    print(f"{path}: whole")
