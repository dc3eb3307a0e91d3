# SPDX-License-Identifier: Apache-2.0
"""GPU tensors over gloo: through page-locked memory, each copy ordered; and the choice of NCCL.

No GPU is needed (`emulated_gpu`), but for what is marked ``gpu``. Uses 2 gloo ranks.
"""

from __future__ import annotations

import contextlib
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from emulated_gpu import GPU, OnGpu, emulated_gpu
from graphshard.comm import (
    ExchangePlan,
    all_reduce,
    fetch_halo,
    gather_grads,
    initialize_comms,
    return_halo,
    shutdown_comms,
    start_fetch,
    start_return,
    sync_params,
)
from graphshard.comm._start import choose_backend
from graphshard.comm.collectives import (
    all_gather,
    copying_ahead,
    from_backend,
    room_for,
    rows_are_ready,
    to_backend,
)
from graphshard.comm.group import GroupState, group_state
from graphshard.comm.transport import exchange_rows
from graphshard.errors import RankError
from graphshard.testing import run_ranks

CPU = torch.device("cpu")

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
DEVICES = ["emulated", pytest.param("real", marks=[pytest.mark.gpu, needs_gpu])]


def state_of(backend: str, device: torch.device | None = None) -> GroupState:
    return GroupState(None, 0, 2, (0, 1), "g", backend, timedelta(seconds=5), comm_device=device)


def test_the_host_waits_for_copies_before_the_backend_reads_them() -> None:
    with emulated_gpu() as log:
        rows = [torch.arange(4.0, device="cuda"), torch.ones(2, device="cuda")]
        sent = to_backend(rows, CPU)
        assert log == [
            ("copies", "waits for", "main"),
            ("page-locked", (4,)),
            ("copy", "copies"),
            ("page-locked", (2,)),
            ("copy", "copies"),
            ("host waits for", "copies"),
        ]
    assert [type(t) for t in sent] == [Tensor, Tensor]
    assert sent[0].tolist() == [0, 1, 2, 3]


def test_the_stream_and_not_the_host_waits_for_what_arrives() -> None:
    with emulated_gpu() as log:
        room = room_for((3,), torch.float32, CPU, GPU)
        assert log.pop() == ("page-locked", (3,))
        (arrived,) = from_backend([room.fill_(2.0)], [GPU])
        assert log == [
            ("copy", "copies"),
            ("marked for", "main"),
            ("main", "waits for", "copies"),
        ]
        assert isinstance(arrived, OnGpu)
        assert arrived.tolist() == [2, 2, 2]


def test_rows_are_copied_ahead_of_kernels_started_since() -> None:
    with emulated_gpu() as log:
        event = rows_are_ready(state_of("gloo"), GPU)
        with copying_ahead(GPU, event):
            to_backend([torch.ones(1, device="cuda")], CPU)
        assert log[0] == ("copies", "waits for an event of", "main")
        assert ("copies", "waits for", "main") not in log
        # NCCL orders its own stream, and what is on the CPU needs no stream.
        assert rows_are_ready(state_of("nccl", GPU), GPU) is None
        assert rows_are_ready(state_of("gloo"), CPU) is None


def test_what_is_there_already_is_not_copied() -> None:
    tensor = torch.ones(3)
    assert to_backend([tensor], CPU)[0] is tensor
    assert from_backend([tensor], [CPU])[0] is tensor


def test_nccl_sends_from_the_gpu_of_its_group() -> None:
    with emulated_gpu():
        assert state_of("nccl").payload_device(CPU) == GPU
        assert state_of("nccl").payload_device(torch.device("cuda", 3)) == torch.device("cuda", 3)
        own = torch.device("cuda", 1)  # whatever is current in this thread
        assert state_of("nccl", own).payload_device(CPU) == own


class Model(torch.nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.ones(3, device=device))
        self.b = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16, device=device))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64, device=device))


