# SPDX-License-Identifier: Apache-2.0
"""Arguments as users give them: ids, plain or by type, which the sampler takes by type alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._base.typing import INDEX_DTYPES, CanonicalEType
from ..graph_store import GraphStore


def per_kind(value: Any, kinds: Sequence[Any], what: str, shape: str) -> Mapping[Any, Any]:
    """A dictionary by node type or by relation, out of a user's value that may be one already.

    Args:
        value: What was given.
        kinds: The node types, or the relations, of the graph.
        what: What the error calls the value.
        shape: What the dictionary should be from and to.

    Raises:
        TypeError: No dictionary, where there are several kinds.
    """
    if isinstance(value, Mapping):
        return value
    if len(kinds) != 1:
        have = "types" if kinds and isinstance(kinds[0], str) else "relations"
        raise TypeError(
            f"{what} must be a dictionary from {shape} because the graph has the {have} "
            f"{list(kinds)} (got {type(value).__name__})"
        )
    return {kinds[0]: value}


def by_type(store: GraphStore, ids: Any, what: str) -> dict[str, Tensor]:
    """Node ids as node type to tensor.

    Args:
        store: Whose nodes they are.
        ids: A tensor, or anything a tensor can be made of, or node type to that.
        what: What error messages call them.

    Raises:
        TypeError: Ids without a type on a graph of several, or ids that are no integers.
        ValueError: An unknown type, or an id that is out of range.
    """
    ids = per_kind(ids, store.ntypes, what, "node type to ids")
    unknown = [t for t in ids if t not in store.ntypes]
    if unknown:
        raise ValueError(
            f"{what} names unknown node types {unknown}; the graph has {list(store.ntypes)}"
        )
    found = {}
    for ntype, values in ids.items():
        label = f"{what} of type {ntype!r}"
        found[ntype] = checked_ids(values, store.num_nodes(ntype), label, store)
    return found


def by_relation(store: GraphStore, ids: Any, what: str) -> dict[CanonicalEType, Tensor] | None:
    """Edge ids as relation to tensor; None stays None. Errors as `by_type`."""
    if ids is None:
        return None
    ids = per_kind(ids, store.canonical_etypes, what, "relation to ids")
    return {
        etype: checked_ids(values, store.num_edges(etype), f"{what} of {etype}", store)
        for etype, values in ((relation_named(store, name), v) for name, v in ids.items())
    }


def relation_named(store: GraphStore, name: Any) -> CanonicalEType:
    """The relation that a name or a triple stands for.

    Raises:
        ValueError: None or several do.
    """
    matching = [t for t in store.canonical_etypes if name in (t, t[1])]
    if len(matching) != 1:
        raise ValueError(
            f"{name!r} must name one relation ({len(matching)} match); the graph has "
            f"{list(store.canonical_etypes)}"
        )
    return matching[0]


def checked_ids(
    values: Any, bound: int, what: str, store: GraphStore, *, leave_out: bool = False
) -> Tensor:
    """Ids as a one-dimensional tensor of the store's idtype.

    Args:
        values: What was given.
        bound: How many there are.
        what: What error messages call them.
        store: Whose ids they are.
        leave_out: Whether ids that are too great are left out and no mistake.

    Raises:
        TypeError: They are no integers.
        ValueError: Another shape, or an id is out of range.
    """
    ids = torch.as_tensor(values)
    if ids.numel() == 0 and not ids.is_floating_point():
        return torch.empty(0, dtype=store.idtype, device=store.device)
    if ids.dtype == torch.bool:
        raise TypeError(f"{what} must be ids (got a bool mask); use mask.nonzero().view(-1)")
    if ids.numel() == 0:
        return torch.empty(0, dtype=store.idtype, device=store.device)
    if ids.dtype not in INDEX_DTYPES:
        raise TypeError(f"{what} must be int32 or int64 (got {ids.dtype})")
    if ids.dim() != 1:
        raise ValueError(f"{what} must have one dimension (got shape {tuple(ids.shape)})")
    if leave_out:
        ids = ids[ids < bound]
    bad = (ids < 0) | (ids >= bound)
    if bool(bad.any()):
        raise ValueError(f"{what} must be in [0, {bound}) (got {int(ids[bad][0])})")
    return ids.to(device=store.device, dtype=store.idtype)


def only_if_plain(by_name: Mapping[Any, Any]) -> Any:
    """The only value where there is one type, else the dictionary."""
    return next(iter(by_name.values())) if len(by_name) == 1 else dict(by_name)


def refuse_unnamed(function: str, unnamed: tuple[Any, ...], *names: str) -> None:
    """Raise a TypeError that names the arguments which must not go by position, if some do.

    Args:
        function: Which was called.
        unnamed: What came by position too many.
        names: The next arguments, in the order of those whose scripts run here.
    """
    if unnamed:
        raise TypeError(
            f"{function} takes {', '.join(names)} and what follows by name alone, because SAR, DGL "
            f"and torch have them in different orders (got {', '.join(map(_short, unnamed))} by "
            f"position); write {names[0]}=..."
        )


def _short(value: Any) -> str:
    is_plain = value is None or isinstance(value, bool | int | float | str)
    return repr(value) if is_plain else type(value).__name__
