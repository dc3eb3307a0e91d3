# SPDX-License-Identifier: Apache-2.0
"""Exchanges and full-batch epochs between hosts, against the limit of their links.

    python benchmarks/wire.py --question exchange --rate 200 --ranks 2 3 4 8
    python benchmarks/wire.py --question epoch --rate 200 1000 --ranks 2 --model sage
    python benchmarks/wire.py --question epoch --rate 200 --ranks 4 --ranks-per-host 2
    python benchmarks/wire.py --question sar --sar FOLDER --rate 1000 --ranks 2
    python benchmarks/wire.py --question order --rate 200 --ranks 2 4   # why gloo takes its time
    python benchmarks/wire.py --question sums --rate 200 1000 --ranks 2 --model gat
    python benchmarks/wire.py --question gradients --rate 1000 --ranks 2 4   # sums of gradients
    python benchmarks/wire.py --question pages                          # epochs with large pages
    python benchmarks/wire.py --write                   # the first two, and a file of results

Each host is a network namespace of its own with its own /dev/shm; all are on one bridge, and what
goes to and from each is shaped (tc tbf). This needs Linux, root and iproute2; the namespaces are
removed at the end, whatever happens. Where several streams share a link, it makes a difference of a
fifth how TCP controls congestion, so tables say it: namespaces take what the machine has (``sysctl
-w net.ipv4.tcp_congestion_control=cubic``). The limit is the larger of what a rank sends and
receives over the rate. An exchange is of equal slices for all other ranks, 27 MB in all; beside it,
in turn: torch's ``all_to_all_single`` and as many plain TCP connections, each with a thread that
sends and one that receives. ``order`` has gloo's own calls in other orders, and groups of a
direction each. ``sums`` has epochs with partial sums (attention: states of destinations) and with
rows alone, one after the other in one run, so that both see the same noise. ``gradients`` are steps
of dense layers of 1024 columns, whose sums begin while the backward runs, in turn with the same
steps and one all_reduce after it, and with neither. ``pages`` needs no root: one process, CPU
seconds and traps of an epoch with pages of 4 KB, with those that torch asks for, and with those of
glibc. Both sides of an epoch's limit are measured: bytes by the counters of the interface and
headers of frames, and compute as the epoch on links that are not shaped. SAR itself, from a
checkout of its repository (https://github.com/IntelLabs/SAR), trains on DGL's partition of the same
graph, in turn, by the program that it shows: features are those of the partition, so their remote
rows are fetched once here (``--constant``), and by SAR in each epoch.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _common import PEER_PYTHON, PEERS, ROOT, community_graph, markdown_table, write_result
from full_batch import forward, make_layers, our_parts

HERE = str(Path(__file__).resolve())
OURS = (sys.executable, HERE)
ROWS, COLUMNS = 52_500, 128
NETWORK = "10.79.0"
PORT, RAW_PORT = 29600, 29700
SECONDS = 280
INTERFACE = "host"
SEGMENT, FRAME = 1448, 1514
"""Bytes of a stream in a frame, and of the frame, which the link carries: counters of the interface
are of what is cut into frames behind them (`tc -s qdisc` has 104.6 MB where they have 100)."""
CONGESTION_CONTROL = Path("/proc/sys/net/ipv4/tcp_congestion_control")
ALONE = "unshare --mount --pid --fork --kill-child bash -c"
IN_BASH = """mount -t proc proc /proc; mount -t tmpfs tmpfs /dev/shm
for i in $(seq $RANKS); do RANK=$((HOST * RANKS + i - 1)) "$@" & PIDS="$PIDS $!"; done
wait $PIDS"""


def run(*words: str) -> None:
    """A command, whose failure is an error."""
    subprocess.run(words, check=True, capture_output=True, text=True)


@contextlib.contextmanager
def hosts(num_ranks: int, rate: int) -> Iterator[list[str]]:
    """Namespaces on a bridge, their links shaped at a rate in Mbit/s, or not if that is 0."""
    prefix = f"gw{os.getpid()}"
    bridge, names = f"{prefix}-b", [f"{prefix}-{rank}" for rank in range(num_ranks)]
    shape = f"root tbf rate {rate}mbit burst 256kb latency 100ms".split()
    try:
        run("ip", "netns", "add", bridge)
        run("ip", "-n", bridge, "link", "add", "name", "bridge0", "type", "bridge")
        run("ip", "-n", bridge, "link", "set", "bridge0", "up")
        for rank, name in enumerate(names):
            run("ip", "netns", "add", name)
            other = f"port{rank}"
            run(
                *("ip", "-n", name, "link", "add", INTERFACE, "type", "veth"),
                *("peer", "name", other, "netns", bridge),
            )
            run("ip", "-n", bridge, "link", "set", other, "master", "bridge0")
            run("ip", "-n", bridge, "link", "set", other, "up")
            run("ip", "-n", name, "addr", "add", f"{NETWORK}.{rank + 1}/24", "dev", INTERFACE)
            run("ip", "-n", name, "link", "set", INTERFACE, "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
            for namespace, device in ((name, INTERFACE), (bridge, other)):
                if rate:
                    run("tc", "-n", namespace, "qdisc", "add", "dev", device, *shape)
        yield names
    finally:
        for name in [*names, bridge]:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def on_hosts(
    num_ranks: int, rate: int, work: list[str], program: Sequence[str] = OURS, per_host: int = 1
) -> Any:
    """Run a program, this one if none is given, on each host; what rank 0 says."""
    with hosts(num_ranks // per_host, rate) as names:
        processes = []
        for host, name in enumerate(names):
            environment = {
                **os.environ,
                "HOST": str(host),
                "RANKS": str(per_host),
                "WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": f"{NETWORK}.1",
                "MASTER_PORT": str(PORT),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": INTERFACE,
            }
            command = [*program, *work]
            processes.append(
                subprocess.Popen(
                    [*f"ip netns exec {name} {ALONE}".split(), IN_BASH, "-", *command],
                    env=environment,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL if host else None,
                    text=True,
                )
            )
        try:
            said = [process.communicate(timeout=SECONDS)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    return json.loads(said[0].splitlines()[-1])


# -- on each host ----------------------------------------------------------------------------------


def raw_tcp(rank: int, num_ranks: int, size: int) -> Callable[[], None]:
    """What sends and receives ``size`` bytes over a connection to each other rank."""
    listener = socket.create_server((f"{NETWORK}.{rank + 1}", RAW_PORT), backlog=num_ranks)
    dist.barrier()
    links = [socket.create_connection((f"{NETWORK}.{r + 1}", RAW_PORT)) for r in range(rank)]
    links += [listener.accept()[0] for _ in range(rank + 1, num_ranks)]
    payload = bytes(size)

    def receive(link: socket.socket) -> None:
        left = size
        while left:
            left -= len(link.recv(1 << 20))

    def exchange() -> None:
        threads = [threading.Thread(target=receive, args=(link,)) for link in links]
        threads += [threading.Thread(target=link.sendall, args=(payload,)) for link in links]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return exchange


def orders(x: torch.Tensor, out: torch.Tensor) -> dict[str, Callable[[], None]]:
    """Ways to exchange equal slices by gloo's calls alone, with all other ranks."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    others = [other for other in range(num_ranks) if other != rank]
    sent, received = (dict(zip(others, rows.chunk(len(others)), strict=True)) for rows in (x, out))
    upward, downward = dist.new_group(), dist.new_group()

    def send(other: int, group: Any = None) -> Any:
        return dist.isend(sent[other], other, group=group)

    def receive(other: int, group: Any = None) -> Any:
        return dist.irecv(received[other], other, group=group)

    def all_of(*calls: Callable[[int], Any]) -> Callable[[], None]:
        def exchange() -> None:
            for request in [call(other) for call in calls for other in others]:
                request.wait()

        return exchange

    def in_rounds() -> None:
        partners = (number ^ rank for number in range(1, num_ranks))  # of a power of two
        for other in partners:
            for request in (receive(other), send(other)):
                request.wait()

    ways = {
        "isend, irecv": all_of(send, receive),
        "irecv, isend": all_of(receive, send),
        "a group a direction": all_of(
            lambda other: send(other, upward if other > rank else downward),
            lambda other: receive(other, downward if other > rank else upward),
        ),
    }
    return ways if num_ranks & (num_ranks - 1) else {**ways, "rounds of pairs": in_rounds}


