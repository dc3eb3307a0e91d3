# SPDX-License-Identifier: Apache-2.0
"""A training function on graph servers, under Ray Train, which starts the trainers.

Needs ``graphshard[ray]``.

On each node on which Ray has placed trainers, the first of them starts a graph server, as an actor
of that node; nodes are the hosts of the job, in the order of their first ranks. Trainers learn from
each other where the servers are. Ray pickles what it sends, the training function and the token
among it: its cluster is trusted. Graph and features do not go through it.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from .._base.files import TemporaryFolder
from ..graph.convert import require
from ..servers import GraphServer, exit_client

__all__ = ["trainer"]

_TEXT_BYTES = 256
_STOP_SECONDS = 30.0


def trainer(
    train_loop: Callable[..., Any],
    part_config: str | os.PathLike[str],
    *,
    num_hosts: int,
    num_trainers: int = 1,
    train_loop_config: Mapping[str, Any] | None = None,
    use_gpu: bool = False,
    resources_per_worker: Mapping[str, float] | None = None,
    start_timeout: float = 600.0,
    **options: Any,
) -> Any:
    """Ray's TorchTrainer for a training function that uses a `DistGraph`; call its ``fit()``.

    In the function ``initialize()`` connects to the servers, and the process group is there.

    Args:
        train_loop: Takes ``train_loop_config``, or nothing.
        part_config: The partition's JSON, the same path on all nodes; each needs the parts that it
            is given, and all of them have one at least.
        num_hosts: Number of nodes to spread trainers over.
        num_trainers: Trainers on each.
        use_gpu: Whether each trainer gets a GPU.
        resources_per_worker: Of a trainer; by default one core.
        start_timeout: Seconds until a server is up.
        **options: Further arguments of ``ray.train.torch.TorchTrainer``, such as ``run_config``.

    Raises:
        ImportError: Ray is not installed.
        ValueError: A number is below 1, or the partition is none.
    """
    for name, number in (("num_hosts", num_hosts), ("num_trainers", num_trainers)):
        if number < 1:
            raise ValueError(f"{name} must be at least 1 (got {number})")
    train, train_torch = _ray("ray.train"), _ray("ray.train.torch")
    job = _RayJob(
        train_loop,
        str(Path(part_config).expanduser().absolute()),
        secrets.token_hex(),
        bool(inspect.signature(train_loop).parameters),
        start_timeout,
    )
    resources = {"CPU": 1.0} if resources_per_worker is None else dict(resources_per_worker)
    if use_gpu:
        resources.setdefault("GPU", 1.0)
    backend = "cpu:gloo,cuda:nccl" if use_gpu else "gloo"
    return train_torch.TorchTrainer(
        job.run,
        train_loop_config=dict(train_loop_config or {}),
        torch_config=train_torch.TorchConfig(backend=backend),
        scaling_config=train.ScalingConfig(
            num_workers=num_hosts * num_trainers,
            use_gpu=use_gpu,
            resources_per_worker=resources,
            placement_strategy="SPREAD",
        ),
        **options,
    )


def _ray(module: str) -> ModuleType:
    return require(module, "graphshard[ray]", "graphshard.train.ray")


@dataclass(frozen=True)
class _RayJob:
    """What each trainer does."""

    train_loop: Callable[..., Any]
    part_config: str
    token: str
    takes_config: bool
    start_timeout: float

    def run(self, config: Mapping[str, Any]) -> Any:
        with self._served():
            return self.train_loop(config) if self.takes_config else self.train_loop()

    @contextlib.contextmanager
    def _served(self) -> Iterator[None]:
        """A server on this node, and what `initialize` looks for in the environment."""
        ray = _ray("ray")
        nodes = _gathered(ray.get_runtime_context().get_node_id())
        hosts = list(dict.fromkeys(nodes))  # by their first ranks
        node = nodes[dist.get_rank()]
        here, num_hosts = hosts.index(node), len(hosts)
        server, address = None, ""
        if dist.get_rank() == nodes.index(node):
            server = _server_of_node(ray, node)
            own = ray.util.get_node_ip_address()
            asked = server.start.remote(here, num_hosts, self.part_config, self.token, own)
            address = ray.get(asked, timeout=self.start_timeout)
        of_ranks = _gathered(address)
        addresses = [of_ranks[nodes.index(each)] for each in hosts]
        with TemporaryFolder() as folder, contextlib.ExitStack() as stack:
            descriptor = os.open(folder / "token", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(self.token)
            lines = [" ".join(each.rsplit(":", 1)) + "\n" for each in addresses]
            (folder / "ip_config").write_text("".join(lines), encoding="utf-8")
            for name, value in (
                ("GRAPHSHARD_HOST", str(here)),
                ("GRAPHSHARD_IP_CONFIG", str(folder / "ip_config")),
                ("GRAPHSHARD_TOKEN_FILE", str(folder / "token")),
            ):
                os.environ[name] = value
                stack.callback(os.environ.pop, name, None)
            stack.callback(exit_client)
            yield
            exit_client()
            if dist.is_initialized():
                dist.barrier()  # all have read what they wanted
            if server is not None:
                ray.get(server.stop.remote(), timeout=_STOP_SECONDS)
                ray.kill(server)


class _ServerActor:
    """A graph server; Ray ends it with the trainer that has started it."""

    def __init__(self) -> None:
        self._server: GraphServer | None = None

    def start(self, number: int, num_hosts: int, part_config: str, token: str, address: str) -> str:
        self._server = GraphServer(number, num_hosts, part_config, token, address)
        return self._server.address

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()


def _server_of_node(ray: ModuleType, node: str) -> Any:
    strategies = _ray("ray.util.scheduling_strategies")
    there = strategies.NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(_ServerActor).options(num_cpus=0, scheduling_strategy=there).remote()


def _gathered(text: str) -> list[str]:
    """What each rank gives, ASCII of some length."""
    row = torch.zeros(_TEXT_BYTES, dtype=torch.int64)
    data = text.encode("ascii")
    row[: len(data)] = torch.tensor(list(data), dtype=torch.int64)
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, row)
    return [bytes(each.tolist()).rstrip(b"\0").decode("ascii") for each in rows]
