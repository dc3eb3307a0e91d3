# SPDX-License-Identifier: Apache-2.0
"""Jobs beside each other: whose port it is, where it listens, what it leaves. Up to 3 ranks."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from forked_programs import run_program
from graphshard.comm import address as addresses
from graphshard.comm import all_reduce, barrier, initialize_comms, rendezvous, shutdown_comms
from graphshard.comm.address import JOB_VARIABLE, job_id, listen
from graphshard.comm.group import group_state
from graphshard.errors import RankError
from graphshard.testing import run_ranks

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, uses 127.0.0.2")

SECOND = "a second process came to 127.0.0.1:[0-9]+ as rank 1: two jobs use one master_port_number"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start(rank, size, port, timeout=60.0):
    initialize_comms(rank, size, "127.0.0.1", master_port_number=port, timeout=timeout)


def fill_the_wrong_place(own, size, port):
    """Job A is processes 0 and 2; process 1 is rank 1 of job B, and comes before A's."""
    os.environ[JOB_VARIABLE] = "B" if own == 1 else "A"
    if own == 2:
        time.sleep(1)
    if own == 1:
        text = f"rank 1 came to another job: 127.0.0.1:{port} is used .* 'A', and .* 'B'"
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        with pytest.raises(RuntimeError, match=text):
            initialize_comms(1, 2, timeout=60)
        return None
    start(min(own, 1), 2, port)
    total = all_reduce(torch.tensor([own])).item()
    shutdown_comms()
    return total


def test_a_job_with_a_name_does_not_take_in_another_s_ranks():
    assert run_ranks(fill_the_wrong_place, 3, free_port(), group=False) == [2, None, 2]


def come_second(own, size, port):
    """Without names nobody knows that process 1 is of another job, until process 2 comes."""
    assert job_id() is None
    begun = time.monotonic()
    if own == 2:
        time.sleep(1)
        with pytest.raises(RuntimeError, match=SECOND):
            start(1, 2, port)
        return
    start(own, 2, port)
    with pytest.raises(RankError, match=f"rank 1 raised RuntimeError: {SECOND}"):
        while time.monotonic() < begun + 30:
            all_reduce(torch.ones(1))
    shutdown_comms()


def test_two_jobs_on_one_port_both_learn_of_it():
    run_ranks(come_second, 3, free_port(), group=False)


def come_second_while_others_wait(own, size, port):
    """Rank 2 never comes, and nobody waits for it."""
    begun = time.monotonic()
    if own == 2:
        time.sleep(1)
    with pytest.raises(RuntimeError, match=SECOND) as caught:
        start(min(own, 1), 3, port)
    assert time.monotonic() < begun + 30
    assert isinstance(caught.value, RankError) == (own < 2)


def test_ranks_that_still_wait_learn_of_a_second_one():
    run_ranks(come_second_while_others_wait, 3, free_port(), group=False)


def disagree(own, size, port):
    begun = time.monotonic()
    text = re.escape("world_size must be the same on all ranks (got 3 on rank 1, 2 on rank 0)")
    with pytest.raises(RankError if own == 0 else ValueError, match=text):
        start(own, 2 + own, port)
    assert time.monotonic() < begun + 30


def test_ranks_that_differ_in_the_world_size():
    run_ranks(disagree, 2, free_port(), group=False)


def find_foreign_store(own, size, port):
    with pytest.raises(RankError, match="but no rank 0 of graphshard within 0.5 s"):
        start(1, 2, port, 0.5)
    with pytest.raises(RuntimeError, match=f"rank 0 cannot listen on 127.0.0.1:{port}: .*in use"):
        start(0, 2, port, 0.5)


def test_a_port_where_another_program_has_its_store():
    """It listens on all interfaces, of which the one that is wanted is but one."""
    other = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    run_ranks(find_foreign_store, 1, other.port, group=False)


def start_again(own, size, port):
    for number in range(5):
        start(own, size, port, 20.0)
        assert all_reduce(torch.tensor([number])).item() == size * number
        shutdown_comms()


def test_one_port_serves_one_start_after_another():
    run_ranks(start_again, 3, free_port(), group=False)


