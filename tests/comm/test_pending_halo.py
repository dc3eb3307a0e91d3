# SPDX-License-Identifier: Apache-2.0
"""HaloUnderWay: `fetch_halo` in two halves, forward and backward. 2, 3 and 5 gloo ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graphshard.comm import ExchangePlan, HaloUnderWay, fetch_halo
from graphshard.comm import halo as exchange
from graphshard.testing import run_ranks


def plan_of(rank: int, world_size: int) -> ExchangePlan:
    wanted = [torch.arange(0, 6, 2 if o % 2 else 3) for o in range(world_size)]
    wanted[rank] = wanted[rank][:0]
    return ExchangePlan.build(wanted, 6)


def same_as_fetch(rank: int, world_size: int) -> None:
    """Values, gradients, and gradients of gradients; with an input that needs none."""
    plan = plan_of(rank, world_size)
    torch.manual_seed(rank)
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    y, ids = torch.randn(6, 2, requires_grad=True), torch.arange(6) + 10 * rank
    requests = [(plan, x), (plan, ids), (plan, y)]
    found = []
    for wait in (lambda: HaloUnderWay(requests).wait(), lambda: fetch_halo(requests)):
        a, numbers, b = wait()
        loss = a.sin().sum() + (b**3).sum()
        first = torch.autograd.grad(loss, (x, y), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), (x, y))
        a, _, b = wait()
        plain = torch.autograd.grad(a.sin().sum() + (b**3).sum(), (x, y))
        found.append([a, numbers, b, *first, *second, *plain])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    with torch.no_grad():
        assert not HaloUnderWay(requests).wait()[0].requires_grad
    halo = HaloUnderWay(requests)
    with torch.no_grad():
        halo.wait()
    assert halo.wait()[0].requires_grad


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_a_pending_halo_is_that_of_fetch_halo(world_size: int) -> None:
    run_ranks(same_as_fetch, world_size)


def order_of_backward(rank: int, world_size: int) -> list[str]:
    plan = plan_of(rank, world_size)
    x = torch.randn(6, 3, requires_grad=True)
    events: list[str] = []
    start = exchange._start_return

    def watched(*arguments: Any) -> Any:
        events.append("gradients leave")
        return start(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange, "_start_return", watched)
        halo = HaloUnderWay([(plan, x)])
        own = x * 2
        own.register_hook(lambda grad: events.append("own rows"))
        (rows,) = halo.wait()
        remote = rows * 3
        remote.register_hook(lambda grad: events.append("remote rows"))
        x.register_hook(lambda grad: events.append("both"))
        (own.sum() + remote.sum()).backward()
    return events


def test_gradients_travel_while_those_of_own_rows_are_found() -> None:
    for events in run_ranks(order_of_backward, 2):
        assert events == ["remote rows", "gradients leave", "own rows", "both"]
