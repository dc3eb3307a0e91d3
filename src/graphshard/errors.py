# SPDX-License-Identifier: Apache-2.0
"""The exceptions a caller can act on.

::

    Exception
    ├── ValueError, TypeError, IndexError, NotImplementedError   wrong arguments (built in)
    └── GraphShardError
        ├── PartitionFormatError   a partition folder is missing, incomplete or damaged
        ├── MetisError             METIS refused the graph or could not satisfy the request
        ├── RankError              another rank failed, or did not answer in time
        └── CheckpointError        a checkpoint is damaged or of another run, or in use

Everything else that graphshard raises is a built-in exception whose message holds the rule,
the value that broke it, and the cure.
"""

from __future__ import annotations

from collections.abc import Sequence


class GraphShardError(Exception):
    """Base of the exceptions that graphshard defines."""


class PartitionFormatError(GraphShardError, ValueError):
    """A partition folder cannot be used: missing, incomplete, damaged, or of another format."""


class MetisError(GraphShardError, RuntimeError):
    """METIS failed on a graph, or could not meet the balance that was asked for."""


class CheckpointError(GraphShardError, ValueError):
    """A checkpoint is damaged or of another run, or another run is writing to its folder."""


class RankError(GraphShardError, RuntimeError):
    """Another rank failed, left, or did not answer within the timeout.

    Args:
        message: The whole text shown to the user.
        ranks: The ranks held responsible, ascending; empty when they are unknown.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(sorted(ranks))
