# SPDX-License-Identifier: Apache-2.0
"""Batches that go to a GPU: order of copies, waits and marks; on a device, that results are equal.

Without a GPU, streams that only write down what is launched on them stand in the place of torch's:
a copy that is "begun" on one happens when another stream waits for an event after it. No group but
in a test that needs a device.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from dist_loader_cases import by_name, inputs_of, labels_of
from sharded_cases import graph_of, manager_of, write_parts

import graphshard
from graphshard._base.page_locked import PageLock, gpu_view
from graphshard.dgl.dataloading import (
    DataLoader,
    EdgeDataLoader,
    NeighborSampler,
    negative_sampler,
)
from graphshard.graph.frame import LazyRows
from graphshard.partition import partition_graph
from graphshard.sampling import DataLoader as ShardedLoader
from graphshard.sampling import DistNeighborSampler, MiniBatch
from graphshard.sampling._pipeline import DeviceStream, moved
from graphshard.sampling.loader import Pipeline, Stage
from graphshard.servers import DistEdgeDataLoader, DistGraph, DistNodeDataLoader, exit_client
from graphshard.testing import run_ranks

PRESENT = torch.device("meta")  # what is patched to have streams


class Stream:
    """Writes down what is launched; does it when something waits for it."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log
        self.launched: list[Callable[[], None]] = []
        self.num_done = 0
        self.working = threading.Lock()

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.name} waits for an event of {event.stream.name}")
        event.synchronize(log=False)


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.has_times = enable_timing

    def record(self, stream: Stream) -> None:
        self.stream, self.place = stream, len(stream.launched)

    def synchronize(self, log: bool = True) -> None:
        stream = self.stream
        if log:
            stream.log.append(f"host waits for {stream.name}")
        with stream.working:
            while stream.num_done < self.place:
                stream.launched[stream.num_done]()
                stream.num_done += 1

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: Event) -> float:
        assert self.has_times
        assert later.has_times
        return 500.0


class Cuda:
    """In the place of ``torch.cuda``'s streams.

    Attributes:
        log: What has happened, in order.
        recorded: Names of streams, and tensors that were recorded on them.
        pinned: Shapes of what was put into page-locked memory.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.default, self.side = Stream("default", self.log), Stream("side", self.log)
        self.of_thread = threading.local()
        self.recorded: list[tuple[str, torch.Tensor]] = []
        self.pinned: list[torch.Size] = []

    def current_stream(self, device: Any = None) -> Stream:
        found: Stream = getattr(self.of_thread, "stream", self.default)
        return found

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.of_thread.stream = self.current_stream(), stream
        yield
        self.of_thread.stream = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    """Streams on the device "meta", to which copies come late and keep their values."""
    found = Cuda()
    monkeypatch.setattr("graphshard.sampling._pipeline._STREAMED", ("cuda", "meta"))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: found.side)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", found.current_stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: found.default)
    monkeypatch.setattr(torch.cuda, "stream", found.stream)

    def record(tensor: torch.Tensor, stream: Stream) -> None:
        found.recorded.append((stream.name, tensor))

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        found.pinned.append(tensor.shape)
        return tensor.clone()

    empty = torch.empty

    def pinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        made = empty(*args, **kwargs)
        found.pinned += [made.shape] if pin_memory else []
        return made

    monkeypatch.setattr(torch, "empty", pinned)
    monkeypatch.setattr(torch.Tensor, "record_stream", record)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    return found


@pytest.fixture
def late_copies(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes to the device stays readable, but is wrong until its copy is waited for."""
    really = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        target = args[0] if args else kwargs.get("device")
        if not isinstance(target, torch.device) or target != PRESENT:
            return really(tensor, *args, **kwargs)
        copy = torch.full_like(tensor, -7)
        stream = cuda.current_stream()
        stream.launched.append(lambda: copy.copy_(tensor))
        if not kwargs.get("non_blocking"):
            done = Event()
            done.record(stream)
            done.synchronize(log=False)
        return copy

    monkeypatch.setattr(torch.Tensor, "to", to)


