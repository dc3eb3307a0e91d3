# SPDX-License-Identifier: Apache-2.0
"""User-defined message functions, run one shard at a time and again in the backward.

Two things are found without being told. *Fields*: the function is run once on a few local edges
and what it reads is recorded; those fields, and no others, are fetched. *Parameters*: every leaf
that the messages' autograd graph ends in, besides the fields, gets its gradient from the backward
pass; see [Note: captured tensors].

[Note: captured tensors]
    A message function may use tensors that are no fields: parameters of a layer, or anything its
    closure holds. A leaf tensor (a parameter) is found by walking the autograd graph down to its
    AccumulateGrad node. A tensor that was itself computed *before* the function ran has its
    history behind it, and the pass could not send a gradient into that history; it is recognised
    by nodes older than the call and refused, so that no gradient is lost silently. Autocast keeps
    the parameters that it has cast, which would be such tensors from the second shard on; while the
    function runs it keeps none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..._base.typing import CanonicalEType
from ...graph import EdgeBatch
from ...ops import Adjacency, gsddmm
from ..topology import Shard
from ._expressions import Expression, Leaf, ShardEvaluation, distinct, leaves_of
from ._lazy_tensor import DeferredEdges
from ._messages import Message

_NUM_PROBE_EDGES = 8
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def message_has_parameters(param_foo: Callable[[Any], Sequence[Tensor]]) -> Callable[..., Any]:
    """Accepted for scripts written for SAR; parameters of message functions are found anyway.

    Args:
        param_foo: From the layer to the parameters that its message function uses.

    Returns:
        A decorator that leaves the message function as it is.
    """
    if not callable(param_foo):
        raise TypeError(
            "message_has_parameters takes a function from the layer to its parameters (got "
            f"{type(param_foo).__name__}); for example lambda self: tuple(self.fc.parameters())"
        )

    def decorate(function: FunctionT) -> FunctionT:
        return function

    return decorate


class _EdgeFields(Mapping[str, Any]):
    """Fields of one side of the shard's edges, computed when the user's function asks."""

    def __init__(self, names: Sequence[str], read: Callable[[str], Any]) -> None:
        self._names, self._read = tuple(names), read
        self._cache: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(f"no field {name!r}; there are {sorted(self._names)}")
        if name not in self._cache:
            self._cache[name] = self._read(name)
        return self._cache[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class UserFunction:
    """A message function together with the fields it may read.

    Args:
        function: From `EdgeBatch` to a dictionary of messages.
        etype: The relation whose edges it sees.
        source: Fields of the source frame.
        destination: Fields of the destination frame.
        edge: Fields of the edge frame; deferred values are allowed.
    """

    def __init__(
        self,
        function: Callable[[EdgeBatch], Any],
        etype: CanonicalEType,
        source: Mapping[str, Any],
        destination: Mapping[str, Any],
        edge: Mapping[str, Any],
    ) -> None:
        self.function, self.etype = function, etype
        frames = {"u": source, "v": destination, "e": edge}
        self._frames = {t: {n: _as_read(t, v) for n, v in f.items()} for t, f in frames.items()}
        self.fields: dict[tuple[str, str], Leaf | Expression] = {}
        self.captured: dict[int, Tensor] = {}
        self._wants_grad = torch.is_grad_enabled()

    def discover(self, own: Shard) -> dict[str, Tensor]:
        """Run once on a few edges of the own shard; returns those messages, to learn shapes."""
        probe = _head(own)
        leaves = _leaves([what for frame in self._frames.values() for what in frame.values()])
        values = {leaf.key: _probe_rows(probe, leaf) for leaf in leaves}
        state = torch.get_rng_state()
        with torch.no_grad():
            messages = self._call(ShardEvaluation(probe, values), recording=True)
        torch.set_rng_state(state)
        # One order on all ranks, whatever order the function asked in.
        self.fields = dict(sorted(self.fields.items()))
        return messages

    def leaves(self) -> list[Leaf]:
        return _leaves(list(self.fields.values()))

    def messages(self, evaluation: ShardEvaluation) -> dict[str, Tensor]:
        """Messages of the shard's edges, with gradients if the caller's mode has them."""
        if torch.is_grad_enabled() or not self._wants_grad:
            return self._call(evaluation, recording=False)
        # Forward merge: run with gradients once, only to find what else the messages depend on.
        values = {
            key: value.detach().requires_grad_(value.is_floating_point())
            for key, value in evaluation.values.items()
        }
        with torch.enable_grad():
            first_node = _next_sequence_number()
            found = self._call(ShardEvaluation(evaluation.shard, values), recording=False)
            known = {id(v) for v in values.values()}
            for tensor in _captured_leaves(found.values(), known, first_node, self.function):
                self.captured[id(tensor)] = tensor
        return {name: value.detach() for name, value in found.items()}

    def _call(self, evaluation: ShardEvaluation, recording: bool) -> dict[str, Tensor]:
        src, dst = evaluation.shard.adjacency.coo()

        def reader(target: str) -> _EdgeFields:
            frame = self._frames[target]

            def read(name: str) -> Any:
                what = self._field(target, name, recording)
                if isinstance(what, Expression):
                    return what.evaluate(evaluation)
                rows = evaluation.leaf(what)
                if target == "e":
                    return rows
                # Its gradient is a sum in the order of edges, which repeats on a GPU as well.
                return gsddmm(evaluation.shard.adjacency, "copy_lhs", rows, None, target)

            return _EdgeFields(list(frame), read)

        batch = EdgeBatch(
            reader("u"),
            reader("v"),
            reader("e"),
            lambda: (src, dst, evaluation.shard.edge_ids()),
            src.shape[0],
            self.etype,
        )
        with _each_cast_anew(src.device.type):
            result = self.function(batch)
        if not isinstance(result, Mapping):
            raise TypeError(
                "a message function must return a dictionary from field name to tensor (got "
                f"{type(result).__name__}); for example return {{'m': edges.src['h']}}"
            )
        return dict(result)

    def _field(self, target: str, name: str, recording: bool) -> Leaf | Expression:
        key = target, name
        if key not in self.fields:
            if not recording and target == "u":
                raise RuntimeError(
                    f"the message function read source field {name!r} on a later shard only, so it "
                    "was not fetched; read every field on every call, or use "
                    "construct_full_graph(..., mode='oneshot')"
                )
            self.fields[key] = self._frames[target][name]
        return self.fields[key]


class UserMessage(Message):
    """One of the messages that a user-defined function returns."""

    is_random = True

    def __init__(self, function: UserFunction, field: str) -> None:
        self.function, self.field = function, field

    def leaves(self) -> list[Leaf]:
        return self.function.leaves()

    def parameters(self) -> list[Tensor]:
        return list(self.function.captured.values())

    def rows(self, evaluation: ShardEvaluation) -> Tensor:
        memo: dict[Any, Any] = evaluation.memo
        key = id(self.function)
        if key not in memo:  # one call per evaluation, however many of its messages are wanted
            memo[key] = self.function.messages(evaluation)
        messages = memo[key]
        if self.field not in messages:
            raise KeyError(
                f"the reduce function reads message {self.field!r}, but the message function "
                f"returned {sorted(messages)}"
            )
        return messages[self.field]


def _as_read(target: str, value: Tensor | DeferredEdges) -> Leaf | Expression:
    return value.expression if isinstance(value, DeferredEdges) else Leaf(target, value)


def _leaves(read: Sequence[Leaf | Expression]) -> list[Leaf]:
    """The distinct leaves of some fields."""
    found = ([what] if isinstance(what, Leaf) else leaves_of([what]) for what in read)
    return distinct([leaf for leaves in found for leaf in leaves])


def _head(shard: Shard) -> Shard:
    src, dst = shard.adjacency.coo()
    count = min(_NUM_PROBE_EDGES, src.shape[0])
    adjacency = Adjacency(
        src[:count], dst[:count], shard.adjacency.num_src, shard.adjacency.num_dst, check=False
    )
    return Shard(0, adjacency, lambda: shard.edge_ids()[:count])


def _probe_rows(probe: Shard, leaf: Leaf) -> Tensor:
    rows = leaf.tensor.detach()
    return probe.edge_rows(rows) if leaf.target == "e" else rows


def _each_cast_anew(kind: str) -> AbstractContextManager[Any]:
    """Autocast on a type of device, if it is on, without what it keeps of parameters."""
    if not torch.is_autocast_enabled(kind):
        return nullcontext()
    return torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=False)


def _next_sequence_number() -> int:
    """A number below those of all autograd nodes that this thread makes from now on."""
    node = torch.zeros((), requires_grad=True).clone().grad_fn
    assert node is not None
    return int(node._sequence_nr())


def _captured_leaves(
    outputs: Any, known: set[int], first_node: int, function: Callable[..., Any]
) -> list[Tensor]:
    """Leaf tensors behind ``outputs`` other than ``known``. See [Note: captured tensors]."""
    found: dict[int, Tensor] = {}
    stack = []
    for tensor in outputs:
        if tensor.grad_fn is not None:
            stack.append(tensor.grad_fn)
        elif tensor.requires_grad and id(tensor) not in known:
            found[id(tensor)] = tensor
    seen = set(stack)
    while stack:
        node = stack.pop()
        variable = getattr(node, "variable", None)
        if variable is not None:
            if id(variable) not in known:
                found[id(variable)] = variable
            continue
        if node._sequence_nr() < first_node:
            raise RuntimeError(
                f"message function {getattr(function, '__qualname__', function)!r} uses a tensor "
                f"that was computed before it ran and needs a gradient ({node.name()}); put the "
                "tensor into srcdata, dstdata or edata, compute it inside the function, detach it, "
                "or use construct_full_graph(..., mode='oneshot')"
            )
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                stack.append(following)
    return list(found.values())
