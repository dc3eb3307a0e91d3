# SPDX-License-Identifier: Apache-2.0
"""JobLogs: what each process of a job prints, in a file of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

_MOST_OPEN = 128


class JobLogs:
    """A new folder with a file for each process: ``host0-server.log``, ``host1-rank3.log``.

    Args:
        parent: Where the folder goes, made if it is not there; None for where temporary files go.
            There it is removed by `close` unless it is to be kept.
        on_error: Told once if a file cannot be written, as where the disk is full; the job goes on.

    Raises:
        OSError: The folder cannot be made.

    Attributes:
        folder: The folder.
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
