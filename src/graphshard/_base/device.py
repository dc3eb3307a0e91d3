# SPDX-License-Identifier: Apache-2.0
"""The device of a process, and devices as tensors on them say it."""

from __future__ import annotations

import os
import re

import torch
import torch.distributed as dist

from .typing import Device

_NAME = re.compile(r"auto|cpu|cuda(:\d+)?")


def check_device_name(name: str) -> None:
    """Raises ValueError unless `choose_device` knows the name."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:N, N a number (got {name!r})")


def choose_device(name: str = "auto") -> torch.device:
    """The device of this process.

    Ranks of one host take its GPUs in turn, by their local rank; where there are more ranks than
    GPUs some share one. With ``"cuda:N"`` all take that one. Nothing is changed: make it the
    current device (``torch.cuda.set_device``) before the process group is started.

    Args:
        name: ``"auto"`` is a GPU if torch sees one and else the CPU; ``"cpu"``, ``"cuda"``, or
            ``"cuda:N"``.

    Raises:
        ValueError: Another name, or there is no such device here.

    Example:
        >>> choose_device("cpu")
        device(type='cpu')
    """
    check_device_name(name)
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        built = torch.version.cuda is not None
        reason = "it sees none" if built else "this torch was built without CUDA"
        raise ValueError(
            f"device must be one that torch sees (got {name}, and {reason}); use cpu, or auto, "
            "which takes a GPU where there is one"
        )
    count = torch.cuda.device_count()
    index = torch.device(name).index if ":" in name else _local_rank() % count
    if index >= count:
        raise ValueError(
            f"device must be one of the GPUs that torch sees, cuda:0 to cuda:{count - 1} (got "
            f"{name}); give one of these, or cuda, which shares them out"
        )
    return torch.device("cuda", index)


def device_of(device: Device | None) -> torch.device:
    """A device with its number: "cuda" is the current one.

    Raises:
        ValueError: Torch has no such device here.
    """
    if isinstance(device, torch.device) and device.type == "cpu" and device.index is None:
        return device
    try:
        return torch.empty(0, device=device).device
    except (AssertionError, RuntimeError) as error:
        raise ValueError(
            f"device must be one that torch has here (got {str(device)!r}: {error}); leave it out, "
            "or give another"
        ) from error


def _local_rank() -> int:
    """This process among those of its host; in one job on one host the rank."""
    for variable in ("LOCAL_RANK", "RANK"):
        if variable in os.environ:
            return int(os.environ[variable])
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
