# SPDX-License-Identifier: Apache-2.0
"""CheckpointFolder: checkpoints of a run on many ranks, ``checkpoint_dir/epoch-...``.

See `servers.checkpoints` for what is in them and how they are written. What all ranks hold alike
(model, its moments, best model) are states. Rows of embeddings, and their moments, are tables with
the ids of their nodes. What a rank has besides is its own: its random number generators. The run's
history is among the plain values.

All ranks must see one folder. A run that only reads takes no lock. If the one that writes removes a
checkpoint meanwhile, the reader finds it damaged and takes the one before, or says that none is
whole.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from .._base.files import check_text
from ..comm import rank, world_size
from ..comm.collectives import reduce_ints, shared_errors
from ..errors import CheckpointError
from ..servers import TableInfo
from ..servers.checkpoints import (
    CheckpointNames,
    DamagedError,
    Manifest,
    Opened,
    RunLock,
    SavedRows,
    check_digests,
    hold_folder,
    json_object,
    on_rank_0,
    open_newest,
    pack,
    read_manifest,
    read_rank_files,
    read_states,
    write_checkpoint,
)
from ._result import History

EPOCHS = CheckpointNames("epoch")
_IDS = re.compile(r"(embeddings|best)/ids_[0-9]+")

KEPT = 2
"""Checkpoints that are kept: the newest, and one more in case its files get damaged."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """The state of a run after an epoch, as one rank has it."""

    shared: dict[str, Tensor]  # what all ranks hold alike
    local: dict[str, Tensor]  # what this rank alone holds
    history: History  # the same on all ranks


class CheckpointFolder:
    """The checkpoints of one run. Every method is collective.

    Args:
        identity: What a run must have in common with the one that wrote a checkpoint; plain
            values, the same on all ranks.
        ids: Of this rank's rows of each table of embeddings, in the order of the tables.
    """

    def __init__(
        self, path: str | os.PathLike[str], identity: Mapping[str, Any], ids: Sequence[Tensor] = ()
    ) -> None:
        self.path = Path(path)
        self._identity: dict[str, Any] = json.loads(json.dumps(dict(identity)))
        self._ids = [of_table.cpu() for of_table in ids]
        self._lock: RunLock | None = None

    def prepare(self, *, resume: bool, write: bool) -> None:
        """Check the folder before anything is trained; to write, make it and hold it: see `close`.

        What killed runs left half written is removed.

        Raises:
            CheckpointError: To resume, and there is no folder; to start afresh in a folder that
                holds checkpoints; or to write where another run does.
        """

        def check_there() -> None:
            check_text(str(self.path), "checkpoint_dir")
            if resume and not self.path.is_dir():
                raise CheckpointError(
                    f"there is no folder of checkpoints at {self.path} to resume from; give the "
                    "checkpoint_dir of the run, or do not resume"
                )

        def check_fresh() -> None:
            names = EPOCHS.find(self.path)
            if names and not resume:
                raise CheckpointError(
                    f"{self.path} holds checkpoints of an earlier run ({names[0]}); resume that "
                    "run, or give another checkpoint_dir"
                )

        on_rank_0(check_there)
        if write:
            self._lock = hold_folder(self.path, EPOCHS, check_fresh)
        else:
            on_rank_0(check_fresh)

    def close(self) -> None:
        """Let other runs write to the folder; a second call does nothing. Not collective."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def save(self, checkpoint: Checkpoint) -> None:
        """Write a checkpoint and remove those that are too old.

        Raises:
            OSError: A rank could not write; raised on every rank.
        """
        rows, tables = self._tables(checkpoint.local)
        own: dict[str, Tensor] = {f"row/{name}": value for name, value in rows.items()}
        own |= {f"id/{_policy(table)}": ids.long() for table, ids in enumerate(self._ids)}
        for name, value in checkpoint.local.items():
            if name not in rows and not _IDS.fullmatch(name):
                own[f"own/{name}"] = value
        states: dict[str, dict[str, Tensor]] = {}
        for name, value in checkpoint.shared.items():
            word, _, rest = name.partition("/")
            states.setdefault(word, {})[rest] = value
        shared: dict[str, Tensor] = {}
        manifest = Manifest(
            number=checkpoint.history.epoch,
            world_size=world_size(),
            identity=self._identity,
            values={"history": checkpoint.history.as_dict()},
            rows={info.policy: info.starts[-1] for info in tables.values()},
            tables=tables,
            state={word: pack(state, shared, word) for word, state in states.items()},
        )
        write_checkpoint(self.path, EPOCHS, manifest, own, shared)
        if rank() == 0:
            EPOCHS.remove_old(self.path, KEPT)

    def _tables(
        self, local: Mapping[str, Tensor]
    ) -> tuple[dict[str, Tensor], dict[str, TableInfo]]:
        """The rows among what this rank has, and the tables that they are of. Collective.

        A rank without moments of its rows has had no gradient yet. Then those of others are no
        table, and stay their own.
        """
        if not self._ids:
            return {}, {}
        names = {name: table for table in range(len(self._ids)) for name in _names_of_rows(table)}
        lacking = [int(name not in local) for name in names]
        totals = reduce_ints([*lacking, *map(len, self._ids)])
        rows, tables = {}, {}
        for num_lacking, (name, table) in zip(totals, names.items(), strict=False):
            if num_lacking == 0:
                rows[name] = value = local[name]
                starts, shape = (0, totals[len(names) + table]), tuple(value.shape[1:])
                tables[name] = TableInfo(name, value.dtype, shape, starts, _policy(table), True)
        return rows, tables

    def newest(self) -> Checkpoint | None:
        """Read the newest checkpoint that is whole; None if there is none.

        Raises:
            CheckpointError: It belongs to another run, or all checkpoints are damaged.
        """
        opened = open_newest(self.path, EPOCHS, check=self._check)
        if opened is None:
            return None
        shared: dict[str, Tensor] = {}
        for word, state in opened.states.items():
            if not isinstance(state, dict) or not all(
                isinstance(v, Tensor) for v in state.values()
            ):
                raise CheckpointError(f"{opened.path} has a state {word!r:.80} that no run writes")
            shared |= {f"{word}/{name}": value for name, value in state.items()}
        local, history = self._local(opened), _history_of(opened.manifest)
        return Checkpoint(shared=shared, local=local, history=history)

    def _local(self, opened: Opened) -> dict[str, Tensor]:
        """What this rank had: its own, and the rows of its nodes."""
        local = opened.own()
        tables = opened.manifest.tables
        for table, ids in enumerate(self._ids if tables else ()):
            saved = SavedRows(opened.files, _policy(table))
            places = saved.find(ids.long())
            for name in _names_of_rows(table):
                if name in tables:
                    local[name] = saved.read(f"row/{name}", places)
            for module in ("embeddings", "best"):
                if f"{module}/rows.{table}" in local:
                    local[f"{module}/ids_{table}"] = ids
        return local

    def _check(self, folder: Path, manifest: Manifest) -> None:
        _history_of(manifest)
        if manifest.world_size != world_size():
            raise CheckpointError(
                f"{folder} was written by {manifest.world_size} workers (got {world_size()}); "
                "resume with as many"
            )
        theirs, mine = manifest.identity, self._identity
        different = [
            f"{key} was {theirs.get(key)!r} and is {mine.get(key)!r}"
            for key in sorted({*theirs, *mine})
            if theirs.get(key) != mine.get(key)
        ]
        if different:
            raise CheckpointError(
                f"{folder} belongs to another run: {'; '.join(different)}; resume with the same "
                "settings and the same partition, or start afresh in another checkpoint_dir"
            )
        policies = set(map(_policy, range(len(self._ids))))
        if manifest.tables and set(manifest.policies) != policies:
            raise ValueError(
                f"its tables are of {manifest.policies}, and not of {sorted(policies)}"
            )