def typed() -> graphshard.Graph:
    count = 40
    ends = [(torch.randint(count, (200,)), torch.randint(count, (200,))) for _ in range(2)]
    g = graphshard.heterograph(
        {("user", "likes", "item"): ends[0], ("item", "liked-by", "user"): ends[1]},
        {"user": count, "item": count},
    )
    g.nodes["user"].data["x"] = torch.randn(count, 5, dtype=torch.bfloat16)
    g.nodes["item"].data["x"] = torch.randn(count, 3, dtype=torch.float64)
    g.nodes["item"].data["y"] = torch.arange(count)
    g.edges["likes"].data["w"] = torch.rand(200)
    return g


class HostTables:
    """A feature store of a user's own: rows come in memory that is not page-locked."""

    def __init__(self, g: graphshard.Graph) -> None:
        self.g = g

    def feature_names(self, kind: Any) -> Any:
        data = self.g.nodes[kind].data if isinstance(kind, str) else self.g.edges[kind].data
        return [name for name in data if not name.startswith("_")]

    def fetch(self, requests: Any) -> Any:
        found = []
        for r in requests:
            data = (self.g.nodes if isinstance(r.kind, str) else self.g.edges)[r.kind].data
            found.append({name: data[name][r.ids] for name in r.names})
        return found

    def on(self, group: Any) -> HostTables:
        return self

    def close(self) -> None:
        pass


def values(value: Any) -> list[torch.Tensor]:
    """Every tensor of a batch of graphs, on the CPU."""
    if isinstance(value, torch.Tensor):
        return [value.cpu()]
    if isinstance(value, dict):
        return [each for key in sorted(value) for each in values(value[key])]
    if isinstance(value, tuple | list):
        return [each for part in value for each in values(part)]
    found = [each for adj in value.relations for ids in adj.coo() for each in values(ids)]
    for frames in (value._src_frames, value._dst_frames, value._edge_frames):
        for frame in frames:
            found += [frame[name].cpu() for name in sorted(frame)]
    return found


def node_loader(g: graphshard.Graph, device: Any, **options: Any) -> Any:
    sampler = NeighborSampler(
        [3, 2],
        prefetch_node_feats=["x"],
        prefetch_labels={"item": ["y"]},
        prefetch_edge_feats=["w"],
    )
    seeds = {"item": torch.arange(30), "user": torch.arange(7)}
    return DataLoader(g, seeds, sampler, device, batch_size=8, seed=3, **options)


def edge_loader(g: graphshard.Graph, device: Any, **options: Any) -> Any:
    return EdgeDataLoader(
        g,
        {"likes": torch.arange(30)},
        NeighborSampler([3, 2], prefetch_node_feats=["x"]),
        device,
        negative_sampler=negative_sampler.Uniform(2),
        prefetch_labels=["w"],
        batch_size=8,
        seed=3,
        **options,
    )


def sharded_loader(g: graphshard.Graph, device: Any, **options: Any) -> Any:
    sampler = DistNeighborSampler(
        [3, 2],
        input_node_features={"x": {t: g.nodes[t].data["x"] for t in g.ntypes}},
        output_node_features={"y": {"item": g.nodes["item"].data["y"]}},
    )
    sampler.output_device = device
    return ShardedLoader(g, {"item": torch.arange(30)}, sampler, 8, seed=3, **options)


LOADERS = [node_loader, edge_loader, sharded_loader]


