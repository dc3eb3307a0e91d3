# SPDX-License-Identifier: Apache-2.0
"""Graphs between processes: what ``torch.multiprocessing`` sends of one.

A graph goes through queues and pipes, and as an argument of ``spawn``, in parts: its types and
numbers as they are, its tensors in shared memory, where torch puts every tensor that a process
sends. So sender and receiver share edges and features, and nothing is copied. This takes the
pickler of ``multiprocessing`` alone, which has a table of its own: pickling to a file goes on to
be refused.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

from ._block import Block
from ._graph import Graph
from .frame import LazyRows
from .message_passing import LocalGraph, frames_of


def _parts(graph: LocalGraph) -> tuple[Callable[..., LocalGraph], tuple[type[Any], dict[str, Any]]]:
    for frames in frames_of(graph):
        for frame in frames:
            for name in frame:
                if isinstance(frame.unread(name), LazyRows):
                    frame[name] = frame[name]  # the rows alone, not the column they come from
    return _joined, (type(graph), dict(graph.__dict__))


def _joined(kind: type[LocalGraph], state: dict[str, Any]) -> LocalGraph:
    graph = object.__new__(kind)
    graph.__dict__.update(state)
    return graph


ForkingPickler.register(Graph, _parts)
ForkingPickler.register(Block, _parts)
