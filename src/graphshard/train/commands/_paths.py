# SPDX-License-Identifier: Apache-2.0
"""Which partition a path means."""

from __future__ import annotations

from pathlib import Path


def partition_json(path: Path) -> Path:
    """The path of a partition's JSON; the folder that holds just one will do too."""
    if path.is_dir() and (path / "META.json").exists():  # of PyG's Partitioner
        return path / "META.json"
    if path.is_dir():
        found = [p for p in sorted(path.glob("*.json")) if not p.name.endswith(".dataset.json")]
        if len(found) == 1 and (path / "part0").is_dir():
            return found[0]
    return path


def is_partition(path: Path) -> bool:
    """Whether a path means a partition, and not a data set."""
    return partition_json(path).suffix == ".json"
