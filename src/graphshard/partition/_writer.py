# SPDX-License-Identifier: Apache-2.0
"""PartitionWriter: writes a partition folder so that a reader never finds half of one.

Files are staged; then, part by part, the old folder steps aside and the new one takes its place,
and the JSON comes last. Why that works is in docs/design/partition_format.md.

[Note: several graphs in a folder]
The first graph of a folder has its parts in ``part0``, ``part1`` and so on, as with DGL; another
one that comes to the same folder has them in ``<graph_name>-part0`` and so on. A JSON says where
its parts are, and a graph that is written again keeps its place.

[Note: journal]
A partition is made in stages (`_streamed`), each of which writes to a folder of its own::

    .<graph_name>-work/
    ├── journal.json      what is made, by whom, and the results of the stages that are finished
    └── <stage>/          the files of a stage

When a stage is finished, its results and the sizes of its files go into the journal, which is
replaced in one step. A run that finds the journal of the same work takes finished stages from it
and begins the others anew, so it ends with the same bytes. A process that is killed loses nothing
that it has written; a machine that goes down may. So a journal is of one boot of one machine, and
no file is forced to disk before the partition is whole.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from .._base.files import (
    check_text,
    parse_json,
    read_text_regular,
    sync_folder,
    write_json,
    writing,
)
from ..errors import PartitionFormatError
from .checked_files import FileRecord, RowSource, write_tensors
from .format import FORMAT, FORMAT_VERSION, PART_FILES, build_of, displaced_folder, read_config

if TYPE_CHECKING:
    from ._ranks import PartitionRanks


class PartitionWriter:
    """Writes one partition folder; see the note on the module. Use as a context manager.

    Args:
        out_path: The folder; made if need be.

    Raises:
        ValueError: The name cannot name a file, the folder holds something else, or it holds a
            partition of that name that must not be replaced.
        RuntimeError: Another process is writing here.
    """

    def __init__(
        self, out_path: str | os.PathLike[str], graph_name: str, *, overwrite: bool = True
    ) -> None:
        check_graph_name(graph_name)
        check_text(os.fspath(out_path), "out_path")
        self._overwrite = overwrite
        self.root = Path(os.path.abspath(out_path))
        self.graph_name = graph_name
        self.json_path = self.root / f"{graph_name}.json"
        #: For what is kept from one run to the next until the partition is whole; see the note.
        self.work_folder = self.root / f".{graph_name}-work"
        self._records: dict[int, dict[str, FileRecord]] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> PartitionWriter:
        self.root.mkdir(parents=True, exist_ok=True)
        with self._stack:
            self._stack.enter_context(_lock(self.root))
            self._old, self._prefix = self._existing()
            self._part_folder = re.compile(re.escape(self._prefix) + _PART_FOLDER.pattern)
            for folder in _items(self.root, self._part_folder):
                _check_ours(folder, _IN_PART)
            self._recover()
            prefix = f".{self.graph_name}-staging-"
            self._staging = Path(tempfile.mkdtemp(prefix=prefix, dir=self.root))
            #: For the stages of a run of which nothing is kept for the next one.
            self.stages_folder = self._staging / "stages"
            self._stack.callback(shutil.rmtree, self._staging, ignore_errors=True)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def write_file(self, part: int, kind: str, tensors: Mapping[str, Tensor | RowSource]) -> None:
        """Write one file of a part, counted from 0; several threads may, each a file of its own."""
        folder = self._staging / self._folder_of(part)
        folder.mkdir(exist_ok=True)
        record = write_tensors(folder / PART_FILES[kind], tensors)
        self._records.setdefault(part, {})[kind] = record

    def adopt_file(self, part: int, kind: str, path: Path, record: FileRecord) -> None:
        """Take a file of a part that `write_tensors` wrote on the same disk; it is moved."""
        folder = self._staging / self._folder_of(part)
        folder.mkdir(exist_ok=True)
        os.rename(path, folder / PART_FILES[kind])
        self._records.setdefault(part, {})[kind] = record

    def part_bytes(self, part: int) -> int:
        """Bytes of the files of a part that have been written."""
        return sum(record.bytes for record in self._records[part].values())

    def commit(self, content: Mapping[str, Any]) -> None:
        """Put everything in place; ``content`` is the JSON without format, files and build."""
        full = dict(content)
        names = {folder.name for folder in _items(self.root, self._part_folder)}
        for part in range(len(self._records)):
            names.add(folder := self._folder_of(part))
            sync_folder(self._staging / folder)
            entry: dict[str, Any] = {}
            files: dict[str, Any] = {}
            for kind, name in PART_FILES.items():
                entry[kind] = f"{folder}/{name}"
                files[entry[kind]] = asdict(self._records[part][kind])
            full[f"part-{part}"] = {**entry, "files": files}
        full |= {"format": FORMAT, "format_version": FORMAT_VERSION}
        full["build"] = build_of(full)
        staged_json = self._staging / self.json_path.name
        write_json(staged_json, full)
        sync_folder(self._staging)
        discarded = self._staging / "discarded"
        aside = discarded
        if self._old is not None:
            aside = displaced_folder(self.json_path, self._old)
        aside.mkdir()
        sync_folder(self.root)
        for name in sorted(names):
            if (self.root / name).exists():
                os.rename(self.root / name, aside / name)
            if (self._staging / name).exists():
                os.rename(self._staging / name, self.root / name)
            sync_folder(self.root)
        os.replace(staged_json, self.json_path)
        sync_folder(self.root)
        shutil.rmtree(self.work_folder, ignore_errors=True)
        if aside != discarded:  # in one step, lest a reader or a later writer find half of it
            os.rename(aside, discarded)

    def _folder_of(self, part: int) -> str:
        return f"{self._prefix}part{part}"

    def _existing(self) -> tuple[str | None, str]:
        """The build of the JSON that is there already, and what the names of its parts begin with.

        Where there is none, None, and what the names of a new one shall begin with.
        """
        if not self.json_path.exists():
            is_shared = any(map(_has_parts, sorted(self.root.glob("*.json"))))
            return None, f"{self.graph_name}-" if is_shared else ""
        if not self._overwrite:
            raise ValueError(
                f"{self.json_path} exists; choose another graph_name, or leave overwrite=False out "
                "to replace it"
            )
        why = "it is of another format"
        try:
            config = read_config(self.json_path)
            if config.layout == "graphshard":
                folder = config.files[0]["part_graph"].name.split("/")[0]
                own = f"{self.graph_name}-"
                return config.build, own if folder == f"{own}part0" else ""
        except PartitionFormatError as error:
            why = str(error)
        raise ValueError(
            f"{self.json_path} exists and is not a partition that graphshard wrote ({why}); choose "
            "another out_path or graph_name, or move it away"
        )

    def _recover(self) -> None:
        """Put back the parts of the JSON that is there; drop what belongs to no JSON.

        Both are what earlier writers left; first it is made sure that nothing else is in it.
        """
        name = re.escape(self.graph_name)
        ours = re.compile(rf"\.{name}-(staging-[a-z0-9_]+|[0-9a-f]{{16}})")
        leftovers = _items(self.root, ours)
        of_writer = re.compile(rf"({name}-)?{_PART_FOLDER.pattern}|discarded|stages|{name}\.json")
        for leftover in leftovers:
            _check_ours(leftover, of_writer)
            for inside in (leftover, leftover / "discarded"):
                for folder in _items(inside, self._part_folder) if inside.is_dir() else ():
                    _check_ours(folder, _IN_PART)
        current = None if self._old is None else displaced_folder(self.json_path, self._old)
        for leftover in leftovers:
            if leftover == current:
                for part in _items(leftover, self._part_folder):
                    _remove(self.root / part.name)
                    os.rename(part, self.root / part.name)
            shutil.rmtree(leftover)


_JOURNAL = "journal.json"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


MakeStage: TypeAlias = Callable[[Path], Mapping[str, Any]]
"""Makes the files of a stage in an empty folder; returns its results, which JSON can hold."""


class Journal:
    """The stages of a run and their folder, see the note; several threads may run stages.

    Args:
        folder: Made if need be; if it holds the journal of other work, it is emptied.
        work: What identifies the work: numbers, texts, lists, dicts. None: nothing is kept for
            another run.
    """

    ranks: PartitionRanks | None = None  # that make the stages together
    leads = True

    def __init__(self, folder: Path, work: Mapping[str, Any] | None) -> None:
        self.folder = folder
        self._stages: dict[str, Any] = {}
        self._lock = threading.Lock()
        self._work = None
        found = None
        if work is not None:
            self._work = json.loads(json.dumps({**work, "boot": _boot_id()}))
            found = self._read()
        if found is None:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            self._write()
        else:
            self._stages = found
        self.resumes = bool(found)

    def run(self, name: str, make: MakeStage) -> dict[str, Any]:
        """The results of a stage: from the journal, or made now.

        Args:
            name: Of the stage, and of its folder.
            make: Is called with an empty folder; returns what JSON can hold.
        """
        with self._lock:
            entry = self._stages.get(name)
        if entry is None or not (
            entry["files"] is None or entry["files"] == sizes_of_files(self.path(name))
        ):
            entry = None if self.ranks is None else self.handed_over(name)
            entry = entry or self.make(name, make)
            with self._lock:
                self._stages[name] = entry
                self._write()
            if self.ranks is not None:
                self.path(f"{name}.json").unlink(missing_ok=True)
        return dict(entry["results"])

    def run_each(self, stages: Mapping[str, MakeStage], num_threads: int) -> list[dict[str, Any]]:
        """The results of stages that need not wait for each other; other ranks make theirs."""
        ranks = self.ranks
        mine = [
            name
            for i, name in enumerate(stages)
            if ranks is None or ranks.is_mine(i) or name in self._stages
        ]
        if num_threads == 1 or len(mine) < 2:
            for name in mine:
                self.run(name, stages[name])
        else:
            with ThreadPoolExecutor(max_workers=min(num_threads, len(mine))) as pool:
                list(pool.map(self.run, mine, map(stages.__getitem__, mine)))
        if ranks is not None:
            for name in stages:
                if name not in self._stages:
                    ranks.wait(partial(self.handed_over, name), f"finish {name}")
        return [self.run(name, make) for name, make in stages.items()]

    def make(self, name: str, make: MakeStage) -> dict[str, Any]:
        """Make a stage: its results, and the sizes of its files where they are kept."""
        folder = self.path(name)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        results = json.loads(json.dumps(dict(make(folder))))
        return {"results": results, "files": None if self._work is None else sizes_of_files(folder)}

    def handed_over(self, name: str) -> dict[str, Any] | None:
        """What another rank has made of a stage, if it has."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            entry = dict(parse_json(read_text_regular(self.path(f"{name}.json"))))
            if entry["files"] == sizes_of_files(self.path(name)):
                return entry
        return None

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
            content = parse_json(read_text_regular(self.folder / _JOURNAL))
            if content["work"] == self._work:
                return dict(content["stages"])
        return None

    def _write(self) -> None:
        if self._work is None:
            return
        path = self.folder / _JOURNAL
        new = path.with_suffix(".new")
        with writing(path), open(new, "w", encoding="utf-8") as file:
            # Not `json.dump`, which takes ten times as long: this is once for each part.
            file.write(json.dumps({"work": self._work, "stages": self._stages}))
        os.replace(new, path)


