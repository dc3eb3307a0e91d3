# SPDX-License-Identifier: Apache-2.0
"""A model of the user's own, ``--model my_package.my_module:Net``, and what it is told."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from .._base.typing import CanonicalEType
from ..errors import ModelError
from ..graph import MessagePassingGraph


@dataclass(frozen=True, kw_only=True)
class ModelSchema:
    """What a model is made for: node types, relations and widths; the same on every rank.

    A model of your own is a class that is called as ``Net(schema, hidden=..., layers=...,
    dropout=..., out=..., **model_args)``, and whose ``forward(graphs, features)`` gives ``[n,
    out]``: rows of the target type. There is one graph per layer: the whole graph, repeated, or
    sampled blocks, in which the destinations of one layer are the sources of the next. Features are
    a tensor where there is one node type and one relation, else node type to tensor; learnt rows of
    nodes without features are among them. Edge features are in ``graph.edata`` or
    ``graph.edges[etype].data``, under the names below.

    The class may have ``penalized_parameters()``, those with weight decay (all by default), and
    ``exchanged_width()``, the most columns of the rows that its layers read of neighbours. With the
    three methods of `LayeredNetwork` it is evaluated layer by layer where features stay in files;
    else an evaluation has the rows of all nodes in memory.

    Args:
        target: Node type whose rows are wanted; for a task on edges between two types, both, and
            then ``forward`` gives them by type.
        node_widths: Node type to the width of its rows of features.
        edge_widths: Relation to the width of what its edges have, by name: ``weight``, which is
            ``[num_edges]``, and ``feat``; relations without are absent.
        num_relations: Number of values of the edge feature ``etype``, 0 without.
    """

    node_types: tuple[str, ...]
    canonical_etypes: tuple[CanonicalEType, ...]
    target: str | tuple[str, ...]
    node_widths: Mapping[str, int]
    edge_widths: Mapping[CanonicalEType, Mapping[str, int]] = field(default_factory=dict)
    num_relations: int = 0

    @property
    def is_typed(self) -> bool:
        """Whether there are several node types or relations."""
        return len(self.node_types) > 1 or len(self.canonical_etypes) > 1


@runtime_checkable
class LayeredNetwork(Protocol):
    """A network that can be computed one layer after another, of some nodes at a time.

    ``forward(graphs, features)`` is then ``first_rows``, ``layer_rows`` with each graph, and
    ``last_rows``. What goes from one to the next is a tensor of rows of nodes, or node type to
    tensor; the networks that come with graphshard have these methods.
    """

    def first_rows(self, features: Any) -> Any:
        """What goes into the first layer, of each node by itself."""

    def layer_rows(self, index: int, graph: MessagePassingGraph, rows: Any) -> Any:
        """What layer ``index`` gives to the destinations of a graph, of its sources' rows."""

    def last_rows(self, rows: Any) -> Any:
        """What the network gives, of what the last layer gave, of each node by itself."""


def load_model_class(model: str) -> type[nn.Module]:
    """The class that ``module:Class`` names; modules of the current folder can be imported.

    Raises:
        ValueError: There is no such module or class, or it is no ``torch.nn.Module``.
    """
    name, _, attribute = model.partition(":")
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        module = importlib.import_module(name) if name else None
    except ModuleNotFoundError as error:
        parents = [name[: i or None] for i in (*_dots(name), 0)]
        if error.name not in parents:
            raise ValueError(
                f"model {model} cannot be imported: it needs the module {error.name}, which is "
                "not there; install it"
            ) from error
        raise ValueError(
            f"model must name a module and a class (got {model!r}): there is no module "
            f"{error.name} in {folder} or among the installed packages; run in its folder, or set "
            "PYTHONPATH"
        ) from None
    found = getattr(module, attribute, None)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        classes = [
            key
            for key, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, nn.Module) and value.__module__ == name
        ]
        what = "has no" if found is None else "has, and it is no torch.nn.Module,"
        nearest = difflib.get_close_matches(attribute, classes, 1, cutoff=0.0)
        cure = f"did you mean {name}:{nearest[0]}?" if nearest else "define it there"
        raise ValueError(
            f"model must name a class of networks (got {model!r}): {name} {what} {attribute!r}; "
            f"{cure}"
        )
    return found


def build_own_model(model: str, schema: ModelSchema, arguments: Mapping[str, Any]) -> nn.Module:
    """Make the class's object.

    Raises:
        ValueError: The class does not take these arguments.
    """
    kind = load_model_class(model)
    try:
        inspect.signature(kind).bind(schema, **arguments)
    except TypeError as error:
        given = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        raise ValueError(
            f"model {model} must take (schema, {given}), and does not ({error}); add the "
            "arguments that it lacks to its __init__, or **_"
        ) from None
    try:
        if kind.forward is nn.Module.forward:
            raise TypeError("there is none")
        inspect.signature(kind.forward).bind(None, (), {})
    except TypeError as error:
        raise ValueError(
            f"model {model} must have forward(self, graphs, features), and does not ({error}); "
            "graphs has one for each layer, features are rows of nodes"
        ) from None
    return kind(schema, **arguments)


def check_rows(
    model: str,
    given: Any,
    graphs: Sequence[MessagePassingGraph],
    target: str | tuple[str, ...],
    width: int,
) -> None:
    """Raise unless a model of the user's own has given what it is for.

    Args:
        target: As of `ModelSchema`.
        width: The ``out`` that it was made with.

    Raises:
        ModelError: The rows are no tensors, or of other nodes, or of another width.
    """
    ntypes = (target,) if isinstance(target, str) else target
    rule = f"forward of model {model} must give "
    if not isinstance(given, Mapping):
        given = {ntypes[0]: given}
    elif isinstance(target, str):
        raise ModelError(
            f"{rule}the rows of '{target}' alone, as a tensor (got a {type(given).__name__}); "
            f"return rows['{target}']"
        )
    if missing := [ntype for ntype in ntypes if ntype not in given]:
        raise ModelError(
            f"{rule}rows of {' and '.join(ntypes)}, by type (got none of {missing[0]}); return "
            "{ntype: rows[ntype] for ntype in schema.target}"
        )
    for ntype in ntypes:
        rows, shape = given[ntype], (graphs[-1].num_dst_nodes(ntype), width)
        if isinstance(rows, Tensor) and rows.is_floating_point() and tuple(rows.shape) == shape:
            continue
        what = f"a {type(rows).__name__}"
        if isinstance(rows, Tensor):
            what = f"{str(rows.dtype).removeprefix('torch.')} {list(rows.shape)}"
        raise ModelError(
            f"{rule}a tensor of {list(shape)} numbers for '{ntype}', its destinations in the last "
            f"graph and out columns (got {what}); return the last layer's rows"
        )


def _dots(name: str) -> list[int]:
    return [index for index, letter in enumerate(name) if letter == "."]
