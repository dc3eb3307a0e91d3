# SPDX-License-Identifier: Apache-2.0
"""keep_freed_memory, by the page faults of a process of its own; when large pages are asked for."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest
import torch

from forked_programs import run_program
from graphshard._base import memory

PROGRAM = """
import resource, torch
from graphshard._base.memory import keep_freed_memory
kept = keep_freed_memory()
for _ in range(8):  # blocks that are cut differently at first, as those of torch 2.6 are
    torch.empty(64 << 20, dtype=torch.uint8).fill_(1)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.empty(64 << 20, dtype=torch.uint8).fill_(1)
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
_ONCE = (64 << 20) // os.sysconf("SC_PAGE_SIZE")  # faults of one tensor that is new


def run(**environment: str) -> tuple[bool, int]:
    told = ("MALLOC_", "GLIBC_TUNABLES", "GRAPHSHARD_KEEP")
    inherited = dict.fromkeys(name for name in os.environ if name.startswith(told))
    kept, faults = run_program(PROGRAM, **{**inherited, **environment}).split()
    return kept == "True", int(faults)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_blocks_are_used_again() -> None:
    kept, faults = run()
    assert kept
    assert faults < 3 * _ONCE  # of ten


@pytest.mark.parametrize(
    "told",
    [{"GRAPHSHARD_KEEP_MEMORY": "0"}, {"MALLOC_ARENA_MAX": "4"}],
    ids=lambda d: next(iter(d)),
)
def test_the_environment_decides(told: dict[str, str]) -> None:
    kept, _ = run(**told)
    assert not kept


@pytest.mark.parametrize(
    ("setting", "own", "asked"),
    [
        ("always [madvise] never\n", None, "1"),
        ("always [madvise] never\n", "0", "0"),
        ("always madvise [never]\n", None, None),
        ("[always] madvise never\n", None, None),
        (None, None, None),  # a system without
    ],
)
def test_large_pages_are_asked_for_where_that_changes_something(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    setting: str | None,
    own: str | None,
    asked: str | None,
) -> None:
    file = tmp_path / "enabled"
    if setting is not None:
        file.write_text(setting)
    monkeypatch.setattr(memory, "_LARGE_PAGES", file)
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "" if own is None else own)
    if own is None:
        monkeypatch.delenv("THP_MEM_ALLOC_ENABLE")
    memory.ask_for_large_pages()
    assert os.environ.get("THP_MEM_ALLOC_ENABLE") == asked


@pytest.mark.parametrize(
    ("given", "has_gpu", "number"),
    [({}, False, "0"), ({}, True, None), ({"TORCH_FR_BUFFER_SIZE": "20"}, False, "20")],
)
def test_collectives_are_not_recorded_where_nobody_reads_it(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], has_gpu: bool, number: str | None
) -> None:
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "THP_MEM_ALLOC_ENABLE"):
        monkeypatch.setenv(name, given.get(name, ""))
        if name not in given:
            monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    memory.leave_out_records_of_collectives()
    assert os.environ.get("TORCH_FR_BUFFER_SIZE") == number
