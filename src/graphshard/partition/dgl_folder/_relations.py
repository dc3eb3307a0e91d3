# SPDX-License-Identifier: Apache-2.0
"""find_relations: what an old JSON does not say, the node types that a relation joins.

DGL before 1.0 named relations alone, "writes" and not "author:writes:paper". Any edge of a relation
tells its types, as DGL's own tool for such files has it
(``tools/change_etype_to_canonical_etype.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from ..._base.ranges import RangeMap
from ..._base.typing import CanonicalEType
from ._part_file import _column, _opened, _structure


def find_relations(
    names: Mapping[str, int],
    ntypes: Mapping[str, int],
    node_map: Mapping[str, Sequence[Sequence[int]]],
    graph_paths: Iterable[Path],
) -> dict[str, CanonicalEType]:
    """The relations that names stand for.

    Args:
        names: Name of each relation and its number.
        ntypes: Node type to its number.
        node_map: Per node type, the block of each part.
        graph_paths: The structure of each part, in order; read until all is known.

    Raises:
        PartitionFormatError: A file is missing or damaged.
        ValueError: A relation has no edge, or edges between several types.
    """
    if len(ntypes) == 1:
        (ntype,) = ntypes
        return {name: (ntype, name, ntype) for name in names}
    types = sorted(ntypes, key=lambda name: ntypes[name])
    sizes = [
        [stop - start for start, stop in of_part]
        for of_part in zip(*(node_map[ntype] for ntype in types), strict=True)
    ]
    blocks = RangeMap.from_sizes([size for row in sizes for size in row])
    found: dict[str, CanonicalEType] = {}
    for path in graph_paths:
        with _opened(path) as reader:
            graph = _structure(reader)
            src, dst = graph.relations[0].adjacency().coo()
            numbers = _column(graph.edata[0], "_TYPE", None)
            ids = _column(graph.ndata[0], "_ID", torch.int64)
            for name, number in names.items():
                chosen = (numbers == number).nonzero().view(-1)
                if not chosen.numel():
                    continue
                ends = []
                for side in (src, dst):
                    nodes = ids[side[chosen].long()]
                    blocks.check(nodes, "node id")
                    kinds = torch.unique(blocks.part_of(nodes) % len(types)).tolist()
                    if len(kinds) != 1:
                        raise ValueError(f"edges of {name!r:.80} join several types of nodes")
                    ends.append(types[kinds[0]])
                if found.setdefault(name, (ends[0], name, ends[1])) != (ends[0], name, ends[1]):
                    raise ValueError(f"edges of {name!r:.80} join other types in {path}")
        if len(found) == len(names):
            return found
    missing = min(set(names) - set(found))
    raise ValueError(
        f"no edge tells which node types the relation {missing!r:.80} joins; name it "
        "'source:relation:destination' in the JSON"
    )
