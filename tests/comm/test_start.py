# SPDX-License-Identifier: Apache-2.0
"""initialize_comms, shutdown_comms, nfs_ip_init: arguments, stores, absent ranks. Up to 3 ranks."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import textwrap
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from graphshard.comm import (
    _monitor,
    all_reduce,
    barrier,
    initialize_comms,
    is_initialized,
    nfs_ip_init,
    rank,
    rendezvous,
    shutdown_comms,
    world_size,
)
from graphshard.comm.group import MARGIN_SECONDS, group_state
from graphshard.errors import RankError
from graphshard.testing import run_ranks


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def check_group(own, size):
    assert is_initialized()
    assert (rank(), world_size()) == (own, size)
    assert all_reduce(torch.tensor([own + 1])).item() == size * (size + 1) // 2


def monitor_threads():
    return [t.name for t in threading.enumerate() if t.name.startswith("graphshard")]


def start_with_address(own, size, port):
    initialize_comms(own, size, "127.0.0.1", master_port_number=port, timeout=timedelta(seconds=20))
    check_group(own, size)
    assert group_state().timeout == timedelta(seconds=20)
    assert len(monitor_threads()) == (0 if size == 1 else 2 if own == 0 else 1)
    with pytest.raises(RuntimeError, match="there is a default process group already"):
        initialize_comms(own, size, "127.0.0.1")
    all_reduce(torch.ones(1))
    shutdown_comms()
    shutdown_comms()
    assert not is_initialized()
    assert monitor_threads() == []


@pytest.mark.parametrize("size", [1, 3])
def test_start_with_an_address(size):
    run_ranks(start_with_address, size, free_port(), group=False)


def start_on_several_hosts(own, size, port):
    """Ranks that seem to be on hosts of their own find the hub at the address of rank 0."""
    rendezvous.network_name = lambda: f"host{own}"
    initialize_comms(own, size, "127.0.0.1", master_port_number=port, timeout=20)
    check_group(own, size)
    if own == 0:
        assert group_state().monitor._server.address[0] == "127.0.0.1"
    shutdown_comms()


def test_ranks_on_several_hosts():
    run_ranks(start_on_several_hosts, 2, free_port(), group=False)


def start_from_environment(own, size, port, agent):
    os.environ.update(RANK=str(own), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(port)
    if agent:
        os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="2")
    for _ in range(2):
        initialize_comms(timeout=20)
        check_group(own, size)
        shutdown_comms()
        if not agent:
            break  # rank 0's store has gone with it


def test_start_from_the_environment():
    run_ranks(start_from_environment, 2, free_port(), False, group=False)


def test_start_with_the_store_of_a_launcher():
    agent = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    run_ranks(start_from_environment, 3, agent.port, True, group=False)


def start_again(own, size, path):
    store = dist.FileStore(path, -1)
    for _ in range(3):
        initialize_comms(own, size, store=store, timeout=20.0)
        check_group(own, size)
        shutdown_comms()
    assert monitor_threads() == []


def test_one_store_serves_several_starts(tmp_path):
    run_ranks(start_again, 3, str(tmp_path / "store"), group=False)


def use_own_group(own, size, path):
    """A group that the user made: everything works, timeouts are the defaults, monitors come."""
    store = dist.FileStore(path, size)
    dist.init_process_group("gloo", store=store, rank=own, world_size=size)
    check_group(own, size)
    assert group_state().timeout == timedelta(seconds=300)
    for _ in range(3):
        barrier()
    assert group_state().monitor is not None
    dist.barrier()
    shutdown_comms()
    assert monitor_threads() == []


def use_own_short_group(own, size, path):
    store = dist.FileStore(path, size)
    limit = timedelta(seconds=17)
    dist.init_process_group("gloo", store=store, rank=own, world_size=size, timeout=limit)
    assert group_state().timeout == limit
    barrier()  # a rank that left before the other is connected would break that one's start
    shutdown_comms()


def test_a_group_that_the_user_made(tmp_path):
    run_ranks(use_own_group, 2, str(tmp_path / "store"), group=False)
    run_ranks(use_own_short_group, 2, str(tmp_path / "other"), group=False)


def start_incomplete(own, size, kind, port, path):
    """Rank 1 of 3 does not come."""
    if own == 1:
        return None
    start = time.monotonic()
    with pytest.raises(RankError) as caught:
        if kind == "file":
            initialize_comms(own, size, store=dist.FileStore(path, -1), timeout=1.5)
        else:
            initialize_comms(own, size, "127.0.0.1", master_port_number=port, timeout=1.5)
    assert time.monotonic() - start < 8
    assert monitor_threads() == []
    if kind == "tcp" and own == 0:
        time.sleep(1)  # the store is here
    return caught.value.ranks, str(caught.value)


@pytest.mark.parametrize("kind", ["file", "tcp"])
def test_a_rank_that_does_not_come_is_named(tmp_path, kind, capsys):
    args = (kind, free_port(), str(tmp_path / "store"))
    zero, _, two = run_ranks(start_incomplete, 3, *args, group=False)
    for own, (ranks, text) in ((0, zero), (2, two)):
        assert ranks == (1,)
        assert text.startswith(f"rank {own}: initialize_comms waited 1.5 s for rank 1 of 3: not")
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("graphshard: ")] == [
        "graphshard: rank 0 has waited 0.75 s of 1.5 s in initialize_comms: ranks [1] are not "
        "there yet"
    ]


def start_with_a_stopped_rank_0(own, size, port):
    """Rank 0 hosts the store and is stopped: torch would wait for its answer for ever."""
    if own == 0:
        store = socket.create_server(("127.0.0.1", port))
        time.sleep(12)  # like a stopped process: it is connected to, and does not answer
        store.close()
        return None
    time.sleep(0.3)
    start = time.monotonic()
    with pytest.raises(RankError, match="the store has not answered for 3 s") as caught:
        initialize_comms(own, size, "127.0.0.1", master_port_number=port, timeout=3.0)
    assert caught.value.ranks == (0,)
    return time.monotonic() - start


def test_a_stopped_rank_0_is_not_waited_for():
    assert (
        run_ranks(start_with_a_stopped_rank_0, 2, free_port(), group=False)[1] < 3 + MARGIN_SECONDS
    )


def start_without_rank_0(own, size, port):
    if own == 0:
        return
    with pytest.raises(RankError, match="cannot reach the store at 127.0.0.1") as caught:
        initialize_comms(own, size, "127.0.0.1", master_port_number=port, timeout=1.0)
    assert caught.value.ranks == (0,)


def test_rank_0_does_not_come():
    run_ranks(start_without_rank_0, 2, free_port(), group=False)


def arrive_and_end(own, size, path):
    store = dist.FileStore(path, -1)
    if own == 1:  # writes what a rank writes first, and goes no further
        store.add("graphshard/starts/1", 1)
        store.set("graphshard/1/arrived/1", "host")
        return
    _monitor._ANSWER_SECONDS = _monitor._EVENT_SECONDS = 0.5
    with pytest.raises(RankError) as caught:
        initialize_comms(own, size, store=store, timeout=1.0)
    assert 1 in caught.value.ranks
    assert monitor_threads() == []


def test_a_rank_that_is_lost_while_groups_are_made(tmp_path):
    run_ranks(arrive_and_end, 2, str(tmp_path / "store"), group=False)


def start_on_used_port(own, size, port):
    with pytest.raises(RuntimeError, match=rf"rank 0 cannot listen on 127.0.0.1:{port}: .*; pass"):
        initialize_comms(0, 1, "127.0.0.1", master_port_number=port)
    assert not is_initialized()


def test_a_port_in_use():
    with socket.create_server(("127.0.0.1", 0)) as server:
        run_ranks(start_on_used_port, 1, server.getsockname()[1], group=False)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"rank": 0}, ValueError, "world_size was not given and the environment has no WORLD_SIZE"),
        ({"world_size": 1}, ValueError, "rank was not given and the environment has no RANK"),
        ({"rank": 0, "world_size": 1}, ValueError, "the environment has no MASTER_ADDR"),
        ({"rank": 2, "world_size": 2}, ValueError, r"\(got rank 2, world_size 2\)"),
        ({"rank": 0, "world_size": 1, "timeout": 0}, ValueError, r"more than 0 s \(got 0.0 s\)"),
        ({"comm_device": "cuda"}, ValueError, r"comm_device must be 'cpu' with 'gloo' \(got cuda"),
        pytest.param(
            {"backend": "nccl"},
            RuntimeError,
            "backend 'nccl' needs a CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="this torch has CUDA"),
        ),
        pytest.param(
            {"backend": "mpi"},
            RuntimeError,
            "built from source with MPI",
            marks=pytest.mark.skipif(dist.is_mpi_available(), reason="this torch has MPI"),
        ),
    ],
)
def test_bad_arguments(monkeypatch, arguments, error, text):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(error, match=text):
        initialize_comms(**arguments)


def check_devices(own, size):
    state = group_state()
    assert state.payload_device(torch.device("cuda", 1)) == torch.device("cpu")
    state.backend = "other"
    assert state.payload_device(torch.device("cuda", 1)) == torch.device("cuda", 1)
    state.comm_device = torch.device("cpu")
    assert state.payload_device(torch.device("cuda", 1)) == torch.device("cpu")


def test_payloads_live_where_the_backend_can_read_them():
    run_ranks(check_devices, 1)


def test_nfs_ip_init(tmp_path):
    file = tmp_path / "ip"
    found = []
    waiting = threading.Thread(target=lambda: found.append(nfs_ip_init(1, str(file), timeout=20)))
    waiting.start()
    time.sleep(0.3)
    assert not found
    address = nfs_ip_init(0, file)
    waiting.join()
    assert found == [address]
    socket.inet_aton(address)
    assert file.read_text() == address
    assert os.listdir(tmp_path) == ["ip"]


def test_nfs_ip_init_does_not_take_an_old_file(tmp_path):
    file = tmp_path / "ip"
    file.write_text("10.9.8.7")
    os.utime(file, (time.time() - 3600,) * 2)
    with pytest.raises(RankError, match=r"within 0.5 s \(the file is of an earlier run\)"):
        nfs_ip_init(1, file, timeout=0.5)
    address = nfs_ip_init(0, file)
    assert nfs_ip_init(1, file, timeout=5) == address


def test_nfs_ip_init_rules(tmp_path):
    with pytest.raises(RankError, match=r"within 0.2 s \(the file does not exist\)"):
        nfs_ip_init(3, tmp_path / "ip", timeout=timedelta(seconds=0.2))
    with pytest.raises(FileNotFoundError, match="the folder of ip_file must exist"):
        nfs_ip_init(0, tmp_path / "no" / "ip")
    with pytest.raises(ValueError, match="rank must not be negative"):
        nfs_ip_init(-1, tmp_path / "ip")


@pytest.mark.exhaustive  # the tests of commands and the README's example are under torchrun, too
def test_torchrun(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        textwrap.dedent(
            """
            from pathlib import Path

            import torch
            from graphshard import comm

            comm.initialize_comms()
            total = comm.all_reduce(torch.tensor([comm.rank() + 1]))
            large = torch.ones(32 << 20, dtype=torch.uint8)
            maps = Path("/proc/self/smaps")
            lines = maps.read_text().splitlines() if maps.exists() else []
            kilobytes = sum(int(x.split()[1]) for x in lines if x.startswith("AnonHugePages"))
            said = f"rank {comm.rank()} of {comm.world_size()}: {total.item()}"
            print(f"{said} {'large' if kilobytes > 28 << 10 else 'small'} pages", flush=True)
            comm.shutdown_comms()
            """
        )
    )
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--standalone", "--nproc-per-node=2", str(script)),
        ],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    # The two ranks share one pipe: their lines may run into each other.
    reports = re.findall(r"rank \d of \d: \d \w+ pages", done.stdout)
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    pages = "small" if not setting.exists() or "[never]" in setting.read_text() else "large"
    assert sorted(reports) == [f"rank 0 of 2: 3 {pages} pages", f"rank 1 of 2: 3 {pages} pages"]
