# SPDX-License-Identifier: Apache-2.0
"""sync_params and gather_grads: against sums over ranks, and DistributedDataParallel. 1-5 ranks."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from graphshard.comm import gather_grads, sync_params, trace
from graphshard.testing import RanksFailed, run_ranks


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


def differ_later(rank, world_size):
    """Models that were equal when they were summed before, and are not now."""
    small, large = torch.nn.Linear(2, 2), torch.nn.Linear(500, 700)
    messages = []
    for model in (small, large):  # the second one has sums that begin in the backward
        for _ in range(4):
            model(torch.ones(1, model.in_features)).sum().backward()
            gather_grads(model)
        if rank == 1:
            model.bias.requires_grad_(False)
        for summed in (model, small if rank else large):
            model(torch.ones(1, model.in_features)).sum().backward()
            with pytest.raises(ValueError) as caught:
                gather_grads(summed)
            messages.append(str(caught.value))
        model.requires_grad_(True)
        model.zero_grad()
        model(torch.ones(1, model.in_features)).sum().backward()
        gather_grads(model)
        assert torch.equal(model.bias.grad, torch.full_like(model.bias, world_size))
    return messages


def test_models_that_differ_later_raise_everywhere():
    for messages in run_ranks(differ_later, 2):
        for message in messages:
            assert "the model passed to gather_grads must be the same on all ranks" in message


def sync_sparse(rank, world_size):
    model = torch.nn.Linear(2, 2)
    model.register_buffer("adjacency", torch.eye(2).to_sparse() if rank else torch.eye(2))
    with pytest.raises(NotImplementedError, match="rank 1: sync_params sends dense tensors only"):
        sync_params(model)


def test_sparse_buffers_are_refused_everywhere():
    run_ranks(sync_sparse, 2)


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
        assert counted.bytes_sent == {"agree": 256, "all_reduce": sum(sizes.values())}
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


# -- sums that begin while the backward runs -------------------------------------------------------

CALLS = 7


class Wide(torch.nn.Module):
    """Several buckets, parameters that are used twice, or by some ranks only, two dtypes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(300, 600)
        self.middle = torch.nn.Linear(600, 600)  # used twice
        self.seldom = torch.nn.Linear(600, 600)
        self.never = torch.nn.Linear(3, 3)
        self.last = torch.nn.Linear(600, 400).to(torch.bfloat16)
        self.very_last = torch.nn.Linear(400, 500, dtype=torch.float64)

    def forward(self, x, is_used):
        h = self.middle(self.middle(self.first(x).relu()).relu())
        if is_used:
            h = h + self.seldom(h)
        return self.very_last(self.last(h.bfloat16()).double()).square().sum()


def one_backward(model, case, call, of_rank):
    """A rank's backward of one call; rank 1 of the last has no rows."""
    generator = torch.Generator().manual_seed(100 * of_rank + call * (case != "the same"))
    num_rows = 0 if case == "no rows" and of_rank == 1 else 5
    backwards = (
        2 if case == "accumulated" or (case == "now and then twice" and call % 3 == 2) else 1
    )
    for _ in range(backwards):
        x = torch.randn(num_rows, 300, generator=generator)
        is_used = of_rank == 0 or case not in ("used by some", "no rows")
        if case == "changes" and call > 3:
            is_used = False
        model(x, is_used).backward()
    if case == "clipped":
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.data.mul_(0.5)  # which no version counts


def gather_early(rank, world_size, case):
    model, plain = Wide(), Wide()
    other = torch.nn.Linear(800, 800) if case == "two models" else None
    during = []
    for call in range(CALLS):
        total = {}
        for of_rank in range(world_size):
            plain.zero_grad()
            one_backward(plain, case, call, of_rank)
            for name, p in plain.named_parameters():
                if p.grad is not None:
                    wide = p.grad.to(torch.promote_types(p.dtype, torch.float32))
                    total[name] = wide + total.get(name, 0)
        model.zero_grad()
        with trace() as counted:
            if case == "alone" and rank == 0:
                model(torch.ones(2, 300), True).backward()
                model.zero_grad()
            one_backward(model, case, call, rank)
        during.append(counted.calls.get("all_reduce", 0))
        gather_grads(model)
        if other is not None:
            other(torch.ones(1, 800)).sum().backward()
            gather_grads(other)
        for name, p in model.named_parameters():
            if name not in total:
                assert p.grad is None, name
                continue
            expected = total[name].to(p.dtype)
            if world_size == 2:
                assert torch.equal(p.grad, expected), (name, call)
            tolerance = 2e-2 if p.dtype == torch.bfloat16 else 1e-4
            torch.testing.assert_close(p.grad, expected, rtol=tolerance, atol=tolerance)
        if case == "the same":
            sums = {
                name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
            }
            if call == 0:  # when nothing is early
                at_first = sums
            assert all(torch.equal(sums[name], at_first[name]) for name in at_first)
    return during


CASES = ["the same", "used by some", "accumulated", "now and then twice", "no rows", "changes"]
CASES += ["clipped", "alone", "two models"]


@pytest.mark.parametrize(
    ("case", "world_size"),
    [
        *((case, 2) for case in CASES),
        *(pytest.param(case, 3, marks=pytest.mark.exhaustive) for case in CASES[1:]),
        ("the same", 3),
        pytest.param("no rows", 5, marks=pytest.mark.exhaustive),
    ],
)
def test_sums_that_begin_in_the_backward(case, world_size):
    during = run_ranks(gather_early, world_size, case)
    for number, calls in enumerate(during):
        # Of float32 two or three buckets leave, of the others one each.
        assert calls[:2] == [0, 0], number
        if case in ("the same", "accumulated", "used by some", "no rows"):
            assert min(calls[2:]) >= 3, (number, calls)
        if case == "clipped":  # once wrong, seldom again
            assert [c > 0 for c in calls[2:]] == [True, False, False, True, False], calls
        if case == "two models":
            assert not any(calls), (number, calls)


def fail_in_backward(rank, world_size):
    model = Wide()
    for _ in range(2):
        model(torch.ones(2, 300), True).backward()
        gather_grads(model)
    if rank == 1:
        model.first.weight.register_hook(lambda grad: 1 / 0)
    model(torch.ones(2, 300), True).backward()
    gather_grads(model)


def test_a_rank_that_fails_in_its_backward_is_named():
    with pytest.raises(RanksFailed, match="ZeroDivisionError") as failure:
        run_ranks(fail_in_backward, 3)
    assert "rank 1" in str(failure.value)


def skip_the_rest(rank, world_size):
    model = Wide()
    for _ in range(2):
        model(torch.ones(2, 300), True).backward()
        gather_grads(model)
    if rank == 0:  # alone, and nobody asks for the sums
        model(torch.ones(2, 300), True).backward()
    copied = copy.deepcopy(model)
    copied(torch.ones(2, 300), True).backward()
    one = weakref.ref(model.first.weight)
    del model
    assert one() is None
    return True


def test_sums_that_nobody_asks_for_keep_nothing_waiting():
    assert run_ranks(skip_the_rest, 2) == [True] * 2
