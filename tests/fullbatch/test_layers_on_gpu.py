# SPDX-License-Identifier: Apache-2.0
"""Layers on a sharded graph on a GPU give what they give on the CPU: outputs and every gradient.

On the emulated GPU (`emulated_gpu`), and (marked ``gpu``) on a real one, in float64 and float32.
Uses 2 gloo ranks, which share the GPU. A few layers always; all of them with ``--all`` and on a
real GPU.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import graphshard
import graphshard.sar
from emulated_gpu import emulated_gpu
from graphshard import function as fn
from graphshard.comm import Pending
from graphshard.comm.group import GroupState
from graphshard.fullbatch.column_blocks import WHOLE
from graphshard.fullbatch.row_transport import RowTransport
from graphshard.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "nn"))

from nn_layer_cases import IN_FEATS, nn_layer_cases
from shards import PLAIN, features, graph_of, own_edges, own_nodes, write_parts
from test_parity import construct, forward, weighted_sum

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-3}
ALWAYS = {"plain": 3, "typed": 1}
IN_AUTOCAST = ("sage-mean-3", "gat", "gatv2", "dotgat", "rgcn-basis-many")

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
REAL = [pytest.mark.gpu, needs_gpu]
DEVICES = [
    ("emulated", torch.float64),
    pytest.param("real", torch.float64, marks=REAL),
    pytest.param("real", torch.float32, marks=REAL),
]


def moved(value: Tensor, device: str) -> Tensor:
    """On a device, and numbers in the default type."""
    dtype = torch.get_default_dtype() if value.is_floating_point() else value.dtype
    return value.to(device, dtype)


def results(
    parts: str,
    rank: int,
    kind: str,
    mode: str,
    names: Sequence[str],
    device: str,
    narrow: torch.dtype | None = None,
) -> dict[str, list[Tensor]]:
    """Outputs and gradients of each layer, on the CPU; ``narrow`` is for autocast."""
    whole = graph_of(kind)
    data = graphshard.load_dgl_partition_data(parts, rank, device, feature_device="cpu")
    nodes, edges = own_nodes(data), own_edges(data)
    sharded = construct(data, mode)
    dtype = torch.get_default_dtype()
    found = {}
    for case in nn_layer_cases(kind):  # type: ignore[arg-type]
        if case.name not in names:
            continue
        torch.manual_seed(0)
        layer = case.make(whole.canonical_etypes).to(device)
        given = case.keywords(edges[PLAIN] if kind == "plain" else edges)
        keywords = tree_map_only(Tensor, lambda value: moved(value, device), dict(given))
        rows = features(whole, IN_FEATS, ties=False)
        inputs = {t: x[nodes[t]].to(device, dtype).requires_grad_() for t, x in rows.items()}
        with torch.autocast(device, narrow, enabled=narrow is not None):
            outputs = forward(layer, sharded, kind, inputs, keywords)
        generator = torch.Generator().manual_seed(4)
        weights = {
            t: torch.randn(out.shape, generator=generator, dtype=dtype).to(device)
            for t, out in outputs.items()
        }
        loss = graphshard.comm.anchor(weighted_sum(outputs, weights), *inputs.values())
        loss.backward()
        graphshard.gather_grads(layer)
        grads = [p.grad for p in [*inputs.values(), *layer.parameters()]]
        found[case.name] = [
            torch.zeros(()) if t is None else t.detach().cpu() for t in [*outputs.values(), *grads]
        ]
    return found


def calls(parts: str, rank: int, kind: str, mode: str, device: str) -> dict[str, Tensor]:
    """What there is besides layers: degrees, edge values, functions of the user, other graphs."""
    data = graphshard.load_dgl_partition_data(parts, rank).to(device)
    graph = construct(data, mode)
    etype = data.canonical_etypes[0]
    source, _, target = etype
    generator = torch.Generator().manual_seed(rank)
    rows = torch.randn(graph.num_src_nodes(source), 3, generator=generator).to(device)
    ends = torch.randn(graph.num_dst_nodes(target), 3, generator=generator).to(device)
    rows.requires_grad_()
    view = graph[etype]
    found: dict[str, Any] = {"in": view.in_degrees(), "out": view.out_degrees()}
    with graph.local_scope():
        graph.nodes[source].data["x"] = rows
        if source == target:
            graph.nodes[target].data["y"] = rows.detach() + 1
        else:
            graph.nodes[target].data["y"] = ends
        view = graph[etype]
        view.apply_edges(fn.u_dot_v("x", "y", "score"))
        view.edata["weight"] = graphshard.edge_softmax(view, view.edata["score"])
        view.update_all(fn.u_mul_e("x", "weight", "m"), fn.sum("m", "weighted"))
        view.update_all(fn.copy_u("x", "m"), fn.max("m", "largest"))
        view.update_all(
            lambda edges: {"m": (edges.src["x"] * edges.dst["y"]).tanh()}, fn.mean("m", "own")
        )
        data_out = graph.nodes[target].data
        found |= {name: data_out[name] for name in ("weighted", "largest", "own")}
        sum(found[name].square().sum() for name in ("weighted", "largest", "own")).backward()
        found["grad"] = rows.grad
    seeds = data.node_map(target).starts[rank] + torch.arange(data.num_owned(target))[::2]
    mfgs = graphshard.construct_mfgs(data, {target: seeds.to(device)}, 2, mode="oneshot")
    inputs = mfgs[0].input_nodes
    found |= {"inputs": inputs} if isinstance(inputs, Tensor) else dict(inputs)
    found["mfg"] = mfgs[1][etype].in_degrees()
    if kind == "plain":
        looped = graph.add_self_loop()
        looped.srcdata["x"] = rows.detach()
        looped.update_all(fn.copy_u("x", "m"), fn.sum("m", "s"))
        found["looped"] = looped.dstdata["s"]
        found["norm"] = graphshard.sar.DistributedBN1D(3).to(device)(rows)
    assert {t.device.type for t in found.values()} == {torch.device(device).type}
    return {name: tensor.detach().cpu() for name, tensor in found.items()}


def compare(
    rank: int,
    size: int,
    jobs: list[list[Any]],
    where: str,
    dtype: torch.dtype,
) -> list[str]:
    """What differs between the CPU and the GPU."""
    wrong = []
    torch.set_default_dtype(dtype)
    try:
        for parts, kind, mode, names in jobs:
            here = results(parts, rank, kind, mode, names, "cpu")
            some = calls(parts, rank, kind, mode, "cpu")
            with emulated_gpu() if where == "emulated" else contextlib.nullcontext():
                there = results(parts, rank, kind, mode, names, "cuda")
                others = calls(parts, rank, kind, mode, "cuda")
            here |= {name: [tensor] for name, tensor in some.items()}
            there |= {name: [tensor] for name, tensor in others.items()}
            for name, expected in here.items():
                for number, (a, b) in enumerate(zip(there[name], expected, strict=True)):
                    gap = float((a - b).abs().max()) if a.numel() else 0.0
                    if a.shape != b.shape or not gap <= TOLERANCES[dtype]:
                        wrong.append(f"{kind} {mode} {name} {number}: {gap}")
        return wrong
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(("where", "dtype"), DEVICES)
@pytest.mark.timeout(600)
def test_layers_give_what_they_give_on_the_cpu(
    where: str, dtype: torch.dtype, tmp_path: Path, run_all: bool
) -> None:
    runs_all = run_all or where == "real"
    jobs: list[list[Any]] = []
    for kind, mode in (
        ("plain", "sequential"),
        ("typed", "oneshot"),
        ("plain", "oneshot"),
        ("typed", "sequential-kept"),
    )[: None if runs_all else 2]:
        parts = write_parts(tmp_path / kind, graph_of(kind), 2, "random")
        names = [
            case.name
            for case in nn_layer_cases(kind)  # type: ignore[arg-type]
            if mode == "oneshot" or not case.oneshot_only
        ]
        step = 1 if runs_all else max(1, len(names) // ALWAYS[kind])
        jobs.append([parts, kind, mode, names[::step]])
    for wrong in run_ranks(compare, 2, jobs, where, dtype, timeout=580.0):
        assert wrong == []


def compare_in_autocast(
    rank: int, size: int, parts: str, names: list[str], where: str
) -> dict[str, float]:
    """The largest gap between the CPU and the GPU over the largest number, by layer."""
    gaps = {}
    for mode in ("sequential", "oneshot"):
        arguments = parts, rank, "plain", mode, names
        here = results(*arguments, "cpu", torch.bfloat16)
        with emulated_gpu() if where == "emulated" else contextlib.nullcontext():
            there = results(*arguments, "cuda", torch.bfloat16)
        for name, expected in here.items():
            pairs = [(a.float(), b.float()) for a, b in zip(there[name], expected, strict=True)]
            assert all(a.shape == b.shape for a, b in pairs), name
            gaps[f"{name} {mode}"] = max(
                float((a - b).abs().max() / b.abs().max().clamp(min=1.0)) for a, b in pairs
            )
    return gaps


@pytest.mark.parametrize("where", ["emulated", pytest.param("real", marks=REAL)])
@pytest.mark.timeout(600)
def test_layers_in_autocast(where: str, tmp_path: Path, run_all: bool) -> None:
    """Also where the backward computes again what the forward computed in the narrower type."""
    parts = write_parts(tmp_path, graph_of("plain"), 2, "random")
    cases = [case for case in nn_layer_cases("plain") if not case.oneshot_only]
    names = [case.name for case in cases if run_all or where == "real" or case.name in IN_AUTOCAST]
    for gaps in run_ranks(compare_in_autocast, 2, parts, names, where, timeout=580.0):
        assert gaps
        assert {name: gap for name, gap in gaps.items() if not gap <= 0.05} == {}


class Visited(RowTransport):
    """A transport that notes on which stream it sends, and when rows are taken."""

    num_steps = 4
    num_rows = (1, 1, 1, 1)

    def __init__(self, log: list[Any], backend: str) -> None:
        state = GroupState(None, 0, 4, (0, 1, 2, 3), "g", backend, timedelta(seconds=5))
        self.plan = SimpleNamespace(state=state)  # type: ignore[assignment]
        self._log = log

    def _find_shards(self, etype: Any) -> Any: ...

    def start_fetch(self, step: int, tensors: Any, needs_grad: Any) -> Pending:
        self._log.append(("sent on", torch.cuda.current_stream().name))
        (rows,) = tensors

        def arrive() -> list[Tensor]:
            self._log.append("taken")
            return [rows]

        return Pending(arrive)

    def start_return(self, step: int, grads: Any) -> Any: ...

    def add_returned(self, step: int, total: Tensor, arrived: Tensor) -> None: ...


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_the_next_shard_is_copied_ahead_and_the_host_stays_one_behind_it(backend: str) -> None:
    with emulated_gpu() as log:
        whole = {("u", "h"): torch.ones(1, device="cuda")}
        visits = [(step, WHOLE) for step in range(4)]
        needs = dict.fromkeys(whole, False)
        passes = Visited(log, backend).prefetched(visits, 1, whole, {}, needs, {})  # type: ignore[arg-type]
        for step, _, _ in passes:
            log.append(("computed", step))
    if backend == "nccl":  # its stream is ordered by torch
        assert set(log) == {("sent on", "main"), "taken", *(("computed", s) for s in range(4))}
        return
    sent = [("copies", "waits for an event of", "main"), ("sent on", "copies")]
    assert log == [
        *sent,
        ("computed", 0),
        "taken",
        *sent,
        ("computed", 1),
        ("host waits for", "main"),
        "taken",
        *sent,
        ("computed", 2),
        ("host waits for", "main"),
        "taken",
        ("computed", 3),
    ]
