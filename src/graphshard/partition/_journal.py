# SPDX-License-Identifier: Apache-2.0
"""Journal: the stages of a long run that are finished, so that it goes on after a kill.

::

    .<graph_name>-work/
    ├── journal.json      what is made, by whom, and the results of the stages that are finished
    └── <stage>/          the files of a stage

A stage is written to a folder of its own. When it is finished, its results and the sizes of its
files go into the journal, which is replaced in one step. A run that finds the journal of the same
work takes finished stages from it and begins the others anew, so it ends with the same bytes.

A process that is killed loses nothing that it has written; a machine that goes down may. So a
journal is of one boot of one machine, and no file is forced to disk before the partition is whole.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .._base.files import parse_json, read_text_regular, writing

_FILE = "journal.json"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Journal:
    """The journal of a run, and the folder of its stages; several threads may run stages.

    Args:
        folder: Made if need be; if it holds the journal of other work, it is emptied.
        work: What identifies the work: numbers, texts, lists, dicts.
    """

    def __init__(self, folder: Path, work: Mapping[str, Any]) -> None:
        self.folder = folder
        self._work = json.loads(json.dumps({**work, "boot": _boot_id()}))
        self._stages: dict[str, Any] = {}
        self._lock = threading.Lock()
        found = self._read()
        if found is None:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            self._write()
        else:
            self._stages = found
        self.resumes = found is not None and bool(found)

    def run(self, name: str, make: Callable[[Path], Mapping[str, Any]]) -> dict[str, Any]:
        """The results of a stage: from the journal, or made now.

        Args:
            name: Of the stage, and of its folder.
            make: Is called with an empty folder; returns what JSON can hold.
        """
        folder = self.path(name)
        with self._lock:
            entry = self._stages.get(name)
        if entry is not None and (entry["files"] is None or entry["files"] == _sizes(folder)):
            return dict(entry["results"])
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        results = json.loads(json.dumps(dict(make(folder))))
        with self._lock:
            self._stages[name] = {"results": results, "files": _sizes(folder)}
            self._write()
        return dict(results)

    def path(self, name: str) -> Path:
        """The folder of a stage."""
        return self.folder / name

    def drop(self, name: str) -> None:
        """Remove the files of a finished stage, which no later one needs; its results stay."""
        with self._lock:
            self._stages[name]["files"] = None
            self._write()
        shutil.rmtree(self.path(name), ignore_errors=True)

    def remove(self) -> None:
        """Remove everything; the work is finished."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self) -> dict[str, Any] | None:
        """Finished stages of this work; None if the folder is of other work, or of none."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            content = parse_json(read_text_regular(self.folder / _FILE))
            if content["work"] == self._work:
                return dict(content["stages"])
        return None

    def _write(self) -> None:
        path = self.folder / _FILE
        new = path.with_suffix(".new")
        with writing(path), open(new, "w", encoding="utf-8") as file:
            json.dump({"work": self._work, "stages": self._stages}, file)
        os.replace(new, path)


def _sizes(folder: Path) -> dict[str, int]:
    """Sizes of the files of a stage, by name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def _boot_id() -> str:
    with contextlib.suppress(OSError, ValueError):
        return read_text_regular(_BOOT_ID).strip()
    return ""