def exchange_work(rounds: int, per_host: int, with_orders: bool) -> None:
    """Seconds of each way to exchange, by round; rank 0 prints them."""
    import graphshard as gs
    from graphshard.comm import ragged_all_to_all

    torch.set_num_threads(1)
    gs.initialize_comms(timeout=SECONDS)
    rank, num_ranks = gs.rank(), gs.world_size()
    rows = ROWS // (num_ranks - 1)
    splits = [0 if other == rank else rows for other in range(num_ranks)]
    x = torch.randn(rows * (num_ranks - 1), COLUMNS)
    out = torch.empty_like(x)
    ways: dict[str, Callable[[], object]] = {
        "graphshard": lambda: ragged_all_to_all(x, splits, splits),
        "all_to_all_single": lambda: dist.all_to_all_single(out, x, splits, splits),
        **(orders(x, out) if with_orders else {}),
    }
    if per_host == 1:
        ways["raw TCP"] = raw_tcp(rank, num_ranks, rows * COLUMNS * 4)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            gs.comm.barrier()
            time.sleep(0.3)
            gs.comm.barrier()
            start = time.perf_counter()
            way()
            gs.comm.barrier()
            if number:  # the first opens windows
                seconds[name].append(time.perf_counter() - start)
    if rank == 0:
        print(json.dumps({"bytes": x.nbytes, "seconds": seconds}), flush=True)
    gs.shutdown_comms()