@pytest.mark.usefixtures("late_copies")
@pytest.mark.parametrize("options", [{}, {"prefetch": 1}, {"use_alternate_streams": False}])
@pytest.mark.parametrize("make", [node_loader, edge_loader])
def test_batches_are_right_when_they_arrive(
    make: Any, options: dict[str, Any], cuda: Cuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that the caller's stream did not wait for would hold -7."""
    g = typed()
    store = {"feature_store": HostTables(g)} if make is node_loader else {}
    expected = [values(batch) for batch in make(g, "cpu", **store)]
    arrived = 0
    for batch, of_cpu in zip(make(g, PRESENT, **store, **options), expected, strict=True):
        for ours, theirs in zip(values(batch), of_cpu, strict=True):
            assert torch.equal(ours, theirs)
        arrived += 1
    assert arrived == len(expected) > 3
    assert cuda.pinned
    side = "default" if options.get("use_alternate_streams") is False else "side"
    assert cuda.log[0] == f"{side} waits for default"
    assert cuda.log.count(f"default waits for an event of {side}") == arrived
    assert (cuda.side.num_done == 0) == (side == "default")


@pytest.mark.usefixtures("late_copies")
def test_batches_of_a_graph_in_parts_are_right_when_they_arrive(cuda: Cuda, tmp_path: Path) -> None:
    partition_graph(typed(), "typed", 2, str(tmp_path), part_method="random", quiet=True)
    g = DistGraph("typed", part_config=tmp_path / "typed.json")
    sampler = NeighborSampler(
        [3, 2], prefetch_node_feats=["x"], prefetch_edge_feats={"likes": ["w"]}
    )

    def loaders(device: Any) -> list[Any]:
        options = {"batch_size": 8, "seed": 3, "queue_size": 2}
        edges = {"likes": torch.arange(30)}
        negatives = {"negative_sampler": negative_sampler.Uniform(2), "prefetch_labels": ["w"]}
        return [
            DistNodeDataLoader(g, {"item": torch.arange(30)}, sampler, device, **options),
            DistEdgeDataLoader(g, edges, sampler, device, **options, **negatives),
        ]

    for on_device, on_cpu in zip(loaders(PRESENT), loaders("cpu"), strict=True):
        for batch, of_cpu in zip(on_device, on_cpu, strict=True):
            for ours, theirs in zip(values(batch), values(of_cpu), strict=True):
                assert torch.equal(ours, theirs)
        assert on_device.stats().num_edges == on_cpu.stats().num_edges > 0
    assert cuda.log.count("default waits for an event of side") == 8
    exit_client()


@pytest.mark.usefixtures("late_copies")
def test_a_copy_that_nothing_waits_for_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stream, "wait_event", lambda self, event: None)
    g = typed()
    input_nodes, _, _ = next(iter(node_loader(g, PRESENT, feature_store=HostTables(g))))
    assert bool((input_nodes["user"] == -7).all())


@pytest.mark.usefixtures("cuda")
@pytest.mark.parametrize("make", LOADERS)
def test_blocks_for_a_device_come_grouped_by_source(make: Any) -> None:
    """As their backward reads them; the first, of whose inputs nothing needs a gradient, is not."""
    for device, is_grouped in ((PRESENT, True), ("cpu", False)):
        for batch in make(typed(), device):
            first, *others = batch[-1] if isinstance(batch, tuple) else batch
            assert not any(adj.formats()["csr"] for adj in first.relations)
            found = {adj.formats()["csr"] for block in others for adj in block.relations}
            assert found == {is_grouped}


@pytest.mark.parametrize("make", LOADERS)
def test_every_tensor_is_recorded_on_the_callers_stream(make: Any, cuda: Cuda) -> None:
    other = Stream("own", cuda.log)
    with cuda.stream(other):
        for batch in make(typed(), PRESENT, prefetch=1):
            assert {name for name, _ in cuda.recorded} == {"own"}
            recorded = {memory_of(tensor) for _, tensor in cuda.recorded}  # which keeps them
            found = arrays(batch)
            assert len(found) > 20
            assert all(each.is_meta and memory_of(each) in recorded for each in found)
            assert len(cuda.recorded) < len(found)  # arrays of a batch have memory in common
            cuda.recorded.clear()
    assert "own waits for an event of side" in cuda.log
    assert cuda.log[0] == "side waits for own"


