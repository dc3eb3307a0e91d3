# SPDX-License-Identifier: Apache-2.0
"""Several relations of a graph seen as one: what ``g["user", :, "item"]`` returns.

Node types and relations are joined end to end, in the order of the graph's types. The fields
``_TYPE`` and ``_ID`` of the result say where each node and edge came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ...errors import GraphValueError
from ...ops import Adjacency
from ..frame import Frame
from ..structure import EID, ETYPE, NID, NTYPE, Schema, joined_name

if TYPE_CHECKING:
    from ._local import LocalGraph

LocalT = TypeVar("LocalT", bound="LocalGraph")


def flattened(g: LocalGraph, relations: Sequence[int], kind: type[LocalT]) -> LocalT:
    """Join several relations into one.

    Args:
        g: The graph.
        relations: Indices of the relations, ascending.
        kind: Class of the result.

    Returns:
        A graph of one relation, with copies of the fields that all joined types have in common.
        Types are named by their parts, sorted and joined by ``+``.
    """
    schema = g._schema
    src_ids = sorted({schema.src_of[r] for r in relations})
    dst_ids = sorted({schema.dst_of[r] for r in relations})
    shared = not schema.split and src_ids == dst_ids
    src_start = _starts(g._src_frames, src_ids)
    dst_start = _starts(g._dst_frames, dst_ids)
    num_src = sum(g._src_frames[i].num_rows for i in src_ids)
    num_dst = sum(g._dst_frames[i].num_rows for i in dst_ids)
    sources, destinations = [], []
    for relation in relations:
        src, dst = g.relations[relation].coo()
        sources.append(src + src_start[schema.src_of[relation]])
        destinations.append(dst + dst_start[schema.dst_of[relation]])
    adj = Adjacency(torch.cat(sources), torch.cat(destinations), num_src, num_dst, check=False)
    src_name = joined_name(schema.srctypes[i] for i in src_ids)
    dst_name = joined_name(schema.dsttypes[i] for i in dst_ids)
    etype = (src_name, joined_name(schema.etypes[r] for r in relations), dst_name)

    src_frame = _joined(g._src_frames, src_ids, f"nodes of type {src_name!r}", NTYPE, NID, g)
    dst_frame = src_frame
    if not shared:
        dst_frame = _joined(g._dst_frames, dst_ids, f"nodes of type {dst_name!r}", NTYPE, NID, g)
    edge_frame = _joined(g._edge_frames, relations, f"edges of relation {etype}", ETYPE, EID, g)
    if shared:
        new_schema = Schema([src_name], [src_name], [src_name], [etype], split=False)
    else:
        new_schema = Schema.of_block([src_name], [dst_name], [etype])
    src_frames = [src_frame]
    new = object.__new__(kind)
    new._init_local(
        new_schema,
        [adj],
        src_frames,
        src_frames if shared else [dst_frame],
        [edge_frame],
        is_block=g.is_block,
    )
    return new


def _starts(frames: Sequence[Frame], ids: Sequence[int]) -> dict[int, int]:
    starts, total = {}, 0
    for i in ids:
        starts[i] = total
        total += frames[i].num_rows
    return starts


def _joined(
    frames: Sequence[Frame],
    ids: Sequence[int],
    what: str,
    type_field: str,
    id_field: str,
    g: LocalGraph,
) -> Frame:
    """Frames end to end: the fields that all of them have, and where each row came from."""
    chosen = [frames[i] for i in ids]
    joined = Frame(sum(frame.num_rows for frame in chosen), g.device, what, chosen[0].default_view)
    filled = [frame for frame in chosen if frame.num_rows > 0] or chosen[:1]
    for name in filled[0]:
        if not all(name in frame for frame in filled):
            continue
        values: list[Any] = [frame[name] for frame in filled]
        kinds = {(tuple(value.shape[1:]), value.dtype) for value in values}
        if len(kinds) > 1:
            raise GraphValueError(
                f"field {name!r} must have one row shape and dtype on {what} to be joined (got "
                f"{sorted(map(str, kinds))}); rename or delete it on some"
            )
        joined[name] = torch.cat(values)
    counts = torch.tensor([frame.num_rows for frame in chosen], device=g.device)
    kinds_of = torch.tensor(list(ids), dtype=g.idtype, device=g.device)
    joined[type_field] = kinds_of.repeat_interleave(counts)
    own: list[Tensor] = [
        torch.arange(frame.num_rows, dtype=g.idtype, device=g.device) for frame in chosen
    ]
    joined[id_field] = torch.cat(own)
    return joined
