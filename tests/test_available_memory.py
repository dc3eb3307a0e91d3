# SPDX-License-Identifier: Apache-2.0
"""available_memory: what machines and control groups say, in made-up file trees. No process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from graphshard._base import memory as _memory
from graphshard._base.memory import available_memory
from graphshard.fullbatch import aggregation_mode
from graphshard.sampling import graph_store

GIB = 1 << 30
V2_MOUNT = "30 23 0:26 {root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNT = "35 31 0:32 {root} /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n"
OTHER = (
    "22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n33 31 0:30 / /cpu rw - cgroup cgroup rw,cpu\n"
)


def tree(
    root: Path,
    *,
    cgroup: str | None = None,
    mounts: str = "",
    groups: dict[str, dict[str, Any]] | None = None,
    available: int | None = 8 * GIB,
) -> Path:
    """A root directory; ``groups`` is from folder to file to text."""
    (root / "proc/self").mkdir(parents=True)
    if available is not None:
        text = f"MemTotal: 99 kB\nMemFree: 7 kB\nMemAvailable:   {available // 1024} kB\nHuge: 0\n"
        (root / "proc/meminfo").write_text(text)
    if cgroup is not None:
        (root / "proc/self/cgroup").write_text(cgroup)
        (root / "proc/self/mountinfo").write_text(OTHER + mounts)
    for folder, files in (groups or {}).items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (root / folder / name).write_text(f"{value}\n")
    return root


def v2(limit: Any, used: int, cache: int | None = None, high: Any = "max") -> dict[str, Any]:
    files = {"memory.max": limit, "memory.high": high, "memory.current": used}
    return files if cache is None else {**files, "memory.stat": f"anon 5\ninactive_file {cache}"}


def v1(limit: int, used: int, cache: int) -> dict[str, Any]:
    stat = f"inactive_file 1\nactive_file 2\ntotal_inactive_file {cache}"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat}


def test_a_machine_without_limits(tmp_path: Path) -> None:
    assert available_memory(tree(tmp_path)) == 8 * GIB


@pytest.mark.parametrize(
    ("files", "left"),
    [
        (v2(3 * GIB, GIB), 2 * GIB),
        (v2(3 * GIB, 2 * GIB, cache=GIB), 2 * GIB),  # file cache that nobody used of late
        (v2("max", 5 * GIB), 8 * GIB),
        (v2("max", GIB, high=2 * GIB), GIB),
        (v2(4 * GIB, GIB, high=2 * GIB), GIB),
        (v2(GIB, 2 * GIB), 0),
        (v2(100 * GIB, GIB), 8 * GIB),  # the machine has less
        ({"memory.current": 1, "memory.max": "no number"}, 8 * GIB),
        ({}, 8 * GIB),
    ],
)
def test_version_2(tmp_path: Path, files: dict[str, Any], left: int) -> None:
    root = tree(
        tmp_path,
        cgroup="0::/job\n",
        mounts=V2_MOUNT.format(root="/"),
        groups={"sys/fs/cgroup/job": files},
    )
    assert available_memory(root) == left


def test_groups_around_the_group_count(tmp_path: Path) -> None:
    """As systemd's slices and batch systems nest them."""
    folder = "sys/fs/cgroup/system.slice/slurm.scope"
    root = tree(
        tmp_path,
        cgroup="0::/system.slice/slurm.scope/job_1/step\n",
        mounts=V2_MOUNT.format(root="/"),
        groups={
            f"{folder}/job_1/step": v2("max", 10),
            f"{folder}/job_1": v2(4 * GIB, GIB),
            folder: v2(6 * GIB, 5 * GIB),
            "sys/fs/cgroup": v2(GIB // 2, 0),  # a container's own root has its limit
        },
    )
    assert available_memory(root) == GIB // 2
    (root / "sys/fs/cgroup/memory.max").unlink()
    assert available_memory(root) == GIB
    (root / folder / "memory.max").write_text("max")
    assert available_memory(root) == 3 * GIB


@pytest.mark.parametrize("inside", [True, False])
def test_version_1(tmp_path: Path, inside: bool) -> None:
    """A container that sees paths of the host has its own group mounted at the top."""
    mounted, folder = ("/docker/ab", "") if inside else ("/", "docker/ab")
    root = tree(
        tmp_path,
        cgroup="9:name=systemd:/\n4:memory:/docker/ab\n1:cpu,cpuacct:/\n0::/\n",
        mounts=V1_MOUNT.format(root=mounted) + V2_MOUNT.format(root="/"),
        groups={f"sys/fs/cgroup/memory/{folder}": v1(3 * GIB, 2 * GIB, GIB // 2)},
    )
    assert available_memory(root) == 3 * GIB // 2
    limit = root / "sys/fs/cgroup/memory" / folder / "memory.limit_in_bytes"
    limit.write_text("9223372036854771712\n")  # none
    assert available_memory(root) == 8 * GIB


@pytest.mark.parametrize("path", ["/../other", "/elsewhere/on/the/host"])
def test_paths_outside_of_the_mount(tmp_path: Path, path: str) -> None:
    """What is mounted is the container's group, whatever its path is called."""
    root = tree(
        tmp_path,
        cgroup=f"0::{path}\n",
        mounts=V2_MOUNT.format(root="/some\\040scope"),
        groups={"sys/fs/cgroup": v2(2 * GIB, GIB)},
    )
    assert available_memory(root) == GIB


def test_mounts_with_spaces(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        cgroup="0::/a\n",
        mounts="30 23 0:26 / /my\\040groups rw - cgroup2 none rw\n",
        groups={"my groups/a": v2(2 * GIB, GIB)},
    )
    assert available_memory(root) == GIB


def test_damaged_files_are_left_out(tmp_path: Path) -> None:
    root = tree(tmp_path, cgroup="nonsense\n0::/a\n", mounts="x\n - \n1 2 3 - cgroup2\n")
    assert available_memory(root) == 8 * GIB
    (root / "proc/meminfo").write_text("MemAvailable: many kB\n")
    assert available_memory(root) > 1 << 20


def test_other_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 20, "SC_AVPHYS_PAGES": 1 << 18}

    def sysconf(name: str) -> int:
        if name not in sizes:
            raise ValueError("unrecognized configuration name")
        return sizes[name]

    monkeypatch.setattr(os, "sysconf", sysconf)
    root = tree(tmp_path, available=None)
    assert available_memory(root) == GIB
    del sizes["SC_AVPHYS_PAGES"]  # macOS
    assert available_memory(root) == 2 * GIB
    monkeypatch.delattr(os, "sysconf")
    assert available_memory(root) == GIB


def test_here() -> None:
    assert 1 << 20 < available_memory() < 1 << 50


def test_all_who_choose_by_memory_ask_it() -> None:
    assert (
        aggregation_mode.available_memory
        is graph_store.available_memory
        is _memory.available_memory
    )


def test_auto_mode_heeds_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget of a rank is a quarter of what the container leaves."""
    root = tree(
        tmp_path,
        cgroup="0::/job\n",
        mounts=V2_MOUNT.format(root="/"),
        groups={"sys/fs/cgroup/job": v2(2000, 0)},
    )
    monkeypatch.setattr(aggregation_mode, "available_memory", lambda: available_memory(root))
    monkeypatch.setattr(aggregation_mode, "all_reduce_alike", lambda tensor, group: tensor)
    mode = aggregation_mode.AggregationMode(row_width=1)
    assert mode.resolve(41, None) == "oneshot"  # 41 rows of 4 bytes, 3 times over: 492 bytes
    assert mode.resolve(42, None) == "sequential"