def memory_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def arrays(value: Any) -> list[torch.Tensor]:
    """What a batch holds on the device."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [each for part in value.values() for each in arrays(part)]
    if isinstance(value, tuple | list):
        return [each for part in value for each in arrays(part)]
    found: list[Any] = []
    for adj in value.relations:
        adj.map(lambda array: found.append(array) or array)  # type: ignore[func-returns-value]
    for frame in (*value._src_frames, *value._dst_frames, *value._edge_frames):
        columns = [frame.unread(name) for name in frame]
        found += [c._rows if isinstance(c, LazyRows) else c for c in columns]
        assert all(c.device == PRESENT for c in columns)
    return [each for each in found if each is not None]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_a_gpu_reads_rows_of_locked_tables(dtype: torch.dtype) -> None:
    src, dst = torch.randint(5000, (2, 40_000))
    g = graphshard.graph((src, dst), num_nodes=5000)
    table = g.ndata["x"] = torch.randint(0, 2, (5000, 300)).to(dtype)
    g.ndata["small"] = torch.arange(5000)
    g.edata["w"] = torch.randn(40_000, 16)[:, :8]  # not contiguous: the host gathers it
    sampler = NeighborSampler([3, 2], prefetch_node_feats=["x", "small"], prefetch_edge_feats=["w"])
    seeds = torch.arange(0, 5000, 7)
    options = {"batch_size": 100, "seed": 3, "shuffle": True}
    expected = [values(batch) for batch in DataLoader(g, seeds, sampler, "cpu", **options)]
    loader = DataLoader(g, seeds, sampler, "cuda", use_uva=True, **options)
    assert table.is_pinned()
    assert gpu_view(table, loader.device).data_ptr() == table.data_ptr()
    assert gpu_view(g.ndata["small"], loader.device) is None
    for batch, of_cpu in zip(loader, expected, strict=True):
        for ours, theirs in zip(values(batch), of_cpu, strict=True):
            assert torch.equal(ours, theirs)
    other = DataLoader(g, seeds, sampler, "cuda", use_uva=True, **options)
    del loader, batch
    gc.collect()
    assert table.is_pinned()
    del other
    gc.collect()
    assert not table.is_pinned()
    assert torch.equal(torch.ones(3, device="cuda").cpu(), torch.ones(3))  # no error is left


def test_what_pages_are_not_locked() -> None:
    """Nothing is asked of a driver that is not there."""
    assert PageLock.of(torch.zeros(10)) is None
    assert PageLock.of(torch.zeros(1 << 20, 2)[:, :1]) is None
    assert PageLock.of(torch.zeros(1 << 20, requires_grad=True)) is None
    assert gpu_view(torch.zeros(1 << 20), torch.device("cpu")) is None


def test_pages_are_locked_once_and_until_the_last_holder_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a driver that only writes down what it is asked."""
    locked: list[int] = []
    unlocked: list[int] = []
    module = "graphshard._base.page_locked"
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(f"{module}._driver_locks", lambda place, size: locked.append(place) or True)
    monkeypatch.setattr(f"{module}._unlock", lambda table, _: unlocked.append(table.data_ptr()))
    table = torch.zeros(1 << 20)
    place = table.data_ptr()
    first, second = PageLock.of(table), PageLock.of(table)
    assert first is second is not None
    assert locked == [place]
    del table, first
    gc.collect()
    assert unlocked == []
    del second
    gc.collect()
    assert unlocked == [place]


def test_what_is_not_locked_is_not_viewed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _: True)  # by torch, or by the user
    table = torch.zeros(1 << 20)
    assert gpu_view(table, torch.device("cuda", 0)) is None


