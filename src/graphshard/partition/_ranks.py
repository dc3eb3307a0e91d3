# SPDX-License-Identifier: Apache-2.0
"""PartitionRanks: several processes that make the parts of one partition, in one folder.

Rank 0 reads the graph, assigns and numbers nodes, and puts the parts in place. What is one for each
relation or part (edges by their new ids, the files of parts with features and digests) is made by
all ranks, the i-th by rank ``i % num_ranks``. Since all of them see one folder, nothing is sent:
where edges and features are, and what was found, is said in files::

    out_path/
    ├── .graphshard-ranks/
    │   └── rank-<i>.json       what rank i says, anew every `_BEAT_SECONDS`: that it is there, whom
    │                           it has heard, its error; of rank 0 also what is to be made
    └── .<graph_name>-work/
        ├── journal.json        as always: rank 0 alone writes it
        ├── <stage>/            made by the rank whose turn it is
        └── <stage>.json        and its results, until rank 0 has put them into the journal

A rank counts only once it has heard the other one: files of earlier runs say nothing. The bytes of
a partition do not depend on the number of ranks. When a rank fails, the others say which and why;
when it is gone, they do so after the timeout. What was finished is kept for the next run.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from .._base.files import PathLike, parse_json, read_text_regular, writing
from .._base.kernels import num_threads
from ..errors import RankError
from ._streamed import Stages, Streaming
from ._writer import Journal, MakeStage, sizes_of_files
from .graph_files import ArrayFile, FileSource, GraphFiles

T = TypeVar("T")

RANKS_FOLDER = ".graphshard-ranks"
"""In the folder of the partition; what ranks say to each other."""

DEFAULT_RANKS_TIMEOUT = 60.0
"""Seconds after which a rank that says nothing counts as gone."""

_BEAT_SECONDS = 0.5
_LOOK_SECONDS = 0.1


class PartitionRanks:
    """One of the processes that make the parts of a partition. Use as a context manager.

    All enter it; rank 0 passes it to `partition_graph`, the others call `help`.

    Args:
        out_path: The folder of the partition, which all ranks see; made if need be.
        rank: Of this process.
        timeout: Seconds after which a rank that says nothing counts as gone.

    Raises:
        RankError: Another rank failed, did not come, or says nothing any more.

    Example:
        >>> with PartitionRanks("parts", 0, 2) as ranks:  # doctest: +SKIP
        ...     partition_graph(files, "g", 8, "parts", memory=1 << 29, ranks=ranks)
    """

    def __init__(
        self,
        out_path: PathLike,
        rank: int,
        num_ranks: int,
        *,
        timeout: float = DEFAULT_RANKS_TIMEOUT,
    ) -> None:
        if not 0 <= rank < num_ranks:
            raise ValueError(f"rank must be in [0, {num_ranks}) (got {rank})")
        self.rank, self.num_ranks, self.timeout = rank, num_ranks, timeout
        self._folder = Path(os.path.abspath(out_path)) / RANKS_FOLDER
        self._others = range(1, num_ranks) if rank == 0 else range(1)
        self._state: dict[str, Any] = {"id": secrets.token_hex(8), "beat": 0}
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._last: dict[int, tuple[Any, float]] = {}

    def __enter__(self) -> PartitionRanks:
        with writing(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
        self._say()
        self._thread = threading.Thread(target=self._beat_on, daemon=True)
        self._thread.start()
        try:
            self.wait(lambda: all(map(self._heard, self._others)) or None, "join")
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._over.set()
        self._thread.join(self.timeout)  # it writes to a folder that may hang
        if error is None:
            self._say(is_over=True)
        else:
            self._say(error=(str(error).strip() or type(error).__name__).splitlines()[0])
        if self.rank == 0 and error is None:
            with contextlib.suppress(OSError, RankError):
                self.wait(lambda: all(map(self._is_over, self._others)) or None, "end")
            for path in self._folder.glob("rank-*"):
                path.unlink(missing_ok=True)
            with contextlib.suppress(OSError):
                self._folder.rmdir()

    def is_mine(self, number: int) -> bool:
        """Whether a piece of work is that of this rank."""
        return number % self.num_ranks == self.rank

    def lead(self, journal: Journal, source: Any, asked: Streaming) -> None:
        """Have the other ranks make their share of a partition; rank 0 calls this.

        Raises:
            ValueError: Some of the graph is not in files.
        """
        if not isinstance(source, FileSource) or not asked.resumes:
            raise ValueError(
                "several processes share a partition whose edges are on disk: pass memory, or "
                "part_method='multilevel', and GraphFiles; or start one process"
            )
        journal.ranks = self
        settings = {name: getattr(asked, name) for name in _SETTINGS}
        work = {"journal": str(journal.folder), "graph": _as_json(source.files), "asked": settings}
        self._say(work=work)

    def help(self) -> None:
        """Make this rank's share of what rank 0 leads; the other ranks call this.

        Raises:
            RankError: See the class.
            OSError: A file cannot be read, or written.
        """
        work = self.wait(lambda: self._read(0).get("work"), "say what is to be made")
        source = FileSource(_from_json(work["graph"]))
        asked = Streaming(**work["asked"], num_threads=num_threads())
        Stages(source, _HelpersJournal(Path(work["journal"]), self), asked).finish(False)

    def wait(self, ready: Callable[[], T | None], what: str) -> T:
        """Wait until ``ready`` has something; others must say meanwhile that they are there."""
        start = time.monotonic()
        while (made := ready()) is None:
            for other in self._others:
                self._check(other, start, what)
            time.sleep(_LOOK_SECONDS)
        return made

    def _check(self, other: int, start: float, what: str) -> None:
        """Raise if another rank has failed, or says nothing."""
        state = self._read(other)
        cure = "what is finished is kept: start the same command again"
        if self._heard(other) and "error" in state:
            raise RankError(f"rank {other} failed: {state['error']}", [other])
        beat = (state.get("id"), state.get("beat")) if self._heard(other) else None
        last, at = self._last.get(other, (None, start))
        if beat != last or state.get("is_over"):
            self._last[other] = beat, time.monotonic()
        elif time.monotonic() - max(at, start) > self.timeout:
            silent = "did not come" if last is None else "says nothing any more"
            raise RankError(
                f"rank {other} {silent} (waited {self.timeout:.0f} s for it to {what}); {cure}",
                [other],
            )

    def _heard(self, other: int) -> bool:
        """Whether another rank has heard this one, and this one that one."""
        heard = self._read(other).get("heard", {})
        return bool(heard.get(str(self.rank)) == self._state["id"])

    def _is_over(self, other: int) -> bool:
        state = self._read(other)
        return "is_over" in state or "error" in state

    def _read(self, rank: int) -> dict[str, Any]:
        """What a rank says."""
        with contextlib.suppress(OSError, ValueError):
            return dict(parse_json(read_text_regular(self._folder / f"rank-{rank}.json")))
        return {}

    def _beat_on(self) -> None:
        while not self._over.wait(_BEAT_SECONDS):
            with contextlib.suppress(OSError):  # a full disk is told by those who write more
                self._say()

    def _say(self, **more: Any) -> None:
        heard = {str(other): self._read(other).get("id") for other in self._others}
        with self._lock:
            self._state |= {**more, "heard": heard}
            self._state["beat"] += 1
            _replace(self._folder / f"rank-{self.rank}.json", self._state)


# What helpers must know of `Streaming`.
_SETTINGS = (
    *("num_parts", "num_hops", "trainers_per_part", "tolerance", "seed", "reorder", "memory"),
)


class _HelpersJournal(Journal):
    """The journal that rank 0 writes, as another rank reads it."""

    leads = False

    def __init__(self, folder: Path, ranks: PartitionRanks) -> None:
        self.folder, self.ranks = folder, ranks
        self.resumes, self._work = False, {}

    def run(self, name: str, make: MakeStage) -> dict[str, Any]:
        assert self.ranks is not None
        entry = self.ranks.wait(lambda: self._entry(name), f"finish {name}")
        return dict(entry["results"])

    def run_each(self, stages: Mapping[str, MakeStage], num_threads: int) -> list[dict[str, Any]]:
        assert self.ranks is not None
        mine = [name for i, name in enumerate(stages) if self.ranks.is_mine(i)]
        for name in mine:
            if self._entry(name) is None and self.handed_over(name) is None:
                entry = self.make(name, stages[name])
                _replace(self.path(f"{name}.json"), entry)
        return []

    def _entry(self, name: str) -> dict[str, Any] | None:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            entry = parse_json(read_text_regular(self.folder / "journal.json"))["stages"][name]
            if entry["files"] is None or entry["files"] == sizes_of_files(self.path(name)):
                return dict(entry)
        return None


def _replace(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON in one step."""
    new = path.with_suffix(".new")
    with writing(path), open(new, "w", encoding="utf-8") as file:
        file.write(json.dumps(content))
    os.replace(new, path)


