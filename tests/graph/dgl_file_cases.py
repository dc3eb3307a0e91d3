# SPDX-License-Identifier: Apache-2.0
"""Graphs and tensors of every kind that DGL's files can hold, and ways to damage such files."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


def tensors(count: int) -> dict[str, Tensor]:
    """One of every dtype, and some odd shapes."""
    found = {
        str(dtype).rsplit(".", 1)[1]: (torch.arange(3 * count).view(count, 3) % 5).to(dtype)
        for dtype in DTYPES
    }
    if not count:  # DGL 1.1.3 cannot read back an empty bfloat16
        del found["bfloat16"]
    found["no columns"] = torch.zeros(count, 0)
    found["strided"] = torch.randn(4, count).t()
    found["Wörter"] = torch.randn(count, 2, 3)
    return found


def pairs(src: int, dst: int, count: int) -> tuple[Tensor, Tensor]:
    return torch.randint(src, (count,)), torch.randint(dst, (count,))


EDGES: dict[str, Callable[[], tuple[dict[Any, Any], dict[str, int]]]] = {
    "plain": lambda: ({("_N", "_E", "_N"): pairs(20, 20, 70)}, {"_N": 25}),
    "empty": lambda: ({("_N", "_E", "_N"): pairs(1, 1, 0)}, {"_N": 0}),
    "edgeless": lambda: ({("_N", "_E", "_N"): pairs(1, 1, 0)}, {"_N": 4}),
    "bipartite": lambda: ({("user", "buys", "item"): pairs(6, 4, 20)}, {"user": 7, "item": 4}),
    "typed": lambda: (
        {
            ("paper", "cites", "paper"): pairs(12, 12, 40),
            ("author", "writes", "paper"): pairs(8, 12, 30),
            ("paper", "of", "author"): pairs(12, 8, 30),
            ("author", "cites", "paper"): pairs(8, 12, 5),
            ("venue", "awards", "author"): pairs(1, 1, 0),
        },
        {"paper": 13, "author": 8, "venue": 2},
    ),
}
"""Relations with their edges, and the number of nodes of each type."""


def same(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> bool:
    """Bit for bit, but for what DGL's files turn into bytes."""
    if set(one) != set(two):
        return False
    for name, expected in one.items():
        found = two[name]
        if expected.dtype == torch.bool:
            expected = expected.to(torch.uint8)
        if expected.dtype != found.dtype or expected.shape != found.shape:
            return False
        if not torch.equal(_bytes(expected), _bytes(found)):
            return False
    return True


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def content(graph: Any) -> dict[str, Tensor]:
    """All that a graph holds, DGL's or ours, by name."""
    found = {"idtype": torch.zeros(0, dtype=graph.idtype)}
    for ntype in graph.ntypes:
        found[f"{ntype} nodes"] = torch.tensor(graph.num_nodes(ntype))
        data = graph.nodes[ntype].data
        found |= {f"{ntype} {name}": data[name] for name in data.keys()}  # noqa: SIM118
    for etype in graph.canonical_etypes:
        src, dst = graph.edges(etype=etype, order="eid")
        found |= {f"{etype} src": src, f"{etype} dst": dst}
        data = graph.edges[etype].data
        found |= {f"{etype} {name}": data[name] for name in data.keys()}  # noqa: SIM118
    return found


_NUMBERS = (0, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


def damaged(original: bytes, number: int) -> bytes:
    """One thing changed: a bit, some bytes, a number, the length; by the number of the mutation."""
    rng = random.Random(number)
    changed = bytearray(original)
    # Past the 4096 bytes of a head that says nothing, where there is one.
    low = 4096 if len(changed) > 5000 and rng.random() < 0.9 else 0
    at = rng.randrange(low, len(changed))
    kind = rng.randrange(6)
    if kind == 0:
        changed[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        changed[at] = rng.randrange(256)
    elif kind == 2:
        value = rng.choice([*_NUMBERS, len(original), len(original) - at, rng.randrange(100)])
        changed[at : at + 8] = struct.pack("<Q", value)
    elif kind == 3:
        del changed[at:]
    elif kind == 4:
        del changed[at : at + rng.choice((1, 4, 8, 16))]
    else:
        other = rng.randrange(len(changed))
        changed[at:at] = changed[other : other + rng.choice((1, 4, 8, 64))]
    return bytes(changed)