def test_the_caller_is_held_back_and_the_device_wait_is_counted(cuda: Cuda) -> None:
    stream = DeviceStream.of(PRESENT)
    run = Pipeline([Stage("one", lambda x: torch.tensor(x))], 1, stream=stream).run(range(6))
    counts = []
    for _ in run:
        counts.append(cuda.log.count("host waits for default"))
    assert counts == [0, 0, 1, 2, 3, 4]  # never more than two steps ahead of the device
    assert run.delivered.arrivals.seconds_waited == 3.0


def test_without_threads_all_is_on_the_callers_stream(cuda: Cuda) -> None:
    loader = node_loader(typed(), PRESENT, use_prefetch_thread=False)
    for _ in loader:
        pass
    assert not any("side" in line for line in cuda.log)
    assert loader.stats().num_steps == len(loader)
    assert loader.stats().device_wait_seconds == len(loader) / 2


def test_errors_and_leaving_early_pass_through(cuda: Cuda) -> None:
    def fails(x: int) -> int:
        if x == 2:
            raise KeyError("no such row")
        return x

    stream = DeviceStream.of(PRESENT)
    run = Pipeline([Stage("a", lambda x: x), Stage("b", fails)], 2, stream=stream).run(range(5))
    got = []
    with pytest.raises(KeyError, match="no such row"):
        for value in run:
            got.append(value)
    assert got == [0, 1]
    run = Pipeline([Stage("a", lambda x: x, 2)], 2, stream=stream).run(range(5))
    assert next(run) == 0
    assert run.close()


def test_rows_on_the_host_are_gathered_in_page_locked_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    really, pins, copies = torch.empty, [], []

    def empty(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        pins.append(pin_memory)
        return really(*args, **kwargs)

    def to(tensor: torch.Tensor, device: Any, non_blocking: bool = False) -> torch.Tensor:
        copies.append((device, non_blocking))
        return tensor

    source, index = torch.randn(6, 3), torch.tensor([5, 0, 5])
    device = torch.device("cuda", 0)
    rows = LazyRows(source, index, device)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        patch.setattr(torch.Tensor, "to", to)
        found = rows.gather()
    assert torch.equal(found, source[index])
    assert rows.gather() is found
    assert pins == [True]
    assert copies == [(device, True)]


def test_copies_to_the_cpu_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    really = torch.Tensor.to

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        found.append(kwargs.get("non_blocking"))
        return really(tensor, *args, **kwargs)

    ((_, _, blocks),) = DataLoader(typed(), {"item": [1]}, NeighborSampler([2]), batch_size=1)
    batch = MiniBatch(blocks, epoch=1, step=2, num_seeds=1, num_global_seeds=4)
    there = batch.to("meta", non_blocking=True)
    monkeypatch.setattr(torch.Tensor, "to", to)
    there[0].srcnodes["user"].data["_ID"] = torch.empty(
        blocks[0].num_src_nodes("user"), device="meta"
    )
    with pytest.raises(NotImplementedError, match="meta"):  # there is nothing to copy from
        there.to("cpu", non_blocking=True)
    assert not any(found)
    assert (there.epoch, there.step, there.num_global_seeds) == (1, 2, 4)
    assert there.device == PRESENT
    with pytest.raises(graphshard.DGLError, match="record_stream is for graphs on a GPU"):
        blocks[0].record_stream(None)


def test_moved_keeps_kinds_and_values() -> None:
    batch = ({"a": torch.arange(3)}, [torch.ones(2)], "name", None)
    found = moved(batch, torch.device("cpu"), pin=True)  # nothing is pinned for the CPU
    assert found[0]["a"] is batch[0]["a"]
    assert found[2:] == ("name", None)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"prefetch": 0}])
