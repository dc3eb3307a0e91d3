# SPDX-License-Identifier: Apache-2.0
"""sync_params, gather_grads: keep the replicas of a model equal.

They do by hand, at the two moments where it matters, what DistributedDataParallel does through
hooks: start from rank 0's values, and sum the gradients before each optimizer step. Nothing is
wrapped, so they work beside anything, also where a rank's loss does not reach every parameter.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from .collectives import (
    Pending,
    ThreadGroups,
    all_reduce_,
    broadcast_,
    start_all_reduce,
    verify,
)
from .group import GroupState, group_state, is_initialized
from .transport import joined, parted

_NO_GRAD, _HAS_GRAD, _SPARSE = 0, 1, 2


def sync_params(model: torch.nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Give every rank rank 0's parameters and buffers, in one broadcast; every rank must call.

    Args:
        model: The same module on every rank, up to its values.
        group: Who takes part; its first member's values are taken. None is the default group.

    Raises:
        ValueError: On every rank, if names, shapes or dtypes differ between ranks, or if a lazy
            parameter has no shape yet.
        NotImplementedError: On every rank, if a buffer is a sparse tensor.
        RankError: Another rank failed, or did not answer in time.
    """
    state = group_state(group)
    named = [*model.named_parameters(), *model.named_buffers()]
    described, error = _description(named, "sync_params")
    error = error or next(
        (
            NotImplementedError(
                f"sync_params sends dense tensors only (got {name} of layout {tensor.layout}); "
                "register it with .to_dense(), or leave it out with persistent state of your own"
            )
            for name, tensor in named
            if tensor.layout != torch.strided
        ),
        None,
    )
    verify(state, described, "the model passed to sync_params", error)
    tensors = [tensor.detach() for _, tensor in named]
    if state.world_size == 1 or not tensors:
        return
    device = tensors[0].device
    rows, one_row_each = [t.contiguous().view(1, -1) for t in tensors], [[1]] * len(tensors)
    stream = joined([[row] for row in rows], device)
    if sum(tensor.numel() > 0 for tensor in tensors) == 1:  # it may be the parameter's own memory
        stream = stream.clone()
    broadcast_(state, stream, 0, "sync_params")
    if state.rank == 0:
        return
    received = parted(stream, rows, one_row_each)
    with torch.no_grad():
        for tensor, value in zip(tensors, received, strict=True):
            tensor.copy_(value.view(tensor.shape))


