# SPDX-License-Identifier: Apache-2.0
"""sync_params and gather_grads: against sums over ranks, and DistributedDataParallel. 1-3 ranks."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from graphshard.comm import gather_grads, sync_params, trace
from graphshard.testing import run_ranks


def make_model(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 3),
        torch.nn.BatchNorm1d(3),
        torch.nn.Linear(3, 2).bfloat16(),
        torch.nn.Linear(2, 2).double(),
    )
    model[0].bias.requires_grad_(False)
    model[1].running_mean.normal_()
    model[1].num_batches_tracked.fill_(seed + 5)
    model.register_buffer("flag", torch.tensor([seed == 0, True]))
    model.register_buffer("absent", None)
    model.tied = model[0]
    return model


def check_sync(rank, world_size):
    model = make_model(rank)
    before = {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}
    with trace() as counted:
        sync_params(model)
    expected = make_model(0).state_dict()
    for name, tensor in model.state_dict().items():
        assert tensor.data_ptr() == before[name]
        assert torch.equal(tensor, expected[name]), name
    assert counted.calls == ({"agree": 1, "broadcast": 1} if world_size > 1 else {})
    tensors = [*model.parameters(), *model.buffers()]
    size = sum(t.numel() * t.element_size() for t in tensors)
    assert counted.bytes_sent.get("broadcast", 0) == (size * (world_size - 1) if rank == 0 else 0)
    sync_params(torch.nn.ReLU())
    one = torch.nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        one.weight.fill_(rank)
    sync_params(one)
    assert torch.equal(one.weight.detach(), torch.zeros(1, 2))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_sync_params_takes_rank_0s_values(world_size):
    run_ranks(check_sync, world_size)


def sync_different(rank, world_size, what):
    model = torch.nn.Linear(2, 3 if rank == 1 and what == "shape" else 4)
    if rank == 1 and what == "lazy":
        model = torch.nn.LazyLinear(4)
    messages = []
    for function in (sync_params, gather_grads):
        try:
            function(model)
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_models_that_differ_raise_everywhere():
    for sync, gather in run_ranks(sync_different, 3, "shape"):
        assert sync == (
            "the model passed to sync_params must be the same on all ranks, but rank 1 differs "
            "from rank 0: ranks [0, 2] have 'weight float32[4, 2]; bias float32[4]', "
            "rank 1 has 'weight float32[3, 2]; bias float32[3]'"
        )
        assert gather.startswith("the model passed to gather_grads must be the same on all ranks")
    for sync, gather in run_ranks(sync_different, 2, "lazy"):
        text = "rank 1: {}: weight has no shape yet; run the model once on a batch first"
        assert (sync, gather) == (text.format("sync_params"), text.format("gather_grads"))


def fill_grads(model, rank):
    """Gradients that are there on all, on some and on no ranks."""
    generator = torch.Generator().manual_seed(rank)
    for number, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
        # The third has a gradient on rank 1 only, the fourth has none.
        if (number == 2 and rank != 1) or number == 3:
            continue
        grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.grad = grad.to(parameter.dtype)


def check_gather(rank, world_size):
    model = make_model(0)
    fill_grads(model, rank)
    others = [make_model(0) for _ in range(world_size)]
    for number, other in enumerate(others):
        fill_grads(other, number)
    gather_grads(model)  # the first call checks the model
    model.zero_grad()
    fill_grads(model, rank)
    with trace() as counted:
        gather_grads(model)
    found = [p for p in model.parameters() if p.requires_grad]
    columns = zip(*([p for p in o.parameters() if p.requires_grad] for o in others), strict=True)
    for number, (parameter, column) in enumerate(zip(found, columns, strict=True)):
        grads = [p.grad for p in column if p.grad is not None]
        if not grads:
            assert parameter.grad is None, number
            continue
        wide = torch.stack(grads).to(torch.promote_types(parameter.dtype, torch.float32))
        assert parameter.grad.dtype == parameter.dtype
        torch.testing.assert_close(parameter.grad, wide.sum(0).to(parameter.dtype))
    if world_size > 1:
        assert counted.calls == {"agree": 1, "all_reduce": 3}
        sizes = {p: p.numel() * max(4, p.element_size()) for p in found if p.grad is not None}
        assert counted.bytes_sent == {"agree": len(found), "all_reduce": sum(sizes.values())}
    else:
        assert counted.calls == {}


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gather_grads_sums(world_size):
    run_ranks(check_gather, world_size)


def gather_sparse(rank, world_size):
    model = torch.nn.ModuleDict({"table": torch.nn.Embedding(5, 2, sparse=rank == 1)})
    model["table"](torch.tensor([1, 1])).sum().backward()
    try:
        gather_grads(model)
    except NotImplementedError as error:
        return str(error)
    return None


def test_sparse_gradients_are_refused_everywhere():
    text = (
        "gather_grads sums dense gradients only, and table.weight has a sparse one on some rank; "
        "make the embedding with sparse=False"
    )
    assert run_ranks(gather_sparse, 2) == [text] * 2


def beside_ddp(rank, world_size):
    torch.manual_seed(rank)
    model = torch.nn.Linear(4, 3)
    sync_params(model)
    wrapped = DistributedDataParallel(torch.nn.Linear(4, 3))
    wrapped.module.load_state_dict(model.state_dict())
    x = torch.randn(6, 4)
    wrapped(x).square().sum().backward()
    model(x).square().sum().backward()
    gather_grads(model)
    for mine, theirs in zip(model.parameters(), wrapped.module.parameters(), strict=True):
        torch.testing.assert_close(mine.grad / world_size, theirs.grad)
    return model.weight.grad


def test_the_same_gradient_as_ddp():
    grads = run_ranks(beside_ddp, 3)
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])


def gather_complex(rank, world_size):
    layer = torch.nn.Linear(2, 2, dtype=torch.complex64)
    layer.weight.grad = torch.full((2, 2), 1.0 + rank * 1j)
    gather_grads(layer)
    return torch.view_as_real(layer.weight.grad)


def test_complex_gradients():
    for grad in run_ranks(gather_complex, 3):
        assert torch.equal(torch.view_as_complex(grad), torch.full((2, 2), 3.0 + 3.0j))