def sizes_of_files(folder: Path) -> dict[str, int]:
    """Sizes of the files of a stage, by name."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_size for path in files}


def _boot_id() -> str:
    with contextlib.suppress(OSError, ValueError):
        return read_text_regular(_BOOT_ID).strip()
    return ""


def check_graph_name(graph_name: str) -> None:
    """Raise unless a graph's name can name a file."""
    check_text(graph_name, "graph_name")
    if not graph_name or graph_name.startswith(".") or set(graph_name) & set("/\\\0"):
        raise ValueError(
            "graph_name must be usable as a file name: not empty, no leading dot, no slash "
            f"(got {graph_name!r})"
        )
    size = len(graph_name.encode())
    if size > _MAX_NAME:
        raise ValueError(
            f"graph_name must have at most {_MAX_NAME} bytes, because names of files are made of "
            f"it (got {size}, {graph_name!r:.80}...); choose a shorter one"
        )


_MAX_NAME = 200
_PART_FOLDER = re.compile(r"part[0-9]+")
# And the ids by which users name nodes: graphshard/data/id_files.py.
_ID_FILE = r"ids-[0-9]+\.arrow"
_IN_PART = re.compile("|".join([*(re.escape(name) for name in PART_FILES.values()), _ID_FILE]))


def _has_parts(path: Path) -> bool:
    """Whether a JSON speaks of parts; one that is damaged may, too."""
    try:
        return "part-0" in read_config(path).content
    except PartitionFormatError:
        with contextlib.suppress(OSError, ValueError):
            return '"part-0"' in read_text_regular(path)
    return False


def _check_ours(folder: Path, names: re.Pattern[str]) -> None:
    """Raise unless a folder, if it is there, is one and holds only what writers put into it."""
    if not os.path.lexists(folder):
        return
    if not folder.is_dir():
        raise ValueError(
            f"{folder} is not a folder that graphshard wrote; choose another out_path, or move it "
            "away"
        )
    strange = sorted(item.name for item in folder.iterdir() if not names.fullmatch(item.name))
    if strange:
        raise ValueError(
            f"{folder} holds files that graphshard did not write (such as {strange[0]}); choose "
            "another out_path, or move them away"
        )


def _items(folder: Path, names: re.Pattern[str]) -> list[Path]:
    """What a folder holds whose whole name fits a pattern, sorted."""
    return sorted(item for item in folder.iterdir() if names.fullmatch(item.name))


def _remove(path: Path) -> None:
    """Remove a folder, or a link to one and not what it leads to."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold a folder against other writers; the system frees it if this process dies."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise RuntimeError(
                    f"another process is partitioning into {folder}; call partition_graph from "
                    "one process only, or give each its own out_path"
                ) from None
        yield
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)