def gather_grads(model: torch.nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Replace every gradient by its sum over the ranks; every rank must call.

    One ``all_reduce`` for each bucket of gradients of one dtype, and one of some bytes in which the
    ranks compare their models and agree on what there is to sum. A parameter with a gradient on
    some ranks only ends with one on all of them; one with none anywhere keeps none. bfloat16 and
    float16 are summed in float32. On CPUs buckets of a model with more than one travel while the
    backward still runs, from the third call on; the sums are the same to the bit.

    Args:
        model: The same module on every rank, up to its values.
        group: Who takes part; None is the default group.

    Raises:
        NotImplementedError: On every rank, if any rank has a sparse gradient.
        ValueError: On every rank, if names, shapes or dtypes of the parameters that need a
            gradient differ between ranks.
        RankError: Another rank failed, or did not answer in time.
    """
    state = group_state(group)
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if state.world_size == 1:
        return
    described, error = _description(named, "gather_grads")
    parameters = [] if error is not None else [parameter for _, parameter in named]
    early = state.early_sums
    verdicts = [] if early is None else early.verdicts(parameters)
    may_be_early = _may_be_early(state, parameters)
    is_odd = any(p.device.type != "cpu" or type(p) not in _PLAIN for p in parameters)
    words = [is_odd, *verdicts, *map(_flag, parameters)]
    is_same, agreed = _agreed_words(state, described, error, words, "gather_grads")
    begin = 1 + len(verdicts)
    may_be_early = may_be_early and not agreed[0]
    sums = {} if early is None else early.finish(agreed[1:begin])
    if not is_same:
        verify(state, described, "the model passed to gather_grads", error)
    if not named:
        return
    flags = agreed[begin : begin + len(named)]
    if _SPARSE in flags:
        raise NotImplementedError(
            f"gather_grads sums dense gradients only, and {named[flags.index(_SPARSE)][0]} has a "
            "sparse one on some rank; make the embedding with sparse=False"
        )
    buckets = _buckets(parameters, [i for i, flag in enumerate(flags) if flag == _HAS_GRAD])
    pending = {}
    for bucket in buckets:
        if bucket not in sums:
            flat = _joined_grads([parameters[i] for i in bucket])
            pending[bucket] = flat, start_all_reduce(state, _as_real(flat), name="gather_grads")
    for bucket in buckets:
        if bucket in pending:
            sums[bucket], arriving = pending.pop(bucket)
            arriving.wait()
        _write_grads([parameters[i] for i in bucket], sums.pop(bucket))
    may_be_early = may_be_early and len(buckets) > 1
    if early is not None and not (may_be_early and early.is_of(parameters, buckets)):
        early.close()
        state.early_sums = None
    if may_be_early and state.early_sums is None:
        state.early_sums = EarlySums(_early_group(state), parameters, buckets)


Bucket = tuple[int, ...]
"""Parameters of one dtype whose gradients are summed together: places in the model's list."""


class EarlySums:
    """Sums of a model's gradients that begin while the backward runs.

    [Note: early sums]
        A hook counts how often each gradient is added to. Once all of a bucket have been as often
        as between the two calls of `gather_grads` before (more often than once where gradients are
        accumulated), a copy of them leaves, while the backward goes on. It is a guess, which the
        next `gather_grads` checks: each rank compares what it sent with what the gradients are
        then. Whether a bucket has left anywhere, and whether that was right everywhere, are words
        in the round in which the ranks agree on the gradients. What has left on some ranks leaves
        on the others; what was wrong on one is summed again by all. After that nothing begins
        early for a number of calls that doubles each time, as a program may well clip gradients
        before they are summed.

        Buckets leave in their order, in a group of their own: so they meet no collective of the
        backward, and a rank that has more of them on their way than another waits for nothing.
        They are the buckets of a call that nothing was early for, so sums are equal to the bit.

    Args:
        state: The group of these sums alone.
        parameters: All of the model that need a gradient.
        buckets: In the order in which they leave; equal on all ranks, as all of this.
    """

    def __init__(
        self, state: GroupState, parameters: Sequence[Tensor], buckets: Sequence[Bucket]
    ) -> None:
        self.state, self._buckets = state, list(buckets)
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self._sizes = [(p.numel(), p.dtype) for p in parameters]
        self._bucket_of = {i: n for n, bucket in enumerate(buckets) for i in bucket}
        #: How often gradients were added to: since the last call, and between the two before it.
        self._times = [0] * len(parameters)
        self._times_before: list[list[int]] = []
        self._left: list[int] = []  # gradients that are waited for, by bucket
        self._started: list[tuple[Tensor, Tensor, Pending]] = []  # copy, sum, and when it is there
        self._num_wrong = self._num_resting = 0
        self._hooks = []
        here = weakref.ref(self)
        for i in self._bucket_of:

            def hook(_: Tensor, i: int = i) -> None:
                if (early := here()) is not None:
                    early._note(i)

            parameter: Any = parameters[i]
            self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))

    def close(self) -> None:
        """Have no more sums begin. What has begun must be finished."""
        for hook in self._hooks:
            hook.remove()

    def is_of(self, parameters: Sequence[Tensor], buckets: Sequence[Bucket]) -> bool:
        """Whether these are its parameters and buckets."""
        same = len(parameters) == len(self._parameters) and self._buckets == list(buckets)
        return same and all(r() is p for r, p in zip(self._parameters, parameters, strict=True))

    def verdicts(self, parameters: Sequence[Tensor]) -> list[int]:
        """Of each bucket: `_WAITS`, `_STARTED`, or `_WRONG` where it was not what is here now."""
        same = self.is_of(parameters, self._buckets)
        verdicts = [_WAITS] * len(self._buckets)
        for number, (copy, _, _) in enumerate(self._started):
            now = self._joined(number) if same else None
            is_right = now is not None and torch.equal(_as_words(now), _as_words(copy))
            verdicts[number] = _STARTED if is_right else _WRONG
        return verdicts

    def finish(self, verdicts: Sequence[int]) -> dict[Bucket, Tensor]:
        """Sums of the buckets that were right on all ranks, by what these have agreed on."""
        for verdict in verdicts[len(self._started) :]:
            if verdict != _WAITS:
                self._start()
        sums = {}
        started, self._started = self._started, []
        for bucket, verdict, (_, flat, arriving) in zip(
            self._buckets, verdicts, started, strict=False
        ):
            arriving.wait()
            if verdict == _STARTED:
                sums[bucket] = flat
        self._num_resting = max(0, self._num_resting - 1)
        if _WRONG in verdicts:
            self._num_wrong += 1
            self._num_resting = 1 << min(self._num_wrong, 20)
        self._times_before = [*self._times_before[-1:], self._times]
        self._times, self._left = [0] * len(self._times), []
        if not self._num_resting:
            for bucket in self._buckets:
                self._left.append(sum(self._expected(i) > 0 for i in bucket))
        return sums

    def _expected(self, i: int) -> int:
        return max(times[i] for times in self._times_before)

    def _note(self, i: int) -> None:
        """A gradient was added to."""
        self._times[i] += 1
        if not self._left or self.state.closed or not is_initialized():
            return
        if self._times[i] != self._expected(i):
            return
        self._left[self._bucket_of[i]] -= 1
        while len(self._started) < len(self._buckets) and not self._left[len(self._started)]:
            self._start()

    def _start(self) -> None:
        flat = self._joined(len(self._started))
        copy = flat.clone()
        pending = start_all_reduce(self.state, _as_real(flat), name="gather_grads")
        self._started.append((copy, flat, pending))

    def _joined(self, number: int) -> Tensor:
        """The gradients of a bucket, as they are now."""
        parameters = []
        for i in self._buckets[number]:
            parameter, (size, dtype) = self._parameters[i](), self._sizes[i]
            if parameter is None or parameter.numel() != size:  # it has gone: what leaves is wrong
                parameter = torch.empty(size, dtype=dtype)
            parameters.append(parameter)
        return _joined_grads(parameters)


