# SPDX-License-Identifier: Apache-2.0
"""Scripts as torchrun would start them, on ranks that are kept warm; also on an emulated GPU."""

from __future__ import annotations

import os
import runpy
import shlex
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor, nn

import graphshard
from emulated_gpu import emulated_gpu
from graphshard.comm import all_reduce
from graphshard.sampling.loader import Pipeline
from graphshard.testing import run_ranks


def run_script_on_ranks(script: str, num_ranks: int, emulated: bool = False) -> None:
    """Run a file with its arguments, as a shell would read them; what it prints is printed here.

    Args:
        script: The file and its arguments.
        num_ranks: How many run it.
        emulated: Whether each has an emulated GPU.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run_ranks(_run, num_ranks, script, port, emulated, group=False, timeout=200.0)


def _run(rank: int, world_size: int, script: str, port: int, emulated: bool) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    before = sys.argv, sys.path
    sys.argv = shlex.split(script)
    sys.path = [str(Path(sys.argv[0]).parent), *sys.path]
    try:
        with program_on_emulated_gpu() if emulated else nullcontext():
            runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        sys.argv, sys.path = before
        graphshard.shutdown_comms()


@contextmanager
def program_on_emulated_gpu() -> Iterator[None]:
    """An emulated GPU for whole programs, also those that use what it cannot show.

    Loaders work in the caller's thread, as others have no emulated GPU. What torch's
    DistributedDataParallel computes, in C++, is computed by a class that does the same.
    """
    make = Pipeline.__init__

    def without_threads(
        self: Any, stages: Any, prefetch: int = 2, *args: Any, **kwargs: Any
    ) -> None:
        make(self, stages, 0, *args, **kwargs)

    with (
        mock.patch.object(Pipeline, "__init__", without_threads),
        mock.patch.object(nn.parallel, "DistributedDataParallel", _MeanOfGradients),
        emulated_gpu(),
    ):
        yield


class _MeanOfGradients(nn.Module):
    """A model whose gradients become their mean over the ranks, each as soon as it is there."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        graphshard.sync_params(module)
        for parameter in module.parameters():
            parameter.register_hook(self._mean)

    def _mean(self, gradient: Tensor) -> Tensor:
        total: Tensor = all_reduce(gradient)
        return total / graphshard.world_size()

    def forward(self, *args: Any) -> Any:
        return self.module(*args)