def traffic() -> torch.Tensor:
    """Bytes that the interface has sent and received."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.strip().partition(":")
        if name == INTERFACE:
            fields = [int(number) for number in numbers.split()]
            return torch.tensor([fields[8], fields[0]])
    raise RuntimeError(f"there is no interface {INTERFACE}")


def epoch_work(
    parts: str, model: str, epochs: int, constant: bool, kinds: Sequence[bool], halo: str | None
) -> None:
    """Seconds of epochs, and bytes of one; rank 0 prints them, for each kind, with sums or not."""
    import graphshard as gs

    torch.set_num_threads(1)
    gs.initialize_comms(timeout=SECONDS)
    data = gs.load_dgl_partition_data(parts, gs.rank())
    dtype = None if halo is None else getattr(torch, halo)
    graphs = {
        sums: gs.construct_full_graph(data, partial_sums=sums, halo_dtype=dtype) for sums in kinds
    }
    x, y = data.node_features["_N/x"], data.node_features["_N/y"]
    if not constant:  # a copy may change, so its remote rows are fetched in each epoch
        x = x.clone()
    train = data.node_features["_N/train"].nonzero().view(-1)
    classes = int(gs.comm.all_reduce(y.max().view(1), "max")) + 1
    torch.manual_seed(0)
    layers = make_layers(model, x.shape[1], classes)
    gs.sync_params(layers)
    optimizer = torch.optim.Adam(layers.parameters(), lr=1e-2)
    seconds: dict[bool, list[float]] = {sums: [] for sums in kinds}
    moved = {sums: torch.zeros(2) for sums in kinds}

    def epoch(graph: Any) -> None:
        h = forward(model, layers, graph, x)
        loss = F.cross_entropy(h[train], y[train], reduction="sum")
        optimizer.zero_grad()
        loss.backward()
        gs.gather_grads(layers)
        optimizer.step()

    for number in range(epochs + 1):
        for sums, graph in graphs.items():
            gs.comm.barrier()
            start, before = time.perf_counter(), traffic()
            epoch(graph)
            gs.comm.barrier()
            if number:  # the first fetches what stays
                seconds[sums].append(time.perf_counter() - start)
                moved[sums] += traffic() - before
    # What all rows of the halo weigh, with their zeros; in the second epoch.
    graph = gs.construct_full_graph(data, partial_sums=False, halo_dtype=dtype)
    epoch(graph)
    with gs.comm.trace() as trace:
        epoch(graph)
    sent = torch.zeros(gs.world_size(), gs.world_size())
    for (_, to), num_bytes in trace.bytes_to.items():
        if to is not None:
            sent[gs.rank(), to] += num_bytes
    gs.comm.all_reduce(sent, dist.ReduceOp.SUM)
    of_rows = float(torch.stack([sent.sum(0), sent.sum(1)]).max())
    results = []
    for sums in kinds:
        most = gs.comm.all_reduce(moved[sums].max().view(1) / epochs, "max")
        results.append({"bytes": float(most), "rows": of_rows, "seconds": seconds[sums]})
    if gs.rank() == 0:
        print(json.dumps(results if len(kinds) > 1 else results[0]), flush=True)
    gs.shutdown_comms()


def gradients_work(steps: int) -> None:
    """Seconds of steps by each way to sum gradients, in turn; rank 0 prints them."""
    import graphshard as gs

    torch.set_num_threads(1)
    gs.initialize_comms(timeout=SECONDS)
    torch.manual_seed(0)
    layers = [part for _ in range(6) for part in (torch.nn.Linear(1024, 1024), torch.nn.ReLU())]
    network = torch.nn.Sequential(*layers)
    models = {name: copy.deepcopy(network) for name in ("graphshard", "after", "alone")}
    x = torch.randn(1000, 1024, generator=torch.Generator().manual_seed(gs.rank()))

    def all_at_once(model: torch.nn.Module) -> None:
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        flat = torch.cat([grad.view(-1) for grad in grads])
        dist.all_reduce(flat)
        for grad, total in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
            grad.copy_(total.view(grad.shape))

    ways = {"graphshard": gs.gather_grads, "after": all_at_once, "alone": lambda model: None}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(steps + 3):
        for name, way in ways.items():
            models[name].zero_grad()
            gs.comm.barrier()
            start = time.perf_counter()
            models[name](x).square().mean().backward()
            way(models[name])
            gs.comm.barrier()
            if number > 2:  # the first two learn what there is to sum
                seconds[name].append(time.perf_counter() - start)
    size = sum(p.nbytes for p in models["alone"].parameters())
    if gs.rank() == 0:
        print(json.dumps({"bytes": size, "seconds": seconds}), flush=True)
    gs.shutdown_comms()


def pages_work(graph: str, model: str, epochs: int) -> None:
    """CPU seconds, traps and peak of epochs of one process; prints them."""
    import graphshard as gs

    torch.set_num_threads(1)
    arrays = np.load(graph)
    tensors = {name: torch.from_numpy(arrays[name]) for name in ("src", "dst", "x", "y", "train")}
    whole = gs.graph((tensors["src"], tensors["dst"]), num_nodes=len(tensors["y"]))
    train = tensors["train"].nonzero().view(-1)
    torch.manual_seed(0)
    layers = make_layers(model, tensors["x"].shape[1], int(tensors["y"].max()) + 1)
    optimizer = torch.optim.Adam(layers.parameters(), lr=1e-2)
    used = []
    for _ in range(epochs + 1):
        before = resource.getrusage(resource.RUSAGE_SELF)
        h = forward(model, layers, whole, tensors["x"])
        optimizer.zero_grad()
        F.cross_entropy(h[train], tensors["y"][train]).backward()
        optimizer.step()
        after = resource.getrusage(resource.RUSAGE_SELF)
        system = after.ru_stime - before.ru_stime
        seconds = after.ru_utime - before.ru_utime + system
        used.append((seconds, system, after.ru_minflt - before.ru_minflt))
    numbers = [statistics.median(column) for column in zip(*used[1:], strict=True)]
    print(json.dumps([*numbers, after.ru_maxrss / 1024]), flush=True)


# -- tables ----------------------------------------------------------------------------------------


def exchanges(args: argparse.Namespace, with_orders: bool) -> list[str]:
    """Each way to exchange, over the limit."""
    rows: list[list[Any]] = []
    names: list[str] = []
    for rate in args.rate:
        for num_ranks in args.ranks:
            work = ["--work", "order" if with_orders else "exchange", "--rounds", str(args.rounds)]
            work += ["--ranks-per-host", str(args.ranks_per_host)]
            result = on_hosts(num_ranks, rate, work, per_host=args.ranks_per_host)
            leaving = args.ranks_per_host * (num_ranks - args.ranks_per_host) / (num_ranks - 1)
            limit = 8 * result["bytes"] * leaving / (rate * 1e6)
            ratios = [f"{statistics.median(s) / limit:.2f}" for s in result["seconds"].values()]
            names = max(names, list(result["seconds"]), key=len)
            layout = f"{num_ranks // args.ranks_per_host} x {args.ranks_per_host}"
            rows.append([rate, layout, f"{limit:.2f}", *ratios])
    heads = ["Mbit/s", "hosts x ranks", "limit, s", *names]
    rows = [[*row, *[""] * (len(heads) - len(row))] for row in rows]
    control = CONGESTION_CONTROL.read_text().strip()
    title = f"Exchange of 27 MB a rank by {control}, medians over the limit:"
    return [title, "", *markdown_table(heads, rows)]


def epochs(args: argparse.Namespace) -> list[str]:
    """Epochs over the larger of compute and the limit of the link."""
    graph = community_graph(args.folder, args.nodes, args.edges)
    rows = []
    for model in args.model:
        for num_ranks in (n for n in args.ranks if n in (2, 4)):
            work = ["--work", our_parts(graph, num_ranks), "--model", model]
            work += ["--rounds", str(args.rounds), *["--constant"] * args.constant]
            work += ["--rows-alone"] if args.rows_alone else []
            work += ["--halo-dtype", args.halo_dtype] if args.halo_dtype else []
            per_host = args.ranks_per_host
            compute = statistics.median(on_hosts(num_ranks, 0, work, per_host=per_host)["seconds"])
            for rate in args.rate:
                result = on_hosts(num_ranks, rate, work, per_host=per_host)
                seconds = statistics.median(result["seconds"])
                byte = 8 * FRAME / SEGMENT / (rate * 1e6)
                of_rows, sent = (byte * result[kind] for kind in ("rows", "bytes"))
                numbers = [compute, of_rows, sent, seconds]
                numbers += [seconds / max(compute, limit) for limit in (of_rows, sent)]
                layout = f"{num_ranks // per_host} x {per_host}"
                rows.append([model, rate, layout, *(f"{number:.2f}" for number in numbers)])
    heads = ["model", "Mbit/s", "hosts x ranks", "compute, s", "rows, s", "sent, s", "epoch, s"]
    heads += ["of compute or rows", "of compute or sent"]
    control = CONGESTION_CONTROL.read_text().strip()
    return [
        f"Epochs, 3 layers, hidden 128, {args.nodes:,} nodes, by {control}. *Rows* is what the "
        "link takes for all remote rows that layers read and their gradients, *sent* for what is "
        "sent; the last columns are the epoch over the larger of that and compute:",
        "",
        *markdown_table(heads, rows),
    ]


def sums_in_turn(args: argparse.Namespace) -> list[str]:
    """Epochs with partial sums or states, and with rows alone, in turn."""
    graph = community_graph(args.folder, args.nodes, args.edges)
    rows: list[list[Any]] = []
    for model in args.model:
        for num_ranks in (n for n in args.ranks if n in (2, 4)):
            work = ["--work", our_parts(graph, num_ranks), "--model", model, "--in-turn"]
            work += ["--rounds", str(args.rounds), *["--constant"] * args.constant]
            work += ["--halo-dtype", args.halo_dtype] if args.halo_dtype else []
            for rate in args.rate:
                found = on_hosts(num_ranks, rate, work, per_host=args.ranks_per_host)
                numbers = [result["bytes"] / 1e6 for result in found]
                numbers += [statistics.median(result["seconds"]) for result in found]
                pairs = zip(*(result["seconds"] for result in found), strict=True)
                ratio = statistics.median(one / other for one, other in pairs)
                numbers += [numbers[0] / numbers[1], ratio]
                layout = f"{num_ranks // args.ranks_per_host} x {args.ranks_per_host}"
                rows.append([model, rate, layout, *(f"{number:.2f}" for number in numbers)])
    heads = ["model", "Mbit/s", "hosts x ranks", "MB", "MB, rows alone", "epoch, s"]
    heads += ["epoch, rows alone, s", "ratio of MB", "ratio of s"]
    return [
        f"Epochs in turn, 3 layers, hidden 128, {args.nodes:,} nodes; medians, of seconds that of "
        "ratios of neighbours:",
        "",
        *markdown_table(heads, rows),
    ]


def gradients(args: argparse.Namespace) -> list[str]:
    """Steps of dense layers, whose gradients are summed while the backward runs and after it."""
    rows = []
    for rate in args.rate:
        for num_ranks in args.ranks:
            work = ["--work", "gradients", "--rounds", str(args.rounds)]
            result = on_hosts(num_ranks, rate, work)
            # What a ring sends and receives.
            limit = 8 * result["bytes"] * 2 * (num_ranks - 1) / num_ranks / (rate * 1e6)
            early, after, alone = map(statistics.median, result["seconds"].values())
            numbers = [alone, limit, after, early, early / after, early / max(alone, limit)]
            rows.append([rate, num_ranks, *(f"{number:.2f}" for number in numbers)])
    heads = ["Mbit/s", "ranks", "without sums, s", "link, s", "summed after, s", "graphshard, s"]
    return [
        "Steps of six dense layers of 1024 columns, 25 MB of gradients, medians:",
        "",
        *markdown_table([*heads, "of summed after", "over the larger"], rows),
    ]


def dgl_parts(graph: Path, num_parts: int) -> str:
    """DGL's partition of the graph, which SAR reads, made once."""
    folder = graph.with_suffix(f".dgl-{num_parts}")
    if not (folder / "g.json").exists():
        program = [PEER_PYTHON, str(PEERS / "dgl_partition.py"), str(graph), str(num_parts)]
        run(*program, str(folder))
    return str(folder / "g.json")