def test_the_name_of_a_job(monkeypatch):
    for variable in (JOB_VARIABLE, "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(variable, raising=False)
    assert job_id() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert job_id() is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    assert job_id() == "7"
    monkeypatch.setenv(JOB_VARIABLE, "mine")
    assert job_id() == "mine"


# -- where a job listens ---------------------------------------------------------------------------


def listening() -> set[tuple[str, str]]:
    """Addresses and ports at which this process listens, as /proc tells."""
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    found = set()
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            words = row.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in links:
                address, _, port = words[1].partition(":")
                number = bytes.fromhex(address)
                number = b"".join(number[i : i + 4][::-1] for i in range(0, len(number), 4))
                family = socket.AF_INET if table == "tcp" else socket.AF_INET6
                found.add((socket.inet_ntop(family, number), port))
    return found


def look_around(own, size, address, kind, port):
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    if kind == "apart":
        rendezvous.network_name = lambda: f"host{own}"
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # else where the host's name leads
    before = listening()
    initialize_comms(own, size, address, master_port_number=port, timeout=20)
    group = dist.new_group([0])
    assert all_reduce(torch.ones(1)).item() == size
    found = listening() - before
    del group
    shutdown_comms()
    assert os.environ.get("GLOO_SOCKET_IFNAME") == ("lo" if kind == "apart" else None)
    deadline = time.monotonic() + 10
    while not listening() <= before and time.monotonic() < deadline:
        time.sleep(0.01)  # threads of gloo close what they listen at, and end
    assert not listening() - before  # a group of the test before may have ended meanwhile
    return sorted({address for address, _ in found})


@on_linux
@pytest.mark.parametrize(
    ("size", "address", "kind", "expected"),
    [
        (1, "127.0.0.1", "together", ["127.0.0.1"]),
        (2, "localhost", "together", ["127.0.0.1"]),
        (2, "127.0.0.2", "together", ["127.0.0.1", "127.0.0.2"]),
        (2, "127.0.0.2", "apart", ["127.0.0.1", "127.0.0.2"]),
    ],
)
def test_a_job_listens_at_the_address_that_it_was_given(size, address, kind, expected):
    """And where all ranks are on one host, its other connections stay on that host."""
    zero, *others = run_ranks(look_around, size, address, kind, free_port(), group=False)
    assert [a for a in zero if a != "::1"] == expected
    assert all(set(found) <= {"127.0.0.1", "::1"} for found in others)


def hub_address(own, size, address, port):
    rendezvous.network_name = lambda: f"host{own}"
    initialize_comms(own, size, address, master_port_number=port, timeout=20)
    found = group_state().monitor._server.address[0] if own == 0 else None
    barrier()  # the other may still be connecting
    shutdown_comms()
    return found


@on_linux
def test_the_hub_of_several_hosts_listens_where_the_store_does():
    assert run_ranks(hub_address, 2, "127.0.0.2", free_port(), group=False)[0] == "127.0.0.2"


def test_a_name_that_leads_to_network_name_alone_is_not_its_address(monkeypatch):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(OSError, match="annot assign requested address"):
        listen("node0", 0)
    for name in ("localhost", "127.0.0.1"):
        with listen(name, 0) as server:
            assert server.getsockname()[0] == "127.0.0.1"


def test_an_address_that_is_another_s(monkeypatch):
    with pytest.raises(OSError, match="annot assign requested address"):
        listen("203.0.113.7", 0)  # reserved for documents
    monkeypatch.setattr(addresses, "listen", lambda *_: listen("203.0.113.7", 0))
    text = "rank 0 listens on all interfaces, because its host has no address localhost"
    with pytest.warns(RuntimeWarning, match=text):
        store, address = rendezvous.host_store("localhost", 0, 1, timedelta(seconds=10))
    store.set("key", "value")
    assert (store.get("key"), address) == (b"value", "localhost")


# -- nfs_ip_init -----------------------------------------------------------------------------------


def test_the_file_of_another_job_is_not_believed(tmp_path, monkeypatch):
    file = tmp_path / "ip"
    monkeypatch.setenv(JOB_VARIABLE, "the first")
    address = rendezvous.nfs_ip_init(0, file)
    assert rendezvous.nfs_ip_init(1, file, timeout=5) == address
    monkeypatch.setenv(JOB_VARIABLE, "the second")
    with pytest.raises(RankError, match="the file is of an earlier run"):
        rendezvous.nfs_ip_init(1, file, timeout=0.3)
    monkeypatch.delenv(JOB_VARIABLE)
    assert rendezvous.nfs_ip_init(1, file, timeout=5) == address


def test_the_file_goes_with_rank_0(tmp_path, monkeypatch):
    file = tmp_path / "ip"
    at_exit = []
    monkeypatch.setattr(atexit, "register", lambda *call: at_exit.append(functools.partial(*call)))
    rendezvous.nfs_ip_init(0, file)
    rendezvous.nfs_ip_init(0, file)  # another job, say
    first, second = at_exit
    first()
    assert file.exists()
    second()
    assert not file.exists()
    second()


# -- the end ---------------------------------------------------------------------------------------

STARTS_AND_ENDS = """
    import os, sys, time
    import torch
    from graphshard import comm
    from graphshard.comm import all_reduce

    torch.set_num_threads(1)
    port, starts = int(sys.argv[1]), int(sys.argv[2])

    def names():
        found = []
        for task in os.listdir("/proc/self/task"):
            try:
                found.append(open(f"/proc/self/task/{task}/comm").read().strip())
            except (FileNotFoundError, ProcessLookupError):
                pass  # the thread has ended meanwhile
        return sorted(found)

    def run(rank):
        before = names()
        comm.initialize_comms(rank, 2, "127.0.0.1", master_port_number=port, timeout=60)
        import torch.distributed.nn.functional  # as torch's optimizers do
        all_reduce(torch.ones(3))
        lanes = comm.Lanes(["one", "two"])  # goes with the rest
        needed = [torch.arange(other != rank) for other in (0, 1)]
        plan = comm.ExchangePlan.build(needed, 1)  # outlives the group, as a graph would
        comm.shutdown_comms()
        after = names()
        while len(after) > len(before) and time.monotonic() < limit:
            after = names()  # a thread that has been joined may be listed for a moment
        assert after == before, (before, after)
        try:
            comm.fetch_halo([(plan, torch.ones(1, 2))])
        except RuntimeError as error:
            assert "has been shut down" in str(error)
        else:
            raise AssertionError("a plan was used after its group")

    for number in range(starts):
        limit = time.monotonic() + 10
        children = []
        for rank in (0, 1):
            child = os.fork()
            if child == 0:
                run(rank)
                sys.exit(0)  # and the interpreter goes through its whole end
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert codes == [0, 0], (number, codes)
    print("ended", starts)
"""


@on_linux
@pytest.mark.timeout(6000)  # for 500 starts
def test_a_job_that_has_ended_leaves_no_thread_and_ends_well(run_all):
    """The threads of a process group that lives on may abort the process at its very end."""
    starts = 500 if run_all else 3
    arguments = str(free_port()), str(starts)
    printed = run_program(STARTS_AND_ENDS, *arguments, timeout=100 + 10 * starts)
    assert printed == f"ended {starts}\n"
