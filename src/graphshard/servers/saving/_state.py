# SPDX-License-Identifier: Apache-2.0
"""States of models and optimizers as JSON and named tensors, and back; and whether they fit.

Values that JSON has stand for themselves; others are objects with one key: ``{"tensor": name}``,
``{"dict": [[key, value], ...]}``, ``{"tuple": [...]}``, ``{"float": "inf"}``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

Stateful: TypeAlias = Any
"""What has ``state_dict()`` and ``load_state_dict()``, or a dictionary of such; or None."""

_PLAIN = (str, int, float, bool, type(None))


def pack(value: Any, tensors: dict[str, Tensor], name: str) -> Any:
    """A value as JSON has it.

    Args:
        value: Plain values and tensors, in dictionaries, lists and tuples.
        tensors: Where tensors go.
        name: Of the value, for errors and for names of tensors.

    Raises:
        TypeError: Something else is in it.
    """
    if isinstance(value, Tensor):
        key = name
        while key in tensors:
            key += "'"
        tensors[key] = value.detach()
        return {"tensor": key}
    if isinstance(value, Mapping):
        pairs = []
        for key, item in value.items():
            if not isinstance(key, _PLAIN):
                raise TypeError(
                    f"keys of {name} must be text or numbers (got {type(key).__name__})"
                )
            pairs.append([_plain(key), pack(item, tensors, f"{name}/{key}")])
        return {"dict": pairs}
    if isinstance(value, list | tuple):
        items = [pack(item, tensors, f"{name}/{n}") for n, item in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if type(value) in _PLAIN:
        return _plain(value)
    raise TypeError(
        f"{name} must be made of tensors and of values that JSON has (got {type(value).__name__}); "
        "save something else in its place"
    )


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return value


def unpack(packed: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The value that was packed; tensors are copies.

    Raises:
        ValueError: It is nothing that `pack` makes.
    """
    if isinstance(packed, list):
        return [unpack(item, tensors) for item in packed]
    if isinstance(packed, _PLAIN):
        return packed
    if isinstance(packed, dict) and len(packed) == 1:
        ((kind, content),) = packed.items()
        if kind == "tensor" and isinstance(content, str) and content in tensors:
            return tensors[content].clone()
        if kind == "tuple" and isinstance(content, list):
            return tuple(unpack(item, tensors) for item in content)
        if kind == "float" and content in ("inf", "-inf", "nan"):
            return float(content)
        if kind == "dict" and isinstance(content, list):
            return dict(_pair(pair, tensors) for pair in content)
    raise ValueError(f"the state holds {packed!r:.80}, which is no value")


def _pair(pair: Any, tensors: Mapping[str, Tensor]) -> tuple[Any, Any]:
    if not isinstance(pair, list) or len(pair) != 2:
        raise ValueError(f"the state holds {pair!r:.80}, which is no key and value")
    key = unpack(pair[0], tensors)
    if not isinstance(key, _PLAIN):
        raise ValueError(f"the state holds the key {key!r:.80}")
    return key, unpack(pair[1], tensors)


def state_of(target: Stateful) -> Any:
    """The states of one or several models or optimizers."""
    if isinstance(target, Mapping):
        return {str(key): state_of(each) for key, each in target.items()}
    return None if target is None else _inner(target).state_dict()


def check_state(target: Stateful, state: Any, name: str) -> None:
    """Raise ValueError unless `load_state` works; changes nothing.

    Args:
        target: What the state is for.
        state: As `state_of` gave it.
        name: For errors.
    """
    if target is None:
        return
    if not isinstance(state, Mapping):
        raise ValueError(f"the checkpoint has no state of {name}; leave {name} out")
    if isinstance(target, Mapping):
        _check_same(name, {str(key) for key in target}, set(state))
        for key, each in target.items():
            check_state(each, state[str(key)], f"{name}[{key!r}]")
        return
    inner = _inner(target)
    if isinstance(inner, torch.optim.Optimizer):
        mine, theirs = inner.state_dict()["param_groups"], state.get("param_groups", [])
        counts = [[len(group["params"]) for group in groups] for groups in (mine, theirs)]
        if counts[0] != counts[1]:
            raise ValueError(
                f"{name} has groups of {counts[0]} parameters, and its state those of {counts[1]}; "
                "make it with the same parameters"
            )
        return
    own = inner.state_dict()
    if not isinstance(inner, torch.nn.Module):
        return
    _check_same(name, set(own), set(state))
    for key, value in own.items():
        other = state[key]
        if isinstance(value, Tensor) != isinstance(other, Tensor) or (
            isinstance(value, Tensor) and value.shape != other.shape
        ):
            found = tuple(other.shape) if isinstance(other, Tensor) else type(other).__name__
            expected = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{key!r} of {name} is {expected}, and that of its state {found}")


def _check_same(name: str, mine: set[str], theirs: set[str]) -> None:
    if mine != theirs:
        raise ValueError(
            f"{name} and its state must have the same entries; only {name} has "
            f"{sorted(mine - theirs)}, only its state has {sorted(theirs - mine)}"
        )


def load_state(target: Stateful, state: Any) -> None:
    """Put a state that was checked into its models or optimizers."""
    if isinstance(target, Mapping):
        for key, each in target.items():
            load_state(each, state[str(key)])
    elif target is not None:
        _inner(target).load_state_dict(state)


def _inner(target: Any) -> Any:
    """A model without what trains it on several ranks, whose names are those on one."""
    return target.module if isinstance(target, DistributedDataParallel) else target