def beside_sar(args: argparse.Namespace) -> list[str]:
    """Epochs of SAR and of this package in turn."""
    if args.sar is None:
        sys.exit(
            "--question sar needs --sar FOLDER, a checkout of https://github.com/IntelLabs/SAR"
        )
    graph = community_graph(args.folder, args.nodes, args.edges)
    rows = []
    for model in args.model:
        for num_ranks in args.ranks:
            ours = ["--work", our_parts(graph, num_ranks), "--model", model, "--constant"]
            ours += ["--rounds", str(args.rounds)]
            theirs = [str(args.sar), dgl_parts(graph, num_ranks), model, str(args.rounds)]
            theirs += [f"{NETWORK}.1", INTERFACE]
            peer = (PEER_PYTHON, str(PEERS / "sar_full.py"))
            for rate in args.rate:
                for _ in range(args.turns):
                    sides = [on_hosts(num_ranks, rate, theirs, peer)]
                    sides += [on_hosts(num_ranks, rate, ours)]
                    seconds = [statistics.median(side["seconds"]) for side in sides]
                    numbers = [side["bytes"] / 1e6 for side in sides]
                    numbers += [*seconds, seconds[1] / seconds[0]]
                    rows.append([model, rate, num_ranks, *(f"{x:.2f}" for x in numbers)])
    heads = ["model", "Mbit/s", "ranks", "MB of SAR", "MB of graphshard", "SAR, s"]
    return [
        f"Epochs beside SAR's, 3 layers, hidden 128, {args.nodes:,} nodes, in turn; MB is what the "
        "busiest rank sends or receives in an epoch:",
        "",
        *markdown_table([*heads, "graphshard, s", "ratio"], rows),
    ]