def _policy(table: int) -> str:
    """Of the rows of a table of embeddings."""
    return f"embedding~{table}"


def _names_of_rows(table: int) -> list[str]:
    """What a rank has a row of for each row of a table of embeddings."""
    rows = f"rows.{table}"
    moments = (f"optimizer/embeddings/{rows}/{key}" for key in ("exp_avg", "exp_avg_sq"))
    return [f"embeddings/{rows}", *moments, f"best/{rows}"]


def read_run_manifest(folder: Path) -> tuple[Manifest, History]:
    """The manifest of a run's checkpoint, and its history.

    Raises:
        DamagedError: It is missing, is not what was written, or does not belong to this folder.
        CheckpointError: It is of another format version.
    """
    manifest = read_manifest(folder, EPOCHS, lambda _, manifest: _history_of(manifest))
    return manifest, _history_of(manifest)


def _history_of(manifest: Manifest) -> History:
    history = History.from_dict(json_object(manifest.values, "history"))
    if history.epoch != manifest.number:
        raise ValueError(
            f"it is of epoch {manifest.number}, and its history of epoch {history.epoch}"
        )
    return history


def load_model_state(checkpoint: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The best model's ``state_dict`` from one checkpoint, ``checkpoint_dir/epoch-...``.

    Embeddings of nodes are not in it: each rank wrote those of its own nodes.

    Raises:
        CheckpointError: It is missing or damaged, of another format version, or of an epoch before
            the first evaluation.
    """
    folder = Path(checkpoint)
    try:
        states = read_states(folder, read_run_manifest(folder)[0], only="best", whole=True)
    except DamagedError as error:
        raise CheckpointError(f"{folder} is not a whole checkpoint ({error})") from None
    state: dict[str, Tensor] = states.get("best", {})
    if not state:
        raise CheckpointError(
            f"{folder} holds no best model: nothing had been evaluated by then; take a later "
            "checkpoint"
        )
    return state


def tensors_under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with ``prefix``, under the rest of their names."""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def read_best_rows(checkpoint: Path, ids: Sequence[Tensor]) -> list[Tensor]:
    """Rows of the best model's embeddings, of each table those of some original ids; collective.

    The checkpoint may have been written by another number of ranks.

    Raises:
        CheckpointError: It is missing or damaged, or has no row of an id.
    """
    with shared_errors():
        try:
            manifest, _ = read_run_manifest(checkpoint)
            files = read_rank_files(checkpoint, manifest)
            check_digests(checkpoint, manifest, rank(), world_size())
        except DamagedError as error:
            raise CheckpointError(f"{checkpoint} is not a whole checkpoint ({error})") from None
        tables = []
        for table, of_table in enumerate(ids):
            if f"best/rows.{table}" not in manifest.tables:
                raise CheckpointError(f"{checkpoint} has no rows of the table {table}; train again")
            saved = SavedRows(files, _policy(table))
            tables.append(saved.read(f"row/best/rows.{table}", saved.find(of_table.long())))
    return tables
