# SPDX-License-Identifier: Apache-2.0
"""Config: what SAR's scripts set for the whole process; read where nothing else is said."""

from __future__ import annotations

from typing import ClassVar


class Config:
    """Defaults of a process, which SAR's scripts set as attributes of this class.

    They are read whenever a layer runs, or tensors are sent, so they may be set after the graph is
    made; all ranks must set them alike. An argument that a graph was made with goes first:
    ``rematerialize`` and ``prefetch`` of `graphshard.construct_full_graph`.

    Attributes:
        disable_sr: With sequential aggregation, keep the rows that were fetched for the backward,
            instead of fetching them again: ``rematerialize=False``.
        max_collective_size: The most elements that one ``all_to_all`` of `graphshard.comm` sends
            or receives on any rank; more go in several. 0 is no bound. It does not concern the
            rows that layers exchange, one message for each pair of ranks.
        pipeline_depth: Remote shards fetched while another one is computed: ``prefetch``.

    Example:
        >>> Config.disable_sr, Config.max_collective_size, Config.pipeline_depth
        (False, 0, 1)
    """

    disable_sr: ClassVar[bool] = False
    max_collective_size: ClassVar[int] = 0
    pipeline_depth: ClassVar[int] = 1