def pages(args: argparse.Namespace) -> list[str]:
    """Epochs of one process with pages of 4 KB and with large ones, in turn."""
    graph = community_graph(args.folder, args.nodes, args.edges)
    kinds: dict[str, dict[str, str]] = {
        "pages of 4 KB": {},
        "THP_MEM_ALLOC_ENABLE=1": {"THP_MEM_ALLOC_ENABLE": "1"},
        "GLIBC_TUNABLES=glibc.malloc.hugetlb=1": {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"},
    }
    command = [sys.executable, HERE, "--work", "pages", "--folder", str(graph)]
    command += ["--model", args.model[0], "--rounds", "6"]
    said: dict[str, list[list[float]]] = {name: [] for name in kinds}
    for _ in range(args.rounds):
        for name, setting in kinds.items():
            environment = {**os.environ, "OMP_NUM_THREADS": "1", **setting}
            shown = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
            said[name].append(json.loads(shown.stdout))
    forms = (".2f", ".2f", ",.0f", ",.0f")
    rows = [
        [f"`{name}`" if "=" in name else name]
        + [", ".join(f"{run[column]:{form}}" for run in runs) for column, form in enumerate(forms)]
        for name, runs in said.items()
    ]
    heads = ["", "CPU seconds an epoch", "of these the system's", "page faults", "peak, MB"]
    title = f"One process, {args.model[0]}, {args.nodes:,} nodes, medians of 6 epochs, in turn:"
    return [title, "", *markdown_table(heads, rows)]


def main() -> None:
    """Print the tables, or write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--question", choices=list(QUESTIONS), action="append")
    parser.add_argument("--rate", type=int, nargs="+", default=[200], help="Mbit/s")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--model", nargs="+", default=["sage"], choices=["sage", "gat"])
    parser.add_argument("--nodes", type=int, default=200_000)
    parser.add_argument("--edges", type=int, default=2_100_000, help="pairs drawn")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "bench")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sar", type=Path, help="a checkout of SAR, for its question")
    parser.add_argument("--turns", type=int, default=3, help="of SAR and this package")
    parser.add_argument("--rows-alone", action="store_true", help="epochs without partial sums")
    parser.add_argument("--halo-dtype", choices=["bfloat16", "int8"], help="of rows on the way")
    parser.add_argument("--write", action="store_true", help="write a file under results/")
    parser.add_argument("--constant", action="store_true", help="features are the partition's own")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    parser.add_argument("--in-turn", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    # An end from outside removes the namespaces, too.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if args.work in ("exchange", "order"):
        exchange_work(args.rounds, args.ranks_per_host, args.work == "order")
        return
    if args.work == "gradients":
        gradients_work(args.rounds)
        return
    if args.work == "pages":
        pages_work(str(args.folder), args.model[0], args.rounds)
        return
    if args.work:
        kinds = [True, False] if args.in_turn else [not args.rows_alone]
        options = args.constant, kinds, args.halo_dtype
        epoch_work(args.work, args.model[0], args.rounds, *options)
        return
    questions = args.question or ["exchange", "epoch"]
    is_able = os.name == "posix" and os.geteuid() == 0 and shutil.which("ip") and shutil.which("tc")
    if questions != ["pages"] and not is_able:
        sys.exit("this makes network namespaces, which needs Linux, root and iproute2 (ip, tc)")
    body: list[str] = []
    for question in questions:
        body += [*QUESTIONS[question](args), ""]
    if args.write:
        write_result("wire", "Exchanges and epochs between hosts", body[:-1])
    else:
        sys.stdout.write("\n".join(body))


QUESTIONS: dict[str, Callable[[argparse.Namespace], list[str]]] = {
    "exchange": lambda args: exchanges(args, with_orders=False),
    "order": lambda args: exchanges(args, with_orders=True),
    "epoch": epochs,
    "sums": sums_in_turn,
    "gradients": gradients,
    "pages": pages,
    "sar": beside_sar,
}


if __name__ == "__main__":
    main()