_WAITS, _STARTED, _WRONG = 0, 1, 2
_BUCKET_BYTES = 1 << 20
_PLAIN = (Tensor, torch.nn.Parameter)


def _may_be_early(state: GroupState, parameters: Sequence[Tensor]) -> bool:
    """Whether sums may begin in a backward, as far as all ranks know alike."""
    if state.backend != "gloo" or state.group is not dist.group.WORLD:
        return False
    return sum(p.numel() * _wide(p.dtype).itemsize for p in parameters) > _BUCKET_BYTES


def _early_group(state: GroupState) -> GroupState:
    """The group of sums that begin early, made once; collective."""
    if state.early_groups is None:
        state.early_groups = ThreadGroups(["gradients"])
    return group_state(state.early_groups.group("gradients"))


def _flag(parameter: Tensor) -> int:
    if parameter.grad is None:
        return _NO_GRAD
    return _HAS_GRAD if parameter.grad.layout == torch.strided else _SPARSE


def _wide(dtype: torch.dtype) -> torch.dtype:
    """In which gradients are summed."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def _buckets(parameters: Sequence[Tensor], chosen: Sequence[int]) -> list[Bucket]:
    """Gradients to sum, those of the last parameters first, which a backward finds first."""
    open_ones: dict[torch.dtype, list[int]] = {}
    sizes: dict[torch.dtype, int] = {}
    buckets: list[Bucket] = []
    for i in reversed(chosen):
        dtype = parameters[i].dtype
        open_ones.setdefault(dtype, []).insert(0, i)
        sizes[dtype] = sizes.get(dtype, 0) + parameters[i].numel() * _wide(dtype).itemsize
        if sizes[dtype] >= _BUCKET_BYTES:
            buckets.append(tuple(open_ones.pop(dtype)))
            sizes[dtype] = 0
    return [*buckets, *(tuple(bucket) for bucket in open_ones.values())]


def _joined_grads(parameters: Sequence[Tensor]) -> Tensor:
    """Gradients of parameters of one dtype, one after the other, as they are summed."""
    wide, device = _wide(parameters[0].dtype), parameters[0].device
    return torch.cat(
        [
            torch.zeros(p.numel(), dtype=wide, device=device)
            if p.grad is None or p.grad.layout != torch.strided
            else p.grad.detach().reshape(-1).to(device, wide)
            for p in parameters
        ]
    )


def _as_real(flat: Tensor) -> Tensor:
    return torch.view_as_real(flat) if flat.is_complex() else flat


def _as_words(flat: Tensor) -> Tensor:
    """Its bits, by which a NaN is equal to itself."""
    return flat.view(torch.int32)


def _write_grads(parameters: Sequence[Tensor], sums: Tensor) -> None:
    for p, total in zip(parameters, sums.split([p.numel() for p in parameters]), strict=True):
        if p.grad is None:
            p.grad = torch.empty_like(p, requires_grad=False)
        with torch.no_grad():
            p.grad.copy_(total.view(p.shape))


_DIGEST_BYTES = 16
_FEWEST_WORDS = 256


def _agreed_words(
    state: GroupState, text: str, error: Exception | None, words: Sequence[int], name: str
) -> tuple[bool, list[int]]:
    """Whether all ranks have the same text and no error, and the largest of each word; collective.

    One round, whose length is a power of two: so ranks whose lists are not equally long are in the
    same operation all the same, and all of them learn it. The largest of the digests' bytes, and
    of their complements, add up to 255 where ranks have the same ones.
    """
    digest = hashlib.blake2b(
        text.encode(errors="surrogatepass"), digest_size=_DIGEST_BYTES
    ).digest()
    sent = [error is not None, *digest, *(255 - byte for byte in digest), *words]
    length = max(_FEWEST_WORDS, 1 << (len(sent) - 1).bit_length())
    agreed = torch.zeros(length, dtype=torch.uint8)
    agreed[: len(sent)] = torch.tensor(sent, dtype=torch.uint8)
    all_reduce_(state, agreed, dist.ReduceOp.MAX, name, "agree")
    has_error, *numbers = agreed.tolist()
    largest, complements = numbers[:_DIGEST_BYTES], numbers[_DIGEST_BYTES : 2 * _DIGEST_BYTES]
    is_same = all(a + b == 255 for a, b in zip(largest, complements, strict=True))
    return is_same and not has_error, numbers[2 * _DIGEST_BYTES :]


def _description(
    named: Sequence[tuple[str, Tensor]], function: str
) -> tuple[str, Exception | None]:
    """Names, dtypes and shapes in words, or the error of a tensor that has no shape yet."""
    for name, tensor in named:
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            return "", ValueError(
                f"{function}: {name} has no shape yet; run the model once on a batch first"
            )
    described = (
        f"{name} {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        for name, tensor in named
    )
    return "; ".join(described), None