def exchanged(rank: int, size: int, where: str, device: str) -> list[Tensor]:
    """One of each operation, with rows of a device; the results on the CPU."""
    with emulated_gpu() if where == "emulated" else contextlib.nullcontext():
        other = 1 - rank
        needed = [torch.empty(0, dtype=torch.int64)] * size
        needed[other] = torch.tensor([3, 0, 4], device=device)
        plan = ExchangePlan.build(needed, 6, device=device)
        rows = (torch.arange(12.0, device=device).view(6, 2) + 100 * rank).requires_grad_()
        ids = torch.arange(6, device=device) + 10 * rank
        halo, halo_ids = fetch_halo([(plan, rows), (plan, ids)])
        (halo * halo.detach()).sum().backward()
        found = [halo, halo_ids, rows.grad, fetch_halo([(plan, rows)], torch.bfloat16)[0]]
        found += return_halo([(plan, halo.detach()), (plan, halo_ids)])
        found += return_halo([(plan, halo.detach())], "max")
        found += start_fetch(plan, 1, [rows, ids]).wait()
        found += start_return(plan, 1, [halo.detach()], torch.float16).wait()
        # 2 MB, by shared memory where the ranks have it.
        tall = torch.arange(300_000, device=device).view(6, -1) * (rank + 1)
        found += fetch_halo([(plan, tall)])
        mixed = [torch.full((2, 1), rank, device=device), torch.full((2, 3), 1.5 + rank)]
        found += exchange_rows(group_state(), mixed, [[1, 1]] * 2, [[1, 1]] * 2, "mixed")
        found += all_gather(group_state(), ids)
        found.append(all_reduce(ids, "max"))
        model = Model(device)
        with torch.no_grad():
            model.a += rank
        sync_params(model)
        model.a.grad = model.a.detach() * (rank + 1)
        if rank:
            model.b.grad = torch.full_like(model.b, 0.5)
        gather_grads(model)
        found += [model.a, model.a.grad, model.b.grad, model.count]
        on_device = {tensor.device.type for tensor in found}
        assert on_device == ({"cpu", "cuda"} if device == "cuda" else {"cpu"})
        return [tensor.detach().cpu() for tensor in found]


@pytest.mark.parametrize("where", DEVICES)
def test_rows_of_a_gpu_arrive_as_those_of_a_cpu(where: str) -> None:
    here = run_ranks(exchanged, 2, "none", "cpu")
    there = run_ranks(exchanged, 2, where, "cuda")
    for expected, got in zip(here, there, strict=True):
        for number, (one, other) in enumerate(zip(expected, got, strict=True)):
            assert torch.equal(one, other), number
    assert here[0][0].tolist() == [[106, 107], [100, 101], [108, 109]]


def chosen(gpus: list[str], timeout: float = 10.0) -> list[object]:
    """What ranks choose that have these GPUs; a rank with None does not come."""
    store, found = dist.HashStore(), [None] * len(gpus)

    def choose(rank: int) -> None:
        try:
            found[rank] = choose_backend(store, rank, len(gpus), timedelta(seconds=timeout))
        except RankError as error:
            found[rank] = error

    def current_gpu() -> str:
        return gpus[int(threading.current_thread().name)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("graphshard.comm._start._current_gpu", current_gpu)
        threads = [
            threading.Thread(target=choose, args=(rank,), name=str(rank))
            for rank, gpu in enumerate(gpus)
            if gpu is not None
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    return found


def test_nccl_is_chosen_where_each_rank_has_a_gpu_of_its_own() -> None:
    assert chosen(["GPU-a", "GPU-b", "GPU-c"]) == ["nccl"] * 3
    assert chosen(["GPU-a", "GPU-b", "GPU-a"]) == ["gloo"] * 3
    assert chosen(["GPU-a", ""]) == ["gloo"] * 2
    assert chosen(["GPU-a"]) == ["gloo"]
    late, _ = chosen(["GPU-a", None], 0.2)
    assert isinstance(late, RankError)
    assert "rank 0: initialize_comms could not choose a backend" in str(late)


def started(rank: int, size: int, folder: str) -> str:
    store = dist.FileStore(f"{folder}/store", size)
    initialize_comms(rank, size, backend="auto", store=store, timeout=30)
    backend = group_state().backend
    dist.barrier()  # a rank that ends while the other still connects is gone to it
    shutdown_comms()
    return backend


def test_auto_is_gloo_without_gpus(tmp_path: object) -> None:
    backends = run_ranks(started, 2, str(tmp_path), group=False)
    if not torch.cuda.is_available():
        assert backends == ["gloo", "gloo"]
    with pytest.raises(ValueError, match="comm_device is for a backend that is named"):
        initialize_comms(0, 1, backend="auto", comm_device="cpu")