@pytest.mark.parametrize("make", LOADERS)
def test_on_a_device_batches_equal_those_on_the_cpu(make: Any, options: dict[str, Any]) -> None:
    g = typed()
    expected = [values(batch) for batch in make(g, "cpu")]
    busy = torch.randn(2000, 2000, device="cuda")
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            loader = make(g, "cuda", **options)
            for batch, of_cpu in zip(loader, expected, strict=True):
                for _ in range(20):  # copies run ahead of this
                    busy = busy @ busy / busy.norm()
                sums = [each.double().sum().cpu() for each in _there(batch)]
                del batch
                for ours, theirs in zip(sums, of_cpu, strict=True):
                    torch.testing.assert_close(ours, theirs.double().sum())
        torch.cuda.synchronize()
    assert loader.stats().num_steps == len(expected)
    assert loader.stats().device_wait_seconds >= 0


@pytest.mark.gpu
@pytest.mark.parametrize("make", LOADERS)
def test_a_graph_on_a_device_gives_the_batches_of_the_cpu(make: Any) -> None:
    g = typed()
    expected = [values(batch) for batch in make(g, "cpu")]
    with torch.cuda.stream(torch.cuda.Stream()):
        there = g.to("cuda")
        for batch, of_cpu in zip(make(there, None), expected, strict=True):
            for ours, theirs in zip(_there(batch), of_cpu, strict=True):
                assert torch.equal(ours.cpu(), theirs)


def _sums(rank: int, world_size: int, parts: str, device: str) -> list[float]:
    """Of what each batch of this rank holds, weighted by place."""
    whole, manager = graph_of("plain"), manager_of(parts, rank)
    features = by_name(manager, "x", inputs_of(whole)) | by_name(manager, "y", labels_of(whole))
    sampler = DistNeighborSampler([2, 2], input_node_features=features)
    sampler.output_device = torch.device(device)
    found = []
    for batch in ShardedLoader(manager, manager.ndata["_ID"], sampler, 3, seed=1):
        assert batch.device.type == torch.device(device).type
        for name in features:
            rows = batch[0].srcdata[name].double()
            places = torch.arange(1, 1 + rows.numel(), device=rows.device).view(rows.shape)
            found.append(float((rows * places).sum()))
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_ranks_that_share_a_device(num_ranks: int, tmp_path: Path) -> None:
    parts = write_parts(tmp_path, graph_of("plain"), num_ranks, "metis")
    on_cpu = run_ranks(_sums, num_ranks, parts, "cpu")
    on_device = run_ranks(_sums, num_ranks, parts, "cuda")
    for ours, theirs in zip(on_device, on_cpu, strict=True):
        assert ours == pytest.approx(theirs)


def _there(value: Any) -> list[torch.Tensor]:
    """As `values`, left where they are."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [each for key in sorted(value) for each in _there(value[key])]
    if isinstance(value, tuple | list):
        return [each for part in value for each in _there(part)]
    found = [ids for adj in value.relations for ids in adj.coo()]
    for frames in (value._src_frames, value._dst_frames, value._edge_frames):
        found += [frame[name] for frame in frames for name in sorted(frame)]
    assert all(each.is_cuda for each in found)
    return found


@pytest.mark.gpu
def test_on_a_device_rows_survive_that_the_loop_drops_them() -> None:
    """Memory that a late kernel still reads must not be used for the next batch."""
    count, width = 20_000, 256
    g = graphshard.graph((torch.arange(count), torch.arange(count)), num_nodes=count)
    g.ndata["x"] = torch.arange(count).float()[:, None].expand(-1, width).contiguous()
    sampler = NeighborSampler([1], prefetch_node_feats=["x"])
    for options in (
        {},
        {"use_uva": True},
        {"pin_prefetcher": False, "use_alternate_streams": False},
    ):
        loader = DataLoader(g, torch.arange(count), sampler, "cuda", batch_size=2000, **options)
        busy, sums = torch.randn(3000, 3000, device="cuda"), []
        for _, _, blocks in loader:
            for _ in range(10):
                busy = busy @ busy / busy.norm()
            sums.append(blocks[0].srcdata["x"][:, 0].sum(dtype=torch.float64))
        found = torch.stack(sums).cpu()
        expected = torch.arange(count, dtype=torch.float64).view(10, -1).sum(1)
        assert torch.equal(found, expected)
