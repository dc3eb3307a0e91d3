# SPDX-License-Identifier: Apache-2.0
"""Which backend of torch.distributed a group uses: checked where it is named, else chosen."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist

from ...errors import RankError
from ._failure import first_line
from ._rendezvous import answered


def check_backend(backend: str, device: torch.device | None) -> None:
    """Whether this torch has the backend, and it can send from where payloads shall be.

    Raises:
        RuntimeError: The backend is not here, or there is no device for it.
        ValueError: Payloads of ``device`` are not for it.
    """
    if backend == "nccl" and not _has_nccl():
        raise RuntimeError(
            "backend 'nccl' needs a CUDA device and a torch built with NCCL; use backend='gloo', "
            "which also moves CUDA tensors, through host memory"
        )
    if backend == "mpi" and not dist.is_mpi_available():
        raise RuntimeError(
            "backend 'mpi' needs a torch that was built from source with MPI, and this one was "
            "not; use backend='gloo', or 'nccl' for CUDA tensors"
        )
    if backend == "auto" and device is not None:
        raise ValueError(
            f"comm_device is for a backend that is named (got {device} with 'auto'); leave it out, "
            "or name 'gloo' or 'nccl'"
        )
    if device is not None and backend == "nccl" and device.type != "cuda":
        raise ValueError(f"comm_device must be a CUDA device with 'nccl' (got {device})")
    if device is not None and backend in ("gloo", "mpi") and device.type != "cpu":
        raise ValueError(f"comm_device must be 'cpu' with {backend!r} (got {device})")


def choose_backend(store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> str:
    """NCCL if every rank has a GPU to itself, else gloo; the same on every rank, which must call.

    NCCL refuses two ranks on one GPU. A rank's GPU is its current one.

    Args:
        store: Where the ranks have met.
        rank: This process.
        world_size: Number of ranks.
        timeout: The longest that the wait for the others may take.

    Raises:
        RankError: Another rank did not say in time which GPU it has.
    """
    if world_size == 1:
        return "gloo"
    store.set(f"gpu/{rank}", _current_gpu())
    keys = [f"gpu/{other}" for other in range(world_size)]
    try:
        answered(lambda: store.wait(keys, timeout), timeout)
        gpus = [store.get(key).decode() for key in keys]
    except RuntimeError as error:
        raise RankError(
            f"rank {rank}: initialize_comms could not choose a backend, because some rank did not "
            f"say which GPU it has: {first_line(error)}; give every rank the same backend"
        ) from error
    return "nccl" if all(gpus) and len(set(gpus)) == world_size else "gloo"


def _current_gpu() -> str:
    """A name of this process's current GPU that no other has; empty where NCCL cannot be used."""
    if not _has_nccl():
        return ""
    device = torch.cuda.current_device()
    return str(torch.cuda.get_device_properties(device).uuid)


def _has_nccl() -> bool:
    return dist.is_nccl_available() and torch.cuda.is_available()
