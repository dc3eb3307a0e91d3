# SPDX-License-Identifier: Apache-2.0
"""Balance constraints: what every part shall hold an equal share of.

Each constraint gives every node a weight; a part weighs what its nodes weigh. Any number can be
asked for at once:

* the number of nodes of each class: a node type, or a label of ``balance_ntypes``;
* the in-edges of the nodes of each class (``balance_edges``), which is what a part stores;
* the members of each training, validation and test set (``balance_split``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from .._source import GraphSource

SPLIT_NAMES = ("train_mask", "val_mask", "valid_mask", "test_mask", "train", "val", "test")

BalanceNTypes: TypeAlias = Tensor | Sequence[int] | Mapping[str, Tensor | Sequence[int]]
Weights: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Constraint:
    """One thing to balance.

    Args:
        name: Shown in statistics and warnings.
        weights: int64 ``[num_nodes]``, in homogenised order; what each node counts for.
    """

    name: str
    weights: Weights

    def limit(self, num_parts: int, tolerance: float) -> float:
        """The most that a part may weigh.

        That is ``tolerance`` times the mean, but never less than what the granularity of nodes
        dictates: one average node above the mean, or the heaviest node.
        """
        total = int(self.weights.sum())
        if total == 0:
            return 0.0
        mean = total / num_parts
        average = total / int(np.count_nonzero(self.weights))
        return max(tolerance * mean, mean + average, float(self.weights.max()))


def build_constraints(
    source: GraphSource,
    balance_ntypes: BalanceNTypes | None,
    balance_edges: bool,
    balance_split: bool | Iterable[str] | None,
) -> list[Constraint]:
    """The constraints that the arguments of `partition_graph` ask for.

    Raises:
        TypeError: An argument has the wrong form.
        ValueError: It does not fit the graph, or names what the graph does not have.
    """
    classes = _classes(source, balance_ntypes)
    constraints = [
        Constraint("nodes" if name is None else f"nodes of {name}", members.astype(np.int64))
        for name, members in classes
    ]
    if balance_edges:
        degrees = source.in_degrees().numpy()
        constraints += [
            Constraint("in-edges" if name is None else f"in-edges of {name}", degrees * members)
            for name, members in classes
        ]
    constraints += [
        Constraint(name, members.astype(np.int64))
        for name, members in _split_members(source, balance_split)
    ]
    return constraints


def _classes(
    source: GraphSource, labels: BalanceNTypes | None
) -> list[tuple[str | None, npt.NDArray[np.bool_]]]:
    """(name, membership of each node) of every class; the name is None where there is just one."""
    if labels is None:
        table: dict[str, Any] = {}
    elif isinstance(labels, Mapping):
        table = dict(labels)
    elif len(source.ntypes) == 1:
        table = {source.ntypes[0]: labels}
    else:
        raise TypeError(
            f"balance_ntypes must be a dict from node type to labels, because the graph has the "
            f"node types {source.ntypes} (got {type(labels).__name__})"
        )
    unknown = [name for name in table if name not in source.ntypes]
    if unknown:
        raise ValueError(
            f"balance_ntypes names node types that the graph does not have (got {unknown}; the "
            f"graph has {source.ntypes})"
        )
    classes: list[tuple[str | None, npt.NDArray[np.bool_]]] = []
    for type_id, ntype in enumerate(source.ntypes):
        if ntype not in table:
            members = _members(source, type_id, True)
            classes.append((f"'{ntype}'" if len(source.ntypes) > 1 else None, members))
            continue
        values = _labels(table[ntype], ntype, source.node_counts[type_id])
        for label in np.unique(values).tolist():
            members = _members(source, type_id, values == label)
            owner = f"'{ntype}', " if len(source.ntypes) > 1 else ""
            classes.append((f"{owner}class {label}", members))
    return classes


def _members(
    source: GraphSource, type_id: int, mask: npt.NDArray[np.bool_] | bool
) -> npt.NDArray[np.bool_]:
    """Membership of every node, from that of the nodes of one type; no others are members."""
    members = np.zeros(source.num_nodes, dtype=bool)
    members[source.offsets[type_id] : source.offsets[type_id + 1]] = mask
    return members


def _labels(labels: Any, ntype: str, count: int) -> npt.NDArray[np.int64]:
    tensor = torch.as_tensor(labels).detach().cpu()
    if tensor.is_floating_point() or tensor.is_complex() or tensor.shape != (count,):
        raise ValueError(
            f"balance_ntypes must hold one whole number per node of type '{ntype}', shape "
            f"({count},) (got {tensor.dtype} of shape {tuple(tensor.shape)})"
        )
    array: npt.NDArray[np.int64] = tensor.to(torch.int64).numpy()
    return array


def _split_members(
    source: GraphSource, balance_split: bool | Iterable[str] | None
) -> list[tuple[str, npt.NDArray[np.bool_]]]:
    if balance_split is None or balance_split is False:
        return []
    if isinstance(balance_split, str):
        balance_split = [balance_split]
    names = list(SPLIT_NAMES if balance_split is True else balance_split)
    found = []
    missing = set(names)
    for type_id, ntype in enumerate(source.ntypes):
        features = source.node_features(type_id)
        for name in names:
            if name not in features:
                continue
            mask = _as_mask(features[name])
            if mask is None:
                if balance_split is True:
                    continue
                raise ValueError(
                    f"balance_split needs masks, one boolean per node (got '{name}' of type "
                    f"'{ntype}' with dtype {features[name].dtype} and shape "
                    f"{tuple(features[name].shape)})"
                )
            missing.discard(name)
            members = _members(source, type_id, mask)
            found.append((f"{name} of '{ntype}'" if len(source.ntypes) > 1 else name, members))
    if balance_split is not True and missing:
        raise ValueError(
            f"balance_split names node features that no node type has (got {sorted(missing)})"
        )
    if not any(bool(members.any()) for _, members in found):
        what = f"those there are have no node: {[name for name, _ in found]}" if found else "none"
        raise ValueError(
            "balance_split needs masks among the node features that have nodes, named "
            f"{SPLIT_NAMES} (got {what}); set them, pass the names of yours, or leave it out"
        )
    return found


def _as_mask(feature: Tensor) -> npt.NDArray[np.bool_] | None:
    """A mask as booleans; None for anything else. 0/1 integers count, as DGL stores masks."""
    if feature.dim() != 1 or feature.is_floating_point() or feature.is_complex():
        return None
    values = feature.detach().cpu()
    if values.dtype != torch.bool:
        if bool(((values != 0) & (values != 1)).any()):
            return None
        values = values != 0
    mask: npt.NDArray[np.bool_] = values.numpy()
    return mask
