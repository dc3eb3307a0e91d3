# SPDX-License-Identifier: Apache-2.0
"""DistributedBN1D against torch.nn.BatchNorm1d on the concatenation. One process; 2, 3, 5 ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphshard.nn import DistributedBN1D
from graphshard.nn._distributed_bn import _Normalize, merge_statistics, pack_statistics
from graphshard.testing import run_ranks

CHANNELS = 3
OPTIONS: list[dict[str, Any]] = [
    {},
    {"affine": False},
    {"momentum": None},
    {"momentum": 0.3, "eps": 1e-2},
    {"track_running_stats": False},
]
# Rows per rank; the same for all world sizes would leave out what is interesting.
ROWS = {2: (5, 3), 3: (4, 0, 1), 5: (0, 1, 1, 0, 6)}


def rows_of_all(num_rows: int, length: int | None, dtype: torch.dtype) -> Tensor:
    shape = (num_rows, CHANNELS) if length is None else (num_rows, CHANNELS, length)
    x = torch.randn(shape, dtype=torch.float64, generator=torch.manual_seed(num_rows))
    return (x * 2 + 5).to(dtype)


def reference(layer: nn.BatchNorm1d) -> nn.BatchNorm1d:
    plain = nn.BatchNorm1d(
        layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats
    ).to(torch.float64)
    plain.load_state_dict(layer.state_dict())
    return plain


def make(options: dict[str, Any], dtype: torch.dtype = torch.float64) -> DistributedBN1D:
    layer = DistributedBN1D(CHANNELS, **options).to(dtype)
    with torch.no_grad():
        for index, parameter in enumerate(layer.parameters()):
            parameter.add_(torch.arange(CHANNELS) * 0.5 + index)
    return layer


def share(num_rows: tuple[int, ...], rank: int) -> slice:
    start = sum(num_rows[:rank])
    return slice(start, start + num_rows[rank])


# ---------------------------------------------------------------- one process


@pytest.mark.parametrize("options", OPTIONS)
def test_alone_it_is_batch_norm(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    ours, plain = DistributedBN1D(CHANNELS, **options), nn.BatchNorm1d(CHANNELS, **options)
    plain.load_state_dict(ours.state_dict())
    for seed in range(3):
        x = torch.randn(4, CHANNELS, generator=torch.manual_seed(seed))
        assert torch.equal(ours(x), plain(x))
    for (name, buffer), other in zip(ours.named_buffers(), plain.buffers(), strict=True):
        assert torch.equal(buffer, other), name
    assert torch.equal(ours.eval()(x), plain.eval()(x))
    assert isinstance(ours, nn.BatchNorm1d)
    assert "distributed=True" in repr(ours)


def test_wrong_shapes() -> None:
    layer = DistributedBN1D(CHANNELS)
    with pytest.raises(ValueError, match="2D or 3D"):
        layer(torch.ones(CHANNELS))
    with pytest.raises(ValueError, match=r"needs 3 channels in dimension 1 \(got shape \(2, 4\)\)"):
        layer(torch.ones(2, 4))
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        layer(torch.ones(1, CHANNELS))


@pytest.mark.parametrize("splits", [(8,), (5, 3), (0, 8), (1, 1, 6), (0, 0, 4, 4)])
@pytest.mark.parametrize("length", [None, 2])
def test_statistics_merge_to_those_of_the_whole(splits: tuple[int, ...], length: Any) -> None:
    x = rows_of_all(8, length, torch.float64)
    packed = torch.stack([pack_statistics(part) for part in x.split(splits)])
    merged = merge_statistics(packed, CHANNELS)
    dims = [0] if length is None else [0, 2]
    variance, mean = torch.var_mean(x, dims, correction=0)
    assert merged.count == x.numel() // CHANNELS
    torch.testing.assert_close(merged.mean, mean, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(merged.squares / merged.count, variance, rtol=1e-13, atol=1e-13)


def test_a_large_offset_costs_no_digits() -> None:
    """E[x^2] - E[x]^2 in float32 would be noise here: the squares are near 1e10."""
    noise = torch.randn(1000, CHANNELS, dtype=torch.float64, generator=torch.manual_seed(0))
    x = (noise + 1e5).float()
    packed = torch.stack([pack_statistics(part) for part in x.split([300, 700])])
    merged = merge_statistics(packed, CHANNELS)
    expected = x.double().var(0, correction=0)
    torch.testing.assert_close(merged.squares / 1000, expected, rtol=1e-6, atol=0)
    out = _Normalize.apply(x, None, None, merged.mean, expected.rsqrt(), 1000, None)
    exact = (x.double() - x.double().mean(0)) * expected.rsqrt()
    torch.testing.assert_close(out.double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("affine", [False, True])
def test_gradient_by_finite_differences(affine: bool) -> None:
    def normalize(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        merged = merge_statistics(pack_statistics(x.detach()).unsqueeze(0), CHANNELS)
        inverse_std = (merged.squares / merged.count + 1e-5).rsqrt()
        out: Tensor = _Normalize.apply(
            x, weight, bias, merged.mean, inverse_std, merged.count, None
        )
        return out

    x = rows_of_all(5, 2, torch.float64).requires_grad_()
    parameters = [torch.rand(CHANNELS, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(normalize, (x, *(parameters if affine else (None, None))))


# ---------------------------------------------------------------- several ranks


def train_on_rank(
    rank: int, world_size: int, options: dict[str, Any], length: Any
) -> dict[str, Any]:
    num_rows = ROWS[world_size]
    x_all = rows_of_all(sum(num_rows), length, torch.float64)
    layer = make(options)
    for step in range(3):
        layer.zero_grad()
        x = (x_all * (step + 1))[share(num_rows, rank)].requires_grad_()
        out = layer(x)
        (out * torch.cos(x_all)[share(num_rows, rank)]).sum().backward()
    evaluated = layer.eval()(x)
    return {
        "out": out.detach(),
        "grad": x.grad,
        "evaluated": evaluated.detach(),
        "parameters": [p.grad for p in layer.parameters()],
        "buffers": list(layer.buffers()),
    }


@pytest.mark.parametrize("length", [None, 2])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("world_size", ROWS)
def test_ranks_together_are_one_batch_norm(
    world_size: int, options: dict[str, Any], length: Any
) -> None:
    results = run_ranks(train_on_rank, world_size, options, length)
    x_all = rows_of_all(sum(ROWS[world_size]), length, torch.float64)
    plain = reference(make(options))
    for step in range(3):
        plain.zero_grad()
        x = (x_all * (step + 1)).requires_grad_()
        out = plain(x)
        (out * torch.cos(x_all)).sum().backward()

    def close(ours: Any, expected: Any) -> None:
        torch.testing.assert_close(ours, expected, rtol=1e-11, atol=1e-11)

    close(torch.cat([r["out"] for r in results]), out.detach())
    close(torch.cat([r["grad"] for r in results]), x.grad)
    evaluated = plain.eval()(x).detach()
    for rank, result in enumerate(results):
        close(result["buffers"], list(plain.buffers()))
        if plain.track_running_stats:
            close(result["evaluated"], evaluated[share(ROWS[world_size], rank)])
    for index, parameter in enumerate(plain.parameters()):
        close(sum(r["parameters"][index] for r in results), parameter.grad)


def single_row_on_rank(rank: int, world_size: int, owner: int) -> str:
    layer = DistributedBN1D(CHANNELS)
    try:
        layer(torch.ones(int(rank == owner), CHANNELS))
    except ValueError as error:
        assert int(layer.num_batches_tracked) == 0
        return str(error)
    return "no error"


@pytest.mark.parametrize("owner", [0, 2])
def test_a_single_row_over_all_ranks_is_an_error_on_all(owner: int) -> None:
    results = run_ranks(single_row_on_rank, 3, owner)
    assert len(set(results)) == 1
    assert "more than one value per channel over all ranks (got 1)" in results[0]


def no_row_on_rank(rank: int, world_size: int) -> list[Tensor]:
    layer = DistributedBN1D(CHANNELS)
    x = torch.ones(0, CHANNELS, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    return [x.grad, layer.running_mean, layer.running_var]


def test_no_row_on_any_rank() -> None:
    for grad, mean, variance in run_ranks(no_row_on_rank, 2):
        assert grad.shape == (0, CHANNELS)
        assert not mean.any()
        assert (variance == 1).all()


def half_on_rank(rank: int, world_size: int, dtype_name: str) -> Any:
    dtype = getattr(torch, dtype_name)
    num_rows = ROWS[world_size]
    x = rows_of_all(sum(num_rows), None, dtype)[share(num_rows, rank)].requires_grad_()
    out = make({}, torch.float32)(x)
    out.float().sum().backward()
    assert out.dtype == x.grad.dtype == dtype
    return out.detach()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dtype_is_kept(dtype: str) -> None:
    out = torch.cat(run_ranks(half_on_rank, 3, dtype))
    x = rows_of_all(sum(ROWS[3]), None, getattr(torch, dtype)).double()
    tolerance = 1e-5 if dtype == "float32" else 0.03
    expected = reference(make({}))(x).detach()
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def count_on_rank(rank: int, world_size: int) -> list[Any]:
    from graphshard.comm import trace

    layer = make({})
    x = torch.ones(2, CHANNELS, dtype=torch.float64) * rank
    with trace() as first:
        out = layer(x)
        out.sum().backward()
    with trace() as hidden:
        layer(x.requires_grad_()).sum().backward()
    with trace() as evaluated, torch.no_grad():
        layer.eval()(x)
    with trace() as alone:
        make({"distributed": False})(x)
    return [t.total_calls for t in (first, hidden, evaluated, alone)]


def test_one_exchange_forward_and_one_backward() -> None:
    # an input that needs no gradient costs nothing in the backward; eval and local cost nothing
    assert run_ranks(count_on_rank, 3) == [[1, 2, 0, 0]] * 3


def repeat_on_rank(rank: int, world_size: int) -> list[Tensor]:
    torch.manual_seed(rank)
    x = torch.randn(50, CHANNELS, requires_grad=True)
    results = []
    for _ in range(2):
        layer = copy.deepcopy(make({}, torch.float32))
        out = layer(x)
        (grad,) = torch.autograd.grad(out.square().sum(), x)
        results.append(torch.cat([out.detach().flatten(), grad.flatten(), layer.running_var]))
    assert torch.equal(*results)
    return [layer.running_mean, layer.running_var]


def test_runs_repeat_and_ranks_agree_bit_for_bit() -> None:
    results = run_ranks(repeat_on_rank, 3)
    for mean, variance in results[1:]:
        assert torch.equal(mean, results[0][0])
        assert torch.equal(variance, results[0][1])