def _as_json(files: GraphFiles) -> dict[str, Any]:
    """A graph in files, as JSON has it.

    Raises:
        ValueError: A feature is a tensor.
    """

    def file(item: Any) -> list[Any]:
        if isinstance(item, torch.Tensor):
            raise ValueError(
                "several processes share a partition of files alone (a feature is a tensor); save "
                "it with numpy.save, or start one process"
            )
        opened = ArrayFile.open(item)
        status = list(opened.status)
        path = os.path.abspath(opened.path)
        return [path, opened.dtype.str, list(opened.shape), opened.offset, status]

    def listed(given: Any, convert: Callable[[Any], Any]) -> list[Any]:
        return [[key, convert(item)] for key, item in given.items()]

    def fields(given: Mapping[Any, Any], is_typed: bool) -> list[Any]:
        return listed(given, lambda item: fields(item, False)) if is_typed else listed(given, file)

    def ends(item: Any) -> list[Any]:
        return [file(one) for one in item] if isinstance(item, tuple) else [file(item)]

    is_typed = isinstance(files.edges, Mapping)
    num_nodes: Any = files.num_nodes
    return {
        "is_typed": is_typed,
        "num_nodes": dict(num_nodes) if isinstance(num_nodes, Mapping) else num_nodes,
        "edges": listed(files.edges, ends) if is_typed else ends(files.edges),
        "node_features": fields(files.node_features, is_typed),
        "edge_features": fields(files.edge_features, is_typed),
        "idtype": str(files.idtype).removeprefix("torch."),
    }


def _from_json(content: Mapping[str, Any]) -> GraphFiles:
    """Inverse of `_as_json`."""

    def file(item: list[Any]) -> ArrayFile:
        path, dtype, shape, offset, status = item
        return ArrayFile(Path(path), np.dtype(dtype), tuple(shape), offset, tuple(status))

    def key(name: Any) -> Any:
        return tuple(name) if isinstance(name, list) else name

    def ends(items: list[Any]) -> Any:
        return file(items[0]) if len(items) == 1 else tuple(map(file, items))

    def fields(items: list[Any], is_typed: bool) -> dict[Any, Any]:
        if is_typed:
            return {key(owner): fields(of_owner, False) for owner, of_owner in items}
        return {name: file(item) for name, item in items}

    is_typed = content["is_typed"]
    edges: Any = content["edges"]
    return GraphFiles(
        num_nodes=content["num_nodes"],
        edges={key(etype): ends(item) for etype, item in edges} if is_typed else ends(edges),
        node_features=fields(content["node_features"], is_typed),
        edge_features=fields(content["edge_features"], is_typed),
        idtype=getattr(torch, content["idtype"]),
    )
