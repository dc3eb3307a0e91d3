# SPDX-License-Identifier: Apache-2.0
"""The folder of a run, ``--run DIR``: what was resolved stands in its ``config.toml``."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_type_hints

from .._base.files import writing
from .._base.settings import OnlyWith, notes_of
from .._base.toml import read_toml, toml_text
from ..comm import rank
from ..comm.collectives import shared_errors
from ._config import FullBatchConfig, ResolvedConfig, RunConfig, SampledConfig

CONFIG = "config.toml"


def check_run_folder(config: RunConfig) -> None:
    """Whether the folder of a run is free for it.

    Raises:
        ValueError: It holds another run, and this one does not resume it.
    """
    if config.run is not None and not config.resume and (Path(config.run) / CONFIG).exists():
        raise ValueError(
            f"{config.run} holds an earlier run; give another folder for this one, delete that, or "
            "go on from its checkpoints with --resume"
        )


def open_run_folder(config: ResolvedConfig) -> None:
    """Make the folder of a run, if it has one, and write `CONFIG` into it, on rank 0; collective.

    Raises:
        ValueError: The folder holds another run, and this one does not resume it.
        OSError: It cannot be written.
    """
    if config.run is None:
        return
    with shared_errors():
        if rank() == 0:
            check_run_folder(config)
            path = Path(config.run) / CONFIG
            path.parent.mkdir(parents=True, exist_ok=True)
            with writing(path):
                path.write_text(config_text(config), encoding="utf-8")


def config_text(config: ResolvedConfig) -> str:
    """TOML that ``graphshard train --config`` takes, of all settings that have an effect."""
    kinds = {kind.mode: kind for kind in (FullBatchConfig, SampledConfig)}
    hints = get_type_hints(kinds[config.mode], include_extras=True)
    values: dict[str, Any] = {"data": config.data, "mode": config.mode}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        has_effect = all(
            getattr(config, note.field) in note.values
            for note in notes_of(hints[field.name], OnlyWith)
        )
        if has_effect and field.name not in ("data", "resume"):
            values[field.name] = dict(value) if isinstance(value, Mapping) else value
    return toml_text({"train": values})


def read_run_config(folder: str | os.PathLike[str]) -> FullBatchConfig | SampledConfig:
    """The configuration of the run in a folder, as `config_text` wrote it.

    Raises:
        ValueError: There is no run, or the file is not what a run writes.
    """
    path = Path(folder) / CONFIG
    if not path.is_file():
        raise ValueError(
            f"there is no {CONFIG} in {folder}; give the folder that --run named in training"
        )
    values = dict(read_toml(path).get("train", {}))
    kinds = {kind.mode: kind for kind in (FullBatchConfig, SampledConfig)}
    kind = kinds.get(values.pop("mode", None))
    names = set() if kind is None else {field.name for field in dataclasses.fields(kind)}
    if kind is None or "data" not in values or not values.keys() <= names:
        raise ValueError(f"{path} is not the configuration of a run; train again")
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = tuple(value)
    made: FullBatchConfig | SampledConfig = kind(**values)
    return made
