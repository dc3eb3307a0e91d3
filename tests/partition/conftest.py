# SPDX-License-Identifier: Apache-2.0
"""A partition that tests may damage: a copy of one that is written once. No process."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from partition_cases import typed

from graphshard.partition import partition_graph


@pytest.fixture(scope="session")
def typed_parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("typed")
    partition_graph(typed(), "g", 3, made, quiet=True)
    return made


@pytest.fixture
def folder(typed_parts: Path, tmp_path: Path) -> Path:
    """A partition in a folder of its own, so that there is something beside it."""
    made: Path = shutil.copytree(typed_parts, tmp_path / "parts")
    return made


@pytest.fixture
def no_syncing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for the disk would take most of the time, and shows nothing."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
